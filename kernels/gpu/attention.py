"""Attention over the KV cache: a decode step of B rows, and a chunk of a prompt.

    q, k  = rotary(norm?(q)), rotary(norm?(k)) at position p,   v = v / rms?(v)
    cache[slot, head, p] = k, v, or their codes and scales; position p too is attended to as stored
    out   = softmax(cap?(scale * q . K[: p + 1])) V[: p + 1] * sigmoid?(gate)   a sink adds exp(sink) to the sum

Decode (``launch_attention``): grid (kv_splits, kv_heads, B), a program has one KV split of one KV head:

    context   |-- split 0 --|-- split 1 --|-- split 2 --|-- split 3 --| p  K, V: (block_t, d) tiles, stages in flight
                                                                           q: (heads / kv_heads padded to 16, d)

The next linear combines the KV splits when it loads its input. Split 0 takes the new token's key and value from
registers, so no program waits for the cache's store. Bytes: 2 * kv_heads * d * context * sizeof(dtype) a row. Codes
(int8 or e4m3) are operands of tl.dot; their scales, one for each position and head, multiply the scores and the softmax
weights. If several rows are consecutive positions of one slot (a draft), ``launch_store_rows`` stores all keys and
values first; each row then equals, bit for bit, a one-row launch with the same number of splits.

A prompt's chunk: ``launch_store_kv``, then ``launch_chunk_attention``, as rows read the keys and values of the rows
before them. Slot, start and number of rows are in a tensor, so that one CUDA graph serves all prompts. The rotary
products are rounded to the model's dtype, as in transformers. Twin: ``runtime.torch.block``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import KVSplits, gdc_wait, rms_normalize, soft_cap
from .kv_cache import KVSlots, load_kv, scale_offset, slot_offset, store_vector, widen_pairs

_LOG2_E = tl.constexpr(1.4426950408889634)
_CHUNK_TILES = 8  # programs of a KV head, about; with 8 KV heads half of an H200's multiprocessors


class QKNorms(NamedTuple):
    """RMSNorm of queries and keys: (D,), or (heads * D,) and (kv_heads * D,), as ``common.Input.norm``; or None."""

    q: Tensor | None
    k: Tensor | None
    eps: float


class RotaryTables(NamedTuple):
    cos: Tensor  # (max_seq_len, rotary / 2) dtype; (max_seq_len, 0) without a rotary embedding
    sin: Tensor
    query_scale: Tensor | None  # (max_seq_len,) dtype, multiplies rotated queries


class Rows(NamedTuple):
    """Token, position and cache slot of each row of a step. Idle rows neither read nor write the cache."""

    token: Tensor  # (B,) int64, negative for an idle row
    position: Tensor  # (B,) int32
    slot: Tensor  # (B,) int32; rows that are not idle have different slots, except after ``launch_store_rows``


class AttentionShape(NamedTuple):
    """Compile-time constants: what is computed."""

    heads: int
    kv_heads: int
    d: int
    rotary: int  # rotated dimensions of a head
    window: int = 0  # sliding window, in positions, the new one included; 0: none
    interleaved: bool = False  # rotary pairs are (2 i, 2 i + 1), not (i, i + rotary / 2)
    softcap: float = 0.0  # c in c * tanh(score / c); 0: none
    norm_of: str = "head"  # RMSNorm of q and k: "head", "rotated head" (after the rotation), "whole" (all heads as one)
    gated: bool = False  # each head's query is followed by a gate (d,),
    gates_last: bool = False  # or all heads' queries are followed by their gates
    shared: bool = False  # the values are the keys before norm and rotation
    value_norm: bool = False  # each head's values are divided by their root mean square


class _Config(NamedTuple):
    """Compile-time constants: how it is computed. ``…_pad``: powers of two."""

    splits: int  # decode: KV splits; chunk: unused
    block_m: int  # chunk: queries of a program, rows times the heads that share a KV head; decode: unused
    block_t: int
    stages: int
    d_pad: int
    group_pad: int
    stored: bool = False  # decode: all keys and values were stored before
    pdl: bool = False


@triton.jit
def _head_vectors(
    base_ptr, head, live_head, norm_ptr, cos, sin, eps,  # base_ptr: a row's queries, or keys and values, head by head
    FIRST: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr,  # head: first, number, stride
    shape: tl.constexpr, config: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """(heads, d_pad) rotated query or key vectors, rounded to dtype; zeros in the padding."""
    D: tl.constexpr = shape.d
    HALF: tl.constexpr = shape.rotary // 2
    d = tl.arange(0, config.d_pad)
    # The other dimension of d's rotary pair, and its sign: (-x2, x1).
    if shape.interleaved:
        partner = tl.where(d < shape.rotary, d ^ 1, d)
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < HALF, d + HALF, tl.where(d < shape.rotary, d - HALF, d))
        sign = tl.where(d < HALF, -1.0, 1.0)
    live = live_head[:, None] & (d < D)[None, :]
    x = tl.load(base_ptr + head[:, None] * STRIDE + d[None, :], mask=live, other=0.0).to(tl.float32)
    live_partner = live_head[:, None] & (partner < D)[None, :]
    y = tl.load(base_ptr + head[:, None] * STRIDE + partner[None, :], mask=live_partner, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        if shape.norm_of == "whole":
            WIDTH: tl.constexpr = HEADS * D
            i = tl.arange(0, triton.next_power_of_2(WIDTH))
            whole = tl.load(base_ptr + FIRST * D + i, mask=i < WIDTH, other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(whole * whole, axis=0) / WIDTH + eps)
            head_ptr = norm_ptr + (head - FIRST)[:, None] * D
            norm_x = tl.load(head_ptr + d[None, :], mask=live, other=0.0)
            norm_y = tl.load(head_ptr + partner[None, :], mask=live_partner, other=0.0)
        elif shape.norm_of == "head":
            rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
            norm_x = tl.load(norm_ptr + d, mask=d < D, other=0.0)[None, :]
            norm_y = tl.load(norm_ptr + partner, mask=partner < D, other=0.0)[None, :]
        if shape.norm_of != "rotated head":
            x = rms_normalize(x, norm_x, rstd, dtype).to(tl.float32)
            y = rms_normalize(y, norm_y, rstd, dtype).to(tl.float32)
    cos_term = (x * cos[None, :]).to(dtype).to(tl.float32)
    sin_term = (sign[None, :] * y * sin[None, :]).to(dtype).to(tl.float32)
    rotated = tl.where((d < shape.rotary)[None, :], (cos_term + sin_term).to(dtype).to(tl.float32), x)
    if norm_ptr is not None and shape.norm_of == "rotated head":
        rstd = tl.rsqrt(tl.sum(rotated * rotated, axis=1) / D + eps)[:, None]
        norm = tl.load(norm_ptr + d, mask=d < D, other=0.0)
        rotated = rms_normalize(rotated, norm[None, :], rstd, dtype)
    return rotated.to(dtype)


@triton.jit
def _cos_sin(rotary, p, shape: tl.constexpr, config: tl.constexpr):
    """cos and sin (d_pad,) of each dimension of a head at position p; equal for both dimensions of a rotary pair."""
    HALF: tl.constexpr = shape.rotary // 2
    d = tl.arange(0, config.d_pad)
    at = p * HALF + (d // 2 if shape.interleaved else tl.where(d < HALF, d, d - HALF))
    cos = tl.load(rotary.cos + at, mask=d < shape.rotary, other=1.0).to(tl.float32)
    sin = tl.load(rotary.sin + at, mask=d < shape.rotary, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _queries(
    query_ptr, kv_head, p, cos, sin, norms, rotary, shape: tl.constexpr, config: tl.constexpr, dtype: tl.constexpr
):
    """(group_pad, d_pad) rotated queries of the heads that share a KV head."""
    GROUP: tl.constexpr = shape.heads // shape.kv_heads
    STRIDE: tl.constexpr = 2 * shape.d if shape.gated and not shape.gates_last else shape.d
    g = tl.arange(0, config.group_pad)
    q = _head_vectors(
        query_ptr, kv_head * GROUP + g, g < GROUP, norms.q, cos, sin, norms.eps, 0, shape.heads, STRIDE, shape, config,
        dtype,
    )  # fmt: skip
    if rotary.query_scale is not None:
        q = (q.to(tl.float32) * tl.load(rotary.query_scale + p).to(tl.float32)).to(dtype)
    return q


@triton.jit
def gate_at(head, shape: tl.constexpr):
    """The first element of a head's gate, from a row's first query on."""
    return (shape.heads + head if shape.gates_last else 2 * head + 1) * shape.d


@triton.jit
def _store_new_kv(
    query_ptr, kv_head, slot, p, live, cos, sin, norms, cache, shape: tl.constexpr, config: tl.constexpr, dtype
):
    """Store a KV head's new key and value at position p if ``live``; returns them as stored, (d_pad,) float32."""
    D: tl.constexpr = shape.d
    VALUES: tl.constexpr = shape.heads if shape.shared else shape.heads + shape.kv_heads  # the first head of values
    base_ptr = query_ptr + (shape.heads * D if shape.gated else 0)
    d = tl.arange(0, config.d_pad)
    zero = tl.arange(0, 1)
    k = _head_vectors(
        base_ptr, shape.heads + kv_head + zero, zero == 0, norms.k, cos, sin, norms.eps, shape.heads, shape.kv_heads, D,
        shape, config, dtype,
    )  # fmt: skip
    k = tl.reshape(k, (config.d_pad,))
    v = tl.load(base_ptr + (VALUES + kv_head) * D + d, mask=d < D, other=0.0)
    if shape.value_norm:
        v_float = v.to(tl.float32)
        v = (v_float * tl.rsqrt(tl.sum(v_float * v_float, axis=0) / D + norms.eps)).to(dtype)
    at = slot_offset(cache, slot, kv_head) + p.to(tl.int64) * cache.stride
    k_scale = None
    v_scale = None
    if cache.k_scale is not None:
        scale_at = scale_offset(cache, slot, kv_head) + p.to(tl.int64) * cache.scale_stride
        k_scale = cache.k_scale + scale_at
        v_scale = cache.v_scale + scale_at
    k = store_vector(k, cache.k + at, k_scale, live, shape, config)
    return k, store_vector(v, cache.v + at, v_scale, live, shape, config)


@triton.jit
def _attend(q, q_odd, kv, mask, m, total, acc, acc_odd, scale_log2, shape: tl.constexpr, dtype: tl.constexpr):
    """Online softmax over one more tile (of ``load_kv``) at the positions of ``mask``, None: all: maximum m (log2 domain),
    denominator ``total``, sum ``acc``. With codes q and acc are the even columns, q_odd and acc_odd the odd ones."""
    k, v, k_scale, v_scale = kv
    if k.dtype.is_int():
        even_k, odd_k = widen_pairs(k, dtype)
        s = tl.dot(q, tl.trans(even_k), input_precision="ieee")
        s = tl.dot(q_odd, tl.trans(odd_k), s, input_precision="ieee") * k_scale[None, :]
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
    SCALED: tl.constexpr = shape.softcap > 0.0
    if SCALED:
        s = soft_cap(s * scale_log2, shape.softcap * _LOG2_E)
    if mask is not None:
        s = tl.where(mask, s, float("-inf"))
    largest = tl.max(s, axis=1)
    m_new = tl.maximum(m, largest if SCALED else largest * scale_log2)
    rescale = tl.exp2(m - m_new)
    # Multiplied here the scale takes no instruction of its own.
    weight = tl.exp2((s if SCALED else s * scale_log2) - m_new[:, None])
    total = total * rescale + tl.sum(weight, axis=1)
    acc = acc * rescale[:, None]
    if v.dtype.is_int():
        # In float16 weight * scale may underflow.
        UNIT: tl.constexpr = 128.0 if dtype == tl.float16 else 1.0
        weight = (weight * (v_scale * UNIT)[None, :]).to(dtype)
        even_v, odd_v = widen_pairs(v, dtype)
        acc += tl.dot(weight, even_v * (1.0 / UNIT), input_precision="ieee")
        acc_odd = acc_odd * rescale[:, None] + tl.dot(weight, odd_v * (1.0 / UNIT), input_precision="ieee")
    else:
        acc += tl.dot(weight.to(dtype), v, input_precision="ieee")
    return m_new, total, acc, acc_odd


@triton.jit
def split_columns(x, cache):
    """x (rows, columns) for ``_attend``: with codes its even and its odd columns, else x twice, the second unused."""
    if cache.k_scale is not None:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    else:
        even = x
        odd = x
    return even, odd


@triton.jit
def join_columns(acc, acc_odd, cache):
    if cache.k_scale is not None:
        acc = tl.reshape(tl.join(acc, acc_odd), (acc.shape[0], 2 * acc.shape[1]))
    return acc


@triton.jit
def _attention_kernel(
    qkv_ptr, norms, rotary, cache, rows, out, sinks_ptr, scale_log2, shape: tl.constexpr, config: tl.constexpr
):
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    D: tl.constexpr = shape.d
    D_PAD: tl.constexpr = config.d_pad
    GROUP: tl.constexpr = shape.heads // shape.kv_heads
    GROUP_PAD: tl.constexpr = config.group_pad
    BLOCK_T: tl.constexpr = config.block_t
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)

    # Positions and cache were written in earlier steps: loaded before gdc_wait. The position of an idle row may be
    # beyond the cache.
    row_position = tl.where(tl.load(rows.token + row) < 0, -1, tl.load(rows.position + row))
    p = tl.maximum(row_position, 0)
    cos, sin = _cos_sin(rotary, p, shape, config)
    if sinks_ptr is not None:
        lane = tl.arange(0, GROUP_PAD)
        sink = tl.load(sinks_ptr + kv_head * GROUP + lane, mask=lane < GROUP, other=0.0).to(tl.float32) * _LOG2_E
    slot = tl.load(rows.slot + row)
    low = tl.maximum(p + 1 - shape.window, 0) if shape.window > 0 else 0
    length = tl.cdiv(tl.cdiv(p - low, config.splits), BLOCK_T) * BLOCK_T
    begin = low + split * length
    end = tl.minimum(begin + length, p)
    t = begin + tl.arange(0, BLOCK_T)
    if config.stored:
        gdc_wait(config.pdl)
    kv = load_kv(cache, slot, kv_head, t, t < end, D, D_PAD)
    if not config.stored:
        gdc_wait(config.pdl)

    Q_STRIDE: tl.constexpr = 2 * D if shape.gated else D
    query_ptr = qkv_ptr + row * (shape.heads * Q_STRIDE + shape.kv_heads * D * (1 if shape.shared else 2))
    q = _queries(query_ptr, kv_head, p, cos, sin, norms, rotary, shape, config, dtype)
    m = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    if split == 0:
        stores = (row_position >= 0) & (not config.stored)
        k_new, v_new = _store_new_kv(query_ptr, kv_head, slot, p, stores, cos, sin, norms, cache, shape, config, dtype)
        m = tl.sum(q.to(tl.float32) * k_new[None, :], axis=1) * scale_log2
        if shape.softcap > 0.0:
            m = soft_cap(m, shape.softcap * _LOG2_E)
        total = tl.full((GROUP_PAD,), 1.0, tl.float32)
        acc += v_new[None, :]
        if sinks_ptr is not None:  # a score whose value is 0, in split 0 only
            rescale = tl.exp2(m - tl.maximum(m, sink))
            m = tl.maximum(m, sink)
            total = rescale + tl.exp2(sink - m)
            acc = acc * rescale[:, None]

    # Without codes q_odd and acc_odd are eliminated as dead code.
    q, q_odd = split_columns(q, cache)
    acc, acc_odd = split_columns(acc, cache)
    if begin < end:
        mask = (t < end)[None, :]
        m, total, acc, acc_odd = _attend(q, q_odd, kv, mask, m, total, acc, acc_odd, scale_log2, shape, dtype)
    for start in tl.range(begin + BLOCK_T, end, BLOCK_T, num_stages=config.stages):
        t = start + tl.arange(0, BLOCK_T)
        kv = load_kv(cache, slot, kv_head, t, t < end, D, D_PAD)
        mask = (t < end)[None, :]
        m, total, acc, acc_odd = _attend(q, q_odd, kv, mask, m, total, acc, acc_odd, scale_log2, shape, dtype)
    acc = join_columns(acc, acc_odd, cache)

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    head = kv_head * GROUP + g
    live = (g < GROUP)[:, None] & (d < D)[None, :]
    if shape.gated:  # applied to every split: linear in acc
        at_gate = gate_at(head, shape)[:, None] + d[None, :]
        gate = tl.load(query_ptr + at_gate, mask=live, other=0.0).to(tl.float32)
        acc = acc / (1.0 + tl.exp(-gate))
    at = (row * shape.heads + head) * config.splits + split
    tl.store(out.maximum + at, m, mask=g < GROUP)
    tl.store(out.total + at, total, mask=g < GROUP)
    tl.store(out.x + at[:, None] * D + d[None, :], acc, mask=live)


def _padded(shape: AttentionShape, cache: KVSlots) -> int:
    return max(16 if cache.k_scale is None else 32, triton.next_power_of_2(shape.d))  # 16: tl.dot's smallest side


def launch_attention(
    qkv: Tensor, cache: KVSlots, rows: Rows, rotary: RotaryTables, out: KVSplits, shape: AttentionShape, *,
    scale: float, norms: QKNorms, sinks: Tensor | None = None, stages: int = 3, stored: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """Launch one block's attention for B rows; nothing is checked or allocated. qkv: (B, (heads + 2 * kv_heads) * D),
    queries, keys and values side by side, before norm and rotary embedding; gated: twice the heads; shared: kv_heads
    once. scale: of the scores. sinks: (heads,), an additional score of each head's softmax. ``stored``: after
    ``launch_store_rows``. ``stages``: num_stages of the loop over tiles, 32 KiB of shared memory each with D = 128."""
    batch, _, splits, _ = out.x.shape
    # A tile of wide heads has fewer positions, so that its bytes fit into the shared memory of all architectures.
    d_pad = _padded(shape, cache)
    block_t = max(16, min(64, 8192 // d_pad))
    if cache.k_scale is not None and splits * batch >= 16:
        block_t *= 2  # codes have half the bytes
    if qkv.dtype == torch.float32:
        # Twice the bytes, and without tensor cores a thread holds whole rows of q and of keys in registers.
        stages, block_t = 1, max(16, block_t // 2)
    # Eight warps if there are few programs and the head is wide enough, or if the head is too wide for the registers of
    # four warps.
    warps = 8 if shape.d > 256 or (splits * (1 if stored else batch) <= 8 and shape.d >= 128) else 4
    group_pad = max(16, triton.next_power_of_2(shape.heads // shape.kv_heads))  # 16: tl.dot's smallest side
    config, scale_log2 = _Config(splits, 0, block_t, stages, d_pad, group_pad, stored, pdl), scale * _LOG2_E.value
    _attention_kernel[(splits, shape.kv_heads, batch)](
        qkv, norms, rotary, cache, rows, out, sinks, scale_log2, shape, config, num_warps=warps, launch_pdl=pdl
    )


@triton.jit
def _store_rows_kernel(
    qkv_ptr, norms, rotary, cache, rows, shape: tl.constexpr, config: tl.constexpr, PDL: tl.constexpr
):
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    D: tl.constexpr = shape.d
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    row_position = tl.where(tl.load(rows.token + row) < 0, -1, tl.load(rows.position + row))
    p = tl.maximum(row_position, 0)
    cos, sin = _cos_sin(rotary, p, shape, config)
    slot = tl.load(rows.slot + row).to(tl.int64)
    gdc_wait(PDL)
    Q_STRIDE: tl.constexpr = 2 * D if shape.gated else D
    query_ptr = qkv_ptr + row * (shape.heads * Q_STRIDE + shape.kv_heads * D * (1 if shape.shared else 2))
    _store_new_kv(query_ptr, kv_head, slot, p, row_position >= 0, cos, sin, norms, cache, shape, config, dtype)


def launch_store_rows(
    qkv: Tensor, cache: KVSlots, rows: Rows, rotary: RotaryTables, shape: AttentionShape, norms: QKNorms, *,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Store every row's key and value, for ``launch_attention`` with ``stored``; the same arguments."""
    config = _Config(0, 0, 0, 0, _padded(shape, cache), 0)
    _store_rows_kernel[(qkv.shape[0], shape.kv_heads)](
        qkv, norms, rotary, cache, rows, shape, config, pdl, num_warps=1, launch_pdl=pdl
    )


@triton.jit
def _store_kv_kernel(
    qkv_ptr, chunk_ptr, norms, rotary, cache, q_ptr, own_ptr, shape: tl.constexpr, config: tl.constexpr
):
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    D: tl.constexpr = shape.d
    GROUP: tl.constexpr = shape.heads // shape.kv_heads
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    live = row < tl.load(chunk_ptr + 2)
    p = tl.load(chunk_ptr + 1) + tl.where(live, row, 0)
    cos, sin = _cos_sin(rotary, p, shape, config)
    query_ptr = qkv_ptr + row * (shape.heads * (2 if shape.gated else 1) + 2 * shape.kv_heads) * D
    q = _queries(query_ptr, kv_head, p, cos, sin, norms, rotary, shape, config, dtype)
    g = tl.arange(0, config.group_pad)
    d = tl.arange(0, config.d_pad)
    at = (row * shape.heads + kv_head * GROUP + g)[:, None] * D + d[None, :]
    tl.store(q_ptr + at, q, mask=(g < GROUP)[:, None] & (d < D)[None, :])
    slot = tl.load(chunk_ptr)
    k, v = _store_new_kv(query_ptr, kv_head, slot, p, live, cos, sin, norms, cache, shape, config, dtype)
    if own_ptr is not None:
        rows = tl.num_programs(0)
        own = own_ptr + (kv_head * rows + row) * D + d
        tl.store(own, k.to(dtype), mask=d < D)
        tl.store(own + shape.kv_heads * rows * D, v.to(dtype), mask=d < D)


@triton.jit
def _chunk_attention_kernel(
    q_ptr, qkv_ptr, chunk_ptr, cache, out_ptr, sinks_ptr, rows, scale_log2, shape: tl.constexpr, config: tl.constexpr
):
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    D: tl.constexpr = shape.d
    D_PAD: tl.constexpr = config.d_pad
    GROUP: tl.constexpr = shape.heads // shape.kv_heads
    BLOCK_M: tl.constexpr = config.block_m
    BLOCK_T: tl.constexpr = config.block_t
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those of the most positions first
    kv_head = tl.program_id(1)
    slot = tl.load(chunk_ptr)
    start = tl.load(chunk_ptr + 1).to(tl.int32)
    last = tl.maximum(tl.load(chunk_ptr + 2).to(tl.int32) - 1, 0)  # rows beyond it attend to the same positions
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i // GROUP
    head = kv_head * GROUP + i % GROUP
    row_position = start + tl.minimum(row, last)
    d = tl.arange(0, D_PAD)
    live = (row < rows)[:, None] & (d < D)[None, :]
    at = (row * shape.heads + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=live, other=0.0)
    end = start + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, last) + 1
    begin = 0
    if shape.window > 0:
        begin = tl.maximum(start + tl.minimum(tile * BLOCK_M // GROUP, last) + 1 - shape.window, 0)
    # Finite, as with a sliding window a tile may have no position that a row attends to.
    m = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    q, q_odd = split_columns(q, cache)
    acc, acc_odd = split_columns(acc, cache)
    # First the tiles of positions that all rows attend to. Two loops over codes would not fit into the registers.
    APART: tl.constexpr = shape.window == 0 and cache.k_scale is None
    if APART:
        whole = (start + tl.minimum(tile * BLOCK_M // GROUP, last) + 1) // BLOCK_T * BLOCK_T
        for t0 in tl.range(0, whole, BLOCK_T, num_stages=config.stages):
            kv = load_kv(cache, slot, kv_head, t0 + tl.arange(0, BLOCK_T), None, D, D_PAD)
            m, total, acc, acc_odd = _attend(q, q_odd, kv, None, m, total, acc, acc_odd, scale_log2, shape, dtype)
        begin = whole
    for t0 in tl.range(begin, end, BLOCK_T, num_stages=1 if APART else config.stages):  # a few tiles if APART
        t = t0 + tl.arange(0, BLOCK_T)
        kv = load_kv(cache, slot, kv_head, t, t < end, D, D_PAD)
        mask = t[None, :] <= row_position[:, None]
        if shape.window > 0:
            mask = mask & (t[None, :] > row_position[:, None] - shape.window)
        m, total, acc, acc_odd = _attend(q, q_odd, kv, mask, m, total, acc, acc_odd, scale_log2, shape, dtype)
    acc = join_columns(acc, acc_odd, cache)
    out = acc / total[:, None]
    if shape.gated:
        at_gate = row * (2 * shape.heads + 2 * shape.kv_heads) * D + gate_at(head, shape)
        gate = tl.load(qkv_ptr + at_gate[:, None] + d[None, :], mask=live, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + at, out.to(dtype), mask=live)


def launch_store_kv(
    qkv: Tensor, chunk: Tensor, cache: KVSlots, rotary: RotaryTables, queries: Tensor, shape: AttentionShape,
    norms: QKNorms, own: Tensor | None = None,
) -> None:  # fmt: skip
    """Store a chunk's rotated keys and its values in the cache, its rotated queries in ``queries`` (T, heads, D). qkv:
    (T, (heads + 2 * kv_heads) * D). chunk: (3,) int64: slot, first position, number of rows; rows beyond are not
    cached. ``own``: (2, kv_heads, T, D), for the keys and values of all rows, those beyond too; not with a cache of
    codes."""
    d_pad, group_pad = _padded(shape, cache), triton.next_power_of_2(shape.heads // shape.kv_heads)
    config = _Config(0, 0, 0, 0, d_pad, group_pad)
    _store_kv_kernel[(len(queries), shape.kv_heads)](qkv, chunk, norms, rotary, cache, queries, own, shape, config)


def launch_chunk_attention(
    queries: Tensor, qkv: Tensor, chunk: Tensor, cache: KVSlots, out: Tensor, shape: AttentionShape, scale: float, *,
    sinks: Tensor | None = None, stages: int = 2,
) -> None:  # fmt: skip
    """Launch one block's attention for a chunk, after ``launch_store_kv``; fp16 and bf16 only. qkv: for the gates; out:
    (T, heads, D); sinks and stages as for ``launch_attention``."""
    rows, group = len(out), shape.heads // shape.kv_heads
    block_m = min(max(triton.next_power_of_2(triton.cdiv(rows * group, _CHUNK_TILES)), 16), 64)
    d_pad, group_pad = _padded(shape, cache), triton.next_power_of_2(group)
    config = _Config(0, block_m, 64 if shape.d <= 128 else 32, stages, d_pad, group_pad)
    _chunk_attention_kernel[(triton.cdiv(rows * group, block_m), shape.kv_heads)](
        queries, qkv, chunk, cache, out, sinks, rows, scale * _LOG2_E.value, shape, config
    )
