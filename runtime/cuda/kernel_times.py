"""A decode step's kernels one by one on an NVIDIA GPU: their times, and the tiles that suit this chip and model."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources

from wisparse.formats.errors import UsageError
from wisparse.kernels.gpu.gemv import GemvTile, launch_kind
from wisparse.kernels.gpu.tiles import local_key, most_pollers, remember_tiles
from wisparse.kernels.reference import rows_together

from ..decoding.decoder import Decoder
from ..timing import read_bandwidth_gbps
from .decoder import CudaDecoder
from .graph import elapsed_us, time_launches
from .step import DecodeStep, kv_splits_for

log = logging.getLogger(__name__)

_ROLES = ("qkv", "o", "gate_up", "down")
# A context like that of the default workload.
_CONTEXT = 150
# A tile has to win by this much of the step to be taken: less is noise.
_MARGIN = 0.002


def time_kernels(decoder: Decoder, *, batch: int, sparsity: float) -> dict[str, dict[str, float]]:
    """Microseconds of each kernel, averaged over the blocks, and for products the time their kept weights take to read.

    Args:
        batch: rows of the step.
        sparsity: realised; the ideal counts the bytes of the weights that it leaves (of a batch: if all rows kept the
            same channels).

    Raises:
        UsageError: the decoder does not run on Triton kernels.
    """
    decoder = _require_triton(decoder, "--kernels")
    bandwidth = read_bandwidth_gbps(decoder.device)
    _read_prompts(decoder, batch)
    step = _step(decoder, batch, None)
    count = len(decoder.weights.blocks)
    table: dict[str, dict[str, float]] = {}
    for role in (*step.parts, "logits"):
        indices = [count] if role == "logits" else range(count)

        def launch(role: str = role, indices: list[int] | range = indices) -> None:
            for index in indices:
                step.launch_part(index, role)

        table[role] = {"us": time_launches(launch, len(indices))}
        if role == "logits":
            needed: float = decoder.bytes_read()[1]
        elif role in _ROLES:
            needed = getattr(decoder.weights.blocks[0], role).matrix.num_bytes * (1 - sparsity)
        else:
            continue
        table[role]["ideal_us"] = needed / bandwidth * 1e-3
    return table


def tune(decoder: Decoder, *, batch: int) -> dict[str, GemvTile]:
    """Try tiles in whole decode steps, one role at a time, and add the best to the local cache.

    A launch timed alone follows its own kind; in a step it starts in the tail of another. So candidates are compared
    where they run. What is loaded afterwards uses the cache; ``decoder`` keeps its own tiles.

    Raises:
        UsageError: the decoder does not run on Triton kernels.
    """
    decoder = _require_triton(decoder, "--tune")
    first = decoder.weights.blocks[0]
    properties = torch.cuda.get_device_properties(decoder.device)
    _read_prompts(decoder, batch)
    tiles = dict(_step(decoder, batch, None).tiles[0])
    best = _time(decoder, batch, tiles)
    log.info("tuning: a step takes %.1f us", best)
    kinds = _kinds(decoder, batch)
    for role in _ROLES:
        widths = getattr(first, role).widths
        for candidate in _neighbours(tiles[role], kinds[role], widths, properties.multi_processor_count):
            try:
                found = _time(decoder, batch, {**tiles, role: candidate})
            except OutOfResources:  # more shared memory or registers than a multiprocessor has
                continue
            if found < best * (1 - _MARGIN):
                best, tiles[role] = found, candidate
        log.info("tuning: %.1f us after %s: %s", best, role, tiles[role])
    named = {}
    arch = properties.major * 10 + properties.minor
    for role in _ROLES:
        group = getattr(first, role)
        # The decoder's graphs have a power of two of rows.
        together = rows_together(1 << (batch - 1).bit_length(), decoder.dtype)
        key = local_key(
            arch, group.in_features, group.out_features, kinds[role], together, decoder.dtype,
            group.matrix.kind, group.matrix.group,
        )  # fmt: skip
        named[key] = tiles[role]
    log.info("tuning: kept in %s", remember_tiles(named))
    return named


def _kinds(decoder: CudaDecoder, batch: int) -> dict[str, str]:
    """How a step of ``batch`` rows launches each role of its first block."""
    first, together = decoder.weights.blocks[0], rows_together(batch, decoder.dtype)
    return {role: launch_kind(together, dense=getattr(first, role).dense) for role in _ROLES}


def _neighbours(tile: GemvTile, kind: str, widths: tuple[int, ...], multiprocessors: int) -> Iterator[GemvTile]:
    """Tiles around one: other widths at the same bytes per load, other numbers of splits, other ways to add up."""
    for width in (tile.block_n // 2, tile.block_n, tile.block_n * 2):
        if not 64 <= width <= 1024:
            continue
        block_k = max(16 if kind == "batch" else 1, tile.block_k * tile.block_n // width)
        for factor in (0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0):
            splits = max(1, round(tile.splits * factor * width / tile.block_n))
            most = most_pollers(multiprocessors, widths, width, splits, tile.warps)
            for pollers in {min(tile.pollers, most)} if factor != 1.0 else {0, most // 2, most}:
                candidate = replace(tile, block_n=width, block_k=block_k, splits=splits, pollers=pollers)
                if candidate != tile:
                    yield candidate


def _require_triton(decoder: Decoder, option: str) -> CudaDecoder:
    if not isinstance(decoder, CudaDecoder):
        raise UsageError(
            f"{option}: expected the triton back end on an NVIDIA GPU, found {decoder.name} on {decoder.device}; "
            "leave the option out"
        )
    return decoder


def _read_prompts(decoder: CudaDecoder, batch: int) -> None:
    """Fill the cache that the timed steps attend to. With an empty one o's input is nearly zero, it keeps no channel,
    and the launches after it work on what no answer has."""
    length = min(_CONTEXT, decoder.max_seq_len - 1)
    ids = torch.randint(decoder.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    for slot in range(batch):
        decoder.prefill(slot, ids, length)


def _step(decoder: CudaDecoder, batch: int, tiles: dict[str, GemvTile] | None) -> DecodeStep:
    step = DecodeStep(
        decoder.weights, decoder.config, decoder._cache, decoder._positions, decoder._places,
        first=0, rows=batch, tiles=tiles, kv_splits=kv_splits_for(_CONTEXT, batch),
    )  # fmt: skip
    step.tokens.fill_(7 % decoder.config.vocab_size)
    decoder._positions.fill_(min(_CONTEXT, decoder.max_seq_len - 1))
    return step


def _time(decoder: CudaDecoder, batch: int, tiles: dict[str, GemvTile]) -> float:
    """Microseconds of a step, replays back to back."""
    step = _step(decoder, batch, tiles)
    step.replay()
    times = []
    for _ in range(9):
        decoder._positions.fill_(min(_CONTEXT, decoder.max_seq_len - 1))
        times.append(elapsed_us(step.replay))
    return statistics.median(times)
