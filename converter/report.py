"""The conversion report: what was decided and what it costs, for a person to read (``conversion_report.json``).

Equal arguments give equal bytes: no dates, no durations, no facts about the machine. The figures (``figures/*.png``)
show the same numbers.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wisparse.formats.card import REPORT
from wisparse.formats.manifest import Recipe, SparsityLevel
from wisparse.formats.model_config import ModelConfig, Projection

from .budget import mean_sparsity
from .evaluation import Quality
from .measurement import Measurement

# Every figure there may be, and what it shows.
FIGURES: Mapping[str, str] = {
    "figures/sparsity.png": "Sparsity by block and module, and by projection.",
    "figures/alpha.png": "Alpha, the exponent of the weight norm, by projection.",
    "figures/block_sensitivity.png": "KL(dense || sparse) with one block sparse at a time.",
    "figures/quality.png": "Quality against sparsity.",
}

# Okabe and Ito's colours: told apart with any kind of colour vision, and in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_ATTENTION, _MLP, _BLOCK = _COLOURS[0], _COLOURS[1], _COLOURS[6]


def render_figures(report: Mapping[str, Any]) -> dict[str, bytes]:
    """PNG files for a report: relative name -> bytes. A figure without data is left out."""
    import matplotlib

    figures: dict[str, Callable[[Mapping[str, Any]], Any]] = {"figures/sparsity.png": _sparsity}
    if len({one["alpha"] for block in report["blocks"] for one in block["projections"].values()}) > 1:
        figures["figures/alpha.png"] = _alpha  # a method that chooses none has nothing to show
    if report["block_sensitivity"] is not None:
        figures["figures/block_sensitivity.png"] = _sensitivity
    if len(report["quality_against_sparsity"]) > 1:
        figures["figures/quality.png"] = _quality
    files = {}
    with matplotlib.rc_context():
        # Not the user's own style: it would change the bytes.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 11, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
        matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
        for name, draw in figures.items():
            files[name] = _png(draw(report))
    return files


def _png(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    out = io.BytesIO()
    # matplotlib's version would be written into the file.
    figure.savefig(out, format="png", dpi=130, metadata={"Software": None})
    return out.getvalue()


def _figure(num_blocks: int, rows: int = 1, columns: int = 1, height: float = 4.2, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    width = min(16.0, max(7.0, 2.5 + 0.3 * num_blocks)) if columns == 1 else 13.0
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def _title(figure: Any, report: Mapping[str, Any], text: str) -> None:
    model, target = report["model"]["base_model"].rsplit("/", 1)[-1], report["sparsity"]["target"]
    figure.suptitle(f"{text}\n{model}, {report['method']}, {target:.0%} sparsity", fontsize=12)


def _block_axis(axis: Any, num_blocks: int, *, label: bool = True, crowded: int = 40) -> None:
    step = 1 if num_blocks <= crowded // 2 else 2 if num_blocks <= crowded else 4 if num_blocks <= 2 * crowded else 8
    axis.set_xticks(range(0, num_blocks, step))
    axis.set_xlim(-0.5, num_blocks - 0.5)
    if label:
        axis.set_xlabel("block")


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def _sensitivity(report: Mapping[str, Any]) -> Any:
    found = report["block_sensitivity"]
    num_blocks = len(report["blocks"])
    figure, axis = _figure(num_blocks)
    for i, (level, values) in enumerate(zip(found["levels"], found["kl"], strict=True)):
        axis.plot(values, marker=_MARKERS[i], color=_COLOURS[i], markersize=5, label=f"{level:.0%} of its channels")
    axis.set_yscale("log")
    axis.set_ylabel("KL(dense || sparse), nats per token")
    _block_axis(axis, num_blocks)
    # Above the axes: inside them no corner is free of points for every model.
    axis.legend(
        title="dropped in this block", ncols=len(found["levels"]), loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )
    _title(figure, report, "One block sparse at a time, the others dense")
    return figure


def _sparsity(report: Mapping[str, Any]) -> Any:
    blocks = report["blocks"]
    num_blocks = len(blocks)
    roles = _roles(blocks)
    figure, (top, bottom) = _figure(num_blocks, rows=2, height=7.2, height_ratios=(3, 2))
    positions = range(num_blocks)
    top.bar([x - 0.2 for x in positions], _column(blocks, "self_attn"), 0.4, color=_ATTENTION, label="self-attention")
    top.bar([x + 0.2 for x in positions], _column(blocks, "mlp"), 0.4, color=_MLP, label="MLP")
    top.plot(_column(blocks, "sparsity"), color=_BLOCK, marker="o", markersize=4, linewidth=1.2, label="block")
    top.axhline(report["sparsity"]["target"], color="0.35", linestyle="--", linewidth=1, label="target")
    top.set_ylim(0, 1)
    _percent(top)
    top.set_ylabel("sparsity")
    _block_axis(top, num_blocks, label=False)
    top.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    grid = [_by_block(blocks, role, "sparsity") for role in roles]
    image = bottom.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    bottom.grid(False)
    bottom.set_yticks(range(len(roles)), roles)
    _block_axis(bottom, num_blocks)
    if num_blocks <= 40:
        for y, row in enumerate(grid):
            for x, value in ((x, value) for x, value in enumerate(row) if not math.isnan(value)):
                colour = "white" if value < 0.55 else "black"
                bottom.text(x, y, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=bottom, format=lambda value, _: f"{value:.0%}", pad=0.01, label="sparsity")
    _title(figure, report, "Where the sparsity went: by block and module, and by projection (in %)")
    return figure


def _alpha(report: Mapping[str, Any]) -> Any:
    blocks = report["blocks"]
    num_blocks = len(blocks)
    roles = _roles(blocks)
    mlp = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
    modules = (
        ("self-attention", [role for role in roles if role not in mlp]),
        ("MLP", [role for role in roles if role in mlp]),
    )
    figure, axes = _figure(num_blocks, columns=2, sharey=True)
    for axis, (name, members) in zip(axes, modules, strict=True):
        for i, role in enumerate(members):
            values = _by_block(blocks, role, "alpha")
            axis.plot(values, marker=_MARKERS[i], color=_COLOURS[i], markersize=5, linewidth=1.2, label=role)
        axis.set_title(name, fontsize=11)
        _block_axis(axis, num_blocks, crowded=32)
        axis.set_ylim(-0.05, 1.55)
        axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes[0].set_ylabel("alpha (exponent of the weight norm)")
    _title(figure, report, "Alpha by projection: 0 looks at activations alone, 1 at |x| times the weight norm")
    return figure


def _quality(report: Mapping[str, Any]) -> Any:
    points = report["quality_against_sparsity"]
    figure, (left, middle, right) = _figure(0, columns=3)
    sparsities = [point["sparsity"] for point in points]
    figures = [point["sparse"] for point in points]
    changes = [
        float("nan") if one["perplexity"] is None else one["perplexity"] / one["dense_perplexity"] - 1
        for one in figures
    ]
    panels: Sequence[tuple[Any, str, list[float], list[float]]] = (
        (left, "KL(dense || sparse), nats per token", [one["kl"] for one in figures], _errors(figures, "kl")),
        (middle, "perplexity, change against dense", changes, []),
        (
            right,
            "top-1 agreement with dense",
            [one["top1_agreement"] for one in figures],
            _errors(figures, "top1"),
        ),
    )
    from matplotlib.ticker import PercentFormatter

    for axis, label, values, errors in panels:
        axis.errorbar(sparsities, values, yerr=errors or None, marker="o", color=_COLOURS[0], capsize=3)
        axis.set_title(label, fontsize=11)
        axis.set_xlabel("sparsity")
        axis.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    left.set_ylim(bottom=0)
    _percent(middle)
    _percent(right)
    figure.suptitle(
        f"Quality against sparsity, every token sparse\n{report['model']['base_model'].rsplit('/', 1)[-1]}", fontsize=12
    )
    return figure


def _roles(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of all blocks: a hybrid model's recurrent ones have others."""
    return list(dict.fromkeys(role for block in blocks for role in block["projections"]))


def _by_block(blocks: Sequence[Mapping[str, Any]], role: str, key: str) -> list[float]:
    """NaN, which is not drawn, where a block has no such projection."""
    return [block["projections"].get(role, {}).get(key, math.nan) for block in blocks]


def _errors(figures: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Standard errors; 0 of a single text, which has none."""
    return [one[f"{name}_stderr"] or 0.0 for one in figures]


def _column(blocks: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [block[key] for block in blocks]


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
    quality, sensitivity = measurement.levels[recipe.default], measurement.sensitivity
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
        "levels": [_level(level, projections, measurement.levels[level.sparsity]) for level in recipe.levels],
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


def _level(level: SparsityLevel, projections: Sequence[Projection], quality: Quality) -> dict[str, Any]:
    decided = {entry.name: entry for entry in level.projections}
    return {
        "sparsity": level.sparsity,
        "realised_on_calibration": _mean(projections, decided, "realised_sparsity"),
        "verdict": verdict(level.sparsity, quality),
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
