"""Compiled: products of a prompt's many rows in bfloat16 by AMX, whose tiles multiply 16 x 32 by 32 x 16 numbers.

    y[t, n] = bfloat16(scale[n] * sum over k of x[t, k] * weight_t[k, n] + bias[n])

A thread owns blocks of columns. Some channels of a block at a time are widened, or copied, to bfloat16 as tiles want
them: of two channels that follow each other the numbers side by side. All rows are multiplied with these, and the sums
kept in float32. So a weight is read once, whatever its type, and nothing of its size is written.

At the end: the sums of products of bytes that a decode step's int4 and graded weights take.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .intrinsics import (
    HAS_QUADS,
    HAS_TILES,
    LIMB,
    TILE_BYTES,
    ZERO,
    exact,
    fixed,
    floats,
    load,
    narrow,
    num_threads,
    pointer,
    prefetch_l2,
    size_of,
    splat,
    thread_num,
    widen,
    widened,
    words,
)
from .layout import CACHE_LINE, ProductField, ProjectionField, ScaleType, StoredAs

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, 16)
_WORDS = ir.VectorType(_I32, 16)
_BYTE, _BF16, _HALF = np.uint8(0), np.uint16(0), np.int16(0)
_ZERO_CODE = np.float32(8)
TILE = 32  # rows, or twice as many as there are, and columns of `multiply_tiles`, and channels of one of its steps
_AHEAD = 32  # channels, whose weights are prefetched: rows of a block are too short for the processor to foresee more
PADDING = 16  # words between rows of a panel: rows a power of two apart share a set of the cache


def _call(builder, name, kinds, *arguments):
    kind = ir.FunctionType(ir.VoidType(), kinds)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _tile(number):
    return ir.Constant(_I8, number)


@fixed(types.void())
def configure_tiles(builder):
    """All eight tiles: 16 rows of 64 bytes."""
    bytes_ = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8
    value = ir.Constant(ir.ArrayType(_I8, 64), bytes_)
    place = cgutils.alloca_once_value(builder, value)
    _call(builder, "ldtilecfg", [_I8.as_pointer()], builder.bitcast(place, _I8.as_pointer()))


@fixed(types.void())
def release_tiles(builder):
    _call(builder, "tilerelease", [])


@fixed(types.void(*[types.int64] * 8))
def multiply_tiles(builder, rows, a, a_stride, b, b_stride, steps, c, c_stride):
    """c (R, 32) float32 += a (R, 32 * steps) times b, pairs of channels (16 * steps, 32, 2); R is 32, or 16 where ``rows``
    are no more; strides are bytes."""

    def place(base, stride, row, column):
        below = builder.add(base, builder.mul(stride, ir.Constant(_I64, 16 * row)))
        return builder.inttoptr(builder.add(below, ir.Constant(_I64, 64 * column)), _I8.as_pointer())

    def move(name, tile, at, stride):
        _call(builder, name, [_I8, _I8.as_pointer(), _I64], _tile(tile), at, stride)

    def multiply(high):
        sums = [(2 * row + column, place(c, c_stride, row, column)) for row in range(high) for column in range(2)]
        for tile, at in sums:
            move("tileloadd64", tile, at, c_stride)
        with cgutils.for_range(builder, steps) as loop:
            at = builder.add(a, builder.mul(loop.index, ir.Constant(_I64, 64)))
            bt = builder.add(b, builder.mul(loop.index, builder.mul(b_stride, ir.Constant(_I64, 16))))
            for row in range(high):
                move("tileloadd64", 4 + row, place(at, a_stride, row, 0), a_stride)
            for column in range(2):
                move("tileloadd64", 6 + column, place(bt, b_stride, 0, column), b_stride)
            for tile, _ in sums:
                _call(builder, "tdpbf16ps", [_I8] * 3, _tile(tile), _tile(4 + tile // 2), _tile(6 + tile % 2))
        for tile, at in sums:
            move("tilestored64", tile, at, c_stride)

    with builder.if_else(builder.icmp_signed(">", rows, ir.Constant(_I64, TILE // 2))) as (two, one):
        with two:
            multiply(2)
        with one:
            multiply(1)


@exact
def _multiply_plainly(rows, a, a_stride, b, b_stride, steps, c, c_stride):
    """`multiply_tiles` without the tiles: what it computes, to test the rest anywhere."""
    for t in range(min(rows, TILE)):
        x, sums = pointer(a + t * a_stride, _BF16), floats(c + t * c_stride)
        for i in range(16 * steps):
            pair = pointer(b + i * b_stride, _BF16)
            for j in range(TILE):
                sums[j] += widen(x[2 * i]) * widen(pair[2 * j]) + widen(x[2 * i + 1]) * widen(pair[2 * j + 1])


@exact
def _nothing():
    pass


if not HAS_TILES:
    configure_tiles = release_tiles = _nothing
    multiply_tiles = _multiply_plainly


def _store_pairs(builder, to, first, second):
    """16 words, each of a number of ``first`` below one of ``second``: float32 vectors that hold bfloat16 numbers."""
    sixteen = ir.Constant(_WORDS, [16] * 16)
    low = builder.lshr(builder.bitcast(first, _WORDS), sixteen)
    high = builder.and_(builder.bitcast(second, _WORDS), ir.Constant(_WORDS, [-65536] * 16))
    builder.store(builder.or_(low, high), builder.inttoptr(to, _WORDS.as_pointer())).align = 4


@fixed(types.void(*[types.int64] * 3))
def pair_numbers(builder, to, first, second):
    """to[j] = number j of both rows of 32 bfloat16."""
    rows = [load(builder, row, ir.VectorType(_I16, 32)) for row in (first, second)]
    for half in range(2):
        lanes = [16 * half + lane // 2 + lane % 2 * 32 for lane in range(32)]
        words = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(_I32, 32), lanes))
        place = builder.inttoptr(builder.add(to, ir.Constant(_I64, 64 * half)), words.type.as_pointer())
        builder.store(words, place).align = 4


@fixed(types.void(*[types.int64] * 3))
def pair_codes(builder, to, first, second):
    """The same of two rows of 16 int8."""
    rows = (load(builder, row, ir.VectorType(_I8, 16)) for row in (first, second))
    _store_pairs(builder, to, *(widened(builder, row, types.int8) for row in rows))


@fixed(types.void(*[types.int64] * 5))
def pair_nibbles(builder, to, first, second, scale, zero):
    """The same of two rows of 8 bytes, (code - zero) * scale rounded to bfloat16."""

    def numbers(row):
        byte = load(builder, row, ir.VectorType(_I8, 8))
        lanes = ir.Constant(_WORDS, [lane // 2 for lane in range(16)])
        word = builder.zext(builder.shuffle_vector(byte, byte, lanes), _WORDS)
        code = builder.and_(builder.lshr(word, ir.Constant(_WORDS, [0, 4] * 8)), ir.Constant(_WORDS, [15] * 16))
        code = builder.fsub(builder.sitofp(code, _FLOATS), load(builder, zero, _FLOATS))
        bits = builder.bitcast(builder.fmul(code, load(builder, scale, _FLOATS)), _WORDS)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_WORDS, [16] * 16)), ir.Constant(_WORDS, [1] * 16))
        return builder.add(bits, builder.add(odd, ir.Constant(_WORDS, [0x7FFF] * 16)))

    _store_pairs(builder, to, numbers(first), numbers(second))


@exact
def _group_scales(field, g, lo, hi, scale, zero, tag):
    """A group's scales and zero points of outputs lo..hi, in the order of outputs."""
    half, first = (field[ProjectionField.N] + 1) // 2, lo // 2
    scale_, zero_ = floats(scale), floats(zero)
    for parity in range(2):
        at = (2 * g + parity) * half + first
        from_ = pointer(field[ProjectionField.COLUMN_SCALE] + at * size_of(tag), tag)
        points = pointer(field[ProjectionField.ZERO_POINT] + at, _BYTE)
        for j in range((hi - lo) // 2):
            scale_[2 * j + parity] = widen(from_[j])
            zero_[2 * j + parity] = _ZERO_CODE if field[ProjectionField.ZERO_POINT] == 0 else np.float32(points[j])


@exact
def _pack(field, k0, k1, lo, hi, panel, stride, scale, zero):
    """Channels k0..k1 of outputs lo..hi as pairs: ((k1 - k0) / 2, stride bytes)."""
    kind, n = field[ProjectionField.STORED_AS], field[ProjectionField.N]
    weight, last = field[ProjectionField.WEIGHT], field[ProjectionField.K] - 2
    if kind == StoredAs.INT4:
        row, before = field[ProjectionField.STRIDE], np.int64(-1)
        for k in range(k0, k1, 2):
            g = k // field[ProjectionField.GROUP]
            if g != before:
                before = g
                if field[ProjectionField.SCALE_TYPE] == ScaleType.BFLOAT16:
                    _group_scales(field, g, lo, hi, scale, zero, _BF16)
                elif field[ProjectionField.SCALE_TYPE] == ScaleType.FLOAT16:
                    _group_scales(field, g, lo, hi, scale, zero, _HALF)
                else:
                    _group_scales(field, g, lo, hi, scale, zero, ZERO)
            to, from_ = panel + (k - k0) // 2 * stride, weight + k * row + lo // 2
            ahead = weight + min(k + _AHEAD, last) * row + lo // 2
            for j in range(0, hi - lo, 16):
                if j % (2 * CACHE_LINE) == 0:
                    prefetch_l2(ahead + j // 2)
                    prefetch_l2(ahead + row + j // 2)
                pair_nibbles(to + 4 * j, from_ + j // 2, from_ + row + j // 2, scale + 4 * j, zero + 4 * j)
    elif kind == StoredAs.INT8:
        for k in range(k0, k1, 2):
            to, from_ = panel + (k - k0) // 2 * stride, weight + k * n + lo
            ahead = weight + min(k + _AHEAD, last) * n + lo
            for j in range(0, hi - lo, 16):
                if j % CACHE_LINE == 0:
                    prefetch_l2(ahead + j)
                    prefetch_l2(ahead + n + j)
                pair_codes(to + 4 * j, from_ + j, from_ + n + j)
    else:
        for k in range(k0, k1, 2):
            to, from_ = panel + (k - k0) // 2 * stride, weight + 2 * (k * n + lo)
            ahead = weight + 2 * (min(k + _AHEAD, last) * n + lo)
            for j in range(0, hi - lo, 32):
                prefetch_l2(ahead + 2 * j)
                prefetch_l2(ahead + 2 * (n + j))
                pair_numbers(to + 4 * j, from_ + 2 * j, from_ + 2 * (n + j))


@exact
def product(p):
    """See `ProductField`. K and N are multiples of TILE."""
    parts, part = np.int64(num_threads()), np.int64(thread_num())
    field, rows = words(p[ProductField.PROJECTION]), p[ProductField.ROWS]
    n, channels = field[ProjectionField.N], field[ProjectionField.K]
    columns, depth = p[ProductField.COLUMNS], p[ProductField.DEPTH]
    stride = 4 * (columns + PADDING)
    scale = p[ProductField.SCRATCH] + part * p[ProductField.SCRATCH_BYTES]
    zero = scale + 4 * columns
    panel = zero + 4 * columns
    sums = panel + depth // 2 * stride
    x, x_stride = p[ProductField.X], p[ProductField.X_STRIDE]
    configure_tiles()
    blocks = n // TILE
    lo, end = blocks * part // parts * TILE, blocks * (part + 1) // parts * TILE
    while lo < end:
        hi = min(lo + columns, end)
        for t in range(rows):
            sums_ = floats(sums + t * stride)
            for j in range(hi - lo):
                sums_[j] = ZERO
        for k0 in range(0, channels, depth):
            k1 = min(k0 + depth, channels)
            _pack(field, k0, k1, lo, hi, panel, stride, scale, zero)
            for t in range(0, rows, TILE):
                for j in range(0, hi - lo, TILE):
                    multiply_tiles(
                        rows - t, x + t * x_stride + 2 * k0, x_stride, panel + 4 * j, stride, (k1 - k0) // TILE,
                        sums + t * stride + 4 * j, stride,
                    )  # fmt: skip
        scales, bias = floats(field[ProjectionField.COLUMN_SCALE]), floats(field[ProjectionField.BIAS])
        for t in range(p[ProductField.KEPT]):
            sums_, y = floats(sums + t * stride), pointer(p[ProductField.Y] + 2 * (t * n + lo), _BF16)
            if field[ProjectionField.STORED_AS] == StoredAs.INT8:
                for j in range(hi - lo):
                    sums_[j] *= scales[lo + j]
            if field[ProjectionField.BIAS] != 0:
                for j in range(hi - lo):
                    sums_[j] += bias[lo + j]
            for j in range(hi - lo):
                y[j] = narrow(sums_[j], _BF16)
        lo = hi
    release_tiles()


# --- integers of a decode step --------------------------------------------------------------------------------------

_PRODUCTS = types.void(*[types.int64] * 7, types.float32)


def _shuffled(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _zero_sums(builder, kind, count):
    """For each of ``count`` vectors of products two places, for the numbers' upper and lower limbs."""
    zero = ir.Constant(kind, [0] * kind.count)
    sums = [[cgutils.alloca_once(builder, kind) for _ in range(2)] for _ in range(count)]
    for place in (place for limbs in sums for place in limbs):
        builder.store(zero, place)
    return sums


def _step_of(builder, codes, rows, uppers, lowers, step, count, kind):
    """The ``count`` rows of bytes of one step of `add_products`, and its limbs in all lanes of ``kind``."""
    first = builder.mul(step, ir.Constant(_I64, count))
    limbs = []
    for numbers in (uppers, lowers):
        limb = builder.load(builder.inttoptr(builder.add(numbers, first), kind.element.as_pointer()))
        limb.align = 1
        limbs.append(splat(builder, limb, kind.count))
    offsets = [
        builder.add(rows, builder.shl(builder.add(first, ir.Constant(_I64, i)), ir.Constant(_I64, 3)))
        for i in range(count)
    ]
    offsets = [builder.load(builder.inttoptr(offset, _I64.as_pointer())) for offset in offsets]
    bytes_ = ir.VectorType(_I8, TILE_BYTES)
    return [load(builder, builder.add(codes, offset), bytes_) for offset in offsets], limbs


def _add_rounded(builder, whole, unit, out, at):
    """The floats from number ``at`` of ``out`` on += unit * whole."""
    kind = ir.VectorType(_F32, whole.type.count)
    out = builder.add(out, ir.Constant(_I64, 4 * at))
    scaled = builder.fmul(builder.sitofp(whole, kind), splat(builder, unit, kind.count), flags=("contract",))
    total = builder.fadd(load(builder, out, kind), scaled, flags=("contract",))
    builder.store(total, builder.inttoptr(out, kind.as_pointer())).align = 4


@fixed(_PRODUCTS)
def _add_pairs(builder, codes, rows, uppers, lowers, steps, even, odd, unit):
    """Two channels an instruction (AVX2). Sums have 16 bits, which 16 steps of limbs of at most 64 do not overflow."""
    vector, wide, words = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16), ir.VectorType(_I32, 8)
    kind = ir.FunctionType(wide, [vector, vector])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.ub.sw")
    # Which bytes' pairs a half holds: as the processor interleaves, within 16 bytes.
    halves = [[*range(8 * half, 8 * half + 8), *range(16 + 8 * half, 24 + 8 * half)] for half in range(2)]
    sums = _zero_sums(builder, wide, 4)
    with cgutils.for_range(builder, steps) as loop:
        (a, b), limbs = _step_of(builder, codes, rows, uppers, lowers, loop.index, 2, wide)
        for half, bytes_ in enumerate(halves):
            both = _shuffled(builder, a, b, [lane for one in bytes_ for lane in (one, 32 + one)])
            shifted = builder.lshr(builder.bitcast(both, wide), ir.Constant(wide, [4] * 16))
            for parity, nibbles in enumerate((both, builder.bitcast(shifted, vector))):
                kept = builder.and_(nibbles, ir.Constant(vector, [15] * 32))
                for limb, total in zip(limbs, sums[2 * parity + half], strict=True):
                    product = builder.call(multiply, [kept, builder.bitcast(limb, vector)])
                    builder.store(builder.add(builder.load(total), product), total)
    for parity, out in enumerate((even, odd)):
        for half, bytes_ in enumerate(halves):
            of_limbs = [builder.load(one) for one in sums[2 * parity + half]]
            for part in range(2):
                lanes = list(range(8 * part, 8 * part + 8))
                upper, lower = (builder.sext(_shuffled(builder, one, one, lanes), words) for one in of_limbs)
                whole = builder.add(builder.shl(upper, ir.Constant(words, [LIMB] * 8)), lower)
                _add_rounded(builder, whole, unit, out, bytes_[8 * part])


@fixed(_PRODUCTS)
def _add_quads(builder, codes, rows, uppers, lowers, steps, even, odd, unit):
    """Four channels an instruction, with sums of 32 bits (AVX-512 VNNI). A byte's low nibble is the byte less its high
    nibble, which counts 16 times."""
    wide, pairs = ir.VectorType(_I32, 16), ir.VectorType(_I16, 32)
    multiply = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(wide, [wide] * 3), "llvm.x86.avx512.vpdpbusd.512"
    )
    sums = _zero_sums(builder, wide, 8)
    with cgutils.for_range(builder, steps) as loop:
        found, limbs = _step_of(builder, codes, rows, uppers, lowers, loop.index, 4, wide)
        # As the processor interleaves, within 16 bytes: bytes of two channels, then words of both pairs.
        for number in range(4):
            half, part = divmod(number, 2)
            lanes = [16 * lane + 8 * half + i // 2 + i % 2 * 64 for lane in range(4) for i in range(16)]
            first, second = (builder.bitcast(_shuffled(builder, *found[i : i + 2], lanes), pairs) for i in (0, 2))
            lanes = [8 * lane + 4 * part + i // 2 + i % 2 * 32 for lane in range(4) for i in range(8)]
            quads = builder.bitcast(_shuffled(builder, first, second, lanes), wide)
            high = builder.and_(quads, ir.Constant(wide, [-0x0F0F0F10] * 16))
            for values, totals in zip((quads, high), sums[2 * number : 2 * number + 2], strict=True):
                for limb, total in zip(limbs, totals, strict=True):
                    builder.store(builder.call(multiply, [builder.load(total), values, limb]), total)
    numbers = []
    for upper, lower in sums:
        shifted = builder.shl(builder.load(upper), ir.Constant(wide, [LIMB] * 16))
        numbers.append(builder.add(shifted, builder.load(lower)))
    of_even = [builder.sub(whole, high) for whole, high in zip(numbers[::2], numbers[1::2], strict=True)]
    of_odd = [builder.ashr(high, ir.Constant(wide, [4] * 16)) for high in numbers[1::2]]
    for some, out in ((of_even, even), (of_odd, odd)):
        # Lane l of vector i holds the bytes from 16 l + 4 i on.
        for half in range(2):
            lanes = [16 * i + 4 * lane + j for i in range(2) for lane in (2 * half, 2 * half + 1) for j in range(4)]
            first, second = (_shuffled(builder, *some[i : i + 2], lanes) for i in (0, 2))
            for part in range(2):
                lanes = [8 * i + 4 * part + j for i in range(4) for j in range(4)]
                _add_rounded(builder, _shuffled(builder, first, second, lanes), unit, out, 16 * (2 * half + part))


# even[0:TILE_BYTES], odd[0:TILE_BYTES] += unit * the sum over STEP * steps channels, at most TOGETHER, of a number,
# 2**LIMB * upper + lower, times its low or its high nibble of the bytes at ``codes + rows[i]`` (int64). Limbs are int8;
# products of bytes are exact.
add_products = _add_quads if HAS_QUADS else _add_pairs
