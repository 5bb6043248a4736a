"""A weight as the CPU kernels read it: transposed, so that a kept channel is one contiguous row, in a floating type, int8
or int4. Importing this module imports numba, which takes a second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .layout import (
    TILE,
    DequantizeField,
    ProjectionField,
    RearrangeField,
    ScaleType,
    StoredAs,
    aligned_empty,
    type_name,
)
from .threads import launch, team_size

# Codes are dequantised in spans of this size, for which the allocator reuses memory instead of mapping fresh pages.
_SPAN_BYTES = 8 << 20
_SCALE_TYPES = {
    torch.float32: ScaleType.FLOAT32,
    torch.bfloat16: ScaleType.BFLOAT16,
    torch.float16: ScaleType.FLOAT16,
}


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which type torch multiplies matrices of ``dtype`` fast on this CPU, also where one is transposed.

    Without AVX-512, torch 2.13 takes 80 times as long for a transposed bfloat16 matrix as for a row-major one.
    """
    fast = dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return dtype if fast else torch.float32


@dataclass(frozen=True)
class Matrix:
    """A weight (N, K)."""

    stored_as: StoredAs
    data: Tensor  # (K, N) if transposed, else (N, K); int4: (K, ceil(N / 2)) uint8, output 2j in byte j's low half
    shape: tuple[int, int]
    transposed: bool
    scale: Tensor | None = None  # int8: (N,) float32; int4: (G, 2, ceil(N / 2)), the even outputs' scales, then the odd
    zero: Tensor | None = None  # int4: uint8, laid out as scale; None: the code 8 is zero
    group: int = 0  # int4: channels that share a scale, K / G

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.zero) if tensor is not None)

    def row(self) -> np.ndarray:
        """A row of `ProjectionField`, without a mask and a bias; valid while the matrix lives."""
        row = np.zeros(len(ProjectionField), dtype=np.int64)
        row[ProjectionField.STORED_AS], row[ProjectionField.GROUP] = self.stored_as, self.group
        row[ProjectionField.N], row[ProjectionField.K] = self.shape
        row[ProjectionField.WEIGHT] = self.data.data_ptr()
        if self.scale is not None:
            row[ProjectionField.COLUMN_SCALE] = self.scale.data_ptr()
            row[ProjectionField.SCALE_TYPE] = _SCALE_TYPES[self.scale.dtype]
        if self.zero is not None:
            row[ProjectionField.ZERO_POINT] = self.zero.data_ptr()
        return row

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The dense product of x (T, K): (T, N) in x's type.

        Quantised weights, and 16-bit ones without a fast product on this CPU, are converted a span of outputs at a time.
        """
        computed = _product_dtype(x.dtype)
        few_rows = not self.transposed and len(x) <= 8  # torch's row-major 16-bit product is fast enough
        if self.stored_as == StoredAs.BASE and (computed == x.dtype or few_rows):
            return functional.linear(x, self.data.t() if self.transposed else self.data, bias)
        n, k = self.shape
        y = torch.empty(len(x), n)
        rows = x.to(computed)
        span = max(2, _SPAN_BYTES // (computed.itemsize * k) // 2 * 2)
        for first in range(0, n, span):
            last = min(first + span, n)
            if self.stored_as == StoredAs.INT4:
                weight = self._dequantize(first, last, computed)
            else:  # int8 is exact in every floating type; its scale multiplies the sums
                weight = (self.data.t() if self.transposed else self.data)[first:last].to(computed)
            y[:, first:last] = functional.linear(rows, weight)
        if self.stored_as == StoredAs.INT8:
            assert self.scale is not None
            y *= self.scale
        return (y if bias is None else y + bias).to(x.dtype)

    def _dequantize(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Outputs first..last of an int4 weight, (last - first, K)."""
        target = torch.empty(self.shape[1], last - first, dtype=dtype)
        row = self.row()
        parameters = np.zeros(len(DequantizeField), dtype=np.int64)
        parameters[DequantizeField.PROJECTION] = row.ctypes.data
        parameters[DequantizeField.FIRST], parameters[DequantizeField.LAST] = first, last
        parameters[DequantizeField.TARGET] = target.data_ptr()
        launch(f"dequantize_{type_name(dtype)}", parameters, team_size())
        return target.t()


def transpose_into(rows: Tensor, target: Tensor, first: int) -> None:
    """target[:, first:first + R] = rows.T; rows: (R, K), target: (K, N) of the same type."""
    _rearrange(f"transpose_{type_name(rows.dtype)}", rows, target, None, first, transposed=True)


def quantize_into(rows: Tensor, target: Tensor, scale: Tensor, first: int, *, transposed: bool) -> None:
    """Round rows (R, K) of a weight to int8, symmetric, with one scale per output: ``weight ~ target * scale``.

    They are outputs first..first + R of target, (K, N) or, not ``transposed``, (N, K), and of scale (N,) float32. A row
    that holds a NaN or an Inf gets a scale of NaN.
    """
    _rearrange("quantize", rows.float(), target, scale, first, transposed=transposed)


def empty_int4(
    shape: tuple[int, int], group: int, *, scale_dtype: torch.dtype = torch.float32, zero_points: bool = False
) -> Matrix:
    """Uninitialised memory for an int4 weight (N, K), to be filled by :func:`pack_int4_into`; group divides K."""
    n, k = shape
    pairs, groups = (n + 1) // 2, k // group
    # Zeros: the second half of an odd row's last byte has no output, and no NaN may come of it.
    scale = torch.zeros(groups, 2, pairs, dtype=scale_dtype)
    zero = torch.zeros(groups, 2, pairs, dtype=torch.uint8) if zero_points else None
    return Matrix(StoredAs.INT4, aligned_empty((k, pairs), torch.uint8), shape, True, scale, zero, group)


def pack_int4_into(codes: Tensor, scales: Tensor, zeros: Tensor | None, matrix: Matrix, first: int) -> None:
    """Put rows of an int4 weight, ``weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]``, into their place.

    codes: (R, ceil(K / 2)) uint8, channel 2j in the low half of byte j; scales: (R, G), exact in the matrix's type;
    zeros: (R, G) uint8, or None: 8; first: of these rows among the N, even.
    """
    n, k = matrix.shape
    count = len(codes)
    if codes.shape != (count, (k + 1) // 2) or first % 2 or not 0 <= first <= n - count:
        raise ValueError(f"rows {first} to {first + count} of {tuple(codes.shape)} do not fit an int4 {n} x {k}")
    if (matrix.zero is None) != (zeros is None):
        raise ValueError("zeros: expected where the memory was made for zero points, and nowhere else")
    target = matrix.data.data_ptr() + first // 2
    _launch("pack_int4", codes, count, k, target, matrix.data.shape[1], threaded=codes.numel() > 2**20)
    for values, source in ((matrix.scale, scales), (matrix.zero, zeros)):
        if values is not None and source is not None:
            for parity in range(2):
                part = source[parity::2].t()
                values[:, parity, first // 2 : first // 2 + part.shape[1]] = part


def _rearrange(
    region: str, rows: Tensor, target: Tensor, scale: Tensor | None, first: int, *, transposed: bool
) -> None:
    count, k = rows.shape
    n = target.shape[1 if transposed else 0]
    if target.shape != ((k, n) if transposed else (n, k)) or not target.is_contiguous() or not 0 <= first <= n - count:
        raise ValueError(f"rows {first} to {first + count} of {k} do not fit a target of {tuple(target.shape)}")
    address = target.data_ptr() + first * (1 if transposed else k) * target.element_size()
    scales = None if scale is None else scale[first:]
    _launch(region, rows, count, k, address, n, scales, transposed=transposed, threaded=rows.numel() > 2**21)


def _launch(
    region: str,
    source: Tensor,
    rows: int,
    k: int,
    target: int,
    stride: int,
    scale: Tensor | None = None,
    *,
    transposed: bool = True,
    threaded: bool,
) -> None:
    """``threaded``: a chunk that lies in the cache is not worth a team of threads."""
    source = source.contiguous()
    threads = team_size() if threaded else 1
    tiles = torch.empty(threads * TILE * (TILE + 1), dtype=torch.float32)
    parameters = np.zeros(len(RearrangeField), dtype=np.int64)
    parameters[RearrangeField.SOURCE], parameters[RearrangeField.TARGET] = source.data_ptr(), target
    parameters[RearrangeField.ROWS], parameters[RearrangeField.K] = rows, k
    parameters[RearrangeField.STRIDE], parameters[RearrangeField.TRANSPOSED] = stride, transposed
    parameters[RearrangeField.SCALE] = 0 if scale is None else scale.data_ptr()
    parameters[RearrangeField.TILES] = tiles.data_ptr()
    launch(region, parameters, threads)
