"""Gradient steps on the joint KL, against autograd over the whole model, and what they are worth on the tiny one."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_source import tiny_source, tiny_tokens

from wisparse.converter.divergence import evaluate
from wisparse.converter.masking import MaskedModel
from wisparse.converter.refinement import Refinement, batch_gradient, kept_channels, num_steps
from wisparse.converter.search import SearchSettings, search
from wisparse.converter.source import SourceModel
from wisparse.converter.workbench import Workbench

WIDTH = 0.3


def start(source: SourceModel) -> dict[str, torch.Tensor]:
    """Half of the channels dropped in every projection, by scales that differ by channel."""
    result = search(source, tiny_tokens(2), SearchSettings(method="teal", search="uniform"))
    draw = torch.Generator().manual_seed(3)
    return {
        name: 0.1 * torch.randn(source.projections[name].in_features, generator=draw) - math.log(entry.threshold)
        for name, entry in result.projections.items()
    }


def test_the_gradient_is_that_of_the_straight_through_mask() -> None:
    source, tokens = tiny_source(), tiny_tokens(2)
    with Workbench(source, tokens, batch_size=2) as bench:
        logits = start(source)
        found = batch_gradient(bench.flow, bench.masked, 0, logits)
    leaves = {name: u.clone().requires_grad_(True) for name, u in logits.items()}
    kept = dict.fromkeys(leaves, 0)

    def drop(name: str):
        def hook(module, args):
            (x,) = args
            # As in the search: the mask's slope counts on the way to u, not on the way to x.
            z = (x.detach().abs().log() + leaves[name]) / WIDTH
            hard, soft = (z >= 0).float(), torch.sigmoid(z)
            kept[name] += int(hard[tokens.keep].sum())
            return (torch.where(tokens.keep[..., None], x * (hard + soft - soft.detach()), x),)

        return hook

    dense = source.model(input_ids=tokens.input_ids).logits.log_softmax(-1)
    handles = [m.register_forward_pre_hook(drop(name)) for name, m in source.projections.items()]
    with torch.enable_grad():
        sparse = source.model(input_ids=tokens.input_ids).logits.log_softmax(-1)
        kl = (dense.exp() * (dense - sparse)).sum(-1)[tokens.keep].sum()
        gradients = torch.autograd.grad(kl, list(leaves.values()))
    for handle in handles:
        handle.remove()
    assert found.kl == pytest.approx(float(kl.detach()), rel=1e-4)
    assert found.num_tokens == int(tokens.keep.sum())
    assert found.kept == kept
    for name, expected in zip(leaves, gradients, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(found.gradient[name], expected, rtol=1e-3, atol=1e-4)


def test_counts_are_the_masks() -> None:
    source, tokens = tiny_source(), tiny_tokens(2)
    with Workbench(source, tokens, batch_size=2) as bench:
        logits = start(source)
        counts = kept_channels(bench.flow, bench.masked, 0, logits)
        assert counts == batch_gradient(bench.flow, bench.masked, 0, logits).kept
    assert not any(module._forward_pre_hooks for module in source.projections.values())


def test_steps_lower_the_kl_and_keep_the_budget() -> None:
    source, tokens = tiny_source(), tiny_tokens(8)
    with Workbench(source, tokens, batch_size=4) as bench:
        state = Refinement(start(source), 20)
        total = sum(bench.sizes.values())
        first = [kept_channels(bench.flow, bench.masked, b, state.logits) for b in range(2)]
        counted = bench.flow.num_counted

        def unread(counts: list[dict[str, int]]) -> float:
            part = {n: sum(c[n] for c in counts) / counted / len(state.logits[n]) for n in bench.sizes}
            return 1 - sum(part[n] * size for n, size in bench.sizes.items()) / total

        target = unread(first)
        while state.step < state.steps:
            found = [batch_gradient(bench.flow, bench.masked, b, state.logits) for b in range(2)]
            state.advance(found, bench.sizes, target)
        last = [kept_channels(bench.flow, bench.masked, b, state.logits) for b in range(2)]
    assert unread(last) == pytest.approx(target, abs=0.01)
    assert state.history[-1] < 0.9 * state.history[0]


def test_few_tokens_bear_few_steps() -> None:
    assert [num_steps(n) for n in (1000, 8192, 32768, 1 << 20)] == [0, 4, 16, 24]


def test_the_search_is_better_than_its_start_on_its_own_text() -> None:
    source, tokens = tiny_source(), tiny_tokens(8)
    kl = {}
    for kind in ("fisher", "refine"):
        result = search(source, tokens, SearchSettings(search=kind, refine_steps=12, kl_tokens=192))
        with MaskedModel(source.projections) as masked:
            found = evaluate(source.model, masked, tokens.input_ids, result.put_on(masked))
        assert found.realised_sparsity == pytest.approx(0.5, abs=0.03)
        kl[kind] = found.kl
    assert kl["refine"] < 0.97 * kl["fisher"]
    assert len(result.details["history"]["refinement"]) == 12
