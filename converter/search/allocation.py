"""Allocation of a target sparsity to projections or blocks: by predicted damage, greedily, by evolution; alpha search."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from wisparse.formats.manifest import MAX_SPARSITY

# The step of a mutation in the block search, and of the quantile tables' grid (the paper's epsilon).
STEP = 0.005

ALPHAS: tuple[float, ...] = tuple(round(0.05 * i, 2) for i in range(31))

# (sparsity, damage) points, sparsities ascending.
Curve = list[tuple[float, float]]
# One sparsity per block.
Candidate = tuple[float, ...]


def mean_sparsity(sparsities: Sequence[float], sizes: Sequence[int]) -> float:
    return sum(p * size for p, size in zip(sparsities, sizes, strict=True)) / sum(sizes)


def repair(sparsities: Mapping[str, float], sizes: Mapping[str, int], target: float) -> dict[str, float]:
    """Add one constant to all sparsities so that their weighted mean is exactly ``target``, clamped to
    [0, `MAX_SPARSITY`]; what clamping takes away is distributed over the others."""
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
    """Interpolate measured damages to the grid of `STEP`, by a power law between two levels; below the first level the
    power law of the first two levels is extrapolated. Damages are made positive and non-decreasing first: at low
    sparsity a measurement is mostly noise."""
    rising = accumulate((max(1e-12, damage) for damage in damages), max)
    points = [(math.log(level), math.log(damage)) for level, damage in zip(levels, rising, strict=True)]
    curve: Curve = [(0.0, 0.0)]
    for i in range(1, round(levels[-1] / STEP) + 1):
        s = min(i * STEP, levels[-1])
        x = math.log(s)
        j = next((k for k in range(1, len(points)) if x <= points[k][0] + 1e-12), len(points) - 1)
        (x0, y0), (x1, y1) = points[j - 1], points[j]
        slope = (y1 - y0) / (x1 - x0)
        if x < x0:
            slope = max(slope, 1.0)
        # Between two equal measurements rounding could make the curve fall.
        curve.append((s, max(math.exp(y0 + slope * (x - x0)), curve[-1][1])))
    return curve


def convex_hull(curve: Curve) -> Curve:
    hull: Curve = []
    for point in curve:
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def allocate(curves: Mapping[str, Curve], sizes: Mapping[str, int], target: float) -> dict[str, float]:
    """Sparsity per projection that minimizes the sum of damages, with a parameter-weighted mean of exactly ``target``.
    With additive damages this is a separable convex problem: take segments of the curves' convex hulls in order of
    slope (damage per parameter) until the target is met. The last slope is the Lagrange multiplier. Curves begin at
    (0, 0) and end at a projection's highest sparsity."""
    hulls = {name: convex_hull(curve) for name, curve in curves.items()}
    sparsities = dict.fromkeys(curves, 0.0)
    missing = target * sum(sizes.values())
    # (slope, name, end point) of each projection's next segment; the name makes the order of equal slopes definite.
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


def search_alpha(loss: Callable[[Mapping[str, float]], float], names: Sequence[str]) -> dict[str, float]:
    """Alphas that minimize ``loss``, the block's error for an alpha per projection: first the best common alpha, then
    one coordinate sweep over the projections in the order of ``names``."""
    least, common = min((loss(dict.fromkeys(names, alpha)), alpha) for alpha in ALPHAS)
    best = dict.fromkeys(names, common)
    for name in names:
        error, alpha = min((loss({**best, name: alpha}), alpha) for alpha in ALPHAS if alpha != best[name])
        if error < least:
            least, best = error, {**best, name: alpha}
    return best


def allocate_greedily(
    loss: Callable[[Mapping[str, float]], float], sizes: Mapping[str, int], target: float, *, step: float = 0.01
) -> dict[str, float]:
    """Sparsity per projection with a parameter-weighted mean of ``target``. Every step adds ``step`` to the block's
    sparsity, at the projection where that raises ``loss``, the block's error for sparsities by name, least."""
    total = sum(sizes.values())
    sparsities = dict.fromkeys(sizes, 0.0)
    spent = 0.0
    while target * total - spent > 1e-9 * total:
        amount = min(step * total, target * total - spent)
        # A raise is clamped at the bound; the next step makes up for the rest.
        free = [name for name in sizes if sparsities[name] < MAX_SPARSITY]
        raised = {name: min(sparsities[name] + amount / sizes[name], MAX_SPARSITY) for name in free}
        if not raised:
            break
        best = min(raised, key=lambda name: loss({**sparsities, name: raised[name]}))
        spent += (raised[best] - sparsities[best]) * sizes[best]
        sparsities[best] = raised[best]
    return sparsities


def mutate(parent: Candidate, sizes: Sequence[int], generator: torch.Generator) -> Candidate:
    """One offspring: raise a tenth of the blocks by `STEP`, then lower others until the weighted mean is the parent's,
    within [0, `MAX_SPARSITY`]. If blocks differ in size the last step down is a partial one."""

    def choose(free: list[int]) -> int:
        return free[int(torch.randint(len(free), (), generator=generator))]

    # In units of `STEP`, integers if sizes are equal: rounding errors do not accumulate over mutations.
    moves = [0.0] * len(parent)
    for _ in range(max(1, len(parent) // 10)):
        free = [i for i, p in enumerate(parent) if p + (moves[i] + 1) * STEP <= MAX_SPARSITY + 1e-12]
        if not free:
            break
        moves[choose(free)] += 1
    excess = sum(move * size for move, size in zip(moves, sizes, strict=True))
    while excess > 1e-9:
        chosen = choose([i for i, p in enumerate(parent) if p + moves[i] * STEP > 1e-12])
        down = min(1.0, excess / sizes[chosen], (parent[chosen] + moves[chosen] * STEP) / STEP)
        moves[chosen] -= down
        excess -= down * sizes[chosen]
    return tuple(min(max(p + move * STEP, 0.0), MAX_SPARSITY) for p, move in zip(parent, moves, strict=True))


def evolve(
    losses: Callable[[Sequence[Candidate]], list[float]],
    sizes: Sequence[int],
    target: float,
    generator: torch.Generator,
    *,
    num_generations: int,
    num_offspring: int,
    on_generation: Callable[[float], None] = lambda loss: None,
) -> tuple[Candidate, list[float]]:
    """The paper's coarse search for block sparsities with a weighted mean of ``target``. Returns the best candidate, and
    the best loss at the start and after every generation."""
    parent: Candidate = (target,) * len(sizes)
    [loss] = losses([parent])
    history = [loss]
    known = {parent: loss}  # losses of the parent and its offspring, each scored once
    for _ in range(num_generations):
        pool = list(dict.fromkeys(mutate(parent, sizes, generator) for _ in range(num_offspring)))
        fresh = [candidate for candidate in pool if candidate not in known]
        known |= zip(fresh, losses(fresh) if fresh else (), strict=True)
        best = min(pool, key=known.__getitem__)
        if known[best] < loss:
            parent, loss = best, known[best]
            known = {parent: loss}
        history.append(loss)
        on_generation(loss)
    return parent, history
