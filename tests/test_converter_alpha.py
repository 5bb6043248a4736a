"""The grid search for alpha on synthetic losses, without a model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from wisparse.converter.search.thresholds import GRID, search_alpha


def test_grid_is_the_papers_with_both_ends() -> None:
    assert len(GRID) == 31
    assert (GRID[0], GRID[1], GRID[-1]) == (0.0, 0.05, 1.5)


def test_finds_one_alpha_per_projection() -> None:
    best = {"q": 0.35, "k": 1.5, "v": 0.0}
    found = search_alpha(lambda a: 1 + sum((a[n] - best[n]) ** 2 for n in best), list(best))
    assert found == pytest.approx(best)


def test_the_block_is_swept_with_one_alpha_and_then_each_projection_from_the_best() -> None:
    calls: list[dict[str, float]] = []

    def loss(alphas: Mapping[str, float]) -> float:
        calls.append(dict(alphas))
        return (alphas["q"] - 0.2) ** 2 + (alphas["k"] - 0.6) ** 2

    assert search_alpha(loss, ["q", "k"]) == {"q": 0.2, "k": 0.6}
    assert calls[:31] == [{"q": alpha, "k": alpha} for alpha in GRID]
    swept_q = [call for call in calls[31:] if call["k"] == 0.4]
    assert {call["q"] for call in swept_q} == {*GRID}
    assert all(call["q"] == 0.2 for call in calls[31 + len(swept_q) :])


def test_a_tie_goes_to_the_smaller_alpha() -> None:
    assert search_alpha(lambda a: 1.0, ["q", "k"]) == {"q": 0.0, "k": 0.0}
