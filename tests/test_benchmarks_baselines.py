"""CATS and R-Sparse in the benchmarks: their maths against a twin written out here, and figures that must not move."""

from __future__ import annotations

import baselines
import pytest
import torch
from baselines import choose_rank, low_rank_factors, low_rank_sparsity
from quality import Evaluator
from tiny_source import tiny_source, tiny_tokens
from torch.nn import functional

from wisparse.converter.masking import MaskedModel
from wisparse.formats.errors import UsageError


# KL and realised sparsity, as these methods gave them when the search itself made them and bundles held them.
@pytest.mark.parametrize(
    ("kind", "method", "shares", "sparsity", "kl", "realised"),
    [
        ("llama", "cats", None, 0.3, 0.024667106550348022, 0.30086805555555557),
        ("llama", "rsparse", None, 0.3, 0.06385724101011102, 0.29408275462962963),
        ("llama", "rsparse", (0.4,), 0.3, 0.16437731189291357, 0.2950231481481482),
        ("qwen2", "cats", None, 0.3, 0.02900091016856632, 0.2917534722222222),
        ("qwen2", "rsparse", (0.4,), 0.5, 0.9440165931379014, 0.5063512731481482),
    ],
)
def test_figures_are_those_of_before(
    kind: str,
    method: str,
    shares: tuple[float, ...] | None,
    sparsity: float,
    kl: float,
    realised: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shares:  # random weights have no directions to spare; have some paths all the same
        monkeypatch.setattr(baselines, "SHARES", shares)
    source, ids = tiny_source(kind), tiny_tokens(4, 24, 1).input_ids
    dense = source.model(input_ids=ids).logits
    with baselines.BASELINES[method](source, tiny_tokens(8), sparsity) as found:
        measured = found.measure(Evaluator(source, ids))
    assert measured.kl == pytest.approx(kl, rel=1e-6)  # another CPU rounds otherwise
    assert measured.realised_sparsity == pytest.approx(realised, abs=1e-6)
    assert torch.equal(source.model(input_ids=ids).logits, dense)


def test_cats_by_hand() -> None:
    source = tiny_source()
    mlp = source.blocks[0].mlp
    x = 3 * torch.randn(7, 32)
    with baselines.cats(source, tiny_tokens(8), 0.3) as found:
        with MaskedModel(found.places) as masked:
            masked.set_thresholds(found.result.apply_to(masked))
            sparse = mlp(x[None])[0]
        torch.testing.assert_close(mlp(x), mlp.down_proj(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    thresholds = {name: entry.threshold for name, entry in found.result.projections.items()}
    assert {name.rsplit(".", 1)[1] for name, threshold in thresholds.items() if threshold} == {"act_fn"}
    gate = functional.silu(mlp.gate_proj(x))
    keep = gate.abs() >= thresholds["model.layers.0.mlp.act_fn"]
    assert 0.2 < keep.float().mean() < 0.8
    # Neither up's rows nor down's columns outside are touched.
    down, up = mlp.down_proj.weight, mlp.up_proj.weight
    rows = [down[:, k] @ (g[k] * (up[k] @ one)) for g, k, one in zip(gate, keep, x, strict=True)]
    torch.testing.assert_close(sparse, torch.stack(rows))
    assert isinstance(mlp.act_fn, torch.nn.SiLU) or "SiLU" in type(mlp.act_fn).__name__


def test_cats_refuses_what_up_and_down_cannot_give() -> None:
    source = tiny_source()
    with (
        pytest.raises(UsageError, match=r"only up and down are sparse, at most 38\.0% .*found 0\.6"),
        baselines.cats(source, tiny_tokens(8), 0.6),
    ):
        pass


def test_rsparse_by_hand() -> None:
    torch.manual_seed(2)
    linear = torch.nn.Linear(16, 12).requires_grad_(False)
    x = torch.randn(3, 7, 16)
    left, right = low_rank_factors(linear.weight, 3)
    u, s, v = torch.linalg.svd(linear.weight)
    torch.testing.assert_close(left @ right, u[:, :3] @ torch.diag(s[:3]) @ v[:3])
    small = torch.where(x.abs() < 0.7, x, 0.0)
    expected = linear(x - small) + small @ (left @ right).T
    path = baselines._Path(linear, 3)
    with MaskedModel({"p": linear}) as masked:
        masked.set_scale("p", torch.ones(16))
        masked.set_threshold("p", 0.7)
        torch.testing.assert_close(linear(x), expected)
        masked.clear()
        torch.testing.assert_close(linear(x), x @ linear.weight.T + linear.bias)
    path.close()


def test_a_rank_is_chosen_where_it_pays() -> None:
    torch.manual_seed(3)
    x = torch.randn(200, 32)
    low = torch.randn(64, 4) @ torch.randn(4, 32)
    rank = choose_rank(x, low, 0.5)
    assert rank >= 4  # all of the weight
    assert low_rank_sparsity(low, 0.5, rank) == pytest.approx(0.5 + rank * 96 / 2048)
    spread = x * torch.logspace(-3, 0, 32)  # a few channels are all that matters, and the spectrum is flat
    assert choose_rank(spread, torch.linalg.qr(torch.randn(32, 32))[0], 0.5) == 0
    assert choose_rank(x, low, 0.0) == 0


def test_a_rank_is_chosen_for_what_the_mask_drops() -> None:
    """The threshold is on a score that ties: channels at 2 are kept, those at 1, which the weight ignores, dropped."""
    x = torch.cat([torch.ones(50, 16), torch.full((50, 16), 2.0)], dim=1)
    weight = torch.cat([torch.zeros(16, 16), torch.eye(16)], dim=1)
    assert choose_rank(x, weight, 0.5) == 0
