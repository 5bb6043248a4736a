"""Every table of quality: the ablation and the methods against sparsities, on the models given, and a summary of both.

    python benchmarks/tables.py examples/pycode-llama-6m PATH... --jobs 6       # minutes on one large GPU

Each table is made in pieces, one process per piece and `--jobs` of them at a time; a piece that is there already is not
made again. Written to --out (benchmarks/results): ablation-NAME, methods-NAME and summary as .md and .json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quality import markdown_table

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "pycode-llama-6m"
_PER_ROW = ("rows", "benchmark")


def piece(folder: Path, script: str, arguments: list[str]) -> None:
    """Run one of the two benchmarks into a folder of its own; what it prints is kept beside its result."""
    folder.mkdir(parents=True, exist_ok=True)
    if list(folder.glob("*.json")):
        return
    command = [sys.executable, str(HERE / script), *arguments, "--out", str(folder)]
    print("making", folder.name, flush=True)
    with open(folder / "log", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        print((folder / "log").read_text()[-2000:], f"\n{folder.name}: exit status {code}", flush=True)


def found(folder: Path) -> dict[str, Any] | None:
    files = list(folder.glob("*.json"))
    return json.loads(files[0].read_text()) if files else None


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document from those of several sparsities."""
    whole = {**documents[0], "rows": [row for document in documents for row in document["rows"]]}
    whole["rows"].sort(key=lambda row: row["sparsity"])
    return whole


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


def summary(methods: dict[str, dict[str, Any]], ablations: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per model, every method at 50%: KL, its ratio to uniform |x| and to TEAL; with the paper's pipeline."""
    rows = []
    for model, document in methods.items():
        half = {row["method"]: row for row in document["rows"] if row["sparsity"] == 0.5}
        entries = {label: row["kl"] for label, row in half.items()}
        for row in ablations.get(model, {}).get("rows", []):
            if "the paper's pipeline" in row["recipe"]:
                entries["paper"] = row["kl"]
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
        texts = ["–" if c is None else f"{c['kl']:.4f}, {c['of_uniform']:.2f}, {c['of_teal']:.2f}" for c in found]
        lines.append(f"| {method} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[EXAMPLE])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.6])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--pieces", type=Path, default=Path("tables.pieces"), help="where unfinished tables lie")
    parser.add_argument("--num-samples", default="128", help="of 512 tokens, to calibrate on")
    parser.add_argument("--eval-tokens", default="24576")
    parser.add_argument("--num-generations", default="400")
    parser.add_argument("--num-offspring", default="64")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()

    common = ["--num-samples", options.num_samples, "--eval-tokens", options.eval_tokens, "--device", options.device]
    evolution = ["--num-generations", options.num_generations, "--num-offspring", options.num_offspring]
    jobs = []
    for model in options.models:
        arguments = ["--model", str(model), *common]
        jobs.append((options.pieces / f"ablation-{model.name}", "ablation.py", [*arguments, *evolution]))
        for sparsity in sorted(options.sparsities, reverse=True):
            arguments_here = [*arguments, "--sparsities", str(sparsity)]
            jobs.append((options.pieces / f"methods-{model.name}-{sparsity:g}", "methods.py", arguments_here))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: piece(*job), jobs))

    options.out.mkdir(parents=True, exist_ok=True)
    methods: dict[str, dict[str, Any]] = {}
    ablations: dict[str, dict[str, Any]] = {}
    for model in options.models:
        name = model.name
        ablation = found(options.pieces / f"ablation-{name}")
        if ablation is not None:
            ablations[name] = ablation
            write(options.out, f"ablation-{name}", f"Ablation: {name}", ablation, markdown_table(ablation["rows"]))
        parts = [found(options.pieces / f"methods-{name}-{sparsity:g}") for sparsity in options.sparsities]
        documents = [part for part in parts if part is not None]
        if documents:
            methods[name] = whole = merged(documents)
            tables = (f"KL, and of uniform |x|:\n\n{across(whole['rows'])}", markdown_table(whole["rows"]))
            write(options.out, f"methods-{name}", f"Methods: {name}", whole, *tables)
    if methods:
        document = summary(methods, ablations)
        write(options.out, "summary", "Summary of quality", document, summary_table(document["rows"]))
        print(summary_table(document["rows"]))


if __name__ == "__main__":
    main()
