"""The weights that masked inputs read, counted by a launch of its own: a decode step that counts launches it before each
masked linear, with the linear's input; the products do not count.

    total += sum over rows, projections p and planes of widths[p] * |{k : not (|x[k]| * scales[p, k] < threshold)}|

A program has one row (of experts: one pair of a row and a chosen expert), one projection and a block of channels. Bytes:
those of x and of the channel scales. Twin: ``reference.keep_mask``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .channels import Channels, is_dropped, load_input
from .common import Input, gdc_wait, load_squares, reciprocal_rms, rms_normalize
from .experts import ExpertLinear
from .weights import FusedLinear

_BLOCK = 1024


@triton.jit(do_not_specialize=["ssq_parts"])
def _count_kernel(
    inputs, scale_ptr, threshold_ptr, token_ptr, expert_ptr, total_ptr, eps, ssq_parts,  # as of launch_count
    problem: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ROW_PAIRS: tl.constexpr, TOKEN_PAIRS: tl.constexpr,  # pairs that share a row of x, and a token
):  # fmt: skip
    K: tl.constexpr = problem.k // problem.planes
    PLANES: tl.constexpr = problem.planes
    pair = tl.program_id(0)
    projection = tl.program_id(1)
    k = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = k < K
    gdc_wait(PDL)
    mask = projection
    if expert_ptr is not None:
        mask += tl.load(expert_ptr + pair) * tl.num_programs(1)
    mask = mask.to(tl.int64)
    scale = tl.load(scale_ptr + mask * K + k, mask=live, other=0.0)
    row = pair // ROW_PAIRS
    x = load_input(inputs, row, Channels(k, k, live, k, scale, scale, scale, K), problem, DTYPE, True)
    if inputs.norm is not None:
        rstd = reciprocal_rms(load_squares(inputs.ssq, row, ssq_parts, problem.ssq_pad), eps, K)
        x = rms_normalize(x, tl.load(inputs.norm + k, mask=live, other=0.0), rstd, DTYPE)
    kept = tl.zeros((BLOCK,), tl.int32)
    for plane in tl.static_range(PLANES):
        kept += (live & ~is_dropped(x, scale, tl.load(threshold_ptr + mask * PLANES + plane))).to(tl.int32)
    width = tl.where(projection == 0, problem.n0, tl.where(projection == 1, problem.n1, problem.n2))
    width = tl.where(projection == 3, problem.n3, width)
    read = tl.sum(kept, axis=0).to(tl.int64) * width
    if token_ptr is not None:
        read = tl.where(tl.load(token_ptr + pair // TOKEN_PAIRS) >= 0, read, 0)
    tl.atomic_add(total_ptr, read, sem="relaxed")


def launch_count(
    linear: FusedLinear | ExpertLinear, inputs: Input, total: Tensor, *, tokens: Tensor | None = None,
    expert: Tensor | None = None, eps: float = 0.0, pdl: bool = False,
) -> None:  # fmt: skip
    """Add to ``total`` (1,) int64 the weights that the rows of ``inputs`` read. ``tokens``: (B,) int64, negative for rows
    that are not counted; ``expert``: (B, chosen) int32, whose rows of inputs are those of x (B, K) or of pairs
    (B * chosen, K); ``eps``: of the RMSNorm."""
    attention, x = inputs.attention, inputs.x
    of_rows = x if attention is None else attention.x
    assert of_rows is not None
    rows, (parts, k) = len(of_rows), linear.scales.shape[-2:]
    pairs = rows if expert is None else expert.numel()
    read = {} if attention is None else {"kv_splits": attention.x.shape[2], "head_dim": attention.x.shape[3]}
    ssq_parts = 1 if inputs.ssq is None else inputs.ssq.shape[1]
    problem = linear.shape.problem(dense=False, ssq_pad=max(32, triton.next_power_of_2(ssq_parts)), **read)
    _count_kernel[(pairs, parts, triton.cdiv(k, _BLOCK))](
        inputs, linear.scales, linear.thresholds, tokens, expert, total, eps, ssq_parts, problem,
        getattr(tl, str(linear.weight.dtype).removeprefix("torch.")), _BLOCK, pdl, pairs // rows,
        pairs // (rows if tokens is None else len(tokens)), num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
