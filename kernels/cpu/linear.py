"""Compiled: which channels are kept, and the products over them.

A kept channel's weights are one contiguous row of ``weight_t`` (K, N). Every thread owns a span of columns; eight rows
are added per pass, each by its own fused multiply-add in the order of k, in float32. So the result depends neither on
the number of threads nor on the other rows of a batch. The definition is ``reference``.
"""

from __future__ import annotations

import numpy as np

from .grouped import add_grouped
from .intrinsics import (
    ZERO,
    dot,
    exact,
    floats,
    pointer,
    projection_row,
    size_of,
    widen,
)  # fmt: skip
from .layout import ProjectionField, StoredAs

__all__ = ["gather", "output_rows", "project", "select"]

_INT8 = np.int8(0)


@exact
def select(x, x_stride, rows, lo, hi, scale, threshold, index, value, value_stride, counts):
    """List the channels lo..hi kept by at least one row, in order; a row that drops one gets the value 0 there.

    Returns their number. ``counts`` grows by the number kept, row by row.
    """
    x_, scale_, value_ = floats(x), floats(scale), floats(value)
    index_ = pointer(index, np.int32(0))
    n = 0
    kept = 0
    if scale == 0:
        for k in range(lo, hi):
            index_[n] = np.int32(k)
            for b in range(rows):
                value_[b * value_stride + n] = x_[b * x_stride + k]
            n += 1
        kept = n * rows
    elif rows == 1:
        for k in range(lo, hi):
            v = x_[k]
            index_[n] = np.int32(k)
            value_[n] = v
            n += 0 if abs(v) * scale_[k] < threshold else 1  # a NaN is kept
        kept = n
    else:
        for k in range(lo, hi):
            index_[n] = np.int32(k)
            here = 0
            for b in range(rows):
                v = x_[b * x_stride + k]
                keep = 0 if abs(v) * scale_[k] < threshold else 1
                value_[b * value_stride + n] = v if keep else ZERO
                here += keep
            n += 1 if here else 0
            kept += here
    counts_ = pointer(counts, np.int64(0))
    counts_[0] += kept
    return n


@exact
def gather(segment_index, segment_value, segment_stride, segments, parts, rows, index, value, value_stride):
    """Join the lists that the threads made, in order of channels. Returns the length."""
    from_, to = pointer(segment_index, np.int32(0)), pointer(index, np.int32(0))
    segments_ = pointer(segments, np.int64(0))
    n = 0
    for part in range(parts):
        first, count = segments_[2 * part], segments_[2 * part + 1]
        for i in range(count):
            to[n + i] = from_[first + i]
        for b in range(rows):
            source = floats(segment_value + 4 * (b * segment_stride + first))
            target = floats(value + 4 * (b * value_stride + n))
            for i in range(count):
                target[i] = source[i]
        n += count
    return n


@exact
def _add_rows(weight, stride, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, tag):
    """acc[b, :] = sum over the list of value[b, i] * weight[index[i], lo:hi]."""
    width = hi - lo
    size = size_of(tag)
    index_ = pointer(index, np.int32(0))
    weight += lo * size
    stride *= size
    for b in range(rows):
        a = floats(acc + 4 * b * acc_stride)
        for j in range(width):
            a[j] = ZERO
    p = 0
    while p + 8 <= count:
        r0 = pointer(weight + np.int64(index_[p]) * stride, tag)
        r1 = pointer(weight + np.int64(index_[p + 1]) * stride, tag)
        r2 = pointer(weight + np.int64(index_[p + 2]) * stride, tag)
        r3 = pointer(weight + np.int64(index_[p + 3]) * stride, tag)
        r4 = pointer(weight + np.int64(index_[p + 4]) * stride, tag)
        r5 = pointer(weight + np.int64(index_[p + 5]) * stride, tag)
        r6 = pointer(weight + np.int64(index_[p + 6]) * stride, tag)
        r7 = pointer(weight + np.int64(index_[p + 7]) * stride, tag)
        for b in range(rows):
            v = floats(value + 4 * (b * value_stride + p))
            v0, v1, v2, v3, v4, v5, v6, v7 = v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]
            a = floats(acc + 4 * b * acc_stride)
            for j in range(width):
                s = a[j]
                s += v0 * widen(r0[j])
                s += v1 * widen(r1[j])
                s += v2 * widen(r2[j])
                s += v3 * widen(r3[j])
                s += v4 * widen(r4[j])
                s += v5 * widen(r5[j])
                s += v6 * widen(r6[j])
                s += v7 * widen(r7[j])
                a[j] = s
        p += 8
    while p < count:
        r0 = pointer(weight + np.int64(index_[p]) * stride, tag)
        for b in range(rows):
            v0 = floats(value + 4 * (b * value_stride))[p]
            a = floats(acc + 4 * b * acc_stride)
            for j in range(width):
                a[j] += v0 * widen(r0[j])
        p += 1


@exact
def project(row, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, partial, partial_stride, tag):
    """acc[b, :] = columns lo..hi of one projection, with its scales and bias; ``tag`` is the base type's.

    ``partial``: scratch, see `add_grouped`.
    """
    field = projection_row(row)
    weight, n, kind = field[ProjectionField.WEIGHT], field[ProjectionField.N], field[ProjectionField.STORED_AS]
    if kind == StoredAs.INT4:
        add_grouped(row, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, partial, partial_stride)
    elif kind == StoredAs.INT8:
        _add_rows(weight, n, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, _INT8)
        column_scale = floats(field[ProjectionField.COLUMN_SCALE] + 4 * lo)
        for b in range(rows):
            a = floats(acc + 4 * b * acc_stride)
            for j in range(hi - lo):
                a[j] *= column_scale[j]
    else:
        _add_rows(weight, n, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, tag)
    if field[ProjectionField.BIAS] != 0:
        bias = floats(field[ProjectionField.BIAS] + 4 * lo)
        for b in range(rows):
            a = floats(acc + 4 * b * acc_stride)
            for j in range(hi - lo):
                a[j] += bias[j]


@dot
def output_rows(weight, k, lo, hi, x, x_stride, rows, scale, out, slots, vocab, tag):
    """Dot products of the rows lo..hi of a (V, K) matrix, four at a time, with every x."""
    size = size_of(tag)
    slots_ = pointer(slots, np.int64(0))
    v = lo
    while v < hi:
        # The last rows are computed again rather than by another loop; never rows of a neighbour's span.
        group = min(v, max(lo, hi - 4))
        last = hi - 1
        r0 = pointer(weight + group * k * size, tag)
        r1 = pointer(weight + min(group + 1, last) * k * size, tag)
        r2 = pointer(weight + min(group + 2, last) * k * size, tag)
        r3 = pointer(weight + min(group + 3, last) * k * size, tag)
        for b in range(rows):
            x_ = floats(x + 4 * b * x_stride)
            s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
            for i in range(k):
                y = x_[i]
                s0 += y * widen(r0[i])
                s1 += y * widen(r1[i])
                s2 += y * widen(r2[i])
                s3 += y * widen(r3[i])
            if scale != 0:
                scale_ = floats(scale)
                s0 *= scale_[group]
                s1 *= scale_[min(group + 1, last)]
                s2 *= scale_[min(group + 2, last)]
                s3 *= scale_[min(group + 3, last)]
            out_ = floats(out + 4 * slots_[b] * vocab)
            out_[group] = s0
            out_[min(group + 1, last)] = s1
            out_[min(group + 2, last)] = s2
            out_[min(group + 3, last)] = s3
        v += 4
