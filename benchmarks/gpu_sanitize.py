"""NVIDIA's compute-sanitizer over the kernel tests, on our own kernels alone.

    PYTHONPATH=. python -m pytest -q tests/triton_cases.py  # compiles the kernels, which the sanitizer would slow down
    PYTHONPATH=. python benchmarks/gpu_sanitize.py memcheck racecheck

memcheck looks for reads and writes beyond a tensor, racecheck for threads of a program that use shared memory without a
barrier between them. PyTorch's and cuDNN's kernels run unwatched. Prints one line of JSON last; fails on any finding.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

KERNELS = ("_gemv", "_attention", "_embed", "_logits", "_next", "_count", "_threshold", "_draw")
TESTS = Path(__file__).resolve().parent.parent / "tests"
FILES = ("triton_cases.py", "triton_sample_cases.py")
# One dtype and a share of the tiles are enough: dtypes differ in conversions, not in which addresses are used. The
# largest vocabulary alone takes minutes.
SELECTION = {
    "memcheck": "not 128256",
    "racecheck": "not 128256 and not float32 and not dtype0 and not (test_gemv_is_the_twins and dtype1)",
}


def check(tool: str, limit: int) -> dict:
    """Run one tool; what it counted."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", "--launch-timeout", "60"]
    for kernel in KERNELS:
        command += ["--kernel-name", f"kns={kernel}_kernel"]
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", SELECTION[tool]]
    command += [str(TESTS / file) for file in FILES]
    environment = dict(os.environ)
    if tool == "memcheck":  # every tensor its own allocation, so that the end of one is not the start of another
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=limit
        )
        output, finished = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode(errors="replace") if isinstance(expired.stdout, bytes) else expired.stdout or ""
        finished = False
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"sanitizer-{tool}.log").write_text(output[-4_000_000:])
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    tests = re.findall(r"^(\d+ passed.*|.*\d+ failed.*)$", output, re.MULTILINE)
    return {
        "tool": tool,
        "summary": summary[-1] if summary else None,
        "tests": tests[-1] if tests else None,
        "finished": finished,
        "findings": output.count("========= Error:") + output.count("========= Warning:"),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="+", choices=SELECTION)
    parser.add_argument("--limit", type=int, default=180, help="seconds for each tool")
    arguments = parser.parse_args()
    rows = []
    for tool in arguments.tools:
        rows.append(check(tool, arguments.limit))
        print(json.dumps(rows[-1]), flush=True)
    sys.exit(0 if all(row["finished"] and not row["findings"] for row in rows) else 1)


if __name__ == "__main__":
    main()
