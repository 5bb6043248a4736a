"""Linears on a GPU, tile by tile: right on odd and on real shapes, and how fast.

    PYTHONPATH=. python benchmarks/gpu_tiles.py check
    PYTHONPATH=. python benchmarks/gpu_tiles.py sweep --weights native int4-128 int8 --sparsity 0 0.5
    PYTHONPATH=. python benchmarks/gpu_tiles.py tune --weights int4-128 --rows 1 8

``check``: of weights in codes, the error against float64 beside the one that PyTorch's product of the same, widened
weights has in the same type. ``sweep``: each launch alone, with its selection and its reduction, as a CUDA graph of
launches over as many copies of the weights as overflow the L2 cache; the share is of the ideal, the bytes of the kept
rows over the read ceiling. ``tune``: the best of those in whole steps, one role changed at a time: to the local cache,
and as lines for kernels/gpu/tiles.json. The last lines are JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import triton
from gpu_models import SHAPES, calibrate, mask_bundle, need_gpu, random_bundle

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.gpu.common import Input, KVSplits, Output
from wisparse.kernels.gpu.plan import (
    GemvTile,
    Scratch,
    count_tiles,
    gpu_of,
    launch_linear,
    most_reducers,
    plan,
    regime,
    remember_tiles,
    tile_key,
    tuned_key,
)
from wisparse.kernels.gpu.weights import BITS, DeviceWeight, FusedLinear, dequantize, empty_weight, unquantized
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.cuda import kernel_times
from wisparse.runtime.cuda.decoder import CudaDecoder

ROLES = ("qkv", "o", "gate_up", "down")
KV_SPLITS = 4
# What is checked: kind, group (None: all channels), zero points; and K, widths.
KINDS = [("int4", 128, False), ("int4", 64, True), ("int8", None, False), ("int8", 128, True), ("fp8", None, False)]
SIZES = [(4096, (4096, 1024, 1024)), (1024, (300, 37, 60)), (14336, (4096,))]
Setting = tuple[str, str, float, int]  # shape, weights (kind, with -group where they have groups), sparsity, rows


def role_of(shape: str, role: str) -> tuple[int, tuple[int, ...], str, str]:
    """Input channels and widths of a linear, and what its launch reads and writes."""
    config = ModelConfig.from_dict(SHAPES[shape])
    h, i, q = config.hidden_size, config.intermediate_size, config.q_size(0)
    return {
        "qkv": (h, (q, *[config.blocks[0].kv_size] * 2), "hidden", "plain"),
        "o": (q, (h,), "attention", "residual"),
        "gate_up": (h, (i, i), "hidden", "silu"),
        "down": (i, (h,), "plain", "residual"),
    }[role]


def kind_and_group(weights: str) -> tuple[str, int | None]:
    kind, _, group = weights.partition("-")
    return kind, int(group) if group else None


class Case:
    """One linear, ``copies`` times, with everything its launch reads."""

    def __init__(self, role: str, setting: Setting, copies: int | None = None) -> None:
        shape, weights, sparsity, self.batch = setting
        k, widths, source, self.target = role_of(shape, role)
        if self.batch > 16:  # as ``wide`` launches them
            source = self.target = "plain"
        kind, group = kind_and_group(weights)
        n, head_dim, dtype = sum(widths), ModelConfig.from_dict(SHAPES[shape]).head_dim, torch.bfloat16
        size = BITS.get(kind, 16) / 8
        copies = copies or max(2, math.ceil(2.5e8 / (k * n * size * max(1 - sparsity, 0.1))))
        x = torch.randn(self.batch, k, device="cuda", dtype=dtype)
        scales = torch.rand(len(widths), k, device="cuda") + 0.5
        self.eps, ssq, seen = 1e-5, x.float().square().sum(1, keepdim=True), x
        self.attention: dict[str, int] = {}
        if source == "hidden":
            seen = (x.float() * torch.rsqrt(ssq / k + self.eps)).to(dtype)
            self.given = Input(x, ssq, torch.ones(k, device="cuda", dtype=dtype))
        elif source == "attention":  # all in the first split
            part = torch.zeros(self.batch, k // head_dim, KV_SPLITS, head_dim, device="cuda")
            part[:, :, 0] = x.float().view(self.batch, -1, head_dim)
            m = torch.full(part.shape[:3], float("-inf"), device="cuda")
            m[:, :, 0] = 0.0
            self.given = Input(None, attention=KVSplits(part, m, (m == 0).float()))
            self.attention = {"kv_splits": KV_SPLITS, "head_dim": head_dim}
        else:
            self.given = Input(x)
        rank = max(1, round(sparsity * k))
        thresholds = (seen[0].float().abs() * scales).kthvalue(rank).values * (sparsity > 0)
        self.kept = [int(keep_mask(seen, s, t).any(0).sum()) for s, t in zip(scales, thresholds, strict=True)]
        self.bytes = sum(kept * width for kept, width in zip(self.kept, widths, strict=True)) * size
        self.bytes += 0 if kind == "native" else 4 * n * (k // group if group else 1)
        self.groups = [
            FusedLinear(random_matrix(kind, k, widths, group, dtype), None, scales, thresholds, sparsity == 0)
            for _ in range(copies)
        ]
        self.out = torch.zeros(self.batch, widths[0] if self.target == "silu" else n, device="cuda", dtype=dtype)

    def launcher(self, tile: GemvTile) -> Callable[[], None]:
        """A function that launches every copy once."""
        chosen = plan(self.groups[0].shape, self.batch, output=self.target, tile=tile, **self.attention)
        scratch = Scratch(self.out.device, self.out.dtype)
        scratch.reserve(chosen)
        out = Output(self.out, torch.empty(self.batch, chosen.ssq_parts, device="cuda"))

        def launch() -> None:
            for linear in self.groups:
                launch_linear(linear, self.given, out, scratch, chosen, eps=self.eps)

        return launch


def random_matrix(
    kind: str, k: int, widths: tuple[int, ...], group: int | None, dtype: torch.dtype, *, zeros: bool = False
) -> DeviceWeight:
    """Weights of any kind: random numbers, or random codes with scales that make numbers of their size."""
    if kind == "native":
        return unquantized(torch.randn(k, sum(widths), device="cuda", dtype=dtype), widths)
    matrix = empty_weight(kind, k, widths, group, dtype, "cuda", zeros=zeros)
    matrix.data.view(torch.uint8).random_(256)
    if kind == "fp8":  # no NaN
        matrix.data.bitwise_and_(~0x08080808)
    assert matrix.scales is not None
    matrix.scales.uniform_(0.5, 1.5)
    matrix.scales.mul_({"int4": 1 / 4.6, "int8": 1 / 74, "fp8": 1 / 100}[kind])
    if matrix.zeros is not None:
        matrix.zeros.random_(1, 15)
    return matrix


# --- check


def apply_linear(x: torch.Tensor, linear: FusedLinear) -> torch.Tensor:
    chosen, scratch = plan(linear.shape, len(x)), Scratch(x.device, x.dtype)
    scratch.reserve(chosen)
    out = x.new_empty(len(x), linear.out_features)
    launch_linear(linear, Input(x), Output(out), scratch, chosen)
    return out


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
        wide = [dequantize(matrix, i, torch.empty(k, width, device="cuda")) for i, width in enumerate(widths)]
        scales = torch.rand(len(widths), k, device="cuda") + 0.5
        for sparsity, batch in ((0.0, 1), (0.5, 1), (0.5, 2), (0.5, 8), (0.0, 11), (0.5, 24), (0.0, 32)):
            thresholds = torch.full((len(widths),), 0.67 if sparsity else 0.0, device="cuda")
            linear = FusedLinear(matrix, None, scales, thresholds, sparsity == 0)
            # All of one sign: what the fixed exponents add is then as large as it gets.
            x = torch.randn(batch, k, device="cuda").abs().to(dtype)
            found, again = (apply_linear(x, linear) for _ in range(2))
            exact, theirs = [], []
            for i, there in enumerate(wide):
                masked = torch.where(keep_mask(x, scales[i], thresholds[i]), x, 0)
                exact.append(masked.double() @ there.double())
                theirs.append((masked @ there.to(dtype)).double())
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


# --- sweep and tune


def tiles_for(role: str, setting: Setting) -> list[GemvTile]:
    """Tiles worth trying, with as many spinning reducers as there may be or (native) with none."""
    shape, weights, sparsity, batch = setting
    k, widths, _, _ = role_of(shape, role)
    kind, group = kind_and_group(weights)
    gpu, wide = gpu_of(torch.device("cuda", 0)), sum(widths) >= 16384
    processors, found = gpu.multiprocessors, []
    if kind == "native" and regime(batch, dense=sparsity == 0) in ("batch", "wide"):
        # Many rows: one program for each multiprocessor, with 64 to 128 KiB on their way.
        pieces = [(64, 128, 6), (128, 64, 6), (128, 64, 8), (256, 32, 6), (256, 32, 8), (256, 64, 4), (256, 64, 5)]
        for block_n, block_k, stages in [*pieces, (512, 16, 6), (512, 16, 8), (512, 32, 4), (1024, 16, 4)]:
            most = processors // count_tiles(widths, block_n)
            for splits in {max(1, min(most - fewer, k // 64)) for fewer in (0, 1)}:
                found += [GemvTile(block_n, block_k, splits, warps, stages, unroll=1) for warps in (4, 8)]
    elif kind == "native":
        # One to six programs for each multiprocessor; block_k is what one 16-byte load of every thread covers.
        for block_n, warps in ((256, 2), (256, 4), (512, 2), (512, 4), (512, 8), (1024, 4), (1024, 8)):
            tiles = count_tiles(widths, block_n)
            counts = {max(1, min(round(processors * m / tiles - 0.45), k // 32)) for m in (1, 2, 3, 4, 5, 6)}
            # The last program adds up to 32 partial sums in one turn.
            counts |= {count for count in (16, 32) if max(counts) > count}
            found += [
                GemvTile(block_n, warps * 256 // block_n, splits, warps, 1, 32, unroll, trigger=2)
                for splits in sorted(counts) for unroll in (4, 8)
            ]  # fmt: skip
    else:
        # 8 to 14 warps for each multiprocessor, two of them in a program, four for many rows and where all channels
        # share a scale. Of many rows no thread has more than 16 words of four channels on their way, and few sums. Of
        # more than sixteen 4 to 12 warps, of 32 or 64 columns each.
        many, most = batch > 2, batch > 16
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
                    for unroll, stages in ((2, 2), (2, 3), (4, 1)) if most else ways:
                        if many and words * unroll * stages > 16:
                            continue
                        found.append(
                            GemvTile(block_n, 1, splits, warps, stages, group or 64, unroll, trigger=2, early=not wide)
                        )
    spinning = [replace(tile, reducers=most_reducers(gpu, widths, tile)) for tile in found]
    if kind == "native":
        return list(dict.fromkeys([*found, *spinning]))
    return list(dict.fromkeys(found if wide else spinning))


def variants(tile: GemvTile, rows: int) -> list[GemvTile]:
    """The ways of a tile to begin and to let the next launch begin: with many rows that is always at once."""
    ways = ((1, True), (2, True), (2, False))[rows > 2 :]
    return [replace(tile, trigger=trigger, early=early) for trigger, early in ways]


def _compile(work: list[tuple[str, Setting, GemvTile]]) -> None:
    held: dict[tuple[str, Setting], Case] = {}
    for role, setting, tile in work:
        if (role, setting) not in held:
            held = {(role, setting): Case(role, setting, copies=1)}
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            held[role, setting].launcher(tile)()
    torch.cuda.synchronize()


def _in_parallel(function: Callable[[list], None], work: list) -> None:
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Neighbours have their case in common.
        parts = [work[i * len(work) // workers : (i + 1) * len(work) // workers] for i in range(workers)]
        list(pool.map(function, parts))


def sweep(settings: list[Setting], ceiling: float) -> dict[tuple[str, Setting], list[tuple[float, GemvTile]]]:
    """For each role and setting: microseconds of a launch alone and its tile, best first."""
    work = {(role, setting): tiles_for(role, setting) for setting in settings for role in ROLES}
    _in_parallel(_compile, [(*key, tile) for key, tiles in work.items() for tile in tiles])
    ranked = {}
    for (role, setting), tiles in work.items():
        case = Case(role, setting)
        ideal = case.bytes / ceiling * 1e-3
        rows = []
        for tile in tiles:
            with contextlib.suppress(triton.runtime.errors.OutOfResources):
                rows.append((kernel_times._time_launches(case.launcher(tile), len(case.groups)), tile))
        rows.sort(key=lambda row: row[0])
        print(f"{setting} {role} kept {case.kept} ideal {ideal:.2f} us")
        for us, tile in rows[:4]:
            print(f"  {us:7.2f} us {100 * ideal / us:5.1f}%  {tile}")
        for names in (("block_n", "warps"), ("splits",), ("unroll", "stages")):
            by: dict[tuple, float] = {}
            for us, tile in rows:
                by.setdefault(tuple(getattr(tile, name) for name in names), us)
            print(f"    by {names}: " + "  ".join(f"{value}: {us:.2f}" for value, us in sorted(by.items())))
        ranked[role, setting] = rows
        sys.stdout.flush()
        del case
        torch.cuda.empty_cache()
    return ranked


def decoder_of(setting: Setting, blocks: int) -> CudaDecoder:
    """A model of so many blocks with weights of a kind, its masks calibrated as those of plain weights."""
    shape, weights, sparsity, rows = setting
    bundle = random_bundle(shape, num_blocks=blocks)
    of: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "max_seq_len": 512}
    if sparsity > 0:
        plain = CudaDecoder(bundle, **of)
        mask_bundle(bundle, plain, calibrate(plain, [sparsity], tokens=128), sparsity)
        plain.close()
        torch.cuda.empty_cache()
    decoder = CudaDecoder(bundle, max_batch=rows, weights=kind_and_group(weights)[0], **of)
    kernel_times._read_prompts(decoder, rows)
    return decoder


def _compile_steps(work: list[tuple[Setting, dict[str, GemvTile]]]) -> None:
    held: dict[Setting, CudaDecoder] = {}
    for setting, tiles in work:
        if setting not in held:
            held = {setting: decoder_of(setting, 1)}
        with contextlib.suppress(triton.runtime.errors.OutOfResources, ValueError):
            kernel_times._time(held[setting], setting[3], tiles)


def tune(settings: list[Setting], best: int, blocks: int, ceiling: float) -> dict[str, str]:
    """The best tiles where they run, in whole decode steps, one role changed at a time."""
    ranked = sweep(settings, ceiling)
    if torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("expected a GPU of generation 9.0 or later: others have no early starts to choose from")
    tried = {key: [way for _, tile in rows[:best] for way in variants(tile, key[1][3])] for key, rows in ranked.items()}
    firsts = {setting: {role: ranked[role, setting][0][1] for role in ROLES} for setting in settings}
    work = [
        (setting, {**firsts[setting], role: way})
        for setting in settings for role in ROLES for way in tried[role, setting]
    ]  # fmt: skip
    _in_parallel(_compile_steps, work)
    found = {}
    for setting, tiles in firsts.items():
        rows, decoder = setting[3], decoder_of(setting, blocks)
        table, us = (kernel_times._time(decoder, rows, given) for given in (None, tiles))
        print(f"{setting}: {blocks} blocks with the table's {table:.1f} us, with the best of each alone {us:.1f}")
        for role in ROLES[::-1]:
            timed = [(kernel_times._time(decoder, rows, {**tiles, role: way}), way) for way in tried[role, setting]]
            timed.sort(key=lambda row: row[0])
            if timed[0][0] < us:
                us, tiles[role] = timed[0]
            print(f"  {role}: {us:.1f} us with {tiles[role]} ({[round(row[0], 1) for row in timed[:6]]})", flush=True)
        for role in ROLES:
            gpu, shape = gpu_of(decoder.device), getattr(decoder.weights.blocks[0], role).shape
            found[tile_key(gpu, shape, regime(rows, dense=shape.dense))] = f"{tiles[role]}"
            remember_tiles({tuned_key(gpu, shape, rows): tiles[role]})
        found[f"{setting}"] = f"{us:.1f} us, table {table:.1f} us"
        decoder.close()
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    for name in ("sweep", "tune"):
        command = commands.add_parser(name)
        command.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
        command.add_argument("--weights", nargs="+", default=["int4-128", "int8"], help="native: bf16")
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
    settings = [
        (arguments.shape, weights, sparsity, rows)
        for weights in arguments.weights for rows in arguments.rows
        for sparsity in (arguments.sparsity if rows <= 2 else [0.0])
    ]  # fmt: skip
    if arguments.command == "sweep":
        ranked = sweep(settings, arguments.ceiling)
        print(json.dumps({str(key): [round(rows[0][0], 2), str(rows[0][1])] for key, rows in ranked.items()}))
    else:
        print(json.dumps(tune(settings, arguments.best, arguments.blocks, arguments.ceiling), indent=1))


if __name__ == "__main__":
    main()
