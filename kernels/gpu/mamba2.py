"""A decode step of Mamba-2: causal convolution, selective scan, skip connection, gate, and norm.

    x, B, C = silu(bias + sum over taps of kernel * inputs)     depthwise
    S       = exp(-rate dt) S + dt B x^T,   o = S^T C + skip x  for each head; dt = softplus(step + dt_bias)
    out     = norm(o * silu(gate))                              over the heads of a group, which share B and C

A program of the first kernel has one head of one row, with its state (state_dim x head_dim, float32) in registers. Bytes:
twice the state, 64 KiB for a head of 128 x 64. The norm is over several heads, and so a kernel of its own. Roundings are
those of transformers. Buffers of states and convolution inputs as in ``delta_net``. Twin: ``runtime.torch.block``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .attention import Rows
from .common import gdc_wait, rms_normalize
from .delta_net import DeltaMemory, convolve, load_taps, memory_of, silu, softplus, state_size


class MambaTensors(NamedTuple):
    """A block's weights, of the activations' dtype."""

    kernel: Tensor  # (mixed, 1, taps)
    bias: Tensor | None  # (mixed,)
    dt_bias: Tensor  # (heads,)
    log_rate: Tensor  # (heads,)
    skip: Tensor  # (heads,)
    norm: Tensor  # (heads * head_dim,)


class _Shape(NamedTuple):
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    taps: int
    buffers: int


@triton.jit
def _load_bias(bias, channel, live):
    found = 0.0
    if bias is not None:
        found = tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["first"])  # arguments as of launch_mamba2; first: row
def _mamba2_kernel(projected_ptr, weights, memory, rows, out_ptr, first, shape: tl.constexpr, PDL: tl.constexpr):
    dtype: tl.constexpr = projected_ptr.dtype.element_ty
    DIM: tl.constexpr = shape.head_dim
    STATE: tl.constexpr = shape.state_dim
    INNER: tl.constexpr = shape.heads * DIM
    MIXED: tl.constexpr = INNER + 2 * shape.groups * STATE
    TAPS: tl.constexpr = shape.taps
    SHARE: tl.constexpr = shape.heads // shape.groups
    head = tl.program_id(0)
    row = first + tl.program_id(1)

    # Before gdc_wait: states, which earlier steps have written, and weights.
    busy, slot, states, inputs_at = memory_of(rows, row, memory, shape.buffers, (TAPS - 1) * MIXED)
    before, after = inputs_at
    i = tl.arange(0, triton.next_power_of_2(STATE))
    j = tl.arange(0, triton.next_power_of_2(DIM))
    live_in = i < tl.where(busy, STATE, 0)
    live_x = j < tl.where(busy, DIM, 0)
    # The first of the heads that share B and C stores their inputs.
    stores_in = i < tl.where(busy & (head % SHARE == 0), STATE, 0)
    live_state = live_in[:, None] & live_x[None, :]
    at = ((slot * shape.heads + head) * STATE + i[:, None]) * DIM + j[None, :]
    state = tl.load(memory.state + states[0] + at, mask=live_state, other=0.0)
    x_at = head * DIM + j
    b_at = INNER + head // SHARE * STATE + i
    c_at = b_at + shape.groups * STATE
    x_kernel, x = load_taps(weights, memory.inputs, before, x_at, live_x, MIXED, TAPS)
    b_kernel, b = load_taps(weights, memory.inputs, before, b_at, live_in, MIXED, TAPS)
    c_kernel, c = load_taps(weights, memory.inputs, before, c_at, live_in, MIXED, TAPS)
    x_bias = _load_bias(weights.bias, x_at, live_x)
    b_bias = _load_bias(weights.bias, b_at, live_in)
    c_bias = _load_bias(weights.bias, c_at, live_in)
    rate = tl.exp(tl.load(weights.log_rate + head).to(tl.float32))
    dt_bias = tl.load(weights.dt_bias + head).to(tl.float32)
    skip = tl.load(weights.skip + head).to(tl.float32)
    gdc_wait(PDL)

    row_ptr = projected_ptr + row * (INNER + MIXED + shape.heads)
    gate = tl.load(row_ptr + x_at, mask=live_x, other=0.0).to(tl.float32)
    step = tl.load(row_ptr + INNER + MIXED + head).to(tl.float32)
    new_ptr = row_ptr + INNER
    x = convolve(x_kernel, x, x_bias, memory.inputs, new_ptr, after, x_at, live_x, live_x, MIXED, TAPS, dtype)
    b = convolve(b_kernel, b, b_bias, memory.inputs, new_ptr, after, b_at, live_in, stores_in, MIXED, TAPS, dtype)
    c = convolve(c_kernel, c, c_bias, memory.inputs, new_ptr, after, c_at, live_in, stores_in, MIXED, TAPS, dtype)
    dt = softplus((step + dt_bias).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    state = tl.exp(-rate * dt) * state + b[:, None] * (dt * x)[None, :]
    tl.store(memory.state + states[1] + at, state, mask=live_state)
    y = (tl.sum(c[:, None] * state, axis=0) + skip * x).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * INNER + x_at, y * silu(gate), mask=j < DIM)


@triton.jit
def _norm_kernel(x_ptr, norm_ptr, out_ptr, eps, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of each group's outputs, (rows, groups, WIDTH)."""
    k = tl.arange(0, triton.next_power_of_2(WIDTH))
    norm = tl.load(norm_ptr + tl.program_id(0) * WIDTH + k, mask=k < WIDTH, other=0.0)
    at = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * WIDTH + k
    gdc_wait(PDL)
    x = tl.load(x_ptr + at, mask=k < WIDTH, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + at, rms_normalize(x, norm, rstd, out_ptr.dtype.element_ty), mask=k < WIDTH)


def launch_mamba2(
    projected: Tensor, weights: MambaTensors, memory: DeltaMemory, rows: Rows, gated: Tensor, out: Tensor, *, groups: int,
    eps: float, pdl: bool = False, in_order: bool = False,
) -> None:  # fmt: skip
    """Launch one block's Mamba-2 for B rows: out (B, heads * head_dim) of in_proj's output, (B, gate + mixed + heads).
    memory.state: (buffers, slots, heads, state_dim, head_dim); ``gated``: like out, float32, the norm's input; ``in_order``:
    as of ``launch_delta_net``."""
    buffers, _, heads, state_dim, head_dim = memory.state.shape
    batch, shape = len(out), _Shape(heads, groups, head_dim, state_dim, weights.kernel.shape[-1], buffers)
    early = pdl and not in_order  # a row reads the state before gdc_wait
    warps = max(1, min(16, state_size(state_dim, head_dim) // (32 * 32)))
    for first in range(batch) if in_order else (0,):
        _mamba2_kernel[(heads, 1 if in_order else batch)](
            projected, weights, memory, rows, gated, first, shape, early, num_warps=warps, launch_pdl=early
        )
    width = heads // groups * head_dim
    warps = max(1, min(16, triton.next_power_of_2(width) // 256))
    _norm_kernel[(groups, batch)](gated, weights.norm, out, eps, width, pdl, num_warps=warps, launch_pdl=pdl)
