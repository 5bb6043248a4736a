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

from .layout import TILE, LayoutField, LinearField, ProjectionField, TeamField
from .threads import launch, team_size

__all__ = ["aligned_empty", "quantize", "quantize_into", "sparse_linear", "transpose", "transpose_into", "type_name"]

_CACHE_LINE = 64
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8"}


def type_name(dtype: torch.dtype) -> str:
    """The part of a region's name that tells a weight's type.

    Raises:
        TypeError: not one of float32, bfloat16, float16 and int8.
    """
    if dtype not in _NAMES:
        raise TypeError(f"expected float32, bfloat16, float16 or int8, found {dtype}")
    return _NAMES[dtype]


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory that starts on a cache line, so that rows of whole lines do."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = torch.empty(size + _CACHE_LINE - 1, dtype=torch.uint8)
    skip = -buffer.data_ptr() % _CACHE_LINE
    return buffer[skip : skip + size].view(dtype).view(shape)


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
    weight_t: Tensor,
    bias: Tensor | None,
    channel_scale: Tensor | None,
    threshold: Tensor | float,
    *,
    column_scale: Tensor | None = None,
) -> Tensor:
    """``y = (x ∘ keep) @ weight_t + bias`` with ``keep = ~(|x| * channel_scale < threshold)``.

    Args:
        x: (..., K), float32, bfloat16 or float16. Several rows share one pass over the channels that any of them keeps.
        weight_t: (K, N), contiguous, float32, bfloat16, float16 or int8.
        bias: (N,) or None.
        channel_scale: (K,) float32, or None for a dense product.
        threshold: () float32.
        column_scale: (N,) float32, for int8 weights.

    Returns:
        (..., N), x's dtype; sums are float32, each row's independent of the others and of the number of threads.

    Raises:
        ValueError: shapes that do not fit, or a weight that is not contiguous.
    """
    k, n = weight_t.shape
    for name, tensor, shape in (
        ("x", x, (*x.shape[:-1], k)),
        ("bias", bias, (n,)),
        ("channel_scale", channel_scale, (k,)),
        ("column_scale", column_scale, (n,)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.device.type != "cpu"):
            raise ValueError(f"{name}: expected {shape} on the CPU, found {tuple(tensor.shape)} on {tensor.device}")
    if not weight_t.is_contiguous():
        raise ValueError("weight_t: expected a contiguous (K, N) tensor; transpose() makes one")
    if (weight_t.dtype == torch.int8) != (column_scale is not None):
        raise ValueError("column_scale: expected with int8 weights and with no others")
    rows_x = x.reshape(-1, k).float().contiguous()
    rows = len(rows_x)
    y = torch.empty(rows, n)
    if y.numel() == 0:
        return y.to(x.dtype).view(*x.shape[:-1], n)
    threads = team_size()
    # Kept alive until the region has run: bias, scales and the threshold as float32, and the scratch of the lists.
    bias, channel_scale, column_scale = (
        None if t is None else t.float().contiguous() for t in (bias, channel_scale, column_scale)
    )
    limit = torch.as_tensor(threshold, dtype=torch.float32)
    lists = torch.empty((threads + 1) * k * (1 + rows), dtype=torch.float32)
    counts = torch.zeros(threads, 3, dtype=torch.int64)
    projection = np.zeros(len(ProjectionField), dtype=np.int64)
    projection[ProjectionField.WEIGHT] = weight_t.data_ptr()
    projection[ProjectionField.K], projection[ProjectionField.N] = k, n
    projection[ProjectionField.SCALE] = 0 if channel_scale is None else channel_scale.data_ptr()
    projection[ProjectionField.BIAS] = 0 if bias is None else bias.data_ptr()
    projection[ProjectionField.COLUMN_SCALE] = 0 if column_scale is None else column_scale.data_ptr()
    parameters = np.zeros(len(LinearField), dtype=np.int64)
    parameters[LinearField.PROJECTION] = projection.ctypes.data
    parameters[LinearField.THRESHOLD] = limit.data_ptr()
    parameters[LinearField.ROWS] = rows
    parameters[LinearField.X], parameters[LinearField.Y] = rows_x.data_ptr(), y.data_ptr()
    segment = lists.data_ptr() + 4 * threads * k * (1 + rows)
    parameters[LinearField.SEGMENT_INDEX], parameters[LinearField.SEGMENT_VALUE] = segment, segment + 4 * k
    parameters[LinearField.SEGMENT_COUNT] = counts.data_ptr()
    parameters[LinearField.LISTS] = lists.data_ptr()
    parameters[LinearField.COUNTS] = counts.data_ptr() + 16 * threads
    team = aligned_empty((TeamField.SIZE,), torch.int64).zero_()
    parameters[LinearField.TEAM] = team.data_ptr()
    launch(f"linear_{type_name(weight_t.dtype)}", parameters, threads)
    return y.to(x.dtype).view(*x.shape[:-1], n)
