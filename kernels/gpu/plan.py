"""Which kernel computes a linear, and with which tile: ``plan`` decides, ``launch_linear`` launches the plan.

    input (x, RMSNorm of the residual stream, or attention's splits) -> product of the kept channels
    -> bias, activation or residual                                       (``common.Input``, ``common.Output``)

    rows   masks   regime   unquantized, or the tensor cores cannot     int4, int8, fp8
    1      no      dense    sparse_gemv                                 packed_gemv, all channels
    1      yes     sparse   sparse_gemv                                 packed_gemv, the kept channels
    2      yes     rows     sparse_gemv, channels that either keeps     packed_gemv, the same
    2-16   else    batch    masked_gemm, all channels                   packed_gemv, all channels
    17-32  either  wide     masked_gemm, all channels                   packed_gemv, all channels

For 17 to 32 rows, quantized weights use packed_gemv; all others cuBLAS or code_gemm (runtime.cuda.wide).
The boundaries are measured on an H200 (benchmarks/LOG.md). A tile comes from the local cache that ``wisparse bench
--tune`` writes, else from tiles.json (measured on an H200), else from ``default_tile``.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from . import packed_gemv
from .common import Counting, Input, LaunchConfig, Output, Problem, Weights, Workspace
from .masked_gemm import masked_gemm_kernel
from .packed_gemv import PackedConfig
from .reduction import EMPTY
from .sparse_gemv import sparse_gemv_kernel
from .weights import BITS, FusedLinear, LinearShape

log = logging.getLogger(__name__)

MOST_REDUCERS = 8  # spinning reducers of a tile: measured to be no faster with more
_LARGE_SMEM = (80, 90, 100)  # architectures with at least 160 KiB of shared memory on a multiprocessor
_EXCLUSIVE = 64 * 1024  # bytes of weights in flight from which masked_gemm runs one program on a multiprocessor
# Bytes of static shared memory that a kernel may declare in addition to Triton's own. A launch has at most 48 KiB in
# all unless the driver is asked for more, which Triton does if its own part exceeds that; the static part is limited to
# 48 KiB in any case.
SMEM_LIMIT = 36 * 1024
SMEM_LIMIT_GEMM = 47 * 1024
SMEM_LIMIT_WIDE = 31 * 1024  # more than sixteen rows: Triton takes 16 KiB to reduce their splits with four warps


def smem_source(num_bytes: int, limit: int = SMEM_LIMIT) -> str:
    """PTX that declares static shared memory and returns its address; "" if ``num_bytes`` exceeds ``limit``."""
    if num_bytes > limit:
        return ""
    return f"{{ .shared .align 16 .b8 smem[{num_bytes}]; mov.u32 $0, smem; }}"


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
class GemvTile:
    """The grid of a launch, ``splits`` splits of the channels times tiles of ``block_n`` columns, and its pipeline."""

    block_n: int = 512
    block_k: int = 2  # rows of weight_t loaded at a time; masked_gemm: channels of a block; packed: unused
    splits: int = 8
    warps: int = 4
    stages: int = 1  # masked_gemm: num_stages of the K loop; packed: pipeline stages in flight
    chunk: int = 8  # splits get channels round-robin, this many at a time
    unroll: int = 4  # loads of block_k rows in flight; packed: mma steps of 16 channels in a stage, at most 4
    trigger: int = 1  # griddepcontrol.launch_dependents: 1 at the start of a program, 2 after its product
    early: bool = True  # launch with programmatic dependent launch
    lead: int = 0  # dense: steps of unroll * block_k rows loaded before the inputs arrive
    reducers: int = 0  # spinning reducers of a tile, a power of two; 0: the last program to arrive reduces

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("lead", "reducers", "early") else 1
            if not isinstance(value, bool if name == "early" else int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, found {value!r}")
            if name in ("block_n", "block_k", "warps") and value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, found {value}")
        if self.reducers > self.splits or self.reducers & (self.reducers - 1):
            raise ValueError(
                f"expected reducers to be 0 or a power of two up to splits ({self.splits}), found {self.reducers}"
            )
        # If several threads polled one partial sum they could read different values, and the reducer could use a stale
        # one.
        if self.reducers and triton.next_power_of_2(self.splits) * self.block_n // self.reducers < 32 * self.warps:
            raise ValueError(f"expected at least one partial sum for every thread of a reducer, found {self}")


@dataclass(frozen=True)
class KernelPlan:
    """The kernel of a linear and its compile-time configuration."""

    kernel: Any
    shape: LinearShape
    tile: GemvTile
    origin: str  # of the tile: "given", "tuned here", "measured (tiles.json)" or "heuristic"
    why_not_packed: str  # why packed_gemv does not take quantized weights; else ""
    problem: Problem
    launch: LaunchConfig
    packed: PackedConfig | None
    pairs: int = 1  # (row, chosen expert) pairs, the grid's second dimension

    @property
    def programs(self) -> int:
        return self.launch.tiles * self.launch.splits

    @property
    def ssq_parts(self) -> int:
        """Columns of ``Output.ssq``."""
        return self.launch.tiles * max(1, self.tile.reducers)

    def __str__(self) -> str:
        shape, tile, rows = self.shape, self.tile, self.problem.batch
        quant = f"{shape.quant}-{shape.group}" if 0 < shape.group < shape.in_features else shape.quant
        quant = str(shape.dtype).removeprefix("torch.") if quant == "none" else quant
        adds = f"{tile.reducers} spinning reducers a tile" if tile.reducers else "last program of a tile adds up"
        name = self.kernel.__name__.removesuffix("_kernel")
        return (
            f"{name} ({regime(rows, dense=shape.dense)}), {quant}, {shape.in_features} x "
            f"{'+'.join(map(str, shape.widths))}, {rows} row{'s'[: rows != 1]}: "
            f"{self.launch.tiles} tiles of {tile.block_n} columns x {tile.splits} splits = {self.programs} programs of "
            f"{tile.warps} warps; {adds}; tile: {self.origin}"
            + (f"; not packed_gemv: {self.why_not_packed}" if self.why_not_packed else "")
        )


def regime(rows: int, *, dense: bool) -> str:
    """The regime of the table above."""
    if rows == 1:
        return "dense" if dense else "sparse"
    return "rows" if rows == 2 and not dense else "batch" if rows <= 16 else "wide"


def count_tiles(widths: tuple[int, ...], block_n: int) -> int:
    return sum(triton.cdiv(width, block_n) for width in widths)


def plan(shape: LinearShape, rows: int, gpu: Gpu | None = None, **options: Any) -> KernelPlan:
    """Plan the launch of a linear for 1 to 32 rows; ``options``: of `cached_plan`. Reads WISPARSE_SPINNING."""
    return cached_plan(shape, rows, gpu, spinning=os.environ.get("WISPARSE_SPINNING") != "0", **options)


@cache
def cached_plan(
    shape: LinearShape, rows: int, gpu: Gpu | None = None, *, spinning: bool, output: str = "plain", kv_splits: int = 1,
    head_dim: int = 1, ssq_parts: int = 1, tile: GemvTile | None = None, pdl: bool | None = None, pairs: int = 1,
    experts: int = 0, clamp: tuple[float, float] = (0.0, 0.0),
) -> KernelPlan:  # fmt: skip
    """`plan`; ``gpu`` None: that of the weights. ``spinning``: False: no reducers wait. ``pairs``, ``experts``,
    ``clamp``: as in ``KernelPlan`` and ``Problem``, for experts' linears."""
    gpu = gpu or gpu_of(shape.device)
    kind = regime(rows, dense=shape.dense)
    tile, origin = choose_tile(gpu, shape, rows) if tile is None else (tile, "given")
    if not spinning:
        tile = replace(tile, reducers=0)
    tiles = count_tiles(shape.widths, tile.block_n)
    waiting = tile.reducers * tiles * pairs // max(1, experts)
    if tile.reducers > 1 and waiting > gpu.multiprocessors:
        raise ValueError(
            f"expected at most {gpu.multiprocessors} programs that wait for each other on {shape.device}, found "
            f"{waiting}: {tile.reducers} spinning reducers for each tile of {tile}; use fewer reducers"
        )
    many = kind in ("batch", "wide")
    if many and shape.dtype == torch.float32:
        tile = replace(tile, stages=max(1, tile.stages // 2))  # an element has twice the bytes
    k, size = shape.in_features, shape.dtype.itemsize
    # The index lists are in scratch memory for the interpreter, which runs no PTX, and for float32, a reference only.
    shared = shape.device.type != "cpu" and shape.dtype != torch.float32
    chosen = _plan_packed(shape, tile, tiles, rows) if shape.quant != "none" else ""
    packed: PackedConfig | None = None
    if not isinstance(chosen, str):
        kernel: Any = packed_gemv.packed_gemv_kernel
        packed, launch = chosen
    elif many:
        kernel, block_k = masked_gemm_kernel, max(16, tile.block_k)  # 16: tl.dot's smallest K
        channels = triton.cdiv(triton.cdiv(k, block_k), tile.splits) * block_k
        length = channels + 8  # 16 bytes of padding for each row of x: loads of eight rows have no bank conflicts
        in_flight = (tile.stages - 1) * block_k * tile.block_n * size
        limit = SMEM_LIMIT_GEMM - (0 if in_flight >= 48 * 1024 else in_flight + 2048)
        needed = rows * length * size
        # Two programs on one multiprocessor while another is idle make the launch up to 1.5 times as long. A program
        # with many bytes in flight therefore declares so much shared memory that no second one fits beside it.
        smem = smem_source(limit if needed <= limit and in_flight >= _EXCLUSIVE else needed, limit) if shared else ""
        launch = _config(tile, tiles, triton.next_power_of_2(channels), length, smem, block_k=block_k)
    else:
        kernel, step = sparse_gemv_kernel, tile.unroll * tile.block_k
        segment = triton.next_power_of_2(max(triton.cdiv(triton.cdiv(k, tile.chunk), tile.splits) * tile.chunk, 16))
        # Prefetching reads up to three steps beyond the last entry; the final entry holds the list's length.
        length = segment + 3 * step + 1
        reduced = tile.block_k * tile.block_n if tile.block_k > 1 else 0  # accumulators, reduced over block_k
        smem = smem_source(4 * ((1 + rows) * length + reduced)) if shared else ""
        lead = min(tile.lead, segment // step) if shape.dense else 0
        launch = _config(tile, tiles, segment, length, smem, lead=lead)
    # Splits that the epilogue loads at a time. Spinning reducers and many rows keep their partial sums in registers: at
    # most 32 of them in a thread.
    padded_splits = triton.next_power_of_2(tile.splits * max(1, experts))
    reduce_splits = min(padded_splits, 32)
    if tile.reducers or many:
        results = 1 if output in ("plain", "residual") else 2
        columns = tile.block_n // max(1, tile.reducers) * triton.next_power_of_2(rows) * results
        fitting = 1 << (max(1, 32 * 32 * tile.warps // columns).bit_length() - 1)
        reduce_splits = min(padded_splits, fitting)
    n0, n1, n2 = (*shape.widths, 0, 0)[:3]
    problem = Problem(
        k, n0, n1, n2, n0 + n1 + n2, shape.stride, rows, kv_splits, head_dim,
        # Rounded up, so that one compiled kernel serves most tiles of the linear that wrote the partial sums.
        max(32, triton.next_power_of_2(ssq_parts)), output, shape.dense, gpu.arch >= 90 if pdl is None else pdl,
        shape.quant, shape.group, shape.planes, experts, clamp,
    )  # fmt: skip
    launch, why_not = launch._replace(reduce_splits=reduce_splits), chosen if isinstance(chosen, str) else ""
    return KernelPlan(kernel, shape, tile, origin, why_not, problem, launch, packed, pairs)


def _config(tile: GemvTile, tiles: int, segment: int, length: int, smem: str, **changes: int) -> LaunchConfig:
    fields = {name: value for name, value in asdict(tile).items() if name != "early"} | changes
    return LaunchConfig(tiles=tiles, segment=segment, length=length, smem=smem, reduce_splits=0, **fields)


def _plan_packed(shape: LinearShape, tile: GemvTile, tiles: int, rows: int) -> tuple[PackedConfig, LaunchConfig] | str:
    """The packed kernel's configuration, or the reason why the weights go to a kernel that dequantizes them."""
    group, k, dtype = shape.group, shape.in_features, str(shape.dtype).removeprefix("torch.")
    grouped = group < k
    lane_words, rest = divmod(tile.block_n * BITS[shape.quant], 32 * 8 * tile.warps)
    multiple = group if grouped else 16  # chunks are whole groups, or whole mma steps
    chunk = triton.cdiv(tile.chunk, multiple) * multiple
    channels = triton.cdiv(triton.cdiv(k, chunk), tile.splits) * chunk
    steps = 1
    while 2 * steps <= min(tile.unroll, 4) and (not grouped or 32 * steps <= group):
        steps *= 2
    block_k = 16 * steps
    segment = triton.next_power_of_2(max(channels, block_k))
    # Prefetching reads one stage beyond the last entry. Rows of x are 32 bytes more than a multiple of 128 apart: loads
    # of eight rows have no bank conflicts.
    length = triton.cdiv(triton.cdiv(channels, block_k) * block_k + block_k - 16, 64) * 64 + 16
    listed, x_tiles = not shape.dense and rows <= 2, 1
    limit = SMEM_LIMIT if rows <= 16 else SMEM_LIMIT_WIDE
    if not listed and 2 * rows * length > limit:
        segment = 1 << ((limit // (2 * rows) - 16).bit_length() - 1)
        length, x_tiles = segment + 16, triton.cdiv(channels, segment)
    slot = group if grouped else segment
    smem = smem_source((4 + 2 * rows) * length + 4 * (segment // slot) if listed else 2 * rows * length)
    half, on_gpu = shape.dtype != torch.float32, shape.device.type == "cuda"
    for refused, why in (
        (not half, "float32 activations"),
        (shape.device.type == "cpu", "the interpreter has no tensor cores"),
        (half and on_gpu and not packed_gemv.keeps_subnormals(shape.device, shape.dtype),
         f"the tensor cores of {shape.device} flush subnormal {dtype} numbers"),
        (grouped and (group < 16 or group & (group - 1)),
         f"groups of {group} channels are no power of two of at least 16"),
        (segment % slot != 0,
         f"the inputs of a group of {group} channels do not fit into shared memory"),
        (rest or lane_words not in (1, 2, 4),
         f"a lane would not read 4, 8 or 16 bytes in tiles of {tile.block_n} columns"),
        (smem == "", "its index list or inputs do not fit into shared memory"),
    ):  # fmt: skip
        if refused:
            return why
    row_tiles = triton.cdiv(rows, 8)
    different = max(2, triton.next_power_of_2(min(rows, 8)))  # rows of mma's eight
    packed = PackedConfig(
        listed, slot, x_tiles, lane_words, steps, tile.stages, 8 // different,
        4 * (4 if shape.quant == "int4" else 2) * row_tiles,
        packed_gemv.VALUE_SCALE[dtype], packed_gemv.code_unit(shape.quant, dtype),
        packed_gemv.load_source(lane_words, shape.stride, listed, k % 16 == 0),
        packed_gemv.product_source(shape.quant, dtype, row_tiles),
        packed_gemv.sum_source(dtype) if shape.quant != "fp8" else ("", ""),
    )  # fmt: skip
    # The tile's other fields are in PackedConfig or unused: at their defaults they cause no recompilation.
    bare = GemvTile(tile.block_n, 1, tile.splits, tile.warps, chunk=chunk, trigger=tile.trigger, reducers=tile.reducers)
    return packed, _config(bare, tiles, segment, length, smem)


class Scratch:
    """Scratch memory of a launch. The launches of a stream share one, as they run in order."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.value = torch.empty(0, dtype=dtype, device=device)
        self.partial = self.polled = self.counter = self.index = self.value.to(torch.int32)  # each grows on its own

    def reserve(self, plan: KernelPlan) -> None:
        """Grow to what a launch needs. Not during graph capture: a captured launch keeps the addresses."""
        lists = 0 if plan.launch.smem else plan.programs * plan.launch.length
        for name, pair_size in (
            ("polled" if plan.tile.reducers else "partial", plan.launch.splits * plan.problem.batch * plan.problem.n),
            ("index", lists),
            ("value", plan.problem.batch * lists),
            ("counter", plan.launch.tiles),
        ):
            size = pair_size * plan.pairs
            held = getattr(self, name)
            if held.numel() < size:
                # Each launch resets counters to 0 and polled sums to EMPTY; the others need no initial value.
                setattr(self, name, held.new_full((size,), EMPTY if name == "polled" else 0))

    def workspace(self, plan: KernelPlan) -> Workspace:
        spinning, in_scratch = plan.tile.reducers > 0, plan.launch.smem == ""
        return Workspace(
            self.polled if spinning else self.partial,
            None if spinning else self.counter,
            self.index if in_scratch and plan.kernel is sparse_gemv_kernel else None,
            self.value if in_scratch else None,
        )


def launch_linear(
    linear: FusedLinear, given: Input, output: Output, scratch: Scratch, plan: KernelPlan, *, eps: float = 0.0,
    counting: Counting | None = None,
) -> None:  # fmt: skip
    """Launch a linear, after ``scratch.reserve(plan)``; nothing is checked or allocated. ``eps``: of the RMSNorm;
    ``counting``: count the kept channels (of a linear that is not dense)."""
    weight = linear.weight
    weights = Weights(weight.data, linear.bias, linear.scales, linear.thresholds, weight.scales, weight.zeros)
    ssq_parts, packed = 1 if given.ssq is None else given.ssq.shape[1], () if plan.packed is None else (plan.packed,)
    plan.kernel[(plan.programs,)](
        given, weights, output, scratch.workspace(plan), counting, eps, ssq_parts, plan.problem, plan.launch, *packed,
        num_warps=plan.tile.warps, launch_pdl=plan.problem.pdl and plan.tile.early,
    )  # fmt: skip


def tile_key(gpu: Gpu, shape: LinearShape, kind: str) -> str:
    if shape.quant != "none":
        kind += f":{shape.quant}" + (f"-{shape.group}" if shape.group < shape.in_features else "")
    return f"sm{gpu.arch}:{kind}:{shape.in_features}x{sum(shape.widths)}"


def tuned_key(gpu: Gpu, shape: LinearShape, rows: int) -> str:
    """The key in the local cache, which includes the number of rows and the dtype."""
    key = tile_key(gpu, shape, regime(rows, dense=shape.dense))
    return f"{key}:{rows}:{str(shape.dtype).removeprefix('torch.')}"


@cache
def measured_tiles() -> Mapping[str, GemvTile]:
    table = json.loads(Path(__file__).with_name("tiles.json").read_text("utf-8"))
    return {key: GemvTile(**fields) for key, fields in table.items() if key != "_"}


def choose_tile(gpu: Gpu, shape: LinearShape, rows: int) -> tuple[GemvTile, str]:
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


def mask_gemm_key(gpu: Gpu, in_features: int, out_features: int, rows: int) -> str:
    return f"sm{gpu.arch}:mask{max(4, min(128, triton.next_power_of_2(rows)))}:{in_features}x{out_features}"


def mask_gemm_tile(gpu: Gpu, in_features: int, out_features: int, rows: int) -> GemvTile | None:
    """The tile of ``mask_gemm`` if it was measured to be the fastest for this number of rows, else None."""
    key = mask_gemm_key(gpu, in_features, out_features, rows)
    return tuned_tiles().get(key) or measured_tiles().get(key)


def most_reducers(gpu: Gpu, widths: tuple[int, ...], tile: GemvTile) -> int:
    """The most spinning reducers of a tile such that each has a multiprocessor and each thread a partial sum to
    poll."""
    sums = triton.next_power_of_2(tile.splits) * tile.block_n
    resident = gpu.multiprocessors // count_tiles(widths, tile.block_n)
    most = min(MOST_REDUCERS, tile.splits, resident, sums // (32 * tile.warps))
    return 1 << (most.bit_length() - 1) if most > 0 else 0


def default_tile(gpu: Gpu, shape: LinearShape, kind: str) -> GemvTile:
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
        tile = GemvTile(
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
        tile = GemvTile(block_n, block_k, splits, 8 if block_n >= 128 else 4, stages=stages, unroll=1)
    else:
        # A thread loads 16 bytes, each warp its own row. Wide outputs are launched without overlap: a grid that fills
        # the GPU is distributed unevenly if it starts while another launch's programs are resident.
        block_n = 256 if n >= 512 else 64
        splits = max(1, min((7 if wide else 5) * processors // triton.cdiv(n, block_n), k // 64, 64))
        lead = 2 if kind == "dense" else 0
        return GemvTile(block_n, 512 // block_n, splits, 2, unroll=8, trigger=2, early=not wide, lead=lead)
    # Not for gate and up, where spinning was measured to be slower: few programs reduce many partial sums.
    return tile if wide else replace(tile, reducers=most_reducers(gpu, shape.widths, tile))


def tuned_file() -> Path:
    """Where ``wisparse bench --tune`` keeps tiles: ``$WISPARSE_CACHE`` or the user's cache folder."""
    folder = os.environ.get("WISPARSE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "wisparse")
    return Path(folder).expanduser() / "tiles.json"


def tuned_tiles() -> Mapping[str, GemvTile]:
    path = tuned_file()
    try:
        return {key: GemvTile(**fields) for key, fields in json.loads(path.read_text("utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # Tiles affect speed only, not results.
        log.warning("%s is ignored (%s); `wisparse bench --tune` writes a new one", path, error)
        return {}


def remember_tiles(tiles: Mapping[str, GemvTile]) -> Path:
    """Add tuned tiles to the local cache and clear the plans; returns the file."""
    path = tuned_file()
    merged = {key: asdict(tile) for key, tile in {**tuned_tiles(), **tiles}.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written under a temporary name and renamed: concurrent readers and writers see complete files.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
        file.write(json.dumps(merged, indent=1, sort_keys=True))
    os.replace(file.name, path)
    cached_plan.cache_clear()
    return path
