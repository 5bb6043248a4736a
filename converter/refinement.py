"""Channel scales and thresholds improved on the joint KL itself, by gradients through the masks.

    u = log(channel_scale / threshold)          a channel is kept where log|x| + u >= 0

The mask is a step, whose slope is 0 nearly everywhere; the slope of a sigmoid of width `_WIDTH` stands in for it on the
way back (straight-through), so a channel of a token counts if its score is near the threshold. Every step goes along

    P (d KL / du - lambda d kept / du)          P: 1 / root mean square of the gradient, per channel (Adam's)

with lambda such that the share of weights read stays as it is. So errors that cancel, within a projection and between
blocks, are taken as they are in the sparse model; what is predicted from the dense model (`sensitivity`) is the start.
Few steps: a calibration text of 65,536 tokens is learnt by heart after about 40 (benchmarks/LOG.md). No weight changes.
Sources: Bengio et al. (arXiv:1308.3432) for the estimator; Kingma and Ba (arXiv:1412.6980) for the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .divergence import kl_rows
from .flow import BlockFlow
from .masking import MaskedModel
from .sensitivity import backward, rows_at_once

__all__ = ["BatchGradient", "Refinement", "batch_gradient", "kept_channels", "num_steps"]

_WIDTH = 0.3
_RATE = 0.03
_MOST_STEPS = 24
_TOKENS_PER_STEP = 2048
_MOMENTUM, _MEMORY = 0.8, 0.95

_SMALLEST = 1e-30


def num_steps(num_tokens: int) -> int:
    """How many steps a calibration text of so many tokens bears before it is learnt by heart."""
    return min(_MOST_STEPS, num_tokens // _TOKENS_PER_STEP)


@dataclass(frozen=True)
class BatchGradient:
    """Sums over the counted tokens of one micro-batch; per projection (K,) float32 on the CPU.

    Attributes:
        kl: of the joint sparse model.
        num_tokens: counted ones.
        gradient: d KL / du.
        slope: d kept / du, kept counted in channels.
        kept: channels kept, per projection.
    """

    kl: float
    num_tokens: int
    gradient: dict[str, Tensor]
    slope: dict[str, Tensor]
    kept: dict[str, int]


def batch_gradient(flow: BlockFlow, masked: MaskedModel, batch: int, logits: Mapping[str, Tensor]) -> BatchGradient:
    """One pass forward and backward over a micro-batch, dense and sparse.

    Args:
        logits: u (K,) float32 of every projection.
    """
    counted = flow.counted[batch]
    masked.clear()
    masked.dense_tokens = None
    with torch.no_grad():
        dense = flow.finish(0, batch, flow.start()[batch])[counted]
    _put_on(masked, logits, ~counted)
    seen: dict[str, Tensor] = {}
    gradient: dict[str, Tensor] = {}
    slope: dict[str, Tensor] = {}
    kept: dict[str, int] = {}
    total = [0.0]

    def note(name: str, x: Tensor) -> None:
        if torch.is_grad_enabled():
            seen[name] = x.detach()

    def divergence(dense_rows: Tensor, rows: Tensor) -> Tensor:
        return kl_rows(flow.logits(dense_rows).log_softmax(-1), flow.logits(rows)).sum()

    def loss(final: Tensor) -> list[Tensor]:
        value = final.new_zeros((), dtype=torch.float32)
        size = rows_at_once(flow)
        for dense_rows, rows in zip(dense.split(size), final.split(size), strict=True):
            value = value + checkpoint(divergence, dense_rows, rows, use_reentrant=False)
        total[0] = float(value.detach())
        return [value]

    def receive(name: str, _: Tensor, at_input: Tensor) -> None:
        x = seen.pop(name)[counted].float()
        u = logits[name].to(x.device)
        z = (x.abs().clamp_min(_SMALLEST).log() + u) / _WIDTH
        soft = torch.sigmoid(z)
        weight = soft * (1 - soft) / _WIDTH
        gradient[name] = (at_input.float() * x * weight).sum(0).cpu()
        slope[name] = weight.sum(0).cpu()
        kept[name] = int((z >= 0).sum())

    with masked.observing(note):
        backward(flow, masked, batch, loss, receive)
    masked.dense_tokens = None
    masked.clear()
    return BatchGradient(total[0], len(dense), gradient, slope, kept)


@dataclass
class Refinement:
    """Where the descent stands: enough to go on from.

    Attributes:
        logits: u by projection, (K,) float32 on the CPU.
        steps: how many there will be.
        step: how many were done.
        history: KL per token of every step's micro-batches, before the step.
    """

    logits: dict[str, Tensor]
    steps: int
    step: int = 0
    history: list[float] = field(default_factory=list)
    momentum: dict[str, Tensor] = field(default_factory=dict)
    slope: dict[str, Tensor] = field(default_factory=dict)
    square: dict[str, Tensor] = field(default_factory=dict)

    def advance(self, found: list[BatchGradient], sizes: Mapping[str, int], target: float) -> None:
        """One step, from the gradients of its micro-batches, in their order.

        Args:
            sizes: parameters per projection.
            target: share of all parameters to leave unread.
        """
        tokens = sum(one.num_tokens for one in found)
        share = {name: size / sum(sizes.values()) / len(self.logits[name]) for name, size in sizes.items()}
        gradient = {name: _sum([one.gradient[name] for one in found]) / tokens for name in sizes}
        slope = {name: _sum([one.slope[name] for one in found]) / tokens * share[name] for name in sizes}
        kept = sum(sum(one.kept[name] for one in found) * share[name] for name in sizes) / tokens
        self.step += 1
        self.history.append(round(sum(one.kl for one in found) / tokens, 6))
        for name in sizes:
            _lerp(self.momentum, name, gradient[name], 1 - _MOMENTUM)
            _lerp(self.slope, name, slope[name], 1 - _MOMENTUM)
            _lerp(self.square, name, gradient[name].square(), 1 - _MEMORY)
        correction = 1 - _MEMORY**self.step
        scale = {name: 1 / ((self.square[name] / correction).sqrt() + 1e-8) for name in sizes}

        def along(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
            return sum(float((left[name] * scale[name] * right[name]).sum(dtype=torch.float64)) for name in sizes)

        price = along(self.slope, self.momentum) / max(along(self.slope, self.slope), 1e-30)
        rate = _RATE * 0.5 * (1 + math.cos(math.pi * (self.step - 1) / self.steps))
        # What curvature did to the budget in the last step is put right by a common shift.
        shift = 0.5 * ((1 - target) - kept) / max(sum(float(slope[name].sum()) for name in sizes), 1e-12)
        for name in sizes:
            direction = scale[name] * (self.momentum[name] - price * self.slope[name])
            self.logits[name] = self.logits[name] - rate * direction.clamp(-3, 3) + shift


def kept_channels(flow: BlockFlow, masked: MaskedModel, batch: int, logits: Mapping[str, Tensor]) -> dict[str, int]:
    """Channels kept over the counted tokens of one micro-batch, per projection, everything sparse."""
    _put_on(masked, logits, ~flow.counted[batch])
    with torch.no_grad(), masked.counting() as realised:
        flow.finish(0, batch, flow.start()[batch])
        found = realised()
    masked.dense_tokens = None
    masked.clear()
    counted = int(flow.counted[batch].sum())
    return {name: round((1 - found[name]) * counted * len(u)) for name, u in logits.items()}


def _put_on(masked: MaskedModel, logits: Mapping[str, Tensor], dense_tokens: Tensor) -> None:
    for name, u in logits.items():
        masked.set_scale(name, u.exp())
        masked.set_threshold(name, 1.0)
    masked.dense_tokens = dense_tokens


def _sum(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def _lerp(kept: dict[str, Tensor], name: str, value: Tensor, weight: float) -> None:
    kept[name] = torch.lerp(kept.get(name, torch.zeros_like(value)), value, weight)
