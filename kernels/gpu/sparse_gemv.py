"""One or two rows of x times unquantized weights, over the kept channels (and quantized ones that ``packed_gemv`` cannot
take, dequantized as they are read).

    keep = not (|x| * channel_scale < threshold)           y[n] = sum over kept k of x[k] * weight_t[k, n]

Two rows read the channels that either keeps; each row's own dropped channels are zeros. The twin is
``reference.sparse_linear``.

A program owns one tile of ``block_n`` columns and one split of the channels. It selects its split's channels into a
compacted index list (ids and x values) in shared memory, then reads the rows of weight_t that stand in the list:

    weight_t (K, N), bf16, block_n = 256             block_k rows at a time, ``unroll`` times that many in flight

                 lane 0      lane 1            lane 31
    list[i]     [n0 .. n7 ] [n8 .. n15] ... [n248..n255]  warp 0       one load of a warp: one kept channel, 512 bytes,
    list[i + 1] [ 16 B    ] [         ] ... [          ]  warp 1       16 bytes a lane; a dropped channel is never read
    ...                                                                x[list[i]] is broadcast from shared memory

Sums stay in registers (block_k x block_n of them), are added over block_k through shared memory, and over the splits in
``reduction``. Bytes: kept channels * N * sizeof(dtype) + 4 K of scales a tile; 2 operations for each weight, so memory
bounds it. At the 4.59 TB/s that an H200 reaches, gate and up of the 8B shape (4096 x 28672, bf16) take at least 51 us
dense and 26 us at 50%.

``lead`` rows are read before the channels are known, as the memory would be idle; dropped ones are multiplied by zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    let_next_kernel_start,
    segment_channel,
    segment_length,
    smem_alloc,
    smem_barrier,
    smem_load,
    smem_store,
    tile_columns,
    wait_for_previous_kernel,
)
from .reduction import reduce_tile, store_partial
from .selection import Channels, choose_channels
from .weights import dequantize_block, quant_columns


@triton.jit(do_not_specialize=["ssq_parts"], do_not_specialize_on_alignment=["counting"])
def sparse_gemv_kernel(
    given,  # Input
    weights,  # Weights
    output,  # Output
    workspace,  # Workspace
    counting,  # Counting; None: nothing is counted
    eps,  # RMSNorm
    ssq_parts,  # columns of given.ssq
    problem: tl.constexpr,  # Problem
    launch: tl.constexpr,  # LaunchConfig, with no more leading rows than a segment has
):
    # A number that stands in a shape or counts a loop has to be a constant of its own.
    LEAD: tl.constexpr = launch.lead
    UNROLL: tl.constexpr = launch.unroll
    K: tl.constexpr = problem.k
    BATCH: tl.constexpr = problem.batch
    DENSE: tl.constexpr = problem.dense
    BLOCK_N: tl.constexpr = launch.block_n
    BLOCK_K: tl.constexpr = launch.block_k
    SEGMENT: tl.constexpr = launch.segment
    LENGTH: tl.constexpr = launch.length
    STEP: tl.constexpr = BLOCK_K * launch.unroll
    LEAD_ROWS: tl.constexpr = launch.lead * STEP
    SMEM: tl.constexpr = launch.smem
    SHARED: tl.constexpr = SMEM != ""
    EACH: tl.constexpr = BATCH > 1 or LEAD_ROWS > 0
    COUNT: tl.constexpr = counting is not None
    dtype: tl.constexpr = output.out.dtype.element_ty
    program = tl.program_id(0)
    tile = program % launch.tiles
    split = program // launch.tiles
    of = tile_columns(tile, problem.n0, problem.n1, problem.n2, BLOCK_N)
    n = of.local * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = n < of.width
    columns = of.first + n
    # Of quantized weights the columns, else the addresses in the first row.
    read = quant_columns(of, n, problem) if problem.quant != "none" else weights.weight_t + columns

    # --- constants of this program's channels: read before the previous kernel has ended
    position = tl.arange(0, SEGMENT)
    k = segment_channel(position, split, launch.splits, launch.chunk)
    live = k < K
    threshold = tl.load(weights.thresholds + of.projection)
    count = segment_length(split, K, launch.splits, launch.chunk)
    scale = tl.load(weights.scales + of.projection * K + k, mask=live, other=0.0)
    norm = scale
    if given.norm is not None:
        norm = tl.load(given.norm + k, mask=live, other=0.0).to(tl.float32)
    # A projection's first tile counts for all of them, each program its own channels in a cell of its own.
    counts = of.local == 0
    cell = of.projection * launch.splits + split
    kept = program * 0
    kept_before = kept.to(tl.int64)
    if COUNT:
        kept_before = tl.load(counting.before + cell, mask=counts, other=0)
    lane = tl.arange(0, BLOCK_K)
    spare = 0
    if SHARED:
        list_index = smem_alloc(SMEM, program)
        list_value = list_index + LENGTH * 4
        spare = list_value + BATCH * LENGTH * 4
    else:
        list_index = workspace.list_index + program * LENGTH
        list_value = workspace.list_value + program * BATCH * LENGTH
    if SHARED:
        _clear(list_index, list_value, problem, launch)
    if LEAD_ROWS > 0:
        # The first rows, whatever x will be: the memory would be idle until the channels are selected.
        lead = ()
        for step in tl.static_range(LEAD):
            ks = _channels(list_index, lane, step * STEP, split, True, launch)
            lead = lead + _rows(weights, read, ks, in_width, problem, launch)
    wait_for_previous_kernel(problem.pdl)
    if not SHARED:
        # Not before: the previous kernel may still read its lists in the same scratch memory.
        _clear(list_index, list_value, problem, launch)
    if launch.trigger == 1:
        let_next_kernel_start(problem.pdl)

    # --- select: compact the kept channels
    channels = Channels(position, k, live, norm, scale, threshold)
    xs, keep, kept_rows = choose_channels(given, channels, counting, eps, ssq_parts, problem, EACH, dtype)
    if DENSE:
        for row in tl.static_range(BATCH):
            smem_store(_values_of(list_value, row, launch), position, xs[row], position >= 0, SHARED)
    else:
        # The leading rows stand first, with zeros for the dropped ones; the kept ones of the rest follow.
        listed = keep & (position >= LEAD_ROWS)
        place = LEAD_ROWS + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        # The list's length is known to its last thread; through the list every thread learns it without a reduction.
        smem_store(list_index, position * 0 + (LENGTH - 1), place + 1, position == SEGMENT - 1, SHARED)
        smem_store(list_index, place, k, listed, SHARED)
        if LEAD_ROWS > 0:
            place = tl.where(position < LEAD_ROWS, position, place)
            listed = listed | (position < LEAD_ROWS)
        for row in tl.static_range(BATCH):
            smem_store(_values_of(list_value, row, launch), place, xs[row], listed, SHARED)
    list_index = smem_barrier(list_index, SHARED)
    if SHARED:
        list_value = list_index + LENGTH * 4
    if not DENSE:
        count = smem_load(list_index, LENGTH - 1, False, SHARED)
    if COUNT:
        if EACH:
            if counts:
                kept = tl.sum(kept_rows, axis=0)
        else:  # one row, and the list has all that it keeps
            kept = tl.where(tl.load(counting.token) >= 0, count, 0)

    # --- the product
    sums = ()
    for _ in tl.static_range(BATCH):
        sums = sums + (tl.zeros((BLOCK_K, BLOCK_N), tl.float32),)  # noqa: RUF005 (Triton has no unpacking)
    # Two steps ahead with the channels, one with the weights: the memory is never idle while a program multiplies.
    ks = _channels(list_index, lane, LEAD_ROWS, split, DENSE, launch)
    ws = _rows(weights, read, ks, in_width, problem, launch)
    ks = _channels(list_index, lane, LEAD_ROWS + STEP, split, DENSE, launch)
    if LEAD_ROWS > 0:
        tl.debug_barrier()
        for i in tl.static_range(LEAD * UNROLL):
            at = i * BLOCK_K + lane
            # A dropped row is zero here whatever stands in it, if no other row of x may have kept it.
            used = smem_load(list_value, at, True, SHARED) != 0
            w = tl.where(used[:, None] | (BATCH > 1), lead[i], 0.0)
            sums = _add_products(sums, list_value, at, w.to(tl.float32), BATCH, launch)
    for start in tl.range(LEAD_ROWS, count, STEP, num_stages=1):
        ahead = _rows(weights, read, ks, in_width, problem, launch)
        ks = _channels(list_index, lane, start + 2 * STEP, split, DENSE, launch)
        # Left alone, the compiler spreads the loads among the multiplications to save registers, and too few are in
        # flight; it moves nothing across a barrier.
        tl.debug_barrier()
        for i in tl.static_range(UNROLL):
            at = start + i * BLOCK_K + lane
            sums = _add_products(sums, list_value, at, ws[i].to(tl.float32), BATCH, launch)
        ws = ahead
    if launch.trigger == 2:
        let_next_kernel_start(problem.pdl)
    for row in tl.static_range(BATCH):
        if SHARED and BLOCK_K > 1 and BLOCK_N >= 64:
            if row > 0:
                tl.debug_barrier()  # the row before has read its own from the same place
            y = _add_rows(sums[row], spare, BLOCK_K, BLOCK_N)
        else:
            y = tl.sum(sums[row], axis=0)
        store_partial(workspace.partial, (split * BATCH + row) * problem.n + columns, y, in_width)
    if COUNT:
        tl.store(counting.after + cell, kept_before + kept, mask=counts)

    reduce_tile(split, tile, of, weights.bias, output, workspace, problem, launch, False)


@triton.jit
def _clear(list_index, list_value, problem: tl.constexpr, launch: tl.constexpr):
    """Fill the lists with "no channel": what they will not reach then needs no comparison with their length."""
    LENGTH: tl.constexpr = launch.length
    BATCH: tl.constexpr = problem.batch
    SEGMENT: tl.constexpr = launch.segment
    SHARED: tl.constexpr = launch.smem != ""
    if not problem.dense:
        for start in tl.static_range(0, LENGTH, SEGMENT):
            place = start + tl.arange(0, SEGMENT)
            smem_store(list_index, place, tl.full((SEGMENT,), problem.k, tl.int32), place < launch.length, SHARED)
    # The rows' values stand one after the other.
    for start in tl.static_range(0, BATCH * LENGTH, SEGMENT):
        place = start + tl.arange(0, SEGMENT)
        zeros = tl.zeros((SEGMENT,), tl.float32)
        smem_store(list_value, place, zeros, place < problem.batch * launch.length, SHARED)
    tl.debug_barrier()


@triton.jit
def _values_of(list_value, row: tl.constexpr, launch: tl.constexpr):
    return list_value + row * launch.length * (4 if launch.smem != "" else 1)


@triton.jit
def _channels(list_index, lane, start, split, DENSE: tl.constexpr, launch: tl.constexpr):
    """The channels at positions ``start``.. of the program's list, as ``unroll`` tensors of block_k; K or more: none."""
    UNROLL: tl.constexpr = launch.unroll
    ks = ()
    for i in tl.static_range(UNROLL):
        at = start + i * launch.block_k + lane
        if DENSE:
            k = segment_channel(at, split, launch.splits, launch.chunk)
        else:
            k = smem_load(list_index, at, False, launch.smem != "")
        ks = ks + (k,)  # noqa: RUF005
    return ks


@triton.jit
def _rows(weights, read, ks, in_width, problem: tl.constexpr, launch: tl.constexpr):
    """The tile's part of the rows ``ks``, as ``unroll`` tensors (block_k, block_n); zeros where there is none."""
    UNROLL: tl.constexpr = launch.unroll
    ws = ()
    for i in tl.static_range(UNROLL):
        if problem.quant != "none":
            live = (ks[i] < problem.k)[:, None] & in_width[None, :]
            w = dequantize_block(weights, read, ks[i], live, problem)
        else:
            w = tl.load(
                read[None, :] + ks[i].to(tl.int64)[:, None] * problem.stride,
                mask=(ks[i] < problem.k)[:, None] & in_width[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
        ws = ws + (w,)  # noqa: RUF005
    return ws


@triton.jit
def _add_products(sums, list_value, at, w, BATCH: tl.constexpr, launch: tl.constexpr):
    """Each row's sums (block_k, block_n), and the products of its values at the list's places ``at`` with w."""
    added = ()
    for row in tl.static_range(BATCH):
        x = smem_load(_values_of(list_value, row, launch), at, True, launch.smem != "").to(w.dtype)
        added = added + (sums[row] + x[:, None] * w,)  # noqa: RUF005
    return added


@triton.jit
def _add_rows(values, items, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of float32 values (ROWS, COLUMNS) over the rows, first to last, in one exchange through shared memory:
    ``tl.sum`` takes one for each number a thread holds. Columns are spread so that few threads meet in a bank."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = (column % 8) * (COLUMNS // 8) + column // 8
    smem_store(items, row[:, None] * COLUMNS + place[None, :], values, place[None, :] >= 0, True)
    items = smem_barrier(items, True)
    total = smem_load(items, place, True, True)
    for other in tl.static_range(1, ROWS):
        total += smem_load(items, other * COLUMNS + place, True, True)
    return total
