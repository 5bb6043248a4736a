"""Four programs give the same float32 tokens of one bundle, and what makes one part is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "agreement.py"


@pytest.mark.slow
def test_torch_numba_transformers_and_onnx_runtime_agree(example_model: Path) -> None:
    """Thresholds on scores, as quantiles are, parted two groups of them on a third of the prompts."""
    shape = ["--num-samples", "4", "--seq-len", "256", "--prompts", "8", "--tokens", "30"]
    command = [sys.executable, str(BENCHMARK), str(example_model), "--search", "fisher", *shape]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["models"]
    assert len(found["agreeing"]) == 6
    assert found["all"] >= 7
    for one in found["parted"]:
        assert one["why"]["distance"] <= 4 * one["why"]["rounding"] < 1e-4
