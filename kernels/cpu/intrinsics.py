"""Numba intrinsics for the CPU kernels: raw pointers, 16-bit loads and stores, atomics, OpenMP and libc calls, exp.

Kernels are generic over a weight's type by a ``tag``, a scalar whose numba type tells how to interpret the bits:

    float32 -> float32    uint16 -> bfloat16    int16 -> float16    int8 -> int8    uint8 -> float8 e4m3
"""

from __future__ import annotations

import inspect
import operator
import platform
import time
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload

# OpenMP's and libc's functions under names of our own, which `launch` registers before compiled code is loaded.
SYMBOLS = (
    "wisparse_thread_num",
    "wisparse_num_threads",
    "wisparse_usleep",
    "wisparse_clock_gettime",
    "wisparse_madvise",
)
thread_num = types.ExternalFunction(SYMBOLS[0], types.int32())
num_threads = types.ExternalFunction(SYMBOLS[1], types.int32())
sleep_us = types.ExternalFunction(SYMBOLS[2], types.int32(types.uint32))
advise_memory = types.ExternalFunction(SYMBOLS[4], types.int32(types.int64, types.int64, types.int32))

ZERO, ONE = np.float32(0), np.float32(1)
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_CLOCK = getattr(time, "CLOCK_MONOTONIC", 1)
_ALIGN = 32  # columns: one cache line of bfloat16


@overload(operator.getitem)
def _field_of(parameters, field):
    """Indexing a pointer by an IntEnum."""
    if isinstance(parameters, types.CPointer) and isinstance(field, types.IntEnumMember):
        return lambda parameters, field: parameters[field.value]
    return None


def fixed(signature):
    """Decorator: an intrinsic with a fixed signature, from a function of the LLVM builder and the arguments."""

    def decorate(emit):
        def codegen(context, builder, _, args):
            result = emit(builder, *args)
            return context.get_dummy_value() if signature.return_type == types.void else result

        def typed(typingctx, *args):
            return signature, codegen

        typed.__name__, typed.__signature__ = emit.__name__, inspect.signature(emit)
        return intrinsic(typed)

    return decorate


@intrinsic
def pointer(typingctx, address, tag):
    """An int64 address as a pointer to elements of ``tag``'s type."""
    result = types.CPointer(tag)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, tag), codegen


@intrinsic
def size_of(typingctx, tag):
    def codegen(context, builder, signature, args):
        return ir.Constant(_I64, tag.bitwidth // 8)

    return types.int64(tag), codegen


def widened(builder, value, tag):
    """A scalar or a vector of ``tag``'s type, converted to float32."""
    lanes = getattr(value.type, "count", 0)

    def kind(one):
        return ir.VectorType(one, lanes) if lanes else one

    if tag == types.uint16:  # bfloat16 is the upper half of a float32
        sixteen = ir.Constant(kind(_I32), [16] * lanes if lanes else 16)
        return builder.bitcast(builder.shl(builder.zext(value, kind(_I32)), sixteen), kind(_F32))
    if tag == types.int16:
        return builder.fpext(builder.bitcast(value, kind(ir.HalfType())), kind(_F32))
    return builder.sitofp(value, kind(_F32)) if tag == types.int8 else value


@intrinsic
def widen(typingctx, value):
    """A stored value converted to float32, exactly."""

    def codegen(context, builder, signature, args):
        if value == types.uint8:  # e4m3: its bits moved into a float16 give the value times 2**-8
            code = builder.zext(args[0], ir.IntType(16))
            sign, rest = (builder.and_(code, ir.Constant(code.type, mask)) for mask in (0x80, 0x7F))
            sign, rest = (builder.shl(x, ir.Constant(x.type, by)) for x, by in ((sign, 8), (rest, 7)))
            half = builder.bitcast(builder.or_(sign, rest), ir.HalfType())
            return builder.fmul(builder.fpext(half, _F32), ir.Constant(_F32, 256.0))
        return widened(builder, args[0], value)

    return types.float32(value), codegen


FOLDED = 16  # pairs of columns of a call of `add_folded`
DOTTED = 64  # weights of a step of `four_dots`
LANES = 32  # columns of a call of `add_lanes`, at most a cache line; bytes of a call of `add_nibbles`
_EIGHT = types.UniTuple(types.int64, 8)
_VALUES = types.UniTuple(types.float32, 8)


def load(builder, address, kind):
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1 if kind.element != _F32 else 4
    return value


def splat(builder, value, count):
    one = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, ir.Constant(_I32, 0)
    )
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def _add_scaled(builder, outs, rows, values, codes):
    """For each of ``outs``, (address, lanes): out += sum_i values[i] * codes(rows[i]), in order; ``codes`` returns the
    vectors of a row, one for each of ``outs``."""
    sums = [[load(builder, out, ir.VectorType(_F32, count)), count] for out, count in outs]
    for i in range(8):
        value = builder.extract_value(values, i)
        for total, vector in zip(sums, codes(builder.extract_value(rows, i)), strict=True):
            product = builder.fmul(splat(builder, value, total[1]), vector, flags=("contract",))
            total[0] = builder.fadd(total[0], product, flags=("contract",))
    for (out, _), (vector, _) in zip(outs, sums, strict=True):
        builder.store(vector, builder.inttoptr(out, vector.type.as_pointer())).align = 4


@intrinsic
def add_lanes(typingctx, out, rows, values, offset, tag):
    """out[j] += sum_i values[i] * (weights of ``tag``'s type at rows[i] + offset)[j], of eight rows and LANES columns,
    or those of a cache line if fewer."""

    def codegen(context, builder, signature, args):
        lanes = min(LANES, 512 // tag.bitwidth)
        kind = ir.VectorType(context.get_value_type(tag), lanes)
        to, rows, values, offset, _ = args

        def codes(row):
            return [widened(builder, load(builder, builder.add(row, offset), kind), tag)]

        _add_scaled(builder, [(to, lanes)], rows, values, codes)
        return context.get_dummy_value()

    return types.void(types.int64, _EIGHT, _VALUES, types.int64, tag), codegen


@fixed(types.void(types.int64, types.int64, _EIGHT, _VALUES, types.int64))
def add_nibbles(builder, even, odd, rows, values, offset):
    """`add_lanes` for the low nibbles (even columns) and the high nibbles (odd columns) of LANES bytes."""
    wide = ir.VectorType(_I32, LANES)

    def codes(row):
        word = builder.zext(load(builder, builder.add(row, offset), ir.VectorType(ir.IntType(8), LANES)), wide)
        halves = builder.and_(word, ir.Constant(wide, [15] * LANES)), builder.lshr(word, ir.Constant(wide, [4] * LANES))
        return [builder.sitofp(half, ir.VectorType(_F32, LANES)) for half in halves]

    _add_scaled(builder, [(even, LANES), (odd, LANES)], rows, values, codes)


@intrinsic
def four_dots(typingctx, rows, x, count, ahead, tag):
    """Four dot products: the first ``count`` weights, of ``tag``'s type, at each address of ``rows``, times float32 x;
    ``count`` is a multiple of DOTTED. Prefetches ``ahead`` bytes further on."""
    lanes, size = 16, tag.bitwidth // 8

    def codegen(context, builder, signature, args):
        kind, stored = ir.VectorType(_F32, lanes), ir.VectorType(context.get_value_type(tag), lanes)
        addresses = [builder.extract_value(args[0], i) for i in range(4)]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(kind, [0.0] * lanes)) for _ in range(4)]
        with cgutils.for_range(builder, builder.sdiv(args[2], ir.Constant(_I64, DOTTED))) as loop:
            first = builder.mul(loop.index, ir.Constant(_I64, DOTTED))
            at = [builder.add(row, builder.mul(first, ir.Constant(_I64, size))) for row in addresses]
            values = builder.add(args[1], builder.shl(first, ir.Constant(_I64, 2)))
            for line in range(0, DOTTED * size, 64):
                for row in at:
                    _prefetch(builder, builder.add(builder.add(row, args[3]), ir.Constant(_I64, line)))
            for j in range(0, DOTTED, lanes):
                value = load(builder, builder.add(values, ir.Constant(_I64, 4 * j)), kind)
                for row, total in zip(at, sums, strict=True):
                    weights = load(builder, builder.add(row, ir.Constant(_I64, size * j)), stored)
                    product = builder.fmul(value, widened(builder, weights, tag), flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        results = []
        for total in sums:
            vector, width = builder.load(total), lanes
            while width > 1:
                width //= 2
                halves = [ir.Constant(ir.VectorType(_I32, width), list(range(i, i + width))) for i in (0, width)]
                vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
            results.append(builder.extract_element(vector, ir.Constant(_I32, 0)))
        return context.make_tuple(builder, signature.return_type, results)

    return types.UniTuple(types.float32, 4)(
        types.UniTuple(types.int64, 4), types.int64, types.int64, types.int64, tag
    ), codegen


@intrinsic
def add_folded(typingctx, out, even, odd, even_scale, odd_scale, subtracted, tag):
    """out[2 j] += (even[j] - subtracted) * even_scale[j], out[2 j + 1] += the same of odd, for FOLDED values of j;
    scales of ``tag``'s type."""

    def codegen(context, builder, signature, args):
        kind = ir.VectorType(_F32, FOLDED)
        scales = ir.VectorType(context.get_value_type(tag), FOLDED)
        subtracted, parts = splat(builder, args[5], FOLDED), []
        for sums, scale in ((args[1], args[3]), (args[2], args[4])):
            part = builder.fsub(load(builder, sums, kind), subtracted)
            parts.append(builder.fmul(part, widened(builder, load(builder, scale, scales), tag), flags=("contract",)))
        lanes = [i // 2 + i % 2 * FOLDED for i in range(2 * FOLDED)]
        both = builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(_I32, 2 * FOLDED), lanes))
        total = builder.fadd(load(builder, args[0], both.type), both, flags=("contract",))
        builder.store(total, builder.inttoptr(args[0], total.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32, tag), codegen


@intrinsic
def narrow(typingctx, value, tag):
    """A float32 rounded to nearest even in ``tag``'s type: float32, bfloat16 or float16."""
    i16 = ir.IntType(16)

    def codegen(context, builder, signature, args):
        if tag == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), i16)
        if tag != types.uint16:
            return args[0]
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        # Rounding a NaN up could carry into its sign bit: set the quiet bit instead.
        quiet = builder.or_(bits, ir.Constant(_I32, 0x400000))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), ir.Constant(_I32, 16)), i16)

    return tag(types.float32, tag), codegen


@fixed(types.float32(types.uint8, types.int64))
def nibble(builder, byte, shift):
    """Four bits of a byte, from bit ``shift`` on, as float32."""
    word = builder.zext(byte, _I32)  # before the shift: x86 has no vector shift of bytes
    word = builder.lshr(word, builder.trunc(shift, _I32))
    return builder.sitofp(builder.and_(word, ir.Constant(_I32, 15)), _F32)


_config: Any = numba.config  # Any: its attributes are defined at run time
# Those that numba compiles for, whatever NUMBA_CPU_NAME is.
_features = str(get_host_cpu_features() if _config.CPU_FEATURES is None else _config.CPU_FEATURES)
_x86 = platform.machine().lower() in ("x86_64", "amd64")
# Whether the target processor supports `add_products`, and whether by AVX-512 instructions.
HAS_PRODUCTS = _x86 and "+avx2" in _features.split(",")
HAS_QUADS = HAS_PRODUCTS and {"+avx512bw", "+avx512vnni"} <= set(_features.split(","))
HAS_TILES = "+amx-bf16" in _features.split(",")  # of `product`
# Of `add_products`: channels of a call, bits of a value's lower limb; channels of an instruction, bytes of a row.
TOGETHER, LIMB = 16, 8
STEP, TILE_BYTES = (4, 64) if HAS_QUADS else (2, 32)


@fixed(types.float32(types.int32))
def bits_to_float(builder, value):
    return builder.bitcast(value, _F32)


@fixed(types.int32(types.float32))
def float_to_bits(builder, value):
    return builder.bitcast(value, _I32)


@fixed(types.void(_EIGHT, types.int64))
def prefetch_rows(builder, rows, offset):
    """Prefetch a cache line of each of eight rows."""
    for i in range(8):
        _prefetch(builder, builder.add(builder.extract_value(rows, i), offset))


def _prefetch(builder, address, locality=3):
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    words = [ir.Constant(_I32, value) for value in (0, locality, 1)]  # read, 3: nearest cache, data
    builder.call(function, [builder.inttoptr(address, byte), *words])


@fixed(types.void(types.int64))
def prefetch(builder, address):
    """Prefetch the cache line at an address, which need not be valid."""
    _prefetch(builder, address)


@fixed(types.void(types.int64))
def prefetch_l2(builder, address):
    """`prefetch` into the L2 cache, where lines a power of two apart do not evict each other."""
    _prefetch(builder, address, 2)


@fixed(types.int64(types.int64, types.int64))
def add_word(builder, address, value):
    """Atomic fetch-and-add on an int64."""
    return builder.atomic_rmw("add", builder.inttoptr(address, _I64.as_pointer()), value, "acq_rel")


@fixed(types.int64(types.int64))
def get_word(builder, address):
    """Load an int64 with acquire ordering."""
    return builder.load_atomic(builder.inttoptr(address, _I64.as_pointer()), "acquire", 8)


@fixed(types.void(types.int64, types.int64))
def put_word(builder, address, value):
    """Store an int64 with release ordering."""
    builder.store_atomic(value, builder.inttoptr(address, _I64.as_pointer()), "release", 8)


@fixed(types.void())
def relax(builder):
    """The processor's spin-wait hint (pause, yield)."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        kind, name, arguments = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause", []
    elif machine in ("aarch64", "arm64"):
        kind, name = ir.FunctionType(ir.VoidType(), [_I32]), "llvm.aarch64.hint"
        arguments = [ir.Constant(_I32, 1)]  # yield
    else:
        return
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@fixed(types.int64())
def now_ns(builder):
    spec = cgutils.alloca_once(builder, _I64, 2)  # struct timespec
    kind = ir.FunctionType(_I32, [_I32, _I64.as_pointer()])
    clock = cgutils.get_or_insert_function(builder.module, kind, SYMBOLS[3])
    builder.call(clock, [ir.Constant(_I32, _CLOCK), spec])
    seconds, rest = (builder.load(builder.gep(spec, [ir.Constant(_I32, i)])) for i in range(2))
    return builder.add(builder.mul(seconds, ir.Constant(_I64, 10**9)), rest)


# "contract" allows fused multiply-adds, whose results do not depend on the vector width. "reassoc" allows reordered
# sums, whose results do: used for dot products only, whose order compilation fixes.
exact = njit(error_model="numpy", fastmath={"contract"})
dot = njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@exact
def floats(address):
    return pointer(address, ZERO)


@exact
def words(address):
    return pointer(address, np.int64(0))


@exact
def span(length, thread, threads):
    """The first column of a thread, a multiple of ``_ALIGN``; ``span(length, thread + 1, threads)`` is its end."""
    units = (length + _ALIGN - 1) // _ALIGN
    return min(length, units * thread // threads * _ALIGN)


@exact
def exp32(x):
    """e**x in float32, within 2 ulp (Cephes' expf); vectorizes, unlike libc's."""
    y = min(max(x, np.float32(-87.3)), np.float32(88.7))
    magic = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    z = (y * np.float32(1.44269504088896341) + magic) - magic
    r = y - z * np.float32(0.693359375) + z * np.float32(2.12194440e-4)
    s = np.float32(1.9875691500e-4)
    s = s * r + np.float32(1.3981999507e-3)
    s = s * r + np.float32(8.3334519073e-3)
    s = s * r + np.float32(4.1665795894e-2)
    s = s * r + np.float32(1.6666665459e-1)
    s = s * r + np.float32(5.0000001201e-1)
    s = s * r * r + r + ONE
    # Two factors, because 2**128 is not a float32 although e**88.7 is.
    half = np.int32(z) >> np.int32(1)
    first = bits_to_float(np.int32((half + np.int32(127)) << np.int32(23)))
    second = bits_to_float(np.int32((np.int32(z) - half + np.int32(127)) << np.int32(23)))
    return s * first * second if x == x else x


@exact
def number(word):
    """The float32 number in a row's word."""
    return bits_to_float(np.int32(word))


@exact
def tanh32(x):
    """tanh in float32, within 2 ulp (Cephes' tanhf)."""
    z = x * x
    s = np.float32(-5.70498872745e-3)
    s = s * z + np.float32(2.06390887954e-2)
    s = s * z - np.float32(5.37397155531e-2)
    s = s * z + np.float32(1.33314422036e-1)
    s = s * z - np.float32(3.33332819422e-1)
    large = ONE - np.float32(2) / (exp32(np.float32(2) * abs(x)) + ONE)
    return s * z * x + x if abs(x) < np.float32(0.625) else (large if x > ZERO else -large)


@exact
def soft_cap(x, cap):
    """cap * tanh(x / cap)."""
    return cap * tanh32(x / cap)
