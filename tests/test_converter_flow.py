"""A model as the chain of its blocks is the model: the same logits, and the gradients of the same loss."""

from __future__ import annotations

import pytest
import torch
from runtime_models import FAMILIES, HYBRIDS, make_checkpoint
from tiny_bundle import byte_tokenizer

from wisparse.converter.flow import BlockFlow
from wisparse.converter.masking import MaskedModel
from wisparse.converter.sensitivity import backward
from wisparse.converter.source import SourceModel, load_source
from wisparse.converter.statistics import block_inputs, first_inputs


@pytest.fixture(scope="module", params=[*FAMILIES, *HYBRIDS])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp("source"))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return load_source(folder, device="cpu")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 101, (3, 20), generator=torch.Generator().manual_seed(0))


def flow_of(source: SourceModel, ids: torch.Tensor) -> BlockFlow:
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[:, 0] = False
    return BlockFlow(source.model, source.config, ids, keep, 2)


@torch.no_grad()
def test_logits_are_the_models(source: SourceModel, ids: torch.Tensor) -> None:
    flow = flow_of(source, ids)
    for batch, part in enumerate(flow.input_ids):
        expected = source.model(input_ids=part, use_cache=False).logits
        found = flow.logits(flow.finish(0, batch, flow.start()[batch]))
        assert expected.abs().max() > 1, "logits this small would hide any difference"
        assert (found - expected).abs().max() < 1e-4


def test_gradients_are_the_models(source: SourceModel, ids: torch.Tensor) -> None:
    """Of a loss through every projection alone, next to autograd's through the whole model."""
    flow, found, expected = flow_of(source, ids), {}, {}
    kept = {}

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[:, 7].sum()

    def receive(name: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
        found[name] = gradient

    def keep_input(name: str, x: torch.Tensor) -> torch.Tensor:
        kept[name] = x.view_as(x) if x.requires_grad else x.detach().requires_grad_(True)
        return kept[name]

    with MaskedModel(source.projections) as masked:
        backward(flow, masked, 0, lambda final: [loss(flow.logits(final))], receive)
        with torch.enable_grad(), masked.replacing(keep_input):
            logits = source.model(input_ids=flow.input_ids[0], use_cache=False).logits
            values = torch.autograd.grad(loss(logits[flow.counted[0]]), list(kept.values()))
    expected = {name: value[flow.counted[0]] for name, value in zip(kept, values, strict=True)}
    assert set(found) == set(expected) == set(source.projections)
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


@torch.no_grad()
def test_inputs_are_what_the_projections_multiply(source: SourceModel, ids: torch.Tensor) -> None:
    flow = flow_of(source, ids)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in source.projections}
    with MaskedModel(source.projections) as masked:
        with masked.observing(lambda name, x: seen[name].append(x)):
            for part in flow.input_ids:
                source.model(input_ids=part, use_cache=False)
        hidden = flow.start()
        for index in range(source.config.num_blocks):
            names = [projection.name for projection in source.config.projections(index)]
            sharing, first = first_inputs(flow, masked, index, hidden, names)
            last = next(place for place, name in enumerate(names) if name.endswith((".o_proj", ".out_proj")))
            assert sharing == names[:last]
            inputs, hidden = block_inputs(flow, masked, index, hidden, names)
            assert torch.equal(first, inputs[names[0]])
            for name in names:
                expected = torch.cat([x[kept] for x, kept in zip(seen[name], flow.counted, strict=True)])
                torch.testing.assert_close(inputs[name], expected, rtol=1e-4, atol=1e-5, msg=name)
