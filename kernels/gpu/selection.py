"""Which channels a program's rows keep, and the values that are multiplied: before any product."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common import (
    Stretches,
    combined_attention,
    hold_reads,
    load_squares,
    normalise,
    put_half,
    reciprocal_rms,
    settled,
    wait_in_loop,
)

# Rows whose inputs are read at the same time.
_ROWS = tl.constexpr(8)


class Channels(NamedTuple):
    """A program's channels: where they stand in its segment, which they are, which of them there are, and what is known
    of them before x."""

    position: Any
    k: Any
    live: Any
    norm: Any
    scale: Any
    threshold: Any


@triton.jit
def choose_channels(
    source, masked_ptr, channels, counting, eps, ssq_parts,
    shape: tl.constexpr, modes: tl.constexpr, EACH: tl.constexpr, wide: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """For one row or two: each row's values of the program's channels, wide, which of them any row keeps, and how many
    rows that are counted keep each. EACH: a row's own dropped channels are 0, and it is counted what it keeps."""
    K: tl.constexpr = shape.k
    BATCH: tl.constexpr = shape.batch
    DENSE: tl.constexpr = modes.dense
    NORMED: tl.constexpr = source.norm is not None
    COUNT: tl.constexpr = counting is not None
    position = channels.position
    k = channels.k
    live = channels.live
    norm_weight = channels.norm
    scale = channels.scale
    threshold = channels.threshold
    if NORMED:
        ONCE: tl.constexpr = source.norm.dtype.element_ty == wide
    # All rows' inputs are on their way before the first is worked on: no read passes a write or a barrier.
    inputs = ()
    squares = ()
    for row in tl.static_range(BATCH):
        if source.stretches is not None:
            x = combined_attention(source.stretches, row, k, live, shape, dtype)
        else:
            x = tl.load(source.x + row * K + k, mask=live, other=0.0)
        inputs = inputs + (x,)  # noqa: RUF005 (the compiler knows no unpacking)
        if NORMED:
            squares = squares + (load_squares(source.ssq, row, ssq_parts, shape.ssq_pad),)  # noqa: RUF005
    keep = position < 0
    kept_rows = position * 0
    xs = ()
    for row in tl.static_range(BATCH):
        x = inputs[row]
        if NORMED:
            rstd = reciprocal_rms(squares[row], eps, K)
            x = normalise(x.to(rstd.dtype), norm_weight, rstd, dtype, ONCE)
        if not DENSE:
            limit = threshold
            if masked_ptr is not None:
                limit = threshold * tl.load(masked_ptr + row)
            # A NaN is not below anything: it is kept.
            keep_row = live & ~(tl.abs(x.to(tl.float32)) * scale < limit)
            keep = keep | keep_row
            if COUNT and EACH:
                kept_rows += (keep_row & (tl.load(counting.token + row) >= 0)).to(tl.int32)
            x = x.to(wide)
            if EACH:
                x = tl.where(keep_row, x, 0.0)
        xs = xs + (x,)  # noqa: RUF005
    return xs, keep, kept_rows


@triton.jit
def lay_values(
    values, source, masked_ptr, channels, counting, counts, eps, ssq_parts,
    shape: tl.constexpr, modes: tl.constexpr, LIST: tl.constexpr, SHARED: tl.constexpr, dtype: tl.constexpr,
    SCALE: tl.constexpr = 1.0,
):  # fmt: skip
    """Each row's values of the program's channels, times SCALE, 0 where it drops one, LIST apart; returns where, for
    ``get_half``.

    Waits for the kernel before this one, and lets the next one start. Adds what the rows keep to the program's own
    cell, at which ``counting`` points, if it ``counts``.
    """
    BATCH: tl.constexpr = shape.batch
    NORMED: tl.constexpr = source.norm is not None
    COUNT: tl.constexpr = counting is not None
    DENSE: tl.constexpr = modes.dense
    position = channels.position
    k = channels.k
    live = channels.live
    zero = wait_in_loop(ssq_parts, modes.pdl)
    kept_rows = position * 0
    kept_before = zero.to(tl.int64)
    if COUNT:
        kept_before = tl.load(counting.before, mask=counts, other=0)
    if source.stretches is not None:
        stretches = source.stretches
        stretches = Stretches(stretches.x + zero, stretches.maximum + zero, stretches.total + zero)
    else:
        x_ptr = source.x + zero
    if NORMED:
        ssq_ptr = source.ssq + zero
    for begin in tl.static_range(0, BATCH, _ROWS):
        # Several rows' inputs are on their way before the first is worked on: no read passes a write or a barrier.
        inputs = ()
        for row in tl.static_range(begin, begin + _ROWS):
            if row < BATCH:
                if source.stretches is not None:
                    x = combined_attention(stretches, row, k, live, shape, dtype)
                else:
                    x = tl.load(x_ptr + row * shape.k + k, mask=live, other=0.0)
                inputs = inputs + (x,)  # noqa: RUF005 (the compiler knows no unpacking)
        squares = ()
        if NORMED:
            if SHARED:
                hold_reads(zero)
            for row in tl.static_range(begin, begin + _ROWS):
                if row < BATCH:
                    squares = squares + (load_squares(ssq_ptr, row, ssq_parts, shape.ssq_pad),)  # noqa: RUF005
        if SHARED:
            hold_reads(zero)
        for row in tl.static_range(begin, begin + _ROWS):
            if row < BATCH:
                x = inputs[row - begin]
                if NORMED:
                    rstd = reciprocal_rms(squares[row - begin], eps, shape.k)
                    norm = channels.norm
                    x = normalise(x.to(rstd.dtype), norm.to(rstd.dtype), rstd, dtype, norm.dtype == rstd.dtype)
                if not DENSE:
                    limit = channels.threshold
                    if masked_ptr is not None:
                        limit = channels.threshold * tl.load(masked_ptr + row)
                    # A NaN is not below anything: it is kept.
                    dropped = tl.abs(x.to(tl.float32)) * channels.scale < limit
                    if COUNT:
                        kept_rows += (live & ~dropped & (tl.load(counting.token + row) >= 0)).to(tl.int32)
                    x = tl.where(dropped, 0.0, x).to(dtype)
                x = tl.where(live, x, 0.0).to(dtype)
                if SCALE != 1.0:
                    x = (x.to(tl.float32) * SCALE).to(dtype)
                put_half(values, row * LIST + position, x, position < LIST, SHARED)
    if COUNT:  # noqa: SIM102 (resolved at compile time)
        if counts:
            tl.store(counting.after, kept_before + tl.sum(kept_rows, axis=0))
    return settled(values, SHARED)
