"""The kernel of ``gemv`` for weights in codes, one to sixteen rows of x, on the tensor cores.

Written one element a thread: what a tensor here holds at i is thread i's. A warp owns 8 times so many columns as a lane
reads of a channel, and takes 16 channels of its program's at a time, a few
turns of one to four such steps being on their way: lane 4 g + t reads t's four channels, g's columns
of each (``mma`` says what becomes of them). Weights are the product's left operand, x's rows its right one, so one to
eight rows cost the same; one, two or four are there several times, and the lanes that hold the same sums see to a part
of the columns each.

The channels are chosen as in ``gemv_kernel``. Those of a group of scales have a slot of their own in the list, and a
step never spans two; at a slot's end its sums are scaled and added to the result's. Programs of one tile add up as
in ``gemv_kernel``, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Counting
from ..common import let_next_kernel_start, segment_channel, segment_length, tile_columns, wait_for_previous_kernel
from ..lists import get, hold_reads, put, put_half, room, settled
from .codes import code_columns
from .matrix import COLUMN_BLOCK, MIDDLE
from .mma import INT8_OFFSET
from .partials import add_up, leave_four, leave_partial
from .selection import Channels, choose_channels, lay_values

__all__ = ["packed_gemv_kernel"]

_BLOCK = tl.constexpr(COLUMN_BLOCK)
_INT4_MIDDLE = tl.constexpr(float(MIDDLE["int4"]))
_INT8_OFFSET = tl.constexpr(float(INT8_OFFSET))


@triton.jit(do_not_specialize=["ssq_parts"], do_not_specialize_on_alignment=["counting"])
def packed_gemv_kernel(
    source,  # as for sparse_gemv_kernel
    weights,
    masked_ptr,
    target,
    memory,
    counting,
    eps,
    ssq_parts,
    shape: tl.constexpr,
    modes: tl.constexpr,
    cut: tl.constexpr,  # GemvTile, chunk a multiple of 16 and of the group
    lists: tl.constexpr,  # PackedLists
    AT_ONCE: tl.constexpr,
):
    K: tl.constexpr = shape.k
    BATCH: tl.constexpr = shape.batch
    BLOCK_N: tl.constexpr = cut.block_n
    SPLITS: tl.constexpr = cut.splits
    CHUNK: tl.constexpr = cut.chunk
    SEGMENT: tl.constexpr = lists.segment
    LIST: tl.constexpr = lists.length
    SLOT: tl.constexpr = lists.slot
    LISTED: tl.constexpr = lists.listed
    GROUPED: tl.constexpr = modes.group < K
    EACH: tl.constexpr = 8 if modes.codes == "int4" else 4
    COLUMNS: tl.constexpr = lists.words * EACH  # a lane's
    PART: tl.constexpr = COLUMNS // lists.copies  # those whose sums it sees to
    PARTS: tl.constexpr = (BATCH + 7) // 8  # rows of x in eights
    ROWS: tl.constexpr = 8 // lists.copies  # different rows among eight
    TURN: tl.constexpr = 16 * lists.steps
    READ: tl.constexpr = 4 * lists.words * lists.steps  # words of a turn
    AHEAD: tl.constexpr = lists.ahead
    dtype: tl.constexpr = target.out.dtype.element_ty
    program = tl.program_id(0)
    tile = program % shape.tiles
    split = program // shape.tiles
    of = tile_columns(tile, shape.n0, shape.n1, shape.n2, BLOCK_N)

    # --- a lane's place: the columns it reads, those it sees to, and its rows
    thread = tl.arange(0, 32 * cut.warps)
    g = thread % 32 // 4
    t = thread % 4
    column = of.local * BLOCK_N + thread // 32 * (8 * COLUMNS) + g * COLUMNS
    padded = (of.width + _BLOCK - 1) // _BLOCK * _BLOCK
    limit = tl.where(column < padded, K, 0)  # a warp beyond the projection reads nothing
    word_at = weights.weight_t.to(tl.int64) + code_columns(of, column, shape).to(tl.int64) // EACH * 4
    copy = 2 * t // ROWS
    mine = column + copy * PART
    scale_at = code_columns(of, mine, shape)
    there = mine < padded

    # --- this program's channels, as in sparse_gemv_kernel
    position = tl.arange(0, SEGMENT)
    k = segment_channel(position, split, SPLITS, CHUNK)
    live = k < K
    count = segment_length(split, K, SPLITS, CHUNK)
    slots = count // SLOT if GROUPED else 1
    norm_weight = k
    scale = k
    wide: tl.constexpr = tl.float32
    threshold = tl.load(weights.thresholds + of.projection)
    if source.norm is not None:
        norm_weight = tl.load(source.norm + k, mask=live, other=0.0)
        if LISTED:
            ONCE: tl.constexpr = source.norm.dtype.element_ty == wide
            norm_weight = norm_weight.to(wide if ONCE else tl.float32)
    if not modes.dense:
        scale = tl.load(weights.scales + of.projection * K + k, mask=live, other=0.0)
    channels = Channels(position, k, live, norm_weight, scale, threshold)
    counts = of.local == 0
    cell = of.projection * SPLITS + split
    ends = _scales(weights, scale_at, there, 0, split, PART, shape, modes, cut, lists)
    ROOM: tl.constexpr = lists.in_room
    base = room(ROOM, program)
    if LISTED:
        for start in tl.static_range(0, LIST, SEGMENT):
            place = start + position
            put(base, place, tl.full((SEGMENT,), K, tl.int32), place < LIST, True)
        for start in tl.static_range(0, BATCH * LIST // 2, SEGMENT):
            place = start + position
            put(base + LIST * 4, place, position * 0, place < BATCH * LIST // 2, True)
        tl.debug_barrier()
        wait_for_previous_kernel(modes.pdl)
        if cut.trigger == 1:
            let_next_kernel_start(modes.pdl)
        xs, keep, kept_rows = choose_channels(
            source, masked_ptr, channels, counting, eps, ssq_parts, shape, modes, True, wide, dtype
        )
        rank = keep.to(tl.int32)
        if SLOT < SEGMENT:
            rank = tl.reshape(tl.cumsum(tl.reshape(rank, (SEGMENT // SLOT, SLOT)), axis=1), (SEGMENT,))
        else:
            rank = tl.cumsum(rank, axis=0)
        place = position // SLOT * SLOT + rank - 1
        put(base, place, k, keep, True)
        for row in tl.static_range(BATCH):
            x = (xs[row] * lists.value_scale).to(dtype)
            put_half(base + LIST * 4, row * LIST + place, x, keep, True)
        put(base + LIST * (4 + 2 * BATCH), position // SLOT, rank, position % SLOT == SLOT - 1, True)
        base = settled(base, True)
        kept_at = base + LIST * (4 + 2 * BATCH)
        index = base + 16 * t
        values = base + LIST * 4
    else:
        index = 4 * t
        kept_at = base
    ahead = ()
    coming = split * 0
    for _ in tl.static_range(AHEAD):
        # Without a list they do not depend on x: the memory would be idle until it is there.
        ahead = ahead + _words(index, word_at, limit, coming, split, SPLITS, CHUNK, lists)
        coming = _next_turn(coming, kept_at, GROUPED, lists)
    if not LISTED:
        cells = None
        if counting is not None:
            cells = Counting(counting.token, counting.before + cell, counting.after + cell)
        values = lay_values(
            base, source, masked_ptr, channels, cells, counts, eps, ssq_parts, shape, modes, LIST, True, dtype,
            lists.value_scale,
        )  # fmt: skip

    # --- the product
    # Rows that are not there repeat the last; nobody looks at their sums.
    values += tl.minimum(g % ROWS, BATCH - 1) * (2 * LIST) + 8 * t
    sums = _zeros(thread, PART * PARTS * (1 if BATCH == 1 else 2))
    for slot in range(slots):
        scaled_by = ends
        first = slot * SLOT
        last = first + tl.minimum(count - first, SLOT)
        if LISTED:
            last = first + tl.maximum(get(kept_at, slot, False, True), 1)
        if GROUPED:
            ends = _scales(weights, scale_at, there, slot + 1, split, PART, shape, modes, cut, lists)
        acc = _zeros(thread, lists.words * EACH * 2 * PARTS)
        total = _zeros(thread, 4 * PARTS)
        for at in range(first, last, TURN):
            words = _some(ahead, 0, READ)
            ahead = _some(ahead, READ, READ * AHEAD)
            ahead = ahead + _words(index, word_at, limit, coming, split, SPLITS, CHUNK, lists)
            coming = _next_turn(coming, kept_at, GROUPED, lists)
            hold_reads(program)
            acc, total = _multiply(acc, total, words, values, at, LIST, PARTS, BATCH, g, ROWS, lists)
        sums = _scaled(sums, acc, total, scaled_by, copy, PART, PARTS, BATCH, weights.zeros is not None, lists, modes)
    if LISTED and cut.trigger == 2:
        let_next_kernel_start(modes.pdl)

    # --- what follows it
    FOUR: tl.constexpr = PART % 4 == 0 and shape.n0 % 4 + shape.n1 % 4 + shape.n2 % 4 == 0
    SECONDS: tl.constexpr = 1 if BATCH == 1 else 2
    for part in tl.static_range(PARTS):
        for second in tl.static_range(SECONDS):
            row = 8 * part + 2 * t % ROWS + second
            at = (split * BATCH + row) * shape.n + of.first + mine
            for i in tl.static_range(0, PART, 4 if FOUR else 1):
                wanted = (mine + i < of.width) & (row < BATCH)
                _leave(memory.partial + at + i, sums, (part * SECONDS + second) * PART + i, wanted, FOUR)
    if LISTED and counting is not None:
        kept_before = tl.load(counting.before + cell, mask=counts, other=0)
        tl.store(counting.after + cell, kept_before + tl.sum(kept_rows, axis=0), mask=counts)
    add_up(split, tile, of, weights.bias, target, memory, wide, shape, modes, cut, AT_ONCE, BATCH > 2)


@triton.jit
def _leave(at, sums, FIRST: tl.constexpr, wanted, FOUR: tl.constexpr):
    """Leave four of a thread's sums side by side, or one."""
    if FOUR:
        leave_four(at, sums[FIRST], sums[FIRST + 1], sums[FIRST + 2], sums[FIRST + 3], wanted)
    else:
        leave_partial(at, 0, sums[FIRST], wanted)


@triton.jit
def _zeros(thread, COUNT: tl.constexpr):
    """So many zeros for each thread."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (thread.to(tl.float32) * 0.0,)  # noqa: RUF005 (the compiler knows no unpacking)
    return zeros


@triton.jit
def _some(items, FIRST: tl.constexpr, END: tl.constexpr):
    """Those of a tuple from FIRST to END."""
    some = ()
    for i in tl.static_range(FIRST, END):
        some = some + (items[i],)  # noqa: RUF005
    return some


@triton.jit
def _next_turn(at, kept_at, GROUPED: tl.constexpr, lists: tl.constexpr):
    """Where the turn after the one at ``at`` begins: at the next slot's begin if that is its slot's last; after the
    last of all, where there are no channels."""
    TURN: tl.constexpr = 16 * lists.steps
    following = at + TURN
    if lists.listed and GROUPED:
        SLOTS: tl.constexpr = lists.segment // lists.slot
        slot = tl.minimum(at // lists.slot, SLOTS - 1)
        last = slot * lists.slot + get(kept_at, slot, False, True)
        following = tl.where(following < last, following, (slot + 1) * lists.slot)
    return tl.minimum(following, lists.length - TURN)


@triton.jit
def _words(
    index, word_at, limit, at, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr, lists: tl.constexpr
):  # fmt: skip
    """The words of the channels at the places ``at`` .. of the list: step by step, of each its four channels'."""
    LOAD: tl.constexpr = lists.load
    CONSTRAINTS: tl.constexpr = lists.load_constraints
    FOUND: tl.constexpr = 4 * lists.words
    STEPS: tl.constexpr = lists.steps
    words = ()
    for step in tl.static_range(STEPS):
        if lists.listed:
            where = index + (at + 16 * step) * 4
        else:
            where = index + segment_channel(at + 16 * step, split, SPLITS, CHUNK)
        words = words + tl.inline_asm_elementwise(
            LOAD, CONSTRAINTS, [where, word_at, limit],
            dtype=(tl.int32,) * FOUND, is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _multiply(
    acc, total, words, values, at, LIST: tl.constexpr, PARTS: tl.constexpr, BATCH: tl.constexpr, g,
    ROWS: tl.constexpr, lists: tl.constexpr,
):  # fmt: skip
    """The sums, and x's own if they are asked for, with the channels at the places ``at`` .. added."""
    WORDS: tl.constexpr = lists.words
    SUMS: tl.constexpr = lists.sums  # of one word
    STEPS: tl.constexpr = lists.steps
    PRODUCT: tl.constexpr = lists.product
    PRODUCT_CONSTRAINTS: tl.constexpr = lists.product_constraints
    TOTAL: tl.constexpr = lists.total
    TOTAL_CONSTRAINTS: tl.constexpr = lists.total_constraints
    for step in tl.static_range(STEPS):
        xs = ()
        for part in tl.static_range(PARTS):
            place = values + (at + 16 * step) * 2
            if part > 0:
                place += (tl.minimum(g, BATCH - 9) + 8 - g) * (2 * LIST)
            xs = xs + tl.inline_asm_elementwise(
                "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [place],
                dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
        added = ()
        for i in tl.static_range(WORDS):
            given = ()
            for channel in tl.static_range(4):
                given = given + (words[(step * 4 + channel) * WORDS + i],)  # noqa: RUF005
            given = given + xs
            for j in tl.static_range(SUMS):
                given = given + (acc[i * SUMS + j],)  # noqa: RUF005
            added = added + tl.inline_asm_elementwise(
                PRODUCT, PRODUCT_CONSTRAINTS, given,
                dtype=(tl.float32,) * SUMS, is_pure=False, pack=1,
            )  # fmt: skip
        acc = added
        if TOTAL != "":
            summed = ()
            for part in tl.static_range(PARTS):
                summed = summed + tl.inline_asm_elementwise(
                    TOTAL, TOTAL_CONSTRAINTS,
                    [xs[2 * part], xs[2 * part + 1], total[4 * part], total[4 * part + 1], total[4 * part + 2],
                     total[4 * part + 3]],
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
                )  # fmt: skip
            total = summed
    return acc, total


@triton.jit
def _scales(
    weights, scale_at, there, slot, split, PART: tl.constexpr,
    shape: tl.constexpr, modes: tl.constexpr, cut: tl.constexpr, lists: tl.constexpr,
):  # fmt: skip
    """A slot's scales of a lane's part of the columns, then, if there are any, its zero points."""
    EACH: tl.constexpr = 8 if modes.codes == "int4" else 4
    COLUMNS: tl.constexpr = shape.stride * EACH
    GROUPS: tl.constexpr = shape.k // modes.group
    group = 0
    if GROUPS > 1:
        group = tl.minimum(segment_channel(slot * lists.slot, split, cut.splits, cut.chunk) // modes.group, GROUPS - 1)
    found = _floats(weights.code_scales + group * COLUMNS + scale_at, there, PART)
    if weights.zeros is not None:
        found = found + _floats(weights.zeros + group * COLUMNS + scale_at, there, PART)
    return found


@triton.jit
def _floats(at, there, COUNT: tl.constexpr):
    """COUNT neighbouring constants of each thread; undefined where it has none."""
    found = ()
    if COUNT % 4 == 0:
        for i in tl.static_range(0, COUNT, 4):
            found = found + tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }",
                "=f,=f,=f,=f,l,r", [(at + i).to(tl.int64), there.to(tl.int32)],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
            )  # fmt: skip
    else:
        for i in tl.static_range(COUNT):
            found = found + (tl.load(at + i, mask=there, other=0.0),)  # noqa: RUF005
    return found


@triton.jit
def _scaled(
    sums, acc, total, ends, copy, PART: tl.constexpr, PARTS: tl.constexpr, BATCH: tl.constexpr,
    ZEROS: tl.constexpr, lists: tl.constexpr, modes: tl.constexpr,
):  # fmt: skip
    """sums + scale * (acc - zero * total), for a lane's part of the columns and its row or two of each eight."""
    INT4: tl.constexpr = modes.codes == "int4"
    EACH: tl.constexpr = 8 if INT4 else 4
    EVEN: tl.constexpr = 1.0 / lists.unit
    ODD: tl.constexpr = EVEN / 16.0
    ROWS: tl.constexpr = 1 if BATCH == 1 else 2
    COPIES: tl.constexpr = lists.copies
    added = ()
    for part in tl.static_range(PARTS):
        for second in tl.static_range(ROWS):
            for i in tl.static_range(PART):
                value = _sum_of(acc, i, second, part, EACH, PARTS)
                for other in tl.static_range(1, COPIES):
                    value = tl.where(copy == other, _sum_of(acc, other * PART + i, second, part, EACH, PARTS), value)
                value = value * (ODD if INT4 and i % 2 == 1 else EVEN)
                if modes.codes != "fp8":
                    x = total[4 * part + second] * EVEN
                    if INT4:
                        value -= (ends[PART + i] if ZEROS else _INT4_MIDDLE) * x
                    else:
                        value -= (_INT8_OFFSET + ends[PART + i] if ZEROS else _INT8_OFFSET) * x
                before = sums[(part * ROWS + second) * PART + i]
                added = added + (before + ends[i] * value,)  # noqa: RUF005
    return added


@triton.jit
def _sum_of(
    acc, COLUMN: tl.constexpr, SECOND: tl.constexpr, PART: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The sum of a lane's column and row, of those that ``mma.product_source`` names, word by word."""
    PAIRS: tl.constexpr = EACH // 2
    PAIR: tl.constexpr = (COLUMN // EACH * PARTS + PART) * PAIRS + COLUMN % EACH // 2
    AT: tl.constexpr = 4 * PAIR + COLUMN % 2 * 2 + SECOND
    return acc[AT]
