"""Which product computes a linear: ``choose_product`` decides, for every caller. ``launch`` launches it.

A decode step of up to 16 rows computes a linear in one launch, with its ends (``common.Input``, ``common.Output``):

    input (x, RMSNorm of the residual stream, or attention's splits) -> product of the kept channels
    -> bias, activation or residual

    place     rows     weights                        product
    step      1        unquantized                    sparse_gemv, the kept channels
              2        unquantized, masked            sparse_gemv, the channels that either row keeps
              2 - 16   unquantized                    fused_gemm, all channels
              1 - 16   int4, int8, fp8                packed_gemv; one or two masked rows read the kept channels only
                       codes it does not take         sparse_gemv or fused_gemm, as if unquantized
              1 - 16   of experts                     expert_gemv: sparse_gemv or packed_gemv of each chosen expert
    rows      9 - 32   unquantized                    gemm with a mask where that was measured to be faster, else cuBLAS
              17 - 32  codes                          packed_gemv, else gemm
    prompt    any      unquantized                    cuBLAS
              - 128    codes                          gemm
              129 -    codes                          cuBLAS after ``widen``
              any      of experts                     expert_gemm
    plugin    3 - 128  unquantized                    gemm with a mask where that was measured to be faster
    (vLLM)    1 - 8    unquantized                    as a step without ends; each row has a mask or none
              9 -      unquantized                    cuBLAS
              any      codes                          as a step without ends, from 17 rows on as rows, from 33 a prompt

Where a product does not mask, masked inputs are copies of x, one for each projection (``gemm.mask_rows``), unless the
launch before has masked them (``ready``). The boundaries are measured on an H200 (benchmarks/LOG.md).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from . import packed_gemv, tiles
from .common import LaunchConfig, Problem
from .packed_gemv import PackedConfig
from .tiles import SMEM_LIMIT_GEMM, Gpu, Tile, count_tiles, regime
from .weights import BITS, LinearShape

PLUGIN_ROWS = 8  # of vLLM: with more, masked copies of x are faster than one launch that masks them
MASKED_ROWS = 128  # one tile of ``gemm`` holds all rows of x
# Up to this many rows of a prompt ``gemm`` takes codes. ``widen`` and cuBLAS are as fast from 256 rows on and take 1.9
# times as long with 128 (H100, 8B shape).
_CODE_ROWS = 128
_BATCHED_ROWS = 512  # projections of unlike widths share one batched product: narrow ones alone do not fill a GPU
_MOST_BATCHED = 16  # products of a bmm in a step
_EXCLUSIVE = 64 * 1024  # bytes of weights in flight from which fused_gemm runs one program on a multiprocessor
# Bytes of static shared memory that a kernel may declare in addition to Triton's own. A launch has at most 48 KiB in
# all unless the driver is asked for more, which Triton does if its own part exceeds that; the static part is limited to
# 48 KiB in any case.
SMEM_LIMIT = 36 * 1024


def smem_source(num_bytes: int, limit: int = SMEM_LIMIT) -> str:
    """PTX that declares static shared memory and returns its address; "" if ``num_bytes`` exceeds ``limit``."""
    if num_bytes > limit:
        return ""
    return f"{{ .shared .align 16 .b8 smem[{num_bytes}]; mov.u32 $0, smem; }}"


@dataclass(frozen=True)
class Product:
    """How a linear is computed for a number of rows."""

    kernel: str  # "sparse_gemv", "fused_gemm", "packed_gemv", "gemm", "expert_gemm" or "cuBLAS"
    shape: LinearShape
    rows: int
    tile: Tile | None = None  # None: cuBLAS
    origin: str = ""  # of the tile: "given", "tuned here", "measured (tiles.json)" or "heuristic"
    why_not_packed: str = ""  # why packed_gemv does not take quantized weights
    masks: bool = False  # the product sets dropped channels to zero; else its input comes masked, or nothing is dropped
    copies: tuple[int, ...] = ()  # of x, masked, of each projection, which a launch before the product makes
    batched: bool = False  # cuBLAS: one batched product, of equal pieces of the projections
    pdl: bool = False
    # Compile-time constants of the first three kernels, with a linear's ends.
    problem: Problem | None = None
    launch: LaunchConfig | None = None
    packed: PackedConfig | None = None
    pairs: int = 1  # (row, chosen expert) pairs, the grid's second dimension

    @property
    def fused(self) -> bool:
        """Whether the linear's ends are in the launch."""
        return self.launch is not None

    @property
    def programs(self) -> int:
        return 0 if self.launch is None else self.launch.tiles * self.launch.splits

    @property
    def ssq_parts(self) -> int:
        """Columns of ``Output.ssq``."""
        return 1 if self.launch is None else self.launch.tiles * max(1, self.launch.reducers)

    def __str__(self) -> str:
        shape, tile, rows = self.shape, self.tile, self.rows
        quant = f"{shape.quant}-{shape.group}" if 0 < shape.group < shape.in_features else shape.quant
        quant = str(shape.dtype).removeprefix("torch.") if quant == "none" else quant
        text = f"{quant}, {shape.in_features} x {'+'.join(map(str, shape.widths))}, {rows} row{'s'[: rows != 1]}"
        if self.launch is None or tile is None:
            masks = ", masks x" if self.masks else f", {sum(self.copies)} masked copies of x" if self.copies else ""
            return f"{self.kernel}, {text}{masks}"
        adds = f"{tile.reducers} spinning reducers a tile" if tile.reducers else "last program of a tile adds up"
        return (
            f"{self.kernel} ({regime(rows, dense=shape.dense)}), {text}: "
            f"{self.launch.tiles} tiles of {tile.block_n} columns x {tile.splits} splits = {self.programs} programs of "
            f"{tile.warps} warps; {adds}; tile: {self.origin}"
            + (f"; not packed_gemv: {self.why_not_packed}" if self.why_not_packed else "")
        )


def choose_product(shape: LinearShape, rows: int, place: str = "step", **options: Any) -> Product:
    """The product of ``rows`` rows at a place of the table above. ``options``, of `choose`: ``ready``: the input comes
    masked; ``tile`` in place of the chosen one; ``gpu``: None: that of the weights; in a step what its ends are: ``output``,
    ``ssq_parts``, ``clamp`` as in ``Problem``, ``kv_splits`` and ``head_dim``. Reads WISPARSE_SPINNING."""
    return choose(shape, rows, place, spinning=os.environ.get("WISPARSE_SPINNING") != "0", **options)


@cache
def choose(
    shape: LinearShape, rows: int, place: str, *, spinning: bool, ready: bool = False, gpu: Gpu | None = None,
    tile: Tile | None = None, **ends: Any,
) -> Product:  # fmt: skip
    """`choose_product`, cached; ``spinning``: False: no reducers wait."""
    gpu = gpu or tiles.gpu_of(shape.device)
    if place == "plugin" and shape.quant != "none":
        place = "step" if rows <= 16 else "rows" if rows <= 32 else "prompt"
    fused = place == "step"
    if place == "plugin":
        tile = None if ready or not 2 < rows <= MASKED_ROWS else tiles.masked_gemm_tile(shape, rows, gpu)
        if tile is not None:
            return Product("gemm", shape, rows, tile, "measured", masks=True)
        fused = rows <= (2 if ready else PLUGIN_ROWS)
    elif ready:
        shape = shape._replace(dense=True)
    if shape.experts and not fused:
        return Product("expert_gemm", shape, rows, tiles.expert_gemm_tile(shape, rows, gpu))
    if fused or (place == "rows" and shape.quant != "none"):
        product = fused_product(gpu, shape, rows, tile, spinning=spinning, **ends)
        if fused or product.packed is not None:
            return product
    dense, widths = shape.dense or ready, shape.widths
    copies = () if dense else (1,) * len(widths)
    if shape.quant != "none":
        tile = tiles.gemm_tile(shape, rows, gpu) if rows <= _CODE_ROWS and shape.dtype != torch.float32 else None
        return Product("cuBLAS" if tile is None else "gemm", shape, rows, tile, "heuristic", copies=copies)
    if place == "rows" and not dense and shape.dtype != torch.float32:
        tile = tiles.masked_gemm_tile(shape, rows, gpu)
        if tile is not None:
            return Product("gemm", shape, rows, tile, "measured", masks=True)
    # Projections of unequal widths as one bmm of equal column blocks: 19 instead of 31 us for 8B's qkv.
    pieces = tuple(width // math.gcd(*widths) for width in widths)
    few = len(set(pieces)) > 1 and rows <= _BATCHED_ROWS if place == "plugin" else 2 < sum(pieces) <= _MOST_BATCHED
    batched = few and not dense
    pdl = place == "plugin" and gpu.arch >= 90
    return Product("cuBLAS", shape, rows, copies=pieces if batched else copies, batched=batched, pdl=pdl)


def fused_product(
    gpu: Gpu, shape: LinearShape, rows: int, tile: Tile | None = None, *, spinning: bool = True, output: str = "plain",
    kv_splits: int = 1, head_dim: int = 1, ssq_parts: int = 1, pdl: bool | None = None,
    clamp: tuple[float, float] = (0.0, 0.0),
) -> Product:  # fmt: skip
    """A product with a linear's ends in its launch, for 1 to 32 rows: packed_gemv if it takes the weights, else
    sparse_gemv, or fused_gemm for more rows than share the kept channels."""
    pairs, experts, origin = 1, 0, "given"
    if shape.experts:  # the programs of a row and a chosen expert compute a one-row product
        pairs, experts = rows * shape.chosen, shape.chosen if output in ("residual", "plain") else 0
        rows = 1
        if tile is None:
            tile = tiles.expert_tile(gpu, shape, pairs, experts)
    if tile is None:
        tile, origin = tiles.choose_tile(gpu, shape, rows)
    if not spinning:
        tile = replace(tile, reducers=0)
    waiting = tile.reducers * count_tiles(shape.widths, tile.block_n) * pairs // max(1, experts)
    if tile.reducers > 1 and waiting > gpu.multiprocessors:
        raise ValueError(
            f"expected at most {gpu.multiprocessors} programs that wait for each other on {shape.device}, found "
            f"{waiting}: {tile.reducers} spinning reducers for each tile of {tile}; use fewer reducers"
        )
    many = regime(rows, dense=shape.dense) in ("batch", "wide")
    if many and shape.dtype == torch.float32:
        tile = replace(tile, stages=max(1, tile.stages // 2))  # an element has twice the bytes
    packed, why_not, launch = None, "", None
    if shape.quant != "none":
        packed, launch, why_not = _packed_launch(shape, tile, rows)
    if launch is None:
        launch = (_gemm_launch if many else _gemv_launch)(shape, tile, rows)
    # Splits that the epilogue loads at a time. Spinning reducers and many rows keep their partial sums in registers: at
    # most 32 of them in a thread.
    padded_splits = triton.next_power_of_2(tile.splits * max(1, experts))
    reduce_splits = min(padded_splits, 32)
    if tile.reducers or many:
        results = 1 if output in ("plain", "residual", "relu2") else 2
        columns = tile.block_n // max(1, tile.reducers) * triton.next_power_of_2(rows) * results
        fitting = 1 << (max(1, 32 * 32 * tile.warps // columns).bit_length() - 1)
        reduce_splits = min(padded_splits, fitting)
    problem = shape.problem(
        batch=rows, kv_splits=kv_splits, head_dim=head_dim, output=output, experts=experts, clamp=clamp,
        # Rounded up, so that one compiled kernel serves most tiles of the linear that wrote the partial sums.
        ssq_pad=max(32, triton.next_power_of_2(ssq_parts)), pdl=gpu.arch >= 90 if pdl is None else pdl,
    )  # fmt: skip
    return Product(
        "packed_gemv" if packed else "fused_gemm" if many else "sparse_gemv", shape, rows, tile, origin, why_not,
        not shape.dense, problem=problem, launch=launch._replace(reduce_splits=reduce_splits), packed=packed, pairs=pairs,
    )  # fmt: skip


def _config(shape: LinearShape, tile: Tile, segment: int, length: int, smem: str, **changes: int) -> LaunchConfig:
    of_launch = ("early", "block_m", "registers")
    fields = {name: value for name, value in asdict(tile).items() if name not in of_launch} | changes
    grid = count_tiles(shape.widths, tile.block_n)
    return LaunchConfig(tiles=grid, segment=segment, length=length, smem=smem, reduce_splits=0, **fields)


def _in_shared(shape: LinearShape) -> bool:
    """Whether lists and inputs are in shared memory: in scratch memory for the interpreter, which runs no PTX, and for
    float32, a reference only."""
    return shape.device.type != "cpu" and shape.dtype != torch.float32


def _gemv_launch(shape: LinearShape, tile: Tile, rows: int) -> LaunchConfig:
    """Of ``sparse_gemv_kernel``."""
    k, step = shape.in_features, tile.unroll * tile.block_k
    segment = triton.next_power_of_2(max(triton.cdiv(triton.cdiv(k, tile.chunk), tile.splits) * tile.chunk, 16))
    # Prefetching reads up to three steps beyond the last entry; the final entry holds the list's length.
    length = segment + 3 * step + 1
    reduced = tile.block_k * tile.block_n if tile.block_k > 1 else 0  # accumulators, reduced over block_k
    smem = smem_source(4 * ((1 + rows) * length + reduced)) if _in_shared(shape) else ""
    return _config(shape, tile, segment, length, smem, lead=min(tile.lead, segment // step) if shape.dense else 0)


def _gemm_launch(shape: LinearShape, tile: Tile, rows: int) -> LaunchConfig:
    """Of ``fused_gemm_kernel``."""
    block_k, size = max(16, tile.block_k), shape.dtype.itemsize  # 16: tl.dot's smallest K
    channels = triton.cdiv(triton.cdiv(shape.in_features, block_k), tile.splits) * block_k
    length = channels + 8  # 16 bytes of padding for each row of x: loads of eight rows have no bank conflicts
    in_flight = (tile.stages - 1) * block_k * tile.block_n * size
    limit = SMEM_LIMIT_GEMM - (0 if in_flight >= 48 * 1024 else in_flight + 2048)
    needed = rows * length * size
    # Two programs on one multiprocessor while another is idle make the launch up to 1.5 times as long. A program with
    # many bytes in flight therefore declares so much shared memory that no second one fits beside it.
    exclusive = needed <= limit and in_flight >= _EXCLUSIVE
    smem = smem_source(limit if exclusive else needed, limit) if _in_shared(shape) else ""
    return _config(shape, tile, triton.next_power_of_2(channels), length, smem, block_k=block_k)


def _packed_launch(shape: LinearShape, tile: Tile, rows: int) -> tuple[PackedConfig | None, LaunchConfig | None, str]:
    """Of ``packed_gemv_kernel``; or the reason why the weights go to a kernel that dequantizes them."""
    group, k, dtype = shape.group, shape.in_features, str(shape.dtype).removeprefix("torch.")
    grouped = group < k
    lane_words, rest = divmod(tile.block_n * BITS[shape.quant], 32 * 8 * tile.warps)
    multiple = group if grouped else 16  # chunks are whole groups, or whole mma steps
    chunk = triton.cdiv(tile.chunk, multiple) * multiple
    channels = triton.cdiv(triton.cdiv(k, chunk), tile.splits) * chunk
    steps = 1
    while 2 * steps <= min(tile.unroll, 4 if rows <= 16 else 8) and (not grouped or 32 * steps <= group):
        steps *= 2
    block_k = 16 * steps
    segment = triton.next_power_of_2(max(channels, block_k))
    # Prefetching reads one stage beyond the last entry. Rows of x are 32 bytes more than a multiple of 128 apart: loads
    # of eight rows have no bank conflicts.
    length = triton.cdiv(triton.cdiv(channels, block_k) * block_k + block_k - 16, 64) * 64 + 16
    listed, x_tiles = not shape.dense and rows <= 2, 1
    # Triton's own part, to reduce the splits of up to eight rows at a time (of more than 16 rows the last program adds
    # one split at a time); of 48 KiB, less what it aligns.
    alone = rows > 16 and tile.reducers == 0
    reducing = 512 * tile.warps * (2 if alone else min(8, triton.next_power_of_2(rows)))
    limit = min(SMEM_LIMIT, 47 * 1024 - reducing)
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
            return None, None, why
    row_tiles = triton.cdiv(rows, 8)
    # With many rows two sets of accumulators would take too many registers.
    scaled = rows > 16 and shape.quant == "int4" and grouped and not shape.zeros and dtype == "bfloat16"
    factor, unit = packed_gemv.VALUE_SCALE[dtype], packed_gemv.code_unit(shape.quant, dtype)
    if scaled:
        factor, unit = 1.0, packed_gemv.SCALED_UNIT
    different = max(2, triton.next_power_of_2(min(rows, 8)))  # rows of mma's eight
    each, replicas, none = (8 if shape.quant == "int4" else 4), 8 // different, ("", "")
    load = packed_gemv.load_source(lane_words, shape.stride, listed, k % 16 == 0)
    product = packed_gemv.product_source(shape.quant, dtype, row_tiles, scaled)
    total = packed_gemv.sum_source(dtype) if shape.quant != "fp8" and not scaled else none
    scale, stages = packed_gemv.scale_source() if scaled else none, tile.stages if rows <= 16 else 1
    sizes = lane_words, steps, stages, replicas, 2 * each * row_tiles, lane_words * each // replicas
    packed = PackedConfig(listed, slot, x_tiles, *sizes, factor, unit, load, product, total, scale)
    # The tile's other fields are in PackedConfig or unused: at their defaults they cause no recompilation.
    bare = Tile(tile.block_n, 1, tile.splits, tile.warps, chunk=chunk, trigger=tile.trigger, reducers=tile.reducers)
    return packed, _config(shape, bare, segment, length, smem), ""


def remember_tiles(found: Mapping[str, Tile]) -> Path:
    """Add tuned tiles to the local cache and clear the products; returns the file."""
    path = tiles.tuned_file()
    tiles.read_tiles.cache_clear()  # other processes may have added some
    merged = {key: asdict(tile) for key, tile in {**tiles.tuned_tiles(), **found}.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written under a temporary name and renamed: concurrent readers and writers see complete files.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
        file.write(json.dumps(merged, indent=1, sort_keys=True))
    os.replace(file.name, path)
    tiles.read_tiles.cache_clear()
    choose.cache_clear()
    return path
