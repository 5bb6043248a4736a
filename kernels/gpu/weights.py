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

from .common import Problem

BITS = {"int4": 4, "int8": 8, "fp8": 8}
ZERO = {"int4": 8, "int8": 0, "fp8": 0}  # default zero points
COLUMN_BLOCK = 256
_UNQUANTIZED_BLOCK = 16
CHUNK = 8 << 20  # weights stored or dequantized at a time, which bounds temporary memory
BLOCK = tl.constexpr(COLUMN_BLOCK)
INT4_ZERO = tl.constexpr(float(ZERO["int4"]))


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
def code_values(code, QUANT: tl.constexpr):
    """Codes in the low bits of int32, converted to float32."""
    if QUANT == "fp8":
        # The bits moved into a float32 give the value times 2^-120, also of subnormals.
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return ((code ^ 128) - 128 if QUANT == "int8" else code).to(tl.float32)


@triton.jit
def _widen_kernel(
    data_ptr, scale_ptr, zero_ptr, out_ptr, WIDTH, K: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr,
    QUANT: tl.constexpr, PLANES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 if QUANT == "int4" else 4
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    live = (k < K)[:, None] & (word * EACH < WIDTH)[None, :]
    at = data_ptr + k.to(tl.int64)[:, None] * (PLANES * STRIDE) + word[None, :]
    words = tl.load(at, mask=live, other=0)
    # Unpack along a third axis, whose elements a thread has.
    each = tl.arange(0, EACH)
    column = word[:, None] * EACH + each[None, :]
    code = (words[:, :, None] >> (each * (32 // EACH))[None, None, :]) & (15 if QUANT == "int4" else 255)
    value = code_values(code, QUANT)
    if PLANES == 2:  # both int4: 16 (high - 8) + low - 8 = 16 high + low - 128 - 8
        low = tl.load(at + STRIDE, mask=live, other=0)
        value = value * 16.0 - 128.0 + ((low[:, :, None] >> (each * 4)[None, None, :]) & 15).to(tl.float32)
    scale_at = (k * PLANES // GROUP)[:, None, None] * (STRIDE * EACH) + column[None, :, :]
    live_columns = (k < K)[:, None, None] & (column < WIDTH)[None, :, :]
    if zero_ptr is not None:
        value -= tl.load(zero_ptr + scale_at, mask=live_columns, other=0.0)
    elif QUANT == "int4":
        value -= INT4_ZERO
    value = value * tl.load(scale_ptr + scale_at, mask=live_columns, other=0.0)
    out_at = out_ptr + k.to(tl.int64)[:, None, None] * WIDTH + column[None, :, :]
    tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=live_columns)


def widen(weight: DeviceWeight, index: int, out: Tensor) -> Tensor:
    """``dequantize`` in one launch, to a contiguous out (K, N)."""
    k, width = out.shape
    each = 32 // BITS[weight.quant]
    first, block_w = weight.first(index), 512 // each
    assert weight.scales is not None
    zeros = None if weight.zeros is None else weight.zeros[:, first:]
    _widen_kernel[(triton.cdiv(k, 8), triton.cdiv(width, 512))](
        weight.data[:, first // each :], weight.scales[:, first:], zeros, out, width, K=k, STRIDE=weight.data.stride(0),
        GROUP=weight.group, QUANT=weight.quant, PLANES=weight.planes, BLOCK_K=8, BLOCK_W=block_w, num_warps=4,
    )  # fmt: skip
    return out


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
    code = (word >> ((column % EACH) * (32 // EACH))[None, :]) & (15 if INT4 else 255)
    value = code_values(code, QUANT)
    scale_at = (k // problem.group)[:, None] * (problem.stride * EACH) + column[None, :]
    if weights.quant_zeros is not None:
        value -= tl.load(weights.quant_zeros + scale_at, mask=live, other=0.0)
    elif INT4:
        value -= INT4_ZERO
    return value * tl.load(weights.quant_scales + scale_at, mask=live, other=0.0)


@triton.jit
def _load_code_values(at, live, MASKED: tl.constexpr, INT4: tl.constexpr, QUANT: tl.constexpr):
    """Load words (R, W) and unpack their codes to float32 (R, columns)."""
    if MASKED:  # noqa: SIM108 (resolved at compile time)
        words = tl.load(at, mask=live, other=0)
    else:
        words = tl.load(at)
    # tl.join keeps a word's columns, in order, in the thread that has loaded it.
    if INT4:
        even = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
        odd = tl.join(tl.join(words >> 4, words >> 20), tl.join(words >> 12, words >> 28))
        code = tl.join(even, odd)
    else:
        code = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
    EACH: tl.constexpr = 8 if INT4 else 4
    code = tl.reshape(code, (words.shape[0], words.shape[1] * EACH))
    return code_values(code & (15 if INT4 else 255), QUANT)


@triton.jit
def code_block(
    weights, first_word, start, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    K: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, QUANT: tl.constexpr, dtype: tl.constexpr,
    PLANES: tl.constexpr = 1, LOW: tl.constexpr = False,
):  # fmt: skip
    """Dequantized weights (ROWS, COLUMNS) in dtype of the channels ``k`` = start .. start + ROWS - 1, 0 from K on, and
    of the columns from word ``first_word`` on; LOW: only the low plane of graded weights."""
    INT4: tl.constexpr = QUANT == "int4"
    EACH: tl.constexpr = 8 if INT4 else 4
    word = first_word + tl.arange(0, COLUMNS // EACH)
    at = weights.weight_t + k.to(tl.int64)[:, None] * (PLANES * STRIDE) + word[None, :] + (STRIDE if LOW else 0)
    live = (k < K)[:, None] & (word >= 0)[None, :]
    value = _load_code_values(at, live, K % ROWS != 0, INT4, QUANT)
    if PLANES == 2 and not LOW:  # as in _widen_kernel
        value = value * 16.0 - 128.0 + _load_code_values(at + STRIDE, live, K % ROWS != 0, INT4, QUANT)
    column = first_word * EACH + tl.arange(0, COLUMNS)
    if GROUP % ROWS == 0 or GROUP == K:
        scale_at = ((start // GROUP) * (STRIDE * EACH) + column)[None, :]
    else:
        scale_at = (tl.minimum(k, K - 1) // GROUP)[:, None] * (STRIDE * EACH) + column[None, :]
    if weights.quant_zeros is not None:
        value -= tl.load(weights.quant_zeros + scale_at)
    elif INT4:
        value -= INT4_ZERO
    value = value * tl.load(weights.quant_scales + scale_at)
    if K % ROWS != 0:
        value = tl.where((k < K)[:, None], value, 0.0)
    return value.to(dtype)
