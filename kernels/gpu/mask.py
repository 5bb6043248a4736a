"""Many rows of x with their dropped channels at zero, a copy for each projection: what a dense product then reads.

    out[p, m, :] = where(|x[m]| * scales[p] < thresholds[p] * masked[m], 0, x[m])    as in reference.py, bit for bit

For more rows than ``gemv`` takes at once: every weight is read for them anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["mask_rows"]

_BLOCK_K = 1024


@triton.jit(do_not_specialize=["M"])
def _mask_rows_kernel(
    x_ptr,  # (M, K)
    scale_ptr,  # (P, K) float32
    threshold_ptr,  # (P,) float32
    masked_ptr,  # (M,) float32
    out_ptr,  # (P, M, K)
    M,
    K: tl.constexpr,
    P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < K
    x = tl.load(x_ptr + row * K + k, mask=live, other=0.0)
    masked = tl.load(masked_ptr + row)
    size = tl.abs(x.to(tl.float32))
    for p in tl.static_range(P):
        scale = tl.load(scale_ptr + p * K + k, mask=live, other=0.0)
        limit = tl.load(threshold_ptr + p) * masked
        # A NaN is not below anything: it is kept.
        kept = tl.where(size * scale < limit, 0.0, x)
        tl.store(out_ptr + (p * M + row) * K + k, kept, mask=live)


def mask_rows(x: Tensor, scales: Tensor, thresholds: Tensor, masked: Tensor) -> Tensor:
    """The masked copies of x, (projections, M, K).

    Args:
        x: (M, K), contiguous.
        scales: (projections, K) float32.
        thresholds: (projections,) float32.
        masked: (M,) float32, 1 for a row that is masked, 0 for one that keeps all its channels.
    """
    rows, k = x.shape
    out = torch.empty(len(scales), rows, k, dtype=x.dtype, device=x.device)
    block_k = min(_BLOCK_K, triton.next_power_of_2(k))
    grid = (rows, triton.cdiv(k, block_k))
    _mask_rows_kernel[grid](x, scales, thresholds, masked, out, rows, K=k, P=len(scales), BLOCK_K=block_k, num_warps=4)
    return out
