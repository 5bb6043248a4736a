"""The types that an NVIDIA GPU computes in beside the weights' own.

float32 weights are for comparing decoders, and two that round in float32 disagree: a score within rounding of its
threshold is kept by one and dropped by the other (benchmarks/LOG.md). So with float32 weights activations and sums are
float64, whose error moves no score across its threshold.
"""

from __future__ import annotations

import torch

__all__ = ["activation_dtype", "rows_together", "wide_dtype"]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels add up in: float64 for float32 weights, float32 for half-precision ones."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def activation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What activations and the cache are stored in: float64 for float32 weights, else the weights' type."""
    return torch.float64 if dtype == torch.float32 else dtype


def rows_together(rows: int, dtype: torch.dtype) -> int:
    """Rows of a batch that one launch takes: for float32 weights one, for half-precision ones all."""
    return 1 if dtype == torch.float32 else rows
