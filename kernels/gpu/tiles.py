"""Launch configurations of the products: how the columns and channels of a linear are divided among programs.

A tile comes from the local cache that ``wisparse bench --tune`` writes, else from tiles.json (measured on an H200), else
from a heuristic: ``default_tile``, ``expert_tile`` or ``gemm_tile``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from .weights import BITS, LinearShape

log = logging.getLogger(__name__)

MOST_REDUCERS = 8  # spinning reducers of a tile: measured to be no faster with more
_LARGE_SMEM = (80, 90, 100)  # architectures with at least 160 KiB of shared memory on a multiprocessor
_MOST_ROWS = 2048  # rows of graded experts' weights of a program
SMEM_LIMIT_GEMM = 47 * 1024  # bytes of shared memory for fused_gemm's inputs, see ``products.SMEM_LIMIT``


class Gpu(NamedTuple):
    """Compute capability (90 for 9.0) and multiprocessors."""

    arch: int
    multiprocessors: int


@cache
def gpu_of(device: torch.device) -> Gpu:
    """A CPU (Triton's interpreter) counts as sm_80 with one multiprocessor, ``meta`` (compilation only) as an H200."""
    if device.type != "cuda":
        return Gpu(90, 132) if device.type == "meta" else Gpu(80, 1)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True)
class Tile:
    """The grid of a launch, ``splits`` splits of the channels times tiles of ``block_n`` columns, and its pipeline."""

    block_n: int = 512
    block_k: int = 2  # rows of weight_t loaded at a time; fused_gemm: channels of a block; packed: unused
    splits: int = 8
    warps: int = 4
    stages: int = 1  # fused_gemm: num_stages of the K loop; packed, up to 16 rows: pipeline stages in flight
    chunk: int = 8  # splits get channels round-robin, this many at a time
    # Loads of block_k rows in flight; packed: mma steps of 16 channels in a stage, at most 4, with more than 16 rows 8.
    unroll: int = 4
    trigger: int = 1  # griddepcontrol.launch_dependents: 1 at the start of a program, 2 after its product
    early: bool = True  # launch with programmatic dependent launch
    lead: int = 0  # dense: steps of unroll * block_k rows loaded before the inputs arrive
    reducers: int = 0  # spinning reducers of a tile, a power of two; 0: the last program to arrive reduces
    block_m: int = 16  # gemm: rows of x; else unused
    registers: int = 0  # packed: most registers of a thread, so that more programs run at once; 0: no limit

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("lead", "reducers", "early", "registers") else 1
            if not isinstance(value, bool if name == "early" else int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, found {value!r}")
            if name in ("block_n", "block_k", "warps", "block_m") and value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, found {value}")
        if self.reducers > self.splits or self.reducers & (self.reducers - 1):
            raise ValueError(
                f"expected reducers to be 0 or a power of two up to splits ({self.splits}), found {self.reducers}"
            )
        # If several threads polled one partial sum they could read different values, and the reducer could use a stale
        # one.
        if self.reducers and triton.next_power_of_2(self.splits) * self.block_n // self.reducers < 32 * self.warps:
            raise ValueError(f"expected at least one partial sum for every thread of a reducer, found {self}")


def regime(rows: int, *, dense: bool) -> str:
    """The regime of a linear in the keys of tiles: how its rows and masks share the loads of weights."""
    if rows == 1:
        return "dense" if dense else "sparse"
    return "rows" if rows == 2 and not dense else "batch" if rows <= 16 else "wide"


def count_tiles(widths: tuple[int, ...], block_n: int) -> int:
    return sum(triton.cdiv(width, block_n) for width in widths)


def tile_key(gpu: Gpu, shape: LinearShape, kind: str) -> str:
    if shape.quant != "none":
        kind += f":{shape.quant}" + (f"-{shape.group}" if shape.group < shape.in_features else "")
    return f"sm{gpu.arch}:{kind}:{shape.in_features}x{sum(shape.widths)}"


def tuned_key(gpu: Gpu, shape: LinearShape, rows: int) -> str:
    """The key in the local cache, which includes the number of rows and the dtype."""
    key = tile_key(gpu, shape, regime(rows, dense=shape.dense))
    return f"{key}:{rows}:{str(shape.dtype).removeprefix('torch.')}"


@cache
def measured_tiles() -> Mapping[str, Tile]:
    table = json.loads(Path(__file__).with_name("tiles.json").read_text("utf-8"))
    return {key: Tile(**fields) for key, fields in table.items() if key != "_"}


def choose_tile(gpu: Gpu, shape: LinearShape, rows: int) -> tuple[Tile, str]:
    """The tile of a launch and its origin, with at most one spinning reducer for each multiprocessor."""
    kind = regime(rows, dense=shape.dense)
    tuned, key = tuned_tiles().get(tuned_key(gpu, shape, rows)), tile_key(gpu, shape, kind)
    tile = tuned or measured_tiles().get(key)
    if tile is None and shape.planes > 1:  # as many bytes as int4 weights of the same channels
        of_int4 = shape._replace(in_features=shape.in_features // 2, group=shape.group // 2, planes=1)
        tile = measured_tiles().get(tile_key(gpu, of_int4, kind))
        tile = tile and replace(tile, chunk=2 * tile.chunk)
    if tile is None:
        return default_tile(gpu, shape, kind), "heuristic"
    reducers = min(tile.reducers, most_reducers(gpu, shape.widths, tile))
    return replace(tile, reducers=reducers), "tuned here" if tuned else "measured (tiles.json)"


def masked_gemm_key(gpu: Gpu, in_features: int, out_features: int, rows: int) -> str:
    return f"sm{gpu.arch}:mask{max(4, min(128, triton.next_power_of_2(rows)))}:{in_features}x{out_features}"


def masked_gemm_tile(shape: LinearShape, rows: int, gpu: Gpu) -> Tile | None:
    """The tile of ``gemm`` with a mask if that was measured to be the fastest for this number of rows, else None."""
    key = masked_gemm_key(gpu, shape.in_features, sum(shape.widths), rows)
    tile = tuned_tiles().get(key) or measured_tiles().get(key)
    return tile and replace(tile, splits=1, block_m=gemm_rows(rows))


def most_reducers(gpu: Gpu, widths: tuple[int, ...], tile: Tile) -> int:
    """The most spinning reducers of a tile such that each has a multiprocessor and each thread a partial sum to
    poll."""
    sums = triton.next_power_of_2(tile.splits) * tile.block_n
    resident = gpu.multiprocessors // count_tiles(widths, tile.block_n)
    most = min(MOST_REDUCERS, tile.splits, resident, sums // (32 * tile.warps))
    return 1 << (most.bit_length() - 1) if most > 0 else 0


def default_tile(gpu: Gpu, shape: LinearShape, kind: str) -> Tile:
    """The heuristic for shapes without a measured tile."""
    k, n, processors = shape.in_features, sum(shape.widths), gpu.multiprocessors
    wide = n >= 16384
    if shape.quant != "none":
        # A lane reads 8 bytes of each channel, in programs of two warps, seven for each multiprocessor; of four warps,
        # three for each, where all channels share a scale. Many rows, whose accumulators take registers: two programs
        # of 256 columns for each, as measured with int4; 512 for a wide output of int4 and at most sixteen rows.
        many, grouped, over16 = kind in ("batch", "wide"), shape.group < k, kind == "wide"
        warps, each = (4, 2) if many else (2, 7) if grouped else (4, 3)
        four_bytes = n <= 1024 or (many and (over16 or not wide) and shape.quant == "int4")
        block_n = (1 if four_bytes else 2) * 256 * warps // BITS[shape.quant]
        chunk = shape.group if grouped else 64
        chunks = triton.cdiv(k, chunk)
        # The inputs of many rows have to fit in shared memory; those of more than sixteen are stored tile by tile.
        least = 1 if over16 else triton.cdiv(k, 1024)
        splits = max(least, each * processors // count_tiles(shape.widths, block_n))
        # Numbers of chunks that differ by at most one between splits.
        splits = triton.cdiv(chunks, triton.cdiv(chunks, min(splits, chunks, 64)))
        # With an index list a stage of 16 * unroll channels ends where its group's kept channels do, so short stages
        # waste less; without one every stage is full, and long stages hide more latency.
        tile = Tile(
            block_n, 16, splits, warps, chunk=chunk, unroll=2 if grouped and not many else 4, trigger=2,
            early=not wide or over16,
        )  # fmt: skip
    elif kind in ("batch", "wide"):
        # The narrowest of a few widths whose programs, at most one for each multiprocessor, leave few of them idle.
        sizes = [(64, 32)] if n < 2048 else [(128, 64), (256, 32), (512, 16)]
        if wide and gpu.arch in _LARGE_SMEM:
            sizes.append((1024, 16))
        found = []
        for block_n, block_k in sizes:
            tiles = triton.cdiv(n, block_n)
            splits = max(1, min(processors // tiles, k // 64, 16))
            busy = tiles * splits / triton.cdiv(tiles * splits, processors)
            # Eight rows' inputs have to fit in shared memory beside the weights.
            if triton.cdiv(k, splits) * 8 * 2 > SMEM_LIMIT_GEMM:
                busy /= processors
            found.append((block_n, block_k, splits, busy))
        most = max(busy for *_, busy in found)
        block_n, block_k, splits, _ = next(candidate for candidate in found if candidate[3] >= 0.85 * most)
        stages = 4 if gpu.arch not in _LARGE_SMEM or block_n == 1024 else 6
        tile = Tile(block_n, block_k, splits, 8 if block_n >= 128 else 4, stages=stages, unroll=1)
    else:
        # A thread loads 16 bytes, each warp its own row. Wide outputs are launched without overlap: a grid that fills
        # the GPU is distributed unevenly if it starts while another launch's programs are resident.
        block_n = 256 if n >= 512 else 64
        splits = max(1, min((7 if wide else 5) * processors // triton.cdiv(n, block_n), k // 64, 64))
        lead = 2 if kind == "dense" else 0
        return Tile(block_n, 512 // block_n, splits, 2, unroll=8, trigger=2, early=not wide, lead=lead)
    # Not for gate and up, where spinning was measured to be slower: few programs reduce many partial sums.
    return tile if wide else replace(tile, reducers=most_reducers(gpu, shape.widths, tile))


def expert_tile(gpu: Gpu, shape: LinearShape, pairs: int, adds: int) -> Tile:
    """A tile like those measured for a linear with the bytes of all pairs: about four programs of four warps for each
    multiprocessor, or seven of two. ``adds``: experts whose products are added up, 0 for gate_up. Quantized gate_up has
    fewer programs and no spinning reducers: measured 9.3 instead of 10.7 us (H100, int4)."""
    k, n, processors = shape.in_features, sum(shape.widths), gpu.multiprocessors
    grouped = 0 < shape.group < k
    if shape.quant == "none":
        block_n, chunk, each = 256 if n >= 512 else 64, 32, 4
        tile = Tile(block_n, 1024 // block_n, 1, 4, chunk=chunk, unroll=8, trigger=2, lead=2 if shape.dense else 0)
    else:
        block_n, chunk = 256 * (2 if n <= 1024 else 4) // BITS[shape.quant], shape.group if grouped else 64
        each = 7 if adds else 4
        tile = Tile(block_n, 16, 1, 2, chunk=chunk, unroll=2 if grouped and not shape.dense else 4, trigger=2)
    chunks = triton.cdiv(k, chunk)
    # Numbers of chunks that differ by at most one between splits; of unquantized weights at least three.
    least = min(chunks, 3) if shape.quant == "none" else 1
    splits = max(1, min(each * processors // (pairs * count_tiles(shape.widths, block_n)), chunks // least))
    if shape.planes > 1:  # a program selects its channels in registers
        splits = max(splits, triton.cdiv(k, _MOST_ROWS))
    splits = triton.cdiv(chunks, triton.cdiv(chunks, splits))
    # At most one spinning reducer for each multiprocessor, over all rows.
    share = gpu._replace(multiprocessors=processors // max(1, pairs // max(1, adds)))
    tile = replace(tile, splits=splits)
    spins = adds > 0 or shape.quant == "none"
    return replace(tile, reducers=most_reducers(share, shape.widths, tile) if spins else 0)


def gemm_tile(shape: LinearShape, rows: int, gpu: Gpu) -> Tile | None:
    """The tile of ``gemm`` for codes; None if it does not support them: graded weights, or groups that are not a multiple
    of block_k."""
    block_k = 64
    if shape.quant == "none" or shape.planes > 1 or shape.group % block_k or shape.in_features % block_k:
        return None
    block_m = gemm_rows(rows)

    def programs(block_n: int) -> int:
        return triton.cdiv(rows, block_m) * count_tiles(shape.widths, block_n)

    # Measured on an H100, 8B shape, 32 and 128 rows: narrow tiles if wide ones are fewer than the multiprocessors, and
    # splits for about three programs on each.
    block_n = 128 if programs(128) >= gpu.multiprocessors else 64
    splits = max(1, min(3 * gpu.multiprocessors // programs(block_n), shape.in_features // (8 * block_k), 8))
    return Tile(block_n, block_k, 1 << (splits.bit_length() - 1), stages=3, block_m=block_m)


def expert_gemm_tile(shape: LinearShape, rows: int, gpu: Gpu) -> Tile:
    """The tile of ``expert_gemm``. Its block_m: the average number of rows of an expert, rounded up to few sizes."""
    pairs, n, itemsize = rows * shape.chosen, shape.widths[0], shape.dtype.itemsize
    k, unquantized = shape.in_features // shape.planes, shape.quant == "none"
    block_m = max(16, min(64, triton.next_power_of_2(triton.cdiv(pairs, shape.experts))))
    block_k = 64 if k % 64 == 0 else 32
    block_n = max(16 if unquantized else 32, min(128, triton.next_power_of_2(n)))
    stages = 3 if gpu.arch in _LARGE_SMEM and shape.dtype != torch.float32 else 1
    if shape.dtype == torch.float32:
        block_n = min(block_n, 64)
    # Shared memory holds the loads of stages - 1 iterations: x, weights, and of codes also scales and zero points.
    each = itemsize if unquantized else shape.planes * BITS[shape.quant] / 8 + 4 * (2 if shape.zeros else 1)
    staged = block_k * (block_n * len(shape.widths) * each + block_m * itemsize)
    while stages > 1 and (stages - 1) * staged > (150_000 if gpu.arch == 80 else 220_000):
        stages -= 1
    return Tile(block_n, block_k, 1, 4 if block_m < 64 else 8, stages, block_m=block_m)


def gemm_rows(rows: int) -> int:
    """Rows of x in a tile of ``gemm``."""
    return max(16, min(128, triton.next_power_of_2(rows)))


def tuned_file() -> Path:
    """Where ``wisparse bench --tune`` keeps tiles: ``$WISPARSE_CACHE`` or the user's cache folder."""
    folder = os.environ.get("WISPARSE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "wisparse")
    return Path(folder).expanduser() / "tiles.json"


def tuned_tiles() -> Mapping[str, Tile]:
    """The local cache."""
    return read_tiles(tuned_file())


@cache
def read_tiles(path: Path) -> Mapping[str, Tile]:
    """The tiles of a file, as the process has found or written it."""
    try:
        return {key: Tile(**fields) for key, fields in json.loads(path.read_text("utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # Tiles affect speed only, not results.
        log.warning("%s is ignored (%s); `wisparse bench --tune` writes a new one", path, error)
        return {}
