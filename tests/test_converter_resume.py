"""A conversion killed at any moment and run again gives the bytes of an undisturbed one."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import tiny_config, write_tiny_model

HARNESS = Path(__file__).with_name("kill_conversion.py")
SEARCHES: dict[str, dict[str, Any]] = {
    "fisher": {},
    "additive": {},
    "paper": {"num_generations": 3, "num_offspring": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "tiny", tiny_config(num_hidden_layers=3))


def conversions(folder: Path, settings: dict[str, Any], kill_at: list[str | None]) -> list[dict[str, Any]]:
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"settings": settings, "kill_at": kill_at}))
    done = subprocess.run([sys.executable, HARNESS, plan], capture_output=True, text=True, timeout=280)
    print(done.stderr)
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


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


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
def test_killed_runs_end_with_the_same_bytes(search: str, model: Path, tmp_path: Path) -> None:
    undisturbed = settings_for(model, tmp_path / "undisturbed", search)
    killed = settings_for(model, tmp_path / "killed", search)
    [reference] = conversions(tmp_path, undisturbed, [None])
    assert reference["status"] == 0
    # Seeded points in the order in which a run passes them, so that every attempt comes further than the one before.
    labels = list(dict.fromkeys(reference["labels"]))
    # After the last trace is gone the conversion is over, not killed.
    labels = labels[: labels.index("after unlink OUT.work/units/finish.state")]
    saves = [label for label in labels if "OUT.work/units" in label and " unlink " not in label]
    others = [label for label in labels if label not in saves]
    choose = random.Random(f"kill {search}")
    chosen = {*choose.sample(saves, 3), *choose.sample(others, 2)}
    attempts = conversions(tmp_path, killed, [*sorted(chosen, key=labels.index), None])
    # A point around the cleaning up may be passed no more once the bundle is found complete; the others all kill.
    statuses = [one["status"] for one in attempts]
    assert statuses[-1] == 0
    assert statuses[:-1] in ([-signal.SIGKILL] * 4, [-signal.SIGKILL] * 5)
    assert digests(tmp_path / "killed") == digests(tmp_path / "undisturbed")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"plan.json", "killed", "undisturbed"}, "neither state nor partial folders stay"
