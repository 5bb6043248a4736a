"""Compiled: the operations of a decode step that have projections: linear ones, gate and up with the activation, and
experts with their router. A thread computes a span of each output's columns.

If every thread has all of an input, each lists the kept channels itself. Of a divided input, of which each thread has
computed its own columns, it lists the kept ones among these, and joins the threads' lists after a barrier. So lists of the
inputs of ``o`` and ``down`` are made by the threads that computed them.
"""

from __future__ import annotations

import mmap

import numpy as np

from .barrier import barrier
from .intrinsics import ONE, ZERO, advise_memory, exact, exp32, floats, number, size_of, span, words
from .layout import (
    PARTIAL_EXTRA,
    ExpertsField,
    MlpActivation,
    OpField,
    ProjectionField,
    StepField,
    StoredAs,
)
from .linear import gather, output_rows, project, select

_ROW_BYTES = 8 * len(ProjectionField)
_NONE = np.int64(0)
_BASE, _PAGE, _WILL_NEED = StoredAs.BASE.value, np.int64(mmap.PAGESIZE), np.int32(3)  # MADV_WILLNEED
_SILU, _CLAMPED, _RELU2 = MlpActivation.SILU.value, MlpActivation.CLAMPED.value, MlpActivation.RELU2.value
# GELU's tanh approximation: 0.5 x (1 + tanh(t / 2)) = x / (1 + e**-t) with t = sqrt(8 / pi) (x + 0.044715 x**3).
_GELU_SLOPE, _GELU_CUBIC = np.float32(1.5957691216057308), np.float32(0.044715)


@exact
def activate_times(gate, up, stride, rows, width, activation, slope, limit):
    """gate = activation(gate) * up; CLAMPED: as ``kernels.gpu.reduction.activate``."""
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
def _scratch(p, thread):
    """This thread's list of kept channels, index and value, and sums of one group."""
    at = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES]
    return at + p[StepField.INDEX_AT], at + p[StepField.VALUE_AT], at + p[StepField.PARTIAL_AT]


@exact
def _list_all(p, i, x, rows, thread):
    """List the kept channels of x, the input of projection i, which all threads have; thread 0 counts them. Returns their
    number."""
    index, value, _ = _scratch(p, thread)
    row = p[StepField.PROJECTIONS] + i * _ROW_BYTES
    width = words(row)[ProjectionField.K]
    counts = p[StepField.COUNTS] + 8 * i if thread == 0 else p[StepField.SPARE_COUNTS] + 8 * thread
    thresholds, length = p[StepField.THRESHOLDS] + 8 * i, p[StepField.LIST_LENGTH]
    return select(x, width, rows, 0, width, row, thresholds, index, value, length, counts)


@exact
def _list_part(p, i, x, rows, lo, hi, index, value, stride, segments, thread):
    """List the kept channels among lo..hi of x, the divided input of projection i. index, value, segments: of all
    threads."""
    row, segment = p[StepField.PROJECTIONS] + i * _ROW_BYTES, words(segments + 16 * thread)
    counts = p[StepField.COUNTS] + 8 * (thread * p[StepField.NUM_PROJECTIONS] + i)
    begin, thresholds = lo * words(row)[ProjectionField.PLANES], p[StepField.THRESHOLDS] + 8 * i
    index, value, segment[0] = index + 4 * begin, value + 4 * begin, begin
    width = words(row)[ProjectionField.K]
    segment[1] = select(x, width, rows, lo, hi, row, thresholds, index, value, stride, counts)


@exact
def _join_parts(p, rows, index, value, stride, segments, thread, threads):
    """Join the threads' lists; returns the number of channels."""
    to, values, _ = _scratch(p, thread)
    return gather(index, value, stride, segments, threads, rows, to, values, p[StepField.LIST_LENGTH])


@exact
def _project(p, i, count, rows, lo, hi, out, stride, thread, tag):
    """out = columns lo..hi of projection i, of the ``count`` channels in this thread's list."""
    index, value, partial = _scratch(p, thread)
    row, length = p[StepField.PROJECTIONS] + i * _ROW_BYTES, p[StepField.LIST_LENGTH]
    partial_stride = p[StepField.ACC_LENGTH] + PARTIAL_EXTRA
    project(row, index, value, count, length, rows, lo, hi, out, stride, partial, partial_stride, tag)


@exact
def linear(p, op, x, y, thread, threads, tag):
    """LINEAR. op: of `OpField`."""
    rows, width, begin = p[StepField.ROWS], op[OpField.WIDTH], np.int64(0)
    lo, hi = span(width, thread, threads), span(width, thread + 1, threads)
    for i in range(op[OpField.FIRST], op[OpField.FIRST] + op[OpField.COUNT]):
        end = begin + words(p[StepField.PROJECTIONS] + i * _ROW_BYTES)[ProjectionField.N]
        first, last = max(begin, lo), min(end, hi)
        if first < last or thread == 0:
            count = _list_all(p, i, x, rows, thread)
            if first < last:
                _project(p, i, count, rows, first - begin, last - begin, y + 4 * first, width, thread, tag)
        begin = end
    barrier(p[StepField.TEAM], threads)


@exact
def linear_of_parts(p, op, x, x_lo, x_hi, y, thread, threads, tag):
    """LINEAR_OF_PARTS. x: this thread has computed columns x_lo..x_hi."""
    i, rows, width, team = op[OpField.FIRST], p[StepField.ROWS], op[OpField.WIDTH], p[StepField.TEAM]
    index, value, segments = p[StepField.SEGMENT_INDEX], p[StepField.SEGMENT_VALUE], p[StepField.SEGMENT_COUNT]
    length, lo, hi = p[StepField.LIST_LENGTH], span(width, thread, threads), span(width, thread + 1, threads)
    _list_part(p, i, x, rows, x_lo, x_hi, index, value, length, segments, thread)
    barrier(team, threads)
    count = _join_parts(p, rows, index, value, length, segments, thread, threads)
    _project(p, i, count, rows, lo, hi, y + 4 * lo, width, thread, tag)
    barrier(team, threads)


@exact
def gate_up(p, gate, up, x, rows, lo, hi, y, stride, thread, tag):
    """y (rows, stride), columns lo..hi = activation(gate) * up, or RELU2 of ``gate``. gate, up: numbers of projections;
    the same for a fused one, whose columns are gate's, then up's."""
    second = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES] + p[StepField.ACC_UP_AT]
    row, out = words(p[StepField.PROJECTIONS] + gate * _ROW_BYTES), y + 4 * lo
    count, ungated = 0, p[StepField.ACTIVATION] == _RELU2
    for part in range(1 if ungated else 2):
        i, offset = up if part else gate, row[ProjectionField.N] // 2 if part and gate == up else 0
        if part == 0 or gate != up:
            count = _list_all(p, i, x, rows, thread)
        _project(p, i, count, rows, offset + lo, offset + hi, second if part else out, stride, thread, tag)
    if ungated:
        for b in range(rows):
            g = floats(out + 4 * b * stride)
            for j in range(hi - lo):
                g[j] = ZERO if g[j] < ZERO else g[j] * g[j]  # keeps a NaN
        return
    slope, limit = number(p[StepField.CLAMP_SLOPE]), number(p[StepField.CLAMP_LIMIT])
    activate_times(out, second, stride, rows, hi - lo, p[StepField.ACTIVATION], slope, limit)


@exact
def _leave_groups(row, keys, sums):
    """The keys of experts outside the best groups = -inf. sums: scratch memory, (GROUPS,)."""
    groups, least = row[ExpertsField.GROUPS], np.float32(-np.inf)
    size = row[ExpertsField.COUNT] // groups
    for g in range(groups):
        first = second = least
        for e in range(g * size, (g + 1) * size):
            if keys[e] > first:
                first, second = keys[e], first
            else:
                second = max(second, keys[e])
        sums[g] = first + second if row[ExpertsField.GROUP_BEST] == 2 else first
    for g in range(groups):
        before = 0
        for other in range(groups):
            before += sums[other] > sums[g] or (sums[other] == sums[g] and other < g)
        if before >= row[ExpertsField.GROUPS_KEPT]:
            for e in range(g * size, (g + 1) * size):
                keys[e] = least


@exact
def choose_experts(row, logits, scores, choice):
    """choice (chosen, 2) = ids of a token's experts, ascending, and their weights. row: words of `ExpertsRow`. Of equal
    experts the lower id is chosen. scores: scratch memory, (3, COUNT)."""
    count, chosen, bias = row[ExpertsField.COUNT], row[ExpertsField.CHOSEN], row[ExpertsField.CHOICE_BIAS]
    logits_, scores_, choice_ = floats(logits), floats(scores), words(choice)
    keys, largest, total = logits_, logits_[0], ONE
    if row[ExpertsField.SIGMOID] != 0:
        for e in range(count):
            scores_[e] = ONE / (ONE + exp32(-logits_[e]))
    else:
        for e in range(count):
            largest = max(largest, logits_[e])
        total = ZERO
        for e in range(count):
            scores_[e] = exp32(logits_[e] - largest)
            total += scores_[e]
    if bias != 0 or row[ExpertsField.GROUPS] != 0:
        keys = floats(scores + 4 * count)
        for e in range(count):
            keys[e] = scores_[e] / total + (floats(bias)[e] if bias != 0 else ZERO)
    if row[ExpertsField.GROUPS] != 0:
        _leave_groups(row, keys, floats(scores + 8 * count))
    last, last_key, of_chosen = np.int64(-1), ZERO, ZERO
    for n in range(chosen):
        best = np.int64(-1)
        for e in range(count):
            later = n == 0 or keys[e] < last_key or (keys[e] == last_key and e > last)
            if later and (best < 0 or keys[e] > keys[best]):
                best = np.int64(e)
        last = max(best, np.int64(0))  # comparisons with NaN find none
        last_key = keys[last]
        of_chosen += scores_[last]
        at = n
        while at > 0 and choice_[2 * (at - 1)] > last:
            choice_[2 * at] = choice_[2 * (at - 1)]
            at -= 1
        choice_[2 * at] = last
    if row[ExpertsField.RENORMALISED] != 0:
        least, added = number(row[ExpertsField.NORM_LEAST]), number(row[ExpertsField.NORM_ADDED])
        total = max(of_chosen, least * total) + added * total
    for n in range(chosen):
        weight = scores_[choice_[2 * n]] / total * number(row[ExpertsField.FACTOR])
        if row[ExpertsField.SCALE] != 0:
            weight *= floats(row[ExpertsField.SCALE])[choice_[2 * n]]
        floats(choice + 8 * (2 * n + 1))[0] = weight


@exact
def router(p, row, x, thread, threads):
    """ROUTER: scores, divided among the threads, then each thread's own list of every token's experts. row: of
    `ExpertsRow`."""
    experts, rows, hidden = words(row), p[StepField.ROWS], p[StepField.HIDDEN]
    total, scores = experts[ExpertsField.COUNT], p[StepField.EXPERT_SCORES]
    first, last = total * thread // threads, total * (thread + 1) // threads
    numbers, weight = p[StepField.ROW_NUMBERS], experts[ExpertsField.ROUTER]
    output_rows(weight, hidden, first, last, x, hidden, rows, _NONE, scores, numbers, total, ZERO)
    if experts[ExpertsField.ROUTER_BIAS] != 0:
        bias = floats(experts[ExpertsField.ROUTER_BIAS])
        for b in range(rows):
            for e in range(first, last):
                floats(scores)[b * total + e] += bias[e]
    barrier(p[StepField.TEAM], threads)

    own = p[StepField.EXPERT_KEYS] + 12 * thread * total
    for b in range(rows):
        choose_experts(experts, scores + 4 * b * total, own, _choice(p, b, thread))


@exact
def _choice(p, b, thread):
    """This thread's list of token b's experts."""
    return p[StepField.EXPERT_CHOICE] + 16 * p[StepField.EXPERT_SLOTS] * (thread * p[StepField.ROWS] + b)


@exact
def _read_ahead(p, first, parts, total, chosen, choice, thread, threads, tag):
    """Have the system read the chosen experts' memory-mapped weights: single page faults take several times as long."""
    for i in range(thread, parts * chosen, threads):
        expert = words(choice)[2 * (i // parts)]
        field = words(p[StepField.PROJECTIONS] + (first + i % parts * total + expert) * _ROW_BYTES)
        at = field[ProjectionField.WEIGHT] & -_PAGE
        size = field[ProjectionField.K] * field[ProjectionField.PLANES] * field[ProjectionField.STRIDE]
        if field[ProjectionField.STORED_AS] == _BASE:
            size *= size_of(tag)
        advise_memory(at, field[ProjectionField.WEIGHT] - at + size, _WILL_NEED)


@exact
def experts(p, op, x, y, thread, threads, tag):
    """EXPERTS, token by token: the MLPs of the chosen experts and, in the last slot, of the shared one, whose weight is
    1 or sigmoid(gate); their outputs are added in the order of slots."""
    row, first, hidden, team = words(op[OpField.PARAMETERS]), op[OpField.FIRST], p[StepField.HIDDEN], p[StepField.TEAM]
    total, chosen, shared = row[ExpertsField.COUNT], row[ExpertsField.CHOSEN], row[ExpertsField.SHARED_SIZE]
    slots, stride = chosen + (1 if shared != 0 else 0), p[StepField.EXPERT_LENGTH]
    acc = p[StepField.SCRATCH] + thread * p[StepField.SCRATCH_BYTES] + p[StepField.ACC_AT]
    index, value, segments = p[StepField.EXPERT_INDEX], p[StepField.EXPERT_VALUE], p[StepField.EXPERT_COUNT]
    lo, hi = span(hidden, thread, threads), span(hidden, thread + 1, threads)
    last = 1 if p[StepField.ACTIVATION] == _RELU2 else 2  # down's place among an expert's projections
    for b in range(p[StepField.ROWS]):
        token, out, choice = x + 4 * b * hidden, floats(y + 4 * b * hidden), _choice(p, b, thread)
        if p[StepField.MAPPED] != 0:
            _read_ahead(p, first, last + 1, total, chosen, choice, thread, threads, tag)
        if shared != 0:
            weight, gate = choice + 8 * (2 * chosen + 1), row[ExpertsField.SHARED_GATE]
            numbers = p[StepField.ROW_NUMBERS]
            floats(weight)[0] = ONE
            if gate != 0:
                output_rows(gate, hidden, _NONE, np.int64(1), token, hidden, 1, _NONE, weight, numbers, _NONE, ZERO)
                floats(weight)[0] = ONE / (ONE + exp32(-floats(weight)[0]))
        if b > 0:
            barrier(team, threads)  # until all threads have read the lists of the token before
        for n in range(slots):
            expert, inner = words(choice)[2 * n], row[ExpertsField.SIZE]
            at, step = first + expert, total
            if n == chosen:
                at, step, inner = first + (last + 1) * total, 1, shared
            down = at + last * step
            acc_lo, acc_hi = span(inner, thread, threads), span(inner, thread + 1, threads)
            gate_up(p, at, down - step, token, 1, acc_lo, acc_hi, acc, inner, thread, tag)
            at, of_slot = 4 * n * stride, segments + 16 * n * threads
            _list_part(p, down, acc, 1, acc_lo, acc_hi, index + at, value + at, stride, of_slot, thread)
        barrier(team, threads)

        for j in range(lo, hi):
            out[j] = ZERO
        for n in range(slots):
            down = first + last * total + (total + last if n == chosen else words(choice)[2 * n])
            at, of_slot = 4 * n * stride, segments + 16 * n * threads
            count = _join_parts(p, 1, index + at, value + at, stride, of_slot, thread, threads)
            _project(p, down, count, 1, lo, hi, acc, hidden, thread, tag)
            weight, a = floats(choice + 8 * (2 * n + 1))[0], floats(acc)
            for j in range(lo, hi):
                out[j] += weight * a[j - lo]
    barrier(team, threads)
