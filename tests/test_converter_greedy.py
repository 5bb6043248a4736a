"""The search within a block on synthetic losses, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisparse.converter.budget import MAX_SPARSITY, mean_sparsity
from wisparse.converter.search.thresholds import allocate_greedily


@given(
    entries=st.lists(st.tuples(st.integers(1, 10**7), st.floats(0.01, 100)), min_size=1, max_size=8),
    target=st.floats(0, MAX_SPARSITY),
    step=st.sampled_from([0.01, 0.05, 0.3]),
)
def test_meets_the_budget_within_bounds(entries: list[tuple[int, float]], target: float, step: float) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(entries)}
    weights = {str(i): weight for i, (_, weight) in enumerate(entries)}
    found = allocate_greedily(lambda p: sum(weights[n] * p[n] ** 2 for n in p), sizes, target, step=step)
    assert all(0.0 <= p <= MAX_SPARSITY for p in found.values())
    assert mean_sparsity(list(found.values()), list(sizes.values())) == pytest.approx(target, abs=1e-8)


def test_spares_the_sensitive_projection() -> None:
    found = allocate_greedily(lambda p: 100 * p["a"] ** 2 + p["b"] ** 2, {"a": 10, "b": 10}, 0.4)
    assert found["a"] < 0.1 < found["b"]


def test_a_step_is_of_equal_parameters() -> None:
    # The small projection is free of charge: it takes every step until the cap.
    found = allocate_greedily(lambda p: p["large"], {"small": 10, "large": 90}, 0.05, step=0.05)
    assert found == {"small": pytest.approx(0.5), "large": 0.0}


def test_no_projection_passes_the_cap() -> None:
    found = allocate_greedily(lambda p: p["large"], {"small": 10, "large": 90}, 0.5)
    assert found["small"] == MAX_SPARSITY
    assert found["large"] == pytest.approx((50 - 9.5) / 90)


def test_zero_target_is_dense() -> None:
    assert allocate_greedily(lambda p: 0.0, {"a": 3}, 0.0) == {"a": 0.0}
