"""Compiled, for one decode step: RMSNorm, rotary embedding, attention over the KV cache, Gated DeltaNet and gated short
convolution in float32.

Gated DeltaNet, as defined in ``runtime.torch.block``:

    c     = silu(sum over taps of kernel * inputs)                     depthwise, of queries, keys and values
    S     = exp(g) S + k (beta (v - exp(g) k^T S))^T,   o = S^T q      for each value head; q and k are L2-normalized
    out   = o / rms(o) * norm * silu(z)
    g     = -rate * softplus(a.x + dt_bias),  beta = sigmoid(b.x)
"""

from __future__ import annotations

import math

import numpy as np

from .barrier import barrier
from .intrinsics import (
    ONE,
    ZERO,
    bits_to_float,
    dot,
    exact,
    exp32,
    float_to_bits,
    floats,
    narrow,
    number,
    pointer,
    size_of,
    soft_cap,
    span,
    widen,
    words,
)
from .layout import AttentionField, DeltaField, LatentField, MambaField, ShortConvField, StepField, StoredAs
from .linear import output_rows

_INT8, _E4M3 = np.int8(0), np.uint8(0)
_CODED_AS_INT8, _CODED_AS_E4M3 = StoredAs.INT8.value, StoredAs.E4M3.value
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to an integer
_L2_EPS = np.float32(1e-6)  # of the L2 norm of a DeltaNet's queries and keys


@dot
def _rms_factor(x, n, eps):
    """1 / rms(x)."""
    x_ = floats(x)
    total = ZERO
    for i in range(n):
        total += x_[i] * x_[i]
    return ONE / np.float32(math.sqrt(total / np.float32(n) + eps))


@dot
def rms_norm(x, weight, n, eps, out):
    """out = x / rms(x) * weight."""
    x_, weight_, out_ = floats(x), floats(weight), floats(out)
    factor = _rms_factor(x, n, eps)
    for i in range(n):
        out_[i] = x_[i] * factor * weight_[i]


@exact
def _norm_and_rotate(x, dim, block, position, norm, factor, after, eps, out):
    """out = rotary(norm(x)) of a head's q or k (dim,). norm: (dim,), 0: none; factor: 1 / rms over all heads, 0:
    computed from this head; after: normalize after the rotation."""
    x_, out_ = floats(x), floats(out)
    if norm == 0 or after != 0:
        for i in range(dim):
            out_[i] = x_[i]
    elif factor != ZERO:
        norm_ = floats(norm)
        for i in range(dim):
            out_[i] = x_[i] * factor * norm_[i]
    else:
        rms_norm(x, norm, dim, eps, out)
    half = block[AttentionField.ROTARY_HALF]
    row = 4 * position * half
    cos_, sin_ = floats(block[AttentionField.COS] + row), floats(block[AttentionField.SIN] + row)
    if block[AttentionField.INTERLEAVED] == 0:
        for i in range(half):
            a, b = out_[i], out_[i + half]
            out_[i] = a * cos_[i] - b * sin_[i]
            out_[i + half] = b * cos_[i] + a * sin_[i]
    else:
        for i in range(half):
            a, b = out_[2 * i], out_[2 * i + 1]
            out_[2 * i] = a * cos_[i] - b * sin_[i]
            out_[2 * i + 1] = b * cos_[i] + a * sin_[i]
    if norm != 0 and after != 0:
        rms_norm(out, norm, dim, eps, out)


@exact
def store_row(x, dim, cache, scales, at, kind, tag):
    """Store a key or value x (dim,) float32 as row ``at`` of ``cache``, with its scale unless ``scales`` is 0. Twin:
    ``quantise`` in ``runtime.decoding.cache``."""
    x_ = floats(x)
    if scales == 0:
        target = pointer(cache + at * dim * size_of(tag), tag)
        for d in range(dim):
            target[d] = narrow(x_[d], tag)
        return
    largest_bits = np.int32(0)  # as integers, of which a NaN's are the largest
    for d in range(dim):
        largest_bits = max(largest_bits, float_to_bits(abs(x_[d])))
    largest = bits_to_float(largest_bits)
    limit = np.float32(127) if kind == _CODED_AS_INT8 else np.float32(448)
    factor = limit / max(largest, np.float32(1e-30))
    floats(scales)[at] = largest * (ONE / limit)
    codes = pointer(cache + at * dim, _E4M3)
    if kind == _CODED_AS_INT8:
        for d in range(dim):
            codes[d] = np.uint8(np.int32((x_[d] * factor + _ROUND) - _ROUND) & 0xFF)
        return
    for d in range(dim):
        y = x_[d] * factor
        bits = float_to_bits(abs(y))
        normal = ((bits + np.int32(0x7FFFF) + ((bits >> np.int32(20)) & np.int32(1))) >> np.int32(20)) - np.int32(960)
        subnormal = np.int32((abs(y) * np.float32(512) + _ROUND) - _ROUND)
        code = subnormal if abs(y) < np.float32(2**-6) else normal
        codes[d] = np.uint8(code | (np.int32(0x80) if y < ZERO else np.int32(0)))


@dot
def _attend(q, heads, first, block, row, start, end, dim, scale, cap, scores, max_len, out, tag):
    """out = softmax(cap(scale * q k^T)) v for heads from ``first`` on that share a KV head, over positions start..end.
    q, out: (heads, dim). block: of `AttentionRow`; row: of its cache, position 0 of the slot and KV head. scores:
    scratch (heads, max_len). tag: of the cache's type."""
    size = size_of(tag)
    keys, values = block[AttentionField.KEYS] + row * dim * size, block[AttentionField.VALUES] + row * dim * size
    coded = block[AttentionField.KEY_SCALES] != 0
    key_scales = block[AttentionField.KEY_SCALES] + 4 * row
    value_scales = block[AttentionField.VALUE_SCALES] + 4 * row
    for h in range(heads):
        q_, s_ = floats(q + 4 * h * dim), floats(scores + 4 * h * max_len)
        for i in range(start, end):
            key = pointer(keys + i * dim * size, tag)
            s = ZERO
            for d in range(dim):
                s += q_[d] * widen(key[d])
            s_[i] = s * scale
        if coded:
            key_scales_ = floats(key_scales)
            for i in range(start, end):
                s_[i] *= key_scales_[i]
        if cap > ZERO:
            for i in range(start, end):
                s_[i] = soft_cap(s_[i], cap)
    for h in range(heads):
        s_, out_ = floats(scores + 4 * h * max_len), floats(out + 4 * h * dim)
        top, total = s_[start], ZERO
        for i in range(start, end):
            top = max(top, s_[i])
        if block[AttentionField.SINKS] != 0:
            sink = floats(block[AttentionField.SINKS])[first + h]
            top = max(top, sink)
            total = exp32(sink - top)
        for i in range(start, end):
            e = exp32(s_[i] - top)
            s_[i] = e
            total += e
        if coded:
            value_scales_ = floats(value_scales)
            for i in range(start, end):
                s_[i] *= value_scales_[i]
        for d in range(dim):
            out_[d] = ZERO
        i = start
        while i < end:
            # Four positions a pass, of weight 0 beyond the end.
            e0 = s_[i]
            e1 = s_[i + 1] if i + 1 < end else ZERO
            e2 = s_[i + 2] if i + 2 < end else ZERO
            e3 = s_[i + 3] if i + 3 < end else ZERO
            v0 = pointer(values + i * dim * size, tag)
            v1 = pointer(values + min(i + 1, end - 1) * dim * size, tag)
            v2 = pointer(values + min(i + 2, end - 1) * dim * size, tag)
            v3 = pointer(values + min(i + 3, end - 1) * dim * size, tag)
            for d in range(dim):
                out_[d] += e0 * widen(v0[d]) + e1 * widen(v1[d]) + e2 * widen(v2[d]) + e3 * widen(v3[d])
            i += 4
        factor = ONE / total
        for d in range(dim):
            out_[d] *= factor


@exact
def attention(p, row, qkv, thread, threads, out, scratch, tag):
    """Attention of this thread's heads for every row, after the new k and v are appended to the cache, unless the block
    shares another block's. row: of `AttentionRow`; qkv: (rows, INPUT_WIDTH), queries, keys and values; out: (rows, q_size);
    returns the range of columns that this thread writes. scratch: (heads, dim) float32."""
    heads, max_len, kind = p[StepField.HEADS], p[StepField.MAX_LEN], p[StepField.CACHED_AS]
    block = words(row)
    eps, cap = number(p[StepField.EPS]), number(p[StepField.ATTENTION_CAP])
    slots, positions = words(p[StepField.SLOTS]), words(p[StepField.POSITIONS])
    window, kv_heads, dim = block[AttentionField.WINDOW], block[AttentionField.KV_HEADS], block[AttentionField.HEAD_DIM]
    keys, key_scales = block[AttentionField.KEYS], block[AttentionField.KEY_SCALES]
    values, value_scales = block[AttentionField.VALUES], block[AttentionField.VALUE_SCALES]
    q_size, share = heads * dim, heads // kv_heads
    stride, gate_from = block[AttentionField.QUERY_STRIDE], block[AttentionField.GATE_FROM]
    keys_from, width = 2 * q_size if gate_from != 0 else q_size, block[AttentionField.INPUT_WIDTH]
    values_from, has_kv = width - kv_heads * dim, width > keys_from
    q_norm, k_norm = block[AttentionField.Q_NORM], block[AttentionField.K_NORM]
    whole, after = p[StepField.QK_WHOLE], p[StepField.QK_AFTER]
    norm_bytes = 4 * dim if whole != 0 else 0  # between heads' weights
    first, last = heads * thread // threads, heads * (thread + 1) // threads
    for b in range(p[StepField.ROWS]):
        position, scale = positions[b], number(p[StepField.ATTENTION_SCALE])
        if p[StepField.QUERY_SCALES] != 0:
            scale *= floats(p[StepField.QUERY_SCALES])[position]
        q_factor = k_factor = ZERO
        if whole != 0:
            q_factor = _rms_factor(qkv, q_size, eps)
            k_factor = _rms_factor(qkv + 4 * keys_from, kv_heads * dim, eps) if has_kv else ZERO
        start = max(0, position + 1 - window) if window > 0 else 0
        h = first
        while h < last:
            group = h // share
            stop, cached = min(last, (group + 1) * share), (slots[b] * kv_heads + group) * max_len
            if has_kv:  # threads that share a KV head both store it, with the same bits
                new_key, new_value = qkv + 4 * (keys_from + group * dim), qkv + 4 * (values_from + group * dim)
                norm, at = k_norm + group * norm_bytes, cached + position
                _norm_and_rotate(new_key, dim, block, position, norm, k_factor, after, eps, scratch)
                store_row(scratch, dim, keys, key_scales, at, kind, tag)
                if block[AttentionField.VALUE_NORM] != 0:
                    rms_norm(new_value, block[AttentionField.VALUE_NORM], dim, eps, scratch)
                    new_value = scratch
                store_row(new_value, dim, values, value_scales, at, kind, tag)
            for i in range(h, stop):
                q, normed, norm = qkv + 4 * i * stride, scratch + 4 * (i - h) * dim, q_norm + i * norm_bytes
                _norm_and_rotate(q, dim, block, position, norm, q_factor, after, eps, normed)
            scores, target = p[StepField.SCORES] + 4 * h * max_len, out + 4 * h * dim
            heads_of = (
                scratch,
                stop - h,
                h,
                block,
                cached,
                start,
                position + 1,
                dim,
                scale,
                cap,
                scores,
                max_len,
                target,
            )
            if kind == _CODED_AS_INT8:
                _attend(*heads_of, _INT8)
            elif kind == _CODED_AS_E4M3:
                _attend(*heads_of, _E4M3)
            else:
                _attend(*heads_of, tag)
            if gate_from != 0:
                for i in range(h, stop):
                    out_, gate_ = floats(out + 4 * i * dim), floats(qkv + 4 * (i * stride + gate_from))
                    for d in range(dim):
                        out_[d] = out_[d] / (ONE + exp32(-gate_[d]))
            h = stop
        qkv, out = qkv + 4 * width, out + 4 * q_size
    return first * dim, last * dim


@exact
def latent_attention(p, row, q, kv, eps, thread, threads, out, scratch, tag):
    """LATENT_ATTENTION for every row: returns the range of columns that this thread writes. row: of `LatentRow`; q, kv: X
    and Z. scratch: (2, latent and rotated part) float32."""
    field = words(row)
    block, heads, kind = words(field[LatentField.ATTENTION]), p[StepField.HEADS], p[StepField.CACHED_AS]
    slots, positions, max_len = words(p[StepField.SLOTS]), words(p[StepField.POSITIONS]), p[StepField.MAX_LEN]
    key_dim, value_dim = field[LatentField.KEY_DIM], field[LatentField.VALUE_DIM]
    rotary, dim = field[LatentField.ROTARY_DIM], block[AttentionField.HEAD_DIM]
    rank, cap, none = dim - rotary, ZERO, np.int64(0)
    scale, weight_bytes = number(p[StepField.ATTENTION_SCALE]), (key_dim + value_dim) * rank * size_of(tag)
    x, attended, latent = floats(scratch), scratch + 4 * dim, scratch + 4 * rotary
    latent_ = floats(latent)
    first, last = heads * thread // threads, heads * (thread + 1) // threads
    for b in range(p[StepField.ROWS]):
        position, cached = positions[b], slots[b] * max_len
        new = kv + 4 * (b * field[LatentField.WIDTH] + field[LatentField.LATENT_FROM])
        for i in range(rotary):
            x[i] = floats(new)[rank + i]
        rms_norm(new, field[LatentField.NORM], rank, eps, latent)
        _norm_and_rotate(scratch, dim, block, position, none, ZERO, none, eps, scratch)
        keys, key_scales = block[AttentionField.KEYS], block[AttentionField.KEY_SCALES]
        store_row(scratch, dim, keys, key_scales, cached + position, kind, tag)  # every thread, the same bits
        for h in range(first, last):
            query = floats(q + 4 * (b * field[LatentField.QUERY_WIDTH] + h * (key_dim + rotary)))
            weights = field[LatentField.KV_B] + h * weight_bytes
            for i in range(rotary):
                x[i] = query[key_dim + i]
            for i in range(rank):
                latent_[i] = ZERO
            for k in range(key_dim):
                weight, q_k = pointer(weights + k * rank * size_of(tag), tag), query[k]
                for i in range(rank):
                    latent_[i] += q_k * widen(weight[i])
            _norm_and_rotate(scratch, dim, block, position, none, ZERO, none, eps, scratch)
            scores, end = p[StepField.SCORES] + 4 * h * max_len, position + 1
            of_head = (scratch, 1, h, block, cached, none, end, dim, scale, cap, scores, max_len, attended)
            if kind == _CODED_AS_INT8:
                _attend(*of_head, _INT8)
            elif kind == _CODED_AS_E4M3:
                _attend(*of_head, _E4M3)
            else:
                _attend(*of_head, tag)
            values, target = weights + key_dim * rank * size_of(tag), out + 4 * (b * heads + h) * value_dim
            numbers = p[StepField.ROW_NUMBERS]
            output_rows(values, rank, none, value_dim, attended + 4 * rotary, rank, 1, none, target, numbers, none, tag)
    return first * value_dim, last * value_dim


@exact
def _convolve(new, inputs, shifted, kernel, taps, width, lo, count, out, tag):
    """out = convolution of ``count`` channels from ``lo`` on. inputs: (taps - 1, width) of the base type, oldest
    first; shifted: receives them shifted by one position, may be ``inputs``. new: (width,) float32, this position's
    input; kernel: (taps, width) float32."""
    size = size_of(tag)
    out_, new_, newest_tap = floats(out), floats(new), floats(kernel + 4 * (taps - 1) * width)
    for j in range(count):
        out_[j] = newest_tap[lo + j] * new_[lo + j]
    for t in range(taps - 1):
        source, tap = pointer(inputs + t * width * size, tag), floats(kernel + 4 * t * width)
        for j in range(count):
            out_[j] += tap[lo + j] * widen(source[lo + j])
        target = pointer(shifted + t * width * size, tag)
        if t + 2 < taps:
            later = pointer(inputs + (t + 1) * width * size, tag)
            for j in range(count):
                target[lo + j] = later[lo + j]
        else:
            for j in range(count):
                target[lo + j] = narrow(new_[lo + j], tag)


@exact
def _silu(x, n):
    x_ = floats(x)
    for i in range(n):
        x_[i] = x_[i] / (ONE + exp32(-x_[i]))


@exact
def short_conv(p, row, projected, thread, threads, out, scratch, tag):
    """c * conv(b * x) of this thread's channels, for every row. row: of `ShortConvRow`; projected: (rows, 3 * hidden), b, c
    and x; out: (rows, hidden); returns the range of columns that this thread writes. scratch: (hidden,) float32."""
    field, hidden = words(row), p[StepField.HIDDEN]
    slots, positions = words(p[StepField.SLOTS]), words(p[StepField.POSITIONS])
    buffers, num_slots, taps = field[ShortConvField.BUFFERS], field[ShortConvField.SLOTS], field[ShortConvField.TAPS]
    size, kernel = (taps - 1) * hidden * size_of(tag), field[ShortConvField.KERNEL]
    lo, hi = span(hidden, thread, threads), span(hidden, thread + 1, threads)
    for b in range(p[StepField.ROWS]):
        source = positions[b] % buffers * num_slots + slots[b]
        target = (positions[b] + 1) % buffers * num_slots + slots[b]
        inputs = field[ShortConvField.INPUTS] + source * size
        shifted = field[ShortConvField.INPUTS] + target * size
        at, y = projected + 12 * b * hidden, out + 4 * (b * hidden + lo)
        b_, c_, x_, new, out_ = floats(at), floats(at + 4 * hidden), floats(at + 8 * hidden), floats(scratch), floats(y)
        for j in range(lo, hi):
            new[j] = b_[j] * x_[j]
        _convolve(scratch, inputs, shifted, kernel, taps, hidden, lo, hi - lo, y, tag)
        if field[ShortConvField.BIAS] != 0:
            for j in range(lo, hi):
                out_[j - lo] += floats(field[ShortConvField.BIAS])[j]
        for j in range(lo, hi):
            out_[j - lo] *= c_[j]
    return lo, hi


@dot
def _product(a, b, n):
    a_, b_ = floats(a), floats(b)
    total = ZERO
    for i in range(n):
        total += a_[i] * b_[i]
    return total


@exact
def _scale_to(x, n, length):
    factor = length / np.float32(math.sqrt(_product(x, x, n) + _L2_EPS))
    x_ = floats(x)
    for i in range(n):
        x_[i] *= factor


@exact
def _update(state, new_state, q, k, v, key_dim, value_dim, decay, beta, delta, out):
    """new_state = decay * state + k delta^T with delta = beta * (v - decay * state^T k), out = new_state^T q. States:
    (key_dim, value_dim), may be the same; delta: (value_dim,), scratch; out: (value_dim,)."""
    q_, k_, v_, delta_, out_ = floats(q), floats(k), floats(v), floats(delta), floats(out)
    for j in range(value_dim):
        delta_[j] = ZERO
    for i in range(key_dim):
        row, k_i = floats(state + 4 * i * value_dim), k_[i]
        for j in range(value_dim):
            delta_[j] += k_i * row[j]
    for j in range(value_dim):
        delta_[j] = beta * (v_[j] - decay * delta_[j])
        out_[j] = ZERO
    for i in range(key_dim):
        row, new_row = floats(state + 4 * i * value_dim), floats(new_state + 4 * i * value_dim)
        k_i, q_i = k_[i], q_[i]
        for j in range(value_dim):
            new = decay * row[j] + k_i * delta_[j]
            new_row[j] = new
            out_[j] += q_i * new


@exact
def _softplus(x):
    """x from 20 on, as in PyTorch."""
    return np.float32(math.log1p(math.exp(np.float64(x)))) if x < np.float32(20) else x


@exact
def mamba2(p, row, projected, thread, threads, out, scratch, tag):
    """Mamba-2 for every row: the convolution of this thread's channels, the states of its heads, the norm of its columns. row:
    of `MambaRow`; projected: (rows, inner + mixed_size + heads) float32, the gate, the convolution's channels and the steps,
    which are overwritten; out: (rows, inner); returns the range of columns that this thread writes. scratch: (mixed_size,)."""
    field, rows = words(row), p[StepField.ROWS]
    slots, positions = words(p[StepField.SLOTS]), words(p[StepField.POSITIONS])
    buffers, num_slots, taps = field[MambaField.BUFFERS], field[MambaField.SLOTS], field[MambaField.TAPS]
    heads, groups = field[MambaField.HEADS], field[MambaField.GROUPS]
    head_dim, state_dim = field[MambaField.HEAD_DIM], field[MambaField.STATE_DIM]
    inner, of_groups = heads * head_dim, groups * state_dim
    width = inner + 2 * of_groups
    stride, kernel = 4 * (inner + width + heads), field[MambaField.KERNEL]
    size, state_size = (taps - 1) * width * size_of(tag), 4 * heads * state_dim * head_dim
    lo, hi = span(width, thread, threads), span(width, thread + 1, threads)
    for b in range(rows):
        new, convolved = projected + b * stride + 4 * inner, floats(scratch)
        inputs = field[MambaField.INPUTS] + (positions[b] % buffers * num_slots + slots[b]) * size
        shifted = field[MambaField.INPUTS] + ((positions[b] + 1) % buffers * num_slots + slots[b]) * size
        _convolve(new, inputs, shifted, kernel, taps, width, lo, hi - lo, scratch, tag)
        if field[MambaField.BIAS] != 0:
            for j in range(lo, hi):
                convolved[j - lo] += floats(field[MambaField.BIAS])[j]
        _silu(scratch, hi - lo)
        for j in range(lo, hi):
            floats(new)[j] = convolved[j - lo]
    barrier(p[StepField.TEAM], threads)

    for b in range(rows):
        at = projected + b * stride
        mixed, steps = at + 4 * inner, floats(at + 4 * (inner + width))
        source = field[MambaField.STATES] + (positions[b] % buffers * num_slots + slots[b]) * state_size
        target = field[MambaField.STATES] + ((positions[b] + 1) % buffers * num_slots + slots[b]) * state_size
        for h in range(heads * thread // threads, heads * (thread + 1) // threads):
            step = _softplus(steps[h] + floats(field[MambaField.DT_BIAS])[h])
            decay, group = exp32(-floats(field[MambaField.RATE])[h] * step), h // (heads // groups)
            x, y = floats(mixed + 4 * h * head_dim), floats(scratch)
            skip, gate = floats(field[MambaField.SKIP])[h], floats(at + 4 * h * head_dim)
            in_, out_ = (
                floats(mixed + 4 * (inner + group * state_dim)),
                floats(mixed + 4 * (inner + of_groups + group * state_dim)),
            )
            for j in range(head_dim):
                y[j] = skip * x[j]
            for i in range(state_dim):
                old = floats(source + 4 * (h * state_dim + i) * head_dim)
                new_ = floats(target + 4 * (h * state_dim + i) * head_dim)
                written, read = step * in_[i], out_[i]
                for j in range(head_dim):
                    new_[j] = decay * old[j] + written * x[j]
                    y[j] += read * new_[j]
            for j in range(head_dim):
                gate[j] = y[j] * gate[j] / (ONE + exp32(-gate[j]))
    barrier(p[StepField.TEAM], threads)

    lo, hi, share = span(inner, thread, threads), span(inner, thread + 1, threads), inner // groups
    norm = floats(field[MambaField.NORM])
    for b in range(rows):
        to = floats(out + 4 * b * inner)
        for group in range(lo // share, (hi + share - 1) // share):
            at = projected + b * stride + 4 * group * share
            factor, first = _rms_factor(at, share, number(p[StepField.EPS])), group * share
            for j in range(max(lo, first), min(hi, first + share)):
                to[j] = floats(at)[j - first] * factor * norm[j]
    return lo, hi


@exact
def delta_net(p, row, x, mixed, thread, threads, out, scratch, tag):
    """Gated DeltaNet of this thread's key heads and their value heads, for every row. row: of `DeltaRow`; x: (rows,
    hidden) float32; mixed: (rows, mixed_size + value_size) float32, queries, keys, values, then the gate; out: (rows,
    value_size); returns the range of columns that this thread writes. scratch: 2 * (key_dim + value_dim) float32."""
    field = words(row)
    rows, hidden = p[StepField.ROWS], p[StepField.HIDDEN]
    slots, positions = words(p[StepField.SLOTS]), words(p[StepField.POSITIONS])
    buffers, num_slots = field[DeltaField.BUFFERS], field[DeltaField.SLOTS]
    eps = number(p[StepField.EPS])
    key_heads, value_heads = field[DeltaField.KEY_HEADS], field[DeltaField.VALUE_HEADS]
    key_dim, value_dim, taps = field[DeltaField.KEY_DIM], field[DeltaField.VALUE_DIM], field[DeltaField.TAPS]
    kernel, share = field[DeltaField.KERNEL], value_heads // key_heads
    key_size, value_size = key_heads * key_dim, value_heads * value_dim
    width = 2 * key_size + value_size
    rate, dt_bias = floats(field[DeltaField.RATE]), floats(field[DeltaField.DT_BIAS])
    q, k, v = scratch, scratch + 4 * key_dim, scratch + 8 * key_dim
    delta = v + 4 * value_dim
    first, last = key_heads * thread // threads, key_heads * (thread + 1) // threads
    for b in range(rows):
        new = mixed + 4 * b * (width + value_size)
        # The buffers that are read and written.
        source = positions[b] % buffers * num_slots + slots[b]
        target = (positions[b] + 1) % buffers * num_slots + slots[b]
        inputs = field[DeltaField.INPUTS] + source * (taps - 1) * width * size_of(tag)
        shifted = field[DeltaField.INPUTS] + target * (taps - 1) * width * size_of(tag)
        for group in range(first, last):
            _convolve(new, inputs, shifted, kernel, taps, width, group * key_dim, key_dim, q, tag)
            _convolve(new, inputs, shifted, kernel, taps, width, key_size + group * key_dim, key_dim, k, tag)
            _silu(q, 2 * key_dim)  # k, too
            _scale_to(q, key_dim, ONE / np.float32(math.sqrt(np.float32(key_dim))))
            _scale_to(k, key_dim, ONE)
            for h in range(group * share, (group + 1) * share):
                _convolve(new, inputs, shifted, kernel, taps, width, 2 * key_size + h * value_dim, value_dim, v, tag)
                _silu(v, value_dim)
                beta = ONE / (ONE + exp32(-_product(x + 4 * b * hidden, field[DeltaField.B] + 4 * h * hidden, hidden)))
                step = _softplus(
                    _product(x + 4 * b * hidden, field[DeltaField.A] + 4 * h * hidden, hidden) + dt_bias[h]
                )
                head_out, decay = out + 4 * (b * value_size + h * value_dim), exp32(-rate[h] * step)
                state, size = (
                    field[DeltaField.STATES] + 4 * h * key_dim * value_dim,
                    4 * value_heads * key_dim * value_dim,
                )
                state, new_state = state + source * size, state + target * size
                _update(state, new_state, q, k, v, key_dim, value_dim, decay, beta, delta, head_out)
                rms_norm(head_out, field[DeltaField.NORM], value_dim, eps, head_out)
                gate, out_ = floats(new + 4 * (width + h * value_dim)), floats(head_out)
                for j in range(value_dim):
                    out_[j] *= gate[j] / (ONE + exp32(-gate[j]))
    return first * share * value_dim, last * share * value_dim
