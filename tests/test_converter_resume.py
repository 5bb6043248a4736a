"""A conversion killed at any moment and run again gives the bytes of an undisturbed one."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import tiny_config, write_tiny_model

HARNESS = Path(__file__).with_name("kill_conversion.py")
SEARCHES: dict[str, dict[str, Any]] = {
    "refine": {"sparsity": [0.4, 0.5], "num_samples": 24},  # enough tokens for three steps
    "fisher": {"max_kl": 5e-3},
    "paper": {"sparsity": 0.5, "num_generations": 3, "num_offspring": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "tiny", tiny_config(num_hidden_layers=3))


@pytest.fixture(scope="module")
def conversions() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """``conversions(settings, kill_at)``: see kill_conversion.py."""
    with subprocess.Popen(
        [sys.executable, HARNESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as harness:

        def ask(settings: dict[str, Any], kill_at: list[str | None]) -> list[dict[str, Any]]:
            print(json.dumps({"settings": settings, "kill_at": kill_at}), file=harness.stdin, flush=True)
            return json.loads(harness.stdout.readline())

        yield ask
        harness.stdin.close()


def digests(bundle: Path) -> dict[str, str]:
    return {
        str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(bundle.rglob("*"))
        if path.is_file()
    }


def settings_for(model: Path, out: Path, search: str) -> dict[str, Any]:
    return {
        "model": str(model),
        "output_dir": str(out),
        "search": search,
        "num_samples": 4,
        "seq_len": 24,
        "device": "cpu",
        **SEARCHES[search],
    }


def check_kills(search: str, num_kills: int, conversions: Any, model: Path, tmp_path: Path) -> None:
    """Kill a conversion at so many points of each kind, and compare what the last run ends with."""
    [reference] = conversions(settings_for(model, tmp_path / "undisturbed", search), [None])
    assert reference["status"] == 0
    # Seeded points in the order in which a run passes them, so that every attempt comes further than the one before:
    # while stages are saved, while the bundle is written, and while the state is removed.
    labels = list(dict.fromkeys(reference["labels"]))
    placed = labels.index("after rename OUT.partial")
    over = labels.index("after unlink OUT.work/state.json")  # from there on it is over, not killed
    kinds = (
        [label for label in labels[:placed] if ".stage" in label],
        [label for label in labels[:placed] if "OUT.partial" in label],
        labels[placed:over],
    )
    choose = random.Random(f"kill {search}")
    chosen = sorted({label for kind in kinds for label in choose.sample(kind, num_kills)}, key=labels.index)
    attempts = conversions(settings_for(model, tmp_path / "killed", search), [*chosen, None])
    assert [one["status"] for one in attempts] == [-signal.SIGKILL] * len(chosen) + [0], chosen
    assert digests(tmp_path / "killed") == digests(tmp_path / "undisturbed")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"killed", "undisturbed"}, "neither state nor partial folders stay"


def test_killed_runs_end_with_the_same_bytes(conversions: Any, model: Path, tmp_path: Path) -> None:
    check_kills("refine", 1, conversions, model, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("search", SEARCHES)
def test_runs_killed_more_often_end_with_the_same_bytes(
    search: str, conversions: Any, model: Path, tmp_path: Path
) -> None:
    check_kills(search, 3, conversions, model, tmp_path)
