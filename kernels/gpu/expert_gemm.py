"""A mixture of experts for many rows, a grouped GEMM: a prompt's rows are sorted by their chosen experts, and the rows
of an expert are multiplied together on the tensor cores.

    sort      (row, chosen expert) pairs by expert, then by row        (``Groups``)
    gate_up   activation(gate[e] x) * up[e] x, or activation(up[e] x)  h (pairs, I), sorted
    down      weight * down[e] h, stored at each pair's row            (rows, k, N), added by ``torch.sum``

A program has block_m sorted pairs of one expert and block_n columns, the same of gate and up. The host does not know
the number of tiles of an expert: it launches the largest possible number of programs, and each finds its expert from
the offsets. Bytes: the weights of every chosen expert, once for every block_m pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channels import is_dropped
from .common import Weights
from .experts import ExpertLinear, weights_of
from .reduction import activate, relu_squared
from .tiles import Tile
from .weights import BLOCK, code_block

_SCAN_BLOCK = tl.constexpr(1024)  # pairs loaded at a time


class Groups(NamedTuple):
    """The pairs of T rows and their k chosen experts, sorted by expert."""

    order: Tensor  # (T k,) int32: indices of the pairs in sorted order
    offset: Tensor  # (E + 1,) int32: the first sorted pair of each expert


class _Config(NamedTuple):
    """Compile-time constants: the block's experts, those of a row, and the tile."""

    experts: int
    chosen: int
    block_m: int
    block_n: int
    block_k: int
    stages: int


@triton.jit(do_not_specialize=["COUNT"])
def _sort_kernel(expert_ptr, groups, COUNT, LAST: tl.constexpr):
    expert = tl.program_id(0)
    before = tl.zeros((_SCAN_BLOCK,), tl.int32)
    for start in range(0, COUNT, _SCAN_BLOCK):
        at = start + tl.arange(0, _SCAN_BLOCK)
        before += (tl.load(expert_ptr + at, mask=at < COUNT, other=LAST) < expert).to(tl.int32)
    offset = tl.sum(before, axis=0)
    tl.store(groups.offset + expert, offset)
    for start in range(0, COUNT, _SCAN_BLOCK):
        at = start + tl.arange(0, _SCAN_BLOCK)
        match = (tl.load(expert_ptr + at, mask=at < COUNT, other=LAST) == expert) & (at < COUNT)
        rank = tl.cumsum(match.to(tl.int32), axis=0)
        tl.store(groups.order + offset + rank - 1, at, mask=match)
        offset += tl.max(rank, axis=0)


def sort_by_expert(expert: Tensor, experts: int) -> Groups:
    """Sort the pairs of rows and chosen experts (``expert`` (T, k) int32) in one launch; a program per expert."""
    offset = torch.empty(experts + 1, dtype=torch.int32, device=expert.device)
    groups = Groups(torch.empty(expert.numel(), dtype=torch.int32, device=expert.device), offset)
    _sort_kernel[(experts + 1,)](expert, groups, expert.numel(), experts, num_warps=4)
    return groups


# Arguments as of ``expert_gemm``; weight_ptr: of the pairs; problem.output "plain": down; problem.dense: no row is masked.
@triton.jit(do_not_specialize=["first_sparse"])
def _expert_gemm_kernel(
    x_ptr, weights, weight_ptr, out_ptr, groups, first_sparse, problem: tl.constexpr, config: tl.constexpr
):
    E: tl.constexpr = config.experts
    BLOCK_M: tl.constexpr = config.block_m
    BLOCK_N: tl.constexpr = config.block_n
    BLOCK_K: tl.constexpr = config.block_k
    PLANES: tl.constexpr = problem.planes
    K: tl.constexpr = problem.k // PLANES
    N: tl.constexpr = problem.n0
    E_PAD: tl.constexpr = triton.next_power_of_2(E)
    ACTIVATION: tl.constexpr = problem.output
    FIRST: tl.constexpr = ACTIVATION != "plain"
    GATED: tl.constexpr = FIRST and ACTIVATION != "relu2"
    PROJECTIONS: tl.constexpr = 2 if GATED else 1
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # This program's expert, from the cumulative number of tiles of the experts.
    e = tl.arange(0, E_PAD)
    first_pair = tl.load(groups.offset + e, mask=e < E, other=0)
    end_pair = tl.load(groups.offset + e + 1, mask=e < E, other=0)
    tiles = tl.cumsum((end_pair - first_pair + BLOCK_M - 1) // BLOCK_M, axis=0)
    tile = tl.program_id(0)
    expert = tl.sum(((tiles <= tile) & (e < E)).to(tl.int32), axis=0)
    if expert < E:
        end = tl.load(groups.offset + expert + 1)
        begin = tl.load(groups.offset + expert)
        before = tl.sum(tl.where(e == expert, tiles - (end_pair - first_pair + BLOCK_M - 1) // BLOCK_M, 0), axis=0)
        m = begin + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        live_rows = m < end
        pair = tl.load(groups.order + m, mask=live_rows, other=0)
        x_at = x_ptr + (pair // config.chosen if FIRST else m).to(tl.int64)[:, None] * K
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        lane = tl.arange(0, BLOCK_K)
        expert_weights = weights_of(weights, expert.to(tl.int64), None, PROJECTIONS, problem)
        masked = (pair // config.chosen >= first_sparse).to(tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=config.stages):
            k = start + lane
            x = tl.load(x_at + k[None, :], mask=live_rows[:, None] & (k < K)[None, :], other=0.0)
            acc = _accumulate(acc, x, expert_weights, masked, 0, n, start, k, problem, config)
            if GATED:
                up = _accumulate(up, x, expert_weights, masked, 1, n, start, k, problem, config)
        live = live_rows[:, None] & (n < N)[None, :]
        if weights.bias is not None:
            bias_at = weights.bias + expert.to(tl.int64) * (PROJECTIONS * N) + n
            acc += tl.load(bias_at, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_at + N, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if FIRST:
            y = acc.to(dtype)
            if GATED:
                up = up.to(dtype).to(tl.float32)
                y = activate(y.to(tl.float32), up, dtype, ACTIVATION, problem.clamp[0], problem.clamp[1])
            else:
                y = relu_squared(y)
            tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=live)
        else:
            acc = acc * tl.load(weight_ptr + pair, mask=live_rows, other=0.0)[:, None]
            tl.store(out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :], acc.to(dtype), mask=live)


@triton.jit
def _accumulate(
    acc, x, weights, masked, PROJECTION: tl.constexpr, n, start, k, problem: tl.constexpr, config: tl.constexpr
):
    """acc + mask(x) @ w, x (BLOCK_M, BLOCK_K), w rows ``k`` of a projection; masked (BLOCK_M,): 0 for unmasked rows."""
    PLANES: tl.constexpr = problem.planes
    K: tl.constexpr = problem.k // PLANES
    dtype: tl.constexpr = x.dtype
    kept = x
    if not problem.dense:
        scale = tl.load(weights.scales + PROJECTION * K + k, mask=k < K, other=0.0)[None, :]
        thresholds = weights.thresholds + PROJECTION * PLANES
        kept = tl.where(is_dropped(x, scale, (tl.load(thresholds) * masked)[:, None]), 0.0, x).to(dtype)
    w = _weight_block(weights, PROJECTION, n, start, problem, config, dtype, False)
    acc = tl.dot(kept, w, acc, input_precision="ieee")
    if PLANES == 2 and not problem.dense:  # channels below the second threshold have their high plane only
        high_only = tl.where(is_dropped(x, scale, (tl.load(thresholds + 1) * masked)[:, None]), -kept, 0.0).to(dtype)
        w = _weight_block(weights, PROJECTION, n, start, problem, config, dtype, True)
        acc = tl.dot(high_only, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _weight_block(
    weights, PROJECTION: tl.constexpr, n, start, problem: tl.constexpr, config: tl.constexpr, dtype, LOW: tl.constexpr
):
    """A projection's weights (BLOCK_K, BLOCK_N), LOW: of the low plane; undefined for columns from N on."""
    # Copies of the fields, as in sparse_gemv_kernel.
    BLOCK_N: tl.constexpr = config.block_n
    BLOCK_K: tl.constexpr = config.block_k
    PLANES: tl.constexpr = problem.planes
    K: tl.constexpr = problem.k // PLANES
    N: tl.constexpr = problem.n0
    STRIDE: tl.constexpr = problem.stride
    GROUP: tl.constexpr = problem.group // PLANES
    QUANT: tl.constexpr = problem.quant
    k = start + tl.arange(0, BLOCK_K)
    if QUANT == "none":
        at = weights.weight_t + k[:, None] * STRIDE + PROJECTION * N + n[None, :]
        if K % BLOCK_K + N % BLOCK_N == 0:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    else:
        EACH: tl.constexpr = 8 if QUANT == "int4" else 4
        FIRST: tl.constexpr = PROJECTION * ((N + BLOCK - 1) // BLOCK * BLOCK)
        word = (FIRST + tl.program_id(1) * BLOCK_N) // EACH
        w = code_block(weights, word, start, k, BLOCK_K, BLOCK_N, K, STRIDE, GROUP, QUANT, dtype, PLANES, LOW)
    return w


def expert_gemm(
    x: Tensor, linear: ExpertLinear, groups: Groups, out: Tensor, tile: Tile, *, weight: Tensor | None = None,
    activation: str = "plain", clamp: tuple[float, float] = (0.0, 0.0), first_sparse: int | None = None,
) -> Tensor:  # fmt: skip
    """gate_up, with ``activation`` and ``clamp``: x (T, K), ``out`` (T k, I), sorted. down: x gate_up's ``out``,
    ``weight`` (T, k) float32, ``out`` (T, k, N). Rows from ``first_sparse`` on are masked; None: no row."""
    pairs, experts, width = len(groups.order), len(linear.scales), linear.widths[0]
    problem = linear.shape.problem(output=activation, clamp=clamp, dense=first_sparse is None or linear.dense)
    weights = Weights(
        linear.weight.data, linear.bias, linear.scales, linear.thresholds, linear.weight.scales, linear.weight.zeros
    )
    grid = (min(triton.cdiv(pairs, tile.block_m) + experts, pairs), triton.cdiv(width, tile.block_n))
    config = _Config(experts, linear.chosen, tile.block_m, tile.block_n, tile.block_k, tile.stages)
    _expert_gemm_kernel[grid](x, weights, weight, out, groups, first_sparse or 0, problem, config, num_warps=tile.warps)
    return out
