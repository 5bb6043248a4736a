"""Compiled: one decode step of the whole model, run by every thread of a team. Activations are float32.

A block takes five barriers. After each half every thread adds all of it to a residual of its own, since a norm and the
next half's selection need all of it.
"""

from __future__ import annotations

import numpy as np

from .attention import BLOCK_BYTES, attention, delta_net, rms_norm
from .intrinsics import (
    ONE,
    ZERO,
    add_word,
    exact,
    exp32,
    floats,
    get_word,
    now_ns,
    num_threads,
    pointer,
    put_word,
    relax,
    size_of,
    sleep_us,
    soft_cap,
    span,
    thread_num,
    widen,
    words,
)
from .layout import PARTIAL_MORE, BlockField, FloatField, ProjectionField, StepField, TeamField
from .linear import gather, output_rows, project, select

_ARRIVED, _PASSED, _WAITED = (8 * field.value for field in TeamField if field != TeamField.SIZE)
_SPINS = 64  # between two readings of the clock
_SPIN_NS = 100_000  # a thread that is later than this has no core: sleep until it comes
_SLEEP_US = 50
_INT8 = np.int8(0)
_ROW_BYTES = 8 * len(ProjectionField)
# GELU's tanh approximation: 0.5 x (1 + tanh(t / 2)) = x / (1 + e**-t) with t = sqrt(8 / pi) (x + 0.044715 x**3).
_GELU_SLOPE, _GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.044715)


@exact
def barrier(team, parts):
    """Wait until all ``parts`` threads are here: spin, then sleep; ``team`` is the address of a `TeamField`."""
    if parts == 1:
        return
    arrived, passed = team + _ARRIVED, team + _PASSED
    now = get_word(passed)
    place = add_word(arrived, np.int64(1))
    if place + 1 == parts:
        put_word(arrived, np.int64(0))
        put_word(passed, now + 1)
        return
    began = np.int64(0)
    while True:
        for _ in range(_SPINS):
            if get_word(passed) != now:
                return
            relax()
        if began == 0:
            began = now_ns()
        elif now_ns() - began > _SPIN_NS:
            break
    while get_word(passed) == now:
        sleep_us(np.uint32(_SLEEP_US))
    if place == 0:  # only the thread that waited longest counts it
        add_word(team + _WAITED, now_ns() - began)


@exact
def _normed(x, norm, rows, hidden, eps, out):
    """x (rows, hidden) normalised into ``out``; x itself without a norm."""
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
def activate_times(gate, up, stride, rows, width, gelu):
    """gate = activation(gate) * up."""
    for b in range(rows):
        g, u = floats(gate + 4 * b * stride), floats(up + 4 * b * stride)
        if gelu == 0:
            for j in range(width):
                g[j] = g[j] / (ONE + exp32(-g[j])) * u[j]
        else:
            for j in range(width):
                t = _GELU_SLOPE * (g[j] + _GELU_CUBIC * g[j] * g[j] * g[j])
                g[j] = g[j] / (ONE + exp32(-t)) * u[j]


@exact
def _logits(p, x, part, parts, base_tag):
    """This thread's span of every row's logits, multiplied and capped; x: (rows, hidden)."""
    rows, hidden, vocab = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.VOCAB]
    head, scale, out, outputs = p[StepField.HEAD], p[StepField.HEAD_SCALE], p[StepField.LOGITS], p[StepField.OUTPUTS]
    lo, hi = vocab * part // parts, vocab * (part + 1) // parts
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
def step(p, base_tag):
    """One token for every row: embedding, blocks, final norm, logits."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    team = p[StepField.TEAM]
    rows, hidden, inner = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.INTERMEDIATE]
    num_gate_up = p[StepField.NUM_GATE_UP]
    constants = floats(p[StepField.FLOATS])
    eps, multiplier = constants[FloatField.EPS], constants[FloatField.RESIDUAL_MULTIPLIER]
    half, qkv = p[StepField.HALF], p[StepField.QKV]
    thresholds = p[StepField.THRESHOLDS]

    residual = p[StepField.SCRATCH] + part * p[StepField.SCRATCH_BYTES]
    normed = residual + p[StepField.NORMED_AT]
    acc, acc_up = residual + p[StepField.ACC_AT], residual + p[StepField.ACC_UP_AT]
    index, value = residual + p[StepField.INDEX_AT], residual + p[StepField.VALUE_AT]
    partial = residual + p[StepField.PARTIAL_AT]
    length, acc_stride = p[StepField.LIST_LENGTH], p[StepField.ACC_LENGTH]
    partial_stride = acc_stride + PARTIAL_MORE
    seg_index, seg_value, seg_count = p[StepField.SEGMENT_INDEX], p[StepField.SEGMENT_VALUE], p[StepField.SEGMENT_COUNT]
    segments = words(seg_count)
    counts = p[StepField.COUNTS] + 8 * part * p[StepField.NUM_PROJECTIONS]
    spare = p[StepField.SPARE_COUNTS] + 8 * part  # what every thread selects for itself is counted by thread 0 only

    lo, hi = span(hidden, part, parts), span(hidden, part + 1, parts)
    mlp_lo, mlp_hi = span(inner, part, parts), span(inner, part + 1, parts)

    tokens = words(p[StepField.TOKENS])
    for b in range(rows):
        source = pointer(p[StepField.EMBEDDING] + tokens[b] * hidden * size_of(base_tag), base_tag)
        target = floats(residual + 4 * b * hidden)
        for j in range(hidden):
            target[j] = widen(source[j]) * constants[FloatField.EMBEDDING_MULTIPLIER]

    for block in range(p[StepField.NUM_BLOCKS]):
        block_ = words(p[StepField.BLOCKS] + block * BLOCK_BYTES)
        first, num_qkv, width = block_[BlockField.FIRST], block_[BlockField.NUM_INPUTS], block_[BlockField.INPUT_WIDTH]
        qkv_lo, qkv_hi = span(width, part, parts), span(width, part + 1, parts)

        # q, k, v: this thread's columns of all of them together.
        x = _normed(residual, block_[BlockField.ATTENTION_INPUT], rows, hidden, eps, normed)
        begin = np.int64(0)
        for i in range(num_qkv):
            row = p[StepField.PROJECTIONS] + (first + i) * _ROW_BYTES
            field = words(row)
            end = begin + field[ProjectionField.N]
            from_, to = max(begin, qkv_lo), min(end, qkv_hi)
            if from_ < to or part == 0:
                count = select(
                    x, hidden, rows, 0, hidden, row, thresholds + 8 * (first + i), index, value, length,
                    counts + 8 * (first + i) if part == 0 else spare,
                )  # fmt: skip
                if from_ < to:
                    project(
                        row, index, value, count, length, rows, from_ - begin, to - begin, qkv + 4 * from_, width,
                        partial, partial_stride, base_tag,
                    )  # fmt: skip
            begin = end
        barrier(team, parts)

        # This thread's heads into the accumulator, and their kept channels listed for o.
        if block_[BlockField.DELTA] != 0:
            a_lo, a_hi = delta_net(p, block_[BlockField.DELTA], part, parts, x, qkv, acc, index, base_tag)
        else:
            a_lo, a_hi = attention(p, block, part, parts, acc, index, base_tag)
        i = first + num_qkv
        row = p[StepField.PROJECTIONS] + i * _ROW_BYTES
        field = words(row)
        begin = a_lo * field[ProjectionField.PLANES]
        segments[2 * part] = begin
        segments[2 * part + 1] = select(
            acc, field[ProjectionField.K], rows, a_lo, a_hi, row, thresholds + 8 * i, seg_index + 4 * begin,
            seg_value + 4 * begin, length, counts + 8 * i,
        )  # fmt: skip
        barrier(team, parts)

        count = gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        project(
            row, index, value, count, length, rows, lo, hi, half + 4 * lo, hidden, partial, partial_stride, base_tag
        )
        barrier(team, parts)

        x = _normed(half, block_[BlockField.ATTENTION_OUTPUT], rows, hidden, eps, normed)
        _add(residual, x, rows * hidden, multiplier)

        # gate and up into the two accumulators, and the kept channels of their product listed for down.
        x = _normed(residual, block_[BlockField.MLP_INPUT], rows, hidden, eps, normed)
        count = 0
        for i in range(2):
            j = first + num_qkv + 1 + (i if num_gate_up == 2 else 0)
            row = p[StepField.PROJECTIONS] + j * _ROW_BYTES
            offset = 0 if num_gate_up == 2 else i * inner
            if i == 0 or num_gate_up == 2:
                count = select(
                    x, hidden, rows, 0, hidden, row, thresholds + 8 * j, index, value, length,
                    counts + 8 * j if part == 0 else spare,
                )  # fmt: skip
            project(
                row, index, value, count, length, rows, offset + mlp_lo, offset + mlp_hi, acc if i == 0 else acc_up,
                acc_stride, partial, partial_stride, base_tag,
            )  # fmt: skip
        activate_times(acc, acc_up, acc_stride, rows, mlp_hi - mlp_lo, p[StepField.GELU])
        i = first + num_qkv + num_gate_up + 1
        row = p[StepField.PROJECTIONS] + i * _ROW_BYTES
        begin = mlp_lo * words(row)[ProjectionField.PLANES]
        segments[2 * part] = begin
        # The accumulator begins at column mlp_lo, select counts from column 0.
        segments[2 * part + 1] = select(
            acc - 4 * mlp_lo, acc_stride, rows, mlp_lo, mlp_hi, row, thresholds + 8 * i, seg_index + 4 * begin,
            seg_value + 4 * begin, length, counts + 8 * i,
        )  # fmt: skip
        barrier(team, parts)

        count = gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        project(
            row, index, value, count, length, rows, lo, hi, half + 4 * lo, hidden, partial, partial_stride, base_tag
        )
        barrier(team, parts)

        x = _normed(half, block_[BlockField.MLP_OUTPUT], rows, hidden, eps, normed)
        _add(residual, x, rows * hidden, multiplier)
        if block_[BlockField.SCALAR] != 0:
            scalar, r = floats(block_[BlockField.SCALAR])[0], floats(residual)
            for j in range(rows * hidden):
                r[j] *= scalar

    x = _normed(residual, p[StepField.FINAL_NORM], rows, hidden, eps, normed)
    _logits(p, x, part, parts, base_tag)
    barrier(team, parts)
