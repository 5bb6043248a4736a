"""The mask's definition, and the reference of every sparse kernel.

    score_i = |x_i| * channel_scale_i          channel_scale = (g / gmean(g)) ** alpha, g_i = ||W[:, i]||_2
    keep_i  = score_i >= threshold
    y       = (x ∘ keep) @ W.T + bias

Scores are float32, from x as it is stored, so the same bits of x give the same mask on every back end. A NaN score is
kept: dropping it would hide a broken activation behind a plausible output. Source: the paper's section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scores(x: Tensor, channel_scale: Tensor) -> Tensor:
    """``|x| * channel_scale``: x (..., K) of any type, channel_scale (K,) float32, to (..., K) float32."""
    return x.float().abs().mul_(channel_scale)


def kept(score: Tensor, threshold: Tensor | float) -> Tensor:
    """``score >= threshold``, and NaN; threshold: float32, broadcast; 0 keeps every score."""
    return ~(score < threshold)


def keep_mask(x: Tensor, channel_scale: Tensor, threshold: Tensor | float) -> Tensor:
    """Which channels of x (..., K) are kept: (..., K) bool."""
    return kept(scores(x, channel_scale), threshold)


def sparse_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, channel_scale: Tensor, threshold: Tensor | float
) -> Tensor:
    """A projection over its kept channels: x (..., K), weight (N, K), bias (N,), channel_scale (K,), to (..., N)."""
    # where, not a product: a dropped Inf must become 0, and Inf * 0 is NaN.
    masked = torch.where(keep_mask(x, channel_scale, threshold), x, x.new_zeros(()))
    return torch.nn.functional.linear(masked, weight, bias)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)
