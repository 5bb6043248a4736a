"""Planes of two-bit codes: widths within their budget, rows that add up to the weight, a row as a channel of the search."""

from dataclasses import replace

import pytest
import torch
from plane_codes import (
    PlaneMatrix,
    choose_widths,
    fit_planes,
    output_fisher,
    quantise_in_planes,
    read_by_rows,
)
from test_converter_weights import inputs
from tiny_source import tiny_source, tiny_tokens
from transformers import Qwen3MoeConfig

from wisparse.converter.gptq import fit_int4
from wisparse.converter.search.search import SearchSettings, SparsityLevels
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def squared(weight: torch.Tensor, matrix: PlaneMatrix, moments: torch.Tensor) -> float:
    error = matrix.dequantise(torch.float32) - weight
    return float(((error @ moments) * error).sum())


def test_rows_are_planes_of_the_channels() -> None:
    weight, x = torch.randn(48, 128, generator=torch.Generator().manual_seed(1)), inputs(2000, 128)
    moments, widths = x.T @ x, torch.tensor([2, 4, 6, 8]).repeat_interleave(32)
    matrix = fit_planes(weight, moments, None, widths, torch.ones(48, dtype=torch.float64))
    assert torch.equal(torch.bincount(matrix.channels), widths // 2)
    assert torch.equal(matrix.channels[:128], torch.arange(128))  # plane 1 is the plain order
    assert int(matrix.codes.max()) == 3
    for scales in (matrix.row_scales, matrix.output_scales):
        assert torch.equal(scales, scales.half().float())
    assert matrix.bits == 2 * 48 * 320 + 16 * (320 + 48)
    by_hand = torch.zeros(48, 128)
    for code, channel, scale in zip(matrix.codes, matrix.channels, matrix.row_scales, strict=True):
        by_hand[:, channel] += (code - 1.5) * scale * matrix.output_scales
    torch.testing.assert_close(matrix.dequantise(torch.float32), by_hand)
    error = (by_hand - weight).square().mean(0).sqrt().view(4, 32).mean(1)
    assert (error[1:] < 0.6 * error[:-1]).all()


def test_widths_for_the_channels_energy_lose_less_than_int4() -> None:
    weight, x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)), inputs(2000, 128)
    moments = x.T @ x
    loss = moments.diagonal().log2().sub(moments.diagonal().log2().mean())
    widths = (3.8 + loss / 2).div(2).round().mul(2).clamp(2, 8).long()
    assert 3.8 < widths.double().mean() <= 4.1
    matrix = fit_planes(weight, moments, None, widths, torch.ones(256, dtype=torch.float64))
    int4 = fit_int4(weight, moments, 64, torch.float16)
    assert squared(weight, matrix, moments) < 0.7 * squared(weight, int4, moments)  # type: ignore[arg-type]


@pytest.mark.parametrize("moments", [torch.zeros(64, 64), torch.ones(64, 64)])
def test_inputs_that_say_nothing_do_no_harm(moments: torch.Tensor) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    widths = torch.full((64,), 4)
    found = fit_planes(weight, moments, None, widths, torch.zeros(8, dtype=torch.float64)).dequantise(torch.float32)
    assert found.isfinite().all()
    assert (found - weight).abs().max() < 1.5 * weight.abs().max()


@pytest.mark.parametrize(("kind", "sizes"), [("llama", SIZES), ("qwen2", SIZES), ("llama", {"num_hidden_layers": 2})])
def test_a_model_is_read_by_rows(kind: str, sizes: dict[str, int]) -> None:
    """In several micro-batches too, where the thresholds of projections with one input are chosen together."""
    source, tokens = tiny_source(kind, **sizes), tiny_tokens()
    fisher = output_fisher(source, tokens)
    assert {name: len(one) for name, one in fisher.items()} == {
        name: module.out_features for name, module in source.projections.items()
    }
    widths = choose_widths(source, tokens, 5.0, fisher)
    matrices = quantise_in_planes(source, tokens, 5.0)
    weights = sum(module.weight.numel() for module in source.projections.values())
    stored = sum(matrix.bits for matrix in matrices.values()) / weights
    assert 4.9 < stored <= 5.0
    assert all(torch.equal(torch.bincount(matrices[name].channels) * 2, widths[name]) for name in widths)
    whole = source.model(tokens.input_ids).logits
    read = read_by_rows(source, matrices)
    torch.testing.assert_close(read.model(tokens.input_ids).logits, whole, rtol=1e-4, atol=1e-4)
    for search, batch_size in (("fisher", 1), ("refine", 4)):
        settings = SearchSettings(search=search, refine_steps=2, batch_size=batch_size)
        with SparsityLevels(read, tokens, settings) as levels:
            result = levels.at(0.5)
        sizes = {name: module.weight.numel() for name, module in read.projections.items()}
        realised = sum(result.projections[name].realised_sparsity * size for name, size in sizes.items())
        assert realised / sum(sizes.values()) == pytest.approx(0.5, abs=0.01)


def test_what_cannot_be_stored() -> None:
    source, tokens = tiny_source(**SIZES), tiny_tokens()
    with pytest.raises(UnsupportedModelError, match="2 bits: two bits a channel and the scales need more"):
        choose_widths(source, tokens, 2.0, output_fisher(source, tokens))
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 64}
    config = ModelConfig.from_dict(Qwen3MoeConfig(**sizes).to_dict())
    with pytest.raises(UnsupportedModelError, match="without routed experts"):
        quantise_in_planes(replace(source, config=config), tokens, 5.0)
