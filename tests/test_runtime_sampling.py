"""Sampling: filters against transformers' own, random numbers that depend on seed and position alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wisparse.runtime.decoding.sampling import SamplingParams, sample, uniform


def random_logits(vocab_size: int, seed: int, rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def their_probabilities(logits: Tensor, settings: SamplingParams) -> Tensor:
    """Transformers' filters in its order; (V,) float64."""
    from transformers.generation import logits_process as theirs

    filters = theirs.LogitsProcessorList([theirs.TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        filters.append(theirs.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        filters.append(theirs.TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        filters.append(theirs.MinPLogitsWarper(settings.min_p))
    return filters(torch.zeros(1, 1, dtype=torch.int64), logits.double()).softmax(-1)[0]


def test_greedy_and_extreme_logits() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 1.0]])
    assert sample(logits, [SamplingParams()] * 2, [0, 0]).tolist() == [1, 0]
    # Extreme logits.
    settings = SamplingParams(1e-4, seed=1)
    assert int(sample(torch.tensor([[3e38, -3e38, 0.0]]), [settings], [0])[0]) == 0
    masked = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    assert int(sample(masked, [SamplingParams(1.0, 2, 0.9, 0.1, 5)], [0])[0]) == 1
    for broken in ([1.0, float("nan")], [1.0, float("inf")], [-torch.inf, -torch.inf]):
        for each in (SamplingParams(), SamplingParams(1.0, seed=0)):
            assert int(sample(torch.tensor([broken]), [each], [0])[0]) == -1


@given(
    temperature=st.floats(0.3, 3), top_k=st.sampled_from([0, 1, 5, 40, 300]), seed=st.integers(0, 2**62),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]), min_p=st.sampled_from([0.0, 0.02, 0.3]),
)  # fmt: skip
def test_filters_are_transformers(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    settings = SamplingParams(temperature, top_k, top_p, min_p, seed)
    logits = random_logits(200, seed % 1000)
    probabilities = their_probabilities(logits, settings)
    position = seed % 7
    drawn = int(sample(logits, [settings], [position])[0])
    assert probabilities[drawn] > 0
    # The definition, from their probabilities: the first id whose cumulative sum exceeds the random number.
    sums = probabilities.cumsum(0)
    number = uniform(seed, position)
    assert sums[drawn] > number - 1e-9
    assert drawn == 0 or sums[drawn - 1] <= number + 1e-9


@pytest.mark.parametrize(("top_p", "last"), [(0.5, 0), (0.50001, 1), (0.75, 1), (0.75001, 3)])
def test_the_nucleus_ends_with_the_token_that_reaches_top_p(top_p: float, last: int) -> None:
    # Weights of exactly 1, 1/2, 1/4 and 1/4; of equals all stay.
    logits = torch.tensor([[0.0, -1.0, -2.0, -2.0]])
    settings = [SamplingParams(1 / math.log(2), top_p=top_p, seed=seed) for seed in range(200)]
    drawn = sample(logits.expand(200, -1), settings, [0] * 200)
    assert drawn.unique().tolist() == list(range(last + 1))


def test_a_large_vocabulary_needs_the_full_sort_and_gets_it() -> None:
    # Nearly flat: the first 1024 tokens hold far less than top_p.
    logits = random_logits(5000, 1) * 0.01
    settings = [SamplingParams(1.0, top_p=0.9, seed=seed) for seed in range(200)]
    kept = their_probabilities(logits, settings[0]) > 0
    drawn = sample(logits.expand(200, -1), settings, [0] * 200)
    assert bool(kept[drawn].all())
    assert 1024 < int(kept.sum()) < 5000


def test_random_numbers_are_uniform_and_independent() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(64)] for seed in range(64)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(numbers.var() - 1 / 12) < 0.01
    for axis in (numbers, numbers.T):
        assert abs(torch.corrcoef(axis)[0, 1:].mean()) < 0.05
    assert numbers.unique().numel() > 4000
    # Written down: another implementation, on a device, has to give the same numbers.
    assert (uniform(0, 0), uniform(42, 1000)) == (0.6524484753608704, 11664524 * 2.0**-24)
