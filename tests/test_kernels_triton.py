"""The Triton kernels: against their twins (interpreted where there is no GPU), and compiled for Hopper; for two more
generations in the exhaustive run."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
CASES = {
    "kernels are their twins": "triton_cases.py",
    "products of codes and sampling are their twins": "triton_codes_cases.py",
    "experts are their twins": "triton_experts_cases.py",
    "the decoder is the plain one, with weights in codes too": "triton_decoder_cases.py",
    "the decoder keeps its promises": "triton_runtime_cases.py",
    "a head drafts as on other back ends": "test_runtime_heads.py",
    "graded experts are read by planes": "test_experts.py::test_graded_experts",
}
COMPILE = "triton_compile.py"
# Each file takes minutes under the interpreter, and waits its turn for a core.
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
QUICK = "quick"


def run(name: str) -> subprocess.CompletedProcess[str]:
    """Run a file of cases, or the compiler for an architecture (a number), in its own process: the interpreter is chosen
    when a kernel is decorated."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if name.isdigit():
        environment.pop("TRITON_INTERPRET", None)
        environment["TRITON_DEFAULT_FP_FUSION"] = "1"
        command = [sys.executable, str(TESTS / COMPILE), name]
    else:
        if not torch.cuda.is_available():
            environment["TRITON_INTERPRET"] = "1"
        chosen = (
            ["-m", QUICK, *(file for file in CASES.values() if file.startswith("triton_"))] if name == QUICK else [name]
        )
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "--tb=short", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS, check=False)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """What this session's tests here wait for, all started with the first: as many at a time as there are cores."""
    selected = " ".join(item.nodeid for item in request.session.items)
    # In the order in which they are waited for: the first test must not wait for all others.
    names = [QUICK] if "test_quick_cases" in selected else []
    names += [name for title, name in CASES.items() if f"[{title}]" in selected]
    names += [str(arch) for arch in SHARED_LIMIT if f"limits[{arch}]" in selected]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(run, name) for name in names}


def test_quick_cases(outcomes) -> None:
    """The few that watch the costliest slips, with the fast tests: the mask, the nucleus, the cache's end."""
    done = outcomes[QUICK].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.exhaustive  # minutes each under the interpreter
@pytest.mark.parametrize("title", CASES)
def test_cases(title, outcomes) -> None:
    done = outcomes[CASES[title]].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.exhaustive  # minutes
@pytest.mark.parametrize("arch", [90, 80, 120])
def test_kernels_compile_within_the_chips_limits(arch: int, outcomes) -> None:
    done = outcomes[str(arch)].result()
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["arch"] for row in rows} == {arch}
    for row in rows:
        assert row["shared"] + row["declared"] <= SHARED_LIMIT[row["arch"]], row
        # Lists lie in declared shared memory: 48 KiB with Triton's own, unless that alone is more: it asks the driver.
        has_lists = row["kernel"].startswith(("gemv", "experts")) and "fp32" not in row["kernel"]
        assert (row["declared"] > 0) == has_lists, row
        assert row["declared"] + (row["shared"] if row["shared"] <= 48 * 1024 else 0) <= 48 * 1024, row
        assert row["local"] == 0, row
        # Those without a block never reach the wait in the loop, and may not touch what is shared before another.
        # The product for many rows within vLLM is launched like any other, and so is what reads a prompt or begins a step.
        # Kernels with a mask by row are compiled without programmatic launches, as vLLM launches them.
        plainly = (
            row["kernel"].startswith(("chunk", "codes", "embed", "many experts", "mask gemm", "subnormals", "widen"))
            or "by row" in row["kernel"]
        )
        # Experts' gate and up wait for the choice, and in the product once more, which is over at once.
        waits = 2 if "idle" in row["kernel"] or row["kernel"].startswith("experts 2048") else 0 if plainly else 1
        assert row["waits"] == (row["arch"] >= 90) * waits, row
        # A sum that two threads poll is taken when one of them has seen it.
        polls = "waiting" in row["kernel"] or (row["kernel"].startswith("experts") and row["polls_shared"] == 0)
        assert row["polls_shared"] == (0 if polls else -1), row
        # One row is the case that speed is promised for: it may not spill. Batches may, a little, and float32. That has no
        # tensor cores: a thread multiplies whole rows of q and keys, 4 bytes a number, and 512 wide they fill no register.
        words = set(row["kernel"].split())
        most = 4 * 512 if {"512", "fp32"} <= words else 512 if {"batch", "wide", "rows", "fp32"} & words else 32
        assert row["stack"] <= most, row
