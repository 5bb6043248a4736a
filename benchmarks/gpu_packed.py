"""Products of weights in codes on a GPU: right on odd and on real shapes, and how fast, tile by tile.

    PYTHONPATH=. python benchmarks/gpu_packed.py check
    PYTHONPATH=. python benchmarks/gpu_packed.py sweep --weights int4-128 int8 --sparsity 0 0.5

``check``: the error against float64 beside the one that PyTorch's product of the same, widened weights has in the same
type. ``sweep``: as gpu_tiles.py has it, Llama-3.1-8B's shapes; the best tiles as lines of the table in
kernels/gpu/products/tiles.py. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from gpu_models import SHAPES
from gpu_tiles import case_for, random_matrix, time_graph

from wisparse.formats.model.model_config import ModelConfig
from wisparse.kernels.gpu.products.gemv import GemvTile, Group, launch_kind, program_lists, sparse_gemv
from wisparse.kernels.gpu.products.matrix import CODE_BITS, widen
from wisparse.kernels.gpu.products.packed import PackedLists
from wisparse.kernels.gpu.products.tiles import default_tile, most_pollers
from wisparse.kernels.reference import keep_mask

ROLES = ("qkv", "o", "gate_up", "down")
# Kind, group (None: all channels), zero points.
KINDS = [("int4", 128, False), ("int4", 64, True), ("int8", None, False), ("int8", 128, True), ("fp8", None, False)]


SIZES = [(4096, (4096, 1024, 1024)), (1024, (300, 37, 60)), (14336, (4096,))]


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
        wide = widen(matrix, None, torch.empty(k, sum(widths), device="cuda", dtype=torch.float32))
        half = wide.to(dtype)
        scales = torch.rand(len(widths), k, device="cuda") + 0.5
        for sparsity, batch in ((0.0, 1), (0.5, 1), (0.5, 2), (0.5, 8), (0.0, 11)):
            thresholds = torch.full((len(widths),), 0.67 if sparsity else 0.0, device="cuda")
            group = Group(matrix, widths, None, scales, thresholds, sparsity == 0)
            # All of one sign: what the fixed exponents add is then as large as it gets.
            x = torch.randn(batch, k, device="cuda").abs().to(dtype)
            tile = default_tile(132, k, widths, launch_kind(batch, dense=sparsity == 0), 90, kind, size)
            found = sparse_gemv(x, group, tile)
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
                    "packed": isinstance(program_lists(group.layout, tile, batch), PackedLists),
                    "same": bool(torch.equal(found, sparse_gemv(x, group, tile))),
                    "ours": float((found.double() - true).square().mean().sqrt() / norm),
                    "torch": float((torch.cat(theirs, 1) - true).square().mean().sqrt() / norm),
                }
            )  # fmt: skip
    return rows


def tiles_for(k: int, widths: tuple[int, ...], kind: str, group: int | None, batch: int) -> list[GemvTile]:
    """Tiles worth trying: 8 to 16 warps for each multiprocessor, two of them in a program, four for many rows."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    found = []
    for words in (1, 2) if sum(widths) < 8192 and kind == "int4" else (2, 4):
        if words == 4 and batch > 2 and kind == "int4":
            continue
        for warps in (2,) if batch <= 2 else (4,):
            block_n = words * 256 * warps // CODE_BITS[kind]
            tiles = sum(-(-width // block_n) for width in widths)
            chunks = k // (group or 64)
            for each in (8, 12, 16):
                # Every split as many chunks as any other, or one less.
                dealt = max(1, round(chunks * tiles * warps / (processors * each)))
                splits = min(-(-chunks // dealt), 64)
                for unroll in (2, 4):
                    most = most_pollers(processors, widths, block_n, splits, warps)
                    pollers = most if sum(widths) < 16384 else 0
                    tile = GemvTile(block_n, 1, splits, warps, 1, group or 64, unroll, trigger=2, pollers=pollers,
                                    early=sum(widths) < 16384)  # fmt: skip
                    if tile not in found:
                        found.append(tile)
    return found


def _case(role: str, weights: str, sparsity: float, batch: int, **keywords):
    kind, _, group = weights.partition("-")
    config = ModelConfig.from_dict(SHAPES["llama-3.1-8b"])
    return case_for(
        config, role, sparsity, batch=batch, weights=kind, group=int(group) if group else None, **keywords
    )  # fmt: skip


def _compile(work: list[tuple]) -> None:
    held: dict[tuple, object] = {}
    for role, weights, sparsity, batch, tile in work:
        key = (role, weights, sparsity, batch)
        if key not in held:
            held = {key: _case(*key, copies=1)}
        held[key].launcher(tile, True)(1)  # type: ignore[attr-defined]
    torch.cuda.synchronize()


def sweep(weights: list[str], sparsities: list[float], batch: int, ceiling: float) -> dict[str, dict]:
    """The best tile of each role for each kind and sparsity."""
    work = []
    config = ModelConfig.from_dict(SHAPES["llama-3.1-8b"])
    h, inner = config.hidden_size, config.intermediate_size
    sizes = {
        "qkv": (h, (config.q_size, config.kv_size, config.kv_size)), "o": (h, (h,)),
        "gate_up": (h, (inner, inner)), "down": (inner, (h,)),
    }  # fmt: skip
    for of in weights:
        kind, _, group = of.partition("-")
        for sparsity in sparsities:
            for role in ROLES:
                tiles = tiles_for(*sizes[role], kind, int(group) if group else None, batch)
                work += [(role, of, sparsity, batch, tile) for tile in tiles]
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, [work[i::workers] for i in range(workers)]))
    best: dict[str, dict] = {}
    for of in weights:
        for sparsity in sparsities:
            for role in ROLES:
                case = _case(role, of, sparsity, batch)
                ideal = case.bytes / ceiling * 1e-3
                rows = sorted(
                    ((time_graph(case.launcher(job[4], True), len(case.groups), 9), job[4]) for job in work
                     if job[:4] == (role, of, sparsity, batch)),
                    key=lambda row: row[0],
                )  # fmt: skip
                us, tile = rows[0]
                # What an early start of the next launch, and a later one of its own, bring.
                for other in (replace(tile, trigger=1), replace(tile, early=not tile.early)):
                    rows.append((time_graph(case.launcher(other, True), len(case.groups), 9), other))
                rows.sort(key=lambda row: row[0])
                print(f"{of} {role} sparsity {sparsity} batch {batch} kept {case.kept} ideal {ideal:.2f} us")
                for us, tile in rows[:6]:
                    print(f"  {us:7.2f} us {100 * ideal / us:5.1f}%  {tile}")
                for name in ("block_n", "splits", "warps", "unroll", "pollers"):
                    by: dict[int, float] = {}
                    for us, tile in rows:
                        by.setdefault(getattr(tile, name), us)
                    print(f"    by {name}: " + "  ".join(f"{value}: {us:.2f}" for value, us in sorted(by.items())))
                us, tile = rows[0]
                best[f"{of} {sparsity} {batch} {role}"] = {"us": round(us, 2), "share": round(ideal / us, 3),
                                                          "tile": str(tile)}  # fmt: skip
                sys.stdout.flush()
                del case
                torch.cuda.empty_cache()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    sweeping = commands.add_parser("sweep")
    sweeping.add_argument("--weights", nargs="+", default=["int4-128", "int8"])
    sweeping.add_argument("--sparsity", nargs="+", type=float, default=[0.0, 0.5])
    sweeping.add_argument("--batch", type=int, default=1)
    sweeping.add_argument("--ceiling", type=float, default=4590.0, help="read bandwidth in GB/s")
    arguments = parser.parse_args()
    if arguments.command == "check":
        bad = check()
        for row in bad:
            print(row)
        print(json.dumps({"bad": len(bad)}))
        sys.exit(bool(bad))
    print(json.dumps(sweep(arguments.weights, arguments.sparsity, arguments.batch, arguments.ceiling)))


if __name__ == "__main__":
    main()
