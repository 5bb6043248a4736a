"""The Triton kernels: against their twins (interpreted where there is no GPU), and compiled for three generations."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TESTS = Path(__file__).resolve().parent
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}


def run_cases(name: str) -> None:
    """Run a file of cases in its own process: the interpreter is chosen when a kernel is decorated."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(TESTS / name)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_kernels_are_their_twins() -> None:
    run_cases("triton_cases.py")


@pytest.mark.slow
def test_a_decode_step_is_the_plain_decoders() -> None:
    run_cases("triton_decoder_cases.py")


@pytest.mark.slow
def test_sampling_on_the_device_is_its_twin() -> None:
    run_cases("triton_sample_cases.py")


@pytest.mark.slow
def test_the_decoder_keeps_its_promises() -> None:
    run_cases("triton_runtime_cases.py")


@pytest.mark.slow
def test_kernels_compile_within_the_chips_limits() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, str(TESTS / "triton_compile.py"), *map(str, SHARED_LIMIT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["arch"] for row in rows} == set(SHARED_LIMIT)
    for row in rows:
        assert row["shared"] + row["room"] <= SHARED_LIMIT[row["arch"]], row
        # Lists lie in declared shared memory, of which there is 48 KiB unless the driver is asked for more.
        has_lists = row["kernel"].startswith("gemv") and "batch 1" in row["kernel"]
        assert (row["room"] > 0) == has_lists, row
        assert not has_lists or row["room"] + row["shared"] <= 48 * 1024, row
        assert row["local"] == 0, row
        # A sum that two threads look at is taken when one of them has seen it.
        assert row["looks_shared"] == (0 if "waiting" in row["kernel"] else -1), row
        # One row is the case that speed is promised for: it may not spill. Batches may, a little, and float64 sums.
        slower = "batch 4" in row["kernel"] or "fp32" in row["kernel"]
        assert row["stack"] <= (512 if slower else 32), row
