"""Decoding a random model of Llama-3.2-1B's shape on the CPU, int8 and int4 at 50% and graded weights at 3.5 and 8 bits,
beside llama.cpp's Q4_0 of it.

    pip install gguf xllamacpp                                   # without these, ours alone
    PYTHONPATH=. python benchmarks/cpu_peers.py --work-dir FOLDER --output benchmarks/results/cpu-peers.json
    PYTHONPATH=. python benchmarks/cpu_peers.py --cpu-time       # one thread's processor time: on a busy machine
    PYTHONPATH=. python benchmarks/cpu_peers.py --prompt 512     # seconds to the first token of such a prompt instead

xllamacpp is llama.cpp's own server (its C++ code) in a Python package; what counts are the milliseconds a token that it
reports itself, HTTP left out; of processor time, what a long answer takes more than one of a single token. Its file is
Q4_0 throughout, twice: the output layer in Q8_0 (as ours, which is int8) and in Q4_0 too. All take turns on the same
threads; a figure is a median. Making the models takes minutes, 10 GB of disk and 12 of memory, timing them two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cpu
import torch
from cpu import PROMPT_TOKENS, SPARSITY, decoder_loop, in_turns, machine, say, timed
from cpu_models import GRADED, LLAMA_1B, calibrated_bundle, finish_gguf, gguf_writer, random_checkpoint
from quality import print_document

from wisparse.formats.bundle import Bundle
from wisparse.formats.manifest import unread
from wisparse.runtime.cpu.decoder import CpuDecoder

_SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.warmup = 1024, 1, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(params)
while True:
    time.sleep(60)
"""


def make_gguf(source: Path, out: Path, output_type: str) -> Path:
    """The checkpoint in Q4_0, its tied embedding and output layer in another type; its words are made up."""
    if out.is_file():
        return out
    import gguf
    from safetensors import safe_open

    config = LLAMA_1B
    writer = gguf_writer(config, out.with_suffix(".part"))
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t 1"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            weight = file.get_tensor(name).float().numpy()
            to = names.get_name(name, try_suffixes=(".weight",))
            if weight.ndim == 1:
                writer.add_tensor(to, weight)
                continue
            kind = gguf.GGMLQuantizationType[output_type if "embed" in name else "Q4_0"]
            writer.add_tensor(to, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    finish_gguf(writer)
    return out.with_suffix(".part").rename(out)


@contextlib.contextmanager
def llama_cpp(
    model: Path, threads: int, prompt: list[int], count: int, cpu_time: bool
) -> Iterator[Callable[[], float]]:
    """A server of a model; calls give its own seconds a token, of the prompt where ``count`` is 0."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    log = model.with_suffix(".log")
    body = {"prompt": prompt, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(model), str(port), str(threads)], stdout=file, stderr=file
        )

    def ask(tokens: int) -> tuple[float, float]:
        """Its own seconds a token, and the processor's for all of the request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion",
            json.dumps({**body, "n_predict": tokens}).encode(),
            {"Content-Type": "application/json"},
        )
        before = _ran(process.pid)
        with urllib.request.urlopen(request, timeout=300) as answer:
            timings = json.load(answer)["timings"]
        assert timings["predicted_n"] == tokens, timings
        if count == 0:
            return timings["prompt_ms"] / 1e3, 0.0
        return timings["predicted_ms"] / tokens / 1e3, _ran(process.pid) - before

    def run() -> float:
        # The prompt gives the first token.
        return (ask(count + 1)[1] - ask(1)[1]) / count if cpu_time else ask(max(count, 1))[0]

    try:
        until = time.monotonic() + 120
        while True:
            try:
                ask(2)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"llama.cpp's server did not start:\n{log.read_text()[-2000:]}") from None
                time.sleep(0.5)
        yield run
    finally:
        process.kill()
        process.wait()


def _ran(pid: int) -> float:
    """Seconds that a process's threads have computed."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, help="keep the models there; a temporary folder if absent")
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, help="time the first token of a prompt of so many tokens")
    parser.add_argument("--make", action="store_true", help="make the models and stop")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and its processor time only")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        cpu._cpu_time = True
        torch.set_num_threads(1)
    count, threads = 0 if arguments.prompt else arguments.tokens, torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="wisparse-bench-") as temporary, contextlib.ExitStack() as open_ones:
        work = arguments.work_dir or Path(temporary)
        source = random_checkpoint(LLAMA_1B, work / "llama-1b")
        bundle = Bundle.open(calibrated_bundle(source, work / f"llama-1b-{SPARSITY:.0%}", SPARSITY))
        graded = Bundle.open(calibrated_bundle(source, work / "llama-1b-graded", SPARSITY, graded=GRADED))
        peers = ("q8_0", "q4_0") if find_spec("xllamacpp") else ()
        models = {kind: make_gguf(source, work / f"1b-q4_0-{kind}.gguf", kind.upper()) for kind in peers}
        if arguments.make:
            return
        ours = {f"{kind} 50%": (bundle, kind) for kind in (("native",) if arguments.prompt else ()) + ("int8", "int4")}
        ours |= {f"graded {bits:g} bits": (graded.at(unread(bits)), "native") for bits in (*GRADED, 8)}
        length = arguments.prompt or PROMPT_TOKENS
        prompt = torch.randint(0, 128256, (length,), generator=torch.Generator().manual_seed(1))
        loops: dict[str, Callable[[], float]] = {}
        settings: dict[str, Any] = {"device": torch.device("cpu"), "max_seq_len": length + count + 1}
        for name, (one, kind) in ours.items():
            decoder = CpuDecoder(one, dtype=torch.bfloat16, weights=kind, **settings)
            first = partial(timed, partial(decoder.prefill, 0, prompt, length))
            loops[f"wisparse {name}"] = decoder_loop(decoder, prompt, count) if count else first
            open_ones.callback(decoder.close)
        for kind, model in models.items():
            ask = open_ones.enter_context(llama_cpp(model, threads, prompt.tolist(), count, arguments.cpu_time))
            loops[f"llama.cpp Q4_0, output {kind.upper()}"] = ask
        times = in_turns(loops, arguments.repetitions)
    rates = {name: 1 / statistics.median(values) for name, values in times.items()}
    over = {
        f"{kind}_over": {name: rates[f"wisparse {kind}"] / rate for name, rate in rates.items()}
        for kind in ("int4 50%", "graded 3.5 bits")
    }
    for name, rate in rates.items():
        ratios = ", ".join(f"{kind} {ratios[name]:.2f}" for kind, ratios in over.items())
        say(f"{name}: {rate:.3g} {'tok' if count else 'prompts'}/s; {ratios}")
    document = {
        "machine": {**machine(), "xllamacpp": version("xllamacpp") if peers else None, "system": platform.platform()},
        "clock": "processor time" if arguments.cpu_time else "wall",
        "new_tokens": count,
        "prompt_tokens": length,
        "tok_per_s" if count else "prompts_per_s": rates,
        "runs_ms": {name: [round(1e3 * value, 3) for value in values] for name, values in times.items()},
        **over,
    }
    print_document(document, arguments.output)


if __name__ == "__main__":
    main()
