"""The two ends of a decode step: the embedding row that starts the residual stream, and the vocabulary's logits.

    embed:    hidden = embedding[token], multiplied, with the partial sums of squares that the first norm needs
    logits:   dtype(weight @ RMSNorm(hidden)), stored as float32; the largest of each tile, lowest id first
    next id:  the largest of the tiles' largest, lowest id first; the positions move on by one

``lm_head`` is read densely, in Hugging Face's (V, K) layout: tied embeddings are then stored once. One row of x and
unquantized weights: a program reads ``passes`` times a few whole rows of the weights, x broadcast over them. Otherwise:
tl.dot. Bytes: V * K * sizeof(dtype) (int8: V * (K + 4)).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import gdc_wait, load_squares, reciprocal_rms, rms_normalize


class HeadTile(NamedTuple):
    """Measured on an H200: K of 4096, 5120 and 8192, 1 to 32 rows."""

    block_v: int  # rows of the vocabulary that a program has
    block_k: int
    warps: int
    stages: int  # of reading (tl.dot)


def head_tile(batch: int, weight: Tensor) -> HeadTile:
    return HeadTile(16, 4096, 4, 1) if _by_rows(batch, weight) else HeadTile(64, 128, 2, 3)


def _by_rows(batch: int, weight: Tensor) -> bool:
    """Without tensor cores. To convert codes takes longer than to read them, unless they go through ``tl.dot``."""
    return batch == 1 and weight.dtype != torch.int8


class Logits(NamedTuple):
    """What the head leaves: values rounded to the weights' dtype, each tile's largest and its lowest id."""

    logit: Tensor  # (B, V) float32 (Triton tuples have a ``values`` of their own)
    best: Tensor  # (B, tiles) float32; NaN if one of the tile's logits is
    best_id: Tensor  # (B, tiles) int32

    @classmethod
    def empty(cls, batch: int, weight: Tensor) -> Logits:
        """For the output layer ``weight`` (V, K)."""
        logit = torch.empty(batch, len(weight), device=weight.device)
        best = torch.empty(batch, triton.cdiv(len(weight), head_tile(batch, weight).block_v), device=weight.device)
        return cls(logit, best, torch.empty_like(best, dtype=torch.int32))


class HeadConfig(NamedTuple):
    k: int
    batch: int
    by_rows: bool
    ssq_parts: int
    ssq_pad: int
    block_v: int
    passes: int  # in which a program reads its rows of the vocabulary (by rows)
    block_k: int
    stages: int


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
    BATCH: tl.constexpr = config.batch
    K: tl.constexpr = config.k
    BLOCK_K: tl.constexpr = config.block_k
    PART: tl.constexpr = config.block_v // config.passes
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK_K)
    v = tile * config.block_v + tl.arange(0, PART)
    if config.by_rows:
        CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        PASSES: tl.constexpr = config.passes
        # The first rows and the norm are constants: they are in flight before the last block has ended.
        w = _vocabulary_rows(weight_ptr, v, V, lane, CHUNKS, config)
        norms = ()
        if norm_ptr is not None:
            for chunk in tl.static_range(CHUNKS):
                norms += (tl.load(norm_ptr + chunk * BLOCK_K + lane, mask=chunk * BLOCK_K + lane < K, other=0.0),)
        gdc_wait(PDL)
        if norm_ptr is not None:
            rstd = reciprocal_rms(load_squares(ssq_ptr, 0, config.ssq_parts, config.ssq_pad), eps, K)
        xs = ()
        for chunk in tl.static_range(CHUNKS):
            x = tl.load(hidden_ptr + chunk * BLOCK_K + lane, mask=chunk * BLOCK_K + lane < K, other=0.0)
            if norm_ptr is not None:
                x = rms_normalize(x, norms[chunk], rstd, dtype)
            xs += (x.to(tl.float32),)
        best = tl.full((PART,), float("-inf"), tl.float32)
        best_id = tl.full((PART,), 2147483647, tl.int32)
        broken = tl.zeros((PART,), tl.int32)
        for part in tl.static_range(PASSES):
            acc = xs[0][None, :] * w[0].to(tl.float32)
            for chunk in tl.static_range(1, CHUNKS):
                acc += xs[chunk][None, :] * w[chunk].to(tl.float32)
            if part + 1 < PASSES:
                w = _vocabulary_rows(weight_ptr, v + PART, V, lane, CHUNKS, config)
            y = _rounded(tl.sum(acc, axis=1), scale_ptr, v, V, dtype)
            tl.store(out.logit + v, y, mask=v < V)
            better = (v < V) & (y > best)
            best = tl.where(better, y, best)
            best_id = tl.where(better, v, best_id)
            broken = broken | ((v < V) & (y != y)).to(tl.int32)
            v += PART
        largest = tl.max(best, axis=0)
        tl.store(out.best_id + tile, tl.min(tl.where(best == largest, best_id, 2147483647), axis=0))
        # NaN if one is NaN: such a row has no largest.
        tl.store(out.best + tile, tl.where(tl.max(broken, axis=0) > 0, float("nan"), largest))
    else:
        ROWS: tl.constexpr = 16 if BATCH <= 16 else 32
        gdc_wait(PDL)
        row = tl.arange(0, ROWS)
        there = row < BATCH
        if norm_ptr is not None:
            i = tl.arange(0, config.ssq_pad)
            squares_at = ssq_ptr + row[:, None] * config.ssq_parts + i[None, :]
            squares = tl.load(squares_at, mask=there[:, None] & (i < config.ssq_parts)[None, :], other=0.0)
            rstd_rows = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
        # The weights are the left operand: int8 codes, exact in every dtype, then stay in registers.
        acc = tl.zeros((PART, ROWS), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=config.stages):
            w = _vocabulary_rows(weight_ptr, v, V, start + lane, 1, config)[0]
            k = start + lane
            x_at = hidden_ptr + row[:, None] * K + k[None, :]
            x = tl.load(x_at, mask=there[:, None] & (k < K)[None, :], other=0.0)
            if norm_ptr is not None:
                norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
                x = rms_normalize(x, norm[None, :], rstd_rows[:, None], dtype)
            acc = tl.dot(w.to(dtype), tl.trans(x), acc, input_precision="ieee")
        y = _rounded(acc, scale_ptr, v[:, None], V, dtype)
        live = (v < V)[:, None] & there[None, :]
        tl.store(out.logit + row[None, :] * V + v[:, None], y, mask=live)
        best_at = row * tl.num_programs(0) + tile
        shown = tl.where(live & (y == y), y, float("-inf"))
        largest = tl.max(shown, axis=0)
        chosen = tl.min(tl.where(shown == largest[None, :], v[:, None], 2147483647), axis=0)
        broken = tl.max((live & (y != y)).to(tl.int32), axis=0)
        tl.store(out.best_id + best_at, chosen, mask=there)
        tl.store(out.best + best_at, tl.where(broken > 0, float("nan"), largest), mask=there)


@triton.jit
def _rounded(total, scale_ptr, v, V, dtype: tl.constexpr):
    """Sums of the tokens ``v``, times their int8 scales if there are any, as the weights' dtype rounds them."""
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + v, mask=v < V, other=0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _vocabulary_rows(weight_ptr, v, V, k, CHUNKS: tl.constexpr, config: tl.constexpr):
    """weight[v, k], and so many chunks of ``block_k`` behind it, zeros outside. Read once."""
    found = ()
    for chunk in tl.static_range(CHUNKS):
        at = k + chunk * config.block_k
        there = (v < V)[:, None] & (at < config.k)[None, :]
        w_at = weight_ptr + v.to(tl.int64)[:, None] * config.k + at[None, :]
        found += (tl.load(w_at, mask=there, other=0.0, eviction_policy="evict_first"),)
    return found


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
    hidden: Tensor, ssq: Tensor | None, norm: Tensor | None, weight: Tensor, scales: Tensor | None, out: Logits, *,
    eps: float = 0.0, pdl: bool = False,
) -> None:  # fmt: skip
    """Final norm and ``lm_head``: hidden (B, K), ssq (B, parts) float32 the partial sums of its squares, norm (K,) as
    ``common.Input.norm``, weight (V, K) of hidden's dtype or int8 with scales (V,) float32. Rows may come
    normalized, without ssq and norm: of more than 16 rows no program then works out the norms anew."""
    (batch, width), parts = hidden.shape, 1 if ssq is None else ssq.shape[1]
    tile, by_rows = head_tile(batch, weight), _by_rows(batch, weight)
    block_k, passes = tile.block_k, 1
    if width <= block_k or not by_rows:
        block_k = min(64 if hidden.dtype == torch.float32 and not by_rows else block_k, triton.next_power_of_2(width))
    else:  # whole rows all the same, in the chunks that waste least
        block_k = min((block_k, block_k // 2, block_k // 4), key=lambda size: triton.cdiv(width, size) * size)
    block_k = max(16, block_k)
    if by_rows:  # about 16,384 numbers at a time
        read = tile.block_v * triton.cdiv(width, block_k) * block_k // 16384
        passes = 1 << min(max(1, read).bit_length() - 1, tile.block_v.bit_length() - 1)
    config = HeadConfig(
        width, batch, by_rows, parts, max(32, triton.next_power_of_2(parts)), tile.block_v, passes, block_k, tile.stages
    )
    _logits_kernel[(triton.cdiv(len(weight), tile.block_v),)](
        hidden, ssq, norm, weight, scales, out, eps, len(weight), config, pdl, num_warps=tile.warps, launch_pdl=pdl
    )


def launch_argmax(logits: Logits, tokens: Tensor, next_tokens: Tensor, positions: Tensor, *, pdl: bool = False) -> None:
    """The greedy choice of every row, and its position moved on; idle rows give -1 and stay where they are. ``tokens``
    (the ids just read, negative for idle rows) and ``next_tokens`` (B,) int64, ``positions`` (B,) int32."""
    batch, tiles = logits.best.shape
    _argmax_kernel[(batch,)](
        logits, tokens, next_tokens, positions, tiles, triton.next_power_of_2(tiles), pdl, num_warps=8, launch_pdl=pdl
    )
