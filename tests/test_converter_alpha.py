"""The grid search for alpha on synthetic losses, without a model."""

from __future__ import annotations

import pytest

from wisparse.converter.searches.alpha import GRID, search_alpha


def test_grid_is_the_papers_with_both_ends() -> None:
    assert len(GRID) == 31
    assert (GRID[0], GRID[1], GRID[-1]) == (0.0, 0.05, 1.5)


def test_finds_one_alpha_per_projection() -> None:
    best = {"q": 0.35, "k": 1.5, "v": 0.0}
    found, loss = search_alpha(lambda a: 1 + sum((a[n] - best[n]) ** 2 for n in best), list(best))
    assert found == pytest.approx(best)
    assert loss == pytest.approx(1.0)


def test_without_sweeps_the_block_shares_one_alpha() -> None:
    found, _ = search_alpha(lambda a: (a["q"] - 0.2) ** 2 + (a["k"] - 0.6) ** 2, ["q", "k"], sweeps=0)
    assert found == {"q": 0.4, "k": 0.4}


def test_a_start_replaces_the_tied_sweep_and_is_never_left_for_worse() -> None:
    calls = []

    def loss(alphas):
        calls.append(dict(alphas))
        return 0.0 if alphas == {"q": 0.5, "k": 1.0} else 1.0

    found, least = search_alpha(loss, ["q", "k"], start={"q": 0.5, "k": 1.0})
    assert (found, least) == ({"q": 0.5, "k": 1.0}, 0.0)
    assert len(calls) == 1 + 2 * 30


def test_a_tie_goes_to_the_smaller_alpha() -> None:
    assert search_alpha(lambda a: 1.0, ["q", "k"])[0] == {"q": 0.0, "k": 0.0}
