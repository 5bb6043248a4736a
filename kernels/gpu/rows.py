"""What stands between the products of many rows: activation(gate) * up, and attention's splits combined.

Fewer rows have both inside their products (``channels.load_input``, ``reduction.reduce_tile``). Roundings are alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import KVSplits
from .reduction import activate


@triton.jit
def _activate_kernel(gate_up_ptr, out_ptr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up_ptr + row * (2 * WIDTH) + n
    gate = tl.load(at, mask=n < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=n < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + n, activate(gate, up, dtype, ACTIVATION), mask=n < WIDTH)


def launch_activate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, (T, I) of (T, 2 I); ``silu`` or ``gelu_tanh``."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(width))
    _activate_kernel[(rows, triton.cdiv(width, block))](gate_up, out, activation, width, block, num_warps=4)
    return out


@triton.jit
def _combine_kernel(splits, out_ptr, SPLITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPLITS
    d = tl.arange(0, D_PAD)
    m = tl.load(splits.maximum + at)
    for s in tl.static_range(1, SPLITS):
        m = tl.maximum(m, tl.load(splits.maximum + at + s))
    x = tl.zeros((D_PAD,), tl.float32)
    total = tl.zeros((), tl.float32)
    for s in tl.static_range(SPLITS):
        factor = tl.exp2(tl.load(splits.maximum + at + s) - m)
        total += tl.load(splits.total + at + s) * factor
        x += tl.load(splits.x + (at + s) * D + d, mask=d < D, other=0.0) * factor
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * D + d, (x / total).to(out_ptr.dtype.element_ty), mask=d < D)


def launch_combine(splits: KVSplits, dtype: torch.dtype) -> Tensor:
    """The attention's output (B, heads * D)."""
    batch, heads, count, d = splits.x.shape
    out = torch.empty(batch, heads * d, dtype=dtype, device=splits.x.device)
    _combine_kernel[(batch * heads,)](splits, out, count, d, triton.next_power_of_2(d), num_warps=1)
    return out
