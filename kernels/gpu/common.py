"""What the Triton kernels share: modes, the order in which channels are dealt to programs, programmatic dependent
launch.

Channels are dealt to the S programs of a split in chunks of ``CHUNK``: chunk c goes to program c mod S. Heads or other
runs of channels that are kept more often than others are thereby spread evenly, so the splits finish together.

Kernels write "wide" for the type they add up in (``precision``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Stretches(NamedTuple):
    """The attention's partial results, one for each stretch of the context."""

    x: Tensor  # (B, heads, kv_splits, head_dim) wide, softmax-weighted sums
    maximum: Tensor  # (B, heads, kv_splits) wide, log2 domain
    total: Tensor  # the same shape, denominators


class Source(NamedTuple):
    """Where a projection's input comes from: x as it is; x, the residual stream, after an RMSNorm; or the attention's
    stretches, combined."""

    x: Tensor | None  # (B, K) dtype
    ssq: Tensor | None  # RMSNorm: (B, ssq_parts) wide, partial sums of squares
    norm: Tensor | None  # RMSNorm: (K,) of the weights' type, or wide: 1 + weight
    stretches: Stretches | None


class Weights(NamedTuple):
    """A group of projections that read one input."""

    weight_t: Tensor  # (K, stride), channel-major; the projections' columns side by side; codes: int32 words
    bias: Tensor | None  # (N,) of the weights' type, or wide
    scales: Tensor  # (projections, K) float32
    thresholds: Tensor  # (projections,) float32
    code_scales: Tensor | None  # codes: (K / group, padded columns) float32
    zeros: Tensor | None  # codes of zero that are not the kind's own: the same shape


class Target(NamedTuple):
    """Where a projection's output goes, as ``Modes.output`` says."""

    out: Tensor  # dtype: TO_PLAIN (B, N); TO_RESIDUAL (B, N), read and written; TO_SILU and TO_GELU (B, n0)
    ssq: Tensor | None  # TO_RESIDUAL: (B, tiles * max(1, pollers)) wide


class Memory(NamedTuple):
    """What the programs of a launch leave for each other, and each for itself."""

    partial: Tensor  # (splits, B, N) integers as wide as the sums; with pollers NOTHING before and after
    counter: Tensor | None  # no pollers: (tiles,) int32, 0 before and after
    list_index: Tensor | None  # lists that are not in shared memory: (programs, length) int32
    list_value: Tensor | None  # and (programs, B, length) dtype


class Counting(NamedTuple):
    """The kept channels, counted."""

    token: Tensor  # (B,) int64, negative for a row that is not counted
    before: Tensor  # (projections, splits) int64
    after: Tensor  # the same shape: before, and what this launch keeps


class Shape(NamedTuple):
    """Compiled in: K, the projections' widths and their sum N, tiles of columns, rows B; the attention's stretches; how
    many partial sums of squares there may be, a multiple of 32."""

    k: int
    n0: int
    n1: int
    n2: int
    n: int
    stride: int
    tiles: int
    batch: int
    kv_splits: int
    head_dim: int
    ssq_pad: int


class Modes(NamedTuple):
    """Compiled in: ``output`` is TO_PLAIN, TO_RESIDUAL, TO_SILU or TO_GELU; ``dense``: no channel is dropped; ``pdl``:
    programmatic dependent launch; ``codes``: the ``Matrix``'s kind, and its ``group``."""

    output: int
    dense: bool
    pdl: bool
    codes: str
    group: int


class Columns(NamedTuple):
    """Within a kernel: the projection that a tile of columns belongs to, which of its tiles it is, and the projection's
    first column and width."""

    projection: int
    local: int
    first: int
    width: int


# Bytes. Triton's own use comes on top, and without asking the driver a program may have 48 KiB in all. Triton asks if
# its own use is more than that; what is declared here may then be nearly as much beside it.
ROOM_LIMIT = 36 * 1024
ROOM_LIMIT_BESIDE = 47 * 1024


def room_source(num_bytes: int, limit: int = ROOM_LIMIT) -> str:
    """PTX that declares so much shared memory and gives its address; "" for none, if it is more than there may be."""
    if num_bytes > limit:
        return ""
    return f"{{ .shared .align 16 .b8 room[{num_bytes}]; mov.u32 $0, room; }}"


@triton.jit
def room(SOURCE: tl.constexpr, scalar):
    """The address of the room that ``room_source`` declares; ``scalar`` is any int32. Once in a kernel."""
    return tl.inline_asm_elementwise(SOURCE, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put(items, place, value, wanted, SHARED: tl.constexpr):
    """items[place] = value where wanted: int32, or floating point, which is float32 in shared memory."""
    if not SHARED:
        tl.store(items + place, value.to(items.dtype.element_ty), mask=wanted)
    elif value.dtype.is_floating():
        # Its own way in: as bits among integers it costs a quarter more registers.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,f,r",
            [items + place * 4, value.to(tl.float32), wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,r,r",
            [items + place * 4, value, wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def get(items, place, FLOATING: tl.constexpr, SHARED: tl.constexpr):
    """items[place], after ``settled``."""
    if SHARED:
        value = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [items + place * 4], dtype=tl.int32, is_pure=True, pack=1
        )
        if FLOATING:
            value = value.to(tl.float32, bitcast=True)
    else:
        value = tl.load(items + place)
    return value


@triton.jit
def put_half(items, place, value, wanted, SHARED: tl.constexpr):
    """items[place] = value where wanted: fp16 or bf16."""
    if SHARED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b16 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,h,r",
            [items + place * 2, value.to(tl.int16, bitcast=True), wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(items + place, value, mask=wanted)


@triton.jit
def get_half(items, place, dtype: tl.constexpr, SHARED: tl.constexpr):
    """items[place], after ``settled``: fp16 or bf16."""
    if SHARED:
        value = tl.inline_asm_elementwise(
            "ld.shared.b16 $0, [$1];", "=h,r", [items + place * 2], dtype=tl.int16, is_pure=True, pack=1
        ).to(dtype, bitcast=True)
    else:
        value = tl.load(items + place)
    return value


@triton.jit
def settled(items, SHARED: tl.constexpr):
    """The list again, once every thread of the program has put what it had to."""
    if SHARED:
        # Not the compiler's own barrier: it reads no weights ahead in a loop that has one.
        items = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [items], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()
    return items


@triton.jit
def hold_reads(scalar):
    """What was read before this is on its way: left alone, the compiler moves each read to where it is needed, to save
    registers. ``scalar`` is any int32."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def add_rows(values, items, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of float32 values (ROWS, COLUMNS) over the rows, first to last, in one exchange through shared memory.

    ``tl.sum`` takes one for each number a thread holds. Columns are spread so that few threads meet in a bank.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = (column % 8) * (COLUMNS // 8) + column // 8
    put(items, row[:, None] * COLUMNS + place[None, :], values, place[None, :] >= 0, True)
    items = settled(items, True)
    total = get(items, place, True, True)
    for other in tl.static_range(1, ROWS):
        total += get(items, other * COLUMNS + place, True, True)
    return total


# Where a projection's output goes.
TO_PLAIN = tl.constexpr(0)  # y (B, N)
TO_RESIDUAL = tl.constexpr(1)  # added to the residual stream, with the sum of squares the next norm needs
TO_SILU = tl.constexpr(2)  # gate and up: silu(gate) * up
TO_GELU = tl.constexpr(3)  # the same, by the tanh form of GELU; from TO_SILU on, outputs are made of pairs


def exact_argument(value: float, wide: torch.dtype) -> float | tl.constexpr:
    """A number for a kernel that adds up in ``wide``: an ordinary argument is rounded to float32, a constant is not."""
    return tl.constexpr(value) if wide == torch.float64 else value


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait until the kernel before this one has written everything.

    What stands before this call may only read constants (weights, scales): it overlaps the previous kernel's tail.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Let the next kernel's programs take their places; they wait for this kernel's end before they read its
    results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_in_loop(scalar, PDL: tl.constexpr):
    """``wait_for_previous_kernel`` and ``let_next_kernel_start``, in a loop whose first reads are to come before them:
    the compiler thinks that nothing may pass those. Returns 0; what is read afterwards has to add it to its address, or
    may come too early.

    ``scalar``: any int32.
    """
    zero = scalar * 0
    if PDL:
        zero = tl.inline_asm_elementwise(
            "{ griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0; }",
            "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.multiple_of(zero, 16)


@triton.jit
def segment_channel(position, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """The channel that stands at ``position`` of a split's segment."""
    return ((position // CHUNK) * SPLITS + split) * CHUNK + position % CHUNK


@triton.jit
def segment_length(split, K: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """Positions in a split's segment; the last chunk may run past K and is masked where it is read."""
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    return ((CHUNKS - split + SPLITS - 1) // SPLITS) * CHUNK


@triton.jit
def normalise(hidden, norm_weight, rstd, dtype, ONCE: tl.constexpr):
    """RMSNorm's two roundings: ``dtype(weight * dtype(hidden * rstd))``, from wide values. ONCE: only the last one."""
    scaled = hidden * rstd
    if not ONCE:
        scaled = scaled.to(dtype).to(rstd.dtype)
    return (scaled * norm_weight).to(dtype)


@triton.jit
def soft_cap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), to a few roundings of CAP."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))


@triton.jit
def inverse_root(x):
    """1 / sqrt(x). The instruction for float64 is only good to 7 digits."""
    if x.dtype == tl.float64:  # noqa: SIM108 (resolved at compile time)
        root = 1.0 / tl.sqrt(x)
    else:
        root = tl.rsqrt(x)
    return root


@triton.jit
def load_squares(ssq_ptr, row, parts, SSQ_PAD: tl.constexpr):
    """(32,) sums of the partial sums of squares that a row's writers left: as many as a warp adds up by itself, where
    more would have to be exchanged between warps. SSQ_PAD: ``parts`` at most, a multiple of 32."""
    i = tl.arange(0, 32)
    squares = tl.load(ssq_ptr + row * parts + i, mask=i < parts, other=0.0)
    for start in tl.static_range(32, SSQ_PAD, 32):
        squares += tl.load(ssq_ptr + row * parts + start + i, mask=start + i < parts, other=0.0)
    return squares


@triton.jit
def reciprocal_rms(squares, eps, K: tl.constexpr):
    """1 / rms of a row of the residual stream, from what ``load_squares`` gives."""
    return inverse_root(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def combined_attention(stretches, row, k, live, shape: tl.constexpr, dtype: tl.constexpr):
    """The attention's output [row, k] in ``dtype`` from its ``Stretches``, 0 where not live.

    One tensor for each stretch: a second dimension would cost exchanges between threads.
    """
    KV_SPLITS: tl.constexpr = shape.kv_splits
    HEAD_DIM: tl.constexpr = shape.head_dim
    at = (row * (shape.k // HEAD_DIM) + k // HEAD_DIM) * KV_SPLITS
    ms = ()
    totals = ()
    parts = ()
    for s in tl.static_range(KV_SPLITS):
        ms = ms + (tl.load(stretches.maximum + at + s, mask=live, other=0.0),)  # noqa: RUF005
        totals = totals + (tl.load(stretches.total + at + s, mask=live, other=1.0),)  # noqa: RUF005
        part = tl.load(stretches.x + (at + s) * HEAD_DIM + k % HEAD_DIM, mask=live, other=0.0)
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
    return (x / total).to(dtype)


@triton.jit
def tile_columns(tile, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK_N: tl.constexpr):
    """The ``Columns`` of a tile of BLOCK_N of them; none spans two projections."""
    T0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
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
    return Columns(projection, local, first, width)
