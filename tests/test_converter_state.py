"""State survives kills and notices damage; a conversion killed at any moment and run again ends with the same bytes."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_bundle import digests, tiny_config, write_tiny_model

from wisparse.converter.state import Stages, check_folder, remove_state
from wisparse.formats.errors import ResourceError, UsageError

FINGERPRINT = {"model": "abc", "sparsity": [0.5]}
VALUE = {"scale": torch.arange(3.0), "rows": [[1, 2], [3]], "name": "x"}

# For what is not to be computed again. The class: an instance would keep its frames, and with them a lock.
fail = Mock(side_effect=AssertionError)


def saved(folder: Path, fingerprint: dict[str, Any] = FINGERPRINT, **stages: Any) -> Stages:
    state = Stages().open(folder, fingerprint)
    for name, value in stages.items():
        state.run(name, lambda value=value: value)
    state.close()
    return state


def test_finished_stages_are_not_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "work", first=VALUE, second=None)
    state = Stages().open(tmp_path / "work", FINGERPRINT)
    found = state.run("first", fail)
    assert torch.equal(found.pop("scale"), VALUE["scale"])
    assert found == {"rows": [[1, 2], [3]], "name": "x"}
    assert state.run("second", fail) is None
    assert state.run("third", lambda: 3) == 3
    assert "(finished: first, second)" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "headless", "swap"])
def test_damaged_result_counts_as_not_done(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, a="x" * 100, b="y" * 100)
    path, other = tmp_path / "a.stage", tmp_path / "b.stage"
    content = path.read_bytes()
    changed = {"flip": content[:-5] + b"z" + content[-4:], "cut": content[:-1], "empty": b"", "headless": content[64:]}
    path.write_bytes(changed.get(damage, other.read_bytes()))
    state = Stages().open(tmp_path, FINGERPRINT)
    assert state.run("b", fail) == "y" * 100
    assert state.run("a", lambda: "again") == "again"
    assert "the state of stage a is damaged" in caplog.text
    assert state.run("a", fail) == "again"


@pytest.mark.parametrize("content", ['{"fingerprint": ', "[]", '{"fingerprint": {}}'])
def test_damaged_fingerprint_starts_over(content: str, tmp_path: Path) -> None:
    saved(tmp_path, a=1)
    (tmp_path / "state.json").write_text(content)
    assert Stages().open(tmp_path, FINGERPRINT).run("a", lambda: 2) == 2


def test_kill_between_emptying_and_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, a=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(AssertionError):
            Stages().open(tmp_path, {"model": "other"})
    assert Stages().open(tmp_path, FINGERPRINT).run("a", lambda: 2) == 2


def test_disk_full_loses_only_the_stage_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Stages().open(tmp_path, FINGERPRINT)
    state.run("a", lambda: 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ResourceError, match="everything computed before is kept"):
            state.run("b", lambda: 2)
    assert (state.run("a", fail), state.run("b", lambda: 3)) == (1, 3)
    assert not list(tmp_path.rglob("*.partial"))


def test_two_conversions_in_one_folder(tmp_path: Path) -> None:
    state = Stages().open(tmp_path, FINGERPRINT)
    with pytest.raises(UsageError, match="another conversion"):
        Stages().open(tmp_path, FINGERPRINT)
    with pytest.raises(UsageError, match="another conversion"):
        remove_state(tmp_path, default=True)
    state.close()
    Stages().open(tmp_path, FINGERPRINT).close()


@pytest.mark.parametrize("name", ["thesis.tex", "units/thesis.tex", ".git/HEAD"])
def test_other_files_are_never_removed(name: str, tmp_path: Path) -> None:
    saved(tmp_path, a=1)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("years of work")
    for action in (
        lambda: Stages().open(tmp_path, FINGERPRINT),
        lambda: Stages().open(tmp_path, {"seed": 1}),
        lambda: remove_state(tmp_path, default=True),
        lambda: check_folder(tmp_path),
    ):
        with pytest.raises(UsageError, match=f"found '{name}'"):
            action()
    with pytest.raises(UsageError, match="is not a folder"):
        check_folder(tmp_path / name)
    assert (tmp_path / name).read_text() == "years of work"


def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    """Also if the run that found it was killed, and another one finishes; the default place is always ours."""
    mine, link, default, made = (tmp_path / name for name in ("mine", "link", "out.work", "made"))
    for folder in (mine, default, tmp_path / "linked"):
        folder.mkdir()
    link.symlink_to("linked")
    for folder in (mine, link, default, made):
        for _ in range(2):
            saved(folder, a=1)
        remove_state(folder, default=folder == default)
    remove_state(tmp_path / "never", default=True)
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "linked", "mine"]


def test_a_read_only_file_system_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(UsageError, match=r"--work-dir .*Read-only file system.*choose another"):
        Stages().open(tmp_path / "work", FINGERPRINT)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match=r"--work-dir .*; choose another --work-dir"):
        check_folder(tmp_path / "work")


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
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, HARNESS], **pipes) as harness:

        def ask(settings: dict[str, Any], kill_at: list[str | None]) -> list[dict[str, Any]]:
            print(json.dumps({"settings": settings, "kill_at": kill_at}), file=harness.stdin, flush=True)
            return json.loads(harness.stdout.readline())

        yield ask
        harness.stdin.close()


@pytest.mark.parametrize(
    ("search", "num_kills"),
    [("refine", 1), *(pytest.param(search, 3, marks=pytest.mark.exhaustive) for search in SEARCHES)],
)
def test_killed_runs_end_alike(search: str, num_kills: int, conversions: Any, model: Path, tmp_path: Path) -> None:
    """Kill a conversion at so many points of each kind, and compare what the last run ends with."""
    settings = {"model": str(model), "search": search, "num_samples": 4, "seq_len": 24, "device": "cpu"} | SEARCHES[
        search
    ]
    [reference] = conversions({**settings, "output_dir": str(tmp_path / "undisturbed")}, [None])
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
    attempts = conversions({**settings, "output_dir": str(tmp_path / "killed")}, [*chosen, None])
    assert [one["status"] for one in attempts] == [-signal.SIGKILL] * len(chosen) + [0], chosen
    assert digests(tmp_path / "killed") == digests(tmp_path / "undisturbed")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"killed", "undisturbed"}, "neither state nor partial folders stay"
