"""Sparsity budgets: the parameter-weighted mean of sparsities, and the allocation of least predicted damage."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import MAX_SPARSITY

# One mutation of the block search, and the grid of quantile tables (the paper's epsilon).
STEP = 0.005

# (sparsity, damage) points, sparsities ascending.
Curve = list[tuple[float, float]]


def check_target(target: float) -> None:
    if not 0.0 <= target <= MAX_SPARSITY:
        raise UsageError(f"sparsity: expected a number in [0, {MAX_SPARSITY}], found {target}")


def mean_sparsity(sparsities: Sequence[float], sizes: Sequence[int]) -> float:
    """The parameter-weighted mean of ``sparsities``."""
    return sum(p * size for p, size in zip(sparsities, sizes, strict=True)) / sum(sizes)


def repair(sparsities: Mapping[str, float], sizes: Mapping[str, int], target: float) -> dict[str, float]:
    """Shift all sparsities alike until their weighted mean is exactly ``target``, within [0, `MAX_SPARSITY`].

    What reaches a bound stays there; the remainder falls on the others.
    """
    check_target(target)
    result = {name: min(max(p, 0.0), MAX_SPARSITY) for name, p in sparsities.items()}
    total = sum(sizes[name] for name in result)
    for _ in range(len(result) + 1):
        missing = target * total - sum(result[name] * sizes[name] for name in result)
        free = [name for name in result if (result[name] < MAX_SPARSITY if missing > 0 else result[name] > 0.0)]
        if not free or abs(missing) <= 1e-12 * total:
            break
        shift = missing / sum(sizes[name] for name in free)
        for name in free:
            result[name] = min(max(result[name] + shift, 0.0), MAX_SPARSITY)
    return result


def interpolate(levels: Sequence[float], damages: Sequence[float]) -> Curve:
    """A measured curve on the grid of `STEP`: damage is a power of the sparsity between two measurements.

    Below the first level the damage falls to 0 like the power law through the first two. Damages are made positive and
    non-decreasing first: at low sparsity a measurement is mostly noise.
    """
    points = []
    highest = 1e-12
    for level, damage in zip(levels, damages, strict=True):
        highest = max(highest, damage)
        points.append((math.log(level), math.log(highest)))
    curve: Curve = [(0.0, 0.0)]
    for i in range(1, round(levels[-1] / STEP) + 1):
        s = min(i * STEP, levels[-1])
        x = math.log(s)
        j = next((k for k in range(1, len(points)) if x <= points[k][0] + 1e-12), len(points) - 1)
        (x0, y0), (x1, y1) = points[j - 1], points[j]
        slope = (y1 - y0) / (x1 - x0)
        if x < x0:
            slope = max(slope, 1.0)
        # Two equal measurements meet within a rounding error: the curve does not fall there either.
        curve.append((s, max(math.exp(y0 + slope * (x - x0)), curve[-1][1])))
    return curve


def convex_hull(curve: Curve) -> Curve:
    """The lower convex hull of a curve."""
    hull: Curve = []
    for point in curve:
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def allocate(curves: Mapping[str, Curve], sizes: Mapping[str, int], target: float) -> dict[str, float]:
    """Sparsity per projection, of least summed damage, whose parameter-weighted mean is exactly ``target``.

    If damages add up this is a separable convex problem: spend the budget on the cheapest slopes (damage per parameter)
    of the curves' convex hulls until it is met. All projections then stop at one slope, the Lagrange multiplier. Curves
    begin at (0, 0) and end at a projection's highest sparsity.
    """
    check_target(target)
    hulls = {name: convex_hull(curve) for name, curve in curves.items()}
    sparsities = dict.fromkeys(curves, 0.0)
    missing = target * sum(sizes.values())
    # The cheapest next segment of every projection; the name breaks ties, so the result does not depend on an order.
    heap = [(_slope(hull[0], hull[1]) / sizes[name], name, 1) for name, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(heap)
    while heap and missing > 0:
        _, name, end = heapq.heappop(heap)
        hull = hulls[name]
        cost = (hull[end][0] - sparsities[name]) * sizes[name]
        if cost >= missing:
            sparsities[name] += missing / sizes[name]
            break
        missing -= cost
        sparsities[name] = hull[end][0]
        if end + 1 < len(hull):
            heapq.heappush(heap, (_slope(hull[end], hull[end + 1]) / sizes[name], name, end + 1))
    return {name: min(s, MAX_SPARSITY) for name, s in sparsities.items()}


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
