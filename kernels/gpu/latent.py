"""Multi-head latent attention, for the rows of a step or of prompts: three launches around the projections' own.

    norms      q_a = RMSNorm(q_a);  cache[p] = (rotary(r), RMSNorm(c))        of kv_a's output (c, r); with two programs a row
    queries    q[h] = (rotary(q_r[h]), K[h]^T q_n[h])                         for q_b's output (q_n, q_r)
    attention  x[h] = sum over positions of softmax(scale * q[h] . cache) c   grid (kv_splits, heads / BLOCK_H, rows)
    values     out[h] = V[h] x[h]                                             combines the KV splits

The cache has one vector (r, c) a position, of D = rotary + rank elements, that is key and, from r on, value. A program of
``attention`` reads it once for up to BLOCK_H heads: tiles (BLOCK_T, rank) and (BLOCK_T, rotary), stages in flight; with
rank 512 and bfloat16 37 KB a stage. ``norms`` stores the keys of all rows, so rows may be consecutive positions of a slot.
kv_b stacks (K[h], V[h]): (heads, key_dim + value_dim, rank). Bytes of a step's row: D * context * sizeof(dtype) for each
BLOCK_H heads; kv_b once. Roundings are those of the twin, ``runtime.torch.mixers``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .attention import RotaryTables, Rows, join_columns, split_columns
from .common import KVSplits, gdc_wait, rms_normalize
from .kv_cache import KVSlots, scale_offset, slot_offset, store_vector, widen_pairs
from .tiles import gpu_of

_LOG2_E = 1.4426950408889634
_STEP_ROWS = 16  # the most rows of a step; more are a prompt's
_LARGE_SHARED = (80, 90, 100)  # architectures with more than 99 KiB of shared memory


class LatentShape(NamedTuple):
    """Compile-time constants."""

    heads: int
    query_rank: int  # 0: queries have no latent
    rank: int
    rotary: int
    key_dim: int
    value_dim: int
    d: int  # rotary + rank


class _Config(NamedTuple):
    d_pad: int
    query_pad: int


@triton.jit
def _rotated(x, other, d, p, rotary, ROTARY: tl.constexpr, dtype: tl.constexpr):
    """Elements ``d`` of a rotated vector at position p, of x and, in ``other``, the other elements of their pairs."""
    at = p * (ROTARY // 2) + d // 2
    cos = tl.load(rotary.cos + at, mask=d < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(rotary.sin + at, mask=d < ROTARY, other=0.0).to(tl.float32)
    sign = tl.where(d % 2 == 0, -1.0, 1.0)
    return ((x * cos).to(dtype).to(tl.float32) + (sign * other * sin).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _norms_kernel(
    projected_ptr, query_norm_ptr, norm_ptr, rotary, cache, rows, out_ptr, eps,
    WIDTH: tl.constexpr, shape: tl.constexpr, config: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = projected_ptr.dtype.element_ty
    ROTARY: tl.constexpr = shape.rotary
    RANK: tl.constexpr = shape.rank
    D: tl.constexpr = shape.d
    Q: tl.constexpr = shape.query_rank
    row = tl.program_id(0)
    gdc_wait(PDL)
    projected_ptr += row.to(tl.int64) * WIDTH
    if tl.program_id(1) == 1:
        i = tl.arange(0, config.query_pad)
        q = tl.load(projected_ptr + i, mask=i < Q, other=0.0).to(tl.float32)
        query_norm = tl.load(query_norm_ptr + i, mask=i < Q, other=0.0)
        q = rms_normalize(q, query_norm, tl.rsqrt(tl.sum(q * q, axis=0) / Q + eps), dtype)
        tl.store(out_ptr + row.to(tl.int64) * Q + i, q, mask=i < Q)
    else:
        live = tl.load(rows.token + row) >= 0
        p = tl.where(live, tl.load(rows.position + row), 0)
        d = tl.arange(0, config.d_pad)
        kv = projected_ptr + (WIDTH - D)
        x = tl.load(kv + tl.where(d < ROTARY, RANK + d, d - ROTARY), mask=d < D, other=0.0).to(tl.float32)
        other = tl.load(kv + RANK + (d ^ 1), mask=d < ROTARY, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(tl.where(d >= ROTARY, x * x, 0.0), axis=0) / RANK + eps)
        weight = tl.load(norm_ptr + d - ROTARY, mask=(d >= ROTARY) & (d < D), other=0.0)
        normed = rms_normalize(x, weight, rstd, dtype)
        key = tl.where(d < ROTARY, _rotated(x, other, d, p, rotary, ROTARY, dtype), normed)
        slot = tl.load(rows.slot + row)
        at = slot_offset(cache, slot, 0) + p.to(tl.int64) * cache.stride
        scale_ptr = None
        if cache.k_scale is not None:
            scale_ptr = cache.k_scale + scale_offset(cache, slot, 0) + p.to(tl.int64) * cache.scale_stride
        store_vector(key, cache.k + at, scale_ptr, live, shape, config)


@triton.jit(do_not_specialize=["count"])
def _queries_kernel(
    query_ptr, kv_b_ptr, rotary, rows, out_ptr, count,
    WIDTH: tl.constexpr, shape: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    ROTARY: tl.constexpr = shape.rotary
    RANK: tl.constexpr = shape.rank
    KEY: tl.constexpr = shape.key_dim
    head = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = m < count
    weights = kv_b_ptr + head.to(tl.int64) * ((KEY + shape.value_dim) * RANK)
    query = query_ptr + m.to(tl.int64) * WIDTH + head * (KEY + ROTARY)
    out = out_ptr + (m.to(tl.int64) * shape.heads + head) * shape.d
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gdc_wait(PDL)
    for first in range(0, KEY, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        q = tl.load(query[:, None] + k[None, :], mask=live[:, None] & (k < KEY)[None, :], other=0.0)
        at = k[:, None] * RANK + n[None, :]
        w = tl.load(weights + at, mask=(k < KEY)[:, None] & (n < RANK)[None, :], other=0.0)
        acc += tl.dot(q, w, input_precision="ieee")
    tl.store(out[:, None] + ROTARY + n[None, :], acc.to(dtype), mask=live[:, None] & (n < RANK)[None, :])
    if tl.program_id(2) == 0:
        r = tl.arange(0, triton.next_power_of_2(ROTARY))
        here = live[:, None] & (r < ROTARY)[None, :]
        x = tl.load(query[:, None] + KEY + r[None, :], mask=here, other=0.0).to(tl.float32)
        other = tl.load(query[:, None] + KEY + (r ^ 1)[None, :], mask=here, other=0.0).to(tl.float32)
        busy = tl.load(rows.token + m, mask=live, other=-1) >= 0
        p = tl.where(busy, tl.load(rows.position + m, mask=live, other=0), 0)
        rotated = _rotated(x, other, r[None, :], p[:, None], rotary, ROTARY, dtype)
        tl.store(out[:, None] + r[None, :], rotated, mask=here)


@triton.jit
def _load(base_ptr, rows, live, FIRST: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, CODES: tl.constexpr):
    """Elements FIRST .. FIRST + WIDTH of vectors at ``base_ptr + rows``, padded to PAD; with CODES as pairs."""
    EACH: tl.constexpr = 2 if CODES else 1
    d = tl.arange(0, PAD // EACH)
    mask = live[:, None] & (d < WIDTH // EACH)[None, :]
    return tl.load(base_ptr + rows[:, None] + FIRST // EACH + d[None, :], mask=mask, other=0)


@triton.jit
def _pairs(x, CODES: tl.constexpr, dtype: tl.constexpr):
    """Even and odd columns of codes; else x twice, the second unused."""
    if CODES:
        even, odd = widen_pairs(x, dtype)
    else:
        even = x
        odd = x
    return even, odd


@triton.jit
def _attention_kernel(
    query_ptr, cache, rows, out, scale_log2,
    SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr, shape: tl.constexpr,
    PAD: tl.constexpr, R_PAD: tl.constexpr,  # of rank and rotary: powers of two, of which tl.dot takes the half
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    CODES: tl.constexpr = cache.k_scale is not None
    H: tl.constexpr = shape.heads
    RANK: tl.constexpr = shape.rank
    ROTARY: tl.constexpr = shape.rotary
    # In float16 a weight times a code's scale may underflow.
    UNIT: tl.constexpr = 128.0 if CODES and dtype == tl.float16 else 1.0
    split = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.program_id(2)
    gdc_wait(PDL)
    end = tl.where(tl.load(rows.token + row) < 0, 0, tl.load(rows.position + row) + 1)  # an idle row reads nothing
    slot = tl.load(rows.slot + row)
    length = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_T) * BLOCK_T
    begin = split * length
    end = tl.minimum(begin + length, end)
    at = (row.to(tl.int64) * H + head) * shape.d
    q_r, q_r_odd = split_columns(_load(query_ptr, at, head < H, 0, ROTARY, R_PAD, False), cache)
    q_c, q_c_odd = split_columns(_load(query_ptr, at, head < H, ROTARY, RANK, PAD, False), cache)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc, acc_odd = split_columns(tl.zeros((BLOCK_H, PAD), tl.float32), cache)
    for start in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_T)
        position = slot_offset(cache, slot, 0) + t.to(tl.int64) * cache.stride
        c, c_odd = _pairs(_load(cache.k, position, t < end, ROTARY, RANK, PAD, CODES), CODES, dtype)
        r, r_odd = _pairs(_load(cache.k, position, t < end, 0, ROTARY, R_PAD, CODES), CODES, dtype)
        s = tl.dot(q_c, tl.trans(c), input_precision="ieee")
        s = tl.dot(q_r, tl.trans(r), s, input_precision="ieee")
        if CODES:
            scale_at = scale_offset(cache, slot, 0) + t.to(tl.int64) * cache.scale_stride
            code_scale = tl.load(cache.k_scale + scale_at, mask=t < end, other=0.0)
            s = tl.dot(q_c_odd, tl.trans(c_odd), s, input_precision="ieee")
            s = tl.dot(q_r_odd, tl.trans(r_odd), s, input_precision="ieee") * code_scale[None, :]
        s = tl.where((t < end)[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        rescale = tl.exp2(m - m_new)
        weight = tl.exp2(s - m_new[:, None])
        total = total * rescale + tl.sum(weight, axis=1)
        acc = acc * rescale[:, None]
        if CODES:
            weight = weight * (code_scale * UNIT)[None, :]
            acc_odd = acc_odd * rescale[:, None]
            acc_odd += tl.dot(weight.to(dtype), c_odd * (1.0 / UNIT), input_precision="ieee")
        acc += tl.dot(weight.to(dtype), c * (1.0 / UNIT) if CODES else c, input_precision="ieee")
        m = m_new
    acc = join_columns(acc, acc_odd, cache)
    k = tl.arange(0, PAD)
    to = (row.to(tl.int64) * H + head) * SPLITS + split
    tl.store(out.x + to[:, None] * RANK + k[None, :], acc, mask=(head < H)[:, None] & (k < RANK)[None, :])
    tl.store(out.maximum + to, m, mask=head < H)
    tl.store(out.total + to, total, mask=head < H)


@triton.jit(do_not_specialize=["count"])
def _values_kernel(
    splits, kv_b_ptr, out_ptr, count,
    SPLITS: tl.constexpr, shape: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    RANK: tl.constexpr = shape.rank
    VALUE: tl.constexpr = shape.value_dim
    head = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = m < count
    weights = kv_b_ptr + (head.to(tl.int64) * (shape.key_dim + VALUE) + shape.key_dim) * RANK
    at = (m.to(tl.int64) * shape.heads + head) * SPLITS
    gdc_wait(PDL)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for s in range(SPLITS):
        top = tl.maximum(top, tl.load(splits.maximum + at + s, mask=live, other=float("-inf")))
    top = tl.maximum(top, -1e30)  # of an idle row, -inf
    total = tl.zeros((BLOCK_M,), tl.float32)
    for s in range(SPLITS):
        factor = tl.exp2(tl.load(splits.maximum + at + s, mask=live, other=float("-inf")) - top)
        total += factor * tl.load(splits.total + at + s, mask=live, other=0.0)
    total = tl.where(total > 0.0, total, 1.0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, RANK, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for s in range(SPLITS):
            factor = tl.exp2(tl.load(splits.maximum + at + s, mask=live, other=float("-inf")) - top)
            of_split = splits.x + (at + s)[:, None] * RANK + k[None, :]
            x += factor[:, None] * tl.load(of_split, mask=live[:, None] & (k < RANK)[None, :], other=0.0)
        w = tl.load(
            weights + n[None, :] * RANK + k[:, None], mask=(k < RANK)[:, None] & (n < VALUE)[None, :], other=0.0
        )
        acc += tl.dot((x / total[:, None]).to(dtype), w, input_precision="ieee")
    to = out_ptr + (m.to(tl.int64) * shape.heads + head)[:, None] * VALUE + n[None, :]
    tl.store(to, acc.to(dtype), mask=live[:, None] & (n < VALUE)[None, :])


def _blocks(rows: int, width: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and BLOCK_K of a product with a head's part of kv_b, to ``width`` columns."""
    return (16, 32, 64) if rows <= _STEP_ROWS else (64, min(64, triton.next_power_of_2(width)), 64)


def launch_latent_norms(
    projected: Tensor, query_norm: Tensor | None, norm: Tensor, rotary: RotaryTables, cache: KVSlots, rows: Rows,
    out: Tensor | None, shape: LatentShape, *, eps: float, pdl: bool = False,
) -> None:  # fmt: skip
    """Store each row's key, and its queries' normed latent in ``out`` (B, query_rank). projected: (B, N), which begins with
    the queries' latent and ends with kv_a's output."""
    config = _Config(triton.next_power_of_2(shape.d), triton.next_power_of_2(max(shape.query_rank, 1)))
    if query_norm is None:
        query_norm, out = norm, projected  # not read
    _norms_kernel[(len(projected), 2 if shape.query_rank else 1)](
        projected, query_norm, norm, rotary, cache, rows, out, eps, projected.shape[1], shape, config, pdl,
        launch_pdl=pdl,
    )  # fmt: skip


def launch_latent_queries(
    queries: Tensor,
    kv_b: Tensor,
    rotary: RotaryTables,
    rows: Rows,
    out: Tensor,
    shape: LatentShape,
    *,
    pdl: bool = False,
) -> None:
    """out (B, heads, D) of queries (B, N), which begin with heads * (key_dim + rotary) columns."""
    count, (block_m, block_n, block_k) = len(queries), _blocks(len(queries), shape.rank)
    _queries_kernel[(shape.heads, triton.cdiv(count, block_m), triton.cdiv(shape.rank, block_n))](
        queries, kv_b, rotary, rows, out, count, queries.shape[1], shape, block_m, block_n, block_k, pdl, launch_pdl=pdl
    )


def launch_latent_attention(
    queries: Tensor, cache: KVSlots, rows: Rows, out: KVSplits, shape: LatentShape, scale: float, *, pdl: bool = False
) -> None:
    """Sums of latents, of queries (B, heads, D), over the positions up to each row's own."""
    most = 64 if len(queries) > _STEP_ROWS and gpu_of(queries.device).arch in _LARGE_SHARED else 16
    block_h, half = min(most, max(16, triton.next_power_of_2(shape.heads))), queries.element_size() == 2
    block_t, stages, splits = 32 if half else 16, 3 if half and block_h < 64 else 2, out.x.shape[2]
    pads = (max(triton.next_power_of_2(width), 32) for width in (shape.rank, shape.rotary))
    _attention_kernel[(splits, triton.cdiv(shape.heads, block_h), len(queries))](
        queries, cache, rows, out, scale * _LOG2_E, splits, block_h, block_t, stages, shape, *pads, pdl,
        num_warps=4 if block_h == 16 else 8, launch_pdl=pdl,
    )  # fmt: skip


def launch_latent_values(splits: KVSplits, kv_b: Tensor, out: Tensor, shape: LatentShape, *, pdl: bool = False) -> None:
    """out (B, heads * value_dim)."""
    count, (block_m, block_n, block_k) = len(out), _blocks(len(out), shape.value_dim)
    _values_kernel[(shape.heads, triton.cdiv(count, block_m), triton.cdiv(shape.value_dim, block_n))](
        splits, kv_b, out, count, splits.x.shape[2], shape, block_m, block_n, block_k, pdl, launch_pdl=pdl
    )
