"""A weight as the CPU kernels read it: what its numbers are stored as, where, and what they are multiplied by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .layout import DequantizeField, ProjectionField, ScaleType, StoredAs
from .threads import launch, team_size
from .types import type_name

__all__ = ["Matrix"]

# Small enough for the allocator to hand out the same memory again, instead of fresh pages every time.
_WIDENED_BYTES = 8 << 20
_SCALE_TYPES = {
    torch.float32: ScaleType.FLOAT32,
    torch.bfloat16: ScaleType.BFLOAT16,
    torch.float16: ScaleType.FLOAT16,
}


def _has_fast_product(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of ``dtype`` by vectorised code on this CPU, also where one is transposed.

    Without AVX-512, torch 2.13 takes 80 times as long for a transposed bfloat16 matrix as for a row-major one.
    """
    if dtype == torch.bfloat16:
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return dtype == torch.float32


@dataclass(frozen=True)
class Matrix:
    """A weight (N, K).

    Attributes:
        stored_as: how ``data`` is to be read.
        data: (K, N) if ``transposed``, else (N, K), a floating type or int8; int4: (K, ceil(N / 2)) uint8, transposed,
            the code of output 2j in the low half of byte j.
        shape: (N, K).
        scale: None for a floating type; int8: (N,) float32; int4: (G, 2, ceil(N / 2)), float32, bfloat16 or float16,
            the scales of the even outputs, then those of the odd ones.
        zero: int4 only: uint8, laid out as ``scale``; None: the code 8 stands for zero.
        group: int4 only: channels that share a scale, K / G.
    """

    stored_as: StoredAs
    data: Tensor
    shape: tuple[int, int]
    transposed: bool
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and of what they are multiplied by."""
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.zero) if tensor is not None)

    def describe(self) -> Mapping[ProjectionField, Tensor | int]:
        """What a table of projections has to say about this weight; a tensor stands for its address."""
        n, k = self.shape
        found: dict[ProjectionField, Tensor | int] = {
            ProjectionField.STORED_AS: self.stored_as,
            ProjectionField.WEIGHT: self.data,
            ProjectionField.N: n,
            ProjectionField.K: k,
            ProjectionField.GROUP: self.group,
        }
        if self.scale is not None:
            found[ProjectionField.COLUMN_SCALE] = self.scale
            found[ProjectionField.SCALE_TYPE] = _SCALE_TYPES[self.scale.dtype]
        if self.zero is not None:
            found[ProjectionField.ZERO_POINT] = self.zero
        return found

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (T, K) times the weight, as a dense product: (T, N) in x's type.

        Codes, and 16-bit weights that this CPU has no fast matrix product for, are converted a span of columns at a time.
        """
        computed = x.dtype if _has_fast_product(x.dtype) else torch.float32
        few_rows = not self.transposed and len(x) <= 8  # torch's loops for row-major 16-bit weights are fast enough
        if self.stored_as == StoredAs.BASE and (computed == x.dtype or few_rows):
            return functional.linear(x, self.data.t() if self.transposed else self.data, bias)
        n, k = self.shape
        y = torch.empty(len(x), n)
        rows = x.to(computed)
        columns = max(2, _WIDENED_BYTES // (computed.itemsize * k) // 2 * 2)
        for first in range(0, n, columns):
            last = min(first + columns, n)
            y[:, first:last] = functional.linear(rows, self._columns(first, last, x.dtype).to(computed))
        if self.stored_as == StoredAs.INT8:
            assert self.scale is not None
            y *= self.scale
        return (y if bias is None else y + bias).to(x.dtype)

    def _columns(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows of the weight (last - first, K): int8 without its scale, which the sums are multiplied by."""
        if self.stored_as != StoredAs.INT4:  # int8 is exact in every floating type
            return (self.data.t() if self.transposed else self.data)[first:last]
        k = self.shape[1]
        target = torch.empty(k, last - first, dtype=dtype)
        parameters = np.zeros(len(DequantizeField), dtype=np.int64)
        row = np.zeros(len(ProjectionField), dtype=np.int64)
        for field, value in self.describe().items():
            row[field] = value.data_ptr() if isinstance(value, Tensor) else value
        parameters[DequantizeField.PROJECTION] = row.ctypes.data
        parameters[DequantizeField.FIRST], parameters[DequantizeField.LAST] = first, last
        parameters[DequantizeField.TARGET] = target.data_ptr()
        launch(f"dequantize_{type_name(dtype)}", parameters, team_size())
        return target.t()
