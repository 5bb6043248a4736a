"""One decode step of attention: rotary embedding, cache write, and attention split over the context.

    q, k  = rotary(norm?(q)), rotary(norm?(k)) at position p = positions[row]
    cache[row, head, p] = k, v
    out   = softmax(q . K[: p + 1] / sqrt(D)) V[: p + 1]

Each program reads one stretch of one KV head's cache and leaves its running maximum, denominator and weighted sum; the
projection that reads the attention's output (``o_proj``) combines the stretches as it selects its channels. The new
token's key and value are taken from registers by split 0, so no program waits for the cache write. Rotary products are
rounded to the model's dtype one by one, as transformers does, so that both agree. With float32 weights all of it is
float64 (``precision`` says why), without the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import exact_argument, inverse_root, let_next_kernel_start, wait_for_previous_kernel

__all__ = ["launch_attention"]


@triton.jit
def _head_vectors(
    base_ptr,
    head,
    live_head,
    norm_ptr,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
    dtype: tl.constexpr,
    wide: tl.constexpr,
):
    """(heads, D_PAD) rotated query or key vectors, rounded to dtype; zeros in the padding."""
    d = tl.arange(0, D_PAD)
    half: tl.constexpr = ROTARY // 2
    # The partner of d in the rotation, and its sign: (-x2, x1).
    partner = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    sign = tl.where(d < half, -1.0, 1.0)
    live = live_head[:, None] & (d < D)[None, :]
    x = tl.load(base_ptr + head[:, None] * D + d[None, :], mask=live, other=0.0).to(wide)
    live_partner = live_head[:, None] & (partner < D)[None, :]
    y = tl.load(base_ptr + head[:, None] * D + partner[None, :], mask=live_partner, other=0.0).to(wide)
    if QK_NORM:
        rstd = inverse_root(tl.sum(x * x, axis=1) / D + eps)[:, None]
        norm_x = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(wide)
        norm_y = tl.load(norm_ptr + partner, mask=partner < D, other=0.0).to(wide)
        x = ((x * rstd).to(dtype).to(wide) * norm_x[None, :]).to(dtype).to(wide)
        y = ((y * rstd).to(dtype).to(wide) * norm_y[None, :]).to(dtype).to(wide)
    straight = (x * cos[None, :]).to(dtype).to(wide)
    crossed = (sign[None, :] * y * sin[None, :]).to(dtype).to(wide)
    rotated = tl.where((d < ROTARY)[None, :], (straight + crossed).to(dtype).to(wide), x)
    return rotated.to(dtype)


@triton.jit
def _cached(k_cache_ptr, v_cache_ptr, slot_base, t, live_t, D: tl.constexpr, D_PAD: tl.constexpr):
    """Keys and values (BLOCK_T, D_PAD) at the positions ``t``; zeros where not live."""
    d = tl.arange(0, D_PAD)
    both = live_t[:, None] & (d < D)[None, :]
    at = slot_base + t[:, None] * D + d[None, :]
    return tl.load(k_cache_ptr + at, mask=both, other=0.0), tl.load(v_cache_ptr + at, mask=both, other=0.0)


@triton.jit
def _attend(q, k, v, live_t, m, total, acc, scale_log2, dtype: tl.constexpr, wide: tl.constexpr):
    """One more stretch of the softmax: new maximum (log2 domain), denominator and weighted sum. float64 takes one
    position, always a live one, at a time."""
    if wide == tl.float64:
        s = tl.sum(q * k, axis=1) * scale_log2
        m_new = tl.maximum(m, s)
        weight = tl.exp2(s - m_new)
        factor = tl.exp2(m - m_new)
        total = total * factor + weight
        acc = acc * factor[:, None] + weight[:, None] * v
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        s = tl.where(live_t[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        factor = tl.exp2(m - m_new)
        weight = tl.exp2(s - m_new[:, None])
        total = total * factor + tl.sum(weight, axis=1)
        acc = acc * factor[:, None] + tl.dot(weight.to(dtype), v, input_precision="ieee")
    return m_new, total, acc


@triton.jit
def _attention_kernel(
    qkv_ptr,  # (B, (heads + 2 kv_heads) * D) dtype
    q_norm_ptr,  # (D,) of the weights' type, QK_NORM only
    k_norm_ptr,
    cos_ptr,  # (max_seq_len, ROTARY / 2) dtype
    sin_ptr,
    k_cache_ptr,  # (slots, kv_heads, max_seq_len, D) dtype
    v_cache_ptr,
    token_ptr,  # (B,) int64: negative: idle row
    position_ptr,  # (B,) int32: where the new token goes
    out_ptr,  # (B, heads, SPLITS, D) wide
    m_ptr,  # (B, heads, SPLITS) wide, log2 domain
    l_ptr,
    max_seq_len,
    scale_log2,  # log2(e) / sqrt(D)
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    QK_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    wide: tl.constexpr = out_ptr.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KV_HEADS
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)

    # The position and the cache are older than this step: what they hold is read while the projections before this
    # launch still run.
    d = tl.arange(0, D_PAD)
    # An idle row may be full: it reads and writes no cache.
    place = tl.where(tl.load(token_ptr + row) < 0, -1, tl.load(position_ptr + row))
    p = tl.maximum(place, 0)
    # cos and sin repeat for the second half of the rotated dimensions.
    half: tl.constexpr = ROTARY // 2
    rotary_at = p * half + tl.where(d < half, d, d - half)
    cos = tl.load(cos_ptr + rotary_at, mask=d < ROTARY, other=1.0).to(wide)
    sin = tl.load(sin_ptr + rotary_at, mask=d < ROTARY, other=0.0).to(wide)
    slot_base = (row * KV_HEADS + kv_head).to(tl.int64) * max_seq_len * D
    low = 0
    if WINDOW > 0:
        low = tl.maximum(p + 1 - WINDOW, 0)
    stretch = tl.cdiv(tl.cdiv(p - low, SPLITS), BLOCK_T) * BLOCK_T
    begin = low + split * stretch
    end = tl.minimum(begin + stretch, p)
    t = begin + tl.arange(0, BLOCK_T)
    k, v = _cached(k_cache_ptr, v_cache_ptr, slot_base, t, t < end, D, D_PAD)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)

    g = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + g
    live_head = g < GROUP
    base_ptr = qkv_ptr + row * (HEADS + 2 * KV_HEADS) * D
    q = _head_vectors(base_ptr, head, live_head, q_norm_ptr, cos, sin, eps, D, D_PAD, ROTARY, QK_NORM, dtype, wide)
    m = tl.full((GROUP_PAD,), float("-inf"), wide)
    total = tl.zeros((GROUP_PAD,), wide)
    acc = tl.zeros((GROUP_PAD, D_PAD), wide)
    if split == 0:
        one = tl.arange(0, 1)
        k_new = _head_vectors(
            base_ptr, HEADS + kv_head + one, one == 0, k_norm_ptr, cos, sin, eps, D, D_PAD, ROTARY, QK_NORM, dtype, wide
        )
        k_new = tl.reshape(k_new, (D_PAD,))
        v_new = tl.load(base_ptr + (HEADS + KV_HEADS + kv_head) * D + d, mask=d < D, other=0.0)
        written = tl.where(place >= 0, d, D) < D
        tl.store(k_cache_ptr + slot_base + p * D + d, k_new, mask=written)
        tl.store(v_cache_ptr + slot_base + p * D + d, v_new, mask=written)
        m = tl.sum(q.to(wide) * k_new.to(wide)[None, :], axis=1) * scale_log2
        total = tl.full((GROUP_PAD,), 1.0, wide)
        acc += v_new.to(wide)[None, :]

    if begin < end:
        m, total, acc = _attend(q, k, v, t < end, m, total, acc, scale_log2, dtype, wide)
    for start in tl.range(begin + BLOCK_T, end, BLOCK_T, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_T)
        k, v = _cached(k_cache_ptr, v_cache_ptr, slot_base, t, t < end, D, D_PAD)
        m, total, acc = _attend(q, k, v, t < end, m, total, acc, scale_log2, dtype, wide)

    at = (row * HEADS + head) * SPLITS + split
    tl.store(m_ptr + at, m, mask=live_head)
    tl.store(l_ptr + at, total, mask=live_head)
    tl.store(out_ptr + at[:, None] * D + d[None, :], acc, mask=live_head[:, None] & (d < D)[None, :])


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
    window: int | None = None,
    qk_norm: tuple[Tensor, Tensor] | None = None,
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
        cos, sin: (max_seq_len, rotary_dim / 2) of the same dtype.
        out: (B, heads, kv_splits, D) wide.
        softmax: maxima (log2 domain) and denominators, each (B, heads, kv_splits) wide.
        scale: of the scores, 1 / sqrt(D) for the models here.
        window: sliding window in positions, the new one included.
        qk_norm: RMSNorm weights (D,) of queries and keys (Qwen3), with ``eps``.
        block_t: positions read at a time; float64 takes one. ``stages`` of them are on their way at once, in shared
            memory: 64 of keys and values take 32 KiB with heads of 128 in half precision.
    """
    batch, _, splits, head_dim = out.shape
    kv_heads = k_cache.shape[1]
    exact = out.dtype == torch.float64
    group = triton.next_power_of_2(heads // kv_heads)
    options = {"launch_pdl": True} if pdl else {}
    _attention_kernel[(splits, kv_heads, batch)](
        qkv,
        qkv if qk_norm is None else qk_norm[0],
        qkv if qk_norm is None else qk_norm[1],
        cos,
        sin,
        k_cache,
        v_cache,
        tokens,
        positions,
        out,
        softmax[0],
        softmax[1],
        k_cache.shape[2],
        exact_argument(scale * 1.4426950408889634, out.dtype),
        exact_argument(eps, out.dtype),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        ROTARY=cos.shape[1] * 2,
        GROUP_PAD=group if exact else max(16, group),  # tl.dot's smallest side
        QK_NORM=qk_norm is not None,
        WINDOW=window or 0,
        SPLITS=splits,
        BLOCK_T=1 if exact else block_t or 64,
        STAGES=stages,
        PDL=pdl,
        # Few programs leave multiprocessors idle: then more warps share one, if the head is wide enough for them. One
        # float64 position is work for one warp, and nothing has to be exchanged through shared memory.
        num_warps=warps or (1 if exact else 8 if splits * batch <= 8 and head_dim >= 128 else 4),
        **options,
    )
