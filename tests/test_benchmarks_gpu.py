"""The scripts that measure a GPU, where there is none: one sentence, before anything is made."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
COMMANDS = {
    "gpu_counters": [],
    "gpu_decode": ["--shape", "llama-3.1-8b", "--parts", "baseline", "decode"],
    "gpu_families": [],
    "gpu_fixed": ["qkv", "16"],
    "gpu_load": [],
    "gpu_packed": ["sweep"],
    "gpu_prompts": ["--bundle", "none"],
    "gpu_sample": [],
    "gpu_serve": [],
    "gpu_tiles": [],
    "gpu_tokens": [],
    "gpu_tune": [],
    "gpu_verbs": [],
    "gpu_vllm": [],
    "gpu_weights": [],
}


@pytest.mark.parametrize("script", COMMANDS)
def test_without_a_gpu_they_say_so(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("began to work"))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *COMMANDS[script]])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    assert "GPU" in said.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
