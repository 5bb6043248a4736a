"""What the kernels know of weights in codes (``matrix`` says how they lie): where a tile's columns are, and, in plain
Triton, the numbers that codes stand for. That is what the interpreter runs, and float32 activations; ``packed_kernel``
is the fast way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .matrix import COLUMN_BLOCK, MIDDLE

__all__ = ["code_columns", "decoded"]

_BLOCK = tl.constexpr(COLUMN_BLOCK)
_INT4_MIDDLE = tl.constexpr(MIDDLE["int4"])


@triton.jit
def code_columns(of, n, shape: tl.constexpr):
    """Where the columns ``n`` of a tile's projection stand among the padded ones: an index of ``code_scales``."""
    FIRST: tl.constexpr = (shape.n0 + _BLOCK - 1) // _BLOCK * _BLOCK
    SECOND: tl.constexpr = FIRST + (shape.n1 + _BLOCK - 1) // _BLOCK * _BLOCK
    return tl.where(of.projection == 0, 0, tl.where(of.projection == 1, FIRST, SECOND)) + n


@triton.jit
def decoded(weights, column, k, live, wide: tl.constexpr, shape: tl.constexpr, modes: tl.constexpr):
    """(code - zero) * scale of the channels ``k`` (BLOCK_K,) and the padded columns (BLOCK_N,), wide; 0 where not
    ``live`` (BLOCK_K, BLOCK_N). No product of a code and a scale is rounded to the weights' type."""
    BITS: tl.constexpr = 4 if modes.codes == "int4" else 8
    EACH: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = shape.stride * EACH
    at = k.to(tl.int64)[:, None] * shape.stride + (column // EACH)[None, :]
    word = tl.load(weights.weight_t + at, mask=live, other=0)
    code = (word >> ((column % EACH) * BITS)[None, :]) & (15 if modes.codes == "int4" else 255)
    if modes.codes == "fp8":
        # As a float32 whose exponent is 120 too small; that of subnormal numbers too.
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        value = (bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0).to(wide)
    else:
        value = ((code ^ 128) - 128 if modes.codes == "int8" else code).to(wide)
    scale_at = (k // modes.group)[:, None] * COLUMNS + column[None, :]
    if weights.zeros is not None:
        value -= tl.load(weights.zeros + scale_at, mask=live, other=0.0).to(wide)
    elif modes.codes == "int4":
        value -= _INT4_MIDDLE
    return value * tl.load(weights.code_scales + scale_at, mask=live, other=0.0).to(wide)
