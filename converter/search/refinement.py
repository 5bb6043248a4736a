"""Refinement of channel scales and thresholds by gradient steps on KL(dense || sparse). The parameters are u = log(scale /
threshold) of all channels: |x| exp(u) >= 1 is kept, with the derivative of sigmoid((log|x| + u) / `_WIDTH`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..calibration_state import CalibrationState
from ..experts import Rows
from ..masking import MaskedModel
from ..planes import by_plane, from_planes
from ..processes import Processes, Progress
from ..sensitivity import DenseReference, backward
from .allocation import mean_sparsity

# The change of u (C,) float32 in a refinement, and `Refinement.sensitivity`: the start of one at another sparsity.
Trajectory = tuple[Tensor, float]

# The points between start and outcome, as fractions of the way, whose KL is compared on held-out sequences.
PARTS = (0.0, 0.5, 1.0)

# `plan_steps`' distance; and the clipping of a channel's step, in root mean squares over all channels.
_DISTANCE, _FARTHEST = 0.385, 8.5
_PULL_TO_START = 0.02
_MOMENTUM, _SQUARE_DECAY = 0.8, 0.95
# The outcome is a running average with the weight of the last eighth of the steps.
_AVERAGED = 8
# The fraction of the steps and of the distance in a refinement that begins at another one's outcome.
_WARM_START = 0.25

_MOST_STEPS, _TOKENS_PER_SQUARED_STEP = 48, 57
_MOST_TOKENS_PER_STEP = 16384
_EPOCHS, _ENOUGH_TOKENS = 6, 32768
_SHARE_TOKENS = 2048

# The KL grows about like this power of the sparsity: candidates within a point of the target are compared at it.
_POWER = 3.5
_WIDTH = 0.3  # of the sigmoid
_SMALLEST = 1e-30
_SMALLEST_THRESHOLD, _LARGEST_LOGIT = 1e-9, 30.0
# Indices of the random generators of epochs begin here, above those of micro-batches.
_FIRST_ORDER = 1 << 20


def plan_steps(num_tokens: int, num_batches: int) -> tuple[int, int, int, float]:
    """Number of steps, micro-batches per step, held-out micro-batches, and the distance: the root mean square of the
    change of u if all steps had the first one's length and direction. Six epochs, in more and larger steps the more
    tokens there are: 24 steps of 8,192 tokens for 32,768 tokens, 48 of 16,384 from 131,072 on. Fewer tokens say too
    little about a channel: for 8,192, half the distance in 6 steps of 2,048."""
    held_out = max(1, round(num_batches / 8)) if num_batches > 2 else 0
    steps = min(_MOST_STEPS, round(math.sqrt(num_tokens / _TOKENS_PER_SQUARED_STEP)))
    part = min(1.0, math.sqrt(num_tokens / _ENOUGH_TOKENS))
    part_of_text = min(part * _EPOCHS / max(steps, 1), _MOST_TOKENS_PER_STEP / num_tokens)
    share = max(1, min(round(part_of_text * num_batches), num_batches - held_out))
    return max(min(steps, 1), round(part * steps)), share, held_out, part * _DISTANCE


def micro_batches(draw: Callable[[int], torch.Generator], step: int, share: int, count: int) -> list[int]:
    """The micro-batches of a step, one of every class of equal remainders modulo ``share``. So one process has all
    micro-batches of a class and keeps their dense distributions. A class is shuffled in every epoch."""
    chosen = []
    for first in range(share):
        members = range(first, count, share)
        epoch, position = divmod(step, len(members))
        order = torch.randperm(len(members), generator=draw(_FIRST_ORDER + epoch * share + first))
        chosen.append(members[int(order[position])])
    return chosen


@dataclass(frozen=True)
class Channels:
    """Layout of the vector (C,) of all projections' channels."""

    widths: Mapping[str, int]  # channels that a token reads, by projection
    sizes: Mapping[str, int]  # parameters that a token reads, by projection
    planes: int = 1  # of each channel; they differ by one number for each projection and plane, see `tie`
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes (E, K) of experts' scales

    @property
    def lengths(self) -> list[int]:
        """Elements of the vector, by projection."""
        return [math.prod(self.experts.get(name, (width,))) for name, width in self.widths.items()]

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Parts of the vector by projection, (K,) or (E, K) each."""
        parts = zip(self.widths, vector.split(self.lengths), strict=True)
        return {name: part.view(self.experts.get(name, (-1,))) for name, part in parts}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].flatten() for name in self.widths])

    def tie(self, vector: Tensor) -> Tensor:
        """The projection of a change (C,) onto those that keep scales tied, see `planes.tied`."""
        if self.planes == 1:
            return vector
        parts = []
        for part in self.split(vector).values():
            planes = by_plane(part, self.planes)
            parts.append(from_planes(planes.mean(0) + planes.mean(1, keepdim=True) - planes.mean(), part).flatten())
        return torch.cat(parts)

    def repeat(self, values: Tensor) -> Tensor:  # values of projections (P,) to their channels (C,)
        return values.repeat_interleave(torch.tensor(self.lengths, device=values.device))


@dataclass
class Refinement:
    """The optimiser's state: u (C,) float32 and its running averages."""

    logits: Tensor
    steps: int
    distance: float
    step: int = 0
    history: list[float] = field(default_factory=list)
    average: Tensor | None = None  # of u (C,): the outcome
    momentum: Tensor | None = None  # of the gradients (C,)
    square: Tensor | None = None  # of the squared gradients, per projection (P,)
    sensitivity: float = 0.0  # d (share of parameters kept) / d (a common shift of u)

    def advance(self, gradients: Sequence[Tensor], channels: Channels, start: Tensor, target: float) -> None:
        """One step with its micro-batches' results of `batch_gradient`. ``start`` (C,): u before the first step;
        ``target``: the sparsity."""
        summed = functools.reduce(torch.add, gradients)  # in this order on every device
        widths, total = channels.lengths, sum(channels.sizes.values())
        counts = [len(start), len(start), len(widths), 1]
        gradient, slope, kept_channels, kl = (summed[:-1] / summed[-1]).split(counts)
        # Of the parameters that a token reads, the fraction in one channel of each projection.
        fractions = [channels.sizes[name] / total / count for name, count in channels.widths.items()]
        shares = torch.tensor(fractions, dtype=torch.float64, device=start.device)
        slope = slope * channels.repeat(shares)
        kept = (kept_channels * shares).sum()
        self.step += 1
        self.history.append(round(float(kl), 6))
        self.momentum = _average(self.momentum, gradient, 1 - _MOMENTUM).float()
        means = torch.stack([part.mean() for part in gradient.square().split(widths)])
        self.square = _average(self.square, means, 1 - _SQUARE_DECAY)
        size = (self.square / (1 - _SQUARE_DECAY**self.step)).sqrt().clamp_min(_SMALLEST)
        scaled_slope = slope / channels.repeat(size)
        price = (self.momentum * scaled_slope).sum() / (slope * scaled_slope).sum().clamp_min(_SMALLEST)
        direction = channels.tie(self.momentum / channels.repeat(size) - price * scaled_slope)
        direction = (direction / direction.square().mean().sqrt().clamp_min(_SMALLEST)).clamp(-_FARTHEST, _FARTHEST)
        falling = 0.5 * (1 + math.cos(math.pi * (self.step - 1) / self.steps))
        # A common shift corrects half of the deviation from the target.
        self.sensitivity = float(slope.sum().clamp_min(1e-12))
        shift = 0.5 * ((1 - target) - kept) / self.sensitivity
        moved = self.logits - self.distance / self.steps * falling * direction + shift
        self.logits = torch.lerp(moved, start.double(), _PULL_TO_START * falling).float()
        weight = 1.0 if self.average is None else min(1.0, _AVERAGED / self.steps)
        self.average = _average(self.average, self.logits.double(), weight).float()

    def partway(self, part: float, start: Tensor) -> Tensor:
        """u at a fraction of the way from ``start`` to the outcome."""
        return start if self.average is None else torch.lerp(start, self.average, part)


def _average(kept: Tensor | None, value: Tensor, weight: float) -> Tensor:
    """A running average of ``value`` (float64) that starts at 0."""
    return weight * value if kept is None else torch.lerp(kept.double(), value, weight)


@contextmanager
def _masks(masked: MaskedModel, logits: Mapping[str, Tensor], dense_tokens: Tensor) -> Iterator[None]:
    for name, u in logits.items():
        masked.set_scale(name, u.exp())
    with masked.masking(dict.fromkeys(logits, 1.0)), masked.during(dense_tokens=dense_tokens):
        yield


def batch_gradient(reference: DenseReference, batch: int, channels: Channels, logits: Tensor) -> Tensor:
    """Forward and backward of the sparse model on a micro-batch; ``logits`` is u (C,) float32. Returns sums over the
    counted tokens in one float64 vector on the model's device: d KL / du (C), d kept / du (C), kept channels per
    projection (P), KL, number of tokens."""
    flow, masked = reference.flow, reference.masked
    counted, device = flow.counted[batch], flow.device
    by_name = channels.split(logits.to(device))
    gradient: dict[str, Tensor] = {}
    slope: dict[str, Tensor] = {}
    totals: list[Tensor] = []
    shared: list[tuple[Tensor, Tensor]] = []  # the last input and its log|x| / width: q, k and v share one

    def gradient_of(final: Tensor) -> Tensor:
        kl, at_final = reference.kl_gradient(batch, final)
        totals.append(kl)
        return at_final

    def receive(name: str, rows: Rows, at_input: Tensor) -> None:
        x = rows.x.float()
        u = rows.scale(by_name[name])
        if not shared or shared[0][0] is not rows.x:
            shared[:] = [(rows.x, x.abs().clamp_min_(_SMALLEST).log_().div_(_WIDTH))]
        soft = torch.add(shared[0][1], u, alpha=1 / _WIDTH).sigmoid_()
        weight = torch.addcmul(soft, soft, soft, value=-1)  # times the width
        slope[name] = rows.total(weight).double().div_(_WIDTH).to(device)
        gradient[name] = rows.total(weight.mul_(x).mul_(at_input)).double().div_(_WIDTH).to(device)

    # The dense model's distributions have to be computed before the masks are set.
    reference.distribution(batch, 0)
    with _masks(masked, by_name, ~counted), masked.counting() as realised:
        backward(flow, masked, batch, gradient_of, receive)
        dropped = realised()
    num_tokens = counted.sum().double()
    kept = [((1 - dropped[name].to(device)) * num_tokens * width).round() for name, width in channels.widths.items()]
    scalars = [*kept, totals[0].to(device), num_tokens]
    return torch.cat([channels.join(gradient), channels.join(slope), torch.stack(scalars)])


@torch.no_grad()
def measure_batch(
    reference: DenseReference, batch: int, channels: Channels, logits: Tensor, *, with_kl: bool = True
) -> list[float]:
    """Forward of the sparse model: kept channels per projection, KL and number of tokens, over the counted tokens."""
    flow, masked = reference.flow, reference.masked
    if with_kl:
        reference.distribution(batch, 0)  # before the masks are set
    counted = flow.counted[batch]
    with _masks(masked, channels.split(logits.to(flow.device)), ~counted), masked.counting() as realised:
        final = flow.final(batch)
        dropped = realised()
    kept = [round((1 - float(dropped[name])) * len(final) * count) for name, count in channels.widths.items()]
    return [*kept, reference.kl_sum(batch, final) if with_kl else 0.0, len(final)]


def refine(
    calib: CalibrationState,
    channels: Channels,
    target: float,
    scales: Mapping[str, Tensor],
    thresholds: Mapping[str, float],
    draw: Callable[[int], torch.Generator],
    *,
    steps: int | None,
    after: Trajectory | None,
    processes: Processes,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Any], float, Trajectory | None]:
    """Refine channel scales and thresholds on all tokens of ``calib`` at a target sparsity. ``after``: the trajectory of
    another sparsity to begin with. Returns the scales by projection, float32 on the CPU; the sparsity by projection;
    the KL before every step and on the held-out sequences; the tokens of all steps; the trajectory, if there were any."""
    flow, reference = calib.flow, calib.reference
    batches = range(flow.num_batches)

    def measured(u: Tensor, batches: Sequence[int], *, with_kl: bool = False) -> tuple[dict[str, float], float]:
        """The fraction of channels dropped by projection, and the KL."""
        sums = processes.spread(batches, lambda b: measure_batch(reference, b, channels, u, with_kl=with_kl))
        *kept, kl, num_tokens = (math.fsum(column) for column in zip(*sums, strict=True))
        widths = channels.widths.items()
        return {n: 1 - k / num_tokens / width for k, (n, width) in zip(kept, widths, strict=True)}, kl / num_tokens

    def on_target(
        u: Tensor, batches: Sequence[int], sensitivity: float, *, with_kl: bool = False
    ) -> tuple[Tensor, float]:
        """u plus a constant that brings the sparsity near the target, and about what the KL is there."""
        dropped, kl = measured(u, batches, with_kl=with_kl)
        mean = mean_sparsity([dropped[name] for name in channels.sizes], list(channels.sizes.values()))
        return u + (mean - target) / sensitivity, kl * (target / max(mean, _SMALLEST)) ** _POWER

    logits = {n: (s.cpu() / max(thresholds[n], _SMALLEST_THRESHOLD)).log() for n, s in scales.items()}
    start = begin = channels.join(logits).to(flow.device)
    planned, share, num_held_out, distance = plan_steps(sum(ids.numel() for ids in flow.input_ids), flow.num_batches)
    steps = planned if steps is None else steps
    steps = steps if target > 0.0 else 0
    num_trained = flow.num_batches - num_held_out
    held_out = batches[num_trained:]
    if steps and after is not None:
        moved, sensitivity = after
        steps, distance = max(1, round(_WARM_START * steps)), _WARM_START * distance
        begin, _ = on_target(start + moved.to(start.device), held_out or batches, sensitivity)
    state = Refinement(begin, steps, distance)
    length = 2 * sum(channels.lengths) + len(channels.widths) + 2
    with progress.stage("Refinement", steps) as stage:
        for step in range(steps):
            chosen = micro_batches(draw, step, share, num_trained)
            gradients = processes.spread_tensors(
                chosen, lambda b: batch_gradient(reference, b, channels, state.logits), length, flow.device
            )
            state.advance(gradients, channels, start, target)
            stage.advance()
            stage.note(f"KL of step {state.history[-1]:.4f}")  # each step has other text, so it rises and falls
        outcome, history = state.partway(1.0, start), dict[str, Any](refinement=state.history)
        if steps and held_out:
            candidates = []
            for part in PARTS:  # all at the same sparsity
                u, kl = on_target(state.partway(part, start), held_out, state.sensitivity, with_kl=True)
                candidates.append((kl, part, u))
            outcome = min(candidates, key=lambda candidate: candidate[:2])[2]
            history["held out"] = {f"{part:g} of the way": round(kl, 6) for kl, part, _ in candidates}
        # Some of the tokens are enough here: `final_thresholds` uses all.
        per_batch = max(1, flow.num_counted // flow.num_batches)
        dropped, _ = measured(outcome, batches[: -(-_SHARE_TOKENS // per_batch)])
    parts = channels.split(outcome.cpu())
    return (
        {name: (u - u.mean()).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).exp() for name, u in parts.items()},
        dropped,
        history,
        steps * share * flow.num_counted / flow.num_batches,
        ((outcome - start).cpu(), state.sensitivity) if steps else None,
    )
