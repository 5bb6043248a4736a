"""The commands of docs/first-model.md in their order, with what they print, their time and their memory.

    python benchmarks/first_model.py --source "$(python benchmarks/smollm2.py)" --device cpu --out RESULTS
    python benchmarks/first_model.py --device cuda       # the model from the Hub

``--source`` is a folder that stands for the Hub's model, so that no network is needed. Prints one block of output a
command and a table; ``--out`` writes both, and JSON.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from serve_soak import address_of

from wisparse.runtime.benchmark import machine

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
BODY = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40})
# Each with what is typed into it. `serve` runs while the command below it does.
COMMANDS: dict[str, str | None] = {
    f"wisparse advise {MODEL}": None,
    f"wisparse-convert {MODEL} -o smollm2 --search fisher --num-samples 4 --seq-len 128": None,
    f"wisparse generate smollm2 --prompt '{QUESTION}'": None,
    f"wisparse generate smollm2 --prompt '{QUESTION}' --sparsity 0": None,
    f"wisparse generate smollm2 --prompt '{QUESTION}' --weights int8": None,
    "wisparse chat smollm2 --max-new-tokens 40": f"{QUESTION}\nAnd of Italy?\n",
    "wisparse bench smollm2": None,
    "wisparse serve smollm2": None,
    f"curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d '{BODY}'": None,
}


_PROGRESS = re.compile(r" *\d+ s elapsed |(still )?compiling|resuming from")
_GPU_HEADING = "## Time and memory on a GPU\n"  # of the page; outputs above it are a CPU's


class Gpu:
    """The largest memory that the GPU's processes had together since `reset`, asked for twice a second."""

    def __init__(self) -> None:
        self.mebibytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            done = subprocess.run(ask, capture_output=True, text=True)
            self.mebibytes = max([self.mebibytes, *map(int, done.stdout.split())])
            time.sleep(0.5)


def run(command: str, typed: str | None, folder: Path) -> dict[str, Any]:
    """Output, wall and processor seconds and the peak resident bytes of one command."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as file, tempfile.TemporaryFile("w+") as given:
        given.write(typed or "")
        given.seek(0)
        words = shlex.split(command)
        program = shutil.which(words[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        process = subprocess.Popen([program or words[0], *words[1:]], cwd=folder, stdin=given, stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
        file.seek(0)
        output = file.read().replace("\r", "")
    if status:
        raise click.ClickException(f"{command}\n{output}")
    seconds = time.perf_counter() - began
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    times = {"seconds": seconds, "processor_seconds": used.ru_utime + used.ru_stime}
    return {"command": command, "output": output, **times, "peak_bytes": peak}


def block(found: dict[str, Any]) -> str:
    """Command and output without lines of progress."""
    lines = [line.rstrip() for line in found["output"].splitlines() if not _PROGRESS.match(line)]
    return "\n".join([f"$ {found['command']}", *lines]).rstrip()


def table(found: list[dict[str, Any]]) -> str:
    columns = {"wall, s": ("seconds", 1), "processor, s": ("processor_seconds", 1), "memory, GB": ("peak_bytes", 1e9)}
    if "gpu_peak_bytes" in found[0]:
        columns["GPU memory, GB"] = ("gpu_peak_bytes", 1e9)
    rows = [" | ".join(["| command", *columns]) + " |", "|---|" + "--:|" * len(columns)]
    for one in found:
        if one["command"].startswith("curl"):
            continue  # its time and memory are the server's
        numbers = [f"{one[key] / unit:.{1 if unit == 1 else 2}f}" for key, unit in columns.values()]
        command = one["command"].replace(MODEL, "MODEL").replace(f"'{QUESTION}'", "...")
        rows.append(" | ".join([f"| `{command}`", *numbers]) + " |")
    return "\n".join(rows)


def with_outputs(page: str, found: list[dict[str, Any]]) -> str:
    """The page with the outputs and the table of this device's part replaced."""
    cpu, heading, gpu = page.partition(_GPU_HEADING)
    on_gpu = "gpu_peak_bytes" in found[0]
    part = gpu if on_gpu else cpu
    for one in found:
        shown = re.compile(rf"^\$ {re.escape(one['command'])}\n(?:(?!\$ |```).*\n)*", re.MULTILINE)
        text = block(one) + "\n"
        part = shown.sub(lambda _, text=text: text, part)
    part = re.sub(r"^\| command .*\n(\|.*\n)*", lambda _: table(found) + "\n", part, count=1, flags=re.MULTILINE)
    return cpu + heading + part if on_gpu else part + heading + gpu


@click.command()
@click.option("--source", type=click.Path(path_type=Path, exists=True), help="A folder instead of the Hub's model.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--out", type=click.Path(path_type=Path), help="Write PATH.json and PATH.md.")
@click.option("--page", type=click.Path(path_type=Path, exists=True), help="Put outputs and table into this page.")
def main(source: Path | None, device: str, out: Path | None, page: Path | None) -> None:
    gpu = Gpu() if device != "cpu" and shutil.which("nvidia-smi") else None
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = []
    with tempfile.TemporaryDirectory(prefix="wisparse-first-") as name:
        folder = Path(name)
        if source is not None:
            (folder / MODEL).parent.mkdir()
            (folder / MODEL).symlink_to(source.resolve())
        for command, typed in COMMANDS.items():
            if command.startswith("wisparse serve"):
                words = [str(Path(sys.executable).parent / "wisparse"), *shlex.split(command)[1:]]
                server = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
                print(f"$ {command} &\n{address_of(server)}\n", flush=True)
                continue
            if gpu is not None:
                gpu.mebibytes = 0
            found.append(run(command, typed, folder))
            if gpu is not None:
                found[-1]["gpu_peak_bytes"] = gpu.mebibytes << 20
            print(block(found[-1]), end="\n\n", flush=True)
        server.terminate()
        server.wait(90)
    conditions = {name: version(name) for name in ("wisparse", "transformers")}
    conditions |= machine(torch.device("cpu" if gpu is None else "cuda"))
    print(table(found), f"\n\n{', '.join(f'{name} {value}' for name, value in conditions.items())}")
    if page is not None:
        page.write_text(with_outputs(page.read_text("utf-8"), found), "utf-8")
    if out is not None:
        out.with_suffix(".md").write_text("\n\n".join([*map(block, found), table(found), ""]), "utf-8")
        document = json.dumps({"machine": conditions, "commands": found}, indent=1)
        out.with_suffix(".json").write_text(document + "\n", "utf-8")


if __name__ == "__main__":
    main()
