"""Sparsities within one block, greedily: the paper's fine search.

From the dense block, every step gives the same number of parameters' worth of sparsity to the projection that raises
the block's error least: ``step`` of the block, hence ``step * block / size`` of a projection. The last step is a
partial one, so that the block's budget is met exactly.
Sources: the paper's Algorithm 3; TEAL (arXiv:2408.14690), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..budget import MAX_SPARSITY, check_target

__all__ = ["allocate_greedily"]


def allocate_greedily(
    loss: Callable[[Mapping[str, float]], float],
    sizes: Mapping[str, int],
    target: float,
    *,
    step: float = 0.01,
) -> dict[str, float]:
    """Sparsity per projection whose parameter-weighted mean is ``target``.

    Args:
        loss: the block's error at given sparsities; called with every projection present.
        sizes: parameters per projection.
        target: the block's sparsity, at most `MAX_SPARSITY`.
        step: sparsity of the whole block that one step adds.
    """
    check_target(target)
    total = sum(sizes.values())
    sparsities = dict.fromkeys(sizes, 0.0)
    spent = 0.0
    while target * total - spent > 1e-9 * total:
        amount = min(step * total, target * total - spent)
        best: tuple[float, str, float] | None = None
        for name, size in sizes.items():
            if sparsities[name] >= MAX_SPARSITY:
                continue
            # What does not fit under the bound is left for the next step.
            raised = min(sparsities[name] + amount / size, MAX_SPARSITY)
            error = loss({**sparsities, name: raised})
            if best is None or error < best[0]:
                best = (error, name, raised)
        if best is None:
            break
        _, name, raised = best
        spent += (raised - sparsities[name]) * sizes[name]
        sparsities[name] = raised
    return sparsities
