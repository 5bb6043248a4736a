"""NVIDIA's compute-sanitizer over the kernel tests, on our own kernels alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from gpu_models import need_gpu, out_option, save

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
KERNELS = [
    name
    for file in sorted((ROOT / "kernels" / "gpu").glob("*.py"))
    for name in re.findall(r"^def (\w+_kernel)\(", file.read_text("utf-8"), re.MULTILINE)
]
FILES = [f"triton_{one}cases.py" for one in ("", "codes_", "experts_", "sample_", "decoder_")]
# Reads far beyond the end of a tensor, through one of our kernels.
CONTROL = """
import torch
from wisparse.kernels.gpu.head import launch_embed
torch.set_default_device("cuda")
launch_embed(torch.tensor([10**6]), torch.zeros(4, 64), torch.empty(1, 64), torch.empty(1, 1))
torch.cuda.synchronize()
"""
# One half-precision type is enough where there are many cases, and the odd shapes: types differ in conversions, not in
# which addresses are used. The largest vocabulary alone takes minutes, and so do a thousand launches in turn.
_SHORT = (
    "not 128256 and not one_after_the_other and not (test_linears_are_the_twins and dtype1) "
    "and not (on_the_tensor_cores and (dtype0 or widths1 or widths2))"
)
SELECTION = {
    # A graph cannot be captured where every tensor is an allocation.
    "memcheck": f"{_SHORT} and not short_pieces_of_codes and not many_rows_of_codes",
    # No list of float32 weights lies in shared memory. Whole decoders end in an error of the sanitizer itself, and in float64
    # lanes that hold the same sum write it to the same place.
    "racecheck": f"{_SHORT} and not float32 and not (triton_cases and dtype0) and not decoder_cases",
}


def sanitizer(tool: str) -> list[str]:
    """The command in front of what is to be watched; the compiler's processes are not."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "500", "--launch-timeout", "60"]
    command += ["--target-processes", "application-only"]
    for kernel in KERNELS:
        command += ["--kernel-name", f"kns={kernel}"]
    return command


def control() -> dict:
    """Whether our kernels are watched at all: a read out of bounds has to be found."""
    command = [*sanitizer("memcheck"), sys.executable, "-c", CONTROL]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {"tool": "control", "watched": "Invalid __global__ read" in done.stdout and "_embed_kernel" in done.stdout}


def select(tool: str, only: str) -> list[str]:
    """The names of the cases that a tool watches."""
    wanted = f"({SELECTION[tool]}) and ({only})" if only else SELECTION[tool]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-k", wanted]
    done = subprocess.run([*command, *(str(TESTS / f) for f in FILES)], stdout=subprocess.PIPE, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def check(tool: str, limit: int, processes: int, only: str, out: Path | None) -> dict:
    """Run one tool over all its cases; what it counted."""
    cases = select(tool, only)
    processes = min(processes, max(1, len(cases)))
    environment = dict(os.environ)
    if tool == "memcheck":  # every tensor its own allocation, so that the end of one is not the start of another
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i in range(processes):
            names, log = Path(folder, f"{i}.txt"), Path(folder, f"{i}.log")
            names.write_text("\n".join(cases[i::processes]) + "\n")
            command = [*sanitizer(tool), sys.executable, "-m", "pytest", "-vv", "-o", "addopts="]
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*command, "-p", "no:cacheprovider", f"@{names}"], stdout=output, stderr=subprocess.STDOUT,
                    env=environment, cwd=TESTS.parent, start_new_session=True,
                )  # fmt: skip
            running.append((process, log))
        finished = True
        for process, _ in running:
            try:
                process.wait(max(0.0, limit - (time.perf_counter() - began)))
            except subprocess.TimeoutExpired:
                finished = False
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outputs = [log.read_text(errors="replace") for _, log in running]
    output = "\n".join(outputs)
    save(out, f"sanitizer-{tool}.log", output)
    passed, skipped = (len(re.findall(rf"^.*::.* {word}", output, re.MULTILINE)) for word in ("PASSED", "SKIPPED"))
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    row = {
        "tool": tool, "processes": processes, "cases": len(cases), "passed": passed, "skipped": skipped,
        "finished": finished and passed + skipped == len(cases), "summaries": sorted(set(summaries)),
        "findings": len(re.findall("========= (?:Error:|Warning:|Invalid)", output)),
        "failed": [process.returncode for process, _ in running if process.returncode],
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    said = len(summaries) == processes and all(summary.startswith("0 ") for summary in summaries)
    return row | {"clean": row["finished"] and said and not row["findings"] and not row["failed"]}


@click.command(context_settings={"show_default": True})
@click.argument("tools", nargs=-1, required=True, type=click.Choice(list(SELECTION)))
@click.option("--limit", default=180, help="Seconds for each tool.")
@click.option("--only", default="", help="Cases whose names pytest's -k finds by this, such as graded.")
@click.option("--processes", default=max(1, (os.cpu_count() or 2) - 2))
@out_option
def sanitize(tools: tuple[str, ...], limit: int, only: str, processes: int, out: Path | None) -> None:
    """compute-sanitizer over the kernel tests: memcheck, racecheck.

    memcheck looks for reads and writes beyond a tensor, racecheck for threads of a program that use shared memory without
    a barrier between them. PyTorch's and cuDNN's kernels run unwatched; that ours are watched is tried first, with a
    kernel given too little memory. The cases are dealt to as many processes as there are cores, each under a sanitizer of
    its own: what takes time is Python and the compiler, not the GPU.

    Printed: a line of JSON for each tool; exit status 1 on any finding, and if not every case ran. Each tool's whole
    output, with the name of every case, is written to sanitizer-TOOL.log.
    """
    need_gpu()
    if shutil.which("compute-sanitizer") is None:
        raise click.UsageError("expected NVIDIA's compute-sanitizer, found none; it comes with the CUDA toolkit")
    watched = control()
    print(json.dumps(watched), flush=True)
    rows = []
    for tool in tools:
        rows.append(check(tool, limit, processes, only, out))
        print(json.dumps(rows[-1]), flush=True)
    sys.exit(0 if watched["watched"] and all(row["clean"] for row in rows) else 1)
