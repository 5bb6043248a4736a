"""The refinement carried out: steps over a calibration text, kept in the state, by one process or several.

The steps themselves are `Refinement`'s, the passes through the model `joint_kl`'s. At the end sequences that no step
was taken on decide how much of the way from the start to the outcome is gone: all of it, half of it, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..bench.workbench import Workbench
from ..budget import mean_sparsity
from ..work.processes import Processes
from ..work.progress import Progress
from ..work.state import Store, pack, unpack
from .joint_kl import Measured, batch_gradient, dense_states, measure_batch
from .refinement import PARTS, BatchGradient, Channels, Plan, Refinement, plan_steps

__all__ = ["Descent", "DescentResult", "Trajectory"]

_KEY = "fisher/refinement"

# Where its draws begin, past any micro-batch's; bounds that no model comes near.
_ROUNDS = 1 << 20
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
        order = torch.randperm(len(members), generator=draw(_ROUNDS + turn * share + first))
        found.append(members[int(order[place])])
    return found
