"""The conversion report: its JSON file, sentences for model card and terminal, and figures."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from wisparse.formats.card import CARD, REPORT, Inherited, render_card
from wisparse.formats.manifest import Recipe, SparsityLevel, level_name, plus_minus
from wisparse.formats.model_config import ModelConfig, Projection

from .evaluation import Quality, json_values
from .measurement import Measurement
from .search.allocation import mean_sparsity

REPORT_VERSION = 1

# All figures with their captions; one without data is not drawn.
FIGURES: Mapping[str, str] = {
    "figures/sparsity.png": "Sparsity by block and module, and by projection.",
    "figures/alpha.png": "Alpha, the exponent of the weight norm, by projection.",
    "figures/block_sensitivity.png": "KL(dense || sparse) with one block sparse at a time.",
    "figures/quality.png": "Quality against sparsity.",
}

# Longer lists of numbers are subsampled in the report.
_LONGEST_HISTORY = 60

# (largest KL in nats per token, least and most of 100 answers that change): greedy answers of 32 tokens that differ anywhere
# from those of the stored weights without masks. Around the points in benchmarks/results/answers.json (benchmarks/answers.py),
# of two models of code up to a KL of 0.39, and a chat model from 0.009 on.
CHANGED = (
    (0.001, 10, 45),
    (0.003, 15, 60),
    (0.01, 25, 80),
    (0.03, 40, 95),
    (0.1, 55, 100),
    (0.3, 75, 100),
    (math.inf, 90, 100),
)
ANSWERS = "greedy answers of 32 tokens"


def answers_changed(kl: float, stderr: float = 0.0) -> tuple[int, int]:
    """The least and the most of 100 short answers that change at a KL, give or take its standard error."""
    error = stderr if math.isfinite(stderr) else 0.0

    def row(value: float) -> tuple[float, int, int]:
        return next(row for row in CHANGED if value <= row[0] or row is CHANGED[-1])

    return (row(kl - error)[1] if kl - error > 0 else 0), (row(kl + error)[2] if kl > 0 else 0)


FEW_TOKENS = 2048  # with fewer a KL is not judged
_LARGE_KL = 0.02  # beside which a perplexity that falls is explained


def note_on(num_tokens: int, kl: float, rise: float) -> str:
    """What a reader should know of a KL from ``num_tokens`` tokens beside the perplexity's relative ``rise``; may be empty."""
    notes = []
    if num_tokens < FEW_TOKENS:
        notes.append(f"too few tokens to tell: {num_tokens:,}, expected {FEW_TOKENS:,} or more")
    if kl > _LARGE_KL and rise < 0:
        notes.append(
            "perplexity counts only the probability of the text's own tokens, which can rise while the distribution moves "
            "away from the dense model's: judge by the KL"
        )
    return "; ".join(notes)


def verdict(sparsity: float, quality: Quality | None, graded: bool = False) -> str:
    """One sentence on the quality at this sparsity, measured on other text than the search's."""
    level = level_name(sparsity, graded) + " sparsity" * (not graded)
    if quality is None:
        return f"At {level}: quality not measured; `wisparse eval` measures it."
    figures = quality.sparse
    tokens = {"all": "every token sparse", "half": "the last half of each text sparse"}.get(quality.prefill, "")
    change = figures.perplexity / figures.dense_perplexity - 1
    measured = f"{figures.perplexity:.3g}{plus_minus(figures.perplexity_stderr)}"
    perplexity = f", perplexity {figures.dense_perplexity:.3g} -> {measured} ({change:+.1%})"
    least, most = answers_changed(figures.kl, figures.kl_stderr)
    judged = f"; about {least} to {most} of 100 {ANSWERS} change" * (
        figures.num_tokens >= FEW_TOKENS and not math.isnan(figures.kl)
    )
    note = note_on(figures.num_tokens, figures.kl, change)
    return (
        f"At {level} ({tokens}), KL {figures.kl:.2g}{plus_minus(figures.kl_stderr)} nats/token, top-1 agreement "
        f"{figures.top1_agreement:.0%}{plus_minus(100 * figures.top1_stderr)}"
        f"{perplexity if math.isfinite(change) else ''}{judged}{f'; {note}' if note else ''}."
    )


@dataclass(frozen=True)
class Report:
    """A conversion's recipe and measured quality, as JSON and as text."""

    recipe: Recipe
    config: ModelConfig
    measurement: Measurement | None  # None: the bundle was written by an earlier, interrupted run

    def quality(self, sparsity: float) -> Quality | None:
        return self.measurement.levels[sparsity] if self.measurement else None

    @property
    def measured_on(self) -> str | None:
        if self.measurement is None:
            return None
        num_tokens = self.measurement.levels[self.recipe.default].sparse.num_tokens
        return f"{num_tokens:,} tokens of {self.measurement.text}; other text gives other figures"

    @property
    def coordinates(self) -> str | None:
        """The KL of int4 with and without rotation, if the conversion compared them."""
        if (found := self.recipe.search.get("coordinates")) is None:
            return None
        kl, how = found["kl"], f"int4 weights at {found['sparsity']:.0%}, roughly fitted"
        return f"KL {kl['pca']:.3g} nats/token rotated, {kl['none']:.3g} as the source has them: {how}"

    @property
    def calibrated_on(self) -> str:
        """The calibration text's source and size, and what more text would gain (docs/method.md, "Amount of text")."""
        text = self.recipe.calibration
        short = ""
        if text.num_tokens < 15_000:  # measured between the defaults of a CPU and a GPU; fewer tokens cost more
            gain = "about 16,000 would lower the KL by 5 to 10%"
            short = f"; {gain if text.num_tokens > 7_000 else 'very few: 8,192 are the least default'} (--num-samples)"
        return f"{text.source}, {text.num_tokens:,} tokens{short}"

    def realised(self, sparsity: float) -> float:
        """The fraction of the weights left unread on the calibration text."""
        return self._mean(self.recipe.at(sparsity), "realised_sparsity")

    def expectation(self, sparsity: float) -> str:
        """A sentence on the weights left unread, here and on text of another kind (measured in benchmarks/LOG.md)."""
        realised, quality = self.realised(sparsity), self.quality(sparsity)
        if realised <= 0.0:
            return "no weight is left unread."
        measured = ""
        if quality is not None and quality.realised_sparsity is not None:
            measured = f", {quality.realised_sparsity:.1%} on the text measured on"
            if quality.realised_range is not None:
                low, high = quality.realised_range
                measured += f" ({low:.1%} to {high:.1%} by passage)"
        what = "weights' bits" if self.recipe.graded else "weights"
        narrow = self.recipe.rotation is not None and self.recipe.calibration.source != "self"
        elsewhere = "up to about 8 points less" if narrow else "up to about 3 points more or less"
        return (
            f"{realised:.1%} of the {what} are left unread on the calibration text{measured}. On text of another kind "
            f"expect {elsewhere}; calibrate on text like yours to come nearer."
        )

    def to_json(self) -> dict[str, Any]:
        """The content of ``conversion_report.json``; requires a measurement."""
        recipe, config, measurement = self.recipe, self.config, self.measurement
        assert measurement is not None
        default, projections = recipe.at(recipe.default), list(config.projections())
        quality, sensitivity = measurement.levels[recipe.default], measurement.sensitivity
        entries = {entry.name: entry for entry in default.projections}
        keys, mean, blocks = ("sparsity", "alpha", "threshold", "realised_sparsity"), partial(self._mean, default), []
        for index in range(config.num_blocks):
            in_block = list(config.projections(index))
            # A recurrent layer counts as attention. A block may lack one of the halves.
            means: dict[str, Any] = {key: mean(key, in_block) for key in ("sparsity", "realised_sparsity")}
            for name, is_mlp in (("self_attn", False), ("mlp", True)):
                half = [one for one in in_block if one.in_mlp == is_mlp]
                means[name] = mean("sparsity", half) if half else None
            shown = {one.role: {key: _rounded(getattr(entries[one.name], key)) for key in keys} for one in in_block}
            blocks.append({"block": index, **means, "projections": shown})
        return {
            "report_version": REPORT_VERSION,
            "verdict": verdict(recipe.default, quality, recipe.graded),
            "model": {
                **{key: getattr(recipe, key) for key in ("base_model", "base_revision")},
                **({"weights": recipe.measured_against} if recipe.measured_against else {}),
                **{key: getattr(config, key) for key in ("model_type", "num_blocks")},
                "parameters_in_scope": sum(projection.num_parameters for projection in projections),
            },
            "method": recipe.method,
            "sparsity": {
                "target": recipe.default,
                "mean": mean("sparsity"),
                "realised_on_calibration": self.realised(recipe.default),
                "realised_on_text_measured_on": _rounded(quality.realised_sparsity),
                "expect": self.expectation(recipe.default),
                "by_projection": {
                    role: mean("sparsity", [one for one in projections if one.role == role])
                    for role in dict.fromkeys(projection.role for projection in projections)
                },
            },
            "calibration": {
                **{key: value for key, value in asdict(recipe.calibration).items() if key != "digest"},
                "summary": self.calibrated_on,
            },
            "quality": {"text": measurement.text, **_rounded(quality.to_dict())},
            "levels": [
                {
                    "sparsity": sparsity,
                    "realised_on_calibration": self.realised(sparsity),
                    "verdict": verdict(sparsity, level, recipe.graded),
                    "answers_changed_of_100": answers_changed(level.sparse.kl, level.sparse.kl_stderr),
                    "quality": _rounded(level.to_dict()),
                }
                for sparsity, level in measurement.levels.items()
            ],
            "quality_against_sparsity": [{"sparsity": at, **_rounded(one.to_dict())} for at, one in measurement.curve],
            "block_sensitivity": None if sensitivity is None else _rounded(asdict(sensitivity)),
            "search": json_values(recipe.search, longest=_LONGEST_HISTORY),
            "blocks": blocks,
            "units": {
                "sparsity": "fraction of input channels dropped, averaged with the number of parameters as weight"
                + "; of graded weights, the fraction of their bits left unread" * recipe.graded,
                "kl": "KL(dense || sparse), nats per token",
                "perplexity": "per token",
                "threshold": "of |x| * channel_scale",
                "stderr": "standard error, each passage of the text a draw",
            },
        }

    def files(self, inherited: Inherited, repo_id: str | None = None) -> dict[str, bytes]:
        """The bundle's model card, report and figures, by file name. ``repo_id``: its repository on the Hub."""
        report = self.to_json()
        figures = render_figures(report)
        captions = [(name, caption) for name, caption in FIGURES.items() if name in figures]
        card = render_card(self.recipe, inherited, report, figures=captions, repo_id=repo_id)
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        return {CARD: card.encode(), REPORT: text.encode(), **figures}

    def _mean(self, level: SparsityLevel, key: str, projections: Sequence[Projection] | None = None) -> float:
        projections = list(self.config.projections()) if projections is None else projections
        values = {entry.name: getattr(entry, key) for entry in level.projections}
        sizes = [projection.num_parameters for projection in projections]
        return float(_rounded(mean_sparsity([values[projection.name] for projection in projections], sizes)))


# To six significant digits, more than any of the measurements has.
_rounded = partial(json_values, digits=6)


# ---------------------------------------------------------------------- figures, from `Report.to_json`

# Okabe and Ito's colours, which are distinguishable with any colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS, _PERCENT = "osD^vPX", "{x:.0%}"
_STYLE: dict[Any, float] = {"font.size": 11, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}
_STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def render_figures(report: Mapping[str, Any]) -> dict[str, bytes]:
    """The figures that have data, as PNG files by name."""
    import matplotlib

    alphas = {one["alpha"] for block in report["blocks"] for one in block["projections"].values()}
    figures: tuple[tuple[str, bool, Callable[[Mapping[str, Any]], Any]], ...] = (
        ("sparsity", True, _draw_sparsity),
        ("alpha", len(alphas) > 1, _draw_alpha),  # only methods that choose alphas
        ("block_sensitivity", report["block_sensitivity"] is not None, _draw_sensitivity),
        ("quality", len(report["quality_against_sparsity"]) > 1, _draw_quality),
    )
    files = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's style would change the bytes
        matplotlib.rcParams.update(_STYLE)
        for name, has_data, draw in figures:
            if has_data:
                out = io.BytesIO()
                # Without matplotlib's version, for reproducible bytes.
                draw(report).savefig(out, format="png", dpi=130, metadata={"Software": None})
                files[f"figures/{name}.png"] = out.getvalue()
    return files


def _figure(
    report: Mapping[str, Any], title: str, rows: int = 1, columns: int = 1, height: float = 4.2, **options: Any
) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    width = min(16.0, max(7.0, 2.5 + 0.3 * len(report["blocks"]))) if columns == 1 else 13.0
    figure = Figure(figsize=(width, height), layout="constrained")
    model, target = report["model"]["base_model"].rsplit("/", 1)[-1], report["sparsity"]["target"]
    about = f", {report['method']}, {target:.0%} sparsity" if columns < 3 else ""
    figure.suptitle(f"{title}\n{model}{about}", fontsize=12)
    return figure, figure.subplots(rows, columns, **options)


def _block_axis(axis: Any, num_blocks: int, *, label: str = "block", crowded: int = 40) -> None:
    step = 1 if num_blocks <= crowded // 2 else 2 if num_blocks <= crowded else 4 if num_blocks <= 2 * crowded else 8
    axis.set_xticks(range(0, num_blocks, step))
    axis.set_xlim(-0.5, num_blocks - 0.5)
    axis.set_xlabel(label)


def _by_role(blocks: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float]]:
    """Role -> values by block; NaN, which is not drawn, if a block (of a hybrid model) has no such projection."""
    roles = dict.fromkeys(role for block in blocks for role in block["projections"])
    return {role: [block["projections"].get(role, {}).get(key, math.nan) for block in blocks] for role in roles}


def _draw_sensitivity(report: Mapping[str, Any]) -> Any:
    sensitivity = report["block_sensitivity"]
    figure, axis = _figure(report, "One block sparse at a time, the others dense")
    for i, (level, values) in enumerate(zip(sensitivity["levels"], sensitivity["kl"], strict=True)):
        axis.plot(values, marker=_MARKERS[i], color=_COLOURS[i], markersize=5, label=f"{level:.0%} of its channels")
    axis.set_yscale("log")
    axis.set_ylabel("KL(dense || sparse), nats per token")
    _block_axis(axis, len(report["blocks"]))
    # Above the axes, where it covers no points.
    place = {"ncols": len(sensitivity["levels"]), "loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    axis.legend(title="dropped in this block", **place)
    return figure


def _draw_sparsity(report: Mapping[str, Any]) -> Any:
    blocks, num_blocks = report["blocks"], len(report["blocks"])
    title = "Where the sparsity went: by block and module, and by projection (in %)"
    figure, (top, bottom) = _figure(report, title, rows=2, height=7.2, height_ratios=(3, 2))
    for i, (key, label) in enumerate((("self_attn", "self-attention"), ("mlp", "MLP"))):
        positions = [x - 0.2 + 0.4 * i for x in range(num_blocks)]
        top.bar(positions, [block[key] or 0 for block in blocks], 0.4, color=_COLOURS[i], label=label)
    style = {"color": _COLOURS[6], "marker": "o", "markersize": 4, "linewidth": 1.2}
    top.plot([block["sparsity"] for block in blocks], label="block", **style)
    top.axhline(report["sparsity"]["target"], color="0.35", linestyle="--", linewidth=1, label="target")
    top.set_ylim(0, 1)
    top.yaxis.set_major_formatter(_PERCENT)
    top.set_ylabel("sparsity")
    _block_axis(top, num_blocks, label="")
    top.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    values = _by_role(blocks, "sparsity")
    image = bottom.imshow([*values.values()], aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    bottom.grid(False)
    bottom.set_yticks(range(len(values)), list(values))
    _block_axis(bottom, num_blocks)
    for y, row in enumerate(values.values() if num_blocks <= 40 else ()):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "white" if value < 0.55 else "black"
                bottom.text(x, y, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=bottom, format=_PERCENT, pad=0.01, label="sparsity")
    return figure


def _draw_alpha(report: Mapping[str, Any]) -> Any:
    mlp = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
    title = "Alpha by projection: 0 looks at activations alone, 1 at |x| times the weight norm"
    figure, axes = _figure(report, title, columns=2, sharey=True)
    alphas = _by_role(report["blocks"], "alpha")
    for axis, name, is_mlp in zip(axes, ("self-attention", "MLP"), (False, True), strict=True):
        for i, role in enumerate(role for role in alphas if (role.removeprefix("shared_") in mlp) == is_mlp):
            marker, colour = _MARKERS[i % len(_MARKERS)], _COLOURS[i % len(_COLOURS)]
            style = {"marker": marker, "color": colour, "markersize": 5, "linewidth": 1.2}
            axis.plot(alphas[role], label=role, **style)
        axis.set_title(name, fontsize=11)
        _block_axis(axis, len(report["blocks"]), crowded=32)
        axis.set_ylim(-0.05, 1.55)
        axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes[0].set_ylabel("alpha (exponent of the weight norm)")
    return figure


def _draw_quality(report: Mapping[str, Any]) -> Any:
    sparsities = [point["sparsity"] for point in report["quality_against_sparsity"]]
    points = [point["sparse"] for point in report["quality_against_sparsity"]]
    figure, axes = _figure(report, "Quality against sparsity, every token sparse", columns=3)
    change = [math.nan if (p := one["perplexity"]) is None else p / one["dense_perplexity"] - 1 for one in points]
    panels = (
        ("KL(dense || sparse), nats per token", [one["kl"] for one in points], "kl_stderr"),
        ("perplexity, change against dense", change, None),
        ("top-1 agreement with dense", [one["top1_agreement"] for one in points], "top1_stderr"),
    )
    for axis, (label, values, error) in zip(axes, panels, strict=True):
        errors = [one[error] or 0.0 for one in points] if error else None  # null for a single sequence
        axis.errorbar(sparsities, values, yerr=errors, marker="o", color=_COLOURS[0], capsize=3)
        axis.set_title(label, fontsize=11)
        axis.set_xlabel("sparsity")
        axis.xaxis.set_major_formatter(_PERCENT)
    axes[0].set_ylim(bottom=0)
    for axis in axes[1:]:
        axis.yaxis.set_major_formatter(_PERCENT)
    return figure
