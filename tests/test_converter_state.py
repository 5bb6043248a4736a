"""State survives kills and notices damage; a conversion killed at any moment and run again, or run by several processes at
once, ends with the bytes of one; one message when one of them fails."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_formats_folder import forked, killed_at
from tiny_bundle import digests, tiny_config, write_tiny_model

from wisparse.converter import processes
from wisparse.converter.api import convert
from wisparse.converter.state import Stages, check_folder, remove_state
from wisparse.formats.errors import ResourceError, UsageError
from wisparse.formats.machine import Place, torchrun_place

pytestmark = pytest.mark.usefixtures("quick_conversion")

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


SEARCHES: dict[str, dict[str, Any]] = {
    "refine": {"sparsity": [0.4, 0.5], "num_samples": 24},  # enough tokens for three steps
    "fisher": {"max_kl": 5e-3},
    "paper": {"sparsity": 0.5, "num_generations": 3, "num_offspring": 3},
}


@pytest.mark.parametrize(
    ("search", "step"),
    [("refine", 45), *(pytest.param(search, 7, marks=pytest.mark.exhaustive) for search in SEARCHES)],
)
def test_killed_runs_end_alike(search: str, step: int, tmp_path: Path) -> None:
    """Killed again and again, ever later: while stages are saved, while the bundle is written, while the state is removed."""
    model = write_tiny_model(tmp_path / "model", tiny_config(num_hidden_layers=3))
    settings = {"search": search, "num_samples": 4, "seq_len": 24, "device": "cpu", "progress": False}
    settings |= SEARCHES[search]
    convert(model, tmp_path / "undisturbed", **settings)
    number, status, left, stages = 0, -signal.SIGKILL, [set[str]()], set[str]()
    while status:
        assert status == -signal.SIGKILL
        number += 3 if "killed.partial" in left[-1] else step
        status = killed_at(number, lambda: convert(model, tmp_path / "killed", **settings))
        left.append({path.name for path in tmp_path.iterdir()} - {"model", "undisturbed"})
        stages |= {path.stem for path in (tmp_path / "killed.work").rglob("*.stage")}
    assert {"killed.work"} in left
    assert {"killed.work", "killed.partial"} in left
    assert {"killed.work", "killed"} in left
    assert stages > {"calibration", *({"sensitivities", "level-0.5"} if search == "refine" else ())}
    assert left[-1] == {"killed"}, "neither state nor partial folders stay"
    assert digests(tmp_path / "killed") == digests(tmp_path / "undisturbed")


Run = Callable[..., tuple[int, str, str]]


def torchrun(count: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += map(str, arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.parametrize("enabled", [None, False])
def test_without_a_terminal_a_stage_prints_a_line_now_and_then(
    enabled: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "_LINE_S", 0.02)
    progress = processes.Progress(enabled)
    with progress.stage("Measuring", 8) as stage, progress.stage("Inside"):
        stage.advance(3)
    with progress.stage("Searching", 4) as stage:
        stage.advance(2)
        stage.note("KL 0.1")
        time.sleep(0.5)
    time.sleep(0.1)
    lines = [line.split(" s elapsed  ")[-1] for line in capsys.readouterr().err.splitlines()]
    if enabled is None:
        assert lines[:4] == ["Measuring: 0 of 8", "Inside", "Searching: 0 of 4", "Searching: 2 of 4, KL 0.1"]
        assert 4 < len(lines) < 60
    else:
        assert lines == []


def test_bars_fit_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    progress = processes.Progress(True)
    for title in ("Checking", "Writing calibration text", "Refinement", "Inside", "Measuring"):
        with progress.stage(title, 128) as stage:
            stage.advance(100)
            stage.note("KL of step 0.0123" if title == "Refinement" else "")
    lines = [line.rstrip() for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert [re.sub(r" +\S+ +100/128 elapsed 0:00:0\d left \S+", "", line) for line in lines] == [
        "[1/7] Checking", "[3/7] Writing calibration text", "[5/7] Refinement KL of step 0.0123", "[5/7] Inside", "[6/7] Measuring",
    ]  # fmt: skip


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_only_all_that_torchrun_sets_makes_a_worker() -> None:
    assert torchrun_place(TORCHRUN) == Place(1, 2, 1, 2)
    assert torchrun_place({**TORCHRUN, "WORLD_SIZE": "8", "RANK": "5", "LOCAL_WORLD_SIZE": "4"}) == Place(5, 8, 1, 4)
    assert torchrun_place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) == Place()
    rank_and_size = {"RANK": "", "WORLD_SIZE": ""}
    for harmless in ({}, {"RANK": "0"}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "10.0.0.1"}, rank_and_size):
        assert torchrun_place(harmless) == Place(), harmless
    for name in TORCHRUN:
        place = torchrun_place({key: value for key, value in TORCHRUN.items() if key != name})
        assert replace(place, ignored="") == Place()
        assert f"torchrun sets {name} too" in place.ignored


WRONG = {"RANK": ["2", "-1", "1.0", "one", "²", "9" * 5000, "0"], "WORLD_SIZE": ["1", "0", " "]}
WRONG |= {"LOCAL_RANK": ["2", "x"], "MASTER_PORT": ["0", "70000", "http"], "LOCAL_WORLD_SIZE": ["1", "3", "many"]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_variables_that_contradict_each_other_are_ignored_in_a_sentence(name: str, value: str) -> None:
    place = torchrun_place({**TORCHRUN, name: value})
    assert replace(place, ignored="") == Place()
    assert "converts alone" in place.ignored


@pytest.mark.parametrize(
    ("search", "options"),
    [
        ("refine", "--num-samples 25"),
        pytest.param("paper", "--num-samples 4 --num-generations 2 --num-offspring 5", marks=pytest.mark.exhaustive),
    ],
)
def test_three_processes_write_the_bytes_of_one(
    search: str, options: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three: the micro-batches, blocks and candidates do not divide evenly, and one process may have nothing.
    model = write_tiny_model(tmp_path / "model", tiny_config(num_hidden_layers=4 if search == "refine" else 2))
    # torch leaves products of up to 16**3 multiplications to MKL: k_proj's, of 8 rows, for one sequence of up to 32 tokens.
    settings = f"--search {search} {options} --sparsity 0.2,0.15 --device cpu --seq-len 40 -o"
    command = ["convert", model, *settings.split()]
    assert run(*command, tmp_path / "one")[0] == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))

    def take_part(rank: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        code, out, err = run(*command, tmp_path / "three")
        (tmp_path / f"said-{rank}").write_text(out)
        assert code == 0, err

    children = [forked(partial(take_part, rank)) for rank in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert ["Converted" in (tmp_path / f"said-{rank}").read_text() for rank in range(3)] == [True, False, False]
    assert digests(tmp_path / "one") == digests(tmp_path / "three")
    assert not list(tmp_path.glob("*.work")), "no state stays"


FAILS = """
from wisparse.converter.processes import joined
with joined("cpu") as (processes, _):
    assert processes.gather(processes.rank) == [0, 1]
    if processes.rank == 1:
        raise OSError("the disk of this test is full")
    processes.gather(None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fails.py"], "OSError: the disk of this test is full"),
        (["-m", "wisparse", "convert", "/nowhere", "--sparsity", "2", "-o", "/nowhere/out"], "--sparsity: expected"),
    ],
)
def test_a_failing_process_ends_all_with_one_message(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS)
    began = time.monotonic()
    done = torchrun(2, *arguments)
    assert done.returncode != 0
    assert time.monotonic() - began < 60
    assert done.stderr.count(words) == 1
