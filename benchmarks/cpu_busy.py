"""What a user's commands keep of `bench`'s speed on a CPU, and of their own where other programs run too.

    PYTHONPATH=. python benchmarks/cpu_busy.py --bundle out --out benchmarks/results/cpu-busy.json
    PYTHONPATH=. python benchmarks/cpu_busy.py --model examples/pycode-llama-6m --out …

The verbs as they are typed, with the threads they choose themselves, quiet and beside 1, 2 and 4 foreign processes that
do nothing but spin; each of those in a session of its own, as if other users had started it. Every figure is tokens
after the first over their time: `bench`'s and `generate`'s as they print it, `serve`'s on the clock of a client that
only reads its socket. ``--bundle`` takes about eight minutes on two cores (``--busy 0`` three), ``--model`` (a
conversion, quiet and beside four) eight. Nothing else may run meanwhile: the last row is quiet again, and tells whether
the machine kept its speed. A fair share for one thread beside B spinning processes on C cores is min(1, C / (B + 1)) of
a core. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
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
NEW_TOKENS = 200, 800
ROUNDS = 2


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


def generate(bundle: str, tokens: int) -> float:
    """Tokens per second, as the verb's last line says."""
    asked = ("generate", bundle, "--device", "cpu", "--prompt", PROMPT, "--max-new-tokens", str(tokens))
    found = subprocess.run([sys.executable, "-m", "wisparse", *asked], check=True, capture_output=True, text=True)
    (rate,) = re.findall(r"generation \d+ tokens, ([\d,.]+) tok/s", found.stderr)
    return float(rate.replace(",", ""))


def serve(bundle: str, tokens: int) -> list[float]:
    """Tokens per second of streamed answers, one after the other, from the first event to the last."""
    asked = ("--device", "cpu", "--port", "0", "--alias", "model", "--speculative-config", "off")
    command = [sys.executable, "-m", "wisparse", "serve", bundle, *asked]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if line.startswith("serving"))
        port = int(re.findall(r":(\d+)/v1", line)[0])
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
        rates = []
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer, times, text = connection.getresponse(), [], b""
            while part := answer.read1():
                times.append(time.perf_counter())
                text += part
            assert b'"finish_reason":"length"' in text
            rates.append((tokens - 1) / (times[-1] - times[0]))
        return rates
    finally:
        server.terminate()
        server.wait()


def bench(bundle: str, tokens: int) -> float:
    """Tokens per second of the sparse model."""
    asked = ("--device", "cpu", "--max-new-tokens", str(tokens), "--runs", "3", "--json")
    return float(json.loads(run("bench", bundle, *asked).splitlines()[-1])["sparse"]["tok_per_s"])


def decode(bundle: str, busy: int) -> dict[str, Any]:
    """Tokens per second of the verbs, for short and long answers; in turns, as the machine's speed changes."""
    row: dict[str, Any] = {"busy": busy, "load_before": round(os.getloadavg()[0], 2)}
    with beside(busy):
        for tokens in NEW_TOKENS:
            rates: dict[str, list[float]] = {"bench": [], "generate": [], "serve": []}
            for _ in range(ROUNDS):
                rates["bench"].append(bench(bundle, tokens))
                rates["generate"] += [generate(bundle, tokens) for _ in range(2)]
                rates["serve"] += serve(bundle, tokens)
            for verb, found in rates.items():
                row[f"{verb} {tokens}"] = round(statistics.median(found), 1)
                row[f"{verb} {tokens} over bench"] = round(row[f"{verb} {tokens}"] / row[f"bench {tokens}"], 3)
    return row


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
    parser.add_argument("--busy", type=int, nargs="*", default=BUSY, help="processes beside the verbs, a row each")
    parser.add_argument("--model", help="what to convert")
    parser.add_argument("--out", type=Path, help="a JSON file; what it holds of the other half stays")
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    found["machine"] = describe_machine(torch.device("cpu"))
    if arguments.bundle:
        generate(arguments.bundle, 8)  # compiles, and fills the files' cache
        found["decode"] = rows = [decode(arguments.bundle, busy) for busy in (*arguments.busy, 0)]
        for row in rows:
            row["over_quiet"] = {
                name: round(rate / rows[0][name], 3) for name, rate in row.items() if name[-1].isdigit()
            }
            print(row)
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
