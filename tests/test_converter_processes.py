"""Several processes at one conversion: the same result as one, and one message when one of them fails."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_bundle import digests, tiny_config, write_tiny_model

from wisparse.converter import processes
from wisparse.formats.machine import Place, torchrun_place

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
    lines = [line.split(" s  ")[-1] for line in capsys.readouterr().err.splitlines()]
    if enabled is None:
        assert lines[:4] == ["Measuring: 0 of 8", "Inside", "Searching: 0 of 4", "Searching: 2 of 4, KL 0.1"]
        assert 4 < len(lines) < 60
    else:
        assert lines == []


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "options"),
    [("refine", "--num-samples 25"), ("paper", "--num-samples 4 --num-generations 2 --num-offspring 5")],
)
def test_three_processes_write_the_bytes_of_one(search: str, options: str, tmp_path: Path, run: Run) -> None:
    # Three: the micro-batches, blocks and candidates do not divide evenly, and one process may have nothing.
    model = write_tiny_model(tmp_path / "model", tiny_config(num_hidden_layers=3))
    command = [
        "convert",
        model,
        *f"--search {search} {options} --sparsity 0.5,0.4 --device cpu --seq-len 24 -o".split(),
    ]
    assert run(*command, tmp_path / "one")[0] == 0
    together = torchrun(3, "-m", "wisparse", *command, tmp_path / "three")
    assert together.returncode == 0, together.stderr
    assert digests(tmp_path / "one") == digests(tmp_path / "three")
    assert together.stdout.count("Converted") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model", "one", "three"}, "no state stays"


FAILS = """
from wisparse.converter.processes import joined
with joined("cpu") as (processes, _):
    if processes.index == 1:
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
