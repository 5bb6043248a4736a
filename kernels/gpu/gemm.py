"""Several rows of x times weights on the tensor cores. All weights are read: few channels are dropped by every row (6%
with four rows at 50% sparsity), so a mask sets x to zero and saves no bytes.

    y[m, n] = sum over k of where(|x[m, k]| * scales[p, k] < thresholds[p] * row_mask[m], 0, x[m, k]) * weight_t[k, n]

``fused_gemm_kernel``, two to 32 rows of a decode step: the ends of a linear (``common.Input``, ``common.Output``) are in
the launch. A program has a tile of columns and every splits-th block of block_k channels:

    x (16, K) in shared memory             weight_t (K, N): (stages - 1) blocks in flight before x is ready
    rows beyond B repeat the last          +-----------+
    +-----+-----+-----+                    | block_k x |  split 0      acc (16, block_n) float32 = tl.dot, mma.m16n8k16:
    | 16 x block_k ...|                    |  block_n  |  split 1      Triton gives lane 4 g + t rows g, g + 8 and
    +-----+-----+-----+                    +-----------+  split 0      columns 2 t, 2 t + 1 of each 8

``gemm``, any number of rows: x (M, K) to y (M, N). A program has block_m rows, block_n columns of one projection and
every splits-th block of channels; the last program of a tile to finish adds up the splits in order. Two compile-time
choices: a mask is applied to x after each load, or not; weights are loaded as they are, or as codes that are
dequantized in registers.

``mask_rows`` only stores masked copies of x, for a product that does not mask.

Bytes: those of the weights for every 16 or block_m rows. Twins: ``reference.sparse_linear``, of codes a product with the
result of ``weights.widen``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channels import is_dropped, program_channels, store_inputs, tile_columns
from .common import Weights, gdc_wait, smem_alloc, smem_load
from .reduction import reduce_tile, store_partial
from .tiles import Tile, count_tiles
from .weights import FusedLinear, code_block, dequantize_block, quant_columns

MOST_TILES = 1 << 14  # of a launch of ``gemm``: the size of its counter


@triton.jit(do_not_specialize=["ssq_parts"])
def fused_gemm_kernel(  # arguments as of sparse_gemv_kernel; launch.block_k at least tl.dot's smallest K
    inputs, weights, output, workspace, eps, ssq_parts, problem: tl.constexpr, launch: tl.constexpr
):
    K: tl.constexpr = problem.k
    BATCH: tl.constexpr = problem.batch
    BLOCK_N: tl.constexpr = launch.block_n
    BLOCK_K: tl.constexpr = launch.block_k
    SPLITS: tl.constexpr = launch.splits
    LENGTH: tl.constexpr = launch.length
    # All tiles are full: loads need no mask.
    REST: tl.constexpr = problem.n0 % BLOCK_N + problem.n1 % BLOCK_N + problem.n2 % BLOCK_N + problem.n3 % BLOCK_N
    FULL: tl.constexpr = K % BLOCK_K + REST == 0
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
    channels = program_channels(inputs, weights, of, problem, launch, BLOCK_K)
    values = smem_alloc(SMEM, program) if SHARED else workspace.list_value + program * BATCH * LENGTH
    if not SHARED:
        values = store_inputs(values, inputs, channels, eps, ssq_parts, problem, LENGTH, SHARED, dtype)

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
                values = store_inputs(values, inputs, channels, eps, ssq_parts, problem, LENGTH, SHARED, dtype)
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
    K: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,  # their first copies' indices
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    copy = tl.program_id(2)
    p = (copy >= SECOND).to(tl.int32) + (copy >= THIRD).to(tl.int32) + (copy >= FOURTH).to(tl.int32)
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
    """x (M, K) masked for each of one to four projections: (sum(copies), M, K), projection by projection. ``scales``,
    ``thresholds``: as in ``common.Weights``; ``row_mask``: (M,) float32, 0 for a row that keeps all its channels;
    ``copies`` of each projection, None: one."""
    rows, k = x.shape
    offsets = list(accumulate(copies or [1] * len(scales)))
    out = torch.empty(offsets[-1], rows, k, dtype=x.dtype, device=x.device)
    block_k = min(1024, triton.next_power_of_2(k))
    second, third, fourth = (*offsets, *offsets[-1:] * 3)[:3]
    _mask_rows_kernel[(rows, triton.cdiv(k, block_k), offsets[-1])](
        x, scales, thresholds, row_mask, out, rows, K=k, SECOND=second, THIRD=third, FOURTH=fourth,
        BLOCK_K=block_k, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x_ptr, weights, out_ptr, partial_ptr, counter_ptr, row_mask_ptr, M,
    problem: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    COPIES: tl.constexpr,  # x is (projections, M, K)
):  # fmt: skip
    K: tl.constexpr = problem.k
    N: tl.constexpr = problem.n
    STRIDE: tl.constexpr = problem.stride
    GROUP: tl.constexpr = problem.group
    QUANT: tl.constexpr = problem.quant
    CODES: tl.constexpr = QUANT != "none"
    MASKED: tl.constexpr = row_mask_ptr is not None
    EACH: tl.constexpr = 8 if QUANT == "int4" else 4
    # All tiles are full: loads need no mask. Codes are padded, and the padding's scales are 0.
    REST: tl.constexpr = problem.n0 % BLOCK_N + problem.n1 % BLOCK_N + problem.n2 % BLOCK_N + problem.n3 % BLOCK_N
    FULL: tl.constexpr = CODES or K % BLOCK_K + REST == 0
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    of = tile_columns(tl.program_id(0), tl.program_id(1) if SPLITS > 1 else 0, problem, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_rows = m < M
    if COPIES:
        x_ptr += of.projection.to(tl.int64) * M * K
    if CODES:
        word = quant_columns(of, of.local * BLOCK_N, problem) // EACH
    if MASKED:
        limit = tl.load(weights.thresholds + of.projection) * tl.load(row_mask_ptr + m, mask=live_rows, other=0.0)
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(of.split * BLOCK_K, K, SPLITS * BLOCK_K, num_stages=STAGES):
        k = start + lane
        live = k < K
        x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
        if CODES:
            w = code_block(weights, word, start, k, BLOCK_K, BLOCK_N, K, STRIDE, GROUP, QUANT, dtype)
        else:
            w_at = weights.weight_t + k.to(tl.int64)[:, None] * STRIDE + of.column[None, :]
            w = tl.load(w_at) if FULL else tl.load(w_at, mask=live[:, None] & of.live[None, :], other=0.0)
        x = tl.load(x_at, mask=live_rows[:, None] if FULL else live_rows[:, None] & live[None, :], other=0.0)
        if MASKED:
            scale_at = weights.scales + of.projection * K + k
            scale = tl.load(scale_at) if FULL else tl.load(scale_at, mask=live, other=0.0)
            x = tl.where(is_dropped(x, scale[None, :], limit[:, None]), 0.0, x).to(dtype)
        acc = tl.dot(x, w, acc)
    out_at = m.to(tl.int64)[:, None] * N + of.column[None, :]
    live_out = live_rows[:, None] & of.live[None, :]
    last = True
    if SPLITS > 1:
        tl.store(partial_ptr + of.split.to(tl.int64) * M * N + out_at, acc, mask=live_out)
        tl.debug_barrier()
        counter_at = counter_ptr + tl.program_id(2) * tl.num_programs(0) + of.tile
        last = tl.atomic_add(counter_at, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counter_at, 0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for split in tl.static_range(SPLITS):
                at = partial_ptr + tl.full((), split, tl.int64) * M * N + out_at
                acc += tl.load(at, mask=live_out, other=0.0, cache_modifier=".cg")
    if last:
        if weights.bias is not None:
            acc += tl.load(weights.bias + of.column, mask=of.live, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + out_at, acc.to(dtype), mask=live_out)


def gemm(
    x: Tensor, linear: FusedLinear, tile: Tile, *, row_mask: Tensor | None = None, counter: Tensor | None = None
) -> Tensor:
    """y (M, N) of x (M, K), contiguous, fp16 or bf16; or of (projections, M, K), a masked x for each projection.
    ``row_mask``: as for ``mask_rows``; None: x is not masked. ``counter``: (MOST_TILES,) int32, 0 before and after."""
    rows, weight = x.shape[-2], linear.weight
    out = x.new_empty(rows, linear.out_features)
    partial = out
    if tile.splits > 1:
        partial = torch.empty(tile.splits, *out.shape, dtype=torch.float32, device=x.device)
    weights = Weights(weight.data, linear.bias, linear.scales, linear.thresholds, weight.scales, weight.zeros)
    grid = (count_tiles(linear.widths, tile.block_n), tile.splits, triton.cdiv(rows, tile.block_m))
    _gemm_kernel[grid](
        x, weights, out, partial, counter, row_mask, rows, linear.shape.problem(dense=row_mask is None), tile.block_m,
        tile.block_n, tile.block_k, tile.splits, tile.stages, x.dim() == 3, num_warps=tile.warps,
    )  # fmt: skip
    return out
