"""What int8 or int4 weights cost, alone and with the masks: KL against the dense model with its weights as they are.

    python benchmarks/int8.py                                  # the example model at 50%; half a minute
    python benchmarks/int8.py --models PATH ... --output results/int8.json
    python benchmarks/int8.py --weights int4

Converts each model with the default search, calibrated on every other file of Python's standard library, and gives the
bundle and the other files to ``wisparse eval --weights int8`` (or int4), which is all that is measured here. Tables go
to stderr, one JSON document to stdout, and to --output if given.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from quality import EXAMPLE, describe_machine, print_document, stdlib_files

import wisparse
from wisparse.cli import main as command_line


def evaluate(bundle: Path, weights: str, arguments: list[str]) -> str:
    """What ``wisparse eval`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command_line(["eval", str(bundle), "--weights", weights, *arguments])
    return printed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=[EXAMPLE])
    parser.add_argument("--weights", choices=("int8", "int4"), default="int8")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--num-samples", type=int, default=48, help="of the evaluation; a third of it calibrates")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    options = parser.parse_args()
    shape = ["--num-samples", str(options.num_samples), "--seq-len", str(options.seq_len)]
    texts = [argument for path in stdlib_files("evaluation") for argument in ("--text", str(path))]
    rows: dict[str, Any] = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            bundle = wisparse.convert(
                model,
                Path(scratch) / model.name,
                sparsity=options.sparsity,
                calibration=stdlib_files("calibration"),
                num_samples=options.num_samples // 3,
                seq_len=options.seq_len,
            )
            found = json.loads(evaluate(bundle, options.weights, [*texts, *shape, "--json"]))["bundles"][0]
        rounded = options.weights
        parts = {
            f"{rounded} alone": found["alone"][rounded],
            "masks alone": found["alone"]["masks"],
            "both": found["quality"],
        }
        rows[model.name] = {"backend": found["backend"], **parts}
        print(f"{model.name}, {options.sparsity:.0%}", file=sys.stderr)
        for part, quality in parts.items():
            measured = quality["all"]["sparse"]
            print(
                f"  {part:12} KL {measured['kl']:.4f} nats/token, perplexity {measured['dense_perplexity']:.3f} -> "
                f"{measured['perplexity']:.3f}, top-1 agreement {measured['top1_agreement']:.1%}",
                file=sys.stderr,
            )
    document = {
        "benchmark": options.weights,
        "sparsity": options.sparsity,
        "evaluation": "standard library, every token sparse (all) or the last half of each sequence (half)",
        "num_tokens": options.num_samples * options.seq_len,
        **describe_machine(torch.device("cpu")),
        "models": rows,
    }
    print_document(document, options.output)


if __name__ == "__main__":
    main()
