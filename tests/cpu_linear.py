"""One projection on the CPU, by the very kernels that a decode step is made of, for tests to hold to the definition,
``reference.sparse_linear``; sums are taken in float32."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from wisparse.kernels.cpu.barrier import barrier
from wisparse.kernels.cpu.intrinsics import exact, num_threads, span, thread_num, words
from wisparse.kernels.cpu.launch import REGIONS, launch, team_size
from wisparse.kernels.cpu.layout import NAMES, PARTIAL_EXTRA, ProjectionField, StoredAs, TeamField
from wisparse.kernels.cpu.linear import gather, project, select
from wisparse.runtime.cpu.weights import Matrix


class LinearField(IntEnum):
    """Parameters of the region that computes one projection."""

    PROJECTION = 0  # a row of the table of projections
    THRESHOLD = 1  # (2,) float32
    ROWS = 2
    X = 3  # (rows, K) float32
    Y = 4  # (rows, N) float32
    SEGMENT_INDEX = 5  # (K,) int32
    SEGMENT_VALUE = 6  # (rows, K) float32
    SEGMENT_COUNT = 7  # (threads, 2) int64
    LISTS = 8  # per thread: (K,) int32, then (rows, K) float32
    COUNTS = 9  # (threads,) int64, kept channels are added
    TEAM = 10  # see `TeamField`
    PARTIAL = 11  # per thread: (rows, N + PARTIAL_EXTRA) float32


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


REGIONS.update(linear_float32=linear_float32, linear_bfloat16=linear_bfloat16, linear_float16=linear_float16)


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
    projection[ProjectionField.SCALE] = channel_scale.data_ptr()
    if bias is not None:
        bias = bias.float()
        projection[ProjectionField.BIAS] = bias.data_ptr()
    tensors = {  # which stay alive until the region has run
        LinearField.THRESHOLD: torch.as_tensor(threshold, dtype=torch.float32).expand(2).contiguous(),
        LinearField.X: rows_x,
        LinearField.Y: y,
        LinearField.SEGMENT_INDEX: torch.empty(length, dtype=torch.int32),
        LinearField.SEGMENT_VALUE: torch.empty(rows, length),
        LinearField.SEGMENT_COUNT: torch.empty(threads, 2, dtype=torch.int64),
        LinearField.LISTS: torch.empty(threads, length * (1 + rows)),
        LinearField.COUNTS: torch.zeros(threads, dtype=torch.int64),
        LinearField.TEAM: torch.zeros(TeamField.SIZE, dtype=torch.int64),
        LinearField.PARTIAL: torch.empty(threads, rows * (n + PARTIAL_EXTRA)),
    }
    parameters = np.zeros(len(LinearField), dtype=np.int64)
    parameters[LinearField.PROJECTION], parameters[LinearField.ROWS] = projection.ctypes.data, rows
    for field, tensor in tensors.items():
        parameters[field] = tensor.data_ptr()
    launch(f"linear_{NAMES[weight.data.dtype if weight.stored_as == StoredAs.BASE else x.dtype]}", parameters, threads)
    return y.to(x.dtype).view(*x.shape[:-1], n)
