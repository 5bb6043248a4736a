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

from ..arguments import Counting
from ..common import segment_channel, tile_columns, wait_for_previous_kernel
from ..lists import get_half, room
from .codes import code_columns, decoded
from .partials import add_up, leave_partial
from .selection import Channels, lay_values

__all__ = ["masked_gemm_kernel"]


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
