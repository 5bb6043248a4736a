"""Compiled: products with int4 weights, whose neighbouring channels share a scale in groups.

    y[n] = sum over groups g of scale[g, n] * (sum over kept k in g of x[k] * code[k, n] - zero[g, n] * sum of x[k])

Codes lie as (K, ceil(N / 2)) bytes: of a channel's outputs 2j and 2j + 1 the first is the low half of byte j. So a kept
channel is one contiguous row, and a scale is read once for all kept channels of its group. Even and odd outputs are
summed apart, and scales and zero points lie that way: (G, 2, ceil(N / 2)). Like all products here, a column's sum is
taken channel by channel in float32, whatever the number of threads and of rows. The definition is ``reference``.
"""

from __future__ import annotations

import numpy as np

from .intrinsics import ZERO, exact, floats, high_half, low_half, narrow, pointer, prefetch, projection_row, widen
from .layout import ProjectionField, ScaleType

__all__ = ["add_grouped", "dequantized"]

_BYTE = np.uint8(0)
_MIDDLE = np.float32(8)  # the code of zero where there are no zero points
# While eight channels are added the next eight are on their way, a few cache lines of each at a time: kept channels
# follow no stride that a processor would guess.
_AHEAD = 8
_TILE = 256  # bytes of a row, of which each holds two weights
_LINE = 64


@exact
def add_grouped(row, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, partial, partial_stride):
    """acc[b, :] = columns lo..hi of one projection over the listed channels; its bias is not added.

    ``partial``: rows of ``partial_stride`` float32, at least ``hi - lo + 2``.
    """
    field = projection_row(row)
    group, half = field[ProjectionField.GROUP], (field[ProjectionField.N] + 1) // 2
    first = lo // 2
    width = (hi + 1) // 2 - first
    codes = field[ProjectionField.WEIGHT] + first
    index_ = pointer(index, np.int32(0))
    for b in range(rows):
        a = floats(acc + 4 * b * acc_stride)
        for j in range(hi - lo):
            a[j] = ZERO
    p = np.int64(0)
    while p < count:
        g = np.int64(index_[p]) // group
        for b in range(rows):
            sums = floats(partial + 4 * b * partial_stride)
            for j in range(2 * width):
                sums[j] = ZERO
        end = p
        while end < count and np.int64(index_[end]) < (g + 1) * group:
            end += 1
        i = p
        while i + 8 <= end:
            _add_eight(codes, half, index_, i, count, value, value_stride, rows, width, partial, partial_stride)
            i += 8
        while i < end:
            _add_one(codes, half, index_, i, count, value, value_stride, rows, width, partial, partial_stride)
            i += 1
        for b in range(rows):
            total = ZERO
            v = floats(value + 4 * b * value_stride)
            for i in range(p, end):
                total += v[i]
            sums, out = partial + 4 * b * partial_stride, acc + 4 * b * acc_stride
            kind = field[ProjectionField.SCALE_TYPE]
            if kind == ScaleType.BFLOAT16:
                _fold(field, g, half, sums, width, total, lo, hi, out, np.uint16(0))
            elif kind == ScaleType.FLOAT16:
                _fold(field, g, half, sums, width, total, lo, hi, out, np.int16(0))
            else:
                _fold(field, g, half, sums, width, total, lo, hi, out, ZERO)
        p = end


@exact
def _add_eight(codes, stride, index, i, count, value, value_stride, rows, width, partial, partial_stride):
    """partial[b, :] += value[b, i:i + 8] @ codes of these channels, even outputs first."""
    for x in range(0, width, _TILE):
        m = min(_TILE, width - x)
        for p in range(i + _AHEAD, min(i + _AHEAD + 8, count)):
            ahead = codes + x + np.int64(index[p]) * stride
            for line in range(0, m, _LINE):
                prefetch(ahead + line)
        r0 = pointer(codes + x + np.int64(index[i]) * stride, _BYTE)
        r1 = pointer(codes + x + np.int64(index[i + 1]) * stride, _BYTE)
        r2 = pointer(codes + x + np.int64(index[i + 2]) * stride, _BYTE)
        r3 = pointer(codes + x + np.int64(index[i + 3]) * stride, _BYTE)
        r4 = pointer(codes + x + np.int64(index[i + 4]) * stride, _BYTE)
        r5 = pointer(codes + x + np.int64(index[i + 5]) * stride, _BYTE)
        r6 = pointer(codes + x + np.int64(index[i + 6]) * stride, _BYTE)
        r7 = pointer(codes + x + np.int64(index[i + 7]) * stride, _BYTE)
        for b in range(rows):
            v = floats(value + 4 * (b * value_stride + i))
            v0, v1, v2, v3, v4, v5, v6, v7 = v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]
            even = floats(partial + 4 * (b * partial_stride + x))
            odd = floats(partial + 4 * (b * partial_stride + width + x))
            for j in range(m):
                s, t = even[j], odd[j]
                c = r0[j]
                s += v0 * low_half(c)
                t += v0 * high_half(c)
                c = r1[j]
                s += v1 * low_half(c)
                t += v1 * high_half(c)
                c = r2[j]
                s += v2 * low_half(c)
                t += v2 * high_half(c)
                c = r3[j]
                s += v3 * low_half(c)
                t += v3 * high_half(c)
                c = r4[j]
                s += v4 * low_half(c)
                t += v4 * high_half(c)
                c = r5[j]
                s += v5 * low_half(c)
                t += v5 * high_half(c)
                c = r6[j]
                s += v6 * low_half(c)
                t += v6 * high_half(c)
                c = r7[j]
                s += v7 * low_half(c)
                t += v7 * high_half(c)
                even[j], odd[j] = s, t


@exact
def _add_one(codes, stride, index, i, count, value, value_stride, rows, width, partial, partial_stride):
    """The same for one channel."""
    if i + _AHEAD < count:
        ahead = codes + np.int64(index[i + _AHEAD]) * stride
        for line in range(0, width, _LINE):
            prefetch(ahead + line)
    r0 = pointer(codes + np.int64(index[i]) * stride, _BYTE)
    for b in range(rows):
        v0 = floats(value + 4 * b * value_stride)[i]
        even = floats(partial + 4 * b * partial_stride)
        odd = floats(partial + 4 * (b * partial_stride + width))
        for j in range(width):
            c = r0[j]
            even[j] += v0 * low_half(c)
            odd[j] += v0 * high_half(c)


@exact
def _fold(field, g, half, sums, width, total, lo, hi, out, tag):
    """out += scale * (sums - zero * total) for the columns lo..hi of group g; ``sums`` begins at an even column."""
    first = lo // 2
    size = 4 if field[ProjectionField.SCALE_TYPE] == ScaleType.FLOAT32 else 2
    even, odd = floats(sums), floats(sums + 4 * width)
    scale = field[ProjectionField.COLUMN_SCALE] + (2 * g * half + first) * size
    scale_even, scale_odd = pointer(scale, tag), pointer(scale + half * size, tag)
    if field[ProjectionField.ZERO_POINT] == 0:
        middle = _MIDDLE * total
        for j in range(width):
            even[j] = (even[j] - middle) * widen(scale_even[j])
            odd[j] = (odd[j] - middle) * widen(scale_odd[j])
    else:
        zero = field[ProjectionField.ZERO_POINT] + 2 * g * half + first
        zero_even, zero_odd = pointer(zero, _BYTE), pointer(zero + half, _BYTE)
        for j in range(width):
            even[j] = (even[j] - np.float32(zero_even[j]) * total) * widen(scale_even[j])
            odd[j] = (odd[j] - np.float32(zero_odd[j]) * total) * widen(scale_odd[j])
    # A pair of columns may belong to two spans: whole pairs first.
    out_ = floats(out)
    skip, rest = lo % 2, hi % 2
    for j in range(skip, width - rest):
        out_[2 * j - skip] += even[j]
        out_[2 * j + 1 - skip] += odd[j]
    if skip == 1:
        out_[0] += odd[0]
    if rest == 1:
        out_[hi - lo - 1] += even[width - 1]


@exact
def dequantized(row, k, lo, hi, target, tag):
    """target[0:hi - lo] = channel k of the columns lo..hi as numbers of ``tag``'s type; lo is even."""
    field = projection_row(row)
    g, half = k // field[ProjectionField.GROUP], (field[ProjectionField.N] + 1) // 2
    kind = field[ProjectionField.SCALE_TYPE]
    if kind == ScaleType.BFLOAT16:
        _dequantized(field, k, g, half, lo, hi, target, np.uint16(0), 2, tag)
    elif kind == ScaleType.FLOAT16:
        _dequantized(field, k, g, half, lo, hi, target, np.int16(0), 2, tag)
    else:
        _dequantized(field, k, g, half, lo, hi, target, ZERO, 4, tag)


@exact
def _dequantized(field, k, g, half, lo, hi, target, scale_tag, size, tag):
    first = lo // 2
    codes = pointer(field[ProjectionField.WEIGHT] + k * half + first, _BYTE)
    scale = field[ProjectionField.COLUMN_SCALE] + (2 * g * half + first) * size
    scale_even, scale_odd = pointer(scale, scale_tag), pointer(scale + half * size, scale_tag)
    zero = field[ProjectionField.ZERO_POINT] + 2 * g * half + first
    zero_even, zero_odd = pointer(zero, _BYTE), pointer(zero + half, _BYTE)
    middle = field[ProjectionField.ZERO_POINT] == 0
    out = pointer(target, tag)
    for j in range((hi - lo + 1) // 2):
        zero_ = _MIDDLE if middle else np.float32(zero_even[j])
        out[2 * j] = narrow((low_half(codes[j]) - zero_) * widen(scale_even[j]), tag)
    for j in range((hi - lo) // 2):
        zero_ = _MIDDLE if middle else np.float32(zero_odd[j])
        out[2 * j + 1] = narrow((high_half(codes[j]) - zero_) * widen(scale_odd[j]), tag)
