"""The front of quality and speed: KL(the source, dense || changed) of weight type x sparsity, beside tokens a second.

    python benchmarks/front.py quality --models PATH... --json results/front-quality.json     # minutes a model on a GPU
    python benchmarks/front.py draw --quality results/front-quality.json --speed results/gpu-h200-weights.json \\
        --out docs/figures                                                                    # front.md and front.png

``quality`` turns the model (unless ``--rotation none``), quantises every projection (int4 by GPTQ on the calibration
text) and searches the masks on the quantised model, as a conversion does, and measures all together against the
source's own dense model, on files that nothing was chosen on. Speeds are those of one H200 and the 8B shape, made by
``gpu_weights.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from quality import EXAMPLE, Divergence, Evaluator, describe_machine, evaluate, stdlib_tokens, turned

from wisparse.converter.model.masking import MaskedModel
from wisparse.converter.model.source import load_source
from wisparse.converter.searches.search import Rungs, SearchSettings
from wisparse.converter.weights.stage import quantise_weights
from wisparse.converter.work.progress import Progress
from wisparse.converter.work.state import NO_STATE

KINDS = ("native", "int8", "fp8", "int4")
RUNGS = (0.3, 0.4, 0.5)
_DIRECTIONS_SEED = 1


def quality(options: argparse.Namespace) -> None:
    """Measure every model; what is done is written after each kind."""
    document: dict[str, Any] = {
        "benchmark": "front",
        "search": options.search,
        "rotation": options.rotation,
        "calibration": f"{options.num_samples} x {options.seq_len}",
        "machine": describe_machine(torch.device(options.device)),
        "models": {},
    }
    for model in options.models:
        rows: list[dict[str, Any]] = []
        document["models"][model.name] = rows
        dense: list[torch.Tensor] = []
        for kind in options.kinds:
            rows += of_kind(model, kind, options, dense)
            if options.json is not None:
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def of_kind(model: Path, kind: str, options: argparse.Namespace, dense: list[torch.Tensor]) -> list[dict[str, Any]]:
    """One model with one kind of weights: dense, then each rung. ``dense``: of the source, filled by the first call."""
    began = time.perf_counter()
    source = load_source(model, torch.float32, options.device)
    tokens = stdlib_tokens(source, "calibration", options.num_samples, options.seq_len)
    evaluator = Evaluator(source, stdlib_tokens(source, "evaluation", options.evaluation_samples, 512).input_ids)
    evaluator._dense = dense

    def unmasked() -> Divergence:
        with MaskedModel(source.projections) as masked:
            none = dict.fromkeys(source.projections, 0.0)
            return evaluate(source.model, masked, evaluator.input_ids, none, dense_log_probs=dense)

    if not dense:
        unmasked()  # keeps the source's own
    if options.rotation == "pca":
        source = turned(source, model, tokens, _DIRECTIONS_SEED)
        evaluator = evaluator.against(source)
    if kind != "native":
        quantise_weights(source, tokens, kind, torch.bfloat16, Progress(enabled=False), NO_STATE)  # type: ignore[arg-type]
    found = {0.0: unmasked()}
    with Rungs(source, tokens, SearchSettings(search=options.search)) as rungs:
        for sparsity in RUNGS:
            found[sparsity] = evaluator(rungs.at(sparsity))
    rows = []
    for sparsity, measured in found.items():
        row = {
            "weights": kind, "sparsity": sparsity, "kl": measured.kl, "top1": measured.top1_agreement,
            "realised": measured.realised_sparsity, "tokens": measured.num_tokens,
        }  # fmt: skip
        print(f"{model.name} {kind} {sparsity:.0%}: KL {measured.kl:.5f}", file=sys.stderr, flush=True)
        rows.append(row)
    print(f"{model.name} {kind}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return rows


def draw(options: argparse.Namespace) -> None:
    """Table and figure from what was measured."""
    models = json.loads(options.quality.read_text())["models"]
    speeds = {
        (row["goal"]["weights"], float(row["goal"]["sparsity"])): row["tok_per_s"]
        for row in json.loads(options.speed.read_text())["rows"].values()
        if row["goal"]["batch"] == 1 and "tok_per_s" in row
    }
    names = list(models)
    kls = {name: {(row["weights"], row["sparsity"]): row["kl"] for row in rows} for name, rows in models.items()}
    points = [(kind, sparsity) for kind in KINDS for sparsity in (0.0, *RUNGS) if (kind, sparsity) in kls[names[0]]]
    lines = [
        "| weights | sparsity | " + " | ".join(f"KL, {name}" for name in names) + " | tok/s, 8B shape, H200 |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for point in points:
        shown = f"{speeds[point]:.0f}" if point in speeds else "not measured"
        cells = " | ".join(f"{kls[name][point]:.4f}" for name in names)
        lines.append(f"| {'bf16' if point[0] == 'native' else point[0]} | {point[1]:.0%} | {cells} | {shown} |")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "front.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    _figure(options.out / "front.png", points, kls, speeds)


def _figure(path: Path, points: list[tuple[str, float]], kls: dict[str, Any], speeds: dict[Any, float]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(kls), 4.2), layout="constrained")
    for place, (name, of_model) in enumerate(kls.items(), 1):
        axis = figure.add_subplot(1, len(kls), place)
        for kind, marker in zip(KINDS, "osD^", strict=True):
            mine = [point for point in points if point[0] == kind and point in speeds]
            # A logarithm has no place for bf16 dense, whose KL is 0.
            x = [max(of_model[point], 1e-5) for point in mine]
            axis.plot(x, [speeds[point] for point in mine], marker=marker, label="bf16" if kind == "native" else kind)
            for at, point in zip(x, mine, strict=True):
                axis.annotate(f"{point[1]:.0%}", (at, speeds[point]), (4, 4), textcoords="offset points", fontsize=8)
        axis.set(
            xscale="log", title=name, xlabel="KL to the source's dense model, nats a token", ylabel="tokens a second"
        )
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    first = parts.add_parser("quality")
    first.add_argument("--models", type=Path, nargs="+", default=[EXAMPLE])
    first.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    first.add_argument("--search", default="refine")
    first.add_argument("--rotation", choices=("pca", "none"), default="pca")
    first.add_argument("--num-samples", type=int, default=128)
    first.add_argument("--seq-len", type=int, default=512)
    first.add_argument("--evaluation-samples", type=int, default=48)
    first.add_argument("--device", default="cpu")
    first.add_argument("--json", type=Path)
    second = parts.add_parser("draw")
    second.add_argument("--quality", type=Path, required=True)
    second.add_argument("--speed", type=Path, required=True)
    second.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"quality": quality, "draw": draw}[options.part](options)


if __name__ == "__main__":
    main()
