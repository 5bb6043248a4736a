"""What the Triton kernels share: modes, the order in which channels are dealt to programs, programmatic dependent
launch.

Channels are dealt to the S programs of a split in chunks of ``CHUNK``: chunk c goes to program c mod S. Heads or other
runs of channels that are kept more often than others are thereby spread evenly, so the splits finish together.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "FROM_ATTENTION",
    "FROM_HIDDEN",
    "FROM_PLAIN",
    "TO_PLAIN",
    "TO_RESIDUAL",
    "TO_SILU",
    "let_next_kernel_start",
    "normalise",
    "segment_channel",
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
def normalise(hidden, norm_weight, rstd, dtype):
    """RMSNorm's two roundings: ``dtype(weight * dtype(hidden * rstd))``, from float32 values."""
    scaled = (hidden * rstd).to(dtype).to(tl.float32)
    return (scaled * norm_weight).to(dtype)
