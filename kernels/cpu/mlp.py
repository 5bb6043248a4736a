"""Compiled: the MLP of a decode step, dense or of experts, from its normalized input to HALF, divided by columns."""

from __future__ import annotations

import mmap

import numba
import numpy as np
from numba.extending import overload

from .attention import BLOCK_BYTES, rms_norm
from .barrier import barrier
from .intrinsics import ONE, ZERO, advise_memory, exact, exp32, floats, size_of, span, words
from .layout import PARTIAL_EXTRA, BlockField, FloatField, MlpActivation, ProjectionField, StepField, StoredAs
from .linear import gather, output_rows, project, select

ROW_BYTES = 8 * len(ProjectionField)
DENSE, EXPERTS = np.int8(0), np.int16(0)  # values of ``kind``, distinguished by type at compile time
_NONE = np.int64(0)
_BASE, _PAGE, _WILL_NEED = StoredAs.BASE.value, np.int64(mmap.PAGESIZE), np.int32(3)  # MADV_WILLNEED
_SILU, _CLAMPED = MlpActivation.SILU.value, MlpActivation.CLAMPED.value
# GELU's tanh approximation: 0.5 x (1 + tanh(t / 2)) = x / (1 + e**-t) with t = sqrt(8 / pi) (x + 0.044715 x**3).
_GELU_SLOPE, _GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.044715)


@exact
def activate_times(gate, up, stride, rows, width, activation, constants):
    """gate = activation(gate) * up; CLAMPED: as ``kernels.gpu.reduction.activate``. constants: FloatField."""
    slope, limit = constants[FloatField.CLAMP_SLOPE], constants[FloatField.CLAMP_LIMIT]
    for b in range(rows):
        g, u = floats(gate + 4 * b * stride), floats(up + 4 * b * stride)
        if activation == _CLAMPED:
            for j in range(width):
                x = limit if g[j] > limit else g[j]
                y = -limit if u[j] < -limit else limit if u[j] > limit else u[j]  # min and max would drop a NaN
                g[j] = x / (ONE + exp32(-slope * x)) * (ONE + y)
        elif activation == _SILU:
            for j in range(width):
                g[j] = g[j] / (ONE + exp32(-g[j])) * u[j]
        else:
            for j in range(width):
                t = _GELU_SLOPE * (g[j] + _GELU_CUBIC * g[j] * g[j] * g[j])
                g[j] = g[j] / (ONE + exp32(-t)) * u[j]


@exact
def gate_and_up(p, gate, up, x, rows, lo, hi, thread, base_tag):
    """Columns lo..hi of activation(gate) * up into the first accumulator. gate, up: rows of the table of projections;
    the same row for a fused projection, whose columns are gate's, then up's."""
    scratch = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES]
    acc, acc_up = scratch + p[StepField.ACC_AT], scratch + p[StepField.ACC_UP_AT]
    index, value = scratch + p[StepField.INDEX_AT], scratch + p[StepField.VALUE_AT]
    partial = scratch + p[StepField.PARTIAL_AT]
    length, acc_stride, hidden = p[StepField.LIST_LENGTH], p[StepField.ACC_LENGTH], p[StepField.HIDDEN]
    counts = p[StepField.COUNTS] + 8 * thread * p[StepField.NUM_PROJECTIONS]
    spare = p[StepField.SPARE_COUNTS] + 8 * thread  # all threads select the same channels, thread 0 counts
    count = 0
    for i in range(2):
        j = gate if i == 0 else up
        row = p[StepField.PROJECTIONS] + j * ROW_BYTES
        offset = words(row)[ProjectionField.N] // 2 if i == 1 and gate == up else 0
        if i == 0 or gate != up:
            count = select(
                x, hidden, rows, 0, hidden, row, p[StepField.THRESHOLDS] + 8 * j, index, value, length,
                counts + 8 * j if thread == 0 else spare,
            )  # fmt: skip
        project(
            row, index, value, count, length, rows, offset + lo, offset + hi, acc if i == 0 else acc_up, acc_stride,
            partial, acc_stride + PARTIAL_EXTRA, base_tag,
        )  # fmt: skip
    activate_times(acc, acc_up, acc_stride, rows, hi - lo, p[StepField.ACTIVATION], floats(p[StepField.FLOATS]))


@exact
def dense_mlp(p, block, x, thread, threads, base_tag):
    block_ = words(p[StepField.BLOCKS] + block * BLOCK_BYTES)
    rows, hidden = p[StepField.ROWS], p[StepField.HIDDEN]
    scratch = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES]
    acc, acc_stride = scratch + p[StepField.ACC_AT], p[StepField.ACC_LENGTH]
    index, value, length = scratch + p[StepField.INDEX_AT], scratch + p[StepField.VALUE_AT], p[StepField.LIST_LENGTH]
    seg_index, seg_value, seg_count = p[StepField.SEGMENT_INDEX], p[StepField.SEGMENT_VALUE], p[StepField.SEGMENT_COUNT]
    segments = words(seg_count)
    lo, hi = span(hidden, thread, threads), span(hidden, thread + 1, threads)
    gate = block_[BlockField.FIRST] + block_[BlockField.NUM_INPUTS] + 1
    i = gate + p[StepField.NUM_GATE_UP]
    row = p[StepField.PROJECTIONS] + i * ROW_BYTES
    inner = words(row)[ProjectionField.K]
    mlp_lo, mlp_hi = span(inner, thread, threads), span(inner, thread + 1, threads)

    # Gate and up, then the list of down's kept channels among this thread's columns.
    gate_and_up(p, gate, gate + p[StepField.NUM_GATE_UP] - 1, x, rows, mlp_lo, mlp_hi, thread, base_tag)
    begin = mlp_lo * words(row)[ProjectionField.PLANES]
    segments[2 * thread] = begin
    # The accumulator's first column is mlp_lo; select indexes from column 0.
    segments[2 * thread + 1] = select(
        acc - 4 * mlp_lo, acc_stride, rows, mlp_lo, mlp_hi, row, p[StepField.THRESHOLDS] + 8 * i, seg_index + 4 * begin,
        seg_value + 4 * begin, length, p[StepField.COUNTS] + 8 * (thread * p[StepField.NUM_PROJECTIONS] + i),
    )  # fmt: skip
    barrier(p[StepField.TEAM], threads)

    count = gather(seg_index, seg_value, length, seg_count, threads, rows, index, value, length)
    project(
        row, index, value, count, length, rows, lo, hi, p[StepField.HALF] + 4 * lo, hidden,
        scratch + p[StepField.PARTIAL_AT], acc_stride + PARTIAL_EXTRA, base_tag,
    )  # fmt: skip


@exact
def choose_experts(scores, count, chosen, renormalised, choice):
    """choice (chosen, 2) = ids of the experts with the highest scores (count,), ascending, and their softmax weights.
    Of equal scores the lower id is chosen."""
    scores_, choice_ = floats(scores), words(choice)
    largest = scores_[0]
    for e in range(count):
        largest = max(largest, scores_[e])
    total, of_chosen = ZERO, ZERO
    for e in range(count):
        total += exp32(scores_[e] - largest)
    last, last_score = np.int64(-1), ZERO
    for n in range(chosen):
        best = np.int64(-1)
        for e in range(count):
            later = n == 0 or scores_[e] < last_score or (scores_[e] == last_score and e > last)
            if later and (best < 0 or scores_[e] > scores_[best]):
                best = np.int64(e)
        last = max(best, np.int64(0))  # comparisons with NaN find none
        last_score = scores_[last]
        of_chosen += exp32(last_score - largest)
        at = n
        while at > 0 and choice_[2 * (at - 1)] > last:
            choice_[2 * at] = choice_[2 * (at - 1)]
            at -= 1
        choice_[2 * at] = last
    if renormalised != 0:
        total = of_chosen
    for n in range(chosen):
        floats(choice + 8 * (2 * n + 1))[0] = exp32(scores_[choice_[2 * n]] - largest) / total


@exact
def expert_mlp(p, block, x, thread, threads, base_tag):
    """Token by token: scores, divided among the threads, then the MLPs of the chosen experts and, in the last slot, of
    the shared one; their outputs are added in the order of slots. For experts in a file madvise reads all chosen ones
    ahead, as single page faults take several times as long."""
    block_ = words(p[StepField.BLOCKS] + block * BLOCK_BYTES)
    hidden, total, chosen = p[StepField.HIDDEN], block_[BlockField.EXPERTS], block_[BlockField.CHOSEN]
    shared, eps = block_[BlockField.SHARED_SIZE], floats(p[StepField.FLOATS])[FloatField.EPS]
    slots, stride, team = chosen + (1 if shared != 0 else 0), p[StepField.EXPERT_LENGTH], p[StepField.TEAM]
    scratch = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES]
    acc, acc_stride = scratch + p[StepField.ACC_AT], p[StepField.ACC_LENGTH]
    index, value, length = scratch + p[StepField.INDEX_AT], scratch + p[StepField.VALUE_AT], p[StepField.LIST_LENGTH]
    scores = p[StepField.EXPERT_SCORES]
    choice = p[StepField.EXPERT_CHOICE] + 16 * thread * p[StepField.EXPERT_SLOTS]
    first = block_[BlockField.FIRST] + block_[BlockField.NUM_INPUTS] + 1
    lo, hi = span(hidden, thread, threads), span(hidden, thread + 1, threads)
    for b in range(p[StepField.ROWS]):
        token, half = x + 4 * b * hidden, floats(p[StepField.HALF] + 4 * b * hidden)
        beside, expert_in = floats(p[StepField.BESIDE] + 4 * b * hidden), token
        if block_[BlockField.BESIDE] != 0:  # the router's input is the residual, the first buffer of the scratch memory
            expert_in = scratch + p[StepField.TOKEN_AT]
            rms_norm(scratch + 4 * b * hidden, block_[BlockField.ROUTER_SCALE], hidden, eps, expert_in)
        first_score, last_score = total * thread // threads, total * (thread + 1) // threads
        output_rows(
            block_[BlockField.ROUTER], hidden, first_score, last_score, expert_in, hidden, 1, _NONE, scores,
            p[StepField.SLOTS], _NONE, ZERO,
        )  # fmt: skip
        if block_[BlockField.ROUTER_BIAS] != 0:
            scores_, bias = floats(scores), floats(block_[BlockField.ROUTER_BIAS])
            for e in range(first_score, last_score):
                scores_[e] += bias[e]
        barrier(team, threads)

        choose_experts(scores, total, chosen, block_[BlockField.RENORMALISED], choice)
        if p[StepField.MAPPED] != 0:
            for i in range(thread, 3 * chosen, threads):
                expert = words(choice)[2 * (i // 3)]
                field = words(p[StepField.PROJECTIONS] + (first + i % 3 * total + expert) * ROW_BYTES)
                at = field[ProjectionField.WEIGHT] & -_PAGE
                size = field[ProjectionField.K] * field[ProjectionField.PLANES] * field[ProjectionField.STRIDE]
                if field[ProjectionField.STORED_AS] == _BASE:
                    size *= size_of(base_tag)
                advise_memory(at, field[ProjectionField.WEIGHT] - at + size, _WILL_NEED)
        if block_[BlockField.BESIDE] != 0:
            rms_norm(scratch + 4 * b * hidden, block_[BlockField.EXPERTS_INPUT], hidden, eps, expert_in)
            scale = floats(block_[BlockField.EXPERT_SCALE])
            for n in range(chosen):
                floats(choice + 8 * (2 * n + 1))[0] *= scale[words(choice)[2 * n]]
        elif shared != 0:
            weight = choice + 8 * (2 * chosen + 1)
            output_rows(
                block_[BlockField.SHARED_GATE], hidden, _NONE, np.int64(1), token, hidden, 1, _NONE, weight,
                p[StepField.SLOTS], _NONE, ZERO,
            )  # fmt: skip
            floats(weight)[0] = ONE / (ONE + exp32(-floats(weight)[0]))
        for n in range(slots):
            expert = words(choice)[2 * n]
            gate, up, down = first + expert, first + total + expert, first + 2 * total + expert
            inner = block_[BlockField.EXPERT_SIZE]
            if n == chosen:
                gate, up, down, inner = first + 3 * total, first + 3 * total + 1, first + 3 * total + 2, shared
            mlp_lo, mlp_hi = span(inner, thread, threads), span(inner, thread + 1, threads)
            gate_and_up(p, gate, up, token if n == chosen else expert_in, 1, mlp_lo, mlp_hi, thread, base_tag)
            row = p[StepField.PROJECTIONS] + down * ROW_BYTES
            segments = words(p[StepField.EXPERT_COUNT] + 16 * (n * threads + thread))
            segments[0] = mlp_lo * words(row)[ProjectionField.PLANES]
            at = 4 * (n * stride + segments[0])
            segments[1] = select(
                acc - 4 * mlp_lo, acc_stride, 1, mlp_lo, mlp_hi, row,
                p[StepField.THRESHOLDS] + 8 * down, p[StepField.EXPERT_INDEX] + at, p[StepField.EXPERT_VALUE] + at,
                stride, p[StepField.COUNTS] + 8 * (thread * p[StepField.NUM_PROJECTIONS] + down),
            )  # fmt: skip
        barrier(team, threads)

        for j in range(lo, hi):
            half[j] = ZERO
        for n in range(slots):
            row = p[StepField.PROJECTIONS] + (first + 2 * total + words(choice)[2 * n]) * ROW_BYTES
            if n == chosen:
                row = p[StepField.PROJECTIONS] + (first + 3 * total + 2) * ROW_BYTES
            at = 4 * n * stride
            count = gather(
                p[StepField.EXPERT_INDEX] + at, p[StepField.EXPERT_VALUE] + at, stride,
                p[StepField.EXPERT_COUNT] + 16 * n * threads, threads, 1, index, value, length,
            )  # fmt: skip
            project(
                row, index, value, count, length, 1, lo, hi, acc, acc_stride, scratch + p[StepField.PARTIAL_AT],
                acc_stride + PARTIAL_EXTRA, base_tag,
            )  # fmt: skip
            weight, a = floats(choice + 8 * (2 * n + 1))[0], floats(acc)
            if n == chosen and block_[BlockField.BESIDE] != 0:
                for j in range(lo, hi):
                    beside[j] = a[j - lo]
            else:
                for j in range(lo, hi):
                    half[j] += weight * a[j - lo]


def mlp(kind, p, block, x, thread, threads, base_tag):
    """A block's MLP. ``kind``: `DENSE` if no block has experts, which halves the compile time."""


@overload(mlp, jit_options={"error_model": "numpy", "fastmath": {"contract"}})
def _mlp_of(kind, p, block, x, thread, threads, base_tag):
    def either(kind, p, block, x, thread, threads, base_tag):
        if words(p[StepField.BLOCKS] + block * BLOCK_BYTES)[BlockField.EXPERTS] != 0:
            expert_mlp(p, block, x, thread, threads, base_tag)
        else:
            dense_mlp(p, block, x, thread, threads, base_tag)

    def dense(kind, p, block, x, thread, threads, base_tag):
        dense_mlp(p, block, x, thread, threads, base_tag)

    return dense if kind == numba.typeof(DENSE) else either
