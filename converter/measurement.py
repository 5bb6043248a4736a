"""What finished searches are worth, measured while the model is still in memory: for the report and the model card.

    quality        KL, perplexity and agreement on text the search has not seen, every token sparse
    sensitivity    KL with one block sparse at a time
    curve          quality at every sparsity level; where there is one, at other sparsities too: same scales, the target's spread
                   over the projections in proportion

The text is made as the calibration text was, with another seed. What the model writes itself is new then; a small
corpus may give passages that were calibrated on, and the report says where the text came from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import AccessError, CalibrationError

from .calibration import load_calibration
from .documents import CalibrationTokens
from .evaluation import Quality, evaluate_text
from .masking import MaskedModel
from .processes import Progress
from .search.search import SearchResult
from .source import SourceModel
from .workbench import Workbench

# The curves of the paper's Fig. 2.
LEVELS = (0.4, 0.5, 0.6)


@dataclass(frozen=True)
class BlockSensitivity:
    """KL in nats per token with one block sparse.

    Attributes:
        levels: the sparsities tried.
        kl: per level, one value per block.
        num_tokens: tokens the values are means over.
    """

    levels: tuple[float, ...]
    kl: tuple[tuple[float, ...], ...]
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@torch.no_grad()
def block_sensitivity(
    bench: Workbench, levels: Sequence[float] = LEVELS, advance: Callable[[], None] = lambda: None
) -> BlockSensitivity:
    """Measure every block: blocks x levels runs of, on average, half the model over the bench's tokens.

    Args:
        bench: with a scale on every projection; its tables are built here.
        levels: sparsities to try.
        advance: called after every block.
    """
    table = []
    for view in bench.blocks():
        view.build_tables()
        table.append(
            [bench.kl(dict.fromkeys(view.names, level), start=view.index, hidden=view.hidden) for level in levels]
        )
        advance()
    return BlockSensitivity(tuple(levels), tuple(zip(*table, strict=True)), bench.flow.num_counted)


_log = logging.getLogger("wisparse")

# Far from any seed that a person chooses beside the calibration's.
_SEED_OFFSET, _CHOICE_SEED_OFFSET = 1_000_003, 2_000_003
_SAMPLES, _SEQ_LEN = 8, 256
_SENSITIVITY_TOKENS = 1024


@dataclass(frozen=True)
class Measurement:
    """See the module's text; ``text`` says in words what the quality was measured on.

    There is no ``sensitivity`` where none was asked for; the curve has the sparsity levels too.
    """

    levels: Mapping[float, Quality]
    text: str
    sensitivity: BlockSensitivity | None
    curve: tuple[tuple[float, Quality], ...] = ()


class MaskedLogits:
    """A search's outcome as the callable that `evaluate_text` takes, and as its counter.

    Args:
        source: the dense model.
        result: of the search.

    Attributes:
        thresholds: by projection; those of the result, until others are put there.

    Use as a context manager: the masks come off again at the end.
    """

    def __init__(self, source: SourceModel, result: SearchResult) -> None:
        self._source = source
        self._masked = MaskedModel(source.projections)
        self._sizes = {name: module.weight.numel() for name, module in source.projections.items()}
        self.thresholds: Mapping[str, float] = result.apply_to(self._masked)
        self._counting = ExitStack()
        self._realised: Callable[[], Mapping[str, float]] | None = None

    def __enter__(self) -> MaskedLogits:
        return self

    def __exit__(self, *_: object) -> None:
        self._counting.close()
        self._masked.close()

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        """Logits (T, V) float32 of token_ids (T,); positions from ``sparse_from`` on are sparse."""
        ids = token_ids.to(self._source.device)[None]
        thresholds = self.thresholds if sparse_from < len(token_ids) else {}
        dense_tokens = (torch.arange(len(token_ids), device=ids.device) < sparse_from)[None]
        with self._masked.masking(thresholds), self._masked.sparing(dense_tokens):
            return self._source.model(input_ids=ids, use_cache=False).logits[0].float()

    def measure_sparsity(self, enabled: bool) -> None:
        """Start counting from zero, or stop."""
        self._counting.close()
        self._realised = self._counting.enter_context(self._masked.counting()) if enabled else None

    def realised_sparsity(self) -> float | None:
        """Dropped share of the weights since counting began."""
        if self._realised is None:
            return None
        dropped = self._realised()
        return sum(dropped[name] * size for name, size in self._sizes.items()) / sum(self._sizes.values())


def measure(
    source: SourceModel,
    tokens: CalibrationTokens,
    results: Mapping[float, SearchResult],
    *,
    default: float,
    calibration: str | Sequence[str] = "self",
    sensitivity: bool = True,
    progress: Progress | None = None,
) -> Measurement:
    """Measure the searches' outcomes.

    Args:
        source: the dense model, not masked.
        tokens: what the searches were made on.
        results: what they found, by sparsity.
        default: the sparsity level whose scales the sensitivity is measured with.
        calibration: where the tokens came from, as for `load_calibration`.
        sensitivity: whether to make one block sparse at a time as well, which on a CPU can take as long as the search.
    """
    progress = progress or Progress(enabled=False)
    fresh, text = _fresh_text(source, tokens, calibration, progress)
    levels, others = {}, {}
    passes = sum(1 + len(result.thresholds_at) for result in results.values())
    with progress.stage("Measuring", fresh.num_samples * passes) as stage:
        for target, result in sorted(results.items()):
            with MaskedLogits(source, result) as logits:

                def quality(logits: MaskedLogits = logits) -> Quality:
                    return evaluate_text(logits, fresh.input_ids, ["all"], counter=logits, advance=stage.advance)["all"]

                levels[target] = quality()
                for sparsity, logits.thresholds in result.thresholds_at.items():
                    others[sparsity] = quality()
    by_block = _sensitivity(source, tokens, results[default], progress) if sensitivity else None
    return Measurement(levels, text, by_block, tuple(sorted({**others, **levels}.items())))


def choice_text(
    source: SourceModel, tokens: CalibrationTokens, calibration: str | Sequence[str], progress: Progress
) -> CalibrationTokens:
    """Another text of the calibration's size, for `choose`.

    Raises:
        AccessError, CalibrationError: there is none: then nothing can be chosen by it.
    """
    seed = tokens.seed + _CHOICE_SEED_OFFSET
    shape = (tokens.num_samples, tokens.seq_len)
    return load_calibration(calibration, source.tokenizer, source.model, *shape, seed, progress)


def _sensitivity(
    source: SourceModel, tokens: CalibrationTokens, result: SearchResult, progress: Progress
) -> BlockSensitivity:
    with Workbench(source, _few(tokens)) as bench:
        for name in bench.names:
            bench.set_scale(name, result.channel_scales[name])
        with progress.stage("Block sensitivity", len(bench.groups)) as stage:
            return block_sensitivity(bench, advance=stage.advance)


def _few(tokens: CalibrationTokens) -> CalibrationTokens:
    """The beginnings of some sequences: enough for a figure that nothing is decided by."""
    num_samples = min(4, tokens.num_samples)
    seq_len = min(tokens.seq_len, _SENSITIVITY_TOKENS // num_samples)
    return replace(tokens, input_ids=tokens.input_ids[:num_samples, :seq_len], keep=tokens.keep[:num_samples, :seq_len])


def _fresh_text(
    source: SourceModel, tokens: CalibrationTokens, calibration: str | Sequence[str], progress: Progress
) -> tuple[CalibrationTokens, str]:
    """Tokens that were not calibrated on, and what they are in words."""
    num_samples, seq_len = min(_SAMPLES, tokens.num_samples), min(_SEQ_LEN, tokens.seq_len)
    seed = tokens.seed + _SEED_OFFSET
    try:
        fresh = load_calibration(calibration, source.tokenizer, source.model, num_samples, seq_len, seed, progress)
    except (AccessError, CalibrationError) as error:
        # A data set that has gone since must not cost the search's result.
        _log.warning("quality is measured on the calibration text itself, which flatters it: %s", error)
        ids, keep = tokens.input_ids[:num_samples, :seq_len], tokens.keep[:num_samples, :seq_len]
        return CalibrationTokens(ids, keep, tokens.source, tokens.seed), "the calibration text itself"
    if fresh.source == "self":
        return fresh, "text that the model wrote, not what it was calibrated on"
    return fresh, f"{fresh.source}, with another seed than the calibration's"
