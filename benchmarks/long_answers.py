"""Where sparsity hurts first: traces of whole programs, greedy answers that end in a loop; dense against sparse.

    python benchmarks/long_answers.py BUNDLE...        # of one model or several; dense, and at each of their sparsities

A chain (`interpreter_chains`, other ones than the task's) is right if all eight lines of a program are; the last half
of every prompt is sparse, which is all of the program. A loop is an answer of 256 tokens, to a prompt read dense, whose
last 192 characters repeat a piece of at most 64 (`greedy_loops`). Standard errors: of a share by its sample, of a
difference by the problems that changed sides; lines of one program are counted as if apart, which makes the error of
their share a little too small. Float32, so that sparsity is compared and no rounding. Readable lines go
to stderr, one JSON document to stdout, and to --output if given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import wisparse
from wisparse.formats.bundle import Bundle
from wisparse.runtime.backends import load
from wisparse.runtime.model import Model
from wisparse.runtime.tasks.greedy_loops import MAX_NEW_TOKENS, loops, make_prompts
from wisparse.runtime.tasks.interpreter_chains import STEPS, make_chains

# The tasks' own questions have seed 0.
SEED = 1


def share(found: Sequence[bool]) -> dict[str, Any]:
    """Of what holds; its standard error."""
    part = sum(found) / len(found)
    return {"n": len(found), "share": part, "stderr": math.sqrt(part * (1 - part) / (len(found) - 1))}


def difference(dense: Sequence[bool], sparse: Sequence[bool]) -> dict[str, Any]:
    """Sparse less dense on the same problems; its standard error."""
    changes = [float(b) - float(a) for a, b in zip(dense, sparse, strict=True)]
    mean = sum(changes) / len(changes)
    spread = sum((one - mean) ** 2 for one in changes) / (len(changes) - 1)
    return {"less_dense": mean, "less_dense_stderr": math.sqrt(spread / len(changes))}


def traced(model: Model, count: int) -> tuple[list[bool], list[bool]]:
    """Whether each program's trace is right, and each of its lines."""
    chains = make_chains(count, SEED)
    prompts = [chain.session + question for chain in chains for question in chain.questions()]
    wanted = [answer for chain in chains for answer in chain.answers]
    given: list[bool] = [False] * len(prompts)
    answers = model.generate_each(prompts, prefill="half", max_new_tokens=48, stop="\n", chat_template=False)
    for place, answer in answers:
        given[place] = answer.text == wanted[place]
    return [all(given[first : first + STEPS]) for first in range(0, len(given), STEPS)], given


def looped(model: Model, count: int) -> list[bool]:
    """Whether each greedy answer ends in a loop."""
    prompts = make_prompts(count, SEED)
    found = [False] * len(prompts)
    for place, answer in model.generate_each(
        prompts, prefill="dense", max_new_tokens=MAX_NEW_TOKENS, chat_template=False
    ):
        found[place] = loops(answer.text)
    return found


def measure(model: Model, num_chains: int, num_prompts: int) -> dict[str, list[bool]]:
    whole, lines = traced(model, num_chains)
    return {"chains": whole, "lines": lines, "loops": looped(model, num_prompts)}


def said(name: str, figures: dict[str, Any]) -> str:
    text = f"{name} {figures['share']:.1%} +- {figures['stderr']:.1%}"
    if "less_dense" in figures:
        text += f" ({figures['less_dense']:+.1%} +- {figures['less_dense_stderr']:.1%})"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--chains", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    options = {"dtype": "float32", "backend": args.backend, "max_seq_len": 768, "max_batch": args.max_batch}
    dense: dict[str, dict[str, list[bool]]] = {}
    rows = []

    def add(base: str, sparsity: float, calibration: str, found: dict[str, list[bool]]) -> None:
        row = {"model": base, "sparsity": sparsity, "calibration": calibration}
        for name, values in found.items():
            row[name] = share(values) | (difference(dense[base][name], values) if sparsity else {})
        rows.append(row)
        told = ", ".join(said(name, row[name]) for name in found)
        print(f"{base} {sparsity:.0%}: {told}", file=sys.stderr, flush=True)

    for folder in args.bundles:
        recipe = Bundle.open(folder).recipe
        with load(folder, **options) as model:
            base, backend = recipe.base_model, model.decoder.name
            for sparsity in (0.0, *recipe.sparsities):
                if sparsity or base not in dense:
                    model.sparsity = sparsity
                    found = measure(model, args.chains, args.prompts)
                    dense.setdefault(base, found)
                    add(base, sparsity, recipe.calibration.source, found)
    document = {
        "benchmark": "long_answers",
        "seed": SEED,
        "backend": backend,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"wisparse": wisparse.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "results": rows,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
