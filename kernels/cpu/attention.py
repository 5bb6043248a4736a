"""Compiled: RMSNorm, rotary embedding, and one token's attention over the cache."""

from __future__ import annotations

import math

import numpy as np

from .intrinsics import ONE, ZERO, dot, exact, exp32, floats, narrow, pointer, size_of, widen
from .layout import StepField

__all__ = ["attention", "rms_norm"]


@dot
def rms_norm(x, weight, n, eps, out):
    x_, weight_, out_ = floats(x), floats(weight), floats(out)
    total = ZERO
    for i in range(n):
        total += x_[i] * x_[i]
    factor = ONE / np.float32(math.sqrt(total / np.float32(n) + eps))
    for i in range(n):
        out_[i] = x_[i] * factor * weight_[i]


@exact
def _rotate(x, dim, half, cos, sin, norm, eps, out):
    """A head's q or k: optional RMSNorm, then the rotary embedding of its first ``2 * half`` entries."""
    x_, out_, cos_, sin_ = floats(x), floats(out), floats(cos), floats(sin)
    if norm != 0:
        rms_norm(x, norm, dim, eps, out)
    else:
        for i in range(dim):
            out_[i] = x_[i]
    for i in range(half):
        a, b = out_[i], out_[i + half]
        out_[i] = a * cos_[i] - b * sin_[i]
        out_[i + half] = b * cos_[i] + a * sin_[i]


@dot
def _attend(q, heads, keys, values, start, end, dim, scale, scores, max_len, out, tag):
    """softmax(scale * q k^T) v for the heads that share one key-value head.

    q is (heads, dim); keys and values are (max_len, dim), of which start..end are attended to; scores (heads, max_len)
    is scratch.
    """
    size = size_of(tag)
    for h in range(heads):
        q_, s_ = floats(q + 4 * h * dim), floats(scores + 4 * h * max_len)
        for i in range(start, end):
            key = pointer(keys + i * dim * size, tag)
            s = ZERO
            for d in range(dim):
                s += q_[d] * widen(key[d])
            s_[i] = s * scale
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
            # Four positions per pass; beyond the end the weight is 0 and the last row is read again.
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
    """Attention of this thread's span of heads, for every row; appends k and v to the cache on the way.

    ``out`` (rows, q_size) is this thread's own; only its heads' columns are written.
    """
    rows, heads, kv_heads = p[StepField.ROWS], p[StepField.HEADS], p[StepField.KV_HEADS]
    dim, half, max_len = p[StepField.HEAD_DIM], p[StepField.ROTARY_HALF], p[StepField.MAX_LEN]
    constants = floats(p[StepField.FLOATS])
    eps, scale = constants[0], constants[1]
    slots, positions = pointer(p[StepField.SLOTS], np.int64(0)), pointer(p[StepField.POSITIONS], np.int64(0))
    window = pointer(p[StepField.WINDOWS], np.int64(0))[block]
    size = size_of(tag)
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
            rotated, fresh = floats(scratch), floats(qkv + 4 * (q_size + (kv_heads + group) * dim))
            key, value = pointer(keys + position * dim * size, tag), pointer(values + position * dim * size, tag)
            for d in range(dim):
                key[d] = narrow(rotated[d], tag)
                value[d] = narrow(fresh[d], tag)
            for i in range(h, stop):
                _rotate(qkv + 4 * i * dim, dim, half, cos, sin, q_norm, eps, scratch + 4 * (i - h) * dim)
            _attend(
                scratch, stop - h, keys, values, start, position + 1, dim, scale, p[StepField.SCORES] + 4 * h * max_len,
                max_len, out + 4 * (b * q_size + h * dim), tag,
            )  # fmt: skip
            h = stop
    return first * dim, last * dim
