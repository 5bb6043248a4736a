"""Several rows of x times unquantized weights on the tensor cores, with dropped channels set to zero in x: two to
sixteen rows of a decode step (``masked_gemm_kernel`` takes up to 32), and vLLM's batches.

    y[m, n] = sum over k of where(|x[m, k]| * scales[p, k] < thresholds[p] * row_mask[m], 0, x[m, k]) * weight_t[k, n]

All weights are read: few channels are dropped by every row (6% with four rows at 50% sparsity). Bytes: K * N *
sizeof(dtype), for any number of rows. The twin is ``reference.sparse_linear``.

``masked_gemm_kernel``: a program has a tile of columns and every splits-th block of block_k channels. ``mask_gemm`` has
no splits and masks x after each load. ``mask_rows`` only stores masked copies of x, for cuBLAS.

    x (16, K) in shared memory             weight_t (K, N): (stages - 1) blocks in flight before x is ready
    rows beyond B repeat the last          +-----------+
    +-----+-----+-----+                    | block_k x |  split 0      acc (16, block_n) float32 = tl.dot, mma.m16n8k16:
    | 16 x block_k ...|                    |  block_n  |  split 1      Triton gives lane 4 g + t rows g, g + 8 and
    +-----+-----+-----+                    +-----------+  split 0      columns 2 t, 2 t + 1 of each 8
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channels import is_dropped, program_channels, store_inputs, tile_columns
from .common import gdc_wait, smem_alloc, smem_load
from .reduction import reduce_tile, store_partial
from .weights import FusedLinear, dequantize_block, quant_columns


@triton.jit(do_not_specialize=["ssq_parts"])
def masked_gemm_kernel(  # arguments as of sparse_gemv_kernel; launch.block_k at least tl.dot's smallest K
    given, weights, output, workspace, counting, eps, ssq_parts, problem: tl.constexpr, launch: tl.constexpr
):
    K: tl.constexpr = problem.k
    BATCH: tl.constexpr = problem.batch
    BLOCK_N: tl.constexpr = launch.block_n
    BLOCK_K: tl.constexpr = launch.block_k
    SPLITS: tl.constexpr = launch.splits
    LENGTH: tl.constexpr = launch.length
    # All tiles are full: loads need no mask.
    FULL: tl.constexpr = K % BLOCK_K + problem.n0 % BLOCK_N + problem.n1 % BLOCK_N + problem.n2 % BLOCK_N == 0
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    ROWS: tl.constexpr = 16 if BATCH <= 16 else 32  # BATCH padded for tl.dot
    SMEM: tl.constexpr = launch.smem
    SHARED: tl.constexpr = SMEM != ""
    QUANTIZED: tl.constexpr = problem.quant != "none"
    dtype: tl.constexpr = output.out.dtype.element_ty
    program = tl.program_id(0)
    of = tile_columns(program % launch.tiles, program // launch.tiles, problem, BLOCK_N)
    split = of.split
    columns = quant_columns(of, of.n, problem) if QUANTIZED else weights.weight_t + of.column
    channels = program_channels(given, weights, of, problem, launch, BLOCK_K)
    values = smem_alloc(SMEM, program) if SHARED else workspace.list_value + program * BATCH * LENGTH
    if not SHARED:
        values = store_inputs(values, given, channels, counting, eps, ssq_parts, problem, LENGTH, SHARED, dtype)

    # --- the product
    rows = tl.arange(0, ROWS)
    row_at = tl.minimum(rows, BATCH - 1)[:, None] * LENGTH
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    count = (BLOCKS - split + SPLITS - 1) // SPLITS
    for step in tl.range(0, count, num_stages=launch.stages):
        k = (step * SPLITS + split) * BLOCK_K + lane
        live = (k < K)[:, None] & of.live[None, :]
        if QUANTIZED:
            w = dequantize_block(weights, columns, k, live, problem)
        else:
            at = columns[None, :] + k.to(tl.int64)[:, None] * problem.stride
            w = tl.load(at) if FULL else tl.load(at, mask=live, other=0.0)
        if SHARED:  # noqa: SIM102 (resolved at compile time)
            # Inside the loop: the compiler's pipeline prologue then loads the first weights before x is waited for.
            if step == 0:
                values = store_inputs(values, given, channels, counting, eps, ssq_parts, problem, LENGTH, SHARED, dtype)
        x = smem_load(values, row_at + (step * BLOCK_K + lane)[None, :], dtype, SHARED)
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision="ieee")
    if BLOCKS < SPLITS:
        # A program without a block has not waited in the loop; the previous kernel may still use the workspace.
        gdc_wait(problem.pdl, False)
    offset = (split * BATCH + rows)[:, None] * problem.n + of.column[None, :]
    store_partial(workspace.partial, offset, acc, (rows < BATCH)[:, None] & of.live[None, :])

    reduce_tile(of, weights.bias, output, workspace, problem, launch, True)


@triton.jit(do_not_specialize=["M"])
def _mask_rows_kernel(
    x_ptr, scale_ptr, threshold_ptr, row_mask_ptr, out_ptr, M,  # as of mask_rows
    K: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,  # index of the first copy of these projections
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    copy = tl.program_id(2)
    p = (copy >= SECOND).to(tl.int32) + (copy >= THIRD).to(tl.int32)
    live = k < K
    scale = tl.load(scale_ptr + p * K + k, mask=live, other=0.0)
    threshold = tl.load(threshold_ptr + p)
    gdc_wait(PDL, False)
    x = tl.load(x_ptr + row * K + k, mask=live, other=0.0)
    limit = threshold * tl.load(row_mask_ptr + row)
    masked = tl.where(is_dropped(x, scale, limit), 0.0, x)
    tl.store(out_ptr + (copy.to(tl.int64) * M + row) * K + k, masked, mask=live)


def mask_rows(
    x: Tensor, scales: Tensor, thresholds: Tensor, row_mask: Tensor, *, copies: Sequence[int] | None = None,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """x (M, K) masked for each of one to three projections: (sum(copies), M, K), projection by projection. ``scales``,
    ``thresholds``: as in ``common.Weights``; ``row_mask``: (M,) float32, 0 for a row that keeps all its channels;
    ``copies`` of each projection, None: one."""
    rows, k = x.shape
    offsets = list(accumulate(copies or [1] * len(scales)))
    out = torch.empty(offsets[-1], rows, k, dtype=x.dtype, device=x.device)
    block_k = min(1024, triton.next_power_of_2(k))
    second, third = (*offsets, offsets[-1], offsets[-1])[:2]
    _mask_rows_kernel[(rows, triton.cdiv(k, block_k), offsets[-1])](
        x, scales, thresholds, row_mask, out, rows, K=k, SECOND=second, THIRD=third, BLOCK_K=block_k, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


class _MaskGemm(NamedTuple):
    """Compile-time constants, as in ``common.Problem`` and ``LaunchConfig``."""

    k: int
    n0: int
    n1: int
    n2: int
    stride: int
    block_m: int
    block_n: int
    block_k: int
    stages: int


@triton.jit(do_not_specialize=["M"])
def _mask_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, threshold_ptr, row_mask_ptr, out_ptr, M, config: tl.constexpr
):
    K: tl.constexpr = config.k
    BLOCK_M: tl.constexpr = config.block_m
    BLOCK_N: tl.constexpr = config.block_n
    BLOCK_K: tl.constexpr = config.block_k
    N: tl.constexpr = config.n0 + config.n1 + config.n2
    FULL: tl.constexpr = K % BLOCK_K + config.n0 % BLOCK_N + config.n1 % BLOCK_N + config.n2 % BLOCK_N == 0
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    of = tile_columns(tl.program_id(0), 0, config, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_rows = m < M
    limit = tl.load(threshold_ptr + of.projection) * tl.load(row_mask_ptr + m, mask=live_rows, other=0.0)
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=config.stages):
        k = start + lane
        x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
        w_at = weight_ptr + k.to(tl.int64)[:, None] * config.stride + of.column[None, :]
        if FULL:
            w = tl.load(w_at)
            x = tl.load(x_at, mask=live_rows[:, None], other=0.0)
            scale = tl.load(scale_ptr + of.projection * K + k)
        else:
            live = k < K
            w = tl.load(w_at, mask=live[:, None] & of.live[None, :], other=0.0)
            x = tl.load(x_at, mask=live_rows[:, None] & live[None, :], other=0.0)
            scale = tl.load(scale_ptr + of.projection * K + k, mask=live, other=0.0)
        x = tl.where(is_dropped(x, scale[None, :], limit[:, None]), 0.0, x).to(dtype)
        acc = tl.dot(x, w, acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + of.column, mask=of.live, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * N + of.column[None, :]
    tl.store(out_at, acc.to(dtype), mask=live_rows[:, None] & of.live[None, :])


def rows_of_tile(rows: int) -> int:
    """block_m of ``mask_gemm`` for a number of rows."""
    return max(16, min(128, triton.next_power_of_2(rows)))


def mask_gemm(x: Tensor, linear: FusedLinear, row_mask: Tensor, tile: Any) -> Tensor:
    """y (M, N) of x (M, K), contiguous, fp16 or bf16 like the weights; ``row_mask`` as for ``mask_rows``. ``tile``: a
    ``plan.GemvTile``, of which block_n, block_k, stages and warps are used."""
    rows, block_m = len(x), rows_of_tile(len(x))
    out = torch.empty(rows, linear.out_features, dtype=x.dtype, device=x.device)
    weight_t = linear.weight.data
    grid = (sum(triton.cdiv(width, tile.block_n) for width in linear.widths), triton.cdiv(rows, block_m))
    n0, n1, n2 = (*linear.widths, 0, 0)[:3]
    _mask_gemm_kernel[grid](
        x, weight_t, linear.bias, linear.scales, linear.thresholds, row_mask, out, rows,
        _MaskGemm(linear.in_features, n0, n1, n2, weight_t.stride(0), block_m, tile.block_n, tile.block_k, tile.stages),
        num_warps=tile.warps,
    )  # fmt: skip
    return out
