"""Sparsity levels and budgets: what three sparsity levels cost over one, and whether `--max-kl` keeps on other text what it promised.

    time       a conversion with one sparsity level (50%) and one with three (30, 40, 50%), in one process, after one of a few
               tokens, in processor time: what it would be alone, on a busy machine too, with one thread
    budgets    KL on other text over X, for ten budgets X: calibration and choice on passages of every other file of
               the standard library, other ones for each budget, measured on the files between. Searches are shared by
               the budgets, as by the tries of one budget; `refine` may differ a little from a conversion with that
               budget alone

    OMP_NUM_THREADS=1 python benchmarks/sparsity levels.py time --json out.json
    OMP_NUM_THREADS=1 python benchmarks/sparsity levels.py budgets --search fisher --json out.json

The example model takes some minutes for either; --model names another one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quality import EXAMPLE, Evaluator, describe_machine, stdlib_tokens, turned

from wisparse.converter.choice import Budget, choose
from wisparse.converter.pipeline import run
from wisparse.converter.search.search import SearchSettings, SparsityLevels
from wisparse.converter.settings import USUAL, ConvertSettings
from wisparse.converter.source import load_source
from wisparse.formats.errors import UsageError

BUDGETS = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15)
_CHOICE_SEED, _DIRECTIONS_SEED = 2_000_003, 3_000_003


def times(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a conversion with one sparsity level and with three."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, levels in (("warm", USUAL[-1:]), ("one", USUAL[-1:]), ("three", USUAL)):
            settings = ConvertSettings(
                str(arguments.model),
                Path(folder) / name,
                sparsities=levels,
                search=arguments.search,
                num_samples=2 if name == "warm" else arguments.num_samples,
                seq_len=min(64, arguments.seq_len) if name == "warm" else arguments.seq_len,
                rotation=arguments.rotation,
                device=arguments.device,
            )
            wall, processor = time.perf_counter(), time.process_time()
            conversion = run(settings)
            assert conversion is not None
            if name == "warm":
                continue
            rows.append(
                {
                    "levels": list(levels),
                    "processor_seconds": round(time.process_time() - processor, 1),
                    "seconds": round(time.perf_counter() - wall, 1),
                    "stages": {name: round(value, 1) for name, value in conversion.seconds.items()},
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    # What a device computes meanwhile is no processor's time.
    clock = "processor_seconds" if arguments.device == "cpu" else "seconds"
    one, three = (row[clock] for row in rows)
    return [*rows, {"three over one": round(three / one, 3)}]


def budgets(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """KL on other text over the budget."""
    source = load_source(arguments.model, device=arguments.device)
    shape = (arguments.num_samples, arguments.seq_len)
    tokens = stdlib_tokens(source, "calibration", *shape)
    other = Evaluator(source, stdlib_tokens(source, "evaluation", arguments.evaluation_samples, shape[1]).input_ids)
    if arguments.rotation != "none":
        model = load_source(arguments.model, device=arguments.device)
        source = turned(model, arguments.model, tokens, _DIRECTIONS_SEED)
        other = other.against(source)
    rows: list[dict[str, Any]] = []
    with SparsityLevels(source, tokens, SearchSettings(search=arguments.search), store=Memory()) as levels:
        for index, limit in enumerate(arguments.max_kl):
            # Each has a text of its own, as conversions of other models have: chance does not hit all ten alike.
            text = partial(stdlib_tokens, source, "calibration", *shape, seed=_CHOICE_SEED + index)
            try:
                choice = choose(source, levels, Budget(max_kl=limit), text)
            except UsageError as error:
                rows.append({"max_kl": limit, "refused": str(error)})
                continue
            chosen = {sparsity: kl for sparsity, kl, _ in choice.tried}[choice.sparsity]
            found = other(levels.at(choice.sparsity))
            rows.append(
                {
                    "max_kl": limit,
                    "sparsity": choice.sparsity,
                    "tried": len(choice.tried),
                    "kl_where_chosen": round(chosen, 6),
                    "kl_elsewhere": round(found.kl, 6),
                    "over_budget": round(found.kl / limit, 3),
                    "realised_elsewhere": round(found.realised_sparsity, 4),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


class Memory(dict[str, bytes]):
    """A store that lasts as long as the process."""

    def load(self, key: str) -> bytes | None:
        return self.get(key)

    def save(self, key: str, data: bytes) -> None:
        self[key] = data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("time", "budgets"))
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--search", default="refine")
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--evaluation-samples", type=int, default=32)
    parser.add_argument("--rotation", choices=("pca", "none"), default="pca")
    parser.add_argument("--max-kl", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = (times if arguments.part == "time" else budgets)(arguments)
    document = {
        "model": arguments.model.name,
        "search": arguments.search,
        "rotation": arguments.rotation,
        "tokens": f"{arguments.num_samples} x {arguments.seq_len}",
        "machine": describe_machine(torch.device(arguments.device)),
        arguments.part: rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
