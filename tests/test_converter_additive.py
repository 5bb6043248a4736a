"""The allocation in closed form on synthetic curves, without a model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisparse.converter.budget import MAX_SPARSITY, mean_sparsity
from wisparse.converter.search.additive import LEVELS, allocate, convex_hull, interpolate

damages = st.lists(st.floats(-1e-3, 10), min_size=len(LEVELS), max_size=len(LEVELS))


@given(rows=st.lists(st.tuples(st.integers(1, 10**8), damages), min_size=1, max_size=12), target=st.floats(0, 0.95))
def test_meets_the_budget_within_bounds(rows: list[tuple[int, list[float]]], target: float) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(rows)}
    found = allocate({str(i): interpolate(LEVELS, row) for i, (_, row) in enumerate(rows)}, sizes, target)
    assert all(0.0 <= p <= MAX_SPARSITY for p in found.values())
    assert mean_sparsity([found[n] for n in sizes], list(sizes.values())) == pytest.approx(target, abs=1e-9)


@given(row=damages)
def test_interpolation_rises_through_the_measurements(row: list[float]) -> None:
    curve = interpolate(LEVELS, row)
    assert curve[0] == (0.0, 0.0)
    assert all(b[1] >= a[1] for a, b in itertools.pairwise(curve))
    at = {round(s, 4): d for s, d in curve}
    highest = 1e-12
    for level, damage in zip(LEVELS, row, strict=True):
        highest = max(highest, damage)
        assert at[level] == pytest.approx(highest, rel=1e-6)


@given(points=st.lists(st.floats(0, 5), min_size=2, max_size=30))
def test_hull_is_convex_and_below(points: list[float]) -> None:
    curve = [(float(i), damage) for i, damage in enumerate(points)]
    hull = convex_hull(curve)
    assert hull[0] == curve[0]
    assert hull[-1] == curve[-1]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(hull)]
    assert all(b > a for a, b in itertools.pairwise(slopes))
    for (x0, y0), (x1, y1) in itertools.pairwise(hull):
        for x, y in curve:
            if x0 <= x <= x1:
                assert y >= y0 + (y1 - y0) * (x - x0) / (x1 - x0) - 1e-9


def test_no_allocation_on_the_grid_is_better() -> None:
    curves = {
        "a": [(i / 20, (i / 20) ** 2) for i in range(20)],
        "b": [(i / 20, 4 * (i / 20) ** 2) for i in range(20)],
        "c": [(i / 20, 3 * (i / 20) ** 4) for i in range(20)],
    }
    sizes = {"a": 1, "b": 2, "c": 1}
    found = allocate(curves, sizes, 0.5)

    def damage(p: dict[str, float]) -> float:
        total = 0.0
        for name, s in p.items():
            i = min(int(s * 20 + 1e-9), 18)
            (x0, y0), (x1, y1) = curves[name][i : i + 2]
            total += y0 + (y1 - y0) * (s - x0) / (x1 - x0)
        return total

    grid = [i / 20 for i in range(20)]
    best = min(
        damage({"a": a, "b": b, "c": c})
        for a, b, c in itertools.product(grid, grid, grid)
        if a + 2 * b + c >= 4 * 0.5 - 1e-9
    )
    assert damage(found) <= best + 1e-9


def test_the_sensitive_projection_is_spared() -> None:
    row = [level**2 for level in LEVELS]
    curves = {"calm": interpolate(LEVELS, row), "touchy": interpolate(LEVELS, [100 * d for d in row])}
    found = allocate(curves, {"calm": 10, "touchy": 10}, 0.4)
    assert found["touchy"] < 0.05 < found["calm"]


def test_the_order_of_the_projections_does_not_matter() -> None:
    curves = {n: [(0.0, 0.0), (0.5, 1.0), (0.95, 3.0)] for n in "abc"}
    sizes = dict.fromkeys("abc", 7)
    backwards = allocate(dict(reversed(curves.items())), sizes, 0.3)
    assert allocate(curves, sizes, 0.3) == {n: backwards[n] for n in "abc"}
