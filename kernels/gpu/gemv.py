"""One projection, or several that read the same input, over the kept channels.

    x     = input (plain | RMSNorm of the residual stream | the attention's splits, combined)
    keep  = not (|x| * channel_scale < threshold)                    as in reference.py, bit for bit
    y     = sum over kept k of x[k] * weight_t[k, :]                 wide, then + bias, rounded to x's dtype
    out   = y | residual + y | activation(y_gate) * y_up

This is what the host knows: weights, how a launch is cut, the memory its programs share. ``gemv_kernel`` is what
they do, ``gemm_kernel`` if the rows are many. Sums are float32 for half-precision weights and float64 for
float32 ones (``precision`` says why), whose rows are launched one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..reference import activation_dtype, rows_together, wide_dtype
from .common import (
    ROOM_LIMIT_BESIDE,
    TO_GELU,
    TO_PLAIN,
    TO_RESIDUAL,
    TO_SILU,
    Counting,
    Memory,
    Modes,
    Shape,
    Source,
    Stretches,
    Target,
    Weights,
    exact_argument,
    room_source,
)
from .matrix import GemvTile, Layout, Matrix, count_tiles
from .packed_gemv import PackedLists, packed_chunk, packed_gemv_kernel, packed_lists
from .reduction import NOTHING
from .sparse_gemv import masked_gemm_kernel, sparse_gemv_kernel

OUTPUTS = {
    "plain": TO_PLAIN.value, "residual": TO_RESIDUAL.value, "silu": TO_SILU.value, "gelu_tanh": TO_GELU.value
}  # fmt: skip
# Bytes of weights on their way from which a program for the tensor cores has a multiprocessor to itself.
ALONE = 64 * 1024


def launch_kind(batch: int, *, dense: bool) -> str:
    """How a launch goes about its rows of x, decided from measurements on an H200 (benchmarks/LOG.md).

    Args:
        batch: rows of x.
        dense: no channel is ever dropped.

    Returns:
        ``sparse`` or ``dense``: one row. ``rows``: two, which read the channels that either keeps. ``batch``: all
        channels, with zeros for the dropped ones, on the tensor cores.
    """
    if batch == 1:
        return "dense" if dense else "sparse"
    return "rows" if batch == 2 and not dense else "batch"


@dataclass(frozen=True)
class Group:
    """Projections that read one input, their columns side by side.

    Attributes:
        matrix: the weights, plain (fp32, fp16 or bf16) or in codes.
        widths: columns of each projection, one to three.
        bias: (sum(widths),) of the weights' dtype, or None.
        scales: (projections, K) float32.
        thresholds: (projections,) float32.
        dense: all thresholds are 0: no channel is ever dropped.
    """

    matrix: Matrix
    widths: tuple[int, ...]
    bias: Tensor | None
    scales: Tensor
    thresholds: Tensor
    dense: bool

    @property
    def in_features(self) -> int:
        """K."""
        return self.matrix.in_features

    @property
    def out_features(self) -> int:
        """Sum of the projections' widths."""
        return sum(self.widths)

    @cached_property
    def layout(self) -> Layout:
        """Its shape, type and place."""
        matrix = self.matrix
        data = matrix.data
        return Layout(
            matrix.in_features, self.widths, data.stride(0), matrix.dtype, data.device, self.dense,
            matrix.kind, 0 if matrix.kind == "plain" else matrix.group, matrix.zeros is not None,
        )  # fmt: skip


class Scratch:
    """Memory the programs of a launch share; one is enough for all launches of a stream, as they run in order."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        bits = torch.int64 if wide_dtype(dtype) == torch.float64 else torch.int32
        self.partial = torch.empty(1, dtype=bits, device=device)
        self.awaited = torch.full((1,), NOTHING, dtype=bits, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.index = torch.empty(1, dtype=torch.int32, device=device)
        self.value = torch.empty(1, dtype=activation_dtype(dtype), device=device)

    def reserve(self, group: Group, tile: GemvTile, batch: int = 1) -> None:
        """Grow to what a launch needs. Not during graph capture: a captured launch keeps the addresses it saw."""
        batch = rows_together(batch, group.matrix.dtype)
        tiles = count_tiles(group.widths, tile.block_n)
        lists = program_lists(group.layout, tile, batch)
        in_scratch = 0 if lists.in_room else tiles * tile.splits * lists.length
        for name, size in (
            ("awaited" if tile.pollers else "partial", tile.splits * batch * group.out_features),
            ("index", in_scratch),
            ("value", batch * in_scratch),
            ("counter", tiles),
        ):
            held = getattr(self, name)
            if held.numel() < size:
                # Each launch leaves counters and awaited sums as it found them; the rest may hold anything.
                content = NOTHING if name == "awaited" else 0
                setattr(self, name, torch.full((size,), content, dtype=held.dtype, device=held.device))


class ProgramLists(NamedTuple):
    """What a program keeps of its channels: ``segment`` of them, a power of two, with ``length`` places in each list;
    ``in_room`` is PTX for the shared memory they lie in ("": in scratch memory)."""

    segment: int
    length: int
    in_room: str


@lru_cache
def program_lists(layout: Layout, tile: GemvTile, batch: int) -> ProgramLists | PackedLists:
    """The lists of a launch's programs."""
    packed = packed_lists(layout, tile, batch)
    if packed is not None:
        return packed
    # The interpreter has no shared memory, and float64 values do not fit there.
    shared = layout.device.type != "cpu" and layout.dtype != torch.float32
    if launch_kind(batch, dense=layout.dense) == "batch":
        return _values_of_many_rows(layout, tile, batch, shared=shared)
    chunks = triton.cdiv(layout.in_features, tile.chunk)
    segment = triton.next_power_of_2(max(triton.cdiv(chunks, tile.splits) * tile.chunk, 16))
    # Reading goes up to three steps beyond the last channel; the last place holds the list's length.
    length = segment + 3 * tile.unroll * tile.block_k + 1
    exchanged = tile.block_k * tile.block_n if tile.block_k > 1 else 0
    in_room = room_source(4 * ((1 + batch) * length + exchanged)) if shared else ""
    return ProgramLists(segment, length, in_room)


def _values_of_many_rows(layout: Layout, tile: GemvTile, batch: int, *, shared: bool) -> ProgramLists:
    """No list of channels, as all are read: each row's values, beside the weights that are on their way."""
    block_k, size = _gemm_block_k(tile), layout.dtype.itemsize
    channels = triton.cdiv(triton.cdiv(layout.in_features, block_k), tile.splits) * block_k
    # Rows 16 bytes off a multiple of 64: threads that read eight of them side by side meet in no bank.
    length = channels + 8
    ahead = (tile.stages - 1) * block_k * tile.block_n * size
    limit = ROOM_LIMIT_BESIDE - (0 if ahead >= 48 * 1024 else ahead + 2048)
    needed = batch * length * size
    # Two programs of a launch on one multiprocessor leave another without: the launch then takes up to half as long
    # again. So a program with much on its way takes more room than it needs, and there is none for a second.
    room = limit if needed <= limit and ahead >= ALONE else needed
    return ProgramLists(triton.next_power_of_2(channels), length, room_source(room, limit) if shared else "")


def sums_at_once(tile: GemvTile, batch: int, target: str, *, kind: str) -> int:
    """Splits whose partial sums are read in one turn. Those that are waited for, and those of many rows, stay in
    registers, 32 numbers a thread over all rows."""
    splits = triton.next_power_of_2(tile.splits)
    if tile.pollers == 0 and kind != "batch":
        return min(splits, 32)
    rows = triton.next_power_of_2(batch)
    columns = tile.block_n // max(1, tile.pollers) * rows * (2 if target in ("silu", "gelu_tanh") else 1)
    fitting = max(1, 32 * 32 * tile.warps // columns)
    return min(splits, 1 << (fitting.bit_length() - 1))


def _gemm_block_k(tile: GemvTile) -> int:
    return max(16, tile.block_k)  # tl.dot's smallest K


class Plan(NamedTuple):
    """What a launch is compiled for: its kernel, that many programs, and the numbers in it, as in ``arguments``."""

    kernel: Any
    programs: int
    shape: Shape
    modes: Modes
    cut: GemvTile
    lists: ProgramLists | PackedLists
    at_once: int
    options: dict[str, Any]


def plan_launch(
    layout: Layout, tile: GemvTile, batch: int, target: str, stretches: tuple[int, int], ssq_parts: int, pdl: bool
) -> Plan:
    """How a launch goes.

    Args:
        layout: of the group.
        tile, batch, target, pdl: as for ``launch_gemv``; ``batch`` shares one launch.
        stretches: the attention's, and the width of a head; (1, 1) if x does not come from there.
        ssq_parts: columns of ``ssq_in``.
    """
    kind = launch_kind(batch, dense=layout.dense)
    lists = program_lists(layout, tile, batch)
    tiles = count_tiles(layout.widths, tile.block_n)
    n0, n1, n2 = (*layout.widths, 0, 0)[:3]
    # At least 32, so that one compiled kernel serves most tiles that wrote the sums.
    ssq_pad = max(32, triton.next_power_of_2(ssq_parts))
    if isinstance(lists, PackedLists):
        # What else there is in a tile stands in the lists, or does not matter: one compiled kernel serves them all.
        kernel = packed_gemv_kernel
        cut = GemvTile(
            tile.block_n, 1, tile.splits, tile.warps, chunk=packed_chunk(layout, tile), trigger=tile.trigger,
            pollers=tile.pollers,
        )  # fmt: skip
    elif kind == "batch":
        kernel, cut = masked_gemm_kernel, replace(tile, block_k=_gemm_block_k(tile))
    else:
        # Leading rows stand in the segment's own piece of the list.
        kernel = sparse_gemv_kernel
        cut = replace(tile, lead=min(tile.lead, lists.segment // (tile.block_k * tile.unroll)))
    return Plan(
        kernel,
        tiles * tile.splits,
        Shape(layout.in_features, n0, n1, n2, n0 + n1 + n2, layout.stride, tiles, batch, *stretches, ssq_pad),
        Modes(OUTPUTS[target], layout.dense, pdl, layout.codes, layout.group),
        cut,
        lists,
        sums_at_once(tile, batch, target, kind=kind),
        {"num_warps": tile.warps, **({"launch_pdl": True} if pdl and tile.early else {})},
    )


@cache
def _checked_plan(layout: Layout, tile: GemvTile, *arguments: Any) -> Plan:
    """``plan_launch``, worked out once; refuses a launch that might wait for ever."""
    waiting = tile.pollers * count_tiles(layout.widths, tile.block_n)
    places = _places(layout.device)
    if tile.pollers > 1 and waiting > places:
        raise ValueError(
            f"expected at most {places} programs that wait for each other on {layout.device}, found {waiting}: "
            f"{tile.pollers} pollers for each tile of {tile}; take fewer pollers"
        )
    return plan_launch(layout, tile, *arguments)


def _places(device: torch.device) -> int:
    """Programs that certainly run at once: on a GPU one for each multiprocessor; the interpreter runs one after the
    other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_gemv(
    group: Group,
    x: Tensor,
    out: Tensor,
    scratch: Scratch,
    tile: GemvTile,
    *,
    batch: int = 1,
    source: str = "plain",
    target: str = "plain",
    norm: Tensor | None = None,
    eps: float = 0.0,
    ssq_in: Tensor | None = None,
    ssq_out: Tensor | None = None,
    softmax: tuple[Tensor, Tensor] | None = None,
    head_dim: int = 1,
    masked: Tensor | None = None,
    kept: tuple[Tensor, Tensor, Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Launch one group of projections on the current stream. Shapes are not checked, nothing is allocated.

    Args:
        group: weights, scales and thresholds.
        x: (batch, K) of the weights' dtype; for source ``attention`` (batch, heads, kv_splits, head_dim) wide.
        out: ``plain`` (batch, N), ``residual`` (batch, N), added to, ``silu`` and ``gelu_tanh`` (batch, N / 2); the
            weights' dtype. For float32 weights x and out are float64, or float32 if one rounding of the result is
            wanted.
        scratch: :meth:`Scratch.reserve` was called for this group, tile and batch.
        batch: rows, 1 to 16; :func:`launch_kind` says what is read for them (float32: row by row).
        source: ``plain``, ``hidden`` (RMS-normalise x with ``norm``, ``eps`` and ``ssq_in``) or ``attention``.
        target: ``plain``, ``residual`` (fills ``ssq_out``), ``silu`` or ``gelu_tanh``.
        norm: (K,) RMSNorm weight; 1 + weight, of the wide type, where it is multiplied by that before rounding.
        ssq_in: (batch, parts) wide, partial sums of the squares of x's rows.
        ssq_out: (batch, tile.parts(N)) wide.
        softmax: maxima (log2 domain) and denominators, each (batch, heads, kv_splits) wide.
        head_dim: for source ``attention``.
        masked: (batch,) float32, 1 for a row that is masked, 0 for one that keeps all its channels; None: all are.
        kept: count the kept channels of a group that is not dense: token ids (batch,) int64, negative for a row that
            is not counted; what was kept before and what was kept after this launch, in turn the buffer of one step
            and of the next, each (launches, projections, splits) int64, to be added up over launches and splits.
            ``launches``: :func:`rows_together` says how many rows share one.
        pdl: programmatic dependent launch (compute capability 9.0 or later).

    Raises:
        ValueError: the tile's pollers are more than the device runs at once: they would wait for ever.
    """
    if rows_together(batch, group.matrix.dtype) < batch:
        for i in range(batch):
            launch_gemv(
                group, x[i : i + 1], out[i : i + 1], scratch, tile, source=source, target=target, norm=norm, eps=eps,
                ssq_in=None if ssq_in is None else ssq_in[i : i + 1],
                ssq_out=None if ssq_out is None else ssq_out[i : i + 1],
                softmax=None if softmax is None else (softmax[0][i : i + 1], softmax[1][i : i + 1]),
                head_dim=head_dim,
                masked=None if masked is None else masked[i : i + 1],
                kept=None if kept is None else tuple(part[i : i + 1] for part in kept),  # type: ignore[arg-type]
                pdl=pdl,
            )  # fmt: skip
        return
    layout = group.layout
    parts = 1 if ssq_in is None else ssq_in.shape[1]
    stretches = (1, 1) if softmax is None else (softmax[0].shape[2], head_dim)
    plan = _checked_plan(layout, tile, batch, target, stretches, parts, pdl)
    in_scratch = plan.lists.in_room == ""
    memory = Memory(
        scratch.awaited if tile.pollers else scratch.partial,
        None if tile.pollers else scratch.counter,
        scratch.index if in_scratch and plan.kernel is sparse_gemv_kernel else None,
        scratch.value if in_scratch else None,
    )
    if source == "attention" and softmax is not None:
        given = Source(None, None, None, Stretches(x, *softmax))
    else:
        given = Source(x, ssq_in, norm, None) if source == "hidden" else Source(x, None, None, None)
    plan.kernel[(plan.programs,)](
        given,
        Weights(
            group.matrix.data,
            group.bias,
            group.scales,
            group.thresholds,
            group.matrix.scales,
            group.matrix.zeros,
        ),
        masked,
        Target(out, ssq_out),
        memory,
        None if kept is None else Counting(*kept),
        exact_argument(eps, wide_dtype(layout.dtype)),
        parts,
        plan.shape,
        plan.modes,
        plan.cut,
        plan.lists,
        plan.at_once,
        **plan.options,
    )


def sparse_gemv(x: Tensor, group: Group, tile: GemvTile | None = None, **keywords) -> Tensor:
    """y (B, N) = the group's projections of x (B, K) over the kept channels: the plain form, for tests and
    benchmarks."""
    tile = tile or GemvTile()
    scratch = Scratch(x.device, x.dtype)
    scratch.reserve(group, tile, x.shape[0])
    out = torch.empty(x.shape[0], group.out_features, dtype=x.dtype, device=x.device)
    launch_gemv(group, x, out, scratch, tile, batch=x.shape[0], **keywords)
    return out
