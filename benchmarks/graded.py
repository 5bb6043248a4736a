"""KL over bits read a weight: bf16, int8 and int4, with masks, and graded weights, in both coordinates.

    python benchmarks/graded.py --device cuda --models PATH ... --output results/graded.json     # minutes on a GPU
    python benchmarks/graded.py --tokens 8192 --search fisher                                    # the example on a CPU

Calibrated on every other file of Python's standard library; measured on the other files and on installed packages.
Scales are not counted. int4 is fitted to the text of the rotation too, as in a conversion.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from coordinates import Trial, timed_rows
from quality import EXAMPLE, describe_machine, print_document

from wisparse.converter.gptq import quantise_weights
from wisparse.converter.planes import read_in_planes
from wisparse.converter.search.allocation import MAX_SPARSITY, allocate
from wisparse.converter.search.search import Run, SearchResult, SearchSettings, SparsityLevels
from wisparse.formats.manifest import unread

BITS = (5.0, 4.25, 3.75, 3.4, 2.95, 2.5)
MASKS = {"native": (16, (0.5, 0.4, 0.3)), "int8": (8, ()), "int4": (4, (0.3,))}


@torch.no_grad()
def only(levels: SparsityLevels, scope: str, sparsity: float) -> SearchResult | None:
    """``levels.at`` where channels are dropped in routed experts alone, or outside them alone, by `fisher`; None where
    these are too few."""
    run, sizes = Run(levels, replace(levels.settings, sparsity=sparsity)), levels.calib.sizes
    curves = run.sensitivities()
    inside = {name: size for name, size in sizes.items() if (".experts." in name) == (scope == "experts")}
    if sparsity * sum(sizes.values()) > MAX_SPARSITY * sum(inside.values()):
        return None
    spread = allocate(
        {name: curves[name] for name in inside}, inside, sparsity * sum(sizes.values()) / sum(inside.values())
    )
    return run.result(dict.fromkeys(sizes, 0.0) | spread)


def rows(
    trial: Trial, amount: int, by: str, coordinates: list[str], kinds: list[str], scopes: list[str]
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    for turned in coordinates:
        tokens, rotation = trial.text("library", amount), trial.text("library", amount // 2, 1)
        source = trial.source("library", amount // 2 if turned == "rotated" else 0)
        for weights in kinds:
            width, sparsities = MASKS.get(weights, (8, tuple(map(unread, sorted(BITS)))))
            about = {"coordinates": turned, "weights": weights}
            with trial.quantized(source, weights if weights != "graded" else "native", tokens.joined(rotation)):
                if weights != "native":
                    matrices = quantise_weights(source, tokens, weights, torch.bfloat16) if weights == "graded" else {}
                    yield {**about, "bits": float(width)}, trial.kl(source)
                read = read_in_planes(source, matrices) if weights == "graded" else source
                with SparsityLevels(read, tokens, SearchSettings(search=by, seed=trial.seed)) as levels:
                    for scope, sparsity in product(scopes, sparsities):
                        found = levels.at(sparsity) if scope == "all" else only(levels, scope, sparsity)
                        inside = {"scope": scope} if len(scopes) > 1 else {}
                        if found is not None:
                            yield {**about, **inside, "bits": round(width * (1 - sparsity), 4)}, trial.kl(read, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=[EXAMPLE])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--search", default="refine", choices=("fisher", "refine"))
    parser.add_argument("--coordinates", nargs="+", default=["rotated", "source"], choices=("rotated", "source"))
    parser.add_argument("--weights", nargs="+", default=[*MASKS, "graded"], choices=(*MASKS, "graded"))
    parser.add_argument("--scopes", nargs="+", default=["all"], choices=("all", "experts", "outside"))
    parser.add_argument("--eval-tokens", type=int, default=24576)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    options = parser.parse_args()
    facts = {"tokens": options.tokens, "search": options.search, "eval_tokens": options.eval_tokens}
    document: dict[str, Any] = {
        "benchmark": "graded",
        **describe_machine(torch.device(options.device)),
        **facts,
        "rows": [],
    }
    for folder in options.models:
        trial = Trial(folder, options.device, 512, options.eval_tokens, 0)
        found = rows(trial, options.tokens, options.search, options.coordinates, options.weights, options.scopes)
        document["rows"] += timed_rows({"model": folder.name}, found)
    print_document(document, options.output)


if __name__ == "__main__":
    main()
