"""KL, perplexity and agreement as the benchmarks measure them."""

from __future__ import annotations

import math

import pytest
import torch
from quality import evaluate
from tiny_source import tiny_source, tiny_tokens

from wisparse.converter.masking import MaskedModel


@pytest.fixture(scope="module")
def setting():
    source, tokens = tiny_source(), tiny_tokens(6)
    masked = MaskedModel(source.projections)
    for name, module in source.projections.items():
        masked.set_scale(name, torch.ones(module.in_features))
    yield source, tokens, masked
    masked.close()


def test_dense_against_itself(setting) -> None:
    source, tokens, masked = setting
    found = evaluate(source.model, masked, tokens.input_ids, dict.fromkeys(source.projections, 0.0), batch_size=4)
    assert (found.kl, found.top1_agreement, found.realised_sparsity) == (pytest.approx(0, abs=1e-7), 1.0, 0.0)
    assert found.perplexity == pytest.approx(found.dense_perplexity)
    logits = source.model(input_ids=tokens.input_ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens.input_ids[:, 1:].flatten())
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert found.num_tokens == tokens.input_ids.numel()


def test_half_measures_the_second_half_after_a_dense_first(setting) -> None:
    source, tokens, masked = setting
    thresholds = dict.fromkeys(source.projections, 0.5)
    half = evaluate(source.model, masked, tokens.input_ids, thresholds, prefill="half")
    whole = evaluate(source.model, masked, tokens.input_ids, thresholds)
    assert half.num_tokens == whole.num_tokens // 2
    with masked.masking(thresholds), masked.sparing((torch.arange(24) < 12).expand(6, -1)):
        sparse = source.model(input_ids=tokens.input_ids).logits[:, 12:].log_softmax(-1)
    dense = source.model(input_ids=tokens.input_ids).logits[:, 12:].log_softmax(-1)
    assert half.kl == pytest.approx(float((dense.exp() * (dense - sparse)).sum(-1).mean()), rel=1e-5)
    assert 0 < half.realised_sparsity < 1
