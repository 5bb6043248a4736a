"""What the products' kernels are given, in groups: tensors (in a kernel their addresses), and numbers that are compiled
in. A tensor that a launch has no use for is None.

A compiled kernel is kept on disk under its source and these numbers. So the groups have fields only: what a property
worked out from them would not be part of that key.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Columns", "Counting", "Memory", "Modes", "Shape", "Source", "Stretches", "Target", "Weights"]


class Stretches(NamedTuple):
    """The attention's partial results, one for each stretch of the context."""

    x: Tensor  # (B, heads, kv_splits, head_dim) wide, softmax-weighted sums
    maximum: Tensor  # (B, heads, kv_splits) wide, log2 domain
    total: Tensor  # the same shape, denominators


class Source(NamedTuple):
    """Where a projection's input comes from: x as it is; x, the residual stream, after an RMSNorm; or the attention's
    stretches, combined."""

    x: Tensor | None  # (B, K) dtype
    ssq: Tensor | None  # RMSNorm: (B, ssq_parts) wide, partial sums of squares
    norm: Tensor | None  # RMSNorm: (K,) of the weights' type, or wide: 1 + weight
    stretches: Stretches | None


class Weights(NamedTuple):
    """A group of projections that read one input."""

    weight_t: Tensor  # (K, stride), channel-major; the projections' columns side by side; codes: int32 words
    bias: Tensor | None  # (N,) of the weights' type, or wide
    scales: Tensor  # (projections, K) float32
    thresholds: Tensor  # (projections,) float32
    code_scales: Tensor | None  # codes: (K / group, padded columns) float32
    zeros: Tensor | None  # codes of zero that are not the kind's own: the same shape


class Target(NamedTuple):
    """Where a projection's output goes, as ``Modes.output`` says."""

    out: Tensor  # dtype: TO_PLAIN (B, N); TO_RESIDUAL (B, N), read and written; TO_SILU and TO_GELU (B, n0)
    ssq: Tensor | None  # TO_RESIDUAL: (B, tiles * max(1, pollers)) wide


class Memory(NamedTuple):
    """What the programs of a launch leave for each other, and each for itself."""

    partial: Tensor  # (splits, B, N) integers as wide as the sums; with pollers NOTHING before and after
    counter: Tensor | None  # no pollers: (tiles,) int32, 0 before and after
    list_index: Tensor | None  # lists that are not in shared memory: (programs, length) int32
    list_value: Tensor | None  # and (programs, B, length) dtype


class Counting(NamedTuple):
    """The kept channels, counted."""

    token: Tensor  # (B,) int64, negative for a row that is not counted
    before: Tensor  # (projections, splits) int64
    after: Tensor  # the same shape: before, and what this launch keeps


class Shape(NamedTuple):
    """Compiled in: K, the projections' widths and their sum N, tiles of columns, rows B; the attention's stretches; how
    many partial sums of squares there may be, a multiple of 32."""

    k: int
    n0: int
    n1: int
    n2: int
    n: int
    stride: int
    tiles: int
    batch: int
    kv_splits: int
    head_dim: int
    ssq_pad: int


class Modes(NamedTuple):
    """Compiled in: ``output`` is TO_PLAIN, TO_RESIDUAL, TO_SILU or TO_GELU; ``dense``: no channel is dropped; ``pdl``:
    programmatic dependent launch; ``codes``: the ``Matrix``'s kind, and its ``group``."""

    output: int
    dense: bool
    pdl: bool
    codes: str
    group: int


class Columns(NamedTuple):
    """Within a kernel: the projection that a tile of columns belongs to, which of its tiles it is, and the projection's
    first column and width."""

    projection: int
    local: int
    first: int
    width: int
