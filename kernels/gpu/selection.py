"""The prologue of a linear's kernel: its input (normalized, or attention's splits combined) and which channels it keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common import (
    KVSplits,
    is_dropped,
    issue_loads,
    load_squares,
    reciprocal_rms,
    rms_normalize,
    smem_barrier,
    smem_store16,
    wait_in_loop,
)

_ROWS = tl.constexpr(8)  # rows whose inputs are read at the same time


class Channels(NamedTuple):
    """A program's channels: positions in its segment, channel ids, which of them exist, and what is known before x."""

    position: Any
    k: Any
    live: Any
    norm: Any
    scale: Any
    threshold: Any


@triton.jit
def combine_kv_splits(splits, row, k, live, problem: tl.constexpr, dtype: tl.constexpr):
    """The attention's output [row, k] in ``dtype`` from its ``KVSplits``, 0 where not live.

    One tensor for each split: a second dimension would cost exchanges between threads.
    """
    KV_SPLITS: tl.constexpr = problem.kv_splits
    HEAD_DIM: tl.constexpr = problem.head_dim
    at = (row * (problem.k // HEAD_DIM) + k // HEAD_DIM) * KV_SPLITS
    ms = ()
    totals = ()
    parts = ()
    for s in tl.static_range(KV_SPLITS):
        ms = ms + (tl.load(splits.maximum + at + s, mask=live, other=0.0),)  # noqa: RUF005 (Triton has no unpacking)
        totals = totals + (tl.load(splits.total + at + s, mask=live, other=1.0),)  # noqa: RUF005
        part = tl.load(splits.x + (at + s) * HEAD_DIM + k % HEAD_DIM, mask=live, other=0.0)
        parts = parts + (part,)  # noqa: RUF005
    m = ms[0]
    for s in tl.static_range(1, KV_SPLITS):
        m = tl.maximum(m, ms[s])
    x = tl.zeros(k.shape, m.dtype)
    total = tl.zeros(k.shape, m.dtype)
    for s in tl.static_range(KV_SPLITS):
        factor = tl.exp2(ms[s] - m)
        total += totals[s] * factor
        x += parts[s] * factor
    return (x / total).to(dtype)


@triton.jit
def row_limit(given, threshold, row):
    """A row's threshold: 0 for a row that keeps all its channels."""
    if given.row_mask is not None:
        threshold = threshold * tl.load(given.row_mask + row)
    return threshold


@triton.jit
def choose_channels(
    given, channels, counting, eps, ssq_parts, problem: tl.constexpr, EACH: tl.constexpr, dtype: tl.constexpr
):
    """For one row or two: each row's float32 values of the program's channels, which of them any row keeps, and how
    many counted rows keep each. EACH: a row's own dropped channels are 0, and what each row keeps is counted."""
    BATCH: tl.constexpr = problem.batch
    NORMED: tl.constexpr = given.norm is not None
    COUNT: tl.constexpr = counting is not None
    if NORMED:
        ROUND_ONCE: tl.constexpr = given.norm.dtype.element_ty == tl.float32
    # Loads first: none passes a store or a barrier.
    inputs = ()
    squares = ()
    for row in tl.static_range(BATCH):
        if given.attention is not None:
            x = combine_kv_splits(given.attention, row, channels.k, channels.live, problem, dtype)
        else:
            x = tl.load(given.x + row * problem.k + channels.k, mask=channels.live, other=0.0)
        inputs = inputs + (x,)  # noqa: RUF005
        if NORMED:
            squares = squares + (load_squares(given.ssq, row, ssq_parts, problem.ssq_pad),)  # noqa: RUF005
    keep = channels.position < 0
    kept_rows = channels.position * 0
    xs = ()
    for row in tl.static_range(BATCH):
        x = inputs[row]
        if NORMED:
            rstd = reciprocal_rms(squares[row], eps, problem.k)
            x = rms_normalize(x.to(tl.float32), channels.norm, rstd, dtype, ROUND_ONCE)
        if not problem.dense:
            keep_row = channels.live & ~is_dropped(x, channels.scale, row_limit(given, channels.threshold, row))
            keep = keep | keep_row
            if COUNT and EACH:
                kept_rows += (keep_row & (tl.load(counting.token + row) >= 0)).to(tl.int32)
            x = x.to(tl.float32)
            if EACH:
                x = tl.where(keep_row, x, 0.0)
        xs = xs + (x,)  # noqa: RUF005
    return xs, keep, kept_rows


@triton.jit
def store_inputs(
    values, given, channels, counting, counts, eps, ssq_parts,
    problem: tl.constexpr, LENGTH: tl.constexpr, SHARED: tl.constexpr, dtype: tl.constexpr, SCALE: tl.constexpr = 1.0,
):  # fmt: skip
    """Store each row's values of the program's channels, times SCALE, 0 where it drops one, LENGTH apart; returns where,
    for ``smem_load16``.

    Waits for the previous kernel, and lets the next one start. Adds what the rows keep to the program's own cell, at
    which ``counting`` points, if it ``counts``.
    """
    BATCH: tl.constexpr = problem.batch
    NORMED: tl.constexpr = given.norm is not None
    COUNT: tl.constexpr = counting is not None
    position = channels.position
    k = channels.k
    live = channels.live
    zero = wait_in_loop(ssq_parts, problem.pdl)
    kept_rows = position * 0
    kept_before = zero.to(tl.int64)
    if COUNT:
        kept_before = tl.load(counting.before, mask=counts, other=0)
    if given.attention is not None:
        attended = given.attention
        attended = KVSplits(attended.x + zero, attended.maximum + zero, attended.total + zero)
    else:
        x_ptr = given.x + zero
    if NORMED:
        ssq_ptr = given.ssq + zero
    for begin in tl.static_range(0, BATCH, _ROWS):
        # Several rows' loads first: none passes a store or a barrier.
        inputs = ()
        for row in tl.static_range(begin, begin + _ROWS):
            if row < problem.batch:
                if given.attention is not None:
                    x = combine_kv_splits(attended, row, k, live, problem, dtype)
                else:
                    x = tl.load(x_ptr + row * problem.k + k, mask=live, other=0.0)
                inputs = inputs + (x,)  # noqa: RUF005
        squares = ()
        if NORMED:
            if SHARED:
                issue_loads(zero)
            for row in tl.static_range(begin, begin + _ROWS):
                if row < problem.batch:
                    squares = squares + (load_squares(ssq_ptr, row, ssq_parts, problem.ssq_pad),)  # noqa: RUF005
        if SHARED:
            issue_loads(zero)
        for row in tl.static_range(begin, begin + _ROWS):
            if row < problem.batch:
                x = inputs[row - begin]
                if NORMED:
                    rstd = reciprocal_rms(squares[row - begin], eps, problem.k)
                    norm = channels.norm
                    x = rms_normalize(x.to(tl.float32), norm.to(tl.float32), rstd, dtype, norm.dtype == tl.float32)
                if not problem.dense:
                    dropped = is_dropped(x, channels.scale, row_limit(given, channels.threshold, row))
                    if COUNT:
                        kept_rows += (live & ~dropped & (tl.load(counting.token + row) >= 0)).to(tl.int32)
                    x = tl.where(dropped, 0.0, x).to(dtype)
                x = tl.where(live, x, 0.0).to(dtype)
                if SCALE != 1.0:
                    x = (x.to(tl.float32) * SCALE).to(dtype)
                smem_store16(values, row * LENGTH + position, x, position < LENGTH, SHARED)
    if COUNT:  # noqa: SIM102 (resolved at compile time)
        if counts:
            tl.store(counting.after, kept_before + tl.sum(kept_rows, axis=0))
    return smem_barrier(values, SHARED)
