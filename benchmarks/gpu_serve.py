"""Servers in processes of their own and what a client on the same machine sees of them: first tokens, streams, gaps."""

from __future__ import annotations

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

import click
from gpu_codes import plugin_path
from gpu_models import Several, blocks_option, endless_source, need_gpu, out_option, save, shape_option

from wisparse.runtime.serve.transport import open_socket

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 200  # of an answer
SECONDS = 45.0  # for one answer
_BYTE = {"num_bits": 8, "symmetric": True}
# Another server's weights by the type of ours: compressed-tensors' format, how weights are stored, and activations.
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
    """One streamed answer by the client's clock: when it was asked for, and when each event with text came."""

    began: float
    at: list[float] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.at[0] - self.began)


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

    def rate(self, prompts: Callable[[], Sequence[Sequence[int]]], rounds: int = 3, **more: Any) -> float:
        """Tokens per second of answers started together, from the start to the last token; median of the rounds."""
        rates = []
        for _ in range(rounds):
            answers = self.together(prompts(), **more)
            seconds = max(one.at[-1] for one in answers) - min(one.began for one in answers)
            rates.append(sum(one.tokens for one in answers) / seconds)
        return statistics.median(rates)


def environment(*paths: Path) -> dict[str, str]:
    """The package from this checkout, wherever the script was started; ``paths``: searched too."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, paths), os.environ.get("PYTHONPATH", "")]),
    }


def free_port() -> int:
    with open_socket("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def server(command: Sequence[object], port: int, log: Path, *paths: Path) -> Iterator[tuple[Client, float]]:
    """A client of a server in a process of its own, once ``/health`` answers, and the seconds that took; ``paths``: where it
    finds modules."""
    began = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen([*map(str, command)], stdout=file, stderr=file, env=environment(*paths))
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


def peer_model(bundle: Path, weights: str, folder: Path) -> Path:
    """A folder with a bundle's ``config.json`` and tokenizer for a server that fills in random weights of a type (vLLM, with
    ``gpu_codes``)."""
    folder.mkdir()
    for file in bundle.glob("*token*.json"):
        os.symlink(file, folder / file.name)
    config = json.loads((bundle / "config.json").read_text("utf-8"))
    plain = {key: value for key, value in config.items() if key not in ("wisparse", "quantization_config")}
    if weights in PEER:
        kind, stored, activations = PEER[weights]
        group = {"targets": ["Linear"], "weights": stored, "input_activations": activations}
        plain["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": {"group_0": group}
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(plain), "utf-8")
    return folder


def memory_gb() -> float | None:
    """Of the whole GPU, as ``nvidia-smi`` shows it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0"), "--format=csv,noheader,nounits"]
    return float(subprocess.check_output([*command, "--query-gpu=memory.used"], text=True)) * 2**20 / 1e9


def gaps(client: Client, ids: Callable[[int], list[int]], length: int, **more: Any) -> dict[str, Any]:
    """How long four running answers wait while a prompt is read."""
    running = [ids(5) for _ in range(4)]

    def longest_wait(read: bool) -> tuple[float, float]:
        """Milliseconds: the longest wait between two events while a prompt is read (or 0.3 s pass), and of reading."""
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

    cold, _ = longest_wait(True)
    quiet = [longest_wait(False)[0] for _ in range(3)]
    found = [longest_wait(True) for _ in range(5)]
    return {
        "running": len(running), "longest_gap_ms": max(gap for gap, _ in found), "each_ms": [gap for gap, _ in found],
        "first_time_ms": cold, "without_ms": max(quiet), "first_token_ms": statistics.median(ms for _, ms in found),
    }  # fmt: skip


@click.command(context_settings={"show_default": True})
@shape_option
@blocks_option
@click.option("--weights", "kinds", type=Several(str), default="native,int4")
@click.option("--peer", help="Command of another server, with {model} and {port}.")
@click.option("--lengths", type=Several(int), default="100,1000,4000,16000", help="Of prompts.")
@click.option("--streams", type=Several(int), default="1,8,16,32", help="Answers at once.")
@click.option("--gap", default=8000, help="Tokens of the prompt beside running answers; 0: leave that out.")
@click.option("--rounds", default=5)
@click.option(
    "--turns", default=1, help="More than 1: all servers run at once, with a part of the memory each, and take turns."
)
@click.option("--options", default="", help="Further options of wisparse serve.")
@click.option("--device", default="cuda")
@click.option("--tiny", "is_tiny", is_flag=True, help="The example model.")
@out_option
def first(
    shape: str, blocks: int | None, kinds: list[str], peer: str | None, lengths: list[int], streams: list[int], gap: int,
    rounds: int, turns: int, options: str, device: str, is_tiny: bool, out: Path | None,
) -> None:  # fmt: skip
    """First tokens, streams and gaps over HTTP: `wisparse serve`, and another OpenAI-compatible server beside it.

    Built: a bundle of random weights with masks calibrated to 50%. Each server runs with its defaults but for the
    context; the peer gets the same config.json, for codes with compressed-tensors' quantisation: int4 in groups of 128,
    int8 and fp8 by channel, fp8 with activations in fp8. Every prompt is token ids that no prompt before it had.

    Timed and printed, a line of JSON for each server and one for all last (gpu-first.json):

    \b
    ready_s     from the start of the server's process to its first answer to /health
    first_ms    to the first token's event: the first request's after the start, and the median of those behind it
    streams     greedy answers of 200 tokens after 5, started together: tokens over the time from start to the last one
    gap         the longest pause of four running answers while a prompt of 8,000 tokens is read
    memory_gb   what nvidia-smi shows once the server is ready, and after the streams
    """
    need_gpu(device)
    began, dice = time.perf_counter(), random.Random(1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle, plugins = folder / "bundle", plugin_path(folder / "plugins")
        if is_tiny:
            source = endless_source(folder / "source")
            make = ["-m", "wisparse", "convert", source, "-o", bundle, "--sparsity", 0.5, "--device", device, "-q"]
            make += ["--calibration", ROOT / "converter", "--num-samples", 1, "--seq-len", 128, "--search", "uniform"]
        else:
            make = [ROOT / "benchmarks" / "gpu.py", "bundle", "--shape", shape, "--folder", bundle, "--device", device]
            make += ["--blocks", blocks] if blocks else []
        subprocess.run([sys.executable, *map(str, make)], check=True, env=environment())
        vocab_size = json.loads((bundle / "config.json").read_text("utf-8"))["vocab_size"]

        def ids(count: int) -> list[int]:
            return [dice.randrange(10, vocab_size - 10) for _ in range(count)]

        def measure(found: dict[str, Any], client: Client, **more: Any) -> None:
            found.setdefault("memory_gb", []).append(memory_gb())
            for length in lengths:
                times = [client.stream(ids(length), most=2, **more).first_ms for _ in range(1 + rounds)]
                seen = found.setdefault("first_ms", {}).setdefault(length, {"first": times[0], "all": []})
                seen["all"] += times[1:]
                seen["median"] = statistics.median(seen["all"])
            for count in streams:
                rate = client.rate(lambda: [ids(5) for _ in range(count)], **more)  # noqa: B023
                found.setdefault("streams", {}).setdefault(count, []).append(rate)
            found["memory_gb"].append(memory_gb())
            try:
                found["gap"] = gaps(client, ids, gap, **more) if gap else None
            except RuntimeError as error:
                found["gap"] = {"error": str(error)}

        serve = [sys.executable, "-m", "wisparse", "serve", bundle, "--device", device]
        serve += ["--max-seq-len", max(*lengths, gap) + 1024, *shlex.split(options)]
        runs: list[tuple[str, Sequence[object], dict[str, Any]]] = [
            (kind, [*serve, "--weights", kind, "--port", "{port}"], {}) for kind in kinds
        ]
        for kind in kinds if peer else ():
            model = peer_model(bundle, kind, folder / f"peer-{kind}")
            command = [word.replace("{model}", str(model)) for word in shlex.split(peer or "")]
            runs.append((f"peer {kind}", command, {"model": str(model), "ignore_eos": True}))
        with contextlib.ExitStack() as running:

            def start(run: tuple[str, Sequence[object], dict[str, Any]]) -> Client | None:
                name, command, _ = run
                port, log = free_port(), folder / f"{name}.log"
                command = [str(word).replace("{port}", str(port)) for word in command]
                try:
                    client, seconds = running.enter_context(server(command, port, log, Path(__file__).parent, plugins))
                except Exception as error:  # the other servers are measured all the same
                    result[name] = {"error": f"{type(error).__name__}: {error}", "log": log.read_text()[-2000:]}
                    return None
                result[name] = {"ready_s": seconds}
                return client

            for together in [runs] if turns > 1 else [[run] for run in runs]:
                with ThreadPoolExecutor(len(together)) as threads:
                    clients = list(threads.map(start, together))
                for _ in range(turns):
                    for (name, _, more), client in zip(together, clients, strict=True):
                        if client is None or "error" in result[name]:
                            continue
                        try:
                            measure(result[name], client, **more)
                        except Exception as error:
                            result[name]["error"] = f"{type(error).__name__}: {error}"
                        print(f"{time.perf_counter() - began:5.0f} s {name}: {json.dumps(result[name])}", flush=True)
                running.pop_all().close()
    save(out, "gpu-first.json", json.dumps(result) + "\n")
    print(json.dumps(result))
    if any("error" in one for one in result.values()):
        sys.exit(1)
