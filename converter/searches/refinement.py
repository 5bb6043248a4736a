"""Channel scales and thresholds improved on the joint KL itself, by gradients through the masks.

    u = log(channel_scale / threshold)          a channel is kept where log|x| + u >= 0

The mask is a step, whose slope is 0 nearly everywhere; the slope of a sigmoid stands in for it on the way back
(straight-through, `joint_kl`), so a channel of a token counts if its score is near the threshold. Every step goes along

    P (d KL / du - price d kept / du)           P: one number per projection, 1 / root mean square of its gradient

with a price such that the share of weights read stays as it is. So errors that cancel, within a projection and between
blocks, are taken as they are in the sparse model; what is predicted from the dense model (`sensitivity`) is the start.

There are about as many channels as tokens, so most of a channel's gradient is chance. What keeps that out: a channel
moves in proportion to its gradient, so those that the text says little about stay (a step of their own size for each,
Adam's, is worse); all are drawn back to the start; however many steps there are, they go one distance together, with a
length that falls to 0; the last ones are averaged; and how much of the way to go is chosen on sequences that no step
was taken on. No weight changes. What each is worth: benchmarks/LOG.md.
Sources: Bengio et al. (arXiv:1308.3432) for the estimator; Polyak and Juditsky (1992) for the average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["PARTS", "BatchGradient", "Channels", "Plan", "Refinement", "plan_steps"]

# How much of the way from the start to the outcome may be gone.
PARTS = (0.0, 0.5, 1.0)

# See `Plan`; and so many times what the others move is the most for a channel in a step.
_DISTANCE, _FARTHEST = 0.385, 8.5
_DRAWN_BACK = 0.02
_MOMENTUM, _MEMORY = 0.8, 0.95
# The average is over about the last eighth of the steps.
_AVERAGED = 8

_MOST_STEPS, _TOKENS_PER_SQUARED_STEP = 48, 57
_MOST_TOKENS_PER_STEP = 16384
_ROUNDS, _ENOUGH_TOKENS = 6, 8192

_SMALLEST = 1e-30


@dataclass(frozen=True)
class Plan:
    """Attributes:
    steps: how many.
    share: micro-batches of each.
    held_out: micro-batches at the end of the text that no step is taken on.
    distance: root mean square of the change of u, were all steps as long as the first and in one direction.
    """

    steps: int
    share: int
    held_out: int
    distance: float


def plan_steps(num_tokens: int, num_batches: int) -> Plan:
    """What a calibration text of so many tokens in so many micro-batches bears.

    Six times through the text, in the more and the larger steps, the longer it is: 12 of 4,096 tokens for 8,192 tokens,
    24 of 8,192 for 32,768, 48 of 16,384 for 131,072, and no more than that. A text of less than 8,192 tokens says too
    little of a channel to go the whole distance.
    """
    held_out = max(1, round(num_batches / 8)) if num_batches > 2 else 0
    steps = min(_MOST_STEPS, round(math.sqrt(num_tokens / _TOKENS_PER_SQUARED_STEP)))
    part_of_text = min(_ROUNDS / max(steps, 1), _MOST_TOKENS_PER_STEP / num_tokens)
    share = max(1, min(round(part_of_text * num_batches), num_batches - held_out))
    return Plan(steps, share, held_out, _DISTANCE * min(1.0, math.sqrt(num_tokens / _ENOUGH_TOKENS)))


@dataclass(frozen=True)
class Channels:
    """The channels of all projections in one vector (C,).

    Attributes:
        widths: channels by projection, in the vector's order.
        sizes: parameters by projection.
    """

    widths: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def packed_length(self) -> int:
        """Of a packed `BatchGradient`."""
        return 2 * sum(self.widths.values()) + len(self.widths) + 2

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """By projection, (K,) each."""
        return dict(zip(self.widths, vector.split(list(self.widths.values())), strict=True))

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name] for name in self.widths])

    def spread(self, values: Tensor) -> Tensor:
        """One value per projection (P,) to each of its channels."""
        return values.repeat_interleave(torch.tensor(list(self.widths.values()), device=values.device))

    def means(self, vector: Tensor) -> Tensor:
        """Per projection, (P,)."""
        return torch.stack([part.mean() for part in vector.split(list(self.widths.values()))])

    def shares(self, device: torch.device) -> Tensor:
        """What part of all parameters one channel of each projection is, (P,) float64."""
        total = sum(self.sizes.values())
        share = [self.sizes[name] / total / width for name, width in self.widths.items()]
        return torch.tensor(share, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class BatchGradient:
    """Sums over the counted tokens of one micro-batch, float64 on the model's device.

    Attributes:
        gradient: (C,) d KL / du.
        slope: (C,) d kept / du, kept counted in channels.
        kept: (P,) channels kept, per projection.
        kl: () of the joint sparse model.
        num_tokens: () counted ones.
    """

    gradient: Tensor
    slope: Tensor
    kept: Tensor
    kl: Tensor
    num_tokens: Tensor

    def pack(self) -> Tensor:
        """As one vector, which processes can exchange."""
        return torch.cat([self.gradient, self.slope, self.kept, self.kl[None], self.num_tokens[None]])

    @classmethod
    def unpack(cls, packed: Tensor, channels: Channels) -> BatchGradient:
        count, projections = sum(channels.widths.values()), len(channels.widths)
        gradient, slope, kept, rest = packed.split([count, count, projections, 2])
        return cls(gradient, slope, kept, rest[0], rest[1])


@dataclass
class Refinement:
    """Where the descent stands: enough to go on from.

    Attributes:
        logits: u (C,) float32.
        steps, distance: see `Plan`.
        step: how many were done.
        history: KL per token of every step's micro-batches, before the step.
        average: of the last u, (C,) float32: the outcome.
        momentum: average of the last gradients, (C,) float32.
        square: average of the last squared gradients per projection, (P,) float64.
        pliancy: d (share of parameters kept) / d (a common shift of u), at the last step.
    """

    logits: Tensor
    steps: int
    distance: float
    step: int = 0
    history: list[float] = field(default_factory=list)
    average: Tensor | None = None
    momentum: Tensor | None = None
    square: Tensor | None = None
    pliancy: float = 0.0

    def to(self, device: torch.device) -> Refinement:
        """Tensors on ``device``."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Refinement(**{**vars(self), **moved})

    def advance(self, found: Sequence[BatchGradient], channels: Channels, start: Tensor, target: float) -> None:
        """One step, from the gradients of its micro-batches, in their order.

        Args:
            start: (C,) float32, where u was before the first step.
            target: share of all parameters to leave unread.
        """
        tokens = _sum([one.num_tokens for one in found])
        shares = channels.shares(start.device)
        gradient = _sum([one.gradient for one in found]) / tokens
        slope = _sum([one.slope for one in found]) / tokens * channels.spread(shares)
        kept = (_sum([one.kept for one in found]) * shares).sum() / tokens
        self.step += 1
        self.history.append(round(float(_sum([one.kl for one in found]) / tokens), 6))
        self.momentum = _lerp(self.momentum, gradient, 1 - _MOMENTUM).float()
        self.square = _lerp(self.square, channels.means(gradient.square()), 1 - _MEMORY)
        size = (self.square / (1 - _MEMORY**self.step)).sqrt().clamp_min(_SMALLEST)
        scaled_slope = slope / channels.spread(size)
        price = (self.momentum * scaled_slope).sum() / (slope * scaled_slope).sum().clamp_min(_SMALLEST)
        direction = self.momentum / channels.spread(size) - price * scaled_slope
        direction = (direction / direction.square().mean().sqrt().clamp_min(_SMALLEST)).clamp(-_FARTHEST, _FARTHEST)
        falling = 0.5 * (1 + math.cos(math.pi * (self.step - 1) / self.steps))
        # What curvature did to the budget in the last step is put right by a common shift.
        self.pliancy = float(slope.sum().clamp_min(1e-12))
        shift = 0.5 * ((1 - target) - kept) / self.pliancy
        moved = self.logits - self.distance / self.steps * falling * direction + shift
        self.logits = torch.lerp(moved, start.double(), _DRAWN_BACK * falling).float()
        weight = 1.0 if self.average is None else min(1.0, _AVERAGED / self.steps)
        self.average = _lerp(self.average, self.logits.double(), weight).float()

    def partway(self, part: float, start: Tensor) -> Tensor:
        """u after a part of the way from ``start``."""
        return start if self.average is None else torch.lerp(start, self.average, part)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def _lerp(kept: Tensor | None, value: Tensor, weight: float) -> Tensor:
    """The running average of ``value`` (float64), which starts at 0."""
    return weight * value if kept is None else torch.lerp(kept.double(), value, weight)
