"""Which sparsity a budget of quality allows: ``--max-kl`` and ``--min-top1``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wisparse.formats.errors import UsageError

from .calibration import CalibrationTokens
from .evaluation import evaluate_text
from .measurement import MaskedLogits
from .processes import ALONE, Processes, Progress
from .search.allocation import MAX_SPARSITY
from .search.search import SparsityLevels
from .source import SourceModel
from .state import NO_STATE, Stages

# Below this a mask saves less than it costs to compute.
LOWEST = 0.05

# The KL grows about like this power of the sparsity (docs/choosing.md), until two measurements say more.
_POWER, _GUESS = 3.5, 0.4
_SMALLEST, _LARGEST = 1e-6, 1e6
_PATIENCE = 5

# Sparsities are a tenth of a point apart, where the KL differs by about a percent. With this much of the budget spent
# the rest is not looked for: a text of thousands of tokens tells no finer.
_GRID, _ENOUGH = 0.001, 0.98


@dataclass(frozen=True)
class Budget:
    """The most of KL(dense || sparse), nats per token, and the least top-1 agreement; None for any."""

    max_kl: float | None = None
    min_top1: float | None = None

    def spent(self, kl: float, top1: float) -> float:
        """The part of the budget that this costs: kept up to 1."""
        costs = []
        if self.max_kl is not None:
            costs.append((kl, self.max_kl))
        if self.min_top1 is not None:
            costs.append((1.0 - top1, 1.0 - self.min_top1))
        return max(0.0 if cost <= 0.0 else cost / limit if limit > 0.0 else math.inf for cost, limit in costs)

    def __str__(self) -> str:
        limits = (("--max-kl", self.max_kl), ("--min-top1", self.min_top1))
        return " and ".join(f"{option} {limit:g}" for option, limit in limits if limit is not None)


@dataclass(frozen=True)
class Choice:
    """The highest sparsity that keeps a budget, and (sparsity, KL, top-1 agreement) of all that were tried."""

    sparsity: float
    tried: tuple[tuple[float, float, float], ...]
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        tried = [{"sparsity": s, "kl": round(kl, 6), "top1_agreement": round(top1, 6)} for s, kl, top1 in self.tried]
        return {"sparsity": self.sparsity, "num_tokens": self.num_tokens, "tried": tried}


def highest(loss: Callable[[float], float]) -> float | None:
    """A sparsity whose loss is within the limit, 1, and at most 2% below it, or that of the next one on the grid.

    ``loss`` of a sparsity is asked for at most once each. It is taken to rise with the sparsity: where it does not, the
    outcome is one of the sparsities at which it crosses the limit. None if not even `LOWEST` is within the limit.
    """
    first, last = round(LOWEST / _GRID), round(MAX_SPARSITY / _GRID)
    known: dict[int, float] = {}
    step = round(_GUESS / _GRID)
    while True:
        known[step] = min(max(loss(round(step * _GRID, 4)), _SMALLEST), _LARGEST)
        if _ENOUGH <= known[step] <= 1.0:
            return round(step * _GRID, 4)
        above = min((i for i, spent in known.items() if spent > 1.0), default=None)
        below = max((i for i in known if known[i] <= 1.0 and (above is None or i < above)), default=None)
        low = first if below is None else below + 1
        high = last if above is None else above - 1
        if low > high:
            return None if below is None else round(below * _GRID, 4)
        guess = (low + high) // 2
        if len(known) <= _PATIENCE:
            # Where a power law through the two measurements nearest to the limit is midway in what is enough.
            nearest = sorted(known, key=lambda i: abs(math.log(known[i])))[:2]
            at, power = nearest[0], _POWER
            if len(nearest) > 1:
                power = max(1.0, math.log(known[at] / known[nearest[1]]) / math.log(at / nearest[1]))
            guess = round(at * ((1.0 + _ENOUGH) / 2 / known[at]) ** (1 / power))
        step = min(max(guess, low), high)


def choose(
    source: SourceModel,
    levels: SparsityLevels,
    budget: Budget,
    text: Callable[[], CalibrationTokens],
    progress: Progress | None = None,
    stages: Stages = NO_STATE,
    processes: Processes = ALONE,
) -> Choice:
    """The highest sparsity that keeps a budget, see `highest`. Several processes call it alike; the first measures.

    ``text`` gives the tokens to measure on, and is called at most once. Raises UsageError if no sparsity keeps the
    budget; the sentence says what the lowest one costs.
    """
    progress = progress or Progress(enabled=False)
    tokens: list[CalibrationTokens] = []
    found: dict[float, tuple[float, float, int]] = {}

    def spent(sparsity: float) -> float:
        result = levels.at(sparsity)

        def measure() -> Any:
            values = None
            if processes.leads:
                if not tokens:
                    tokens.append(text())
                with MaskedLogits(source, result) as logits, progress.stage("Trying", tokens[0].num_samples) as stage:
                    quality = evaluate_text(logits, tokens[0].input_ids, ["all"], advance=stage.advance)["all"].sparse
                values = [quality.kl, quality.top1_agreement, quality.num_tokens]
            return processes.broadcast(values)

        kl, top1, num_tokens = stages.run(f"choice-{sparsity!r}", measure)
        found[sparsity] = (kl, top1, num_tokens)
        return budget.spent(kl, top1)

    sparsity = highest(spent)
    if sparsity is None:
        kl, top1, _ = found[LOWEST]
        raise UsageError(
            f"{budget}: no sparsity from {LOWEST:.0%} on keeps that; the best is KL {kl:.2g} nats/token and top-1 "
            f"agreement {top1:.2%} at {LOWEST:.0%}; allow more, or leave the model dense"
        )
    tried = tuple((one, kl, top1) for one, (kl, top1, _) in sorted(found.items()))
    return Choice(sparsity, tried, found[sparsity][2])
