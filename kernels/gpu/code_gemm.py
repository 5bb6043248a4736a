"""Seventeen to a few hundred rows of x times quantized weights on the tensor cores, dequantized in registers. For more
rows ``weights.widen`` stores the dequantized weights to memory once, for cuBLAS.

    y[m, n] = sum over k of x[m, k] * dtype((q[k, n] - zero[k // group, n]) * scale[k // group, n]) + bias[n]

A program has block_m rows, block_n columns of one projection and every splits-th block of block_k channels; the last
program of a tile to finish adds up the splits in order. Bytes: those of ``packed_gemv`` without a mask, for every
block_m rows. Twin: a product with the result of ``widen``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channels import tile_columns
from .common import Weights
from .weights import FusedLinear, code_block, quant_columns

MOST_TILES = 1 << 14  # of a launch: the size of its counter


class CodeGemmTile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


class _Config(NamedTuple):
    """Compile-time constants."""

    k: int
    n0: int
    n1: int
    n2: int
    stride: int
    group: int
    quant: str
    tile: CodeGemmTile
    copies: bool  # x is (projections, M, K)


@triton.jit(do_not_specialize=["M"])
def _code_gemm_kernel(x_ptr, weights, out_ptr, partial_ptr, counter_ptr, M, config: tl.constexpr):
    K: tl.constexpr = config.k
    N: tl.constexpr = config.n0 + config.n1 + config.n2
    BLOCK_M: tl.constexpr = config.tile.block_m
    BLOCK_N: tl.constexpr = config.tile.block_n
    BLOCK_K: tl.constexpr = config.tile.block_k
    SPLITS: tl.constexpr = config.tile.splits
    STRIDE: tl.constexpr = config.stride
    GROUP: tl.constexpr = config.group
    QUANT: tl.constexpr = config.quant
    EACH: tl.constexpr = 8 if QUANT == "int4" else 4
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    of = tile_columns(tl.program_id(0), tl.program_id(1), config, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_rows = m < M
    x_at = x_ptr + m.to(tl.int64)[:, None] * K
    if config.copies:
        x_at += of.projection.to(tl.int64) * M * K
    # No mask on columns: the padding of a projection may be loaded, its scales are 0.
    word = quant_columns(of, of.local * BLOCK_N, config) // EACH
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    count = (K // BLOCK_K - of.split + SPLITS - 1) // SPLITS
    for step in tl.range(0, count, num_stages=config.tile.stages):
        first = (step * SPLITS + of.split) * BLOCK_K
        x = tl.load(x_at + (first + lane)[None, :], mask=live_rows[:, None], other=0.0)
        k = first + lane
        w = code_block(weights, word, first, k, BLOCK_K, BLOCK_N, K, STRIDE, GROUP, QUANT, dtype)
        acc = tl.dot(x, w, acc)
    out_at = m.to(tl.int64)[:, None] * N + of.column[None, :]
    live = live_rows[:, None] & of.live[None, :]
    last = True
    if SPLITS > 1:
        tl.store(partial_ptr + of.split.to(tl.int64) * M * N + out_at, acc, mask=live)
        tl.debug_barrier()
        counter_at = counter_ptr + tl.program_id(2) * tl.num_programs(0) + of.tile
        last = tl.atomic_add(counter_at, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counter_at, 0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for split in tl.static_range(SPLITS):
                at = partial_ptr + tl.full((), split, tl.int64) * M * N + out_at
                acc += tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
    if last:
        if weights.bias is not None:
            acc += tl.load(weights.bias + of.column, mask=of.live, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + out_at, acc.to(dtype), mask=live)


def code_gemm_tile(linear: FusedLinear, rows: int, processors: int) -> CodeGemmTile | None:
    """The tile for a number of rows; None for weights that the kernel does not support: unquantized, graded, or groups
    that are not a multiple of block_k."""
    weight, block_k = linear.weight, 64
    if weight.quant == "none" or weight.planes > 1 or weight.group % block_k or weight.in_features % block_k:
        return None
    block_m = max(16, min(128, triton.next_power_of_2(rows)))

    def programs(block_n: int) -> int:
        return triton.cdiv(rows, block_m) * sum(triton.cdiv(width, block_n) for width in linear.widths)

    # Measured on an H100, 8B shape, 32 and 128 rows: narrow tiles if wide ones are fewer than the multiprocessors, and
    # splits for about three programs on each.
    block_n = 128 if programs(128) >= processors else 64
    splits = max(1, min(3 * processors // programs(block_n), weight.in_features // (8 * block_k), 8))
    return CodeGemmTile(block_m, block_n, block_k, 1 << (splits.bit_length() - 1), 4, 3)


def code_gemm(x: Tensor, linear: FusedLinear, counter: Tensor, tile: CodeGemmTile) -> Tensor:
    """y (M, N) of x (M, K), or (projections, M, K) with a masked x for each projection, fp16 or bf16. ``counter``:
    (MOST_TILES,) int32, 0 before and after."""
    rows, weight = x.shape[-2], linear.weight
    out = x.new_empty(rows, linear.out_features)
    partial: Any = torch.empty(tile.splits, *out.shape, device=x.device) if tile.splits > 1 else out
    n0, n1, n2 = (*linear.widths, 0, 0)[:3]
    weights = Weights(weight.data, linear.bias, linear.scales, linear.thresholds, weight.scales, weight.zeros)
    config = _Config(
        weight.in_features, n0, n1, n2, weight.data.stride(0), weight.group, weight.quant, tile, x.dim() == 3
    )
    tiles = sum(triton.cdiv(width, tile.block_n) for width in linear.widths)
    _code_gemm_kernel[(tiles, tile.splits, triton.cdiv(rows, tile.block_m))](
        x, weights, out, partial, counter, rows, config, num_warps=tile.warps
    )
    return out
