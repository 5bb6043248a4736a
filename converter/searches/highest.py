"""The highest sparsity that a budget allows, from few measurements: each costs a search."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..budget import MAX_SPARSITY

__all__ = ["LOWEST", "highest"]

# Below this a mask saves less than it costs to tell what to leave out.
LOWEST = 0.05

# What is lost grows about like this power of the sparsity (docs/choosing.md), until two measurements say more.
_POWER, _GUESS = 3.5, 0.4
_SMALLEST, _LARGEST = 1e-6, 1e6
_PATIENCE = 5

# Sparsities are a tenth of a point apart, where what is lost differs by about a percent; and whoever has spent this
# much of what is allowed need not look for the rest: a text of thousands of tokens tells no finer.
_GRID, _ENOUGH = 0.001, 0.98


def highest(loss: Callable[[float], float]) -> float | None:
    """A sparsity whose loss is within the limit, 1, and at most 2% below it, or that of the next one on the grid.

    Args:
        loss: of a sparsity; asked for each at most once. It is taken to rise with the sparsity: where it does not, the
            outcome is one of the sparsities at which it crosses the limit.

    Returns:
        None if not even `LOWEST` is within the limit.
    """
    first, last = round(LOWEST / _GRID), round(MAX_SPARSITY / _GRID)
    known: dict[int, float] = {}
    place = round(_GUESS / _GRID)
    while True:
        known[place] = min(max(loss(_sparsity(place)), _SMALLEST), _LARGEST)
        if _ENOUGH <= known[place] <= 1.0:
            return _sparsity(place)
        breaks = min((i for i, part in known.items() if part > 1.0), default=None)
        keeps = max((i for i in known if known[i] <= 1.0 and (breaks is None or i < breaks)), default=None)
        low = first if keeps is None else keeps + 1
        high = last if breaks is None else breaks - 1
        if low > high:
            return None if keeps is None else _sparsity(keeps)
        guess = (low + high) // 2 if len(known) > _PATIENCE else _crossing(known)
        place = min(max(guess, low), high)


def _crossing(known: dict[int, float]) -> int:
    """Where a power law through the two measurements nearest to the limit is midway in what is enough."""
    nearest = sorted(known, key=lambda i: abs(math.log(known[i])))[:2]
    at, power = nearest[0], _POWER
    if len(nearest) > 1:
        other = nearest[1]
        power = max(1.0, math.log(known[at] / known[other]) / math.log(at / other))
    wanted = (1.0 + _ENOUGH) / 2
    return round(at * math.exp(math.log(wanted / known[at]) / power))


def _sparsity(place: int) -> float:
    return round(place * _GRID, 4)
