"""The choice of weight type and sparsity level: the fastest pair of the bundle's quality table within a KL."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import QualityRow, level_name, plus_minus
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import WEIGHT_TYPES

if TYPE_CHECKING:
    import torch

MAX_KL = 0.05  # nats per token, the default
_VARIABLE = "WISPARSE_MAX_KL"
# Masks have to be faster than the dense model by this; of pairs within this of the fastest, that of the lowest KL.
_PAYS, _CLOSE = 1.02, 0.97


def auto_max_kl() -> float | None:
    """What ``auto`` stands for: ``MAX_KL``, or the environment's number; None with ``off`` there."""
    given = os.environ.get(_VARIABLE) or "auto"
    if given in ("auto", "off"):
        return MAX_KL if given == "auto" else None
    try:
        return guard.number(_VARIABLE, float(given), 0, math.inf, "a number of nats per token, 0 or more, auto or off")
    except ValueError:
        raise UsageError(
            f"{_VARIABLE}: expected a number of nats per token, auto or off, found {given!r:.80}"
        ) from None


@dataclass(frozen=True)
class Pair:
    """A weight type at a sparsity level, 0 for dense: its KL in nats per token, and the speed of one request."""

    weights: str
    sparsity: float
    kl: float
    tok_per_s: float
    kl_stderr: float | None = None


@dataclass(frozen=True)
class Choice:
    """The pair that was chosen for ``max_kl``; ``down``: the fastest of those with a lower KL; ``up``: of the faster ones that
    with the lowest KL. Speeds of the chosen weight type are measured, those of the others forecast from bytes."""

    pair: Pair
    max_kl: float
    within: bool  # whether the KL is at most max_kl
    down: Pair | None
    up: Pair | None
    graded: bool = False

    def __str__(self) -> str:
        if self.within:
            why = f"the fastest with KL at most {self.max_kl:g}"
        else:
            why = f"nothing has a KL of at most {self.max_kl:g}; this is the lowest"
        text = f"{self._name(self.pair)}: {why}"
        for pair in filter(None, (self.down, self.up)):
            text += f"; --max-kl {_rounded_up(pair.kl):g}: {self._name(pair)}"
        return text

    def _name(self, pair: Pair) -> str:
        level = level_name(pair.sparsity, self.graded) if pair.sparsity else "dense"
        return (
            f"{pair.weights} {level}, about {pair.tok_per_s:,.0f} tok/s, KL {pair.kl:.2g}{plus_minus(pair.kl_stderr)}"
        )


def _rounded_up(kl: float) -> float:
    """To two digits."""
    if kl <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(kl)) - 1)
    return float(f"{math.ceil(kl / unit) * unit:.2g}")


def choose(pairs: Iterable[Pair], max_kl: float, graded: bool = False) -> Choice:
    """The fastest of ``pairs`` whose KL is at most ``max_kl``, or that of the lowest KL if there is none. A sparse pair that
    is not faster than the dense model of its weight type is left out."""
    pairs = list(pairs)
    dense = {pair.weights: pair.tok_per_s for pair in pairs if pair.sparsity == 0}
    paying = [one for one in pairs if not one.sparsity or one.tok_per_s >= _PAYS * dense.get(one.weights, 0.0)]
    allowed = [pair for pair in paying if pair.kl <= max_kl]
    candidates = allowed or [min(paying, key=lambda pair: pair.kl)]
    fastest = max(pair.tok_per_s for pair in candidates)
    close = [pair for pair in candidates if pair.tok_per_s >= _CLOSE * fastest]
    chosen = min(close, key=lambda pair: (pair.kl, -pair.tok_per_s))
    down = max((one for one in paying if one.kl < chosen.kl), key=lambda pair: pair.tok_per_s, default=None)
    faster = (one for one in paying if one.tok_per_s > chosen.tok_per_s and one.kl > max(chosen.kl, max_kl))
    up = min(faster, key=lambda pair: pair.kl, default=None)
    return Choice(chosen, max_kl, bool(allowed), down, up, graded)


def bytes_read(config: ModelConfig, dtype: torch.dtype, kind: str, level: float) -> float:
    """Bytes of weights that a step of one request reads."""
    weight_type, vocabulary = WEIGHT_TYPES[kind], (config.vocab_size, config.hidden_size)
    shapes = [(one.out_features * one.chosen, one.in_features) for one in config.projections()]
    projections = sum(weight_type.nbytes(shape, dtype) for shape in shapes)
    return projections * (1 - level) + WEIGHT_TYPES[weight_type.head].nbytes(vocabulary, dtype)


def forecast_pairs(
    bundle: Bundle, dtype: torch.dtype, rows: Sequence[QualityRow], base: Pair | None = None
) -> list[Pair]:
    """Pairs of ``rows`` with speeds in proportion to the bytes read, relative to ``base``'s; without it to 1 GB/s."""

    def rate(kind: str, level: float) -> float:
        return 1e9 / bytes_read(bundle.config, dtype, kind, level)

    unit = 1.0 if base is None else base.tok_per_s / rate(base.weights, base.sparsity)
    return [
        Pair(row.weights, row.sparsity, row.kl, unit * rate(row.weights, row.sparsity), row.kl_stderr) for row in rows
    ]


def choose_weights(
    bundle: Bundle, dtype: torch.dtype, weights: str | None, supported: Sequence[str], max_kl: float
) -> str:
    """The weight type to load by the forecast, before any measurement; ``weights``: the user's."""
    return choose(forecast_pairs(bundle, dtype, rows_of(bundle, weights, supported)), max_kl).pair.weights


def rows_of(bundle: Bundle, weights: str | None, supported: Sequence[str]) -> list[QualityRow]:
    """The rows of a bundle's table that this machine can run; empty without a table."""
    rows = bundle.recipe.quality.rows if bundle.recipe.quality is not None else ()
    return [row for row in rows if row.weights in ([weights] if weights is not None else supported)]
