"""What the Triton kernels share: modes, the order in which channels are dealt to programs, programmatic dependent
launch.

Channels are dealt to the S programs of a split in chunks of ``CHUNK``: chunk c goes to program c mod S. Heads or other
runs of channels that are kept more often than others are thereby spread evenly, so the splits finish together.

Kernels write "wide" for the type they add up in (``precision``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import Columns

__all__ = [
    "TO_GELU",
    "TO_PLAIN",
    "TO_RESIDUAL",
    "TO_SILU",
    "combined_attention",
    "exact_argument",
    "inverse_root",
    "let_next_kernel_start",
    "load_squares",
    "normalise",
    "reciprocal_rms",
    "segment_channel",
    "segment_length",
    "soft_cap",
    "tile_columns",
    "wait_for_previous_kernel",
    "wait_in_loop",
]

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
