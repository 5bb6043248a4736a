"""Sweep the tiles of every projection of a shape at one sparsity; the winners go to the local tile cache.

    PYTHONPATH=. python benchmarks/gpu_tiles.py --shape llama-3.1-8b --sparsity 0.5

Each tile is timed as a CUDA graph of launches over as many copies of the weights as overflow the L2 cache, so a figure
holds the launch, the selection and the reduction. ``share`` is of the ideal: bytes of the kept rows over the read
ceiling.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from gpu_models import SHAPES, need_gpu

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.gpu.common import Input, KVSplits, Output
from wisparse.kernels.gpu.plan import (
    GemvTile,
    Gpu,
    Scratch,
    gpu_of,
    launch_linear,
    most_reducers,
    plan,
    regime,
    remember_tiles,
    tuned_key,
)
from wisparse.kernels.gpu.weights import BITS, DeviceWeight, FusedLinear, LinearShape, empty_weight, unquantized
from wisparse.kernels.reference import keep_mask

KV_SPLITS = 4


class Case:
    """One group of projections, ``copies`` times, with everything its launch reads."""

    def __init__(
        self, k: int, widths: tuple[int, ...], source: str, target: str, head_dim: int, sparsity: float,
        *, batch: int = 1, copies: int | None = None, dtype: torch.dtype = torch.bfloat16,
        weights: str = "none", group: int | None = None,
    ) -> None:  # fmt: skip
        n = sum(widths)
        size = BITS.get(weights, 16) / 8
        if copies is None:
            copies = max(2, math.ceil(2.5e8 / (k * n * size * max(1 - sparsity, 0.1))))
        self.source, self.target, self.head_dim, self.batch = source, target, head_dim, batch
        self.k, self.n, self.widths = k, n, widths
        x = torch.randn(batch, k, device="cuda", dtype=dtype)
        scales = torch.rand(len(widths), k, device="cuda") + 0.5
        self.eps, self.norm = 1e-5, torch.ones(k, device="cuda", dtype=dtype)
        self.ssq = x.float().square().sum(1, keepdim=True)
        seen = x
        if source == "hidden":
            seen = (x.float() * torch.rsqrt(self.ssq / k + self.eps)).to(dtype)
        thresholds = torch.stack(
            [
                (seen[0].float().abs() * s).kthvalue(max(1, round(sparsity * k))).values
                if sparsity > 0
                else s.new_zeros(())
                for s in scales
            ]
        )
        self.kept = [
            int(keep_mask(seen, s, t).any(0).sum()) if sparsity > 0 else k
            for s, t in zip(scales, thresholds, strict=True)
        ]
        self.bytes = sum(kept * width for kept, width in zip(self.kept, widths, strict=True)) * size
        self.bytes += 0 if weights == "none" else 4 * n * (k // group if group else 1)
        self.softmax = None
        if source == "attention":
            heads = k // head_dim
            part = torch.zeros(batch, heads, KV_SPLITS, head_dim, device="cuda")
            part[:, :, 0] = x.float().view(batch, heads, head_dim)
            m = torch.full((batch, heads, KV_SPLITS), float("-inf"), device="cuda")
            m[:, :, 0] = 0.0
            self.softmax = m, (m == 0).float()
            self.x = part
        else:
            self.x = x
        self.groups = [
            FusedLinear(
                random_matrix(weights, k, widths, group, dtype),
                None,
                scales,
                thresholds,
                sparsity == 0,
            )
            for _ in range(copies)
        ]
        width = widths[0] if target == "silu" else n
        self.out = torch.zeros(batch, width, device="cuda", dtype=dtype)

    def launcher(self, tile: GemvTile, pdl: bool, **keywords):
        """A function that launches every copy once."""
        attention = {} if self.softmax is None else {"kv_splits": KV_SPLITS, "head_dim": self.head_dim}
        parts = 1 if self.ssq is None else self.ssq.shape[1]
        chosen = plan(
            self.groups[0].shape, self.batch, output=self.target, ssq_parts=parts, tile=tile, pdl=pdl, **attention
        )
        scratch = Scratch(self.x.device, self.out.dtype)
        scratch.reserve(chosen)
        ssq_out = torch.empty(self.batch, chosen.ssq_parts, device="cuda")
        given = Input(self.x)
        if self.softmax is not None:
            given = Input(None, attention=KVSplits(self.x, *self.softmax))
        elif self.source == "hidden":
            given = Input(self.x, self.ssq, self.norm)

        def launch(limit: int | None = None) -> None:
            for linear in self.groups[:limit]:
                launch_linear(linear, given, Output(self.out, ssq_out), scratch, chosen, eps=self.eps, **keywords)

        return launch


def random_matrix(
    kind: str, k: int, widths: tuple[int, ...], group: int | None, dtype: torch.dtype, *, zeros: bool = False
) -> DeviceWeight:
    """Weights of any kind: random numbers, or random codes with scales that make numbers of their size."""
    if kind == "none":
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


def case_for(config: ModelConfig, role: str, sparsity: float, **keywords) -> Case:
    """The case of one role: qkv, o, gate_up or down."""
    h, i = config.hidden_size, config.intermediate_size
    k, widths, source, target = {
        "qkv": (h, (config.q_size(0), *[config.blocks[0].kv_size] * 2), "hidden", "plain"),
        "o": (config.q_size(0), (h,), "attention", "residual"),
        "gate_up": (h, (i, i), "hidden", "silu"),
        "down": (i, (h,), "plain", "residual"),
    }[role]
    return Case(k, widths, source, target, config.head_dim, sparsity, **keywords)


def candidates(k: int, widths: tuple[int, ...], kind: str, processors: int) -> list[GemvTile]:
    """Tiles worth trying: one to eight programs for each multiprocessor, 8 to 64 numbers a thread in flight."""
    gpu = Gpu(90, processors)
    # block_n, warps, unroll: block_k is then what one 16-byte load of every thread covers.
    found = []
    if kind != "batch":
        for block_n, warps in ((256, 2), (256, 4), (512, 2), (512, 4), (512, 8), (1024, 4), (1024, 8)):
            tiles = sum(triton.cdiv(width, block_n) for width in widths)
            splits = {max(1, min(round(processors * m / tiles - 0.45), k // 32)) for m in (1, 2, 3, 4, 5, 6)}
            # The last program adds up to 32 partial sums in one turn.
            splits |= {split for split in (16, 32) if max(splits) > split}
            for split in sorted(splits):
                for unroll in (4, 8):
                    tile = GemvTile(block_n, warps * 256 // block_n, split, warps, 1, 32, unroll, trigger=2)
                    found += [replace(tile, reducers=n) for n in {0, most_reducers(gpu, tuple(widths), tile)}]
        return found
    # Many rows: one program for each multiprocessor, with 64 to 128 KiB on their way.
    pieces = [(64, 128, 6), (128, 64, 6), (128, 64, 8), (256, 32, 6), (256, 32, 8), (256, 64, 4), (256, 64, 5)]
    pieces += [(512, 16, 6), (512, 16, 8), (512, 32, 4), (1024, 16, 4)]
    found = []
    for block_n, block_k, stages in pieces:
        most = processors // sum(triton.cdiv(width, block_n) for width in widths)
        for splits in {max(1, min(most - fewer, k // 64)) for fewer in (0, 1)}:
            for warps in (4, 8):
                tile = GemvTile(block_n, block_k, splits, warps, stages, unroll=1)
                found += [replace(tile, reducers=n) for n in {0, most_reducers(gpu, tuple(widths), tile)}]
    return found


def time_graph(launch, count: int, runs: int = 15) -> float:
    """Microseconds of one of the ``count`` launches that ``launch()`` makes, by replaying them as a graph; the
    median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        acc += tl.load(x_ptr + start.to(tl.int64) + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, axis=0))


def ceiling_gbps(gigabytes: int = 4) -> float:
    """Read bandwidth in GB/s: the best of several ways of adding up a large array."""
    x = torch.ones(gigabytes * 2**28, dtype=torch.int32, device="cuda")
    out = torch.empty(132 * 16, dtype=torch.int32, device="cuda")
    best = 0.0
    for block, warps, programs in ((4096, 4, 132 * 8), (8192, 8, 132 * 4), (4096, 8, 132 * 4), (2048, 4, 132 * 8)):

        def launch(block=block, warps=warps, programs=programs) -> None:
            _read_kernel[(programs,)](x, out, x.numel(), block, num_warps=warps)

        best = max(best, x.numel() * 4 / time_graph(launch, 1, 5) * 1e-3)
    return best


def _compile(arguments) -> None:
    shape, role, sparsity, batch, tiles, pdl = arguments
    config = ModelConfig.from_dict(SHAPES[shape])
    case = case_for(config, role, sparsity, batch=batch, copies=1)
    for tile in tiles:
        try:
            case.launcher(tile, pdl)(1)
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()


def sweep(shape: str, roles: list[str], sparsity: float, batch: int, ceiling: float, pdl: bool, extra: bool) -> dict:
    """Time every candidate of every role; {role: [(us, tile)], best first}."""
    config = ModelConfig.from_dict(SHAPES[shape])
    properties = torch.cuda.get_device_properties(0)
    results = {}
    work = {}
    kind = regime(batch, dense=sparsity == 0)
    for role in roles:
        case = case_for(config, role, sparsity, batch=batch, copies=1)
        work[role] = candidates(case.k, case.widths, kind, properties.multi_processor_count)
        del case
    workers = max(1, (os.cpu_count() or 2) - 1)
    jobs = [
        (shape, role, sparsity, batch, tiles[i::workers], pdl) for role, tiles in work.items() for i in range(workers)
    ]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))
    for role, tiles in work.items():
        case = case_for(config, role, sparsity, batch=batch)
        ideal = case.bytes / ceiling * 1e-3
        rows = []
        for tile in tiles:
            try:
                rows.append((time_graph(case.launcher(tile, pdl), len(case.groups)), tile))
            except triton.runtime.errors.OutOfResources:
                continue
        rows.sort(key=lambda row: row[0])
        if extra and batch == 1:
            best = [tile for _, tile in rows[:2]]
            for tile in best:
                line = [f"late {time_graph(case.launcher(tile, False), len(case.groups)):.2f}"]
                for chunk in (32,):
                    other = GemvTile(**{**asdict(tile), "chunk": chunk})
                    us = time_graph(case.launcher(other, pdl), len(case.groups))
                    line.append(f"chunk {chunk} {us:.2f}")
                    rows.append((us, other))
                print(f"{role} {tile}: " + ", ".join(line))
            rows.sort(key=lambda row: row[0])
        results[role] = rows
        print(
            f"{shape} {role} K={case.k} N={case.n} sparsity {sparsity} batch {batch} "
            f"kept {case.kept} ideal {ideal:.2f} us"
        )
        for us, tile in rows[:8]:
            print(f"  {us:7.2f} us {100 * ideal / us:5.1f}%  {tile}")
        # The best of each family, to see what matters.
        for name in ("block_n", "block_k", "splits", "warps", "stages", "unroll"):
            best = {}
            for us, tile in rows:
                best.setdefault(getattr(tile, name), us)
            print(f"    by {name}: " + "  ".join(f"{value}: {us:.2f}" for value, us in sorted(best.items())))
        del case
        torch.cuda.empty_cache()
    return results


def keep_tiles(name: str, shape: str, sparsity: float, batch: int, tiles: dict[str, GemvTile]) -> None:
    """Add each role's tile to the local cache, print them as a line of JSON, and write it to ``$OUT``, if set."""
    config = ModelConfig.from_dict(SHAPES[shape])
    sizes = {
        "qkv": (config.hidden_size, config.q_size(0) + 2 * config.blocks[0].kv_size),
        "o": (config.q_size(0), config.hidden_size),
        "gate_up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
    }
    device = torch.device("cuda", 0)
    named = {}
    for role, tile in tiles.items():
        k, n = sizes[role]
        shape = LinearShape(k, (n,), n, torch.bfloat16, device, sparsity == 0)
        named[tuned_key(gpu_of(device), shape, batch)] = tile
    print("written to", remember_tiles(named))
    line = json.dumps({key: asdict(tile) for key, tile in named.items()})
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"{name}-{shape}-{batch}-{sparsity}.json").write_text(line)
    print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--roles", nargs="+", default=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ceiling", type=float, default=4530.0, help="read bandwidth in GB/s")
    parser.add_argument("--extra", action="store_true", help="also time the best without programmatic dependent launch")
    arguments = parser.parse_args()
    need_gpu(parser)
    results = sweep(
        arguments.shape, arguments.roles, arguments.sparsity, arguments.batch, arguments.ceiling,
        torch.cuda.get_device_capability() >= (9, 0), arguments.extra,
    )  # fmt: skip
    best = {role: rows[0][1] for role, rows in results.items()}
    keep_tiles("tiles", arguments.shape, arguments.sparsity, arguments.batch, best)


if __name__ == "__main__":
    main()
