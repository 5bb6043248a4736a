"""Exact answers kept at 50% sparsity: interpreter lines, dense and sparse, under each prefill policy.

    python benchmarks/interpreter_lines.py                                  # the example model, about ten minutes
    python benchmarks/interpreter_lines.py MODEL... --calibration corpus/   # others trained on the same kind of text
    python benchmarks/interpreter_lines.py --bundles DIR...                 # bundles that exist already

A model is converted with the default settings of `wisparse convert`, then solves problems that ship nowhere (their seed
differs from the task's). Right means the exact result of the line, by greedy decoding. `relative` is sparse over dense;
its standard error comes from the problems that changed sides. Human-readable lines go to stderr, one JSON document to
stdout, and to --output if given.

    dense   prompts are read dense, answers decoded sparse: the serving default
    half    the last half of a prompt is sparse too: the paper's protocol for accuracy
    all     the whole prompt is sparse
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quality import describe_machine, print_document

from wisparse.converter.pipeline import convert
from wisparse.formats.bundle import Bundle
from wisparse.runtime.backends import load
from wisparse.runtime.model import Model
from wisparse.runtime.tasks.generators import make_problems

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ("dense", "half", "all")


def compare(dense: Sequence[bool], sparse: Sequence[bool]) -> dict[str, Any]:
    """The figures of exact answers to the same problems; ``relative`` is None if the dense model has none right."""
    lost = sum(d and not s for d, s in zip(dense, sparse, strict=True))
    gained = sum(s and not d for d, s in zip(dense, sparse, strict=True))
    # The problems are a sample, and only those that changed sides move the ratio.
    error = math.sqrt(lost + gained - (lost - gained) ** 2 / len(dense))
    return {
        "num_problems": len(dense),
        "dense_right": sum(dense) / len(dense),
        "sparse_right": sum(sparse) / len(sparse),
        "relative": sum(sparse) / sum(dense) if any(dense) else None,
        "relative_error": error / sum(dense) if any(dense) else None,
        "lost": lost,
        "gained": gained,
    }


def exact_answers(model: Model, prefill: str, problems: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether greedy decoding puts exactly the right line after each prompt of (prompt, answer)."""
    how: dict[str, Any] = {"max_new_tokens": 48, "stop": "\n", "prefill": prefill, "chat_template": False}
    return [model.generate(prompt, **how).text == answer for prompt, answer in problems]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(folder: Path, problems: list[tuple[str, str]], backend: str, policies: Sequence[str]) -> dict[str, Any]:
    """Answers of one bundle under some policies, in float32: a policy is compared, not a rounding."""
    recipe = Bundle.open(folder).recipe
    with load(folder, dtype="float32", backend=backend, max_seq_len=512) as model:
        level, model.sparsity = model.sparsity, 0
        dense = exact_answers(model, "dense", problems)
        model.sparsity = level
        found = {policy: compare(dense, exact_answers(model, policy, problems)) for policy in policies}
        backend = model.decoder.name
    for policy, figures in found.items():
        say(
            f"{recipe.base_model:<20} {recipe.default:.0%} {policy:<6} dense {figures['dense_right']:.1%}  sparse "
            f"{figures['sparse_right']:.1%}  relative {figures['relative']:.1%} +- {figures['relative_error']:.1%}"
        )
    return {
        "model": recipe.base_model,
        "method": recipe.method,
        "search": recipe.search.get("settings", {}).get("search"),
        "sparsity": recipe.default,
        "calibration": recipe.calibration.source,
        "num_samples": recipe.calibration.num_samples,
        "seq_len": recipe.calibration.seq_len,
        "seed": recipe.calibration.seed,
        "backend": backend,
        "policies": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="default: examples/pycode-llama-6m")
    parser.add_argument("--bundles", nargs="*", type=Path, default=[])
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--calibration", nargs="+", default=["self"])
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, help="default: 2,048 on a GPU, 512 on a CPU")
    parser.add_argument("--search", default="auto")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    models = args.models or ([] if args.bundles else [ROOT / "examples" / "pycode-llama-6m"])
    problems = [(one.prompt, one.answer) for one in make_problems(args.problems, args.seed)]
    rows = []
    with tempfile.TemporaryDirectory() as work:
        bundles = list(args.bundles)
        for model in models:
            say(f"converting {model.name}")
            out = Path(work) / model.name
            how = {"num_samples": args.num_samples, "seq_len": args.seq_len, "search": args.search}
            bundles.append(convert(model, out, sparsity=args.sparsity, calibration=args.calibration, **how))
        rows = [measure(folder, problems, args.backend, args.policies) for folder in bundles]
    document = {
        "benchmark": "interpreter_lines",
        "num_problems": args.problems,
        "seed": args.seed,
        "goal": {"relative": 0.97, "aim": 0.99},
        **describe_machine(torch.device("cpu")),
        "results": rows,
    }
    print_document(document, args.output)


if __name__ == "__main__":
    main()
