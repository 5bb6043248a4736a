"""A weight as the CPU kernels read it: (N, K) to (K, N), so that a kept channel is one contiguous row; rounded to int8,
or its int4 codes packed, on the way. Importing this module imports numba, which takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .layout import TILE, DequantizeField, LayoutField, ProjectionField, ScaleType, StoredAs, aligned_empty, type_name
from .threads import launch, team_size

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

        Codes, and 16-bit weights without a fast matrix product on this CPU, are converted a span of columns at a time.
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


def transpose_into(rows: Tensor, target: Tensor, first: int) -> None:
    """Put some rows of a weight into its transpose: ``target[:, first:first + len(rows)] = rows.T``.

    Args:
        rows: (R, K).
        target: (K, N), contiguous, the same type.
        first: of the N columns.
    """
    _rearrange(f"transpose_{type_name(rows.dtype)}", rows, target, None, first, transposed=True)


def quantize_into(rows: Tensor, target: Tensor, scale: Tensor, first: int, *, transposed: bool) -> None:
    """Round some rows of a weight to int8, symmetric, to nearest, with one scale per output channel.

    Args:
        rows: (R, K), float32, bfloat16 or float16.
        target: (K, N) or, not ``transposed``, (N, K) int8; the rows' place in it gets -127..127.
        scale: (N,) float32: ``weight ~ int8 * scale``. A row that holds a NaN or an Inf has a scale of NaN.
        first: of these rows among the N.
    """
    _rearrange(f"quantize_{type_name(rows.dtype)}", rows, target, scale, first, transposed=transposed)


def empty_int4(
    shape: tuple[int, int], group: int, *, scale_dtype: torch.dtype = torch.float32, zero_points: bool = False
) -> Matrix:
    """Uninitialised memory for an int4 weight of a shape (N, K), to be filled by :func:`pack_int4_into`.

    Args:
        group: channels that share a scale; divides K.
        scale_dtype: what scales are held in: float32, or bfloat16 or float16 where they are numbers of these.
    """
    n, k = shape
    pairs, groups = (n + 1) // 2, k // group
    # The second half of an odd row's last byte has no output; nothing of it may be a NaN.
    scale = torch.zeros(groups, 2, pairs, dtype=scale_dtype)
    zero = torch.zeros(groups, 2, pairs, dtype=torch.uint8) if zero_points else None
    return Matrix(StoredAs.INT4, aligned_empty((k, pairs), torch.uint8), shape, True, scale, zero, group)


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, k: int) -> Matrix:
    """Lay out a whole int4 weight (N, K): its arguments are those of :func:`pack_int4_into`."""
    matrix = empty_int4((len(codes), k), group, scale_dtype=scales.dtype, zero_points=zeros is not None)
    pack_int4_into(codes, scales, zeros, matrix, 0)
    return matrix


def pack_int4_into(codes: Tensor, scales: Tensor, zeros: Tensor | None, matrix: Matrix, first: int) -> None:
    """Put some rows of an int4 weight, ``weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]``, into their place.

    Args:
        codes: (R, ceil(K / 2)) uint8, channel 2j in the low half of byte j.
        scales: (R, G), numbers of the type that ``matrix`` holds.
        zeros: (R, G) uint8, or None: 8.
        matrix: of :func:`empty_int4`.
        first: of these rows among the N; even.
    """
    n, k = matrix.shape
    count = len(codes)
    if matrix.stored_as != StoredAs.INT4 or matrix.scale is None:
        raise ValueError("matrix: expected the memory of an int4 weight; empty_int4() makes it")
    if codes.shape != (count, (k + 1) // 2) or first % 2 or not 0 <= first <= n - count:
        raise ValueError(f"rows {first} to {first + count} of {tuple(codes.shape)} do not fit an int4 {n} x {k}")
    codes = codes.contiguous()
    threads = team_size() if codes.numel() > 2**20 else 1
    tiles = torch.empty(threads * TILE * (TILE + 1), dtype=torch.float32)
    parameters = np.zeros(len(LayoutField), dtype=np.int64)
    parameters[LayoutField.SOURCE] = codes.data_ptr()
    parameters[LayoutField.ROWS], parameters[LayoutField.K] = count, k
    parameters[LayoutField.TARGET] = matrix.data.data_ptr() + first // 2
    parameters[LayoutField.STRIDE] = matrix.data.shape[1]
    parameters[LayoutField.TILES] = tiles.data_ptr()
    launch("pack_int4", parameters, threads)
    for target, source in ((matrix.scale, scales), (matrix.zero, zeros)):
        if (target is None) != (source is None):
            raise ValueError("zeros: expected where the memory has room for them, and nowhere else")
        if target is not None and source is not None:
            for parity in range(2):
                part = source[parity::2].t()
                target[:, parity, first // 2 : first // 2 + part.shape[1]] = part


def _rearrange(
    region: str, rows: Tensor, target: Tensor, scale: Tensor | None, first: int, *, transposed: bool
) -> None:
    rows = rows.contiguous()
    count, k = rows.shape
    n = target.shape[1 if transposed else 0]
    if target.shape != ((k, n) if transposed else (n, k)) or not target.is_contiguous() or not 0 <= first <= n - count:
        raise ValueError(f"rows {first} to {first + count} of {k} do not fit a target of {tuple(target.shape)}")
    # A piece that lies in the cache is not worth a team of threads.
    threads = team_size() if rows.numel() > 2**21 else 1
    tiles = torch.empty(threads * TILE * (TILE + 1), dtype=torch.float32)
    parameters = np.zeros(len(LayoutField), dtype=np.int64)
    parameters[LayoutField.SOURCE] = rows.data_ptr()
    parameters[LayoutField.ROWS], parameters[LayoutField.K] = count, k
    parameters[LayoutField.TARGET] = target.data_ptr() + first * (1 if transposed else k) * target.element_size()
    parameters[LayoutField.STRIDE] = n
    parameters[LayoutField.TRANSPOSED] = transposed
    parameters[LayoutField.SCALE] = 0 if scale is None else scale.data_ptr() + 4 * first
    parameters[LayoutField.TILES] = tiles.data_ptr()
    launch(region, parameters, threads)
