"""Sampling of the next token on the device, in three launches. Twin: runtime/decoding/sampling.py.

    count:      histogram of the logits over the 2**16 values of a 16-bit type, without those that top-k or top-p cannot
                keep: top_k other logits are larger, or the softmax weight is too small for top_p
    threshold:  the smallest value that top-k and top-p keep, from the histogram
    draw:       cumulative sum of the kept weights exp((logit - max) / temperature), by ascending id; the first id at
                which it exceeds a random number

Logits are rounded to the model's dtype, so with bf16 and fp16 the histogram is exact and replaces a sort. The small
logits are left out because the atomic additions dominate: thousands of logits share a few values. Counts are integers
and sums are added in a fixed order: the same input gives the same token on every run. A model's multiplier and soft cap
of logits are monotonic, so they are applied where the weights are computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import gdc_wait, soft_cap
from .head import Logits, likeliest_token

# The dtypes of logits; float32 has too many values for a histogram.
SAMPLED_DTYPES = (torch.bfloat16, torch.float16)

VALUES = tl.constexpr(1 << 16)  # of a 16-bit type
TILE = tl.constexpr(1024)  # values, or vocabulary entries, of a program
BLOCKS = tl.constexpr(64)  # VALUES / TILE


class SampleState(NamedTuple):
    """Parameters and intermediate results of B rows. A rank is the index of a value, 0 the largest."""

    numbers: Tensor  # (B, 4) float64: temperature, top_k, top_p, min_p as in SamplingParams
    seeds: Tensor  # (B,) int64
    counts: Tensor  # (B, 2**16) int32, histogram by rank; zero between steps, as is ``arrived``
    block_counts: Tensor  # (B, blocks) int32, logits of each block of ranks
    block_sums: Tensor  # (B, blocks) float64, the sum of their weights
    threshold: Tensor  # (B,) int32, the last rank kept; 2**16 without top-k and top-p
    sums: Tensor  # (B, tiles) float64, of each tile of the vocabulary: all weights (count), then the kept ones (draw)
    largest: Tensor  # (B,) float32, the largest logit
    likeliest: Tensor  # (B,) int32, its lowest id; -1 if it is infinite or the row has a NaN
    arrived: Tensor  # (B,) int32, counter of programs

    @classmethod
    def empty(cls, batch: int, vocabulary: int, device: torch.device) -> SampleState:
        """Zeros for ``batch`` rows, 0.25 MB each."""
        i32, i64, f32, f64 = torch.int32, torch.int64, torch.float32, torch.float64
        columns = (
            (f64, 4), (i64,), (i32, VALUES.value), (i32, BLOCKS.value), (f64, BLOCKS.value), (i32,),
            (f64, triton.cdiv(vocabulary, TILE.value)), (f32,), (i32,), (i32,),
        )  # fmt: skip
        return cls(*(torch.zeros((batch, *size), dtype=dtype, device=device) for dtype, *size in columns))


class Finish(NamedTuple):
    """Compile-time constants: logits are multiplied, then capped; ``half``: their dtype is fp16, else bf16."""

    multiplier: float
    cap: float | None
    half: bool


class Choice(NamedTuple):
    token: Tensor  # (B,) int64: the step's input ids, negative for idle rows
    next: Tensor  # (B,) int64: the sampled ids; may be the same tensor
    position: Tensor  # (B,) int32, of ``token``


@triton.jit
def _rank(logit, HALF: tl.constexpr):
    """The rank of a logit's value; -0 has that of 0."""
    logit = tl.where(logit == 0.0, 0.0, logit)
    if HALF:
        bits = logit.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = (logit.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return tl.where(bits >= 0x8000, bits, 0x7FFF - bits)


@triton.jit
def _value(rank, HALF: tl.constexpr):
    """The float32 value of a rank."""
    bits = tl.where(rank >= 0x8000, rank, 0x7FFF - rank)
    if HALF:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _finished(logit, finish: tl.constexpr):
    """The logit multiplied and soft-capped, float32; -inf, a masked logit, stays -inf."""
    if finish.multiplier != 1.0:
        logit = logit * finish.multiplier
    if finish.cap is not None:
        logit = tl.where(logit == float("-inf"), logit, soft_cap(logit.to(tl.float64), finish.cap).to(tl.float32))
    return logit


@triton.jit
def _weight(logit, largest, temperature, finish: tl.constexpr):
    """exp((logit - largest) / temperature), float64, at most 1."""
    logit = _finished(logit, finish)
    return tl.exp((logit.to(tl.float64) - _finished(largest, finish).to(tl.float64)) / temperature)


@triton.jit
def _mix(state):
    """The output function of SplitMix64, as in runtime/decoding/sampling.py."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _limits(state, token_ptr, row, V):
    """Temperature, top_k (V if off), top_p, and whether the row is sampled with top-k or top-p."""
    temperature = tl.load(state.numbers + row * 4)
    top_k = tl.load(state.numbers + row * 4 + 1)
    top_p = tl.load(state.numbers + row * 4 + 2)
    cuts = (top_k > 0.0) & (top_k < V)
    sampled = (temperature > 0.0) & (tl.load(token_ptr + row) >= 0)
    return temperature, tl.where(cuts, top_k, V).to(tl.int32), top_p, sampled & (cuts | (top_p < 1.0))


@triton.jit
def _count_kernel(
    logits, choice, state, V, head_tiles, HEAD_PAD: tl.constexpr, finish: tl.constexpr, PDL: tl.constexpr
):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    gdc_wait(PDL)
    temperature, top_k, top_p, filtered = _limits(state, choice.token, row, V)
    if filtered | (tile == 0):
        i = tl.arange(0, HEAD_PAD)
        value = tl.load(logits.best + row * head_tiles + i, mask=i < head_tiles, other=float("-inf"))
        largest = tl.max(value, axis=0)
        if tile == 0:
            tl.store(state.largest + row, largest)
            tl.store(state.likeliest + row, likeliest_token(logits, row, head_tiles, value, largest))
        if filtered:
            v = tile * TILE + tl.arange(0, TILE)
            logit = tl.load(logits.logit + row * V + v, mask=v < V, other=float("-inf"))
            rank = _rank(logit, finish.half)
            if top_k < V:
                # At least top_k of the tiles' maxima, so at least top_k logits, have the rank ``_kth`` or a smaller
                # one.
                ranks = tl.where(i < head_tiles, _rank(value, finish.half), VALUES)
                counted = rank <= _kth(ranks, top_k)
            else:
                # All logits with smaller weights sum to less than the weight that top_p drops; half of it, for
                # rounding.
                weight = _weight(logit, largest, temperature, finish)
                tl.store(state.sums + row * tl.num_programs(0) + tile, tl.sum(weight, axis=0))
                counted = weight * V >= 0.5 * (1.0 - top_p)
            tl.atomic_add(state.counts + row * VALUES + rank, 1, mask=(v < V) & counted, sem="relaxed")


@triton.jit
def _kth(ranks, k):
    """The k-th smallest of ranks, by bisection; VALUES - 1 if there are fewer."""
    low = tl.full((), 0, tl.int32)
    high = tl.full((), VALUES - 1, tl.int32)
    for _ in range(16):
        middle = (low + high) // 2
        enough = tl.sum((ranks <= middle).to(tl.int32), axis=0) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, VALUES - 1))
    return high


@triton.jit
def _block_weights(state, row, block, largest, temperature, finish: tl.constexpr):
    """Of a block of ranks: the ranks, their counts, and the sum of the weights of each rank's logits."""
    rank = block * TILE + tl.arange(0, TILE)
    count = tl.load(state.counts + row * VALUES + rank)
    weight = tl.where(count > 0, _weight(_value(rank, finish.half), largest, temperature, finish), 0.0)
    return rank, count, count.to(tl.float64) * weight


@triton.jit
def _threshold_kernel(choice, state, V, tiles, TILES_PAD: tl.constexpr, finish: tl.constexpr, PDL: tl.constexpr):
    block = tl.program_id(0)
    row = tl.program_id(1)
    gdc_wait(PDL)
    temperature, top_k, top_p, filtered = _limits(state, choice.token, row, V)
    if filtered:
        largest = tl.load(state.largest + row)
        _, count, weight = _block_weights(state, row, block, largest, temperature, finish)
        tl.store(state.block_counts + row * BLOCKS + block, tl.sum(count, axis=0))
        tl.store(state.block_sums + row * BLOCKS + block, tl.sum(weight, axis=0))
        tl.debug_barrier()
        ticket = tl.atomic_add(state.arrived + row, 1, sem="acq_rel")
        if ticket == BLOCKS - 1:
            tl.store(state.arrived + row, 0)
            b = tl.arange(0, BLOCKS)
            sums = tl.load(state.block_sums + row * BLOCKS + b)
            threshold = tl.full((), VALUES - 1, tl.int32)
            if top_k < V:
                # top-k: the first rank whose cumulative count reaches top_k.
                counts = tl.load(state.block_counts + row * BLOCKS + b)
                block_k = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
                before = tl.sum(tl.where(b < block_k, counts, 0), axis=0)
                rank, count, weight = _block_weights(state, row, block_k, largest, temperature, finish)
                cumulative = before + tl.cumsum(count, axis=0)
                threshold = block_k * TILE + tl.sum((cumulative < top_k).to(tl.int32), axis=0)
                block_k_sum = tl.sum(tl.where(rank <= threshold, weight, 0.0), axis=0)
                sums = tl.where(b < block_k, sums, tl.where(b == block_k, block_k_sum, 0.0))
            if top_p < 1.0:
                # top-p: the first rank whose cumulative weight reaches top_p of the weight that top-k keeps.
                total = tl.sum(sums, axis=0)
                if top_k >= V:
                    t = tl.arange(0, TILES_PAD)
                    total = tl.sum(tl.load(state.sums + row * tiles + t, mask=t < tiles, other=0.0), axis=0)
                wanted = top_p * total
                block_p = tl.sum((tl.cumsum(sums, axis=0) < wanted).to(tl.int32), axis=0)
                block_p = tl.minimum(block_p, BLOCKS - 1)
                before_p = tl.sum(tl.where(b < block_p, sums, 0.0), axis=0)
                rank, _, weight = _block_weights(state, row, block_p, largest, temperature, finish)
                weight = tl.where(rank <= threshold, weight, 0.0)
                cumulative_p = before_p + tl.cumsum(weight, axis=0)
                threshold_p = block_p * TILE + tl.sum((cumulative_p < wanted).to(tl.int32), axis=0)
                threshold = tl.minimum(threshold, threshold_p)
            tl.store(state.threshold + row, threshold)
    elif block == 0:
        tl.store(state.threshold + row, VALUES)


@triton.jit
def _kept_weights(logits, row, tile, V, largest, temperature, threshold, min_p, finish: tl.constexpr):
    """Of a tile of the vocabulary: the ids, and their weights, 0 if top-k, top-p or min-p drops them."""
    v = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits.logit + row * V + v, mask=v < V, other=float("-inf"))
    weight = _weight(logit, largest, temperature, finish)
    return v, tl.where((v < V) & (_rank(logit, finish.half) <= threshold) & (weight >= min_p), weight, 0.0)


@triton.jit
def _draw_kernel(logits, choice, state, V, tiles, TILES_PAD: tl.constexpr, finish: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    gdc_wait(PDL)
    threshold = tl.load(state.threshold + row)
    idle = tl.load(choice.token + row) < 0
    likeliest = tl.load(state.likeliest + row)
    temperature = tl.load(state.numbers + row * 4)
    position = tl.load(choice.position + row)
    if threshold < VALUES:  # the row was counted: reset its counts to zero
        share = (VALUES + tiles - 1) // tiles
        for start in range(0, share, TILE):
            i = start + tl.arange(0, TILE)
            tl.store(state.counts + row * VALUES + tile * share + i, 0, mask=(i < share) & (tile * share + i < VALUES))
    if (temperature > 0.0) & (likeliest >= 0) & (idle == 0):
        largest = tl.load(state.largest + row)
        min_p = tl.load(state.numbers + row * 4 + 3)
        v, weight = _kept_weights(logits, row, tile, V, largest, temperature, threshold, min_p, finish)
        tl.store(state.sums + row * tiles + tile, tl.sum(weight, axis=0))
        tl.debug_barrier()
        ticket = tl.atomic_add(state.arrived + row, 1, sem="acq_rel")
        if ticket == tiles - 1:
            tl.store(state.arrived + row, 0)
            t = tl.arange(0, TILES_PAD)
            sums = tl.load(state.sums + row * tiles + t, mask=t < tiles, other=0.0)
            # A random number in [0, 1), of the seed and the position, times the sum of all kept weights.
            start = _mix(tl.load(state.seeds + row).to(tl.uint64) + 0x9E3779B97F4A7C15)
            mixed = _mix(start + (position + 2).to(tl.uint64) * 0x9E3779B97F4A7C15)
            wanted = (mixed >> 40).to(tl.int64).to(tl.float64) * 5.9604644775390625e-08 * tl.sum(sums, axis=0)
            # The first tile, then id, whose cumulative sum exceeds it; if rounding leaves none, the last with a weight.
            drawn = tl.min(tl.where((tl.cumsum(sums, axis=0) > wanted) & (sums > 0.0), t, TILES_PAD), axis=0)
            drawn = tl.where(drawn < TILES_PAD, drawn, tl.max(tl.where(sums > 0.0, t, 0), axis=0))
            before = tl.sum(tl.where(t < drawn, sums, 0.0), axis=0)
            v, weight = _kept_weights(logits, row, drawn, V, largest, temperature, threshold, min_p, finish)
            cumulative = before + tl.cumsum(weight, axis=0)
            chosen = tl.min(tl.where((cumulative > wanted) & (weight > 0.0), v, 2147483647), axis=0)
            chosen = tl.where(chosen < 2147483647, chosen, tl.max(tl.where(weight > 0.0, v, 0), axis=0))
            tl.store(choice.next + row, chosen.to(tl.int64))
            tl.store(choice.position + row, position + 1)
    elif tile == 0:
        tl.store(choice.next + row, tl.where(idle, -1, likeliest).to(tl.int64))
        tl.store(choice.position + row, tl.where(idle, position, position + 1))


def launch_sample(
    logits: Logits, choice: Choice, state: SampleState, dtype: torch.dtype, *, multiplier: float = 1.0,
    cap: float | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Sample each row's next token and increment its position; idle rows give -1 and keep their position. ``dtype``: of
    SAMPLED_DTYPES, to which the logits are rounded."""
    batch, vocabulary = logits.logit.shape
    tiles, head_tiles = triton.cdiv(vocabulary, TILE.value), logits.best.shape[1]
    tiles_pad, finish = triton.next_power_of_2(tiles), Finish(multiplier, cap, dtype == torch.float16)
    _count_kernel[(tiles, batch)](
        logits, choice, state, vocabulary, head_tiles, triton.next_power_of_2(head_tiles), finish, pdl, launch_pdl=pdl
    )
    _threshold_kernel[(BLOCKS.value, batch)](choice, state, vocabulary, tiles, tiles_pad, finish, pdl, launch_pdl=pdl)
    _draw_kernel[(tiles, batch)](logits, choice, state, vocabulary, tiles, tiles_pad, finish, pdl, launch_pdl=pdl)
