"""Measurement of search results while the model is in memory, and the choice of a sparsity within a budget."""

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
from wisparse.formats.manifest import QualityTable

from .calibration import CalibrationTokens, load_calibration
from .calibration_state import CalibrationState
from .evaluation import (
    Measured,
    Quality,
    can_round,
    dense_logits,
    estimate,
    evaluate_text,
    evaluate_together,
    noise_floor,
    quality_table,
    rounded,
    rounded_weights,
    unmasked,
)
from .experts import weights_read
from .masking import MaskedModel
from .processes import SILENT, Progress
from .search.allocation import MAX_SPARSITY
from .search.search import SearchResult, SparsityLevels
from .source import SourceModel

_log = logging.getLogger("wisparse")

# Sparsities of the block sensitivity, as in the paper's Fig. 2.
LEVELS = (0.4, 0.5, 0.6)
# Added to the calibration's seed. Far from seeds that users choose.
_SEED_OFFSET, _CHOICE_SEED_OFFSET = 1_000_003, 2_000_003
# Samples and length of the measurement text, at most; on a CPU of given text, and of text that the model writes.
_SIZE, _SIZE_CPU, _WRITTEN_CPU = (16, 512), (8, 512), (9, 256)
# On a CPU only the dense model and the default level are measured on all of it, the others on this many tokens.
_FEW_TOKENS = 1024
# That a bundle's weights can be rounded to at load; int4 is only good if it is fitted. On a CPU fp8 is left out: it has int8's
# size and a higher KL.
_ROUNDED = {"cuda": ("int8", "fp8"), "cpu": ("int8",)}
_SENSITIVITY_TOKENS = 1024
# Bytes of the logits of one pass. Most of a GPU's time is that of starting kernels, and weights are rounded in each pass.
_LARGEST_LOGITS = {"cuda": 4 << 30, "cpu": 1 << 29}
# The lowest sparsity that `choose` tries: below it a mask saves less time than it takes.
LOWEST = 0.05
# `highest` begins at _GUESS. Before there are two measurements it assumes that the KL grows like this power of the
# sparsity (docs/choosing.md).
_POWER, _GUESS = 3.5, 0.4
_SMALLEST, _LARGEST = 1e-6, 1e6  # losses are clamped to these
_MAX_POWER_STEPS = 5  # evaluations, after which `highest` bisects
# The grid of sparsities, whose step changes the KL by about a percent, and the fraction of a budget that is close enough.
_GRID, _ENOUGH = 0.001, 0.98


@dataclass(frozen=True)
class BlockSensitivity:
    """KL in nats per token with one block sparse, by level and block: means over ``num_tokens``."""

    levels: tuple[float, ...]
    kl: tuple[tuple[float, ...], ...]
    num_tokens: int


@torch.no_grad()
def block_sensitivity(calib: CalibrationState, levels: Sequence[float], progress: Progress) -> BlockSensitivity:
    """Measure every block: blocks x levels passes over, on average, half the model. All scales have to be set."""
    table = []
    with progress.stage("Block sensitivity", len(calib.groups)) as stage:
        for view in calib.blocks():
            view.build_tables()
            by_level = (calib.thresholds(dict.fromkeys(view.names, level)) for level in levels)
            table.append([calib.kl(thresholds, view=view) for thresholds in by_level])
            stage.advance()
    return BlockSensitivity(tuple(levels), tuple(zip(*table, strict=True)), calib.flow.num_counted)


@dataclass(frozen=True)
class Measurement:
    levels: Mapping[float, Quality]  # by sparsity level
    text: str  # a description of the measurement text
    sensitivity: BlockSensitivity | None
    curve: tuple[tuple[float, Quality], ...] = ()  # by sparsity, ascending; includes the levels
    table: QualityTable | None = None


class MaskedLogits(AbstractContextManager["MaskedLogits"]):
    """A search result as the ``logits`` and ``counter`` of `evaluate_text`. ``thresholds`` by projection can be replaced."""

    def __init__(self, source: SourceModel, result: SearchResult) -> None:
        self._source = source
        self._masked = MaskedModel(source.projections)
        self._sizes = {name: weights_read(module) for name, module in source.projections.items()}
        self.thresholds: Mapping[str, float] = result.apply_to(self._masked)
        self._counting = ExitStack()
        self._realised: Callable[[], Mapping[str, Tensor]] | None = None

    def __exit__(self, *_: object) -> None:
        self._counting.close()
        self._masked.close()

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        """Logits (..., T, V) float32 of token_ids (..., T); positions from ``sparse_from`` on are sparse."""
        thresholds = self.thresholds if sparse_from < token_ids.shape[-1] else {}
        dense_tokens = torch.arange(token_ids.shape[-1], device=self._source.device) < sparse_from
        dense_tokens = dense_tokens.expand(token_ids.numel() // len(dense_tokens), -1)
        with self._masked.masking(thresholds), self._masked.during(dense_tokens=dense_tokens):
            return dense_logits(self._source, token_ids)

    def measure_sparsity(self, enabled: bool) -> None:
        """Start counting from zero, or stop."""
        self._counting.close()
        self._realised = self._counting.enter_context(self._masked.counting()) if enabled else None

    def realised_sparsity(self) -> float | None:
        if self._realised is None:
            return None
        dropped = self._realised()
        return sum(float(dropped[name]) * size for name, size in self._sizes.items()) / sum(self._sizes.values())


def measure(
    source: SourceModel,
    tokens: CalibrationTokens,
    results: Mapping[float, SearchResult],
    calibration: str | Sequence[str] = "self",
    sensitivity_at: float | None = None,
    fresh: CalibrationTokens | None = None,
    progress: Progress = SILENT,
    *,
    default: float | None = None,
    reference: Sequence[Tensor] = (),
) -> Measurement:
    """Measure ``results``, by sparsity, of searches on ``tokens``. ``sensitivity_at``: the sparsity whose scales the block
    sensitivity is measured with; ``fresh``: the text to measure on, else read or generated like ``calibration``;
    ``default``: the default level, else the highest; ``reference``: logits of the first sequences of ``fresh`` before the
    weights were quantized."""
    written = calibration in ("self", ["self"])
    size = fresh_text(tokens.num_samples, tokens.seq_len, tokens.seed, source.device.type, written)
    try:
        if fresh is None:
            fresh = load_calibration(calibration, source.tokenizer, source.model, *size, progress)
        text = f"{fresh.source}, with another seed than the calibration's"
        if fresh.source == "self":
            text = "text that the model wrote, not what it was calibrated on"
    except (AccessError, CalibrationError) as error:
        # The data set was available before the search: do not lose the search's results now.
        _log.warning("quality is measured on the calibration text itself, which flatters it: %s", error)
        fresh, text = _truncate(tokens, *size[:2]), "the calibration text itself"
    default = max(results) if default is None else default
    texts = fresh.input_ids[: len(reference) or None]
    known = {ids.numpy().tobytes(): one for ids, one in zip(texts, reference, strict=False)}

    def reference_of(ids: Tensor, _: int) -> Tensor:
        key = ids.numpy().tobytes()
        if key not in known:
            known[key] = rounded(dense_logits(source, ids)).cpu()
        return known[key].to(source.device)

    kinds = _ROUNDED[source.device.type] if not reference and can_round(source) else ()
    few = len(texts) if source.device.type == "cuda" else max(1, min(len(texts), _FEW_TOKENS // texts.shape[1]))
    levels, curve = dict[float, Quality](), dict[float, Quality]()
    pairs: dict[tuple[str, float], Measured] = {}
    part = whole = unmasked(0, math.nan)  # the default level on a part of the text and on all
    each = texts.shape[1] * source.config.vocab_size * 4
    at_once = max(1, _LARGEST_LOGITS[source.device.type] // each)
    passes = sum(1 + len(result.thresholds_at) for result in results.values()) + len(kinds) * (1 + len(results))
    with progress.stage("Measuring", (passes - (few == len(texts))) * few + len(texts)) as stage:

        def quality(logits: Callable[[Tensor, int], Tensor], counter: Any = None) -> Quality:
            return evaluate_together(logits, texts[:few], reference_of, at_once, counter, stage.advance)

        def plain(ids: Tensor, _: int) -> Tensor:
            return dense_logits(source, ids)

        # The default level first: by it the others are estimated from fewer tokens.
        for target, result in sorted(results.items(), key=lambda item: item[0] != default):
            with MaskedLogits(source, result) as logits:
                own = logits.thresholds
                for sparsity, thresholds in {target: own, **result.thresholds_at}.items():
                    logits.thresholds = thresholds
                    if sparsity == default:  # by sequence, with the range of the realised sparsity
                        given: dict[str, Any] = {"reference": reference_of, "counter": logits, "advance": stage.advance}
                        found = evaluate_text(logits, texts, ["all"], **given)["all"]
                        whole = found.sparse
                        part = whole if few == len(texts) else quality(logits).sparse
                    else:
                        found = quality(logits, logits)
                    figures = estimate(found.sparse, part, whole) if sparsity != default else whole
                    if sparsity == target:
                        pairs["native", target] = figures
                    figures = replace(figures, num_tokens=whole.num_tokens)
                    (levels if sparsity == target else curve)[sparsity] = replace(
                        found, sparse=figures, overall=figures
                    )
                logits.thresholds = own
                for kind in kinds if target else ():
                    with rounded_weights(source, kind):
                        pairs[kind, target] = estimate(quality(logits).sparse, part, whole)
        if reference and 0.0 not in results:
            pairs["native", 0.0] = estimate(quality(plain).sparse, part, whole)
        elif 0.0 not in results:
            pairs["native", 0.0] = unmasked(whole.num_tokens, whole.dense_perplexity)
        for kind in kinds:
            with rounded_weights(source, kind):
                pairs[kind, 0.0] = estimate(quality(plain).sparse, part, whole)
        floor = noise_floor(source, texts)
    table = quality_table(text, floor, whole, pairs)
    sensitivity = None
    if sensitivity_at is not None:
        num_samples = min(4, tokens.num_samples)  # few: it is only reported
        with CalibrationState(source, _truncate(tokens, num_samples, _SENSITIVITY_TOKENS // num_samples)) as calib:
            for name in calib.names:
                calib.set_scale(name, results[sensitivity_at].channel_scales[name])
            sensitivity = block_sensitivity(calib, LEVELS, progress)
    levels = dict(sorted(levels.items()))
    return Measurement(levels, text, sensitivity, tuple(sorted({**curve, **levels}.items())), table)


def fresh_text(num_samples: int, seq_len: int, seed: int, device_type: str, written: bool) -> tuple[int, int, int]:
    """(num_samples, seq_len, seed) of the measurement text, from those of the calibration text; ``written``: by the model."""
    most, longest = _SIZE if device_type != "cpu" else _WRITTEN_CPU if written else _SIZE_CPU
    return min(most, num_samples), min(longest, seq_len), seed + _SEED_OFFSET


def _truncate(tokens: CalibrationTokens, num_samples: int, seq_len: int) -> CalibrationTokens:
    cut = slice(num_samples), slice(seq_len)
    return replace(tokens, input_ids=tokens.input_ids[cut], keep=tokens.keep[cut])


@dataclass(frozen=True)
class Budget:
    """The largest KL(dense || sparse), nats per token, and the smallest top-1 agreement; None: no limit."""

    max_kl: float | None = None
    min_top1: float | None = None

    def spent(self, kl: float, top1: float) -> float:
        """The fraction of the budget that this quality uses; at most 1 is within the budget."""
        costs = [(kl, self.max_kl)] if self.max_kl is not None else []
        costs += [(1.0 - top1, 1.0 - self.min_top1)] if self.min_top1 is not None else []
        return max(0.0 if cost <= 0.0 else cost / limit if limit > 0.0 else math.inf for cost, limit in costs)

    def __str__(self) -> str:
        limits = (("--max-kl", self.max_kl), ("--min-top1", self.min_top1))
        return " and ".join(f"{option} {limit:g}" for option, limit in limits if limit is not None)


@dataclass(frozen=True)
class Choice:
    """The highest sparsity within a budget, and (sparsity, KL, top-1 agreement) of all that were tried."""

    sparsity: float
    tried: tuple[tuple[float, float, float], ...]
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        tried = [{"sparsity": s, "kl": round(kl, 6), "top1_agreement": round(top1, 6)} for s, kl, top1 in self.tried]
        return {"sparsity": self.sparsity, "num_tokens": self.num_tokens, "tried": tried}


def highest(loss: Callable[[float], float]) -> float | None:
    """The highest sparsity on the grid whose ``loss`` is at most 1, or one with a loss from 0.98 to 1; None if `LOWEST` is
    above 1. A sparsity is evaluated at most once. The loss should rise with the sparsity: if it does not, the result is
    one of the sparsities at which it crosses 1."""
    first, last = round(LOWEST / _GRID), round(MAX_SPARSITY / _GRID)
    known: dict[int, float] = {}
    step = round(_GUESS / _GRID)
    while True:
        known[step] = min(max(loss(round(step * _GRID, 4)), _SMALLEST), _LARGEST)
        if _ENOUGH <= known[step] <= 1.0:
            return round(step * _GRID, 4)
        above = min((i for i, value in known.items() if value > 1.0), default=None)
        below = max((i for i in known if known[i] <= 1.0 and (above is None or i < above)), default=None)
        low = first if below is None else below + 1
        high = last if above is None else above - 1
        if low > high:
            return None if below is None else round(below * _GRID, 4)
        guess = (low + high) // 2
        if len(known) <= _MAX_POWER_STEPS:
            # Where a power law through the two values nearest to 1 is midway between 0.98 and 1.
            nearest = sorted(known, key=lambda i: abs(math.log(known[i])))[:2]
            best, power = nearest[0], _POWER
            if len(nearest) > 1:
                power = max(1.0, math.log(known[best] / known[nearest[1]]) / math.log(best / nearest[1]))
            guess = round(best * ((1.0 + _ENOUGH) / 2 / known[best]) ** (1 / power))
        step = min(max(guess, low), high)


def choose(levels: SparsityLevels, calibration: str | Sequence[str], budget: Budget) -> Choice:
    """The highest sparsity within a budget, see `highest`; UsageError if there is none. All processes call it. Rank 0
    measures, on another text from ``calibration``, of the calibration text's size."""
    fresh: list[CalibrationTokens] = []
    tried: dict[float, tuple[float, float, int]] = {}
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
        tried[sparsity] = (kl, top1, num_tokens)
        return budget.spent(kl, top1)

    sparsity = highest(spent)
    if sparsity is None:
        kl, top1, _ = tried[LOWEST]
        best = f"KL {kl:.2g} nats/token and top-1 agreement {top1:.2%} at {LOWEST:.0%}"
        wrong = f"{budget}: no sparsity from {LOWEST:.0%} on keeps that; the best is {best}"
        raise UsageError(f"{wrong}; allow more, or leave the model dense")
    qualities = tuple((one, kl, top1) for one, (kl, top1, _) in sorted(tried.items()))
    return Choice(sparsity, qualities, tried[sparsity][2])
