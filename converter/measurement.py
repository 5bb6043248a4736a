"""What searches' results are worth, measured while the model is still in memory; the sparsity that a budget allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import AccessError, CalibrationError, UsageError

from .calibration import CalibrationTokens, load_calibration
from .calibration_state import CalibrationState
from .evaluation import Quality, evaluate_text
from .experts import numbers_read
from .masking import MaskedModel
from .processes import SILENT, Progress
from .search.allocation import MAX_SPARSITY
from .search.search import SearchResult, SparsityLevels
from .source import SourceModel

_log = logging.getLogger("wisparse")

# The curves of the paper's Fig. 2.
LEVELS = (0.4, 0.5, 0.6)
# Far from any seed that a person chooses beside the calibration's.
_SEED_OFFSET, _CHOICE_SEED_OFFSET = 1_000_003, 2_000_003
_SAMPLES, _SEQ_LEN = 8, 256
_SENSITIVITY_TOKENS = 1024
# Below this a mask saves less than it costs to compute.
LOWEST = 0.05
# The KL grows about like this power of the sparsity (docs/choosing.md), until two measurements say more.
_POWER, _GUESS = 3.5, 0.4
_SMALLEST, _LARGEST = 1e-6, 1e6
_PATIENCE = 5
# Sparsities are a tenth of a point apart, about a percent of KL. This much of a budget is enough: no text tells finer.
_GRID, _ENOUGH = 0.001, 0.98


@dataclass(frozen=True)
class BlockSensitivity:
    """KL in nats per token with one block sparse: per level, one value per block, each a mean over ``num_tokens``."""

    levels: tuple[float, ...]
    kl: tuple[tuple[float, ...], ...]
    num_tokens: int


@torch.no_grad()
def block_sensitivity(calib: CalibrationState, levels: Sequence[float], progress: Progress) -> BlockSensitivity:
    """Measure every block: blocks x levels runs of, on average, half the model. Every projection has a scale."""
    table = []
    with progress.stage("Block sensitivity", len(calib.groups)) as stage:
        for view in calib.blocks():
            view.build_tables()
            runs = (calib.thresholds(dict.fromkeys(view.names, level)) for level in levels)
            table.append([calib.kl(thresholds, view=view) for thresholds in runs])
            stage.advance()
    return BlockSensitivity(tuple(levels), tuple(zip(*table, strict=True)), calib.flow.num_counted)


@dataclass(frozen=True)
class Measurement:
    """Quality by sparsity level, and of the curve's sparsities; ``text`` says what it was measured on."""

    levels: Mapping[float, Quality]
    text: str
    sensitivity: BlockSensitivity | None
    curve: tuple[tuple[float, Quality], ...] = ()


class MaskedLogits(AbstractContextManager["MaskedLogits"]):
    """A search's result as the callable, and the counter, that `evaluate_text` takes; a context manager. ``thresholds``
    by projection are those of the result, until others are put there."""

    def __init__(self, source: SourceModel, result: SearchResult) -> None:
        self._source = source
        self._masked = MaskedModel(source.projections)
        self._sizes = {name: numbers_read(module) for name, module in source.projections.items()}
        self.thresholds: Mapping[str, float] = result.apply_to(self._masked)
        self._counting = ExitStack()
        self._realised: Callable[[], Mapping[str, float]] | None = None

    def __exit__(self, *_: object) -> None:
        self._counting.close()
        self._masked.close()

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        """Logits (T, V) float32 of token_ids (T,); positions from ``sparse_from`` on are sparse."""
        ids = token_ids.to(self._source.device)[None]
        thresholds = self.thresholds if sparse_from < len(token_ids) else {}
        dense_tokens = (torch.arange(len(token_ids), device=ids.device) < sparse_from)[None]
        with self._masked.masking(thresholds), self._masked.during(dense_tokens=dense_tokens):
            return self._source.model(input_ids=ids, use_cache=False).logits[0].float()

    def measure_sparsity(self, enabled: bool) -> None:
        """Start counting from zero, or stop."""
        self._counting.close()
        self._realised = self._counting.enter_context(self._masked.counting()) if enabled else None

    def realised_sparsity(self) -> float | None:
        if self._realised is None:
            return None
        dropped = self._realised()
        return sum(dropped[name] * size for name, size in self._sizes.items()) / sum(self._sizes.values())


def measure(
    source: SourceModel,
    tokens: CalibrationTokens,
    results: Mapping[float, SearchResult],
    calibration: str | Sequence[str] = "self",
    sensitivity_at: float | None = None,
    fresh: CalibrationTokens | None = None,
    progress: Progress = SILENT,
) -> Measurement:
    """Measure what searches on ``tokens``, from ``calibration``, found by sparsity; at one also how sensitive blocks
    are."""
    num_samples, seq_len, seed = fresh_text(tokens.num_samples, tokens.seq_len, tokens.seed)
    try:
        if fresh is None:
            fresh = load_calibration(calibration, source.tokenizer, source.model, num_samples, seq_len, seed, progress)
        text = f"{fresh.source}, with another seed than the calibration's"
        if fresh.source == "self":
            text = "text that the model wrote, not what it was calibrated on"
    except (AccessError, CalibrationError) as error:
        # A data set that has gone since must not cost the search's result.
        _log.warning("quality is measured on the calibration text itself, which flatters it: %s", error)
        fresh, text = _beginnings(tokens, num_samples, seq_len), "the calibration text itself"
    dense: dict[bytes, Tensor] = {}  # the same at every level

    @torch.no_grad()
    def dense_logits(ids: Tensor, _: int) -> Tensor:
        key = ids.numpy().tobytes()
        if key not in dense:
            dense[key] = source.model(input_ids=ids.to(source.device)[None], use_cache=False).logits[0].float()
        return dense[key]

    levels: dict[float, Quality] = {}
    others: dict[float, Quality] = {}
    passes = sum(1 + len(result.thresholds_at) for result in results.values())
    with progress.stage("Measuring", fresh.num_samples * passes) as stage:
        for target, result in sorted(results.items()):
            with MaskedLogits(source, result) as logits:
                for sparsity, thresholds in {target: logits.thresholds, **result.thresholds_at}.items():
                    logits.thresholds = thresholds
                    options: dict[str, Any] = {"reference": dense_logits, "counter": logits, "advance": stage.advance}
                    found = evaluate_text(logits, fresh.input_ids, ["all"], **options)["all"]
                    (levels if sparsity == target else others)[sparsity] = found
    by_block = None
    if sensitivity_at is not None:
        few = min(4, tokens.num_samples)  # enough for a figure that nothing is decided by
        with CalibrationState(source, _beginnings(tokens, few, _SENSITIVITY_TOKENS // few)) as calib:
            for name in calib.names:
                calib.set_scale(name, results[sensitivity_at].channel_scales[name])
            by_block = block_sensitivity(calib, LEVELS, progress)
    return Measurement(levels, text, by_block, tuple(sorted({**others, **levels}.items())))


def fresh_text(num_samples: int, seq_len: int, seed: int) -> tuple[int, int, int]:
    """Size and seed of the text to measure on, from those of the calibration text."""
    return min(_SAMPLES, num_samples), min(_SEQ_LEN, seq_len), seed + _SEED_OFFSET


def _beginnings(tokens: CalibrationTokens, num_samples: int, seq_len: int) -> CalibrationTokens:
    cut = slice(num_samples), slice(seq_len)
    return replace(tokens, input_ids=tokens.input_ids[cut], keep=tokens.keep[cut])


@dataclass(frozen=True)
class Budget:
    """The most of KL(dense || sparse), nats per token, and the least top-1 agreement; None for any."""

    max_kl: float | None = None
    min_top1: float | None = None

    def spent(self, kl: float, top1: float) -> float:
        """The part of the budget that this costs: kept up to 1."""
        costs = [(kl, self.max_kl)] if self.max_kl is not None else []
        costs += [(1.0 - top1, 1.0 - self.min_top1)] if self.min_top1 is not None else []
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
    """A sparsity whose loss is within the limit, 1, and at most 2% below it, or that of the next one on the grid; None
    if not even `LOWEST` is within the limit. ``loss`` is asked for at most once each. It is taken to rise with the
    sparsity: where it does not, the outcome is one of the sparsities at which it crosses the limit."""
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


def choose(levels: SparsityLevels, calibration: str | Sequence[str], budget: Budget) -> Choice:
    """The highest sparsity that keeps a budget, see `highest`; UsageError if none does. Several processes call it
    alike; the first measures, on another text of the size of the calibration text, which came from ``calibration``."""
    fresh: list[CalibrationTokens] = []
    found: dict[float, tuple[float, float, int]] = {}
    source, tokens, stages, progress = levels.source, levels.tokens, levels.stages, levels.stages.progress
    size = tokens.num_samples, tokens.seq_len, tokens.seed + _CHOICE_SEED_OFFSET

    def spent(sparsity: float) -> float:
        result = levels.at(sparsity)

        def measure() -> Any:
            values = None
            if stages.processes.is_main:
                if not fresh:
                    fresh.append(load_calibration(calibration, source.tokenizer, source.model, *size, progress))
                with MaskedLogits(source, result) as logits, progress.stage("Trying", tokens.num_samples) as stage:
                    quality = evaluate_text(logits, fresh[0].input_ids, ["all"], advance=stage.advance)["all"].sparse
                values = [quality.kl, quality.top1_agreement, quality.num_tokens]
            return stages.processes.broadcast(values)

        kl, top1, num_tokens = stages.run(f"choice-{sparsity!r}", measure)
        found[sparsity] = (kl, top1, num_tokens)
        return budget.spent(kl, top1)

    sparsity = highest(spent)
    if sparsity is None:
        kl, top1, _ = found[LOWEST]
        best = f"KL {kl:.2g} nats/token and top-1 agreement {top1:.2%} at {LOWEST:.0%}"
        wrong = f"{budget}: no sparsity from {LOWEST:.0%} on keeps that; the best is {best}"
        raise UsageError(f"{wrong}; allow more, or leave the model dense")
    tried = tuple((one, kl, top1) for one, (kl, top1, _) in sorted(found.items()))
    return Choice(sparsity, tried, found[sparsity][2])
