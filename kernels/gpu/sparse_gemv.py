"""One or two rows of x times unquantized weights, over the kept channels (and quantized ones that ``packed_gemv``
cannot take, dequantized as they are read).

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
bounds it. Where all channels are kept, ``lead`` rows are read before x is known, as the memory would be idle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .channels import choose_channels, clear_lists, program_channels, segment_channel, tile_columns
from .common import gdc_launch, gdc_wait, smem_alloc, smem_barrier, smem_load, smem_store
from .reduction import reduce_tile, store_partial
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
    launch: tl.constexpr,  # LaunchConfig
):
    # A number that stands in a shape or counts a loop, and a string, have to be constants of their own (Triton 3.6).
    K: tl.constexpr = problem.k
    BATCH: tl.constexpr = problem.batch
    DENSE: tl.constexpr = problem.dense
    BLOCK_N: tl.constexpr = launch.block_n
    BLOCK_K: tl.constexpr = launch.block_k
    LENGTH: tl.constexpr = launch.length
    UNROLL: tl.constexpr = launch.unroll
    STEP: tl.constexpr = BLOCK_K * UNROLL
    LEAD: tl.constexpr = launch.lead
    LEAD_ROWS: tl.constexpr = LEAD * STEP
    SMEM: tl.constexpr = launch.smem
    SHARED: tl.constexpr = SMEM != ""
    VALUE: tl.constexpr = 4 if SHARED else 1  # from a value of the list to the next: bytes, or an element
    dtype: tl.constexpr = output.out.dtype.element_ty
    program = tl.program_id(0)
    of = tile_columns(program % launch.tiles, program // launch.tiles, problem, BLOCK_N)
    split = of.split
    # Of quantized weights the columns, else the addresses in the first row.
    read = quant_columns(of, of.n, problem) if problem.quant != "none" else weights.weight_t + of.column

    # --- before the previous kernel has ended: constants, and the first rows of weights
    channels = program_channels(given, weights, of, problem, launch, launch.chunk)
    position = channels.position
    count = channels.count
    kept = program * 0
    if counting is not None:
        kept_before = tl.load(counting.before + channels.cell, mask=channels.counts, other=0)
    lane = tl.arange(0, BLOCK_K)
    if SHARED:
        list_index = smem_alloc(SMEM, program)
        list_value = list_index + LENGTH * 4
        spare = list_value + BATCH * LENGTH * 4
        clear_lists(list_index, list_value, K, BATCH * LENGTH, launch, not DENSE)
    else:
        list_index = workspace.list_index + program * LENGTH
        list_value = workspace.list_value + program * BATCH * LENGTH
    if LEAD_ROWS > 0:
        # Whatever x will be: the memory would be idle until the channels are selected.
        lead = ()
        for step in tl.static_range(LEAD):
            ks = _channels(list_index, lane, step * STEP, split, True, launch)
            lead = lead + _rows(weights, read, ks, of.live, problem, launch)
    gdc_wait(problem.pdl, False)
    if not SHARED:
        # Not before: the previous kernel may still read its lists in the same scratch memory.
        clear_lists(list_index, list_value, K, BATCH * LENGTH, launch, not DENSE)
    if launch.trigger == 1:
        gdc_launch(problem.pdl)

    # --- select: compact the kept channels
    xs, keep, _, kept_rows = choose_channels(given, channels, counting, eps, ssq_parts, problem, BATCH > 1, dtype)
    place = position
    listed = position >= 0
    if not DENSE:
        listed = keep
        place = tl.cumsum(listed.to(tl.int32), axis=0) - 1
        # The list's length is known to its last thread; through the list every thread learns it without a reduction.
        smem_store(list_index, position * 0 + (LENGTH - 1), place + 1, position == launch.segment - 1, SHARED)
        smem_store(list_index, place, channels.k, listed, SHARED)
    for row in tl.static_range(BATCH):
        smem_store(list_value + row * LENGTH * VALUE, place, xs[row], listed, SHARED)
    list_index = smem_barrier(list_index, SHARED)
    if SHARED:
        list_value = list_index + LENGTH * 4
    if not DENSE:
        count = smem_load(list_index, LENGTH - 1, tl.int32, SHARED)
    if counting is not None:
        if BATCH > 1:
            if channels.counts:
                kept = tl.sum(kept_rows, axis=0)
        else:  # one row, and the list has all that it keeps
            kept = tl.where(tl.load(counting.token) >= 0, count, 0)

    # --- the product
    sums = ()
    for _ in tl.static_range(BATCH):
        sums += (tl.zeros((BLOCK_K, BLOCK_N), tl.float32),)
    # Two steps ahead with the channels, one with the weights: the memory is never idle while a program multiplies.
    ks = _channels(list_index, lane, LEAD_ROWS, split, DENSE, launch)
    ws = _rows(weights, read, ks, of.live, problem, launch)
    ks = _channels(list_index, lane, LEAD_ROWS + STEP, split, DENSE, launch)
    if LEAD_ROWS > 0:
        tl.debug_barrier()
        for i in tl.static_range(LEAD * UNROLL):
            at = i * BLOCK_K + lane
            sums = _add_products(sums, list_value, at, lead[i].to(tl.float32), BATCH, launch)
    for start in tl.range(LEAD_ROWS, count, STEP, num_stages=1):
        ahead = _rows(weights, read, ks, of.live, problem, launch)
        ks = _channels(list_index, lane, start + 2 * STEP, split, DENSE, launch)
        # Left alone, the compiler spreads the loads among the multiplications to save registers, and too few are in
        # flight; it moves nothing across a barrier.
        tl.debug_barrier()
        for i in tl.static_range(UNROLL):
            at = start + i * BLOCK_K + lane
            sums = _add_products(sums, list_value, at, ws[i].to(tl.float32), BATCH, launch)
        ws = ahead
    if launch.trigger == 2:
        gdc_launch(problem.pdl)
    for row in tl.static_range(BATCH):
        if SHARED and BLOCK_K > 1 and BLOCK_N >= 64:
            # Over block_k, first to last, in one exchange through shared memory: ``tl.sum`` takes one for each number
            # that a thread holds. Columns are spread so that few threads meet in a bank.
            if row > 0:
                tl.debug_barrier()  # the row before has read its own from the same place
            spread = tl.arange(0, BLOCK_N) % 8 * (BLOCK_N // 8) + tl.arange(0, BLOCK_N) // 8
            smem_store(spare, lane[:, None] * BLOCK_N + spread[None, :], sums[row], spread[None, :] >= 0, True)
            items = smem_barrier(spare, True)
            y = smem_load(items, spread, tl.float32, True)
            for other in tl.static_range(1, BLOCK_K):
                y += smem_load(items, other * BLOCK_N + spread, tl.float32, True)
        else:
            y = tl.sum(sums[row], axis=0)
        store_partial(workspace.partial, (split * BATCH + row) * problem.n + of.column, y, of.live)
    if counting is not None:
        tl.store(counting.after + channels.cell, kept_before + kept, mask=channels.counts)

    reduce_tile(of, weights.bias, output, workspace, problem, launch, False)


@triton.jit
def _channels(list_index, lane, start, split, DENSE: tl.constexpr, launch: tl.constexpr):
    """The channels at the list's positions ``start`` .., as ``unroll`` tensors of block_k; K or more: none."""
    UNROLL: tl.constexpr = launch.unroll
    ks = ()
    for i in tl.static_range(UNROLL):
        at = start + i * launch.block_k + lane
        if DENSE:
            ks += (segment_channel(at, split, launch.splits, launch.chunk),)
        else:
            ks += (smem_load(list_index, at, tl.int32, launch.smem != ""),)
    return ks


@triton.jit
def _rows(weights, read, ks, in_width, problem: tl.constexpr, launch: tl.constexpr):
    """The tile's part of the rows ``ks``, as ``unroll`` tensors (block_k, block_n); zeros where there is none."""
    UNROLL: tl.constexpr = launch.unroll
    ws = ()
    for i in tl.static_range(UNROLL):
        live = (ks[i] < problem.k)[:, None] & in_width[None, :]
        if problem.quant != "none":
            ws += (dequantize_block(weights, read, ks[i], live, problem),)
        else:
            at = read[None, :] + ks[i].to(tl.int64)[:, None] * problem.stride
            ws += (tl.load(at, mask=live, other=0.0, eviction_policy="evict_first"),)
    return ws


@triton.jit
def _add_products(sums, list_value, at, w, BATCH: tl.constexpr, launch: tl.constexpr):
    """Each row's sums (block_k, block_n), and the products of its values at the list's places ``at`` with w."""
    added = ()
    for row in tl.static_range(BATCH):
        values = list_value + row * launch.length * (4 if launch.smem != "" else 1)
        x = smem_load(values, at, tl.float32, launch.smem != "").to(w.dtype)
        added += (sums[row] + x[:, None] * w,)
    return added
