"""What the Triton kernels share: groups of arguments, programmatic dependent launch, shared memory, RMSNorm; and how the
kernels of a linear begin: which columns and channels a program has, its input, which channels it keeps.

Sums are float32. Channels are dealt to the S programs of a split in chunks of ``CHUNK``: chunk c goes to program
c mod S. Heads or other runs of channels that are kept more often than others are spread evenly, so the splits finish
together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class KVSplits(NamedTuple):
    """Attention's partial results, one for each split of the context."""

    x: Tensor  # (B, heads, kv_splits, head_dim) float32, softmax-weighted sums
    maximum: Tensor  # (B, heads, kv_splits) float32, log2 domain
    total: Tensor  # the same shape, denominators


class Input(NamedTuple):
    """A linear's input: x as it is; x after an RMSNorm (``ssq``, ``norm``); or attention's splits, combined."""

    x: Tensor | None  # (B, K) dtype
    ssq: Tensor | None = None  # (B, ssq_parts) float32, partial sums of squares of x's rows
    norm: Tensor | None = None  # (K,) of the weights' dtype; float32 if multiplied before any rounding: 1 + weight
    attention: KVSplits | None = None
    row_mask: Tensor | None = None  # (B,) float32, 1 for a masked row, 0 for one that keeps all channels; None: all 1


class Weights(NamedTuple):
    weight_t: Tensor  # (K, stride), channel-major; the projections' columns side by side; quantized: int32 words
    bias: Tensor | None  # (N,) of the weights' dtype
    scales: Tensor  # (projections, K) float32, channel scales
    thresholds: Tensor  # (projections,) float32
    quant_scales: Tensor | None  # quantized: (K / group, padded columns) float32
    quant_zeros: Tensor | None  # zero points other than the type's own: the same shape


class Output(NamedTuple):
    out: Tensor  # dtype: (B, N), "residual" read and written; "silu" and "gelu_tanh" (B, n0)
    ssq: Tensor | None = None  # "residual": (B, tiles * max(1, reducers)) float32, sums of squares for the next norm


class Workspace(NamedTuple):
    partial: Tensor  # (splits, B, N) int32, bits of float32; with spinning reducers EMPTY before and after
    counter: Tensor | None  # no spinning reducers: (tiles,) int32, 0 before and after
    list_index: Tensor | None  # compacted index lists outside shared memory: (programs, length) int32
    list_value: Tensor | None  # and (programs, B, length) dtype


class Counting(NamedTuple):
    token: Tensor  # (B,) int64, negative for a row that is not counted
    before: Tensor  # (projections, splits) int64
    after: Tensor  # the same shape: before, and what this launch keeps


class Problem(NamedTuple):
    """Compiled in: what is computed."""

    k: int
    n0: int  # the projections' widths, and their sum
    n1: int
    n2: int
    n: int
    stride: int  # of weight_t
    batch: int
    kv_splits: int  # of the attention that is read
    head_dim: int
    ssq_pad: int  # partial sums of squares at most, a multiple of 32
    output: str  # "plain" (y), "residual" (residual + y), "silu" or "gelu_tanh" (activation(gate) * up)
    dense: bool  # no channel is dropped
    pdl: bool  # programmatic dependent launch
    quant: str  # "none", "int4", "int8", "fp8"
    group: int  # channels that share a quantization scale


class LaunchConfig(NamedTuple):
    """Compiled in: how it is computed. Fields as in ``GemvTile``, and what follows from it."""

    tiles: int  # of columns
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    chunk: int
    unroll: int
    trigger: int
    lead: int
    reducers: int
    segment: int  # a program's channels, a power of two
    length: int  # entries of each of its lists
    smem: str  # PTX that declares the lists' shared memory; "": they lie in scratch memory
    reduce_splits: int  # splits whose partial sums are read at a time


class Columns(NamedTuple):
    """Within a kernel: a tile's projection, its index there, the projection's first column and width."""

    projection: Any
    local: Any
    first: Any
    width: Any


class Channels(NamedTuple):
    """Within a kernel: a program's channels, their positions in its segment and ids; and what is known before x."""

    position: Any
    k: Any
    live: Any  # those that exist
    norm: Any
    scale: Any
    threshold: Any


_ROWS = tl.constexpr(8)  # rows whose inputs are read at the same time

# --- shared memory


@triton.jit
def smem_alloc(SOURCE: tl.constexpr, scalar):
    """The address of what ``LaunchConfig.smem`` declares; ``scalar`` is any int32. Once in a kernel."""
    return tl.inline_asm_elementwise(SOURCE, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


_STORE = "{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b{} [$1], $2; mov.b32 $0, 0; }}"
_STORE_16 = tl.constexpr(_STORE.format(16))
_STORE_32 = tl.constexpr(_STORE.format(32))


@triton.jit
def smem_store(items, place, value, wanted, SHARED: tl.constexpr):
    """items[place] = value (int32, float32, fp16 or bf16) where wanted, in shared or global memory."""
    if not SHARED:
        tl.store(items + place, value.to(items.dtype.element_ty), mask=wanted)
    elif value.dtype.primitive_bitwidth == 16:
        tl.inline_asm_elementwise(
            _STORE_16, "=r,r,h,r", [items + place * 2, value.to(tl.int16, bitcast=True), wanted.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        # A float32 as such: as bits among integers it costs a quarter more registers.
        CONSTRAINTS: tl.constexpr = "=r,r,f,r" if value.dtype.is_floating() else "=r,r,r,r"
        tl.inline_asm_elementwise(
            _STORE_32, CONSTRAINTS, [items + place * 4, value, wanted.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def smem_load(items, place, dtype: tl.constexpr, SHARED: tl.constexpr):
    """items[place], after ``smem_barrier``."""
    if not SHARED:
        value = tl.load(items + place)
    elif dtype.primitive_bitwidth == 16:
        value = tl.inline_asm_elementwise(
            "ld.shared.b16 $0, [$1];", "=h,r", [items + place * 2], dtype=tl.int16, is_pure=True, pack=1
        ).to(dtype, bitcast=True)
    else:
        value = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [items + place * 4], dtype=tl.int32, is_pure=True, pack=1
        ).to(dtype, bitcast=True)
    return value


@triton.jit
def smem_barrier(items, SHARED: tl.constexpr):
    """``items`` again, once every thread of the program has stored."""
    if SHARED:
        # Not the compiler's own barrier: it reads no weights ahead in a loop that has one.
        items = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [items], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()
    return items


# --- the order of launches and loads


@triton.jit
def issue_loads(scalar):
    """The loads before this are issued before what follows: left alone, the compiler moves each to where it is needed,
    to save registers. ``scalar`` is any int32."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait until the previous kernel has written everything. What precedes this call may only read constants (weights,
    scales): it overlaps the previous kernel's tail."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Let the next kernel's programs start; they wait for this kernel's end before they read its results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_in_loop(scalar, PDL: tl.constexpr):
    """``wait_for_previous_kernel`` and ``let_next_kernel_start`` inside a loop whose first loads have to come before
    them: the compiler moves no load across those. Returns 0, to be added to the address of what is read afterwards, or
    that may come too early. ``scalar``: any int32."""
    zero = scalar * 0
    if PDL:
        zero = tl.inline_asm_elementwise(
            "{ griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0; }",
            "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.multiple_of(zero, 16)


# --- columns and channels of a program


@triton.jit
def tile_columns(tile, problem: tl.constexpr, BLOCK_N: tl.constexpr):
    """The ``Columns`` of a tile of BLOCK_N of them; none spans two projections."""
    T0: tl.constexpr = (problem.n0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (problem.n1 + BLOCK_N - 1) // BLOCK_N
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
    return Columns(projection, local, first, width)


@triton.jit
def segment_channel(position, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """The channel at ``position`` of a split's segment."""
    return ((position // CHUNK) * SPLITS + split) * CHUNK + position % CHUNK


@triton.jit
def segment_length(split, K: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """Positions in a split's segment; the last chunk may run past K and is masked where it is read."""
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    return ((CHUNKS - split + SPLITS - 1) // SPLITS) * CHUNK


@triton.jit
def program_channels(given, weights, of, split, problem: tl.constexpr, launch: tl.constexpr, CHUNK: tl.constexpr):
    """The ``Channels`` of a program: constants, which are read before the previous kernel has ended."""
    position = tl.arange(0, launch.segment)
    k = segment_channel(position, split, launch.splits, CHUNK)
    live = k < problem.k
    threshold = tl.load(weights.thresholds + of.projection)
    norm = k
    scale = k
    if given.norm is not None:
        norm = tl.load(given.norm + k, mask=live, other=0.0)
    if not problem.dense:
        scale = tl.load(weights.scales + of.projection * problem.k + k, mask=live, other=0.0)
    return Channels(position, k, live, norm, scale, threshold)


# --- RMSNorm and masks


@triton.jit
def rms_normalize(x, weight, rstd, dtype, ROUND_ONCE: tl.constexpr):
    """``dtype(weight * dtype(x * rstd))`` from float32; ROUND_ONCE: only the outer rounding, as Gemma's norms have."""
    scaled = x * rstd
    if not ROUND_ONCE:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight).to(dtype)


@triton.jit
def load_squares(ssq_ptr, row, parts, SSQ_PAD: tl.constexpr):
    """(32,) sums of a row's partial sums of squares: as many as one warp adds up by itself, where more would have to be
    exchanged between warps. SSQ_PAD: ``parts`` at most, a multiple of 32."""
    i = tl.arange(0, 32)
    squares = tl.load(ssq_ptr + row * parts + i, mask=i < parts, other=0.0)
    for start in tl.static_range(32, SSQ_PAD, 32):
        squares += tl.load(ssq_ptr + row * parts + start + i, mask=start + i < parts, other=0.0)
    return squares


@triton.jit
def reciprocal_rms(squares, eps, K: tl.constexpr):
    """1 / rms of a row, from what ``load_squares`` gives."""
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def soft_cap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), to a few roundings of CAP."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))


@triton.jit
def is_dropped(x, scale, limit):
    """The mask, as ``reference.keep_mask`` defines it: a NaN is not below anything, so it is kept."""
    return tl.abs(x.to(tl.float32)) * scale < limit


@triton.jit
def drops(given, x, channels, row):
    """``is_dropped`` for the channels of a row; its threshold is 0 if it keeps all of them."""
    limit = channels.threshold
    if given.row_mask is not None:
        limit = limit * tl.load(given.row_mask + row)
    return is_dropped(x, channels.scale, limit)


# --- the input of a linear


@triton.jit
def load_input(given, row, channels, problem: tl.constexpr, dtype: tl.constexpr):
    """A row's values of the program's channels before any norm: x, or in ``dtype`` attention's splits combined.

    One tensor for each split: a second dimension would cost exchanges between threads.
    """
    k = channels.k
    live = channels.live
    if given.attention is None:
        x = tl.load(given.x + row * problem.k + k, mask=live, other=0.0)
    else:
        KV_SPLITS: tl.constexpr = problem.kv_splits
        HEAD_DIM: tl.constexpr = problem.head_dim
        at = (row * (problem.k // HEAD_DIM) + k // HEAD_DIM) * KV_SPLITS
        ms = ()
        totals = ()
        parts = ()
        for s in tl.static_range(KV_SPLITS):
            ms += (tl.load(given.attention.maximum + at + s, mask=live, other=0.0),)
            totals += (tl.load(given.attention.total + at + s, mask=live, other=1.0),)
            part = tl.load(given.attention.x + (at + s) * HEAD_DIM + k % HEAD_DIM, mask=live, other=0.0)
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
def normalize_input(x, squares, channels, eps, problem: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of a row's values; ``squares``: what ``load_squares`` gives."""
    norm = channels.norm
    rstd = reciprocal_rms(squares, eps, problem.k)
    return rms_normalize(x.to(tl.float32), norm.to(tl.float32), rstd, dtype, norm.dtype == tl.float32)


@triton.jit
def choose_channels(
    given, channels, counting, eps, ssq_parts, problem: tl.constexpr, EACH: tl.constexpr, dtype: tl.constexpr
):
    """For one row or two: each row's float32 values of the program's channels, which of them any row keeps, and how
    many counted rows keep each. EACH: a row's own dropped channels are 0, and what each row keeps is counted."""
    BATCH: tl.constexpr = problem.batch
    NORMED: tl.constexpr = given.norm is not None
    # Loads first: none passes a store or a barrier.
    inputs = ()
    squares = ()
    for row in tl.static_range(BATCH):
        inputs += (load_input(given, row, channels, problem, dtype),)
        if NORMED:
            squares += (load_squares(given.ssq, row, ssq_parts, problem.ssq_pad),)
    keep = channels.position < 0
    kept_rows = channels.position * 0
    xs = ()
    for row in tl.static_range(BATCH):
        x = inputs[row]
        if NORMED:
            x = normalize_input(x, squares[row], channels, eps, problem, dtype)
        if problem.dense:
            x = x.to(tl.float32)
        else:
            keep_row = channels.live & ~drops(given, x, channels, row)
            keep = keep | keep_row
            if EACH:
                if counting is not None:
                    kept_rows += (keep_row & (tl.load(counting.token + row) >= 0)).to(tl.int32)
                x = tl.where(keep_row, x.to(tl.float32), 0.0)
            else:
                x = x.to(tl.float32)
        xs += (x,)
    return xs, keep, kept_rows


@triton.jit
def store_inputs(
    values, given, channels, counting, counts, eps, ssq_parts,
    problem: tl.constexpr, LENGTH: tl.constexpr, SHARED: tl.constexpr, dtype: tl.constexpr, SCALE: tl.constexpr = 1.0,
):  # fmt: skip
    """Store each row's values of the program's channels, times SCALE, 0 where it drops one, LENGTH apart; returns where,
    for ``smem_load``.

    Waits for the previous kernel, and lets the next one start. Adds what the rows keep to the program's own cell, at
    which ``counting`` points, if it ``counts``.
    """
    BATCH: tl.constexpr = problem.batch
    NORMED: tl.constexpr = given.norm is not None
    COUNT: tl.constexpr = counting is not None
    position = channels.position
    zero = wait_in_loop(ssq_parts, problem.pdl)
    kept_rows = position * 0
    kept_before = zero.to(tl.int64)
    if COUNT:
        kept_before = tl.load(counting.before, mask=counts, other=0)
    if given.attention is not None:
        splits = given.attention
        splits = KVSplits(splits.x + zero, splits.maximum + zero, splits.total + zero)
        after_wait = Input(None, None, None, splits, given.row_mask)
    else:
        after_wait = Input(given.x + zero, None, None, None, given.row_mask)
    ssq_ptr = given.ssq
    if NORMED:
        ssq_ptr += zero
    for begin in tl.static_range(0, BATCH, _ROWS):
        # Several rows' loads first: none passes a store or a barrier.
        inputs = ()
        squares = ()
        for row in tl.static_range(begin, begin + _ROWS):
            if row < BATCH:
                inputs += (load_input(after_wait, row, channels, problem, dtype),)
        if NORMED:
            if SHARED:
                issue_loads(zero)
            for row in tl.static_range(begin, begin + _ROWS):
                if row < BATCH:
                    squares += (load_squares(ssq_ptr, row, ssq_parts, problem.ssq_pad),)
        if SHARED:
            issue_loads(zero)
        for row in tl.static_range(begin, begin + _ROWS):
            if row < BATCH:
                x = inputs[row - begin]
                if NORMED:
                    x = normalize_input(x, squares[row - begin], channels, eps, problem, dtype)
                if not problem.dense:
                    dropped = drops(given, x, channels, row)
                    if COUNT:
                        kept_rows += (channels.live & ~dropped & (tl.load(counting.token + row) >= 0)).to(tl.int32)
                    x = tl.where(dropped, 0.0, x).to(dtype)
                x = tl.where(channels.live, x, 0.0).to(dtype)
                if SCALE != 1.0:
                    x = (x.to(tl.float32) * SCALE).to(dtype)
                smem_store(values, row * LENGTH + position, x, position < LENGTH, SHARED)
    if COUNT:  # noqa: SIM102 (resolved at compile time)
        if counts:
            tl.store(counting.after, kept_before + tl.sum(kept_rows, axis=0))
    return smem_barrier(values, SHARED)
