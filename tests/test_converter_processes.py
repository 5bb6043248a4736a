"""Several processes at one conversion: the same result as one, and one message when one of them fails."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from search_together import SEARCHES, flat, settings
from tiny_bundle import digests, tiny_config, write_tiny_model
from tiny_source import tiny_source, tiny_tokens

from wisparse.converter import processes
from wisparse.converter.pipeline import convert
from wisparse.converter.search.search import search
from wisparse.formats.machine import Place, torchrun_place

SCRIPT = Path(__file__).with_name("search_together.py")


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
def test_three_processes_find_what_one_finds(tmp_path: Path) -> None:
    # Three: the micro-batches, blocks and candidates do not divide evenly, and one process may have nothing.
    done = torchrun(3, SCRIPT, tmp_path / "found")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"found-{index}.json").read_text()) for index in range(3)]
    assert found[0] == found[1] == found[2]
    torch.set_num_threads(1)
    for kind in SEARCHES:
        assert found[0][kind] == flat(search(tiny_source(), tiny_tokens(8), settings(kind))), kind


@pytest.mark.slow
def test_two_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", tiny_config(num_hidden_layers=3))
    convert(model, tmp_path / "one", sparsity=[0.4, 0.5], device="cpu", num_samples=4, seq_len=24, progress=False)
    options = ["--sparsity", "0.5,0.4", "--device", "cpu", "--num-samples", "4", "--seq-len", "24", "-o"]
    together = torchrun(2, "-m", "wisparse", "convert", model, *options, tmp_path / "two")
    assert together.returncode == 0, together.stderr
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert together.stdout.count("Converted") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model", "one", "two"}, "no state stays"


FAILS = """
from wisparse.converter.processes import joined
with joined("cpu") as (processes, _):
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
