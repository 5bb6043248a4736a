"""The CPU back end's operations on tensors: prepare a weight once, then multiply by its kept channels only.

    weight_t = transpose(weight)                       # (N, K) -> (K, N): a kept channel becomes one contiguous row
    y = sparse_linear(x, weight_t, bias, channel_scale, threshold)

The definition it agrees with is ``reference.sparse_linear``; sums are taken in float32. A whole decode step uses the
same kernels without coming back to Python: ``runtime.cpu.decoder``. Importing this module imports numba, which takes a
second.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .layout import TILE, LayoutField, LinearField, ProjectionField, StoredAs, TeamField
from .matrix import Matrix
from .threads import launch, team_size
from .types import aligned_empty, type_name

__all__ = [
    "empty_int4", "pack_int4", "pack_int4_into", "quantize", "quantize_into", "sparse_linear", "transpose",
    "transpose_into",
]  # fmt: skip


def transpose(weight: Tensor) -> Tensor:
    """A weight's columns as contiguous rows.

    Args:
        weight: (N, K), float32, bfloat16 or float16.

    Returns:
        (K, N), the same type, in fresh memory.
    """
    target = aligned_empty((weight.shape[1], weight.shape[0]), weight.dtype)
    transpose_into(weight, target, 0)
    return target


def quantize(weight: Tensor, *, transposed: bool = True) -> tuple[Tensor, Tensor]:
    """Round a weight to int8, symmetric, to nearest, with one scale per output channel.

    Args:
        weight: (N, K), float32, bfloat16 or float16.
        transposed: whether to lay the result out as (K, N), as ``sparse_linear`` wants it.

    Returns:
        int8 (K, N) or (N, K), in -127..127, and its scale (N,) float32: ``weight ~ int8 * scale``. A row that holds a
        NaN or an Inf has a scale of NaN.
    """
    n, k = weight.shape
    target = aligned_empty((k, n) if transposed else (n, k), torch.int8)
    scale = torch.empty(n, dtype=torch.float32)
    quantize_into(weight, target, scale, 0, transposed=transposed)
    return target, scale


def transpose_into(rows: Tensor, target: Tensor, first: int) -> None:
    """Put some rows of a weight into its transpose: ``target[:, first:first + len(rows)] = rows.T``.

    Args:
        rows: (R, K).
        target: (K, N), contiguous, the same type.
        first: of the N columns.
    """
    _rearrange(f"transpose_{type_name(rows.dtype)}", rows, target, None, first, transposed=True)


def quantize_into(rows: Tensor, target: Tensor, scale: Tensor, first: int, *, transposed: bool) -> None:
    """Round some rows (R, K) of a weight into their place in ``target`` and ``scale``; see :func:`quantize`."""
    _rearrange(f"quantize_{type_name(rows.dtype)}", rows, target, scale, first, transposed=transposed)


def empty_int4(
    shape: tuple[int, int], group: int, *, scale_dtype: torch.dtype = torch.float32, zero_points: bool = False
) -> Matrix:
    """Uninitialised memory for an int4 weight of a shape (N, K), to be filled by :func:`pack_int4_into`.

    Args:
        group: channels that share a scale; divides K.
        scale_dtype: what scales are held in: float32, or bfloat16 or float16 where they are numbers of these.
    """
    n, k = shape
    pairs, groups = (n + 1) // 2, k // group
    # The second half of an odd row's last byte has no output; nothing of it may be a NaN.
    scale = torch.zeros(groups, 2, pairs, dtype=scale_dtype)
    zero = torch.zeros(groups, 2, pairs, dtype=torch.uint8) if zero_points else None
    return Matrix(StoredAs.INT4, aligned_empty((k, pairs), torch.uint8), shape, True, scale, zero, group)


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, k: int) -> Matrix:
    """Lay out a whole int4 weight (N, K): its arguments are those of :func:`pack_int4_into`."""
    matrix = empty_int4((len(codes), k), group, scale_dtype=scales.dtype, zero_points=zeros is not None)
    pack_int4_into(codes, scales, zeros, matrix, 0)
    return matrix


def pack_int4_into(codes: Tensor, scales: Tensor, zeros: Tensor | None, matrix: Matrix, first: int) -> None:
    """Put some rows of an int4 weight, ``weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]``, into their place.

    Args:
        codes: (R, ceil(K / 2)) uint8, channel 2j in the low half of byte j.
        scales: (R, G), numbers of the type that ``matrix`` holds.
        zeros: (R, G) uint8, or None: 8.
        matrix: of :func:`empty_int4`.
        first: of these rows among the N; even.
    """
    n, k = matrix.shape
    count = len(codes)
    if matrix.stored_as != StoredAs.INT4 or matrix.scale is None:
        raise ValueError("matrix: expected the memory of an int4 weight; empty_int4() makes it")
    if codes.shape != (count, (k + 1) // 2) or first % 2 or not 0 <= first <= n - count:
        raise ValueError(f"rows {first} to {first + count} of {tuple(codes.shape)} do not fit an int4 {n} x {k}")
    codes = codes.contiguous()
    threads = team_size() if codes.numel() > 2**20 else 1
    tiles = torch.empty(threads * TILE * (TILE + 1), dtype=torch.float32)
    parameters = np.zeros(len(LayoutField), dtype=np.int64)
    parameters[LayoutField.SOURCE] = codes.data_ptr()
    parameters[LayoutField.ROWS], parameters[LayoutField.K] = count, k
    parameters[LayoutField.TARGET] = matrix.data.data_ptr() + first // 2
    parameters[LayoutField.STRIDE] = matrix.data.shape[1]
    parameters[LayoutField.TILES] = tiles.data_ptr()
    launch("pack_int4", parameters, threads)
    for target, source in ((matrix.scale, scales), (matrix.zero, zeros)):
        if (target is None) != (source is None):
            raise ValueError("zeros: expected where the memory has room for them, and nowhere else")
        if target is not None and source is not None:
            for parity in range(2):
                part = source[parity::2].t()
                target[:, parity, first // 2 : first // 2 + part.shape[1]] = part


def _rearrange(
    region: str, rows: Tensor, target: Tensor, scale: Tensor | None, first: int, *, transposed: bool
) -> None:
    rows = rows.contiguous()
    count, k = rows.shape
    n = target.shape[1 if transposed else 0]
    if target.shape != ((k, n) if transposed else (n, k)) or not target.is_contiguous() or not 0 <= first <= n - count:
        raise ValueError(f"rows {first} to {first + count} of {k} do not fit a target of {tuple(target.shape)}")
    # A piece that lies in the cache is not worth a team of threads.
    threads = team_size() if rows.numel() > 2**21 else 1
    tiles = torch.empty(threads * TILE * (TILE + 1), dtype=torch.float32)
    parameters = np.zeros(len(LayoutField), dtype=np.int64)
    parameters[LayoutField.SOURCE] = rows.data_ptr()
    parameters[LayoutField.ROWS], parameters[LayoutField.K] = count, k
    parameters[LayoutField.TARGET] = target.data_ptr() + first * (1 if transposed else k) * target.element_size()
    parameters[LayoutField.STRIDE] = n
    parameters[LayoutField.TRANSPOSED] = transposed
    parameters[LayoutField.SCALE] = 0 if scale is None else scale.data_ptr() + 4 * first
    parameters[LayoutField.TILES] = tiles.data_ptr()
    launch(region, parameters, threads)


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
        threshold: () float32.
        column_scale: (N,) float32, for a tensor of int8 weights.

    Returns:
        (..., N), x's dtype; sums are float32, each row's independent of the others and of the number of threads.

    Raises:
        ValueError: shapes that do not fit, or a weight that is not contiguous.
    """
    if isinstance(weight_t, Tensor):
        weight_t = _as_matrix(weight_t, column_scale)
    n, k = weight_t.shape
    if not weight_t.transposed or not weight_t.data.is_contiguous():
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
    limit = torch.as_tensor(threshold, dtype=torch.float32)
    lists = torch.empty((threads + 1) * k * (1 + rows), dtype=torch.float32)
    partial = torch.empty(threads * rows * (n + 2), dtype=torch.float32)
    counts = torch.zeros(threads, 3, dtype=torch.int64)
    projection = np.zeros(len(ProjectionField), dtype=np.int64)
    for field, value in weight_t.describe().items():
        projection[field] = value.data_ptr() if isinstance(value, Tensor) else value
    projection[ProjectionField.SCALE] = 0 if channel_scale is None else channel_scale.data_ptr()
    projection[ProjectionField.BIAS] = 0 if bias is None else bias.data_ptr()
    parameters = np.zeros(len(LinearField), dtype=np.int64)
    parameters[LinearField.PROJECTION] = projection.ctypes.data
    parameters[LinearField.THRESHOLD] = limit.data_ptr()
    parameters[LinearField.ROWS] = rows
    parameters[LinearField.X], parameters[LinearField.Y] = rows_x.data_ptr(), y.data_ptr()
    segment = lists.data_ptr() + 4 * threads * k * (1 + rows)
    parameters[LinearField.SEGMENT_INDEX], parameters[LinearField.SEGMENT_VALUE] = segment, segment + 4 * k
    parameters[LinearField.SEGMENT_COUNT] = counts.data_ptr()
    parameters[LinearField.LISTS] = lists.data_ptr()
    parameters[LinearField.PARTIAL] = partial.data_ptr()
    parameters[LinearField.COUNTS] = counts.data_ptr() + 16 * threads
    team = aligned_empty((TeamField.SIZE,), torch.int64).zero_()
    parameters[LinearField.TEAM] = team.data_ptr()
    base = weight_t.data.dtype if weight_t.stored_as == StoredAs.BASE else torch.float32
    launch(f"linear_{type_name(base)}", parameters, threads)
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
