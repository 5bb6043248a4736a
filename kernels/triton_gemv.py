"""One projection, or several that read the same input, over the kept channels: selection, product and what follows it.

    x     = input (plain | RMSNorm of the residual stream | the attention's splits, combined)
    keep  = not (|x| * channel_scale < threshold)                    as in reference.py, bit for bit
    y     = sum over kept k of x[k] * weight_t[k, :]                 wide, then + bias, rounded to x's dtype
    out   = y | residual + y | silu(y_gate) * y_up

A program owns one tile of columns and one segment of channels. It selects its own channels, so nothing has to build a
global list, and reads one contiguous stretch of each kept row. Programs of one tile add up through partial sums in
scratch memory; the one that arrives last adds them in a fixed order and writes the result. There are no float atomics
and no buffer has to be cleared: the same input gives the same bits on every run.

Sums are float32 for half-precision weights and float64 for float32 ones (``triton_common`` says why), whose rows are
launched one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import (
    FROM_ATTENTION,
    FROM_HIDDEN,
    FROM_PLAIN,
    TO_PLAIN,
    TO_RESIDUAL,
    TO_SILU,
    activation_dtype,
    exact_argument,
    inverse_root,
    let_next_kernel_start,
    normalise,
    segment_channel,
    wait_for_previous_kernel,
    wide_dtype,
)
from .triton_lists import add_rows, get, put, room, room_source, settled

__all__ = ["GemvTile", "Group", "Scratch", "launch_gemv", "sparse_gemv"]


@triton.jit
def _load_input(
    x_ptr,
    m_ptr,
    l_ptr,
    norm_weight,
    rstd,
    row,
    k,
    live,
    loaded,
    K: tl.constexpr,
    INPUT: tl.constexpr,
    KV_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    dtype: tl.constexpr,
):
    """x[row, k] in ``dtype``, 0 where not live."""
    if INPUT == FROM_ATTENTION:
        # x_ptr: (B, heads, splits, D) wide, each split's softmax-weighted sum; m its maximum, l its denominator. One
        # tensor for each split: a second dimension would cost exchanges between threads.
        at = (row * (K // HEAD_DIM) + k // HEAD_DIM) * KV_SPLITS
        ms = ()
        totals = ()
        parts = ()
        for s in tl.static_range(KV_SPLITS):
            ms = ms + (tl.load(m_ptr + at + s, mask=live, other=0.0),)  # noqa: RUF005
            totals = totals + (tl.load(l_ptr + at + s, mask=live, other=1.0),)  # noqa: RUF005
            part = tl.load(x_ptr + (at + s) * HEAD_DIM + k % HEAD_DIM, mask=live, other=0.0)
            parts = parts + (part,)  # noqa: RUF005
        m = ms[0]
        for s in tl.static_range(1, KV_SPLITS):
            m = tl.maximum(m, ms[s])
        x = tl.zeros(k.shape, m.dtype)
        total = tl.zeros(k.shape, m.dtype)
        for s in tl.static_range(KV_SPLITS):
            factor = tl.exp2(ms[s] - m)
            total += totals[s] * factor
            x += parts[s] * factor
        x = (x / total).to(dtype)
    elif INPUT == FROM_HIDDEN:
        x = normalise(loaded.to(rstd.dtype), norm_weight, rstd, dtype)
    else:
        x = loaded
    return x


@triton.jit
def _rstd(ssq_ptr, row, eps, parts, K: tl.constexpr, SSQ_PAD: tl.constexpr):
    """1 / rms of a row of the residual stream, from the partial sums of squares its writers left."""
    i = tl.arange(0, SSQ_PAD)
    return inverse_root(tl.sum(tl.load(ssq_ptr + row * parts + i, mask=i < parts, other=0.0), axis=0) / K + eps)


@triton.jit(do_not_specialize=["ssq_parts"])
def _gemv_kernel(
    x_ptr,  # (B, K) dtype; FROM_ATTENTION: (B, heads, KV_SPLITS, HEAD_DIM) wide
    m_ptr,  # FROM_ATTENTION: (B, heads, KV_SPLITS) wide, log2 domain
    l_ptr,  # the same shape
    ssq_in_ptr,  # FROM_HIDDEN: (B, ssq_parts) wide
    norm_ptr,  # FROM_HIDDEN: (K,) of the weights' type
    weight_ptr,  # (K, stride), channel-major; the projections' columns side by side
    bias_ptr,  # (N0 + N1 + N2,) of the weights' type
    scale_ptr,  # (projections, K) float32
    threshold_ptr,  # (projections,) float32
    out_ptr,  # TO_PLAIN: (B, N0 + N1 + N2); TO_RESIDUAL: (B, N0), read and written; TO_SILU: (B, N0); dtype
    ssq_out_ptr,  # TO_RESIDUAL: (B, tiles) wide
    partial_ptr,  # scratch: (SPLITS, B, N0 + N1 + N2) wide
    index_ptr,  # scratch: (programs, LIST) int32, unless ROOM
    value_ptr,  # scratch: (programs, LIST) wide, unless ROOM; batches: (programs, B, LIST) dtype
    counter_ptr,  # (tiles,) int32, 0 before and after
    eps,
    ssq_parts,  # columns of ssq_in
    K: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    STRIDE: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    SSQ_PAD: tl.constexpr,
    KV_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DENSE: tl.constexpr,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
    TRIGGER: tl.constexpr,
    STAGES: tl.constexpr,
    LEAD: tl.constexpr,
    LIST: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = N0 + N1 + N2
    T0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    T2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = T0 + T1 + T2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wide: tl.constexpr = partial_ptr.dtype.element_ty
    program = tl.program_id(0)
    tile = program % TILES
    split = program // TILES

    # The projection this tile belongs to, and its columns in the weights.
    second = (tile >= T0).to(tl.int32)
    third = (tile >= T0 + T1).to(tl.int32)
    projection = second + third if N2 > 0 else second
    local = tile - second * T0
    first = tl.where(second > 0, N0, 0)
    width = tl.where(second > 0, N1, N0)
    if N2 > 0:
        local = local - third * T1
        first = tl.where(third > 0, N0 + N1, first)
        width = tl.where(third > 0, N2, width)
    n = local * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = n < width
    columns = first + n
    weight_column_ptr = weight_ptr + columns

    # --- this program's channels: x, which of them are kept, and their list
    position = tl.arange(0, SEGMENT)
    k = segment_channel(position, split, SPLITS, CHUNK)
    live = k < K
    threshold = tl.load(threshold_ptr + projection)
    count = segment_length(split, K, SPLITS, CHUNK)
    scale = tl.load(scale_ptr + projection * K + k, mask=live, other=0.0)
    norm_weight = scale
    if INPUT == FROM_HIDDEN:
        norm_weight = tl.load(norm_ptr + k, mask=live, other=0.0).to(tl.float32)
    STEP: tl.constexpr = BLOCK_K * UNROLL
    LEAD_ROWS: tl.constexpr = LEAD * STEP if BATCH == 1 else 0
    lane = tl.arange(0, BLOCK_K)
    SHARED: tl.constexpr = ROOM != ""
    spare = 0
    if SHARED:
        list_index = room(ROOM, program)
        list_value = list_index + LIST * 4
        spare = list_value + LIST * 4
    else:
        list_index = index_ptr + program * LIST
        list_value = value_ptr + program * LIST
    if BATCH == 1:
        # What the list does not reach reads as "no channel", so that nothing is compared with its length.
        for start in tl.static_range(0, LIST, SEGMENT):
            place = start + position
            if not DENSE:
                put(list_index, place, tl.full((SEGMENT,), K, tl.int32), place < LIST, SHARED)
            put(list_value, place, tl.zeros((SEGMENT,), wide), place < LIST, SHARED)
        tl.debug_barrier()
    if LEAD_ROWS > 0:
        # The first rows, whatever x will be: the memory would be idle until the channels are selected.
        lead = ()
        for step in tl.static_range(LEAD):
            ks = _channels(list_index, lane, step * STEP, split, True, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
            lead = lead + _rows(weight_column_ptr, ks, in_width, K, STRIDE, UNROLL)
    wait_for_previous_kernel(PDL)
    if TRIGGER == 1 or BATCH > 1:
        let_next_kernel_start(PDL)
    rstd = 1.0
    for row in tl.static_range(BATCH):
        loaded = 0.0
        if INPUT != FROM_ATTENTION:
            loaded = tl.load(x_ptr + row * K + k, mask=live, other=0.0)
        if INPUT == FROM_HIDDEN:
            rstd = _rstd(ssq_in_ptr, row, eps, ssq_parts, K, SSQ_PAD)
        x = _load_input(
            x_ptr, m_ptr, l_ptr, norm_weight, rstd, row, k, live, loaded, K, INPUT, KV_SPLITS, HEAD_DIM, dtype
        )
        keep_row = live
        if not DENSE:
            score = tl.abs(x.to(tl.float32)) * scale
            keep_row = live & ((score >= threshold) | (score != score))
        if BATCH > 1:
            # Every row of the weights is read: the union of several rows' kept channels is most of them.
            masked = tl.where(keep_row, x, 0.0).to(dtype)
            tl.store(value_ptr + (program * BATCH + row) * SEGMENT + position, masked)
        elif DENSE:
            put(list_value, position, x, position >= 0, SHARED)
        else:
            # The leading rows stand first, with zeros for the dropped ones; the kept ones of the rest follow.
            listed = keep_row & (position >= LEAD_ROWS)
            place = LEAD_ROWS + tl.cumsum(listed.to(tl.int32), axis=0) - 1
            # The list's length is known where it ends; through the list everybody learns it without a reduction.
            put(list_index, position * 0 + (LIST - 1), place + 1, position == SEGMENT - 1, SHARED)
            put(list_index, place, k, listed, SHARED)
            if LEAD_ROWS > 0:
                place = tl.where(position < LEAD_ROWS, position, place)
                listed = listed | (position < LEAD_ROWS)
                x = tl.where(keep_row, x, 0.0).to(dtype)
            put(list_value, place, x, listed, SHARED)
    list_index = settled(list_index, SHARED)
    if SHARED:
        list_value = list_index + LIST * 4
    if BATCH == 1 and not DENSE:
        count = get(list_index, LIST - 1, False, SHARED)

    # --- the product
    if BATCH == 1:
        acc = tl.zeros((BLOCK_K, BLOCK_N), wide)
        # Two steps ahead with the channels, one with the weights: the memory is never idle while a program multiplies.
        ks = _channels(list_index, lane, LEAD_ROWS, split, DENSE, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
        ws = _rows(weight_column_ptr, ks, in_width, K, STRIDE, UNROLL)
        ks = _channels(list_index, lane, LEAD_ROWS + STEP, split, DENSE, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
        if LEAD_ROWS > 0:
            tl.debug_barrier()
            for i in tl.static_range(LEAD * UNROLL):
                x_now = get(list_value, i * BLOCK_K + lane, True, SHARED).to(wide)
                # A dropped row is zero here whatever stands in it.
                w = tl.where((x_now != 0)[:, None], lead[i], 0.0)
                acc += x_now[:, None] * w.to(wide)
        for start in tl.range(LEAD_ROWS, count, STEP, num_stages=1):
            ahead = _rows(weight_column_ptr, ks, in_width, K, STRIDE, UNROLL)
            ks = _channels(list_index, lane, start + 2 * STEP, split, DENSE, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
            # Left alone, the compiler spreads the loads among the multiplications to save registers, and too few are in
            # flight; it moves nothing across a barrier.
            tl.debug_barrier()
            for i in tl.static_range(UNROLL):
                x_now = get(list_value, start + i * BLOCK_K + lane, True, SHARED).to(wide)
                acc += x_now[:, None] * ws[i].to(wide)
            ws = ahead
        if TRIGGER == 2:
            let_next_kernel_start(PDL)
        if SHARED and BLOCK_K > 1 and BLOCK_N >= 64:  # noqa: SIM108 (resolved at compile time)
            y = add_rows(acc, spare, BLOCK_K, BLOCK_N)
        else:
            y = tl.sum(acc, axis=0)
        if SPLITS > 1:
            tl.store(partial_ptr + split * N + columns, y, mask=in_width)
    else:
        # Rows padded to the tensor cores' 16; dropped channels hold zeros.
        rows = tl.arange(0, ROWS)
        acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
        base = value_ptr + (program * BATCH + rows) * SEGMENT
        for start in tl.range(0, count, BLOCK_K, num_stages=STAGES):
            at = start + lane
            live_k = at < count
            k_now = segment_channel(at, split, SPLITS, CHUNK)
            live_k = live_k & (k_now < K)
            both = (rows < BATCH)[:, None] & live_k[None, :]
            x_now = tl.load(base[:, None] + at[None, :], mask=both, other=0.0)
            w = tl.load(
                weight_column_ptr[None, :] + k_now.to(tl.int64)[:, None] * STRIDE,
                mask=live_k[:, None] & in_width[None, :],
                other=0.0,
            )
            acc = tl.dot(x_now, w, acc, input_precision="ieee")
        tl.store(
            partial_ptr + (split * BATCH + rows)[:, None] * N + columns[None, :],
            acc,
            mask=(rows < BATCH)[:, None] & in_width[None, :],
        )

    # --- the last program of the tile to arrive adds the partial sums, in the order of the splits
    ARRIVALS: tl.constexpr = SPLITS * 2 if OUTPUT == TO_SILU else SPLITS
    last = True
    if ARRIVALS > 1 or BATCH > 1:
        if SPLITS == 1 and BATCH == 1:
            tl.store(partial_ptr + columns, y, mask=in_width)
        tl.debug_barrier()
        ticket = tl.atomic_add(counter_ptr + local if OUTPUT == TO_SILU else counter_ptr + tile, 1, sem="acq_rel")
        last = ticket == ARRIVALS - 1
    if last:
        if ARRIVALS > 1 or BATCH > 1:
            tl.store(counter_ptr + local if OUTPUT == TO_SILU else counter_ptr + tile, 0)
        for row in tl.static_range(BATCH):
            if OUTPUT == TO_SILU:
                gate = _add_partials(partial_ptr, bias_ptr, n, in_width, row, N, BATCH, SPLITS, SPLITS_PAD, HAS_BIAS)
                up = _add_partials(partial_ptr, bias_ptr, N0 + n, in_width, row, N, BATCH, SPLITS, SPLITS_PAD, HAS_BIAS)
                gate = gate.to(dtype).to(wide)
                silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(wide)
                result = silu * up.to(dtype).to(wide)
                tl.store(out_ptr + row * N0 + n, result.to(dtype), mask=in_width)
            else:
                if ARRIVALS > 1 or BATCH > 1:
                    y = _add_partials(
                        partial_ptr, bias_ptr, columns, in_width, row, N, BATCH, SPLITS, SPLITS_PAD, HAS_BIAS
                    )
                elif HAS_BIAS:
                    y += tl.load(bias_ptr + columns, mask=in_width, other=0.0).to(tl.float32)
                y_rounded = y.to(dtype)
                if OUTPUT == TO_RESIDUAL:
                    hidden = tl.load(out_ptr + row * N + columns, mask=in_width, other=0.0).to(wide)
                    y_rounded = (hidden + y_rounded.to(wide)).to(dtype)
                    squares = y_rounded.to(wide)
                    squares = tl.where(in_width, squares * squares, 0.0)
                    tl.store(ssq_out_ptr + row * TILES + tile, tl.sum(squares, axis=0))
                tl.store(out_ptr + row * N + columns, y_rounded, mask=in_width)


@triton.jit
def _channels(
    list_index,
    lane,
    start,
    split,
    DENSE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARED: tl.constexpr,
):
    """The channels at positions ``start``.. of the program's list, as UNROLL tensors of BLOCK_K; K or more: none."""
    ks = ()
    for i in tl.static_range(UNROLL):
        at = start + i * BLOCK_K + lane
        if DENSE:  # noqa: SIM108 (resolved at compile time)
            k = segment_channel(at, split, SPLITS, CHUNK)
        else:
            k = get(list_index, at, False, SHARED)
        ks = ks + (k,)  # noqa: RUF005 (the compiler knows no unpacking)
    return ks


@triton.jit
def _rows(weight_column_ptr, ks, in_width, K: tl.constexpr, STRIDE: tl.constexpr, UNROLL: tl.constexpr):
    """The program's stretch of the rows ``ks``, as UNROLL tensors (BLOCK_K, BLOCK_N); zeros where there is none."""
    ws = ()
    for i in tl.static_range(UNROLL):
        w = tl.load(
            weight_column_ptr[None, :] + ks[i].to(tl.int64)[:, None] * STRIDE,
            mask=(ks[i] < K)[:, None] & in_width[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        ws = ws + (w,)  # noqa: RUF005
    return ws


@triton.jit
def segment_length(split, K: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """Positions in a split's segment; the last chunk may run past K and is masked where it is read."""
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    return ((CHUNKS - split + SPLITS - 1) // SPLITS) * CHUNK


@triton.jit
def _add_partials(
    partial_ptr,
    bias_ptr,
    columns,
    in_width,
    row,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Sum over the splits, in a fixed order, plus bias. Read past L1: other multiprocessors wrote them."""
    # All at once if they fit the registers: each further turn waits for the L2 cache again.
    AT_ONCE: tl.constexpr = min(SPLITS_PAD, 32)
    y = tl.zeros(columns.shape, partial_ptr.dtype.element_ty)
    for start in tl.static_range(0, SPLITS, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        parts = tl.load(
            partial_ptr + (s * BATCH + row)[:, None] * N + columns[None, :],
            mask=(s < SPLITS)[:, None] & in_width[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        y += tl.sum(parts, axis=0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=in_width, other=0.0).to(tl.float32)
    return y


_INPUTS = {"plain": FROM_PLAIN.value, "hidden": FROM_HIDDEN.value, "attention": FROM_ATTENTION.value}
_OUTPUTS = {"plain": TO_PLAIN.value, "residual": TO_RESIDUAL.value, "silu": TO_SILU.value}


@dataclass(frozen=True)
class GemvTile:
    """How a launch is cut: ``splits`` segments of channels times tiles of ``block_n`` columns.

    A program of ``warps`` warps reads ``unroll`` times ``block_k`` rows at a time (for batches ``block_k`` rows,
    ``stages`` pieces ahead). Channels are dealt to the splits ``chunk`` at a time. With programmatic dependent launch,
    ``early`` lets the launch begin before the one before it has ended, and ``trigger`` says when it lets the next one
    begin: 1 at its start, 2 after its product. ``lead`` times ``unroll * block_k`` rows are read before the channels
    are selected, and multiplied by zero if they were to be dropped.
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


@dataclass(frozen=True)
class Group:
    """Projections that read one input, their columns side by side.

    Attributes:
        weight_t: (K, stride) fp32, fp16 or bf16; the first ``sum(widths)`` columns are used.
        widths: columns of each projection, one to three.
        bias: (sum(widths),) of the weights' dtype, or None.
        scales: (projections, K) float32.
        thresholds: (projections,) float32.
        dense: all thresholds are 0: no channel is ever dropped.
    """

    weight_t: Tensor
    widths: tuple[int, ...]
    bias: Tensor | None
    scales: Tensor
    thresholds: Tensor
    dense: bool

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight_t.shape[0]

    @property
    def out_features(self) -> int:
        """Sum of the projections' widths."""
        return sum(self.widths)


class Scratch:
    """Memory the programs of a launch share; one is enough for all launches of a stream, as they run in order."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.partial = torch.empty(1, dtype=wide_dtype(dtype), device=device)
        self.index = torch.empty(1, dtype=torch.int32, device=device)
        self.value = torch.empty(1, dtype=activation_dtype(dtype), device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    def reserve(self, group: Group, tile: GemvTile, batch: int = 1) -> None:
        """Grow to what a launch needs. Not during graph capture: a captured launch keeps the addresses it saw."""
        if group.weight_t.dtype == torch.float32:
            batch = 1  # rows are launched one by one
        tiles = sum(triton.cdiv(width, tile.block_n) for width in group.widths)
        programs = tiles * tile.splits
        segment, length, in_room = _lists(group.in_features, tile, batch, shared=_has_room(group.weight_t))
        in_scratch = 0 if in_room else programs * length
        for name, size in (
            ("partial", tile.splits * batch * group.out_features),
            ("index", in_scratch if batch == 1 else 0),
            ("value", in_scratch if batch == 1 else programs * batch * segment),
            ("counter", tiles),
        ):
            held = getattr(self, name)
            if held.numel() < size:
                # Zeros for the counters, which each launch leaves as it found them; the rest may hold anything.
                setattr(self, name, torch.zeros(size, dtype=held.dtype, device=held.device))


def _segment(in_features: int, tile: GemvTile) -> int:
    chunks = triton.cdiv(in_features, tile.chunk)
    return triton.next_power_of_2(max(triton.cdiv(chunks, tile.splits) * tile.chunk, 16))


def _lists(in_features: int, tile: GemvTile, batch: int, *, shared: bool) -> tuple[int, int, str]:
    """Channels of a program, places in its lists, and PTX for the shared memory they lie in ("": in scratch memory)."""
    segment = _segment(in_features, tile)
    block_k = _block_k(tile, batch)
    # Reading goes up to three steps beyond the last channel; the last place holds the list's length.
    length = segment + 3 * tile.unroll * block_k + 1
    exchanged = block_k * tile.block_n if block_k > 1 else 0
    return segment, length, room_source(4 * (2 * length + exchanged)) if shared and batch == 1 else ""


def _has_room(weight_t: Tensor) -> bool:
    """Half-precision weights on a GPU: the interpreter has no shared memory, and float64 values do not fit there."""
    return weight_t.device.type == "cuda" and weight_t.dtype != torch.float32


def _block_k(tile: GemvTile, batch: int) -> int:
    # tl.dot's smallest K is 16.
    return tile.block_k if batch == 1 else max(16, tile.block_k)


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
    pdl: bool = False,
) -> None:
    """Launch one group of projections on the current stream. Nothing is checked or allocated here.

    Args:
        group: weights, scales and thresholds.
        x: (batch, K) of the weights' dtype; for source ``attention`` (batch, heads, kv_splits, head_dim) wide.
        out: ``plain`` (batch, N), ``residual`` (batch, N), added to, ``silu`` (batch, N / 2); the weights' dtype. For
            float32 weights x and out are float64, or float32 if one rounding of the result is wanted.
        scratch: :meth:`Scratch.reserve` was called for this group, tile and batch.
        batch: rows, 1 to 16; more than one read all channels, with zeros for the dropped ones (float32: row by row).
        source: ``plain``, ``hidden`` (RMS-normalise x with ``norm``, ``eps`` and ``ssq_in``) or ``attention``.
        target: ``plain``, ``residual`` (fills ``ssq_out``) or ``silu``.
        norm: (K,) RMSNorm weight.
        ssq_in: (batch, parts) wide, partial sums of the squares of x's rows.
        ssq_out: (batch, tiles) wide.
        softmax: maxima (log2 domain) and denominators, each (batch, heads, kv_splits) wide.
        head_dim: for source ``attention``.
        pdl: programmatic dependent launch (compute capability 9.0 or later).
    """
    if batch > 1 and group.weight_t.dtype == torch.float32:
        for i in range(batch):
            launch_gemv(
                group, x[i : i + 1], out[i : i + 1], scratch, tile, source=source, target=target, norm=norm, eps=eps,
                ssq_in=None if ssq_in is None else ssq_in[i : i + 1],
                ssq_out=None if ssq_out is None else ssq_out[i : i + 1],
                softmax=None if softmax is None else (softmax[0][i : i + 1], softmax[1][i : i + 1]),
                head_dim=head_dim, pdl=pdl,
            )  # fmt: skip
        return
    widths = (*group.widths, 0, 0)[:3]
    tiles = sum(triton.cdiv(width, tile.block_n) for width in group.widths)
    parts = 1 if ssq_in is None else ssq_in.shape[1]
    unused = group.thresholds
    options = {"launch_pdl": True} if pdl and tile.early else {}
    segment, length, in_room = _lists(group.in_features, tile, batch, shared=_has_room(group.weight_t))
    block_k = _block_k(tile, batch)
    _gemv_kernel[(tiles * tile.splits,)](
        x,
        unused if softmax is None else softmax[0],
        unused if softmax is None else softmax[1],
        unused if ssq_in is None else ssq_in,
        group.weight_t if norm is None else norm,
        group.weight_t,
        group.weight_t if group.bias is None else group.bias,
        group.scales,
        group.thresholds,
        out,
        unused if ssq_out is None else ssq_out,
        scratch.partial,
        scratch.index,
        scratch.value,
        scratch.counter,
        exact_argument(eps, scratch.partial.dtype),
        parts,
        K=group.in_features,
        N0=widths[0],
        N1=widths[1],
        N2=widths[2],
        STRIDE=group.weight_t.stride(0),
        TRIGGER=tile.trigger,
        BATCH=batch,
        ROWS=16,
        # At least 32, so that one compiled kernel serves most tiles that wrote the sums; a warp adds up 32 by itself.
        SSQ_PAD=max(32, triton.next_power_of_2(parts)),
        KV_SPLITS=1 if softmax is None else softmax[0].shape[2],
        HEAD_DIM=head_dim,
        HAS_BIAS=group.bias is not None,
        DENSE=group.dense,
        INPUT=_INPUTS[source],
        OUTPUT=_OUTPUTS[target],
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        SPLITS=tile.splits,
        SPLITS_PAD=triton.next_power_of_2(tile.splits),
        SEGMENT=segment,
        CHUNK=tile.chunk,
        UNROLL=tile.unroll,
        STAGES=tile.stages,
        # They stand in the segment's own piece of the list.
        LEAD=min(tile.lead, segment // (tile.block_k * tile.unroll)),
        LIST=length,
        ROOM=in_room,
        PDL=pdl,
        num_warps=tile.warps,
        **options,
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
