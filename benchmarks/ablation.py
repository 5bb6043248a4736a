"""What each part of a search is worth: the rows of the paper's ablation, the baselines and the default, on one model.

    python benchmarks/ablation.py                              # the example model; minutes on a GPU, hours on two cores
    python benchmarks/ablation.py --num-generations 20 --num-offspring 8 --num-samples 16      # half an hour
    python benchmarks/ablation.py --model PATH --out DIR       # another one; writes ablation-NAME.{md,json}
    python benchmarks/ablation.py --parts baselines            # some of the rows: baselines, paper, additive

Calibrated on standard-library files, measured on other ones, every token sparse. KL in nats per token, to the dense
model. ``seconds`` and ``KL evaluations`` are those of the search up to that row; an evaluation is one pass over the
search's tokens, a pass over a part of them that part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from quality import Clock, describe_machine, opened, options_of, print_head, publish, row

from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.search.allocation import allocate, interpolate
from wisparse.converter.search.search import DAMAGE_LEVELS, Run, SearchResult, SearchSettings, SparsityLevels, search
from wisparse.converter.source import SourceModel

# Every row of the table, in its order.
ROWS = {
    "uniform": "|x|, uniform (TEAL uniform)",
    "wina": "|x|·g, uniform (WINA's score everywhere)",
    "alpha": "alpha per projection, uniform",
    "evolution": "+ evolutionary block search",
    "greedy": "+ greedy within blocks",
    "paper": "+ alpha again (the paper's pipeline)",
    "teal": "|x|, greedy within blocks (TEAL)",
    "additive": "alpha, additive table of measured KL",
    "additive-alpha": "alpha, additive table, alpha again",
    "fisher": "loss-weighted norm and damage (fisher)",
    "refine": "the same, refined on the joint KL (refine)",
}
PARTS = ("baselines", "paper", "additive")

Settings = Callable[[str, str], SearchSettings]
Add = Callable[[str, SearchResult, Clock], None]


def baselines(source: SourceModel, tokens: CalibrationTokens, settings: Settings, add: Add) -> None:
    """The rows that are one search each."""
    for key, method, kind in (
        ("uniform", "teal", "uniform"),
        ("wina", "wina", "uniform"),
        ("teal", "teal", "greedy"),
        ("fisher", "wisparse", "fisher"),
        ("refine", "wisparse", "refine"),
    ):
        with Clock() as clock:
            result = search(source, tokens, settings(method, kind))
        add(key, result, clock)


def paper(source: SourceModel, tokens: CalibrationTokens, settings: Settings, add: Add) -> None:
    """The paper's pipeline, stage by stage."""
    with SparsityLevels(source, tokens, settings("wisparse", "paper")) as levels:
        run = Run(levels, levels.settings)
        clock = Clock()
        with clock:
            run.prepare()
            result = run.result(run.uniform_allocation())
        add("alpha", result, clock)
        with clock:
            blocks = run.evolve_blocks()
            spread = {n: p for group, p in zip(run.calib.groups, blocks, strict=True) for n in group}
            result = run.result(spread)
        add("evolution", result, clock)
        with clock:
            spread = run.spread_within(blocks)
            result = run.result(spread)
        add("greedy", result, clock)
        with clock:
            run.choose_alphas(spread)
            result = run.result(spread)
        add("paper", result, clock)


def additive_table(source: SourceModel, tokens: CalibrationTokens, settings: Settings, add: Add) -> None:
    """KL of each projection alone at some sparsities, the allocation of least sum, then alphas at its sparsities."""
    with SparsityLevels(source, tokens, settings("wisparse", "paper")) as levels:
        run, calib = Run(levels, levels.settings), levels.calib
        clock = Clock()
        with clock:
            run.prepare()
            curves = {}
            for view in calib.blocks():
                for name in view.names:
                    # Blocks before this one are not run again, the others are dense.
                    row = [calib.kl(calib.thresholds({name: p}), view=view) for p in DAMAGE_LEVELS]
                    curves[name] = interpolate(DAMAGE_LEVELS, row)
            spread = allocate(curves, calib.sizes, run.settings.sparsity)
            result = run.result(spread)
        add("additive", result, clock)
        with clock:
            run.choose_alphas(spread)
            result = run.result(spread)
        add("additive-alpha", result, clock)


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of any parts as the table has them, with their ratio to uniform |x| where that is known."""
    known = {row["recipe"]: row for row in rows}
    ordered = [known[label] for label in ROWS.values() if label in known]
    uniform = known.get(ROWS["uniform"])
    return [{**row, "of_uniform": row["kl"] / uniform["kl"] if uniform else None} for row in ordered]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--num-generations", type=int, default=400)
    parser.add_argument("--num-offspring", type=int, default=64)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = options_of(parser)

    source, tokens, evaluator = opened(options)
    facts = {
        "model": options.model.name,
        "sparsity": options.sparsity,
        "calibration tokens": tokens.input_ids.numel(),
        "search tokens": options.kl_tokens,
        "evaluation tokens": evaluator.input_ids.numel(),
        "evolution": f"{options.num_generations} generations x {options.num_offspring}, all on all search tokens",
        **describe_machine(source.device),
    }
    print_head("Ablation", facts)
    rows: list[dict[str, Any]] = []

    def settings(method: str, kind: str) -> SearchSettings:
        return SearchSettings(
            sparsity=options.sparsity,
            method=method,
            search=kind,
            num_generations=options.num_generations,
            num_offspring=options.num_offspring,
            kl_tokens=options.kl_tokens if kind not in ("fisher", "refine") else None,
            seed=options.seed,
        )

    def add(key: str, result: SearchResult, clock: Clock) -> None:
        entry = row(ROWS[key], evaluator(result), clock.spent, result)
        rows.append(entry)
        print(
            f"{ROWS[key]}: KL {entry['kl']:.4f}, realised {entry['realised_sparsity']:.4f}, {clock.spent:.0f} s",
            flush=True,
        )

    with torch.no_grad():
        for part, make in zip(PARTS, (baselines, paper, additive_table), strict=True):
            if part in options.parts:
                make(source, tokens, settings, add)

    rows = in_order(rows)
    print(f"\ndense perplexity {rows[0]['dense_perplexity']:.3f}")
    publish("ablation", "Ablation", options, facts, rows)


if __name__ == "__main__":
    main()
