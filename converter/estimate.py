"""The time that a conversion takes, estimated before it begins."""

from __future__ import annotations

import math
import timeit

import torch

from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors

from .settings import ConvertSettings

# A search takes as long as this many forward passes over the calibration text at the speed of a matrix product. refine: on
# the 8B shape on an H200 (132 s, benchmarks/results/scale-h200.json) and on the 6.5M example on two cores; fisher: on
# SmolLM2-135M on two cores (benchmarks/first_model.py). The other searches were not measured.
_PASSES = {"refine": 190, "fisher": 46}
# The overhead of a block per decode step in transformers, which generates the calibration text.
_BLOCK_SECONDS = {"cuda": 0.0014, "cpu": 0.005}
_WRITTEN_BYTES_PER_S = 450e6  # to write and verify a bundle (benchmarks/results/scale-h200.json)
_LARGE = 1 << 28  # bytes of a matrix that no cache holds


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
    passes = _PASSES.get(settings.chosen_search)
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
    written = (
        sum(map(math.prod, expected_tensors(config).values())) * getattr(torch, config.dtype, torch.float32).itemsize
    )
    return search + (0 if given_text else length * step) + written / _WRITTEN_BYTES_PER_S


def _seconds(rows: int, weight: torch.Tensor) -> float:
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def multiply() -> None:
        torch.nn.functional.linear(x, weight)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)

    return min(timeit.repeat(multiply, number=1, repeat=4))
