"""The front of quality and speed: KL(the source, dense || changed) of weight type x sparsity, beside tokens a second.

    python benchmarks/front.py quality --models PATH... --json results/front-quality.json     # minutes a model on a GPU
    python benchmarks/front.py draw --quality front-*.json --speed results/gpu-h200-weights.json \\
        --merged results/front-quality.json --out ../docs/figures       # of one or several runs: front.md and front.png

``quality`` turns the model, quantises every projection (int4 by GPTQ on the calibration text) and searches the masks on
the quantised model, as a conversion does, and measures all together against the source's own dense model, on files that
nothing was chosen on. int4 is measured in the source's coordinates too; of both the better stands in each row. Speeds
are those of one H200 and the 8B shape, made by ``gpu.py weights``.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quality import EXAMPLE, Evaluator, describe_machine, stdlib_tokens, turned

from wisparse.converter.gptq import quantise_weights
from wisparse.converter.planes import read_in_planes
from wisparse.converter.search.search import SearchSettings, SparsityLevels
from wisparse.converter.source import load_source
from wisparse.formats.manifest import level_name, unread

# The sparsities of each kind; those of graded weights are named by the bits read.
LEVELS = {
    **dict.fromkeys(("native", "int8", "fp8", "int4"), (0.3, 0.4, 0.5)),
    "graded": tuple(unread(bits) for bits in (4.25, 3.5, 3.0)),
}
KINDS = tuple(LEVELS)
_ROTATIONS = {"int4": ("pca", "none")}
_DIRECTIONS_SEED = 1
# Colours that all eyes tell apart (Okabe and Ito's), and a marker each.
_LOOKS = {
    "native": ("#000000", "o"), "int8": ("#0072B2", "s"), "fp8": ("#D55E00", "D"), "int4": ("#009E73", "^"),
    "graded": ("#CC79A7", "v"),
}  # fmt: skip
# Where a label stands beside its point: offset in points, and the side of the text that is there.
_BESIDE = {"fp8": ((8, -6), "left"), "native": ((8, -6), "left"), "graded": ((-6, 6), "right")}
_Point = tuple[str, float]
_Figures = dict[str, dict[_Point, float]]
_Speeds = dict[_Point, float]


def quality(options: argparse.Namespace) -> None:
    """Measure every model; what is done is written after each kind."""
    calibration, machine = f"{options.num_samples} x {options.seq_len}", describe_machine(torch.device(options.device))
    document: dict[str, Any] = {"benchmark": "front", "search": options.search, "calibration": calibration}
    document |= {"machine": machine, "models": {}}
    for model in options.models:
        rows: list[dict[str, Any]] = []
        document["models"][model.name] = rows
        dense: list[torch.Tensor] = []
        for kind in options.kinds:
            found = [of_kind(model, kind, rotation, options, dense) for rotation in _ROTATIONS.get(kind, ("pca",))]
            rows += [min(alike, key=lambda row: row["kl"]) for alike in zip(*found, strict=True)]
            if options.json is not None:
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def of_kind(
    model: Path, kind: str, rotation: str, options: argparse.Namespace, dense: list[torch.Tensor]
) -> list[dict[str, Any]]:
    """One model with one kind of weights: dense, then each sparsity level. ``dense``: of the source, filled by the first call."""
    began = time.perf_counter()
    source = load_source(model, torch.float32, options.device)
    tokens = stdlib_tokens(source, "calibration", options.num_samples, options.seq_len)
    evaluator = Evaluator(
        source, stdlib_tokens(source, "evaluation", options.evaluation_samples, 512).input_ids, dense=dense
    )
    dense[:] = evaluator.dense()
    if rotation == "pca":
        source = turned(source, model, tokens, _DIRECTIONS_SEED)
        evaluator = evaluator.against(source)
    matrices = {}
    if kind != "native":
        size = -(-options.num_samples // 2), options.seq_len
        text = tokens.joined(stdlib_tokens(source, "calibration", *size, _DIRECTIONS_SEED))
        matrices = quantise_weights(source, text, kind, torch.bfloat16)
    found = {0.0: evaluator()}
    if kind == "graded":
        source = read_in_planes(source, matrices)
        evaluator = evaluator.against(source)
    with SparsityLevels(source, tokens, SearchSettings(search=options.search)) as levels:
        for sparsity in LEVELS[kind]:
            found[sparsity] = evaluator(levels.at(sparsity))
    rows = []
    for sparsity, measured in found.items():
        row = {
            "weights": kind, "rotation": rotation, "sparsity": sparsity, "kl": measured.kl,
            "top1": measured.top1_agreement, "realised": measured.realised_sparsity, "tokens": measured.num_tokens,
        }  # fmt: skip
        print(f"{model.name} {kind} {rotation} {sparsity:.0%}: KL {measured.kl:.5f}", file=sys.stderr, flush=True)
        rows.append(row)
    print(f"{model.name} {kind}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return rows


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs of other models or other kinds of weights as one, in the order of `KINDS`.

    Raises:
        ValueError: they were measured in different ways, or twice.
    """
    head = {key: value for key, value in documents[0].items() if key != "models"}
    found: dict[str, dict[tuple[str, float], dict[str, Any]]] = {}
    for document in documents:
        other = {key: value for key, value in document.items() if key != "models"}
        if other != head:
            raise ValueError(f"these do not belong together: {head} and {other}")
        for model, rows in document["models"].items():
            for row in rows:
                point = row["weights"], row["sparsity"]
                if point in found.setdefault(model, {}):
                    raise ValueError(f"measured twice: {model}, {point[0]} at {point[1]:.0%}")
                found[model][point] = row
    points = [(kind, sparsity) for kind in KINDS for sparsity in (0.0, *LEVELS[kind])]
    models = {model: [rows[point] for point in points if point in rows] for model, rows in found.items()}
    return {**head, "models": models}


def draw(options: argparse.Namespace) -> None:
    """Table and figure from what was measured."""
    quality = merged([json.loads(path.read_text()) for path in options.quality])
    if options.merged is not None:
        options.merged.write_text(json.dumps(quality, indent=1) + "\n")
    speed = json.loads(options.speed.read_text())
    text = table(quality, speed)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "front.md").write_text(text)
    print(text)
    _figure(options.out / "front.png", quality, speed)


def table(quality: dict[str, Any], speed: dict[str, Any]) -> str:
    """Every point that was measured on all models, as Markdown."""
    names, points, kls, speeds = _measured(quality, speed)
    base = speed["baseline"]["tok_per_s"]
    heads = ["weights", "sparsity or bits", *(f"KL, {name}" for name in names), "tok/s", "over torch.compile"]
    lines = ["| " + " | ".join(heads) + " |", "|---|---" + "|---:" * (len(names) + 2) + "|"]
    for kind, sparsity in points:
        rate = speeds.get((kind, sparsity))
        cells = [_rounded(kls[name][kind, sparsity]) for name in names]
        cells += [f"{rate:.0f}", f"{rate / base:.2f}x"] if rate else ["not measured", ""]
        lines.append(f"| {_label(kind)} | {level_name(sparsity, kind == 'graded')} | " + " | ".join(cells) + " |")
    tokens = {row["tokens"] for rows in quality["models"].values() for row in rows}
    lines += [
        "",
        f"KL to the source's own dense model, nats a token, over {max(tokens):,} tokens that nothing was chosen on; "
        f"int4 by GPTQ. {_conditions(speed)} torch.compile, bf16, there: {base:.0f} tok/s.",
    ]
    return "\n".join(lines) + "\n"


def _label(kind: str) -> str:
    return "bf16" if kind == "native" else kind


def _rounded(kl: float) -> str:
    return "<0.0001" if 0 < kl < 0.0001 else f"{kl:.4f}"


def _measured(quality: dict[str, Any], speed: dict[str, Any]) -> tuple[list[str], list[_Point], _Figures, _Speeds]:
    """Models, points that all of them have, KL by model and point, and tok/s by point where it was measured."""
    kls = {name: {(r["weights"], r["sparsity"]): r["kl"] for r in rows} for name, rows in quality["models"].items()}
    points = [(kind, sparsity) for kind in KINDS for sparsity in (0.0, *LEVELS[kind])]
    points = [point for point in points if all(point in of_model for of_model in kls.values())]
    speeds = {(row["weights"], row["level"]): row["tok_per_s"] for row in speed["rows"]}
    return list(kls), points, kls, speeds


def _conditions(speed: dict[str, Any]) -> str:
    return (
        f"tok/s: {speed['shape']} shape, random weights, one request, {speed['prompt']} + {speed['tokens']} tokens, "
        f"one {speed['machine']['device']}."
    )


def _figure(path: Path, quality: dict[str, Any], speed: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, points, kls, speeds = _measured(quality, speed)
    figure = Figure(figsize=(5.6 * len(names), 4.6), layout="constrained", facecolor="white", dpi=150)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axis, name in zip(panels, names, strict=True):
        of_model = kls[name]
        for kind in KINDS:
            # A logarithm has no place for a KL of 0, which bf16 has where nothing was turned.
            mine = [point for point in points if point[0] == kind and point in speeds and of_model[point] > 0]
            x, y = [of_model[point] for point in mine], [speeds[point] for point in mine]
            colour, marker = _LOOKS[kind]
            axis.plot(x, y, marker=marker, color=colour, label=_label(kind), linewidth=1.5, markersize=6)
            for at, point in zip(x, mine, strict=True):
                # Beside the line.
                offset, side = ((-8, 0), "right") if point[1] == 0 else _BESIDE.get(kind, ((8, -2), "left"))
                axis.annotate(
                    level_name(point[1], kind == "graded"), (at, speeds[point]), offset, textcoords="offset points", fontsize=9,
                    color=colour, ha=side, va="center",
                )  # fmt: skip
        base = speed["baseline"]["tok_per_s"]
        axis.axhline(base, color="#555555", linestyle="--", linewidth=1)
        axis.annotate(
            f"torch.compile, bf16: {base:.0f}", (0.02, base), (0, -4), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="top", fontsize=9, color="#555555",
        )  # fmt: skip
        axis.set(xscale="log", title=name, xlabel="KL to the source's dense model, nats a token (log)")
        axis.set_ylim(0, 1.12 * max(speeds.values()))
        axis.margins(x=0.12)
        axis.grid(alpha=0.25)
    panels[0].set_ylabel("tokens a second")
    panels[0].legend(frameon=False, loc="upper left", title="weights (labels: sparsity, bits)")
    told = f"KL: of the model named, int4 by GPTQ. {_conditions(speed)}"
    figure.suptitle(textwrap.fill(told, 75 * len(names)), fontsize=9)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    first = parts.add_parser("quality")
    first.add_argument("--models", type=Path, nargs="+", default=[EXAMPLE])
    first.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    first.add_argument("--search", default="refine")
    first.add_argument("--num-samples", type=int, default=128)
    first.add_argument("--seq-len", type=int, default=512)
    first.add_argument("--evaluation-samples", type=int, default=48)
    first.add_argument("--device", default="cpu")
    first.add_argument("--json", type=Path)
    second = parts.add_parser("draw")
    second.add_argument("--quality", type=Path, nargs="+", required=True)
    second.add_argument("--merged", type=Path, help="where to write all of --quality as one")
    second.add_argument("--speed", type=Path, required=True)
    second.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"quality": quality, "draw": draw}[options.part](options)


if __name__ == "__main__":
    main()
