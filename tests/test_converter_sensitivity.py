"""Sensitivities, KL and steps down its gradient: against autograd over the whole model, and block by block of every family."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from family_cases import make_source
from runtime_models import FAMILIES, HYBRIDS, SMALL, featured
from tiny_source import has_hooks, tiny_source, tiny_tokens

from wisparse.converter import sensitivity
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.calibration_state import CalibrationState, block_inputs
from wisparse.converter.experts import Rows
from wisparse.converter.flow import BlockFlow
from wisparse.converter.masking import MaskedModel
from wisparse.converter.search.refinement import Channels, Refinement, batch_gradient, measure_batch
from wisparse.converter.search.search import SearchSettings, search
from wisparse.converter.sensitivity import DenseReference, backward, fisher_diagonal, kl_rows, quadratic_damage
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.model_config import ModelConfig, Projection
from wisparse.kernels.reference import keep_mask


@pytest.fixture
def calib():
    source = tiny_source()
    with CalibrationState(source, tiny_tokens(8), batch_size=8) as calib:
        calib.source = source
        for name, module in source.projections.items():
            calib.set_scale(name, torch.ones(module.in_features))
        yield calib


def test_projections_are_grouped_by_block_whatever_numbers_their_names_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    source, described = tiny_source(), ModelConfig.projections

    def numbered(config: ModelConfig, block: int | None = None) -> Iterator[Projection]:
        return (replace(one, name=f"{one.name}.{2 - one.block}.linear") for one in described(config, block))

    monkeypatch.setattr(ModelConfig, "projections", numbered)
    named = {one.name: source.model.get_submodule(one.name[:-9]) for one in source.config.projections()}
    with CalibrationState(replace(source, projections=named), tiny_tokens(4)) as state:
        assert [len(group) for group in state.groups] == [7, 7, 7]
        assert [name for group in state.groups for name in group] == state.names


def test_fisher_of_the_last_projection_is_the_closed_form(calib: CalibrationState) -> None:
    # A linear path to the logits: without the final norm, F = head^T (diag(p) - p p^T) head at down_proj's output.
    calib.flow.norm = torch.nn.Identity()
    name = calib.names[-1]
    weight = calib.source.projections[name].weight
    final = calib.flow.final(0)
    p = calib.flow.logits(final).softmax(-1)
    to_logits = calib.flow.head.weight @ weight
    variance = (p @ to_logits.square()) - (p @ to_logits).square()
    generator = torch.Generator().manual_seed(0)
    draws = [fisher_diagonal(calib.reference, 0, generator)[name] for _ in range(200)]
    torch.testing.assert_close(torch.stack(draws).mean(0).float(), variance.sum(0), rtol=0.1, atol=0.0)


def test_predicted_damage_is_the_measured_kl_while_it_is_small(calib: CalibrationState) -> None:
    calib.build_tables()
    thresholds = {name: [calib.thresholds({name: s})[name] for s in (0.2, 0.4)] for name in calib.names}
    generator = torch.Generator().manual_seed(1)
    draws = [quadratic_damage(calib.reference, 0, generator, calib.scales, thresholds) for _ in range(60)]
    predicted = measured = 0.0
    for name in calib.names:
        low, high = torch.tensor([draw[name] for draw in draws]).double().mean(0).div(calib.flow.num_counted).tolist()
        assert 0 < low < high
        predicted, measured = predicted + low, measured + calib.kl(calib.thresholds({name: 0.2}))
    assert predicted == pytest.approx(measured, rel=0.3)


def test_damage_is_of_what_the_mask_drops(calib: CalibrationState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score on the threshold is kept, and so is one that is not a number."""
    name = calib.names[0]
    x, gradient = torch.tensor([[0.25, -0.5, torch.nan]]), torch.tensor([[3.0, 5.0, 0.0]])
    monkeypatch.setattr(sensitivity, "backward", lambda *given: given[-1](name, Rows(x), gradient))
    thresholds = {name: [0.25, 0.3, 0.5, 0.6]}
    draw = torch.Generator().manual_seed(1)
    found = quadratic_damage(calib.reference, 0, draw, {name: torch.ones(3)}, thresholds)
    assert found[name] == [0.0, 0.75**2 / 2, 0.75**2 / 2, (0.75 - 2.5) ** 2 / 2]


def test_a_large_vocabulary_is_gone_through_in_parts(calib: CalibrationState, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, torch.Tensor]:
        return fisher_diagonal(calib.reference, 0, torch.Generator().manual_seed(0))

    whole = found()
    monkeypatch.setattr(sensitivity, "_LARGEST_LOGITS_CPU", 64 * 7)
    parts = found()
    for name in calib.names:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kept", [True, False], ids=["distributions", "hidden states"])
@pytest.mark.parametrize("graph", [1 << 30, 1], ids=["one graph", "a graph for each block"])
def test_a_backward_pass_leaves_the_dense_distributions(
    calib: CalibrationState, graph: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calib.reference.keeps_distributions = kept
    monkeypatch.setattr(sensitivity, "_LARGEST_GRAPH_BYTES", graph)
    monkeypatch.setattr(sensitivity, "_LARGEST_LOGITS_CPU", 64 * 7)
    chunks = range(-(-calib.flow.num_counted // 7))
    dense = DenseReference(calib.flow, calib.masked)
    expected = [dense.distribution(0, index) for index in chunks]
    fisher_diagonal(calib.reference, 0, torch.Generator().manual_seed(0))
    monkeypatch.setattr(calib.flow, "final", None)  # no further pass
    for index in chunks:
        assert all(map(torch.equal, calib.reference.distribution(0, index), expected[index]))


@pytest.mark.parametrize("limit", [1 << 30, 0], ids=["kept", "computed again"])
def test_the_kl_is_that_of_the_whole_model(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "_LARGEST_REFERENCE_BYTES", limit)
    monkeypatch.setattr(sensitivity, "_LARGEST_LOGITS_CPU", 64 * 7)
    source, tokens = tiny_source(), tiny_tokens(6)
    with CalibrationState(source, tokens, batch_size=4) as calib:
        assert calib.reference.keeps_distributions == (limit > 0)
        for name, module in source.projections.items():
            calib.set_scale(name, torch.ones(module.in_features))
        dense = source.model(input_ids=tokens.input_ids).logits.log_softmax(-1)
        assert calib.kl(dict.fromkeys(calib.names, 0.0)) == pytest.approx(0, abs=1e-6)
        thresholds = dict.fromkeys(calib.names, 0.5)
        found = calib.kl(thresholds)
        with calib.masked.masking(thresholds), calib.masked.during(dense_tokens=~tokens.keep):
            sparse = source.model(input_ids=tokens.input_ids).logits.log_softmax(-1)
        with calib.masked.masking(thresholds), calib.masked.during(dense_tokens=~tokens.keep[:4]):
            final = calib.flow.final(0).requires_grad_(True)
        total, gradient = calib.reference.kl_gradient(0, final.detach())
        expected = float((dense.exp() * (dense - sparse)).sum(-1)[tokens.keep].mean())
        assert expected > 0.01
        assert found == pytest.approx(expected, rel=1e-5)
        value = kl_rows(dense[:4][tokens.keep[:4]], calib.flow.logits(final).log_softmax(-1)).sum()
        assert float(total) == pytest.approx(float(value.detach()), rel=1e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(value, final)[0], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module", params=featured((*FAMILIES, *HYBRIDS, *SMALL)))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    return load_source(make_source(request.param, tmp_path_factory.mktemp("source")), device="cpu")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 101, (3, 20), generator=torch.Generator().manual_seed(0))


def flow_of(source: SourceModel, ids: torch.Tensor) -> BlockFlow:
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[:, 0] = False
    return BlockFlow(source.model, source.config, ids, keep, 2)


@torch.no_grad()
def test_logits_and_inputs_are_the_models(source: SourceModel, ids: torch.Tensor) -> None:
    flow = flow_of(source, ids)
    for batch, (part, start) in enumerate(zip(flow.input_ids, flow.start(), strict=True)):
        expected = source.model(input_ids=part, use_cache=False).logits[flow.counted[batch]]
        assert expected.abs().max() > 1, "logits this small would hide any difference"
        for final in (flow.final(batch), flow.final(batch, 1, flow.block(0, batch, start))):
            assert (flow.logits(final) - expected).abs().max() < 1e-4
    assert flow.num_counted == 3 * 19
    # Inputs are what the projections multiply.
    flow = flow_of(source, ids)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in source.projections}
    with MaskedModel(source.projections) as masked:
        with masked.during(observer=lambda name, x: seen[name].append(x)):
            for part in flow.input_ids:
                source.model(input_ids=part, use_cache=False)
        hidden = flow.start()
        for index in range(source.config.num_blocks):
            names = [projection.name for projection in source.config.projections(index)]
            first, _ = block_inputs(flow, masked, index, hidden, names, first=True)
            assert list(first) == [one.name for one in source.config.shared_inputs(index)[0]]
            inputs, hidden = block_inputs(flow, masked, index, hidden, names)
            assert torch.equal(first[names[0]].x, inputs[names[0]].x)
            for name in names:
                expected = torch.cat([x[kept] for x, kept in zip(seen[name], flow.counted, strict=True)])
                torch.testing.assert_close(inputs[name].x, expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("bytes_at_once", "threshold"), [(0, 0.02), (1 << 30, 0.0)], ids=["sparse", "dense"])
def test_gradients_are_the_models(
    source: SourceModel, ids: torch.Tensor, bytes_at_once: int, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loss through every projection alone, next to autograd's through the whole model."""
    monkeypatch.setattr(sensitivity, "_LARGEST_GRAPH_BYTES", bytes_at_once)
    flow, found, kept = flow_of(source, ids), {}, {}

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[:, 7].sum()

    def keep_input(name: str, x: torch.Tensor) -> torch.Tensor:
        kept[name] = x.view_as(x) if x.requires_grad else x.detach().requires_grad_(True)
        return kept[name]

    def gradient_of(final: torch.Tensor) -> torch.Tensor:
        final.requires_grad_(True)
        return torch.autograd.grad(loss(flow.logits(final)), final)[0]

    with MaskedModel(source.projections) as masked:
        for name, module in source.projections.items():
            masked.set_scale(name, torch.ones(module.in_features))
            masked.set_threshold(name, threshold)
        backward(flow, masked, 0, gradient_of, lambda name, x, gradient: found.__setitem__(name, gradient))
        with torch.enable_grad(), masked.during(replacer=keep_input):
            logits = source.model(input_ids=flow.input_ids[0], use_cache=False).logits
            values = torch.autograd.grad(loss(logits[flow.counted[0]]), list(kept.values()))
    expected = {name: value[flow.counted[0]] for name, value in zip(kept, values, strict=True)}
    assert set(found) == set(expected) == set(source.projections)
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


WIDTH = 0.3


def channels_of(source: SourceModel) -> Channels:
    modules = source.projections
    return Channels({n: m.in_features for n, m in modules.items()}, {n: m.weight.numel() for n, m in modules.items()})


def start(source: SourceModel) -> torch.Tensor:
    """Half of the channels dropped in every projection, by scales that differ by channel."""
    result = search(source, tiny_tokens(2), SearchSettings(method="teal", search="uniform"))
    draw = torch.Generator().manual_seed(3)
    return channels_of(source).join(
        {
            name: 0.1 * torch.randn(source.projections[name].in_features, generator=draw) - math.log(entry.threshold)
            for name, entry in result.projections.items()
        }
    )


def test_the_gradient_is_that_of_the_straight_through_mask() -> None:
    source, tokens = tiny_source(), tiny_tokens(2)
    channels = channels_of(source)
    logits = start(source)
    with CalibrationState(source, tokens, batch_size=2) as calib:
        found = batch_gradient(calib.reference, 0, channels, logits)
        measured = measure_batch(calib.reference, 0, channels, logits)
        assert measure_batch(calib.reference, 0, channels, logits, with_kl=False)[-2] == 0.0
    at_u, _, found_kept, found_kl = found[:-1].split([len(logits), len(logits), len(channels.widths), 1])
    leaves = {name: u.clone().requires_grad_(True) for name, u in channels.split(logits).items()}
    kept = dict.fromkeys(leaves, 0)

    def drop(name: str, module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = args
        # As in the search: the mask's slope counts on the way to u, not on the way to x.
        z = (x.detach().abs().log() + leaves[name]) / WIDTH
        hard, soft = (z >= 0).float(), torch.sigmoid(z)
        kept[name] += int(hard[tokens.keep].sum())
        return (torch.where(tokens.keep[..., None], x * (hard + soft - soft.detach()), x),)

    dense = source.model(input_ids=tokens.input_ids).logits.log_softmax(-1)
    handles = [m.register_forward_pre_hook(partial(drop, name)) for name, m in source.projections.items()]
    with torch.enable_grad():
        sparse = source.model(input_ids=tokens.input_ids).logits.log_softmax(-1)
        kl = (dense.exp() * (dense - sparse)).sum(-1)[tokens.keep].sum()
        gradients = torch.autograd.grad(kl, list(leaves.values()))
    for handle in handles:
        handle.remove()
    assert float(found_kl) == pytest.approx(float(kl.detach()), rel=1e-4)
    assert int(found[-1]) == int(tokens.keep.sum())
    assert dict(zip(kept, found_kept.tolist(), strict=True)) == kept
    assert measured == pytest.approx([*kept.values(), float(found_kl), float(found[-1])], rel=1e-5)
    assert not has_hooks(source)
    for name, expected in zip(leaves, gradients, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(channels.split(at_u)[name].float(), expected, rtol=1e-3, atol=1e-4)


def test_a_score_on_the_threshold_counts_as_the_mask_has_it() -> None:
    """Where |x| * scale is the threshold but for rounding, the logarithm of it would decide otherwise."""
    source, tokens = tiny_source(), tiny_tokens(2)
    channels = channels_of(source)
    seen: dict[str, torch.Tensor] = {}
    with CalibrationState(source, tokens, batch_size=2) as calib:
        with calib.masked.during(observer=lambda name, x: seen.__setitem__(name, x[tokens.keep])):
            calib.flow.final(0)
        # Every channel of q has its threshold on the score of its first token.
        name = calib.names[0]
        parts = {n: torch.full((source.projections[n].in_features,), 30.0) for n in calib.names}
        parts[name] = -seen[name][0].abs().log()
        found = batch_gradient(calib.reference, 0, channels, channels.join(parts))
    expected = keep_mask(seen[name], parts[name].exp(), 1.0)
    by_logarithm = seen[name].abs().log() + parts[name] >= 0
    assert not torch.equal(expected, by_logarithm)
    assert int(found[2 * sum(channels.widths.values())]) == int(expected.sum())


def test_steps_lower_the_kl_and_keep_the_budget() -> None:
    source, tokens = tiny_source(), tiny_tokens(8)
    channels = channels_of(source)
    with CalibrationState(source, tokens, batch_size=4) as calib:
        state, begun = Refinement(start(source), 20, 0.385), start(source)

        def measured(logits: torch.Tensor) -> tuple[float, float]:
            parts = torch.tensor([measure_batch(calib.reference, b, channels, logits) for b in range(2)]).double()
            *kept, kl, num_tokens = parts.sum(0)
            total = sum(channels.sizes.values())
            shares = torch.tensor([channels.sizes[n] / total / width for n, width in channels.widths.items()])
            return 1 - float((torch.stack(kept) * shares).sum() / num_tokens), float(kl / num_tokens)

        target, before = measured(begun)
        while state.step < state.steps:
            found = [batch_gradient(calib.reference, b, channels, state.logits) for b in range(2)]
            state.advance(found, channels, begun, target)
        assert state.history[0] == pytest.approx(before, rel=1e-4)
        unread, after = measured(state.partway(1.0, begun))
    assert unread == pytest.approx(target, abs=0.01)
    assert after < 0.9 * before
    assert torch.equal(state.partway(0.0, begun), begun)


def test_steps_that_harm_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # The sequences held out are like the others, as in a real text.
    rows = tiny_tokens(2).input_ids.tolist() * 8
    tokens = CalibrationTokens.from_rows(rows, "test", 0)
    settings = SearchSettings(search="refine", refine_steps=6, kl_tokens=192, batch_size=2)
    helped = search(tiny_source(), tokens, settings).details["history"]["held out"]
    advance = Refinement.advance

    def backwards(self: Refinement, found, channels, begun, target) -> None:
        count = len(begun)
        advance(self, [torch.cat([-one[:count], one[count:]]) for one in found], channels, begun, target)

    monkeypatch.setattr(Refinement, "advance", backwards)
    result = search(tiny_source(), tokens, settings)
    harmed = result.details["history"]["held out"]
    assert list(helped) == list(harmed) == ["0 of the way", "0.5 of the way", "1 of the way"]
    assert helped["1 of the way"] < helped["0 of the way"] < harmed["1 of the way"]
    assert helped["0 of the way"] == pytest.approx(harmed["0 of the way"], rel=0.02)
    # The start is what comes out: the channels' scales are those of the search that takes no step.
    begun = search(tiny_source(), tokens, replace(settings, refine_steps=0))
    for name, scale in begun.channel_scales.items():
        torch.testing.assert_close(result.channel_scales[name], scale, rtol=1e-4, atol=1e-6)
