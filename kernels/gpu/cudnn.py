"""Attention of a prompt's chunk by cuDNN, through torch:

    positions   |----------- before the chunk -----------|------------ chunk ------------|
                 of every row to every position            causal, padded rows included

Keys and values before the chunk are read where they lie in the cache; query heads share them as in the kernel.
``merge`` adds the two up, and applies sinks and gates. cuDNN builds a plan for each shape, which torch
keeps by thread: chunks have few sizes and begin at multiples of one, so a prompt of n chunks has about n shapes. Results
are rounded to the dtype before they are merged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import AttentionShape, gate_at
from .kv_cache import KVSlots
from .tiles import gpu_of

log = logging.getLogger(__name__)


class Attended(NamedTuple):
    """Attention of a chunk's rows to some positions."""

    out: Tensor  # (T, heads, D) dtype
    lse: Tensor  # (heads, T) float32, natural logarithm of the sum of exp(score)


def cudnn_attends(cache: KVSlots, shape: AttentionShape) -> bool:
    """Whether cuDNN supports a block's attention, and is faster than ``launch_chunk_attention``."""
    if cache.k_scale is not None or shape.window or shape.softcap or shape.d not in (64, 128):
        return False
    if gpu_of(cache.k.device).arch not in (90, 100):
        return False
    return supports(shape.heads, shape.kv_heads, shape.d, cache.k.dtype, cache.k.device)


@cache
def supports(heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch says that cuDNN can attend so, and a small call succeeds."""
    queries, keys = (torch.zeros(64, count, d, dtype=dtype, device=device) for count in (heads, kv_heads))
    keys = keys.transpose(0, 1)
    given = queries.transpose(0, 1)[None], keys[None], keys[None]
    parameters = torch.backends.cuda.SDPAParams(*given, None, 0.0, False, True)
    if not torch.backends.cuda.can_use_cudnn_attention(parameters):
        return False
    try:
        attend_by_cudnn(queries, keys, keys, 1.0)
    except RuntimeError as error:  # a cuDNN that lacks what torch expects of it
        log.warning("prompts are read without cuDNN, which cannot attend: %s", str(error).partition("\n")[0])
        return False
    return True


def attend_by_cudnn(queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = False) -> Attended:
    """Attention of queries (T, heads, D) to keys and values (kv_heads, positions, D). ``causal``: query i attends to the
    positions up to i."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], None, True, 0.0, causal, scale=scale
    )
    return Attended(out[0].transpose(0, 1).contiguous(), lse.reshape(queries.shape[1], -1))


@triton.jit
def _merge_kernel(
    attended, qkv_ptr, sinks_ptr, out_ptr, shape: tl.constexpr, HEADS_PAD: tl.constexpr, COUNT: tl.constexpr
):
    D: tl.constexpr = shape.d
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, D)
    live = (head < shape.heads)[:, None] & (d < D)[None, :]
    at = (row * shape.heads + head)[:, None] * D + d[None, :]
    largest = tl.full((HEADS_PAD,), -1e30, tl.float32)
    total = tl.zeros((HEADS_PAD,), tl.float32)
    acc = tl.zeros((HEADS_PAD, D), tl.float32)
    if sinks_ptr is not None:  # a score whose value is 0
        largest = tl.load(sinks_ptr + head, mask=head < shape.heads, other=0.0).to(tl.float32)
        total += 1.0
    for i in tl.static_range(COUNT):
        lse = tl.load(attended[i].lse + head * tl.num_programs(0) + row, mask=head < shape.heads, other=0.0)
        before = largest
        largest = tl.maximum(before, lse)
        rescale = tl.exp(before - largest)
        weight = tl.exp(lse - largest)
        total = total * rescale + weight
        x = tl.load(attended[i].out + at, mask=live, other=0.0).to(tl.float32)
        acc = acc * rescale[:, None] + x * weight[:, None]
    out = acc / total[:, None]
    if shape.gated:
        gate = row * (2 * shape.heads + 2 * shape.kv_heads) * D + gate_at(head, shape)
        out = out / (1.0 + tl.exp(-tl.load(qkv_ptr + gate[:, None] + d[None, :], mask=live, other=0.0).to(tl.float32)))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=live)


def merge(attended: Sequence[Attended], qkv: Tensor, sinks: Tensor | None, shape: AttentionShape) -> Tensor:
    """(T, heads, D): attention to all the positions together, with sinks (heads,) and the gates of qkv
    (T, (2 * heads + 2 * kv_heads) * D)."""
    if len(attended) == 1 and sinks is None and not shape.gated:
        return attended[0].out
    out, heads_pad = torch.empty_like(attended[0].out), triton.next_power_of_2(shape.heads)
    _merge_kernel[(len(out),)](tuple(attended), qkv, sinks, out, shape, heads_pad, len(attended))
    return out
