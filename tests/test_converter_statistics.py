"""Column norms, scales, quantiles and the capture of a block's inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wisparse.converter import statistics
from wisparse.converter.statistics import Scores, Window, channel_scale, score_quantiles, weight_norm
from wisparse.kernels.reference import keep_mask, scores


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
