"""Every compiled function of the CPU back end: selection, sparse products, norms, rotary, attention, one decode step.

All of it stands in one file on purpose: numba's disk cache notices a change of the file a function is defined in and of
no other, so code that calls across files would go stale after an upgrade.

A *region* is ``void region(int64 *parameters)``, run once by every thread of an OpenMP team (``cpu_threads``). Threads
own spans of output columns and meet at barriers. A kept channel's weights are one contiguous row of ``weight_t`` (K, N);
eight rows are added per pass, each by its own fused multiply-add in the order of k, in float32. Hence the result depends
neither on the number of threads nor on the other rows of a batch. A weight's type is told by the type of its bits:

    float32 -> float32        uint16 -> bfloat16        int16 -> float16        int8 -> int8, scaled per output column

Activations are float32. Addresses travel as int64, 0 for "none". The definition all this must agree with is ``reference``.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

__all__ = ["REGIONS", "SYMBOLS", "TILE", "LayoutField", "LinearField", "ProjectionField", "StepField"]

# OpenMP's functions under names of our own, registered by `cpu_threads` before any code is loaded.
SYMBOLS = ("wisparse_omp_barrier", "wisparse_omp_thread_num", "wisparse_omp_num_threads")
_barrier = types.ExternalFunction(SYMBOLS[0], types.void())
_thread_num = types.ExternalFunction(SYMBOLS[1], types.int32())
_num_threads = types.ExternalFunction(SYMBOLS[2], types.int32())

_float32 = types.float32
_ZERO, _ONE = np.float32(0), np.float32(1)
_ALIGN = 32  # columns: 64 bytes of bfloat16, so that threads share no cache line of a row
TILE = 64
_FIELDS = 64  # at least as many as any region has


class ProjectionField(IntEnum):
    """One row of the table of projections (int64)."""

    WEIGHT = 0  # (K, N)
    N = 1
    K = 2
    SCALE = 3  # channel_scale (K,) float32; 0: dense
    BIAS = 4  # (N,) float32 or 0
    COLUMN_SCALE = 5  # (N,) float32, int8 weights only, else 0


class LinearField(IntEnum):
    """Parameters of the region that computes one projection."""

    PROJECTION = 0  # one row of the table above
    THRESHOLD = 1  # () float32
    ROWS = 2
    X = 3  # (rows, K) float32
    Y = 4  # (rows, N) float32
    SEGMENT_INDEX = 5  # (K,) int32
    SEGMENT_VALUE = 6  # (rows, K) float32
    SEGMENT_COUNT = 7  # (threads, 2) int64
    LISTS = 8  # per thread: (K,) int32, then (rows, K) float32
    COUNTS = 9  # (threads,) int64, kept channels are added


class LayoutField(IntEnum):
    """Parameters of the regions that transpose or quantise one weight."""

    SOURCE = 0  # (rows, K): some rows of a weight (N, K)
    ROWS = 1
    K = 2
    TARGET = 3  # where the first of these rows goes: a column of (K, N), or a row of (N, K) if TRANSPOSED is 0
    STRIDE = 4  # N
    TRANSPOSED = 5
    SCALE = 6  # (rows,) float32, written by the quantisation
    TILES = 7  # per thread: TILE * (TILE + 1) elements of 4 bytes


class StepField(IntEnum):
    """Parameters of the region that decodes one token for each of ``rows`` slots."""

    ROWS = 0
    SLOTS = 1  # (rows,) int64
    TOKENS = 2  # (rows,) int64
    POSITIONS = 3  # (rows,) int64
    HIDDEN = 4
    INTERMEDIATE = 5
    HEADS = 6
    KV_HEADS = 7
    HEAD_DIM = 8
    ROTARY_HALF = 9
    MAX_LEN = 10
    MAX_BATCH = 11
    NUM_BLOCKS = 12
    NUM_QKV = 13  # projections of the group: 3, or 1 if fused
    NUM_GATE_UP = 14  # 2, or 1 if fused
    VOCAB = 15
    EMBEDDING = 16  # (V, hidden), the base type
    HEAD = 17  # (V, hidden)
    HEAD_SCALE = 18  # (V,) float32 or 0
    NORMS = 19  # (2 * blocks + 1, hidden) float32: input and post-attention norm of every block, then the final one
    HEAD_NORMS = 20  # (2 * blocks, head_dim) float32: of q and of k; 0: none
    COS = 21  # (max_len, rotary_half) float32
    SIN = 22
    WINDOWS = 23  # (blocks,) int64, 0: attends to everything
    KEYS = 24  # (blocks, max_batch, kv_heads, max_len, head_dim), the base type
    VALUES = 25
    PROJECTIONS = 26  # the table, block by block
    THRESHOLDS = 27  # one float32 for each of its rows
    FLOATS = 28  # float32: rms_norm_eps, attention scale
    RESIDUAL = 29  # (rows, hidden) float32
    QKV = 30  # (rows, q + 2 kv) float32
    SEGMENT_INDEX = 31  # (max(q, intermediate),) int32
    SEGMENT_VALUE = 32  # (rows, max(q, intermediate)) float32
    SEGMENT_COUNT = 33  # (threads, 2) int64
    SCORES = 34  # (heads, max_len) float32
    SCRATCH = 35  # per thread, see `_step`
    SCRATCH_BYTES = 36
    LIST_LENGTH = 37  # longest K
    ACC_LENGTH = 38  # widest N of an accumulator
    COUNTS = 39  # (threads, projections) int64, kept channels are added; then (threads,) that nobody reads
    LOGITS = 40  # (slots, V) float32


# --- what numba lacks: raw pointers, and half-precision loads and stores ---------------------------------------------


@intrinsic
def _pointer(typingctx, address, tag):
    """An int64 as a pointer to elements of ``tag``'s type; ``tag``'s value is ignored."""
    result = types.CPointer(tag)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, tag), codegen


@intrinsic
def _size(typingctx, tag):
    """Bytes of one element of ``tag``'s type."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(64), tag.bitwidth // 8)

    return types.int64(tag), codegen


@intrinsic
def _widen(typingctx, value):
    """One stored weight as float32, exactly."""
    i32, f32 = ir.IntType(32), ir.FloatType()

    def codegen(context, builder, signature, args):
        if value == types.uint16:  # bfloat16 is the upper half of a float32
            return builder.bitcast(builder.shl(builder.zext(args[0], i32), ir.Constant(i32, 16)), f32)
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), f32)
        if value == types.int8:
            return builder.sitofp(args[0], f32)
        return args[0]

    return types.float32(value), codegen


@intrinsic
def _narrow(typingctx, value, tag):
    """A float32 rounded to nearest even, as ``tag``'s type stores it (float32, bfloat16 or float16)."""
    i16, i32 = ir.IntType(16), ir.IntType(32)

    def codegen(context, builder, signature, args):
        if tag == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), i16)
        if tag != types.uint16:
            return args[0]
        bits = builder.bitcast(args[0], i32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(i32, 0x7FFF)))
        # Rounding up could carry a NaN's payload into the sign: keep it a quiet NaN.
        quiet = builder.or_(bits, ir.Constant(i32, 0x400000))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), ir.Constant(i32, 16)), i16)

    return tag(types.float32, tag), codegen


@intrinsic
def _bits_to_float(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


# "contract" fuses a multiplication and an addition, and changes nothing between one machine's vector widths;
# "reassoc" reorders sums, for dot products only, whose order is fixed once compiled.
_exact = njit(error_model="numpy", fastmath={"contract"})
_dot = njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@_exact
def _floats(address):
    return _pointer(address, _ZERO)


@_exact
def _row(address):
    """A row of the table of projections, to be indexed by ``ProjectionField``."""
    return carray(_pointer(address, np.int64(0)), (6,))


@_exact
def _span(length, part, parts):
    """Where a thread's span of columns begins (``part``) and ends (``part + 1``), on a multiple of ``_ALIGN``."""
    units = (length + _ALIGN - 1) // _ALIGN
    return min(length, units * part // parts * _ALIGN)


@_exact
def _exp(x):
    """e**x in float32, within 2 units in the last place; vectorises, unlike the C library's (Cephes' expf)."""
    y = min(max(x, np.float32(-87.3)), np.float32(88.7))
    magic = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    z = (y * np.float32(1.44269504088896341) + magic) - magic
    r = y - z * np.float32(0.693359375) + z * np.float32(2.12194440e-4)
    s = np.float32(1.9875691500e-4)
    s = s * r + np.float32(1.3981999507e-3)
    s = s * r + np.float32(8.3334519073e-3)
    s = s * r + np.float32(4.1665795894e-2)
    s = s * r + np.float32(1.6666665459e-1)
    s = s * r + np.float32(5.0000001201e-1)
    s = s * r * r + r + _ONE
    # Two factors, because 2**128 is not a float32 although e**88.7 is.
    half = np.int32(z) >> np.int32(1)
    first = _bits_to_float(np.int32((half + np.int32(127)) << np.int32(23)))
    second = _bits_to_float(np.int32((np.int32(z) - half + np.int32(127)) << np.int32(23)))
    return s * first * second if x == x else x


# --- selection and products ------------------------------------------------------------------------------------------


@_exact
def _select(x, x_stride, rows, lo, hi, scale, threshold, index, value, value_stride, counts):
    """List the channels lo..hi kept by at least one row, in order; a row that drops one gets the value 0 there.

    Returns their number. ``counts`` grows by the number kept, row by row.
    """
    x_, scale_, value_ = _floats(x), _floats(scale), _floats(value)
    index_ = _pointer(index, np.int32(0))
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
                value_[b * value_stride + n] = v if keep else _ZERO
                here += keep
            n += 1 if here else 0
            kept += here
    counts_ = _pointer(counts, np.int64(0))
    counts_[0] += kept
    return n


@_exact
def _gather(segment_index, segment_value, segment_stride, segments, parts, rows, index, value, value_stride):
    """Join the lists that the threads made, in order of channels. Returns the length."""
    from_, to = _pointer(segment_index, np.int32(0)), _pointer(index, np.int32(0))
    segments_ = _pointer(segments, np.int64(0))
    n = 0
    for part in range(parts):
        first, count = segments_[2 * part], segments_[2 * part + 1]
        for i in range(count):
            to[n + i] = from_[first + i]
        for b in range(rows):
            source = _floats(segment_value + 4 * (b * segment_stride + first))
            target = _floats(value + 4 * (b * value_stride + n))
            for i in range(count):
                target[i] = source[i]
        n += count
    return n


@_exact
def _add_rows(weight, stride, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, tag):
    """acc[b, :] = sum over the list of value[b, i] * weight[index[i], lo:hi]."""
    width = hi - lo
    size = _size(tag)
    index_ = _pointer(index, np.int32(0))
    weight += lo * size
    stride *= size
    for b in range(rows):
        a = _floats(acc + 4 * b * acc_stride)
        for j in range(width):
            a[j] = _ZERO
    p = 0
    while p + 8 <= count:
        r0 = _pointer(weight + np.int64(index_[p]) * stride, tag)
        r1 = _pointer(weight + np.int64(index_[p + 1]) * stride, tag)
        r2 = _pointer(weight + np.int64(index_[p + 2]) * stride, tag)
        r3 = _pointer(weight + np.int64(index_[p + 3]) * stride, tag)
        r4 = _pointer(weight + np.int64(index_[p + 4]) * stride, tag)
        r5 = _pointer(weight + np.int64(index_[p + 5]) * stride, tag)
        r6 = _pointer(weight + np.int64(index_[p + 6]) * stride, tag)
        r7 = _pointer(weight + np.int64(index_[p + 7]) * stride, tag)
        for b in range(rows):
            v = _floats(value + 4 * (b * value_stride + p))
            v0, v1, v2, v3, v4, v5, v6, v7 = v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]
            a = _floats(acc + 4 * b * acc_stride)
            for j in range(width):
                s = a[j]
                s += v0 * _widen(r0[j])
                s += v1 * _widen(r1[j])
                s += v2 * _widen(r2[j])
                s += v3 * _widen(r3[j])
                s += v4 * _widen(r4[j])
                s += v5 * _widen(r5[j])
                s += v6 * _widen(r6[j])
                s += v7 * _widen(r7[j])
                a[j] = s
        p += 8
    while p < count:
        r0 = _pointer(weight + np.int64(index_[p]) * stride, tag)
        for b in range(rows):
            v0 = _floats(value + 4 * (b * value_stride))[p]
            a = _floats(acc + 4 * b * acc_stride)
            for j in range(width):
                a[j] += v0 * _widen(r0[j])
        p += 1


@_exact
def _project(row, index, value, count, value_stride, rows, lo, hi, acc, acc_stride, tag):
    """acc[b, :] = columns lo..hi of one projection, with its column scale and bias."""
    field = _row(row)
    _add_rows(
        field[ProjectionField.WEIGHT], field[ProjectionField.N], index, value, count, value_stride, rows, lo, hi, acc,
        acc_stride, tag,
    )  # fmt: skip
    if field[ProjectionField.COLUMN_SCALE] != 0:
        column_scale = _floats(field[ProjectionField.COLUMN_SCALE] + 4 * lo)
        for b in range(rows):
            a = _floats(acc + 4 * b * acc_stride)
            for j in range(hi - lo):
                a[j] *= column_scale[j]
    if field[ProjectionField.BIAS] != 0:
        bias = _floats(field[ProjectionField.BIAS] + 4 * lo)
        for b in range(rows):
            a = _floats(acc + 4 * b * acc_stride)
            for j in range(hi - lo):
                a[j] += bias[j]


@_exact
def _linear(p, tag):
    """One projection: every thread selects on its span of channels, then computes its span of columns."""
    parts, part = np.int64(_num_threads()), np.int64(_thread_num())
    field = _row(p[LinearField.PROJECTION])
    n, k = field[ProjectionField.N], field[ProjectionField.K]
    rows = p[LinearField.ROWS]
    segments = _pointer(p[LinearField.SEGMENT_COUNT], np.int64(0))
    first = _span(k, part, parts)
    count = _select(
        p[LinearField.X], k, rows, first, _span(k, part + 1, parts), field[ProjectionField.SCALE],
        _floats(p[LinearField.THRESHOLD])[0], p[LinearField.SEGMENT_INDEX] + 4 * first,
        p[LinearField.SEGMENT_VALUE] + 4 * first, k, p[LinearField.COUNTS] + 8 * part,
    )  # fmt: skip
    segments[2 * part], segments[2 * part + 1] = first, count
    _barrier()
    index = p[LinearField.LISTS] + part * 4 * k * (1 + rows)
    value = index + 4 * k
    count = _gather(
        p[LinearField.SEGMENT_INDEX], p[LinearField.SEGMENT_VALUE], k, p[LinearField.SEGMENT_COUNT], parts, rows, index,
        value, k,
    )  # fmt: skip
    lo, hi = _span(n, part, parts), _span(n, part + 1, parts)
    _project(p[LinearField.PROJECTION], index, value, count, k, rows, lo, hi, p[LinearField.Y] + 4 * lo, n, tag)


@_dot
def _rms_norm(x, weight, n, eps, out):
    x_, weight_, out_ = _floats(x), _floats(weight), _floats(out)
    total = _ZERO
    for i in range(n):
        total += x_[i] * x_[i]
    factor = _ONE / np.float32(math.sqrt(total / np.float32(n) + eps))
    for i in range(n):
        out_[i] = x_[i] * factor * weight_[i]


@_dot
def _head(weight, k, lo, hi, x, x_stride, rows, scale, out, slots, vocab, tag):
    """Dot products of the rows lo..hi of a (V, K) matrix, four at a time, with every x."""
    size = _size(tag)
    slots_ = _pointer(slots, np.int64(0))
    v = lo
    while v < hi:
        # The last rows are computed again rather than by another loop; never rows of a neighbour's span.
        group = min(v, max(lo, hi - 4))
        last = hi - 1
        r0 = _pointer(weight + group * k * size, tag)
        r1 = _pointer(weight + min(group + 1, last) * k * size, tag)
        r2 = _pointer(weight + min(group + 2, last) * k * size, tag)
        r3 = _pointer(weight + min(group + 3, last) * k * size, tag)
        for b in range(rows):
            x_ = _floats(x + 4 * b * x_stride)
            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
            for i in range(k):
                y = x_[i]
                s0 += y * _widen(r0[i])
                s1 += y * _widen(r1[i])
                s2 += y * _widen(r2[i])
                s3 += y * _widen(r3[i])
            if scale != 0:
                scale_ = _floats(scale)
                s0 *= scale_[group]
                s1 *= scale_[min(group + 1, last)]
                s2 *= scale_[min(group + 2, last)]
                s3 *= scale_[min(group + 3, last)]
            out_ = _floats(out + 4 * slots_[b] * vocab)
            out_[group] = s0
            out_[min(group + 1, last)] = s1
            out_[min(group + 2, last)] = s2
            out_[min(group + 3, last)] = s3
        v += 4


# --- attention -------------------------------------------------------------------------------------------------------


@_exact
def _rotate(x, dim, half, cos, sin, norm, eps, out):
    """A head's q or k: optional RMSNorm, then the rotary embedding of its first ``2 * half`` entries."""
    x_, out_, cos_, sin_ = _floats(x), _floats(out), _floats(cos), _floats(sin)
    if norm != 0:
        _rms_norm(x, norm, dim, eps, out)
    else:
        for i in range(dim):
            out_[i] = x_[i]
    for i in range(half):
        a, b = out_[i], out_[i + half]
        out_[i] = a * cos_[i] - b * sin_[i]
        out_[i + half] = b * cos_[i] + a * sin_[i]


@_dot
def _attend(q, heads, keys, values, start, end, dim, scale, scores, max_len, out, tag):
    """softmax(scale * q k^T) v for the heads that share one key-value head.

    q (heads, dim), keys and values (max_len, dim) of which start..end are attended to, scores (heads, max_len) is scratch.
    """
    size = _size(tag)
    for h in range(heads):
        q_, s_ = _floats(q + 4 * h * dim), _floats(scores + 4 * h * max_len)
        for i in range(start, end):
            key = _pointer(keys + i * dim * size, tag)
            s = _ZERO
            for d in range(dim):
                s += q_[d] * _widen(key[d])
            s_[i] = s * scale
    for h in range(heads):
        s_, out_ = _floats(scores + 4 * h * max_len), _floats(out + 4 * h * dim)
        top = s_[start]
        for i in range(start, end):
            top = max(top, s_[i])
        total = _ZERO
        for i in range(start, end):
            e = _exp(s_[i] - top)
            s_[i] = e
            total += e
        for d in range(dim):
            out_[d] = _ZERO
        i = start
        while i < end:
            # Four positions per pass; beyond the end the weight is 0 and the last row is read again.
            e0 = s_[i]
            e1 = s_[i + 1] if i + 1 < end else _ZERO
            e2 = s_[i + 2] if i + 2 < end else _ZERO
            e3 = s_[i + 3] if i + 3 < end else _ZERO
            v0 = _pointer(values + i * dim * size, tag)
            v1 = _pointer(values + min(i + 1, end - 1) * dim * size, tag)
            v2 = _pointer(values + min(i + 2, end - 1) * dim * size, tag)
            v3 = _pointer(values + min(i + 3, end - 1) * dim * size, tag)
            for d in range(dim):
                out_[d] += e0 * _widen(v0[d]) + e1 * _widen(v1[d]) + e2 * _widen(v2[d]) + e3 * _widen(v3[d])
            i += 4
        factor = _ONE / total
        for d in range(dim):
            out_[d] *= factor


@_exact
def _attention(p, block, part, parts, out, scratch, tag):
    """Attention of this thread's span of heads, for every row; appends k and v to the cache on the way.

    ``out`` (rows, q_size) is this thread's own; only its heads' columns are written.
    """
    rows, heads, kv_heads = p[StepField.ROWS], p[StepField.HEADS], p[StepField.KV_HEADS]
    dim, half, max_len = p[StepField.HEAD_DIM], p[StepField.ROTARY_HALF], p[StepField.MAX_LEN]
    floats = _floats(p[StepField.FLOATS])
    eps, scale = floats[0], floats[1]
    slots, positions = _pointer(p[StepField.SLOTS], np.int64(0)), _pointer(p[StepField.POSITIONS], np.int64(0))
    window = _pointer(p[StepField.WINDOWS], np.int64(0))[block]
    size = _size(tag)
    q_size, width, share = heads * dim, (heads + 2 * kv_heads) * dim, heads // kv_heads
    q_norm = k_norm = np.int64(0)
    if p[StepField.HEAD_NORMS] != 0:
        q_norm = p[StepField.HEAD_NORMS] + 4 * 2 * block * dim
        k_norm = q_norm + 4 * dim
    first, last = heads * part // parts, heads * (part + 1) // parts
    for b in range(rows):
        qkv = p[StepField.QKV] + 4 * b * width
        position = positions[b]
        cos, sin = p[StepField.COS] + 4 * position * half, p[StepField.SIN] + 4 * position * half
        start = max(0, position + 1 - window) if window > 0 else 0
        h = first
        while h < last:
            group = h // share
            stop = min(last, (group + 1) * share)
            row = (((block * p[StepField.MAX_BATCH] + slots[b]) * kv_heads + group) * max_len) * dim * size
            keys, values = p[StepField.KEYS] + row, p[StepField.VALUES] + row
            # A group shared by two threads is appended by both, with the same bits.
            _rotate(qkv + 4 * (q_size + group * dim), dim, half, cos, sin, k_norm, eps, scratch)
            rotated, fresh = _floats(scratch), _floats(qkv + 4 * (q_size + (kv_heads + group) * dim))
            key, value = _pointer(keys + position * dim * size, tag), _pointer(values + position * dim * size, tag)
            for d in range(dim):
                key[d] = _narrow(rotated[d], tag)
                value[d] = _narrow(fresh[d], tag)
            for i in range(h, stop):
                _rotate(qkv + 4 * i * dim, dim, half, cos, sin, q_norm, eps, scratch + 4 * (i - h) * dim)
            _attend(
                scratch, stop - h, keys, values, start, position + 1, dim, scale, p[StepField.SCORES] + 4 * h * max_len,
                max_len, out + 4 * (b * q_size + h * dim), tag,
            )  # fmt: skip
            h = stop
    return first * dim, last * dim


# --- one decode step -------------------------------------------------------------------------------------------------


@_exact
def _add(residual, hidden, acc, acc_stride, rows, lo, hi):
    for b in range(rows):
        r, a = _floats(residual + 4 * (b * hidden + lo)), _floats(acc + 4 * b * acc_stride)
        for j in range(hi - lo):
            r[j] += a[j]


@_exact
def _silu_times(gate, up, stride, rows, width):
    """gate = SiLU(gate) * up."""
    for b in range(rows):
        g, u = _floats(gate + 4 * b * stride), _floats(up + 4 * b * stride)
        for j in range(width):
            g[j] = g[j] / (_ONE + _exp(-g[j])) * u[j]


@_exact
def _step(p, tag, head_tag, base_tag):
    """One token for every row: embedding, blocks, final norm, logits. Five barriers a block.

    A thread's scratch: normed (rows, hidden), two accumulators (rows, acc_length), an index list (list_length) and its
    values (rows, list_length).
    """
    parts, part = np.int64(_num_threads()), np.int64(_thread_num())
    rows, hidden, inner = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.INTERMEDIATE]
    q_size, kv_size = p[StepField.HEADS] * p[StepField.HEAD_DIM], p[StepField.KV_HEADS] * p[StepField.HEAD_DIM]
    num_qkv, num_gate_up = p[StepField.NUM_QKV], p[StepField.NUM_GATE_UP]
    per_block = num_qkv + 1 + num_gate_up + 1
    eps = _floats(p[StepField.FLOATS])[0]
    residual, qkv, width = p[StepField.RESIDUAL], p[StepField.QKV], q_size + 2 * kv_size
    thresholds = _floats(p[StepField.THRESHOLDS])
    row_bytes = 8 * 6

    length, acc_stride = p[StepField.LIST_LENGTH], p[StepField.ACC_LENGTH]
    normed = p[StepField.SCRATCH] + part * p[StepField.SCRATCH_BYTES]
    acc = normed + 4 * rows * hidden
    acc_up = acc + 4 * rows * acc_stride
    index = acc_up + 4 * rows * acc_stride
    value = index + 4 * length
    seg_index, seg_value = p[StepField.SEGMENT_INDEX], p[StepField.SEGMENT_VALUE]
    seg_count = p[StepField.SEGMENT_COUNT]
    segments = _pointer(seg_count, np.int64(0))
    counts = p[StepField.COUNTS] + 8 * part * p[StepField.NUM_BLOCKS] * per_block
    # What every thread lists for itself is counted once.
    spare = p[StepField.COUNTS] + 8 * parts * p[StepField.NUM_BLOCKS] * per_block + 8 * part

    lo, hi = _span(hidden, part, parts), _span(hidden, part + 1, parts)
    mlp_lo, mlp_hi = _span(inner, part, parts), _span(inner, part + 1, parts)
    qkv_lo, qkv_hi = _span(width, part, parts), _span(width, part + 1, parts)

    tokens = _pointer(p[StepField.TOKENS], np.int64(0))
    for b in range(rows):
        source = _pointer(p[StepField.EMBEDDING] + tokens[b] * hidden * _size(base_tag), base_tag)
        target = _floats(residual + 4 * b * hidden)
        for j in range(lo, hi):
            target[j] = _widen(source[j])
    _barrier()

    for block in range(p[StepField.NUM_BLOCKS]):
        first = block * per_block
        norm = p[StepField.NORMS] + 4 * 2 * block * hidden

        for b in range(rows):
            _rms_norm(residual + 4 * b * hidden, norm, hidden, eps, normed + 4 * b * hidden)
        begin = np.int64(0)
        for i in range(num_qkv):
            row = p[StepField.PROJECTIONS] + (first + i) * row_bytes
            field = _row(row)
            end = begin + field[ProjectionField.N]
            from_, to = max(begin, qkv_lo), min(end, qkv_hi)
            if from_ < to or part == 0:
                count = _select(
                    normed, hidden, rows, 0, hidden, field[ProjectionField.SCALE], thresholds[first + i], index, value,
                    length, counts + 8 * (first + i) if part == 0 else spare,
                )  # fmt: skip
                if from_ < to:
                    _project(
                        row, index, value, count, length, rows, from_ - begin, to - begin, qkv + 4 * from_, width, tag
                    )
            begin = end
        _barrier()

        # Attention writes its heads' outputs where the accumulators are, and lists the channels kept for o_proj.
        a_lo, a_hi = _attention(p, block, part, parts, acc, index, base_tag)
        i = first + num_qkv
        row = p[StepField.PROJECTIONS] + i * row_bytes
        segments[2 * part] = a_lo
        segments[2 * part + 1] = _select(
            acc, q_size, rows, a_lo, a_hi, _row(row)[ProjectionField.SCALE], thresholds[i],
            seg_index + 4 * a_lo, seg_value + 4 * a_lo, length, counts + 8 * i,
        )  # fmt: skip
        _barrier()

        count = _gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        _project(row, index, value, count, length, rows, lo, hi, acc, acc_stride, tag)
        _add(residual, hidden, acc, acc_stride, rows, lo, hi)
        _barrier()

        for b in range(rows):
            _rms_norm(residual + 4 * b * hidden, norm + 4 * hidden, hidden, eps, normed + 4 * b * hidden)
        count = 0
        for i in range(2):
            j = first + num_qkv + 1 + (i if num_gate_up == 2 else 0)
            row = p[StepField.PROJECTIONS] + j * row_bytes
            offset = 0 if num_gate_up == 2 else i * inner
            if i == 0 or num_gate_up == 2:
                count = _select(
                    normed, hidden, rows, 0, hidden, _row(row)[ProjectionField.SCALE], thresholds[j],
                    index, value, length, counts + 8 * j if part == 0 else spare,
                )  # fmt: skip
            _project(
                row, index, value, count, length, rows, offset + mlp_lo, offset + mlp_hi, acc if i == 0 else acc_up,
                acc_stride, tag,
            )  # fmt: skip
        _silu_times(acc, acc_up, acc_stride, rows, mlp_hi - mlp_lo)
        i = first + per_block - 1
        row = p[StepField.PROJECTIONS] + i * row_bytes
        segments[2 * part] = mlp_lo
        # The accumulator begins at column mlp_lo, _select counts from column 0.
        segments[2 * part + 1] = _select(
            acc - 4 * mlp_lo, acc_stride, rows, mlp_lo, mlp_hi, _row(row)[ProjectionField.SCALE],
            thresholds[i], seg_index + 4 * mlp_lo, seg_value + 4 * mlp_lo, length, counts + 8 * i,
        )  # fmt: skip
        _barrier()

        count = _gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        _project(row, index, value, count, length, rows, lo, hi, acc, acc_stride, tag)
        _add(residual, hidden, acc, acc_stride, rows, lo, hi)
        _barrier()

    norm = p[StepField.NORMS] + 4 * 2 * p[StepField.NUM_BLOCKS] * hidden
    for b in range(rows):
        _rms_norm(residual + 4 * b * hidden, norm, hidden, eps, normed + 4 * b * hidden)
    vocab = p[StepField.VOCAB]
    _head(
        p[StepField.HEAD], hidden, vocab * part // parts, vocab * (part + 1) // parts, normed, hidden, rows,
        p[StepField.HEAD_SCALE], p[StepField.LOGITS], p[StepField.SLOTS], vocab, head_tag,
    )  # fmt: skip


# --- weights at load -------------------------------------------------------------------------------------------------


@_exact
def _transpose(p, tag):
    """(N, K) to (K, N) through small tiles, so that both sides are read and written a cache line at a time."""
    parts, part = np.int64(_num_threads()), np.int64(_thread_num())
    n, k, stride, size = p[LayoutField.ROWS], p[LayoutField.K], p[LayoutField.STRIDE], _size(tag)
    tile = _pointer(p[LayoutField.TILES] + part * TILE * (TILE + 1) * 4, tag)
    for n0 in range(_span(n, part, parts), _span(n, part + 1, parts), TILE):
        height = min(TILE, _span(n, part + 1, parts) - n0)
        for k0 in range(0, k, TILE):
            width = min(TILE, k - k0)
            for i in range(height):
                source = _pointer(p[LayoutField.SOURCE] + ((n0 + i) * k + k0) * size, tag)
                # One more than a power of two: columns of the tile then lie in different cache sets.
                for j in range(width):
                    tile[i * (TILE + 1) + j] = source[j]
            for j in range(width):
                target = _pointer(p[LayoutField.TARGET] + ((k0 + j) * stride + n0) * size, tag)
                for i in range(height):
                    target[i] = tile[i * (TILE + 1) + j]


@_exact
def _quantize(p, tag):
    """Round to nearest, symmetric, one scale per output column: weight ~ target * scale, target in -127..127."""
    parts, part = np.int64(_num_threads()), np.int64(_thread_num())
    n, k, stride, size = p[LayoutField.ROWS], p[LayoutField.K], p[LayoutField.STRIDE], _size(tag)
    tile = _pointer(p[LayoutField.TILES] + part * TILE * (TILE + 1) * 4, np.int8(0))
    factors = _floats(p[LayoutField.TILES] + part * TILE * (TILE + 1) * 4 + TILE * (TILE + 1))
    scale = _floats(p[LayoutField.SCALE])
    magic = np.float32(12582912.0)
    for n0 in range(_span(n, part, parts), _span(n, part + 1, parts), TILE):
        height = min(TILE, _span(n, part + 1, parts) - n0)
        for i in range(height):
            top = _largest(p[LayoutField.SOURCE] + (n0 + i) * k * size, k, tag)
            scale[n0 + i] = top / np.float32(127) if top > _ZERO or top != top else _ONE
            factors[i] = np.float32(127) / top if top > _ZERO else _ZERO
        for k0 in range(0, k, TILE):
            width = min(TILE, k - k0)
            for i in range(height):
                source = _pointer(p[LayoutField.SOURCE] + ((n0 + i) * k + k0) * size, tag)
                factor = factors[i]
                for j in range(width):
                    rounded = (_widen(source[j]) * factor + magic) - magic
                    tile[i * (TILE + 1) + j] = np.int8(min(max(rounded, np.float32(-127)), np.float32(127)))
            if p[LayoutField.TRANSPOSED] == 0:
                for i in range(height):
                    target = _pointer(p[LayoutField.TARGET] + (n0 + i) * k + k0, np.int8(0))
                    for j in range(width):
                        target[j] = tile[i * (TILE + 1) + j]
            else:
                for j in range(width):
                    target = _pointer(p[LayoutField.TARGET] + (k0 + j) * stride + n0, np.int8(0))
                    for i in range(height):
                        target[i] = tile[i * (TILE + 1) + j]


@_dot
def _largest(source, k, tag):
    """The largest magnitude of a row; NaN if the row holds a NaN or an Inf."""
    source_ = _pointer(source, tag)
    top = _ZERO
    poison = _ZERO
    for i in range(k):
        v = abs(_widen(source_[i]))
        poison += v * _ZERO
        top = v if v > top else top
    return top + poison


# --- regions ---------------------------------------------------------------------------------------------------------
# Written out one by one: a function made in a closure is never found in numba's disk cache.


def _linear_float32(p):
    _linear(carray(p, (_FIELDS,)), np.float32(0))


def _linear_bfloat16(p):
    _linear(carray(p, (_FIELDS,)), np.uint16(0))


def _linear_float16(p):
    _linear(carray(p, (_FIELDS,)), np.int16(0))


def _linear_int8(p):
    _linear(carray(p, (_FIELDS,)), np.int8(0))


def _step_float32(p):
    _step(carray(p, (_FIELDS,)), np.float32(0), np.float32(0), np.float32(0))


def _step_bfloat16(p):
    _step(carray(p, (_FIELDS,)), np.uint16(0), np.uint16(0), np.uint16(0))


def _step_float16(p):
    _step(carray(p, (_FIELDS,)), np.int16(0), np.int16(0), np.int16(0))


def _step_int8_float32(p):
    _step(carray(p, (_FIELDS,)), np.int8(0), np.int8(0), np.float32(0))


def _step_int8_bfloat16(p):
    _step(carray(p, (_FIELDS,)), np.int8(0), np.int8(0), np.uint16(0))


def _step_int8_float16(p):
    _step(carray(p, (_FIELDS,)), np.int8(0), np.int8(0), np.int16(0))


def _transpose_float32(p):
    _transpose(carray(p, (_FIELDS,)), np.float32(0))


def _transpose_bfloat16(p):
    _transpose(carray(p, (_FIELDS,)), np.uint16(0))


def _quantize_float32(p):
    _quantize(carray(p, (_FIELDS,)), np.float32(0))


def _quantize_bfloat16(p):
    _quantize(carray(p, (_FIELDS,)), np.uint16(0))


def _quantize_float16(p):
    _quantize(carray(p, (_FIELDS,)), np.int16(0))


# Name -> what to compile, on first use. The transposition moves bits: two bytes are two bytes.
REGIONS = {
    "linear_float32": _linear_float32,
    "linear_bfloat16": _linear_bfloat16,
    "linear_float16": _linear_float16,
    "linear_int8": _linear_int8,
    "step_float32": _step_float32,
    "step_bfloat16": _step_bfloat16,
    "step_float16": _step_float16,
    "step_int8_float32": _step_int8_float32,
    "step_int8_bfloat16": _step_int8_bfloat16,
    "step_int8_float16": _step_int8_float16,
    "transpose_float32": _transpose_float32,
    "transpose_bfloat16": _transpose_bfloat16,
    "transpose_float16": _transpose_bfloat16,
    "quantize_float32": _quantize_float32,
    "quantize_bfloat16": _quantize_bfloat16,
    "quantize_float16": _quantize_float16,
}
