"""Block sparsities by evolution: the paper's coarse search, with its constraint met exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .allocation import MAX_SPARSITY, STEP, check_target

Candidate = tuple[float, ...]

# Of the blocks, raised by one mutation.
_FRACTION = 0.1


@dataclass(frozen=True)
class Evolution:
    """The best candidate, its loss, and the parent's loss after every generation."""

    parent: Candidate
    loss: float
    history: tuple[float, ...]
    num_evaluations: int


def mutate(parent: Candidate, sizes: Sequence[int], generator: torch.Generator) -> Candidate:
    """One offspring: a tenth of the blocks up by `STEP`, others down until the weighted mean is the parent's again.

    A block that would pass 0 or `MAX_SPARSITY` is not chosen. Where blocks differ in size the last step down is a
    partial one.
    """

    def choose(free: list[int]) -> int:
        return free[int(torch.randint(len(free), (), generator=generator))]

    # Counted in steps, integers where sizes allow, so that a thousand mutations add up to no rounding error.
    moves = [0.0] * len(parent)
    for _ in range(max(1, int(len(parent) * _FRACTION))):
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
    losses: Callable[[Sequence[Candidate], int | None], list[float]],
    sizes: Sequence[int],
    target: float,
    generator: torch.Generator,
    *,
    num_generations: int,
    num_offspring: int,
    stages: Sequence[tuple[int, int | None]] = ((1, None),),
    on_generation: Callable[[float], None] = lambda loss: None,
) -> Evolution:
    """Search block sparsities of least loss whose weighted mean is ``target``.

    Args:
        losses: of candidates, over so many micro-batches of tokens (None: all of them).
    """
    check_target(target)
    parent: Candidate = (target,) * len(sizes)
    [loss] = losses([parent], None)
    history, num_evaluations = [loss], 1
    # Losses of this parent's mutants, by micro-batches: equal ones are scored once.
    known: dict[tuple[int | None, Candidate], float] = {(None, parent): loss}
    for _ in range(num_generations):
        pool = list(dict.fromkeys(mutate(parent, sizes, generator) for _ in range(num_offspring)))
        for survivors, batches in stages:
            fresh = [candidate for candidate in pool if (batches, candidate) not in known]
            if fresh:
                known |= zip([(batches, candidate) for candidate in fresh], losses(fresh, batches), strict=True)
                num_evaluations += len(fresh)
            scored = sorted((known[batches, candidate], index) for index, candidate in enumerate(pool))
            best_loss, best = scored[0][0], pool[scored[0][1]]
            pool = [pool[index] for _, index in scored[:survivors]]
        if best_loss < loss:
            parent, loss = best, best_loss
            known = {(None, parent): loss}
        history.append(loss)
        on_generation(loss)
    return Evolution(parent, loss, tuple(history), num_evaluations)
