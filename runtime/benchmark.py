"""Decoding speed of a bundle, dense and sparse in one run, beside the ceiling that the bytes set.

    ideal ms = (projections * (1 - realised sparsity) + lm_head + cache read) bytes / measured read bandwidth

Of a batch that is the rows' mean sparsity: the ideal if all rows kept the same channels. Those that do not read more.

A run is a random prompt, then greedy steps whose token is read by the host before the next one, as a program that shows
text does. Stop tokens are ignored. Dense is the same bundle on the same back end with its masks off.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from wisparse.formats.errors import UsageError
from wisparse.formats.model_config import ModelConfig

from .decoding.cache import bytes_per_position
from .decoding.decoder import Decoder, peak_bytes
from .decoding.sampling import SamplingParams
from .model import Model
from .timing import read_bandwidth_gbps, wait

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Workload:
    """What is timed, ``runs`` times: ``batch`` random prompts of ``prompt_length`` and ``new_tokens`` after each."""

    prompt_length: int = 5
    new_tokens: int = 200
    batch: int = 1
    runs: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Speed:
    """How fast one decoder was.

    Attributes:
        tok_per_s: median over the runs, all rows of the batch together; ``runs`` holds each.
        step_ms: one step, median over the runs of their mean.
        prefill_tok_per_s: median over the runs.
        bytes_per_step: weights and cache that a step has to read, as in the module's text.
        gbps: those bytes over the time they took.
        ideal_ms: the same bytes at the measured bandwidth.
    """

    tok_per_s: float
    step_ms: float
    prefill_tok_per_s: float
    realised_sparsity: float
    bytes_per_step: int
    gbps: float
    ideal_ms: float
    peak_memory_bytes: int
    runs: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Dense and sparse, with what they were measured on."""

    machine: dict[str, str]
    backend: str
    dtype: str
    weights: str
    workload: Workload
    read_gbps: float
    sparsity: float
    dense: Speed
    sparse: Speed
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Sparse over dense, in tokens per second."""
        return self.sparse.tok_per_s / self.dense.tok_per_s

    def to_dict(self) -> dict[str, object]:
        """JSON values."""
        return {**asdict(self), "speedup": self.speedup}


def compare(model: Model, workload: Workload, *, weights: str = "native", kernels: bool = False) -> Comparison:
    """Time a loaded bundle at its sparsity level and with its masks off.

    Runs alternate between the two, so that a change of the machine's speed meets both.

    Args:
        model: loaded with at least ``workload.batch`` slots and room for prompt and new tokens.
        weights: as for `load`: what the model was loaded with.
        kernels: time the sparse step's kernels one by one as well.

    Raises:
        UsageError: a model at sparsity 0, or ``kernels`` with a decoder that has none to show.
    """
    return compare_weights({weights: model}, workload, kernels=kernels)[weights]


def compare_weights(models: Mapping[str, Model], workload: Workload, *, kernels: bool = False) -> dict[str, Comparison]:
    """Time the same bundle with its weights held in several ways, each at its sparsity level and with its masks off, all in
    turns; arguments and errors as for `compare`.

    Args:
        models: what the weights are held as -> the bundle loaded so.
    """
    levels = {name: model.sparsity for name, model in models.items()}
    if 0 in levels.values():
        raise UsageError("sparsity: expected a sparsity level to compare with the dense model, found 0")
    bandwidth = read_bandwidth_gbps(next(iter(models.values())).decoder.device)
    realised = {name: _realised(model.decoder, workload) for name, model in models.items()}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    if kernels:
        from .cuda.kernel_times import time_kernels

        for name, model in models.items():
            tables[name] = time_kernels(model.decoder, batch=workload.batch, sparsity=realised[name])
    found: dict[tuple[str, float], list[tuple[float, float]]] = {
        (name, sparsity): [] for name, level in levels.items() for sparsity in (level, 0.0)
    }
    for run in range(1 + workload.runs):
        for (name, sparsity), runs in found.items():
            models[name].sparsity = sparsity
            timed = time_run(models[name].decoder, workload)
            if run:  # the first only warms up
                runs.append(timed)
    for name, model in models.items():
        model.sparsity = levels[name]
    return {
        name: _comparison(
            model.decoder, name, workload, bandwidth, levels[name], realised[name], found[name, 0.0],
            found[name, levels[name]], tables.get(name, {}),
        )
        for name, model in models.items()
    }  # fmt: skip


def _comparison(
    decoder: Decoder,
    weights: str,
    workload: Workload,
    bandwidth: float,
    level: float,
    realised: float,
    dense: list[tuple[float, float]],
    sparse: list[tuple[float, float]],
    table: dict[str, dict[str, float]],
) -> Comparison:
    device = decoder.device

    def speed(runs: list[tuple[float, float]], unread: float) -> Speed:
        needed = _bytes_per_step(decoder, unread, workload)
        step_ms = statistics.median(seconds for _, seconds in runs) / workload.new_tokens * 1e3
        rates = tuple(workload.batch * workload.new_tokens / seconds for _, seconds in runs)
        return Speed(
            tok_per_s=statistics.median(rates),
            step_ms=step_ms,
            prefill_tok_per_s=statistics.median(workload.batch * workload.prompt_length / s for s, _ in runs),
            realised_sparsity=unread,
            bytes_per_step=needed,
            gbps=needed / step_ms * 1e-6,
            ideal_ms=needed / bandwidth * 1e-6,
            peak_memory_bytes=peak_bytes(device),
            runs=rates,
        )

    return Comparison(
        machine=machine(device),
        backend=decoder.name,
        dtype=str(decoder.dtype).removeprefix("torch."),
        weights=weights,
        workload=workload,
        read_gbps=bandwidth,
        sparsity=level,
        dense=speed(dense, 0.0),
        sparse=speed(sparse, realised),
        kernels=table,
    )


def machine(device: torch.device) -> dict[str, str]:
    """What a figure was measured on: chip, threads or driver's CUDA, and versions."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        import triton

        found |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        found["triton"] = triton.__version__
    else:
        found |= {"device": _cpu_name(), "threads": str(torch.get_num_threads()), "cores": str(os.cpu_count())}
    return found


def time_run(decoder: Decoder, workload: Workload) -> tuple[float, float]:
    """Seconds of the prefill and of the steps."""
    last = None
    began = time.perf_counter()
    for slot, prompt in enumerate(prompts(decoder.config, workload)):
        last = decoder.prefill(slot, prompt, len(prompt)).argmax()
    wait(decoder.device)
    middle = time.perf_counter()
    ids = torch.full((workload.batch,), int(last if last is not None else 0))
    for _ in range(workload.new_tokens):
        ids = decoder.step(ids, [_GREEDY] * workload.batch)
        ids.tolist()
    wait(decoder.device)
    return middle - began, time.perf_counter() - middle


def _realised(decoder: Decoder, workload: Workload) -> float:
    """Sparsity of a short run, which is not one of those timed."""
    decoder.measure_sparsity(True)
    short = Workload(workload.prompt_length, min(workload.new_tokens, 32), workload.batch, 1, workload.seed)
    time_run(decoder, short)
    found = decoder.realised_sparsity()
    decoder.measure_sparsity(False)
    return found or 0.0


def prompts(config: ModelConfig, workload: Workload) -> list[Tensor]:
    """Random ids (``prompt_length``,), the same for the same seed; one prompt for each row of the batch."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.batch, workload.prompt_length)
    return list(torch.randint(config.vocab_size, shape, generator=generator))


def _bytes_per_step(decoder: Decoder, sparsity: float, workload: Workload) -> int:
    projections, head = decoder.bytes_read()
    context = workload.prompt_length + workload.new_tokens // 2
    cache = bytes_per_position(decoder.config, decoder.dtype) * context * workload.batch
    return round(projections * (1 - sparsity)) + head + cache


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux; the platform's own word will do
    return platform.processor() or platform.machine()
