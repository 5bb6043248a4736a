"""Compiled: a decode step of the whole model, run by every thread of a team. Activations are float32.

A step runs the rows of its list of operations, which `runtime.cpu.step` writes from ``formats.block_ops``. These pairs of
neighbours are one row: gate and up with the activation; a linear with the selection of its kept channels (all others have a
row of their own). A linear takes one barrier, a second one if its input is divided between the threads; a router takes
one, experts two for each token. Every thread has a copy of the whole residual stream, to which it adds the outputs of all
threads, as norms and selections need all of it.
"""

from __future__ import annotations

import math

import numpy as np

from .attention import attention, delta_net, latent_attention, mamba2, rms_norm, short_conv
from .barrier import barrier
from .intrinsics import (
    ONE,
    ZERO,
    exact,
    floats,
    num_threads,
    number,
    pointer,
    size_of,
    soft_cap,
    span,
    thread_num,
    widen,
    words,
)
from .layout import OpCode, OpField, PerLayerField, StepField
from .linear import output_rows
from .projections import activate_times, experts, gate_up, linear, linear_of_parts, router

_OP_BYTES = 8 * len(OpField)
_INT8, _NONE, _SQRT_HALF = np.int8(0), np.int64(0), np.float32(0.5**0.5)


@exact
def _norm(x, width, weight, rows, count, eps, out):
    """out (rows, count) = RMSNorm of the first columns of x (rows, width)."""
    for b in range(rows):
        rms_norm(x + 4 * b * width, weight, count, eps, out + 4 * b * count)


@exact
def _add(x, other, length, multiplier):
    x_, other_ = floats(x), floats(other)
    for j in range(length):
        x_[j] += multiplier * other_[j]


@exact
def _scale(x, length, factor):
    x_ = floats(x)
    for j in range(length):
        x_[j] *= factor


@exact
def _tap(x, rows, hidden, taps, width):
    """Copy x (rows, hidden) to ``taps``, of rows of ``width``."""
    for b in range(rows):
        from_, to = floats(x + 4 * b * hidden), floats(taps + 4 * b * width)
        for j in range(hidden):
            to[j] = from_[j]


@exact
def _logits(p, x, thread, threads, base_tag):
    """This thread's span of the logits of x (rows, hidden), multiplied and capped."""
    rows, hidden, vocab = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.VOCAB]
    head, scale, out, outputs = p[StepField.HEAD], p[StepField.HEAD_SCALE], p[StepField.LOGITS], p[StepField.OUTPUTS]
    lo, hi = vocab * thread // threads, vocab * (thread + 1) // threads
    if scale != 0:
        output_rows(head, hidden, lo, hi, x, hidden, rows, scale, out, outputs, vocab, _INT8)
    else:
        output_rows(head, hidden, lo, hi, x, hidden, rows, scale, out, outputs, vocab, base_tag)
    multiplier, cap = number(p[StepField.LOGITS_MULTIPLIER]), number(p[StepField.LOGITS_CAP])
    for b in range(rows):
        row = floats(out + 4 * words(outputs)[b] * vocab)
        if multiplier != ONE:
            for v in range(lo, hi):
                row[v] *= multiplier
        if cap > ZERO:
            for v in range(lo, hi):
                row[v] = soft_cap(row[v], cap)


@exact
def _per_layer_inputs(p, x, thread, threads, base_tag):
    """PER_LAYER_INPUTS = (PER_LAYER_INPUTS + norm(projection of the embeddings x)) * sqrt(1/2), for this thread's
    blocks."""
    rows, hidden, size = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.PER_LAYER]
    blocks, eps = p[StepField.NUM_BLOCKS], number(p[StepField.EPS])
    width, lo, hi = blocks * size, blocks * thread // threads * size, blocks * (thread + 1) // threads * size
    projected, factor = p[StepField.PER_LAYER_PROJECTED], ONE / np.float32(math.sqrt(np.float32(hidden)))
    weight, numbers = p[StepField.PER_LAYER_PROJECTION], p[StepField.ROW_NUMBERS]
    output_rows(weight, hidden, lo, hi, x, hidden, rows, _NONE, projected, numbers, width, base_tag)
    for b in range(rows):
        for at in range(b * width + lo, b * width + hi, size):
            projected_, inputs = floats(projected + 4 * at), floats(p[StepField.PER_LAYER_INPUTS] + 4 * at)
            for j in range(size):
                projected_[j] *= factor
            rms_norm(projected + 4 * at, p[StepField.PER_LAYER_NORM], size, eps, projected + 4 * at)
            for j in range(size):
                inputs[j] = (projected_[j] + inputs[j]) * _SQRT_HALF


@exact
def _per_layer(p, row, x, y, thread, threads, base_tag):
    """PER_LAYER. row: of `PerLayerRow`."""
    block, gate, projection = row[PerLayerField.BLOCK], row[PerLayerField.GATE], row[PerLayerField.PROJECTION]
    rows, hidden, size = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.PER_LAYER]
    gated, numbers = p[StepField.PER_LAYER_GATED], p[StepField.ROW_NUMBERS]
    activation, slope, limit = (
        p[StepField.ACTIVATION],
        number(p[StepField.CLAMP_SLOPE]),
        number(p[StepField.CLAMP_LIMIT]),
    )
    lo, hi = span(size, thread, threads), span(size, thread + 1, threads)
    output_rows(gate, hidden, lo, hi, x, hidden, rows, _NONE, gated, numbers, size, base_tag)
    for b in range(rows):
        inputs = p[StepField.PER_LAYER_INPUTS] + 4 * ((b * p[StepField.NUM_BLOCKS] + block) * size + lo)
        activate_times(gated + 4 * (b * size + lo), inputs, size, 1, hi - lo, activation, slope, limit)
    barrier(p[StepField.TEAM], threads)

    lo, hi = span(hidden, thread, threads), span(hidden, thread + 1, threads)
    output_rows(projection, size, lo, hi, gated, size, rows, _NONE, y, numbers, hidden, base_tag)
    barrier(p[StepField.TEAM], threads)


@exact
def step(p, base_tag, mixers, routed):
    """A token of every row: embedding, operations, final norm, logits. ``mixers``: None leaves out all but attention,
    ``routed``: None leaves out the experts; each is half of the compile time or more."""
    threads, thread = np.int64(num_threads()), np.int64(thread_num())
    rows, hidden = p[StepField.ROWS], p[StepField.HIDDEN]
    eps, multiplier = number(p[StepField.EPS]), number(p[StepField.EMBEDDING_MULTIPLIER])
    scratch = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES]
    residual, heads = scratch, scratch + p[StepField.INDEX_AT]

    tokens = words(p[StepField.TOKENS])
    for b in range(rows):
        source = pointer(p[StepField.EMBEDDING] + tokens[b] * hidden * size_of(base_tag), base_tag)
        target = floats(residual + 4 * b * hidden)
        for j in range(hidden):
            target[j] = widen(source[j]) * multiplier
    if p[StepField.PER_LAYER] != 0:
        _per_layer_inputs(p, residual, thread, threads, base_tag)

    lo = hi = np.int64(0)  # this thread's columns of the last divided value
    for i in range(p[StepField.NUM_OPS]):
        op = words(p[StepField.OPS] + i * _OP_BYTES)
        code, row = op[OpField.CODE], op[OpField.PARAMETERS]
        x, y = op[OpField.X] + thread * op[OpField.X_STEP], op[OpField.Y] + thread * op[OpField.Y_STEP]
        if code == OpCode.NORM:
            _norm(x, op[OpField.WIDTH], row, rows, op[OpField.COUNT], number(op[OpField.EPS]), y)
        elif code == OpCode.LINEAR:
            linear(p, op, x, y, thread, threads, base_tag)
        elif code == OpCode.ATTENTION:
            lo, hi = attention(p, row, x, thread, threads, y, heads, base_tag)
        elif code == OpCode.LINEAR_OF_PARTS:
            linear_of_parts(p, op, x, lo, hi, y, thread, threads, base_tag)
        elif code == OpCode.ADD:
            _add(y, x, rows * hidden, number(row))
        elif code == OpCode.GATE_UP:
            width = op[OpField.WIDTH]
            lo, hi = span(width, thread, threads), span(width, thread + 1, threads)
            first, last = op[OpField.FIRST], op[OpField.FIRST] + op[OpField.COUNT] - 1
            gate_up(p, first, last, x, rows, lo, hi, y, width, thread, base_tag)
        elif code == OpCode.SCALE:
            _scale(y, rows * hidden, number(row))
        elif code == OpCode.PER_LAYER:
            _per_layer(p, words(row), x, y, thread, threads, base_tag)
        elif code == OpCode.TAP and thread == 0:
            _tap(x, rows, hidden, y, op[OpField.WIDTH])
        if mixers is not None:
            z = op[OpField.Z] + thread * op[OpField.Z_STEP]
            if code == OpCode.DELTA_NET:
                lo, hi = delta_net(p, row, z, x, thread, threads, y, heads, base_tag)
            elif code == OpCode.SHORT_CONV:
                lo, hi = short_conv(p, row, x, thread, threads, y, heads, base_tag)
            elif code == OpCode.MAMBA2:
                lo, hi = mamba2(p, row, x, thread, threads, y, heads, base_tag)
            elif code == OpCode.LATENT_ATTENTION:
                norm_eps = number(op[OpField.EPS])
                lo, hi = latent_attention(p, row, x, z, norm_eps, thread, threads, y, heads, base_tag)
        if routed is not None:
            if code == OpCode.ROUTER:
                router(p, row, x, thread, threads)
            elif code == OpCode.EXPERTS:
                experts(p, op, x, y, thread, threads, base_tag)

    x = residual
    if p[StepField.FINAL_NORM] != 0:
        x = scratch + p[StepField.VALUE_AT]
        _norm(residual, hidden, p[StepField.FINAL_NORM], rows, hidden, eps, x)
    _logits(p, x, thread, threads, base_tag)
    barrier(p[StepField.TEAM], threads)
