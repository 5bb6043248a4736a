"""The kernels of a decode step on an NVIDIA GPU: their plans (``--explain``), times (``--kernels``), tuning
(``--tune``)."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources

from wisparse.formats.block_ops import describe
from wisparse.formats.errors import UsageError
from wisparse.kernels.gpu.experts import ExpertLinear
from wisparse.kernels.gpu.products import remember_tiles
from wisparse.kernels.gpu.tiles import Gpu, Tile, gpu_of, most_reducers, regime, tuned_key

from ..decoding.decoder import Decoder
from ..torch.block import LINEARS, ROLES
from .decoder import CudaDecoder
from .step import DecodeStep, capture

log = logging.getLogger(__name__)

_CONTEXT = 150  # positions, as in the default workload
_MARGIN = 0.002  # relative gain in step time from which a tile is taken; smaller differences are noise


def explain(decoder: Decoder, *, batch: int) -> str:
    """The operations of the blocks, and the plans of a step's linears, one line for each distinct plan of a role."""
    decoder = _require_triton(decoder, "--explain")
    step = _step(decoder, batch)
    seen: dict[tuple[str, str], list[int]] = {}
    for index, plans in enumerate(step.plans):
        for role, product in plans.items():
            seen.setdefault((role, str(product)), []).append(index)
    lines = [
        f"{role} ({f'{len(blocks)} blocks' if len(blocks) > 1 else f'block {blocks[0]}'}): {chosen}"
        for (role, chosen), blocks in seen.items()
    ]
    return "\n".join([*describe(decoder.config), *lines])


def time_kernels(decoder: Decoder, *, batch: int, sparsity: float, gbps: float) -> dict[str, dict[str, float]]:
    """Microseconds of each kernel, averaged over the blocks, and for linears the time to load their kept weights at
    ``gbps``, as if all rows kept the same channels. ``sparsity``: realised."""
    decoder = _require_triton(decoder, "--kernels")
    _read_prompts(decoder, batch)
    step = _step(decoder, batch)
    blocks = [step.block_launches(index) for index in range(len(decoder.weights.blocks))]
    table: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for launches in blocks for name in launches):
        kernels = [launches[name] for launches in blocks if name in launches]  # not every block has a router

        def launch(kernels: list[Callable[[], object]] = kernels) -> None:
            for kernel in kernels:
                kernel()

        table[name] = {"us": _time_launches(launch, len(kernels))}
        if name in ROLES:
            linears = (getattr(block, name) for block in decoder.weights.blocks)
            num_bytes = sum(linear.num_bytes_read for linear in linears if linear is not None) * (1 - sparsity)
            table[name]["ideal_us"] = num_bytes / len(kernels) / gbps * 1e-3
    ideal = decoder.bytes_read()[1] / gbps * 1e-3
    table["logits"] = {"us": _time_launches(step.launch_logits, 1), "ideal_us": ideal}
    return table


def tune(decoder: Decoder, *, batch: int) -> dict[str, Tile]:
    """Time candidate tiles in whole decode steps, as launches overlap, one linear at a time, and add the fastest to the
    local cache, for decoders loaded afterwards; ``decoder`` keeps its tiles."""
    decoder = _require_triton(decoder, "--tune")
    first, gpu = decoder.weights.blocks[0], gpu_of(decoder.device)
    _read_prompts(decoder, batch)
    step = _step(decoder, batch)
    rows, tiles = step.rows, {role: one.tile for role, one in step.plans[0].items() if one.fused and one.tile}
    best = _time(decoder, batch, tiles)
    log.info("tuning: a step takes %.1f us", best)
    # Tiles of experts are not cached.
    roles = [role for role in LINEARS if role in tiles and not isinstance(getattr(first, role), ExpertLinear)]
    for role in roles:
        linear = getattr(first, role)
        for candidate in neighbours(tiles[role], regime(rows, dense=linear.dense), linear.widths, gpu):
            try:
                found = _time(decoder, batch, {**tiles, role: candidate})
            except OutOfResources:  # more shared memory or registers than a multiprocessor has
                continue
            if found < best * (1 - _MARGIN):
                best, tiles[role] = found, candidate
        log.info("tuning: %.1f us after %s: %s", best, role, tiles[role])
    named = {tuned_key(gpu, getattr(first, role).shape, rows): tiles[role] for role in roles}
    log.info("tuning: kept in %s", remember_tiles(named))
    return named


def neighbours(tile: Tile, kind: str, widths: tuple[int, ...], gpu: Gpu) -> Iterator[Tile]:
    """Tiles near ``tile``: other widths with the same bytes per load, other numbers of splits and of reducers."""
    for width in (tile.block_n // 2, tile.block_n, tile.block_n * 2):
        if not 64 <= width <= 1024:
            continue
        block_k = max(16 if kind in ("batch", "wide") else 1, tile.block_k * tile.block_n // width)
        for factor in (0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0):
            splits = max(1, round(tile.splits * factor * width / tile.block_n))
            bare = replace(tile, block_n=width, block_k=block_k, splits=splits, reducers=0)
            most = most_reducers(gpu, widths, bare)
            for reducers in {min(tile.reducers, most)} if factor != 1.0 else {0, most // 2, most}:
                candidate = replace(bare, reducers=reducers)
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
    """Fill the cache of the timed steps. With an empty cache o's input is nearly zero and all its channels are
    dropped."""
    length = min(_CONTEXT, decoder.max_seq_len - 1)
    ids = torch.randint(decoder.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    for slot in range(batch):
        decoder.prefill(slot, ids, length)
        decoder.cache.grow(slot, min(length + 2, decoder.max_seq_len))  # for the steps' own positions


def _step(decoder: CudaDecoder, batch: int, tiles: dict[str, Tile] | None = None) -> DecodeStep:
    """A step as the decoder runs it for a batch: its rows are a power of two, those beyond the batch are idle."""
    if batch > decoder._most_rows:
        raise UsageError(f"--batch: expected at most {decoder._most_rows} rows, the most of one step, found {batch}")
    step = decoder.new_step(batch, _CONTEXT, tiles)
    position = min(_CONTEXT, decoder.max_seq_len - 1)
    step.set_inputs([7 % decoder.config.vocab_size] * batch, [position] * batch, range(batch))
    return step


def _time(decoder: CudaDecoder, batch: int, tiles: dict[str, Tile]) -> float:
    step = _step(decoder, batch, tiles)
    step.replay()
    times = []
    for _ in range(9):
        step.positions.fill_(min(_CONTEXT, decoder.max_seq_len - 1))
        times.append(_elapsed_us(step.replay))
    return statistics.median(times)


def _time_launches(launch: Callable[[], None], count: int) -> float:
    """Microseconds of one of the ``count`` kernels that ``launch`` launches, in a CUDA graph; median of 20."""
    replay = capture(launch, torch.device("cuda"))
    return statistics.median(_elapsed_us(replay) for _ in range(20)) / count


def _elapsed_us(launch: Callable[[], object]) -> float:
    """GPU time of ``launch`` in microseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
