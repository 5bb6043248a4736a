"""PTX for products of codes on the tensor cores: the sources of the inline assembly in ``packed_kernel``, as text.

One ``mma.m16n8k16`` multiplies 16 columns of the weights by up to 8 rows of x over 16 channels. Lane 4 g + t holds two
of the 16 columns, which are its own (whatever their numbers), and four of the channels, t's; of x row g's values of
those channels; of the sums both columns' for rows 2 t and 2 t + 1.

Numbers made of codes, two channels in a register:

    int4   four bits in the high mantissa of a number whose exponent is fixed: (16 + code) * `unit`. No subtraction: the
           sum of x over the channels, one more product, tells what was too much.
    int8   seven bits so, minus the same number with the eighth alone: the code, exactly.
    fp8    its exponent and mantissa in the places of the wider type, times a power of two: exactly the number.
"""

from __future__ import annotations

__all__ = ["ONES", "code_unit", "load_source", "product_source", "sum_source"]

_TYPES = {"bfloat16": "bf16", "float16": "f16"}
# 1.0 twice, and the exponent under which four or seven bits are the end, or the high end, of the mantissa.
ONES = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}
_MAGIC = {"bfloat16": 0x43004300, "float16": 0x64006400}
# Where four bits stand in the mantissa: how far each of a half word's four has to be moved to the left.
_MASK4 = {"bfloat16": 0x00780078, "float16": 0x03C003C0}
_MOVES4 = {"bfloat16": (3, -1, -5, -9), "float16": (6, 2, -2, -6)}
_MINUS_ONE = {"bfloat16": 0xBF80BF80, "float16": 0xBC00BC00}
# fp8 in the high byte of each half: moved to the right, where the bits then are, and the power of two that is missing.
_FP8 = {"bfloat16": (4, 0x07F007F0, 0x7B807B80), "float16": (1, 0x3F803F80, 0x5C005C00)}


def code_unit(kind: str, dtype: str) -> float:
    """What the products' sums are multiples of."""
    return (8.0 if dtype == "bfloat16" else 64.0) if kind == "int4" else 1.0


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
    lines = ["{ .reg .b32 p<2>, s<2>, o<2>, a<4>;"]
    for pair in range(pairs):
        for second in range(2):
            column = 2 * pair + second
            unpack = _unpack4 if kind == "int4" else _unpack8
            lines += unpack(kind, dtype, word, column, (f"a{second}", f"a{second + 2}"))
        for part in range(parts):
            at = 4 * (part * pairs + pair)
            d = ", ".join(f"${at + i}" for i in range(4))
            c = ", ".join(f"${before + at + i}" for i in range(4))
            lines.append(_mma(dtype, d, "a0, a1, a2, a3", x[part], c))
    return " ".join(lines) + " }", ",".join(["=f"] * sums + ["r"] * (4 + 2 * parts) + ["f"] * sums)


def sum_source(dtype: str) -> tuple[str, str]:
    """Source and constraints: x's rows added up. Out: four sums, the first two of rows 2 t and 2 t + 1; in: x's two
    registers, the sums before."""
    one = f"{ONES[dtype]:#x}"
    lines = ["{ .reg .b32 a;", f"mov.b32 a, {one};"]
    lines.append(_mma(dtype, "$0, $1, $2, $3", "a, a, a, a", "{$4, $5}", "$6, $7, $8, $9"))
    return " ".join(lines) + " }", ",".join(["=f"] * 4 + ["r"] * 2 + ["f"] * 4)


def _mma(dtype: str, d: str, a: str, b: str, c: str) -> str:
    of = _TYPES[dtype]
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 {{{d}}}, {{{a}}}, {b}, {{{c}}};"


def _unpack4(kind: str, dtype: str, word: list[str], column: int, out: tuple[str, str]) -> list[str]:
    """One column of the four channels, two in each register of ``out``."""
    lines = []
    if column % 4 == 0:
        selector = "0x5410" if column == 0 else "0x7632"
        lines += [f"prmt.b32 p{i}, {word[2 * i]}, {word[2 * i + 1]}, {selector};" for i in range(2)]
    move = _MOVES4[dtype][column % 4]
    moved = f"shl.b32 s{{0}}, p{{0}}, {move};" if move > 0 else f"shr.u32 s{{0}}, p{{0}}, {-move};"
    for i in range(2):
        lines.append(moved.format(i))
        lines.append(f"lop3.b32 {out[i]}, s{i}, {_MASK4[dtype]:#x}, {_MAGIC[dtype]:#x}, 0xea;")
    return lines


def _unpack8(kind: str, dtype: str, word: list[str], column: int, out: tuple[str, str]) -> list[str]:
    lines = []
    of, magic = _TYPES[dtype], f"{_MAGIC[dtype]:#x}"
    for i in range(2):
        # The byte twice, in both halves' both bytes: whatever is not wanted is masked.
        selector = f"{(4 + column) * 0x1100 + column * 0x11:#x}"
        lines.append(f"prmt.b32 p{i}, {word[2 * i]}, {word[2 * i + 1]}, {selector};")
        if kind == "int8":
            lines.append(f"lop3.b32 s{i}, p{i}, 0x007f007f, {magic}, 0xea;")
            lines.append(f"lop3.b32 o{i}, p{i}, 0x00800080, {magic}, 0xea;")
            lines.append(f"fma.rn.{of}x2 {out[i]}, o{i}, m, s{i};")
        else:
            move, mask, _ = _FP8[dtype]
            lines.append(f"shr.u32 s{i}, p{i}, {move};")
            lines.append(f"and.b32 o{i}, s{i}, {mask:#x};")
            lines.append(f"lop3.b32 s{i}, p{i}, 0x80008000, o{i}, 0xea;")
            lines.append(f"fma.rn.{of}x2 {out[i]}, s{i}, m, z;")
    if column == 0:
        constant = _MINUS_ONE[dtype] if kind == "int8" else _FP8[dtype][2]
        lines = [".reg .b32 m, z;", f"mov.b32 m, {constant:#x};", "mov.b32 z, 0x80008000;", *lines]
    return lines
