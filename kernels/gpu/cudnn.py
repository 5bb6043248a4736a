"""Attention of a prompt's chunk by cuDNN, through torch. ``launch_chunk_attention`` continues from its results:

    positions   |----------- before the chunk -----------|------------ chunk ------------|
                 cuDNN, of every row to every position     cuDNN, causal, if the chunk is
                                                           full; else the kernel

Keys and values are read where they lie in the cache; query heads share them as in the kernel. cuDNN builds a plan for
each shape, which torch keeps by thread: chunks have one size and begin at multiples of it, so a prompt of n chunks has n
shapes. Results are rounded to the dtype before they are merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import Attended, AttentionShape
from .kv_cache import KVSlots
from .tiles import gpu_of

_POSITIONS = 64  # that torch is asked about


def cudnn_attends(cache: KVSlots, shape: AttentionShape) -> bool:
    """Whether cuDNN supports a block's attention, and is faster than ``launch_chunk_attention``."""
    if cache.k_scale is not None or shape.window or shape.softcap or shape.d not in (64, 128):
        return False
    keys, values = cache.k[:1, :, :_POSITIONS], cache.v[:1, :, :_POSITIONS]  # torch refuses a single one
    if gpu_of(keys.device).arch not in (90, 100) or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    queries = keys.new_empty(1, _POSITIONS, shape.heads, shape.d).transpose(1, 2)
    parameters = torch.backends.cuda.SDPAParams(queries, keys, values, None, 0.0, False, True)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def attend_by_cudnn(queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = False) -> Attended:
    """Attention of queries (T, heads, D) to keys and values (kv_heads, positions, D). ``causal``: query i attends to the
    positions up to i."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], None, True, 0.0, causal, scale=scale
    )
    return Attended(out[0].transpose(0, 1).contiguous(), lse.reshape(queries.shape[1], -1))
