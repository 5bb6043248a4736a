"""int4 weights are fitted in the coordinates that cost less, and the report says what both cost."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_bundle import tiny_config, write_tiny_model

from wisparse.converter import pipeline
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.gptq import compare_coordinates
from wisparse.converter.source import full_config, load_source
from wisparse.converter.state import Stages
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint

Run = Callable[..., tuple[int, str, str]]
OPTIONS = ["--weights", "int4", "--sparsity", "0.3", "--search", "uniform"]
OPTIONS += ["--num-samples", "2", "--seq-len", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(hidden_size=64, head_dim=16, intermediate_size=96, tie_word_embeddings=True)
    return write_tiny_model(tmp_path_factory.mktemp("coordinates") / "tiny", config)


def text(seed: int) -> CalibrationTokens:
    rows = torch.randint(64, (3, 24), generator=torch.Generator().manual_seed(seed))
    return CalibrationTokens.from_rows(rows.tolist(), "random", seed)


def test_both_are_measured_and_nothing_is_left_behind(model: Path, tmp_path: Path) -> None:
    source = load_source(model, torch.float32, "cpu")
    checkpoint, ids = Checkpoint.open(model, complete=full_config), text(3).input_ids
    before = source.model(input_ids=ids).logits
    stages = Stages(tmp_path)
    found = compare_coordinates(source, checkpoint, text(0), lambda: text(1), lambda: text(2), 0.5, stages)
    assert sorted(found) == ["none", "pca"]
    assert all(0.0 < kl < 10.0 for kl in found.values())
    torch.testing.assert_close(source.model(input_ids=ids).logits, before, rtol=0, atol=0)
    # A killed run goes on with what was measured.
    assert sorted(path.stem for path in tmp_path.glob("*.stage")) == ["coordinates", "rotation"]
    assert compare_coordinates(source, checkpoint, text(0), None, None, 0.5, Stages(tmp_path)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize("better", ["none", "pca"])
def test_the_lower_kl_decides(better: str, model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    kls = {"none": 0.2, "pca": 0.2, better: 0.1}
    monkeypatch.setattr(pipeline, "compare_coordinates", lambda *_: kls)
    code, out, _ = run("convert", model, "-o", tmp_path / "out", *OPTIONS)
    recipe = Bundle.open(tmp_path / "out").recipe
    assert (code, recipe.rotation is not None) == (0, better == "pca")
    assert recipe.search["coordinates"] == {"sparsity": 0.3, "kl": kls}
    assert f"KL {kls['pca']:.3g} nats/token rotated, {kls['none']:.3g} as the source has them" in out


def test_only_int4_is_measured_and_only_where_nobody_chose(model: Path, tmp_path: Path, run: Run, monkeypatch):
    monkeypatch.setattr(pipeline, "compare_coordinates", None)
    monkeypatch.setattr("wisparse.runtime.forecast._ROUNDS", 1)
    for number, changes in enumerate((["--weights", "int8"], ["--rotation", "pca"], ["--rotation", "none"])):
        assert run("convert", model, "-o", tmp_path / str(number), *OPTIONS, *changes, "-q")[0] == 0
    _, plan, _ = run("convert", model, "-o", tmp_path / "dry", *OPTIONS, "--dry-run", "--json")
    assert json.loads(plan)["rotation"] == "auto"
