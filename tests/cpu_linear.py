"""One projection on the CPU, by the very kernels that a decode step is made of, for tests to hold to the definition.

    weight_t = transpose(weight)                       # (N, K) -> (K, N): a kept channel becomes one contiguous row
    y = sparse_linear(x, weight_t, bias, channel_scale, threshold)

The definition is ``reference.sparse_linear``; sums are taken in float32.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.weight_types import quantise
from wisparse.kernels.cpu.barrier import barrier
from wisparse.kernels.cpu.intrinsics import exact, num_threads, span, thread_num, words
from wisparse.kernels.cpu.launch import REGIONS, launch, team_size
from wisparse.kernels.cpu.layout import NAMES, PARTIAL_EXTRA, ProjectionField, StoredAs, TeamField
from wisparse.kernels.cpu.linear import gather, project, select
from wisparse.runtime.cpu.weights import Matrix


class LinearField(IntEnum):
    """Parameters of the region that computes one projection."""

    PROJECTION = 0  # a row of the table of projections
    THRESHOLD = 1  # () float32
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


def transpose(weight: Tensor) -> Tensor:
    """A weight (N, K) as contiguous (K, N): its columns as rows."""
    return weight.t().contiguous()


def quantize(weight: Tensor, *, transposed: bool = True) -> tuple[Tensor, Tensor]:
    """A weight (N, K) rounded to int8, (K, N) or not ``transposed`` (N, K), and its scale (N,) float32."""
    rounded = quantise("int8", weight)
    return transpose(rounded.codes) if transposed else rounded.codes, rounded.scales[:, 0].contiguous()


def sparse_linear(
    x: Tensor,
    weight_t: Tensor | Matrix,
    bias: Tensor | None,
    channel_scale: Tensor | None,
    threshold: Tensor | float,
    *,
    column_scale: Tensor | None = None,
) -> Tensor:
    """``y = (x ∘ keep) @ weight_t + bias`` with ``keep = ~(|x| * channel_scale < threshold)``.

    Args:
        x: (..., K), float32, bfloat16 or float16. Several rows share one pass over the channels that any of them keeps.
        weight_t: (K, N), contiguous, float32, bfloat16, float16 or int8; or a weight laid out, transposed.
        bias: (N,) or None.
        channel_scale: (K,) float32, or None for a dense product.
        threshold: () float32; of a graded weight (2,), one for each plane.
        column_scale: (N,) float32, for a tensor of int8 weights.

    Returns:
        (..., N), x's dtype; sums are float32, each row's independent of the others and of the number of threads.

    Raises:
        ValueError: shapes that do not fit, or a weight that is not contiguous.
    """
    if isinstance(weight_t, Tensor):
        weight_t = _as_matrix(weight_t, column_scale)
    n, k = weight_t.shape
    if not weight_t.transposed or weight_t.data.stride(1) != 1:
        raise ValueError("weight_t: expected a contiguous (K, N) tensor; transpose() makes one")
    for name, tensor, shape in (
        ("x", x, (*x.shape[:-1], k)),
        ("bias", bias, (n,)),
        ("channel_scale", channel_scale, (k,)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.device.type != "cpu"):
            raise ValueError(f"{name}: expected {shape} on the CPU, found {tuple(tensor.shape)} on {tensor.device}")
    rows_x = x.reshape(-1, k).float().contiguous()
    rows = len(rows_x)
    y = torch.empty(rows, n)
    if y.numel() == 0:
        return y.to(x.dtype).view(*x.shape[:-1], n)
    threads = team_size()
    # Kept alive until the region has run: bias, scales and the threshold as float32, and the scratch of the lists.
    bias, channel_scale = (None if t is None else t.float().contiguous() for t in (bias, channel_scale))
    limit = torch.as_tensor(threshold, dtype=torch.float32).expand(2).contiguous()
    length = k * weight_t.planes
    lists = torch.empty((threads + 1) * length * (1 + rows), dtype=torch.float32)
    partial = torch.empty(threads * rows * (n + PARTIAL_EXTRA), dtype=torch.float32)
    counts = torch.zeros(threads, 3, dtype=torch.int64)
    projection = weight_t.row()
    projection[ProjectionField.SCALE] = 0 if channel_scale is None else channel_scale.data_ptr()
    projection[ProjectionField.BIAS] = 0 if bias is None else bias.data_ptr()
    parameters = np.zeros(len(LinearField), dtype=np.int64)
    parameters[LinearField.PROJECTION] = projection.ctypes.data
    parameters[LinearField.THRESHOLD] = limit.data_ptr()
    parameters[LinearField.ROWS] = rows
    parameters[LinearField.X], parameters[LinearField.Y] = rows_x.data_ptr(), y.data_ptr()
    segment = lists.data_ptr() + 4 * threads * length * (1 + rows)
    parameters[LinearField.SEGMENT_INDEX], parameters[LinearField.SEGMENT_VALUE] = segment, segment + 4 * length
    parameters[LinearField.SEGMENT_COUNT] = counts.data_ptr()
    parameters[LinearField.LISTS] = lists.data_ptr()
    parameters[LinearField.PARTIAL] = partial.data_ptr()
    parameters[LinearField.COUNTS] = counts.data_ptr() + 16 * threads
    team = torch.zeros(TeamField.SIZE, dtype=torch.int64)
    parameters[LinearField.TEAM] = team.data_ptr()
    base = weight_t.data.dtype if weight_t.stored_as == StoredAs.BASE else x.dtype
    launch(f"linear_{NAMES[base]}", parameters, threads)
    return y.to(x.dtype).view(*x.shape[:-1], n)


def _as_matrix(weight_t: Tensor, column_scale: Tensor | None) -> Matrix:
    k, n = weight_t.shape
    if (weight_t.dtype == torch.int8) != (column_scale is not None):
        raise ValueError("column_scale: expected with int8 weights and with no others")
    if column_scale is None:
        return Matrix(StoredAs.BASE, weight_t, (n, k), True)
    if column_scale.shape != (n,):
        raise ValueError(f"column_scale: expected ({n},), found {tuple(column_scale.shape)}")
    return Matrix(StoredAs.INT8, weight_t, (n, k), True, column_scale.float().contiguous())
