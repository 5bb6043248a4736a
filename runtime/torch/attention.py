"""Attention of some positions of a sequence over those before them, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model.model_config import ModelConfig
from wisparse.kernels.reference import soft_cap

__all__ = ["attention", "capped_attention", "causal_mask"]


def attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Causal attention of the positions from ``start`` on, over at most ``window`` positions each, itself included.

    Args:
        q: (num_heads, T, head_dim).
        keys, values: (num_kv_heads, start + T, head_dim).

    Returns:
        (num_heads, T, head_dim).
    """
    count, stop = q.shape[1], keys.shape[1]
    first = 0 if window is None else max(start - window + 1, 0)  # nobody here looks further back
    keys, values = keys[:, first:], values[:, first:]
    mask = causal_mask(start, stop, first, window, q.device) if count > 1 else None
    if config.attention_softcap is not None:
        return capped_attention(config, q, keys, values, mask)
    return functional.scaled_dot_product_attention(
        q[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=config.attention_scale,
        enable_gqa=q.shape[0] != keys.shape[0],
    )[0]


def causal_mask(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the positions ``first`` to ``stop`` - 1 those from ``start`` on see: (stop - start, stop - first)."""
    ahead = torch.arange(first, stop, device=device) - torch.arange(start, stop, device=device)[:, None]
    return ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)


def capped_attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention whose scores are capped before the softmax, which torch's own has no place for.

    Args:
        q: (num_heads, T, head_dim).
        keys, values: (num_kv_heads, context, head_dim).
        mask: (T, context), True where a position is seen; None for all.

    Returns:
        (num_heads, T, head_dim).
    """
    keys, values = (x.repeat_interleave(q.shape[0] // len(x), dim=0) for x in (keys, values))
    scores = soft_cap(q @ keys.transpose(1, 2) * config.attention_scale, config.attention_softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return scores.softmax(dim=-1, dtype=wide).to(q.dtype) @ values
