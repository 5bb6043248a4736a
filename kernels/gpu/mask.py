"""Many rows of x with their dropped channels at zero, copies for each projection: what a dense product then reads.

    out[c, m, :] = where(|x[m]| * scales[p] < thresholds[p] * masked[m], 0, x[m])    as in reference.py, bit for bit

with p the projection that copy c is for. For more rows than ``gemv`` takes at once: every weight is read for them
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import wait_for_previous_kernel

__all__ = ["mask_rows"]

_BLOCK_K = 1024


@triton.jit(do_not_specialize=["M"])
def _mask_rows_kernel(
    x_ptr,  # (M, K)
    scale_ptr,  # (projections, K) float32
    threshold_ptr,  # (projections,) float32
    masked_ptr,  # (M,) float32
    out_ptr,  # (copies, M, K)
    M,
    K: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    copy = tl.program_id(2)
    # Copies of the second and of the third projection begin at SECOND and THIRD.
    p = (copy >= SECOND).to(tl.int32) + (copy >= THIRD).to(tl.int32)
    live = k < K
    scale = tl.load(scale_ptr + p * K + k, mask=live, other=0.0)
    threshold = tl.load(threshold_ptr + p)
    wait_for_previous_kernel(PDL)
    x = tl.load(x_ptr + row * K + k, mask=live, other=0.0)
    limit = threshold * tl.load(masked_ptr + row)
    # A NaN is not below anything: it is kept.
    kept = tl.where(tl.abs(x.to(tl.float32)) * scale < limit, 0.0, x)
    tl.store(out_ptr + (copy.to(tl.int64) * M + row) * K + k, kept, mask=live)


def mask_rows(
    x: Tensor,
    scales: Tensor,
    thresholds: Tensor,
    masked: Tensor,
    *,
    copies: Sequence[int] | None = None,
    pdl: bool = False,
) -> Tensor:
    """The masked copies of x, (sum(copies), M, K), those of one projection after those of another.

    Args:
        x: (M, K), contiguous.
        scales: (projections, K) float32.
        thresholds: (projections,) float32.
        masked: (M,) float32, 1 for a row that is masked, 0 for one that keeps all its channels.
        copies: how many of each projection, one to three of them; None for one of each.
        pdl: programmatic dependent launch (compute capability 9.0 or later).
    """
    rows, k = x.shape
    ends = list(accumulate(copies or [1] * len(scales)))
    out = torch.empty(ends[-1], rows, k, dtype=x.dtype, device=x.device)
    block_k = min(_BLOCK_K, triton.next_power_of_2(k))
    second, third = (*ends, ends[-1], ends[-1])[:2]
    _mask_rows_kernel[(rows, triton.cdiv(k, block_k), ends[-1])](
        x, scales, thresholds, masked, out, rows, K=k, SECOND=second, THIRD=third, BLOCK_K=block_k, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
