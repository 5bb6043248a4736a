"""Searches from end to end on a tiny model, and their final thresholds; quality on the example model."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from quality import evaluate
from tiny_source import has_hooks, tiny_source, tiny_tokens

from wisparse.converter import statistics
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.calibration_state import CalibrationState
from wisparse.converter.masking import MaskedModel
from wisparse.converter.processes import ALONE, SILENT
from wisparse.converter.search.allocation import mean_sparsity
from wisparse.converter.search.search import SearchResult, SearchSettings, SparsityLevels, search
from wisparse.converter.source import SourceModel, load_source
from wisparse.converter.statistics import Gaps, Scores
from wisparse.kernels import reference

SMALL = {"kl_tokens": 64, "num_generations": 3, "num_offspring": 4, "greedy_step": 0.2, "refine_steps": 3}
COMBINATIONS = [*(f"wisparse {search}" for search in ("refine", "fisher", "paper", "uniform"))]
COMBINATIONS += ["teal greedy", "teal uniform", "wina uniform"]


def flat(result: SearchResult) -> list:
    scales = {name: scale.tolist() for name, scale in result.channel_scales.items()}
    return [{name: vars(entry) for name, entry in result.projections.items()}, scales, result.details]


@pytest.fixture(scope="module")
def source():
    return tiny_source()


@pytest.fixture(scope="module", params=COMBINATIONS)
def found(source: SourceModel, request: pytest.FixtureRequest) -> SearchResult:
    method, kind = request.param.split()
    return search(source, tiny_tokens(8), SearchSettings(sparsity=0.45, method=method, search=kind, **SMALL))


def test_the_budget_is_met(source: SourceModel, found: SearchResult) -> None:
    assert list(found.projections) == list(source.projections)
    sizes = [module.weight.numel() for module in source.projections.values()]
    entries = list(found.projections.values())
    assert mean_sparsity([e.sparsity for e in entries], sizes) == pytest.approx(0.45, abs=1e-9)
    for entry in entries:
        assert 0.0 <= entry.sparsity <= 0.95
        assert (entry.threshold == 0.0) == (entry.sparsity == 0.0)
        assert found.channel_scales[entry.name].shape == (source.projections[entry.name].in_features,)
    assert found.details["settings"]["method"] != "teal" or {e.alpha for e in entries} == {0.0}


def test_other_sparsities_come_with_the_result(source) -> None:
    tokens = tiny_tokens(8)
    result = search(source, tokens, SearchSettings(sparsity=0.5, **SMALL))
    assert sorted(result.thresholds_at) == [0.3, 0.4, 0.6]
    sizes = {name: module.weight.numel() for name, module in source.projections.items()}
    for sparsity, thresholds in result.thresholds_at.items():
        with MaskedModel(source.projections) as masked:
            result.apply_to(masked)
            found = evaluate(source, masked, tokens.input_ids, dict(thresholds))
        assert (set(thresholds), found.realised_sparsity) == (set(sizes), pytest.approx(sparsity, abs=0.04))


def test_candidates_side_by_side_are_those_one_by_one(source) -> None:
    with torch.no_grad(), CalibrationState(source, tiny_tokens(6), batch_size=4) as calib:
        for name in calib.names:
            calib.set_scale(name, torch.ones(source.projections[name].in_features))
        calib.build_tables()
        assert calib.side_by_side > 3
        spreads = [dict.fromkeys(calib.names, p) for p in (0.0, 0.3, 0.6)]
        together = calib.kls(spreads)
        spent = calib.num_kl_evaluations
        assert together == pytest.approx([calib.kl(calib.thresholds(spread)) for spread in spreads], rel=1e-4, abs=1e-7)
        assert calib.num_kl_evaluations == pytest.approx(2 * spent)
        assert calib.kls(spreads[:1])[0] == together[0], "whatever the neighbours"


def test_the_seed_decides_what_is_drawn_and_the_model_is_left_as_it_was(source) -> None:
    ids = tiny_tokens().input_ids
    before = source.model(input_ids=ids).logits
    results = [flat(search(source, tiny_tokens(8), SearchSettings(seed=seed, **SMALL))) for seed in (0, 0, 1)]
    assert results[0] == results[1] != results[2]
    assert torch.equal(source.model(input_ids=ids).logits, before)
    assert not has_hooks(source)


@pytest.mark.slow
def test_the_default_beats_uniform_magnitude_by_far(example_model: Path) -> None:
    """The bar of the paper's pipeline (0.65 of uniform |x|), on text that was not calibrated on."""
    source = load_source(example_model, device="cpu")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))

    def rows(names: list[Path], count: int) -> list[list[int]]:
        found = [source.tokenizer(path.read_text("utf-8", "replace")[:2000]).input_ids[:256] for path in names]
        return [ids for ids in found if len(ids) == 256][:count]

    tokens = CalibrationTokens.from_rows(rows(files[0::2], 5), "standard library", 0)
    held_out = torch.tensor(rows(files[1::2], 8))
    kl, kept = {}, {}

    def run(name: str, compute) -> object:
        """What both searches by sensitivities begin with is measured once."""
        if name != "sensitivities":
            return compute()
        return kept[name] if kept else kept.setdefault(name, compute())

    stages = SimpleNamespace(run=run, processes=ALONE, progress=SILENT)
    for method, kind in (("teal", "uniform"), ("wisparse", "fisher"), ("wisparse", "refine")):
        with SparsityLevels(source, tokens, SearchSettings(method=method, search=kind), stages=stages) as levels:
            result = levels.at(0.5)
        with MaskedModel(source.projections) as masked:
            found = evaluate(source, masked, held_out, result.apply_to(masked))
        assert found.realised_sparsity == pytest.approx(0.5, abs=0.01)
        kl[kind] = found.kl
    assert kl["fisher"] <= 0.65 * kl["uniform"]
    # So few tokens: the steps must not learn them by heart.
    assert kl["refine"] < 0.99 * kl["fisher"]


def test_thresholds_are_from_inputs_as_sparse_as_at_run_time(source: SourceModel, found: SearchResult) -> None:
    """Dense inputs, or one projection more or less sparse, give other thresholds: the counts are exact."""
    tokens, result = tiny_tokens(8), found
    scores: dict[str, torch.Tensor] = {}

    def keep(name: str, x: torch.Tensor) -> None:
        scores[name] = reference.scores(x[tokens.keep], result.channel_scales[name])

    with MaskedModel(source.projections) as masked:
        thresholds = result.apply_to(masked)
        with masked.during(observer=keep), masked.masking(thresholds), masked.during(dense_tokens=~tokens.keep):
            source.model(input_ids=tokens.input_ids)
    for name, entry in result.projections.items():
        dropped = float((scores[name] < entry.threshold).double().mean())
        assert dropped == pytest.approx(entry.realised_sparsity, abs=1e-9), name
        assert dropped == pytest.approx(entry.sparsity, abs=1e-3 + 1 / scores[name].numel()), name
        distance = (scores[name].double() - entry.threshold).abs().min()
        assert entry.threshold == 0.0 or float(distance) > 1e-5 * entry.threshold, name


def test_in_block_0_no_token_of_the_vocabulary_is_on_a_threshold(source: SourceModel, found: SearchResult) -> None:
    """What q, k and v read there depends on the token alone, so a score on the threshold comes again and again."""
    x = source.model.model.layers[0].input_layernorm(source.model.get_input_embeddings().weight)
    sparse = [entry for entry in list(found.projections.values())[:3] if entry.sparsity]
    assert sparse
    for entry in sparse:
        scores = reference.scores(x, found.channel_scales[entry.name])
        below, above = scores[scores < entry.threshold].max(), scores[scores >= entry.threshold].min()
        assert float(above - below) / entry.threshold > 4e-4, "wide: about 20 scores are as near as it may be"
        assert entry.threshold == pytest.approx(float(below + above) / 2, rel=1e-6)


@pytest.mark.parametrize("limit", [0, 1 << 24], ids=["windows", "partition"])
@example(values=[2.0**-149], last=1.0, sparsity=0.25)
@given(
    values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 3.0000002, 7.0]) | st.floats(0, 2.0**60, width=32)),
    last=st.floats(2.0**-40, 2.0**60, width=32),
    sparsity=st.floats(0.01, 0.95),
)
def test_a_threshold_drops_what_was_asked_and_meets_no_score(
    limit: int, values: list[float], last: float, sparsity: float
) -> None:
    scores = torch.tensor([*values, last])[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_SORT_LIMIT", limit)
        threshold = Gaps(Scores(scores, torch.ones(1)), sparsity).threshold()
    possible = [float((scores < t).double().mean()) for t in [*scores, torch.tensor(torch.inf)]]
    off = abs(float((scores < threshold).double().mean()) - sparsity)
    zeros = float((scores == 0).double().mean())  # are dropped whatever was asked
    assert off <= min(abs(p - sparsity) for p in possible if p >= zeros) + 1e-3 + 1e-9
    assert torch.tensor(threshold).item() == threshold, "a float32"
    if threshold in scores:  # its neighbour below is the float32 before it, or there is no room for any other
        before = torch.nextafter(torch.tensor(threshold), torch.tensor(0.0))
        assert before in scores or threshold == 0.0 or before == 0.0
