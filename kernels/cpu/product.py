"""Compiled: prompt products in bfloat16 by AMX tiles (16 x 32 times 32 x 16), and a decode step's integer products.

    y[t, n] = bfloat16(scale[n] * sum over k of x[t, k] * weight_t[k, n] + bias[n])

A thread has blocks of columns. A panel, some channels of a block, is converted to bfloat16 in the layout of AMX's
second operand: two consecutive channels interleaved. All rows are multiplied by the panel and accumulated in float32. A
weight is thus read once, whatever its type, and no converted copy of it is stored.

The second half has ``add_products``, integer dot products for int4 and graded weights.
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
TILE = 32  # rows, columns, and channels of a step of `multiply_tiles`
_AHEAD = 32  # channels to prefetch ahead: a block's rows are too short for the hardware prefetcher
PADDING = 16  # words between rows of a panel: rows a power of two apart would share a cache set


def _call(builder, name, kinds, *arguments):
    kind = ir.FunctionType(ir.VoidType(), kinds)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _tile(number):
    return ir.Constant(_I8, number)


@fixed(types.void())
def configure_tiles(builder):
    """Configure all eight tiles as 16 rows of 64 bytes."""
    bytes_ = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8
    value = ir.Constant(ir.ArrayType(_I8, 64), bytes_)
    config = cgutils.alloca_once_value(builder, value)
    _call(builder, "ldtilecfg", [_I8.as_pointer()], builder.bitcast(config, _I8.as_pointer()))


@fixed(types.void())
def release_tiles(builder):
    _call(builder, "tilerelease", [])


@fixed(types.void(*[types.int64] * 8))
def multiply_tiles(builder, rows, a, a_stride, b, b_stride, steps, c, c_stride):
    """c (R, 32) float32 += a (R, 32 * steps) @ b, b as interleaved pairs of channels (16 * steps, 32, 2); R: 16 if
    ``rows`` is at most 16, else 32. Strides are in bytes."""

    def tile_pointer(base, stride, row, column):
        row_at = builder.add(base, builder.mul(stride, ir.Constant(_I64, 16 * row)))
        return builder.inttoptr(builder.add(row_at, ir.Constant(_I64, 64 * column)), _I8.as_pointer())

    def move(name, tile, at, stride):
        _call(builder, name, [_I8, _I8.as_pointer(), _I64], _tile(tile), at, stride)

    def multiply(row_tiles):
        sums = [(2 * row + col, tile_pointer(c, c_stride, row, col)) for row in range(row_tiles) for col in range(2)]
        for tile, at in sums:
            move("tileloadd64", tile, at, c_stride)
        with cgutils.for_range(builder, steps) as loop:
            at = builder.add(a, builder.mul(loop.index, ir.Constant(_I64, 64)))
            bt = builder.add(b, builder.mul(loop.index, builder.mul(b_stride, ir.Constant(_I64, 16))))
            for row in range(row_tiles):
                move("tileloadd64", 4 + row, tile_pointer(at, a_stride, row, 0), a_stride)
            for column in range(2):
                move("tileloadd64", 6 + column, tile_pointer(bt, b_stride, 0, column), b_stride)
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
def _multiply_without_amx(rows, a, a_stride, b, b_stride, steps, c, c_stride):
    """`multiply_tiles` for tests on CPUs without AMX."""
    for t in range(min(rows, TILE)):
        x, sums = pointer(a + t * a_stride, _BF16), floats(c + t * c_stride)
        for i in range(16 * steps):
            pair = pointer(b + i * b_stride, _BF16)
            for j in range(TILE):
                sums[j] += widen(x[2 * i]) * widen(pair[2 * j]) + widen(x[2 * i + 1]) * widen(pair[2 * j + 1])


@exact
def _no_op():
    pass


if not HAS_TILES:
    configure_tiles = release_tiles = _no_op
    multiply_tiles = _multiply_without_amx


def _store_pairs(builder, to, first, second):
    """Interleave two vectors of 16 float32, truncated to bfloat16: to[2 j], to[2 j + 1] = first[j], second[j]."""
    sixteen = ir.Constant(_WORDS, [16] * 16)
    low = builder.lshr(builder.bitcast(first, _WORDS), sixteen)
    high = builder.and_(builder.bitcast(second, _WORDS), ir.Constant(_WORDS, [-65536] * 16))
    builder.store(builder.or_(low, high), builder.inttoptr(to, _WORDS.as_pointer())).align = 4


@fixed(types.void(*[types.int64] * 3))
def interleave_bfloat16(builder, to, first, second):
    """to[2 j], to[2 j + 1] = first[j], second[j], of two rows of 32 bfloat16."""
    rows = [load(builder, row, ir.VectorType(_I16, 32)) for row in (first, second)]
    for half in range(2):
        lanes = [16 * half + lane // 2 + lane % 2 * 32 for lane in range(32)]
        words = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(_I32, 32), lanes))
        pointer_ = builder.inttoptr(builder.add(to, ir.Constant(_I64, 64 * half)), words.type.as_pointer())
        builder.store(words, pointer_).align = 4


@fixed(types.void(*[types.int64] * 3))
def interleave_int8(builder, to, first, second):
    """The same of two rows of 16 int8, converted to bfloat16."""
    rows = (load(builder, row, ir.VectorType(_I8, 16)) for row in (first, second))
    _store_pairs(builder, to, *(widened(builder, row, types.int8) for row in rows))


@fixed(types.void(*[types.int64] * 5))
def interleave_int4(builder, to, first, second, scale, zero):
    """The same of two rows of 8 bytes of int4 codes, (code - zero) * scale rounded to bfloat16."""

    def dequantized(row):
        byte = load(builder, row, ir.VectorType(_I8, 8))
        lanes = ir.Constant(_WORDS, [lane // 2 for lane in range(16)])
        word = builder.zext(builder.shuffle_vector(byte, byte, lanes), _WORDS)
        code = builder.and_(builder.lshr(word, ir.Constant(_WORDS, [0, 4] * 8)), ir.Constant(_WORDS, [15] * 16))
        code = builder.fsub(builder.sitofp(code, _FLOATS), load(builder, zero, _FLOATS))
        bits = builder.bitcast(builder.fmul(code, load(builder, scale, _FLOATS)), _WORDS)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_WORDS, [16] * 16)), ir.Constant(_WORDS, [1] * 16))
        return builder.add(bits, builder.add(odd, ir.Constant(_WORDS, [0x7FFF] * 16)))

    _store_pairs(builder, to, dequantized(first), dequantized(second))


@exact
def _group_scales(field, g, lo, hi, scale, zero, tag):
    """Load a group's scales and zero points of outputs lo..hi as float32, in the order of outputs."""
    half, first = (field[ProjectionField.N] + 1) // 2, lo // 2
    scale_, zero_ = floats(scale), floats(zero)
    for parity in range(2):
        at = (2 * g + parity) * half + first
        scales = pointer(field[ProjectionField.COLUMN_SCALE] + at * size_of(tag), tag)
        zeros = pointer(field[ProjectionField.ZERO_POINT] + at, _BYTE)
        for j in range((hi - lo) // 2):
            scale_[2 * j + parity] = widen(scales[j])
            zero_[2 * j + parity] = _ZERO_CODE if field[ProjectionField.ZERO_POINT] == 0 else np.float32(zeros[j])


@exact
def _pack(field, k0, k1, lo, hi, panel, stride, scale, zero):
    """Convert channels k0..k1 of outputs lo..hi to a panel of interleaved pairs: ((k1 - k0) / 2, stride bytes)."""
    kind, n = field[ProjectionField.STORED_AS], field[ProjectionField.N]
    weight, last = field[ProjectionField.WEIGHT], field[ProjectionField.K] - 2
    if kind == StoredAs.INT4:
        row, loaded_group = field[ProjectionField.STRIDE], np.int64(-1)
        for k in range(k0, k1, 2):
            g = k // field[ProjectionField.GROUP]
            if g != loaded_group:
                loaded_group = g
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
                interleave_int4(to + 4 * j, from_ + j // 2, from_ + row + j // 2, scale + 4 * j, zero + 4 * j)
    elif kind == StoredAs.INT8:
        for k in range(k0, k1, 2):
            to, from_ = panel + (k - k0) // 2 * stride, weight + k * n + lo
            ahead = weight + min(k + _AHEAD, last) * n + lo
            for j in range(0, hi - lo, 16):
                if j % CACHE_LINE == 0:
                    prefetch_l2(ahead + j)
                    prefetch_l2(ahead + n + j)
                interleave_int8(to + 4 * j, from_ + j, from_ + n + j)
    else:
        for k in range(k0, k1, 2):
            to, from_ = panel + (k - k0) // 2 * stride, weight + 2 * (k * n + lo)
            ahead = weight + 2 * (min(k + _AHEAD, last) * n + lo)
            for j in range(0, hi - lo, 32):
                prefetch_l2(ahead + 2 * j)
                prefetch_l2(ahead + 2 * (n + j))
                interleave_bfloat16(to + 4 * j, from_ + 2 * j, from_ + 2 * (n + j))


@exact
def product(p):
    """y = x @ weight_t + bias, parameters as in `ProductField`; K and N are multiples of TILE."""
    threads, thread = np.int64(num_threads()), np.int64(thread_num())
    field, rows = words(p[ProductField.PROJECTION]), p[ProductField.ROWS]
    n, channels = field[ProjectionField.N], field[ProjectionField.K]
    columns, depth = p[ProductField.COLUMNS], p[ProductField.DEPTH]
    stride = 4 * (columns + PADDING)
    scale = p[ProductField.SCRATCH] + thread * p[ProductField.SCRATCH_BYTES]
    zero = scale + 4 * columns
    panel = zero + 4 * columns
    sums = panel + depth // 2 * stride
    x, x_stride = p[ProductField.X], p[ProductField.X_STRIDE]
    configure_tiles()
    blocks = n // TILE
    lo, end = blocks * thread // threads * TILE, blocks * (thread + 1) // threads * TILE
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


# --- integer products of a decode step ------------------------------------------------------------------------------

_PRODUCTS = types.void(*[types.int64] * 7, types.float32)


def _shuffled(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _zero_sums(builder, kind, count):
    """Stack variables for ``count`` pairs of accumulators, of upper and lower limbs, set to zero."""
    zero = ir.Constant(kind, [0] * kind.count)
    sums = [[cgutils.alloca_once(builder, kind) for _ in range(2)] for _ in range(count)]
    for accumulator in (accumulator for limbs in sums for accumulator in limbs):
        builder.store(zero, accumulator)
    return sums


def _load_step(builder, codes, rows, uppers, lowers, step, count, kind):
    """The ``count`` rows of codes of a step of `add_products`, and its limbs, broadcast to the lanes of ``kind``."""
    first = builder.mul(step, ir.Constant(_I64, count))
    limbs = []
    for address in (uppers, lowers):
        limb = builder.load(builder.inttoptr(builder.add(address, first), kind.element.as_pointer()))
        limb.align = 1
        limbs.append(splat(builder, limb, kind.count))
    offsets = [
        builder.add(rows, builder.shl(builder.add(first, ir.Constant(_I64, i)), ir.Constant(_I64, 3)))
        for i in range(count)
    ]
    offsets = [builder.load(builder.inttoptr(offset, _I64.as_pointer())) for offset in offsets]
    bytes_ = ir.VectorType(_I8, TILE_BYTES)
    return [load(builder, builder.add(codes, offset), bytes_) for offset in offsets], limbs


def _add_converted(builder, whole, unit, out, at):
    """out[at:] += unit * whole; out float32, whole a vector of int32."""
    kind = ir.VectorType(_F32, whole.type.count)
    out = builder.add(out, ir.Constant(_I64, 4 * at))
    scaled = builder.fmul(builder.sitofp(whole, kind), splat(builder, unit, kind.count), flags=("contract",))
    total = builder.fadd(load(builder, out, kind), scaled, flags=("contract",))
    builder.store(total, builder.inttoptr(out, kind.as_pointer())).align = 4


@fixed(_PRODUCTS)
def _add_pairs(builder, codes, rows, uppers, lowers, steps, even, odd, unit):
    """`add_products` by AVX2's pmaddubsw, two channels an instruction. 8 steps with limbs of at most 128 do not
    overflow the 16-bit sums."""
    vector, wide, words = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16), ir.VectorType(_I32, 8)
    kind = ir.FunctionType(wide, [vector, vector])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.ub.sw")
    # The bytes of each half after interleaving, which AVX2 does within lanes of 16 bytes.
    halves = [[*range(8 * half, 8 * half + 8), *range(16 + 8 * half, 24 + 8 * half)] for half in range(2)]
    sums = _zero_sums(builder, wide, 4)
    with cgutils.for_range(builder, steps) as loop:
        (a, b), limbs = _load_step(builder, codes, rows, uppers, lowers, loop.index, 2, wide)
        for half, bytes_ in enumerate(halves):
            both = _shuffled(builder, a, b, [lane for byte in bytes_ for lane in (byte, 32 + byte)])
            shifted = builder.lshr(builder.bitcast(both, wide), ir.Constant(wide, [4] * 16))
            for parity, nibbles in enumerate((both, builder.bitcast(shifted, vector))):
                low = builder.and_(nibbles, ir.Constant(vector, [15] * 32))
                for limb, total in zip(limbs, sums[2 * parity + half], strict=True):
                    product = builder.call(multiply, [low, builder.bitcast(limb, vector)])
                    builder.store(builder.add(builder.load(total), product), total)
    for parity, out in enumerate((even, odd)):
        for half, bytes_ in enumerate(halves):
            limb_sums = [builder.load(accumulator) for accumulator in sums[2 * parity + half]]
            for part in range(2):
                lanes = list(range(8 * part, 8 * part + 8))
                upper, lower = (builder.sext(_shuffled(builder, limb, limb, lanes), words) for limb in limb_sums)
                whole = builder.add(builder.shl(upper, ir.Constant(words, [LIMB] * 8)), lower)
                _add_converted(builder, whole, unit, out, bytes_[8 * part])


@fixed(_PRODUCTS)
def _add_quads(builder, codes, rows, uppers, lowers, steps, even, odd, unit):
    """`add_products` by AVX-512 VNNI's vpdpbusd, four channels an instruction, with 32-bit sums. Products of whole
    bytes and of masked high nibbles (times 16) are accumulated; their difference is that of the low nibbles."""
    wide, pairs = ir.VectorType(_I32, 16), ir.VectorType(_I16, 32)
    multiply = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(wide, [wide] * 3), "llvm.x86.avx512.vpdpbusd.512"
    )
    sums = _zero_sums(builder, wide, 8)
    with cgutils.for_range(builder, steps) as loop:
        rows_of_codes, limbs = _load_step(builder, codes, rows, uppers, lowers, loop.index, 4, wide)
        # Interleave within lanes of 16 bytes: bytes of two channels, then words of both pairs.
        for number in range(4):
            half, part = divmod(number, 2)
            lanes = [16 * lane + 8 * half + i // 2 + i % 2 * 64 for lane in range(4) for i in range(16)]
            first, second = (
                builder.bitcast(_shuffled(builder, *rows_of_codes[i : i + 2], lanes), pairs) for i in (0, 2)
            )
            lanes = [8 * lane + 4 * part + i // 2 + i % 2 * 32 for lane in range(4) for i in range(8)]
            quads = builder.bitcast(_shuffled(builder, first, second, lanes), wide)
            high = builder.and_(quads, ir.Constant(wide, [-0x0F0F0F10] * 16))
            for values, totals in zip((quads, high), sums[2 * number : 2 * number + 2], strict=True):
                for limb, total in zip(limbs, totals, strict=True):
                    builder.store(builder.call(multiply, [builder.load(total), values, limb]), total)
    totals = []
    for upper, lower in sums:
        shifted = builder.shl(builder.load(upper), ir.Constant(wide, [LIMB] * 16))
        totals.append(builder.add(shifted, builder.load(lower)))
    of_even = [builder.sub(whole, high) for whole, high in zip(totals[::2], totals[1::2], strict=True)]
    of_odd = [builder.ashr(high, ir.Constant(wide, [4] * 16)) for high in totals[1::2]]
    for vectors, out in ((of_even, even), (of_odd, odd)):
        # Lane l of vector i has the columns of the bytes from 16 l + 4 i on.
        for half in range(2):
            lanes = [16 * i + 4 * lane + j for i in range(2) for lane in (2 * half, 2 * half + 1) for j in range(4)]
            first, second = (_shuffled(builder, *vectors[i : i + 2], lanes) for i in (0, 2))
            for part in range(2):
                lanes = [8 * i + 4 * part + j for i in range(4) for j in range(4)]
                _add_converted(builder, _shuffled(builder, first, second, lanes), unit, out, 16 * (2 * half + part))


# even[0:TILE_BYTES] += unit * sum over i of v[i] * low nibbles of the bytes at codes + rows[i], odd the same of high
# nibbles; i < STEP * steps <= TOGETHER, v[i] = 2**LIMB * upper[i] + lower[i], limbs int8, rows int64. Sums are exact.
add_products = _add_quads if HAS_QUADS else _add_pairs
