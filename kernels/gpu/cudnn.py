"""Attention of a prompt's chunk by cuDNN, through torch. ``launch_chunk_attention`` continues from its results:

    positions   |----------- before the chunk -----------|------------ chunk ------------|
                 cuDNN, of every row to every position     cuDNN, causal, if the chunk is
                                                           full; else the kernel

Keys and values are read where they lie in the cache; query heads share them as in the kernel. cuDNN builds a plan for
each shape, which torch keeps by thread: chunks have one size and begin at multiples of it, so a prompt of n chunks has n
shapes. Results are rounded to the dtype before they are merged.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from .attention import Attended, AttentionShape
from .kv_cache import KVSlots
from .tiles import gpu_of

log = logging.getLogger(__name__)


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
