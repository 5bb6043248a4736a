"""The exponent of the weight norm, per projection, by grid search on the block's output error.

The paper's Algorithm 1 sweeps one alpha for the whole block, its text and figure want one per projection. Both: a tied
sweep over the block first, then one coordinate sweep per projection around what is best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

__all__ = ["GRID", "search_alpha"]

GRID: tuple[float, ...] = tuple(round(0.05 * i, 2) for i in range(31))


def search_alpha(
    loss: Callable[[Mapping[str, float]], float],
    names: Sequence[str],
) -> dict[str, float]:
    """Alphas of least ``loss``.

    Args:
        loss: the block's error with the given alpha per projection, thresholds following from the alphas.
        names: the block's projections, in order of execution: the order of the coordinate sweeps.
    """
    least, tied = min((loss(dict.fromkeys(names, alpha)), alpha) for alpha in GRID)
    best = dict.fromkeys(names, tied)
    for name in names:
        for alpha in GRID:
            if alpha == best[name]:
                continue
            error = loss({**best, name: alpha})
            if error < least:
                least, best = error, {**best, name: alpha}
    return best
