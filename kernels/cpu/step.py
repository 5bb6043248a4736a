"""Compiled: one decode step of the whole model, run by every thread of a team. Activations are float32."""

from __future__ import annotations

import numpy as np

from .attention import BLOCK_BYTES, attention, rms_norm
from .delta_net import delta_net
from .intrinsics import (
    ONE,
    ZERO,
    add_word,
    block_row,
    constants_row,
    exact,
    exp32,
    floats,
    get_word,
    now_ns,
    num_threads,
    pointer,
    projection_row,
    put_word,
    relax,
    size_of,
    sleep_us,
    soft_cap,
    span,
    thread_num,
    widen,
)
from .layout import BlockField, FloatField, ProjectionField, StepField, TeamField
from .linear import gather, output_rows, project, select

_ARRIVED, _PASSED, _WAITED = (8 * field.value for field in TeamField if field != TeamField.SIZE)
_LOOKS = 64  # between two looks at the clock
_BRIEF_NS = 100_000  # a thread that is late for longer has no core; putting one to sleep and waking it costs a tenth
_SLEEP_US = 50


@exact
def barrier(team, parts):
    """Wait until all ``parts`` threads of a team are here; ``team`` is the address of its `TeamField`."""
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
        for _ in range(_LOOKS):
            if get_word(passed) != now:
                return
            relax()
        if began == 0:
            began = now_ns()
        elif now_ns() - began > _BRIEF_NS:
            break
    while get_word(passed) == now:
        sleep_us(np.uint32(_SLEEP_US))
    if place == 0:  # one of them counts it, the one who waited longest
        add_word(team + _WAITED, now_ns() - began)


_INT8 = np.int8(0)
_ROW_BYTES = 8 * len(ProjectionField)
# GELU by its approximation: 0.5 x (1 + tanh(t / 2)) = x / (1 + e**-t) with t = sqrt(8 / pi) (x + 0.044715 x**3).
_GELU_SLOPE, _GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.044715)


@exact
def _normed(x, norm, rows, hidden, eps, out):
    """Where x (rows, hidden) is to be found normalised: in ``out``; without a norm, where it was."""
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
def _scale(residual, length, factor):
    r = floats(residual)
    for j in range(length):
        r[j] *= factor


@exact
def _activate_times(gate, up, stride, rows, width, gelu):
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
def _finish_logits(logits, slots, rows, vocab, lo, hi, multiplier, cap):
    """Multiply and cap the columns lo..hi of every row's logits, where there is anything to do."""
    slots_ = pointer(slots, np.int64(0))
    for b in range(rows):
        row = floats(logits + 4 * slots_[b] * vocab)
        if multiplier != ONE:
            for v in range(lo, hi):
                row[v] *= multiplier
        if cap > ZERO:
            for v in range(lo, hi):
                row[v] = soft_cap(row[v], cap)


@exact
def step(p, base_tag):
    """One token for every row: embedding, blocks, final norm, logits. Five barriers a block.

    What is added to the residual may have to be normalised as a whole first, and the next half reads all of the
    residual: so every thread adds all of it for itself, to a residual of its own.

    A thread's scratch: the residual and normed (rows, hidden), two accumulators (rows, acc_length), an index list
    (list_length), its values (rows, list_length) and the sums of a group (rows, acc_length + 2).
    """
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    team = p[StepField.TEAM]
    rows, hidden, inner = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.INTERMEDIATE]
    num_gate_up = p[StepField.NUM_GATE_UP]
    constants = constants_row(p[StepField.FLOATS])
    eps, multiplier = constants[FloatField.EPS], constants[FloatField.RESIDUAL_MULTIPLIER]
    half, qkv = p[StepField.HALF], p[StepField.QKV]
    thresholds = floats(p[StepField.THRESHOLDS])

    length, acc_stride = p[StepField.LIST_LENGTH], p[StepField.ACC_LENGTH]
    residual = p[StepField.SCRATCH] + part * p[StepField.SCRATCH_BYTES]
    normed = residual + 4 * rows * hidden
    acc = normed + 4 * rows * hidden
    acc_up = acc + 4 * rows * acc_stride
    index = acc_up + 4 * rows * acc_stride
    value = index + 4 * length
    partial, partial_stride = value + 4 * rows * length, acc_stride + 2
    seg_index, seg_value = p[StepField.SEGMENT_INDEX], p[StepField.SEGMENT_VALUE]
    seg_count = p[StepField.SEGMENT_COUNT]
    segments = pointer(seg_count, np.int64(0))
    counts = p[StepField.COUNTS] + 8 * part * p[StepField.NUM_PROJECTIONS]
    # What every thread lists for itself is counted once.
    spare = p[StepField.SPARE_COUNTS] + 8 * part

    lo, hi = span(hidden, part, parts), span(hidden, part + 1, parts)
    mlp_lo, mlp_hi = span(inner, part, parts), span(inner, part + 1, parts)

    tokens = pointer(p[StepField.TOKENS], np.int64(0))
    for b in range(rows):
        source = pointer(p[StepField.EMBEDDING] + tokens[b] * hidden * size_of(base_tag), base_tag)
        target = floats(residual + 4 * b * hidden)
        for j in range(hidden):
            target[j] = widen(source[j]) * constants[FloatField.EMBEDDING_MULTIPLIER]

    for block in range(p[StepField.NUM_BLOCKS]):
        facts = block_row(p[StepField.BLOCKS] + block * BLOCK_BYTES)
        first, num_qkv, width = facts[BlockField.FIRST], facts[BlockField.NUM_INPUTS], facts[BlockField.INPUT_WIDTH]
        qkv_lo, qkv_hi = span(width, part, parts), span(width, part + 1, parts)

        x = _normed(residual, facts[BlockField.ATTENTION_INPUT], rows, hidden, eps, normed)
        begin = np.int64(0)
        for i in range(num_qkv):
            row = p[StepField.PROJECTIONS] + (first + i) * _ROW_BYTES
            field = projection_row(row)
            end = begin + field[ProjectionField.N]
            from_, to = max(begin, qkv_lo), min(end, qkv_hi)
            if from_ < to or part == 0:
                count = select(
                    x, hidden, rows, 0, hidden, field[ProjectionField.SCALE], thresholds[first + i], index, value,
                    length, counts + 8 * (first + i) if part == 0 else spare,
                )  # fmt: skip
                if from_ < to:
                    project(
                        row, index, value, count, length, rows, from_ - begin, to - begin, qkv + 4 * from_, width,
                        partial, partial_stride, base_tag,
                    )  # fmt: skip
            begin = end
        barrier(team, parts)

        # The heads' outputs are written where the accumulators are, and the channels kept for o_proj listed.
        if facts[BlockField.DELTA] != 0:
            a_lo, a_hi = delta_net(p, facts[BlockField.DELTA], part, parts, x, qkv, acc, index, base_tag)
        else:
            a_lo, a_hi = attention(p, block, part, parts, acc, index, base_tag)
        i = first + num_qkv
        row = p[StepField.PROJECTIONS] + i * _ROW_BYTES
        field = projection_row(row)
        segments[2 * part] = a_lo
        segments[2 * part + 1] = select(
            acc, field[ProjectionField.K], rows, a_lo, a_hi, field[ProjectionField.SCALE], thresholds[i],
            seg_index + 4 * a_lo, seg_value + 4 * a_lo, length, counts + 8 * i,
        )  # fmt: skip
        barrier(team, parts)

        count = gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        project(
            row, index, value, count, length, rows, lo, hi, half + 4 * lo, hidden, partial, partial_stride, base_tag
        )
        barrier(team, parts)

        x = _normed(half, facts[BlockField.ATTENTION_OUTPUT], rows, hidden, eps, normed)
        _add(residual, x, rows * hidden, multiplier)

        x = _normed(residual, facts[BlockField.MLP_INPUT], rows, hidden, eps, normed)
        count = 0
        for i in range(2):
            j = first + num_qkv + 1 + (i if num_gate_up == 2 else 0)
            row = p[StepField.PROJECTIONS] + j * _ROW_BYTES
            offset = 0 if num_gate_up == 2 else i * inner
            if i == 0 or num_gate_up == 2:
                count = select(
                    x, hidden, rows, 0, hidden, projection_row(row)[ProjectionField.SCALE], thresholds[j],
                    index, value, length, counts + 8 * j if part == 0 else spare,
                )  # fmt: skip
            project(
                row, index, value, count, length, rows, offset + mlp_lo, offset + mlp_hi, acc if i == 0 else acc_up,
                acc_stride, partial, partial_stride, base_tag,
            )  # fmt: skip
        _activate_times(acc, acc_up, acc_stride, rows, mlp_hi - mlp_lo, p[StepField.GELU])
        i = first + num_qkv + num_gate_up + 1
        row = p[StepField.PROJECTIONS] + i * _ROW_BYTES
        segments[2 * part] = mlp_lo
        # The accumulator begins at column mlp_lo, select counts from column 0.
        segments[2 * part + 1] = select(
            acc - 4 * mlp_lo, acc_stride, rows, mlp_lo, mlp_hi, projection_row(row)[ProjectionField.SCALE],
            thresholds[i], seg_index + 4 * mlp_lo, seg_value + 4 * mlp_lo, length, counts + 8 * i,
        )  # fmt: skip
        barrier(team, parts)

        count = gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        project(
            row, index, value, count, length, rows, lo, hi, half + 4 * lo, hidden, partial, partial_stride, base_tag
        )
        barrier(team, parts)

        x = _normed(half, facts[BlockField.MLP_OUTPUT], rows, hidden, eps, normed)
        _add(residual, x, rows * hidden, multiplier)
        if facts[BlockField.SCALAR] != 0:
            _scale(residual, rows * hidden, floats(facts[BlockField.SCALAR])[0])

    x = _normed(residual, p[StepField.FINAL_NORM], rows, hidden, eps, normed)
    vocab = p[StepField.VOCAB]
    lo, hi = vocab * part // parts, vocab * (part + 1) // parts
    if p[StepField.HEAD_SCALE] != 0:
        output_rows(
            p[StepField.HEAD], hidden, lo, hi, x, hidden, rows, p[StepField.HEAD_SCALE], p[StepField.LOGITS],
            p[StepField.SLOTS], vocab, _INT8,
        )  # fmt: skip
    else:
        output_rows(
            p[StepField.HEAD], hidden, lo, hi, x, hidden, rows, np.int64(0), p[StepField.LOGITS], p[StepField.SLOTS],
            vocab, base_tag,
        )  # fmt: skip
    _finish_logits(
        p[StepField.LOGITS], p[StepField.SLOTS], rows, vocab, lo, hi, constants[FloatField.LOGITS_MULTIPLIER],
        constants[FloatField.LOGITS_CAP],
    )  # fmt: skip
    barrier(team, parts)
