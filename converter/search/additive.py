"""Sparsities from a table: the KL of each projection alone at a few sparsities, then an allocation in closed form.

If the projections' damages add up, minimising their sum under the budget is a separable convex problem: interpolate
each projection's damage, take its lower convex hull, and spend the budget on the cheapest slopes (damage per parameter)
until it is met exactly. All projections then stop at one common slope, the Lagrange multiplier.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from ..budget import MAX_SPARSITY, STEP, check_target

# Sparsities at which each projection is probed.
LEVELS: tuple[float, ...] = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.95)

Curve = list[tuple[float, float]]


def interpolate(levels: Sequence[float], damages: Sequence[float]) -> Curve:
    """A measured curve on the fine grid of `STEP`: damage is a power of the sparsity between two measurements.

    Below the first level the damage falls to 0 like the power law through the first two. Damages are made positive and
    non-decreasing first: at low sparsity a measurement is mostly noise.
    """
    floor = 1e-12
    points = []
    highest = floor
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
        # Two measurements of one size meet within a rounding error: the curve does not fall there either.
        curve.append((s, max(math.exp(y0 + slope * (x - x0)), curve[-1][1])))
    return curve


def convex_hull(curve: Curve) -> Curve:
    """The lower convex hull of a curve of (sparsity, damage) points, sparsities ascending."""
    hull: Curve = []
    for point in curve:
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def allocate(curves: Mapping[str, Curve], sizes: Mapping[str, int], target: float) -> dict[str, float]:
    """Sparsity per projection, of least summed damage, whose parameter-weighted mean is exactly ``target``.

    Args:
        curves: per projection (sparsity, damage) points from (0, 0) on; the last sparsity is its bound.
        sizes: parameters per projection.
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
