"""The two ends of a decode step: the embedding row that starts the residual stream, and the vocabulary's logits.

    embed:    hidden = embedding[token], multiplied, with the partial sums of squares that the first norm needs
    logits:   dtype(weight @ RMSNorm(hidden)), stored as float32; the largest of each tile, lowest id first
    next id:  the largest of the tiles' largest, lowest id first; the positions move on by one

``lm_head`` is read densely, in Hugging Face's (V, K) layout: tied embeddings are then stored once. One row of x: a
program reads ``passes`` times a few whole rows of the weights, x broadcast over them. More rows: tl.dot. Bytes: V * K *
sizeof(dtype) (int8: V * (K + 4)).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import gdc_wait, load_squares, reciprocal_rms, rms_normalize

# Rows of the vocabulary that a program has, for one row of x and for more.
_ROW_TILE = 16
_TILE = 64


class Logits(NamedTuple):
    """What the head leaves: values rounded to the weights' dtype, each tile's largest and its lowest id."""

    logit: Tensor  # (B, V) float32 (Triton tuples have a ``values`` of their own)
    best: Tensor  # (B, tiles) float32; NaN if one of the tile's logits is
    best_id: Tensor  # (B, tiles) int32

    @classmethod
    def empty(cls, batch: int, vocabulary: int, device: torch.device) -> Logits:
        logit = torch.empty(batch, vocabulary, device=device)
        best = torch.empty(batch, triton.cdiv(vocabulary, _ROW_TILE if batch == 1 else _TILE), device=device)
        return cls(logit, best, torch.empty_like(best, dtype=torch.int32))


class HeadConfig(NamedTuple):
    k: int
    batch: int
    ssq_parts: int
    ssq_pad: int
    block_v: int  # rows of the vocabulary that a program has
    passes: int  # in which it reads them (one row of x)
    block_k: int


@triton.jit
def _embed_kernel(
    token_ptr, embedding_ptr, hidden_ptr, ssq_ptr,  # as of launch_embed
    MULTIPLIER: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.program_id(1)
    k = tile * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row)
    x = tl.load(embedding_ptr + token * K + k, mask=tl.where(token >= 0, k, K) < K, other=0.0)
    if MULTIPLIER != 1.0:
        x = (x.to(tl.float32) * MULTIPLIER).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + row * K + k, x, mask=k < K)
    x = x.to(tl.float32)
    tl.store(ssq_ptr + row * TILES + tile, tl.sum(x * x, axis=0))


@triton.jit
def _logits_kernel(
    hidden_ptr, ssq_ptr, norm_ptr, weight_ptr, scale_ptr, out, eps, V,  # as of launch_logits
    config: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PASSES: tl.constexpr = config.passes
    BATCH: tl.constexpr = config.batch
    K: tl.constexpr = config.k
    BLOCK_K: tl.constexpr = config.block_k
    PART: tl.constexpr = config.block_v // config.passes
    WHOLE: tl.constexpr = K <= BLOCK_K
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK_K)
    v = tile * config.block_v + tl.arange(0, PART)
    if config.batch == 1:
        if WHOLE:
            # The first rows and the norm are constants: they are in flight before the last block has ended.
            w = _vocabulary_rows(weight_ptr, v, lane, V, K)
            norm = tl.load(norm_ptr + lane, mask=lane < K, other=0.0)
        gdc_wait(PDL)
        rstd = reciprocal_rms(load_squares(ssq_ptr, 0, config.ssq_parts, config.ssq_pad), eps, K)
        if WHOLE:
            x = tl.load(hidden_ptr + lane, mask=lane < K, other=0.0)
            x = rms_normalize(x, norm, rstd, dtype).to(tl.float32)
        best = tl.full((PART,), float("-inf"), tl.float32)
        best_id = tl.full((PART,), 2147483647, tl.int32)
        broken = tl.zeros((PART,), tl.int32)
        for part in tl.static_range(PASSES):
            if WHOLE:
                acc = x[None, :] * w.to(tl.float32)
                if part + 1 < config.passes:
                    w = _vocabulary_rows(weight_ptr, v + PART, lane, V, K)
            else:
                acc = tl.zeros((PART, BLOCK_K), tl.float32)
                for start in tl.range(0, K, BLOCK_K, num_stages=1):
                    k = start + lane
                    w = _vocabulary_rows(weight_ptr, v, k, V, K)
                    x = tl.load(hidden_ptr + k, mask=k < K, other=0.0)
                    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
                    x = rms_normalize(x, norm, rstd, dtype).to(tl.float32)
                    acc += x[None, :] * w.to(tl.float32)
            y = _store_logits(out, tl.sum(acc, axis=1), 0, scale_ptr, v, V, dtype)
            better = (v < V) & (y > best)
            best = tl.where(better, y, best)
            best_id = tl.where(better, v, best_id)
            broken = broken | ((v < V) & (y != y)).to(tl.int32)
            v += PART
        _store_best(out, best, best_id, broken, tile)
    else:
        ROWS: tl.constexpr = 16 if config.batch <= 16 else 32
        gdc_wait(PDL)
        rows = tl.arange(0, ROWS)
        live_rows = rows < config.batch
        i = tl.arange(0, config.ssq_pad)
        squares_at = ssq_ptr + rows[:, None] * config.ssq_parts + i[None, :]
        squares = tl.load(squares_at, mask=live_rows[:, None] & (i < config.ssq_parts)[None, :], other=0.0)
        rstd_rows = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
        acc = tl.zeros((ROWS, PART), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=3):
            k = start + lane
            live = k < K
            w = _vocabulary_rows(weight_ptr, v, k, V, K)
            x_at = hidden_ptr + rows[:, None] * K + k[None, :]
            x = tl.load(x_at, mask=live_rows[:, None] & live[None, :], other=0.0)
            norm = tl.load(norm_ptr + k, mask=live, other=0.0)
            x = rms_normalize(x, norm[None, :], rstd_rows[:, None], dtype)
            # An int8 code is exact in every dtype.
            acc = tl.dot(x, tl.trans(w.to(dtype)), acc, input_precision="ieee")
        for row in tl.static_range(BATCH):
            y = tl.sum(tl.where((rows == row)[:, None], acc, 0.0), axis=0)
            y = _store_logits(out, y, row, scale_ptr, v, V, dtype)
            shown = tl.where((v < V) & (y == y), y, float("-inf"))
            broken = ((v < V) & (y != y)).to(tl.int32)
            _store_best(out, shown, v, broken, row * tl.num_programs(0) + tile)


@triton.jit
def _store_logits(out, total, row, scale_ptr, v, V, dtype: tl.constexpr):
    """Sums of the tokens ``v``, times their int8 scales if there are any, as the weights' dtype rounds them."""
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + v, mask=v < V, other=0.0)
    y = total.to(dtype).to(tl.float32)
    tl.store(out.logit + row * V + v, y, mask=v < V)
    return y


@triton.jit
def _vocabulary_rows(weight_ptr, v, k, V, K: tl.constexpr):
    """weight[v, k], zeros outside. Read once."""
    at = weight_ptr + v.to(tl.int64)[:, None] * K + k[None, :]
    return tl.load(at, mask=(v < V)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _store_best(out, best, best_id, broken, at):
    """The largest of a tile's logits and its lowest id; NaN if one is NaN: such a row has no largest."""
    largest = tl.max(best, axis=0)
    tl.store(out.best_id + at, tl.min(tl.where(best == largest, best_id, 2147483647), axis=0))
    tl.store(out.best + at, tl.where(tl.max(broken, axis=0) > 0, float("nan"), largest))


@triton.jit
def likeliest_token(logits, row, tiles, value, largest):
    """The lowest id of a row's largest logit, given the tiles' (padded: -inf); -1 if it is infinite or one is NaN."""
    i = tl.arange(0, value.shape[0])
    token = tl.load(logits.best_id + row * tiles + i, mask=i < tiles, other=2147483647)
    chosen = tl.min(tl.where(value == largest, token, 2147483647), axis=0)
    broken = tl.max((value != value).to(tl.int32), axis=0)  # a maximum may pass over NaN
    return tl.where((broken > 0) | (tl.abs(largest) == float("inf")), -1, chosen)


@triton.jit
def _argmax_kernel(
    logits, token_ptr, next_ptr, position_ptr, tiles,  # as of launch_argmax
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    gdc_wait(PDL)
    i = tl.arange(0, BLOCK)
    value = tl.load(logits.best + row * tiles + i, mask=i < tiles, other=float("-inf"))
    chosen = likeliest_token(logits, row, tiles, value, tl.max(value, axis=0))
    idle = tl.load(token_ptr + row) < 0
    tl.store(next_ptr + row, tl.where(idle, -1, chosen).to(tl.int64))
    position = tl.load(position_ptr + row)
    tl.store(position_ptr + row, tl.where(idle, position, position + 1))


def launch_embed(tokens: Tensor, embedding: Tensor, hidden: Tensor, ssq: Tensor, *, multiplier: float = 1.0) -> None:
    """hidden (B, K) = multiplied rows of ``embedding`` (V, K) at ``tokens`` (B,) int64; idle rows (negative) become
    zeros. ``ssq`` (B, parts) float32 receives the partial sums of squares, whatever number of parts it has."""
    width, parts = hidden.shape[1], ssq.shape[1]
    block = triton.next_power_of_2(triton.cdiv(width, parts))
    _embed_kernel[(parts, hidden.shape[0])](tokens, embedding, hidden, ssq, multiplier, width, parts, block)


def launch_logits(
    hidden: Tensor, ssq: Tensor, norm: Tensor, weight: Tensor, scales: Tensor | None, out: Logits, *, eps: float,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Final norm and ``lm_head``: hidden (B, K), ssq (B, parts) float32 the partial sums of its squares, norm (K,) as
    ``common.Input.norm``, weight (V, K) of hidden's dtype or int8 with scales (V,) float32."""
    (batch, width), parts = hidden.shape, ssq.shape[1]
    # One row: whole rows of the weights, four at a time.
    widest = 4096 if batch == 1 else 64 if hidden.dtype == torch.float32 else 128
    block_k = min(widest, max(16, triton.next_power_of_2(width)))
    block_v, passes = (_ROW_TILE, max(1, _ROW_TILE * block_k // 16384)) if batch == 1 else (_TILE, 1)
    config = HeadConfig(width, batch, parts, max(32, triton.next_power_of_2(parts)), block_v, passes, block_k)
    _logits_kernel[(triton.cdiv(weight.shape[0], block_v),)](
        hidden, ssq, norm, weight, scales, out, eps, weight.shape[0], config, pdl, num_warps=2 if 1 < batch <= 16 else 4,
        launch_pdl=pdl,
    )  # fmt: skip


def launch_argmax(logits: Logits, tokens: Tensor, next_tokens: Tensor, positions: Tensor, *, pdl: bool = False) -> None:
    """The greedy choice of every row, and its position moved on; idle rows give -1 and stay where they are. ``tokens``
    (the ids just read, negative for idle rows) and ``next_tokens`` (B,) int64, ``positions`` (B,) int32."""
    batch, tiles = logits.best.shape
    _argmax_kernel[(batch,)](
        logits, tokens, next_tokens, positions, tiles, triton.next_power_of_2(tiles), pdl, num_warps=8, launch_pdl=pdl
    )
