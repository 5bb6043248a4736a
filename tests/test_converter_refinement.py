"""Gradient steps on the joint KL, against autograd over the whole model, and what they are worth on the tiny one."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_source import tiny_source, tiny_tokens

from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.calibration_state import CalibrationState
from wisparse.converter.search.refinement import Channels, Refinement, batch_gradient, measure_batch
from wisparse.converter.search.search import SearchSettings, search
from wisparse.converter.source import SourceModel
from wisparse.kernels.reference import keep_mask

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
    assert not any(module._forward_pre_hooks for module in source.projections.values())
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
