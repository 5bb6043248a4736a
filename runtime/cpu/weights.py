"""A bundle's weights as the CPU kernels want them: projections channel-major, optionally rounded on the way.

A weight is read in pieces of a few rows that still lie in the processor's cache when they are transposed, so a model is
never in memory twice, and several weights are read at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ResourceError, UsageError
from wisparse.formats.model_config import Projection
from wisparse.formats.weight_types import WEIGHT_TYPES, QuantizedMatrix, group_of, round_weight
from wisparse.kernels.cpu.layout import StoredAs, aligned_empty
from wisparse.kernels.cpu.matrix import Matrix, empty_int4, pack_int4, pack_int4_into, quantize_into, transpose_into

from ..torch.block import MaskedLinear

_T = TypeVar("_T")
# What scales are held in, narrow ones first; the first that holds them exactly is taken.
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_PIECE_BYTES = 4 << 20
# Rows of a piece: whole cache lines of the transposed weight, whatever its type.
_ROW_STEP = 64


class CpuProjection(MaskedLinear):
    """One linear layer with its mask, if it has one.

    Attributes:
        matrix: the weight (N, K).
        bias: (N,), the decoder's type, or None.
    """

    def __init__(self, bundle: Bundle, projection: Projection, matrix: Matrix, dtype: torch.dtype) -> None:
        name = projection.name
        super().__init__(name, projection.in_features, projection.out_features, torch.device("cpu"))
        self.matrix = matrix
        self.bias = bundle.checkpoint.tensor(f"{name}.bias").to(dtype) if projection.bias else None
        self.set_mask(bundle.masks.get(name))

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def product(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x, self.bias)

    def step_bias(self) -> Tensor | None:
        """(N,) float32; None for nothing."""
        return None if self.bias is None else self.bias.float()


def read_matrices(
    bundle: Bundle, names: Iterable[str], dtype: torch.dtype, weights: str, *, transposed: bool
) -> dict[str, Matrix]:
    """Read several weights side by side; arguments as for :func:`read_matrix`."""
    names = list(names)
    # Reading, checksums and the transposition all run without the interpreter's lock.
    with ThreadPoolExecutor(max_workers=max(1, min(torch.get_num_threads(), 8, os.cpu_count() or 1))) as pool:
        futures = [pool.submit(read_matrix, bundle, name, dtype, weights, transposed=transposed) for name in names]
        try:
            return {name: future.result() for name, future in zip(names, futures, strict=True)}
        finally:
            for future in futures:
                future.cancel()


def read_matrix(bundle: Bundle, name: str, dtype: torch.dtype, weights: str, *, transposed: bool) -> Matrix:
    """Read one weight.

    Args:
        bundle: where it is.
        name: of the tensor, (N, K).
        dtype: its type in memory, if it is not rounded.
        weights: one of ``WEIGHT_TYPES``; ``native`` takes codes as they are on disk if a kernel multiplies with them
            (int4, int8 with a scale a row), and widens others to ``dtype``.
        transposed: lay it out as (K, N); int4 always is.

    Raises:
        BundleError: damaged, or holding a number that is not finite (if it is rounded: codes have no place for one).
        ResourceError: not enough memory.
        UsageError: its channels cannot be cut into groups.
    """
    how = bundle.checkpoint.quantised.get(name)
    if how is not None and weights in ("native", how.packing.kind):
        stored = bundle.checkpoint.matrix(name)
        assert isinstance(stored, QuantizedMatrix)
        laid_out = _as_stored(name, stored, transposed)
        if laid_out is not None:
            return laid_out
    return _READERS[weights](bundle, name, dtype, transposed)


def _as_stored(name: str, stored: QuantizedMatrix, transposed: bool) -> Matrix | None:
    """A weight with the codes that it has on disk, or None where no kernel multiplies with such codes."""
    n, k = stored.shape
    if stored.kind == "int4" and transposed:
        scale_dtype = next(dtype for dtype in _SCALES if torch.equal(stored.scales.to(dtype).float(), stored.scales))
        scales, group = stored.scales.to(scale_dtype), stored.group or k
        return _memory(name, (n, k), lambda: pack_int4(stored.codes, scales, stored.zeros, group, k))
    if stored.kind == "int8" and stored.group is None and stored.zeros is None:
        data = _memory(name, (n, k), lambda: aligned_empty((k, n) if transposed else (n, k), torch.int8))
        return Matrix(
            StoredAs.INT8, data.copy_(stored.codes.t() if transposed else stored.codes), (n, k), transposed,
            stored.scales.flatten().contiguous(),
        )  # fmt: skip
    return None


def _read_native(bundle: Bundle, name: str, dtype: torch.dtype, transposed: bool) -> Matrix:
    n, k = bundle.checkpoint.shape(name)
    data = _memory(name, (n, k), lambda: aligned_empty((k, n) if transposed else (n, k), dtype))
    for first, piece in _pieces(bundle, name, dtype):
        if transposed:
            transpose_into(piece, data, first)
        else:
            data[first : first + len(piece)] = piece
    return Matrix(StoredAs.BASE, data, (n, k), transposed)


def _read_int8(bundle: Bundle, name: str, dtype: torch.dtype, transposed: bool) -> Matrix:
    n, k = bundle.checkpoint.shape(name)
    data = _memory(name, (n, k), lambda: aligned_empty((k, n) if transposed else (n, k), torch.int8))
    scale = torch.empty(n)
    for first, piece in _pieces(bundle, name, dtype):
        quantize_into(piece, data, scale, first, transposed=transposed)
    _check_finite(bundle, name, scale)
    return Matrix(StoredAs.INT8, data, (n, k), transposed, scale)


def _read_int4(bundle: Bundle, name: str, dtype: torch.dtype, transposed: bool) -> Matrix:
    n, k = bundle.checkpoint.shape(name)
    try:
        group = group_of(k)
    except ValueError as error:
        raise UsageError(f"{name}: {error}: load it with weights int8") from None
    scale_dtype = WEIGHT_TYPES["int4"].scale_dtype
    matrix = _memory(name, (n, k), lambda: empty_int4((n, k), group, scale_dtype=scale_dtype))
    for first, piece in _pieces(bundle, name, dtype):
        _check_finite(bundle, name, piece.float().sum(1), first)
        codes = round_weight(piece, "int4")
        pack_int4_into(codes.codes, codes.scales, codes.zeros, matrix, first)
    return matrix


# What weights may be held as -> how they are read.
_READERS = {"native": _read_native, "int8": _read_int8, "int4": _read_int4}


def _memory(name: str, shape: tuple[int, int], allocate: Callable[[], _T]) -> _T:
    """What ``allocate`` gives, or a ResourceError."""
    try:
        return allocate()
    except (OSError, MemoryError, RuntimeError):
        raise ResourceError(f"{name}: not enough memory for its {shape[0]} x {shape[1]} weights") from None


def _pieces(bundle: Bundle, name: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Some rows of a weight at a time, as ``dtype``, with the number of the first."""
    checkpoint = bundle.checkpoint
    row_bytes = checkpoint.shape(name)[1] * checkpoint.dtype.itemsize
    first = 0
    for stored in checkpoint.row_pieces(name, max(_ROW_STEP, _PIECE_BYTES // row_bytes // _ROW_STEP * _ROW_STEP)):
        piece = stored.to(dtype)
        yield first, piece
        first += len(piece)


def _check_finite(bundle: Bundle, name: str, of_rows: Tensor, first: int = 0) -> None:
    """Raise BundleError unless what was computed of each row, from row ``first`` on, is finite."""
    if not bool(of_rows.isfinite().all()):
        row = first + int((~of_rows.isfinite()).nonzero()[0])
        raise bundle.checkpoint.error(f"{name}: expected finite weights, found NaN or Inf in row {row}")
