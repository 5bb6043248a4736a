"""The memory, disk and time that a conversion takes, estimated before it begins."""

from __future__ import annotations

import math
import timeit

import torch

from wisparse.formats.bundle import scale_shapes
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors

from .sensitivity import LARGEST_LOGITS
from .settings import ConvertSettings

# Memory of a Python process with torch and transformers, without a model.
BASE_BYTES = 600 << 20
# A search takes as long as this many forward passes over the calibration text at the speed of a matrix product. On a GPU
# refine: on the 8B shape on an H200 (132 s, benchmarks/results/scale-h200.json); fisher is not measured there. On a CPU on
# SmolLM2-135M (25 and 13) and on the 6.5M example (70 with refine at two sparsities). The other searches were not measured.
_PASSES = {"cuda": {"refine": 190, "fisher": 46}, "cpu": {"refine": 40, "fisher": 20}}
# The overhead of a block per decode step in transformers, which generates the calibration text.
_BLOCK_SECONDS = {"cuda": 0.0014, "cpu": 0.005}
_WRITTEN_BYTES_PER_S = 450e6  # to write and verify a bundle (benchmarks/results/scale-h200.json)
_LARGE = 1 << 28  # bytes of a matrix that no cache holds


def bundle_bytes(config: ModelConfig, num_parameters: int, dtype: str, num_levels: int = 3) -> int:
    """Estimated size of a bundle of ``num_parameters``, stored in ``dtype`` (``auto``: the source's)."""
    sidecar = sum(4 * num_levels * math.prod(shape) + 512 for shape in scale_shapes(config).values())
    return num_parameters * itemsize(config, dtype) + sidecar + (32 << 20)  # tokenizers have up to 20 MB


def itemsize(config: ModelConfig, dtype: str) -> int:
    return getattr(torch, config.dtype if dtype == "auto" else dtype, torch.float32).itemsize


def working_bytes(config: ModelConfig, dtype: torch.dtype, settings: ConvertSettings) -> int:
    """Memory that a conversion needs beside the weights: a bound from measurements (benchmarks/results/scale*.json)."""
    length, tokens = settings.length, settings.num_samples * settings.length
    # One block's inputs at all tokens, twice while they are concatenated; its input and output.
    chosen = max(1 if block.experts is None else block.experts.chosen for block in config.blocks)
    states = tokens * (4 * chosen * config.hidden_size + 2 * config.mlp_size) * dtype.itemsize
    states += tokens * config.num_blocks * config.per_layer_size * dtype.itemsize
    # A backward pass of one micro-batch: attention scores in float32, rows of logits.
    attention = 6 * 4 * config.num_heads * length * length
    logits = 6 * 4 * min(LARGEST_LOGITS, tokens * config.vocab_size)
    # The refinement's float64 sums of four micro-batches, and its state; experts have many channels.
    channels = 160 * sum(map(math.prod, scale_shapes(config).values()))
    # The KV cache while the model generates its calibration text.
    kv_bytes = tokens * config.kv_size * dtype.itemsize
    cache = min(2 * kv_bytes, 4 << 30) * 5 // 4 if settings.calibration == ("self",) else 0
    return max(states, attention + logits + channels, cache) + BASE_BYTES


def conversion_seconds(
    config: ModelConfig,
    settings: ConvertSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    given_text: bool = False,
) -> float | None:
    """An estimate, from two matrix products that are timed on ``device``; the true time is half to twice it. None: the search
    or the weight type (int4, graded) was not measured. ``given_text``: the calibration text is not generated."""
    passes = _PASSES[device.type].get(settings.chosen_search)
    if passes is None or settings.weights in ("int4", "graded"):
        return None
    length, samples = settings.length, settings.num_samples
    weight = torch.ones(config.intermediate_size, config.hidden_size, dtype=dtype, device=device)
    mac = _seconds(length, weight) / (length * weight.numel())
    large = torch.ones(_LARGE // dtype.itemsize // config.hidden_size, config.hidden_size, dtype=dtype, device=device)
    read = _seconds(1, large) / large.numel()
    in_blocks = sum(projection.num_parameters for projection in config.projections())
    search = passes * in_blocks * samples * length * mac
    step = in_blocks * (read + samples * mac) + _BLOCK_SECONDS[device.type] * config.num_blocks
    written = sum(map(math.prod, expected_tensors(config).values())) * itemsize(config, "auto")
    return search + (0 if given_text else length * step) + written / _WRITTEN_BYTES_PER_S


def _seconds(rows: int, weight: torch.Tensor) -> float:
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def multiply() -> None:
        torch.nn.functional.linear(x, weight)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)

    return min(timeit.repeat(multiply, number=1, repeat=4))
