"""The block search on synthetic losses, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wisparse.converter.budget import MAX_SPARSITY, STEP, mean_sparsity
from wisparse.converter.search.evolution import Evolution, evolve, mutate


def bowl(best: tuple[float, ...]):
    """A loss with its minimum at ``best``."""
    return lambda candidates, batches: [sum((p - b) ** 2 for p, b in zip(c, best, strict=True)) for c in candidates]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    num_blocks=st.integers(2, 40),
    target=st.floats(0, MAX_SPARSITY),
    size=st.integers(1, 10**8),
    seed=st.integers(0, 10**6),
)
def test_mutants_of_equal_blocks_keep_budget_and_bounds(num_blocks: int, target: float, size: int, seed: int) -> None:
    parent, random = (target,) * num_blocks, generator(seed)
    for _ in range(5):
        parent = mutate(parent, [size] * num_blocks, random)
        assert all(0.0 <= p <= MAX_SPARSITY for p in parent)
        assert mean_sparsity(parent, [size] * num_blocks) == pytest.approx(target, abs=1e-9)


@given(num_blocks=st.integers(2, 40), steps=st.integers(0, 190), seed=st.integers(0, 10**6))
def test_from_the_grid_to_the_grid(num_blocks: int, steps: int, seed: int) -> None:
    parent, random = (steps * STEP,) * num_blocks, generator(seed)
    for _ in range(5):
        parent = mutate(parent, [7] * num_blocks, random)
        assert all(abs(p / STEP - round(p / STEP)) < 1e-6 for p in parent)


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=2, max_size=20), target=st.floats(0, 0.95), seed=st.integers(0, 99)
)
def test_mutants_of_unequal_blocks_keep_the_budget(sizes: list[int], target: float, seed: int) -> None:
    child = mutate((target,) * len(sizes), sizes, generator(seed))
    assert all(0.0 <= p <= MAX_SPARSITY for p in child)
    assert mean_sparsity(child, sizes) == pytest.approx(target, abs=1e-9)


def test_a_mutation_is_local() -> None:
    child = mutate((0.5,) * 32, [1] * 32, generator(0))
    moved = [p for p in child if p != 0.5]
    assert 0 < len(moved) <= 6  # three blocks up, three down


def test_finds_the_minimum_of_a_bowl() -> None:
    best = (0.3, 0.4, 0.5, 0.6, 0.7)
    found = evolve(bowl(best), [1] * 5, 0.5, generator(1), num_generations=150, num_offspring=16)
    assert found.parent == pytest.approx(best, abs=2 * STEP)
    assert mean_sparsity(found.parent, [1] * 5) == pytest.approx(0.5, abs=1e-9)


def test_never_gets_worse() -> None:
    found = evolve(bowl((0.1, 0.9, 0.5)), [1, 2, 3], 0.5, generator(2), num_generations=30, num_offspring=4)
    assert all(later <= earlier for earlier, later in zip(found.history, found.history[1:], strict=False))
    assert found.loss == found.history[-1]


def test_keeps_the_parent_where_no_offspring_is_better() -> None:
    found = evolve(bowl((0.5,) * 4), [1] * 4, 0.5, generator(3), num_generations=5, num_offspring=8)
    assert found.parent == (0.5,) * 4


def test_one_seed_one_result() -> None:
    runs = [evolve(bowl((0.2, 0.8)), [3, 5], 0.5, generator(4), num_generations=10, num_offspring=4) for _ in range(2)]
    assert runs[0] == runs[1]


def test_goes_on_from_a_saved_state() -> None:
    def run(generations: int, random: torch.Generator, start: Evolution | None = None) -> Evolution:
        return evolve(
            bowl((0.2, 0.5, 0.8)), [1, 1, 1], 0.5, random, num_generations=generations, num_offspring=4, start=start
        )

    whole = run(12, generator(5))
    random = generator(5)
    half = run(5, random)
    other = torch.Generator()
    other.set_state(random.get_state())
    assert run(12, other, half) == whole


def test_stages_thin_the_offspring_out() -> None:
    calls: list[int | None] = []

    def losses(candidates: Sequence[tuple[float, ...]], batches: int | None) -> list[float]:
        calls.extend([batches] * len(candidates))
        return bowl((0.2, 0.8, 0.3, 0.7))(candidates, batches)

    found = evolve(
        losses, [1] * 4, 0.5, generator(6), num_generations=1, num_offspring=32, stages=((4, 1), (2, 2), (1, None))
    )
    assert calls[0] is None  # the start
    assert (calls.count(2), calls.count(None)) == (4, 1 + 2)
    assert found.num_evaluations == len(calls)


def test_a_mutant_of_one_parent_is_scored_once() -> None:
    scored: list[tuple[float, ...]] = []

    def losses(candidates: Sequence[tuple[float, ...]], batches: int | None) -> list[float]:
        scored.extend(candidates)
        return bowl((0.5,) * 4)(candidates, batches)

    found = evolve(losses, [1] * 4, 0.5, generator(7), num_generations=40, num_offspring=8)
    assert len(scored) == len(set(scored)) == found.num_evaluations == 1 + 4 * 3  # one block up, another one down


def test_what_was_tried_is_forgotten_with_the_parent() -> None:
    found = evolve(bowl((0.2, 0.8)), [1, 1], 0.5, generator(8), num_generations=1, num_offspring=8)
    assert found.parent != (0.5, 0.5)
    assert found.tried == ()
