"""What weights may be held as at load: one table, which options, memory estimates and back ends read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .quantised import QuantizedMatrix, quantise_fp8, quantise_int4, quantise_int8

__all__ = ["DTYPES", "WEIGHT_TYPES", "WeightType", "code_bytes", "group_of", "round_weight"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_GROUP = 128
_SMALLEST_GROUP = 32


@dataclass(frozen=True)
class WeightType:
    """A way to hold the weights of a model's projections.

    Attributes:
        name: as ``load(weights=...)`` and ``--weights`` take it.
        bits: of one code; None: numbers of the decoder's floating type.
        grouped: a scale for each group of neighbouring channels, see :func:`group_of`, else one a row.
        scale_dtype: of the scales.
        head: what the output layer is held as: codes of four bits would cost quality where it shows.
    """

    name: str
    bits: int | None
    grouped: bool
    scale_dtype: torch.dtype
    head: str

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """About the bytes of a weight (N, K) held so in a decoder of ``dtype``; other tensors have numbers of it."""
        if self.bits is None or len(shape) != 2:
            return math.prod(shape) * dtype.itemsize
        return code_bytes(self.bits, shape, _GROUP if self.grouped else None)


WEIGHT_TYPES: Mapping[str, WeightType] = {
    found.name: found
    for found in (
        WeightType("native", None, False, torch.float32, "native"),
        WeightType("int8", 8, False, torch.float32, "int8"),
        WeightType("int4", 4, True, torch.bfloat16, "int8"),
        WeightType("fp8", 8, False, torch.float32, "int8"),
    )
}


def code_bytes(bits: int, shape: tuple[int, ...], group: int | None, *, zero_points: bool = False) -> int:
    """About the bytes of a weight (N, K) in codes with scales of four bytes, which not every back end needs."""
    n, k = shape
    groups = 1 if group is None else -(-k // group)
    return (n * bits + 7) // 8 * k + n * groups * (8 if zero_points else 4)


def group_of(k: int) -> int:
    """Channels that share a scale of a weight with ``k`` of them: the largest divisor up to 128.

    Raises:
        ValueError: it would be below 32 (and not ``k`` itself): so many scales outweigh the codes.
    """
    group = next(divisor for divisor in range(min(_GROUP, k), 0, -1) if k % divisor == 0)
    if group < min(_SMALLEST_GROUP, k):
        raise ValueError(f"{k} channels cannot be cut into even groups of {_SMALLEST_GROUP} to {_GROUP}")
    return group


def round_weight(weight: Tensor, weights: str) -> QuantizedMatrix:
    """A weight (N, K), floating and finite, as it is held with ``weights``, which is not ``native``.

    Raises:
        ValueError: its channels cannot be cut into groups.
    """
    if weights == "int4":
        held = WEIGHT_TYPES[weights]
        return quantise_int4(weight, group=group_of(weight.shape[1]), scale_dtype=held.scale_dtype)
    return quantise_int8(weight) if weights == "int8" else quantise_fp8(weight)
