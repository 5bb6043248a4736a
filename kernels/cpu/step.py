"""Compiled: one decode step of the whole model, run by every thread of a team. Activations are float32."""

from __future__ import annotations

import numpy as np

from .attention import attention, rms_norm
from .intrinsics import (
    ONE,
    exact,
    exp32,
    floats,
    num_threads,
    pointer,
    projection_row,
    size_of,
    span,
    thread_num,
    widen,
)  # fmt: skip
from .layout import ProjectionField, StepField
from .linear import gather, output_rows, project, select
from .meeting import meet

__all__ = ["step"]


@exact
def _add(residual, hidden, acc, acc_stride, rows, lo, hi):
    for b in range(rows):
        r, a = floats(residual + 4 * (b * hidden + lo)), floats(acc + 4 * b * acc_stride)
        for j in range(hi - lo):
            r[j] += a[j]


@exact
def _silu_times(gate, up, stride, rows, width):
    """gate = SiLU(gate) * up."""
    for b in range(rows):
        g, u = floats(gate + 4 * b * stride), floats(up + 4 * b * stride)
        for j in range(width):
            g[j] = g[j] / (ONE + exp32(-g[j])) * u[j]


@exact
def step(p, tag, head_tag, base_tag):
    """One token for every row: embedding, blocks, final norm, logits. Five meetings a block.

    A thread's scratch: normed (rows, hidden), two accumulators (rows, acc_length), an index list (list_length) and its
    values (rows, list_length).
    """
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    team = p[StepField.TEAM]
    rows, hidden, inner = p[StepField.ROWS], p[StepField.HIDDEN], p[StepField.INTERMEDIATE]
    q_size, kv_size = p[StepField.HEADS] * p[StepField.HEAD_DIM], p[StepField.KV_HEADS] * p[StepField.HEAD_DIM]
    num_qkv, num_gate_up = p[StepField.NUM_QKV], p[StepField.NUM_GATE_UP]
    per_block = num_qkv + 1 + num_gate_up + 1
    eps = floats(p[StepField.FLOATS])[0]
    residual, qkv, width = p[StepField.RESIDUAL], p[StepField.QKV], q_size + 2 * kv_size
    thresholds = floats(p[StepField.THRESHOLDS])
    row_bytes = 8 * 6

    length, acc_stride = p[StepField.LIST_LENGTH], p[StepField.ACC_LENGTH]
    normed = p[StepField.SCRATCH] + part * p[StepField.SCRATCH_BYTES]
    acc = normed + 4 * rows * hidden
    acc_up = acc + 4 * rows * acc_stride
    index = acc_up + 4 * rows * acc_stride
    value = index + 4 * length
    seg_index, seg_value = p[StepField.SEGMENT_INDEX], p[StepField.SEGMENT_VALUE]
    seg_count = p[StepField.SEGMENT_COUNT]
    segments = pointer(seg_count, np.int64(0))
    counts = p[StepField.COUNTS] + 8 * part * p[StepField.NUM_BLOCKS] * per_block
    # What every thread lists for itself is counted once.
    spare = p[StepField.SPARE_COUNTS] + 8 * part

    lo, hi = span(hidden, part, parts), span(hidden, part + 1, parts)
    mlp_lo, mlp_hi = span(inner, part, parts), span(inner, part + 1, parts)
    qkv_lo, qkv_hi = span(width, part, parts), span(width, part + 1, parts)

    tokens = pointer(p[StepField.TOKENS], np.int64(0))
    for b in range(rows):
        source = pointer(p[StepField.EMBEDDING] + tokens[b] * hidden * size_of(base_tag), base_tag)
        target = floats(residual + 4 * b * hidden)
        for j in range(lo, hi):
            target[j] = widen(source[j])
    meet(team, parts)

    for block in range(p[StepField.NUM_BLOCKS]):
        first = block * per_block
        norm = p[StepField.NORMS] + 4 * 2 * block * hidden

        for b in range(rows):
            rms_norm(residual + 4 * b * hidden, norm, hidden, eps, normed + 4 * b * hidden)
        begin = np.int64(0)
        for i in range(num_qkv):
            row = p[StepField.PROJECTIONS] + (first + i) * row_bytes
            field = projection_row(row)
            end = begin + field[ProjectionField.N]
            from_, to = max(begin, qkv_lo), min(end, qkv_hi)
            if from_ < to or part == 0:
                count = select(
                    normed, hidden, rows, 0, hidden, field[ProjectionField.SCALE], thresholds[first + i], index, value,
                    length, counts + 8 * (first + i) if part == 0 else spare,
                )  # fmt: skip
                if from_ < to:
                    project(
                        row, index, value, count, length, rows, from_ - begin, to - begin, qkv + 4 * from_, width, tag
                    )
            begin = end
        meet(team, parts)

        # Attention writes its heads' outputs where the accumulators are, and lists the channels kept for o_proj.
        a_lo, a_hi = attention(p, block, part, parts, acc, index, base_tag)
        i = first + num_qkv
        row = p[StepField.PROJECTIONS] + i * row_bytes
        segments[2 * part] = a_lo
        segments[2 * part + 1] = select(
            acc, q_size, rows, a_lo, a_hi, projection_row(row)[ProjectionField.SCALE], thresholds[i],
            seg_index + 4 * a_lo, seg_value + 4 * a_lo, length, counts + 8 * i,
        )  # fmt: skip
        meet(team, parts)

        count = gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        project(row, index, value, count, length, rows, lo, hi, acc, acc_stride, tag)
        _add(residual, hidden, acc, acc_stride, rows, lo, hi)
        meet(team, parts)

        for b in range(rows):
            rms_norm(residual + 4 * b * hidden, norm + 4 * hidden, hidden, eps, normed + 4 * b * hidden)
        count = 0
        for i in range(2):
            j = first + num_qkv + 1 + (i if num_gate_up == 2 else 0)
            row = p[StepField.PROJECTIONS] + j * row_bytes
            offset = 0 if num_gate_up == 2 else i * inner
            if i == 0 or num_gate_up == 2:
                count = select(
                    normed, hidden, rows, 0, hidden, projection_row(row)[ProjectionField.SCALE], thresholds[j],
                    index, value, length, counts + 8 * j if part == 0 else spare,
                )  # fmt: skip
            project(
                row, index, value, count, length, rows, offset + mlp_lo, offset + mlp_hi, acc if i == 0 else acc_up,
                acc_stride, tag,
            )  # fmt: skip
        _silu_times(acc, acc_up, acc_stride, rows, mlp_hi - mlp_lo)
        i = first + per_block - 1
        row = p[StepField.PROJECTIONS] + i * row_bytes
        segments[2 * part] = mlp_lo
        # The accumulator begins at column mlp_lo, select counts from column 0.
        segments[2 * part + 1] = select(
            acc - 4 * mlp_lo, acc_stride, rows, mlp_lo, mlp_hi, projection_row(row)[ProjectionField.SCALE],
            thresholds[i], seg_index + 4 * mlp_lo, seg_value + 4 * mlp_lo, length, counts + 8 * i,
        )  # fmt: skip
        meet(team, parts)

        count = gather(seg_index, seg_value, length, seg_count, parts, rows, index, value, length)
        project(row, index, value, count, length, rows, lo, hi, acc, acc_stride, tag)
        _add(residual, hidden, acc, acc_stride, rows, lo, hi)
        meet(team, parts)

    norm = p[StepField.NORMS] + 4 * 2 * p[StepField.NUM_BLOCKS] * hidden
    for b in range(rows):
        rms_norm(residual + 4 * b * hidden, norm, hidden, eps, normed + 4 * b * hidden)
    vocab = p[StepField.VOCAB]
    output_rows(
        p[StepField.HEAD], hidden, vocab * part // parts, vocab * (part + 1) // parts, normed, hidden, rows,
        p[StepField.HEAD_SCALE], p[StepField.LOGITS], p[StepField.SLOTS], vocab, head_tag,
    )  # fmt: skip
    meet(team, parts)
