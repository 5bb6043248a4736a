"""Which sparsity a budget of quality allows: ``--max-kl`` and ``--min-top1``.

Every sparsity that is tried is searched for as if it were to be written, and measured on a text of the calibration's
size that neither the calibration nor the search has seen. What is written in the end is measured once more, on yet
another text (`measurement`): the text that chose flatters its choice a little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wisparse.formats.errors import UsageError

from .documents import CalibrationTokens
from .evaluation import Quality, evaluate_text
from .measurement import MaskedLogits
from .processes import ALONE, Processes, Progress
from .search.evolution import LOWEST, highest
from .search.search import SearchResult, SparsityLevels
from .source import SourceModel
from .state import NO_STATE, Store, pack, unpack


@dataclass(frozen=True)
class Budget:
    """How far from dense a model may be.

    Attributes:
        max_kl: mean KL(dense || sparse), nats per token; None for any.
        min_top1: share of tokens with the dense model's first choice; None for any.
    """

    max_kl: float | None = None
    min_top1: float | None = None

    def spent(self, kl: float, top1: float) -> float:
        """The part of the budget that this costs: kept up to 1."""
        parts = []
        if self.max_kl is not None:
            parts.append(_part(kl, self.max_kl))
        if self.min_top1 is not None:
            parts.append(_part(1.0 - top1, 1.0 - self.min_top1))
        return max(parts)

    def __str__(self) -> str:
        said = [f"--max-kl {self.max_kl:g}"] if self.max_kl is not None else []
        return " and ".join([*said, *([f"--min-top1 {self.min_top1:g}"] if self.min_top1 is not None else [])])


def _part(spent: float, limit: float) -> float:
    if spent <= 0.0:
        return 0.0
    return spent / limit if limit > 0.0 else float("inf")


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        sparsity: the highest on the grid that keeps the budget.
        tried: (sparsity, KL, top-1 agreement) of all that were tried, ascending.
        num_tokens: of the text that chose.
    """

    sparsity: float
    tried: tuple[tuple[float, float, float], ...]
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        tried = [{"sparsity": s, "kl": round(kl, 6), "top1_agreement": round(top1, 6)} for s, kl, top1 in self.tried]
        return {"sparsity": self.sparsity, "num_tokens": self.num_tokens, "tried": tried}


def choose(
    source: SourceModel,
    levels: SparsityLevels,
    budget: Budget,
    text: Callable[[], CalibrationTokens],
    progress: Progress | None = None,
    store: Store = NO_STATE,
    processes: Processes = ALONE,
) -> Choice:
    """The highest sparsity that keeps a budget, see `highest`. Several processes call it alike; the first measures.

    Args:
        text: gives the tokens to measure on; asked of the first process, once, and only if something is to be measured.

    Raises:
        UsageError: no sparsity keeps it; the sentence says what the lowest one costs.
    """
    progress = progress or Progress(enabled=False)
    tokens: list[CalibrationTokens] = []
    found: dict[float, tuple[float, float, int]] = {}

    def measured(result: SearchResult) -> bytes:
        if not tokens:
            tokens.append(text())
        quality = _quality(source, result, tokens[0], progress)
        return pack([quality.sparse.kl, quality.sparse.top1_agreement, quality.sparse.num_tokens])

    def spent(sparsity: float) -> float:
        result = levels.at(sparsity)
        key = f"choice/{sparsity!r}"
        data = store.load(key)
        if data is None:
            data = processes.broadcast(measured(result) if processes.leads else b"")
            store.save(key, data)
        kl, top1, num_tokens = unpack(data)
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


def _quality(source: SourceModel, result: SearchResult, tokens: CalibrationTokens, progress: Progress) -> Quality:
    with MaskedLogits(source, result) as logits, progress.stage("Trying", tokens.num_samples) as stage:
        return evaluate_text(logits, tokens.input_ids, ["all"], advance=stage.advance)["all"]
