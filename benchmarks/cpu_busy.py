"""What a user's commands keep of their speed on a CPU where other programs run too.

    PYTHONPATH=. python benchmarks/cpu_busy.py --bundle out --out benchmarks/results/cpu-busy.json
    PYTHONPATH=. python benchmarks/cpu_busy.py --model examples/pycode-llama-6m --out …

The verbs as they are typed, with the threads they choose themselves, quiet and beside 1, 2 and 4 foreign processes that
do nothing but spin; each of those in a session of its own, as if other users had started it. ``--bundle`` takes about
two minutes on two cores, ``--model`` (a conversion, quiet and beside four) eight. Nothing else may run meanwhile: the
last row is quiet again, and tells whether the machine kept its speed. A fair share for one thread beside B spinning
processes on C cores is min(1, C / (B + 1)) of a core. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from quality import describe_machine

BUSY = (0, 1, 2, 4)
PROMPT = "def mean(values):\n"
NEW_TOKENS = 400


@contextmanager
def beside(count: int) -> Iterator[None]:
    """So many processes spin meanwhile."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    busy = [subprocess.Popen(spin, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run(*arguments: str) -> str:
    """One verb's standard output."""
    command = [sys.executable, "-m", "wisparse", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def decode(bundle: str, busy: int) -> dict[str, Any]:
    """Tokens per second of the two verbs."""
    load = os.getloadavg()[0]
    with beside(busy):
        bench = json.loads(run("bench", bundle, "--device", "cpu", "--json").splitlines()[-1])
        answer = run(
            "generate", bundle, "--device", "cpu", "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--json"
        )
    return {
        "busy": busy,
        "load_before": round(load, 2),
        "bench": round(bench["sparse"]["tok_per_s"], 1),
        "bench_dense": round(bench["dense"]["tok_per_s"], 1),
        "generate": round(json.loads(answer)["generation_tok_per_s"], 1),
    }


def convert(model: str, busy: int) -> dict[str, Any]:
    """Seconds of a conversion."""
    load = os.getloadavg()[0]
    with beside(busy), tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run(
            *("convert", model, "--sparsity", "0.5", "--calibration", "self", "--device", "cpu"),
            *("-o", str(Path(folder) / "out"), "-q", "--json"),
        )
        return {"busy": busy, "load_before": round(load, 2), "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", help="what to decode with")
    parser.add_argument("--model", help="what to convert")
    parser.add_argument("--out", type=Path, help="a JSON file; what it holds of the other half stays")
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    found["machine"] = describe_machine(torch.device("cpu"))
    if arguments.bundle:
        decode(arguments.bundle, 0)  # compiles, and fills the files' cache
        rows = [decode(arguments.bundle, busy) for busy in (*BUSY, 0)]
        for row in rows:
            for verb in ("bench", "generate"):
                row[f"{verb}_over_quiet"] = round(row[verb] / rows[0][verb], 3)
        found["decode"] = rows
        print(f"{'busy':>4} {'load':>6} {'bench':>8} {'ratio':>6} {'generate':>9} {'ratio':>6}")
        for row in rows:
            print(
                f"{row['busy']:4} {row['load_before']:6.2f} {row['bench']:8.0f} {row['bench_over_quiet']:6.2f} "
                f"{row['generate']:9.0f} {row['generate_over_quiet']:6.2f}"
            )
    if arguments.model:
        found["conversion"] = rows = [convert(arguments.model, busy) for busy in (0, 4)]
        for row in rows:
            row["over_quiet"] = round(row["seconds"] / rows[0]["seconds"], 2)
            print(f"{row['busy']:4} busy: {row['seconds']:7.1f} s, {row['over_quiet']:.2f} of quiet")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
