"""Final thresholds: in gaps between scores, and from inputs as sparse as at run time, whatever the search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_source import tiny_source, tiny_tokens

from wisparse.converter.masking import MaskedModel
from wisparse.converter.search.search import SearchResult, SearchSettings, search
from wisparse.converter.search.thresholds import Gaps
from wisparse.converter.source import SourceModel
from wisparse.converter.statistics import Scores
from wisparse.kernels import reference

SMALL = {"kl_tokens": 64, "num_generations": 2, "num_offspring": 3, "levels": (0.4, 0.95), "greedy_step": 0.3}
SEARCHES = [
    ("wisparse", "refine"),
    ("wisparse", "fisher"),
    ("wisparse", "additive"),
    ("wisparse", "paper"),
    ("teal", "greedy"),
    ("wina", "uniform"),
]


@pytest.fixture(scope="module", params=SEARCHES, ids=" ".join)
def found(request: pytest.FixtureRequest) -> tuple[SourceModel, SearchResult]:
    method, kind = request.param
    source = tiny_source(num_hidden_layers=2)
    settings = SearchSettings(method=method, search=kind, refine_steps=2, **SMALL)
    return source, search(source, tiny_tokens(8), settings)


def distance(scores: torch.Tensor, threshold: float) -> float:
    """Of the nearest score, relative to the threshold."""
    return float((scores.double() - threshold).abs().min()) / threshold


def test_thresholds_are_from_inputs_as_sparse_as_at_run_time(found: tuple[SourceModel, SearchResult]) -> None:
    """Dense inputs, or one projection more or less sparse, give other thresholds: the counts are exact."""
    source, result = found
    tokens = tiny_tokens(8)
    scores: dict[str, torch.Tensor] = {}

    def keep(name: str, x: torch.Tensor) -> None:
        scores[name] = reference.scores(x[tokens.keep], result.channel_scales[name])

    with MaskedModel(source.projections) as masked:
        thresholds = result.apply_to(masked)
        with masked.observing(keep), masked.masking(thresholds), masked.sparing(~tokens.keep):
            source.model(input_ids=tokens.input_ids)
    for name, entry in result.projections.items():
        dropped = float((scores[name] < entry.threshold).double().mean())
        assert dropped == pytest.approx(entry.realised_sparsity, abs=1e-9), name
        assert dropped == pytest.approx(entry.sparsity, abs=1e-3 + 1 / scores[name].numel()), name
        assert entry.threshold == 0.0 or distance(scores[name], entry.threshold) > 1e-5, name


def test_in_block_0_no_token_of_the_vocabulary_is_on_a_threshold(found: tuple[SourceModel, SearchResult]) -> None:
    """What q, k and v read there depends on the token alone, so a score on the threshold comes again and again."""
    source, result = found
    block = source.blocks[0]
    x = block.input_layernorm(source.model.get_input_embeddings().weight)
    sparse = [result.projections[name] for name in list(result.projections)[:3] if result.projections[name].sparsity]
    assert sparse
    for entry in sparse:
        scores = reference.scores(x, result.channel_scales[entry.name])
        below, above = scores[scores < entry.threshold].max(), scores[scores >= entry.threshold].min()
        assert float(above - below) / entry.threshold > 4e-4, "wide: about 20 scores are as near as it may be"
        assert entry.threshold == pytest.approx(float(below + above) / 2, rel=1e-6)


@example(values=[2.0**-149], last=1.0, sparsity=0.25)
@given(
    values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 3.0000002, 7.0]) | st.floats(0, 2.0**60, width=32)),
    last=st.floats(2.0**-40, 2.0**60, width=32),
    sparsity=st.floats(0.01, 0.95),
)
def test_a_threshold_drops_what_was_asked_and_meets_no_score(values: list[float], last: float, sparsity: float) -> None:
    scores = torch.tensor([*values, last])[:, None]
    threshold = Gaps(Scores(scores, torch.ones(1)), sparsity).threshold()
    possible = [float((scores < t).double().mean()) for t in [*scores, torch.tensor(torch.inf)]]
    off = abs(float((scores < threshold).double().mean()) - sparsity)
    assert off <= min(abs(p - sparsity) for p in possible) + 1e-3 + 1e-9
    assert torch.tensor(threshold).item() == threshold, "a float32"
    if threshold in scores:  # its neighbour below is the float32 before it, or there is no room for any other
        before = torch.nextafter(torch.tensor(threshold), torch.tensor(0.0))
        assert before in scores or threshold == 0.0 or before == 0.0


def test_of_the_gaps_near_the_quantile_it_is_the_widest() -> None:
    scores = torch.arange(1.0, 100_001.0).sqrt()
    gap = (scores > scores[49_979]) & (scores < scores[49_985])
    scores = scores[~gap][:, None]
    gaps = Gaps(Scores(scores, torch.ones(1)), 0.5)
    assert gaps.threshold() == pytest.approx((49_980**0.5 + 49_986**0.5) / 2, rel=1e-7)
    # Scores that do not count for the quantile, but are to be kept away from.
    gaps.add(torch.tensor([49_984.0]).sqrt())
    assert gaps.threshold() == pytest.approx((49_980**0.5 + 49_984**0.5) / 2, rel=1e-7)
    # A wider gap further off is left alone: the sparsity asked for comes first.
    far = scores[(scores < scores[49_000]) | (scores > scores[49_500])][:, None]
    assert Gaps(Scores(far, torch.ones(1)), 0.5).threshold() > float(far[49_500])
