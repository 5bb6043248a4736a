"""Block sparsities by evolution: the paper's coarse search, with its constraint met exactly.

One generation makes ``num_offspring`` mutants of the parent. A mutant raises 10% of the blocks by one step of 0.5% and
lowers randomly chosen blocks until the parameter-weighted mean is the target again. The parent competes with its
offspring (elitist), on the same tokens.

With ``stages`` the offspring are thinned out as in EvoPress: many candidates on few tokens, the survivors on more.
Sources: the paper's Algorithm 2; EvoPress (arXiv:2410.14649), section 3, for the stages and the elitism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..budget import MAX_SPARSITY, STEP, check_target

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


Candidate = tuple[float, ...]

# Of the blocks, raised by one mutation.
_FRACTION = 0.1


@dataclass(frozen=True)
class Evolution:
    """Where the search stands after ``generation`` generations: enough to go on from, together with the generator.

    Attributes:
        tried: mutants of this parent with their losses, by micro-batches: once the parent stands still, few are new.
    """

    parent: Candidate
    loss: float
    generation: int
    history: tuple[float, ...]
    num_evaluations: int
    tried: tuple[tuple[int | None, Candidate, float], ...] = ()


def mutate(parent: Candidate, sizes: Sequence[int], generator: torch.Generator) -> Candidate:
    """One offspring: a tenth of the blocks up by `STEP`, others down until the weighted mean is the parent's again.

    A block that would pass 0 or `MAX_SPARSITY` is not chosen. Where blocks differ in size the last step down is a
    partial one.
    """
    # Steps are counted as integers where sizes allow, so that a thousand mutations add up to no rounding error.
    moves = [0.0] * len(parent)
    for _ in range(max(1, int(len(parent) * _FRACTION))):
        free = [i for i, p in enumerate(parent) if p + (moves[i] + 1) * STEP <= MAX_SPARSITY + 1e-12]
        if not free:
            break
        moves[free[_choice(len(free), generator)]] += 1
    excess = sum(move * size for move, size in zip(moves, sizes, strict=True))
    while excess > 1e-9:
        free = [i for i, p in enumerate(parent) if p + moves[i] * STEP > 1e-12]
        chosen = free[_choice(len(free), generator)]
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
    start: Evolution | None = None,
    on_generation: Callable[[Evolution], None] | None = None,
) -> Evolution:
    """Search block sparsities of least loss whose weighted mean is ``target``.

    Args:
        losses: of candidates, over so many micro-batches of tokens (None: all of them).
        sizes: parameters per block.
        stages: (survivors, micro-batches) in turn: every stage scores what the last one left, over its micro-batches,
            and keeps the best. The last stage is over all tokens, so that its best can be compared with the parent.
        start: continue from here; ``generator`` must be in the state it had then.
        on_generation: called after every generation, e.g. to save its argument and the generator's state.
    """
    check_target(target)
    if start is None:
        parent: Candidate = (target,) * len(sizes)
        [first] = losses([parent], None)
        start = Evolution(parent, first, 0, (first,), 1)
    state = start
    while state.generation < num_generations:
        # Equal mutants of one parent are scored once.
        pool = list(dict.fromkeys(mutate(state.parent, sizes, generator) for _ in range(num_offspring)))
        known: dict[tuple[int | None, Candidate], float] = {(None, state.parent): state.loss}
        known |= {(batches, candidate): loss for batches, candidate, loss in state.tried}
        before, scored = len(known), []
        for survivors, batches in stages:
            fresh = [candidate for candidate in pool if (batches, candidate) not in known]
            if fresh:
                known |= zip([(batches, candidate) for candidate in fresh], losses(fresh, batches), strict=True)
            ranked = [(known[batches, candidate], index, candidate) for index, candidate in enumerate(pool)]
            scored = sorted(ranked, key=lambda item: item[:2])
            pool = [candidate for _, _, candidate in scored[:survivors]]
        evaluations = state.num_evaluations + len(known) - before
        best_loss, _, best = scored[0]
        tried: tuple[tuple[int | None, Candidate, float], ...] = ()
        if best_loss >= state.loss:
            best, best_loss = state.parent, state.loss
            tried = tuple((batches, candidate, loss) for (batches, candidate), loss in known.items())
        state = Evolution(best, best_loss, state.generation + 1, (*state.history, best_loss), evaluations, tried)
        if on_generation is not None:
            on_generation(state)
    return state


def _choice(n: int, generator: torch.Generator) -> int:
    return int(torch.randint(n, (), generator=generator))
