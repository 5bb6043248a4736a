"""Embedding, ``lm_head`` and the greedy choice of the next token.

    embed:    hidden = multiplier * embedding[token], and the partial sums of squares for the first norm
    logits:   dtype(weight @ RMSNorm(hidden)), stored as float32; each tile's maximum and its lowest id
    argmax:   the maximum over the tiles, lowest id first; positions are incremented

``lm_head`` is dense, in Hugging Face's (V, K) layout, so that tied embeddings are stored once. One row of x and
unquantized weights: a program reduces its rows of the weights along K, in ``passes`` groups of rows. Otherwise: tl.dot.
Bytes: V * K * sizeof(dtype) (int8: V * (K + 4)).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import gdc_wait, load_squares, reciprocal_rms, rms_normalize


class HeadTile(NamedTuple):
    """Measured on an H200: K of 4096, 5120 and 8192, 1 to 32 rows."""

    block_v: int  # rows of the weights of a program
    block_k: int
    warps: int
    stages: int  # num_stages of the K loop (tl.dot)


def head_tile(batch: int, weight: Tensor) -> HeadTile:
    return HeadTile(16, 4096, 4, 1) if _by_rows(batch, weight) else HeadTile(64, 128, 2, 3)


def _by_rows(batch: int, weight: Tensor) -> bool:
    """Whether a launch does without ``tl.dot``, which is slower for int8 weights, bound by the conversion of codes."""
    return batch == 1 and weight.dtype != torch.int8


class Logits(NamedTuple):
    """Logits rounded to the weights' dtype, each tile's maximum and its lowest id."""

    logit: Tensor  # (B, V) float32 (a field ``values`` would shadow one of Triton's tuples)
    best: Tensor  # (B, tiles) float32; NaN if one of the tile's logits is NaN
    best_id: Tensor  # (B, tiles) int32

    @classmethod
    def empty(cls, batch: int, weight: Tensor) -> Logits:
        """For the output layer ``weight`` (V, K)."""
        float32: Any = {"dtype": torch.float32, "device": weight.device}
        logit = torch.empty(batch, len(weight), **float32)
        best = torch.empty(batch, triton.cdiv(len(weight), head_tile(batch, weight).block_v), **float32)
        return cls(logit, best, torch.empty_like(best, dtype=torch.int32))


class HeadConfig(NamedTuple):
    """Compile-time constants of ``_logits_kernel``."""

    k: int
    batch: int
    by_rows: bool  # without tl.dot
    ssq_parts: int
    ssq_pad: int
    block_v: int
    passes: int  # groups of rows that a program loads one after the other (by_rows)
    block_k: int
    stages: int


@triton.jit  # arguments as of launch_embed
def _embed_kernel(
    token_ptr, embedding_ptr, hidden_ptr, ssq_ptr, MULTIPLIER: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2((K + TILES - 1) // TILES)
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


@triton.jit  # arguments as of launch_logits
def _logits_kernel(
    hidden_ptr, ssq_ptr, norm_ptr, weight_ptr, scale_ptr, out, eps, V, config: tl.constexpr, PDL: tl.constexpr
):
    BATCH: tl.constexpr = config.batch
    K: tl.constexpr = config.k
    BLOCK_K: tl.constexpr = config.block_k
    BLOCK_V: tl.constexpr = config.block_v // config.passes  # of a pass
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK_K)
    v = tile * config.block_v + tl.arange(0, BLOCK_V)
    if config.by_rows:
        CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        PASSES: tl.constexpr = config.passes
        # The first rows and the norm's weights are constants, loaded before the previous kernel has completed.
        w = _load_weights(weight_ptr, v, V, lane, CHUNKS, config)
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
        best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
        best_id = tl.full((BLOCK_V,), 2147483647, tl.int32)
        has_nan = tl.zeros((BLOCK_V,), tl.int32)
        for i in tl.static_range(PASSES):
            acc = xs[0][None, :] * w[0].to(tl.float32)
            for chunk in tl.static_range(1, CHUNKS):
                acc += xs[chunk][None, :] * w[chunk].to(tl.float32)
            if i + 1 < PASSES:
                w = _load_weights(weight_ptr, v + BLOCK_V, V, lane, CHUNKS, config)
            y = _scale_and_round(tl.sum(acc, axis=1), scale_ptr, v, V, dtype)
            tl.store(out.logit + v, y, mask=v < V)
            better = (v < V) & (y > best)
            best = tl.where(better, y, best)
            best_id = tl.where(better, v, best_id)
            has_nan = has_nan | ((v < V) & (y != y)).to(tl.int32)
            v += BLOCK_V
        largest = tl.max(best, axis=0)
        tl.store(out.best_id + tile, tl.min(tl.where(best == largest, best_id, 2147483647), axis=0))
        tl.store(out.best + tile, tl.where(tl.max(has_nan, axis=0) > 0, float("nan"), largest))
    else:
        ROWS: tl.constexpr = 16 if BATCH <= 16 else 32
        gdc_wait(PDL)
        row = tl.arange(0, ROWS)
        live_rows = row < BATCH
        if norm_ptr is not None:
            i = tl.arange(0, config.ssq_pad)
            squares_at = ssq_ptr + row[:, None] * config.ssq_parts + i[None, :]
            squares = tl.load(squares_at, mask=live_rows[:, None] & (i < config.ssq_parts)[None, :], other=0.0)
            rstd_rows = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
        # The weights are operand A, so that int8 codes, exact in every dtype, are converted in registers.
        acc = tl.zeros((BLOCK_V, ROWS), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=config.stages):
            w = _load_weights(weight_ptr, v, V, start + lane, 1, config)[0]
            k = start + lane
            x_at = hidden_ptr + row[:, None] * K + k[None, :]
            x = tl.load(x_at, mask=live_rows[:, None] & (k < K)[None, :], other=0.0)
            if norm_ptr is not None:
                norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
                x = rms_normalize(x, norm[None, :], rstd_rows[:, None], dtype)
            acc = tl.dot(w.to(dtype), tl.trans(x), acc, input_precision="ieee")
        y = _scale_and_round(acc, scale_ptr, v[:, None], V, dtype)
        live = (v < V)[:, None] & live_rows[None, :]
        tl.store(out.logit + row[None, :] * V + v[:, None], y, mask=live)
        best_at = row * tl.num_programs(0) + tile
        masked = tl.where(live & (y == y), y, float("-inf"))
        largest = tl.max(masked, axis=0)
        chosen = tl.min(tl.where(masked == largest[None, :], v[:, None], 2147483647), axis=0)
        has_nan = tl.max((live & (y != y)).to(tl.int32), axis=0)
        tl.store(out.best_id + best_at, chosen, mask=live_rows)
        tl.store(out.best + best_at, tl.where(has_nan > 0, float("nan"), largest), mask=live_rows)


@triton.jit
def _scale_and_round(acc, scale_ptr, v, V, dtype: tl.constexpr):
    """The logits of the ids ``v``: acc, times the int8 scale if there is one, rounded to dtype, as float32."""
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + v, mask=v < V, other=0.0)
    return acc.to(dtype).to(tl.float32)


@triton.jit
def _load_weights(weight_ptr, v, V, k, CHUNKS: tl.constexpr, config: tl.constexpr):
    """weight[v, k + chunk * block_k] for each of CHUNKS chunks, zeros outside."""
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        at = k + chunk * config.block_k
        live = (v < V)[:, None] & (at < config.k)[None, :]
        w_at = weight_ptr + v.to(tl.int64)[:, None] * config.k + at[None, :]
        chunks += (tl.load(w_at, mask=live, other=0.0, eviction_policy="evict_first"),)
    return chunks


@triton.jit
def likeliest_token(logits, row, tiles, value, largest):
    """The lowest id of a row's largest logit; -1 if it is infinite or a logit is NaN. value: the tiles' maxima, padded
    by -inf; largest: their maximum."""
    i = tl.arange(0, value.shape[0])
    token = tl.load(logits.best_id + row * tiles + i, mask=i < tiles, other=2147483647)
    chosen = tl.min(tl.where(value == largest, token, 2147483647), axis=0)
    has_nan = tl.max((value != value).to(tl.int32), axis=0)  # tl.max may ignore NaN
    return tl.where((has_nan > 0) | (tl.abs(largest) == float("inf")), -1, chosen)


@triton.jit  # arguments as of launch_argmax
def _argmax_kernel(logits, token_ptr, next_ptr, position_ptr, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
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
    """hidden (B, K) = multiplier * embedding[tokens]; embedding (V, K), tokens (B,) int64, negative for idle rows,
    which become zeros. ``ssq`` (B, parts) float32 receives partial sums of squares, for any number of parts."""
    width, parts = hidden.shape[1], ssq.shape[1]
    _embed_kernel[(parts, hidden.shape[0])](tokens, embedding, hidden, ssq, multiplier, width, parts)


def launch_logits(
    hidden: Tensor, ssq: Tensor | None, norm: Tensor | None, weight: Tensor, scales: Tensor | None, out: Logits, *,
    eps: float = 0.0, pdl: bool = False,
) -> None:  # fmt: skip
    """Final norm and ``lm_head``: hidden (B, K), ssq (B, parts) float32 its partial sums of squares, norm (K,) as
    ``common.Input.norm``, weight (V, K) of hidden's dtype or int8 with scales (V,) float32. Without ssq and norm hidden
    is already normalized: faster for more than 16 rows, where every program would normalize all of them again."""
    (batch, width), parts = hidden.shape, 1 if ssq is None else ssq.shape[1]
    tile, by_rows = head_tile(batch, weight), _by_rows(batch, weight)
    block_k, passes = tile.block_k, 1
    if width <= block_k or not by_rows:
        block_k = min(64 if hidden.dtype == torch.float32 and not by_rows else block_k, triton.next_power_of_2(width))
    else:  # whole rows, in chunks of the size with the least padding
        block_k = min((block_k, block_k // 2, block_k // 4), key=lambda size: triton.cdiv(width, size) * size)
    block_k = max(16, block_k)
    if by_rows:  # a pass loads about 16,384 weights
        wanted = tile.block_v * triton.cdiv(width, block_k) * block_k // 16384
        passes = 1 << min(max(1, wanted).bit_length() - 1, tile.block_v.bit_length() - 1)
    config = HeadConfig(
        width, batch, by_rows, parts, max(32, triton.next_power_of_2(parts)), tile.block_v, passes, block_k, tile.stages
    )
    _logits_kernel[(triton.cdiv(len(weight), tile.block_v),)](
        hidden, ssq, norm, weight, scales, out, eps, len(weight), config, pdl, num_warps=tile.warps, launch_pdl=pdl
    )


def launch_argmax(logits: Logits, tokens: Tensor, next_tokens: Tensor, positions: Tensor, *, pdl: bool = False) -> None:
    """Each row's greedy choice, and its position incremented; idle rows give -1 and keep their position. ``tokens``
    (the step's input ids, negative for idle rows) and ``next_tokens`` (B,) int64, ``positions`` (B,) int32."""
    batch, tiles = logits.best.shape
    _argmax_kernel[(batch,)](
        logits, tokens, next_tokens, positions, tiles, triton.next_power_of_2(tiles), pdl, num_warps=8, launch_pdl=pdl
    )
