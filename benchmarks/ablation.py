"""What each part of a search is worth: the rows of the paper's ablation, the baselines and the default, on one model;
``tables.py`` makes the table.

``seconds`` and ``KL evaluations`` are those of the search up to that row; an evaluation is one pass over the search's
tokens, a pass over a part of them that part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from quality import Clock, Evaluator, row

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
Settings = Callable[[str, str], SearchSettings]
Add = Callable[[str, SearchResult, Clock], None]


def baselines(source: SourceModel, tokens: CalibrationTokens, settings: Settings, add: Add) -> None:
    """The rows that are one search each."""
    searches = {"uniform": ("teal", "uniform"), "wina": ("wina", "uniform"), "teal": ("teal", "greedy")}
    searches |= {kind: ("wisparse", kind) for kind in ("fisher", "refine")}
    for key, (method, kind) in searches.items():
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


PARTS = {"baselines": baselines, "paper": paper, "additive": additive_table}


@torch.no_grad()
def measure(
    parts: Sequence[str], source: SourceModel, tokens: CalibrationTokens, evaluator: Evaluator, options: argparse.Namespace
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of some parts, at 50%."""
    rows: list[dict[str, Any]] = []

    def settings(method: str, kind: str) -> SearchSettings:
        kl_tokens = options.kl_tokens if kind not in ("fisher", "refine") else None
        return SearchSettings(
            sparsity=0.5, method=method, search=kind, num_generations=options.num_generations,
            num_offspring=options.num_offspring, kl_tokens=kl_tokens, seed=0,
        )  # fmt: skip

    def add(key: str, result: SearchResult, clock: Clock) -> None:
        rows.append(row(ROWS[key], evaluator(result), clock.spent, result))
        print(f"{ROWS[key]}: KL {rows[-1]['kl']:.4f}, {clock.spent:.0f} s", flush=True)

    for part in parts:
        PARTS[part](source, tokens, settings, add)
    return rows
