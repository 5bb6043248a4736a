"""The kernel of ``gemv`` for many rows of x, on the tensor cores: selection, product, and what follows it.

Many rows together keep nearly all channels: every weight is read, and each row's dropped channels are zeros. A program
owns one tile of columns and every SPLITS-th block of BLOCK_K channels. What it reads first is weights, several blocks
of them, as they do not depend on the kernel before this one. While they are on their way it waits for that kernel, and
lays its channels of all rows, normalised and masked, in shared memory (``lists``). Programs of one tile add up
as in ``gemv_kernel``, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    Counting,
    add_rows,
    get,
    get_half,
    let_next_kernel_start,
    put,
    room,
    segment_channel,
    segment_length,
    settled,
    tile_columns,
    wait_for_previous_kernel,
)
from .matrix import code_columns, decoded
from .reduction import add_up, leave_partial
from .selection import Channels, choose_channels, lay_values


@triton.jit(do_not_specialize=["ssq_parts"], do_not_specialize_on_alignment=["counting"])
def sparse_gemv_kernel(
    source,  # groups of tensors, as in arguments.py
    weights,
    masked_ptr,  # (B,) float32, 1 for a row that is masked, 0 for one that keeps all its channels; None: all are
    target,
    memory,
    counting,  # None: nothing is counted
    eps,  # RMSNorm
    ssq_parts,  # columns of source.ssq
    shape: tl.constexpr,  # Shape
    modes: tl.constexpr,  # Modes
    cut: tl.constexpr,  # GemvTile, with no more leading rows than a segment has
    lists: tl.constexpr,  # ProgramLists
    AT_ONCE: tl.constexpr,  # splits whose sums are read in one turn
):
    # A number that stands in a shape or counts a loop has to be a constant of its own.
    K: tl.constexpr = shape.k
    BATCH: tl.constexpr = shape.batch
    DENSE: tl.constexpr = modes.dense
    BLOCK_N: tl.constexpr = cut.block_n
    BLOCK_K: tl.constexpr = cut.block_k
    SPLITS: tl.constexpr = cut.splits
    CHUNK: tl.constexpr = cut.chunk
    UNROLL: tl.constexpr = cut.unroll
    LEAD: tl.constexpr = cut.lead
    SEGMENT: tl.constexpr = lists.segment
    LIST: tl.constexpr = lists.length
    NORMED: tl.constexpr = source.norm is not None
    COUNT: tl.constexpr = counting is not None
    dtype: tl.constexpr = target.out.dtype.element_ty
    wide: tl.constexpr = tl.float64 if memory.partial.dtype.element_ty == tl.int64 else tl.float32
    program = tl.program_id(0)
    tile = program % shape.tiles
    split = program // shape.tiles
    of = tile_columns(tile, shape.n0, shape.n1, shape.n2, BLOCK_N)
    n = of.local * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = n < of.width
    columns = of.first + n
    CODED: tl.constexpr = modes.codes != "plain"
    read = code_columns(of, n, shape) if CODED else weights.weight_t + columns

    # --- this program's channels: x, which of them are kept, and their list
    position = tl.arange(0, SEGMENT)
    k = segment_channel(position, split, SPLITS, CHUNK)
    live = k < K
    threshold = tl.load(weights.thresholds + of.projection)
    count = segment_length(split, K, SPLITS, CHUNK)
    scale = tl.load(weights.scales + of.projection * K + k, mask=live, other=0.0)
    norm_weight = scale
    if NORMED:
        # Weights that are wide are multiplied by before the only rounding.
        ONCE: tl.constexpr = source.norm.dtype.element_ty == wide
        norm_weight = tl.load(source.norm + k, mask=live, other=0.0).to(wide if ONCE else tl.float32)
    # A projection's first tile counts for all of them, each program its own channels in a cell that is its own. What
    # stands there is read early: nothing waits for it.
    counts = of.local == 0
    cell = of.projection * SPLITS + split
    kept = program * 0
    kept_before = kept.to(tl.int64)
    if COUNT:
        kept_before = tl.load(counting.before + cell, mask=counts, other=0)
    STEP: tl.constexpr = BLOCK_K * UNROLL
    LEAD_ROWS: tl.constexpr = LEAD * STEP
    lane = tl.arange(0, BLOCK_K)
    ROOM: tl.constexpr = lists.in_room
    SHARED: tl.constexpr = ROOM != ""
    spare = 0
    if SHARED:
        list_index = room(ROOM, program)
        list_value = list_index + LIST * 4
        spare = list_value + BATCH * LIST * 4
    else:
        list_index = memory.list_index + program * LIST
        list_value = memory.list_value + program * BATCH * LIST
    if SHARED:
        _clear(list_index, list_value, K, wide, BATCH, SEGMENT, LIST, DENSE, SHARED)
    if LEAD_ROWS > 0:
        # The first rows, whatever x will be: the memory would be idle until the channels are selected.
        lead = ()
        for step in tl.static_range(LEAD):
            ks = _channels(list_index, lane, step * STEP, split, True, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
            lead = lead + _rows(weights, read, ks, in_width, wide, shape, modes, UNROLL)
    wait_for_previous_kernel(modes.pdl)
    if not SHARED:
        # Not before: the kernel before this one may still read its lists in the same scratch memory.
        _clear(list_index, list_value, K, wide, BATCH, SEGMENT, LIST, DENSE, SHARED)
    if cut.trigger == 1:
        let_next_kernel_start(modes.pdl)
    channels = Channels(position, k, live, norm_weight, scale, threshold)
    xs, keep, kept_rows = choose_channels(
        source, masked_ptr, channels, counting, eps, ssq_parts, shape, modes, BATCH > 1 or LEAD_ROWS > 0, wide, dtype
    )
    if DENSE:
        for row in tl.static_range(BATCH):
            put(_values_of(list_value, row, LIST, SHARED), position, xs[row], position >= 0, SHARED)
    else:
        # The leading rows stand first, with zeros for the dropped ones; the kept ones of the rest follow.
        listed = keep & (position >= LEAD_ROWS)
        place = LEAD_ROWS + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        # The list's length is known where it ends; through the list everybody learns it without a reduction.
        put(list_index, position * 0 + (LIST - 1), place + 1, position == SEGMENT - 1, SHARED)
        put(list_index, place, k, listed, SHARED)
        if LEAD_ROWS > 0:
            place = tl.where(position < LEAD_ROWS, position, place)
            listed = listed | (position < LEAD_ROWS)
        for row in tl.static_range(BATCH):
            put(_values_of(list_value, row, LIST, SHARED), place, xs[row], listed, SHARED)
    list_index = settled(list_index, SHARED)
    if SHARED:
        list_value = list_index + LIST * 4
    if not DENSE:
        count = get(list_index, LIST - 1, False, SHARED)
    if COUNT:
        if BATCH > 1 or LEAD_ROWS > 0:
            if counts:
                kept = tl.sum(kept_rows, axis=0)
        else:  # one row, and the list has all that it keeps
            kept = tl.where(tl.load(counting.token) >= 0, count, 0)

    # --- the product
    sums = ()
    for _ in tl.static_range(BATCH):
        sums = sums + (tl.zeros((BLOCK_K, BLOCK_N), wide),)  # noqa: RUF005
    # Two steps ahead with the channels, one with the weights: the memory is never idle while a program multiplies.
    ks = _channels(list_index, lane, LEAD_ROWS, split, DENSE, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
    ws = _rows(weights, read, ks, in_width, wide, shape, modes, UNROLL)
    ks = _channels(list_index, lane, LEAD_ROWS + STEP, split, DENSE, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
    if LEAD_ROWS > 0:
        tl.debug_barrier()
        for i in tl.static_range(LEAD * UNROLL):
            at = i * BLOCK_K + lane
            # A dropped row is zero here whatever stands in it, if no other row of x may have kept it.
            used = get(list_value, at, True, SHARED) != 0
            w = tl.where(used[:, None] | (BATCH > 1), lead[i], 0.0)
            sums = _add_products(sums, list_value, at, w.to(wide), BATCH, LIST, SHARED)
    for start in tl.range(LEAD_ROWS, count, STEP, num_stages=1):
        ahead = _rows(weights, read, ks, in_width, wide, shape, modes, UNROLL)
        ks = _channels(list_index, lane, start + 2 * STEP, split, DENSE, SPLITS, CHUNK, UNROLL, BLOCK_K, SHARED)
        # Left alone, the compiler spreads the loads among the multiplications to save registers, and too few are in
        # flight; it moves nothing across a barrier.
        tl.debug_barrier()
        for i in tl.static_range(UNROLL):
            at = start + i * BLOCK_K + lane
            sums = _add_products(sums, list_value, at, ws[i].to(wide), BATCH, LIST, SHARED)
        ws = ahead
    if cut.trigger == 2:
        let_next_kernel_start(modes.pdl)
    for row in tl.static_range(BATCH):
        if SHARED and BLOCK_K > 1 and BLOCK_N >= 64:
            if row > 0:
                tl.debug_barrier()  # the row before has read its own from the same place
            y = add_rows(sums[row], spare, BLOCK_K, BLOCK_N)
        else:
            y = tl.sum(sums[row], axis=0)
        leave_partial(memory.partial, (split * BATCH + row) * shape.n + columns, y, in_width)
    if COUNT:
        tl.store(counting.after + cell, kept_before + kept, mask=counts)

    add_up(split, tile, of, weights.bias, target, memory, wide, shape, modes, cut, AT_ONCE, False)


@triton.jit
def _clear(
    list_index,
    list_value,
    K: tl.constexpr,
    wide: tl.constexpr,
    BATCH: tl.constexpr,
    SEGMENT: tl.constexpr,
    LIST: tl.constexpr,
    DENSE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Fill the lists with "no channel": what they will not reach then needs no comparison with their length."""
    if not DENSE:
        for start in tl.static_range(0, LIST, SEGMENT):
            place = start + tl.arange(0, SEGMENT)
            put(list_index, place, tl.full((SEGMENT,), K, tl.int32), place < LIST, SHARED)
    # The rows' values stand one after the other.
    for start in tl.static_range(0, BATCH * LIST, SEGMENT):
        place = start + tl.arange(0, SEGMENT)
        put(list_value, place, tl.zeros((SEGMENT,), wide), place < BATCH * LIST, SHARED)
    tl.debug_barrier()


@triton.jit
def _values_of(list_value, row: tl.constexpr, LIST: tl.constexpr, SHARED: tl.constexpr):
    """The list of a row's values."""
    return list_value + row * LIST * (4 if SHARED else 1)


@triton.jit
def _add_products(sums, list_value, at, w, BATCH: tl.constexpr, LIST: tl.constexpr, SHARED: tl.constexpr):
    """Each row's sums (BLOCK_K, BLOCK_N) and the products of its values at the places ``at`` with the weights there."""
    added = ()
    for row in tl.static_range(BATCH):
        x = get(_values_of(list_value, row, LIST, SHARED), at, True, SHARED).to(w.dtype)
        added = added + (sums[row] + x[:, None] * w,)  # noqa: RUF005
    return added


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
def _rows(
    weights, read, ks, in_width, wide: tl.constexpr,
    shape: tl.constexpr, modes: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The program's stretch of the rows ``ks``, as UNROLL tensors (BLOCK_K, BLOCK_N); zeros where there is none.

    ``read``: what to read of a row, the addresses in the first; of codes the columns."""
    ws = ()
    for i in tl.static_range(UNROLL):
        if modes.codes != "plain":
            live = (ks[i] < shape.k)[:, None] & in_width[None, :]
            w = decoded(weights, read, ks[i], live, wide, shape, modes)
        else:
            w = tl.load(
                read[None, :] + ks[i].to(tl.int64)[:, None] * shape.stride,
                mask=(ks[i] < shape.k)[:, None] & in_width[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
        ws = ws + (w,)  # noqa: RUF005
    return ws


@triton.jit(do_not_specialize=["ssq_parts"], do_not_specialize_on_alignment=["counting"])
def masked_gemm_kernel(
    source,  # as for sparse_gemv_kernel
    weights,
    masked_ptr,
    target,
    memory,
    counting,
    eps,
    ssq_parts,
    shape: tl.constexpr,
    modes: tl.constexpr,
    cut: tl.constexpr,  # GemvTile, block_k at least tl.dot's smallest K
    lists: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    K: tl.constexpr = shape.k
    BATCH: tl.constexpr = shape.batch
    BLOCK_N: tl.constexpr = cut.block_n
    BLOCK_K: tl.constexpr = cut.block_k
    SPLITS: tl.constexpr = cut.splits
    LIST: tl.constexpr = lists.length
    # No mask where none is needed: a weight's address is then all there is to work out.
    WHOLE: tl.constexpr = K % BLOCK_K + shape.n0 % BLOCK_N + shape.n1 % BLOCK_N + shape.n2 % BLOCK_N == 0
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # The tensor cores take 16 rows.
    ROWS: tl.constexpr = 16
    ROOM: tl.constexpr = lists.in_room
    SHARED: tl.constexpr = ROOM != ""
    dtype: tl.constexpr = target.out.dtype.element_ty
    program = tl.program_id(0)
    tile = program % shape.tiles
    split = program // shape.tiles
    of = tile_columns(tile, shape.n0, shape.n1, shape.n2, BLOCK_N)
    n = of.local * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = n < of.width
    columns = of.first + n
    CODED: tl.constexpr = modes.codes != "plain"
    read = code_columns(of, n, shape) if CODED else weights.weight_t + columns

    # --- what is known before the kernel before this one has ended
    position = tl.arange(0, lists.segment)
    k = segment_channel(position, split, SPLITS, BLOCK_K)
    live = k < K
    threshold = tl.load(weights.thresholds + of.projection)
    norm_weight = k
    scale = k
    if source.norm is not None:
        norm_weight = tl.load(source.norm + k, mask=live, other=0.0)
    DENSE: tl.constexpr = modes.dense
    if not DENSE:
        scale = tl.load(weights.scales + of.projection * K + k, mask=live, other=0.0)
    channels = Channels(position, k, live, norm_weight, scale, threshold)
    # As in sparse_gemv_kernel: a projection's first tile counts, each program in its own cell.
    counts = of.local == 0
    if counting is not None:
        cell = of.projection * SPLITS + split
        counting = Counting(counting.token, counting.before + cell, counting.after + cell)
    values = room(ROOM, program) if SHARED else memory.list_value + program * BATCH * LIST
    if not SHARED:
        values = lay_values(
            values, source, masked_ptr, channels, counting, counts, eps, ssq_parts, shape, modes, LIST, SHARED, dtype
        )

    # --- the product
    rows = tl.arange(0, ROWS)
    # Rows that are not there repeat the last; nobody looks at their sums.
    held = tl.minimum(rows, BATCH - 1)[:, None] * LIST
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    count = (BLOCKS - split + SPLITS - 1) // SPLITS
    for step in tl.range(0, count, num_stages=cut.stages):
        k_now = (step * SPLITS + split) * BLOCK_K + lane
        if CODED:
            w = decoded(weights, read, k_now, (k_now < K)[:, None] & in_width[None, :], tl.float32, shape, modes)
        else:
            at = read[None, :] + k_now.to(tl.int64)[:, None] * shape.stride
            if WHOLE:  # noqa: SIM108 (resolved at compile time)
                w = tl.load(at)
            else:
                w = tl.load(at, mask=(k_now < K)[:, None] & in_width[None, :], other=0.0)
        if SHARED:  # noqa: SIM102 (resolved at compile time)
            # In here, as the compiler puts the first reads of weights before the loop.
            if step == 0:
                values = lay_values(
                    values, source, masked_ptr, channels, counting, counts, eps, ssq_parts,
                    shape, modes, LIST, SHARED, dtype,
                )  # fmt: skip
        x = get_half(values, held + (step * BLOCK_K + lane)[None, :], dtype, SHARED)
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision="ieee")
    if BLOCKS < SPLITS:
        # A program without a block was not in the loop; and sums of the kernel before may still lie in scratch memory.
        wait_for_previous_kernel(modes.pdl)
    place = (split * BATCH + rows)[:, None] * shape.n + columns[None, :]
    leave_partial(memory.partial, place, acc, (rows < BATCH)[:, None] & in_width[None, :])

    add_up(split, tile, of, weights.bias, target, memory, tl.float32, shape, modes, cut, AT_ONCE, True)
