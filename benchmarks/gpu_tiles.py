"""Launch configurations of a decode step's linears, timed in whole steps."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import click
import torch
from gpu_models import Several, calibrate, mask_bundle, need_gpu, random_bundle, shape_option
from triton.runtime.errors import OutOfResources

from wisparse.kernels.gpu import tiles as tables
from wisparse.kernels.gpu.products import remember_tiles
from wisparse.kernels.gpu.tiles import Gpu, Tile, count_tiles, regime
from wisparse.kernels.gpu.weights import BITS, LinearShape
from wisparse.runtime.cuda import kernel_times
from wisparse.runtime.cuda.decoder import CudaDecoder

ROLES = ("down", "gate_up", "o", "qkv")  # in the order of tuning
Setting = tuple[str, str, float, int]  # shape, weights, sparsity, rows


@click.command(context_settings={"show_default": True})
@shape_option
@click.option("--weights", "kinds", type=Several(str), default="int4,int8", help="native: bf16.")
@click.option("--sparsity", "sparsities", type=Several(float), default="0,0.5")
@click.option("--rows", type=Several(int), default="1", help="More than two: dense only.")
@click.option("--best", default=3, help="Tiles of each role that are tried with every way to start.")
@click.option("--blocks", default=8)
def tiles(shape: str, kinds: list[str], sparsities: list[float], rows: list[int], best: int, blocks: int) -> None:
    """Choose launch configurations: what kernels/gpu/tiles.json holds.

    Built: for each weight type, sparsity and number of rows a decoder of 8 blocks with random weights.

    Timed: whole decode steps, one role's tile changed at a time, as `wisparse bench --tune` does with fewer candidates;
    all candidates are compiled first, by as many processes as there are cores.

    Printed: the best of each role, then lines for tiles.json as JSON; they are kept in the local cache too.
    """
    need_gpu()
    if torch.cuda.get_device_capability() < (9, 0):
        raise click.UsageError("expected a GPU of generation 9.0 or later: others have no early starts to choose from")
    found: dict[str, str] = {}
    for kind in kinds:
        for count in rows:
            for sparsity in sparsities if count <= 2 else [0.0]:
                found |= tune((shape, kind, sparsity, count), best, blocks)
    print(json.dumps(found, indent=1))


def tune(setting: Setting, best: int, blocks: int) -> dict[str, str]:
    rows, decoder, found = setting[3], decoder_of(setting, blocks), dict[str, str]()
    gpu, chosen = tables.gpu_of(decoder.device), {}
    for role, launch in kernel_times._step(decoder, rows).plans[0].items():
        if launch.fused and launch.tile is not None:
            chosen[role] = launch.tile
    us = before = kernel_times._time(decoder, rows, chosen)
    for role in (role for role in ROLES if role in chosen):
        linear = getattr(decoder.weights.blocks[0], role).shape
        ranked = timed(decoder, setting, chosen, role, candidates(linear, rows, gpu))
        ways = [way for _, tile in ranked[:best] for way in variants(tile, rows)]
        ranked = sorted(ranked + timed(decoder, setting, chosen, role, ways), key=lambda row: row[0])
        if ranked and ranked[0][0] < us:
            us, chosen[role] = ranked[0]
        print(
            f"{setting} {role}: {us:.1f} us with {chosen[role]} ({[round(row[0], 1) for row in ranked[:6]]})",
            flush=True,
        )
        found[tables.tile_key(gpu, linear, regime(rows, dense=linear.dense))] = f"{chosen[role]}"
        remember_tiles({tables.tuned_key(gpu, linear, rows): chosen[role]})
    decoder.close()
    torch.cuda.empty_cache()
    return found | {f"{setting}": f"{us:.1f} us for {blocks} blocks, before {before:.1f} us"}


def timed(
    decoder: CudaDecoder, setting: Setting, chosen: dict[str, Tile], role: str, tried: list[Tile]
) -> list[tuple[float, Tile]]:
    """Microseconds of a step with each tile in a role, best first; tiles that do not fit the GPU are left out."""
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [(setting, [{**chosen, role: tile} for tile in tried[i::workers]]) for i in range(workers)]
        list(pool.map(_compile, *zip(*work, strict=True)))
    rows = []
    for tile in tried:
        with contextlib.suppress(OutOfResources, ValueError):
            rows.append((kernel_times._time(decoder, setting[3], {**chosen, role: tile}), tile))
    return sorted(rows, key=lambda row: row[0])


def _compile(setting: Setting, tried: list[dict[str, Tile]]) -> None:
    decoder = decoder_of(setting, 1) if tried else None
    for tiles_of in tried:
        with contextlib.suppress(OutOfResources, ValueError):
            kernel_times._time(decoder, setting[3], tiles_of)


def decoder_of(setting: Setting, blocks: int) -> CudaDecoder:
    """A model of so many blocks with weights of a type, its masks calibrated on plain weights."""
    shape, weights, sparsity, rows = setting
    bundle = random_bundle(shape, num_blocks=blocks)
    of: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "max_seq_len": 512}
    if sparsity > 0:
        plain = CudaDecoder(bundle, **of)
        mask_bundle(bundle, plain, calibrate(plain, [sparsity], tokens=128), sparsity)
        plain.close()
        torch.cuda.empty_cache()
    decoder = CudaDecoder(bundle, max_batch=rows, weights=weights, **of)
    kernel_times._read_prompts(decoder, rows)
    return decoder


def candidates(linear: LinearShape, rows: int, gpu: Gpu) -> list[Tile]:
    """Tiles worth trying, with as many spinning reducers as there may be or (unquantised) with none."""
    k, widths, kind = linear.in_features, linear.widths, linear.quant
    processors, wide, found = gpu.multiprocessors, sum(widths) >= 16384, []
    group = linear.group if linear.group < k else None
    if kind == "none" and regime(rows, dense=linear.dense) in ("batch", "wide"):
        # Many rows: one program for each multiprocessor, with 64 to 128 KiB on their way.
        pieces = [(64, 128, 6), (128, 64, 6), (128, 64, 8), (256, 32, 6), (256, 32, 8), (256, 64, 4), (256, 64, 5)]
        for block_n, block_k, stages in [*pieces, (512, 16, 6), (512, 16, 8), (512, 32, 4), (1024, 16, 4)]:
            most = processors // count_tiles(widths, block_n)
            for splits in {max(1, min(most - fewer, k // 64)) for fewer in (0, 1)}:
                found += [Tile(block_n, block_k, splits, warps, stages, unroll=1) for warps in (4, 8)]
    elif kind == "none":
        # One to six programs for each multiprocessor; block_k is what one 16-byte load of every thread covers.
        for block_n, warps in ((256, 2), (256, 4), (512, 2), (512, 4), (512, 8), (1024, 4), (1024, 8)):
            tiles = count_tiles(widths, block_n)
            counts = {max(1, min(round(processors * m / tiles - 0.45), k // 32)) for m in (1, 2, 3, 4, 5, 6)}
            # The last program adds up to 32 partial sums in one turn.
            counts |= {count for count in (16, 32) if max(counts) > count}
            found += [
                Tile(block_n, warps * 256 // block_n, splits, warps, 1, 32, unroll, trigger=2)
                for splits in sorted(counts) for unroll in (4, 8)
            ]  # fmt: skip
    else:
        # 8 to 14 warps for each multiprocessor, two of them in a program, four for many rows and where all channels
        # share a scale. Of many rows no thread has more than 16 words of four channels on their way, and few sums. Of
        # more than sixteen 4 to 12 warps, of 32 or 64 columns each.
        many, most = rows > 2, rows > 16
        for words in (1, 2) if most or (sum(widths) < 8192 and (many or kind == "int4")) else (2, 4):
            if words == (2 if most else 4) and many and kind == "int4":
                continue
            for warps in (2, 4) if most else (4,) if many else (2,) if group or words == 4 else (2, 4):
                block_n = words * 256 * warps // BITS[kind]
                chunks = k // (group or 64)
                for each in (4, 8, 12) if most else (8, 14):
                    # Every split as many chunks as any other, or one less.
                    dealt = max(1, round(chunks * count_tiles(widths, block_n) * warps / (processors * each)))
                    splits = min(-(-chunks // dealt), 64)
                    ways = ((2, 1), (2, 2), (4, 1), (1, 3)) if group else ((4, 1), (2, 2), (4, 2))
                    for unroll, stages in ((4, 1), (8, 1)) if most else ways:
                        if many and words * unroll * stages > 16:
                            continue
                        tile = Tile(block_n, 1, splits, warps, stages, group or 64, unroll, trigger=2, early=not wide)
                        found += [replace(tile, registers=registers) for registers in ((0, 168) if most else (0,))]
    spinning = [replace(tile, reducers=tables.most_reducers(gpu, widths, tile)) for tile in found]
    if kind == "none":
        return list(dict.fromkeys([*found, *spinning]))
    return list(dict.fromkeys(found if wide else spinning))


def variants(tile: Tile, rows: int) -> list[Tile]:
    """The ways of a tile to begin and to let the next launch begin: with many rows that is always at once."""
    ways = ((1, True), (2, True), (2, False))[rows > 2 :]
    return [replace(tile, trigger=trigger, early=early) for trigger, early in ways]
