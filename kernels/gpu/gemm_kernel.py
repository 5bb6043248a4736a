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
    FROM_ATTENTION,
    FROM_HIDDEN,
    combined_attention,
    load_squares,
    normalise,
    reciprocal_rms,
    segment_channel,
    tile_columns,
    wait_for_previous_kernel,
    wait_in_loop,
)
from .lists import get_half, hold_reads, put_half, room, settled
from .partials import add_up, leave_partial

__all__ = ["masked_gemm_kernel"]

# Rows whose inputs are read at the same time.
_ROWS = tl.constexpr(8)


@triton.jit(
    do_not_specialize=["ssq_parts"], do_not_specialize_on_alignment=["token_ptr", "kept_before_ptr", "kept_after_ptr"]
)
def masked_gemm_kernel(
    x_ptr,  # as for sparse_gemv_kernel, up to kept_after_ptr
    m_ptr,
    l_ptr,
    ssq_in_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    threshold_ptr,
    masked_ptr,
    out_ptr,
    ssq_out_ptr,
    partial_ptr,  # scratch: (SPLITS, B, N0 + N1 + N2) int32; POLLERS: NOTHING before and after
    counter_ptr,
    token_ptr,
    kept_before_ptr,
    kept_after_ptr,
    value_ptr,  # scratch: (programs, B, LIST) dtype, unless ROOM
    eps,
    ssq_parts,  # columns of ssq_in
    K: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    BATCH: tl.constexpr,
    SSQ_PAD: tl.constexpr,
    KV_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DENSE: tl.constexpr,
    BY_ROW: tl.constexpr,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    POLLERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SEGMENT: tl.constexpr,
    LIST: tl.constexpr,
    STAGES: tl.constexpr,
    ROOM: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = N0 + N1 + N2
    # No mask where none is needed: a weight's address is then all there is to work out.
    WHOLE: tl.constexpr = K % BLOCK_K + N0 % BLOCK_N + N1 % BLOCK_N + N2 % BLOCK_N == 0
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # The tensor cores take 16 rows.
    ROWS: tl.constexpr = 16
    SHARED: tl.constexpr = ROOM != ""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    tile = program % TILES
    split = program // TILES
    projection, local, first, width = tile_columns(tile, N0, N1, N2, BLOCK_N)
    n = local * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = n < width
    columns = first + n
    weight_column_ptr = weight_ptr + columns

    # --- what is known before the kernel before this one has ended
    position = tl.arange(0, SEGMENT)
    k = segment_channel(position, split, SPLITS, BLOCK_K)
    live = k < K
    threshold = tl.load(threshold_ptr + projection)
    norm_weight = k
    scale = k
    if INPUT == FROM_HIDDEN:
        norm_weight = tl.load(norm_ptr + k, mask=live, other=0.0)
    if not DENSE:
        scale = tl.load(scale_ptr + projection * K + k, mask=live, other=0.0)
    # As in sparse_gemv_kernel: a projection's first tile counts, each program in its own cell.
    counts = local == 0
    kept_before_ptr += projection * SPLITS + split
    kept_after_ptr += projection * SPLITS + split
    values = room(ROOM, program) if SHARED else value_ptr + program * BATCH * LIST
    if not SHARED:
        values = _lay_values(
            values, x_ptr, m_ptr, l_ptr, ssq_in_ptr, norm_weight, scale, threshold, masked_ptr, token_ptr,
            kept_before_ptr, kept_after_ptr, counts, eps, ssq_parts, position, k, live,
            K, BATCH, SSQ_PAD, KV_SPLITS, HEAD_DIM, DENSE, BY_ROW, INPUT, LIST, SHARED, COUNT, PDL, dtype,
        )  # fmt: skip

    # --- the product
    rows = tl.arange(0, ROWS)
    # Rows that are not there repeat the last; nobody looks at their sums.
    held = tl.minimum(rows, BATCH - 1)[:, None] * LIST
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    count = (BLOCKS - split + SPLITS - 1) // SPLITS
    for step in tl.range(0, count, num_stages=STAGES):
        k_now = (step * SPLITS + split) * BLOCK_K + lane
        at = weight_column_ptr[None, :] + k_now.to(tl.int64)[:, None] * STRIDE
        if WHOLE:  # noqa: SIM108 (resolved at compile time)
            w = tl.load(at)
        else:
            w = tl.load(at, mask=(k_now < K)[:, None] & in_width[None, :], other=0.0)
        if SHARED:  # noqa: SIM102 (resolved at compile time)
            # In here, as the compiler puts the first reads of weights before the loop.
            if step == 0:
                values = _lay_values(
                    values, x_ptr, m_ptr, l_ptr, ssq_in_ptr, norm_weight, scale, threshold, masked_ptr, token_ptr,
                    kept_before_ptr, kept_after_ptr, counts, eps, ssq_parts, position, k, live,
                    K, BATCH, SSQ_PAD, KV_SPLITS, HEAD_DIM, DENSE, BY_ROW, INPUT, LIST, SHARED, COUNT, PDL, dtype,
                )  # fmt: skip
        x = get_half(values, held + (step * BLOCK_K + lane)[None, :], dtype, SHARED)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BLOCKS < SPLITS:
        # A program without a block was not in the loop; and sums of the kernel before may still lie in scratch memory.
        wait_for_previous_kernel(PDL)
    place = (split * BATCH + rows)[:, None] * N + columns[None, :]
    leave_partial(partial_ptr, place, acc, (rows < BATCH)[:, None] & in_width[None, :])

    add_up(
        split, tile, projection, local, first, width, partial_ptr, bias_ptr, out_ptr, ssq_out_ptr, counter_ptr,
        tl.float32, N0, N, TILES, BATCH, OUTPUT, HAS_BIAS, BLOCK_N, SPLITS, POLLERS, AT_ONCE, True,
    )  # fmt: skip


@triton.jit
def _lay_values(
    values, x_ptr, m_ptr, l_ptr, ssq_in_ptr, norm_weight, scale, threshold, masked_ptr, token_ptr, kept_before_ptr,
    kept_after_ptr, counts, eps, ssq_parts, position, k, live,
    K: tl.constexpr, BATCH: tl.constexpr, SSQ_PAD: tl.constexpr, KV_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DENSE: tl.constexpr, BY_ROW: tl.constexpr, INPUT: tl.constexpr, LIST: tl.constexpr, SHARED: tl.constexpr,
    COUNT: tl.constexpr, PDL: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Each row's values of the program's channels, 0 where it drops one, LIST apart; returns where, for ``get_half``.

    Waits for the kernel before this one, and lets the next one start. COUNT: adds what the rows keep to the program's
    own cell, if it ``counts``.
    """
    zero = wait_in_loop(ssq_parts, PDL)
    kept_rows = position * 0
    kept_before = zero.to(tl.int64)
    if COUNT:
        kept_before = tl.load(kept_before_ptr, mask=counts, other=0)
    x_ptr += zero
    m_ptr += zero
    l_ptr += zero
    ssq_in_ptr += zero
    for begin in tl.static_range(0, BATCH, _ROWS):
        # Several rows' inputs are on their way before the first is worked on: no read passes a write or a barrier.
        inputs = ()
        for row in tl.static_range(begin, begin + _ROWS):
            if row < BATCH:
                if INPUT == FROM_ATTENTION:
                    x = combined_attention(x_ptr, m_ptr, l_ptr, row, k, live, K, KV_SPLITS, HEAD_DIM, dtype)
                else:
                    x = tl.load(x_ptr + row * K + k, mask=live, other=0.0)
                inputs = inputs + (x,)  # noqa: RUF005 (the compiler knows no unpacking)
        squares = ()
        if INPUT == FROM_HIDDEN:
            if SHARED:
                hold_reads(zero)
            for row in tl.static_range(begin, begin + _ROWS):
                if row < BATCH:
                    squares = squares + (load_squares(ssq_in_ptr, row, ssq_parts, SSQ_PAD),)  # noqa: RUF005
        if SHARED:
            hold_reads(zero)
        for row in tl.static_range(begin, begin + _ROWS):
            if row < BATCH:
                x = inputs[row - begin]
                if INPUT == FROM_HIDDEN:
                    rstd = reciprocal_rms(squares[row - begin], eps, K)
                    x = normalise(
                        x.to(rstd.dtype), norm_weight.to(rstd.dtype), rstd, dtype, norm_weight.dtype == rstd.dtype
                    )
                if not DENSE:
                    limit = threshold
                    if BY_ROW:
                        limit = threshold * tl.load(masked_ptr + row)
                    # A NaN is not below anything: it is kept.
                    dropped = tl.abs(x.to(tl.float32)) * scale < limit
                    if COUNT:
                        kept_rows += (live & ~dropped & (tl.load(token_ptr + row) >= 0)).to(tl.int32)
                    x = tl.where(dropped, 0.0, x).to(dtype)
                x = tl.where(live, x, 0.0).to(dtype)
                put_half(values, row * LIST + position, x, position < LIST, SHARED)
    if COUNT:  # noqa: SIM102 (resolved at compile time)
        if counts:
            tl.store(kept_after_ptr, kept_before + tl.sum(kept_rows, axis=0))
    return settled(values, SHARED)
