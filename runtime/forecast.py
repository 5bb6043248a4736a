"""Expected decoding speed of a model of which only the configuration is there. Some of its blocks, with random weights,
are timed in the decoder that will run the model, and the rest is extrapolated:

    step = fixed part + blocks * time of a block + rows of the output layer * time of a row

Speed depends on shapes and on how many channels are kept, not on what the weights say.
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
from wisparse.formats.model_config import ModelConfig, expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES, group_of

from .backends import make_decoder
from .benchmark import Workload, time_run
from .decoding.cache import bytes_per_position
from .decoding.decoder import Decoder, weight_bytes

_ROUNDS, _STEPS = 5, 8  # of parts of a model; a whole one has 200 steps, as `wisparse bench`
# Seconds of a step that no block and no row takes; more than this is noise, which would be multiplied.
_MOST_FIXED = 3e-4
_GPU_BLOCK_SECONDS = 30e-6  # of a block whatever it reads, on an H200: benchmarks/results/gpu-h200-weights.md
# Half the range that is stated at least: `wisparse bench` was within it (benchmarks/results/advise.json).
_ERROR = 0.15


@dataclass(frozen=True)
class Forecast:
    """One request, 200 tokens after a prompt of 5, as `wisparse bench` times it."""

    weights: str
    sparsity: float
    tok_per_s: float  # median of the rounds
    low: float
    high: float
    memory_bytes: int  # weights, and keys and values of the context


class _RandomCheckpoint:
    """Weights for any model: the same million random numbers over and over."""

    quantised: Mapping[str, Any] = {}
    error = WisparseError

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.dtype, self._shapes = dtype, expected_tensors(config)
        self._values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        return self._made(self._shapes[name], device)

    def row_pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        n, k = self._shapes[name]
        piece = self._made((min(rows, n), k), "cpu")
        for first in range(0, n, rows):
            yield piece[: n - first]

    def _made(self, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
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
    on_type: Callable[[str], None] = lambda weights: None,
) -> list[Forecast]:
    """For each weight type that the device's back end has, and each of ``levels``, ascending from 0. On a CPU the first
    and the last are timed, the time of others lies on the line between them, as their bytes do. ``context``: positions of
    the KV cache in ``memory_bytes``. ``on_type`` is called before each type is measured."""
    dtype = getattr(torch, config.dtype, torch.float32)
    parts = _parts(config, device, dtype)
    whole = len(parts) == 1
    work = Workload(1, min(200, config.max_position_embeddings - 2) if whole else _STEPS)
    # On a GPU kernels of every type and level would take minutes to compile: see `_by_bytes`.
    timed = (levels[0], levels[-1]) if device.type == "cpu" else (levels[0],)
    bundles = [_random_bundle(part, dtype, levels) for part in parts]
    try:
        grouped = all(group_of(projection.in_features) for projection in config.projections())
    except ValueError:
        grouped = False  # no int4

    def memory(kind: str) -> int:
        everything = SimpleNamespace(config=config, checkpoint=bundles[0].checkpoint, recipe=bundles[0].recipe)
        weights = weight_bytes(everything, dtype, kind, made.keeps)  # type: ignore[arg-type]
        return weights + context * bytes_per_position(config, dtype)

    found: list[Forecast] = []
    kinds, other = ["native"], list[str]()
    for kind in kinds:
        on_type(kind)
        decoders: list[Decoder] = []
        for bundle in bundles:
            length = work.prompt_length + work.new_tokens + 1
            made = make_decoder(bundle, device=device, dtype=dtype, max_seq_len=length, weights=kind)
            decoders.append(made)
        if kind == "native":
            other = [one for one in made.weight_types if one != kind and (grouped or not WEIGHT_TYPES[one].grouped)]
            kinds += other if device.type == "cpu" else []
        # Rounds alternate between the levels, so that a change of the machine's speed meets all.
        times: dict[float, list[list[float]]] = {level: [] for level in timed}
        for count in range(1 + _ROUNDS):
            for level, rounds in times.items():
                for decoder, bundle in zip(decoders, bundles, strict=True):
                    decoder.set_masks(bundle.levels[level])
                seconds = [time_run(decoder, work)[1] / work.new_tokens for decoder in decoders]
                if count:  # the first only warms up
                    rounds.append(seconds)
        medians = {level: [*map(statistics.median, zip(*rounds, strict=True))] for level, rounds in times.items()}
        row = 0.0  # seconds; the output layer is never sparse, so all levels tell of it
        if not whole:
            more = statistics.median(larger - small for small, _, larger in medians.values())
            row = max(0.0, more) / (parts[2].vocab_size - parts[0].vocab_size)
        for decoder in decoders:
            decoder.close()
        steps = []  # seconds of the whole model's
        for seconds, *others in medians.values():
            if others:
                head = row * parts[0].vocab_size
                fixed = min(max(0.0, 2 * seconds - others[0] - head), _MOST_FIXED)
                blocks = (others[0] - fixed - head) * config.num_blocks / parts[1].num_blocks
                seconds = fixed + blocks + row * config.vocab_size
            steps.append(seconds)
        part = 0 if whole else 1
        spread = [one[part] / medians[level][part] for level, rounds in times.items() for one in rounds]
        slow, fast = max(*spread, 1 / (1 - _ERROR)), min(*spread, 1 / (1 + _ERROR))
        for level in levels:
            rate = 1 / (steps[0] + (steps[-1] - steps[0]) * level / levels[-1])
            found.append(Forecast(kind, level, rate, rate / slow, rate / fast, memory(kind)))
    if device.type == "cpu":
        return found
    return [
        _by_bytes(config, dtype, found[0], kind, level, memory(kind)) for kind in (*kinds, *other) for level in levels
    ]


def _by_bytes(
    config: ModelConfig, dtype: torch.dtype, dense: Forecast, kind: str, level: float, memory: int
) -> Forecast:
    """On a GPU a step takes a fixed part for each block, and its bytes at the rate of the dense native weights. For the
    steps in benchmarks/results/gpu-h200-weights.md this gives the speed within 9%."""

    def bytes_read(kind: str, level: float) -> float:
        held, vocabulary = WEIGHT_TYPES[kind], (config.vocab_size, config.hidden_size)
        shapes = [(one.out_features * one.chosen, one.in_features) for one in config.projections()]
        inside = sum(held.nbytes(shape, dtype) for shape in shapes)
        return inside * (1 - level) + WEIGHT_TYPES[held.head].nbytes(vocabulary, dtype)

    seconds = 1 / dense.tok_per_s
    fixed = min(_GPU_BLOCK_SECONDS * config.num_blocks, seconds / 2)
    rate = 1 / (fixed + (seconds - fixed) * bytes_read(kind, level) / bytes_read("native", 0.0))
    low, high = rate * dense.low / dense.tok_per_s, rate * dense.high / dense.tok_per_s
    return Forecast(kind, level, rate, low, high, memory)


def _parts(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[ModelConfig]:
    """The model itself, or what of it is timed: some blocks, twice as many, and a larger vocabulary. They are as large
    as they have to be for the cache not to help more than in the whole model."""
    # Of a GPU whatever fits: it makes weights fast, and steps of a few blocks would wait for the host.
    cache = _cache_bytes() if device.type == "cpu" else available_bytes(device) // (10 * dtype.itemsize)
    # Blocks of several kinds come in turns: of each kind there have to be as many as in the whole.
    period = next(n for n in range(1, config.num_blocks + 1) if config.blocks[n:] == config.blocks[:-n])
    each = sum(projection.num_parameters for block in range(period) for projection in config.projections(block))
    blocks = period * math.ceil(1.5 * cache / each)
    whole = sum(map(math.prod, expected_tensors(config).values())) <= 6 * cache
    if whole or 2 * blocks >= config.num_blocks:
        return [config]
    rows = min(config.vocab_size // 2, 2 * cache // config.hidden_size)
    shapes = [(blocks, rows), (2 * blocks, rows), (blocks, min(2 * rows, config.vocab_size))]
    return [replace(config, num_blocks=n, blocks=config.blocks[:n], vocab_size=vocab) for n, vocab in shapes]


def _cache_bytes() -> int:
    """Of all last-level caches together; 32 MB where the system does not tell."""
    found = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(OSError, ValueError):
            found[(cache / "shared_cpu_list").read_text()] = int((cache / "size").read_text().strip()[:-1]) << 10
    return sum(found.values()) or 32 << 20


def _random_bundle(config: ModelConfig, dtype: torch.dtype, levels: Sequence[float]) -> Any:
    """What a decoder reads of a bundle. A level's masks keep the same random channels whatever the input is."""
    generator = torch.Generator().manual_seed(1)
    masks: dict[float, dict[str, ProjectionMask]] = {level: {} for level in (0.0, *levels)}
    for level, of_level in masks.items():
        for name, shape in scale_shapes(config).items():
            channels = torch.randperm(shape[-1], generator=generator)
            scale = torch.ones(shape)
            scale[..., channels[: round(level * shape[-1])]] = 1e-20
            of_level[name] = ProjectionMask(scale, 1e-12 if level else 0.0, level)
    checkpoint = _RandomCheckpoint(config, dtype)
    recipe = SimpleNamespace(graded=False)
    return SimpleNamespace(config=config, checkpoint=checkpoint, masks=masks[0.0], levels=masks, recipe=recipe)
