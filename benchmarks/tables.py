"""Every table of quality: the ablation and the methods against sparsities, on the models given, and a summary of both.

    python benchmarks/tables.py examples/pycode-llama-6m PATH... --jobs 12      # minutes on four large GPUs

Each table is made in pieces, one process per piece and `--jobs` of them at a time, dealt out over all GPUs that are
visible. A piece that is there already, made with the same options, is not made again. If a piece fails, the others are
still made, nothing is written, and the exit status is 1: run the same command again. Written to --out
(benchmarks/results): ablation-NAME, methods-NAME and summary as .md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ablation import PARTS, ROWS, in_order
from methods import METHODS, of_uniform
from quality import EXAMPLE, markdown_table

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
    """One process's share of the tables, in a folder of its own."""

    folder: Path
    script: str
    arguments: tuple[str, ...]

    def found(self) -> dict[str, Any] | None:
        """What it made, if that was with these options."""
        asked, files = self.folder / "asked", list(self.folder.glob("*.json"))
        if not files or not asked.is_file() or asked.read_text() != self._asked():
            return None
        document: dict[str, Any] = json.loads(files[0].read_text())
        return document

    def make(self, gpu: str | None) -> bool:
        """Run it, on one GPU; what it prints is kept beside its result. Returns whether it succeeded."""
        if self.found() is not None:
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.json"):
            old.unlink()
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        command = [sys.executable, str(HERE / self.script), *self.arguments, "--out", str(self.folder)]
        began = time.perf_counter()
        with open(self.folder / "log", "w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
        (self.folder / "asked").write_text(self._asked())
        made = code == 0 and self.found() is not None
        if not made:
            print((self.folder / "log").read_text()[-2000:], flush=True)
        told = "made" if made else f"FAILED, exit status {code}"
        print(f"{self.folder.name}: {told} in {time.perf_counter() - began:.0f} s", flush=True)
        return made

    def _asked(self) -> str:
        return json.dumps([self.script, *self.arguments])


def visible_gpus(device: str) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none if pieces run on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def make_all(pieces: list[Piece], jobs: int, gpus: list[str]) -> bool:
    """Some pieces at a time, the first ones first; each GPU gets its turn. Returns whether all succeeded."""
    places: queue.Queue[str | None] = queue.Queue()
    for job in range(jobs):
        places.put(gpus[job % len(gpus)] if gpus else None)

    def one(piece: Piece) -> bool:
        place = places.get()
        try:
            return piece.make(place)
        finally:
            places.put(place)

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(one, pieces)))


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document from those of several pieces, which tell the same of themselves.

    Raises:
        ValueError: pieces made on different machines, or with different versions.
    """
    heads = [{key: value for key, value in document.items() if key != "rows"} for document in documents]
    if any(head != heads[0] for head in heads):
        raise ValueError(f"pieces that do not belong together, remove --pieces and make all: {heads}")
    return {**heads[0], "rows": [row for document in documents for row in document["rows"]]}


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
    parser.add_argument("--pieces", type=Path, default=Path("tables.pieces"), help="where unfinished tables lie")
    parser.add_argument("--num-samples", default="256", help="of 512 tokens, to calibrate on")
    parser.add_argument("--eval-tokens", default="24576")
    parser.add_argument("--num-generations", default="400")
    parser.add_argument("--num-offspring", default="64")
    parser.add_argument("--batch-size", default="4", help="sequences of a search's pass, for what methods.py makes")
    parser.add_argument("--only", choices=("methods", "ablation"), help="one kind of table, and no summary")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()

    common = ("--num-samples", options.num_samples, "--eval-tokens", options.eval_tokens, "--device", options.device)
    evolution = ("--num-generations", options.num_generations, "--num-offspring", options.num_offspring)
    ablation_pieces: dict[str, list[Piece]] = {}
    methods_pieces: dict[str, list[Piece]] = {}
    for model in options.models:
        name, arguments = model.name, ("--model", str(model), *common)
        ablation_pieces[name] = [
            Piece(options.pieces / f"ablation-{name}-{part}", "ablation.py", (*arguments, *evolution, "--parts", part))
            for part in PARTS
        ]
        methods_pieces[name] = [
            Piece(
                options.pieces / f"methods-{name}-{s:g}-{group[0]}",
                "methods.py",
                (*arguments, "--batch-size", options.batch_size, "--sparsities", f"{s:g}", "--methods", *group),
            )
            for group in GROUPS
            for s in sorted(options.sparsities, reverse=True)
        ]
    # The long ones first: the paper's evolution, of the largest model first; high sparsities before low ones.
    size = {model.name: sum(file.stat().st_size for file in model.glob("*.safetensors")) for model in options.models}
    names = sorted(size, key=lambda name: -size[name])
    paper = PARTS.index("paper")
    pieces = [ablation_pieces[name][paper] for name in names]
    pieces += [piece for together in zip(*(methods_pieces[name] for name in names), strict=True) for piece in together]
    pieces += [piece for name in names for i, piece in enumerate(ablation_pieces[name]) if i != paper]
    pieces = [piece for piece in pieces if options.only in (None, piece.script.removesuffix(".py"))]
    gpus = visible_gpus(options.device)
    began = time.perf_counter()
    if not make_all(pieces, options.jobs, gpus):
        sys.exit(1)
    print(f"all pieces in {time.perf_counter() - began:.0f} s", flush=True)

    where = f"{len(gpus)} GPU(s)" if gpus else "one CPU"
    shared = {"made by": f"benchmarks/tables.py, up to {options.jobs} processes on {where}: compare seconds roughly"}
    options.out.mkdir(parents=True, exist_ok=True)
    methods: dict[str, dict[str, Any]] = {}
    ablations: dict[str, dict[str, dict[str, Any]]] = {}
    for model in options.models:
        name = model.name
        if options.only != "methods":
            whole = merged([piece.found() or {} for piece in ablation_pieces[name]]) | shared
            whole["rows"] = in_order(whole["rows"])
            by_label = {row["recipe"]: row for row in whole["rows"]}
            ablations[name] = {key: by_label[label] for key, label in ROWS.items()}
            write(options.out, f"ablation-{name}", f"Ablation: {name}", whole, markdown_table(whole["rows"]))
        if options.only != "ablation":
            methods[name] = whole = merged([piece.found() or {} for piece in methods_pieces[name]]) | shared
            whole["rows"] = of_uniform(whole["rows"])
            tables = (f"KL, and of uniform |x|:\n\n{across(whole['rows'])}", markdown_table(whole["rows"]))
            write(options.out, f"methods-{name}", f"Methods: {name}", whole, *tables)
    if 0.5 in options.sparsities and options.only is None:
        document = summary(methods, ablations) | shared
        write(options.out, "summary", "Summary of quality", document, summary_table(document["rows"]))
        print(summary_table(document["rows"]))


if __name__ == "__main__":
    main()
