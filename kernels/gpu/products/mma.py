"""PTX for products of codes on the tensor cores: the sources of the inline assembly in ``packed_kernel``, as text.

One ``mma.m16n8k16`` multiplies 16 columns of the weights by up to 8 rows of x over 16 channels. Lane 4 g + t holds two
of the 16 columns, which are its own (whatever their numbers), and four of the channels, t's; of x row g's values of
those channels; of the sums both columns' for rows 2 t and 2 t + 1.

Numbers made of codes, two channels in a register. Those below the smallest normal number stand for multiples of one
step, so that what has eight bits or fewer is a number as it is, in the low end of either type; no bit is added and no
constant subtracted. Tensor cores read such numbers as they are (Fasi and others, Numerical behavior of NVIDIA tensor
cores, 2021; on an H200 `benchmarks/gpu_packed.py check`). The step is tiny, `code_unit`, which for bfloat16 has the
power of two in it that x is multiplied by (`value_scale`), lest the sums be as small.

    int4   a byte's low four bits, and its high four where they are: 16 times the code
    int8   the eighth bit turned over: the code + 128
    fp8    its exponent and mantissa at the low end of the exponent: exactly the number, times a power of two

The sum of x over the channels, one more product, tells what zero points and the 128 come to.
"""

from __future__ import annotations

__all__ = ["INT8_OFFSET", "code_unit", "load_source", "product_source", "sum_source", "value_scale"]

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
