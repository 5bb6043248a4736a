"""Loads and stores of the KV cache: keys and values in the model's dtype, or codes (int8 or e4m3) with a float32 scale
for each position and head. Twin: ``runtime.decoding.cache``.

Two adjacent codes are loaded as one 16-bit element and converted two at a time, to even and odd columns: a tile of
16-bit elements can be transposed by ldmatrix for the tensor cores, bytes would be transposed one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # without inline PTX
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a float32 to an integer


class KVSlots(NamedTuple):
    # (slots, kv_heads, positions, D), or (…, D / 2) pairs of codes: int8 as int16, e4m3 as uint16
    k: Tensor
    v: Tensor
    k_scale: Tensor | None  # of codes: (slots, kv_heads, positions) float32
    v_scale: Tensor | None
    # Strides in elements of k and v, then of k_scale and v_scale.
    slot_stride: int
    head_stride: int
    stride: int
    scale_slot_stride: int
    scale_head_stride: int
    scale_stride: int


def kv_slots(k: Tensor, v: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> KVSlots:
    """``KVSlots`` of keys and values (slots, kv_heads, positions, D), with scales (slots, kv_heads, positions) of
    codes."""
    if k_scale is not None:
        pairs = torch.int16 if k.dtype == torch.int8 else torch.uint16
        k, v = k.view(pairs), v.view(pairs)
    strides = (0, 0, 0) if k_scale is None else k_scale.stride()
    return KVSlots(k, v, k_scale, v_scale, *k.stride()[:3], *strides)


@triton.jit
def _widen(codes, e4m3: tl.constexpr, dtype: tl.constexpr):
    """Codes, in the low bytes of int16, converted exactly to dtype, without their scale."""
    if e4m3:
        # The exponent and fraction bits moved into a float16 give the value times 2^-8.
        values = ((codes & 0x80) << 8 | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    else:
        # The fraction of a float16 in [1024, 2048) counts integers.
        values = ((codes ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return values.to(dtype)


def _pairs_source(low: list[str], high: list[str], convert: str) -> tl.constexpr:
    """PTX: convert two pairs of codes ($2) to the values of their low bytes ($0) and of their high bytes ($1)."""
    lines = ["{ .reg .b32 a, b;", *low, convert.format("$0"), *high, convert.format("$1"), "}"]
    return tl.constexpr(" ".join(lines))


# `_widen` of two codes at a time. int8 to bfloat16: 128 + the low seven bits, minus 128, or minus 256 if negative.
_INT8_BF16 = _pairs_source(
    ["lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;", "lop3.b32 b, $2, 0x00800080, 0x43004300, 0xea;"],
    ["shr.u32 b, $2, 8;", "lop3.b32 a, b, 0x007f007f, 0x43004300, 0xea;",
     "lop3.b32 b, b, 0x00800080, 0x43004300, 0xea;"],
    "{{ .reg .b32 m; mov.b32 m, 0xbf80bf80; fma.rn.bf16x2 {0}, b, m, a; }}",
)  # fmt: skip
_INT8_FP16 = _pairs_source(
    ["lop3.b32 a, $2, 0x00ff00ff, 0x64806480, 0x6a;"],
    ["shr.u32 b, $2, 8;", "lop3.b32 a, b, 0x00ff00ff, 0x64806480, 0x6a;"],
    "{{ .reg .b32 m; mov.b32 m, 0x64806480; sub.f16x2 {0}, a, m; }}",
)
_E4M3_BF16 = _pairs_source(
    ["shl.b32 a, $2, 4;", "and.b32 a, a, 0x07f007f0;", "shl.b32 b, $2, 8;", "lop3.b32 a, b, 0x80008000, a, 0xea;"],
    ["shr.u32 a, $2, 4;", "and.b32 a, a, 0x07f007f0;", "lop3.b32 a, $2, 0x80008000, a, 0xea;"],
    "{{ .reg .b32 m, z; mov.b32 m, 0x7b807b80; mov.b32 z, 0x80008000; fma.rn.bf16x2 {0}, a, m, z; }}",
)
_E4M3_FP16 = _pairs_source(
    ["shl.b32 a, $2, 7;", "and.b32 a, a, 0x3f803f80;", "shl.b32 b, $2, 8;", "lop3.b32 a, b, 0x80008000, a, 0xea;"],
    ["shr.u32 a, $2, 1;", "and.b32 a, a, 0x3f803f80;", "lop3.b32 a, $2, 0x80008000, a, 0xea;"],
    "{{ .reg .b32 m; mov.b32 m, 0x5c005c00; mul.f16x2 {0}, a, m; }}",
)


@triton.jit
def widen_pairs(words, dtype: tl.constexpr):
    """The values in dtype of pairs of codes: those of the low bytes, and those of the high bytes."""
    e4m3: tl.constexpr = words.dtype == tl.uint16
    if _INTERPRETED or dtype == tl.float32:
        even = _widen((words & 0xFF).to(tl.int16), e4m3, dtype)
        odd = _widen(((words >> 8) & 0xFF).to(tl.int16), e4m3, dtype)
    elif dtype == tl.bfloat16:
        BF16: tl.constexpr = _E4M3_BF16 if e4m3 else _INT8_BF16
        even, odd = tl.inline_asm_elementwise(
            BF16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        FP16: tl.constexpr = _E4M3_FP16 if e4m3 else _INT8_FP16
        even, odd = tl.inline_asm_elementwise(
            FP16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return even, odd


@triton.jit
def store_vector(x, base_ptr, scale_ptr, live, shape: tl.constexpr, config: tl.constexpr):
    """Store a key or value x (d_pad,), zero in the padding, if ``live``; returns it as float32 after quantization.
    Twin: ``quantise`` in ``runtime.decoding.cache``."""
    d = tl.arange(0, config.d_pad)
    if not base_ptr.dtype.element_ty.is_int():
        tl.store(base_ptr + d, x, mask=tl.where(live, d, shape.d) < shape.d)
        stored = x.to(tl.float32)
    else:
        e4m3: tl.constexpr = base_ptr.dtype.element_ty == tl.uint16
        LIMIT: tl.constexpr = 448.0 if e4m3 else 127.0
        largest = tl.max(tl.abs(x.to(tl.float32)), axis=0)
        y = x.to(tl.float32) * (LIMIT / tl.maximum(largest, 1e-30))
        if e4m3:
            size = tl.abs(y)
            bits = size.to(tl.int32, bitcast=True)
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
            subnormal = ((size * 512.0 + _ROUND) - _ROUND).to(tl.int32)
            code = tl.where(size < 2.0**-6, subnormal, normal) | tl.where(y < 0.0, 0x80, 0)
        else:
            code = ((y + _ROUND) - _ROUND).to(tl.int32) & 0xFF
        scale = largest * (1.0 / LIMIT)
        even, odd = tl.split(tl.reshape(code, (config.d_pad // 2, 2)))
        pair = tl.arange(0, config.d_pad // 2)
        words = (even | (odd << 8)).to(base_ptr.dtype.element_ty)
        tl.store(base_ptr + pair, words, mask=tl.where(live, 2 * pair, shape.d) < shape.d)
        tl.store(scale_ptr, scale, mask=live)
        stored = _widen(code.to(tl.int16), e4m3, tl.float32) * scale
    return stored


@triton.jit
def slot_offset(cache, slot, kv_head):
    return slot.to(tl.int64) * cache.slot_stride + kv_head * cache.head_stride


@triton.jit
def scale_offset(cache, slot, kv_head):
    return slot.to(tl.int64) * cache.scale_slot_stride + kv_head * cache.scale_head_stride


@triton.jit
def load_kv(cache, slot, kv_head, t, live_t, D: tl.constexpr, D_PAD: tl.constexpr):
    """Keys and values (block_t, d_pad) at the positions ``t``, or pairs of codes (block_t, d_pad / 2) and their scales
    (block_t,); zeros where not ``live_t``; None, not for codes: all are live."""
    EACH: tl.constexpr = 2 if cache.k_scale is not None else 1
    d = tl.arange(0, D_PAD // EACH)
    live = (d < D // EACH)[None, :]
    if live_t is not None:
        live = live_t[:, None] & live
    at = slot_offset(cache, slot, kv_head) + t.to(tl.int64)[:, None] * cache.stride + d[None, :]
    k = tl.load(cache.k + at, mask=live, other=0)
    v = tl.load(cache.v + at, mask=live, other=0)
    k_scale = tl.zeros(t.shape, tl.float32)
    v_scale = k_scale
    if cache.k_scale is not None:
        scale_at = scale_offset(cache, slot, kv_head) + t.to(tl.int64) * cache.scale_stride
        k_scale = tl.load(cache.k_scale + scale_at, mask=live_t, other=0.0)
        v_scale = tl.load(cache.v_scale + scale_at, mask=live_t, other=0.0)
    return k, v, k_scale, v_scale
