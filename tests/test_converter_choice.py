"""The sparsity that a budget allows: found by few measurements, and what is written is what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import write_tiny_model

from wisparse.cli import convert_main
from wisparse.converter.choice import Budget
from wisparse.converter.search.search import SparsityLevels
from wisparse.formats.bundle import Bundle

FLAGS = ["--search", "uniform", "--method", "teal", "--num-samples", "2", "--seq-len", "16", "--device", "cpu"]


def test_what_a_budget_is_spent_on() -> None:
    assert Budget(max_kl=0.02).spent(0.03, 0.0) == pytest.approx(1.5)
    assert Budget(min_top1=0.95).spent(9.0, 0.97) == pytest.approx(0.6)
    assert Budget(0.02, 0.95).spent(0.01, 0.9) == pytest.approx(2.0)
    assert Budget(0.0).spent(0.0, 1.0) == 0.0
    assert Budget(min_top1=1.0).spent(0.0, 0.99) == math.inf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        convert_main([str(argument) for argument in arguments])
    return int(exit_.value.code or 0)


def test_max_kl_writes_the_sparsity_that_keeps_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(model, "-o", out, "--max-kl", "5e-3", "--json", *FLAGS) == 0
    document = json.loads(capsys.readouterr().out)
    choice = document["choice"]
    recipe = Bundle.open(out).recipe
    assert recipe.sparsities == (choice["sparsity"],) == (document["sparsity"],)
    assert recipe.search["budget"] == {"max_kl": 5e-3, "min_top1": None, **choice}
    kl = {one["sparsity"]: one["kl"] for one in choice["tried"]}
    beyond = [kl[one] for one in kl if one > recipe.sparsity]
    assert kl[recipe.sparsity] <= 5e-3
    assert kl[recipe.sparsity] >= 0.98 * 5e-3 or min(beyond) > 5e-3
    report = json.loads((out / "conversion_report.json").read_text())
    beside = [point["sparsity"] for point in report["quality_against_sparsity"]]
    expected = [recipe.sparsity - 0.05, recipe.sparsity, recipe.sparsity + 0.05]
    assert beside == pytest.approx(expected), "what a bit less and a bit more would cost"


def test_a_budget_that_nothing_keeps_says_what_is_best(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "-o", tmp_path / "out", "--max-kl", "1e-12", "--min-top1", "0.5", *FLAGS) == 2
    said = capsys.readouterr().err
    assert "--max-kl 1e-12 and --min-top1 0.5: no sparsity from 5% on keeps that; the best is KL " in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_killed_choice_goes_on_and_tries_nothing_twice(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [model, "--max-kl", "5e-3", "-q", *FLAGS]
    original: Any = SparsityLevels.at
    asked: list[float] = []

    def counted(self: SparsityLevels, sparsity: float) -> Any:
        asked.append(sparsity)
        if killed and len(asked) == 3:
            raise KeyboardInterrupt
        return original(self, sparsity)

    monkeypatch.setattr(SparsityLevels, "at", counted)
    killed = False
    assert run(*wanted, "-o", tmp_path / "whole") == 0
    whole, asked, killed = asked, [], True
    assert run(*wanted, "-o", tmp_path / "out") == 130
    first, asked, killed = asked, [], False
    assert run(*wanted, "-o", tmp_path / "out") == 0
    assert first == whole[:3]
    assert asked == whole
    files = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in files)
