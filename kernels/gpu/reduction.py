"""The end of a product: the programs of a tile add up, and one or a few of them write the result.

Each program leaves its partial sum in scratch memory; they are added in the order of the splits. Who adds them?

POLLERS = 0: the program that arrives last, by a counter of those that did. That takes a fence, the counter's way to the
L2 cache and back, and then the sums' own.

POLLERS > 0: that many of the tile's last programs, a part of its columns each. Scratch memory holds "nothing yet"
before a launch and after it: they look until every split's sums are there and put "nothing yet" in their place. The
numbers are their own signal, and two ways to the L2 cache fewer. But looking takes bandwidth from those that still read
weights, and programs that look hold their places on the chip. All others end without waiting for anybody, so those that
look end too, as long as they leave room for the ones that are still to begin: ``GemvTile`` says how many there may be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import TO_GELU, TO_RESIDUAL, TO_SILU

# All bits set. As a number that is a NaN, though none that arithmetic results in, nor one that is ever left.
NOTHING = -1
_NOTHING = tl.constexpr(NOTHING)
_NAN32 = tl.constexpr(0x7FC00000)
_NAN64 = tl.constexpr(0x7FF8000000000000)


@triton.jit
def leave_partial(partial_ptr, place, y, mask):
    """Leave partial sums where ``add_up`` looks for them: (SPLITS, B, N) integers as wide as y's numbers."""
    bits = y.to(partial_ptr.dtype.element_ty, bitcast=True)
    nan = _NAN64 if partial_ptr.dtype.element_ty == tl.int64 else _NAN32
    tl.store(partial_ptr + place, tl.where(bits == _NOTHING, nan, bits), mask=mask)


@triton.jit
def leave_four(at, a, b, c, d, wanted):
    """The same for four neighbouring float32 sums of each thread, the first at a multiple of 16 bytes."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r",
        [at.to(tl.int64), _left(a), _left(b), _left(c), _left(d), wanted.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _left(y):
    bits = y.to(tl.int32, bitcast=True)
    return tl.where(bits == _NOTHING, _NAN32, bits)


@triton.jit
def add_up(
    split, tile, of, bias_ptr, target, memory, wide: tl.constexpr,
    shape: tl.constexpr, modes: tl.constexpr, cut: tl.constexpr, AT_ONCE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """What each program ends with: one of its tile's, or a few, add up the partial sums of all and write the result,
    row by row or, TOGETHER, all rows in one tensor.

    ``of``: the tile's ``Columns``; AT_ONCE: splits whose sums are read in one turn.
    """
    IN_PAIRS: tl.constexpr = modes.output >= TO_SILU
    SPLITS: tl.constexpr = cut.splits
    PARTS: tl.constexpr = cut.pollers if cut.pollers > 0 else 1
    PART: tl.constexpr = cut.block_n // PARTS
    counter_ptr = memory.counter
    if counter_ptr is not None:
        counter_ptr += of.local if IN_PAIRS else tile
    turn = _writers_turn(
        split + of.projection * SPLITS if IN_PAIRS else split,
        counter_ptr,
        SPLITS * 2 if IN_PAIRS else SPLITS,
        cut.pollers,
    )
    if turn >= 0:
        n = of.local * cut.block_n + turn * PART + tl.arange(0, PART)
        live = n < of.width
        # Of partial sums and bias; with gate and up gate's, n0 before up's.
        columns = n if IN_PAIRS else of.first + n
        place = tile * PARTS + turn
        if TOGETHER:
            _write_rows_together(
                columns, live, place, bias_ptr, target, memory.partial, wide, shape, modes, cut, AT_ONCE
            )
        else:
            _write_row_by_row(columns, live, place, bias_ptr, target, memory.partial, wide, shape, modes, cut, AT_ONCE)


@triton.jit
def _writers_turn(arrival, counter_ptr, ARRIVALS: tl.constexpr, POLLERS: tl.constexpr):
    """Which part of its tile's columns this program writes, from 0; negative: none.

    ``arrival``: which of the ARRIVALS programs it is that leave sums for the tile (with gate and up, the two tiles);
    the last POLLERS of them write. ``counter_ptr``: the tile's, 0 before and after; None with POLLERS.
    """
    if POLLERS > 0:
        turn = arrival - (ARRIVALS - POLLERS)
    else:
        tl.debug_barrier()
        if ARRIVALS > 1:
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
            turn = tl.where(arrived == ARRIVALS, 0, -1)
            tl.store(counter_ptr, 0, mask=arrived == ARRIVALS)
        else:
            turn = arrival
    return turn


@triton.jit
def _write_row_by_row(
    columns, live, place, bias_ptr, target, partial_ptr, wide: tl.constexpr,
    shape: tl.constexpr, modes: tl.constexpr, cut: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """``columns``: those of partial sums and bias; ``place``: where the sums of squares go, TO_RESIDUAL only."""
    BATCH: tl.constexpr = shape.batch
    PART: tl.constexpr = columns.shape[0]
    SSQ_PARTS: tl.constexpr = shape.tiles * (cut.block_n // PART)
    dtype: tl.constexpr = target.out.dtype.element_ty
    IN_PAIRS: tl.constexpr = modes.output >= TO_SILU
    OUT_N: tl.constexpr = shape.n0 if IN_PAIRS else shape.n
    EACH: tl.constexpr = 2 if IN_PAIRS else 1
    hidden = ()
    if modes.output == TO_RESIDUAL:  # on its way meanwhile
        for row in tl.static_range(BATCH):
            hidden = hidden + (tl.load(target.out + row * shape.n + columns, mask=live, other=0.0),)  # noqa: RUF005
    # One sum for each row, or two: gate's, then up's.
    sums = ()
    for _ in tl.static_range(BATCH * EACH):
        sums = sums + (tl.zeros((PART,), wide),)  # noqa: RUF005
    for start in tl.range(0, cut.splits, AT_ONCE, num_stages=1):
        # First all reads, so that one way to the L2 cache serves them, then the waiting.
        places = ()
        found = ()
        for i in tl.static_range(BATCH * EACH):
            at, there = _places(partial_ptr, columns + i % EACH * shape.n0, live, i // EACH, start, shape, cut, AT_ONCE)
            places = places + ((at, there),)  # noqa: RUF005
            found = found + (_look(at, there, cut.pollers),)  # noqa: RUF005
        added = ()
        for i in tl.static_range(BATCH * EACH):
            at, there = places[i]
            added = added + (sums[i] + _take(found[i], at, there, wide, cut.pollers),)  # noqa: RUF005
        sums = added
    for row in tl.static_range(BATCH):
        # Gate's and up's; else the same one twice, and the second is not looked at.
        y = _finished(sums[row * EACH], sums[row * EACH + EACH - 1], bias_ptr, columns, live, wide, dtype, shape, modes)
        if modes.output == TO_RESIDUAL:
            y = (hidden[row].to(wide) + y.to(wide)).to(dtype)
            squares = tl.where(live, y.to(wide) * y.to(wide), 0.0)
            tl.store(target.ssq + row * SSQ_PARTS + place, tl.sum(squares, axis=0))
        tl.store(target.out + row * OUT_N + columns, y, mask=live)


@triton.jit
def _write_rows_together(
    columns, live, place, bias_ptr, target, partial_ptr, wide: tl.constexpr,
    shape: tl.constexpr, modes: tl.constexpr, cut: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The same for many rows, which are waited for together."""
    BATCH: tl.constexpr = shape.batch
    PART: tl.constexpr = columns.shape[0]
    SSQ_PARTS: tl.constexpr = shape.tiles * (cut.block_n // PART)
    dtype: tl.constexpr = target.out.dtype.element_ty
    IN_PAIRS: tl.constexpr = modes.output >= TO_SILU
    OUT_N: tl.constexpr = shape.n0 if IN_PAIRS else shape.n
    ROWS: tl.constexpr = triton.next_power_of_2(BATCH)
    row = tl.arange(0, ROWS)
    there = (row < BATCH)[:, None] & live[None, :]
    out_at = target.out + row[:, None] * OUT_N + columns[None, :]
    hidden = tl.zeros((ROWS, PART), dtype)
    if modes.output == TO_RESIDUAL:  # on its way meanwhile
        hidden = tl.load(out_at, mask=there, other=0.0)
    y = tl.zeros((ROWS, PART), wide)
    up = tl.zeros((ROWS, PART), wide)
    for start in tl.range(0, cut.splits, AT_ONCE, num_stages=1):
        split = start + tl.arange(0, AT_ONCE)
        at = partial_ptr + (split[:, None] * BATCH + row[None, :])[:, :, None] * shape.n + columns[None, None, :]
        wanted = (split < cut.splits)[:, None, None] & there[None, :, :]
        found = _look(at, wanted, cut.pollers)
        if IN_PAIRS:
            found_up = _look(at + shape.n0, wanted, cut.pollers)
            up += _take(found_up, at + shape.n0, wanted, wide, cut.pollers)
        y += _take(found, at, wanted, wide, cut.pollers)
    y = _finished(y, up, bias_ptr, columns[None, :], live[None, :], wide, dtype, shape, modes)
    if modes.output == TO_RESIDUAL:
        y = (hidden.to(wide) + y.to(wide)).to(dtype)
        squares = tl.where(there, y.to(wide) * y.to(wide), 0.0)
        tl.store(target.ssq + row * SSQ_PARTS + place, tl.sum(squares, axis=1), mask=row < BATCH)
    tl.store(out_at, y, mask=there)


@triton.jit
def _finished(
    y, up, bias_ptr, columns, live, wide: tl.constexpr, dtype: tl.constexpr, shape: tl.constexpr, modes: tl.constexpr
):  # fmt: skip
    """Sums with their bias, or gate's and ``up``'s as one, in dtype."""
    y = _with_bias(y, bias_ptr, columns, live).to(dtype)
    if modes.output >= TO_SILU:
        up = _with_bias(up, bias_ptr, shape.n0 + columns, live)
        y = _activated_product(y, up, modes.output, wide, dtype)
    return y


@triton.jit
def _activated_product(gate, up, OUTPUT: tl.constexpr, wide: tl.constexpr, dtype: tl.constexpr):
    """activation(gate) * up, rounded as the projections' outputs are."""
    gate = gate.to(wide)
    if OUTPUT == TO_GELU:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with 2 u = sqrt(8 / pi) * (gate + 0.044715 gate**3)
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = (gate / (1.0 + tl.exp(-twice))).to(dtype).to(wide)
    else:
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(wide)
    return (activated * up.to(dtype).to(wide)).to(dtype)


@triton.jit
def _places(
    partial_ptr, columns, live, row, start, shape: tl.constexpr, cut: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Where AT_ONCE splits' partial sums of a row lie, and which of them there are."""
    split = start + tl.arange(0, AT_ONCE)
    at = partial_ptr + (split * shape.batch + row)[:, None] * shape.n + columns[None, :]
    return at, (split < cut.splits)[:, None] & live[None, :]


@triton.jit
def _look(at, there, POLLERS: tl.constexpr):
    """Partial sums as they are now, read past L1: other multiprocessors write them."""
    if POLLERS > 0:
        found = tl.load(at, mask=there, other=0, volatile=True)
    else:
        found = tl.load(at, mask=there, other=0, cache_modifier=".cg")
    return found


@triton.jit
def _take(found, at, there, wide: tl.constexpr, POLLERS: tl.constexpr):
    """The sum over the splits; if it has to be waited for, "nothing yet" stands in its place again."""
    if POLLERS > 0:
        while tl.max((found == _NOTHING).to(tl.int32)) > 0:
            found = tl.load(at, mask=found == _NOTHING, other=found, volatile=True)
        tl.store(at, tl.full(found.shape, _NOTHING, found.dtype), mask=there)
    return tl.sum(found.to(wide, bitcast=True), axis=0)


@triton.jit
def _with_bias(y, bias_ptr, columns, live):
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=live, other=0.0).to(y.dtype)
    return y
