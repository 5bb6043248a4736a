"""Compiled: selection of the kept channels, and products over them.

    select:  index = {k : some row has |x_k| * channel_scale_k >= threshold},  value = x_k, 0 where a row drops k
             graded weights: row 2 k (high plane, value 16 x_k) by the first threshold, row 2 k + 1 by the second
    project: y[n] = sum over the list of value_k * weight_t[k, n], + bias

A channel's weights are one contiguous row of ``weight_t`` (K, N). Each thread has a span of columns and adds eight
channels a pass, by float32 fused multiply-adds in the order of k, so results depend neither on the number of threads
nor on the other rows of a batch. The definition is ``reference.sparse_linear``.

An index list is index (count,) int32 and value (rows, value_stride) float32.
"""

from __future__ import annotations

import numpy as np

from .intrinsics import (
    DOTTED,
    FOLDED,
    HAS_PRODUCTS,
    HAS_QUADS,
    LANES,
    LIMB,
    ONE,
    STEP,
    TILE_BYTES,
    TOGETHER,
    ZERO,
    add_folded,
    add_lanes,
    add_nibbles,
    bits_to_float,
    dot,
    exact,
    floats,
    four_dots,
    narrow,
    nibble,
    num_threads,
    pointer,
    prefetch,
    prefetch_rows,
    size_of,
    thread_num,
    widen,
    words,
)
from .layout import CACHE_LINE, LIST_WORDS, MOST_LISTED, DequantizeField, ProjectionField, ScaleType, StoredAs
from .product import add_products

_BYTE, _INT8 = np.uint8(0), np.int8(0)
_ZERO_CODE = np.float32(8)  # the default zero point
_HIGH = np.float32(16)  # factor of the high plane's codes
# Of values that `_add_in_integers` quantizes: the largest integer, the bits of the largest float32, the smallest unit.
_LARGEST_INTEGER, _LARGEST_BITS = np.float32(32639), np.int32(0x7149F2CA)
_SMALLEST_UNIT = np.float32(1e-38)
_INFINITY = np.float32(np.inf)
_ROUNDING = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to an integer


@exact
def keeps(v, scale, threshold):
    """1 if the mask keeps a channel of value v, else 0; a NaN is kept."""
    return 0 if abs(v) * scale < threshold else 1


@exact
def select(x, x_stride, rows, lo, hi, projection, thresholds, index, value, value_stride, counts):
    """List the channels lo..hi (graded: their rows of the weight) that any row keeps; returns their number. Adds the
    number that each row keeps to ``counts``, int64."""
    scale = words(projection)[ProjectionField.SCALE]
    x_, scale_, value_ = floats(x), floats(scale), floats(value)
    threshold, low = floats(thresholds)[0], floats(thresholds)[1]
    index_ = pointer(index, np.int32(0))
    n = 0
    kept = 0
    if words(projection)[ProjectionField.PLANES] == 2 and rows == 1:
        for k in range(lo, hi):
            v, of = x_[k], scale_[k] if scale != 0 else _INFINITY
            index_[n], value_[n] = np.int32(2 * k), _HIGH * v
            n += keeps(v, of, threshold)
            index_[n], value_[n] = np.int32(2 * k + 1), v
            n += keeps(v, of, low)
        kept = n
    elif words(projection)[ProjectionField.PLANES] == 2:
        for k in range(lo, hi):
            for plane in range(2):
                index_[n] = np.int32(2 * k + plane)
                limit, factor = (low, ONE) if plane else (threshold, _HIGH)
                keeping = 0
                for b in range(rows):
                    v = x_[b * x_stride + k]
                    keep = keeps(v, scale_[k], limit) if scale != 0 else 1
                    value_[b * value_stride + n] = factor * v if keep else ZERO
                    keeping += keep
                n += 1 if keeping else 0
                kept += keeping
    elif scale == 0:
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
            n += keeps(v, scale_[k], threshold)
        kept = n
    else:
        for k in range(lo, hi):
            index_[n] = np.int32(k)
            keeping = 0
            for b in range(rows):
                v = x_[b * x_stride + k]
                keep = keeps(v, scale_[k], threshold)
                value_[b * value_stride + n] = v if keep else ZERO
                keeping += keep
            n += 1 if keeping else 0
            kept += keeping
    counts_ = words(counts)
    counts_[0] += kept
    return n


@exact
def gather(segment_index, segment_value, segment_stride, segments, threads, rows, index, value, value_stride):
    """Concatenate the lists of all threads, in the order of channels; returns the length."""
    from_, to = pointer(segment_index, np.int32(0)), pointer(index, np.int32(0))
    segments_ = words(segments)
    n = 0
    for thread in range(threads):
        first, count = segments_[2 * thread], segments_[2 * thread + 1]
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
def _eight_rows(weight, stride, index, p, last):
    """Addresses of the eight rows listed from entry p on; entries beyond ``last`` repeat it."""
    return (
        weight + np.int64(index[min(p, last)]) * stride,
        weight + np.int64(index[min(p + 1, last)]) * stride,
        weight + np.int64(index[min(p + 2, last)]) * stride,
        weight + np.int64(index[min(p + 3, last)]) * stride,
        weight + np.int64(index[min(p + 4, last)]) * stride,
        weight + np.int64(index[min(p + 5, last)]) * stride,
        weight + np.int64(index[min(p + 6, last)]) * stride,
        weight + np.int64(index[min(p + 7, last)]) * stride,
    )


@exact
def _or_zero(values, i, count):
    return values[i] if i < count else ZERO


@exact
def _eight_values(values, count):
    """The first eight values; 0 from ``count`` on."""
    return (
        values[0], _or_zero(values, 1, count), _or_zero(values, 2, count), _or_zero(values, 3, count),
        _or_zero(values, 4, count), _or_zero(values, 5, count), _or_zero(values, 6, count), _or_zero(values, 7, count),
    )  # fmt: skip


@exact
def _add_rows(weight, stride, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, tag):
    """acc[b, :] = sum over the list of value[b, i] * weight[index[i], lo:hi]. The next eight rows are prefetched, as
    the hardware prefetcher cannot predict the addresses of kept channels."""
    width = hi - lo
    size = size_of(tag)
    index_ = pointer(index, np.int32(0))
    weight += lo * size
    stride *= size
    line = CACHE_LINE // size
    whole = width // line * line
    for b in range(rows):
        a = floats(acc + 4 * b * acc_stride)
        for j in range(width):
            a[j] = ZERO
    for p in range(0, count, 8):
        addresses = _eight_rows(weight, stride, index_, p, count - 1)
        next_addresses = _eight_rows(weight, stride, index_, p + 8, count - 1)
        for b in range(rows):
            values = _eight_values(floats(value + 4 * (b * value_stride + p)), count - p)
            out = acc + 4 * b * acc_stride
            for x in range(0, whole, line):
                if b == 0:
                    prefetch_rows(next_addresses, x * size)
                for y in range(x, x + line, min(LANES, line)):
                    add_lanes(out + 4 * y, addresses, values, y * size, tag)
            a = floats(out)
            for j in range(whole, width):
                s = a[j]
                for i in range(8):
                    s += values[i] * widen(pointer(addresses[i], tag)[j])
                a[j] = s


@exact
def _add_grouped(row, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, partial, partial_stride, tag):
    """acc[b, :] = columns lo..hi of an int4 projection, without bias, group by group. ``partial``: scratch memory for
    the sums of one group, (rows, partial_stride) float32, partial_stride >= hi - lo + PARTIAL_EXTRA."""
    field = words(row)
    group, half = field[ProjectionField.GROUP], (field[ProjectionField.N] + 1) // 2
    stride = field[ProjectionField.STRIDE]
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
            for j in range(2 * width + 1):  # the last: the sum of the values that _add_in_integers multiplied
                sums[j] = ZERO
        end = p
        while end < count and np.int64(index_[end]) < (g + 1) * group:
            end += 1
        i = p
        if (
            HAS_PRODUCTS
            and size_of(tag) == 2
            and (HAS_QUADS or field[ProjectionField.PLANES] == 2)
            and group <= MOST_LISTED
        ):
            i = _add_in_integers(
                codes, stride, index, p, end, count, value, value_stride, rows, width, partial, partial_stride
            )
        floats_from = i
        while i < end:
            addresses = _eight_rows(codes, stride, index_, i, end - 1)
            next_addresses = _eight_rows(codes, stride, index_, min(i + 8, end), count - 1)
            for b in range(rows):
                values = _eight_values(floats(value + 4 * (b * value_stride + i)), end - i)
                even = partial + 4 * b * partial_stride
                _add_eight(addresses, next_addresses, values, width, even, even + 4 * width, b == 0)
            i += 8
        for b in range(rows):
            total = floats(partial + 4 * b * partial_stride)[2 * width]
            v = floats(value + 4 * b * value_stride)
            for i in range(floats_from, end):
                total += v[i]
            sums, out = partial + 4 * b * partial_stride, acc + 4 * b * acc_stride
            kind = field[ProjectionField.SCALE_TYPE]
            if kind == ScaleType.BFLOAT16:
                _add_scaled(field, g, half, sums, width, total, lo, hi, out, np.uint16(0))
            elif kind == ScaleType.FLOAT16:
                _add_scaled(field, g, half, sums, width, total, lo, hi, out, np.int16(0))
            else:
                _add_scaled(field, g, half, sums, width, total, lo, hi, out, ZERO)
        p = end


@exact
def _add_in_integers(codes, stride, index, p, end, count, value, value_stride, rows, width, partial, partial_stride):
    """partial[b, :] += values @ codes in integers, several times as fast; the sum of the values follows the sums. values:
    value[b, p:end] rounded to multiples of 1 / 32639 of the row's largest, thus by at most 1 / 64,000 of it.
    Returns the entry reached: ``end``, or ``p`` if a value is too large or not finite, and the caller must use floats."""
    whole = width // TILE_BYTES * TILE_BYTES
    listed, magnitude = pointer(index, np.int32(0)), np.int32(0x7FFFFFFF)
    for b in range(rows):
        bits = pointer(value + 4 * (b * value_stride + p), np.int32(0))
        largest = np.int32(0)
        for i in range(end - p):
            largest = max(largest, bits[i] & magnitude)
        if largest > _LARGEST_BITS:
            return p
    for b in range(rows):
        of_row = floats(value + 4 * b * value_stride)
        even = partial + 4 * b * partial_stride
        odd = even + 4 * width
        # This row's own list, so that its sums do not depend on other rows: offsets of codes, values, limbs of values.
        offsets = (even + 4 * (partial_stride - LIST_WORDS) + 4) & -8
        quantized = offsets + 8 * (MOST_LISTED + TOGETHER)
        uppers = quantized + 4 * MOST_LISTED
        lowers = uppers + MOST_LISTED
        offset, v = words(offsets), floats(quantized)
        upper, lower = pointer(uppers, _INT8), pointer(lowers, _INT8)
        stop = np.int64(0)
        for i in range(p, end):
            offset[stop], v[stop] = np.int64(listed[i]) * stride, of_row[i]
            stop += 1 if of_row[i] != ZERO else 0
        bits = pointer(quantized, np.int32(0))
        largest = np.int32(0)
        for i in range(stop):
            largest = max(largest, bits[i] & magnitude)
        unit = bits_to_float(largest) / _LARGEST_INTEGER
        inverse = ONE / unit if unit > _SMALLEST_UNIT else ZERO
        padded = (stop + STEP - 1) // STEP * STEP
        for i in range(stop, padded):
            offset[i], v[i] = offset[0], ZERO
        total = ZERO
        for i in range(padded):
            v[i] = (v[i] * inverse + _ROUNDING) - _ROUNDING
            total += v[i]  # exact
            integer = np.int32(v[i])
            limb = (integer + np.int32(1 << (LIMB - 1))) >> np.int32(LIMB)
            upper[i] = np.int8(limb)
            lower[i] = np.int8(integer - (limb << np.int32(LIMB)))
        floats(even)[2 * width] = unit * total
        for i in range(TOGETHER):  # the next group's, to be prefetched
            offset[padded + i] = np.int64(listed[min(end + i, count - 1)]) * stride
        for first in range(0, padded, TOGETHER):
            steps = (min(padded - first, TOGETHER)) // STEP
            for x in range(0, whole, TILE_BYTES):
                if x % CACHE_LINE == 0 and b == 0:
                    for i in range(first + STEP * steps, first + STEP * steps + TOGETHER):
                        prefetch(codes + x + offset[i])
                add_products(
                    codes + x,
                    offsets + 8 * first,
                    uppers + first,
                    lowers + first,
                    steps,
                    even + 4 * x,
                    odd + 4 * x,
                    unit,
                )
        if whole < width:
            even_, odd_ = floats(even), floats(odd)
            for i in range(stop):
                r = pointer(codes + offset[i], _BYTE)
                for j in range(whole, width):
                    even_[j], odd_[j] = _add_pair(even_[j], odd_[j], unit * v[i], r[j])
    return end


@exact
def _add_pair(even, odd, value, byte):
    return even + value * nibble(byte, 0), odd + value * nibble(byte, 4)


@exact
def _add_eight(addresses, next_addresses, values, width, even, odd, prefetches):
    """even += values @ codes of even outputs, odd += the same of odd ones, of eight channels."""
    whole = width // CACHE_LINE * CACHE_LINE
    for x in range(0, whole, CACHE_LINE):
        if prefetches:
            prefetch_rows(next_addresses, x)
        for y in range(x, x + CACHE_LINE, LANES):
            add_nibbles(even + 4 * y, odd + 4 * y, addresses, values, y)
    even_, odd_ = floats(even), floats(odd)
    for j in range(whole, width):
        for i in range(8):
            even_[j], odd_[j] = _add_pair(even_[j], odd_[j], values[i], pointer(addresses[i], _BYTE)[j])


@exact
def _add_scaled(field, g, half, sums, width, total, lo, hi, out, tag):
    """out += scale * (sums - zero * total), columns lo..hi of group g; sums: even columns from lo // 2 * 2 on, then
    odd."""
    at, size = 2 * g * half + lo // 2, size_of(tag)
    even, odd, scales = sums, sums + 4 * width, field[ProjectionField.COLUMN_SCALE] + at * size
    subtracted = _ZERO_CODE * total
    if field[ProjectionField.ZERO_POINT] != 0:
        subtracted = ZERO
        for parity in range(2):
            sum_ = floats(sums + 4 * parity * width)
            zero = pointer(field[ProjectionField.ZERO_POINT] + at + parity * half, _BYTE)
            for j in range(width):
                sum_[j] -= np.float32(zero[j]) * total
    # lo and hi may be odd: pairs of columns first.
    skip, rest = lo % 2, hi % 2
    end = skip + (width - rest - skip) // FOLDED * FOLDED
    out -= 4 * skip
    for j in range(skip, end, FOLDED):
        add_folded(
            out + 8 * j, even + 4 * j, odd + 4 * j, scales + j * size, scales + (half + j) * size, subtracted, tag
        )
    for parity in range(2):
        sum_, out_ = floats(sums + 4 * parity * width), floats(out + 4 * parity)
        scale = pointer(scales + parity * half * size, tag)
        if skip == 1 and parity == 1:
            out_[0] += (sum_[0] - subtracted) * widen(scale[0])
        for j in range(end, width if parity == 0 else width - rest):
            out_[2 * j] += (sum_[j] - subtracted) * widen(scale[j])


@exact
def project(row, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, partial, partial_stride, tag):
    """acc[b, :] = columns lo..hi of a projection, with scales and bias; ``tag``: of the base type."""
    field = words(row)
    weight, n, kind = field[ProjectionField.WEIGHT], field[ProjectionField.N], field[ProjectionField.STORED_AS]
    if kind == StoredAs.INT4:
        _add_grouped(
            row, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, partial, partial_stride, tag
        )
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
def output_rows(weight, k, lo, hi, x, x_stride, rows, scale, out, outputs, vocab, tag):
    """out[outputs[b], lo:hi] = weight[lo:hi] @ x[b], weight (V, K); ``scale``: (V,) float32 of int8, 0: none."""
    size, whole = size_of(tag), k // DOTTED * DOTTED
    outputs_ = words(outputs)
    v = lo
    while v < hi:
        # Four dot products at a time; the last four may overlap the ones before.
        group = min(v, max(lo, hi - 4))
        last = hi - 1
        addresses = (
            weight + group * k * size,
            weight + min(group + 1, last) * k * size,
            weight + min(group + 2, last) * k * size,
            weight + min(group + 3, last) * k * size,
        )
        for b in range(rows):
            x_ = floats(x + 4 * b * x_stride)
            s0, s1, s2, s3 = four_dots(addresses, x + 4 * b * x_stride, whole, 4 * k * size, tag)
            for i in range(whole, k):
                s0 += x_[i] * widen(pointer(addresses[0], tag)[i])
                s1 += x_[i] * widen(pointer(addresses[1], tag)[i])
                s2 += x_[i] * widen(pointer(addresses[2], tag)[i])
                s3 += x_[i] * widen(pointer(addresses[3], tag)[i])
            if scale != 0:
                scale_ = floats(scale)
                s0 *= scale_[group]
                s1 *= scale_[min(group + 1, last)]
                s2 *= scale_[min(group + 2, last)]
                s3 *= scale_[min(group + 3, last)]
            out_ = floats(out + 4 * outputs_[b] * vocab)
            out_[group] = s0
            out_[min(group + 1, last)] = s1
            out_[min(group + 2, last)] = s2
            out_[min(group + 3, last)] = s3
        v += 4


@exact
def _dequantize_channel(field, k, lo, hi, target, scale_tag, tag):
    """target[0:hi - lo] = row k of the weight, outputs lo..hi; lo is even."""
    half, first = (field[ProjectionField.N] + 1) // 2, lo // 2
    at = 2 * (k // field[ProjectionField.GROUP]) * half + first
    codes = pointer(field[ProjectionField.WEIGHT] + k * field[ProjectionField.STRIDE] + first, _BYTE)
    out = pointer(target, tag)
    scales = field[ProjectionField.COLUMN_SCALE] + at * size_of(scale_tag)
    zeros = field[ProjectionField.ZERO_POINT] + at
    even, odd = pointer(scales, scale_tag), pointer(scales + half * size_of(scale_tag), scale_tag)
    if field[ProjectionField.ZERO_POINT] == 0:
        for j in range((hi - lo) // 2):
            out[2 * j] = narrow((nibble(codes[j], 0) - _ZERO_CODE) * widen(even[j]), tag)
            out[2 * j + 1] = narrow((nibble(codes[j], 4) - _ZERO_CODE) * widen(odd[j]), tag)
    else:
        even_zero, odd_zero = pointer(zeros, _BYTE), pointer(zeros + half, _BYTE)
        for j in range((hi - lo) // 2):
            out[2 * j] = narrow((nibble(codes[j], 0) - np.float32(even_zero[j])) * widen(even[j]), tag)
            out[2 * j + 1] = narrow((nibble(codes[j], 4) - np.float32(odd_zero[j])) * widen(odd[j]), tag)
    if (hi - lo) % 2 == 1:
        j = (hi - lo) // 2
        zero = _ZERO_CODE if field[ProjectionField.ZERO_POINT] == 0 else np.float32(pointer(zeros, _BYTE)[j])
        out[2 * j] = narrow((nibble(codes[j], 0) - zero) * widen(even[j]), tag)


@exact
def dequantize(p, tag):
    """Dequantize outputs FIRST..LAST of an int4 weight to ``tag``'s type, (K * PLANES, LAST - FIRST)."""
    threads, thread = np.int64(num_threads()), np.int64(thread_num())
    field, lo, hi = words(p[DequantizeField.PROJECTION]), p[DequantizeField.FIRST], p[DequantizeField.LAST]
    kind, channels = field[ProjectionField.SCALE_TYPE], field[ProjectionField.K] * field[ProjectionField.PLANES]
    for k in range(channels * thread // threads, channels * (thread + 1) // threads):
        target = p[DequantizeField.TARGET] + k * (hi - lo) * size_of(tag)
        if kind == ScaleType.BFLOAT16:
            _dequantize_channel(field, k, lo, hi, target, np.uint16(0), tag)
        elif kind == ScaleType.FLOAT16:
            _dequantize_channel(field, k, lo, hi, target, np.int16(0), tag)
        else:
            _dequantize_channel(field, k, lo, hi, target, ZERO, tag)
