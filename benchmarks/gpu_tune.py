"""Choose the tiles of a shape in the place where they run: whole decode steps, one role changed at a time.

    PYTHONPATH=. python benchmarks/gpu_tune.py --shape llama-3.1-8b --sparsity 0.5

A launch timed alone follows its own kind; in a step it starts in the tail of another, with other resources, so the
order of the best few differs. Candidates come from gpu_tiles. The winners go to the local tile cache and to standard
output.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from gpu_models import SHAPES, calibrate, need_gpu, random_bundle, set_sparsity
from gpu_tiles import _compile, keep_tiles, sweep

from wisparse.kernels.gpu.gemv import GemvTile, launch_kind
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.step import DecodeStep, kv_splits_for

CONTEXT = 150


def time_step(
    decoder: CudaDecoder, tiles: dict[str, GemvTile] | None, *, rows: int = 1, runs: int = 9, **keywords
) -> float:
    """Microseconds of one step, replays back to back."""
    step = DecodeStep(
        decoder.weights, decoder.config, decoder._cache, decoder._positions, decoder._places,
        first=0, rows=rows, tiles=tiles, kv_splits=kv_splits_for(CONTEXT, rows), **keywords,
    )  # fmt: skip
    step.tokens.fill_(7)
    decoder._positions.fill_(CONTEXT)
    step.replay()
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            step.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 250)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--best", type=int, default=6, help="candidates of each role that are tried in the step")
    parser.add_argument("--ceiling", type=float, default=4600.0)
    arguments = parser.parse_args()
    need_gpu(parser)
    shape, sparsity, batch = arguments.shape, arguments.sparsity, arguments.batch
    roles = ["gate_up", "down", "o", "qkv"]
    ranked = sweep(shape, roles, sparsity, batch, arguments.ceiling, True, False)

    def variants(tile: GemvTile) -> list[GemvTile]:
        if launch_kind(batch, dense=sparsity == 0) == "batch":
            return [tile, replace(tile, early=False)]
        return [replace(tile, trigger=trigger, early=early) for trigger in (1, 2) for early in (True, False)]

    chosen = {role: [tile for _, tile in ranked[role][: arguments.best]] for role in roles}
    workers = max(1, (os.cpu_count() or 2) - 1)
    jobs = []
    for role in roles:
        everything = [v for tile in chosen[role] for v in variants(tile)]
        jobs += [(shape, role, sparsity, batch, everything[i::4], True) for i in range(4)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))

    bundle = random_bundle(shape, num_blocks=arguments.blocks)
    decoder = CudaDecoder(bundle, device=torch.device("cuda"), dtype=torch.bfloat16, max_seq_len=512, max_batch=batch)
    set_sparsity(decoder, calibrate(decoder, [sparsity] if sparsity > 0 else []), sparsity)
    tiles = {role: chosen[role][0] for role in roles}
    best = time_step(decoder, tiles, rows=batch)
    late = time_step(decoder, tiles, rows=batch, pdl=False)
    print(f"{arguments.blocks} blocks with the best of each alone: {best:.1f} us; late {late:.1f}")
    for turn in range(2):
        for role in roles:
            tried = []
            for tile in chosen[role]:
                for variant in variants(tile):
                    tried.append((time_step(decoder, {**tiles, role: variant}, rows=batch), variant))
            tried.sort(key=lambda row: row[0])
            if tried[0][0] < best - 0.5:
                best, tiles[role] = tried[0]
            shown = [round(us, 1) for us, _ in tried[:6]]
            print(f"turn {turn} {role}: {best:.1f} us with {tiles[role]}  (tried: {shown})", flush=True)
    keep_tiles("tune", shape, sparsity, batch, tiles)


if __name__ == "__main__":
    main()
