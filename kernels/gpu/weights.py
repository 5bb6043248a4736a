"""Weights on the device, transposed to (K, N): unquantized, or int4, int8 or fp8 packed into int32 words.

    weight[k, n] = (q[k, n] - zero[k // group, n]) * scale[k // group, n]    ``widen``; the twin is ``dequantize``

Unquantized: (K, stride), the projections' columns side by side; the stride is a multiple of 16 elements.
Quantized: (K, words), each projection padded to a multiple of 256 columns, so that a warp's loads of 16 bytes a lane
never span two projections. A word holds consecutive columns of one channel, the first in its lowest bits:

    int4   bits 0-3 column 8 w | 4-7 column 8 w + 1 | ... | 28-31 column 8 w + 7            zero 8, or a zero point
    int8   bits 0-7 column 4 w | 8-15 column 4 w + 1 | ...  two's complement                zero 0, or a zero point
    fp8    the same, e4m3                                                                   no zero
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import Problem, Weights

BITS = {"int4": 4, "int8": 8, "fp8": 8}
ZERO = {"int4": 8, "int8": 0, "fp8": 0}  # default zero points
COLUMN_BLOCK = 256
_UNQUANTIZED_BLOCK = 16
CHUNK = 8 << 20  # weights stored or dequantized at a time, which bounds temporary memory
BLOCK = tl.constexpr(COLUMN_BLOCK)
INT4_ZERO = tl.constexpr(float(ZERO["int4"]))
_WIDEN_ROWS, _WIDEN_WARPS = 32, 4  # of a program of ``widen``, which has COLUMN_BLOCK columns


@dataclass(frozen=True)
class DeviceWeight:
    """Weights (K, N) of one to three projections; ``dtype``: of x and of the products' outputs."""

    quant: str  # "none", "int4", "int8" or "fp8"
    data: Tensor  # (K, stride) of dtype; quantized: (K, words) int32
    scales: Tensor | None  # quantized: (K / group, padded columns) float32; 0 in the padding
    zeros: Tensor | None  # the same shape, zero points; None: the type's default
    group: int  # consecutive rows that share a scale; 0: unquantized
    dtype: torch.dtype
    widths: tuple[int, ...]
    planes: int = 1  # 2: graded, int4 rows 2 k and 2 k + 1 are the high and the low plane of channel k

    @property
    def in_features(self) -> int:
        return self.data.shape[0] // self.planes

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scales, self.zeros) if part is not None)

    def first(self, index: int) -> int:
        """The first column of a projection, in ``scales`` and in the unpacked data."""
        widths = self.widths[:index]
        return sum(widths) if self.quant == "none" else sum(map(padded_width, widths))


class LinearShape(NamedTuple):
    """The properties of a fused linear that its plan depends on."""

    in_features: int  # rows of the weights: channels times planes
    widths: tuple[int, ...]
    stride: int
    dtype: torch.dtype
    device: torch.device
    dense: bool
    quant: str = "none"
    group: int = 0
    planes: int = 1
    experts: int = 0  # of a linear of experts; the other fields are those of one expert
    chosen: int = 0  # experts of a row
    zeros: bool = False  # with zero points

    def problem(self, **fields: Any) -> Problem:
        """The constants of a kernel that computes the linear; ``fields``: beyond those of the shape."""
        n0, n1, n2, n3 = (*self.widths, *[0] * (4 - len(self.widths)))
        return Problem(
            k=self.in_features, n0=n0, n1=n1, n2=n2, n3=n3, n=sum(self.widths), stride=self.stride,
            quant=self.quant, group=self.group, planes=self.planes, **{"dense": self.dense} | fields,
        )  # fmt: skip


@dataclass(frozen=True)
class FusedLinear:
    """Projections of the same input, fused along N, and their masks."""

    weight: DeviceWeight
    bias: Tensor | None  # (N,) of the weights' dtype
    scales: Tensor  # (projections, K) float32, channel scales
    thresholds: Tensor  # (projections * planes,) float32
    dense: bool  # all thresholds are 0: no channel is ever dropped

    @property
    def widths(self) -> tuple[int, ...]:
        return self.weight.widths

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    @property
    def num_bytes_read(self) -> int:
        return self.weight.num_bytes

    @cached_property
    def shape(self) -> LinearShape:
        weight, data = self.weight, self.weight.data
        return LinearShape(
            len(data), self.widths, data.stride(0), weight.dtype, data.device, self.dense, weight.quant, weight.group,
            weight.planes, zeros=weight.zeros is not None,
        )  # fmt: skip


def padded_width(width: int) -> int:
    """The columns of a projection in the quantized layout."""
    return triton.cdiv(width, COLUMN_BLOCK) * COLUMN_BLOCK


def unquantized(data: Tensor, widths: tuple[int, ...]) -> DeviceWeight:
    """Unquantized weights: data (K, stride), of which the first ``sum(widths)`` columns are used."""
    return DeviceWeight("none", data, None, None, 0, data.dtype, widths)


def empty_weight(
    quant: str, k: int, widths: tuple[int, ...], group: int | None, dtype: torch.dtype, device: torch.device | str,
    *, zeros: bool = False, planes: int = 1,
) -> DeviceWeight:  # fmt: skip
    """A weight that ``store_columns`` fills. k: rows, ``planes`` for each channel; group: rows that share a scale, a
    divisor of k, None: all; zeros: with zero points."""
    if quant == "none":
        stride = triton.cdiv(sum(widths), _UNQUANTIZED_BLOCK) * _UNQUANTIZED_BLOCK
        return unquantized(torch.empty(k, stride, dtype=dtype, device=device), widths)
    group = k if group is None else group
    columns = sum(map(padded_width, widths))
    data = torch.zeros(k, columns * BITS[quant] // 32, dtype=torch.int32, device=device)
    scales = torch.zeros(k // group, columns, dtype=torch.float32, device=device)
    zero_points = torch.full_like(scales, ZERO[quant]) if zeros else None
    return DeviceWeight(quant, data, scales, zero_points, group, dtype, widths, planes)


def store_columns(
    weight: DeviceWeight, index: int, codes: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None
) -> None:
    """Store projection ``index`` from a checkpoint's (N, K) layout. codes: (N, K), int4 (N, ceil(K / 2)) uint8, channel
    2 j in the low half of byte j; unquantized: the weights. scales: (N, K / group) or (N, 1). zeros: the same, None:
    the type's default. Graded weights: planes interleaved by `weight_types.interleaved`."""
    k, width, first = len(weight.data), weight.widths[index], weight.first(index)
    expected = (width, (k + 1) // 2 if weight.quant == "int4" else k)
    if tuple(codes.shape) != expected:
        raise ValueError(f"codes: expected {expected}, found {tuple(codes.shape)}")
    columns = slice(first, first + width)
    if weight.scales is None or scales is None:
        weight.data[:, columns].copy_(codes.T)
        return
    weight.scales[:, columns] = scales.T.to(weight.scales)
    if zeros is not None:
        if weight.zeros is None:
            raise ValueError("zeros: the weight was made without zero points")
        weight.zeros[:, columns] = zeros.T.to(weight.zeros)
    raw = weight.data.view(torch.uint8)
    step = max(COLUMN_BLOCK, CHUNK // k // COLUMN_BLOCK * COLUMN_BLOCK)
    for start in range(0, width, step):
        chunk = codes[start : start + step].to(raw.device)
        if weight.quant == "int4":
            # From two channels in a byte to two columns in a byte.
            chunk = torch.nn.functional.pad(chunk, (0, 0, 0, len(chunk) % 2))
            even, odd = chunk[::2], chunk[1::2]
            chunk = torch.stack(((even & 15) | (odd << 4), (even >> 4) | (odd & 240)), dim=2).flatten(1)[:, :k]
        at = (first + start) * BITS[weight.quant] // 8
        raw[:, at : at + len(chunk)] = chunk.view(torch.uint8).T


def dequantize(weight: DeviceWeight, index: int, out: Tensor, *, low: bool = False) -> Tensor:
    """Projection ``index`` of a quantized weight: float32 (q - zero) * scale, rounded to the dtype of ``out`` (K, N),
    which may have any strides and is returned; ``low``: only the low plane of graded weights."""
    assert weight.scales is not None
    raw, k, bits = weight.data.view(torch.uint8), len(weight.data), BITS[weight.quant]
    width, first = weight.widths[index], weight.first(index)
    columns, step = slice(first, first + width), max(1, CHUNK // width) * weight.planes
    for begin in range(0, k, step):
        rows = slice(begin, min(k, begin + step))
        codes = raw[rows, first * bits // 8 : (first + padded_width(width)) * bits // 8]
        if weight.quant == "int4":
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        else:
            codes = codes.view(torch.int8 if weight.quant == "int8" else torch.float8_e4m3fn)
        groups = torch.arange(rows.start, rows.stop, device=raw.device) // weight.group
        zero = ZERO[weight.quant] if weight.zeros is None else weight.zeros[groups, columns]
        values, scales = codes[:, :width].float() - zero, weight.scales[groups, columns]
        if weight.planes == 2:
            values = values[1::2] if low else 16 * values[::2] + values[1::2]
            scales = scales[::2]
        first_row = begin // weight.planes
        out[first_row : first_row + len(values)] = values.mul_(scales)
    return out


@triton.jit
def code_values(words, QUANT: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr = 0):
    """The codes of int32 words from bit SHIFT on, at most 12, converted to float32, minus ZERO, an integer."""
    if QUANT == "fp8":
        # The bits moved into a float32 give the value times 2^-120, also of subnormals.
        code = words >> SHIFT
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    # Bit SHIFT of the fraction of a float32 in [2^(23 - SHIFT), 2^(24 - SHIFT)) is worth 1: no shift and no conversion.
    INT8: tl.constexpr = QUANT == "int8"
    bits = (words & ((255 if INT8 else 15) << SHIFT)) ^ (((150 - SHIFT) << 23) + ((128 << SHIFT) if INT8 else 0))
    return bits.to(tl.float32, bitcast=True) - ((1 << (23 - SHIFT)) + (128 if INT8 else 0) + ZERO)


@triton.jit
def _unpack(words, QUANT: tl.constexpr, ZERO: tl.constexpr):
    """The ``code_values`` (R, columns) of words (R, W). tl.join keeps a word's columns, in order, in its thread."""
    high = words >> 16
    if QUANT == "int4":
        even = tl.join(
            tl.join(code_values(words, QUANT, ZERO), code_values(high, QUANT, ZERO)),
            tl.join(code_values(words, QUANT, ZERO, 8), code_values(high, QUANT, ZERO, 8)),
        )
        odd = tl.join(
            tl.join(code_values(words, QUANT, ZERO, 4), code_values(high, QUANT, ZERO, 4)),
            tl.join(code_values(words, QUANT, ZERO, 12), code_values(high, QUANT, ZERO, 12)),
        )
        values = tl.join(even, odd)
    else:
        values = tl.join(
            tl.join(code_values(words, QUANT, ZERO), code_values(high, QUANT, ZERO)),
            tl.join(code_values(words, QUANT, ZERO, 8), code_values(high, QUANT, ZERO, 8)),
        )
    EACH: tl.constexpr = 8 if QUANT == "int4" else 4
    return tl.reshape(values, (words.shape[0], words.shape[1] * EACH))


def without_default_zeros(weight: DeviceWeight) -> DeviceWeight:
    """The weight without its zero points if all are the type's default."""
    default = weight.zeros is not None and bool((weight.zeros == ZERO[weight.quant]).all())
    return replace(weight, zeros=None) if default else weight


@triton.jit
def quant_columns(of, n, problem: tl.constexpr):
    """The padded columns, indices of ``quant_scales``, of the columns ``n`` of a tile's projection."""
    FIRST: tl.constexpr = (problem.n0 + BLOCK - 1) // BLOCK * BLOCK
    SECOND: tl.constexpr = FIRST + (problem.n1 + BLOCK - 1) // BLOCK * BLOCK
    THIRD: tl.constexpr = SECOND + (problem.n2 + BLOCK - 1) // BLOCK * BLOCK
    second = tl.where(of.projection == 1, FIRST, tl.where(of.projection == 2, SECOND, THIRD))
    return tl.where(of.projection == 0, 0, second) + n


@triton.jit
def dequantize_block(weights, column, k, live, problem: tl.constexpr):
    """(q - zero) * scale of the rows ``k`` and padded columns ``column``: float32 (BLOCK_K, BLOCK_N), 0 where not
    ``live``."""
    QUANT: tl.constexpr = problem.quant
    INT4: tl.constexpr = QUANT == "int4"
    EACH: tl.constexpr = 8 if INT4 else 4
    at = k.to(tl.int64)[:, None] * problem.stride + (column // EACH)[None, :]
    word = tl.load(weights.weight_t + at, mask=live, other=0)
    shifted = word >> ((column % EACH) * (32 // EACH))[None, :]
    value = code_values(shifted, QUANT, INT4_ZERO if INT4 and weights.quant_zeros is None else 0.0)
    scale_at = (k // problem.group)[:, None] * (problem.stride * EACH) + column[None, :]
    if weights.quant_zeros is not None:
        value -= tl.load(weights.quant_zeros + scale_at, mask=live, other=0.0)
    return value * tl.load(weights.quant_scales + scale_at, mask=live, other=0.0)


@triton.jit
def _load_words(at, live, MASKED: tl.constexpr):
    if MASKED:  # noqa: SIM108 (resolved at compile time)
        words = tl.load(at, mask=live, other=0)
    else:
        words = tl.load(at)
    return words


@triton.jit
def code_block(
    weights, first_word, start, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    K: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, QUANT: tl.constexpr, dtype: tl.constexpr,
    PLANES: tl.constexpr = 1, LOW: tl.constexpr = False, VECTOR: tl.constexpr = 0,
):  # fmt: skip
    """Dequantized weights (ROWS, COLUMNS) in dtype of the channels ``k`` = start .. start + ROWS - 1, 0 from K on, and
    of the columns from word ``first_word`` on; LOW: only the low plane of graded weights; VECTOR: words of a channel that
    a thread loads, 0: as many as fit into 16 bytes."""
    INT4: tl.constexpr = QUANT == "int4"
    EACH: tl.constexpr = 8 if INT4 else 4
    word = first_word + tl.arange(0, COLUMNS // EACH)
    if VECTOR > 0:
        word = tl.multiple_of(word, VECTOR)  # a hint: no wider loads, whose threads would not have neighbouring columns
    at = weights.weight_t + k.to(tl.int64)[:, None] * (PLANES * STRIDE) + word[None, :] + (STRIDE if LOW else 0)
    live = (k < K)[:, None] & (word >= 0)[None, :]
    ZERO: tl.constexpr = INT4_ZERO if INT4 and weights.quant_zeros is None else 0.0
    BOTH: tl.constexpr = PLANES == 2 and not LOW
    value = _unpack(_load_words(at, live, K % ROWS != 0), QUANT, INT4_ZERO if BOTH else ZERO)
    if BOTH:  # 16 (high - 8) + low - 8, or minus zero
        value = value * 16.0 + _unpack(_load_words(at + STRIDE, live, K % ROWS != 0), QUANT, ZERO)
    column = first_word * EACH + tl.arange(0, COLUMNS)
    if GROUP % ROWS == 0 or GROUP == K:
        scale_at = ((start // GROUP) * (STRIDE * EACH) + column)[None, :]
    else:
        scale_at = (tl.minimum(k, K - 1) // GROUP)[:, None] * (STRIDE * EACH) + column[None, :]
    if weights.quant_zeros is not None:
        value -= tl.load(weights.quant_zeros + scale_at)
    value = value * tl.load(weights.quant_scales + scale_at)
    if K % ROWS != 0:
        value = tl.where((k < K)[:, None], value, 0.0)
    return value.to(dtype)


@triton.jit
def _widen_kernel(
    weights, out_ptr, K: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, QUANT: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr,  # of each projection: its first block of columns, the padding before it, its end in out
):  # fmt: skip
    EACH: tl.constexpr = 8 if QUANT == "int4" else 4
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    block = tl.program_id(0)
    start = tl.program_id(1) * ROWS
    padding = 0
    end = 0
    for i in tl.static_range(len(PARTS)):
        padding = tl.where(block >= PARTS[i][0], PARTS[i][1], padding)
        end = tl.where(block >= PARTS[i][0], PARTS[i][2], end)
    lane = tl.arange(0, ROWS)
    k = start + lane
    column = block * BLOCK - padding + tl.arange(0, BLOCK)
    # A thread converts 8 columns of a channel, which it stores as 16 bytes.
    value = code_block(
        weights,
        block * (BLOCK // EACH),
        start,
        k,
        ROWS,
        BLOCK,
        K,
        STRIDE,
        GROUP,
        QUANT,
        dtype,
        PLANES,
        False,
        8 // EACH,
    )
    live = (k < K)[:, None] & (column < end)[None, :]
    tl.store(out_ptr + start.to(tl.int64) * N + lane[:, None] * N + column[None, :], value, mask=live)


def widen(weight: DeviceWeight, projections: range, out: Tensor) -> Tensor:
    """``dequantize`` of consecutive projections side by side, in one launch, to a contiguous out (K, N)."""
    (k, n), first, each = out.shape, weight.first(projections.start), 32 // BITS[weight.quant]
    parts, block, end = [], 0, 0
    for width in weight.widths[projections.start : projections.stop]:
        parts.append((block, block * COLUMN_BLOCK - end, end + width))
        block, end = block + triton.cdiv(width, COLUMN_BLOCK), end + width
    assert weight.scales is not None
    zeros = None if weight.zeros is None else weight.zeros[:, first:]
    weights = Weights(weight.data[:, first // each :], None, None, None, weight.scales[:, first:], zeros)
    _widen_kernel[(block, triton.cdiv(k, _WIDEN_ROWS))](
        weights, out, K=k, N=n, STRIDE=weight.data.stride(0), GROUP=weight.group // weight.planes, QUANT=weight.quant,
        PLANES=weight.planes, ROWS=_WIDEN_ROWS, PARTS=tuple(parts), num_warps=_WIDEN_WARPS,
    )  # fmt: skip
    return out
