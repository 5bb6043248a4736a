"""Masks on a model's projections."""

from __future__ import annotations

import pytest
import torch
from tiny_source import tiny_source

from wisparse.converter.masking import MaskedModel
from wisparse.kernels.reference import keep_mask, sparse_linear


@pytest.fixture
def linear() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(16, 8).requires_grad_(False)


def test_a_mask_is_the_references_mask(linear: torch.nn.Linear) -> None:
    x, scale = torch.randn(2, 5, 16), torch.rand(16) + 0.5
    with MaskedModel({"p": linear}) as masked:
        masked.set_scale("p", scale)
        masked.set_threshold("p", 0.6)
        torch.testing.assert_close(linear(x), sparse_linear(x, linear.weight, linear.bias, scale, 0.6))


def test_clear_close_and_an_error_within_leave_the_dense_model(linear: torch.nn.Linear) -> None:
    x = torch.randn(1, 4, 16)
    dense = linear(x)
    masked = MaskedModel({"p": linear})
    masked.set_scale("p", torch.ones(16))
    for threshold in (0.0, None):
        masked.set_threshold("p", 9.0)
        assert not torch.equal(linear(x), dense)
        masked.set_threshold("p", threshold)
        assert torch.equal(linear(x), dense)
    spared = torch.tensor([[True, False, False, False]])
    with pytest.raises(ZeroDivisionError), masked.masking({"p": 99.0}), masked.during(dense_tokens=spared):
        raise ZeroDivisionError
    assert torch.equal(linear(x), dense)
    with masked.masking({"p": 99.0}):
        torch.testing.assert_close(linear(x), linear.bias.expand(1, 4, 8))
    masked.set_threshold("p", 9.0)
    masked.close()
    assert torch.equal(linear(x), dense)
    assert not linear._forward_pre_hooks


def test_dense_tokens_are_left_alone(linear: torch.nn.Linear) -> None:
    x = torch.randn(2, 4, 16)
    dense = linear(x)
    with MaskedModel({"p": linear}) as masked:
        masked.set_scale("p", torch.ones(16))
        masked.set_threshold("p", 99.0)
        dense_tokens = torch.tensor([[True, False, False, True], [False, True, False, False]])
        with masked.during(dense_tokens=dense_tokens):
            out = linear(x)
    assert torch.equal(out[dense_tokens], dense[dense_tokens])
    torch.testing.assert_close(out[~dense_tokens], linear.bias.expand(5, 8))


def test_a_threshold_per_sequence_runs_candidates_side_by_side(linear: torch.nn.Linear) -> None:
    x = torch.randn(1, 4, 16)
    thresholds = [0.3, 0.9]
    with MaskedModel({"p": linear}) as masked:
        masked.set_scale("p", torch.ones(16))
        masked.set_threshold("p", torch.tensor(thresholds))
        both = linear(x.expand(2, -1, -1))
        for row, threshold in zip(both, thresholds, strict=True):
            masked.set_threshold("p", threshold)
            torch.testing.assert_close(row, linear(x)[0])


def test_counting_is_the_fraction_dropped_among_sparse_tokens(linear: torch.nn.Linear) -> None:
    x = torch.randn(3, 7, 16)
    dense_tokens = torch.zeros(3, 7, dtype=torch.bool)
    dense_tokens[:, 0] = True
    with MaskedModel({"p": linear}) as masked:
        masked.set_scale("p", torch.ones(16))
        masked.set_threshold("p", 0.7)
        with masked.counting() as realised:
            with masked.during(dense_tokens=dense_tokens[:2]):
                linear(x[:2])
            linear(x[2:, 1:])
            found = realised()["p"]
    assert found == pytest.approx(1 - float(keep_mask(x[:, 1:], torch.ones(16), 0.7).float().mean()))


def test_q_k_and_v_have_masks_of_their_own() -> None:
    source = tiny_source()
    names = [n for n in source.projections if ".0.self_attn." in n][:3]
    seen: dict[str, torch.Tensor] = {}
    with MaskedModel(source.projections) as masked:
        for i, name in enumerate(names):
            masked.set_scale(name, torch.ones(32))
            masked.set_threshold(name, 0.2 * (i + 1))
        handles = [
            source.projections[n].register_forward_pre_hook(lambda m, a, n=n: seen.__setitem__(n, a[0])) for n in names
        ]
        source.model(input_ids=torch.arange(10)[None])
        for handle in handles:
            handle.remove()
    dropped = [float((seen[n] == 0).float().mean()) for n in names]
    assert 0 < dropped[0] < dropped[1] < dropped[2] < 1
