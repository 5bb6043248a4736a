"""A bundle's weights in the layout of the CPU kernels: transposed, a channel is one contiguous row."""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ResourceError, UsageError
from wisparse.formats.weight_types import (
    PLANE_BITS,
    WEIGHT_TYPES,
    QuantizedMatrix,
    group_of,
    interleaved,
    pack_int4,
    round_weight,
    unpack_int4,
)
from wisparse.kernels.cpu.launch import has_tiles, launch, product_dtype, team_size
from wisparse.kernels.cpu.layout import CACHE_LINE, NAMES, DequantizeRow, ProductRow, ProjectionRow, ScaleType, StoredAs
from wisparse.kernels.cpu.product import PADDING, TILE

from ..torch.block import MaskedLinear

log = logging.getLogger(__name__)
# Weights are dequantized in spans of this size, for which the allocator reuses memory instead of mapping new pages.
_SPAN_BYTES = 8 << 20
_CHUNK_BYTES = 4 << 20  # of a weight read at a time
SEGMENT_BYTES = 256 << 20  # the smallest size of a mapped file
_COLD_BYTES = 1 << 20  # of a read that measures the disk's speed
_ROW_STEP = 64  # chunks are multiples of this many rows: whole cache lines of the transposed weight, for every type
# Types of stored scales; the first that represents them exactly is used.
_SCALE_TYPES = {torch.bfloat16: ScaleType.BFLOAT16, torch.float16: ScaleType.FLOAT16, torch.float32: ScaleType.FLOAT32}


class MappedMemory:
    """Memory-mapped unnamed files for experts that do not fit into the machine's memory, in the kernels' layout; the
    operating system caches the pages in use."""

    def __init__(self) -> None:
        self.folder = os.environ.get("TMPDIR") or "/var/tmp"  # /tmp may be a tmpfs
        self.num_bytes, self._lock = 0, threading.Lock()
        self._segments: list[tuple[int, mmap.mmap]] = []
        self._at = self._size = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """`torch.empty` in a mapped file, which is freed with its last tensor."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // CACHE_LINE) * CACHE_LINE
        with self._lock:
            if self._at + size > self._size:
                self._at, self._size = 0, max(size, SEGMENT_BYTES)
                try:
                    file, name = tempfile.mkstemp(prefix="wisparse-", dir=self.folder)
                    os.unlink(name)
                    os.posix_fallocate(file, 0, self._size)
                except OSError as error:
                    raise ResourceError(
                        f"experts do not fit the free memory, and {self.folder} has no room for a file of them "
                        f"({error.strerror}): set TMPDIR to a folder on a larger disk, or load with weights int4"
                    ) from None
                self._segments.append((file, mmap.mmap(file, self._size)))
            at, self._at, self.num_bytes = self._at, self._at + size, self.num_bytes + size
            return torch.frombuffer(self._segments[-1][1], dtype=dtype, count=count, offset=at).view(shape)

    def close_files(self, needed: int, free: int, share: float) -> None:
        """Close the file descriptors (the mappings stay), measure the disk's speed and log the expected tok/s: ``free``
        of ``needed`` bytes fit into memory, and a token reads a ``share`` of the experts."""
        file, memory = self._segments[0]
        memory.flush()
        memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        count, values = len(memory) // _COLD_BYTES, np.frombuffer(memory, np.uint8)
        spans = [17 * i % count * _COLD_BYTES for i in range(min(count, 64))]  # scattered, like a step's experts
        started = time.perf_counter()
        for first in range(0, len(spans), 8):
            for at in spans[first : first + 8]:
                memory.madvise(mmap.MADV_WILLNEED, at, _COLD_BYTES)
            for at in spans[first : first + 8]:
                values[at : at + _COLD_BYTES : mmap.PAGESIZE].sum()
        seconds = time.perf_counter() - started
        for file, _ in self._segments:
            os.close(file)
        speed, bytes_read = len(spans) * _COLD_BYTES / seconds, share * self.num_bytes
        missing = min(1.0, (needed - free) / self.num_bytes)
        log.warning(
            "experts of %.1f GB are mapped from a file in %s, as %.1f GB of memory are free: a token reads %.2f GB of "
            "them, about %.0f%% from disk at %.2f GB/s: expect up to %.2g tok/s",
            *(self.num_bytes / 1e9, self.folder, free / 1e9, bytes_read / 1e9),
            *(100 * missing, speed / 1e9, speed / (bytes_read * missing)),
        )


@dataclass(frozen=True)
class Matrix:
    """A weight (N, K)."""

    stored_as: StoredAs
    data: Tensor  # (K, N) if transposed, else (N, K); int4: (K, ceil(N / 2)) uint8, output 2j in the low half of byte j
    shape: tuple[int, int]
    transposed: bool = True
    scale: Tensor | None = None  # int8: (N,) float32; int4: (G, 2, ceil(N / 2)), even outputs, then odd ones
    zero: Tensor | None = None  # int4: uint8, in the layout of scale; None: all zero points are 8
    group: int = 0  # int4: rows of data that share a scale, planes * K / G
    planes: int = 1  # 2: graded, rows 2k and 2k + 1 of data are the int4 high and low plane of channel k

    @classmethod
    def int4(
        cls, shape: tuple[int, int], group: int, scale_dtype: torch.dtype, zero_points: bool, planes: int = 1,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> Matrix:  # fmt: skip
        """An int4 or graded weight, to be filled by :meth:`store`; ``group``: channels that share a scale."""
        n, k = shape
        # Zeros: with odd N the last byte's high half is padding, whose scale must not be NaN.
        scale = torch.zeros(k // group, 2, (n + 1) // 2, dtype=scale_dtype)
        zero = torch.zeros_like(scale, dtype=torch.uint8) if zero_points else None
        width = columns = (n + 1) // 2
        if planes == 2:  # an odd number of cache lines, so that consecutive rows do not share a cache set
            width = (-(-columns // CACHE_LINE) | 1) * CACHE_LINE
        data = empty(planes * k, width, dtype=torch.uint8)[:, :columns]
        return cls(StoredAs.INT4, data, shape, scale=scale, zero=zero, group=planes * group, planes=planes)

    def store(self, first: int, rows: Tensor | QuantizedMatrix) -> None:
        """Store some rows of the weight: outputs from ``first`` on, which is even for int4."""
        codes = rows if isinstance(rows, Tensor) else rows.codes
        if isinstance(rows, QuantizedMatrix) and self.stored_as == StoredAs.INT4:
            codes = unpack_int4(codes, self.planes * self.shape[1])
            for values, source in ((self.scale, rows.scales), (self.zero, rows.zeros)):
                if values is not None and source is not None:
                    for parity in range(2):
                        part = source[parity::2].t()
                        values[:, parity, first // 2 : first // 2 + part.shape[1]] = part
        elif isinstance(rows, QuantizedMatrix) and self.scale is not None:
            self.scale[first : first + len(codes)] = rows.scales[:, 0]
        if not self.transposed:
            self.data[first : first + len(codes)] = codes
            return
        columns = codes.t().contiguous()
        if self.stored_as == StoredAs.INT4:
            columns, first = pack_int4(columns), first // 2
        self.data[:, first : first + columns.shape[1]] = columns

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.data, self.scale, self.zero) if tensor is not None)

    def row(self) -> ProjectionRow:
        """Its row of parameters, without mask and bias; it holds the address of ``data``."""
        row = ProjectionRow(weight=self.data.data_ptr(), stored_as=self.stored_as, stride=self.data.stride(0))
        (row.n, row.k), row.group, row.planes = self.shape, self.group, self.planes
        row.column_scale, row.zero_point = self.scale, self.zero
        row.scale_type = None if self.scale is None else _SCALE_TYPES[self.scale.dtype]
        return row

    def linear(self, x: Tensor, bias: Tensor | None, low: Tensor | None = None) -> Tensor:
        """The dense product of x (T, K): (T, N) in x's dtype. ``low``: input of a graded weight's low plane, if not x.
        Quantized weights, and 16-bit ones without a fast product on this CPU, are converted a span of outputs at a
        time."""
        tiled = self.tiled(x.dtype)
        if tiled:
            if self.planes == 2:  # row 2 k is the high plane of channel k, with a factor of 16
                x = torch.stack((16 * x, x if low is None else low), -1).flatten(1)
            return self.multiply_tiles(x, bias)
        computed = product_dtype(x.dtype)
        weight = self.data.t() if self.transposed else self.data
        few_rows = not self.transposed and len(x) <= 8  # torch's row-major 16-bit product is fast enough
        if self.stored_as == StoredAs.BASE and (computed == x.dtype or few_rows):
            return functional.linear(x, weight, bias)
        n, k = self.shape[0], self.planes * self.shape[1]
        y = torch.empty(len(x), n)
        rows, unread = x.to(computed), None if low is None else (x - low).to(computed)
        span = max(2, _SPAN_BYTES // (computed.itemsize * k) // 2 * 2)
        for first in range(0, n, span):
            last = min(first + span, n)
            # int8 codes are exact in every dtype; their scale multiplies the products.
            int4 = self.stored_as == StoredAs.INT4
            part = self._dequantize(first, last, computed) if int4 else weight[first:last].to(computed)
            planes = part.t()[::2], part.t()[1::2]
            if self.planes == 2:
                part = planes[1].add(planes[0], alpha=16).t()
            y[:, first:last] = functional.linear(rows, part)
            if unread is not None:  # subtracted, so that rows which read both planes are the same without other rows
                y[:, first:last] -= functional.linear(unread, planes[1].t())
        if self.stored_as == StoredAs.INT8 and self.scale is not None:
            y *= self.scale
        return (y if bias is None else y + bias).to(x.dtype)

    def tiled(self, dtype: torch.dtype) -> bool:
        """Whether `kernels.cpu.product` supports the matrix."""
        fits = self.transposed and not any(size % TILE for size in self.shape)
        return fits and dtype == torch.bfloat16 and has_tiles()

    def multiply_tiles(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ W + bias`` (B, N) in bfloat16 by `kernels.cpu.product`."""
        (k, n), threads, rows = (len(self.data), self.shape[0]), team_size(), -(-2 * len(x) // TILE) * TILE // 2
        columns, depth = (512, 128) if rows <= 2 * TILE else (256, 512)  # measured
        padded = x.new_zeros(rows, k + TILE)  # rows a power of two apart would share a cache set
        padded[: len(x), :k] = x
        y = x.new_empty(len(x), n)
        row, stride = self.row(), 4 * (columns + PADDING)
        row.k, row.bias = k, None if bias is None else bias.float()
        scratch = torch.empty(threads, 8 * columns + (rows + depth // 2) * stride, dtype=torch.uint8)
        parameters = ProductRow(projection=row, x=padded, y=y, scratch=scratch, rows=rows, kept=len(x))
        parameters.columns, parameters.depth = columns, depth
        parameters.x_stride, parameters.scratch_bytes = 2 * padded.stride(0), scratch.stride(0)
        launch("product_bfloat16", parameters.words, threads)
        return y

    def _dequantize(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Outputs first..last of an int4 weight: (last - first, planes * K)."""
        target = torch.empty(len(self.data), last - first, dtype=dtype)
        parameters = DequantizeRow(projection=self.row(), first=first, last=last, target=target)
        launch(f"dequantize_{NAMES[dtype]}", parameters.words, team_size())
        return target.t()


class CpuProjection(MaskedLinear):
    weight: Matrix

    def product(self, x: Tensor, low: Tensor | None = None) -> Tensor:
        return self.weight.linear(x, self.bias, low)


def read_matrix(
    bundle: Bundle, name: str, dtype: torch.dtype, weights: str, *, transposed: bool,
    empty: Callable[..., Tensor] = torch.empty,
) -> Matrix:  # fmt: skip
    """Read the weight ``name`` (N, K), to (K, N) if ``transposed``, which int4 always is. ``weights``: as for ``load``;
    ``native`` keeps the type of int4, graded, and int8 with one scale a row, and dequantizes others to ``dtype``.
    ``empty``: allocates memory."""
    checkpoint, (n, k) = bundle.checkpoint, bundle.checkpoint.shape(name)
    stored, graded, packed = None, False, checkpoint.quantised.get(name)
    if packed is not None and weights in ("native", packed.packing.kind):
        found = checkpoint.matrix(name)
        assert isinstance(found, QuantizedMatrix)
        graded = bundle.recipe.graded and transposed
        int8_rows = found.kind == "int8" and found.group is None and found.zeros is None
        if graded or int8_rows or (found.kind == "int4" and transposed):
            stored = found
    kind = weights if stored is None else stored.kind
    if kind == "int4" and stored is None:
        try:
            group, scale_dtype, zero_points = group_of(k), WEIGHT_TYPES["int4"].scale_dtype, False
        except ValueError as error:
            raise UsageError(f"{name}: {error}: load it with weights int8") from None
    elif stored is not None:
        group, zero_points = stored.group or k, stored.zeros is not None
        scale_dtype = next(one for one in _SCALE_TYPES if torch.equal(stored.scales.to(one).float(), stored.scales))
    if stored is not None and graded:
        matrix = Matrix.int4((n, k), group, scale_dtype, False, len(PLANE_BITS), empty)
    elif kind == "int4":
        matrix = Matrix.int4((n, k), group, scale_dtype, zero_points, empty=empty)
    else:
        data = empty(*((k, n) if transposed else (n, k)), dtype=torch.int8 if kind == "int8" else dtype)
        scale = torch.empty(n) if kind == "int8" else None
        matrix = Matrix(StoredAs.BASE if scale is None else StoredAs.INT8, data, (n, k), transposed, scale)
    step = max(_ROW_STEP, _CHUNK_BYTES // (k * checkpoint.dtype.itemsize) // _ROW_STEP * _ROW_STEP)
    if stored is not None:
        for first in range(0, n, step):
            chunk = stored.rows(first, first + step)
            try:
                matrix.store(first, interleaved(chunk) if graded else chunk)
            except ValueError as error:
                raise checkpoint.error(f"{name}: {error}; convert again") from None
        return matrix
    first = 0
    for piece in checkpoint.row_pieces(name, step):
        rows = piece.to(dtype)
        if kind == "native":
            matrix.store(first, rows)
        else:
            finite = rows.isfinite().all(1)
            if not bool(finite.all()):
                row = first + int((~finite).nonzero()[0])
                raise checkpoint.error(f"{name}: expected finite weights, found NaN or Inf in row {row}")
            matrix.store(first, round_weight(rows, kind))
        first += len(rows)
    return matrix
