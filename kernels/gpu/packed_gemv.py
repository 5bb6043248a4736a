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

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .common import (
    Counting,
    get,
    hold_reads,
    let_next_kernel_start,
    put,
    put_half,
    room,
    room_source,
    segment_channel,
    segment_length,
    settled,
    tile_columns,
    wait_for_previous_kernel,
)
from .matrix import CODE_BITS, COLUMN_BLOCK, MIDDLE, GemvTile, Layout, code_columns
from .reduction import add_up, leave_four, leave_partial
from .selection import Channels, choose_channels, lay_values

_TYPES = {"bfloat16": "bf16", "float16": "f16"}
# The smallest number twice.
_ONES = 0x00010001
# What an int8 code's bits are more than it.
INT8_OFFSET = 128
# How far fp8's seven lower bits are moved, so that its exponent ends where the wider type's does, and the power of two
# that the number then is too small by.
_FP8 = {"bfloat16": (4, 120), "float16": (7, 8)}
_SMALLEST = {"bfloat16": -133, "float16": -24}
# x of bfloat16 times this is infinite from 2^32 on; a product with the smallest code is a normal number down to 2^-89.
_VALUE_BITS = {"bfloat16": 96, "float16": 0}


def value_scale(dtype: str) -> float:
    """What x is multiplied by before the product, exactly."""
    return 2.0 ** _VALUE_BITS[dtype]


def code_unit(kind: str, dtype: str) -> float:
    """What the products' sums are multiples of; of int4's odd columns 16 times it."""
    return 2.0 ** (_VALUE_BITS[dtype] + (-_FP8[dtype][1] if kind == "fp8" else _SMALLEST[dtype]))


def load_source(words: int, stride: int, listed: bool, whole: bool) -> tuple[str, str]:
    """Source and constraints: the words of four channels, channel by channel; undefined where there is no channel.

    Args:
        words: a lane reads so many of each channel: 1, 2 or 4.
        stride: words of a channel.
        listed: the channels stand in a list in shared memory; else they are neighbours.
        whole: the number of channels is a multiple of 16.

    Operands: out 4 * words; in: the list's address or the first channel; the address of channel 0's first word; from
    which channel on there are none.
    """
    n = 4 * words
    vector = {1: "", 2: ".v2", 4: ".v4"}[words]
    lines = ["{ .reg .b32 k<4>; .reg .b64 a<4>; .reg .pred p<4>;"]
    if listed:
        lines.append(f"ld.shared.v4.b32 {{k0, k1, k2, k3}}, [${n}];")
    else:
        lines += [f"add.u32 k{i}, ${n}, {i};" for i in range(4)]
    for i in range(4):
        out = ", ".join(f"${i * words + w}" for w in range(words))
        p = 0 if whole and not listed else i
        if p == i:
            lines.append(f"setp.lt.u32 p{i}, k{i}, ${n + 2};")
        if listed or i == 0:
            lines.append(f"mad.wide.u32 a{i}, k{i}, {4 * stride}, ${n + 1};")
            at = f"a{i}"
        else:
            at = f"a0+{i * 4 * stride}"
        lines.append(f"@p{p} ld.global.nc.L1::no_allocate{vector}.b32 {{{out}}}, [{at}];")
    return " ".join(lines) + " }", ",".join(["=r"] * n + ["r", "l", "r"])


def product_source(kind: str, dtype: str, parts: int) -> tuple[str, str]:
    """Source and constraints: one word of each of four channels, times x, added to sums.

    Args:
        kind: of the codes.
        dtype: of x: ``bfloat16`` or ``float16``.
        parts: rows of x in eights.

    Operands: out the sums: for each part, for each two columns of the word, the first column's two rows and the
    second's; in: the four words, x's two registers of each part, the sums before.
    """
    pairs = 4 if kind == "int4" else 2
    sums = 4 * pairs * parts
    word = [f"${sums + c}" for c in range(4)]
    x = [f"{{${sums + 4 + 2 * part}, ${sums + 5 + 2 * part}}}" for part in range(parts)]
    before = sums + 4 + 2 * parts
    lines = ["{ .reg .b32 p<2>, s<2>, a<4>;"]
    for pair in range(pairs):
        for second in range(2):
            lines += _unpack(kind, dtype, word, 2 * pair + second, (f"a{second}", f"a{second + 2}"))
        for part in range(parts):
            at = 4 * (part * pairs + pair)
            d = ", ".join(f"${at + i}" for i in range(4))
            c = ", ".join(f"${before + at + i}" for i in range(4))
            lines.append(_mma(dtype, d, "a0, a1, a2, a3", x[part], c))
    return " ".join(lines) + " }", ",".join(["=f"] * sums + ["r"] * (4 + 2 * parts) + ["f"] * sums)


def sum_source(dtype: str) -> tuple[str, str]:
    """Source and constraints: x's rows added up, in integers' unit. Out: four sums, the first two of rows 2 t and
    2 t + 1; in: x's two registers, the sums before."""
    lines = ["{ .reg .b32 a;", f"mov.b32 a, {_ONES:#x};"]
    lines.append(_mma(dtype, "$0, $1, $2, $3", "a, a, a, a", "{$4, $5}", "$6, $7, $8, $9"))
    return " ".join(lines) + " }", ",".join(["=f"] * 4 + ["r"] * 2 + ["f"] * 4)


def _mma(dtype: str, d: str, a: str, b: str, c: str) -> str:
    of = _TYPES[dtype]
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 {{{d}}}, {{{a}}}, {b}, {{{c}}};"


def _unpack(kind: str, dtype: str, word: list[str], column: int, out: tuple[str, str]) -> list[str]:
    """One column of the four channels, two in each register of ``out``."""
    byte = column // 2 if kind == "int4" else column
    lines = []
    for i in range(2):
        if kind != "int4" or column % 2 == 0:
            # The byte twice, in both halves' both bytes: whatever is not wanted is masked.
            selector = f"{(4 + byte) * 0x1100 + byte * 0x11:#x}"
            lines.append(f"prmt.b32 p{i}, {word[2 * i]}, {word[2 * i + 1]}, {selector};")
        if kind == "int4":
            lines.append(f"and.b32 {out[i]}, p{i}, {0x00F000F0 if column % 2 else 0x000F000F:#x};")
        elif kind == "int8":
            lines.append(f"lop3.b32 {out[i]}, p{i}, 0x00ff00ff, {INT8_OFFSET * 0x10001:#x}, 0x6a;")
        else:
            lines.append(f"and.b32 s{i}, p{i}, 0x007f007f;")
            lines.append(f"shl.b32 s{i}, s{i}, {_FP8[dtype][0]};")
            lines.append(f"lop3.b32 {out[i]}, p{i}, 0x80008000, s{i}, 0xea;")
    return lines


class PackedLists(NamedTuple):
    """What a program keeps of its channels, and how it multiplies them.

    ``segment``, ``length``, ``in_room``: as of ``ProgramLists``. ``listed``: the kept channels stand in a list,
    ``slot`` places of it for each group of scales; else all are read. ``words``: a lane reads so many of a channel.
    ``steps`` of 16 channels are a turn; ``ahead`` turns are on their way. ``copies`` of each row stand among eight.
    ``sums``: of one word, for which ``product`` is the source; ``load`` and ``total`` as in ``mma``, "" if no sum of x
    is needed. ``value_scale``: what x is multiplied by; ``unit``: of the sums.
    """

    segment: int
    length: int
    in_room: str
    listed: bool
    slot: int
    words: int
    steps: int
    ahead: int
    copies: int
    sums: int
    value_scale: float
    unit: float
    load: str
    load_constraints: str
    product: str
    product_constraints: str
    total: str
    total_constraints: str


def packed_chunk(layout: Layout, tile: GemvTile) -> int:
    """Channels that are dealt at a time: whole steps, and whole groups."""
    unit = 16 if layout.group == layout.in_features else layout.group
    return triton.cdiv(tile.chunk, unit) * unit


@lru_cache
def packed_lists(layout: Layout, tile: GemvTile, batch: int) -> PackedLists | None:
    """The lists of a launch's programs; None where the plain kernels do it: interpreted or float32, before generation
    8.0, a group that is no power of two of at least 16, a tile whose warps do not read 4, 8 or 16 bytes a lane, lists
    that are too long."""
    group, k = layout.group, layout.in_features
    grouped = group < k
    words, rest = divmod(tile.block_n * CODE_BITS.get(layout.codes, 0), 32 * 8 * tile.warps)
    if layout.codes == "plain" or layout.dtype == torch.float32 or not _has_tensor_cores(layout.device):
        return None
    if rest or words not in (1, 2, 4) or (grouped and (group < 16 or group & (group - 1))):
        return None
    listed = not layout.dense and batch <= 2
    chunk = packed_chunk(layout, tile)
    channels = triton.cdiv(triton.cdiv(k, chunk), tile.splits) * chunk
    steps = 1
    while 2 * steps <= min(tile.unroll, 4) and (not grouped or 32 * steps <= group):
        steps *= 2
    turn = 16 * steps
    segment = triton.next_power_of_2(max(channels, turn))
    # Rows 32 bytes off a multiple of 128: eight of them side by side meet in no bank. One turn is read ahead.
    length = triton.cdiv(triton.cdiv(channels, turn) * turn + turn - 16, 64) * 64 + 16
    slot = group if grouped else segment
    needed = (4 + 2 * batch) * length + 4 * (segment // slot) if listed else 2 * batch * length
    in_room = room_source(needed)
    if in_room == "":
        return None
    dtype = str(layout.dtype).removeprefix("torch.")
    parts = triton.cdiv(batch, 8)
    different = max(2, triton.next_power_of_2(min(batch, 8)))
    sums = 4 * (4 if layout.codes == "int4" else 2) * parts
    total = sum_source(dtype) if layout.codes != "fp8" else ("", "")
    return PackedLists(
        segment, length, in_room, listed, slot, words, steps, tile.stages, 8 // different, sums,
        value_scale(dtype), code_unit(layout.codes, dtype),
        *load_source(words, layout.stride, listed, k % 16 == 0), *product_source(layout.codes, dtype, parts), *total,
    )  # fmt: skip


def _has_tensor_cores(device: torch.device) -> bool:
    """Those that the products' instructions need. ``meta`` stands for a GPU: kernels are compiled without one."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "meta"


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
