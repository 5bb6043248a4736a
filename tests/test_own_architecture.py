"""docs/bring-your-own-architecture.md is true: the row it shows makes an unknown model work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import runtime_models
import torch
from bundle_maker import make_bundle
from transformers import AutoModelForCausalLM

from wisparse.converter.source import full_config
from wisparse.formats import architectures
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError
from wisparse.runtime.torch.decoder import TorchDecoder

PAGE = Path(__file__).resolve().parent.parent / "docs" / "bring-your-own-architecture.md"


def test_the_row_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, variant = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    rows = eval(f"{{{row}}}", vars(architectures))
    ((name, settings),) = eval(f"{{{variant}}}").items()
    monkeypatch.setitem(runtime_models.VARIANTS, name, settings)
    source = runtime_models.make_checkpoint(name, tmp_path / "source")
    message = re.search(r"^wisparse: (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    with pytest.raises(UnsupportedModelError) as refused:
        Checkpoint.open(source, complete=full_config)
    assert message is not None
    assert str(refused.value) == message[1]

    ((model_type, facts),) = rows.items()
    monkeypatch.setitem(architectures.ARCHITECTURES, model_type, facts)
    folder = make_bundle(source, tmp_path / "bundle")
    bundle = Bundle.open(folder)
    assert bundle.config.attention_softcap == 2.0
    tokens = torch.arange(3, 40)
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=64)
    # The attention that caps scores in every version of transformers.
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    assert (decoder.logits(tokens, len(tokens)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("fused", [{"qkv": ("query_key_value",)}, {"gate_up": ("up_gate_proj",)}])
def test_a_row_with_names_that_nothing_knows_is_refused_where_it_is_written(fused: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match=r"expected (qkv|gate_up) to be one of"):
        architectures.Architecture("OddForCausalLM", **fused)
