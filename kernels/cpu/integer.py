"""Compiled: products of int4 codes with activations in 16-bit integers.

    sums[j] += sum over 16 kept channels of q_k * code[k, j]        q_k = round(x_k / s),  s = max |x| / 32512

``s`` is shared by at most `PIECE` channels of one row, so the rounding is 2^-16 of the largest activation among them: less
than bfloat16's own. Integer sums are exact, hence the same for any number of threads and beside any other row.

One instruction multiplies 32 codes with 8-bit halves of q and adds them in pairs of channels (``pmaddubsw``), which is
half as long again as widening every code to float32. A row's quantised activations, for each 16 channels: 8 words of
(h0, h1, h0, h1) int8, then 8 words of (l0, l1, l0, l1), with q = 256 h + l.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba import types

from .intrinsics import ZERO, exact, fixed, float_to_bits, floats, pointer, prefetch, words
from .layout import BATCH, CACHE_LINE, QUANTIZED_WORDS

_LARGEST = np.float32(32512)  # 127 * 256: both halves of q fit int8
_MAGIC, _MAGIC_BITS = np.float32(12582912), np.int32(0x4B400000)  # adding 1.5 * 2**23 rounds to an integer
_SMALLEST = np.float32(1e-30)
_TILE = 256  # bytes of a row; the next channels' are fetched while these are added, as they have no stride to predict

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _vector(lanes: int, bits: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(bits), lanes)


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, mask: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(_vector(len(mask), 32), list(mask)))


def _interleave(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(a0, b0, a1, b1, ...) of the lower and of the upper half of every 16 bytes, as the unpack instructions do."""
    count = a.type.count
    per = 16 * 8 // a.type.element.width
    halves = []
    for half in range(2):
        places = [lane * per + half * per // 2 + i for lane in range(count // per) for i in range(per // 2)]
        halves.append(_shuffle(builder, a, b, [place for i in places for place in (i, count + i)]))
    return halves[0], halves[1]


def _pair_sums(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, x86: str, *, signed: bool) -> ir.Value:
    """a0 b0 + a1 b1, a2 b2 + a3 b3, ... in lanes twice as wide; ``x86`` names the instruction for this there."""
    count, width = a.type.count, a.type.element.width
    if x86 and _X86:
        result = _vector(count // 2, 2 * width)
        kind = ir.FunctionType(result, [a.type, b.type])
        function = builder.module.globals.get(x86) or ir.Function(builder.module, kind, x86)
        return builder.call(function, [a, b])
    wide = _vector(count, 2 * width)
    products = builder.mul(builder.sext(a, wide) if signed else builder.zext(a, wide), builder.sext(b, wide))
    even, odd = (_shuffle(builder, products, products, range(first, count, 2)) for first in range(2))
    return builder.add(even, odd)


def _constant(kind: ir.VectorType, *values: int) -> ir.Constant:
    return ir.Constant(kind, list(values) * (kind.count // len(values)))


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _over_columns(size: int):  # type: ignore[no-untyped-def]
    """An intrinsic (rows, x, sums, length, odd) that adds 16 channels' products, ``size`` bytes of codes (32 or 16) at a
    time. rows: 16 addresses; x: 16 words; sums: int32; length: bytes, a multiple of ``size``; odd: from the even outputs'
    sums to the odd ones', in bytes."""
    codes, shorts, words_ = _vector(size, 8), _vector(size // 2, 16), _vector(size // 4, 32)
    multiply_bytes = "llvm.x86.avx2.pmadd.ub.sw" if size == 32 else "llvm.x86.ssse3.pmadd.ub.sw.128"
    multiply_shorts = "llvm.x86.avx2.pmadd.wd" if size == 32 else "llvm.x86.sse2.pmadd.wd"

    @fixed(types.void(*[types.int64] * 5))
    def add(builder: ir.IRBuilder, rows, x, sums, length, odd):  # type: ignore[no-untyped-def]
        def offset(base: ir.Value, by: int) -> ir.Value:
            return builder.add(base, ir.Constant(_I64, by))

        bases = [_load(builder, offset(rows, 8 * i), _I64) for i in range(BATCH)]
        factors = []
        for i in range(BATCH):
            word = _load(builder, offset(x, 4 * i), _I32)
            one = builder.insert_element(ir.Constant(words_, ir.Undefined), word, ir.Constant(_I32, 0))
            factors.append(builder.bitcast(_shuffle(builder, one, one, [0] * words_.count), codes))
        entry, loop, end = builder.block, builder.append_basic_block("columns"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(_I64)
        at.add_incoming(ir.Constant(_I64, 0), entry)

        # Sums in 16 bits of the lower and upper half of every 16 even outputs, then of the odd ones, by halves of q.
        totals: list[list] = [[None, None] for _ in range(4)]
        for pair in range(BATCH // 2):
            both = [_load(builder, builder.add(bases[2 * pair + i], at), codes) for i in range(2)]
            halves = _interleave(builder, *both)
            low = [builder.and_(half, _constant(codes, 15)) for half in halves]
            shifted = [builder.lshr(builder.bitcast(half, shorts), _constant(shorts, 4)) for half in halves]
            high = [builder.and_(builder.bitcast(half, codes), _constant(codes, 15)) for half in shifted]
            for total, nibbles in zip(totals, low + high, strict=True):
                for part in range(2):
                    factor = factors[8 * part + pair]
                    product = _pair_sums(builder, nibbles, factor, multiply_bytes, signed=False)
                    total[part] = product if total[part] is None else builder.add(total[part], product)

        # 256 h + l in 32 bits, in order of outputs, onto the sums in memory.
        for k, total in enumerate(totals):
            weights = _constant(shorts, 256, 1)
            a, b = (_pair_sums(builder, v, weights, multiply_shorts, signed=True) for v in _interleave(builder, *total))
            base = builder.add(sums, builder.mul(at, ir.Constant(_I64, 4)))
            base = builder.add(base, odd) if k // 2 else base
            for lane in range(size // 16):
                eight = [place + i for place in (4 * lane, a.type.count + 4 * lane) for i in range(4)]
                value = _shuffle(builder, a, b, eight)
                address = offset(base, 4 * (16 * lane + 8 * (k % 2)))
                target = builder.inttoptr(address, value.type.as_pointer())
                before = builder.load(target)
                before.align = builder.store(builder.add(before, value), target).align = 4  # type: ignore[attr-defined]

        after = offset(at, size)
        at.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", after, length), loop, end)
        builder.position_at_end(end)

    return add


_add_32, _add_16 = _over_columns(32), _over_columns(16)


@exact
def quantize(value, count, quantized):
    """Quantise ``count`` (<= `PIECE`) activations; returns their scale and the sum of q. A NaN or an infinity makes the
    scale NaN."""
    v, words_ = floats(value), pointer(quantized, np.int32(0))
    largest, check = ZERO, ZERO
    for i in range(count):
        largest = max(largest, abs(v[i]))
        check += v[i] * ZERO
    inverse, scale = ZERO, ZERO
    if largest > _SMALLEST:
        inverse, scale = _LARGEST / largest, largest / _LARGEST
    total = np.int64(0)
    for i in range(0, (count + BATCH - 1) // BATCH * BATCH, 2):
        a, b = np.int64(0), np.int64(0)
        if i < count:
            a = np.int64(float_to_bits(v[i] * inverse + _MAGIC) - _MAGIC_BITS)
        if i + 1 < count:
            b = np.int64(float_to_bits(v[i + 1] * inverse + _MAGIC) - _MAGIC_BITS)
        total += a + b
        low_a, low_b = ((a + 128) & 255) - 128, ((b + 128) & 255) - 128
        high_a, high_b = (a - low_a) >> 8, (b - low_b) >> 8
        at = i // BATCH * BATCH + i % BATCH // 2
        words_[at] = np.int32(((high_a & 255) | ((high_b & 255) << 8)) * 65537)
        words_[at + 8] = np.int32(((low_a & 255) | ((low_b & 255) << 8)) * 65537)
    return scale + check, np.float32(total)


@exact
def _quantized_at(quantized, i):
    """q of channel i."""
    words_ = pointer(quantized, np.int32(0))
    at, shift = i // BATCH * BATCH + i % BATCH // 2, 8 * (i % 2)
    high, low = (words_[at] >> shift) & 255, (words_[at + 8] >> shift) & 255
    return ((high ^ 128) - 128) * 256 + (low ^ 128) - 128


@exact
def add_codes(codes, stride, index, count, quantized, rows, width, sums, sums_stride, addresses):
    """sums[b, :] = products of ``count`` channels, whose codes are ``width`` bytes at ``codes + index * stride``.

    sums: (rows, sums_stride) int32, the even outputs' in 0..width, the odd ones' in width..2 width; quantized: (rows,
    `QUANTIZED_WORDS`); addresses: room for 16.
    """
    addresses_ = words(addresses)
    for b in range(rows):
        s = pointer(sums + 4 * b * sums_stride, np.int32(0))
        for j in range(2 * width):
            s[j] = np.int32(0)
    for first in range(0, count, BATCH):
        for x in range(0, width, _TILE):
            length = min(_TILE, width - x)
            for i in range(first + BATCH, min(first + 2 * BATCH, count)):
                ahead = codes + x + np.int64(index[i]) * stride
                for line in range(0, length, CACHE_LINE):
                    prefetch(ahead + line)
            for i in range(BATCH):  # beyond the end q is 0
                addresses_[i] = codes + x + np.int64(index[min(first + i, count - 1)]) * stride
            whole = length // 32 * 32
            if whole > 0:
                for b in range(rows):
                    q, out = quantized + 4 * (b * QUANTIZED_WORDS + first), sums + 4 * (b * sums_stride + x)
                    _add_32(addresses, q, out, whole, 4 * width)
            if length - whole >= 16:
                for i in range(BATCH):
                    addresses_[i] += whole
                for b in range(rows):
                    q, out = quantized + 4 * (b * QUANTIZED_WORDS + first), sums + 4 * (b * sums_stride + x + whole)
                    _add_16(addresses, q, out, np.int64(16), 4 * width)
                whole += 16
            for i in range(first, min(first + BATCH, count) if whole < length else first):  # the last few bytes
                code = pointer(codes + x + np.int64(index[i]) * stride, np.uint8(0))
                for b in range(rows):
                    q = _quantized_at(quantized + 4 * b * QUANTIZED_WORDS, i)
                    s = pointer(sums + 4 * (b * sums_stride + x), np.int32(0))
                    for j in range(whole, length):
                        s[j] = np.int32(s[j] + q * (code[j] & 15))
                        s[width + j] = np.int32(s[width + j] + q * (code[j] >> 4))
