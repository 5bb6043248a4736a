"""An output of attention or MLP on its way into the residual stream, where it is changed first.

    hidden = (hidden + multiplier * norm?(half)) * scalar?          and the sum of squares that the next norm needs

Each step is rounded to the activations' type, as transformers has it. One program has a whole row: a norm needs all of
it, so the product that made ``half`` cannot do this as it adds up its tiles. Llama's outputs are added there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import exact_argument, inverse_root, let_next_kernel_start, normalise, wait_for_previous_kernel


@triton.jit
def _add_kernel(
    half_ptr,  # (B, K) dtype
    hidden_ptr,  # (B, K) dtype, read and written
    norm_ptr,  # (K,) of the weights' type, or wide: 1 + weight; None: no norm
    scalar_ptr,  # (1,) dtype; None: 1
    ssq_ptr,  # (B, 1) wide
    eps,
    MULTIPLIER: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    wide: tl.constexpr = ssq_ptr.dtype.element_ty
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    live = k < K
    if norm_ptr is not None:
        factors = tl.load(norm_ptr + k, mask=live, other=0.0)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    hidden = tl.load(hidden_ptr + row * K + k, mask=live, other=0.0).to(wide)
    y = tl.load(half_ptr + row * K + k, mask=live, other=0.0).to(wide)
    if norm_ptr is not None:
        rstd = inverse_root(tl.sum(y * y, axis=0) / K + eps)
        y = normalise(y, factors.to(wide), rstd, dtype, norm_ptr.dtype.element_ty == wide).to(wide)
    if MULTIPLIER != 1.0:
        y = (y * MULTIPLIER).to(dtype).to(wide)
    y = (hidden + y).to(dtype)
    if scalar_ptr is not None:
        y = (y.to(wide) * tl.load(scalar_ptr).to(wide)).to(dtype)
    tl.store(hidden_ptr + row * K + k, y, mask=live)
    y = y.to(wide)
    tl.store(ssq_ptr + row, tl.sum(y * y, axis=0))


def launch_add(
    half: Tensor,
    hidden: Tensor,
    ssq: Tensor,
    *,
    norm: Tensor | None = None,
    scalar: Tensor | None = None,
    eps: float = 0.0,
    multiplier: float = 1.0,
    pdl: bool = False,
) -> None:
    """Add ``half`` to ``hidden``, both (B, K). Nothing is checked or allocated here.

    Args:
        half: what a product left.
        hidden: the residual stream.
        ssq: (B, 1) wide, receives the sums of the squares of hidden's rows.
        norm: (K,) what half is multiplied by once it is normalised with ``eps``, as for ``launch_gemv``; None: no norm.
        scalar: (1,) what the sum is multiplied by; None: 1.
        multiplier: of half, after the norm.
    """
    batch, width = hidden.shape
    options = {"launch_pdl": True} if pdl else {}
    _add_kernel[(batch,)](
        half, hidden, norm, scalar, ssq, exact_argument(eps, ssq.dtype), multiplier, width,
        triton.next_power_of_2(width), pdl, num_warps=8, **options,
    )  # fmt: skip
