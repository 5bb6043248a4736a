"""One or two rows of x times unquantized weights, over the kept channels; also quantized weights that ``packed_gemv``
does not support, dequantized after the load.

    keep = not (|x| * channel_scale < threshold)           y[n] = sum over kept k of x[k] * weight_t[k, n]

Two rows read the channels that either keeps; each row's own dropped channels are zeros. The twin is
``reference.sparse_linear``.

A program has one tile of ``block_n`` columns and one split of the channels. It compacts its split's kept channels into
an index list (ids and x values) in shared memory, then loads the rows of weight_t that are in the list:

    weight_t (K, N), bf16, block_n = 256             block_k rows a load, ``unroll`` loads in flight

                 lane 0      lane 1            lane 31
    list[i]     [n0 .. n7 ] [n8 .. n15] ... [n248..n255]  warp 0       one load of a warp: one kept channel, 512 bytes,
    list[i + 1] [ 16 B    ] [         ] ... [          ]  warp 1       16 bytes a lane; a dropped channel is never read
    ...                                                                x[list[i]] is broadcast from shared memory

The accumulators (block_k x block_n) are in registers. They are reduced over block_k through shared memory, and over the
splits in ``reduction``. Bytes: kept channels * N * sizeof(dtype) + 4 K of scales a tile; with 2 operations for each
weight it is memory-bound. If no channel is dropped, ``lead`` steps of rows are prefetched before x is ready.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .channels import choose_channels, clear_lists, program_channels, segment_channel, tile_columns
from .common import gdc_launch, gdc_wait, smem_alloc, smem_barrier, smem_load, smem_store
from .reduction import reduce_tile, store_partial
from .weights import dequantize_block, quant_columns


@triton.jit(do_not_specialize=["ssq_parts"])
def sparse_gemv_kernel(
    inputs,  # Input
    weights,  # Weights
    output,  # Output
    workspace,  # Workspace
    eps,  # RMSNorm
    ssq_parts,  # columns of inputs.ssq
    problem: tl.constexpr,  # Problem
    launch: tl.constexpr,  # LaunchConfig
):
    # Triton 3.6 takes fields of a constexpr tuple neither as shapes or loop bounds nor as strings.
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
    VALUE: tl.constexpr = 4 if SHARED else 1  # stride of the list's x values: in bytes, or in elements
    dtype: tl.constexpr = output.out.dtype.element_ty
    program = tl.program_id(0)
    of = tile_columns(program % launch.tiles, program // launch.tiles, problem, BLOCK_N)
    split = of.split
    # Padded columns of quantized weights, else pointers to the first row.
    columns = quant_columns(of, of.n, problem) if problem.quant != "none" else weights.weight_t + of.column

    # --- before gdc_wait: constants, and the first rows of weights
    channels = program_channels(inputs, weights, of, problem, launch, launch.chunk)
    position = channels.position
    count = channels.count
    lane = tl.arange(0, BLOCK_K)
    if SHARED:
        list_index = smem_alloc(SMEM, program)
        list_value = list_index + LENGTH * 4
        reduce_base = list_value + BATCH * LENGTH * 4
        clear_lists(list_index, list_value, K, BATCH * LENGTH, launch, not DENSE)
    else:
        list_index = workspace.list_index + program * LENGTH
        list_value = workspace.list_value + program * BATCH * LENGTH
    if LEAD_ROWS > 0:
        # Prefetch; these loads do not depend on x.
        lead = ()
        for step in tl.static_range(LEAD):
            ks = _load_channels(list_index, lane, step * STEP, split, True, launch)
            lead = lead + _load_rows(weights, columns, ks, of.live, problem, launch)
    gdc_wait(problem.pdl, False)
    if not SHARED:
        # After gdc_wait: the previous kernel has its lists in the same scratch memory.
        clear_lists(list_index, list_value, K, BATCH * LENGTH, launch, not DENSE)
    if launch.trigger == 1:
        gdc_launch(problem.pdl)

    # --- select: compact the kept channels
    xs, keep, _ = choose_channels(inputs, channels, eps, ssq_parts, problem, BATCH > 1, dtype)
    entry = position
    listed = position >= 0
    if not DENSE:
        listed = keep
        entry = tl.cumsum(listed.to(tl.int32), axis=0) - 1
        # The last position has the list's length; the final entry broadcasts it to all threads.
        smem_store(list_index, position * 0 + (LENGTH - 1), entry + 1, position == launch.segment - 1, SHARED)
        smem_store(list_index, entry, channels.k, listed, SHARED)
    for row in tl.static_range(BATCH):
        smem_store(list_value + row * LENGTH * VALUE, entry, xs[row], listed, SHARED)
    list_index = smem_barrier(list_index, SHARED)
    if SHARED:
        list_value = list_index + LENGTH * 4
    if not DENSE:
        count = smem_load(list_index, LENGTH - 1, tl.int32, SHARED)

    # --- the product
    acc = ()
    for _ in tl.static_range(BATCH):
        acc += (tl.zeros((BLOCK_K, BLOCK_N), tl.float32),)
    # Software pipeline: channel ids are loaded two steps ahead, weights one step.
    ks = _load_channels(list_index, lane, LEAD_ROWS, split, DENSE, launch)
    ws = _load_rows(weights, columns, ks, of.live, problem, launch)
    ks = _load_channels(list_index, lane, LEAD_ROWS + STEP, split, DENSE, launch)
    if LEAD_ROWS > 0:
        tl.debug_barrier()
        for i in tl.static_range(LEAD * UNROLL):
            at = i * BLOCK_K + lane
            acc = _accumulate(acc, list_value, at, lead[i].to(tl.float32), BATCH, launch)
    for start in tl.range(LEAD_ROWS, count, STEP, num_stages=1):
        next_ws = _load_rows(weights, columns, ks, of.live, problem, launch)
        ks = _load_channels(list_index, lane, start + 2 * STEP, split, DENSE, launch)
        # The compiler moves no load across a barrier. Without one it delays loads to save registers, and too few are in
        # flight.
        tl.debug_barrier()
        for i in tl.static_range(UNROLL):
            at = start + i * BLOCK_K + lane
            acc = _accumulate(acc, list_value, at, ws[i].to(tl.float32), BATCH, launch)
        ws = next_ws
    if launch.trigger == 2:
        gdc_launch(problem.pdl)
    for row in tl.static_range(BATCH):
        if SHARED and BLOCK_K > 1 and BLOCK_N >= 64:
            # Reduce over block_k, first to last, in one pass through shared memory: ``tl.sum`` takes one pass for each
            # element of a thread. The column order is permuted to reduce bank conflicts.
            if row > 0:
                tl.debug_barrier()  # the loads of the row before have finished
            permuted = tl.arange(0, BLOCK_N) % 8 * (BLOCK_N // 8) + tl.arange(0, BLOCK_N) // 8
            smem_store(reduce_base, lane[:, None] * BLOCK_N + permuted[None, :], acc[row], permuted[None, :] >= 0, True)
            stored = smem_barrier(reduce_base, True)
            y = smem_load(stored, permuted, tl.float32, True)
            for other in tl.static_range(1, BLOCK_K):
                y += smem_load(stored, other * BLOCK_N + permuted, tl.float32, True)
        else:
            y = tl.sum(acc[row], axis=0)
        store_partial(workspace.partial, (split * BATCH + row) * problem.n + of.column, y, of.live)

    reduce_tile(of, weights.bias, output, workspace, problem, launch, False)


@triton.jit
def _load_channels(list_index, lane, start, split, DENSE: tl.constexpr, launch: tl.constexpr):
    """Channel ids from list entry ``start`` on, or with DENSE from the segment's position, as ``unroll`` tensors
    (block_k,); ids of K and more are padding."""
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
def _load_rows(weights, columns, ks, live_columns, problem: tl.constexpr, launch: tl.constexpr):
    """The tile's columns of the rows ``ks``, as ``unroll`` tensors (block_k, block_n); zeros in the padding."""
    UNROLL: tl.constexpr = launch.unroll
    ws = ()
    for i in tl.static_range(UNROLL):
        live = (ks[i] < problem.k)[:, None] & live_columns[None, :]
        if problem.quant != "none":
            ws += (dequantize_block(weights, columns, ks[i], live, problem),)
        else:
            at = columns[None, :] + ks[i].to(tl.int64)[:, None] * problem.stride
            ws += (tl.load(at, mask=live, other=0.0, eviction_policy="evict_first"),)
    return ws


@triton.jit
def _accumulate(acc, list_value, at, w, BATCH: tl.constexpr, launch: tl.constexpr):
    """Each row's acc (block_k, block_n) + x[:, None] * w, with x its values at the list entries ``at``."""
    updated = ()
    for row in tl.static_range(BATCH):
        values = list_value + row * launch.length * (4 if launch.smem != "" else 1)
        x = smem_load(values, at, tl.float32, launch.smem != "").to(w.dtype)
        updated += (acc[row] + x[:, None] * w,)
    return updated
