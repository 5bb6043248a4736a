"""Expected decoding speed of a model of which only the configuration is there. Some of its blocks, with random weights,
are timed in the decoder that will run the model, and the rest is extrapolated:

    step = fixed part + blocks * time of a block + rows of the output layer * time of a row

Speed depends on shapes and on how many channels are kept, not on what the weights say.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.errors import WisparseError
from wisparse.formats.model_config import ModelConfig, expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES, group_of

from .backends import make_decoder
from .benchmark import Workload, time_run
from .decoding.cache import bytes_per_position
from .decoding.decoder import Decoder, weight_bytes
from .decoding.sampling import SamplingParams

# A model of at most so many parameters is timed whole; of a larger one blocks with at least a quarter of them, and twice
# as many. A GPU makes weights fast, and has a large cache.
_WHOLE = {"cpu": 120_000_000, "cuda": 1_600_000_000}
# The output layer of these parts has few rows; of a third part it has about so many weights.
_FEW_ROWS, _HEAD_WEIGHTS = 256, {"cpu": 32_000_000, "cuda": 500_000_000}
_ROUNDS = 5
# Seconds of a step that no block and no row takes; more than this is noise, which would be multiplied.
_MOST_FIXED = 3e-4
# Read before each step of a part on the CPU: in the whole model its blocks would not be in the cache either.
_FLUSH_BYTES = 128 << 20
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
    """For each weight type that the device's back end has, and each of ``levels``; ``context``: positions of the KV
    cache in ``memory_bytes``. ``on_type`` is called before each type is measured."""
    dtype = getattr(torch, config.dtype, torch.float32)
    parts = _parts(config, device.type)
    whole = len(parts) == 1
    few = 32 if device.type == "cuda" else 3
    work = Workload(new_tokens=min(200, config.max_position_embeddings - 6) if whole else few)
    bundles = [_random_bundle(part, dtype, levels) for part in parts]
    flush = None if whole or device.type == "cuda" else torch.ones(_FLUSH_BYTES // 4)
    try:
        grouped = all(group_of(projection.in_features) for projection in config.projections())
    except ValueError:
        grouped = False  # no int4
    found: list[Forecast] = []
    kinds = ["native"]
    for kind in kinds:
        on_type(kind)
        decoders: list[Decoder] = []
        for bundle in bundles:
            length = work.prompt_length + work.new_tokens + 1
            made = make_decoder(bundle, device=device, dtype=dtype, max_seq_len=length, weights=kind)
            decoders.append(made)
        if kind == "native":
            kinds += [one for one in made.weight_types if one != kind and (grouped or not WEIGHT_TYPES[one].grouped)]
        # Rounds alternate between the levels, so that a change of the machine's speed meets all.
        times: dict[float, list[list[float]]] = {level: [] for level in levels}
        for count in range(1 + _ROUNDS):
            for level, rounds in times.items():
                for decoder, bundle in zip(decoders, bundles, strict=True):
                    decoder.set_masks(bundle.levels[level])
                seconds = [_step_seconds(decoder, work, flush) for decoder in decoders]
                if count:  # the first only warms up
                    rounds.append(seconds)
        medians = {level: [*map(statistics.median, zip(*rounds, strict=True))] for level, rounds in times.items()}
        # The output layer is never sparse: all levels tell of it.
        head = 0.0
        if not whole:
            more = statistics.median(larger - small for small, _, larger in medians.values())
            share = (config.vocab_size - parts[0].vocab_size) / (parts[2].vocab_size - parts[0].vocab_size)
            head = share * max(0.0, more)
        everything = SimpleNamespace(config=config, checkpoint=bundles[0].checkpoint)
        memory = weight_bytes(everything, dtype, kind, made.keeps)  # type: ignore[arg-type]
        memory += context * bytes_per_position(config, dtype)
        for decoder in decoders:
            decoder.close()
        for level, (seconds, *others) in medians.items():
            if others:
                fixed = min(max(0.0, 2 * seconds - others[0]), _MOST_FIXED)
                seconds = fixed + (others[0] - fixed) * config.num_blocks / parts[1].num_blocks + head
            largest = [one[min(1, len(others))] for one in times[level]]
            slow, fast = (statistics.median(largest) / edge for edge in (max(largest), min(largest)))
            low, high = min(slow, 1 - _ERROR) / seconds, max(fast, 1 + _ERROR) / seconds
            found.append(Forecast(kind, level, 1 / seconds, low, high, memory))
    return found


def _parts(config: ModelConfig, device_type: str) -> list[ModelConfig]:
    """The model itself, or what of it is timed: some blocks, twice as many, and these with more of the vocabulary."""
    expected = expected_tensors(config)
    whole = _WHOLE[device_type]
    # Blocks of several kinds come in turns: of each kind there have to be as many as in the whole.
    period = next(n for n in range(1, config.num_blocks + 1) if config.blocks[n:] == config.blocks[:-n])
    each = sum(projection.num_parameters for block in range(period) for projection in config.projections(block))
    blocks = period * -(-whole // (4 * each))
    if sum(map(math.prod, expected.values())) <= whole or 2 * blocks >= config.num_blocks:
        return [config]
    rows = min(config.vocab_size // 2, _FEW_ROWS)
    more_rows = min(config.vocab_size, rows + _HEAD_WEIGHTS[device_type] // config.hidden_size)
    shapes = [(blocks, rows), (2 * blocks, rows), (blocks, more_rows)]
    return [replace(config, num_blocks=n, blocks=config.blocks[:n], vocab_size=vocab) for n, vocab in shapes]


def _random_bundle(config: ModelConfig, dtype: torch.dtype, levels: Sequence[float]) -> Any:
    """What a decoder reads of a bundle. A level's masks keep the same random channels whatever the input is."""
    generator = torch.Generator().manual_seed(1)
    masks: dict[float, dict[str, ProjectionMask]] = {level: {} for level in (0.0, *levels)}
    for level, of_level in masks.items():
        for projection in config.projections():
            channels = torch.randperm(projection.in_features, generator=generator)
            scale = torch.ones(projection.in_features)
            scale[channels[: round(level * projection.in_features)]] = 1e-20
            of_level[projection.name] = ProjectionMask(scale, 1e-12 if level else 0.0, level)
    checkpoint = _RandomCheckpoint(config, dtype)
    return SimpleNamespace(config=config, checkpoint=checkpoint, masks=masks[0.0], levels=masks)


def _step_seconds(decoder: Decoder, work: Workload, flush: Tensor | None) -> float:
    if flush is None:
        return time_run(decoder, work)[1] / work.new_tokens
    decoder.prefill(0, torch.zeros(1, dtype=torch.int64), 1)
    ids, seconds = torch.zeros(1, dtype=torch.int64), []
    for _ in range(work.new_tokens):
        flush.sum()
        began = time.perf_counter()
        ids = decoder.step(ids, [SamplingParams()])
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
