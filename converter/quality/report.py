"""The conversion report: what was decided and what it costs, for a person to read (``conversion_report.json``).

Equal arguments give equal bytes: no dates, no durations, no facts about the machine. The figures (``figures/*.png``)
show the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from wisparse.formats.model.model_config import ModelConfig, Projection
from wisparse.formats.record.findings import REPORT
from wisparse.formats.record.recipe import Recipe, Rung

from ..budget import mean_sparsity
from .evaluation import Quality
from .figures import render_figures
from .measurement import Measurement

__all__ = ["REPORT", "expectation", "grade", "make_report", "render_report", "verdict"]

REPORT_VERSION = 1

# A history longer than this is thinned out: the report is for reading.
_LONGEST_HISTORY = 60

# KL in nats per token -> what that means in a word. Rules of thumb, from the example models: at 0.05 their perplexity
# rises by about 5% and hardly an answer changes, at 0.2 they make mistakes a reader notices.
_GRADES = ((0.02, "nearly indistinguishable from dense"), (0.08, "close to dense"), (0.2, "visibly different"))
_WORST = "clearly damaged: choose a lower sparsity"


def grade(quality: Quality) -> str:
    """What was measured, in a few words."""
    return next((word for limit, word in _GRADES if quality.sparse.kl <= limit), _WORST)


def verdict(sparsity: float, quality: Quality | None) -> str:
    """One plain sentence: what the sparsity costs.

    Args:
        sparsity: the target.
        quality: measured on text the search never saw; None if nothing was measured.
    """
    if quality is None:
        return f"At {100 * sparsity:.4g}% sparsity: quality not measured; `wisparse eval` measures it."
    figures = quality.sparse
    tokens = {"all": "every token sparse", "half": "the last half of each text sparse"}.get(quality.prefill, "")
    change = figures.perplexity / figures.dense_perplexity - 1
    perplexity = (
        f", perplexity {figures.dense_perplexity:.3g} -> {figures.perplexity:.3g} ({change:+.1%})"
        if math.isfinite(change)
        else ""
    )
    return (
        f"At {100 * sparsity:.4g}% sparsity ({tokens}), KL {figures.kl:.2g} nats/token, "
        f"top-1 agreement {figures.top1_agreement:.0%}{perplexity}: {grade(quality)}."
    )


def expectation(sparsity: float, quality: Quality | None, recipe: Recipe) -> str:
    """What share of the weights is left unread, here and elsewhere.

    Thresholds are numbers fixed on the calibration text, and another kind of text has larger or smaller activations. Of
    small models of code, calibrated on text of their own, interpreter sessions left 3 points more unread; source code
    and prose came within one. Weights turned to the directions of source code given left 3 points less unread on prose,
    5 on the model's own text and 8 on interpreter sessions (benchmarks/LOG.md).

    Args:
        sparsity: the target.
        quality: measured on text the search never saw; None if nothing was measured.
        recipe: says what it was calibrated on, and whether the weights were turned.
    """
    if sparsity <= 0.0:
        return "no weight is left unread."
    found = ""
    if quality is not None and quality.realised_sparsity is not None:
        found = f", {quality.realised_sparsity:.1%} on the text measured on"
        if quality.realised_range is not None:
            low, high = quality.realised_range
            found += f" ({low:.1%} to {high:.1%} by passage)"
    narrow = recipe.rotation is not None and recipe.calibration.source != "self"
    elsewhere = "up to about 8 points less" if narrow else "up to about 3 points more or less"
    return (
        f"{sparsity:.1%} of the weights are left unread on the calibration text{found}. On text of another kind expect "
        f"{elsewhere}; calibrate on text like yours to come nearer."
    )


def render_report(recipe: Recipe, config: ModelConfig, measurement: Measurement) -> dict[str, bytes]:
    """The report and its figures, as files for the bundle: relative name -> bytes."""
    report = make_report(recipe, config, measurement)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return {REPORT: text.encode(), **render_figures(report)}


def make_report(recipe: Recipe, config: ModelConfig, measurement: Measurement) -> dict[str, Any]:
    """The report as JSON-ready data."""
    decided = {entry.name: entry for entry in recipe.projections}
    projections = list(config.projections())
    quality, sensitivity = measurement.rungs[recipe.default], measurement.sensitivity
    blocks = []
    for index in range(config.num_blocks):
        mine = [projection for projection in projections if projection.block == index]
        blocks.append(
            {
                "block": index,
                "sparsity": _mean(mine, decided, "sparsity"),
                "realised_sparsity": _mean(mine, decided, "realised_sparsity"),
                # A recurrent half counts as attention, in whose place it stands.
                "self_attn": _mean([one for one in mine if ".mlp." not in one.name], decided, "sparsity"),
                "mlp": _mean([one for one in mine if ".mlp." in one.name], decided, "sparsity"),
                "projections": {
                    one.role: {
                        key: _number(getattr(decided[one.name], key))
                        for key in ("sparsity", "alpha", "threshold", "realised_sparsity")
                    }
                    for one in mine
                },
            }
        )
    roles = list(dict.fromkeys(projection.role for projection in projections))
    return {
        "report_version": REPORT_VERSION,
        "verdict": verdict(recipe.sparsity, quality),
        "model": {
            "base_model": recipe.base_model,
            "base_revision": recipe.base_revision,
            "model_type": config.model_type,
            "num_blocks": config.num_blocks,
            "parameters_in_scope": sum(projection.num_parameters for projection in projections),
        },
        "method": recipe.method,
        "sparsity": {
            "target": recipe.sparsity,
            "mean": _mean(projections, decided, "sparsity"),
            "realised_on_calibration": _mean(projections, decided, "realised_sparsity"),
            "realised_on_text_measured_on": _rounded(quality.realised_sparsity),
            "expect": expectation(_mean(projections, decided, "realised_sparsity"), quality, recipe),
            "by_projection": {
                role: _mean([one for one in projections if one.role == role], decided, "sparsity") for role in roles
            },
        },
        "calibration": {
            "source": recipe.calibration.source,
            "num_samples": recipe.calibration.num_samples,
            "seq_len": recipe.calibration.seq_len,
            "seed": recipe.calibration.seed,
        },
        "quality": {"text": measurement.text, **_rounded(quality.to_dict())},
        "rungs": [_rung(rung, projections, measurement.rungs[rung.sparsity]) for rung in recipe.rungs],
        "quality_against_sparsity": [
            {"sparsity": sparsity, **_rounded(found.to_dict())} for sparsity, found in measurement.curve
        ],
        "block_sensitivity": None if sensitivity is None else _rounded(sensitivity.to_dict()),
        "search": _thinned(dict(recipe.search)),
        "blocks": blocks,
        "units": {
            "sparsity": "fraction of input channels dropped, averaged with the number of parameters as weight",
            "kl": "KL(dense || sparse), nats per token",
            "perplexity": "per token",
            "threshold": "of |x| * channel_scale",
            "stderr": "standard error, each passage of the text a draw",
        },
    }


def _rung(rung: Rung, projections: Sequence[Projection], quality: Quality) -> dict[str, Any]:
    decided = {entry.name: entry for entry in rung.projections}
    return {
        "sparsity": rung.sparsity,
        "realised_on_calibration": _mean(projections, decided, "realised_sparsity"),
        "verdict": verdict(rung.sparsity, quality),
        "quality": _rounded(quality.to_dict()),
    }


def _mean(projections: Sequence[Projection], decided: Mapping[str, Any], key: str) -> float:
    values = [getattr(decided[one.name], key) for one in projections]
    return _number(mean_sparsity(values, [one.num_parameters for one in projections]))


def _number(value: float) -> float:
    # Six digits are more than any of these figures has, and easier on the eye.
    return float(f"{value:.6g}")


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return _number(value) if isinstance(value, float) else value


def _thinned(value: Any) -> Any:
    """JSON values with long lists of numbers cut down to evenly spaced ones, the first and the last included."""
    if isinstance(value, Mapping):
        return {str(key): _thinned(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_thinned(entry) for entry in value]
        numbers = all(entry is None or isinstance(entry, (int, float)) for entry in entries)
        if len(entries) <= _LONGEST_HISTORY or not numbers:
            return entries
        last = len(entries) - 1
        return [entries[round(i * last / (_LONGEST_HISTORY - 1))] for i in range(_LONGEST_HISTORY)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
