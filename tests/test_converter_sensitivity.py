"""Sensitivities from backward passes: against autograd on the whole model, and against measured KL."""

from __future__ import annotations

import pytest
import torch
from tiny_source import tiny_source, tiny_tokens

from wisparse.converter import sensitivity
from wisparse.converter.sensitivity import backward, fisher_diagonal, loss_weighted_norm, quadratic_damage
from wisparse.converter.workbench import Workbench


@pytest.fixture
def bench():
    source = tiny_source()
    with Workbench(source, tiny_tokens(8), batch_size=8) as bench:
        bench.source = source
        for name, module in source.projections.items():
            bench.set_scale(name, torch.ones(module.in_features))
        yield bench


def whole_graph_gradients(bench: Workbench, loss) -> dict[str, torch.Tensor]:
    """Gradient at every projection's input by autograd over the whole model at once."""
    inputs: dict[str, torch.Tensor] = {}

    def split(name: str, x: torch.Tensor) -> torch.Tensor:
        inputs[name] = x.view_as(x)
        return inputs[name]

    with torch.enable_grad(), bench.masked.replacing(split):
        embeddings = bench.flow.start()[0].clone().requires_grad_(True)
        final = bench.flow.finish(0, 0, embeddings)
        gradients = torch.autograd.grad(loss(final[bench.flow.counted[0]])[0], list(inputs.values()))
    return {name: g[bench.flow.counted[0]] for name, g in zip(inputs, gradients, strict=True)}


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "sparse"])
def test_block_by_block_gradients_are_the_models(bench: Workbench, masked: bool) -> None:
    def loss(final: torch.Tensor) -> list[torch.Tensor]:
        return [bench.flow.logits(final).log_softmax(-1)[:, 3].sum()]

    if masked:
        bench.masked.set_thresholds(dict.fromkeys(bench.names, 0.3))
    expected = whole_graph_gradients(bench, loss)
    found: dict[str, torch.Tensor] = {}
    backward(bench.flow, bench.masked, 0, loss, lambda name, x, gradient: found.__setitem__(name, gradient))
    assert set(found) == set(bench.names)
    for name in bench.names:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4)


def test_weights_get_no_gradient(bench: Workbench) -> None:
    fisher_diagonal(bench.flow, bench.masked, 0, torch.Generator().manual_seed(0))
    assert all(p.grad is None for p in bench.source.model.parameters())


def test_fisher_of_the_last_projection_is_the_closed_form(bench: Workbench) -> None:
    # A linear path to the logits: without the final norm, F = head^T (diag(p) - p p^T) head at down_proj's output.
    bench.flow.norm = torch.nn.Identity()
    name = bench.names[-1]
    weight = bench.source.projections[name].weight
    final = bench.flow.finish(0, 0, bench.flow.start()[0])[bench.flow.counted[0]]
    p = bench.flow.logits(final).softmax(-1)
    to_logits = bench.flow.head.weight @ weight
    variance = (p @ to_logits.square()) - (p @ to_logits).square()
    draws = fisher_diagonal(bench.flow, bench.masked, 0, torch.Generator().manual_seed(0), num_draws=200)[name]
    torch.testing.assert_close(draws.float(), variance.sum(0), rtol=0.1, atol=0.0)


def test_same_generator_same_result(bench: Workbench) -> None:
    a, b = (fisher_diagonal(bench.flow, bench.masked, 0, torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in bench.names)


def test_predicted_damage_is_the_measured_kl_while_it_is_small(bench: Workbench) -> None:
    for view in bench.blocks():
        view.build_tables()
    thresholds = {name: [bench.thresholds({name: s})[name] for s in (0.2, 0.4)] for name in bench.names}
    found = quadratic_damage(
        bench.flow, bench.masked, 0, torch.Generator().manual_seed(1), bench.scales, thresholds, num_draws=60
    )
    predicted = measured = 0.0
    for name in bench.names:
        low, high = (value / bench.flow.num_counted for value in found[name])
        assert 0 < low < high
        predicted, measured = predicted + low, measured + bench.kl({name: 0.2})
    assert predicted == pytest.approx(measured, rel=0.3)


def test_damage_is_of_what_the_mask_drops(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score on the threshold is kept, and so is one that is not a number."""
    name = bench.names[0]
    x, gradient = torch.tensor([[0.25, -0.5, torch.nan]]), torch.tensor([[3.0, 5.0, 0.0]])
    monkeypatch.setattr(sensitivity, "backward", lambda *given: given[-1](name, x, gradient))
    thresholds = {name: [0.25, 0.3, 0.5, 0.6]}
    draw = torch.Generator().manual_seed(1)
    found = quadratic_damage(bench.flow, bench.masked, 0, draw, {name: torch.ones(3)}, thresholds, num_draws=1)
    assert found[name] == [0.0, 0.75**2 / 2, 0.75**2 / 2, (0.75 - 2.5) ** 2 / 2]


def test_loss_weighted_norm_is_halfway_and_scale_free() -> None:
    norm, diagonal = torch.rand(50) + 0.1, torch.rand(50, dtype=torch.float64) + 0.1
    weighted = loss_weighted_norm(norm, diagonal)
    assert float(weighted.log().mean()) == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(loss_weighted_norm(7 * norm, 9 * diagonal), weighted)
    assert torch.isfinite(loss_weighted_norm(norm, torch.zeros(50, dtype=torch.float64))).all()


def test_a_large_vocabulary_is_gone_through_in_parts(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, torch.Tensor]:
        return fisher_diagonal(bench.flow, bench.masked, 0, torch.Generator().manual_seed(0))

    whole = found()
    monkeypatch.setattr(sensitivity, "LARGEST_LOGITS", 64 * 7)
    parts = found()
    for name in bench.names:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=0.0)
