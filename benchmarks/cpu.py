"""The CPU back end against PyTorch and transformers: every figure is a ratio of two things timed in turns.

    python benchmarks/cpu.py                      # about five minutes, 12 GB of memory, 5 GB of disk in --work-dir
    python benchmarks/cpu.py --only examples prompts
    python benchmarks/cpu.py --cpu-time           # one thread, processor time: on a machine that is busy otherwise

    llama-1b  decoding a random model of Llama-3.2-1B's shape, over transformers
    examples  decoding small models (``--models``), over transformers dense in the same type
    experts   decoding random mixtures of experts, over the fastest of transformers' ways to run these
    prompts   prompts of 5, 32 and 512 tokens of the 1B model, over transformers in the faster of its types
    peers     decoding the 1B model, int8 and int4 at 50% and graded weights at 3.5 and 8 bits, over llama.cpp's Q4_0
    busy      `wisparse bench` on the small example beside 0, 1, 2 and 4 processes that do nothing but spin

``peers`` needs ``pip install gguf xllamacpp`` (llama.cpp's own server; its milliseconds a token count, HTTP left out), and
is run only if it is asked for, as ``busy`` is. Its file is Q4_0 throughout, twice: the output layer in Q8_0 (as ours,
which is int8) and in Q4_0 too.

Times are medians of interleaved repetitions. Close other programs: half a busy core halves the slower side only.
Human-readable lines go to stderr, one JSON document to stdout, and to --output if given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
from pathlib import Path
from typing import Any

import torch
from cpu_models import EXPERTS, GRADED, LLAMA_1B, calibrated_bundle, make_gguf, random_checkpoint
from quality import EXAMPLE, describe_machine, print_document
from torch import Tensor

from wisparse.converter.source import cache_argument
from wisparse.formats.bundle import Bundle
from wisparse.formats.manifest import unread
from wisparse.runtime.cpu.decoder import CpuDecoder

USUAL = ("llama-1b", "examples", "experts", "prompts")
SECTIONS = (*USUAL, "peers", "busy")
KINDS = ("native", "int8", "int4")
PROMPT_TOKENS = 32
SPARSITY = 0.5


def clock() -> float:
    """Seconds; of this process's own work under --cpu-time, which other programs disturb least."""
    return time.process_time() if _cpu_time else time.perf_counter()


_cpu_time = False


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = clock()
    run()
    return clock() - start


def in_turns(loops: dict[str, Callable[[], float]], repetitions: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds that each gives, every repetition running all of them one after the other."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repetition in range(warm_up + repetitions):
        for name, loop in loops.items():
            seconds = loop()
            if repetition >= warm_up:
                times[name].append(seconds)
    return times


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return {
        **describe_machine(torch.device("cpu")),
        "extensions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "numba": version("numba"),
    }


# --- decoding --------------------------------------------------------------------------------------------------------


def transformers_loop(model: Any, prompt: Tensor, count: int, experts: str = "") -> Callable[[], Any]:
    """Greedy decoding by the bare model and its cache, without the cost of ``generate``. ``experts``: how it runs them."""

    name = cache_argument(model)

    @torch.inference_mode()
    def run() -> float:
        if experts:
            model.set_experts_implementation(experts)
        output = model(prompt[None], use_cache=True, logits_to_keep=1)
        cache, token = output[name], output.logits[:, -1].argmax(-1, keepdim=True)
        start = clock()
        for _ in range(count):
            output = model(token, use_cache=True, **{name: cache})
            token = output.logits[:, -1].argmax(-1, keepdim=True)
        return (clock() - start) / count

    return run


def decoder_loop(decoder: CpuDecoder, prompt: Tensor, count: int) -> Callable[[], Any]:
    """The same by one of our decoders."""

    def run() -> float:
        token = decoder.prefill(0, prompt, len(prompt)).argmax()[None]
        start = clock()
        for _ in range(count):
            token = decoder.decode(token).argmax(-1)
        return (clock() - start) / count

    return run


def decoding(source: Path, bundle_folder: Path, count: int, repetitions: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Milliseconds per token of transformers and of ours (``kinds``) on one model."""
    from transformers import AutoModelForCausalLM

    bundle = Bundle.open(bundle_folder)
    dtype = bundle.checkpoint.tensors["model.norm.weight"].dtype
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, bundle.config.vocab_size, (PROMPT_TOKENS,), generator=generator)
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype, "max_seq_len": PROMPT_TOKENS + count + 1}
    decoders = {kind: CpuDecoder(bundle, weights=kind, **settings) for kind in kinds}
    ways = ("eager", "batched_mm", "grouped_mm") if bundle.config.has_experts else ("",)
    loops: dict[str, Callable[[], float]] = {
        f"transformers {way}".strip(): transformers_loop(dense, prompt, count, way) for way in ways
    }
    theirs = list(loops)
    loops |= {f"wisparse_{kind}": decoder_loop(decoder, prompt, count) for kind, decoder in decoders.items()}
    medians = {name: statistics.median(values) for name, values in in_turns(loops, repetitions).items()}
    medians["transformers"] = min(medians[name] for name in theirs)
    decoder = decoders["native"]
    decoder.measure_sparsity(True)
    decoder_loop(decoder, prompt, count)()
    result: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(info.nbytes // info.dtype.itemsize for info in bundle.checkpoint.tensors.values()),
        "tok_per_s": {name: 1 / value for name, value in medians.items()},
        "realised_sparsity": decoder.realised_sparsity(),
    }
    result["speedup"] = {kind: medians["transformers"] / medians[f"wisparse_{kind}"] for kind in kinds}
    for one in decoders.values():
        one.close()
    rates = result["tok_per_s"]
    told = (f"{kind} {rates[f'wisparse_{kind}']:.1f} tok/s, {result['speedup'][kind]:.2f}x" for kind in kinds)
    say(f"{source.name}: transformers {rates['transformers']:.1f} tok/s; " + "; ".join(told))
    return result


def prompts(source: Path, bundle_folder: Path, repetitions: int) -> dict[str, Any]:
    """Seconds of prompts in every weight and activation type, and the ratio to the faster type of transformers."""
    from transformers import AutoModelForCausalLM

    bundle, lengths = Bundle.open(bundle_folder), (5, 32, 512)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, bundle.config.vocab_size, (max(lengths),), generator=generator)
    times: dict[str, dict[int, float]] = {}

    def measure(name: str, run: Callable[[Tensor], object]) -> None:
        with torch.inference_mode():
            runs = {str(length): partial(timed, partial(run, tokens[:length])) for length in lengths}
            found = in_turns(runs, repetitions)
        times[name] = {length: statistics.median(found[str(length)]) for length in lengths}
        say(f"{name}: " + ", ".join(f"{length} tokens {seconds:.2f} s" for length, seconds in times[name].items()))

    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        measure(f"transformers {kind}", lambda ids, model=model: model(ids[None], logits_to_keep=1))
        del model
        for weights in KINDS:
            decoder = CpuDecoder(bundle, device=torch.device("cpu"), dtype=dtype, max_seq_len=520, weights=weights)
            measure(f"{weights} {kind}", lambda ids, decoder=decoder: decoder.prefill(0, ids, len(ids)))
            decoder.close()
    best = {length: min(times[f"transformers {k}"][length] for k in ("bfloat16", "float32")) for length in lengths}
    return {
        name: {str(length): {"s": t, "over_transformers": t / best[length]} for length, t in row.items()}
        for name, row in times.items()
    }


# --- llama.cpp -------------------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def llama_cpp(model: Path, prompt: list[int], count: int) -> Iterator[Callable[[], float]]:
    """A server of a model; calls give its own seconds a token."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    log = model.with_suffix(".log")
    body = {"prompt": prompt, "ignore_eos": True, "temperature": 0, "cache_prompt": False, "n_predict": count}
    asked = json.dumps(body).encode(), {"Content-Type": "application/json"}

    def run() -> float:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", *asked)
        with urllib.request.urlopen(request, timeout=300) as answer:
            timings = json.load(answer)["timings"]
        assert timings["predicted_n"] == count, timings
        return timings["predicted_ms"] / count / 1e3

    with log.open("w") as file:
        command = [sys.executable, "-c", _SERVER, str(model), str(port), str(torch.get_num_threads())]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                run()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"llama.cpp's server did not start:\n{log.read_text()[-2000:]}") from None
                time.sleep(0.5)
        yield run
    finally:
        process.kill()
        process.wait()


def peers(source: Path, bundle: Bundle, graded: Bundle, work: Path, count: int, repetitions: int) -> dict[str, Any]:
    """Tokens a second of ours and of llama.cpp, in turns on the same threads."""
    ours = {f"{kind} 50%": (bundle, kind) for kind in KINDS[1:]}
    ours |= {f"graded {bits:g} bits": (graded.at(unread(bits)), "native") for bits in (*GRADED, 8)}
    prompt = torch.randint(0, bundle.config.vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    settings["max_seq_len"] = PROMPT_TOKENS + count + 1
    loops: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as open_ones:
        for name, (one, kind) in ours.items():
            decoder = CpuDecoder(one, weights=kind, **settings)
            open_ones.callback(decoder.close)
            loops[f"wisparse {name}"] = decoder_loop(decoder, prompt, count)
        for kind in ("Q8_0", "Q4_0"):
            model = make_gguf(source, work / f"1b-q4_0-{kind}.gguf", kind)
            loops[f"llama.cpp Q4_0, output {kind}"] = open_ones.enter_context(llama_cpp(model, prompt.tolist(), count))
        times = in_turns(loops, repetitions)
    rates = {name: 1 / statistics.median(values) for name, values in times.items()}
    result: dict[str, Any] = {"xllamacpp": version("xllamacpp"), "tok_per_s": rates}
    for kind in ("int4 50%", "graded 3.5 bits"):
        result[f"{kind} over"] = {name: rates[f"wisparse {kind}"] / rate for name, rate in rates.items()}
    for name, rate in rates.items():
        say(f"{name}: {rate:.3g} tok/s; int4 at 50% {result['int4 50% over'][name]:.2f} of it")
    return result


# --- other programs --------------------------------------------------------------------------------------------------


def busy(bundle: Path) -> list[dict[str, Any]]:
    """What `wisparse bench` prints beside spinning processes in sessions of their own, as other users start them; quiet
    again at the end, which tells whether the machine kept its speed."""
    command = [sys.executable, "-m", "wisparse", "bench", str(bundle), "--device", "cpu", "--runs", "3", "--json"]
    rows: list[dict[str, Any]] = []
    for count in (0, 1, 2, 4, 0):
        spin = [sys.executable, "-S", "-c", "while True: pass"]
        beside = [subprocess.Popen(spin, start_new_session=True) for _ in range(count)]
        try:
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        finally:
            for process in beside:
                process.kill()
                process.wait()
        rate = json.loads(said.splitlines()[-1])["sparse"]["tok_per_s"]
        rows.append({"busy": count, "tok_per_s": rate, "over_quiet": rate / (rows[0]["tok_per_s"] if rows else rate)})
        say(f"beside {count} busy processes: {rate:.0f} tok/s, {rows[-1]['over_quiet']:.2f} of quiet")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=USUAL, help="sections to run")
    parser.add_argument("--models", nargs="+", type=Path, default=[EXAMPLE], help="of the section examples")
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    parser.add_argument("--work-dir", type=Path, help="keep the models made for this there; temporary if absent")
    parser.add_argument("--repetitions", type=int, default=5, help="repetitions of every decoding loop")
    parser.add_argument("--threads", type=int, help="of torch and of ours; torch's own choice if absent")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its processor time: for a busy machine")
    arguments = parser.parse_args()
    only = set(arguments.only)
    if arguments.cpu_time and only & {"peers", "busy"}:
        parser.error("--cpu-time: expected sections of this process alone, found peers or busy")
    global _cpu_time
    _cpu_time = arguments.cpu_time
    if _cpu_time or arguments.threads is not None:
        torch.set_num_threads(1 if _cpu_time else arguments.threads)
    result: dict[str, Any] = {"machine": machine(), "sparsity": SPARSITY}
    result["clock"] = "processor time" if _cpu_time else "wall"
    say(json.dumps(result["machine"]))
    repetitions = arguments.repetitions
    with tempfile.TemporaryDirectory(prefix="wisparse-bench-") as temporary:
        work = arguments.work_dir or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for source in arguments.models if "examples" in only else ():
            bundle = calibrated_bundle(source, work / f"{source.name}-{SPARSITY:.0%}", SPARSITY)
            result.setdefault("examples", {})[source.name] = decoding(source, bundle, 64, repetitions, KINDS)
        for name, shape in EXPERTS.items() if "experts" in only else ():
            source = random_checkpoint(shape, work / name)
            bundle = calibrated_bundle(source, work / f"{name}-{SPARSITY:.0%}", SPARSITY)
            result.setdefault("experts", {})[name] = decoding(source, bundle, 32, repetitions, KINDS)
        if only & {"llama-1b", "prompts", "peers"}:
            say("making the 1B model: about a minute")
            source = random_checkpoint(LLAMA_1B, work / "llama-1b")
            bundle = calibrated_bundle(source, work / f"llama-1b-{SPARSITY:.0%}", SPARSITY)
        if "llama-1b" in only:
            result["llama_1b"] = decoding(source, bundle, 16, repetitions, KINDS)
        if "prompts" in only:
            result["prompts"] = prompts(source, bundle, min(3, repetitions))
        if "peers" in only:
            graded = Bundle.open(calibrated_bundle(source, work / "llama-1b-graded", SPARSITY, graded=GRADED))
            result["peers"] = peers(source, Bundle.open(bundle), graded, work, 32, repetitions)
        if "busy" in only:
            result["busy"] = busy(calibrated_bundle(EXAMPLE, work / f"{EXAMPLE.name}-{SPARSITY:.0%}", SPARSITY))
    print_document(result, arguments.output)


if __name__ == "__main__":
    main()
