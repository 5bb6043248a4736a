"""What a conversion measures at its end, against the runtime's own figures and against the model taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import make_bundle

from wisparse.converter import measurement
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.calibration_state import CalibrationState
from wisparse.converter.measurement import MaskedLogits, block_sensitivity, measure
from wisparse.converter.search.search import SearchResult
from wisparse.converter.sensitivity import kl_rows
from wisparse.converter.settings import ConvertSettings
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import AccessError
from wisparse.runtime.backends import load


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("measurement") / "bundle", 0.5)


@pytest.fixture(scope="module")
def source(example_model: Path) -> SourceModel:
    return load_source(example_model, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def found(bundle: Path) -> SearchResult:
    """A search's outcome, read from a bundle."""
    opened = Bundle.open(bundle)
    return SearchResult(
        projections={entry.name: entry for entry in opened.recipe.projections},
        channel_scales={name: mask.channel_scale for name, mask in opened.masks.items()},
    )


def tokens(samples: int = 3, length: int = 24) -> CalibrationTokens:
    ids = torch.randint(4, 8000, (samples, length), generator=torch.Generator().manual_seed(1))
    return CalibrationTokens.from_rows(ids.tolist(), "self", 0)


@pytest.mark.parametrize("start", [0, 11, 24])
def test_masked_logits_are_the_runtimes(source: SourceModel, found: SearchResult, bundle: Path, start: int) -> None:
    ids = tokens(1).input_ids[0]
    with load(bundle, backend="torch", dtype="float32") as model:
        model.decoder.measure_sparsity(True)
        expected = model.decoder.logits(ids, start)
        realised = model.decoder.realised_sparsity()
    with MaskedLogits(source, found) as logits:
        logits.measure_sparsity(True)
        torch.testing.assert_close(logits(ids, start), expected, atol=2e-3, rtol=1e-3)
        if start < len(ids):
            assert logits.realised_sparsity() == pytest.approx(realised, abs=1e-4)
        logits.measure_sparsity(False)
        assert logits.realised_sparsity() is None
    plain = source.model(input_ids=ids[None]).logits[0]
    assert torch.equal(plain, source.model(input_ids=ids[None]).logits[0])  # the masks are off again


def test_measure(source: SourceModel, found: SearchResult) -> None:
    first, second = (measure(source, tokens(), {0.5: found}, default=0.5) for _ in range(2))
    assert first == second
    assert first.text == "text that the model wrote, not what it was calibrated on"
    assert first.levels[0.5].sparse.num_tokens == 3 * 24
    assert 0.01 < first.levels[0.5].sparse.kl < 3
    assert first.levels[0.5].realised_sparsity == pytest.approx(0.5, abs=0.15)
    assert [len(row) for row in first.sensitivity.kl] == [6, 6, 6]
    assert all(low < high for low, high in zip(first.sensitivity.kl[0], first.sensitivity.kl[2], strict=True))


def test_a_data_set_that_went_away_does_not_cost_the_search(
    source: SourceModel, found: SearchResult, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object) -> None:
        raise AccessError("no network")

    monkeypatch.setattr(measurement, "load_calibration", gone)
    result = measure(source, tokens(), {0.5: found}, default=0.5, calibration=["org/corpus"])
    assert result.text == "the calibration text itself"
    assert "flatters it: no network" in caplog.text


def test_blocks_are_measured_alone_only_where_the_report_shows_it(
    source: SourceModel, found: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("this takes time, and nobody asked for it")

    with monkeypatch.context() as patch:
        patch.setattr(measurement, "block_sensitivity", measured)
        assert measure(source, tokens(), {0.5: found}, default=0.5, sensitivity=False).sensitivity is None
    assert measure(source, tokens(), {0.5: found}, default=0.5, sensitivity=True).sensitivity is not None
    reports = {
        (report, device): ConvertSettings("model", Path("out"), report=report).full_report(device)
        for report in ("auto", "full", "brief")
        for device in ("cpu", "cuda")
    }
    assert {case for case, full in reports.items() if full} == {("auto", "cuda"), ("full", "cpu"), ("full", "cuda")}


def test_block_sensitivity_by_hand(source: SourceModel, found: SearchResult) -> None:
    level, index = 0.5, 2
    with CalibrationState(source, tokens(), batch_size=2) as calib:
        for name in calib.names:
            calib.set_scale(name, found.channel_scales[name])
        sensitivity = block_sensitivity(calib, (level,))
    names = [name for name in source.projections if f".{index}." in name]
    ids, keep = tokens().input_ids, tokens().keep
    inputs: dict[str, torch.Tensor] = {}
    hooks = [
        source.projections[name].register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
        for name in names
    ]
    dense = source.model(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    hooks = []
    for name in names:
        scale = found.channel_scales[name]
        threshold = torch.quantile((inputs[name][keep].abs() * scale).flatten(), level)

        def drop(_: Any, args: Any, scale: Any = scale, threshold: Any = threshold) -> Any:
            kept = (args[0].abs() * scale >= threshold) | ~keep[..., None]
            return (torch.where(kept, args[0], 0.0),)

        hooks.append(source.projections[name].register_forward_pre_hook(drop))
    sparse = source.model(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    expected = kl_rows(dense[keep].log_softmax(-1), sparse[keep]).mean()
    assert sensitivity.num_tokens == int(keep.sum())
    assert sensitivity.kl[0][index] == pytest.approx(float(expected), rel=0.02)
