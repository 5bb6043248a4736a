"""One decode step of attention: rotary embedding, cache write, and attention split over the context.

    q, k  = rotary(norm?(q)), rotary(norm?(k)) at position p = positions[row],   v = v / rms?(v)
    cache[row, head, p] = k, v
    out   = softmax(cap?(scale * q . K[: p + 1])) V[: p + 1] * sigmoid?(gate)

Each program reads one stretch of one KV head's cache and leaves its running maximum, denominator and weighted sum; the
projection that reads the attention's output (``o_proj``) combines the stretches as it selects its channels. The new
token's key and value are taken from registers by split 0, so no program waits for the cache write. Rotary products are
rounded to the model's dtype one by one, as transformers does, so that both agree. With float32 weights all of it is
float64 (``precision`` says why), without the tensor cores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    Stretches,
    exact_argument,
    inverse_root,
    let_next_kernel_start,
    normalise,
    soft_cap,
    wait_for_previous_kernel,
)

# What is normalised of queries and keys: each head before the rotation, or after it, or all heads as one vector.
_HEAD = tl.constexpr(0)
_TURNED_HEAD = tl.constexpr(1)
_WHOLE = tl.constexpr(2)
_LOG2_E = 1.4426950408889634
QK_NORMS = {"head": _HEAD.value, "turned head": _TURNED_HEAD.value, "whole": _WHOLE.value}


class _Norms(NamedTuple):
    """RMSNorm of queries and keys: (D,), or (heads * D,) and (kv_heads * D,), of the weights' type, or wide, which is
    1 + weight; or None."""

    q: Tensor | None
    k: Tensor | None
    eps: float | tl.constexpr


class _Rotary(NamedTuple):
    """(max_seq_len, rotary / 2) dtype; what queries are multiplied by, (max_seq_len,) dtype, or None."""

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None


class _Cache(NamedTuple):
    """(slots, kv_heads, max_seq_len, D) dtype, slot = row."""

    k: Tensor
    v: Tensor
    max_seq_len: int


class _Rows(NamedTuple):
    """What each row reads and where its new token goes: (B,) int64, negative for an idle row, and int32."""

    token: Tensor
    position: Tensor


class _Shape(NamedTuple):
    """Known at compile time. ``rotary``: rotated dimensions of a head, ``interleaved``: neighbours together;
    ``window``: positions looked back on, 0 for all; ``cap_log2``: of scores in the log2 domain, 0 for none;
    ``norm_of``: a value of ``QK_NORMS``; ``gated``: each head's query is followed by a gate of the same width;
    ``shared``: values are what keys are made of; ``value_norm``: each head's are divided by their root mean square."""

    heads: int
    kv_heads: int
    d: int
    rotary: int
    window: int
    interleaved: bool = False
    cap_log2: float = 0.0
    norm_of: int = QK_NORMS["head"]
    gated: bool = False
    shared: bool = False
    value_norm: bool = False


class _Cut(NamedTuple):
    """Known at compile time. A program takes one of ``splits`` stretches of a KV head's context, ``block_t`` positions
    at a time, ``stages`` of them on their way; a head's width and a group's heads are padded to powers of two."""

    splits: int
    block_t: int
    stages: int
    d_pad: int
    group_pad: int


@triton.jit
def _head_vectors(
    base_ptr,  # a row's queries, keys and values, head by head
    head,
    live_head,
    norm_ptr,
    cos,
    sin,
    eps,
    FIRST: tl.constexpr,  # the first head of queries, or of keys, how many there are, and from one to the next
    HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    shape: tl.constexpr,
    cut: tl.constexpr,
    dtype: tl.constexpr,
    wide: tl.constexpr,
):
    """(heads, d_pad) rotated query or key vectors, rounded to dtype; zeros in the padding."""
    D: tl.constexpr = shape.d
    d = tl.arange(0, cut.d_pad)
    half: tl.constexpr = shape.rotary // 2
    # The partner of d in the rotation, and its sign: (-x2, x1).
    if shape.interleaved:
        partner = tl.where(d < shape.rotary, d ^ 1, d)
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < half, d + half, tl.where(d < shape.rotary, d - half, d))
        sign = tl.where(d < half, -1.0, 1.0)
    live = live_head[:, None] & (d < D)[None, :]
    x = tl.load(base_ptr + head[:, None] * STRIDE + d[None, :], mask=live, other=0.0).to(wide)
    live_partner = live_head[:, None] & (partner < D)[None, :]
    y = tl.load(base_ptr + head[:, None] * STRIDE + partner[None, :], mask=live_partner, other=0.0).to(wide)
    if norm_ptr is not None:
        ONCE: tl.constexpr = norm_ptr.dtype.element_ty == wide
        if shape.norm_of == _WHOLE:
            tl.static_assert(not shape.gated, "gates lie between the heads")
            WIDTH: tl.constexpr = HEADS * D
            i = tl.arange(0, triton.next_power_of_2(WIDTH))
            whole = tl.load(base_ptr + FIRST * D + i, mask=i < WIDTH, other=0.0).to(wide)
            rstd = inverse_root(tl.sum(whole * whole, axis=0) / WIDTH + eps)
            own_ptr = norm_ptr + (head - FIRST)[:, None] * D
            norm_x = tl.load(own_ptr + d[None, :], mask=live, other=0.0).to(wide)
            norm_y = tl.load(own_ptr + partner[None, :], mask=live_partner, other=0.0).to(wide)
            x = normalise(x, norm_x, rstd, dtype, ONCE).to(wide)
            y = normalise(y, norm_y, rstd, dtype, ONCE).to(wide)
        elif shape.norm_of == _HEAD:
            rstd = inverse_root(tl.sum(x * x, axis=1) / D + eps)[:, None]
            norm_x = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(wide)
            norm_y = tl.load(norm_ptr + partner, mask=partner < D, other=0.0).to(wide)
            x = normalise(x, norm_x[None, :], rstd, dtype, ONCE).to(wide)
            y = normalise(y, norm_y[None, :], rstd, dtype, ONCE).to(wide)
    straight = (x * cos[None, :]).to(dtype).to(wide)
    crossed = (sign[None, :] * y * sin[None, :]).to(dtype).to(wide)
    rotated = tl.where((d < shape.rotary)[None, :], (straight + crossed).to(dtype).to(wide), x)
    if norm_ptr is not None:  # noqa: SIM102 (resolved at compile time)
        if shape.norm_of == _TURNED_HEAD:
            TURNED_ONCE: tl.constexpr = norm_ptr.dtype.element_ty == wide
            rstd = inverse_root(tl.sum(rotated * rotated, axis=1) / D + eps)[:, None]
            norm = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(wide)
            rotated = normalise(rotated, norm[None, :], rstd, dtype, TURNED_ONCE)
    return rotated.to(dtype)


@triton.jit
def _cached(cache, slot_base, t, live_t, D: tl.constexpr, D_PAD: tl.constexpr):
    """Keys and values (block_t, d_pad) at the positions ``t``; zeros where not live."""
    d = tl.arange(0, D_PAD)
    both = live_t[:, None] & (d < D)[None, :]
    at = slot_base + t[:, None] * D + d[None, :]
    return tl.load(cache.k + at, mask=both, other=0.0), tl.load(cache.v + at, mask=both, other=0.0)


@triton.jit
def _scores(products, scale_log2, shape: tl.constexpr):
    """Scores in the log2 domain, from products of queries and keys."""
    s = products * scale_log2
    if shape.cap_log2 > 0.0:
        s = soft_cap(s, shape.cap_log2)
    return s


@triton.jit
def _turns(rotary, p, d, shape: tl.constexpr, wide: tl.constexpr):
    """Cosines and sines of the dimensions ``d`` at position p: they repeat for the second half of the rotated ones, or
    for every other one."""
    half: tl.constexpr = shape.rotary // 2
    if shape.interleaved:  # noqa: SIM108 (resolved at compile time)
        at = p * half + d // 2
    else:
        at = p * half + tl.where(d < half, d, d - half)
    cos = tl.load(rotary.cos + at, mask=d < shape.rotary, other=1.0).to(wide)
    sin = tl.load(rotary.sin + at, mask=d < shape.rotary, other=0.0).to(wide)
    return cos, sin


@triton.jit
def _attend(
    q, k, v, seen, m, total, acc, scale_log2, shape: tl.constexpr, dtype: tl.constexpr, wide: tl.constexpr
):  # fmt: skip
    """One more stretch of the softmax: new maximum (log2 domain), denominator and weighted sum. ``seen``: which
    positions each query sees. float64 takes one position, which is seen, at a time."""
    if wide == tl.float64:
        s = _scores(tl.sum(q * k, axis=1), scale_log2, shape)
        m_new = tl.maximum(m, s)
        weight = tl.exp2(s - m_new)
        factor = tl.exp2(m - m_new)
        total = total * factor + weight
        acc = acc * factor[:, None] + weight[:, None] * v
    else:
        s = _scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scale_log2, shape)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        factor = tl.exp2(m - m_new)
        weight = tl.exp2(s - m_new[:, None])
        total = total * factor + tl.sum(weight, axis=1)
        acc = acc * factor[:, None] + tl.dot(weight.to(dtype), v, input_precision="ieee")
    return m_new, total, acc


@triton.jit
def _attention_kernel(
    qkv_ptr,  # (B, (heads + 2 kv_heads) * D) dtype; gated: twice the heads; shared: kv_heads once
    norms,  # _Norms, and so on
    rotary,
    cache,
    rows,
    out,  # Stretches
    scale_log2,  # of the scores, times log2(e)
    shape: tl.constexpr,
    cut: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    wide: tl.constexpr = out.x.dtype.element_ty
    D: tl.constexpr = shape.d
    D_PAD: tl.constexpr = cut.d_pad
    HEADS: tl.constexpr = shape.heads
    KV_HEADS: tl.constexpr = shape.kv_heads
    GROUP: tl.constexpr = HEADS // KV_HEADS
    GROUP_PAD: tl.constexpr = cut.group_pad
    BLOCK_T: tl.constexpr = cut.block_t
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)

    # The position and the cache are older than this step: what they hold is read while the projections before this
    # launch still run.
    d = tl.arange(0, D_PAD)
    # An idle row may be full: it reads and writes no cache.
    place = tl.where(tl.load(rows.token + row) < 0, -1, tl.load(rows.position + row))
    p = tl.maximum(place, 0)
    cos, sin = _turns(rotary, p, d, shape, wide)
    slot_base = (row * KV_HEADS + kv_head).to(tl.int64) * cache.max_seq_len * D
    low = 0
    if shape.window > 0:
        low = tl.maximum(p + 1 - shape.window, 0)
    stretch = tl.cdiv(tl.cdiv(p - low, cut.splits), BLOCK_T) * BLOCK_T
    begin = low + split * stretch
    end = tl.minimum(begin + stretch, p)
    t = begin + tl.arange(0, BLOCK_T)
    k, v = _cached(cache, slot_base, t, t < end, D, D_PAD)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)

    g = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + g
    live_head = g < GROUP
    Q_STRIDE: tl.constexpr = 2 * D if shape.gated else D
    VALUES: tl.constexpr = HEADS if shape.shared else HEADS + KV_HEADS  # the first head of values
    query_ptr = qkv_ptr + row * (HEADS * (Q_STRIDE - D) + (VALUES + KV_HEADS) * D)
    # Heads of keys and values are counted on from those of queries.
    base_ptr = query_ptr + HEADS * (Q_STRIDE - D)
    q = _head_vectors(
        query_ptr, head, live_head, norms.q, cos, sin, norms.eps, 0, HEADS, Q_STRIDE, shape, cut, dtype, wide
    )
    if rotary.query_scale is not None:
        q = (q.to(wide) * tl.load(rotary.query_scale + p).to(wide)).to(dtype)
    m = tl.full((GROUP_PAD,), float("-inf"), wide)
    total = tl.zeros((GROUP_PAD,), wide)
    acc = tl.zeros((GROUP_PAD, D_PAD), wide)
    if split == 0:
        one = tl.arange(0, 1)
        new = HEADS + kv_head + one
        k_new = _head_vectors(
            base_ptr, new, one == 0, norms.k, cos, sin, norms.eps, HEADS, KV_HEADS, D, shape, cut, dtype, wide
        )
        k_new = tl.reshape(k_new, (D_PAD,))
        v_new = tl.load(base_ptr + (VALUES + kv_head) * D + d, mask=d < D, other=0.0)
        if shape.value_norm:
            v_wide = v_new.to(wide)
            v_new = (v_wide * inverse_root(tl.sum(v_wide * v_wide, axis=0) / D + norms.eps)).to(dtype)
        written = tl.where(place >= 0, d, D) < D
        tl.store(cache.k + slot_base + p * D + d, k_new, mask=written)
        tl.store(cache.v + slot_base + p * D + d, v_new, mask=written)
        m = _scores(tl.sum(q.to(wide) * k_new.to(wide)[None, :], axis=1), scale_log2, shape)
        total = tl.full((GROUP_PAD,), 1.0, wide)
        acc += v_new.to(wide)[None, :]

    if begin < end:
        m, total, acc = _attend(q, k, v, (t < end)[None, :], m, total, acc, scale_log2, shape, dtype, wide)
    for start in tl.range(begin + BLOCK_T, end, BLOCK_T, num_stages=cut.stages):
        t = start + tl.arange(0, BLOCK_T)
        k, v = _cached(cache, slot_base, t, t < end, D, D_PAD)
        m, total, acc = _attend(q, k, v, (t < end)[None, :], m, total, acc, scale_log2, shape, dtype, wide)

    if shape.gated:  # every stretch alike, which is as if their sum were
        live = live_head[:, None] & (d < D)[None, :]
        gate = tl.load(query_ptr + head[:, None] * Q_STRIDE + D + d[None, :], mask=live, other=0.0).to(wide)
        acc = acc / (1.0 + tl.exp(-gate))
    at = (row * HEADS + head) * cut.splits + split
    tl.store(out.maximum + at, m, mask=live_head)
    tl.store(out.total + at, total, mask=live_head)
    tl.store(out.x + at[:, None] * D + d[None, :], acc, mask=live_head[:, None] & (d < D)[None, :])


def launch_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tokens: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    softmax: tuple[Tensor, Tensor],
    *,
    heads: int,
    scale: float,
    cap: float | None = None,
    window: int | None = None,
    interleaved: bool = False,
    query_scales: Tensor | None = None,
    qk_norm: tuple[Tensor, Tensor] | None = None,
    norm_of: str = "head",
    gated: bool = False,
    shared: bool = False,
    value_norm: bool = False,
    eps: float = 0.0,
    block_t: int | None = None,
    stages: int = 3,
    warps: int | None = None,
    pdl: bool = False,
) -> None:
    """Launch one block's attention for B rows on the current stream. Nothing is checked or allocated here.

    Args:
        qkv: (B, (heads + 2 * kv_heads) * D), queries, keys and values side by side, before the rotary embedding.
        k_cache, v_cache: (slots, kv_heads, max_seq_len, D) of the same dtype, slot = row; written at ``positions``.
        tokens: (B,) int64; a negative one marks an idle row, which reads and writes no cache.
        positions: (B,) int32.
        cos, sin: (max_seq_len, rotary_dim / 2) of the same dtype; of no columns where nothing is turned.
        out: (B, heads, kv_splits, D) wide.
        softmax: maxima (log2 domain) and denominators, each (B, heads, kv_splits) wide.
        scale: what scores are multiplied by, mostly 1 / sqrt(D).
        cap: c in c * tanh(score / c).
        window: sliding window in positions, the new one included.
        interleaved: neighbours are turned together, not halves.
        query_scales: (max_seq_len,) of the same dtype: what queries are multiplied by, once they are turned.
        qk_norm: RMSNorm weights of queries and keys, with ``eps``; as for ``launch_gemv`` they may be 1 + weight.
        norm_of: what they normalise, one of ``QK_NORMS``: each head, with weights (D,), before it is turned or after;
            or all of them as one vector, with weights (heads * D,) and (kv_heads * D,).
        gated: each head's query is followed by its gate, of the same width, in ``qkv``.
        shared: ``qkv`` ends with the keys; as they stand there they are the values too.
        value_norm: each head's values are divided by their root mean square, with ``eps``.
        block_t: positions read at a time; float64 takes one. ``stages`` of them are on their way at once, in shared
            memory: 64 of keys and values take 32 KiB with heads of 128 in half precision.
    """
    batch, _, splits, head_dim = out.shape
    shape, cut, fitting_warps = _constants(
        heads, k_cache.shape[1], head_dim, cos.shape[1] * 2, window or 0, interleaved, cap or 0.0, norm_of, gated,
        shared, value_norm, splits, batch, out.dtype, block_t, stages,
    )  # fmt: skip
    q_norm, k_norm = qk_norm or (None, None)
    options = {"launch_pdl": True} if pdl else {}
    _attention_kernel[(splits, shape.kv_heads, batch)](
        qkv,
        _Norms(q_norm, k_norm, exact_argument(eps, out.dtype)),
        _Rotary(cos, sin, query_scales),
        _Cache(k_cache, v_cache, k_cache.shape[2]),
        _Rows(tokens, positions),
        Stretches(out, *softmax),
        exact_argument(scale * _LOG2_E, out.dtype),
        shape,
        cut,
        pdl,
        num_warps=warps or fitting_warps,
        **options,
    )


@lru_cache
def _constants(
    heads: int, kv_heads: int, d: int, rotary: int, window: int, interleaved: bool, cap: float, norm_of: str,
    gated: bool, shared: bool, value_norm: bool, splits: int, batch: int, wide: torch.dtype, block_t: int | None,
    stages: int,
) -> tuple[_Shape, _Cut, int]:  # fmt: skip
    """What is compiled for, and warps: worked out once, not for every launch."""
    exact = wide == torch.float64
    group = triton.next_power_of_2(heads // kv_heads)
    cut = _Cut(
        splits,
        # Wide heads take as much shared memory with fewer positions: some chips have little.
        1 if exact else block_t or max(16, min(64, 8192 // triton.next_power_of_2(d))),
        stages,
        d_pad=max(16, triton.next_power_of_2(d)),
        group_pad=group if exact else max(16, group),  # tl.dot's smallest side
    )
    # Few programs leave multiprocessors idle: then more warps share one, if the head is wide enough for them, and the
    # widest do not fit into the registers of fewer. One float64 position of not too many numbers is work for one warp,
    # and nothing has to be exchanged through shared memory.
    if exact:
        warps = 1 if cut.group_pad * cut.d_pad <= 1024 else 8
    else:
        warps = 8 if d > 256 or (splits * batch <= 8 and d >= 128) else 4
    shape = _Shape(
        heads, kv_heads, d, rotary, window, interleaved, cap * _LOG2_E, QK_NORMS[norm_of], gated, shared, value_norm
    )
    return shape, cut, warps
