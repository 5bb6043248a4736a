"""Projections of more rows of x than ``gemv`` takes, each over the channels that each row keeps, in one launch.

    y[m, :] = sum over k of where(|x[m, k]| * scales[p, k] < thresholds[p] * masked[m], 0, x[m, k]) * weight_t[k, :]

A program owns one tile of rows and columns and goes through all channels; the mask is worked out beside the loads, so
nothing is written but the result. Every weight is read once for each tile of rows: for a few dozen rows that is what
takes the time, and a plain product of copies of x (``mask``) reads no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import tile_columns, wait_for_previous_kernel
from .gemv import GemvTile, Group

_BLOCK_K = 1024


@triton.jit(do_not_specialize=["M"])
def _mask_rows_kernel(
    x_ptr,  # (M, K)
    scale_ptr,  # (projections, K) float32
    threshold_ptr,  # (projections,) float32
    masked_ptr,  # (M,) float32
    out_ptr,  # (copies, M, K)
    M,
    K: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    copy = tl.program_id(2)
    # Copies of the second and of the third projection begin at SECOND and THIRD.
    p = (copy >= SECOND).to(tl.int32) + (copy >= THIRD).to(tl.int32)
    live = k < K
    scale = tl.load(scale_ptr + p * K + k, mask=live, other=0.0)
    threshold = tl.load(threshold_ptr + p)
    wait_for_previous_kernel(PDL)
    x = tl.load(x_ptr + row * K + k, mask=live, other=0.0)
    limit = threshold * tl.load(masked_ptr + row)
    # A NaN is not below anything: it is kept.
    kept = tl.where(tl.abs(x.to(tl.float32)) * scale < limit, 0.0, x)
    tl.store(out_ptr + (copy.to(tl.int64) * M + row) * K + k, kept, mask=live)


def mask_rows(
    x: Tensor,
    scales: Tensor,
    thresholds: Tensor,
    masked: Tensor,
    *,
    copies: Sequence[int] | None = None,
    pdl: bool = False,
) -> Tensor:
    """The masked copies of x, (sum(copies), M, K), those of one projection after those of another.

    Args:
        x: (M, K), contiguous.
        scales: (projections, K) float32.
        thresholds: (projections,) float32.
        masked: (M,) float32, 1 for a row that is masked, 0 for one that keeps all its channels.
        copies: how many of each projection, one to three of them; None for one of each.
        pdl: programmatic dependent launch (compute capability 9.0 or later).
    """
    rows, k = x.shape
    ends = list(accumulate(copies or [1] * len(scales)))
    out = torch.empty(ends[-1], rows, k, dtype=x.dtype, device=x.device)
    block_k = min(_BLOCK_K, triton.next_power_of_2(k))
    second, third = (*ends, ends[-1], ends[-1])[:2]
    _mask_rows_kernel[(rows, triton.cdiv(k, block_k), ends[-1])](
        x, scales, thresholds, masked, out, rows, K=k, SECOND=second, THIRD=third, BLOCK_K=block_k, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _mask_gemm_kernel(
    x_ptr,  # (M, K)
    weight_ptr,  # (K, STRIDE)
    bias_ptr,  # (N0 + N1 + N2,)
    scale_ptr,  # (projections, K) float32
    threshold_ptr,  # (projections,) float32
    masked_ptr,  # (M,) float32
    out_ptr,  # (M, N0 + N1 + N2)
    M,
    K: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    N: tl.constexpr = N0 + N1 + N2
    WHOLE: tl.constexpr = K % BLOCK_K + N0 % BLOCK_N + N1 % BLOCK_N + N2 % BLOCK_N == 0
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    of = tile_columns(tl.program_id(0), N0, N1, N2, BLOCK_N)
    n = of.local * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = n < of.width
    columns = of.first + n
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = m < M
    limit = tl.load(threshold_ptr + of.projection) * tl.load(masked_ptr + m, mask=there, other=0.0)
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + lane
        x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
        w_at = weight_ptr + k.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        if WHOLE:
            w = tl.load(w_at)
            x = tl.load(x_at, mask=there[:, None], other=0.0)
            scale = tl.load(scale_ptr + of.projection * K + k)
        else:
            live = k < K
            w = tl.load(w_at, mask=live[:, None] & in_width[None, :], other=0.0)
            x = tl.load(x_at, mask=there[:, None] & live[None, :], other=0.0)
            scale = tl.load(scale_ptr + of.projection * K + k, mask=live, other=0.0)
        # A NaN is not below anything: it is kept.
        x = tl.where(tl.abs(x.to(tl.float32)) * scale[None, :] < limit[:, None], 0.0, x).to(dtype)
        acc = tl.dot(x, w, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=in_width, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_at, acc.to(dtype), mask=there[:, None] & in_width[None, :])


def mask_gemm_kind(rows: int) -> str:
    """The kind of a launch for so many rows, in the table of tiles; one tile holds up to 128 of them."""
    return f"mask{max(4, min(128, triton.next_power_of_2(rows)))}"


def rows_of_tile(rows: int) -> int:
    """Rows that the kernel for so many is compiled for."""
    return max(16, min(128, triton.next_power_of_2(rows)))


def mask_gemm(x: Tensor, group: Group, masked: Tensor, tile: GemvTile) -> Tensor:
    """y (M, N), x's dtype.

    Args:
        x: (M, K), contiguous, fp16 or bf16 as the weights.
        group: weights, scales and thresholds.
        masked: (M,) float32, 1 for a row that is masked, 0 for one that keeps all its channels.
        tile: columns (``block_n``), channels that are read at a time (``block_k``), how many times that are on their
            way and one (``stages``), ``warps``.
    """
    rows = len(x)
    block_m = rows_of_tile(rows)
    widths = (*group.widths, 0, 0)[:3]
    out = torch.empty(rows, group.out_features, dtype=x.dtype, device=x.device)
    weight_t = group.matrix.data
    grid = (sum(triton.cdiv(width, tile.block_n) for width in group.widths), triton.cdiv(rows, block_m))
    _mask_gemm_kernel[grid](
        x, weight_t, weight_t if group.bias is None else group.bias, group.scales, group.thresholds, masked,
        out, rows, K=group.in_features, N0=widths[0], N1=widths[1], N2=widths[2], STRIDE=weight_t.stride(0),
        HAS_BIAS=group.bias is not None, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
