"""Decoding speed of a bundle, dense and sparse in one run, and the bound by memory bandwidth."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
import timeit
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import bits_of
from wisparse.formats.model_config import ModelConfig

from .decoding.decoder import Decoder
from .decoding.sampling import SamplingParams
from .memory import bytes_per_position, peak_bytes
from .model import Model


@dataclass(frozen=True)
class Workload:
    """The timed work, ``runs`` times: ``batch`` random prompts of ``prompt_length``, and ``new_tokens`` after each."""

    prompt_length: int = 5
    new_tokens: int = 200
    batch: int = 1
    runs: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Speed:
    tok_per_s: float  # of the batch; median over ``runs``
    step_ms: float  # mean over a run's steps; median over ``runs``
    prefill_tok_per_s: float
    realised_sparsity: float
    bytes_per_step: int  # weights and KV cache that a step reads
    gbps: float  # those bytes over ``step_ms``
    ideal_ms: float  # the same bytes at the measured bandwidth
    peak_memory_bytes: int
    runs: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    machine: dict[str, str]
    backend: str
    dtype: str
    weights: str
    workload: Workload
    read_gbps: float
    sparsity: float
    dense: Speed
    sparse: Speed
    bits: float | None = None  # of the level of a graded bundle
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        return self.sparse.tok_per_s / self.dense.tok_per_s

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "speedup": self.speedup}


def compare_weights(models: Mapping[str, Model], workload: Workload, *, kernels: bool = False) -> dict[str, Comparison]:
    """Time models with several weight types, each at its sparsity level and dense. Runs alternate between all of them, so
    that a change of the machine's speed affects all."""
    levels = {name: model.sparsity for name, model in models.items()}
    if 0 in levels.values():
        bundle = next(iter(models.values())).bundle
        graded = bundle.bits is not None
        known = ", ".join(f"{bits_of(one) if graded else one:g}" for one in bundle.levels if one)
        wanted = f"expected a level to compare with the dense model ({known or 'this bundle has none'})"
        raise UsageError(f"{'bits' if graded else 'sparsity'}: {wanted}, found {8 if graded else 0}")
    device = next(iter(models.values())).decoder.device
    bandwidth = read_bandwidth_gbps(device)
    realised, tables = {}, {}
    for name, model in models.items():
        model.decoder.measure_sparsity(True)
        time_run(model.decoder, workload)  # as long as the timed runs: the first tokens leave more unread
        realised[name] = model.decoder.realised_sparsity() or 0.0
        model.decoder.measure_sparsity(False)
        if kernels:
            from .cuda.kernel_times import time_kernels

            tables[name] = time_kernels(model.decoder, batch=workload.batch, sparsity=realised[name], gbps=bandwidth)
    timed: dict[tuple[str, float], list[tuple[float, float]]] = {
        (name, sparsity): [] for name, level in levels.items() for sparsity in (level, 0.0)
    }
    for run in range(1 + workload.runs):
        for (name, sparsity), runs in timed.items():
            models[name].sparsity = sparsity
            seconds = time_run(models[name].decoder, workload)
            if run:  # the first is a warmup
                runs.append(seconds)

    def speed(decoder: Decoder, sparsity: float, runs: list[tuple[float, float]]) -> Speed:
        projections, head = decoder.bytes_read()
        context = workload.prompt_length + workload.new_tokens // 2
        cache = bytes_per_position(decoder.config, decoder.dtype, decoder.kv_cache_dtype) * context * workload.batch
        bytes_per_step = round(projections * (1 - sparsity)) + head + cache
        step_ms = statistics.median(seconds for _, seconds in runs) / workload.new_tokens * 1e3
        rates = tuple(workload.batch * workload.new_tokens / seconds for _, seconds in runs)
        return Speed(
            tok_per_s=statistics.median(rates),
            step_ms=step_ms,
            prefill_tok_per_s=statistics.median(workload.batch * workload.prompt_length / s for s, _ in runs),
            realised_sparsity=sparsity,
            bytes_per_step=bytes_per_step,
            gbps=bytes_per_step / step_ms * 1e-6,
            ideal_ms=bytes_per_step / bandwidth * 1e-6,
            peak_memory_bytes=peak_bytes(device),
            runs=rates,
        )

    comparisons = {}
    for name, model in models.items():
        model.sparsity = levels[name]
        comparisons[name] = Comparison(
            machine=machine(device),
            backend=model.decoder.name,
            dtype=str(model.decoder.dtype).removeprefix("torch."),
            weights=name,
            workload=workload,
            read_gbps=bandwidth,
            sparsity=levels[name],
            dense=speed(model.decoder, 0.0, timed[name, 0.0]),
            sparse=speed(model.decoder, realised[name], timed[name, levels[name]]),
            bits=model.bits,
            kernels=tables.get(name, {}),
        )
    return comparisons


def time_drafts(model: Model, workload: Workload) -> dict[str, float]:
    """Tokens per second with and without drafts of a model loaded with ``speculative``, and acceptance of the drafts."""
    ids = [prompt.tolist() for prompt in prompts(model.config, workload)]
    timed: dict[bool, list[float]] = {False: [], True: []}
    for run in range(1 + workload.runs):
        for drafts, rates in timed.items():
            began = time.perf_counter()
            answers = model.generate(ids, max_new_tokens=workload.new_tokens, speculative=drafts)
            if run:
                rates.append(sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - began))
    plain, drafted = (statistics.median(timed[drafts]) for drafts in (False, True))
    counts = model.engine.scheduler.stats.drafts
    return {
        "plain_tok_per_s": plain,
        "tok_per_s": drafted,
        "acceptance_rate": counts.acceptance_rate,
        "mean_length": counts.mean_length,
    }


def machine(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        import triton

        name, cuda = torch.cuda.get_device_name(device), str(torch.version.cuda)
        return versions | {"device": name, "cuda": cuda, "triton": triton.__version__}
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read_text("utf-8"), re.M) if cpuinfo.exists() else None
    name = match[1] if match else platform.processor() or platform.machine()
    return versions | {"device": name, "threads": str(torch.get_num_threads()), "cores": str(os.cpu_count())}


def time_run(decoder: Decoder, workload: Workload) -> tuple[float, float]:
    """Seconds of the prefills and of the decode steps."""
    last = torch.tensor(0)
    began = time.perf_counter()
    for slot, prompt in enumerate(prompts(decoder.config, workload)):
        last = decoder.prefill(slot, prompt, len(prompt)).argmax()
    wait(decoder.device)
    middle = time.perf_counter()
    ids, settings = torch.full((workload.batch,), int(last)), [SamplingParams()] * workload.batch
    for _ in range(workload.new_tokens):
        ids = decoder.step(ids, settings)
        ids.tolist()
    wait(decoder.device)
    return middle - began, time.perf_counter() - middle


def prompts(config: ModelConfig, workload: Workload) -> list[Tensor]:
    generator = torch.Generator().manual_seed(workload.seed)
    return list(torch.randint(config.vocab_size, (workload.batch, workload.prompt_length), generator=generator))


def read_bandwidth_gbps(device: torch.device) -> float:
    """Read bandwidth of a device's memory: the fastest of several sums over a buffer much larger than the caches."""
    buffer = torch.ones((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.float32, device=device)

    def read() -> None:
        buffer.sum()
        wait(device)

    read()
    return buffer.nbytes / min(timeit.repeat(read, number=1, repeat=6)) * 1e-9


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
