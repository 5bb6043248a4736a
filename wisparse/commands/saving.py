"""``--save``: what `eval` and `bench` found goes into the bundle's report and onto its model card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wisparse.formats.card import Finding, check_amendable, save_findings
from wisparse.formats.errors import UsageError
from wisparse.formats.guard import find_folder, quoted, shown

if TYPE_CHECKING:
    from wisparse.runtime.benchmark import Comparison


# Where metrics have their standard error and their number of questions, as `evaluate_tasks` says it.
_STDERR, _QUESTIONS = "_stderr", "num_questions"
_PROMPTS = {"dense": "prompts dense", "half": "the last half of each prompt sparse", "all": "prompts sparse"}

save_option = click.option(
    "--save", is_flag=True, help="Write what was found into the bundle as well: its report and its model card."
)


def folders_to_save(bundles: Sequence[str], sparsity: float | None) -> list[Path]:
    """The bundles' folders; refused before the work if nothing can be written there."""
    if sparsity == 0:
        raise UsageError("--save: expected a sparsity level to tell of, found --sparsity 0, which is the dense model")
    folders = []
    for bundle in bundles:
        folder = find_folder(bundle)
        if folder is None:
            raise UsageError(f"--save: expected a bundle's folder, found {quoted(bundle)}: download it first")
        check_amendable(folder)
        folders.append(folder)
    return folders


def save(folder: Path, findings: Iterable[Finding]) -> None:
    save_findings(folder, findings)
    click.echo(f"saved in {shown(folder)}: conversion_report.json and README.md", err=True)


def task_findings(row: Mapping[str, Any]) -> list[Finding]:
    """Of a row of `eval`: every metric under every prefill policy."""
    dense = row["tasks"]["masks off"]
    findings = []
    for policy, tasks in row["tasks"].items():
        if policy == "masks off":
            continue
        for task, metrics in tasks.items():
            conditions = f"n = {metrics[_QUESTIONS]:,}, {_PROMPTS[policy]}; {row['backend']}"
            for metric, value in metrics.items():
                if metric == _QUESTIONS or metric.endswith(_STDERR) or not _is_number(value):
                    continue
                errors = (_error(one.get(f"{metric}{_STDERR}")) for one in (dense[task], metrics))
                name = f"{task}, {metric}"
                findings.append(Finding(name, conditions, row["sparsity"], dense[task][metric], value, *errors))
    return findings


def speed_finding(comparison: Comparison) -> Finding:
    """Of `bench`."""
    work, machine = comparison.workload, comparison.machine
    requests = "one request" if work.batch == 1 else f"{work.batch} requests"
    weights = comparison.dtype if comparison.weights == "native" else comparison.weights
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] != '1')}" if "threads" in machine else ""
    conditions = (
        f"{requests}, {work.new_tokens} tokens after {work.prompt_length}; {weights} weights, {comparison.backend} on "
        f"{machine['device']}{threads}"
    )
    dense, sparse = comparison.dense.tok_per_s, comparison.sparse.tok_per_s
    return Finding("tok/s", conditions, comparison.sparsity, dense, sparse)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _error(value: Any) -> float | None:
    return float(value) if _is_number(value) else None
