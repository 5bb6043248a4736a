"""The scripts that measure a GPU, where there is none: one sentence, before anything is made."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
# By script; where one has several ways in, which stands behind a dot.
COMMANDS = {
    "gpu_decode": ["--shape", "llama-3.1-8b", "--parts", "baseline", "decode"],
    "gpu_packed": ["sweep"],
    "gpu_packed.check": ["check"],
    "gpu_sanitize": ["memcheck"],
    "gpu_serve": [],
    "gpu_tiles": [],
    "gpu_tokens": [],
    "gpu_verbs": [],
    "gpu_vllm": [],
    "gpu_weights": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_gpu_they_say_so(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("began to work"))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("began to work"))
    monkeypatch.setenv("OUT", str(tmp_path / "results"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script = command.partition(".")[0]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *COMMANDS[command]])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    assert "GPU" in said.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_check_of_everything_says_so(tmp_path: Path) -> None:
    """Whether ``nvidia-smi`` is missing or finds no device: nothing is made, and nothing looks as if it had passed."""
    none = tmp_path / "bin" / "nvidia-smi"
    none.parent.mkdir()
    none.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    none.chmod(0o755)
    bash, tools = "/bin/bash", tmp_path / "tools"
    tools.mkdir()
    for tool in ("dirname", "wc", "mkdir", "rm", "grep", "basename", "tail", "cut", "tr"):
        found = shutil.which(tool)
        assert found
        (tools / tool).symlink_to(found)
    for path in (tools, f"{none.parent}{os.pathsep}{tools}"):
        command = [bash, str(BENCHMARKS / "gpu_check.sh"), str(tmp_path / "results"), "none"]
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(path)})
        assert done.returncode == 2, done.stderr
        assert not done.stdout
        assert done.stderr.splitlines() == ["gpu_check.sh: expected an NVIDIA GPU, found none that nvidia-smi lists"]
        assert not (tmp_path / "results").exists()
