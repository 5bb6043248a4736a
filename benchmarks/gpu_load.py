"""Loading a bundle of a published shape to an NVIDIA GPU, beside the time that reading its files takes.

    PYTHONPATH=. python benchmarks/gpu_load.py --shape llama-3.1-8b --folder /dev/shm

Writes a bundle with random weights into ``--folder`` (16 GB for the 8B shape), then measures in fresh processes:
reading the files alone, with one thread and with several, into memory that is used again; loading, with imports and
CUDA's start apart; loading tensor by tensor, as a plain loader does. The page cache is warm; ``--disk FOLDER`` moves
the bundle there and measures both again with the files dropped from the cache. Prints a line of JSON per measurement.
"""

# ruff: noqa: E402 (the clock starts before the imports)
from __future__ import annotations

import time

_STARTED = time.perf_counter()

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BUFFER = 8 << 20
_SPARSITY = 0.5


def write(shape: str, folder: Path, num_blocks: int | None) -> None:
    """A valid bundle: random weights, random scales, thresholds that drop about half of normal activations."""
    import numpy as np
    import torch
    from gpu_models import SHAPES

    from wisparse.formats.bundle import ProjectionMask
    from wisparse.formats.checkpoint import TensorInfo
    from wisparse.formats.config import expected_tensors
    from wisparse.formats.errors import BundleError
    from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel
    from wisparse.formats.model_config import ModelConfig
    from wisparse.formats.write import write_bundle

    config_dict = {**SHAPES[shape], "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"}
    if num_blocks is not None:
        config_dict["num_hidden_layers"] = num_blocks
    config = ModelConfig.from_dict(config_dict)
    pool = (torch.randn(32 << 20, generator=torch.Generator().manual_seed(0)) / 64).to(torch.bfloat16)

    class Source:
        """What ``write_bundle`` asks of a checkpoint; the tensors are stretches of one pool of numbers."""

        def __init__(self, folder: Path) -> None:
            self.config, self.config_dict, self.folder = config, config_dict, folder
            self.tied, self.error, self.quantised = config.tie_word_embeddings, BundleError, {}
            self.tensors = {
                name: TensorInfo(name, "none", size, torch.bfloat16, 0, 2 * int(np.prod(size)))
                for name, size in expected_tensors(config).items()
            }

        def chunks(self, name: str, chunk_bytes: int):
            left = self.tensors[name].nbytes // 2
            while left:
                count = min(left, chunk_bytes // 2, len(pool))
                yield torch.ones(count, dtype=torch.bfloat16) if len(self.tensors[name].shape) == 1 else pool[:count]
                left -= count

    empty = folder.with_name(folder.name + "-source")
    empty.mkdir(parents=True, exist_ok=True)
    source = Source(empty)
    masks = {}
    generator = torch.Generator().manual_seed(1)
    for projection in config.projections():
        typical = {"o_proj": 0.05, "down_proj": 0.02}.get(projection.role, 0.67)
        scale = torch.rand(projection.in_features, generator=generator) + 0.5
        masks[projection.name] = ProjectionMask(scale, float(torch.tensor(typical)), _SPARSITY)
    entries = tuple(ProjectionRecipe(n, m.sparsity, 0.5, m.threshold, m.sparsity) for n, m in masks.items())
    recipe = Recipe(
        base_model=f"random/{shape}", base_revision=None, method="wisparse", default=_SPARSITY,
        levels=(SparsityLevel(_SPARSITY, entries, (_SPARSITY,) * config.num_blocks),),
        calibration=CalibrationRecord("self", 1, 8, 8, 0, "ab" * 32),
    )  # fmt: skip
    write_bundle(source, recipe, {_SPARSITY: masks}, folder)  # type: ignore[arg-type]
    empty.rmdir()


def read(folder: Path, threads: int) -> dict:
    """Read all weight files, each thread into one buffer."""
    files = sorted(folder.glob("*.safetensors"))
    work = [(file, at) for file in files for at in range(0, file.stat().st_size, _BUFFER)]

    def part(index: int) -> int:
        buffer = bytearray(_BUFFER)
        total = 0
        for file, at in work[index::threads]:
            with open(file, "rb", buffering=0) as handle:
                handle.seek(at)
                total += handle.readinto(buffer)
        return total

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(part, range(threads)))
    seconds = time.perf_counter() - began
    return {"what": f"read, {threads} threads", "seconds": seconds, "gbps": total / seconds * 1e-9}


def load(folder: Path, plain: bool) -> dict:
    """Load in this fresh process, then decode a little, greedily and sampled."""
    import torch

    from wisparse.runtime import backends
    from wisparse.runtime.cuda import decoder as cuda_decoder
    from wisparse.runtime.decoding.sampling import SamplingSettings

    imports = time.perf_counter() - _STARTED
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    cuda = time.perf_counter() - _STARTED - imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    if plain:
        from types import SimpleNamespace

        from wisparse.formats.bundle import Bundle

        bundle = Bundle.open(folder)
        stub = SimpleNamespace(tensor=bundle.checkpoint.tensor)
        stub = SimpleNamespace(config=bundle.config, masks=bundle.masks, checkpoint=stub)
        decoder = cuda_decoder.CudaDecoder(stub, device=torch.device("cuda"), dtype=torch.bfloat16, max_seq_len=512)
    else:
        decoder = backends.load(str(folder), max_seq_len=512).decoder
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    weights = decoder.weights.num_bytes
    result = {
        "what": "load, tensor by tensor" if plain else "load",
        "seconds": seconds,
        "gbps": weights / seconds * 1e-9,
        "imports_seconds": imports,
        "cuda_start_seconds": cuda,
        "gpu_peak_over_weights": torch.cuda.max_memory_allocated() / weights,
        "host_peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }
    if plain:
        return result
    began = time.perf_counter()
    ids = torch.arange(5)
    settings = {
        "greedy": SamplingSettings(),
        "temperature": SamplingSettings(0.8, seed=1),
        "top_p": SamplingSettings(0.8, 0, 0.9, 0.0, 1),
        "top_k_top_p": SamplingSettings(0.8, 50, 0.9, 0.0, 1),
    }
    for repeat in range(2):  # the first compiles and captures
        for name, setting in settings.items():
            token = decoder.prefill(0, ids, len(ids)).argmax().view(1)
            token = decoder.step(token, [setting])
            if repeat == 0 and name == "greedy":
                result["first_tokens_seconds"] = time.perf_counter() - began
            torch.cuda.synchronize()
            began = time.perf_counter()
            tokens = []
            for _ in range(200 if repeat else 8):
                token = decoder.step(token, [setting])
                tokens.append(int(token))
            torch.cuda.synchronize()
            result[f"{name}_tok_per_s"] = len(tokens) / (time.perf_counter() - began)
    return result


def drop_from_cache(folder: Path) -> None:
    """Ask the system to forget the files' pages; written pages first go to disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has, to try it out")
    parser.add_argument("--threads", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--part", choices=("write", "read", "load", "plain"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    bundle = arguments.folder / f"bundle-{arguments.shape}"
    if arguments.part == "write":
        write(arguments.shape, bundle, arguments.blocks)
        return
    if arguments.part is not None:
        measure = {"read": lambda: read(bundle, arguments.threads), "load": lambda: load(bundle, False)}
        measure["plain"] = lambda: load(bundle, True)
        print(json.dumps(measure[arguments.part]()))
        return
    from gpu_models import need_gpu

    need_gpu(parser)

    results = []

    def child(part: str, folder: Path, *, note: str = "", threads: int = 1) -> None:
        command = [sys.executable, __file__, "--part", part, "--shape", arguments.shape, "--folder", str(folder)]
        command += ["--threads", str(threads)]
        command += [] if arguments.blocks is None else ["--blocks", str(arguments.blocks)]
        began = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        wall = time.perf_counter() - began
        if done.stdout:
            results.append({**json.loads(done.stdout.splitlines()[-1]), "process_seconds": wall, "cache": note})
            print(json.dumps(results[-1]), flush=True)
        else:
            print(f"{part}: {wall:.1f} s", flush=True)

    try:
        child("write", arguments.folder)
        for part, threads in (("read", 1), ("read", arguments.threads), ("load", 1), ("load", 1), ("read", 1)):
            child(part, arguments.folder, note="warm", threads=threads)
        child("plain", arguments.folder, note="warm")
        if arguments.disk is not None:
            moved = arguments.disk / bundle.name
            arguments.disk.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            shutil.move(bundle, moved)
            bundle = moved
            drop_from_cache(bundle)
            print(f"moved to disk: {time.perf_counter() - began:.1f} s", flush=True)
            for part, threads in (("read", 1), ("read", arguments.threads), ("load", 1)):
                child(part, arguments.disk, note="dropped", threads=threads)
                drop_from_cache(bundle)
    finally:
        shutil.rmtree(bundle, ignore_errors=True)
        line = json.dumps({"shape": arguments.shape, "blocks": arguments.blocks, "results": results})
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "gpu-h200-load.json").write_text(line + "\n")
        print(line)


if __name__ == "__main__":
    main()
