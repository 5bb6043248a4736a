"""Compiled: one token's step of a gated DeltaNet, in float32. The definition is ``runtime.torch.block``.

    c     = silu(sum over taps of kernel * inputs)                     of queries, keys and values, channel by channel
    S     = exp(g) S + k (beta (v - exp(g) k^T S))^T,   o = S^T q      for each value head; q and k have length 1
    out   = o / rms(o) * norm * silu(z)

g = -rate * softplus(a.x + dt_bias) and beta = sigmoid(b.x) are numbers of a head.
"""

from __future__ import annotations

import math

import numpy as np

from .attention import rms_norm
from .intrinsics import ONE, ZERO, dot, exact, exp32, floats, narrow, pointer, size_of, widen, words
from .layout import DeltaField, FloatField, StepField

_LENGTH_EPS = np.float32(1e-6)  # of the squared length by which queries and keys are divided


@exact
def _convolve(new, inputs, kernel, taps, width, lo, count, out, tag):
    """out = silu(convolution) of ``count`` channels from ``lo`` on; ``inputs`` shift by one position. new: (width,)
    float32, this position's input; inputs: (taps - 1, width) of the base type, oldest first; kernel: (taps, width)
    float32."""
    size = size_of(tag)
    out_, new_, newest_tap = floats(out), floats(new), floats(kernel + 4 * (taps - 1) * width)
    for j in range(count):
        out_[j] = newest_tap[lo + j] * new_[lo + j]
    for t in range(taps - 1):
        here, tap = pointer(inputs + t * width * size, tag), floats(kernel + 4 * t * width)
        for j in range(count):
            out_[j] += tap[lo + j] * widen(here[lo + j])
        if t + 2 < taps:
            later = pointer(inputs + (t + 1) * width * size, tag)
            for j in range(count):
                here[lo + j] = later[lo + j]
        else:
            for j in range(count):
                here[lo + j] = narrow(new_[lo + j], tag)
    for j in range(count):
        out_[j] = out_[j] / (ONE + exp32(-out_[j]))


@dot
def _product(a, b, n):
    a_, b_ = floats(a), floats(b)
    total = ZERO
    for i in range(n):
        total += a_[i] * b_[i]
    return total


@exact
def _scale_to(x, n, length):
    """Scale a vector to a length."""
    factor = length / np.float32(math.sqrt(_product(x, x, n) + _LENGTH_EPS))
    x_ = floats(x)
    for i in range(n):
        x_[i] *= factor


@exact
def _update(state, q, k, v, key_dim, value_dim, decay, beta, recalled, out):
    """Update a head's state (key_dim, value_dim) and read it into ``out`` (value_dim,); ``recalled`` is scratch."""
    q_, k_, v_, recalled_, out_ = floats(q), floats(k), floats(v), floats(recalled), floats(out)
    for j in range(value_dim):
        recalled_[j] = ZERO
    for i in range(key_dim):
        row, here = floats(state + 4 * i * value_dim), k_[i]
        for j in range(value_dim):
            recalled_[j] += here * row[j]
    for j in range(value_dim):
        recalled_[j] = beta * (v_[j] - decay * recalled_[j])
        out_[j] = ZERO
    for i in range(key_dim):
        row, here, asked = floats(state + 4 * i * value_dim), k_[i], q_[i]
        for j in range(value_dim):
            moved = decay * row[j] + here * recalled_[j]
            row[j] = moved
            out_[j] += asked * moved


@exact
def delta_net(p, table, part, parts, x, mixed, out, scratch, tag):
    """This thread's key heads and the value heads that share them, for every row; returns its columns of ``out``. x:
    (rows, hidden) float32; mixed: (rows, mixed_size + value_size) float32, queries, keys, values, then the gate; out:
    (rows, value_size), of which this thread writes its heads' columns; scratch: 2 * (key_dim + value_dim) float32."""
    field = words(table)
    rows, hidden = p[StepField.ROWS], p[StepField.HIDDEN]
    slots = words(p[StepField.SLOTS])
    eps = floats(p[StepField.FLOATS])[FloatField.EPS]
    key_heads, value_heads = field[DeltaField.KEY_HEADS], field[DeltaField.VALUE_HEADS]
    key_dim, value_dim, taps = field[DeltaField.KEY_DIM], field[DeltaField.VALUE_DIM], field[DeltaField.TAPS]
    kernel, share = field[DeltaField.KERNEL], value_heads // key_heads
    key_size, value_size = key_heads * key_dim, value_heads * value_dim
    width = 2 * key_size + value_size
    rate, dt_bias = floats(field[DeltaField.RATE]), floats(field[DeltaField.DT_BIAS])
    q, k, v = scratch, scratch + 4 * key_dim, scratch + 8 * key_dim
    recalled = v + 4 * value_dim
    first, last = key_heads * part // parts, key_heads * (part + 1) // parts
    for b in range(rows):
        new = mixed + 4 * b * (width + value_size)
        inputs = field[DeltaField.INPUTS] + slots[b] * (taps - 1) * width * size_of(tag)
        for group in range(first, last):
            _convolve(new, inputs, kernel, taps, width, group * key_dim, key_dim, q, tag)
            _convolve(new, inputs, kernel, taps, width, key_size + group * key_dim, key_dim, k, tag)
            _scale_to(q, key_dim, ONE / np.float32(math.sqrt(np.float32(key_dim))))
            _scale_to(k, key_dim, ONE)
            for h in range(group * share, (group + 1) * share):
                _convolve(new, inputs, kernel, taps, width, 2 * key_size + h * value_dim, value_dim, v, tag)
                beta = ONE / (ONE + exp32(-_product(x + 4 * b * hidden, field[DeltaField.B] + 4 * h * hidden, hidden)))
                step = _product(x + 4 * b * hidden, field[DeltaField.A] + 4 * h * hidden, hidden) + dt_bias[h]
                # softplus, which above 20 is the number itself
                step = np.float32(math.log1p(math.exp(np.float64(step)))) if step < np.float32(20) else step
                target = out + 4 * (b * value_size + h * value_dim)
                _update(
                    field[DeltaField.STATES] + 4 * (slots[b] * value_heads + h) * key_dim * value_dim, q, k, v,
                    key_dim, value_dim, exp32(-rate[h] * step), beta, recalled, target,
                )  # fmt: skip
                rms_norm(target, field[DeltaField.NORM], value_dim, eps, target)
                gate, target_ = floats(new + 4 * (width + h * value_dim)), floats(target)
                for j in range(value_dim):
                    target_[j] *= gate[j] / (ONE + exp32(-gate[j]))
    return first * share * value_dim, last * share * value_dim
