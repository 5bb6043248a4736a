"""The arithmetic of budgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisparse.converter.budget import MAX_SPARSITY, check_target, mean_sparsity, repair
from wisparse.formats.errors import UsageError

sizes_and_sparsities = st.lists(st.tuples(st.integers(1, 10**8), st.floats(-0.5, 1.5)), min_size=1, max_size=20)


def test_mean_is_weighted_by_parameters() -> None:
    assert mean_sparsity([0.0, 0.9], [1, 2]) == pytest.approx(0.6)


@pytest.mark.parametrize("target", [-0.01, 0.951, float("nan")])
def test_target_out_of_range_is_refused(target: float) -> None:
    with pytest.raises(UsageError, match="expected a number in"):
        check_target(target)


@given(entries=sizes_and_sparsities, target=st.floats(0, MAX_SPARSITY))
def test_repair_meets_the_budget_within_bounds(entries: list[tuple[int, float]], target: float) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(entries)}
    repaired = repair({str(i): p for i, (_, p) in enumerate(entries)}, sizes, target)
    assert all(0.0 <= p <= MAX_SPARSITY for p in repaired.values())
    assert mean_sparsity(list(repaired.values()), list(sizes.values())) == pytest.approx(target, abs=1e-9)


def test_repair_keeps_what_is_right() -> None:
    assert repair({"a": 0.2, "b": 0.8}, {"a": 5, "b": 5}, 0.5) == {"a": 0.2, "b": 0.8}
