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

__all__ = [
    "FROM_ATTENTION",
    "FROM_HIDDEN",
    "FROM_PLAIN",
    "TO_PLAIN",
    "TO_RESIDUAL",
    "TO_SILU",
    "exact_argument",
    "inverse_root",
    "let_next_kernel_start",
    "load_squares",
    "normalise",
    "reciprocal_rms",
    "segment_channel",
    "segment_length",
    "wait_for_previous_kernel",
]

# Where a projection's input comes from.
FROM_PLAIN = tl.constexpr(0)  # x (B, K), as it is
FROM_HIDDEN = tl.constexpr(1)  # the residual stream: RMS-normalise it first
FROM_ATTENTION = tl.constexpr(2)  # the attention's partial results, one for each split of the context

# Where its output goes.
TO_PLAIN = tl.constexpr(0)  # y (B, N)
TO_RESIDUAL = tl.constexpr(1)  # added to the residual stream, with the sum of squares the next norm needs
TO_SILU = tl.constexpr(2)  # gate and up: silu(gate) * up


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
def segment_channel(position, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """The channel that stands at ``position`` of a split's segment."""
    return ((position // CHUNK) * SPLITS + split) * CHUNK + position % CHUNK


@triton.jit
def segment_length(split, K: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """Positions in a split's segment; the last chunk may run past K and is masked where it is read."""
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    return ((CHUNKS - split + SPLITS - 1) // SPLITS) * CHUNK


@triton.jit
def normalise(hidden, norm_weight, rstd, dtype):
    """RMSNorm's two roundings: ``dtype(weight * dtype(hidden * rstd))``, from wide values."""
    scaled = (hidden * rstd).to(dtype).to(rstd.dtype)
    return (scaled * norm_weight).to(dtype)


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
