"""``wisparse advise``: estimates of speed, memory, disk and quality by weight type and sparsity, before a conversion."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from wisparse.converter.config import full_config
from wisparse.converter.preflight import bundle_bytes, conversion_seconds, working_bytes
from wisparse.converter.processes import Progress
from wisparse.converter.report import answers_changed
from wisparse.converter.settings import USUAL, USUAL_DEFAULT, ConvertSettings, auto_seq_len
from wisparse.converter.source import choose_dtype
from wisparse.formats.checkpoint import read_config
from wisparse.formats.errors import printable
from wisparse.formats.machine import available_bytes, choose_device
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.quantization import read_quantisation
from wisparse.formats.tensors import expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES
from wisparse.runtime.benchmark import machine, read_bandwidth_gbps
from wisparse.runtime.forecast import Forecast, forecast

from .options import print_table

# KL(dense || converted) in nats per token of the models `MEASURED_ON`, by weight type and sparsity (benchmarks/front.py).
MEASURED_ON = "6.5M Llama", "37M Qwen2"
KL = {
    "native": {0.0: (0.0, 0.0), 0.3: (0.0107, 0.0032), 0.4: (0.0294, 0.0090), 0.5: (0.0685, 0.0219)},
    "int8": {0.0: (0.0004, 0.0002), 0.3: (0.0111, 0.0034), 0.4: (0.0296, 0.0093), 0.5: (0.0692, 0.0221)},
    "fp8": {0.0: (0.0037, 0.0019), 0.3: (0.0143, 0.0052), 0.4: (0.0327, 0.0110), 0.5: (0.0715, 0.0238)},
    "int4": {0.0: (0.0135, 0.0067), 0.3: (0.0340, 0.0156), 0.4: (0.0531, 0.0236), 0.5: (0.0948, 0.0365)},
}

CONTEXT = 4096  # tokens of the KV cache in the memory estimate


@dataclass(frozen=True)
class Row(Forecast):
    fits: bool  # in the free memory
    bundle_bytes: int
    kl: tuple[float, float]  # of the models `MEASURED_ON`
    answers_changed: tuple[int, int]  # `answers_changed` of both: the least and the most of 100


@dataclass(frozen=True)
class Advice:
    machine: dict[str, str]
    read_gbps: float
    memory_free_bytes: int
    context: int
    rows: tuple[Row, ...]
    conversion_seconds: float
    conversion_memory_bytes: int
    command: str
    why: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kl_measured_on": MEASURED_ON}


def advise(
    model: str,
    folder: Path,
    device: torch.device,
    progress: Progress,
    *,
    revision: str | None,
    gguf_file: str | None = None,
    context: int = CONTEXT,
) -> Advice:
    """``model``, ``revision``, ``gguf_file``: the user's, for the recommended command; ``folder`` has config.json."""
    stated = full_config(read_config(folder))
    config = ModelConfig.from_dict(stated)
    packings = read_quantisation(stated, config)  # a conversion keeps quantised weights
    stored = next(iter(packings.values())).kind if packings else None
    context = min(context, config.max_position_embeddings)
    free = available_bytes(device)
    with progress.stage("Measuring this machine") as stage:
        read_gbps = read_bandwidth_gbps(device)
        forecasts = forecast(config, device, (0.0, *USUAL), context, stage.note)
        dtype, length = choose_dtype(config.dtype, device), auto_seq_len(device.type, config.max_position_embeddings)
        settings = ConvertSettings("model", Path("bundle"), seq_len=length)
        seconds = conversion_seconds(config, settings, device, dtype)
        assert seconds is not None  # of the default settings
    if stored is not None:  # a back end without this weight type dequantises it
        weights = stored if stored in {one.weights for one in forecasts} else "native"
        forecasts = [one for one in forecasts if one.weights == weights]
    native = getattr(torch, config.dtype, torch.float32)
    shapes = [(one.out_features * max(1, one.experts), one.in_features) for one in config.projections()]
    parameters = sum(map(math.prod, expected_tensors(config).values()))
    conversion_memory = parameters * dtype.itemsize + working_bytes(config, dtype, settings)
    parameters += config.untied_parameters
    rows = []
    for one in forecasts:
        weight_type = WEIGHT_TYPES[one.weights]
        saved = sum(math.prod(shape) * native.itemsize - weight_type.nbytes(shape, native) for shape in shapes)
        disk = bundle_bytes(config, parameters, "auto") - saved
        kl = KL["native" if stored else one.weights][one.sparsity]
        changed = answers_changed(min(kl))[0], answers_changed(max(kl))[1]
        rows.append(Row(**asdict(one), fits=one.memory_bytes < free, bundle_bytes=disk, kl=kl, answers_changed=changed))
    options, why = _recommended(rows, stored, config, device)
    options += ["--device", str(device)] if device != choose_device() else []
    options += ["--revision", revision] if revision is not None else []
    options += ["--gguf-file", gguf_file] if gguf_file is not None else []
    command = shlex.join(["wisparse", "convert", model, *options])
    facts = machine(device)
    if device.type == "cpu":
        facts["instructions"] = torch.backends.cpu.get_cpu_capability()
    return Advice(facts, read_gbps, free, context, tuple(rows), seconds, conversion_memory, command, why)


def _recommended(
    rows: Sequence[Row], stored: str | None, config: ModelConfig, device: torch.device
) -> tuple[list[str], str]:
    """The recommended options of `wisparse convert`, and the reason."""
    table = {(row.weights, row.sparsity): row for row in rows}
    kinds = [kind for kind in ("int8", "int4", "native", "fp8") if (kind, 0.0) in table]
    fitting = [kind for kind in kinds if table[kind, 0.0].fits]
    kind = fitting[0] if fitting else min(kinds, key=lambda one: table[one, 0.0].memory_bytes)
    options = [] if stored else ["--weights", kind]
    if stored:
        why = f"the model is {stored} already and stays so"
    elif not fitting:
        why = "no weight type fits into the free memory; this is the smallest"
        if config.has_experts and device.type == "cpu":
            why += ", whose experts are then read from a file, as fast as the disk and not as stated"
    else:
        why = {"int8": "int8 costs almost no quality", "int4": "int8 does not fit into the free memory"}.get(kind, "")
        why = why or "this back end has no other weight type"
    dense, sparse = table[kind, 0.0].tok_per_s, table[kind, USUAL_DEFAULT].tok_per_s
    if sparse < 1.05 * dense:
        return [*options, "--sparsity", "0"], f"{why}; sparsity would not make it faster here"
    times = sparse / rows[0].tok_per_s
    options += ["--sparsity", ",".join(f"{one:g}" for one in USUAL)]
    return options, f"{why}; {kind} at {USUAL_DEFAULT:.0%} is {times:.2g} times as fast as {rows[0].weights} dense"


def print_advice(advice: Advice) -> None:
    facts = ", ".join(f"{key} {value}" for key, value in advice.machine.items() if key not in ("python", "torch"))
    click.echo(f"{facts}; memory reads {advice.read_gbps:,.1f} GB/s, {advice.memory_free_bytes / 1e9:,.1f} GB free")
    heads = ["weights", "sparsity", "tok/s", "range", "memory GB", "bundle GB", "KL", "changed"]
    lines = []
    for row in advice.rows:
        rate, low, high = (
            f"{rate:,.0f}" if rate >= 20 else f"{rate:.2g}" for rate in (row.tok_per_s, row.low, row.high)
        )
        sizes = [f"{size / 1e9:,.2f}" for size in (row.memory_bytes, row.bundle_bytes)]
        sizes[0] += "" if row.fits else " too large"
        kl = " / ".join(f"{one:.2g}" for one in row.kl)
        changed = "{} to {}%".format(*row.answers_changed)
        lines.append([row.weights, f"{row.sparsity:.0%}", rate, f"{low} to {high}", *sizes, kl, changed])
    minutes = advice.conversion_seconds / 60
    duration = f"{minutes:.2g} minutes" if minutes < 100 else f"{minutes / 60:,.0f} hours"
    note = (
        f"tok/s: one request, measured on blocks of this shape with random weights; memory: with {advice.context:,} "
        f"tokens of context.\nKL to the dense model, nats a token, measured on two models: {' / '.join(MEASURED_ON)}; "
        f"changed: greedy answers of 32 tokens that differ anywhere from the dense model's. Masks cost "
        f"chat models several times as much: `wisparse eval`.\nConversion: about {duration} (half to twice that; int4 "
        f"longer), {advice.conversion_memory_bytes / 1e9:.2g} GB of memory."
    )
    print_table(heads, lines, note=note)
    click.echo(f"Recommended: {printable(advice.command)}\n  {advice.why}")
