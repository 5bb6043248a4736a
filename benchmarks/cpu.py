"""The CPU back end against PyTorch and transformers: every figure is a ratio of two things timed in turns.

    python benchmarks/cpu.py                      # about five minutes, 12 GB of memory, 5 GB of disk in --work-dir
    python benchmarks/cpu.py --only examples prompts
    python benchmarks/cpu.py --cpu-time           # one thread, processor time: on a machine that is busy otherwise

    llama-1b     decoding a random model of Llama-3.2-1B's shape, over transformers
    examples     decoding the project's small models, over transformers dense in the same type
    experts      decoding random mixtures of experts, over the fastest of transformers' ways to run these
    prompts      prompts of 5, 32 and 512 tokens of that model, over transformers in the faster of its types
    first-token  load and first token of the 1B bundle, over reading its files into memory

Times are medians of interleaved repetitions, of first-token the least of them. Close other programs: half a busy core
halves the slower side only.
Human-readable lines go to stderr, one JSON document to stdout, and to --output if given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from cpu_models import EXPERTS, LLAMA_1B, calibrated_bundle, random_checkpoint
from quality import describe_machine, print_document
from torch import Tensor

from wisparse.converter.source import cache_argument
from wisparse.formats.bundle import Bundle
from wisparse.runtime.cpu.decoder import CpuDecoder

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("llama-1b", "examples", "experts", "prompts", "first-token")
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


def examples(work: Path, count: int, repetitions: int) -> dict[str, Any]:
    """The project's small models."""
    results = {}
    sources = {"pycode-llama-6m": ROOT / "examples" / "pycode-llama-6m"}
    packed = ROOT.parent / "shared" / "models" / "pycode-qwen2-37m"
    unpacked = work / packed.name
    if not unpacked.is_dir() and packed.is_dir():
        subprocess.run([sys.executable, packed.parent / "pack.py", "unpack", packed, unpacked], check=True)
    if unpacked.is_dir():
        sources[packed.name] = unpacked
    else:
        say(f"{packed.name}: not beside this checkout, left out")
    for name, source in sources.items():
        bundle = calibrated_bundle(source, work / f"{name}-{SPARSITY:.0%}", SPARSITY)
        results[name] = decoding(source, bundle, count, repetitions, ("native", "int8", "int4"))
    return results


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
        for weights in ("native", "int8", "int4"):
            decoder = CpuDecoder(bundle, device=torch.device("cpu"), dtype=dtype, max_seq_len=520, weights=weights)
            measure(f"{weights} {kind}", lambda ids, decoder=decoder: decoder.prefill(0, ids, len(ids)))
            decoder.close()
    best = {
        length: min(times[f"transformers {kind}"][length] for kind in ("bfloat16", "float32")) for length in lengths
    }
    return {
        name: {
            str(length): {"s": seconds, "over_transformers": seconds / best[length]} for length, seconds in row.items()
        }
        for name, row in times.items()
    }


# --- the first token -------------------------------------------------------------------------------------------------


# Every figure comes from a process of its own, as a user starts one: memory once used and freed is not fresh.
READ = """
import sys, time
from pathlib import Path
import numpy as np
files, kept, piece = [Path(name) for name in sys.argv[2:]], [], 1 << 20
buffer = bytearray(piece)
np.ones({memory}, np.uint8)
start = time.{clock}()
for file in files:
    data = buffer if sys.argv[1] == "stream" else np.empty(file.stat().st_size, np.uint8)
    kept.append(data)
    view, filled = memoryview(data), 0
    with file.open("rb", buffering=0) as stream:
        while read := stream.readinto(view if sys.argv[1] == "stream" else view[filled : filled + piece]):
            filled += read
print(time.{clock}() - start)
"""
FIRST = """
import sys, time
import torch
import wisparse.runtime.cpu.decoder
from wisparse.runtime.backends import load
torch.set_num_threads({threads})
torch.ones({memory}, dtype=torch.uint8)
start = time.{clock}()
model = load(sys.argv[2], device="cpu", weights=sys.argv[1], max_seq_len=1024)
model.generate({prompt}, max_new_tokens=1)
print(time.{clock}() - start)
"""


def first_token(bundle: Path, repetitions: int) -> dict[str, Any]:
    """From ``load`` to the first token, over reading the bundle's files, all of which the system has in its cache.

    Reading means into memory that stays, as a model's has to; what the cache gives to one reused buffer is told beside
    it. In a virtual machine, memory that the host has not handed out yet costs several times more at first touch than
    all the rest, at random. So each process first touches as much as it is going to need and gives it back, and the
    least of the repetitions counts.
    """
    files = [file for file in bundle.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    words = {
        "clock": "process_time" if _cpu_time else "perf_counter",
        "threads": torch.get_num_threads(),
        "prompt": list(range(100, 100 + PROMPT_TOKENS)),
        "memory": 2 * size,
    }
    runs = {name: (READ, [name, *files]) for name in ("stream", "read")}
    runs |= {name: (FIRST, [name, bundle]) for name in ("native", "int8")}

    def run(script: str, arguments: list[object]) -> float:
        command = [sys.executable, "-c", script.format(**words), *map(str, arguments)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    # The first of each fills the system's cache and compiles.
    found = in_turns({name: partial(run, *given) for name, given in runs.items()}, repetitions)
    times = {name: min(values) for name, values in found.items()}
    result = {
        "bundle_bytes": size,
        "read_s": times["read"],
        "read_gbps": size / times["read"] / 1e9,
        "stream_s": times["stream"],
        "first_token_s": {"native": times["native"], "int8": times["int8"]},
        "runs": {name: [round(value, 3) for value in values] for name, values in found.items()},
        "over_read": times["native"] / times["read"],
        "over_read_int8": times["int8"] / times["read"],
    }
    say(
        f"first token: reading {size / 1e9:.2f} GB into memory {times['read']:.2f} s, through one buffer "
        f"{times['stream']:.2f} s; load and first token {times['native']:.2f} s "
        f"({result['over_read']:.2f}x), int8 {times['int8']:.2f} s ({result['over_read_int8']:.2f}x)"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to run")
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    parser.add_argument(
        "--work-dir", type=Path, help="keep the models made for this there; a temporary folder if absent"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="repetitions of every decoding loop")
    parser.add_argument("--threads", type=int, help="of torch and of ours; torch's own choice if absent")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, and its processor time only: for a busy machine"
    )
    arguments = parser.parse_args()
    global _cpu_time
    _cpu_time = arguments.cpu_time
    if _cpu_time or arguments.threads is not None:
        torch.set_num_threads(1 if _cpu_time else arguments.threads)
    result: dict[str, Any] = {
        "machine": machine(),
        "sparsity": SPARSITY,
        "clock": "processor time" if _cpu_time else "wall",
    }
    say(json.dumps(result["machine"]))
    with tempfile.TemporaryDirectory(prefix="wisparse-bench-") as temporary:
        work = arguments.work_dir or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if "examples" in arguments.only:
            result["examples"] = examples(work, 64, arguments.repetitions)
        if "experts" in arguments.only:
            for name, shape in EXPERTS.items():
                source = random_checkpoint(shape, work / name)
                bundle = calibrated_bundle(source, work / f"{name}-{SPARSITY:.0%}", SPARSITY)
                found = decoding(source, bundle, 32, arguments.repetitions, ("native", "int8", "int4"))
                result.setdefault("experts", {})[name] = found
        if {"llama-1b", "prompts", "first-token"} & set(arguments.only):
            say("making the 1B model: about a minute")
            source = random_checkpoint(LLAMA_1B, work / "llama-1b")
            bundle = calibrated_bundle(source, work / f"llama-1b-{SPARSITY:.0%}", SPARSITY)
            if "llama-1b" in arguments.only:
                result["llama_1b"] = decoding(source, bundle, 16, arguments.repetitions, ("native", "int8", "int4"))
            if "prompts" in arguments.only:
                result["prompts"] = prompts(source, bundle, min(3, arguments.repetitions))
            if "first-token" in arguments.only:
                result["first_token"] = first_token(bundle, arguments.repetitions)
    print_document(result, arguments.output)


if __name__ == "__main__":
    main()
