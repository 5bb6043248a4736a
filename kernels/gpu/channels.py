"""The prologue of a linear's kernel: a program's columns and channels, its input, the selection of kept channels.

The channels are divided among S splits in chunks of ``CHUNK``: chunk c belongs to split c mod S. Runs of channels that
are kept more often than others, such as a head's, are thereby spread evenly over the splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common import (
    Input,
    KVSplits,
    issue_loads,
    load_squares,
    reciprocal_rms,
    rms_normalize,
    smem_barrier,
    smem_store,
    smem_store_runs,
)


class Columns(NamedTuple):
    """A program's tile of columns and its split of the channels (values within a kernel)."""

    tile: Any
    split: Any
    projection: Any  # of the tile
    local: Any  # index of the tile within its projection
    first: Any  # the projection's first column
    width: Any  # the projection's number of columns
    n: Any  # (BLOCK_N,) columns within the projection
    live: Any  # n < width
    column: Any  # first + n


class Channels(NamedTuple):
    """A program's channels and their constants (values within a kernel), (segment,) unless said otherwise."""

    position: Any  # within the program's segment
    k: Any  # rows of the weights: channels times planes
    live: Any  # k < K
    norm: Any  # weights of the RMSNorm
    scale: Any  # channel scales
    threshold: Any  # scalar; of graded weights one for each row
    low: Any  # of ``paired_channels``: scalar, threshold of the low planes
    count: Any  # scalar, number of rows, including those of a last chunk that are K or more


@triton.jit
def tile_columns(tile, split, problem: tl.constexpr, BLOCK_N: tl.constexpr):
    """The ``Columns`` of a tile of BLOCK_N columns; a tile does not span two projections."""
    T0: tl.constexpr = (problem.n0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (problem.n1 + BLOCK_N - 1) // BLOCK_N
    T2: tl.constexpr = (problem.n2 + BLOCK_N - 1) // BLOCK_N
    second = (tile >= T0).to(tl.int32)
    third = (tile >= T0 + T1).to(tl.int32)
    projection = second + third if problem.n2 > 0 else second
    local = tile - second * T0
    first = tl.where(second > 0, problem.n0, 0)
    width = tl.where(second > 0, problem.n1, problem.n0)
    if problem.n2 > 0:
        local = local - third * T1
        first = tl.where(third > 0, problem.n0 + problem.n1, first)
        width = tl.where(third > 0, problem.n2, width)
    if problem.n3 > 0:
        fourth = (tile >= T0 + T1 + T2).to(tl.int32)
        projection += fourth
        local = local - fourth * T2
        first = tl.where(fourth > 0, problem.n0 + problem.n1 + problem.n2, first)
        width = tl.where(fourth > 0, problem.n3, width)
    n = local * BLOCK_N + tl.arange(0, BLOCK_N)
    return Columns(tile, split, projection, local, first, width, n, n < width, first + n)


@triton.jit
def segment_channel(position, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """The channel at ``position`` of a split's segment."""
    return ((position // CHUNK) * SPLITS + split) * CHUNK + position % CHUNK


@triton.jit
def channel_of(row, problem: tl.constexpr):
    """The channel of a row of the weights."""
    return row if problem.planes == 1 else row // problem.planes


@triton.jit
def plane_value(x, row, problem: tl.constexpr):
    """The float32 factor of a row's codes: x, or 16 x for a high plane."""
    value = x.to(tl.float32)
    return value if problem.planes == 1 else tl.where(row % 2 == 0, value * 16.0, value)


@triton.jit
def program_channels(inputs, weights, of, problem: tl.constexpr, launch: tl.constexpr, CHUNK: tl.constexpr, begin=0):
    """The ``Channels`` of a program from position ``begin`` on. Loads constants only, so it may precede gdc_wait."""
    position = tl.arange(0, launch.segment)
    k = segment_channel(begin + position, of.split, launch.splits, CHUNK)
    live = k < problem.k
    channel = channel_of(k, problem)
    if problem.planes == 1:
        threshold = tl.load(weights.thresholds + of.projection)
    else:
        threshold = tl.load(weights.thresholds + of.projection * problem.planes + k % problem.planes)
    norm = tl.load(inputs.norm + channel, mask=live, other=0.0) if inputs.norm is not None else k
    scale_at = weights.scales + of.projection * (problem.k // problem.planes) + channel
    scale = k if problem.dense else tl.load(scale_at, mask=live, other=0.0)
    CHUNKS: tl.constexpr = (problem.k + CHUNK - 1) // CHUNK
    count = ((CHUNKS - of.split + launch.splits - 1) // launch.splits) * CHUNK
    return Channels(position, k, live, norm, scale, threshold, threshold, count)


@triton.jit
def paired_channels(inputs, weights, of, problem: tl.constexpr, launch: tl.constexpr):
    """The ``Channels`` of a program with graded weights, one position for both planes of a channel, so that its score
    is computed once; ``k``: channels, ``count``: rows."""
    CHUNK: tl.constexpr = launch.chunk // 2
    CHANNELS: tl.constexpr = problem.k // 2
    position = tl.arange(0, launch.segment // 2)
    k = segment_channel(position, of.split, launch.splits, CHUNK)
    live = k < CHANNELS
    high = tl.load(weights.thresholds + of.projection * 2)
    low = tl.load(weights.thresholds + of.projection * 2 + 1)
    norm = tl.load(inputs.norm + k, mask=live, other=0.0) if inputs.norm is not None else k
    scale = tl.load(weights.scales + of.projection * CHANNELS + k, mask=live, other=0.0)
    CHUNKS: tl.constexpr = (CHANNELS + CHUNK - 1) // CHUNK
    count = ((CHUNKS - of.split + launch.splits - 1) // launch.splits) * launch.chunk
    return Channels(position, k, live, norm, scale, high, low, count)


@triton.jit
def clear_lists(index, values, K: tl.constexpr, VALUES: tl.constexpr, launch: tl.constexpr, LISTED: tl.constexpr):
    """Fill a program's index list (if LISTED) with K, the padding, and its list of x values with VALUES float32
    zeros."""
    SEGMENT: tl.constexpr = launch.segment
    LENGTH: tl.constexpr = launch.length
    SHARED: tl.constexpr = launch.smem != ""
    position = tl.arange(0, SEGMENT)
    if LISTED:
        for start in tl.static_range(0, LENGTH, SEGMENT):
            none = tl.full((SEGMENT,), K, tl.int32)
            smem_store(index, start + position, none, start + position < LENGTH, SHARED)
    for start in tl.static_range(0, VALUES, SEGMENT):
        smem_store(values, start + position, tl.zeros((SEGMENT,), tl.float32), start + position < VALUES, SHARED)
    tl.debug_barrier()


@triton.jit
def is_dropped(x, scale, limit):
    """The negation of ``reference.keep_mask``: a NaN score is kept."""
    return tl.abs(x.to(tl.float32)) * scale < limit


@triton.jit
def drops(inputs, x, channels, row, LOW: tl.constexpr = False):
    """``is_dropped`` for a row's channels, LOW: for their low planes; none of a row whose ``row_mask`` is 0."""
    limit = channels.low if LOW else channels.threshold
    if inputs.row_mask is not None:
        limit = limit * tl.load(inputs.row_mask + row)
    return is_dropped(x, channels.scale, limit)


@triton.jit
def load_input(inputs, row, channels, problem: tl.constexpr, dtype: tl.constexpr, PAIRED: tl.constexpr = False):
    """A row's x at the program's channels, without norm, or attention's combined KV splits in ``dtype``. Each KV split
    is a tensor of its own: reducing a second dimension would exchange data between threads."""
    k = channels.k if PAIRED else channel_of(channels.k, problem)
    CHANNELS: tl.constexpr = problem.k // problem.planes
    live = channels.live
    if inputs.attention is None:
        x = tl.load(inputs.x + row * CHANNELS + k, mask=live, other=0.0)
    else:
        KV_SPLITS: tl.constexpr = problem.kv_splits
        HEAD_DIM: tl.constexpr = problem.head_dim
        at = (row * (CHANNELS // HEAD_DIM) + k // HEAD_DIM) * KV_SPLITS
        ms = ()
        totals = ()
        parts = ()
        for s in tl.static_range(KV_SPLITS):
            ms += (tl.load(inputs.attention.maximum + at + s, mask=live, other=0.0),)
            totals += (tl.load(inputs.attention.total + at + s, mask=live, other=1.0),)
            part = tl.load(inputs.attention.x + (at + s) * HEAD_DIM + k % HEAD_DIM, mask=live, other=0.0)
            parts += (part,)
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
    return x


@triton.jit
def choose_channels(
    inputs, channels, eps, ssq_parts, problem: tl.constexpr, EACH: tl.constexpr, dtype, PAIRED: tl.constexpr = False
):
    """For one or two rows: the float32 values of each row at the program's channels, whether any row keeps each channel,
    and the same for low planes. EACH: values are 0 where their own row drops the channel. PAIRED: values of the high
    planes, then of the low ones."""
    BATCH: tl.constexpr = problem.batch
    CHANNELS: tl.constexpr = problem.k // problem.planes
    NORMED: tl.constexpr = inputs.norm is not None
    # All loads first: the compiler moves none across a store or a barrier.
    loaded = ()
    squares = ()
    for row in tl.static_range(BATCH):
        loaded += (load_input(inputs, row, channels, problem, dtype, PAIRED),)
        if NORMED:
            squares += (load_squares(inputs.ssq, row, ssq_parts, problem.ssq_pad),)
    keep = channels.position < 0
    keep_low = keep
    xs = ()
    lows = ()
    for row in tl.static_range(BATCH):
        x = loaded[row]
        if NORMED:
            x = rms_normalize(x, channels.norm, reciprocal_rms(squares[row], eps, CHANNELS), dtype)
        value = x.to(tl.float32) * 16.0 if PAIRED else plane_value(x, channels.k, problem)
        if not problem.dense:
            keep_row = channels.live & ~drops(inputs, x, channels, row)
            keep = keep | keep_row
            if PAIRED:
                keep_row_low = channels.live & ~drops(inputs, x, channels, row, True)
                keep_low = keep_low | keep_row_low
                lows += (tl.where(keep_row_low, x.to(tl.float32), 0.0),)
            if EACH:
                value = tl.where(keep_row, value, 0.0)
        xs += (value,)
    return xs + lows, keep, keep_low


@triton.jit
def store_inputs(
    values, inputs, channels, eps, ssq_parts,
    problem: tl.constexpr, LENGTH: tl.constexpr, SHARED: tl.constexpr, dtype: tl.constexpr, SCALE: tl.constexpr = 1.0,
    RUN: tl.constexpr = 1,
):  # fmt: skip
    """gdc_wait and gdc_launch, then store each row's masked values at the program's channels, times SCALE, from
    values[row * LENGTH] on; returns ``values`` after a barrier. RUN: 1, or the RUN of ``smem_store_runs``."""
    BATCH: tl.constexpr = problem.batch
    CHANNELS: tl.constexpr = problem.k // problem.planes
    NORMED: tl.constexpr = inputs.norm is not None
    AT_ONCE: tl.constexpr = 8 if BATCH <= 16 else 16  # rows whose inputs are loaded together
    position = channels.position
    # Called within the loop over the weights, whose prologue has to load them before the wait; the compiler moves no
    # load across tl.extra.cuda.gdc_wait. This asm returns 0, which is added to the pointers loaded after it, as a
    # dependency.
    zero = ssq_parts * 0
    if problem.pdl:
        zero = tl.inline_asm_elementwise(
            "{ griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0; }",
            "=r,r", [ssq_parts], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    zero = tl.multiple_of(zero, 16)
    if inputs.attention is not None:
        splits = inputs.attention
        splits = KVSplits(splits.x + zero, splits.maximum + zero, splits.total + zero)
        after_wait = Input(None, None, None, splits, inputs.row_mask)
    else:
        after_wait = Input(inputs.x + zero, None, None, None, inputs.row_mask)
    ssq_ptr = inputs.ssq
    if NORMED:
        ssq_ptr += zero
    for begin in tl.static_range(0, BATCH, AT_ONCE):
        # All loads first: the compiler moves none across a store or a barrier.
        loaded = ()
        squares = ()
        for row in tl.static_range(begin, begin + AT_ONCE):
            if row < BATCH:
                loaded += (load_input(after_wait, row, channels, problem, dtype),)
        if NORMED:
            if SHARED:
                issue_loads(zero)
            for row in tl.static_range(begin, begin + AT_ONCE):
                if row < BATCH:
                    squares += (load_squares(ssq_ptr, row, ssq_parts, problem.ssq_pad),)
        if SHARED:
            issue_loads(zero)
        for row in tl.static_range(begin, begin + AT_ONCE):
            if row < BATCH:
                x = loaded[row - begin]
                if NORMED:
                    x = rms_normalize(x, channels.norm, reciprocal_rms(squares[row - begin], eps, CHANNELS), dtype)
                if not problem.dense:
                    x = tl.where(drops(inputs, x, channels, row), 0.0, x).to(dtype)
                x = tl.where(channels.live, x, 0.0).to(dtype)
                if SCALE != 1.0 or problem.planes != 1:
                    x = (plane_value(x, channels.k, problem) * SCALE).to(dtype)
                if RUN > 1:
                    smem_store_runs(values, row * LENGTH + position, x, position < LENGTH, RUN)
                else:
                    smem_store(values, row * LENGTH + position, x, position < LENGTH, SHARED)
    return smem_barrier(values, SHARED)
