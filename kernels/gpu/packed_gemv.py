"""One to thirty-two rows of x times quantized weights, over the kept channels, on the tensor cores.

    y[n] = sum over groups G of scale[G, n] * (sum over kept k in G of q[k, n] x[k] - zero[G, n] * sum of these x[k])

Integer codes are valid subnormal floats, so mma multiplies them unconverted; the scale undoes the factor: below the
smallest normal number a bf16 or fp16 number is a multiple of the smallest subnormal, so int4 and int8 codes are exact as
they are, and the power of two that remains is divided out with the scale (``code_unit``). fp8's seven low bits are
shifted to where the exponent ends in the wider type. int4's odd columns stay in the upper half of their byte and are 16
times too large. x of bf16 is multiplied by 2^96 first, so that no product is subnormal. ``keeps_subnormals`` checks that
the device supports this.

The kernel is written with one element per thread: element i of every tensor belongs to thread i. The weights are mma's
A operand and rows of x its B operand, so one to eight rows cost the same. A warp computes the columns of its 8 lane
groups, 16 channels a step:

    loads    lane 4 g + t loads 4, 8 or 16 bytes of each of the channels 4 t .. 4 t + 3 of the step (1 to 4 words w):

                      g = 0           g = 1                g = 7
        channel 0   [w0 .. w3     ] [w0 .. w3     ] ... [          ]   t = 0    a word: 8 columns of int4, 4 of int8
        channels 1, 2, 3                                               t = 0
        channels 4 .. 7                                                t = 1
        ...                                                            t = 3

    mma.m16n8k16, for each two columns (c, d) of a word:   A (16 x 16): row g is column c of lane group g, row g + 8
    column d. Its K order is the channels', permuted alike in A and B:

        a0 = c of channels 4 t, 4 t + 1      a1 = d of the same      a2 = c of 4 t + 2, 4 t + 3      a3 = d of the same
        b0 = x[row g] of 4 t, 4 t + 1        b1 = x[row g] of 4 t + 2, 4 t + 3
        accumulators: column c of rows 2 t and 2 t + 1, column d of rows 2 t and 2 t + 1

One, two or four rows are repeated to fill mma's eight (``replicas``); lanes with the same accumulators divide their
columns among them. For one or two rows the kept channels are compacted into an index list in which each quantization
group has a slot of its own, and a pipeline stage never spans two slots. More rows read all channels, with x in shared
memory, in tiles of as many channels as fit. At the end of a slot its accumulators are scaled and added to the result.

With more than 16 rows registers are short. int4 weights in bf16 are multiplied by their scales before the product and
rounded, as by ``weights.widen``, and scales of whole rows are applied at the end, so that one set of accumulators is
enough; a step's words are loaded into the registers of the step just multiplied.

Bytes: kept channels * N * bits / 8 + 4 N K / group of scales. Twins: ``QuantizedMatrix.dequantise`` and
``reference.sparse_linear``.
"""

from __future__ import annotations

import struct
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
from .common import gdc_launch, gdc_wait, issue_loads, smem_alloc, smem_barrier, smem_load, smem_store
from .reduction import reduce_tile, store_partial, store_partial4
from .weights import BLOCK, INT4_ZERO, ZERO, quant_columns

INT8_OFFSET = 128  # an int8 code is (bits xor 128) - 128
_SMALLEST = {"bfloat16": -133, "float16": -24}  # exponent of the smallest subnormal
# The left shift of fp8's seven low bits, and the exponent of the factor by which the result is too small.
_FP8 = {"bfloat16": (4, 120), "float16": (7, 8)}
# x is multiplied by this before the product, exactly. For bfloat16, |x| from 2^32 on overflows to infinity, and
# products with the smallest code are normal numbers down to |x| = 2^-89.
VALUE_SCALE = {"bfloat16": 2.0**96, "float16": 1.0}
_INT8_OFFSET = tl.constexpr(float(INT8_OFFSET))


class PackedConfig(NamedTuple):
    """Compiled in: how a program multiplies."""

    listed: bool  # the kept channels are compacted into an index list; else all channels are read
    slot: int  # list entries of each quantization group
    x_tiles: int  # tiles of launch.segment channels in which x is stored to shared memory; 1 with an index list
    lane_words: int  # int32 words that a lane loads of each channel
    steps: int  # mma steps of 16 channels in a pipeline stage
    stages: int  # pipeline stages in flight; 1 with more than 16 rows
    replicas: int  # of each row among mma's eight
    word_acc: int  # accumulators of a word
    columns: int  # that a lane scales and stores
    value_scale: float  # factor of x
    unit: float  # ``code_unit``
    load: tuple[str, str]  # PTX and its constraints: ``load_source``
    product: tuple[str, str]  # ``product_source``
    total: tuple[str, str]  # ``sum_source``; "" if no sum of x is needed
    # ``scale_source``: weights are multiplied by their scales, and rounded, before the product, so that there are no second
    # accumulators; "": they are not.
    scale: tuple[str, str]


def code_unit(quant: str, dtype: str) -> float:
    """An accumulator is code_unit * sum(q * x), of int4's odd columns 16 times that."""
    return VALUE_SCALE[dtype] * 2.0 ** (-_FP8[dtype][1] if quant == "fp8" else _SMALLEST[dtype])


# Factor of the scales where weights are scaled before the product: bfloat16 holds scales from 2^-93 to 2^27, and an
# accumulator is SCALED_UNIT * sum(w * x).
_SCALE = 2.0**100
SCALED_UNIT = _SCALE * 2.0 ** _SMALLEST["bfloat16"]


def load_source(words: int, stride: int, listed: bool, whole: bool) -> tuple[str, str]:
    """PTX and constraints that load ``words`` words of each of four channels; registers of channels beyond the last are
    undefined. Out: 4 * words, channel by channel; in: the list entry's address, or the first channel; the address of
    channel 0's first word; the number of channels. ``stride``: words of a channel; ``whole``: a multiple of 16
    channels."""
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


def product_source(quant: str, dtype: str, row_tiles: int, scaled: bool = False) -> tuple[str, str]:
    """PTX and constraints that multiply one word of each of four channels by x and accumulate. Out: the accumulators:
    for each of ``row_tiles`` tiles of eight rows, for each two columns of the word, those of the first column's two
    rows and of the second's; in: the four words, x's two registers of each row tile, the accumulators before, and if
    ``scaled`` for each column two registers of `scale_source`."""
    pairs = 4 if quant == "int4" else 2
    outputs = 4 * pairs * row_tiles
    word = [f"${outputs + c}" for c in range(4)]
    inputs = outputs + 4 + 2 * row_tiles
    scales = inputs + outputs
    lines = ["{ .reg .b32 p<2>, s<2>, a<4>;"]
    for column in range(2 * pairs):
        byte = column // 2 if quant == "int4" else column
        for i in range(2):  # channels 0 and 1, then 2 and 3
            out = f"a{column % 2 + 2 * i}"
            if quant != "int4" or column % 2 == 0:
                # Each 16-bit half holds one channel's byte twice; the masks below select bits of it.
                selector = f"{(4 + byte) * 0x1100 + byte * 0x11:#x}"
                lines.append(f"prmt.b32 p{i}, {word[2 * i]}, {word[2 * i + 1]}, {selector};")
            if quant == "int4":
                lines.append(f"and.b32 {out}, p{i}, {0x00F000F0 if column % 2 else 0x000F000F:#x};")
                if scaled:
                    factor, shift = (f"${scales + 2 * column + part}" for part in range(2))
                    lines.append(f"fma.rn.bf16x2 {out}, {out}, {factor}, {shift};")
            elif quant == "int8":
                lines.append(f"lop3.b32 {out}, p{i}, 0x00ff00ff, {INT8_OFFSET * 0x10001:#x}, 0x6a;")
            else:
                lines.append(f"and.b32 s{i}, p{i}, 0x007f007f;")
                lines.append(f"shl.b32 s{i}, s{i}, {_FP8[dtype][0]};")
                lines.append(f"lop3.b32 {out}, p{i}, 0x80008000, s{i}, 0xea;")
        for tile in range(row_tiles if column % 2 else 0):
            acc = 4 * (tile * pairs + column // 2)
            d, c = (", ".join(f"${first + acc + i}" for i in range(4)) for first in (0, inputs))
            x = f"{{${outputs + 4 + 2 * tile}, ${outputs + 5 + 2 * tile}}}"
            lines.append(_mma(dtype, d, "a0, a1, a2, a3", x, c))
    types = ["=f"] * outputs + ["r"] * (4 + 2 * row_tiles) + ["f"] * outputs + ["r"] * (4 * pairs * scaled)
    return " ".join(lines) + " }", ",".join(types)


def scale_source() -> tuple[str, str]:
    """PTX and constraints from int4 scales (float32) of an even and an odd column to two registers each, of twice a
    bfloat16: a code's subnormal times the first, plus the second, is (q - 8) * scale * SCALED_UNIT, rounded."""
    lines = ["{ .reg .f32 s;"]
    for out, factor in enumerate((_SCALE, -ZERO["int4"] * SCALED_UNIT, _SCALE / 16, -ZERO["int4"] * SCALED_UNIT)):
        bits = struct.pack(">f", factor).hex()
        lines.append(f"mul.rn.f32 s, ${4 + out // 2}, 0f{bits}; cvt.rn.bf16x2.f32 ${out}, s, s;")
    return " ".join(lines) + " }", "=r,=r,=r,=r,f,f"


def sum_source(dtype: str) -> tuple[str, str]:
    """PTX and constraints that add ``code_unit`` * sum(x) to the accumulators. Out: four, the first two of rows 2 t and
    2 t + 1; in: x's two registers, the accumulators before."""
    product = _mma(dtype, "$0, $1, $2, $3", "a, a, a, a", "{$4, $5}", "$6, $7, $8, $9")
    # A is the smallest subnormal, twice in a register.
    return f"{{ .reg .b32 a; mov.b32 a, 0x10001; {product} }}", "=f,=f,=f,=f,r,r,f,f,f,f"


def _mma(dtype: str, d: str, a: str, b: str, c: str) -> str:
    of = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 {{{d}}}, {{{a}}}, {b}, {{{c}}};"


@triton.jit
def subnormal_kernel(out_ptr, X: tl.constexpr, TOTAL: tl.constexpr, CONSTRAINTS: tl.constexpr):
    thread = tl.arange(0, 32)
    x = tl.full((32,), X, tl.int32)
    zero = thread.to(tl.float32) * 0.0
    operands = (x, x, zero, zero, zero, zero)
    sums = tl.inline_asm_elementwise(TOTAL, CONSTRAINTS, operands, dtype=(tl.float32,) * 4, is_pure=False, pack=1)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * 32 + thread, sums[i])


subnormal_kernel.is_probe = True  # run within ``compiling_side_by_side`` too


@cache
def keeps_subnormals(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device's tensor cores do not flush subnormal operands: one mma of the smallest subnormal and x, whose
    sum of 16 products has to be exact."""
    name = str(dtype).removeprefix("torch.")
    bits = torch.tensor([VALUE_SCALE[name]] * 2, dtype=dtype).view(torch.int32)
    out = torch.empty(128, dtype=torch.float32, device=device)
    subnormal_kernel[(1,)](out, int(bits), *sum_source(name), num_warps=1)
    return bool((out == 16 * code_unit("int8", name)).all())


@triton.jit(do_not_specialize=["ssq_parts"])
def packed_gemv_kernel(
    inputs, weights, output, workspace, eps, ssq_parts,  # as of sparse_gemv_kernel
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
    X_TILES: tl.constexpr = packed.x_tiles
    GROUPED: tl.constexpr = problem.group < K
    MANY: tl.constexpr = BATCH > 16
    APART: tl.constexpr = not MANY or (GROUPED and packed.scale[0] == "")  # each slot has accumulators of its own
    ZEROS: tl.constexpr = weights.quant_zeros is not None
    EACH: tl.constexpr = 8 if problem.quant == "int4" else 4
    COLUMNS: tl.constexpr = packed.lane_words * EACH  # that a lane loads
    OUT_COLUMNS: tl.constexpr = packed.columns
    ROW_TILES: tl.constexpr = (BATCH + 7) // 8  # of mma's eight rows
    LANE_ROWS: tl.constexpr = 1 if BATCH == 1 else 2  # of each row tile, whose accumulators a lane has
    ROWS: tl.constexpr = 8 // packed.replicas  # different rows of a row tile
    # Neighbouring values of x that a thread stores at once.
    RUN: tl.constexpr = min(4, max(1, SEGMENT // (32 * launch.warps))) if MANY else 1
    BLOCK_K: tl.constexpr = 16 * packed.steps  # channels of a pipeline stage
    STEPS: tl.constexpr = packed.steps
    STAGES: tl.constexpr = packed.stages
    STEP_WORDS: tl.constexpr = 4 * packed.lane_words  # that a lane loads
    dtype: tl.constexpr = output.out.dtype.element_ty
    program = tl.program_id(0)
    of = tile_columns(program % launch.tiles, program // launch.tiles, problem, BLOCK_N)
    split = of.split

    # --- the columns that a lane loads, and those that it stores
    thread = tl.arange(0, 32 * launch.warps)
    g = thread % 32 // 4
    t = thread % 4
    column = of.local * BLOCK_N + thread // 32 * (8 * COLUMNS) + g * COLUMNS
    padded = (of.width + BLOCK - 1) // BLOCK * BLOCK
    limit = tl.where(column < padded, K, 0)  # a warp beyond the projection loads no channel
    word_at = weights.weight_t.to(tl.int64) + quant_columns(of, column, problem).to(tl.int64) // EACH * 4
    replica = 2 * t // ROWS
    out_column = column + replica * OUT_COLUMNS
    scale_at = quant_columns(of, out_column, problem)
    in_range = out_column < padded

    # --- this program's channels, as in sparse_gemv_kernel
    if LISTED and problem.planes == 2:
        channels = paired_channels(inputs, weights, of, problem, launch)
    else:
        channels = program_channels(inputs, weights, of, problem, launch, launch.chunk)
    count = channels.count
    slots = count // SLOT if GROUPED else 1
    if X_TILES > 1:  # at least one, so that a program without channels also waits for the previous kernel
        slots = tl.maximum((count + SLOT - 1) // SLOT, 1)
    next_scales = _load_scales(weights, scale_at, in_range, 0, split, problem, launch, packed)
    SMEM: tl.constexpr = launch.smem
    base = smem_alloc(SMEM, program)
    if LISTED:
        clear_lists(base, base + LENGTH * 4, K, BATCH * LENGTH // 2, launch, True)
        gdc_wait(problem.pdl, launch.trigger == 1)
        _store_list(base, inputs, channels, eps, ssq_parts, problem, launch, packed, dtype)
        base = smem_barrier(base, True)
        kept_at = base + LENGTH * (4 + 2 * BATCH)
        index = base + 16 * t
        values = base + LENGTH * 4
    else:
        index = 4 * t
        kept_at = base
        values = base
    # The first stages. Without an index list they do not depend on x: their loads overlap the wait for it.
    codes = ()
    following = split * 0
    for _ in tl.static_range(STAGES):
        for step in tl.static_range(STEPS):
            codes = codes + _load_codes(index, word_at, limit, following + 16 * step, split, launch, packed)
        following = _next_stage(following, kept_at, GROUPED, launch, packed)
    if not LISTED and X_TILES == 1:
        values = store_inputs(
            base, inputs, channels, eps, ssq_parts, problem, LENGTH, True, dtype, packed.value_scale, RUN
        )

    # --- the product
    # Rows beyond the batch repeat its last row; their accumulators are not stored.
    row_at = tl.minimum(g % ROWS, BATCH - 1) * (2 * LENGTH) + 8 * t
    values += row_at
    sums = _zeros(thread, OUT_COLUMNS * ROW_TILES * LANE_ROWS)
    acc = _zeros(thread, packed.lane_words * EACH * 2 * ROW_TILES)
    x_sums = _zeros(thread, 4 * ROW_TILES)
    for slot in range(slots):
        scales = next_scales
        factors = _scale_factors(scales, OUT_COLUMNS, packed)
        first = slot * SLOT
        last = first + tl.minimum(count - first, SLOT)
        if LISTED:
            last = first + tl.maximum(smem_load(kept_at, slot, tl.int32, True), 1)
        tile_start = 0
        if X_TILES > 1:
            tile_start = first // SEGMENT * SEGMENT
            if first == tile_start:
                tile_channels = program_channels(inputs, weights, of, problem, launch, launch.chunk, first)
                base = smem_barrier(base, True)  # all warps have read the tile before
                values = row_at + store_inputs(
                    base, inputs, tile_channels, eps, ssq_parts, problem, LENGTH, True, dtype, packed.value_scale, RUN
                )
        if GROUPED:
            next_scales = _load_scales(weights, scale_at, in_range, slot + 1, split, problem, launch, packed)
        if APART:
            acc = _zeros(thread, packed.lane_words * EACH * 2 * ROW_TILES)
            x_sums = _zeros(thread, 4 * ROW_TILES)
        for at in range(first, last, BLOCK_K):
            # A stage is loaded before the one in front of it is multiplied; or, of many rows, step by step into the
            # registers of the step just multiplied, which takes half as many.
            loaded = ()
            if not MANY:
                for step in tl.static_range(STEPS):
                    loaded = loaded + _load_codes(index, word_at, limit, following + 16 * step, split, launch, packed)
                issue_loads(program)
            for step in tl.static_range(STEPS):
                x_at = at - tile_start + 16 * step
                step_codes = codes[:STEP_WORDS]
                acc, x_sums = _multiply(acc, x_sums, step_codes, factors, values, x_at, LENGTH, BATCH, g, packed)
                codes = codes[STEP_WORDS:]
                if MANY:
                    codes = codes + _load_codes(index, word_at, limit, following + 16 * step, split, launch, packed)
                    issue_loads(program)
            codes = codes + loaded
            following = _next_stage(following, kept_at, GROUPED, launch, packed)
        if APART:
            sums = _add_scaled(sums, acc, x_sums, scales, replica, ZEROS, problem, packed)
    if not APART:
        sums = _add_scaled(sums, acc, x_sums, next_scales, replica, ZEROS, problem, packed)
    if LISTED and launch.trigger == 2:
        gdc_launch(problem.pdl)

    # --- epilogue
    REST: tl.constexpr = problem.n0 % 4 + problem.n1 % 4 + problem.n2 % 4 + problem.n3 % 4
    VECTOR: tl.constexpr = OUT_COLUMNS % 4 == 0 and REST == 0
    for row_tile in tl.static_range(ROW_TILES):
        for lane_row in tl.static_range(LANE_ROWS):
            row = 8 * row_tile + 2 * t % ROWS + lane_row
            at = (split * BATCH + row) * problem.n + of.first + out_column
            for i in tl.static_range(0, OUT_COLUMNS, 4 if VECTOR else 1):
                live = (out_column + i < of.width) & (row < BATCH)
                if VECTOR:
                    store_partial4(workspace.partial + at + i, sums[0], sums[1], sums[2], sums[3], live)
                    sums = sums[4:]
                else:
                    store_partial(workspace.partial, at + i, sums[0], live)
                    sums = sums[1:]
    reduce_tile(of, weights.bias, output, workspace, problem, launch, BATCH > 2)


@triton.jit
def _store_list(
    base, inputs, channels, eps, ssq_parts, problem: tl.constexpr, launch: tl.constexpr, packed: tl.constexpr, dtype
):
    """Select the program's channels and store to shared memory the index list (from ``base`` on), each row's x, and the
    number of entries in each slot."""
    BATCH: tl.constexpr = problem.batch
    SEGMENT: tl.constexpr = launch.segment
    LENGTH: tl.constexpr = launch.length
    SLOT: tl.constexpr = packed.slot
    PLANES: tl.constexpr = problem.planes  # selected together, at one position
    SLOT_POSITIONS: tl.constexpr = SLOT // PLANES
    position = channels.position
    xs, keep, keep_low = choose_channels(inputs, channels, eps, ssq_parts, problem, True, dtype, PLANES == 2)
    rank = keep.to(tl.int32)
    if PLANES == 2:
        rank += keep_low.to(tl.int32)
    if SLOT < SEGMENT:
        rank = tl.reshape(tl.cumsum(tl.reshape(rank, (SEGMENT // SLOT, SLOT_POSITIONS)), axis=1), (SEGMENT // PLANES,))
    else:
        rank = tl.cumsum(rank, axis=0)
    for plane in tl.static_range(PLANES):
        # A channel's high plane precedes its low plane, if that is kept too.
        entry = position // SLOT_POSITIONS * SLOT + rank - 1
        if PLANES == 2 and plane == 0:
            entry -= keep_low.to(tl.int32)
        kept = keep if plane == 0 else keep_low
        smem_store(base, entry, channels.k * PLANES + plane, kept, True)
        for row in tl.static_range(BATCH):
            x = (xs[plane * BATCH + row] * packed.value_scale).to(dtype)
            smem_store(base + LENGTH * 4, row * LENGTH + entry, x, kept, True)
    slot_end = position % SLOT_POSITIONS == SLOT_POSITIONS - 1
    smem_store(base + LENGTH * (4 + 2 * BATCH), position // SLOT_POSITIONS, rank, slot_end, True)


@triton.jit
def _zeros(thread, COUNT: tl.constexpr):
    """COUNT tensors of float32 zeros, one element per thread."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (thread.to(tl.float32) * 0.0,)
    return zeros


@triton.jit
def _next_stage(at, kept_at, GROUPED: tl.constexpr, launch: tl.constexpr, packed: tl.constexpr):
    """The position of the stage after the one at ``at``: the next slot's after a slot's last kept channel."""
    BLOCK_K: tl.constexpr = 16 * packed.steps
    following = at + BLOCK_K
    if packed.listed and GROUPED:
        SLOTS: tl.constexpr = launch.segment // packed.slot
        slot = tl.minimum(at // packed.slot, SLOTS - 1)
        last = slot * packed.slot + smem_load(kept_at, slot, tl.int32, True)
        following = tl.where(following < last, following, (slot + 1) * packed.slot)
    # With several tiles of x positions are not list entries; channels from K on are not loaded.
    return tl.minimum(following, launch.length - BLOCK_K) if packed.x_tiles == 1 else following


@triton.jit
def _load_codes(index, word_at, limit, at, split, launch: tl.constexpr, packed: tl.constexpr):
    """A lane's words of the step at ``at``, of each of its four channels."""
    LOAD: tl.constexpr = packed.load[0]
    CONSTRAINTS: tl.constexpr = packed.load[1]
    WORDS: tl.constexpr = 4 * packed.lane_words
    channel_at = index + (at * 4 if packed.listed else segment_channel(at, split, launch.splits, launch.chunk))
    return tl.inline_asm_elementwise(
        LOAD, CONSTRAINTS, [channel_at, word_at, limit], dtype=(tl.int32,) * WORDS, is_pure=False, pack=1
    )


@triton.jit
def _scale_factors(scales, COUNT: tl.constexpr, packed: tl.constexpr):
    """The registers of ``scale_source`` for each of a lane's COUNT columns; none where weights are not scaled before."""
    factors = ()
    SOURCE: tl.constexpr = packed.scale[0]
    CONSTRAINTS: tl.constexpr = packed.scale[1]
    if SOURCE != "":
        for i in tl.static_range(0, COUNT, 2):
            factors += tl.inline_asm_elementwise(
                SOURCE, CONSTRAINTS, [scales[i], scales[i + 1]], dtype=(tl.int32,) * 4, is_pure=True, pack=1
            )
    return factors


@triton.jit
def _multiply(
    acc, x_sums, codes, factors, values, at, LENGTH: tl.constexpr, BATCH: tl.constexpr, g, packed: tl.constexpr
):
    """Accumulate a step's products, and its sums of x if zero points need them; ``at``: its position in ``values``."""
    WORDS: tl.constexpr = packed.lane_words
    WORD_FACTORS: tl.constexpr = 16 if packed.scale[0] != "" else 0
    WORD_ACC: tl.constexpr = packed.word_acc
    ROW_TILES: tl.constexpr = (BATCH + 7) // 8
    PRODUCT: tl.constexpr = packed.product[0]
    PRODUCT_CONSTRAINTS: tl.constexpr = packed.product[1]
    TOTAL: tl.constexpr = packed.total[0]
    TOTAL_CONSTRAINTS: tl.constexpr = packed.total[1]
    x = ()
    for row_tile in tl.static_range(ROW_TILES):
        x_at = values + at * 2
        if row_tile > 0:
            x_at += (tl.minimum(g, BATCH - 8 * row_tile - 1) + 8 * row_tile - g) * (2 * LENGTH)
        x = x + tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [x_at], dtype=(tl.int32,) * 2, is_pure=False, pack=1
        )
    new_acc = ()
    for i in tl.static_range(WORDS):
        operands = ()
        for channel in tl.static_range(4):
            operands += (codes[channel * WORDS + i],)
        operands = operands + x + acc[i * WORD_ACC : (i + 1) * WORD_ACC]
        operands += factors[i * WORD_FACTORS : (i + 1) * WORD_FACTORS]
        new_acc = new_acc + tl.inline_asm_elementwise(
            PRODUCT, PRODUCT_CONSTRAINTS, operands, dtype=(tl.float32,) * WORD_ACC, is_pure=False, pack=1
        )
    new_sums = ()
    if TOTAL != "":
        for row_tile in tl.static_range(ROW_TILES):
            operands = x[2 * row_tile : 2 * row_tile + 2] + x_sums[4 * row_tile : 4 * row_tile + 4]
            new_sums = new_sums + tl.inline_asm_elementwise(
                TOTAL, TOTAL_CONSTRAINTS, operands, dtype=(tl.float32,) * 4, is_pure=False, pack=1
            )
    else:
        new_sums = x_sums
    return new_acc, new_sums


@triton.jit
def _load_scales(
    weights, scale_at, live, slot, split, problem: tl.constexpr, launch: tl.constexpr, packed: tl.constexpr
):
    """The scales of a slot's group for a lane's columns, then, if the weights have them, its zero points."""
    OUT_COLUMNS: tl.constexpr = packed.columns
    COLUMNS: tl.constexpr = problem.stride * (8 if problem.quant == "int4" else 4)
    GROUPS: tl.constexpr = problem.k // problem.group
    group = 0
    if GROUPS > 1:
        group = tl.minimum(
            segment_channel(slot * packed.slot, split, launch.splits, launch.chunk) // problem.group, GROUPS - 1
        )
    scales = _load_floats(weights.quant_scales + group * COLUMNS + scale_at, live, OUT_COLUMNS)
    if weights.quant_zeros is not None:
        scales = scales + _load_floats(weights.quant_zeros + group * COLUMNS + scale_at, live, OUT_COLUMNS)
    return scales


@triton.jit
def _load_floats(at, live, COUNT: tl.constexpr):
    """COUNT consecutive read-only float32 of each thread; undefined where not ``live``."""
    loaded = ()
    if COUNT % 4 == 0:
        for i in tl.static_range(0, COUNT, 4):
            loaded = loaded + tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }",
                "=f,=f,=f,=f,l,r", [(at + i).to(tl.int64), live.to(tl.int32)], dtype=(tl.float32,) * 4, is_pure=False,
                pack=1,
            )  # fmt: skip
    else:
        for i in tl.static_range(COUNT):
            loaded += (tl.load(at + i, mask=live, other=0.0),)
    return loaded


@triton.jit
def _add_scaled(sums, acc, x_sums, scales, replica, ZEROS: tl.constexpr, problem: tl.constexpr, packed: tl.constexpr):
    """sums + scale * (acc - zero * x_sums) / unit, of a lane's columns and rows."""
    INT4: tl.constexpr = problem.quant == "int4"
    OUT_COLUMNS: tl.constexpr = packed.columns
    LANE_ROWS: tl.constexpr = 1 if problem.batch == 1 else 2
    DEFAULT_ZERO: tl.constexpr = INT4_ZERO if INT4 else 0.0
    EVEN: tl.constexpr = 1.0 / packed.unit
    ODD: tl.constexpr = EVEN / 16.0
    ROW_TILES: tl.constexpr = (problem.batch + 7) // 8
    REPLICAS: tl.constexpr = packed.replicas
    added = ()
    for row_tile in tl.static_range(ROW_TILES):
        for lane_row in tl.static_range(LANE_ROWS):
            for i in tl.static_range(OUT_COLUMNS):
                value = _accumulator(acc, i, lane_row, row_tile, problem)
                for other in tl.static_range(1, REPLICAS):
                    of_other = _accumulator(acc, other * OUT_COLUMNS + i, lane_row, row_tile, problem)
                    value = tl.where(replica == other, of_other, value)
                if packed.scale[0] != "":
                    added += (value * EVEN,)
                else:
                    value = value * (ODD if INT4 and i % 2 == 1 else EVEN)
                    if problem.quant != "fp8":
                        zero = scales[OUT_COLUMNS + i] if ZEROS else DEFAULT_ZERO
                        value -= (zero if INT4 else _INT8_OFFSET + zero) * (x_sums[4 * row_tile + lane_row] * EVEN)
                    added += (sums[(row_tile * LANE_ROWS + lane_row) * OUT_COLUMNS + i] + scales[i] * value,)
    return added


@triton.jit
def _accumulator(acc, COLUMN: tl.constexpr, LANE_ROW: tl.constexpr, ROW_TILE: tl.constexpr, problem: tl.constexpr):
    """The accumulator of one of a lane's columns and rows, in the order of ``product_source``, word by word."""
    EACH: tl.constexpr = 8 if problem.quant == "int4" else 4
    ROW_TILES: tl.constexpr = (problem.batch + 7) // 8
    PAIR: tl.constexpr = (COLUMN // EACH * ROW_TILES + ROW_TILE) * (EACH // 2) + COLUMN % EACH // 2
    return acc[4 * PAIR + COLUMN % 2 * 2 + LANE_ROW]
