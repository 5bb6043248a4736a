"""Gradient steps on the KL of the whole sparse model, by which channel scales and thresholds move, and no weight."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wisparse.kernels.reference import keep_mask

from ..calibration_state import CalibrationState
from ..experts import Rows
from ..masking import MaskedModel
from ..planes import by_plane, from_planes
from ..processes import Processes, Progress
from ..sensitivity import DenseReference, backward
from .allocation import mean_sparsity

# Where a refinement went, for one at a near sparsity: the change of u (C,) float32, and `Refinement.sensitivity`.
Trajectory = tuple[Tensor, float]

# How much of the way from the start to the outcome may be gone.
PARTS = (0.0, 0.5, 1.0)

# See `plan_steps`; and so many times the root mean square is the most that a channel moves in a step.
_DISTANCE, _FARTHEST = 0.385, 8.5
_PULL_TO_START = 0.02
_MOMENTUM, _SQUARE_DECAY = 0.8, 0.95
# The outcome is the average over about the last eighth of the steps.
_AVERAGED = 8
# A refinement that begins where that of a near sparsity ended goes this part of the steps, and of the distance.
_AGAIN = 0.25

_MOST_STEPS, _TOKENS_PER_SQUARED_STEP = 48, 57
_MOST_TOKENS_PER_STEP = 16384
_EPOCHS, _ENOUGH_TOKENS = 6, 32768
_SHARE_TOKENS = 4096

_WIDTH = 0.3
_SMALLEST = 1e-30
_SMALLEST_THRESHOLD, _LARGEST_LOGIT = 1e-9, 30.0
# The generators of the steps' orders have numbers beyond those of the micro-batches.
_FIRST_ORDER = 1 << 20


def plan_steps(num_tokens: int, num_batches: int) -> tuple[int, int, int, float]:
    """How many steps, micro-batches a step, micro-batches held out, and the distance a calibration text allows: the
    root mean square of the change of u, were all steps as long as the first and in one direction. Six times through the
    text, in the more and the larger steps, the longer it is: 24 of 8,192 tokens for 32,768, 48 of 16,384 for 131,072
    and more. A shorter text says too little of a channel: half the distance, 6 steps of 2,048, for 8,192 tokens."""
    held_out = max(1, round(num_batches / 8)) if num_batches > 2 else 0
    steps = min(_MOST_STEPS, round(math.sqrt(num_tokens / _TOKENS_PER_SQUARED_STEP)))
    part = min(1.0, math.sqrt(num_tokens / _ENOUGH_TOKENS))
    part_of_text = min(part * _EPOCHS / max(steps, 1), _MOST_TOKENS_PER_STEP / num_tokens)
    share = max(1, min(round(part_of_text * num_batches), num_batches - held_out))
    return max(min(steps, 1), round(part * steps)), share, held_out, part * _DISTANCE


def micro_batches(draw: Callable[[int], torch.Generator], step: int, share: int, count: int) -> list[int]:
    """The micro-batches of a step, one of every class of equal remainders modulo ``share``. So each class has its
    process, which keeps its dense distributions. A class is gone through in epochs, each in an order of its own."""
    found = []
    for first in range(share):
        members = range(first, count, share)
        epoch, position = divmod(step, len(members))
        order = torch.randperm(len(members), generator=draw(_FIRST_ORDER + epoch * share + first))
        found.append(members[int(order[position])])
    return found


@dataclass(frozen=True)
class Channels:
    """The channels of all projections in one vector (C,): ``widths`` and ``sizes`` (parameters) that a token reads, by
    projection."""

    widths: Mapping[str, int]
    sizes: Mapping[str, int]
    planes: int = 1  # of each channel, which move together but for one difference a projection and plane
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes (E, K) of experts' scales

    @property
    def lengths(self) -> list[int]:
        """How many of the vector are of each projection."""
        return [math.prod(self.experts.get(name, (width,))) for name, width in self.widths.items()]

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """By projection, (K,) or (E, K) each."""
        parts = zip(self.widths, vector.split(self.lengths), strict=True)
        return {name: part.view(self.experts.get(name, (-1,))) for name, part in parts}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].flatten() for name in self.widths])

    def tie(self, vector: Tensor) -> Tensor:
        """The nearest change (C,) that keeps scales tied, see `planes.tied`."""
        if self.planes == 1:
            return vector
        found = []
        for part in self.split(vector).values():
            one = by_plane(part, self.planes)
            found.append(from_planes(one.mean(0) + one.mean(1, keepdim=True) - one.mean(), part).flatten())
        return torch.cat(found)

    def repeat(self, values: Tensor) -> Tensor:  # one value per projection (P,) to each of its channels
        return values.repeat_interleave(torch.tensor(self.lengths, device=values.device))


@dataclass
class Refinement:
    """The optimiser: u (C,) float32 and its running averages."""

    logits: Tensor
    steps: int
    distance: float
    step: int = 0
    history: list[float] = field(default_factory=list)
    average: Tensor | None = None  # of the last u (C,): the outcome
    momentum: Tensor | None = None  # of the gradients (C,)
    square: Tensor | None = None  # of the squared gradients, per projection (P,)
    sensitivity: float = 0.0  # d (share of parameters kept) / d (a common shift of u)

    def advance(self, found: Sequence[Tensor], channels: Channels, start: Tensor, target: float) -> None:
        """One step with the gradients of its micro-batches (`batch_gradient`). ``start`` (C,) is u before the first
        one, ``target`` the share of all parameters to drop."""
        summed = functools.reduce(torch.add, found)  # in their order, whatever the device
        widths, total = channels.lengths, sum(channels.sizes.values())
        counts = [len(start), len(start), len(widths), 1]
        gradient, slope, kept_channels, kl = (summed[:-1] / summed[-1]).split(counts)
        # What part of all parameters that a token reads one channel of each projection is.
        share = [channels.sizes[name] / total / count for name, count in channels.widths.items()]
        shares = torch.tensor(share, dtype=torch.float64, device=start.device)
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
        # What curvature did to the budget in the last step is corrected by a common shift.
        self.sensitivity = float(slope.sum().clamp_min(1e-12))
        shift = 0.5 * ((1 - target) - kept) / self.sensitivity
        moved = self.logits - self.distance / self.steps * falling * direction + shift
        self.logits = torch.lerp(moved, start.double(), _PULL_TO_START * falling).float()
        weight = 1.0 if self.average is None else min(1.0, _AVERAGED / self.steps)
        self.average = _average(self.average, self.logits.double(), weight).float()

    def partway(self, part: float, start: Tensor) -> Tensor:
        """u after a part of the way from ``start``."""
        return start if self.average is None else torch.lerp(start, self.average, part)


def _average(kept: Tensor | None, value: Tensor, weight: float) -> Tensor:
    """The running average of ``value`` (float64), which starts at 0."""
    return weight * value if kept is None else torch.lerp(kept.double(), value, weight)


@contextmanager
def _masks(masked: MaskedModel, logits: Mapping[str, Tensor], dense_tokens: Tensor) -> Iterator[None]:
    for name, u in logits.items():
        masked.set_scale(name, u.exp())
    with masked.masking(dict.fromkeys(logits, 1.0)), masked.during(dense_tokens=dense_tokens):
        yield


def batch_gradient(reference: DenseReference, batch: int, channels: Channels, logits: Tensor) -> Tensor:
    """One pass of the sparse model forward and backward over a micro-batch; ``logits`` is u (C,) float32. Gives sums
    over the counted tokens, in one float64 vector on the model's device, which processes can exchange: d KL / du (C), d
    kept / du (C), the channels kept per projection (P), the KL, and the number of tokens."""
    flow, masked = reference.flow, reference.masked
    counted, device = flow.counted[batch], flow.device
    by_name = channels.split(logits.to(device))
    gradient: dict[str, Tensor] = {}
    slope: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    totals: list[Tensor] = []

    def gradient_of(final: Tensor) -> Tensor:
        kl, at_final = reference.kl_gradient(batch, final)
        totals.append(kl)
        return at_final

    def receive(name: str, rows: Rows, at_input: Tensor) -> None:
        x = rows.x.float()
        u = rows.scale(by_name[name])
        soft = x.abs().clamp_min_(_SMALLEST).log_().add_(u).div_(_WIDTH).sigmoid_()
        weight = soft.mul_(1 - soft).div_(_WIDTH)
        slope[name] = rows.total(weight).double().to(device)
        gradient[name] = rows.total(weight.mul_(x).mul_(at_input)).double().to(device)
        # As the forward pass decided, which the sign of log|x| + u does not tell where rounding does.
        kept[name] = keep_mask(x, u.exp(), 1.0).count_nonzero().double().to(device)

    # Before the masks are on: the dense model's distributions, if they are not kept yet.
    reference.distribution(batch, 0)
    with _masks(masked, by_name, ~counted):
        backward(flow, masked, batch, gradient_of, receive)
    scalars = [*(kept[name] for name in channels.widths), totals[0].to(device), counted.sum().double()]
    return torch.cat([channels.join(gradient), channels.join(slope), torch.stack(scalars)])


@torch.no_grad()
def measure_batch(
    reference: DenseReference, batch: int, channels: Channels, logits: Tensor, *, with_kl: bool = True
) -> list[float]:
    """Everything sparse, of the counted tokens of a micro-batch: channels kept per projection, KL, number of tokens."""
    flow, masked = reference.flow, reference.masked
    if with_kl:
        reference.distribution(batch, 0)  # before the masks are on
    counted = flow.counted[batch]
    with _masks(masked, channels.split(logits.to(flow.device)), ~counted), masked.counting() as realised:
        final = flow.final(batch)
        found = realised()
    kept = [round((1 - found[name]) * len(final) * count) for name, count in channels.widths.items()]
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
    """Refine channel scales and thresholds over all tokens of ``calib`` at a target sparsity. Gives channel scales by
    projection, float32 on the CPU, and the share of channels dropped with them; the KL before every step, and on
    the held-out sequences by part of the way; the tokens of all steps; the trajectory, if a step was taken."""
    flow, reference = calib.flow, calib.reference
    batches = range(flow.num_batches)

    def measured(u: Tensor, batches: Sequence[int], *, with_kl: bool = False) -> tuple[dict[str, float], float]:
        """The share of channels dropped by projection, and the KL."""
        found = processes.spread(batches, lambda b: measure_batch(reference, b, channels, u, with_kl=with_kl))
        *kept, kl, num_tokens = (math.fsum(column) for column in zip(*found, strict=True))
        widths = channels.widths.items()
        return {n: 1 - k / num_tokens / width for k, (n, width) in zip(kept, widths, strict=True)}, kl / num_tokens

    def on_target(u: Tensor, batches: Sequence[int], sensitivity: float) -> Tensor:
        """u, shifted alike for all channels until about the target is dropped."""
        dropped, _ = measured(u, batches)
        mean = mean_sparsity([dropped[name] for name in channels.sizes], list(channels.sizes.values()))
        return u + (mean - target) / sensitivity

    logits = {n: (s.cpu() / max(thresholds[n], _SMALLEST_THRESHOLD)).log() for n, s in scales.items()}
    start = begin = channels.join(logits).to(flow.device)
    planned, share, num_held_out, distance = plan_steps(sum(ids.numel() for ids in flow.input_ids), flow.num_batches)
    steps = planned if steps is None else steps
    steps = steps if target > 0.0 else 0
    num_trained = flow.num_batches - num_held_out
    held_out = batches[num_trained:]
    if steps and after is not None:
        moved, sensitivity = after
        steps, distance = max(1, round(_AGAIN * steps)), _AGAIN * distance
        begin = on_target(start + moved.to(start.device), held_out or batches, sensitivity)
    state = Refinement(begin, steps, distance)
    length = 2 * sum(channels.lengths) + len(channels.widths) + 2
    with progress.stage("Refinement", steps) as stage:
        for step in range(steps):
            chosen = micro_batches(draw, step, share, num_trained)
            found = processes.spread_tensors(
                chosen, lambda b: batch_gradient(reference, b, channels, state.logits), length, flow.device
            )
            state.advance(found, channels, start, target)
            stage.advance()
            stage.note(f"KL {state.history[-1]:.4f}")
        outcome, history = state.partway(1.0, start), dict[str, Any](refinement=state.history)
        if steps and held_out:
            candidates = []
            for part in PARTS:  # at the same sparsity, all of them
                u = on_target(state.partway(part, start), held_out, state.sensitivity)
                candidates.append((measured(u, held_out, with_kl=True)[1], part, u))
            outcome = min(candidates, key=lambda one: one[:2])[2]
            history["held out"] = {f"{part:g} of the way": round(kl, 6) for kl, part, _ in candidates}
        # Of a long text a part tells the shares well enough: every threshold is decided again on all of it.
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
