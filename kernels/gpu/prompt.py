"""Attention of a prompt's piece behind what its slot holds already, for lengths that stand on the device.

    q, k  = rotary(norm?(q)), rotary(norm?(k)) at the positions p = start, start + 1, ...
    cache[slot, head, p] = k, v
    out   = softmax(cap?(scale * q . K[: p + 1])) V[: p + 1] * sigmoid?(gate)

Two launches, as every row reads what the rows before it have written. Slot, start and how many rows there are stand in
a tensor, so that a captured graph serves every prompt; rows beyond them write nothing and give numbers of no use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .attention import QK_NORMS, _attend, _Cache, _cached, _head_vectors, _Norms, _Rotary, _Shape, _turns

_LOG2_E = 1.4426950408889634
# Programs of one KV head, about: with 8 of those they are half as many as an H200 has multiprocessors.
_TILES = 8


class _Cut(NamedTuple):
    """Known at compile time. A program has ``block_m`` queries of one KV head (rows times the heads that share it) and
    reads ``block_t`` positions at a time, ``stages`` of them on their way."""

    block_m: int
    block_t: int
    stages: int
    d_pad: int
    group_pad: int


@triton.jit
def _place_kernel(
    qkv_ptr,  # (T, (heads + 2 kv_heads) * D) dtype; gated: (T, (2 heads + 2 kv_heads) * D)
    piece_ptr,  # (3,) int64: slot, first position, rows
    norms,
    rotary,
    cache,
    q_ptr,  # (T, heads, D) dtype
    shape: tl.constexpr,
    cut: tl.constexpr,
):
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    D: tl.constexpr = shape.d
    HEADS: tl.constexpr = shape.heads
    KV_HEADS: tl.constexpr = shape.kv_heads
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(piece_ptr)
    count = tl.load(piece_ptr + 2)
    live = row < count
    p = tl.load(piece_ptr + 1) + tl.where(live, row, 0)
    d = tl.arange(0, cut.d_pad)
    cos, sin = _turns(rotary, p, d, shape, tl.float32)
    g = tl.arange(0, cut.group_pad)
    head = kv_head * GROUP + g
    live_head = g < GROUP
    Q_STRIDE: tl.constexpr = 2 * D if shape.gated else D
    query_ptr = qkv_ptr + row * (HEADS * Q_STRIDE + 2 * KV_HEADS * D)
    # Heads of keys and values are counted on from those of queries.
    base_ptr = query_ptr + HEADS * (Q_STRIDE - D)
    q = _head_vectors(
        query_ptr, head, live_head, norms.q, cos, sin, norms.eps, 0, HEADS, Q_STRIDE, shape, cut, dtype, tl.float32
    )
    if rotary.query_scale is not None:
        q = (q.to(tl.float32) * tl.load(rotary.query_scale + p).to(tl.float32)).to(dtype)
    at = (row * HEADS + head)[:, None] * D + d[None, :]
    tl.store(q_ptr + at, q, mask=live_head[:, None] & (d < D)[None, :])
    one = tl.arange(0, 1)
    k = _head_vectors(
        base_ptr, HEADS + kv_head + one, one == 0, norms.k, cos, sin, norms.eps, HEADS, KV_HEADS, D, shape, cut, dtype,
        tl.float32,
    )  # fmt: skip
    v = tl.load(base_ptr + (HEADS + KV_HEADS + kv_head) * D + d, mask=d < D, other=0.0)
    cached_at = ((slot * KV_HEADS + kv_head) * cache.max_seq_len + p) * D + d
    written = tl.where(live, d, D) < D
    tl.store(cache.k + cached_at, tl.reshape(k, (cut.d_pad,)), mask=written)
    tl.store(cache.v + cached_at, v, mask=written)


@triton.jit
def _piece_kernel(
    q_ptr,  # (T, heads, D) dtype
    qkv_ptr,  # as above, for the gates
    piece_ptr,
    cache,
    out_ptr,  # (T, heads, D) dtype
    rows,  # T
    scale_log2,  # of the scores, times log2(e)
    shape: tl.constexpr,
    cut: tl.constexpr,
):
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    D: tl.constexpr = shape.d
    D_PAD: tl.constexpr = cut.d_pad
    HEADS: tl.constexpr = shape.heads
    KV_HEADS: tl.constexpr = shape.kv_heads
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_M: tl.constexpr = cut.block_m
    BLOCK_T: tl.constexpr = cut.block_t
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(piece_ptr)
    start = tl.load(piece_ptr + 1).to(tl.int32)
    most = tl.maximum(tl.load(piece_ptr + 2).to(tl.int32) - 1, 0)  # the last row that there is: those beyond see as it
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i // GROUP
    head = kv_head * GROUP + i % GROUP
    place = start + tl.minimum(row, most)
    d = tl.arange(0, D_PAD)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    at = (row * HEADS + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    slot_base = (slot * KV_HEADS + kv_head) * cache.max_seq_len * D
    end = start + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, most) + 1
    begin = 0
    if shape.window > 0:
        begin = tl.maximum(start + tl.minimum(tile * BLOCK_M // GROUP, most) + 1 - shape.window, 0)
    # Finite: of a window's first positions a row may see none.
    m = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    for first in tl.range(begin, end, BLOCK_T, num_stages=cut.stages):
        t = first + tl.arange(0, BLOCK_T)
        k, v = _cached(cache, slot_base, t, t < end, D, D_PAD)
        seen = t[None, :] <= place[:, None]
        if shape.window > 0:
            seen = seen & (t[None, :] > place[:, None] - shape.window)
        m, total, acc = _attend(q, k, v, seen, m, total, acc, scale_log2, shape, dtype, tl.float32)
    out = acc / total[:, None]
    if shape.gated:
        gate_at = row * (2 * HEADS + 2 * KV_HEADS) * D + head * 2 * D + D
        gate = tl.load(qkv_ptr + gate_at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + at, out.to(dtype), mask=inside)


def launch_piece_attention(
    qkv: Tensor,
    piece: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor,
    out: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    window: int | None = None,
    interleaved: bool = False,
    query_scales: Tensor | None = None,
    qk_norm: tuple[Tensor, Tensor] | None = None,
    norm_of: str = "head",
    gated: bool = False,
    eps: float = 0.0,
) -> None:
    """Launch one block's attention for a piece of up to T rows on the current stream; half precision alone. Nothing is
    checked or allocated here.

    Args:
        qkv: (T, (heads + 2 * kv_heads) * D), as for ``launch_attention``.
        piece: (3,) int64: the slot, the first row's position, and how many rows there are, 0 to T.
        k_cache, v_cache: (slots, kv_heads, max_seq_len, D) of the same dtype; written at the rows' positions.
        queries: (T, heads, D) of the same dtype, to work in.
        out: (T, heads, D) of the same dtype.

    The others are ``launch_attention``'s.
    """
    rows, heads, head_dim = out.shape
    shape, cut = _constants(
        rows, heads, k_cache.shape[1], head_dim, cos.shape[1] * 2, window or 0, interleaved, cap or 0.0, norm_of, gated
    )
    q_norm, k_norm = qk_norm or (None, None)
    cache = _Cache(k_cache, v_cache, k_cache.shape[2])
    _place_kernel[(rows, shape.kv_heads)](
        qkv, piece, _Norms(q_norm, k_norm, eps), _Rotary(cos, sin, query_scales), cache, queries, shape, cut
    )
    tiles = triton.cdiv(rows * (heads // shape.kv_heads), cut.block_m)
    _piece_kernel[(tiles, shape.kv_heads)](queries, qkv, piece, cache, out, rows, scale * _LOG2_E, shape, cut)


@lru_cache
def _constants(
    rows: int, heads: int, kv_heads: int, d: int, rotary: int, window: int, interleaved: bool, cap: float, norm_of: str,
    gated: bool,
) -> tuple[_Shape, _Cut]:  # fmt: skip
    """What is compiled for: worked out once."""
    group = heads // kv_heads
    block_m = min(max(triton.next_power_of_2(triton.cdiv(rows * group, _TILES)), 16), 64)
    cut = _Cut(
        block_m,
        64 if d <= 128 else 32,
        2,
        d_pad=max(16, triton.next_power_of_2(d)),
        group_pad=triton.next_power_of_2(group),
    )
    return _Shape(heads, kv_heads, d, rotary, window, interleaved, cap * _LOG2_E, QK_NORMS[norm_of], gated), cut
