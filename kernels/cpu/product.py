"""Compiled: products of a prompt's many rows in bfloat16 by AMX, whose tiles multiply 16 x 32 by 32 x 16 numbers.

    y[t, n] = bfloat16(scale[n] * sum over k of x[t, k] * weight_t[k, n] + bias[n])

A thread owns blocks of columns. Some channels of a block at a time are widened, or copied, to bfloat16 as tiles want
them: of two channels that follow each other the numbers side by side. All rows are multiplied with these, and the sums
kept in float32. So a weight is read once, whatever its type, and nothing of its size is written.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .intrinsics import (
    HAS_TILES,
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
    thread_num,
    widen,
    widened,
    words,
)
from .layout import CACHE_LINE, ProductField, ProjectionField, ScaleType, StoredAs

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS = ir.VectorType(ir.FloatType(), 16)
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
    rows = [load(builder, row, ir.VectorType(ir.IntType(16), 32)) for row in (first, second)]
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
