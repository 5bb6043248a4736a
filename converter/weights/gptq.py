"""GPTQ: codes of four bits for one weight, chosen so that its output changes little on the inputs it is given.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023: channels are
rounded one after the other, and what one loses is made up for by those still to come, by the inverse of the inputs'
second moments. Here the channels with the largest inputs come first, while groups stay those of neighbours; and each
group's scale is searched for: clipping its largest values can cost less than a coarser step does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wisparse.formats.model.quantised import QuantizedMatrix, pack_int4

__all__ = ["fit_int4", "search_scales"]

# Of a group's largest value, what seven and a half steps are: above 1 the seventh step can meet a positive one.
_CLIPS = tuple(1.08 - 0.02 * step for step in range(25))
_STEPS = 7.5
# Added to the diagonal, of its mean: without it the inverse of few tokens' moments is noise.
_DAMPING = 0.01
# Channels rounded before what they lost is carried to all that are left.
_PANEL = 128


def fit_int4(weight: Tensor, moments: Tensor, group: int, scale_dtype: torch.dtype) -> QuantizedMatrix:
    """Codes for a weight.

    Args:
        weight: (N, K), finite.
        moments: (K, K) float32, the sum of x xᵀ over the inputs x, on the weight's device.
        group: neighbouring channels that share a scale; divides K.
        scale_dtype: scales are numbers of this type.

    Returns:
        int4 without zero points.
    """
    rows, columns = weight.shape
    left = weight.to(torch.float32).clone()
    moments = moments.to(torch.float32)
    scales = search_scales(left, moments.diagonal(), group, scale_dtype)
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(moments[order][:, order])
    left = left[:, order]
    by_channel = scales.repeat_interleave(group, dim=1)[:, order]
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    for first in range(0, columns, _PANEL):
        last = min(first + _PANEL, columns)
        panel, lost = left[:, first:last], torch.empty(rows, last - first, device=weight.device)
        for k in range(last - first):
            scale, row = by_channel[:, first + k], factor[first + k, first:last]
            code = torch.round(panel[:, k] / scale).clamp_(-8, 7)
            codes[:, first + k] = (code + 8).to(torch.uint8)
            lost[:, k] = (panel[:, k] - code * scale) / row[k]
            panel[:, k:] -= torch.outer(lost[:, k], row[k:])
        left[:, last:] -= lost @ factor[first:last, last:]
    found = torch.empty_like(codes)
    found[:, order] = codes
    return QuantizedMatrix("int4", pack_int4(found), scales, None, group, (rows, columns))


def search_scales(weight: Tensor, importance: Tensor, group: int, scale_dtype: torch.dtype) -> Tensor:
    """Scales (N, K / group), float32: of some that clip more or less, those that lose least by rounding alone, each
    channel's loss weighted by ``importance`` (K,)."""
    groups = weight.to(torch.float32).unflatten(1, (-1, group))
    weights = importance.to(torch.float32).clamp(min=0).unflatten(0, (-1, group))
    # A channel that was never used still counts a little: a group of such has to have a scale.
    weights = weights + weights.mean().clamp(min=1e-30) * 1e-6
    largest = groups.abs().amax(2)
    best = torch.full_like(largest, float("inf"))
    scales = torch.ones_like(largest)
    smallest = max(torch.finfo(scale_dtype).tiny, torch.finfo(torch.float32).tiny)
    for clip in _CLIPS:
        scale = (largest * (clip / _STEPS)).clamp(min=smallest).to(scale_dtype).to(torch.float32)
        step = scale.unsqueeze(2)
        loss = ((torch.round(groups / step).clamp_(-8, 7) * step - groups).square_() * weights).sum(2)
        better = loss < best
        best, scales = torch.where(better, loss, best), torch.where(better, scale, scales)
    return torch.where(largest > 0, scales, 1.0).contiguous()


def _inverse_factor(moments: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped moments' inverse; more damping where rounding leaves them not definite."""
    diagonal = moments.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    damping = _DAMPING
    while True:
        damped = moments + torch.diag((mean * damping).expand(len(moments)))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse = torch.cholesky_inverse(factor)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(failed):
                return upper
        damping *= 10
