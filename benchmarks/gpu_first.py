"""First tokens, streams and gaps over HTTP: ``wisparse serve`` beside another OpenAI-compatible server, on a GPU.

    PYTHONPATH=. python benchmarks/gpu_first.py --weights native int4
    PYTHONPATH=. python benchmarks/gpu_first.py --weights native int4 --peer 'vllm serve {model} --port {port} \\
        --load-format dummy --max-model-len 20480 --no-enable-prefix-caching'

The Llama-3.1-8B shape: a bundle of random weights with thresholds calibrated to 50%, as ``gpu_bundle.py`` makes it. Each
server runs with its defaults but for the context; the peer gets the same ``config.json``, for codes with
compressed-tensors' quantisation: int4 in groups of 128, int8 and fp8 by channel, fp8 with activations in fp8. Every prompt is token ids that no prompt before it had.

    first_ms    to the first token's event: the first request's after the start, and the median of those behind it
    streams     greedy answers of 200 tokens after 5, started together: tokens over the time from start to the last one
    gap         the longest pause of four running answers while a prompt of 8,000 tokens is read
    memory_gb   what ``nvidia-smi`` shows once the server is ready, and after the streams

Prints a line for each server, and one line of JSON last (also to ``$OUT/gpu-first.json`` if OUT is set).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_bundle import ROOT, SPARSITY, endless_source, environment
from gpu_models import need_gpu

from wisparse.runtime.serve.transport import open_socket

LENGTHS = (100, 1000, 4000, 16000)
STREAMS = (1, 8, 16, 32)
TOKENS = 200  # of an answer
SECONDS = 45.0  # for one answer
_BYTE = {"num_bits": 8, "symmetric": True}
# The peer's weights by the type of ours: compressed-tensors' format, how weights are stored, and activations.
PEER = {
    "int8": ("pack-quantized", _BYTE | {"type": "int", "strategy": "channel"}, None),
    "int4": ("pack-quantized", _BYTE | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None),
    "fp8": (
        "float-quantized", _BYTE | {"type": "float", "strategy": "channel"},
        _BYTE | {"type": "float", "strategy": "token", "dynamic": True},
    ),
}  # fmt: skip


@dataclass
class Answer:
    """One streamed answer, by the client's clock: when it was asked for, and when each event with text came."""

    began: float
    at: list[float] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.at[0] - self.began


class Client:
    """Streams greedy completions from a server; any thread may ask."""

    def __init__(self, port: int) -> None:
        self._port = port

    def stream(self, prompt: Sequence[int], *, most: int = TOKENS, **more: Any) -> Answer:
        """An answer, which has to have ``most`` tokens."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": most, "stream": True, **more}
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        headers = {"content-type": "application/json", "connection": "close"}
        answer, ended = Answer(time.perf_counter()), False
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with connection.getresponse() as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read(2000)!r}")
            for line in response:
                now = time.perf_counter()
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    ended = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream ended with {event['error']}")
                answer.usage = event.get("usage") or answer.usage
                if any(choice["text"] for choice in event["choices"]):
                    answer.at.append(now)
        if not ended or answer.tokens < most or not answer.at:
            raise RuntimeError(f"expected a stream of {most} tokens, found {answer.usage} in {len(answer.at)} events")
        return answer

    def together(self, prompts: Sequence[Sequence[int]], **more: Any) -> list[Answer]:
        """Answers started at the same time."""
        barrier = threading.Barrier(len(prompts))

        def ask(prompt: Sequence[int]) -> Answer:
            barrier.wait(SECONDS)
            return self.stream(prompt, **more)

        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(ask, prompts))


def make_bundle(arguments: argparse.Namespace, folder: Path) -> Path:
    bundle = folder / ("example" if arguments.tiny else arguments.shape)
    if arguments.tiny:
        text = ("--calibration", ROOT / "converter", "--num-samples", 1, "--seq-len", 128, "--search", "uniform")
        more = ("--sparsity", SPARSITY, *text, "--device", arguments.device, "-q")
        command = ["-m", "wisparse", "convert", endless_source(folder / "source"), "-o", bundle, *more]
    else:
        command = [ROOT / "benchmarks" / "gpu_bundle.py", "--folder", bundle]
        command += ["--shape", arguments.shape, "--device", arguments.device]
        command += ["--blocks", arguments.blocks] if arguments.blocks else []
    subprocess.run([sys.executable, *map(str, command)], check=True, env=environment(), timeout=120)
    return bundle


def memory_gb() -> float | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0"), "--format=csv,noheader,nounits"]
    return float(subprocess.check_output([*command, "--query-gpu=memory.used"], text=True)) * 2**20 / 1e9


@contextlib.contextmanager
def server(command: list[str], port: int, log: Path) -> Iterator[tuple[Client, float]]:
    """A client of a server in a process of its own, once ``/health`` answers, and the seconds that took."""
    began = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment())
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            if process.poll() is not None or time.perf_counter() - began > 240:
                raise RuntimeError(f"the server did not start:\n{log.read_text('utf-8')[-3000:]}")
            time.sleep(0.1)
        yield Client(port), time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def gaps(client: Client, ids: Callable[[int], list[int]], length: int, **more: Any) -> dict[str, Any]:
    """How long four running answers wait while a prompt is read."""
    running = [ids(5) for _ in range(4)]

    def round_(read: bool) -> tuple[float, float]:
        moments: list[float] = []

        def reader() -> None:
            time.sleep(0.15)
            moments.append(time.perf_counter())
            if read:
                client.stream(ids(length), most=1, **more)
            else:
                time.sleep(0.3)
            moments.append(time.perf_counter())

        thread = threading.Thread(target=reader)
        thread.start()
        answers = client.together(running, most=500, **more)
        thread.join()
        if len(moments) != 2 or min(answer.at[-1] for answer in answers) < moments[1]:
            raise RuntimeError("the prompt was not read while the answers ran")
        waits = [
            after - before
            for answer in answers
            for before, after in zip(answer.at, answer.at[1:], strict=False)
            if after > moments[0] and before < moments[1]
        ]
        return 1e3 * max(waits), 1e3 * (moments[1] - moments[0])

    cold, _ = round_(True)
    quiet = [round_(False)[0] for _ in range(3)]
    found = [round_(True) for _ in range(5)]
    return {
        "running": len(running), "longest_gap_ms": max(gap for gap, _ in found), "each_ms": [gap for gap, _ in found],
        "first_time_ms": cold, "without_ms": max(quiet), "first_token_ms": statistics.median(ms for _, ms in found),
    }  # fmt: skip


def measure(client: Client, ids: Callable[[int], list[int]], arguments: argparse.Namespace, **more: Any) -> dict:
    """The figures of one server."""
    found: dict[str, Any] = {"memory_gb": [memory_gb()], "first_ms": {}, "streams": {}}
    for length in arguments.lengths:
        times = [1e3 * client.stream(ids(length), most=2, **more).first for _ in range(1 + arguments.rounds)]
        found["first_ms"][length] = {"first": times[0], "median": statistics.median(times[1:]), "all": times}
    for count in arguments.streams:
        rates = []
        for _ in range(3):
            answers = client.together([ids(5) for _ in range(count)], **more)
            seconds = max(one.at[-1] for one in answers) - min(one.began for one in answers)
            rates.append(sum(one.tokens for one in answers) / seconds)
        found["streams"][count] = statistics.median(rates)
    found["memory_gb"].append(memory_gb())
    try:
        found["gap"] = gaps(client, ids, arguments.gap, **more)
    except RuntimeError as error:
        found["gap"] = {"error": str(error)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has, to try it out")
    parser.add_argument("--weights", nargs="+", default=["native", "int4"])
    parser.add_argument("--peer", help="command of another server, with {model} and {port}")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS)
    parser.add_argument("--gap", type=int, default=8000, help="tokens of the prompt beside running answers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--options", default="", help="further options of wisparse serve")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the example model, to try the script out")
    arguments = parser.parse_args()
    need_gpu(parser, arguments.device)
    began, dice = time.perf_counter(), random.Random(1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = make_bundle(arguments, folder)
        config = json.loads((bundle / "config.json").read_text("utf-8"))

        def ids(count: int) -> list[int]:
            return [dice.randrange(10, config["vocab_size"] - 10) for _ in range(count)]

        longest = max(*arguments.lengths, arguments.gap) + 1024
        ours = [sys.executable, "-m", "wisparse", "serve", bundle, "--device", arguments.device]
        ours += ["--max-seq-len", longest, *shlex.split(arguments.options)]
        runs: list[tuple[str, Callable[[int], list[Any]], dict[str, Any]]] = [
            (weights, lambda port, weights=weights: [*ours, "--weights", weights, "--port", port], {})
            for weights in arguments.weights
        ]
        for weights in arguments.weights if arguments.peer else ():
            model = folder / f"peer-{weights}"
            model.mkdir()
            for file in bundle.glob("*token*.json"):
                os.symlink(file, model / file.name)
            plain = {key: value for key, value in config.items() if key not in ("wisparse", "quantization_config")}
            if weights in PEER:
                kind, stored, given = PEER[weights]
                group = {"targets": ["Linear"], "weights": stored, "input_activations": given}
                plain["quantization_config"] = {
                    "quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"],
                    "config_groups": {"group_0": group},
                }  # fmt: skip
            (model / "config.json").write_text(json.dumps(plain), "utf-8")

            def peer(port: int, model: Path = model) -> list[Any]:
                return shlex.split(arguments.peer.format(model=model, port=port))

            runs.append((f"peer {weights}", peer, {"model": str(model), "ignore_eos": True}))
        for name, command, more in runs:
            with open_socket("127.0.0.1", 0) as listener:
                port = listener.getsockname()[1]
            try:
                with server([*map(str, command(port))], port, folder / "log") as (client, seconds):
                    result[name] = {"ready_s": seconds, **measure(client, ids, arguments, **more)}
            except Exception as error:  # the other servers are worth their time all the same
                result[name] = {
                    "error": f"{type(error).__name__}: {error}",
                    "log": (folder / "log").read_text()[-2000:],
                }
            print(f"{time.perf_counter() - began:5.0f} s {name}: {json.dumps(result[name])}", flush=True)
    line = json.dumps(result)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu-first.json").write_text(line + "\n", "utf-8")
    print(line)
    if any("error" in one for one in result.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
