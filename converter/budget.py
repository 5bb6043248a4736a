"""The arithmetic of a sparsity budget: sparsities are averaged with the number of parameters as weight.

A projection of N x K weights at sparsity s does not read s * N * K of them, so the sparsity of a block or of a model is
the mean over its projections weighted by N * K. In scope are the linear layers inside the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import MAX_SPARSITY

# One mutation of the block search, and the grid on which sparsities are told apart (the paper's epsilon).
STEP = 0.005


def check_target(target: float) -> None:
    """Raise `UsageError` unless ``target`` is a sparsity in [0, 0.95]."""
    if not 0.0 <= target <= MAX_SPARSITY:
        raise UsageError(f"sparsity: expected a number in [0, {MAX_SPARSITY}], found {target}")


def mean_sparsity(sparsities: Sequence[float], sizes: Sequence[int]) -> float:
    """The parameter-weighted mean of ``sparsities``."""
    return sum(p * size for p, size in zip(sparsities, sizes, strict=True)) / sum(sizes)


def repair(sparsities: Mapping[str, float], sizes: Mapping[str, int], target: float) -> dict[str, float]:
    """Shift all sparsities alike until their weighted mean is exactly ``target``, within [0, `MAX_SPARSITY`].

    The shift leaves what already sits at a bound where it is; the remainder falls on the others.
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
