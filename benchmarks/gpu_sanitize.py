"""NVIDIA's compute-sanitizer over the kernel tests, on our own kernels alone.

    PYTHONPATH=. python -m pytest -q tests/triton_cases.py  # compiles the kernels, which the sanitizer would slow down
    PYTHONPATH=. python benchmarks/gpu_sanitize.py memcheck racecheck

memcheck looks for reads and writes beyond a tensor, racecheck for threads of a program that use shared memory without a
barrier between them. PyTorch's and cuDNN's kernels run unwatched; that ours are watched is tried first, with a kernel
given too little memory. Prints a line of JSON for each tool; fails on any finding.
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

KERNELS = (
    "sparse_gemv",
    "masked_gemm",
    "packed_gemv",
    "_attention",
    "_delta_net",
    "_embed",
    "_logits",
    "_next",
    "_count",
    "_threshold",
    "_draw",
)
TESTS = Path(__file__).resolve().parent.parent / "tests"
FILES = ("triton_cases.py", "triton_codes_cases.py", "triton_sample_cases.py", "triton_decoder_cases.py")
# Reads far beyond the end of a tensor, through one of our kernels.
CONTROL = """
import torch
from wisparse.kernels.gpu.head import launch_embed
torch.set_default_device("cuda")
launch_embed(torch.tensor([10**6]), torch.zeros(4, 64), torch.empty(1, 64), torch.empty(1, 1))
torch.cuda.synchronize()
"""
# One dtype and a share of the tiles are enough: dtypes differ in conversions, not in which addresses are used. The
# largest vocabulary alone takes minutes, and so do a thousand launches one after the other.
_SHORT = "not 128256 and not one_after_the_other"
SELECTION = {
    "memcheck": _SHORT,
    "racecheck": f"{_SHORT} and not float32 and not dtype0 and not (test_gemv_is_the_twins and dtype1)",
}


def sanitizer(tool: str) -> list[str]:
    """The command in front of what is to be watched."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "500"]
    for kernel in KERNELS:
        command += ["--kernel-name", f"kns={kernel}_kernel"]
    return command


def control() -> dict:
    """Whether our kernels are watched at all: a read out of bounds has to be found."""
    command = [*sanitizer("memcheck"), sys.executable, "-c", CONTROL]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {"tool": "control", "watched": "Invalid __global__ read" in done.stdout and "_embed_kernel" in done.stdout}


def check(tool: str, limit: int) -> dict:
    """Run one tool; what it counted."""
    command = [
        *sanitizer(tool),
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        SELECTION[tool],
    ]
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
    tests = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*?)(?: =+)?$", output, re.MULTILINE)
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
    watched = control()
    print(json.dumps(watched), flush=True)
    rows = []
    for tool in arguments.tools:
        rows.append(check(tool, arguments.limit))
        print(json.dumps(rows[-1]), flush=True)
    sys.exit(0 if watched["watched"] and all(row["finished"] and not row["findings"] for row in rows) else 1)


if __name__ == "__main__":
    main()
