"""Every table of quality: the ablation and the methods against sparsities, on the models given, and a summary of both.

    python benchmarks/tables.py examples/pycode-llama-6m PATH... --jobs 12      # minutes on four large GPUs
    python benchmarks/tables.py --only ablation --num-generations 20 --num-offspring 8 --num-samples 16  # half an hour

Calibrated on standard-library files, measured on other ones, every token sparse. KL in nats per token, to the dense
model. Each table is made in pieces, ``--jobs`` processes at a time, dealt out over all GPUs that are visible. Written to
``--out`` (benchmarks/results): ablation-NAME, methods-NAME and summary as .md and .json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ablation
import methods
import torch
from ablation import PARTS, ROWS, in_order
from methods import METHODS, of_uniform
from quality import EXAMPLE, Evaluator, describe_machine, markdown_table, stdlib_tokens

from wisparse.converter.source import load_source

HERE = Path(__file__).resolve().parent
_PER_ROW = ("rows", "benchmark")
# What one process makes of a sparsity: the searches that take longest are alone.
_LONG = ("wisparse-rotated", "wisparse")
GROUPS = (
    *((label,) for label in _LONG),
    tuple(label for label in METHODS if label.endswith("-rotated") and label not in _LONG),
    tuple(label for label in METHODS if not label.endswith("-rotated") and label not in _LONG),
)


@dataclass(frozen=True)
class Piece:
    """One process's share of a table: some parts of the ablation, or some methods at one sparsity."""

    kind: str
    model: Path
    labels: tuple[str, ...]
    sparsity: float = 0.5

    def make(self, options: argparse.Namespace) -> dict[str, Any]:
        """Its rows, and how they were made."""
        began = time.perf_counter()
        source = load_source(self.model, device=options.device)
        tokens = stdlib_tokens(source, "calibration", options.num_samples, 512)
        evaluator = Evaluator(source, stdlib_tokens(source, "evaluation", options.eval_tokens // 512, 512, 1).input_ids)
        facts = {
            "benchmark": self.kind, "model": self.model.name, "calibration tokens": tokens.input_ids.numel(),
            "evaluation tokens": evaluator.input_ids.numel(), **describe_machine(source.device),
        }  # fmt: skip
        if self.kind == "ablation":
            evolution = f"{options.num_generations} generations x {options.num_offspring}, all on all search tokens"
            facts |= {"sparsity": 0.5, "search tokens": options.kl_tokens, "evolution": evolution}
            rows = ablation.measure(self.labels, source, tokens, evaluator, options)
        else:
            rows = methods.measure(self.labels, self.sparsity, self.model, source, tokens, evaluator, options)
        print(f"{self.model.name} {self.kind} {self.labels[0]}: {time.perf_counter() - began:.0f} s", flush=True)
        return {**facts, "rows": rows}


def visible_gpus(device: str) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none if pieces run on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def take_gpu(places: Any) -> None:
    """The GPU of a process, before it uses one."""
    if (gpu := places.get()) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def make_all(pieces: list[Piece], options: argparse.Namespace) -> dict[Piece, dict[str, Any]]:
    """Some pieces at a time, the first ones first."""
    gpus, context = visible_gpus(options.device), multiprocessing.get_context("spawn")
    places = context.Manager().Queue()
    for job in range(options.jobs):
        places.put(gpus[job % len(gpus)] if gpus else None)
    with ProcessPoolExecutor(options.jobs, context, take_gpu, (places,)) as pool:
        return dict(zip(pieces, pool.map(Piece.make, pieces, [options] * len(pieces)), strict=True))


def merged(documents: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """One document from those of several pieces."""
    shared = {"made by": f"benchmarks/tables.py, up to {options.jobs} processes at a time: compare seconds roughly"}
    return {**documents[0], **shared, "rows": [row for document in documents for row in document["rows"]]}


def across(rows: list[dict[str, Any]]) -> str:
    """Methods down, sparsities across: KL, and what it is of uniform |x| at the same sparsity."""
    sparsities = sorted({row["sparsity"] for row in rows})
    by_cell = {(row["method"], row["sparsity"]): row for row in rows}
    lines = ["| method | " + " | ".join(f"{s:.0%}" for s in sparsities) + " |", "|---|" + "---|" * len(sparsities)]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = [by_cell.get((method, sparsity)) for sparsity in sparsities]
        texts = ["–" if cell is None else f"{cell['kl']:.4f} ({cell['of_uniform']:.2f})" for cell in cells]
        lines.append(f"| {method} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def write(out: Path, name: str, title: str, document: dict[str, Any], *tables: str) -> None:
    head = "\n".join(f"- {key}: {value}" for key, value in document.items() if key not in _PER_ROW)
    (out / f"{name}.md").write_text("\n\n".join([f"# {title}", head, *tables]) + "\n")
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def summary(methods: dict[str, dict[str, Any]], ablations: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Per model, every method at 50%: KL, its ratio to uniform |x| and to TEAL; with rows of the ablation by key."""
    rows = []
    for model, document in methods.items():
        half = {row["method"]: row for row in document["rows"] if row["sparsity"] == 0.5}
        entries = {label: row["kl"] for label, row in half.items()}
        entries |= {key: row["kl"] for key, row in ablations[model].items() if key in ("paper", "additive")}
        for label, kl in entries.items():
            ratios = {"of_uniform": kl / entries["teal-uniform"], "of_teal": kl / entries["teal"]}
            rows.append({"model": model, "method": label, "kl": kl, **ratios})
    return {"benchmark": "summary", "sparsity": 0.5, "rows": rows}


def summary_table(rows: list[dict[str, Any]]) -> str:
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(row["method"], row["model"]): row for row in rows}
    heads = [f"{model}: KL, of uniform, of TEAL" for model in models]
    lines = ["| method, 50% | " + " | ".join(heads) + " |", "|---|" + "---|" * len(models)]
    for method in dict.fromkeys(row["method"] for row in rows):
        found = [cells.get((method, model)) for model in models]
        texts = ["–" if c is None else f"{c['kl']:.4f}, {c['of_uniform']:.3f}, {c['of_teal']:.3f}" for c in found]
        lines.append(f"| {method} | " + " | ".join(texts) + " |")
    lines.append("")
    for method in ("fisher", "wisparse", "fisher-rotated", "wisparse-rotated"):
        of = [[row[key] for row in rows if row["method"] == method] for key in ("of_uniform", "of_teal")]
        means = [sum(values) / len(values) for values in of if values]
        if means:
            lines.append(f"- mean of {method}: {means[0]:.3f} of uniform, {means[1]:.3f} of TEAL")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[EXAMPLE])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.6])
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; three on a GPU are well fed")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--num-samples", type=int, default=256, help="of 512 tokens, to calibrate on")
    parser.add_argument("--eval-tokens", type=int, default=24576)
    parser.add_argument("--kl-tokens", type=int, default=2048, help="for the searches that compare candidates")
    parser.add_argument("--num-generations", type=int, default=400)
    parser.add_argument("--num-offspring", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a search's pass, for the methods")
    parser.add_argument("--only", choices=("methods", "ablation"), help="one kind of table, and no summary")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    # The long ones first: the paper's evolution, of the largest model first; high sparsities before low ones.
    models = sorted(options.models, key=lambda model: -sum(file.stat().st_size for file in model.glob("*.safetensors")))
    ranked = sorted(options.sparsities, reverse=True)
    pieces = [Piece("ablation", model, ("paper",)) for model in models]
    pieces += [Piece("methods", model, group, s) for group in GROUPS for s in ranked for model in models]
    pieces += [Piece("ablation", model, (part,)) for model in models for part in PARTS if part != "paper"]
    made = make_all([piece for piece in pieces if options.only in (None, piece.kind)], options)
    options.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, dict[str, Any]] = {"methods": {}, "ablation": {}}
    for model in options.models:
        for kind in ("ablation", "methods") if options.only is None else (options.only,):
            whole = merged([one for piece, one in made.items() if (piece.kind, piece.model) == (kind, model)], options)
            name, title = model.name, f"{kind.capitalize()}: {model.name}"
            if kind == "ablation":
                whole["rows"] = in_order(whole["rows"])
                by_label = {row["recipe"]: row for row in whole["rows"]}
                tables[kind][name] = {key: by_label[label] for key, label in ROWS.items()}
                write(options.out, f"{kind}-{name}", title, whole, markdown_table(whole["rows"]))
            else:
                whole["rows"] = of_uniform(whole["rows"])
                tables[kind][name] = whole
                kls = f"KL, and of uniform |x|:\n\n{across(whole['rows'])}"
                write(options.out, f"{kind}-{name}", title, whole, kls, markdown_table(whole["rows"]))
    if 0.5 in options.sparsities and options.only is None:
        document = summary(tables["methods"], tables["ablation"])
        write(options.out, "summary", "Summary of quality", document, summary_table(document["rows"]))
        print(summary_table(document["rows"]))


if __name__ == "__main__":
    main()
