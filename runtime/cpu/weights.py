"""A bundle's weights as the CPU kernels read them: projections channel-major, optionally rounded to int8 or int4."""

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
from wisparse.kernels.cpu.matrix import Matrix, empty_int4, pack_int4_into, quantize_into, transpose_into

from ..torch.block import MaskedLinear

_T = TypeVar("_T")
# Types for stored scales: the first that holds them exactly is taken.
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK_BYTES = 4 << 20
_ROW_STEP = 64  # rows of a chunk: whole cache lines of the transposed weight, whatever its type


class CpuProjection(MaskedLinear):
    """One linear layer over a `Matrix`."""

    def __init__(self, bundle: Bundle, projection: Projection, matrix: Matrix, dtype: torch.dtype) -> None:
        name = projection.name
        super().__init__(name, projection.in_features, projection.out_features, torch.device("cpu"))
        self.matrix = matrix
        self.bias = bundle.checkpoint.tensor(f"{name}.bias").to(dtype) if projection.bias else None
        self.step_bias = None if self.bias is None else self.bias.float()  # what a decode step adds
        self.set_mask(bundle.masks.get(name))

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def product(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x, self.bias)


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
    """Read the weight ``name`` (N, K), laid out as (K, N) if ``transposed``; int4 always is.

    ``weights``: one of ``WEIGHT_TYPES``; ``native`` takes int4, and int8 with a scale a row, as they are on disk, and
    dequantises others to ``dtype``.
    """
    checkpoint = bundle.checkpoint
    stored_type = checkpoint.quantised.get(name)
    if stored_type is not None and weights in ("native", stored_type.packing.kind):
        stored = checkpoint.matrix(name)
        assert isinstance(stored, QuantizedMatrix)
        found = _as_stored(name, stored, transposed)
        if found is not None:
            return found

    n, k = checkpoint.shape(name)
    if weights == "int4":
        try:
            group = group_of(k)
        except ValueError as error:
            raise UsageError(f"{name}: {error}: load it with weights int8") from None
        scale_dtype = WEIGHT_TYPES["int4"].scale_dtype
        matrix = _allocate(name, (n, k), lambda: empty_int4((n, k), group, scale_dtype=scale_dtype))
        for first, rows in _chunks(bundle, name, dtype):
            _check_finite(bundle, name, rows.float().sum(1), first)
            codes = round_weight(rows, "int4")
            pack_int4_into(codes.codes, codes.scales, codes.zeros, matrix, first)
        return matrix

    shape = (k, n) if transposed else (n, k)
    data = _allocate(name, (n, k), lambda: aligned_empty(shape, torch.int8 if weights == "int8" else dtype))
    if weights == "int8":
        scale = torch.empty(n)
        for first, rows in _chunks(bundle, name, dtype):
            quantize_into(rows, data, scale, first, transposed=transposed)
        _check_finite(bundle, name, scale)
        return Matrix(StoredAs.INT8, data, (n, k), transposed, scale)
    for first, rows in _chunks(bundle, name, dtype):
        if transposed:
            transpose_into(rows, data, first)
        else:
            data[first : first + len(rows)] = rows
    return Matrix(StoredAs.BASE, data, (n, k), transposed)


def _as_stored(name: str, stored: QuantizedMatrix, transposed: bool) -> Matrix | None:
    """A weight as quantised on disk, or None where no kernel multiplies with it."""
    n, k = stored.shape
    if stored.kind == "int4" and transposed:
        scale_dtype = next(dtype for dtype in _SCALES if torch.equal(stored.scales.to(dtype).float(), stored.scales))
        group, zero_points = stored.group or k, stored.zeros is not None
        matrix = _allocate(
            name, (n, k), lambda: empty_int4((n, k), group, scale_dtype=scale_dtype, zero_points=zero_points)
        )
        pack_int4_into(stored.codes, stored.scales.to(scale_dtype), stored.zeros, matrix, 0)
        return matrix
    if stored.kind == "int8" and stored.group is None and stored.zeros is None:
        data = _allocate(name, (n, k), lambda: aligned_empty((k, n) if transposed else (n, k), torch.int8))
        data.copy_(stored.codes.t() if transposed else stored.codes)
        return Matrix(StoredAs.INT8, data, (n, k), transposed, stored.scales.flatten().contiguous())
    return None


def _allocate(name: str, shape: tuple[int, int], allocate: Callable[[], _T]) -> _T:
    try:
        return allocate()
    except (OSError, MemoryError, RuntimeError):
        raise ResourceError(f"{name}: not enough memory for its {shape[0]} x {shape[1]} weights") from None


def _chunks(bundle: Bundle, name: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Some rows of a weight at a time, as ``dtype``, with the number of the first."""
    checkpoint = bundle.checkpoint
    row_bytes = checkpoint.shape(name)[1] * checkpoint.dtype.itemsize
    first = 0
    for stored in checkpoint.row_pieces(name, max(_ROW_STEP, _CHUNK_BYTES // row_bytes // _ROW_STEP * _ROW_STEP)):
        rows = stored.to(dtype)
        yield first, rows
        first += len(rows)


def _check_finite(bundle: Bundle, name: str, of_rows: Tensor, first: int = 0) -> None:
    """Raise BundleError unless a number of each row, from row ``first`` on, is finite."""
    if not bool(of_rows.isfinite().all()):
        row = first + int((~of_rows.isfinite()).nonzero()[0])
        raise bundle.checkpoint.error(f"{name}: expected finite weights, found NaN or Inf in row {row}")
