"""What searches are made of, without a model: budgets, allocation, alpha, greedy, evolution, bisection; column norms, scales
and quantiles."""

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wisparse.converter import statistics
from wisparse.converter.measurement import LOWEST, highest
from wisparse.converter.search import allocation
from wisparse.converter.search.allocation import MAX_SPARSITY, STEP, allocate, evolve, mean_sparsity, mutate
from wisparse.converter.search.search import DAMAGE_LEVELS
from wisparse.converter.statistics import Scores, Window, channel_scale, score_quantiles, weight_norm
from wisparse.kernels.reference import keep_mask, scores

sizes_and_sparsities = st.lists(st.tuples(st.integers(1, 10**8), st.floats(-0.5, 1.5)), min_size=1, max_size=20)


def assert_budget(found: Sequence[float], sizes: Sequence[int], target: float) -> None:
    assert all(0.0 <= p <= MAX_SPARSITY for p in found)
    assert mean_sparsity(found, sizes) == pytest.approx(target, abs=1e-8)


@given(entries=sizes_and_sparsities, target=st.floats(0, MAX_SPARSITY))
def test_repair_meets_the_budget_within_bounds(entries: list[tuple[int, float]], target: float) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(entries)}
    repaired = allocation.repair({str(i): p for i, (_, p) in enumerate(entries)}, sizes, target)
    assert_budget(list(repaired.values()), list(sizes.values()), target)


damages = st.lists(st.floats(-1e-3, 10), min_size=len(DAMAGE_LEVELS), max_size=len(DAMAGE_LEVELS))


@given(rows=st.lists(st.tuples(st.integers(1, 10**8), damages), min_size=1, max_size=12), target=st.floats(0, 0.95))
def test_allocation_meets_the_budget(rows: list[tuple[int, list[float]]], target: float) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(rows)}
    curves = {str(i): allocation.interpolate(DAMAGE_LEVELS, row) for i, (_, row) in enumerate(rows)}
    found = allocate(curves, sizes, target)
    assert_budget([found[n] for n in sizes], list(sizes.values()), target)


def test_allocation_is_the_best_on_the_grid() -> None:
    curves = {
        "a": [(i / 20, (i / 20) ** 2) for i in range(20)],
        "b": [(i / 20, 4 * (i / 20) ** 2) for i in range(20)],
        "c": [(i / 20, 3 * (i / 20) ** 4) for i in range(20)],
    }
    sizes = {"a": 1, "b": 2, "c": 1}
    found = allocate(curves, sizes, 0.5)

    def damage(p: dict[str, float]) -> float:
        total = 0.0
        for name, s in p.items():
            i = min(int(s * 20 + 1e-9), 18)
            (x0, y0), (x1, y1) = curves[name][i : i + 2]
            total += y0 + (y1 - y0) * (s - x0) / (x1 - x0)
        return total

    grid = itertools.product([i / 20 for i in range(20)], repeat=3)
    best = min(damage({"a": a, "b": b, "c": c}) for a, b, c in grid if a + 2 * b + c >= 4 * 0.5 - 1e-9)
    assert damage(found) <= best + 1e-9
    # The order of the projections does not matter.
    curves = {n: [(0.0, 0.0), (0.5, 1.0), (0.95, 3.0)] for n in "abc"}
    sizes = dict.fromkeys("abc", 7)
    backwards = allocate(dict(reversed(curves.items())), sizes, 0.3)
    assert allocate(curves, sizes, 0.3) == {n: backwards[n] for n in "abc"}


def test_alpha_of_a_block() -> None:
    calls: list[dict[str, float]] = []

    def loss(alphas: Mapping[str, float]) -> float:
        calls.append(dict(alphas))
        return (alphas["q"] - 0.2) ** 2 + (alphas["k"] - 0.6) ** 2

    assert allocation.search_alpha(loss, ["q", "k"]) == {"q": 0.2, "k": 0.6}
    assert calls[:31] == [{"q": alpha, "k": alpha} for alpha in allocation.ALPHAS]
    swept_q = [call for call in calls[31:] if call["k"] == 0.4]
    assert {call["q"] for call in swept_q} == {*allocation.ALPHAS} - {0.4}
    assert all(call["q"] == 0.2 for call in calls[31 + len(swept_q) :])
    # A tie goes to the smaller alpha.
    assert allocation.search_alpha(lambda a: 1.0, ["q", "k"]) == {"q": 0.0, "k": 0.0}


@given(
    entries=st.lists(st.tuples(st.integers(1, 10**7), st.floats(0.01, 100)), min_size=1, max_size=8),
    target=st.floats(0, MAX_SPARSITY),
    step=st.sampled_from([0.01, 0.05, 0.3]),
)
def test_greedy_meets_the_budget(entries: list[tuple[int, float]], target: float, step: float) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(entries)}
    weights = {str(i): weight for i, (_, weight) in enumerate(entries)}
    found = allocation.allocate_greedily(lambda p: sum(weights[n] * p[n] ** 2 for n in p), sizes, target, step=step)
    assert_budget(list(found.values()), list(sizes.values()), target)


@pytest.mark.parametrize(("target", "small", "large"), [(0.05, 0.5, 0.0), (0.5, MAX_SPARSITY, (50 - 9.5) / 90)])
def test_a_step_is_of_equal_parameters_and_ends_at_the_cap(target: float, small: float, large: float) -> None:
    # The small projection is free of charge: it takes every step until the cap.
    found = allocation.allocate_greedily(lambda p: p["large"], {"small": 10, "large": 90}, target, step=0.05)
    assert found == {"small": pytest.approx(small), "large": pytest.approx(large)}


def bowl(best: tuple[float, ...]):
    return lambda candidates: [sum((p - b) ** 2 for p, b in zip(c, best, strict=True)) for c in candidates]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=2, max_size=20), target=st.floats(0, 0.95), seed=st.integers(0, 99)
)
def test_mutants_of_unequal_blocks_keep_the_budget(sizes: list[int], target: float, seed: int) -> None:
    child = mutate((target,) * len(sizes), sizes, generator(seed))
    assert_budget(child, sizes, target)


def test_a_mutation_is_local_and_from_the_grid_to_the_grid() -> None:
    child = mutate((0.5,) * 32, [1] * 32, generator(0))
    moved = [p for p in child if p != 0.5]
    assert 0 < len(moved) <= 6  # three blocks up, three down
    for _ in range(200):
        child = mutate(child, [7] * 32, generator(1))
        assert all(abs(p / STEP - round(p / STEP)) < 1e-6 for p in child)


@pytest.mark.parametrize(
    ("best", "sizes", "generations"),
    [((0.3, 0.4, 0.5, 0.6, 0.7), [1] * 5, 150), ((0.1, 0.9, 0.5), [1, 2, 3], 30), ((0.5,) * 4, [1] * 4, 5)],
)
def test_evolution_only_gets_better(best: tuple[float, ...], sizes: list[int], generations: int) -> None:
    how = {"num_generations": generations, "num_offspring": 16}
    runs = [evolve(bowl(best), sizes, 0.5, generator(1), **how) for _ in range(2)]
    assert runs[0] == runs[1]
    parent, history = runs[0]
    assert mean_sparsity(parent, sizes) == pytest.approx(0.5, abs=1e-9)
    assert all(later <= earlier for earlier, later in itertools.pairwise(history))
    assert bowl(best)([parent]) == [history[-1]]
    if len(set(sizes)) == 1:  # the least is within the budget
        assert parent == pytest.approx(best, abs=2 * STEP)


@given(st.floats(1.0, 8.0), st.floats(1e-6, 1e3), st.floats(0.0, 0.3))
def test_a_budget_is_spent_and_soon(power: float, factor: float, bump: float) -> None:
    asked = []

    def loss(sparsity: float) -> float:
        asked.append(sparsity)
        return factor * sparsity**power * (1 + bump * math.sin(40 * sparsity) / 40)

    found = highest(loss)
    assert len(asked) == len(set(asked)) <= 15
    assert all(LOWEST <= sparsity <= 0.95 for sparsity in asked)
    if found is None:
        assert loss(LOWEST) > 1.0
        return
    assert loss(found) <= 1.0
    assert found == 0.95 or loss(found) >= 0.98 or loss(round(found + 0.001, 4)) > 1.0


def test_a_budget_that_everything_or_nothing_keeps() -> None:
    assert (highest(lambda _: 0.0), highest(lambda _: math.inf)) == (0.95, None)


def dropped(scores: torch.Tensor, threshold: float) -> float:
    return float((scores < threshold).double().mean())


def test_norms_and_scales() -> None:
    norm = weight_norm(torch.tensor([[3.0, 0.0], [4.0, 2.0]], dtype=torch.bfloat16))
    assert (norm.dtype, norm.tolist()) == (torch.float32, [5.0, 2.0])
    # Channel scale has geometric mean one.
    norm = torch.rand(100) + 0.01
    assert float(channel_scale(norm, 0.7).log().mean()) == pytest.approx(0, abs=1e-6)
    assert torch.equal(channel_scale(norm, 0.0), torch.ones(100))
    torch.testing.assert_close(channel_scale(5000 * norm, 1.3), channel_scale(norm, 1.3))
    # A zero column is safe.
    scale = channel_scale(torch.tensor([0.0, 2.0, 8.0]), 1.0)
    assert scale.tolist() == pytest.approx([1e-4, 0.5, 2.0])
    assert torch.isfinite(channel_scale(torch.zeros(4), 1.5)).all()


@pytest.mark.parametrize("limit", [0, 1 << 24], ids=["windows", "sorting"])
@given(
    values=st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=60),
    sparsities=st.lists(st.floats(0, 0.95), min_size=1, max_size=8),
)
def test_quantiles_come_as_close_as_the_values_allow(limit: int, values: list[float], sparsities: list[float]) -> None:
    scores = torch.tensor(values, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_SORT_LIMIT", limit)
        patch.setattr(statistics, "_CHUNK", 7)
        patch.setattr(statistics, "_SAMPLE", 3)  # too few to tell where a rank is
        thresholds = score_quantiles(Scores(scores[:, None], torch.ones(1)), sparsities)
    possible = [dropped(scores, t) for t in [0.0, *values, *(torch.nextafter(scores, scores + 1).tolist())]]
    for sparsity, threshold in zip(sparsities, thresholds, strict=True):
        off = abs(dropped(scores, threshold) - sparsity)
        assert off <= min(abs(p - sparsity) for p in possible) + 1e-9
        assert torch.tensor(threshold, dtype=torch.float32).item() == threshold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_what_is_dropped_are_the_masks(dtype: torch.dtype) -> None:
    x, scale = torch.randn(40, 12).to(dtype), torch.rand(12) + 0.5
    x[0, 0] = torch.nan  # kept, so that a broken activation shows
    found = Scores(x, scale)
    assert torch.equal(next(iter(found)).nan_to_num(-1.0), scores(x, scale).nan_to_num(-1.0))
    for threshold in (0.0, 0.5, float(scores(x, scale)[3, 4])):
        assert Window(found, 0, found.total - 1).dropped(threshold) == int((~keep_mask(x, scale, threshold)).sum())
