"""Products of weights in codes on a GPU: right on odd and on real shapes, and how fast, tile by tile.

    PYTHONPATH=. python benchmarks/gpu_packed.py check
    PYTHONPATH=. python benchmarks/gpu_packed.py sweep --weights int4-128 int8 --sparsity 0 0.5
    PYTHONPATH=. python benchmarks/gpu_packed.py tune --weights int4-128 --rows 1 8

``check``: the error against float64 beside the one that PyTorch's product of the same, widened weights has in the same
type. ``sweep``: each launch alone, as gpu_tiles.py has it, Llama-3.1-8B's shapes. ``tune``: the best of those in whole
steps, one role changed at a time: to the local cache, and as lines for the table in kernels/gpu/tiles.py. The last
lines are JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
import triton
from gpu_models import SHAPES, calibrate, mask_bundle, need_gpu, random_bundle
from gpu_tiles import case_for, random_matrix, time_graph

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.gpu.common import Input, Output
from wisparse.kernels.gpu.plan import (
    GemvTile,
    Scratch,
    gpu_of,
    launch_linear,
    most_reducers,
    plan,
    regime,
    remember_tiles,
    tile_key,
    tuned_key,
)
from wisparse.kernels.gpu.weights import BITS, FusedLinear, dequantize
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.step import DecodeStep, kv_splits_for

ROLES = ("qkv", "o", "gate_up", "down")
CONTEXT = 150
# Kind, group (None: all channels), zero points.
KINDS = [("int4", 128, False), ("int4", 64, True), ("int8", None, False), ("int8", 128, True), ("fp8", None, False)]


SIZES = [(4096, (4096, 1024, 1024)), (1024, (300, 37, 60)), (14336, (4096,))]


def apply_linear(x: torch.Tensor, linear: FusedLinear) -> torch.Tensor:
    chosen, scratch = plan(linear.shape, len(x)), Scratch(x.device, x.dtype)
    scratch.reserve(chosen)
    out = x.new_empty(len(x), linear.out_features)
    launch_linear(linear, Input(x), Output(out), scratch, chosen)
    return out


def time_step(
    decoder: CudaDecoder, tiles: dict[str, GemvTile] | None, *, rows: int = 1, runs: int = 9, **keywords
) -> float:
    """Microseconds of one step, replays back to back."""
    step = DecodeStep(
        decoder.weights, decoder.config, decoder._cache, decoder._positions, decoder._tables,
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


def check() -> list[dict]:
    """Every kind, type and number of rows on shapes large and odd; a row of figures for each that is too far off."""
    jobs = [(*size, *kind) for size in SIZES for kind in KINDS]
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [row for found in pool.map(_check_one, jobs) for row in found]
    for dtype in ("bfloat16", "float16"):
        worst = max(row["ours"] / row["torch"] for row in rows if row["dtype"] == dtype)
        print(json.dumps({"dtype": dtype, "cases": len(rows), "worst_over_torch": round(worst, 3)}), flush=True)
    return [row for row in rows if not (row["ours"] <= row["torch"] and row["packed"] and row["same"])]


def _check_one(job: tuple) -> list[dict]:
    k, widths, kind, size, zeros = job
    torch.manual_seed(0)
    rows = []
    for dtype in (torch.bfloat16, torch.float16)[: 1 if k == 14336 else 2]:
        matrix = random_matrix(kind, k, widths, size, dtype, zeros=zeros)
        wide = dequantize(matrix, None, torch.empty(k, sum(widths), device="cuda", dtype=torch.float32))
        half = wide.to(dtype)
        scales = torch.rand(len(widths), k, device="cuda") + 0.5
        for sparsity, batch in ((0.0, 1), (0.5, 1), (0.5, 2), (0.5, 8), (0.0, 11)):
            thresholds = torch.full((len(widths),), 0.67 if sparsity else 0.0, device="cuda")
            linear = FusedLinear(matrix, None, scales, thresholds, sparsity == 0)
            # All of one sign: what the fixed exponents add is then as large as it gets.
            x = torch.randn(batch, k, device="cuda").abs().to(dtype)
            found, again = (apply_linear(x, linear) for _ in range(2))
            exact, theirs = [], []
            for i, (there, near) in enumerate(zip(wide.split(widths, 1), half.split(widths, 1), strict=True)):
                masked = torch.where(keep_mask(x, scales[i], thresholds[i]), x, 0)
                exact.append(masked.double() @ there.double())
                theirs.append((masked @ near).double())
            true = torch.cat(exact, 1)
            norm = true.square().mean().sqrt()
            rows.append(
                {
                    "k": k, "n": sum(widths), "kind": kind, "group": size, "zeros": zeros,
                    "dtype": str(dtype).removeprefix("torch."), "sparsity": sparsity, "batch": batch,
                    "packed": plan(linear.shape, batch).packed is not None,
                    "same": bool(torch.equal(found, again)),
                    "ours": float((found.double() - true).square().mean().sqrt() / norm),
                    "torch": float((torch.cat(theirs, 1) - true).square().mean().sqrt() / norm),
                }
            )  # fmt: skip
    return rows


def tiles_for(k: int, widths: tuple[int, ...], kind: str, group: int | None, batch: int) -> list[GemvTile]:
    """Tiles worth trying: 8 to 14 warps for each multiprocessor, two of them in a program, four for many rows and where
    all channels share a scale."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    found = []
    narrow = sum(widths) < 8192 and kind == "int4"
    for words in (1, 2) if narrow else (2, 4):
        if words == 4 and batch > 2:
            continue
        for warps in (4,) if batch > 2 else (2,) if group or words == 4 else (2, 4):
            block_n = words * 256 * warps // BITS[kind]
            tiles = sum(-(-width // block_n) for width in widths)
            chunks = k // (group or 64)
            for each in (8, 14):
                # Every split as many chunks as any other, or one less.
                dealt = max(1, round(chunks * tiles * warps / (processors * each)))
                splits = min(-(-chunks // dealt), 64)
                for unroll, stages in ((2, 1), (2, 2), (4, 1), (1, 3)) if group else ((4, 1), (2, 2), (4, 2)):
                    wide = sum(widths) >= 16384
                    tile = GemvTile(block_n, 1, splits, warps, stages, group or 64, unroll, trigger=2, early=not wide)
                    if not wide:
                        most = most_reducers(gpu_of(torch.device("cuda", 0)), widths, tile)
                        tile = replace(tile, reducers=most)
                    if tile not in found:
                        found.append(tile)
    return found


def variants(tile: GemvTile) -> list[GemvTile]:
    """The ways of a tile to begin and to let the next launch begin."""
    return [
        replace(tile, trigger=trigger, early=early) for trigger, early in ((1, True), (2, True), (2, False))
    ]  # fmt: skip


def kind_and_group(weights: str) -> tuple[str, int | None]:
    kind, _, group = weights.partition("-")
    return kind, int(group) if group else None


def _case(role: str, weights: str, sparsity: float, batch: int, **keywords):
    kind, group = kind_and_group(weights)
    config = ModelConfig.from_dict(SHAPES["llama-3.1-8b"])
    return case_for(config, role, sparsity, batch=batch, weights=kind, group=group, **keywords)


def _compile(work: list[tuple]) -> None:
    held: dict[tuple, object] = {}
    for role, weights, sparsity, batch, tile in work:
        key = (role, weights, sparsity, batch)
        if key not in held:
            held = {key: _case(*key, copies=1)}
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            held[key].launcher(tile, True)(1)  # type: ignore[attr-defined]
    torch.cuda.synchronize()


def role_sizes() -> dict[str, tuple[int, tuple[int, ...]]]:
    """Each role's input channels and widths."""
    config = ModelConfig.from_dict(SHAPES["llama-3.1-8b"])
    h, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (h, (config.q_size(0), *[config.blocks[0].kv_size] * 2)), "o": (h, (h,)),
        "gate_up": (h, (inner, inner)), "down": (inner, (h,)),
    }  # fmt: skip


def sweep(settings: list[tuple[str, float, int]], ceiling: float) -> dict[tuple, list[tuple[float, GemvTile]]]:
    """For each role and setting (weights, sparsity, rows): microseconds of a launch alone and its tile, best first."""
    sizes = role_sizes()
    work = [
        (role, *setting, tile) for setting in settings for role in ROLES
        for tile in tiles_for(*sizes[role], *kind_and_group(setting[0]), setting[2])
    ]  # fmt: skip
    _in_parallel(_compile, work)
    ranked: dict[tuple, list[tuple[float, GemvTile]]] = {}
    for setting in settings:
        for role in ROLES:
            case = _case(role, *setting)
            ideal = case.bytes / ceiling * 1e-3
            rows = []
            for job in work:
                if job[:4] == (role, *setting):
                    with contextlib.suppress(triton.runtime.errors.OutOfResources):
                        rows.append((time_graph(case.launcher(job[4], True), len(case.groups), 7), job[4]))
            rows.sort(key=lambda row: row[0])
            print(f"{setting} {role} kept {case.kept} ideal {ideal:.2f} us")
            for us, tile in rows[:4]:
                print(f"  {us:7.2f} us {100 * ideal / us:5.1f}%  {tile}")
            for names in (("block_n", "warps"), ("splits",), ("unroll", "stages")):
                by: dict[tuple, float] = {}
                for us, tile in rows:
                    by.setdefault(tuple(getattr(tile, name) for name in names), us)
                print(f"    by {names}: " + "  ".join(f"{value}: {us:.2f}" for value, us in sorted(by.items())))
            ranked[role, *setting] = rows
            sys.stdout.flush()
            del case
            torch.cuda.empty_cache()
    return ranked


def _in_parallel(function, work: list) -> None:
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Neighbours have their case in common.
        parts = [work[i * len(work) // workers : (i + 1) * len(work) // workers] for i in range(workers)]
        list(pool.map(function, parts))


def decoder_of(weights: str, sparsity: float, rows: int, blocks: int) -> CudaDecoder:
    """A model of so many blocks with weights of a kind, its masks calibrated as those of plain weights."""
    bundle = random_bundle("llama-3.1-8b", num_blocks=blocks)
    of = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "max_seq_len": 512}
    if sparsity > 0:
        plain = CudaDecoder(bundle, **of)
        mask_bundle(bundle, plain, calibrate(plain, [sparsity], tokens=128), sparsity)
        plain.close()
        torch.cuda.empty_cache()
    decoder = CudaDecoder(bundle, max_batch=rows, weights=kind_and_group(weights)[0], **of)
    # What a step attends to. With an empty cache o's input is nearly zero, and it keeps no channel.
    ids = torch.randint(bundle.config.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(2))
    for slot in range(rows):
        decoder.prefill(slot, ids, CONTEXT)
    return decoder


def _compile_steps(work: list[tuple]) -> None:
    held: dict[tuple, CudaDecoder] = {}
    for setting, tiles in work:
        if setting not in held:
            held = {setting: decoder_of(*setting, 1)}
        with contextlib.suppress(triton.runtime.errors.OutOfResources, ValueError):
            time_step(held[setting], tiles, rows=setting[2], runs=1)


def tune(settings: list[tuple[str, float, int]], best: int, blocks: int, ceiling: float) -> dict[str, str]:
    """The best tiles where they run, in whole decode steps, one role changed at a time."""
    ranked = sweep(settings, ceiling)
    if torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("expected a GPU of generation 9.0 or later: others have no early starts to choose from")
    tried = {key: [tile for _, tile in rows[:best]] for key, rows in ranked.items()}
    work = []
    for setting in settings:
        first = {role: tried[role, *setting][0] for role in ROLES}
        work += [
            (setting, {**first, role: variant})
            for role in ROLES for tile in tried[role, *setting] for variant in variants(tile)
        ]  # fmt: skip
    _in_parallel(_compile_steps, work)
    found = {}
    for setting in settings:
        _, sparsity, rows = setting
        decoder = decoder_of(*setting, blocks)
        table = time_step(decoder, None, rows=rows)
        tiles = {role: tried[role, *setting][0] for role in ROLES}
        us = time_step(decoder, tiles, rows=rows)
        print(f"{setting}: {blocks} blocks with the table's {table:.1f} us, with the best of each alone {us:.1f}")
        for role in ROLES[::-1]:
            timed = [
                (time_step(decoder, {**tiles, role: variant}, rows=rows, runs=5), variant)
                for tile in tried[role, *setting] for variant in variants(tile)
            ]  # fmt: skip
            timed.sort(key=lambda row: row[0])
            if timed[0][0] < us:
                us, tiles[role] = timed[0]
            print(f"  {role}: {us:.1f} us with {tiles[role]} ({[round(row[0], 1) for row in timed[:6]]})", flush=True)
        for role in ROLES:
            gpu, shape = gpu_of(decoder.device), getattr(decoder.weights.blocks[0], role).shape
            found[tile_key(gpu, shape, regime(rows, dense=sparsity == 0))] = f"{tiles[role]}"
            remember_tiles({tuned_key(gpu, shape, rows): tiles[role]})
        found[f"{setting}"] = f"{us:.1f} us, table {table:.1f} us"
        decoder.close()
        torch.cuda.empty_cache()
    return found


def settings_of(arguments: argparse.Namespace) -> list[tuple[str, float, int]]:
    return [
        (weights, sparsity, rows)
        for weights in arguments.weights
        for rows in arguments.rows
        for sparsity in (arguments.sparsity if rows <= 2 else [0.0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    for name in ("sweep", "tune"):
        command = commands.add_parser(name)
        command.add_argument("--weights", nargs="+", default=["int4-128", "int8"])
        command.add_argument("--sparsity", nargs="+", type=float, default=[0.0, 0.5])
        command.add_argument("--rows", nargs="+", type=int, default=[1], help="more than two: dense only")
        command.add_argument("--ceiling", type=float, default=4590.0, help="read bandwidth in GB/s")
        if name == "tune":
            command.add_argument("--best", type=int, default=3, help="tiles of each role that are tried in a step")
            command.add_argument("--blocks", type=int, default=8)
    arguments = parser.parse_args()
    need_gpu(parser)
    if arguments.command == "check":
        bad = check()
        for row in bad:
            print(row)
        print(json.dumps({"bad": len(bad)}))
        sys.exit(bool(bad))
    if arguments.command == "sweep":
        ranked = sweep(settings_of(arguments), arguments.ceiling)
        print(json.dumps({str(key): [round(rows[0][0], 2), str(rows[0][1])] for key, rows in ranked.items()}))
    else:
        print(json.dumps(tune(settings_of(arguments), arguments.best, arguments.blocks, arguments.ceiling), indent=1))


if __name__ == "__main__":
    main()
