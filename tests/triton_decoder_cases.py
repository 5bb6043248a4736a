"""The launches of a whole decode step against the plain PyTorch decoder. Run by test_runtime_cuda.py in a process of
its own; under the interpreter without a graph, on a GPU through ``CudaDecoder``.

    TRITON_INTERPRET=1 python -m pytest tests/triton_decoder_cases.py
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from runtime_models import FAMILIES, HYBRIDS

from wisparse.converter.source import full_config
from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.model_config import ModelConfig, expected_tensors
from wisparse.runtime.cuda.step import DecodeStep, PositionTables
from wisparse.runtime.cuda.weights import load_weights
from wisparse.runtime.decoding.cache import KVCache
from wisparse.runtime.decoding.rotary import Rotary
from wisparse.runtime.torch.decoder import TorchDecoder

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
_COMMON = dict(
    hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=70, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip
CONFIGS = {
    "llama": dict(_COMMON, model_type="llama", tie_word_embeddings=True),
    "mistral": dict(_COMMON, model_type="mistral", sliding_window=6),
    "qwen2": dict(_COMMON, model_type="qwen2"),
    "qwen3": dict(_COMMON, model_type="qwen3"),
    "phi3": dict(_COMMON, model_type="phi3", partial_rotary_factor=0.5),
}
MORE_CONFIGS = {
    name: {**_COMMON, "num_hidden_layers": 3, "model_type": model_type, **settings}
    for name, (model_type, settings) in {**FAMILIES, **HYBRIDS}.items()
}


def make_bundle(name: str, sparsity: float, **changes: int):
    """A tiny random model whose masks drop about ``sparsity``, a different share in each projection."""
    config = ModelConfig.from_dict(full_config({**CONFIGS, **MORE_CONFIGS}[name] | changes))
    generator = torch.Generator().manual_seed(len(name))
    tensors: dict[str, torch.Tensor] = {}

    for key, shape in expected_tensors(config).items():
        values = torch.randn(shape, generator=generator)
        middle = 0 if config.architecture.norm_offset and "norm" in key else 1
        tensors[key] = values / shape[-1] ** 0.5 if len(shape) > 1 else middle + 0.1 * values
    masks = {}
    for index in range(config.num_blocks):
        for i, projection in enumerate(config.projections(index)):
            typical = {"o_proj": 0.5, "out_proj": 0.5, "down_proj": 0.3}.get(projection.role, 1.0)
            masks[projection.name] = ProjectionMask(
                channel_scale=torch.rand(projection.in_features, generator=generator) + 0.5,
                threshold=typical * (sparsity + 0.02 * i) if sparsity else 0.0,
                sparsity=sparsity,
            )
    checkpoint = SimpleNamespace(tensor=lambda key, device="cpu": tensors[key].to(device))
    return SimpleNamespace(config=config, checkpoint=checkpoint, masks=masks)


def tables_of(config: ModelConfig, length: int) -> PositionTables:
    rotaries = [Rotary(rope, DEVICE, torch.float32) for rope in config.rotaries]
    return PositionTables(config, rotaries, length, DEVICE, torch.float32)


def assert_as_exact(found: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, times: float = 4.0) -> None:
    """Logits (..., V) are as near to float64's as the plain decoder's own in the same dtype are: within ``times`` the
    largest of its rows' errors, and at least some roundings of the largest logit."""
    exact = exact.double()
    error, least = ((one.double() - exact).norm(dim=-1).max() for one in (found, own))
    floor = 4 * torch.finfo(torch.float32).eps * exact.norm(dim=-1).max()
    assert error <= times * max(float(least), float(floor)), (float(error), float(least), float(floor))


# Every family's step, alone and in rows, dense and sparse: few cases in which every two of these meet.
@pytest.mark.parametrize(
    ("name", "sparsity", "rows"),
    [
        ("llama", 0.5, 1), ("llama", 0.0, 2), ("llama", 0.5, 4), ("mistral", 0.0, 1), ("mistral", 0.5, 2),
        ("qwen2", 0.5, 1), ("qwen2", 0.0, 2), ("qwen3", 0.0, 1), ("qwen3", 0.5, 2), ("phi3", 0.5, 1), ("phi3", 0.0, 2),
    ],
)  # fmt: skip
def test_a_step_is_the_plain_decoders(name, sparsity, rows):
    bundle = make_bundle(name, sparsity)
    config = bundle.config
    exact, own = (
        TorchDecoder(bundle, device=DEVICE, dtype=dtype, max_seq_len=32, max_batch=rows)
        for dtype in (torch.float64, torch.float32)
    )
    weights = load_weights(bundle, DEVICE, torch.float32)
    cache, tables = KVCache(config, rows, 32, DEVICE, torch.float32), tables_of(config, 32)
    for slot in range(rows):
        for decoder in (exact, own):
            decoder.prefill(slot, torch.arange(9) + slot, 9)
        for index, pair in cache.attention.items():
            for side, filled in zip(pair, own._cache.attention[index], strict=True):
                side[slot, :, :9] = filled[slot, :, :9]
    positions = torch.full((rows,), 9, dtype=torch.int32, device=DEVICE)
    step = DecodeStep(weights, config, cache, positions, tables, first=0, rows=rows, kv_splits=4)
    step.tokens.copy_(torch.tensor([3, 60, 4, 5][:rows]))
    for _ in range(2):
        given = step.tokens.clone()
        step.launch()
        expected = exact.decode(given)
        assert_as_exact(step.logits, own.decode(given), expected)
        assert step.tokens.tolist() == expected.argmax(-1).tolist()
    assert positions.tolist() == [11] * rows


def test_an_idle_row_moves_nothing():
    bundle = make_bundle("llama", 0.5)
    weights = load_weights(bundle, DEVICE, torch.float32)
    cache = KVCache(bundle.config, 2, 16, DEVICE, torch.float32)
    keys = [keys.fill_(5.0) for keys, _ in cache.attention.values()]
    positions = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)  # the second slot is full
    step = DecodeStep(
        weights, bundle.config, cache, positions, tables_of(bundle.config, 16), first=0, rows=2, kv_splits=2
    )
    step.tokens.copy_(torch.tensor([4, -1]))
    step.launch()
    assert positions.tolist() == [1, 16]
    assert step.tokens[1] == -1
    assert all((one[1] == 5.0).all() for one in keys)
    assert not any((one[0, :, 0] == 5.0).all() for one in keys)
