"""Expected decoding speed of a model by its configuration. Smaller models of the same blocks, with random weights, are timed
in the decoder that would run the model, and extrapolated:

    step = fixed part + blocks * time of a block + rows of the output layer * time of a row

Speed depends on shapes and on the number of kept channels, not on the weights' values.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.bundle import ProjectionMask, scale_shapes
from wisparse.formats.errors import WisparseError
from wisparse.formats.machine import available_bytes
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES, group_of

from .backends import make_decoder
from .benchmark import Workload, time_run
from .choice import bytes_read
from .decoding.decoder import Decoder
from .memory import bytes_per_position, weight_bytes

ROUNDS, _STEPS, _COMPLETE_STEPS = 5, 8, 24  # steps of a smaller model, and of the complete one
# Upper bound of a step's fixed part in seconds; a larger one is noise, which the extrapolation would multiply.
_MOST_FIXED = 3e-4
_GPU_BLOCK_SECONDS = 30e-6  # fixed time of a block on an H200: benchmarks/results/gpu-h200-weights.md
# Least relative error of the stated range; `wisparse bench` was within it (benchmarks/results/advise.json).
_ERROR = 0.15


@dataclass(frozen=True)
class Forecast:
    """Speed of one request, 200 tokens after a prompt of 5, as in `wisparse bench`."""

    weights: str
    sparsity: float
    tok_per_s: float  # median of the rounds
    low: float
    high: float
    memory_bytes: int  # weights, and KV cache of the context


class _RandomCheckpoint:
    """Weights of any model: the same million random numbers, repeated."""

    quantised: Mapping[str, Any] = {}
    error = WisparseError

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.dtype, self._shapes = dtype, expected_tensors(config)
        self._values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        return self._random(self._shapes[name], device)

    def row_pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        n, k = self._shapes[name]
        piece = self._random((min(rows, n), k), "cpu")
        for first in range(0, n, rows):
            yield piece[: n - first]

    def _random(self, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=device)
        count = math.prod(shape)
        values = self._values.to(device) * shape[-1] ** -0.5
        return values.repeat(-(-count // len(values)))[:count].view(shape)


def forecast(
    config: ModelConfig,
    device: torch.device,
    levels: Sequence[float],
    context: int,
    on_type: Callable[[str], None] = lambda note: None,
) -> list[Forecast]:
    """Forecasts for each weight type of the device's back end and each of ``levels``, ascending from 0. On a CPU the first
    and the last level are timed and the others interpolated, as bytes are linear in sparsity. ``context``: positions of the
    KV cache in ``memory_bytes``. ``on_type`` is called before a type is timed, with its name and its number of how many."""
    dtype = getattr(torch, config.dtype, torch.float32)
    configs = _timed_configs(config, device, dtype)
    complete = len(configs) == 1
    work = Workload(1, min(_COMPLETE_STEPS, config.max_position_embeddings - 2) if complete else _STEPS)
    # On a GPU the kernels of all types and levels would take minutes to compile: see `_by_bytes`.
    timed = (levels[0], levels[-1]) if device.type == "cpu" else (levels[0],)
    bundles = [_random_bundle(timed_config, dtype, levels) for timed_config in configs]
    try:
        grouped = all(group_of(projection.in_features) for projection in config.projections())
    except ValueError:
        grouped = False  # no int4

    def memory(kind: str) -> int:
        bundle = SimpleNamespace(config=config, checkpoint=bundles[0].checkpoint, recipe=bundles[0].recipe)
        weights = weight_bytes(bundle, dtype, kind, decoder.keeps)  # type: ignore[arg-type]
        return weights + context * bytes_per_position(config, dtype)

    forecasts: list[Forecast] = []
    kinds, other = ["native"], list[str]()
    for kind in kinds:
        decoders: list[Decoder] = []
        for bundle in bundles:
            length = work.prompt_length + work.new_tokens + 1
            decoder = make_decoder(bundle, device=device, dtype=dtype, max_seq_len=length, weights=kind)
            decoders.append(decoder)
        if kind == "native":
            other = [one for one in decoder.weight_types if one != kind and (grouped or not WEIGHT_TYPES[one].grouped)]
            kinds += other if device.type == "cpu" else []
        on_type(f"{kind}, {kinds.index(kind) + 1} of {len(kinds)}")
        # Rounds alternate between the levels, so that a change of the machine's speed affects all.
        times: dict[float, list[list[float]]] = {level: [] for level in timed}
        for count in range(1 + ROUNDS):
            for level, rounds in times.items():
                for decoder, bundle in zip(decoders, bundles, strict=True):
                    decoder.set_masks(bundle.levels[level])
                seconds = [time_run(decoder, work)[1] / work.new_tokens for decoder in decoders]
                if count:  # the first is a warmup
                    rounds.append(seconds)
        medians = {level: [*map(statistics.median, zip(*rounds, strict=True))] for level, rounds in times.items()}
        row = 0.0  # seconds of a row of the output layer, which is dense at all levels
        if not complete:
            difference = statistics.median(larger - small for small, _, larger in medians.values())
            row = max(0.0, difference) / (configs[2].vocab_size - configs[0].vocab_size)
        for decoder in decoders:
            decoder.close()
        steps = []  # seconds of the complete model's step, by timed level
        for seconds, *others in medians.values():
            if others:
                head = row * configs[0].vocab_size
                fixed = min(max(0.0, 2 * seconds - others[0] - head), _MOST_FIXED)
                blocks = (others[0] - fixed - head) * config.num_blocks / configs[1].num_blocks
                seconds = fixed + blocks + row * config.vocab_size
            steps.append(seconds)
        index = 0 if complete else 1
        spread = [seconds[index] / medians[level][index] for level, rounds in times.items() for seconds in rounds]
        slow, fast = max(*spread, 1 / (1 - _ERROR)), min(*spread, 1 / (1 + _ERROR))
        for level in levels:
            rate = 1 / (steps[0] + (steps[-1] - steps[0]) * level / levels[-1])
            forecasts.append(Forecast(kind, level, rate, rate / slow, rate / fast, memory(kind)))
    if device.type == "cpu":
        return forecasts
    native = forecasts[0]
    return [
        _by_bytes(config, dtype, native, kind, level, memory(kind)) for kind in (*kinds, *other) for level in levels
    ]


def _by_bytes(
    config: ModelConfig, dtype: torch.dtype, dense: Forecast, kind: str, level: float, memory: int
) -> Forecast:
    """A GPU's forecast by that of the dense native weights: a fixed time for each block, the rest proportional to bytes. For
    the steps in benchmarks/results/gpu-h200-weights.md the error is at most 9%."""

    seconds = 1 / dense.tok_per_s
    fixed = min(_GPU_BLOCK_SECONDS * config.num_blocks, seconds / 2)
    rate = 1 / (
        fixed + (seconds - fixed) * bytes_read(config, dtype, kind, level) / bytes_read(config, dtype, "native", 0.0)
    )
    low, high = rate * dense.low / dense.tok_per_s, rate * dense.high / dense.tok_per_s
    return Forecast(kind, level, rate, low, high, memory)


def _timed_configs(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[ModelConfig]:
    """The model itself, or three smaller ones: with n blocks, 2 n blocks, and n blocks and a larger vocabulary. They are so
    large that the cache helps no more than in the complete model."""
    # On a GPU as large as fits: steps of a few blocks would wait for the host.
    cache = _cache_bytes() if device.type == "cpu" else available_bytes(device) // (10 * dtype.itemsize)
    # Kinds of blocks alternate with a period; whole periods keep their proportion.
    period = next(n for n in range(1, config.num_blocks + 1) if config.blocks[n:] == config.blocks[:-n])
    each = sum(projection.num_parameters for block in range(period) for projection in config.projections(block))
    blocks = period * math.ceil(1.5 * cache / each)
    fits = sum(map(math.prod, expected_tensors(config).values())) <= 6 * cache
    if fits or 2 * blocks >= config.num_blocks:
        return [config]
    rows = min(config.vocab_size // 2, 2 * cache // config.hidden_size)
    shapes = [(blocks, rows), (2 * blocks, rows), (blocks, min(2 * rows, config.vocab_size))]
    return [replace(config, num_blocks=n, blocks=config.blocks[:n], vocab_size=vocab) for n, vocab in shapes]


def _cache_bytes() -> int:
    """Total size of the last-level caches; 32 MB if unknown."""
    sizes = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(OSError, ValueError):
            sizes[(cache / "shared_cpu_list").read_text()] = int((cache / "size").read_text().strip()[:-1]) << 10
    return sum(sizes.values()) or 32 << 20


def _random_bundle(config: ModelConfig, dtype: torch.dtype, levels: Sequence[float]) -> Any:
    """A bundle for a decoder. The masks of a level keep fixed random channels for any input."""
    generator = torch.Generator().manual_seed(1)
    masks: dict[float, dict[str, ProjectionMask]] = {level: {} for level in (0.0, *levels)}
    for level, level_masks in masks.items():
        for name, shape in scale_shapes(config).items():
            channels = torch.randperm(shape[-1], generator=generator)
            scale = torch.ones(shape)
            scale[..., channels[: round(level * shape[-1])]] = 1e-20
            level_masks[name] = ProjectionMask(scale, 1e-12 if level else 0.0, level)
    checkpoint = _RandomCheckpoint(config, dtype)
    recipe = SimpleNamespace(graded=False)
    return SimpleNamespace(config=config, checkpoint=checkpoint, masks=masks[0.0], levels=masks, recipe=recipe)
