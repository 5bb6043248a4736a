"""The refinement carried out: steps over a calibration text, kept in the state, by one process or several.

The steps themselves are `Refinement`'s, the passes through the model `joint_kl`'s. At the end sequences that no step
was taken on decide how much of the way from the start to the outcome is gone: all of it, half of it, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wisparse.kernels.reference import keep_mask

from ..budget import mean_sparsity
from ..flow import BlockFlow
from ..masking import MaskedModel
from ..processes import Processes, Progress
from ..sensitivity import backward, kl_rows, rows_at_once
from ..state import Store, pack, unpack
from ..workbench import Workbench

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


# Of the sigmoid that stands in for the step.
_WIDTH = 0.3


# Of every projection: u is in the scales.
_THRESHOLD = 1.0


@torch.no_grad()
def dense_states(flow: BlockFlow, masked: MaskedModel, batch: int) -> Tensor:
    """The dense model's last hidden states at the counted tokens of a micro-batch, (T, hidden_size) on the CPU."""
    with masked.masking({}), masked.sparing(None):
        final = flow.finish(0, batch, flow.start()[batch])
    return final[flow.counted[batch].to(final.device)].cpu()


def batch_gradient(
    flow: BlockFlow, masked: MaskedModel, batch: int, channels: Channels, logits: Tensor, dense: Tensor
) -> BatchGradient:
    """One pass of the sparse model forward and backward over a micro-batch.

    Args:
        logits: (C,) float32, u of every channel.
        dense: of `dense_states`.
    """
    counted = flow.counted[batch]
    by_name = channels.split(logits.to(flow.device))
    seen: dict[str, Tensor] = {}
    gradient: dict[str, Tensor] = {}
    slope: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    total: list[Tensor] = []

    def note(name: str, x: Tensor) -> None:
        if torch.is_grad_enabled():
            seen[name] = x.detach()

    def divergence(dense_rows: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            log_probs = flow.logits(dense_rows).log_softmax(-1)
        return kl_rows(log_probs, flow.logits(rows)).sum()

    def loss(final: Tensor) -> list[Tensor]:
        value = final.new_zeros((), dtype=torch.float32)
        size = rows_at_once(flow)
        for dense_rows, rows in zip(dense.to(final.device).split(size), final.split(size), strict=True):
            if len(final) <= size:
                value = divergence(dense_rows, rows)
            else:
                value = value + checkpoint(divergence, dense_rows, rows, use_reentrant=False)
        total.append(value.detach().double())
        return [value]

    def receive(name: str, _: Tensor, at_input: Tensor) -> None:
        x = seen.pop(name)[counted.to(at_input.device)].float()
        u = by_name[name].to(x.device)
        z = (x.abs().clamp_min(_SMALLEST).log() + u) / _WIDTH
        soft = torch.sigmoid(z)
        weight = soft * (1 - soft) / _WIDTH
        # What one process of several sends, and all add up in one order.
        gradient[name] = (at_input.float() * x * weight).sum(0).double().to(flow.device)
        slope[name] = weight.sum(0).double().to(flow.device)
        # As the mask on the way forward decided, which the sign of z does not tell where rounding does.
        kept[name] = keep_mask(x, u.exp(), _THRESHOLD).sum().double().to(flow.device)

    with _masks(masked, by_name, ~counted), masked.observing(note):
        backward(flow, masked, batch, loss, receive)
    kept_all = torch.stack([kept[name] for name in channels.widths])
    return BatchGradient(
        channels.join(gradient), channels.join(slope), kept_all, total[0].to(flow.device), counted.sum().double()
    )


@dataclass(frozen=True)
class Measured:
    """Of the sparse model over the counted tokens of one micro-batch or several.

    Attributes:
        kept: channels kept, per projection.
        kl: summed.
        num_tokens: how many.
    """

    kept: dict[str, int]
    kl: float
    num_tokens: int

    @classmethod
    def total(cls, parts: Sequence[Measured]) -> Measured:
        kept = {name: sum(one.kept[name] for one in parts) for name in parts[0].kept}
        return cls(kept, math.fsum(one.kl for one in parts), sum(one.num_tokens for one in parts))

    def dropped(self, channels: Channels) -> dict[str, float]:
        """Share of the channels left unread, per projection."""
        return {name: 1 - self.kept[name] / self.num_tokens / width for name, width in channels.widths.items()}


@torch.no_grad()
def measure_batch(
    flow: BlockFlow, masked: MaskedModel, batch: int, channels: Channels, logits: Tensor, dense: Tensor | None = None
) -> Measured:
    """One pass over a micro-batch, everything sparse; without ``dense``, of `dense_states`, the KL is not measured."""
    counted = flow.counted[batch]
    with _masks(masked, channels.split(logits.to(flow.device)), ~counted), masked.counting() as realised:
        final = flow.finish(0, batch, flow.start()[batch])
        found = realised()
    kl = 0.0
    if dense is not None:
        size, rows = rows_at_once(flow), final[counted.to(final.device)]
        for dense_rows, some in zip(dense.to(final.device).split(size), rows.split(size), strict=True):
            kl += float(kl_rows(flow.logits(dense_rows).log_softmax(-1), flow.logits(some)).double().sum())
    num_tokens = int(counted.sum())
    kept = {name: round((1 - found[name]) * num_tokens * width) for name, width in channels.widths.items()}
    return Measured(kept, kl, num_tokens)


@contextmanager
def _masks(masked: MaskedModel, logits: Mapping[str, Tensor], dense_tokens: Tensor) -> Iterator[None]:
    for name, u in logits.items():
        masked.set_scale(name, u.exp())
    with masked.masking(dict.fromkeys(logits, _THRESHOLD)), masked.sparing(dense_tokens):
        yield


_KEY = "fisher/refinement"

# Where its draws begin, past any micro-batch's; bounds that no model comes near.
_descent_ROUNDS = 1 << 20
_SMALLEST_THRESHOLD, _LARGEST_LOGIT = 1e-9, 30.0


# A refinement that begins where that of a near sparsity ended goes this part of the steps, and of the distance.
_AGAIN = 0.25


@dataclass(frozen=True)
class Trajectory:
    """Where a refinement went: what another one, at a sparsity near by, begins with.

    Attributes:
        moved: (C,) float32 on the CPU, the change of u.
        pliancy: see `Refinement`.
    """

    moved: Tensor
    pliancy: float


@dataclass(frozen=True)
class DescentResult:
    """Attributes:
    scales: channel_scale of every projection, (K,) float32 on the CPU.
    dropped: share of the channels left unread with them, per projection.
    history: KL before every step; KL on the held-out sequences by part of the way.
    num_tokens: gone through by all steps together.
    trajectory: from the start to the outcome; None if no step was taken.
    """

    scales: dict[str, Tensor]
    dropped: dict[str, float]
    history: dict[str, Any]
    num_tokens: float
    trajectory: Trajectory | None


class Descent:
    """One refinement.

    Args:
        bench: over all calibration tokens, with masks of its own.
        target: share of all parameters to leave unread.
        dense_states: of `dense_states` by micro-batch, filled here; refinements of one model and text share them.
    """

    def __init__(
        self,
        bench: Workbench,
        channels: Channels,
        target: float,
        processes: Processes,
        dense_states: dict[int, Tensor] | None = None,
    ) -> None:
        self.flow, self.masked = bench.flow, bench.masked
        self.channels, self.target, self.processes = channels, target, processes
        self.num_tokens = sum(ids.numel() for ids in self.flow.input_ids)
        self._dense = {} if dense_states is None else dense_states

    def run(
        self,
        scales: Mapping[str, Tensor],
        thresholds: Mapping[str, float],
        draw: Callable[[int], torch.Generator],
        steps: int | None,
        store: Store,
        progress: Progress,
        after: Trajectory | None = None,
    ) -> DescentResult:
        """From channel scales and thresholds on.

        Args:
            draw: a generator by number.
            steps: how many; None goes by `plan_steps`.
            after: of a refinement at a near sparsity, to go at once; the steps then are fewer.
        """
        flow, channels = self.flow, self.channels
        logits = {n: (s.cpu() / max(thresholds[n], _SMALLEST_THRESHOLD)).log() for n, s in scales.items()}
        start = channels.join(logits).to(flow.device)
        plan = plan_steps(self.num_tokens, flow.num_batches)
        steps, distance = plan.steps if steps is None else steps, plan.distance
        steps = steps if self.target > 0.0 else 0
        saved = store.load(_KEY)
        begin = start
        if steps and after is not None:
            steps, distance = max(1, round(_AGAIN * steps)), _AGAIN * distance
            if saved is None:
                begin = self._on_target(start + after.moved.to(start.device), after.pliancy)
        state = Refinement(begin, steps, distance) if saved is None else Refinement(**unpack(saved))
        state = state.to(flow.device)
        with progress.stage("Refinement", steps) as stage:
            stage.advance(state.step)
            while state.step < steps:
                batches = micro_batches(draw, state.step, plan.share, flow.num_batches - plan.held_out)
                state.advance(self._gradients(batches, state.logits), channels, start, self.target)
                store.save(_KEY, pack(vars(state.to(torch.device("cpu")))))
                stage.advance()
                stage.note(f"KL {state.history[-1]:.4f}")
        outcome, held_out = (
            self._choose(state, start, plan) if steps and plan.held_out else (state.partway(1, start), {})
        )
        found = self._measured(outcome, range(flow.num_batches), with_kl=False)
        by_name = channels.split(outcome.cpu()).items()
        return DescentResult(
            {n: (u - u.mean()).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).exp() for n, u in by_name},
            found.dropped(channels),
            {"refinement": state.history, **({"held out": held_out} if held_out else {})},
            steps * plan.share * flow.num_counted / flow.num_batches,
            Trajectory((outcome - start).cpu(), state.pliancy) if steps else None,
        )

    def _on_target(self, u: Tensor, pliancy: float) -> Tensor:
        """u, shifted alike for all channels until about the target is left unread."""
        dropped = self._measured(u, range(self.flow.num_batches), with_kl=False).dropped(self.channels)
        return u + (self._mean(dropped) - self.target) / pliancy

    def _mean(self, dropped: Mapping[str, float]) -> float:
        sizes = self.channels.sizes
        return mean_sparsity([dropped[name] for name in sizes], list(sizes.values()))

    def _choose(self, state: Refinement, start: Tensor, plan: Plan) -> tuple[Tensor, dict[str, float]]:
        """u after the part of the way that is best on the held-out sequences, all parts at the same sparsity there."""
        batches = range(self.flow.num_batches - plan.held_out, self.flow.num_batches)
        found = []
        for part in PARTS:
            u = state.partway(part, start)
            dropped = self._measured(u, batches, with_kl=False).dropped(self.channels)
            u = u + (self._mean(dropped) - self.target) / state.pliancy
            measured = self._measured(u, batches, with_kl=True)
            found.append((measured.kl / measured.num_tokens, part, u))
        best = min(found, key=lambda one: one[:2])
        return best[2], {f"{part:g} of the way": round(kl, 6) for kl, part, _ in found}

    def _gradients(self, batches: Sequence[int], logits: Tensor) -> list[BatchGradient]:
        def one(batch: int) -> Tensor:
            dense = self._dense_states(batch)
            return batch_gradient(self.flow, self.masked, batch, self.channels, logits, dense).pack()

        length, device = self.channels.packed_length, self.flow.device
        found = self.processes.spread_tensors(batches, one, length, device)
        return [BatchGradient.unpack(packed, self.channels) for packed in found]

    def _measured(self, logits: Tensor, batches: Sequence[int], *, with_kl: bool) -> Measured:
        def one(batch: int) -> Measured:
            dense = self._dense_states(batch) if with_kl else None
            return measure_batch(self.flow, self.masked, batch, self.channels, logits, dense)

        return Measured.total(self.processes.spread(batches, one))

    def _dense_states(self, batch: int) -> Tensor:
        if batch not in self._dense:
            self._dense[batch] = dense_states(self.flow, self.masked, batch)
        return self._dense[batch]


def micro_batches(draw: Callable[[int], torch.Generator], step: int, share: int, count: int) -> list[int]:
    """The micro-batches of a step, one of every class: those that leave one remainder when divided by ``share``.

    So each has its process, which knows its dense states. A class is gone through round after round, each round in an
    order of its own.
    """
    found = []
    for first in range(share):
        members = range(first, count, share)
        turn, place = divmod(step, len(members))
        order = torch.randperm(len(members), generator=draw(_descent_ROUNDS + turn * share + first))
        found.append(members[int(order[place])])
    return found
