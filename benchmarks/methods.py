"""Methods against sparsities, on one model: KL(dense || sparse), perplexity, top-1 agreement; ``tables.py`` makes the table.

All methods share the tokens, the final thresholds' rule and the protocol: calibrated on standard-library files,
measured on other ones, every token sparse, the realised sparsity beside the target.

    teal-uniform   |x|, the same sparsity everywhere
    teal           |x|, greedy within blocks
    wina           |x| g, the same sparsity everywhere
    wina-code      |x| g for k and gate, |x| elsewhere, as WINA's code does (without its rotation of weights)
    cats           |SiLU(gate)|: up and down sparse, as far as they alone can meet the target
    rsparse        |x|, the same share unread everywhere, what is dropped through low-rank factors
    fisher         loss-weighted norms, damage and allocation from backward passes
    wisparse       refine: the same, refined by gradient steps on the joint KL
    *-rotated      the same on the model in its principal directions, which is what a conversion does by default; KL is
                   to the source's dense model, so what rounding the rotated weights costs is in it
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from baselines import BASELINES, Baseline
from quality import Clock, Evaluator, row, turned

from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.search.search import SearchSettings, search
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.errors import UsageError

METHODS = {
    "teal-uniform": ("teal", "uniform"),
    "teal": ("teal", "greedy"),
    "wina": ("wina", "uniform"),
    "wina-code": ("wina-code", "uniform"),
    **{name: (name, "uniform") for name in BASELINES},
    "fisher": ("wisparse", "fisher"),
    "wisparse": ("wisparse", "refine"),
}
_ROTATED = "-rotated"
METHODS |= {label + _ROTATED: METHODS[label] for label in ("teal-uniform", "teal", "fisher", "wisparse")}
UNIFORM = "teal-uniform"


def made(
    label: str, source: SourceModel, tokens: CalibrationTokens, sparsity: float, options: argparse.Namespace
) -> AbstractContextManager[Baseline]:
    """A method's masks, by the search or by hand.

    Raises:
        UsageError: more than it can give.
    """
    method, kind = METHODS[label]
    if method in BASELINES:
        return BASELINES[method](source, tokens, sparsity, options.kl_tokens)
    settings = SearchSettings(
        sparsity=sparsity, method=method, search=kind, batch_size=options.batch_size, seed=0,
        kl_tokens=None if kind in ("fisher", "refine") else options.kl_tokens,
    )  # fmt: skip
    return nullcontext(Baseline(source.projections, search(source, tokens, settings)))


def measure(
    labels: Sequence[str], sparsity: float, folder: Path, source: SourceModel, tokens: CalibrationTokens,
    evaluator: Evaluator, options: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of some methods at one sparsity; ``folder``: of the model."""
    models, rows = {False: (source, evaluator)}, []
    if any(label.endswith(_ROTATED) for label in labels):
        model = turned(load_source(folder, device=options.device), folder, tokens, 1)
        models[True] = (model, evaluator.against(model))
    for label in labels:
        model, own = models[label.endswith(_ROTATED)]
        try:
            with ExitStack() as stack:
                with Clock() as clock:
                    found = stack.enter_context(made(label, model, tokens, sparsity, options))
                entry = row(f"{label} {100 * sparsity:g}%", found.measure(own), clock.spent, found.result)
        except UsageError as refused:  # cats: up and down alone are not enough
            print(f"{label} {sparsity}: {refused}", flush=True)
            continue
        rows.append({"method": label, "sparsity": sparsity, **entry})
        print(f"{label} {sparsity}: KL {entry['kl']:.4f}, realised {entry['realised_sparsity']:.4f}", flush=True)
    return rows


def of_uniform(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the table's order, each with its ratio to uniform |x| at its sparsity, where that is there."""
    order = list(METHODS)
    rows = sorted(rows, key=lambda row: (row["sparsity"], order.index(row["method"])))
    uniform = {row["sparsity"]: row["kl"] for row in rows if row["method"] == UNIFORM}
    return [{**row, "of_uniform": row["kl"] / uniform[row["sparsity"]]} if uniform else row for row in rows]
