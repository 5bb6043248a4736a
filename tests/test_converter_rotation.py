"""A rotated copy says what its source says, in other numbers; what cannot be turned is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from runtime_models import VARIANTS, make_checkpoint
from test_every_family import hugging_face, make_source
from tiny_bundle import VOCAB

from wisparse.cli import cli
from wisparse.converter.model.masking import MaskedModel
from wisparse.converter.model.rotation import find_rotation
from wisparse.converter.model.source import load_source
from wisparse.converter.rotate import rotate
from wisparse.converter.text.tokens import CalibrationTokens
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.model.architectures import ARCHITECTURES
from wisparse.formats.weights.checkpoint import Checkpoint


def _is_fixed(kind: str) -> bool:
    arch = ARCHITECTURES[kind]
    norms = arch.norms
    return bool(norms.attention_output or not norms.attention_input or arch.attention_gate or arch.recurrent)


FIXED = [name for name, (kind, _) in VARIANTS.items() if _is_fixed(kind)]
# Tied, with biases, fused, with fewer key-value heads, with norms of 1 + weight, with multipliers; all others are slow.
QUICK = ("llama-tied", "llama-bias", "llama-head-dim", "phi3", "gemma", "granite", "qwen3", "ernie")
TURNED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in VARIANTS if name not in FIXED]


@pytest.mark.parametrize("variant", TURNED)
def test_a_copy_says_the_same(variant: str, tmp_path: Path) -> None:
    source = make_source(variant, tmp_path / "source")
    made = rotate(source, tmp_path / "copy", num_samples=2, seq_len=24, device="cpu")
    tokens = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = (hugging_face(one)(tokens, use_cache=False).logits for one in (source, made.folder))
    assert expected.abs().max() > 1, "logits this small would hide any difference"
    assert (found - expected).abs().max() < 1e-3
    assert abs(made.kl) < 1e-6
    before, after = Checkpoint.open(source), Checkpoint.open(made.folder)
    o_proj = "model.layers.1.self_attn.o_proj.weight"
    assert not torch.allclose(before.tensor(o_proj), after.tensor(o_proj), atol=0.1)
    assert not after.config.tie_word_embeddings


def test_directions_are_principal(tmp_path: Path) -> None:
    """Turned, what a block's o_proj reads has no correlations within a group of heads, nor has the hidden state."""
    folder = make_source("qwen2", tmp_path / "source")
    source, checkpoint = load_source(folder, device="cpu"), Checkpoint.open(folder)
    rows = torch.randint(3, VOCAB, (4, 48), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = CalibrationTokens.from_rows(rows, "numbers", 1)
    rotation = find_rotation(source, checkpoint, tokens.input_ids, tokens.keep)
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, x: torch.Tensor) -> None:
        seen.setdefault(name, []).append(x[:, 1:].flatten(0, 1))  # the first token of a sequence does not count

    with MaskedModel(source.projections) as masked, masked.observing(note), torch.no_grad():
        source.model(input_ids=tokens.input_ids, use_cache=False)
    x = torch.cat(seen["model.layers.1.self_attn.o_proj"]).view(-1, 2, 2, 16).double()
    for group, turn in enumerate(rotation.heads[1].double()):
        turned = (x[:, group].flatten(0, 1) @ turn).T
        moments = turned @ turned.T
        assert (moments - moments.diag().diag()).abs().max() < 1e-4 * moments.diag().max()
    total = torch.zeros(64, 64, dtype=torch.float64)
    for index in range(3):
        for name, norm in (("self_attn.q_proj", "input_layernorm"), ("mlp.gate_proj", "post_attention_layernorm")):
            prefix = f"model.layers.{index}."
            x = torch.cat(seen[prefix + name]) / checkpoint.tensor(f"{prefix}{norm}.weight").float()
            total += x.double().T @ x.double()
    moments = rotation.residual.double().T @ total @ rotation.residual.double()
    assert (moments - moments.diag().diag()).abs().max() < 1e-4 * moments.diag().max()


@pytest.mark.parametrize("variant", ["gemma2", "olmo2", *[name for name in FIXED if name.startswith("qwen3.5")][:1]])
def test_what_ties_a_model_to_its_coordinates_is_refused(variant: str, tmp_path: Path) -> None:
    source = make_checkpoint(variant, tmp_path / "source")
    with pytest.raises(UnsupportedModelError, match=r"expected (norms before attention and MLP only|plain attention)"):
        rotate(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_the_command(tmp_path: Path) -> None:
    source = make_source("llama", tmp_path / "source")
    arguments = ["rotate", str(source), "-o", str(tmp_path / "copy"), "--num-samples", "1", "--seq-len", "16"]
    done = CliRunner().invoke(cli, [*arguments, "--device", "cpu", "--json", "-q"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["folder"] == str(tmp_path / "copy")
    assert document["num_tokens"] == 16
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        rotate(source, tmp_path / "copy")
    with pytest.raises(UsageError, match="--seq-len 1000"):
        rotate(source, tmp_path / "other", seq_len=1000)


def test_the_same_bytes_again(tmp_path: Path) -> None:
    source = make_source("llama", tmp_path / "source")
    for name in ("one", "two"):
        rotate(source, tmp_path / name, num_samples=1, seq_len=16, device="cpu")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
