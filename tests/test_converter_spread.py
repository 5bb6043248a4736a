"""Models larger than the device: weights in memory or in their files give the bundle that an ample device gives."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from tiny_bundle import tiny_config, write_tiny_model

from wisparse.converter import pipeline, preflight, source
from wisparse.converter.pipeline import convert
from wisparse.converter.settings import ConvertSettings
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.errors import ResourceError

pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "model", tiny_config(num_hidden_layers=3))


def give_room(patch: pytest.MonkeyPatch, room: int) -> None:
    """To the weights, beside what the work needs."""
    patch.setattr(preflight, "_BASE_BYTES", 0)
    patch.setattr(preflight, "working_bytes", lambda *_: 1 << 20)
    patch.setattr(preflight, "available_bytes", lambda device: (1 << 20) + room)


def digests(bundle: Path) -> dict[str, str]:
    return {
        str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in bundle.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("search", ["refine", "greedy"])
def test_a_model_larger_than_memory_is_read_from_its_files(
    search: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = {"refine": 24, "greedy": 4}[search]  # enough for the refinement's steps
    options = {
        "sparsity": 0.5,
        "search": search,
        "device": "cpu",
        "num_samples": samples,
        "seq_len": 16,
        "progress": False,
        "rotation": "none",  # `auto` leaves alone what is read from its files
    }
    convert(model, tmp_path / "ample", **options)
    devices: list[set[str]] = []

    def load(*args: object, **kwargs: object) -> SourceModel:
        source = load_source(*args, **kwargs)  # type: ignore[arg-type]
        devices.append({parameter.device.type for parameter in source.model.parameters()})
        return source

    monkeypatch.setattr(pipeline, "load_source", load)
    give_room(monkeypatch, 30 << 10)  # the weights take 40
    convert(model, tmp_path / "tight", **options)
    assert devices == [{"cpu", "meta"}]
    assert digests(tmp_path / "tight") == digests(tmp_path / "ample")


def test_weights_are_fetched_from_where_they_are(model: Path) -> None:
    ample, tight = load_source(model, device="cpu"), load_source(model, device="cpu", max_memory={"cpu": 0})
    assert {parameter.device.type for parameter in tight.model.parameters()} == {"meta"}
    assert tight.device == torch.device("cpu")
    for name in ample.projections:
        assert torch.equal(tight.weight(name), ample.weight(name))


def test_the_plan_says_where_the_weights_go(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ConvertSettings(str(model), tmp_path / "out", num_samples=2, seq_len=16, device="cpu")
    assert preflight.preflight(settings).weights_on == "cpu"
    give_room(monkeypatch, 30 << 10)
    assert preflight.preflight(settings).weights_on == "memory, the model's files"
    give_room(monkeypatch, 0)
    with pytest.raises(ResourceError, match="GB of memory"):
        preflight.preflight(settings)
    give_room(monkeypatch, 30 << 10)


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (None, r"but it needs the package accelerate: pip install 'accelerate>=1\.15'"),
        ("1.14.0", r"but accelerate 1\.14\.0 is too old: pip install 'accelerate>=1\.15'"),
        ("0.34.2", r"but accelerate 0\.34\.2 is too old"),
        ("1.15.0", None),
        ("2.0.0.dev0", None),
    ],
)
def test_the_version_that_can_spread_a_model_is_named(
    version: str | None, sentence: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    settings = ConvertSettings(str(model), tmp_path / "out", num_samples=2, seq_len=16, device="cpu")
    give_room(monkeypatch, 30 << 10)
    monkeypatch.setattr(source, "version", installed)
    if sentence is None:
        assert preflight.preflight(settings).max_memory is not None
        return
    with pytest.raises(ResourceError, match=sentence):
        preflight.preflight(settings)
