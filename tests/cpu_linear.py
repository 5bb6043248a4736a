"""One projection on the CPU, by the very kernels that a decode step is made of, for tests to hold to the definition,
``reference.sparse_linear``; sums are taken in float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wisparse.kernels.cpu.barrier import barrier
from wisparse.kernels.cpu.intrinsics import exact, num_threads, span, thread_num, words
from wisparse.kernels.cpu.launch import REGIONS, launch, team_size
from wisparse.kernels.cpu.layout import NAMES, PARTIAL_EXTRA, ProjectionField, Row, StoredAs, TeamField, Word, positions
from wisparse.kernels.cpu.linear import gather, project, select
from wisparse.runtime.cpu.weights import Matrix


class LinearRow(Row):
    """Parameters of the region that computes one projection."""

    projection: Word  # of `ProjectionRow`
    threshold: Word  # (2,) float32
    rows: Word
    x: Word  # (rows, K) float32
    y: Word  # (rows, N) float32
    segment_index: Word  # (K,) int32
    segment_value: Word  # (rows, K) float32
    segment_count: Word  # (threads, 2) int64
    lists: Word  # per thread: (K,) int32, then (rows, K) float32
    counts: Word  # (threads,) int64, kept channels are added
    team: Word  # see `TeamField`
    partial: Word  # per thread: (rows, N + PARTIAL_EXTRA) float32


LinearField = positions(LinearRow)


@exact
def linear(p, tag):
    """One projection: every thread selects on its span of channels, then computes its span of columns."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    field = words(p[LinearField.PROJECTION])
    n, k = field[ProjectionField.N], field[ProjectionField.K]
    length = k * field[ProjectionField.PLANES]
    rows = p[LinearField.ROWS]
    segments = words(p[LinearField.SEGMENT_COUNT])
    first = span(k, part, parts)
    begin = first * field[ProjectionField.PLANES]
    count = select(
        p[LinearField.X], k, rows, first, span(k, part + 1, parts), p[LinearField.PROJECTION],
        p[LinearField.THRESHOLD], p[LinearField.SEGMENT_INDEX] + 4 * begin, p[LinearField.SEGMENT_VALUE] + 4 * begin,
        length, p[LinearField.COUNTS] + 8 * part,
    )  # fmt: skip
    segments[2 * part], segments[2 * part + 1] = begin, count
    barrier(p[LinearField.TEAM], parts)
    index = p[LinearField.LISTS] + part * 4 * length * (1 + rows)
    value = index + 4 * length
    count = gather(
        p[LinearField.SEGMENT_INDEX], p[LinearField.SEGMENT_VALUE], length, p[LinearField.SEGMENT_COUNT], parts, rows,
        index, value, length,
    )  # fmt: skip
    lo, hi = span(n, part, parts), span(n, part + 1, parts)
    partial = p[LinearField.PARTIAL] + part * 4 * rows * (n + PARTIAL_EXTRA)
    project(
        p[LinearField.PROJECTION], index, value, count, length, rows, lo, hi, p[LinearField.Y] + 4 * lo, n, partial, n + PARTIAL_EXTRA,
        tag,
    )  # fmt: skip
    barrier(p[LinearField.TEAM], parts)


def linear_float32(p):
    linear(p, np.float32(0))


def linear_bfloat16(p):
    linear(p, np.uint16(0))


def linear_float16(p):
    linear(p, np.int16(0))


def linear_tiny(p):
    p[0] = 1


REGIONS.update({one.__name__: one for one in (linear_float32, linear_bfloat16, linear_float16, linear_tiny)})


def sparse_linear(
    x: Tensor, weight: Tensor | Matrix, bias: Tensor | None, channel_scale: Tensor, threshold: Tensor | float
) -> Tensor:
    """x (..., K), a weight (N, K) or laid out, and of a graded one two thresholds: (..., N) in x's type."""
    if isinstance(weight, Tensor):
        weight = Matrix(StoredAs.BASE, weight.t().contiguous(), tuple(weight.shape))
    n, k = weight.shape
    rows_x = x.reshape(-1, k).float().contiguous()
    rows, length, threads = len(rows_x), k * weight.planes, team_size()
    projection, y = weight.row(), torch.empty(rows, n)
    projection.scale, projection.bias = channel_scale, None if bias is None else bias.float()
    parameters = LinearRow(
        projection=projection,
        threshold=torch.as_tensor(threshold, dtype=torch.float32).expand(2),
        rows=rows,
        x=rows_x,
        y=y,
        segment_index=torch.empty(length, dtype=torch.int32),
        segment_value=torch.empty(rows, length),
        segment_count=torch.empty(threads, 2, dtype=torch.int64),
        lists=torch.empty(threads, length * (1 + rows)),
        counts=torch.zeros(threads, dtype=torch.int64),
        team=torch.zeros(TeamField.SIZE, dtype=torch.int64),
        partial=torch.empty(threads, rows * (n + PARTIAL_EXTRA)),
    )
    launch(
        f"linear_{NAMES[weight.data.dtype if weight.stored_as == StoredAs.BASE else x.dtype]}",
        parameters.words,
        threads,
    )
    return y.to(x.dtype).view(*x.shape[:-1], n)
