"""Compiled: a weight's rows transposed, rounded to int8 or packed, on their way into memory, and int4 widened again."""

from __future__ import annotations

import numpy as np

from .intrinsics import (
    ONE,
    ZERO,
    dot,
    exact,
    floats,
    num_threads,
    pointer,
    projection_row,
    size_of,
    span,
    thread_num,
    widen,
)
from .layout import TILE, DequantizeField, LayoutField, ProjectionField
from .linear import dequantized


@exact
def transpose(p, tag):
    """(N, K) to (K, N) through small tiles, so that both sides are read and written a cache line at a time."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    n, k, stride, size = p[LayoutField.ROWS], p[LayoutField.K], p[LayoutField.STRIDE], size_of(tag)
    tile = pointer(p[LayoutField.TILES] + part * TILE * (TILE + 1) * 4, tag)
    for n0 in range(span(n, part, parts), span(n, part + 1, parts), TILE):
        height = min(TILE, span(n, part + 1, parts) - n0)
        for k0 in range(0, k, TILE):
            width = min(TILE, k - k0)
            for i in range(height):
                source = pointer(p[LayoutField.SOURCE] + ((n0 + i) * k + k0) * size, tag)
                # One more than a power of two: columns of the tile then lie in different cache sets.
                for j in range(width):
                    tile[i * (TILE + 1) + j] = source[j]
            for j in range(width):
                target = pointer(p[LayoutField.TARGET] + ((k0 + j) * stride + n0) * size, tag)
                for i in range(height):
                    target[i] = tile[i * (TILE + 1) + j]


@exact
def quantize(p, tag):
    """Round to nearest, symmetric, one scale per output column: weight ~ target * scale, target in -127..127."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    n, k, stride, size = p[LayoutField.ROWS], p[LayoutField.K], p[LayoutField.STRIDE], size_of(tag)
    tile = pointer(p[LayoutField.TILES] + part * TILE * (TILE + 1) * 4, np.int8(0))
    factors = floats(p[LayoutField.TILES] + part * TILE * (TILE + 1) * 4 + TILE * (TILE + 1))
    scale = floats(p[LayoutField.SCALE])
    magic = np.float32(12582912.0)
    for n0 in range(span(n, part, parts), span(n, part + 1, parts), TILE):
        height = min(TILE, span(n, part + 1, parts) - n0)
        for i in range(height):
            top = _largest(p[LayoutField.SOURCE] + (n0 + i) * k * size, k, tag)
            scale[n0 + i] = top / np.float32(127) if top > ZERO or top != top else ONE
            factors[i] = np.float32(127) / top if top > ZERO else ZERO
        for k0 in range(0, k, TILE):
            width = min(TILE, k - k0)
            for i in range(height):
                source = pointer(p[LayoutField.SOURCE] + ((n0 + i) * k + k0) * size, tag)
                factor = factors[i]
                for j in range(width):
                    rounded = (widen(source[j]) * factor + magic) - magic
                    tile[i * (TILE + 1) + j] = np.int8(min(max(rounded, np.float32(-127)), np.float32(127)))
            if p[LayoutField.TRANSPOSED] == 0:
                for i in range(height):
                    target = pointer(p[LayoutField.TARGET] + (n0 + i) * k + k0, np.int8(0))
                    for j in range(width):
                        target[j] = tile[i * (TILE + 1) + j]
            else:
                for j in range(width):
                    target = pointer(p[LayoutField.TARGET] + (k0 + j) * stride + n0, np.int8(0))
                    for i in range(height):
                        target[i] = tile[i * (TILE + 1) + j]


@dot
def _largest(source, k, tag):
    """The largest magnitude of a row; NaN if the row holds a NaN or an Inf."""
    source_ = pointer(source, tag)
    top = ZERO
    poison = ZERO
    for i in range(k):
        v = abs(widen(source_[i]))
        poison += v * ZERO
        top = v if v > top else top
    return top + poison


@exact
def pack(p):
    """int4 codes of rows (rows, K), two channels a byte, to columns of (K, ceil(N / 2)), two outputs a byte.

    The first row goes into the low halves of TARGET's bytes; the last of an odd number of rows has no neighbour.
    """
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    n, k, stride, byte = p[LayoutField.ROWS], p[LayoutField.K], p[LayoutField.STRIDE], np.uint8(0)
    row = (k + 1) // 2
    tile = pointer(p[LayoutField.TILES] + part * TILE * (TILE + 1) * 4, byte)
    for n0 in range(span(n, part, parts), span(n, part + 1, parts), TILE):
        height = (min(TILE, span(n, part + 1, parts) - n0) + 1) // 2
        for j0 in range(0, row, TILE):
            width = min(TILE, row - j0)
            for i in range(height):
                even = n0 + 2 * i
                source = pointer(p[LayoutField.SOURCE] + even * row + j0, byte)
                below = pointer(p[LayoutField.SOURCE] + min(even + 1, n - 1) * row + j0, byte)
                for j in range(width):
                    tile[(2 * j) * (TILE + 1) + i] = (source[j] & np.uint8(15)) | (below[j] << np.uint8(4))
                    tile[(2 * j + 1) * (TILE + 1) + i] = (source[j] >> np.uint8(4)) | (below[j] & np.uint8(240))
            for j in range(min(2 * width, k - 2 * j0)):
                target = pointer(p[LayoutField.TARGET] + (2 * j0 + j) * stride + n0 // 2, byte)
                for i in range(height):
                    target[i] = tile[j * (TILE + 1) + i]


@exact
def dequantize(p, tag):
    """Columns of an int4 weight as numbers of ``tag``'s type, (K, columns)."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    row = p[DequantizeField.PROJECTION]
    k, lo, hi = projection_row(row)[ProjectionField.K], p[DequantizeField.FIRST], p[DequantizeField.LAST]
    for i in range(k * part // parts, k * (part + 1) // parts):
        dequantized(row, i, lo, hi, p[DequantizeField.TARGET] + i * (hi - lo) * size_of(tag), tag)
