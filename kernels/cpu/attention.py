"""Compiled: RMSNorm, rotary embeddings, and one token's attention over the cache."""

from __future__ import annotations

import math

import numpy as np

from .intrinsics import (
    ONE,
    ZERO,
    dot,
    exact,
    exp32,
    floats,
    narrow,
    pointer,
    size_of,
    soft_cap,
    widen,
    words,
)
from .layout import BlockField, FloatField, StepField

BLOCK_BYTES = 8 * len(BlockField)


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
def _place(x, dim, block, position, norm, factor, after, eps, out):
    """A head's q or k (dim,), normalised by ``norm`` (dim,) and rotated to its position. ``factor`` is 1 / rms of the
    whole vector, 0 where each head has its own; ``after``: normalise after the rotation."""
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
    half = block[BlockField.ROTARY_HALF]
    row = 4 * position * half
    cos_, sin_ = floats(block[BlockField.COS] + row), floats(block[BlockField.SIN] + row)
    if block[BlockField.INTERLEAVED] == 0:
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


@dot
def _attend(q, heads, keys, values, start, end, dim, scale, cap, scores, max_len, out, tag):
    """out = softmax(cap(scale * q k^T)) v for the heads that share one key-value head. q, out: (heads, dim); keys,
    values: (max_len, dim), positions start..end; scores: (heads, max_len), scratch."""
    size = size_of(tag)
    for h in range(heads):
        q_, s_ = floats(q + 4 * h * dim), floats(scores + 4 * h * max_len)
        for i in range(start, end):
            key = pointer(keys + i * dim * size, tag)
            s = ZERO
            for d in range(dim):
                s += q_[d] * widen(key[d])
            s_[i] = s * scale
        if cap > ZERO:
            for i in range(start, end):
                s_[i] = soft_cap(s_[i], cap)
    for h in range(heads):
        s_, out_ = floats(scores + 4 * h * max_len), floats(out + 4 * h * dim)
        top = s_[start]
        for i in range(start, end):
            top = max(top, s_[i])
        total = ZERO
        for i in range(start, end):
            e = exp32(s_[i] - top)
            s_[i] = e
            total += e
        for d in range(dim):
            out_[d] = ZERO
        i = start
        while i < end:
            # Four positions a pass; beyond the end the weight is 0.
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
def attention(p, block, part, parts, out, scratch, tag):
    """Attention of this thread's heads, for every row, appending k and v to the cache; returns its columns of ``out``.
    out: (rows, q_size), of which this thread writes its heads' columns; scratch: (heads, dim) float32."""
    rows, heads, max_len = p[StepField.ROWS], p[StepField.HEADS], p[StepField.MAX_LEN]
    block_, constants = words(p[StepField.BLOCKS] + block * BLOCK_BYTES), floats(p[StepField.FLOATS])
    eps, cap = constants[FloatField.EPS], constants[FloatField.ATTENTION_CAP]
    slots, positions = words(p[StepField.SLOTS]), words(p[StepField.POSITIONS])
    window, kv_heads, dim = block_[BlockField.WINDOW], block_[BlockField.KV_HEADS], block_[BlockField.HEAD_DIM]
    size = size_of(tag)
    q_size, share = heads * dim, heads // kv_heads
    stride = 2 * dim if p[StepField.GATED] != 0 else dim  # from a query to the next: the gate lies between
    keys_from, width = heads * stride, block_[BlockField.INPUT_WIDTH]
    values_from = width - kv_heads * dim
    q_norm, k_norm, v_norm = block_[BlockField.Q_NORM], block_[BlockField.K_NORM], block_[BlockField.VALUE_NORM]
    whole, after = p[StepField.QK_WHOLE], p[StepField.QK_AFTER]
    norm_bytes = 4 * dim if whole != 0 else 0  # from a head's weights to the next
    first, last = heads * part // parts, heads * (part + 1) // parts
    for b in range(rows):
        qkv = p[StepField.QKV] + 4 * b * width
        position = positions[b]
        scale = constants[FloatField.ATTENTION_SCALE]
        if p[StepField.QUERY_SCALES] != 0:
            scale *= floats(p[StepField.QUERY_SCALES])[position]
        q_factor = k_factor = ZERO
        if whole != 0:
            q_factor, k_factor = _rms_factor(qkv, q_size, eps), _rms_factor(qkv + 4 * keys_from, kv_heads * dim, eps)
        start = max(0, position + 1 - window) if window > 0 else 0
        h = first
        while h < last:
            group = h // share
            stop = min(last, (group + 1) * share)
            row = (slots[b] * kv_heads + group) * max_len * dim * size
            keys, values = block_[BlockField.KEYS] + row, block_[BlockField.VALUES] + row
            # Two threads that share a group both append it, with the same bits.
            _place(
                qkv + 4 * (keys_from + group * dim), dim, block_, position, k_norm + group * norm_bytes, k_factor,
                after, eps, scratch,
            )  # fmt: skip
            key, value = pointer(keys + position * dim * size, tag), pointer(values + position * dim * size, tag)
            rotated, fresh = floats(scratch), qkv + 4 * (values_from + group * dim)
            for d in range(dim):
                key[d] = narrow(rotated[d], tag)
            if v_norm != 0:
                rms_norm(fresh, v_norm, dim, eps, scratch)
                fresh = scratch
            v = floats(fresh)
            for d in range(dim):
                value[d] = narrow(v[d], tag)
            for i in range(h, stop):
                _place(
                    qkv + 4 * i * stride, dim, block_, position, q_norm + i * norm_bytes, q_factor, after, eps,
                    scratch + 4 * (i - h) * dim,
                )  # fmt: skip
            _attend(
                scratch, stop - h, keys, values, start, position + 1, dim, scale, cap,
                p[StepField.SCORES] + 4 * h * max_len, max_len, out + 4 * (b * q_size + h * dim), tag,
            )  # fmt: skip
            if stride != dim:
                for i in range(h, stop):
                    out_, gate_ = floats(out + 4 * (b * q_size + i * dim)), floats(qkv + 4 * (i * stride + dim))
                    for d in range(dim):
                        out_[d] = out_[d] / (ONE + exp32(-gate_[d]))
            h = stop
    return first * dim, last * dim
