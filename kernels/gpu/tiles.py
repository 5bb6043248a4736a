"""Which tile a launch gets: a small measured table, a local cache that ``wisparse bench --tune`` refreshes, a rule of
thumb.

Nothing is tuned while a model loads. Keys are ``sm<arch>:<kind>:<K>x<N>``, the kind being ``launch_kind``'s and N the
sum of the widths; weights in codes put theirs after it, with the group unless it is all channels (``sparse:int4-128``).
In the local cache the launch's rows and the weights' type follow; values are GemvTile's fields.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton

from .common import ROOM_LIMIT_BESIDE
from .gemv import GemvTile, count_tiles
from .matrix import CODE_BITS

log = logging.getLogger(__name__)

# Measured on an H200 in whole steps, at 50%, at 0%, for 2 rows (rows) and for 8 (batch) at 50%: Llama-3.1-8B's
# and Mistral-7B's shapes; Qwen2.5-7B's at 50%.
TABLE: Mapping[str, GemvTile] = {
    "sm90:sparse:4096x6144": GemvTile(256, 4, 16, 4, chunk=32, unroll=8, trigger=2, pollers=4),
    "sm90:sparse:4096x4096": GemvTile(256, 4, 20, 4, chunk=32, unroll=8, trigger=2, pollers=8),
    "sm90:sparse:4096x28672": GemvTile(256, 2, 9, 2, chunk=32, unroll=8, trigger=2, early=False),
    "sm90:sparse:14336x4096": GemvTile(256, 4, 32, 4, chunk=32, unroll=8, trigger=2, pollers=8),
    "sm90:dense:4096x6144": GemvTile(256, 4, 22, 4, chunk=32, unroll=8, trigger=2, lead=2, pollers=4),
    "sm90:dense:4096x4096": GemvTile(256, 2, 32, 2, chunk=32, unroll=8, trigger=2, lead=2, pollers=8),
    "sm90:dense:4096x28672": GemvTile(256, 2, 9, 2, chunk=32, unroll=8, trigger=2, early=False, lead=2),
    "sm90:dense:14336x4096": GemvTile(256, 4, 24, 4, chunk=32, unroll=8, trigger=2, lead=3, pollers=8),
    "sm90:rows:4096x6144": GemvTile(256, 4, 16, 4, chunk=32, unroll=6, trigger=2, pollers=4),
    "sm90:rows:4096x4096": GemvTile(256, 4, 16, 4, chunk=32, unroll=8, trigger=2, pollers=8),
    "sm90:rows:4096x28672": GemvTile(256, 2, 9, 2, chunk=32, unroll=6, trigger=2, early=False),
    "sm90:rows:14336x4096": GemvTile(256, 4, 32, 4, chunk=32, unroll=6, trigger=2, pollers=8),
    "sm90:sparse:3584x4608": GemvTile(256, 4, 16, 4, chunk=32, unroll=8, trigger=2, pollers=4),
    "sm90:sparse:3584x3584": GemvTile(256, 4, 20, 4, chunk=64, unroll=8, trigger=2, pollers=8),
    "sm90:sparse:3584x37888": GemvTile(256, 2, 7, 2, chunk=64, unroll=8, trigger=2, early=False),
    "sm90:sparse:18944x3584": GemvTile(256, 4, 24, 4, chunk=32, unroll=8, trigger=2, pollers=4),
    "sm90:batch:4096x6144": GemvTile(128, 64, 2, 4, stages=6, unroll=1, pollers=2),
    "sm90:batch:4096x4096": GemvTile(128, 64, 4, 8, stages=8, unroll=1, pollers=2),
    "sm90:batch:4096x28672": GemvTile(512, 16, 2, 8, stages=6, unroll=1),
    "sm90:batch:14336x4096": GemvTile(256, 64, 8, 8, stages=5, unroll=1, pollers=8),
    "sm90:dense:int4-128:4096x6144": GemvTile(256, 1, 32, 2, chunk=128, unroll=4, trigger=2, pollers=4),
    "sm90:dense:int4-128:4096x4096": GemvTile(256, 1, 32, 2, chunk=128, unroll=4, trigger=1, pollers=8),
    "sm90:dense:int4-128:4096x28672": GemvTile(256, 1, 8, 2, chunk=128, unroll=2, trigger=1),
    "sm90:dense:int4-128:14336x4096": GemvTile(256, 1, 56, 2, chunk=128, unroll=4, trigger=2, pollers=8),
    "sm90:sparse:int4-128:4096x6144": GemvTile(256, 1, 32, 2, chunk=128, unroll=2, trigger=2, pollers=4),
    "sm90:sparse:int4-128:4096x4096": GemvTile(256, 1, 32, 2, chunk=128, unroll=2, trigger=1, pollers=8),
    "sm90:sparse:int4-128:4096x28672": GemvTile(256, 1, 8, 2, chunk=128, unroll=2, trigger=2, early=False),
    "sm90:sparse:int4-128:14336x4096": GemvTile(256, 1, 56, 2, chunk=128, unroll=2, trigger=2, pollers=8),
    "sm90:dense:int8:4096x6144": GemvTile(128, 1, 22, 2, chunk=64, unroll=4, trigger=1, pollers=2),
    "sm90:dense:int8:4096x4096": GemvTile(256, 1, 32, 2, chunk=64, unroll=4, trigger=2, pollers=8),
    "sm90:dense:int8:4096x28672": GemvTile(256, 1, 8, 2, 2, chunk=64, unroll=2, trigger=2, early=False),
    "sm90:dense:int8:14336x4096": GemvTile(256, 1, 32, 2, chunk=64, unroll=4, trigger=1, pollers=8),
    "sm90:sparse:int8:4096x6144": GemvTile(256, 1, 22, 2, chunk=64, unroll=4, trigger=2, pollers=4),
    "sm90:sparse:int8:4096x4096": GemvTile(128, 1, 32, 2, 2, chunk=64, unroll=2, trigger=2, pollers=4),
    "sm90:sparse:int8:4096x28672": GemvTile(256, 1, 3, 4, chunk=64, unroll=4, trigger=2, early=False),
    "sm90:sparse:int8:14336x4096": GemvTile(256, 1, 32, 2, chunk=64, unroll=4, trigger=1, pollers=8),
    "sm90:dense:fp8:4096x6144": GemvTile(128, 1, 22, 2, chunk=64, unroll=4, trigger=2, pollers=2),
    "sm90:dense:fp8:4096x4096": GemvTile(128, 1, 32, 2, chunk=64, unroll=4, trigger=1, pollers=4),
    "sm90:dense:fp8:4096x28672": GemvTile(256, 1, 8, 2, 2, chunk=64, unroll=2, trigger=2, early=False),
    "sm90:dense:fp8:14336x4096": GemvTile(256, 1, 32, 2, chunk=64, unroll=4, trigger=2, pollers=8),
    "sm90:sparse:fp8:4096x6144": GemvTile(256, 1, 22, 2, chunk=64, unroll=4, trigger=2, pollers=4),
    "sm90:sparse:fp8:4096x4096": GemvTile(128, 1, 32, 2, 2, chunk=64, unroll=2, trigger=2, pollers=4),
    "sm90:sparse:fp8:4096x28672": GemvTile(128, 1, 3, 2, chunk=64, unroll=4, trigger=2, early=False),
    "sm90:sparse:fp8:14336x4096": GemvTile(256, 1, 32, 2, chunk=64, unroll=4, trigger=1, pollers=8),
    "sm90:batch:int4-128:4096x6144": GemvTile(256, 1, 16, 4, chunk=128, unroll=4, trigger=2, pollers=4),
    "sm90:batch:int4-128:4096x4096": GemvTile(256, 1, 16, 4, chunk=128, unroll=2, trigger=1, pollers=8),
    "sm90:batch:int4-128:4096x28672": GemvTile(512, 1, 8, 4, chunk=128, unroll=4, trigger=2, early=False),
    "sm90:batch:int4-128:14336x4096": GemvTile(256, 1, 16, 4, chunk=128, unroll=4, trigger=2, early=False, pollers=8),
    # Launches of mask_gemm alone, where they were faster than what else there is for so many rows.
    "sm90:mask16:4096x6144": GemvTile(64, 128, 1, 4, stages=4, unroll=1),
    **{f"sm90:mask{rows}:4096x28672": GemvTile(256, 64, 1, 8, stages=4, unroll=1) for rows in (4, 8, 16, 32, 64)},
}
# More than this for each tile cost more than they save.
MOST_POLLERS = 8
# Generations whose multiprocessors have 160 KiB and more of shared memory.
ROOMY = (80, 90, 100)


def tile_key(
    arch: int, in_features: int, out_features: int, kind: str, codes: str = "plain", group: int | None = None
) -> str:
    """The key of a launch in the table; ``codes`` and ``group`` as a ``Matrix`` has them."""
    if codes != "plain":
        kind += f":{codes}" + (f"-{group}" if group and group < in_features else "")
    return f"sm{arch}:{kind}:{in_features}x{out_features}"


def local_key(
    arch: int,
    in_features: int,
    out_features: int,
    kind: str,
    rows: int,
    dtype: torch.dtype,
    codes: str = "plain",
    group: int | None = None,
) -> str:
    """The key of a launch in the local cache: a tile is for the rows and the weights' type it was measured with."""
    key = tile_key(arch, in_features, out_features, kind, codes, group)
    return f"{key}:{rows}:{str(dtype).removeprefix('torch.')}"


def cache_file() -> Path:
    """Where locally measured tiles are kept: ``$WISPARSE_CACHE`` or the user's cache folder."""
    folder = os.environ.get("WISPARSE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "wisparse")
    return Path(folder).expanduser() / "tiles.json"


def default_tile(
    multiprocessors: int,
    in_features: int,
    widths: tuple[int, ...],
    kind: str = "sparse",
    arch: int = 90,
    codes: str = "plain",
    group: int | None = None,
) -> GemvTile:
    """A tile for a shape nobody measured: five to seven programs for each multiprocessor, segments of at least 64
    channels, no pollers; for many rows one program for each multiprocessor at most."""
    if codes != "plain":
        return _default_coded_tile(multiprocessors, in_features, widths, kind, codes, group or in_features)
    if kind == "batch":
        return _default_batch_tile(multiprocessors, in_features, widths, arch)
    out_features = sum(widths)
    # Every thread's load is 16 bytes, each warp reads its own row. Wide outputs start late: a launch that fills the
    # chip is spread unevenly if it starts among another's programs.
    block_n = 256 if out_features >= 512 else 64
    wide = out_features >= 16384
    splits = (7 if wide else 5) * multiprocessors // triton.cdiv(out_features, block_n)
    splits = max(1, min(splits, in_features // 64, 64))
    lead = 2 if kind == "dense" else 0
    return GemvTile(block_n, 512 // block_n, splits, 2, unroll=8, trigger=2, early=not wide, lead=lead)


def _default_batch_tile(multiprocessors: int, in_features: int, widths: tuple[int, ...], arch: int) -> GemvTile:
    """The narrowest of a few widths whose programs, one for each multiprocessor at most, leave few of them idle."""
    out_features = sum(widths)
    wide = out_features >= 16384
    # Pieces of 16 KiB, of 32 KiB for the widest.
    pieces = [(64, 32)] if out_features < 2048 else [(128, 64), (256, 32), (512, 16)]
    if wide and arch in ROOMY:
        pieces.append((1024, 16))
    found = []
    for block_n, block_k in pieces:
        tiles = triton.cdiv(out_features, block_n)
        splits = max(1, min(multiprocessors // tiles, in_features // 64, 16))
        busy = tiles * splits / triton.cdiv(tiles * splits, multiprocessors)
        # Eight rows' inputs have to fit in shared memory beside the weights.
        if triton.cdiv(in_features, splits) * 8 * 2 > ROOM_LIMIT_BESIDE:
            busy /= multiprocessors
        found.append((block_n, block_k, splits, busy))
    most = max(busy for *_, busy in found)
    block_n, block_k, splits, _ = next(piece for piece in found if piece[3] >= 0.85 * most)
    warps = 8 if block_n >= 128 else 4
    # Those of gate and up cost more than they save: fewer programs add up more.
    pollers = 0 if wide else most_pollers(multiprocessors, widths, block_n, splits, warps)
    stages = 4 if arch not in ROOMY or block_n == 1024 else 6
    return GemvTile(block_n, block_k, splits, warps, stages=stages, unroll=1, pollers=pollers)


def _default_coded_tile(
    multiprocessors: int, in_features: int, widths: tuple[int, ...], kind: str, codes: str, group: int
) -> GemvTile:
    """A lane reads 8 bytes of each channel, in programs of two warps, seven for each multiprocessor; of four warps,
    three for each, where all channels share a scale, as no group bounds what a program chooses from. For many rows
    of four warps, two for each, and 4 bytes, so that the lists and sums are short."""
    out_features = sum(widths)
    wide = out_features >= 16384
    many = kind == "batch"
    warps, each = (4, 2) if many else (2, 7) if group < in_features else (4, 3)
    words = 1 if out_features <= 1024 or (many and not wide) else 2
    block_n = words * 256 * warps // CODE_BITS[codes]
    unit = group if group < in_features else 64
    chunks = triton.cdiv(in_features, unit)
    # The lists of many rows have to fit in shared memory.
    splits = max(1, triton.cdiv(in_features, 1024), each * multiprocessors // count_tiles(widths, block_n))
    # Every split as many chunks as any other, or one less.
    splits = triton.cdiv(chunks, triton.cdiv(chunks, min(splits, chunks, 64)))
    pollers = 0 if wide else most_pollers(multiprocessors, widths, block_n, splits, warps)
    # Where a group ends, so does a step of unroll times 16 channels, however few are left.
    unroll = 2 if many or group < in_features else 4
    return GemvTile(
        block_n, 16, splits, warps, chunk=unit, unroll=unroll, trigger=2, early=not wide or not many, pollers=pollers
    )  # fmt: skip


def most_pollers(multiprocessors: int, widths: tuple[int, ...], block_n: int, splits: int, warps: int) -> int:
    """Up to eight for each tile of projections so wide, as long as every one of them could have a multiprocessor of its
    own, and a sum to look at for every thread; 0 if not even one could."""
    sums = triton.next_power_of_2(splits) * block_n
    most = min(MOST_POLLERS, splits, multiprocessors // count_tiles(widths, block_n), sums // (32 * warps))
    return 1 << (most.bit_length() - 1) if most > 0 else 0


def choose_tile(
    arch: int,
    multiprocessors: int,
    in_features: int,
    widths: tuple[int, ...],
    kind: str = "sparse",
    rows: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    codes: str = "plain",
    group: int | None = None,
) -> GemvTile:
    """The tile of a launch: local measurements first, then the table, then the rule of thumb. Never with more pollers
    than there is room for."""
    tile = measured_tile(arch, in_features, sum(widths), kind, rows, dtype, codes, group)
    if tile is None:
        return default_tile(multiprocessors, in_features, widths, kind, arch, codes, group)
    most = most_pollers(multiprocessors, widths, tile.block_n, tile.splits, tile.warps)
    return tile if tile.pollers <= most else replace(tile, pollers=most)


def measured_tile(
    arch: int,
    in_features: int,
    out_features: int,
    kind: str,
    rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    codes: str = "plain",
    group: int | None = None,
) -> GemvTile | None:
    """The tile that somebody measured for such a launch, here or for the table; ``rows`` None for a kind of launch
    whose tiles do not depend on them."""
    key = tile_key(arch, in_features, out_features, kind, codes, group)
    local = key if rows is None else local_key(arch, in_features, out_features, kind, rows, dtype, codes, group)
    return _remembered().get(local) or TABLE.get(key)


def remember_tiles(tiles: Mapping[str, GemvTile]) -> Path:
    """Add measured tiles to the local cache; returns the file."""
    path = cache_file()
    merged = {key: asdict(tile) for key, tile in {**_remembered(), **tiles}.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(merged, indent=1, sort_keys=True), "utf-8")
    partial.replace(path)
    return path


def _remembered() -> dict[str, GemvTile]:
    path = cache_file()
    try:
        return {key: GemvTile(**fields) for key, fields in json.loads(path.read_text("utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # A cache that cannot be read costs speed, not correctness.
        log.warning("%s is ignored (%s); `wisparse bench --tune` writes a new one", path, error)
        return {}
