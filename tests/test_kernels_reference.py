"""The mask's definition: what is kept, what is dropped, and what happens at the edges."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from wisparse.kernels.reference import keep_mask, scores, sparse_linear

_sizes = st.integers(1, 40)


@given(k=_sizes, n=_sizes, quantile=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_equals_a_product_over_the_kept_channels(k: int, n: int, quantile: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((k,), (n, k)))
    bias = torch.randn(n, generator=generator, dtype=torch.float64)
    scale = torch.rand(k, generator=generator) + 0.1
    threshold = torch.quantile(scores(x, scale), quantile)
    kept = [i for i in range(k) if abs(x[i].float()) * scale[i] >= threshold]
    expected = bias + sum((x[i] * weight[:, i] for i in kept), torch.zeros(n, dtype=torch.float64))
    torch.testing.assert_close(sparse_linear(x, weight, bias, scale, threshold), expected)


def test_edges_of_the_mask() -> None:
    for x, threshold, kept in (
        ([2.0, -2.0, 1.9], 2.0, [True, True, False]),  # equality keeps
        ([0.0, 0.0], 0.0, [True, True]),
        ([math.nan, 0.1], 1.0, [True, False]),  # NaN is kept
    ):
        assert keep_mask(torch.tensor(x), torch.ones(len(x)), threshold).tolist() == kept
    # inf * 0 is NaN, and a NaN score is kept: the output must say so rather than look plausible.
    y = sparse_linear(torch.tensor([math.inf, 1.0]), torch.ones(2, 2), None, torch.tensor([0.0, 1.0]), 0.5)
    assert not torch.isfinite(y).all()
