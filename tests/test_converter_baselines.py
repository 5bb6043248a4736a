"""CATS and R-Sparse: their maths against a twin written out here, and their way through bundle and runtime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_bundle import tiny_config, write_tiny_model
from tiny_source import tiny_source, tiny_tokens
from torch.nn import functional

from wisparse.converter.bench.divergence import evaluate
from wisparse.converter.model.masking import MaskedModel
from wisparse.converter.model.source import load_source
from wisparse.converter.model.sparsify import sparsify
from wisparse.converter.pipeline import convert
from wisparse.converter.searches import baselines
from wisparse.converter.searches.baselines import choose_rank, gate_sparsity, low_rank_factors, low_rank_sparsity
from wisparse.converter.searches.search import SearchResult, SearchSettings, search
from wisparse.converter.text.tokens import CalibrationTokens
from wisparse.formats.architectures import ModelConfig
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.formats.verify import verify_bundle
from wisparse.runtime.dense import without_masks
from wisparse.runtime.loader import load

TEXT = "def f(x):\n    return [x, 1]\n" * 40


def found(method: str, sparsity: float = 0.3) -> tuple[SearchResult, float]:
    """A search on the tiny model, and the sparsity it realises at every token but the first."""
    source, tokens = tiny_source(), tiny_tokens(8)
    result = search(source, tokens, SearchSettings(sparsity=sparsity, method=method, search="uniform"))
    sizes = {name: module.weight.numel() for name, module in source.projections.items()}
    with MaskedModel(source.projections) as masked:
        masked.set_thresholds(result.put_on(masked))
        masked.dense_tokens = ~tokens.keep
        with masked.counting() as realised:
            source.model(input_ids=tokens.input_ids)
            unread = realised()
    return result, sum(unread[name] * size for name, size in sizes.items()) / sum(sizes.values())


@pytest.mark.parametrize("method", ["cats", "rsparse"])
def test_the_budget_is_met_with_everything_that_is_read(method: str) -> None:
    result, realised = found(method)
    assert result.details["mean_sparsity"] == pytest.approx(0.3, abs=1e-9)
    assert realised == pytest.approx(0.3, abs=0.005)
    assert bool(result.gate_thresholds) == (method == "cats")


def test_cats_leaves_gate_and_attention_dense() -> None:
    result, _ = found("cats")
    for name, entry in result.projections.items():
        sparse = name.endswith(("up_proj", "down_proj"))
        assert (entry.sparsity > 0.5) == sparse
        assert entry.threshold == 0.0


def test_cats_by_hand() -> None:
    source = tiny_source()
    mlp = source.blocks[0].mlp
    x = 3 * torch.randn(7, 32)
    gate = functional.silu(mlp.gate_proj(x))
    keep = gate.abs() >= 0.1
    assert 0.2 < keep.float().mean() < 0.8
    # Neither up's rows nor down's columns outside are touched.
    down, up = mlp.down_proj.weight, mlp.up_proj.weight
    rows = [down[:, k] @ (g[k] * (up[k] @ one)) for g, k, one in zip(gate, keep, x, strict=True)]
    expected = torch.stack(rows)[None]
    x = x[None]
    with MaskedModel(source.projections) as masked:
        name = "model.layers.0.mlp.down_proj"
        masked.score_by_gate(name)
        masked.set_scale(name, torch.ones(48))
        masked.set_threshold(name, 0.1)
        torch.testing.assert_close(mlp(x), expected)
        masked.clear()
        torch.testing.assert_close(mlp(x), mlp.down_proj(gate * mlp.up_proj(x)))
    assert not mlp.gate_proj._forward_hooks


def test_rsparse_by_hand() -> None:
    torch.manual_seed(2)
    linear = torch.nn.Linear(16, 12).requires_grad_(False)
    x = torch.randn(3, 7, 16)
    left, right = low_rank_factors(linear.weight, 3)
    u, s, v = torch.linalg.svd(linear.weight)
    torch.testing.assert_close(left @ right, u[:, :3] @ torch.diag(s[:3]) @ v[:3])
    small = torch.where(x.abs() < 0.7, x, 0.0)
    expected = linear(x - small) + small @ (left @ right).T
    with MaskedModel({"p": linear}) as masked:
        masked.set_scale("p", torch.ones(16))
        masked.set_low_rank("p", (left, right))
        masked.set_threshold("p", 0.7)
        torch.testing.assert_close(linear(x), expected)
        masked.clear()
        torch.testing.assert_close(linear(x), x @ linear.weight.T + linear.bias)


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


def test_cats_refuses_what_up_and_down_cannot_give() -> None:
    config = ModelConfig.from_dict(tiny_config())
    assert gate_sparsity(config, 0.3) == pytest.approx(0.3 * (768 + 3 * 384) / 768)
    with pytest.raises(UsageError, match=r"at most 38\.0% .*choose 0\.37 or less"):
        gate_sparsity(config, 0.5)
    with pytest.raises(UsageError, match="--search uniform"):
        SearchSettings(method="cats", search="greedy")


def test_cats_is_refused_before_anything_is_read(text: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    for search_kind, message in (("auto", "only up and down are sparse"), ("greedy", "goes with --search uniform")):
        with pytest.raises(UsageError, match=message):
            convert(model, tmp_path / "out", method="cats", search=search_kind, sparsity=0.5, calibration=text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 4)
    return file


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
@pytest.mark.parametrize("method", ["cats", "rsparse"])
def test_a_bundle_runs_as_it_was_measured(
    method: str, model_type: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Random weights have no directions to spare; have some paths all the same.
    monkeypatch.setattr(baselines, "SHARES", (0.4,))
    model = write_tiny_model(tmp_path / "model", tiny_config(model_type))
    out = convert(
        model,
        tmp_path / "out",
        method=method,
        search="auto",
        sparsity=0.3,
        calibration=text,
        num_samples=4,
        seq_len=48,
        device="cpu",
    )
    verify_bundle(out)
    bundle = Bundle.open(out)
    assert method in str(bundle.beyond_masks)
    report = json.loads((out / "conversion_report.json").read_text())
    assert (report["block_sensitivity"], report["quality_against_sparsity"]) == (None, [])
    ids = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0))
    source = load_source(model, dtype=torch.float32, device="cpu")
    settings = SearchSettings(sparsity=0.3, method=method, search="uniform")
    again = search(source, _tokens(source, text), settings)
    with MaskedModel(source.projections) as masked:
        expected = evaluate(source.model, masked, ids, again.put_on(masked))
        masked.set_thresholds(again.put_on(masked))
        logits = source.model(input_ids=ids).logits[0]
    with load(out, dtype="float32") as loaded:  # auto: the other back ends refuse
        assert loaded.decoder.name == "torch"
        loaded.decoder.measure_sparsity(True)
        torch.testing.assert_close(loaded.decoder.logits(ids[0], 0), logits, atol=1e-4, rtol=1e-4)
        assert loaded.decoder.realised_sparsity() == pytest.approx(expected.realised_sparsity, abs=1e-6)
        half = loaded.decoder.logits(ids[0], 20)
        loaded.decoder.prefill(0, ids[0, :20], 20)
        for position in range(20, 40):
            row = loaded.decoder.decode(ids[0, position : position + 1])[0]
            torch.testing.assert_close(row, half[position], atol=1e-4, rtol=1e-4)
    with without_masks(loaded) as dense:
        torch.testing.assert_close(
            dense.decoder.logits(ids[0], 0), source.model(input_ids=ids).logits[0], atol=1e-4, rtol=1e-4
        )
    with pytest.raises(UsageError, match=f"numba cannot run this model: .*{method}.*only the plain PyTorch decoder"):
        load(out, backend="numba", device="cpu", dtype="float32")
    with pytest.raises(UsageError, match="only the runtime's plain PyTorch decoder"):
        sparsify(source.model, bundle)


def _tokens(source: object, text: Path) -> CalibrationTokens:
    from wisparse.converter.text.calibration import load_calibration

    return load_calibration([str(text)], source.tokenizer, None, 4, 48, 0)
