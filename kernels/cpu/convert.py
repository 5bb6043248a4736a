"""Compiled: transpose, quantise to int8, or pack a weight's rows at load; dequantise int4 for prompts."""

from __future__ import annotations

import numpy as np

from .intrinsics import (
    ONE,
    ZERO,
    dot,
    exact,
    floats,
    high_half,
    low_half,
    narrow,
    num_threads,
    pointer,
    projection_row,
    size_of,
    span,
    thread_num,
    widen,
)
from .layout import TILE, DequantizeField, ProjectionField, RearrangeField, ScaleType
from .linear import ZERO_CODE

_TILE_BYTES = TILE * (TILE + 1) * 4
_BYTE, _INT8 = np.uint8(0), np.int8(0)


@exact
def transpose(p, tag):
    """(N, K) to (K, N) through small tiles, so that both sides are read and written a cache line at a time."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    n, k, stride, size = p[RearrangeField.ROWS], p[RearrangeField.K], p[RearrangeField.STRIDE], size_of(tag)
    tile = pointer(p[RearrangeField.TILES] + part * _TILE_BYTES, tag)
    for n0 in range(span(n, part, parts), span(n, part + 1, parts), TILE):
        height = min(TILE, span(n, part + 1, parts) - n0)
        for k0 in range(0, k, TILE):
            width = min(TILE, k - k0)
            for i in range(height):
                source = pointer(p[RearrangeField.SOURCE] + ((n0 + i) * k + k0) * size, tag)
                # Rows of TILE + 1: columns of the tile then lie in different cache sets.
                for j in range(width):
                    tile[i * (TILE + 1) + j] = source[j]
            for j in range(width):
                target = pointer(p[RearrangeField.TARGET] + ((k0 + j) * stride + n0) * size, tag)
                for i in range(height):
                    target[i] = tile[i * (TILE + 1) + j]


@dot
def _row_maximum(source, k):
    """The largest magnitude of a float32 row; NaN if it holds a NaN or an Inf."""
    source_ = floats(source)
    top = ZERO
    poison = ZERO
    for i in range(k):
        v = abs(source_[i])
        poison += v * ZERO
        top = v if v > top else top
    return top + poison


@exact
def quantize(p):
    """float32 to int8, to nearest, symmetric, one scale per row: weight ~ target * scale, target in -127..127."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    n, k, stride = p[RearrangeField.ROWS], p[RearrangeField.K], p[RearrangeField.STRIDE]
    tile = pointer(p[RearrangeField.TILES] + part * _TILE_BYTES, _INT8)
    factors = floats(p[RearrangeField.TILES] + part * _TILE_BYTES + TILE * (TILE + 1))
    scale = floats(p[RearrangeField.SCALE])
    magic = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    for n0 in range(span(n, part, parts), span(n, part + 1, parts), TILE):
        height = min(TILE, span(n, part + 1, parts) - n0)
        for i in range(height):
            top = _row_maximum(p[RearrangeField.SOURCE] + 4 * (n0 + i) * k, k)
            scale[n0 + i] = top / np.float32(127) if top > ZERO or top != top else ONE
            factors[i] = np.float32(127) / top if top > ZERO else ZERO
        for k0 in range(0, k, TILE):
            width = min(TILE, k - k0)
            for i in range(height):
                source = floats(p[RearrangeField.SOURCE] + 4 * ((n0 + i) * k + k0))
                factor = factors[i]
                for j in range(width):
                    rounded = (source[j] * factor + magic) - magic
                    tile[i * (TILE + 1) + j] = np.int8(min(max(rounded, np.float32(-127)), np.float32(127)))
            if p[RearrangeField.TRANSPOSED] == 0:
                for i in range(height):
                    target = pointer(p[RearrangeField.TARGET] + (n0 + i) * k + k0, _INT8)
                    for j in range(width):
                        target[j] = tile[i * (TILE + 1) + j]
            else:
                for j in range(width):
                    target = pointer(p[RearrangeField.TARGET] + (k0 + j) * stride + n0, _INT8)
                    for i in range(height):
                        target[i] = tile[i * (TILE + 1) + j]


@exact
def pack(p):
    """int4 codes of rows (rows, K), two channels a byte, to columns of (K, ceil(N / 2)), two outputs a byte.

    The first row goes into the low halves of TARGET's bytes; the last of an odd number of rows has no neighbour.
    """
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    n, k, stride = p[RearrangeField.ROWS], p[RearrangeField.K], p[RearrangeField.STRIDE]
    row = (k + 1) // 2
    tile = pointer(p[RearrangeField.TILES] + part * _TILE_BYTES, _BYTE)
    for n0 in range(span(n, part, parts), span(n, part + 1, parts), TILE):
        height = (min(TILE, span(n, part + 1, parts) - n0) + 1) // 2
        for j0 in range(0, row, TILE):
            width = min(TILE, row - j0)
            for i in range(height):
                even = n0 + 2 * i
                source = pointer(p[RearrangeField.SOURCE] + even * row + j0, _BYTE)
                below = pointer(p[RearrangeField.SOURCE] + min(even + 1, n - 1) * row + j0, _BYTE)
                for j in range(width):
                    tile[(2 * j) * (TILE + 1) + i] = (source[j] & np.uint8(15)) | (below[j] << np.uint8(4))
                    tile[(2 * j + 1) * (TILE + 1) + i] = (source[j] >> np.uint8(4)) | (below[j] & np.uint8(240))
            for j in range(min(2 * width, k - 2 * j0)):
                target = pointer(p[RearrangeField.TARGET] + (2 * j0 + j) * stride + n0 // 2, _BYTE)
                for i in range(height):
                    target[i] = tile[j * (TILE + 1) + i]


@exact
def _dequantize_channel(field, k, lo, hi, target, scale_tag, tag):
    """target[0:hi - lo] = channel k of outputs lo..hi; lo is even."""
    half, first = (field[ProjectionField.N] + 1) // 2, lo // 2
    at = 2 * (k // field[ProjectionField.GROUP]) * half + first
    size = size_of(scale_tag)
    codes = pointer(field[ProjectionField.WEIGHT] + k * half + first, _BYTE)
    scale = field[ProjectionField.COLUMN_SCALE] + at * size
    scale_even, scale_odd = pointer(scale, scale_tag), pointer(scale + half * size, scale_tag)
    zero = field[ProjectionField.ZERO_POINT] + at
    zero_even, zero_odd = pointer(zero, _BYTE), pointer(zero + half, _BYTE)
    symmetric = field[ProjectionField.ZERO_POINT] == 0
    out = pointer(target, tag)
    for j in range((hi - lo + 1) // 2):
        zero_ = ZERO_CODE if symmetric else np.float32(zero_even[j])
        out[2 * j] = narrow((low_half(codes[j]) - zero_) * widen(scale_even[j]), tag)
    for j in range((hi - lo) // 2):
        zero_ = ZERO_CODE if symmetric else np.float32(zero_odd[j])
        out[2 * j + 1] = narrow((high_half(codes[j]) - zero_) * widen(scale_odd[j]), tag)


@exact
def dequantize(p, tag):
    """Outputs FIRST..LAST of an int4 weight as numbers of ``tag``'s type, (K, LAST - FIRST)."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    field, lo, hi = projection_row(p[DequantizeField.PROJECTION]), p[DequantizeField.FIRST], p[DequantizeField.LAST]
    kind, channels = field[ProjectionField.SCALE_TYPE], field[ProjectionField.K]
    for k in range(channels * part // parts, channels * (part + 1) // parts):
        target = p[DequantizeField.TARGET] + k * (hi - lo) * size_of(tag)
        if kind == ScaleType.BFLOAT16:
            _dequantize_channel(field, k, lo, hi, target, np.uint16(0), tag)
        elif kind == ScaleType.FLOAT16:
            _dequantize_channel(field, k, lo, hi, target, np.int16(0), tag)
        else:
            _dequantize_channel(field, k, lo, hi, target, ZERO, tag)
