"""The two ends of a decode step: the embedding row that starts the residual stream, and the vocabulary's logits.

    embed:    hidden = embedding[token], multiplied, with the partial sums of squares the first norm needs
    logits:   dtype(weight @ RMSNorm(hidden)), float32 storage; the largest of each tile, lowest id first
    next id:  the largest of the tiles' largest, lowest id first; the positions move on by one

``lm_head`` is read densely, in Hugging Face's (V, K) layout: tied embeddings are then stored once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    exact_argument,
    inverse_root,
    let_next_kernel_start,
    load_squares,
    normalise,
    reciprocal_rms,
    wait_for_previous_kernel,
)

# Vocabulary rows of one program; batches of float32 rows are launched row by row.
HEAD_ROWS = 16
HEAD_ROWS_BATCHED = 64


@triton.jit
def _embed_kernel(
    token_ptr,  # (B,) int64; negative: idle row
    embedding_ptr,  # (V, K)
    hidden_ptr,  # (B, K) dtype
    ssq_ptr,  # (B, tiles) wide
    MULTIPLIER: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    k = tile * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    token = tl.load(token_ptr + row)
    x = tl.load(embedding_ptr + token * K + k, mask=tl.where(token >= 0, k, K) < K, other=0.0)
    if MULTIPLIER != 1.0:
        x = (x.to(ssq_ptr.dtype.element_ty) * MULTIPLIER).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + row * K + k, x, mask=k < K)
    wide = x.to(ssq_ptr.dtype.element_ty)
    tl.store(ssq_ptr + row * TILES + tile, tl.sum(wide * wide, axis=0))


@triton.jit
def _logits_kernel(
    hidden_ptr,  # (B, K) dtype
    ssq_ptr,  # (B, SSQ) wide
    norm_ptr,  # (K,) of the weights' type, or wide: 1 + weight
    weight_ptr,  # (V, K)
    scale_ptr,  # (V,) float32: of int8 weights; None for plain ones
    logits_ptr,  # (B, V) float32
    best_ptr,  # (B, tiles) float32
    best_id_ptr,  # (B, tiles) int32
    eps,
    V,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    SSQ: tl.constexpr,
    SSQ_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    wide: tl.constexpr = ssq_ptr.dtype.element_ty
    ONCE: tl.constexpr = norm_ptr.dtype.element_ty == wide
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK_K)
    if BATCH == 1:
        PART: tl.constexpr = BLOCK_V // PASSES
        WHOLE: tl.constexpr = K <= BLOCK_K
        v = tile * BLOCK_V + tl.arange(0, PART)
        if WHOLE:
            # The first rows and the norm are constants: they are on their way before the last block has ended.
            w = _vocabulary_rows(weight_ptr, v, lane, V, K)
            norm = tl.load(norm_ptr + lane, mask=lane < K, other=0.0).to(wide)
        wait_for_previous_kernel(PDL)
        let_next_kernel_start(PDL)
        rstd = reciprocal_rms(load_squares(ssq_ptr, 0, SSQ, SSQ_PAD), eps, K)
        if WHOLE:
            x = tl.load(hidden_ptr + lane, mask=lane < K, other=0.0).to(wide)
            x = normalise(x, norm, rstd, dtype, ONCE).to(wide)
        best = tl.full((PART,), float("-inf"), tl.float32)
        best_id = tl.full((PART,), 2147483647, tl.int32)
        broken = tl.zeros((PART,), tl.int32)
        for part in tl.static_range(PASSES):
            if WHOLE:
                acc = x[None, :] * w.to(wide)
                if part + 1 < PASSES:
                    w = _vocabulary_rows(weight_ptr, v + PART, lane, V, K)
            else:
                acc = tl.zeros((PART, BLOCK_K), wide)
                for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                    k = start + lane
                    w = _vocabulary_rows(weight_ptr, v, k, V, K)
                    x = tl.load(hidden_ptr + k, mask=k < K, other=0.0).to(wide)
                    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(wide)
                    acc += normalise(x, norm, rstd, dtype, ONCE).to(wide)[None, :] * w.to(wide)
            y = _as_logits(tl.sum(acc, axis=1), scale_ptr, v, V, dtype)
            tl.store(logits_ptr + v, y, mask=v < V)
            better = (v < V) & (y > best)
            best = tl.where(better, y, best)
            best_id = tl.where(better, v, best_id)
            broken = broken | ((v < V) & (y != y)).to(tl.int32)
            v += PART
        _store_best(best_ptr, best_id_ptr, best, best_id, broken, tile)
    else:
        wait_for_previous_kernel(PDL)
        let_next_kernel_start(PDL)
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        rows = tl.arange(0, 16)
        live_rows = rows < BATCH
        i = tl.arange(0, SSQ_PAD)
        squares = tl.load(
            ssq_ptr + rows[:, None] * SSQ + i[None, :], mask=live_rows[:, None] & (i < SSQ)[None, :], other=0.0
        )
        rstd_rows = inverse_root(tl.sum(squares, axis=1) / K + eps)
        acc = tl.zeros((16, BLOCK_V), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = start + lane
            live = k < K
            w = _vocabulary_rows(weight_ptr, v, k, V, K)
            x = tl.load(
                hidden_ptr + rows[:, None] * K + k[None, :], mask=live_rows[:, None] & live[None, :], other=0.0
            ).to(tl.float32)
            norm = tl.load(norm_ptr + k, mask=live, other=0.0).to(tl.float32)
            acc = tl.dot(
                normalise(x, norm[None, :], rstd_rows[:, None], dtype, ONCE),
                tl.trans(w.to(dtype)),  # a code of eight bits is exact in every type
                acc,
                input_precision="ieee",
            )
        for row in tl.static_range(BATCH):
            y = _as_logits(tl.sum(tl.where((rows == row)[:, None], acc, 0.0), axis=0), scale_ptr, v, V, dtype)
            tl.store(logits_ptr + row * V + v, y, mask=v < V)
            shown = tl.where((v < V) & (y == y), y, float("-inf"))
            broken = ((v < V) & (y != y)).to(tl.int32)
            _store_best(best_ptr, best_id_ptr, shown, v, broken, row * tl.num_programs(0) + tile)


@triton.jit
def _as_logits(total, scale_ptr, v, V, dtype: tl.constexpr):
    """Sums of the tokens ``v``, times the scales of their codes if there are any, as the weights' type rounds them."""
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + v, mask=v < V, other=0.0).to(total.dtype)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _vocabulary_rows(weight_ptr, v, k, V, K: tl.constexpr):
    """weight[v, k], zeros outside. Read once."""
    return tl.load(
        weight_ptr + v.to(tl.int64)[:, None] * K + k[None, :],
        mask=(v < V)[:, None] & (k < K)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _store_best(best_ptr, best_id_ptr, best, best_id, broken, at):
    """The largest of a tile's logits and its lowest id; NaN if one is NaN: such a row has no largest."""
    largest = tl.max(best, axis=0)
    tl.store(best_id_ptr + at, tl.min(tl.where(best == largest, best_id, 2147483647), axis=0))
    tl.store(best_ptr + at, tl.where(tl.max(broken, axis=0) > 0, float("nan"), largest))


@triton.jit
def _next_kernel(
    best_ptr,  # (B, tiles) float32
    best_id_ptr,  # (B, tiles) int32
    token_ptr,  # (B,) int64: the ids just read, idle ones negative
    next_ptr,  # (B,) int64
    position_ptr,  # (B,) int32
    tiles,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    i = tl.arange(0, BLOCK)
    value = tl.load(best_ptr + row * tiles + i, mask=i < tiles, other=float("-inf"))
    token = tl.load(best_id_ptr + row * tiles + i, mask=i < tiles, other=2147483647)
    best = tl.max(value, axis=0)
    chosen = tl.min(tl.where(value == best, token, 2147483647), axis=0)
    # As sampling.sample has it: -1 for a row that holds a NaN or whose largest logit is infinite.
    broken = tl.max((value != value).to(tl.int32), axis=0)
    chosen = tl.where((broken > 0) | (tl.abs(best) == float("inf")), -1, chosen)
    idle = tl.load(token_ptr + row) < 0
    tl.store(next_ptr + row, tl.where(idle, -1, chosen).to(tl.int64))
    position = tl.load(position_ptr + row)
    tl.store(position_ptr + row, tl.where(idle, position, position + 1))


def launch_embed(
    tokens: Tensor, embedding: Tensor, hidden: Tensor, ssq: Tensor, *, multiplier: float = 1.0, pdl: bool = False
) -> None:
    """hidden (B, K) = rows of ``embedding`` (V, K) at ``tokens`` (B,) int64, multiplied; idle rows (negative) become
    zeros.

    ``ssq`` (B, parts) wide receives the partial sums of squares, whatever number of parts it has.
    """
    width = hidden.shape[1]
    parts = ssq.shape[1]
    options = {"launch_pdl": True} if pdl else {}
    _embed_kernel[(parts, hidden.shape[0])](
        tokens, embedding, hidden, ssq, multiplier, width, parts, triton.next_power_of_2(triton.cdiv(width, parts)),
        pdl, **options,
    )  # fmt: skip


def launch_logits(
    hidden: Tensor,
    ssq: Tensor,
    norm: Tensor,
    weight: Tensor,
    logits: Tensor,
    best: Tensor,
    best_id: Tensor,
    *,
    eps: float,
    scales: Tensor | None = None,
    block_k: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    block_v: int | None = None,
    passes: int | None = None,
    pdl: bool = False,
) -> None:
    """Final norm and ``lm_head``, without selection.

    Args:
        hidden: (B, K), with ``ssq`` (B, parts) wide, the partial sums of its squares.
        norm: (K,).
        weight: (V, K), Hugging Face's layout; of the hidden state's type, or int8.
        scales: (V,) float32, what the products with int8 rows are multiplied by.
        logits: (B, V) float32, values rounded to the weights' dtype. float32's rows are launched one by one.
        best, best_id: (B, ceil(V / block_v)) float32 and int32, each tile's largest logit and its lowest id.
    """
    batch, width = hidden.shape
    vocabulary = weight.shape[0]
    parts = ssq.shape[1]
    if batch > 1 and ssq.dtype == torch.float64:
        for i in range(batch):
            one = slice(i, i + 1)
            launch_logits(
                hidden[one], ssq[one], norm, weight, logits[one], best[one], best_id[one], eps=eps, scales=scales,
                block_k=block_k, warps=warps, stages=stages, block_v=block_v, passes=passes, pdl=pdl,
            )  # fmt: skip
        return
    block_v = block_v or (HEAD_ROWS if batch == 1 else HEAD_ROWS_BATCHED)
    # One row: whole rows of the weights, four at a time. float64 sums take twice the registers.
    exact = ssq.dtype == torch.float64
    block_k = block_k or ((256 if exact else 4096) if batch == 1 else 128)
    block_k = min(block_k, max(16, triton.next_power_of_2(width)))
    passes = passes or (max(1, block_v * block_k // 16384) if batch == 1 and not exact else 1)
    stages = stages or (1 if batch == 1 else 3)
    warps = warps or (4 if batch == 1 else 2)
    options = {"launch_pdl": True} if pdl else {}
    _logits_kernel[(triton.cdiv(vocabulary, block_v),)](
        hidden,
        ssq,
        norm,
        weight,
        scales,
        logits,
        best,
        best_id,
        exact_argument(eps, ssq.dtype),
        vocabulary,
        K=width,
        BATCH=batch,
        SSQ=parts,
        SSQ_PAD=max(32, triton.next_power_of_2(parts)),
        BLOCK_V=block_v,
        PASSES=passes,
        BLOCK_K=block_k,
        STAGES=stages,
        PDL=pdl,
        num_warps=warps,
        **options,
    )


def launch_next(
    best: Tensor, best_id: Tensor, tokens: Tensor, next_tokens: Tensor, positions: Tensor, *, pdl: bool = False
) -> None:
    """The greedy choice of every row, and its position moved on; idle rows give -1 and stay where they are."""
    tiles = best.shape[1]
    options = {"launch_pdl": True} if pdl else {}
    _next_kernel[(best.shape[0],)](
        best, best_id, tokens, next_tokens, positions, tiles, triton.next_power_of_2(tiles), pdl, num_warps=8, **options
    )
