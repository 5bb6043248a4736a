"""Checks of a loaded source: logits that are not finite, zero points that are off by one, a text that the model cannot predict."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import PUBLISHED, awq, change_config, change_tensors, gptq, quantise_model
from tiny_bundle import tiny_config, write_tiny_model

from wisparse.cli import convert_main
from wisparse.converter.checks import require_centred_weights, require_finite_logits, warn_of_absurd_perplexity
from wisparse.converter.gptq import fit_int4
from wisparse.converter.source import load_source
from wisparse.formats.errors import UnsupportedModelError

DOWN, O_PROJ = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("name", "factor", "where"),
    [(DOWN, 2e38, "block 1"), (O_PROJ, 2e38, "block 0"), ("lm_head.weight", 2e38, "the output layer")],
)
def test_logits_that_are_not_finite_are_refused(
    name: str, factor: float, where: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """Every weight is finite; exit code 3, before any calibration."""
    model = write_tiny_model(tmp_path / "model", tiny_config(tie_word_embeddings=False))
    require_finite_logits(load_source(model, device="cpu"), "tiny")
    change_tensors(model, lambda tensors: tensors[name].div_(tensors[name].abs().max()).mul_(factor))
    code, _, err = run(str(model), "-o", str(tmp_path / "out"), "--device", "cpu", main=convert_main)
    assert code == 3
    assert f"the dense model's logits are NaN or infinite, from {where} on" in err
    assert not (tmp_path / "out").exists()


def _shifted(pack: Callable[[torch.Tensor], dict[str, torch.Tensor]], part: str) -> Any:
    """As ``pack``, with zero points (in words of eight, none at an end) one higher."""
    return lambda weight: {name: t + 0x11111111 if name == part else t for name, t in pack(weight).items()}


OFF_BY_ONE = {
    "gptq in the other version's form": (partial(gptq, symmetric=False, offset=0), PUBLISHED["gptq, zero points"]()[1]),
    "gptq_v2 in the first version's form": (
        partial(gptq, symmetric=False, offset=1), PUBLISHED["gptq, zero points"]()[1] | {"checkpoint_format": "gptq_v2"},
    ),
    "awq": (_shifted(awq, "qzeros"), PUBLISHED["awq"]()[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", OFF_BY_ONE)
def test_zero_points_that_are_off_by_one_are_refused(name: str, tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", tiny_config(hidden_size=64, intermediate_size=128, head_dim=16))
    pack, settings = OFF_BY_ONE[name]
    wrong = load_source(quantise_model(plain, tmp_path / "wrong", pack, settings), device="cpu")
    with pytest.raises(
        UnsupportedModelError, match=r"means are 0\.\d+ of their standard dev.*zero points are off by one"
    ):
        require_centred_weights(wrong, "tiny")
    if name.startswith("gptq"):  # the advice
        form = "gptq" if "checkpoint_format" in settings else "gptq_v2"
        change_config(tmp_path / "wrong", lambda d: d["quantization_config"].update(checkpoint_format=form))
        require_centred_weights(load_source(tmp_path / "wrong", device="cpu"), "tiny")


@pytest.mark.parametrize("name", ["gptq", "awq", "pack int8 rows", "fp8 blocks, as DeepSeek's"])
def test_right_weights_are_centred(name: str, tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain")
    source = load_source(quantise_model(plain, tmp_path / "model", *PUBLISHED[name]()), device="cpu")
    require_centred_weights(source, "tiny")


def test_a_perplexity_near_guessing(example_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = load_source(example_model, device="cpu")
    text = torch.tensor(source.tokenizer.encode("def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n"))
    with caplog.at_level(logging.WARNING, "wisparse"):
        warn_of_absurd_perplexity(source, text, "example")
        assert not caplog.messages
        warn_of_absurd_perplexity(source, text.roll(1) * 7 % source.config.vocab_size, "shuffled")
        warn_of_absurd_perplexity(load_source(write_tiny_model(tmp_path), device="cpu"), text % 256, "untrained")
    assert [message.partition(":")[0] for message in caplog.messages] == ["shuffled", "untrained"]
    assert "hardly better than guessing" in caplog.messages[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.timeout(20)
def test_moments_that_are_not_finite_end_the_fit(value: float) -> None:
    moments = torch.eye(32)
    moments[3, 5] = value
    with pytest.raises(UnsupportedModelError, match="NaN or infinite"):
        fit_int4(torch.ones(4, 32), moments, 32, torch.float32)
