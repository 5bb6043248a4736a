"""When a launch with weights in codes takes ``packed_kernel``, and what that is compiled for."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from ..lists import room_source
from .layout import GemvTile, Layout
from .matrix import CODE_BITS
from .mma import code_unit, load_source, product_source, sum_source, value_scale

__all__ = ["PackedLists", "packed_chunk", "packed_lists"]


class PackedLists(NamedTuple):
    """What a program keeps of its channels, and how it multiplies them.

    ``segment``, ``length``, ``in_room``: as of ``ProgramLists``. ``listed``: the kept channels stand in a list,
    ``slot`` places of it for each group of scales; else all are read. ``words``: a lane reads so many of a channel.
    ``steps`` of 16 channels are a turn; ``ahead`` turns are on their way. ``copies`` of each row stand among eight.
    ``sums``: of one word, for which ``product`` is the source; ``load`` and ``total`` as in ``mma``, "" if no sum of x
    is needed. ``value_scale``: what x is multiplied by; ``unit``: of the sums.
    """

    segment: int
    length: int
    in_room: str
    listed: bool
    slot: int
    words: int
    steps: int
    ahead: int
    copies: int
    sums: int
    value_scale: float
    unit: float
    load: str
    load_constraints: str
    product: str
    product_constraints: str
    total: str
    total_constraints: str


def packed_chunk(layout: Layout, tile: GemvTile) -> int:
    """Channels that are dealt at a time: whole steps, and whole groups."""
    unit = 16 if layout.group == layout.in_features else layout.group
    return triton.cdiv(tile.chunk, unit) * unit


@lru_cache
def packed_lists(layout: Layout, tile: GemvTile, batch: int) -> PackedLists | None:
    """The lists of a launch's programs; None where the plain kernels do it: interpreted or float32, before generation
    8.0, a group that is no power of two of at least 16, a tile whose warps do not read 4, 8 or 16 bytes a lane, lists
    that are too long."""
    group, k = layout.group, layout.in_features
    grouped = group < k
    words, rest = divmod(tile.block_n * CODE_BITS.get(layout.codes, 0), 32 * 8 * tile.warps)
    if layout.codes == "plain" or layout.dtype == torch.float32 or not _has_tensor_cores(layout.device):
        return None
    if rest or words not in (1, 2, 4) or (grouped and (group < 16 or group & (group - 1))):
        return None
    listed = not layout.dense and batch <= 2
    chunk = packed_chunk(layout, tile)
    channels = triton.cdiv(triton.cdiv(k, chunk), tile.splits) * chunk
    steps = 1
    while 2 * steps <= min(tile.unroll, 4) and (not grouped or 32 * steps <= group):
        steps *= 2
    turn = 16 * steps
    segment = triton.next_power_of_2(max(channels, turn))
    # Rows 32 bytes off a multiple of 128: eight of them side by side meet in no bank. One turn is read ahead.
    length = triton.cdiv(triton.cdiv(channels, turn) * turn + turn - 16, 64) * 64 + 16
    slot = group if grouped else segment
    needed = (4 + 2 * batch) * length + 4 * (segment // slot) if listed else 2 * batch * length
    in_room = room_source(needed)
    if in_room == "":
        return None
    dtype = str(layout.dtype).removeprefix("torch.")
    parts = triton.cdiv(batch, 8)
    different = max(2, triton.next_power_of_2(min(batch, 8)))
    sums = 4 * (4 if layout.codes == "int4" else 2) * parts
    total = sum_source(dtype) if layout.codes != "fp8" else ("", "")
    return PackedLists(
        segment, length, in_room, listed, slot, words, steps, tile.stages, 8 // different, sums,
        value_scale(dtype), code_unit(layout.codes, dtype),
        *load_source(words, layout.stride, listed, k % 16 == 0), *product_source(layout.codes, dtype, parts), *total,
    )  # fmt: skip


def _has_tensor_cores(device: torch.device) -> bool:
    """Those that the products' instructions need. ``meta`` stands for a GPU: kernels are compiled without one."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "meta"
