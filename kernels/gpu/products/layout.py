"""What a launch of a product is cut by, and what it has to know of the weights' layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import triton

__all__ = ["GemvTile", "Layout", "count_tiles"]


@dataclass(frozen=True)
class GemvTile:
    """How a launch is cut: ``splits`` segments of channels times tiles of ``block_n`` columns.

    A program of ``warps`` warps reads ``unroll`` times ``block_k`` rows at a time. Channels are dealt to the splits
    ``chunk`` at a time. With programmatic dependent launch, ``early`` lets the launch begin before the one before it
    has ended, and ``trigger`` says when it lets the next one begin: 1 at its start, 2 after its product. ``lead`` times
    ``unroll * block_k`` rows are read before the channels are selected, and multiplied by zero if they were to be
    dropped. For the tensor cores ``block_k`` channels are read and dealt at a time, ``stages - 1`` times that many are
    on their way before the channels are selected, and ``chunk``, ``unroll``, ``trigger`` and ``lead`` mean nothing. Of
    weights in codes a warp reads ``unroll`` times 16 channels at a time, ``stages`` times that many are on their way,
    and ``block_k`` and ``lead`` mean nothing.

    Partial sums are added by the program of a tile that arrives last, or by ``pollers`` (a power of two) of its last
    splits, which wait for all others. One waits for programs that began before it. Several wait for each other too, so
    those of all tiles must have places on the GPU at once: one for each multiprocessor there always is.
    ``choose_tile`` gives no more, and ``launch_gemv`` takes no more.

    Raises:
        ValueError: ``pollers`` is no power of two, or larger than ``splits``; or two threads would look at one sum:
            they may not see the same, and the program would take what only one of them has seen.
    """

    block_n: int = 512
    block_k: int = 2
    splits: int = 8
    warps: int = 4
    stages: int = 1
    chunk: int = 8
    unroll: int = 4
    trigger: int = 1
    early: bool = True
    lead: int = 0
    pollers: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("lead", "pollers", "early") else 1
            if not isinstance(value, bool if name == "early" else int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, found {value!r}")
        for name in ("block_n", "block_k", "warps"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, found {value}")
        if not 0 <= self.pollers <= self.splits or self.pollers & (self.pollers - 1):
            raise ValueError(
                f"expected pollers to be 0 or a power of two up to splits ({self.splits}), found {self.pollers}"
            )
        if self.pollers and triton.next_power_of_2(self.splits) * self.block_n // self.pollers < 32 * self.warps:
            raise ValueError(f"expected a sum to look at for every thread of a poller, found {self}")

    def parts(self, width: int) -> int:
        """Columns of ``ssq_out``: partial sums of squares that a launch with ``width`` outputs leaves."""
        return triton.cdiv(width, self.block_n) * max(1, self.pollers)


def count_tiles(widths: tuple[int, ...], block_n: int) -> int:
    """Tiles of ``block_n`` columns of projections so wide; none spans two of them."""
    return sum(triton.cdiv(width, block_n) for width in widths)


class Layout(NamedTuple):
    """What a launch has to know of a group before it sees a number of it: as in ``Group`` and ``Matrix``."""

    in_features: int
    widths: tuple[int, ...]
    stride: int
    dtype: torch.dtype
    device: torch.device
    dense: bool
    codes: str = "plain"
    group: int = 0
    zeros: bool = False
