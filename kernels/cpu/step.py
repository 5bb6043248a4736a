"""Compiled: a decode step of the whole model, run by every thread of a team. Activations are float32.

A block takes five barriers; with experts three, and two for each token; with PER_LAYER two more. Every thread has a
copy of the whole residual stream, to which it adds the outputs of all threads, as norms and selections need all of it.
"""

from __future__ import annotations

import math

import numpy as np

from .attention import BLOCK_BYTES, attention, delta_net, rms_norm
from .barrier import barrier
from .intrinsics import (
    ONE,
    ZERO,
    exact,
    floats,
    num_threads,
    pointer,
    size_of,
    soft_cap,
    span,
    thread_num,
    widen,
    words,
)
from .layout import PARTIAL_EXTRA, BlockField, FloatField, ProjectionField, StepField
from .linear import gather, output_rows, project, select
from .mlp import ROW_BYTES, activate_times, mlp

_INT8, _NONE, _SQRT_HALF = np.int8(0), np.int64(0), np.float32(0.5**0.5)


@exact
def _normed(x, norm, rows, hidden, eps, out):
    """RMSNorm of x (rows, hidden) into ``out``; returns ``out``, or x if ``norm`` is 0."""
    if norm == 0:
        return x
    for b in range(rows):
        rms_norm(x + 4 * b * hidden, norm, hidden, eps, out + 4 * b * hidden)
    return out


@exact
def _add(residual, half, length, multiplier):
    r, h = floats(residual), floats(half)
    for j in range(length):
        r[j] += multiplier * h[j]


@exact
def _tap(p, index, residual, rows, hidden):
    """Copy the rows' input of block ``index`` to TAPS, if a draft head reads it."""
    if p[StepField.TAPPED] != 0:
        tapped = words(p[StepField.TAPPED])
        if tapped[index] >= 0:
            x, taps = floats(residual), floats(p[StepField.TAPS])
            for b in range(rows):
                at = b * tapped[p[StepField.NUM_BLOCKS] + 1] + tapped[index]
                for j in range(hidden):
                    taps[at + j] = x[b * hidden + j]


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
    constants = floats(p[StepField.FLOATS])
    multiplier, cap = constants[FloatField.LOGITS_MULTIPLIER], constants[FloatField.LOGITS_CAP]
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
    blocks, eps = p[StepField.NUM_BLOCKS], floats(p[StepField.FLOATS])[FloatField.EPS]
    width, lo, hi = blocks * size, blocks * thread // threads * size, blocks * (thread + 1) // threads * size
    projected, factor = p[StepField.PER_LAYER_PROJECTED], ONE / np.float32(math.sqrt(np.float32(hidden)))
    output_rows(
        p[StepField.PER_LAYER_PROJECTION], hidden, lo, hi, x, hidden, rows, _NONE, projected, p[StepField.ROW_NUMBERS],
        width, base_tag,
    )  # fmt: skip
    for b in range(rows):
        for at in range(b * width + lo, b * width + hi, size):
            projected_, inputs = floats(projected + 4 * at), floats(p[StepField.PER_LAYER_INPUTS] + 4 * at)
            for j in range(size):
                projected_[j] *= factor
            rms_norm(projected + 4 * at, p[StepField.PER_LAYER_NORM], size, eps, projected + 4 * at)
            for j in range(size):
                inputs[j] = (projected_[j] + inputs[j]) * _SQRT_HALF


@exact
def _add_per_layer(p, block, residual, normed, thread, threads, base_tag):
    """residual += norm(projection @ (activation(gate @ residual) * PER_LAYER_INPUTS))."""
    block_ = words(p[StepField.BLOCKS] + block * BLOCK_BYTES)
    rows, hidden, size = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.PER_LAYER]
    gated, half, row_ids = p[StepField.PER_LAYER_GATED], p[StepField.HALF], p[StepField.ROW_NUMBERS]
    constants = floats(p[StepField.FLOATS])
    lo, hi = span(size, thread, threads), span(size, thread + 1, threads)
    output_rows(
        block_[BlockField.PER_LAYER_GATE], hidden, lo, hi, residual, hidden, rows, _NONE, gated, row_ids, size, base_tag
    )
    for b in range(rows):
        inputs = p[StepField.PER_LAYER_INPUTS] + 4 * ((b * p[StepField.NUM_BLOCKS] + block) * size + lo)
        activate_times(gated + 4 * (b * size + lo), inputs, size, 1, hi - lo, p[StepField.ACTIVATION], constants)
    barrier(p[StepField.TEAM], threads)

    lo, hi = span(hidden, thread, threads), span(hidden, thread + 1, threads)
    output_rows(
        block_[BlockField.PER_LAYER_PROJECTION], size, lo, hi, gated, size, rows, _NONE, half, row_ids, hidden, base_tag
    )
    barrier(p[StepField.TEAM], threads)

    x = _normed(half, block_[BlockField.PER_LAYER_OUTPUT], rows, hidden, constants[FloatField.EPS], normed)
    _add(residual, x, rows * hidden, ONE)


@exact
def step(p, base_tag, kind):
    """A token of every row: embedding, blocks, final norm, logits. ``kind``: see `mlp`."""
    threads, thread = np.int64(num_threads()), np.int64(thread_num())
    team = p[StepField.TEAM]
    rows, hidden = p[StepField.ROWS], p[StepField.HIDDEN]
    constants = floats(p[StepField.FLOATS])
    eps, multiplier = constants[FloatField.EPS], constants[FloatField.RESIDUAL_MULTIPLIER]
    half, qkv = p[StepField.HALF], p[StepField.QKV]
    thresholds = p[StepField.THRESHOLDS]

    residual = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES]
    normed = residual + p[StepField.NORMED_AT]
    acc = residual + p[StepField.ACC_AT]
    index, value = residual + p[StepField.INDEX_AT], residual + p[StepField.VALUE_AT]
    partial = residual + p[StepField.PARTIAL_AT]
    length, acc_stride = p[StepField.LIST_LENGTH], p[StepField.ACC_LENGTH]
    partial_stride = acc_stride + PARTIAL_EXTRA
    seg_index, seg_value, seg_count = p[StepField.SEGMENT_INDEX], p[StepField.SEGMENT_VALUE], p[StepField.SEGMENT_COUNT]
    segments = words(seg_count)
    counts = p[StepField.COUNTS] + 8 * thread * p[StepField.NUM_PROJECTIONS]
    spare = p[StepField.SPARE_COUNTS] + 8 * thread  # all threads select the same channels, thread 0 counts

    lo, hi = span(hidden, thread, threads), span(hidden, thread + 1, threads)

    tokens = words(p[StepField.TOKENS])
    for b in range(rows):
        source = pointer(p[StepField.EMBEDDING] + tokens[b] * hidden * size_of(base_tag), base_tag)
        target = floats(residual + 4 * b * hidden)
        for j in range(hidden):
            target[j] = widen(source[j]) * constants[FloatField.EMBEDDING_MULTIPLIER]
    if p[StepField.PER_LAYER] != 0:
        _per_layer_inputs(p, residual, thread, threads, base_tag)

    for block in range(p[StepField.NUM_BLOCKS]):
        block_ = words(p[StepField.BLOCKS] + block * BLOCK_BYTES)
        first, num_qkv, width = block_[BlockField.FIRST], block_[BlockField.NUM_INPUTS], block_[BlockField.INPUT_WIDTH]
        qkv_lo, qkv_hi = span(width, thread, threads), span(width, thread + 1, threads)
        if thread == 0:
            _tap(p, block, residual, rows, hidden)

        # q, k, v: this thread's columns of the concatenated outputs.
        x = _normed(residual, block_[BlockField.ATTENTION_INPUT], rows, hidden, eps, normed)
        begin = np.int64(0)
        for i in range(num_qkv):
            row = p[StepField.PROJECTIONS] + (first + i) * ROW_BYTES
            field = words(row)
            end = begin + field[ProjectionField.N]
            from_, to = max(begin, qkv_lo), min(end, qkv_hi)
            if from_ < to or thread == 0:
                count = select(
                    x, hidden, rows, 0, hidden, row, thresholds + 8 * (first + i), index, value, length,
                    counts + 8 * (first + i) if thread == 0 else spare,
                )  # fmt: skip
                if from_ < to:
                    project(
                        row, index, value, count, length, rows, from_ - begin, to - begin, qkv + 4 * from_, width,
                        partial, partial_stride, base_tag,
                    )  # fmt: skip
            begin = end
        barrier(team, threads)

        # Attention of this thread's heads into the accumulator, then the list of o's kept channels among them.
        if block_[BlockField.DELTA] != 0:
            a_lo, a_hi = delta_net(p, block_[BlockField.DELTA], thread, threads, x, qkv, acc, index, base_tag)
        else:
            a_lo, a_hi = attention(p, block, thread, threads, acc, index, base_tag)
        i = first + num_qkv
        row = p[StepField.PROJECTIONS] + i * ROW_BYTES
        field = words(row)
        begin = a_lo * field[ProjectionField.PLANES]
        segments[2 * thread] = begin
        segments[2 * thread + 1] = select(
            acc, field[ProjectionField.K], rows, a_lo, a_hi, row, thresholds + 8 * i, seg_index + 4 * begin,
            seg_value + 4 * begin, length, counts + 8 * i,
        )  # fmt: skip
        barrier(team, threads)

        count = gather(seg_index, seg_value, length, seg_count, threads, rows, index, value, length)
        project(
            row, index, value, count, length, rows, lo, hi, half + 4 * lo, hidden, partial, partial_stride, base_tag
        )
        barrier(team, threads)

        x = _normed(half, block_[BlockField.ATTENTION_OUTPUT], rows, hidden, eps, normed)
        _add(residual, x, rows * hidden, multiplier)

        x = _normed(residual, block_[BlockField.MLP_INPUT], rows, hidden, eps, normed)
        mlp(kind, p, block, x, thread, threads, base_tag)
        barrier(team, threads)

        x = half
        if block_[BlockField.BESIDE] != 0:
            x = acc
            for b in range(rows):
                experts, dense = acc + 4 * b * hidden, normed + 4 * b * hidden
                rms_norm(half + 4 * b * hidden, block_[BlockField.EXPERTS_OUTPUT], hidden, eps, experts)
                rms_norm(p[StepField.BESIDE] + 4 * b * hidden, block_[BlockField.SHARED_OUTPUT], hidden, eps, dense)
                _add(experts, dense, hidden, ONE)
        x = _normed(x, block_[BlockField.MLP_OUTPUT], rows, hidden, eps, normed)
        _add(residual, x, rows * hidden, multiplier)
        if p[StepField.PER_LAYER] != 0:
            _add_per_layer(p, block, residual, normed, thread, threads, base_tag)
        if block_[BlockField.SCALAR] != 0:
            scalar, r = floats(block_[BlockField.SCALAR])[0], floats(residual)
            for j in range(rows * hidden):
                r[j] *= scalar

    if thread == 0:
        _tap(p, p[StepField.NUM_BLOCKS], residual, rows, hidden)
    x = _normed(residual, p[StepField.FINAL_NORM], rows, hidden, eps, normed)
    _logits(p, x, thread, threads, base_tag)
    barrier(team, threads)
