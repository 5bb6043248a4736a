"""The first token and many streams on an NVIDIA GPU: prompts read directly and over HTTP, streams decoded together.

    PYTHONPATH=. python benchmarks/gpu_first.py --weights native int4

The Llama-3.1-8B shape, random weights with thresholds calibrated to 50%. Prompts are token ids, each different from all
before it, over HTTP from a client in a process of its own; milliseconds to the first token's event. Streams: greedy
tokens after 5 tokens, tok/s of all together. Prints a line for each part, and one line of JSON last (also to
``$OUT/gpu-first.json`` if OUT is set).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from gpu_decode import rates
from gpu_models import SHAPES, calibrate, mask_bundle, need_gpu, random_bundle, tiny

from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.model import Model
from wisparse.runtime.serve.app import ServeSettings, make_app
from wisparse.runtime.serve.transport import http_server, open_socket

LENGTHS = (100, 1000, 4000, 16000)
STREAMS = (1, 8, 16, 32)
# Reads lines of [port, tokens, rounds]; gives the milliseconds of each round. Every answer has two tokens.
CLIENT = """
import http.client, json, random, sys, time
dice = random.Random(1)
for line in sys.stdin:
    port, vocabulary, length, rounds = json.loads(line)
    found = []
    for _ in range(rounds):
        prompt = [dice.randrange(10, vocabulary - 10) for _ in range(length)]
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True})
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.readline()
        found.append(1e3 * (time.perf_counter() - began))
        response.read()
        connection.close()
    print(json.dumps(found), flush=True)
"""


def milliseconds(work: Any, runs: int = 5) -> float:
    times = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def prompts(decoder: CudaDecoder, lengths: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds that a prompt takes, read in the chunks of a request that is alone."""
    ids = torch.randint(decoder.config.vocab_size, (max(lengths),), generator=torch.Generator().manual_seed(3))
    return {n: milliseconds(lambda n=n: decoder.prefill(0, ids[:n], n)) for n in lengths}


@contextlib.contextmanager
def served(bundle: SimpleNamespace, decoder: CudaDecoder):
    """The port of a server on the decoder, once it is ready, and the seconds that took."""
    model, ready, began = Model(bundle, decoder, None), threading.Event(), time.perf_counter()
    sys.setswitchinterval(0.0005)  # as ``wisparse serve`` does
    with open_socket("127.0.0.1", 0) as listener:
        server = http_server(make_app(model, ServeSettings("m"), ready.set))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not ready.wait(1):
            if not thread.is_alive():
                raise SystemExit("the server ended before it was ready")
        try:
            yield listener.getsockname()[1], time.perf_counter() - began
        finally:
            server.should_exit = True
            thread.join()


def over_http(bundle: SimpleNamespace, decoder: CudaDecoder, lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """First tokens over HTTP, the first request's, and the median of those behind it."""
    found: dict[str, Any] = {}
    with served(bundle, decoder) as (port, seconds):
        found["ready_s"] = round(seconds, 1)
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            for length in lengths:
                print(json.dumps([port, decoder.config.vocab_size, length, rounds]), file=client.stdin, flush=True)
                times = json.loads(client.stdout.readline())
                found[str(length)] = {"first": times[0], "median": statistics.median(times[1:]), "all": times}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--weights", nargs="+", default=["native", "int4"])
    parser.add_argument("--parts", nargs="+", default=["prompts", "http", "streams"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    arguments = parser.parse_args()
    need_gpu(parser, arguments.device)
    device, dtype = torch.device(arguments.device), torch.float16 if arguments.tiny else torch.bfloat16
    bundle = random_bundle(tiny(SHAPES[arguments.shape]) if arguments.tiny else arguments.shape, dtype=dtype)
    bundle.folder, bundle.sparsity, bundle.config_dict = Path("random"), 0.5, {}
    dense = SimpleNamespace(sparsity=0.0, masks=dict(bundle.masks))
    bundle.at, bundle.read_bytes = lambda level: bundle if level else dense, lambda _: None
    bundle.levels = {0.5: bundle.masks}
    lengths = (20, 40) if arguments.tiny else LENGTHS
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none", "torch": torch.__version__,
        "triton": triton.__version__,
    }  # fmt: skip
    decoder = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
    mask_bundle(bundle, decoder, calibrate(decoder, [0.5]), 0.5)
    decoder.close()
    began = time.perf_counter()

    def make(weights: str, max_batch: int, max_seq_len: int) -> CudaDecoder:
        gc.collect()
        torch.cuda.empty_cache()
        return CudaDecoder(
            bundle, device=device, dtype=dtype, weights=weights, max_batch=max_batch, max_seq_len=max_seq_len
        )

    for weights in arguments.weights:
        found: dict[str, Any] = {}
        decoder = make(weights, 4, max(lengths) + 1024 if not arguments.tiny else 64)
        if "prompts" in arguments.parts and device.type == "cuda":
            found["launched_ms"] = prompts(decoder, lengths)
            decoder.prepare_prompts()
            found["prompt_ms"] = prompts(decoder, (16, 32, 64, 128, 256, 512, *lengths))
            print(f"{time.perf_counter() - began:5.0f} s {weights} prompts: {json.dumps(found)}", flush=True)
        if "http" in arguments.parts:
            found["http_ms"] = over_http(bundle, decoder, lengths, arguments.rounds)
            print(f"{time.perf_counter() - began:5.0f} s {weights} http: {json.dumps(found['http_ms'])}", flush=True)
        decoder.close()
        if "streams" in arguments.parts and device.type == "cuda":
            decoder = make(weights, max(STREAMS), 1024)
            found["tok_per_s"] = {n: statistics.median(rates(decoder, batch=n, runs=3)) for n in STREAMS}
            print(f"{time.perf_counter() - began:5.0f} s {weights} streams: {found['tok_per_s']}", flush=True)
            decoder.close()
        result[weights] = found
    line = json.dumps(result)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu-first.json").write_text(line + "\n", "utf-8")
    print(line)


if __name__ == "__main__":
    main()
