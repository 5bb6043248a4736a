"""A mixture of experts for many rows, a grouped GEMM: a prompt's rows are sorted by their chosen experts, and the rows
of an expert are multiplied together on the tensor cores.

    sort      (row, chosen expert) pairs by expert, then by row        (``Groups``)
    gate_up   activation(gate[e] x) * up[e] x                          h (pairs, I), sorted
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
from .experts import ExpertLinear, scale_offset
from .plan import Gpu
from .reduction import activate
from .weights import BITS, BLOCK, code_block

_SCAN_BLOCK = tl.constexpr(1024)  # pairs loaded at a time


class Groups(NamedTuple):
    """The pairs of T rows and their k chosen experts, sorted by expert."""

    order: Tensor  # (T k,) int32: indices of the pairs in sorted order
    offset: Tensor  # (E + 1,) int32: the first sorted pair of each expert


class _Config(NamedTuple):
    """Compile-time constants."""

    k: int
    planes: int  # 2: graded weights, with two rows for each channel
    n: int  # of one projection
    stride: int
    projections: int
    chosen: int
    experts: int
    quant: str
    group: int  # channels that share a scale
    masked: bool
    activation: str  # of gate_up; "": down
    clamp: tuple[float, float]  # as in ``common.Problem``
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


@triton.jit(do_not_specialize=["first_sparse"])
def _expert_gemm_kernel(
    x_ptr, weights, weight_ptr, out_ptr, groups, first_sparse, config: tl.constexpr
):  # as of expert_gemm; weight_ptr: of the pairs
    K: tl.constexpr = config.k
    PLANES: tl.constexpr = config.planes
    N: tl.constexpr = config.n
    E: tl.constexpr = config.experts
    E_PAD: tl.constexpr = triton.next_power_of_2(config.experts)
    BLOCK_M: tl.constexpr = config.block_m
    BLOCK_N: tl.constexpr = config.block_n
    BLOCK_K: tl.constexpr = config.block_k
    ACTIVATION: tl.constexpr = config.activation
    GATED: tl.constexpr = ACTIVATION != ""
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
        x_at = x_ptr + (pair // config.chosen if GATED else m).to(tl.int64)[:, None] * K
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        lane = tl.arange(0, BLOCK_K)
        expert_id = expert.to(tl.int64)
        quant_scales = weights.quant_scales
        quant_zeros = weights.quant_zeros
        if config.quant != "none":
            quant_scales += scale_offset(expert_id, config)
            if quant_zeros is not None:
                quant_zeros += scale_offset(expert_id, config)
        expert_weights = Weights(
            weights.weight_t + expert_id * (K * PLANES * config.stride), None,
            weights.scales + expert_id * (config.projections * K),
            weights.thresholds + expert * (config.projections * PLANES), quant_scales, quant_zeros,
        )  # fmt: skip
        masked = (pair // config.chosen >= first_sparse).to(tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=config.stages):
            k = start + lane
            x = tl.load(x_at + k[None, :], mask=live_rows[:, None] & (k < K)[None, :], other=0.0)
            acc = _accumulate(acc, x, expert_weights, masked, 0, n, start, k, config)
            if GATED:
                up = _accumulate(up, x, expert_weights, masked, 1, n, start, k, config)
        live = live_rows[:, None] & (n < N)[None, :]
        if weights.bias is not None:
            bias_at = weights.bias + expert_id * (config.projections * N) + n
            acc += tl.load(bias_at, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_at + N, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate = acc.to(dtype).to(tl.float32)
            y = activate(gate, up.to(dtype).to(tl.float32), dtype, ACTIVATION, config.clamp[0], config.clamp[1])
            tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=live)
        else:
            acc = acc * tl.load(weight_ptr + pair, mask=live_rows, other=0.0)[:, None]
            tl.store(out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :], acc.to(dtype), mask=live)


@triton.jit
def _accumulate(acc, x, weights, masked, PROJECTION: tl.constexpr, n, start, k, config: tl.constexpr):
    """acc + mask(x) @ w, x (BLOCK_M, BLOCK_K), w rows ``k`` of a projection; masked (BLOCK_M,): 0 for unmasked rows."""
    PLANES: tl.constexpr = config.planes
    dtype: tl.constexpr = x.dtype
    kept = x
    if config.masked:
        scale = tl.load(weights.scales + PROJECTION * config.k + k, mask=k < config.k, other=0.0)[None, :]
        thresholds = weights.thresholds + PROJECTION * PLANES
        kept = tl.where(is_dropped(x, scale, (tl.load(thresholds) * masked)[:, None]), 0.0, x).to(dtype)
    w = _weight_block(weights, PROJECTION, n, start, k, config, dtype, False)
    acc = tl.dot(kept, w, acc, input_precision="ieee")
    if PLANES == 2 and config.masked:  # channels below the second threshold have their high plane only
        high_only = tl.where(is_dropped(x, scale, (tl.load(thresholds + 1) * masked)[:, None]), -kept, 0.0).to(dtype)
        w = _weight_block(weights, PROJECTION, n, start, k, config, dtype, True)
        acc = tl.dot(high_only, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _weight_block(
    weights, PROJECTION: tl.constexpr, n, start, k, config: tl.constexpr, dtype: tl.constexpr, LOW: tl.constexpr
):
    """A projection's weights (BLOCK_K, BLOCK_N), LOW: of the low plane; undefined for columns from N on."""
    # Copies of the fields, as in sparse_gemv_kernel.
    K: tl.constexpr = config.k
    STRIDE: tl.constexpr = config.stride
    GROUP: tl.constexpr = config.group
    QUANT: tl.constexpr = config.quant
    BLOCK_K: tl.constexpr = config.block_k
    BLOCK_N: tl.constexpr = config.block_n
    if QUANT == "none":
        at = weights.weight_t + k[:, None] * config.stride + PROJECTION * config.n + n[None, :]
        if config.k % config.block_k + config.n % config.block_n == 0:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=(k < config.k)[:, None] & (n < config.n)[None, :], other=0.0)
    else:
        EACH: tl.constexpr = 8 if QUANT == "int4" else 4
        FIRST: tl.constexpr = PROJECTION * ((config.n + BLOCK - 1) // BLOCK * BLOCK)
        word = (FIRST + tl.program_id(1) * BLOCK_N) // EACH
        PLANES: tl.constexpr = config.planes
        w = code_block(weights, word, start, k, BLOCK_K, BLOCK_N, K, STRIDE, GROUP, QUANT, dtype, PLANES, LOW)
    return w


def expert_gemm(
    x: Tensor, linear: ExpertLinear, groups: Groups, out: Tensor, gpu: Gpu, *, weight: Tensor | None = None,
    activation: str = "", clamp: tuple[float, float] = (0.0, 0.0), first_sparse: int | None = None,
) -> Tensor:  # fmt: skip
    """gate_up, with ``activation`` and ``clamp``: x (T, K), ``out`` (T k, I), sorted. down: x gate_up's ``out``,
    ``weight`` (T, k) float32, ``out`` (T, k, N). Rows from ``first_sparse`` on are masked; None: no row."""
    pairs = len(groups.order)
    rows = pairs if activation else len(out)
    chosen = pairs // (len(x) if activation else rows)
    experts, _, stride = linear.weight.data.shape
    k, planes, n, quant = linear.in_features, linear.weight.planes, linear.widths[0], linear.weight.quant
    group = linear.weight.group // planes
    masked = first_sparse is not None and not linear.dense
    # The average number of rows of an expert, rounded up to few sizes.
    block_m = max(16, min(64, triton.next_power_of_2(triton.cdiv(pairs, experts))))
    large_smem = gpu.arch in (80, 90, 100)
    block_k = 64 if k % 64 == 0 else 32
    block_n = max(16 if quant == "none" else 32, min(128, triton.next_power_of_2(n)))
    stages = 3 if large_smem and x.dtype != torch.float32 else 1
    if x.dtype == torch.float32:
        block_n = min(block_n, 64)
    # Shared memory holds the loads of stages - 1 iterations: x, weights, and of codes also scales and zero points.
    each = x.itemsize if quant == "none" else planes * BITS[quant] / 8 + 4 * (1 if linear.weight.zeros is None else 2)
    staged = block_k * (block_n * len(linear.widths) * each + block_m * x.itemsize)
    while stages > 1 and (stages - 1) * staged > (150_000 if gpu.arch == 80 else 220_000):
        stages -= 1
    config = _Config(
        k, planes, n, stride, len(linear.widths), chosen, experts, quant, group, masked, activation, clamp, block_m,
        block_n, block_k, stages,
    )  # fmt: skip
    data = linear.weight
    weights = Weights(data.data, linear.bias, linear.scales, linear.thresholds, data.scales, data.zeros)
    grid = (min(triton.cdiv(pairs, block_m) + experts, pairs), triton.cdiv(n, block_n))
    _expert_gemm_kernel[grid](
        x, weights, weight, out, groups, first_sparse or 0, config, num_warps=4 if block_m < 64 else 8
    )
    return out
