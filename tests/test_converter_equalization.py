"""Equalized inputs: the same model to the last bit, whose weights lose less by rounding to a scale a row."""

from pathlib import Path

import pytest
import torch
from family_cases import make_source
from runtime_models import SMALL, VARIANTS
from test_converter_rotation import opened
from tiny_bundle import VOCAB

from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.config import full_config
from wisparse.converter.equalization import equal_inputs, equalize, fit_factors
from wisparse.converter.rotation import load_weights, rotate
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import quantise

# Tied, biased and fused projections, norms of 1 + weight, no norm before attention, a clamped activation of experts, an MLP
# without a gate, latent attention, a DeltaNet, Mamba-2, a short convolution, shared experts, experts beside an MLP.
QUICK = ("llama", "llama-tied", "llama-bias", "phi3", "gemma", "gemma3", "gemma4-small", "glm4", "olmo2", "arcee")
QUICK += ("lfm2", "granite-hybrid", "nemotron-h", "glm4-moe-lite", "qwen3.5", "qwen3-next", "qwen2-moe", "gemma4-moe")
QUICK += ("gpt-oss",)
FIXED = ("glm4-moe-lite", "qwen3.5", "qwen3-next")  # cannot be rotated
CASES = [pytest.param(name, False, id=name) for name in QUICK]
CASES += [pytest.param(name, True, id=f"{name}-rotated") for name in QUICK if name not in FIXED]
OTHERS = [name for name in (*VARIANTS, *SMALL) if name not in QUICK]
CASES += [pytest.param(name, False, id=name, marks=pytest.mark.exhaustive) for name in OTHERS]


@pytest.mark.parametrize(("family", "turned"), CASES)
@torch.no_grad()
def test_the_dense_model_is_the_same_to_the_last_bit(
    family: str, turned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, checkpoint = opened(make_source(family, tmp_path / "source"))
    generator = torch.Generator().manual_seed(1)
    tokens = CalibrationTokens.from_rows(torch.randint(3, VOCAB, (2, 24), generator=generator).tolist(), "numbers", 1)
    if turned:
        source, checkpoint, _ = rotate(source, checkpoint, tokens, lambda: tokens)
    expected = source.model(tokens.input_ids, use_cache=False).logits

    def random_factors(_: object, moments: torch.Tensor) -> torch.Tensor:
        return torch.randint(-4, 5, moments.shape, generator=generator).float().exp2()

    monkeypatch.setattr("wisparse.converter.equalization.fit_factors", random_factors)
    made, number = equalize(source, checkpoint, tokens)
    assert torch.equal(source.model(tokens.input_ids, use_cache=False).logits, expected)
    config = checkpoint.config
    # Random 1 + w are not exact after a division; a rotation of the hidden state leaves w = 0.
    offset = config.architecture.norm_offset and not (turned and not config.fixed_hidden)
    changed = {name for name in made.tensors if not torch.equal(made.tensor(name), checkpoint.tensor(name))}
    equalized = [one for one in equal_inputs(config) if not (offset and one.offset)]
    assert number == len(equalized)
    assert changed == {name for one in equalized for name in (*one.readers, *one.makers)}
    load_weights(source.model, made)
    assert torch.equal(source.model(tokens.input_ids, use_cache=False).logits, expected)


NAMES = {
    "llama": {"q_proj", "gate_proj", "down_proj", "lm_head.weight"},
    "llama-tied": {"q_proj", "gate_proj", "down_proj"},
    "phi3": {"qkv_proj", "gate_up_proj", "down_proj", "lm_head.weight"},
    "olmo2": {"down_proj", "lm_head.weight"},  # no norms before projections
    "arcee": {"q_proj", "up_proj", "lm_head.weight"},  # relu(up)²
    "qwen3.5": {"q_proj", "gate_proj", "down_proj"},  # of attention; output layer and norm with an MTP head
    "gpt-oss": {"q_proj", "lm_head.weight"},  # experts
    "lfm2": {"in_proj", "q_proj", "w1", "w2"},
}


@pytest.mark.parametrize("family", NAMES)
def test_which_inputs_have_factors(family: str, tmp_path: Path) -> None:
    config: ModelConfig = Checkpoint.open(make_source(family, tmp_path / "source"), complete=full_config).config
    found = list(equal_inputs(config))
    assert {one.name if "lm_head" in one.name else one.name.rpartition(".")[2] for one in found} == NAMES[family]
    tensors = [name for one in found for name in one.readers]
    assert len(set(tensors)) == len(tensors), "two factors for one column"


def _rounding_error(weights: list[torch.Tensor], x: torch.Tensor, factors: torch.Tensor) -> float:
    """The sum over weights of the squared error of W x in int8, relative to W x."""
    total = 0.0
    for weight in weights:
        rounded = quantise("int8", weight * factors).dequantise(torch.float32)
        exact = x.double() @ weight.double().T
        wrong = (x / factors).double() @ rounded.double().T - exact
        total += float(wrong.square().sum() / exact.square().sum())
    return total


@pytest.mark.parametrize("seed", range(25))
def test_factors_of_random_shapes(seed: int) -> None:
    """Powers of two; the rounding error is not larger, whatever the energies of channels and the norms of columns."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    channels, spread = number(1, 200), 0.5 * number(0, 5)
    x = torch.randn(64, channels, generator=generator) * (spread * torch.randn(channels, generator=generator)).exp()
    columns = (0.5 * number(0, 4) * torch.randn(channels, generator=generator)).exp()
    weights = [torch.randn(number(1, 300), channels, generator=generator) * columns for _ in range(number(1, 4))]
    if number(0, 4) == 0:
        x[:, 0] = 0.0
        weights[0][:, -1] = 0.0
    factors = fit_factors(weights, x.square().sum(0))
    assert torch.equal(factors, factors.log2().round().exp2())
    assert _rounding_error(weights, x, factors) <= 1.1 * _rounding_error(weights, x, torch.ones(channels)) + 1e-12


def test_unequal_channels_lose_less() -> None:
    """Channels of energies over four decades under weights of like size: half of the error or less. The factors the other way
    round, as if large activations wanted small weights, would lose more."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 128, generator=generator) * torch.logspace(-2, 2, 128)
    weights = [torch.randn(96, 128, generator=generator) / torch.logspace(-1, 1, 128) for _ in range(2)]
    factors = fit_factors(weights, x.square().sum(0))
    without = _rounding_error(weights, x, torch.ones(128))
    assert _rounding_error(weights, x, factors) < 0.5 * without
    assert _rounding_error(weights, x, 1 / factors) > 2 * without
