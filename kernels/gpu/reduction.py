"""The epilogue of a linear's kernel: split-K reduction, bias, activation, residual; and the residual add that has to be
a launch of its own.

Each program stores its partial sums; they are added in the order of the splits, so results repeat. Who adds them?

reducers = 0: the last program of a tile to arrive, by a counter.

reducers > 0: that many of the tile's last programs, part of its columns each, by spinning. The workspace holds EMPTY
before a launch and after it: they poll until every split's sums are there, and put EMPTY in their place. That is two
ways to the L2 cache fewer, but takes bandwidth from programs that still read weights, and places on the chip.

Progress: all other programs end without waiting for anybody. A single reducer a tile waits only for programs that began
before it. Several wait for each other too, so the spinning programs of a launch, reducers * tiles, have to be resident
at once: ``plan`` allows one for each multiprocessor. Where the process may not use every one that the driver reports
(MPS with a limited share, or beside a persistent kernel), WISPARSE_SPINNING=0 makes every launch use the counter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import KVSplits, gdc_wait, rms_normalize

# All bits set: as a float32 a NaN, though none that arithmetic results in, nor one that is ever stored.
EMPTY = -1
_EMPTY = tl.constexpr(EMPTY)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _bits(y):
    bits = y.to(tl.int32, bitcast=True)
    return tl.where(bits == _EMPTY, _NAN, bits)


@triton.jit
def store_partial(partial_ptr, place, y, mask):
    """Store float32 partial sums where ``reduce_tile`` looks for them."""
    tl.store(partial_ptr + place, _bits(y), mask=mask)


@triton.jit
def store_partial4(at, a, b, c, d, wanted):
    """The same for four neighbouring sums of each thread, the first at a multiple of 16 bytes."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r",
        [at.to(tl.int64), _bits(a), _bits(b), _bits(c), _bits(d), wanted.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def reduce_tile(of, bias_ptr, output, workspace, problem: tl.constexpr, launch: tl.constexpr, TOGETHER: tl.constexpr):
    """The end of every program: its tile's reducer adds up the partial sums of all splits and writes the result, row by
    row or, TOGETHER, all rows in one tensor. ``of``: the tile's ``Columns``."""
    BATCH: tl.constexpr = problem.batch
    PAIRS: tl.constexpr = problem.output != "plain" and problem.output != "residual"
    EACH: tl.constexpr = 2 if PAIRS else 1  # sums of a row: gate's, then up's
    OUT_N: tl.constexpr = problem.n0 if PAIRS else problem.n
    PARTS: tl.constexpr = launch.reducers if launch.reducers > 0 else 1
    PART: tl.constexpr = launch.block_n // PARTS
    SSQ_PARTS: tl.constexpr = launch.tiles * PARTS
    AT_ONCE: tl.constexpr = launch.reduce_splits
    EXPERTS: tl.constexpr = problem.experts
    SPLITS: tl.constexpr = launch.splits * (EXPERTS if EXPERTS > 0 else 1)  # those of one expert after another's
    dtype: tl.constexpr = output.out.dtype.element_ty
    # Gate's and up's programs of one tile arrive together.
    ARRIVALS: tl.constexpr = SPLITS * EACH
    arrival = of.split + of.projection * launch.splits if PAIRS else of.split
    partial_ptr = workspace.partial
    if EXPERTS > 0:
        arrival += workspace.chosen * launch.splits
        partial_ptr -= workspace.chosen * (launch.splits * problem.n)  # the first expert's
    # Which part of the tile's columns this program writes; negative: none.
    if launch.reducers > 0:
        part = arrival - (ARRIVALS - launch.reducers)
    else:
        counter_ptr = workspace.counter + (of.local if PAIRS else of.tile)
        tl.debug_barrier()
        if ARRIVALS > 1:
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
            part = tl.where(arrived == ARRIVALS, 0, -1)
            tl.store(counter_ptr, 0, mask=arrived == ARRIVALS)
        else:
            part = arrival
    if part >= 0:
        n = of.local * launch.block_n + part * PART + tl.arange(0, PART)
        live = n < of.width
        # Columns of partial sums and bias; with gate and up gate's, n0 before up's.
        columns = n if PAIRS else of.first + n
        ssq_at = of.tile * PARTS + part
        if TOGETHER:
            ROWS: tl.constexpr = triton.next_power_of_2(BATCH)
            row = tl.arange(0, ROWS)
            there = (row < BATCH)[:, None] & live[None, :]
            out_at = output.out + row[:, None] * OUT_N + columns[None, :]
            hidden = tl.zeros((ROWS, PART), dtype)
            if problem.output == "residual":  # loaded ahead
                hidden = tl.load(out_at, mask=there, other=0.0)
            y = tl.zeros((ROWS, PART), tl.float32)
            up = tl.zeros((ROWS, PART), tl.float32)
            for start in tl.range(0, launch.splits, AT_ONCE, num_stages=1):
                splits = start + tl.arange(0, AT_ONCE)
                sum_row = splits[:, None] * BATCH + row[None, :]
                at = workspace.partial + sum_row[:, :, None] * problem.n + columns[None, None, :]
                wanted = (splits < launch.splits)[:, None, None] & there[None, :, :]
                found = _poll(at, wanted, launch.reducers)
                if PAIRS:
                    found_up = _poll(at + problem.n0, wanted, launch.reducers)
                    up += _consume(found_up, at + problem.n0, wanted, launch.reducers)
                y += _consume(found, at, wanted, launch.reducers)
            y = _add_bias_and_activate(y, up, bias_ptr, columns[None, :], live[None, :], dtype, problem)
            if problem.output == "residual":
                y = (hidden.to(tl.float32) + y.to(tl.float32)).to(dtype)
                squares = tl.where(there, y.to(tl.float32) * y.to(tl.float32), 0.0)
                tl.store(output.ssq + row * SSQ_PARTS + ssq_at, tl.sum(squares, axis=1), mask=row < BATCH)
            tl.store(out_at, y, mask=there)
        else:
            hidden = ()
            if problem.output == "residual":  # loaded ahead
                for row in tl.static_range(BATCH):
                    hidden += (tl.load(output.out + row * problem.n + columns, mask=live, other=0.0),)
            sums = ()
            for _ in tl.static_range(BATCH * EACH):
                sums += (tl.zeros((PART,), tl.float32),)
            if EXPERTS > 0 and bias_ptr is not None:  # each expert's, times its weight; read ahead too
                for i in tl.static_range(EXPERTS):
                    expert = tl.load(workspace.chosen_expert + i, cache_modifier=".cg").to(tl.int64)
                    own = tl.load(bias_ptr + expert * problem.n + columns, mask=live, other=0.0).to(tl.float32)
                    sums = (sums[0] + own * tl.load(workspace.chosen_weight + i),)
            for start in tl.range(0, SPLITS, AT_ONCE, num_stages=1):
                # First all loads, so that one way to the L2 cache serves them, then the waiting.
                places = ()
                found = ()
                for i in tl.static_range(BATCH * EACH):
                    splits = start + tl.arange(0, AT_ONCE)
                    column = columns + i % EACH * problem.n0
                    at = partial_ptr + (splits * BATCH + i // EACH)[:, None] * problem.n + column[None, :]
                    there = (splits < SPLITS)[:, None] & live[None, :]
                    places += ((at, there),)
                    found += (_poll(at, there, launch.reducers),)
                factor = 1.0
                if EXPERTS > 0:
                    chosen = (start + tl.arange(0, AT_ONCE)) // launch.splits
                    factor = tl.load(workspace.chosen_weight + chosen, mask=chosen < EXPERTS, other=0.0)[:, None]
                added = ()
                for i in tl.static_range(BATCH * EACH):
                    at, there = places[i]
                    added += (sums[i] + _consume(found[i], at, there, launch.reducers, factor),)
                sums = added
            for row in tl.static_range(BATCH):
                # Gate's and up's; else the same one twice, and the second is not used.
                y = _add_bias_and_activate(
                    sums[row * EACH], sums[row * EACH + EACH - 1], None if EXPERTS > 0 else bias_ptr, columns, live,
                    dtype, problem,
                )  # fmt: skip
                if problem.output == "residual":
                    y = (hidden[row].to(tl.float32) + y.to(tl.float32)).to(dtype)
                    squares = tl.where(live, y.to(tl.float32) * y.to(tl.float32), 0.0)
                    tl.store(output.ssq + row * SSQ_PARTS + ssq_at, tl.sum(squares, axis=0))
                tl.store(output.out + row * OUT_N + columns, y, mask=live)


@triton.jit
def _poll(at, there, REDUCERS: tl.constexpr):
    """Partial sums as they are now, read past L1: other multiprocessors write them."""
    if REDUCERS > 0:
        found = tl.load(at, mask=there, other=0, volatile=True)
    else:
        found = tl.load(at, mask=there, other=0, cache_modifier=".cg")
    return found


@triton.jit
def _consume(found, at, there, REDUCERS: tl.constexpr, factor=1.0):
    """The sum over the splits, each times its factor, once all are there; spinning reducers leave EMPTY."""
    if REDUCERS > 0:
        while tl.max((found == _EMPTY).to(tl.int32)) > 0:
            found = tl.load(at, mask=found == _EMPTY, other=found, volatile=True)
        tl.store(at, tl.full(found.shape, _EMPTY, found.dtype), mask=there)
    return tl.sum(found.to(tl.float32, bitcast=True) * factor, axis=0)


@triton.jit
def _add_bias_and_activate(y, up, bias_ptr, columns, live, dtype: tl.constexpr, problem: tl.constexpr):
    """Sums with their bias, or activation(gate) * up, in dtype; rounded where the model's own tensors are."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=live, other=0.0).to(tl.float32)
    y = y.to(dtype)
    OUTPUT: tl.constexpr = problem.output
    if OUTPUT != "plain" and OUTPUT != "residual":
        if bias_ptr is not None:
            up += tl.load(bias_ptr + problem.n0 + columns, mask=live, other=0.0).to(tl.float32)
        y = activate(y.to(tl.float32), up.to(dtype).to(tl.float32), dtype, OUTPUT, problem.clamp[0], problem.clamp[1])
    return y


@triton.jit
def activate(
    gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr = 0.0, LIMIT: tl.constexpr = 0.0
):
    """activation(gate) * up in dtype, of float32 that holds rounded numbers: "silu", "gelu_tanh", or "clamped", gpt-oss's
    gate * sigmoid(SLOPE * gate) * (up + 1), of gate up to LIMIT and up within it."""
    slope = gate
    if ACTIVATION == "clamped":
        # Not tl.minimum, which takes a NaN for the limit.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        up = (up + 1.0).to(dtype).to(tl.float32)
        slope = gate * SLOPE
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with 2 u = sqrt(8 / pi) * (gate + 0.044715 gate**3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32)
    return (activated * up).to(dtype)


class Beside(NamedTuple):
    """A second half, of experts beside a dense MLP, and norms of both, which are added then."""

    half: Tensor  # (B, K)
    norm: Tensor  # (K,)
    norm_of_first: Tensor  # (K,)


@triton.jit
def _residual_add_kernel(
    half_ptr, beside, hidden_ptr, norm_ptr, scalar_ptr, ssq_ptr, next_ptr, normed_ptr, eps,  # as of launch_residual_add
    MULTIPLIER: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    live = k < K
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=live, other=0.0)
    gdc_wait(PDL)
    hidden = tl.load(hidden_ptr + row * K + k, mask=live, other=0.0).to(tl.float32)
    y = tl.load(half_ptr + row * K + k, mask=live, other=0.0).to(tl.float32)
    if beside is not None:
        other = tl.load(beside.half + row * K + k, mask=live, other=0.0).to(tl.float32)
        norm_y = tl.load(beside.norm_of_first + k, mask=live, other=0.0)
        norm_other = tl.load(beside.norm + k, mask=live, other=0.0)
        y = rms_normalize(y, norm_y, tl.rsqrt(tl.sum(y * y, axis=0) / K + eps), dtype).to(tl.float32)
        other = rms_normalize(other, norm_other, tl.rsqrt(tl.sum(other * other, axis=0) / K + eps), dtype)
        y = (y + other.to(tl.float32)).to(dtype).to(tl.float32)
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(y * y, axis=0) / K + eps)
        y = rms_normalize(y, norm, rstd, dtype).to(tl.float32)
    if MULTIPLIER != 1.0:
        y = (y * MULTIPLIER).to(dtype).to(tl.float32)
    y = (hidden + y).to(dtype)
    if scalar_ptr is not None:
        y = (y.to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)).to(dtype)
    tl.store(hidden_ptr + row * K + k, y, mask=live)
    y = y.to(tl.float32)
    squares = tl.sum(y * y, axis=0)
    if ssq_ptr is not None:
        tl.store(ssq_ptr + row, squares)
    if normed_ptr is not None:
        if next_ptr is not None:
            next_norm = tl.load(next_ptr + k, mask=live, other=0.0)
            y = rms_normalize(y, next_norm, tl.rsqrt(squares / K + eps), dtype).to(tl.float32)
        tl.store(normed_ptr + row * K + k, y.to(dtype), mask=live)


def launch_residual_add(
    half: Tensor, hidden: Tensor, ssq: Tensor | None, *, beside: Beside | None = None, norm: Tensor | None = None,
    scalar: Tensor | None = None, next_norm: Tensor | None = None, normed: Tensor | None = None, eps: float = 0.0,
    multiplier: float = 1.0, pdl: bool = False,
) -> None:  # fmt: skip
    """hidden = (hidden + multiplier * norm?(half)) * scalar?, both (B, K), each step rounded as transformers does; norm
    (K,) as ``common.Input.norm``, scalar (1,). ``ssq`` (B, 1) float32 receives the sums of squares of hidden's rows,
    ``normed`` (B, K) hidden after the RMSNorm ``next_norm``, or as it is. One program has a whole row, as a norm needs
    all of it."""
    batch, width = hidden.shape
    _residual_add_kernel[(batch,)](
        half, beside, hidden, norm, scalar, ssq, next_norm, normed, eps, multiplier, width,
        triton.next_power_of_2(width), pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


# Between the products of many rows: fewer rows have both inside their products (``channels.load_input``, ``reduce_tile``).
# Roundings are alike.

Mask = tuple[Tensor, Tensor]  # of a linear that is one projection: scales (1, K), thresholds (1,)


@triton.jit
def _masked(y, k, live, scale_ptr, threshold_ptr):
    """y, zero where a linear's mask drops channel k; as it is without one."""
    if scale_ptr is not None:
        score = tl.abs(y.to(tl.float32)) * tl.load(scale_ptr + k, mask=live, other=0.0)
        y = tl.where(score < tl.load(threshold_ptr), 0.0, y)
    return y


@triton.jit
def _activate_kernel(
    gate_up_ptr, scale_ptr, threshold_ptr, out_ptr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up_ptr + row * (2 * WIDTH) + n
    gate = tl.load(at, mask=n < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=n < WIDTH, other=0.0).to(tl.float32)
    y = _masked(activate(gate, up, dtype, ACTIVATION), n, n < WIDTH, scale_ptr, threshold_ptr)
    tl.store(out_ptr + row * WIDTH + n, y, mask=n < WIDTH)


def launch_activate(gate_up: Tensor, activation: str, mask: Mask | None = None) -> Tensor:
    """activation(gate) * up, (T, I) of (T, 2 I), then masked; ``silu`` or ``gelu_tanh``."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(width))
    _activate_kernel[(rows, triton.cdiv(width, block))](
        gate_up, *(mask or (None, None)), out, activation, width, block, num_warps=4
    )
    return out


@triton.jit
def _combine_kernel(
    splits, scale_ptr, threshold_ptr, out_ptr, HEADS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SPLITS
    d = tl.arange(0, D_PAD)
    m = tl.load(splits.maximum + at)
    for s in tl.static_range(1, SPLITS):
        m = tl.maximum(m, tl.load(splits.maximum + at + s))
    x = tl.zeros((D_PAD,), tl.float32)
    total = tl.zeros((), tl.float32)
    for s in tl.static_range(SPLITS):
        factor = tl.exp2(tl.load(splits.maximum + at + s) - m)
        total += tl.load(splits.total + at + s) * factor
        x += tl.load(splits.x + (at + s) * D + d, mask=d < D, other=0.0) * factor
    y = (x / total).to(out_ptr.dtype.element_ty)
    y = _masked(y, tl.program_id(0) % HEADS * D + d, d < D, scale_ptr, threshold_ptr)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * D + d, y, mask=d < D)


def launch_combine(splits: KVSplits, dtype: torch.dtype, mask: Mask | None = None) -> Tensor:
    """The attention's output (B, heads * D), then masked."""
    batch, heads, count, d = splits.x.shape
    out = torch.empty(batch, heads * d, dtype=dtype, device=splits.x.device)
    _combine_kernel[(batch * heads,)](
        splits, *(mask or (None, None)), out, heads, count, d, triton.next_power_of_2(d), num_warps=1
    )
    return out
