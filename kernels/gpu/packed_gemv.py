"""One to thirty-two rows of x times quantized weights, over the kept channels, on the tensor cores.

    y[n] = sum over groups G of scale[G, n] * (sum over kept k in G of q[k, n] x[k] - zero[G, n] * sum of these x[k])

Codes are never converted: their bits are used as bf16 or fp16 numbers, which below the smallest normal number are
multiples of one step (subnormals), so int4 and int8 codes are exact with no bit added and no constant subtracted; fp8's
seven lower bits are moved to where its exponent ends in the wider type. The power of two that this leaves is divided
out with the scale; int4's odd columns stay in the upper half of their byte, 16 times too large. x of bf16 is multiplied
by 2^96 first, so that no product of such numbers is itself subnormal. ``keeps_subnormals`` checks the device for this.

Written one element a thread: what a tensor here holds at i is thread i's. Weights are the product's left operand, x's
rows its right one, so one to eight rows cost the same. A warp owns 8 lanes' columns and takes 16 of its program's
channels a step:

    loads    lane 4 g + t: its 4, 8 or 16 bytes of the channels 4 t .. 4 t + 3 of the step (1 to 4 words w of each):

                      g = 0           g = 1                g = 7
        channel 0   [w0 .. w3     ] [w0 .. w3     ] ... [          ]   t = 0    a word: 8 columns of int4, 4 of int8
        channels 1, 2, 3                                               t = 0
        channels 4 .. 7                                                t = 1
        ...                                                            t = 3

    mma.m16n8k16, for each two columns (c, d) of a word:   A (16 x 16): row g is column c of lane group g, row g + 8
    column d. Its K order is the channels', permuted alike in A and B:

        a0 = c of channels 4 t, 4 t + 1      a1 = d of the same      a2 = c of 4 t + 2, 4 t + 3      a3 = d of the same
        b0 = x[row g] of 4 t, 4 t + 1        b1 = x[row g] of 4 t + 2, 4 t + 3
        sums: column c of rows 2 t and 2 t + 1, column d of rows 2 t and 2 t + 1

One, two or four rows stand among the eight several times (``copies``), and the lanes that hold the same sums see to a
part of the columns each. For one or two rows the kept channels are compacted into an index list in which each
quantization group has a slot of its own, and a step never spans two; more rows read all channels, with x in shared
memory for so many at a time as fit (a piece). At a slot's end its sums are scaled and added to the result's.

Bytes: kept channels * N * bits / 8 + 4 N K / group of scales. Twins: ``QuantizedMatrix.dequantise`` and
``reference.sparse_linear``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .channels import (
    choose_channels,
    clear_lists,
    paired_channels,
    program_channels,
    segment_channel,
    store_inputs,
    tile_columns,
)
from .common import Counting, gdc_launch, gdc_wait, issue_loads, smem_alloc, smem_barrier, smem_load, smem_store
from .reduction import reduce_tile, store_partial, store_partial4
from .weights import BLOCK, INT4_ZERO, quant_columns

INT8_OFFSET = 128  # what an int8 code's bits, xor 128, are more than it
_SMALLEST = {"bfloat16": -133, "float16": -24}  # its subnormal numbers are multiples of this power of two
# How far fp8's seven lower bits are moved, and the power of two that the number then is too small by.
_FP8 = {"bfloat16": (4, 120), "float16": (7, 8)}
# What x is multiplied by before the product, exactly: x of bfloat16 is then infinite from 2^32 on; a product with the
# smallest code is a normal number down to 2^-89.
VALUE_SCALE = {"bfloat16": 2.0**96, "float16": 1.0}
_INT8_OFFSET = tl.constexpr(float(INT8_OFFSET))


class PackedConfig(NamedTuple):
    """Compiled in: how a program multiplies."""

    listed: bool  # the kept channels stand in a list; else all are read
    slot: int  # places of the list for each quantization group
    pieces: int  # of launch.segment channels, whose inputs are stored one after the other; 1 with a list
    words: int  # a lane reads so many of each channel
    steps: int  # of 16 channels, together a turn
    ahead: int  # turns in flight
    copies: int  # of each row among eight
    sums: int  # of one word
    value_scale: float  # what x is multiplied by
    unit: float  # of the sums
    load: tuple[str, str]  # PTX and its constraints: ``load_source``
    product: tuple[str, str]  # ``product_source``
    total: tuple[str, str]  # ``sum_source``; "" if no sum of x is needed


def code_unit(quant: str, dtype: str) -> float:
    """What the products' sums are multiples of; of int4's odd columns 16 times it."""
    return VALUE_SCALE[dtype] * 2.0 ** (-_FP8[dtype][1] if quant == "fp8" else _SMALLEST[dtype])


def load_source(words: int, stride: int, listed: bool, whole: bool) -> tuple[str, str]:
    """PTX and constraints: ``words`` words of four channels, channel by channel; undefined where there is no channel.
    Out: 4 * words; in: the list's address or the first channel; the address of channel 0's first word; the number of
    channels. ``stride``: words of a channel; ``whole``: the number is a multiple of 16."""
    n = 4 * words
    vector = {1: "", 2: ".v2", 4: ".v4"}[words]
    lines = ["{ .reg .b32 k<4>; .reg .b64 a<4>; .reg .pred p<4>;"]
    if listed:
        lines.append(f"ld.shared.v4.b32 {{k0, k1, k2, k3}}, [${n}];")
    else:
        lines += [f"add.u32 k{i}, ${n}, {i};" for i in range(4)]
    for i in range(4):
        out = ", ".join(f"${i * words + w}" for w in range(words))
        p, a = (0 if whole and not listed else i), (i if listed else 0)
        if p == i:
            lines.append(f"setp.lt.u32 p{i}, k{i}, ${n + 2};")
        if a == i:
            lines.append(f"mad.wide.u32 a{i}, k{i}, {4 * stride}, ${n + 1};")
        lines.append(f"@p{p} ld.global.nc.L1::no_allocate{vector}.b32 {{{out}}}, [a{a}+{(i - a) * 4 * stride}];")
    return " ".join(lines) + " }", ",".join(["=r"] * n + ["r", "l", "r"])


def product_source(quant: str, dtype: str, parts: int) -> tuple[str, str]:
    """PTX and constraints: one word of each of four channels, times x, added to sums; ``parts``: rows of x in eights.
    Out: the sums, for each part, for each two columns of the word, the first column's two rows and the second's; in:
    the four words, x's two registers of each part, the sums before."""
    pairs = 4 if quant == "int4" else 2
    sums = 4 * pairs * parts
    word = [f"${sums + c}" for c in range(4)]
    before = sums + 4 + 2 * parts
    lines = ["{ .reg .b32 p<2>, s<2>, a<4>;"]
    for column in range(2 * pairs):
        byte = column // 2 if quant == "int4" else column
        for i in range(2):  # channels 0 and 1, then 2 and 3
            out = f"a{column % 2 + 2 * i}"
            if quant != "int4" or column % 2 == 0:
                # The byte twice, in both halves' both bytes: whatever is not wanted is masked.
                selector = f"{(4 + byte) * 0x1100 + byte * 0x11:#x}"
                lines.append(f"prmt.b32 p{i}, {word[2 * i]}, {word[2 * i + 1]}, {selector};")
            if quant == "int4":
                lines.append(f"and.b32 {out}, p{i}, {0x00F000F0 if column % 2 else 0x000F000F:#x};")
            elif quant == "int8":
                lines.append(f"lop3.b32 {out}, p{i}, 0x00ff00ff, {INT8_OFFSET * 0x10001:#x}, 0x6a;")
            else:
                lines.append(f"and.b32 s{i}, p{i}, 0x007f007f;")
                lines.append(f"shl.b32 s{i}, s{i}, {_FP8[dtype][0]};")
                lines.append(f"lop3.b32 {out}, p{i}, 0x80008000, s{i}, 0xea;")
        for part in range(parts if column % 2 else 0):
            at = 4 * (part * pairs + column // 2)
            d, c = (", ".join(f"${first + at + i}" for i in range(4)) for first in (0, before))
            x = f"{{${sums + 4 + 2 * part}, ${sums + 5 + 2 * part}}}"
            lines.append(_mma(dtype, d, "a0, a1, a2, a3", x, c))
    return " ".join(lines) + " }", ",".join(["=f"] * sums + ["r"] * (4 + 2 * parts) + ["f"] * sums)


def sum_source(dtype: str) -> tuple[str, str]:
    """PTX and constraints: x's rows added up, in the integers' unit. Out: four sums, the first two of rows 2 t and
    2 t + 1; in: x's two registers, the sums before."""
    product = _mma(dtype, "$0, $1, $2, $3", "a, a, a, a", "{$4, $5}", "$6, $7, $8, $9")
    # 0x10001: the smallest subnormal twice.
    return f"{{ .reg .b32 a; mov.b32 a, 0x10001; {product} }}", "=f,=f,=f,=f,r,r,f,f,f,f"


def _mma(dtype: str, d: str, a: str, b: str, c: str) -> str:
    of = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 {{{d}}}, {{{a}}}, {b}, {{{c}}};"


@triton.jit
def _subnormal_kernel(out_ptr, X: tl.constexpr, TOTAL: tl.constexpr, CONSTRAINTS: tl.constexpr):
    thread = tl.arange(0, 32)
    x = tl.full((32,), X, tl.int32)
    zero = thread.to(tl.float32) * 0.0
    given = (x, x, zero, zero, zero, zero)
    sums = tl.inline_asm_elementwise(TOTAL, CONSTRAINTS, given, dtype=(tl.float32,) * 4, is_pure=False, pack=1)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * 32 + thread, sums[i])


_subnormal_kernel.is_probe = True  # run within ``compiling_side_by_side`` too


@cache
def keeps_subnormals(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device's tensor cores multiply subnormal numbers as they are: one 16 x 8 product of the smallest one
    and x, whose 16 products have to add up exactly."""
    name = str(dtype).removeprefix("torch.")
    bits = torch.tensor([VALUE_SCALE[name]] * 2, dtype=dtype).view(torch.int32)
    out = torch.empty(128, device=device)
    _subnormal_kernel[(1,)](out, int(bits), *sum_source(name), num_warps=1)
    return bool((out == 16 * code_unit("int8", name)).all())


@triton.jit(do_not_specialize=["ssq_parts"], do_not_specialize_on_alignment=["counting"])
def packed_gemv_kernel(
    given, weights, output, workspace, counting, eps, ssq_parts,  # as of sparse_gemv_kernel
    problem: tl.constexpr,
    launch: tl.constexpr,  # chunk a multiple of 16 and of the group
    packed: tl.constexpr,  # PackedConfig
):  # fmt: skip
    K: tl.constexpr = problem.k
    BATCH: tl.constexpr = problem.batch
    BLOCK_N: tl.constexpr = launch.block_n
    SEGMENT: tl.constexpr = launch.segment
    LENGTH: tl.constexpr = launch.length
    SLOT: tl.constexpr = packed.slot
    LISTED: tl.constexpr = packed.listed
    PIECES: tl.constexpr = packed.pieces
    GROUPED: tl.constexpr = problem.group < K
    EACH: tl.constexpr = 8 if problem.quant == "int4" else 4
    COLUMNS: tl.constexpr = packed.words * EACH  # a lane's
    PART: tl.constexpr = COLUMNS // packed.copies  # those whose sums it sees to
    PARTS: tl.constexpr = (BATCH + 7) // 8  # rows of x in eights
    # Of a row's inputs a thread stores so many at a time.
    RUN: tl.constexpr = min(4, max(1, SEGMENT // (32 * launch.warps))) if BATCH > 16 else 1
    SECONDS: tl.constexpr = 1 if BATCH == 1 else 2  # rows of each eight whose sums a lane sees to
    ROWS: tl.constexpr = 8 // packed.copies  # different rows among eight
    TURN: tl.constexpr = 16 * packed.steps
    READ: tl.constexpr = 4 * packed.words * packed.steps  # words of a turn
    AHEAD: tl.constexpr = packed.ahead
    dtype: tl.constexpr = output.out.dtype.element_ty
    program = tl.program_id(0)
    of = tile_columns(program % launch.tiles, program // launch.tiles, problem, BLOCK_N)
    split = of.split

    # --- a lane's place: the columns it reads, those it sees to, and its rows
    thread = tl.arange(0, 32 * launch.warps)
    g = thread % 32 // 4
    t = thread % 4
    column = of.local * BLOCK_N + thread // 32 * (8 * COLUMNS) + g * COLUMNS
    padded = (of.width + BLOCK - 1) // BLOCK * BLOCK
    limit = tl.where(column < padded, K, 0)  # a warp beyond the projection reads nothing
    word_at = weights.weight_t.to(tl.int64) + quant_columns(of, column, problem).to(tl.int64) // EACH * 4
    copy = 2 * t // ROWS
    mine = column + copy * PART
    scale_at = quant_columns(of, mine, problem)
    there = mine < padded

    # --- this program's channels, as in sparse_gemv_kernel
    PLANES: tl.constexpr = problem.planes if LISTED else 1  # listed together
    if PLANES == 2:
        channels = paired_channels(given, weights, of, problem, launch)
    else:
        channels = program_channels(given, weights, of, problem, launch, launch.chunk)
    position = channels.position
    count = channels.count
    slots = count // SLOT if GROUPED else 1
    if PIECES > 1:  # one at least, in which a program without channels waits for the previous kernel too
        slots = tl.maximum((count + SLOT - 1) // SLOT, 1)
    ends = _scales(weights, scale_at, there, 0, split, PART, problem, launch, packed)
    SMEM: tl.constexpr = launch.smem
    base = smem_alloc(SMEM, program)
    if LISTED:
        clear_lists(base, base + LENGTH * 4, K, BATCH * LENGTH // 2, launch, True)
        gdc_wait(problem.pdl, launch.trigger == 1)
        xs, keep, keep_low, kept_rows = choose_channels(
            given, channels, counting, eps, ssq_parts, problem, True, dtype, PLANES == 2
        )
        EACH_SLOT: tl.constexpr = SLOT // PLANES  # positions
        rank = keep.to(tl.int32)
        if PLANES == 2:
            rank += keep_low.to(tl.int32)
        if SLOT < SEGMENT:
            rank = tl.reshape(tl.cumsum(tl.reshape(rank, (SEGMENT // SLOT, EACH_SLOT)), axis=1), (SEGMENT // PLANES,))
        else:
            rank = tl.cumsum(rank, axis=0)
        for plane in tl.static_range(PLANES):
            # The high plane stands before the low one, if that is read too.
            place = position // EACH_SLOT * SLOT + rank - 1
            if PLANES == 2 and plane == 0:
                place -= keep_low.to(tl.int32)
            kept = keep if plane == 0 else keep_low
            smem_store(base, place, channels.k * PLANES + plane, kept, True)
            for row in tl.static_range(BATCH):
                x = (xs[plane * BATCH + row] * packed.value_scale).to(dtype)
                smem_store(base + LENGTH * 4, row * LENGTH + place, x, kept, True)
        slot_end = position % EACH_SLOT == EACH_SLOT - 1
        smem_store(base + LENGTH * (4 + 2 * BATCH), position // EACH_SLOT, rank, slot_end, True)
        base = smem_barrier(base, True)
        kept_at = base + LENGTH * (4 + 2 * BATCH)
        index = base + 16 * t
        values = base + LENGTH * 4
    else:
        index = 4 * t
        kept_at = base
        values = base
    ahead = ()
    coming = split * 0
    for _ in tl.static_range(AHEAD):
        # Without a list they do not depend on x: the memory would be idle until it is there.
        ahead = ahead + _words(index, word_at, limit, coming, split, launch, packed)
        coming = _next_turn(coming, kept_at, GROUPED, launch, packed)
    if not LISTED and PIECES == 1:
        values = store_inputs(
            base, given, channels, counting, eps, ssq_parts, problem, LENGTH, True, dtype, packed.value_scale, RUN
        )

    # --- the product
    # Rows that are not there repeat the last; nobody looks at their sums.
    row_at = tl.minimum(g % ROWS, BATCH - 1) * (2 * LENGTH) + 8 * t
    values += row_at
    sums = _zeros(thread, PART * PARTS * SECONDS)
    for slot in range(slots):
        scaled_by = ends
        first = slot * SLOT
        last = first + tl.minimum(count - first, SLOT)
        if LISTED:
            last = first + tl.maximum(smem_load(kept_at, slot, tl.int32, True), 1)
        stored_from = 0
        if PIECES > 1:
            stored_from = first // SEGMENT * SEGMENT
            if first == stored_from:  # another piece
                here = program_channels(given, weights, of, problem, launch, launch.chunk, first)
                cells = counting
                if counting is not None:  # adds to what the piece before has left
                    cells = Counting(
                        counting.token, tl.where(slot == 0, counting.before, counting.after), counting.after
                    )
                base = smem_barrier(base, True)  # every warp is done with the piece before
                values = row_at + store_inputs(
                    base, given, here, cells, eps, ssq_parts, problem, LENGTH, True, dtype, packed.value_scale, RUN
                )
        if GROUPED:
            ends = _scales(weights, scale_at, there, slot + 1, split, PART, problem, launch, packed)
        acc = _zeros(thread, packed.words * EACH * 2 * PARTS)
        total = _zeros(thread, 4 * PARTS)
        for at in range(first, last, TURN):
            words = ahead[:READ]
            ahead = ahead[READ:] + _words(index, word_at, limit, coming, split, launch, packed)
            coming = _next_turn(coming, kept_at, GROUPED, launch, packed)
            issue_loads(program)
            acc, total = _multiply(acc, total, words, values, at - stored_from, LENGTH, BATCH, g, packed)
        sums = _scaled(
            sums, acc, total, scaled_by, copy, PART, SECONDS, weights.quant_zeros is not None, problem, packed
        )
    if LISTED and launch.trigger == 2:
        gdc_launch(problem.pdl)

    # --- what follows it
    FOUR: tl.constexpr = PART % 4 == 0 and problem.n0 % 4 + problem.n1 % 4 + problem.n2 % 4 == 0
    for part in tl.static_range(PARTS):
        for second in tl.static_range(SECONDS):
            row = 8 * part + 2 * t % ROWS + second
            at = (split * BATCH + row) * problem.n + of.first + mine
            for i in tl.static_range(0, PART, 4 if FOUR else 1):
                wanted = (mine + i < of.width) & (row < BATCH)
                if FOUR:
                    store_partial4(workspace.partial + at + i, sums[0], sums[1], sums[2], sums[3], wanted)
                    sums = sums[4:]
                else:
                    store_partial(workspace.partial, at + i, sums[0], wanted)
                    sums = sums[1:]
    if LISTED and counting is not None:
        kept_before = tl.load(counting.before + channels.cell, mask=channels.counts, other=0)
        tl.store(counting.after + channels.cell, kept_before + tl.sum(kept_rows, axis=0), mask=channels.counts)
    reduce_tile(of, weights.bias, output, workspace, problem, launch, BATCH > 2)


@triton.jit
def _zeros(thread, COUNT: tl.constexpr):
    """So many zeros for each thread."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (thread.to(tl.float32) * 0.0,)
    return zeros


@triton.jit
def _next_turn(at, kept_at, GROUPED: tl.constexpr, launch: tl.constexpr, packed: tl.constexpr):
    """Where the turn after the one at ``at`` begins: at the next slot's begin if that is its slot's last; after the
    last of all, where there are no channels."""
    TURN: tl.constexpr = 16 * packed.steps
    following = at + TURN
    if packed.listed and GROUPED:
        SLOTS: tl.constexpr = launch.segment // packed.slot
        slot = tl.minimum(at // packed.slot, SLOTS - 1)
        last = slot * packed.slot + smem_load(kept_at, slot, tl.int32, True)
        following = tl.where(following < last, following, (slot + 1) * packed.slot)
    # With pieces nothing is at a place: channels beyond the last are not there.
    return tl.minimum(following, launch.length - TURN) if packed.pieces == 1 else following


@triton.jit
def _words(index, word_at, limit, at, split, launch: tl.constexpr, packed: tl.constexpr):
    """The words of the channels at the places ``at`` .. of the list: step by step, of each its four channels'."""
    LOAD: tl.constexpr = packed.load[0]
    CONSTRAINTS: tl.constexpr = packed.load[1]
    FOUND: tl.constexpr = 4 * packed.words
    STEPS: tl.constexpr = packed.steps
    words = ()
    for step in tl.static_range(STEPS):
        if packed.listed:
            where = index + (at + 16 * step) * 4
        else:
            where = index + segment_channel(at + 16 * step, split, launch.splits, launch.chunk)
        words = words + tl.inline_asm_elementwise(
            LOAD, CONSTRAINTS, [where, word_at, limit], dtype=(tl.int32,) * FOUND, is_pure=False, pack=1
        )
    return words


@triton.jit
def _multiply(acc, total, words, values, at, LENGTH: tl.constexpr, BATCH: tl.constexpr, g, packed: tl.constexpr):
    """The sums, and x's own if they are asked for, with the channels at the places ``at`` .. added."""
    WORDS: tl.constexpr = packed.words
    SUMS: tl.constexpr = packed.sums  # of one word
    STEPS: tl.constexpr = packed.steps
    PARTS: tl.constexpr = (BATCH + 7) // 8
    PRODUCT: tl.constexpr = packed.product[0]
    PRODUCT_CONSTRAINTS: tl.constexpr = packed.product[1]
    TOTAL: tl.constexpr = packed.total[0]
    TOTAL_CONSTRAINTS: tl.constexpr = packed.total[1]
    for step in tl.static_range(STEPS):
        xs = ()
        for part in tl.static_range(PARTS):
            place = values + (at + 16 * step) * 2
            if part > 0:
                place += (tl.minimum(g, BATCH - 8 * part - 1) + 8 * part - g) * (2 * LENGTH)
            xs = xs + tl.inline_asm_elementwise(
                "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [place], dtype=(tl.int32,) * 2, is_pure=False, pack=1
            )
        added = ()
        for i in tl.static_range(WORDS):
            given = ()
            for channel in tl.static_range(4):
                given += (words[(step * 4 + channel) * WORDS + i],)
            given = given + xs + acc[i * SUMS : (i + 1) * SUMS]
            added = added + tl.inline_asm_elementwise(
                PRODUCT, PRODUCT_CONSTRAINTS, given, dtype=(tl.float32,) * SUMS, is_pure=False, pack=1
            )
        acc = added
        if TOTAL != "":
            summed = ()
            for part in tl.static_range(PARTS):
                given = xs[2 * part : 2 * part + 2] + total[4 * part : 4 * part + 4]
                summed = summed + tl.inline_asm_elementwise(
                    TOTAL, TOTAL_CONSTRAINTS, given, dtype=(tl.float32,) * 4, is_pure=False, pack=1
                )
            total = summed
    return acc, total


@triton.jit
def _scales(
    weights, scale_at, there, slot, split, PART: tl.constexpr,
    problem: tl.constexpr, launch: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    """A slot's scales of a lane's part of the columns, then, if there are any, its zero points."""
    COLUMNS: tl.constexpr = problem.stride * (8 if problem.quant == "int4" else 4)
    GROUPS: tl.constexpr = problem.k // problem.group
    group = 0
    if GROUPS > 1:
        group = tl.minimum(
            segment_channel(slot * packed.slot, split, launch.splits, launch.chunk) // problem.group, GROUPS - 1
        )
    found = _floats(weights.quant_scales + group * COLUMNS + scale_at, there, PART)
    if weights.quant_zeros is not None:
        found = found + _floats(weights.quant_zeros + group * COLUMNS + scale_at, there, PART)
    return found


@triton.jit
def _floats(at, there, COUNT: tl.constexpr):
    """COUNT neighbouring constants of each thread; undefined where it has none."""
    found = ()
    if COUNT % 4 == 0:
        for i in tl.static_range(0, COUNT, 4):
            found = found + tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }",
                "=f,=f,=f,=f,l,r", [(at + i).to(tl.int64), there.to(tl.int32)], dtype=(tl.float32,) * 4, is_pure=False,
                pack=1,
            )  # fmt: skip
    else:
        for i in tl.static_range(COUNT):
            found += (tl.load(at + i, mask=there, other=0.0),)
    return found


@triton.jit
def _scaled(
    sums, acc, total, ends, copy, PART: tl.constexpr, SECONDS: tl.constexpr, ZEROS: tl.constexpr,
    problem: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    """sums + scale * (acc - zero * total), for a lane's part of the columns and its row or two of each eight."""
    INT4: tl.constexpr = problem.quant == "int4"
    EACH: tl.constexpr = 8 if INT4 else 4
    NONE: tl.constexpr = INT4_ZERO if INT4 else 0.0
    EVEN: tl.constexpr = 1.0 / packed.unit
    ODD: tl.constexpr = EVEN / 16.0
    PARTS: tl.constexpr = (problem.batch + 7) // 8
    COPIES: tl.constexpr = packed.copies
    added = ()
    for part in tl.static_range(PARTS):
        for second in tl.static_range(SECONDS):
            for i in tl.static_range(PART):
                value = _sum_of(acc, i, second, part, EACH, PARTS)
                for other in tl.static_range(1, COPIES):
                    value = tl.where(copy == other, _sum_of(acc, other * PART + i, second, part, EACH, PARTS), value)
                value = value * (ODD if INT4 and i % 2 == 1 else EVEN)
                if problem.quant != "fp8":
                    zero = ends[PART + i] if ZEROS else NONE
                    value -= (zero if INT4 else _INT8_OFFSET + zero) * (total[4 * part + second] * EVEN)
                added += (sums[(part * SECONDS + second) * PART + i] + ends[i] * value,)
    return added


@triton.jit
def _sum_of(
    acc, COLUMN: tl.constexpr, SECOND: tl.constexpr, PART: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The sum of a lane's column and row, of those that ``product_source`` names, word by word."""
    PAIR: tl.constexpr = (COLUMN // EACH * PARTS + PART) * (EACH // 2) + COLUMN % EACH // 2
    return acc[4 * PAIR + COLUMN % 2 * 2 + SECOND]
