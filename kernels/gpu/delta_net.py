"""A decode step of Gated DeltaNet, the linear attention of hybrid models: causal convolution, state, norm and gate.

    c     = silu(sum over taps of kernel * inputs)                     depthwise, of queries, keys and values
    S     = exp(g) S + k (beta (v - exp(g) k^T S))^T,   o = S^T q      for each value head; q and k are L2-normalized
    out   = norm(o) * silu(z)
    g     = -rate * softplus(a.x + dt_bias),  beta = sigmoid(b.x)      x: the input of the block's first linear

A program has one value head of one row, with its state (key_dim x value_dim, float32) in registers. Bytes: twice the
state, 128 KiB for a head of 128 x 128, and the weights a and b. Roundings are those of transformers.

States and convolution inputs have at least two buffers: position p reads buffer p % buffers and writes the next one.
Value heads that share a key head therefore read the same inputs in any order, and rejected rows of a draft, or of a
step launched ahead, overwrite nothing that is still needed. Twin: ``runtime.torch.block``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .attention import Rows
from .common import gdc_wait, load_squares, reciprocal_rms, rms_normalize

LARGEST_STATE = 128 * 128  # elements of a head's state that fit in registers, key_dim and value_dim padded
_L2_EPS = tl.constexpr(1e-6)  # of the L2 norm of queries and keys


class DeltaTensors(NamedTuple):
    """A block's weights, of the activations' dtype."""

    a: Tensor  # (value_heads, H)
    b: Tensor  # (value_heads, H)
    kernel: Tensor  # (mixed, 1, taps)
    log_rate: Tensor  # (value_heads,)
    dt_bias: Tensor  # (value_heads,)
    norm: Tensor  # (value_dim,)


class DeltaInput(NamedTuple):
    mixed: Tensor  # (B, mixed + value_size) dtype: queries, keys and values, then the gate z
    hidden: Tensor  # (B, H) dtype; x, ssq and norm of ``common.Input``
    ssq: Tensor | None  # (B, parts) float32, partial sums of squares; None: no norm
    norm: Tensor | None  # (H,)


class DeltaMemory(NamedTuple):
    """All buffers; ``…_stride``: elements from one buffer to the next."""

    inputs: Tensor  # (buffers, slots, taps - 1, mixed) dtype, oldest first
    state: Tensor  # (buffers, slots, value_heads, key_dim, value_dim) float32
    inputs_stride: int
    state_stride: int


class _Shape(NamedTuple):
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    ssq_pad: int  # partial sums of squares at most, a multiple of 32
    buffers: int


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """x above 20, as in PyTorch."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def memory_of(rows, row, memory, BUFFERS: tl.constexpr, INPUTS: tl.constexpr):
    """Of a row: whether it is busy, its slot, and offsets to read and write states and, from a slot's INPUTS elements on,
    convolution inputs. Tokens, positions and slots are those of earlier steps: it may run before gdc_wait."""
    busy = tl.load(rows.token + row) >= 0
    position = tl.where(busy, tl.load(rows.position + row), 0).to(tl.int64)
    slot = tl.load(rows.slot + row).to(tl.int64)
    read = position % BUFFERS
    write = (position + 1) % BUFFERS
    states = (read * memory.state_stride, write * memory.state_stride)
    at = slot * INPUTS
    return busy, slot, states, (at + read * memory.inputs_stride, at + write * memory.inputs_stride)


@triton.jit
def load_taps(weights, inputs, before, channel, live, MIXED: tl.constexpr, TAPS: tl.constexpr):
    """The convolution kernel (taps_pad, channels), and the inputs of earlier positions, 0 in the last tap's row. One
    tensor for all taps, as the compiler replicates the loads of small tensors across threads."""
    t = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
    kernel = tl.load(weights.kernel + channel[None, :] * TAPS + t, mask=(t < TAPS) & live[None, :], other=0.0)
    at = before + t * MIXED + channel[None, :]
    return kernel, tl.load(inputs + at, mask=(t < TAPS - 1) & live[None, :], other=0.0)


@triton.jit
def convolve(
    kernel, earlier, bias, inputs, new_ptr, after, channel, live, stores, MIXED: tl.constexpr, TAPS: tl.constexpr, dtype
):
    """silu(convolution) of some channels, float32; stores their inputs shifted by one position where ``stores``. ``bias``:
    (channels,) float32, or 0."""
    t = tl.arange(0, kernel.shape[0])[:, None]
    new = tl.load(new_ptr + channel[None, :] + t * 0, mask=(t == TAPS - 1) & live[None, :], other=0.0)
    x = tl.where(t == TAPS - 1, new, earlier)
    at = after + (t - 1) * MIXED + channel[None, :]
    tl.store(inputs + at, x, mask=(t >= 1) & (t < TAPS) & stores[None, :])
    total = tl.sum(kernel.to(tl.float32) * x.to(tl.float32), axis=0) + bias
    return silu(total.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


# Arguments as of ``launch_delta_net``; ssq_parts: columns of inputs.ssq; first: row.
@triton.jit(do_not_specialize=["first"])
def _delta_net_kernel(
    inputs, weights, memory, rows, out_ptr, eps, query_scale, ssq_parts, first, shape: tl.constexpr, PDL: tl.constexpr
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    H: tl.constexpr = shape.hidden
    BLOCK_H: tl.constexpr = 1024 if H >= 1024 else triton.next_power_of_2(H)
    KEY: tl.constexpr = shape.key_dim
    VALUE: tl.constexpr = shape.value_dim
    KEY_SIZE: tl.constexpr = shape.key_heads * KEY
    VALUE_SIZE: tl.constexpr = shape.value_heads * VALUE
    MIXED: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    TAPS: tl.constexpr = shape.taps
    SHARE: tl.constexpr = shape.value_heads // shape.key_heads
    NORMED: tl.constexpr = inputs.norm is not None
    head = tl.program_id(0)
    row = first + tl.program_id(1)
    key_head = head // SHARE

    # Before gdc_wait: states, which earlier steps have written, and weights.
    busy, slot, states, inputs_at = memory_of(rows, row, memory, shape.buffers, (TAPS - 1) * MIXED)
    before, after = inputs_at
    i = tl.arange(0, triton.next_power_of_2(KEY))
    j = tl.arange(0, triton.next_power_of_2(VALUE))
    keys = tl.where(busy, KEY, 0)
    live_key = i < keys
    live_value = j < tl.where(busy, VALUE, 0)
    # The first of the value heads that share a key head stores the key head's inputs.
    stores_key = i < tl.where(head % SHARE == 0, keys, 0)
    live_state = live_key[:, None] & live_value[None, :]
    at = ((slot * shape.value_heads + head) * KEY + i[:, None]) * VALUE + j[None, :]
    state = tl.load(memory.state + states[0] + at, mask=live_state, other=0.0)
    q_at = key_head * KEY + i
    k_at = KEY_SIZE + q_at
    v_at = 2 * KEY_SIZE + head * VALUE + j
    q_kernel, q = load_taps(weights, memory.inputs, before, q_at, live_key, MIXED, TAPS)
    k_kernel, k = load_taps(weights, memory.inputs, before, k_at, live_key, MIXED, TAPS)
    v_kernel, v = load_taps(weights, memory.inputs, before, v_at, live_value, MIXED, TAPS)
    h = tl.arange(0, BLOCK_H)
    a = ()
    b = ()
    norm = ()
    for start in tl.static_range(0, H, BLOCK_H):
        live = start + h < H
        a += (tl.load(weights.a + head * H + start + h, mask=live, other=0.0),)
        b += (tl.load(weights.b + head * H + start + h, mask=live, other=0.0),)
        if NORMED:
            norm += (tl.load(inputs.norm + start + h, mask=live, other=0.0),)
    rate = tl.exp(tl.load(weights.log_rate + head).to(tl.float32))
    dt_bias = tl.load(weights.dt_bias + head).to(tl.float32)
    out_norm = tl.load(weights.norm + j, mask=j < VALUE, other=0.0)
    gdc_wait(PDL)

    new_ptr = inputs.mixed + row * (MIXED + VALUE_SIZE)
    gate = tl.load(new_ptr + MIXED + head * VALUE + j, mask=j < VALUE, other=0.0).to(tl.float32)
    q = convolve(q_kernel, q, 0.0, memory.inputs, new_ptr, after, q_at, live_key, stores_key, MIXED, TAPS, dtype)
    k = convolve(k_kernel, k, 0.0, memory.inputs, new_ptr, after, k_at, live_key, stores_key, MIXED, TAPS, dtype)
    v = convolve(v_kernel, v, 0.0, memory.inputs, new_ptr, after, v_at, live_value, live_value, MIXED, TAPS, dtype)
    sums_a = tl.zeros((BLOCK_H,), tl.float32)
    sums_b = tl.zeros((BLOCK_H,), tl.float32)
    rstd = eps
    if NORMED:
        rstd = reciprocal_rms(load_squares(inputs.ssq, row, ssq_parts, shape.ssq_pad), eps, H)
    for start in tl.static_range(0, H, BLOCK_H):
        x = tl.load(inputs.hidden + row * H + start + h, mask=start + h < H, other=0.0)
        if NORMED:
            x = rms_normalize(x, norm[start // BLOCK_H], rstd, dtype)
        sums_a += x.to(tl.float32) * a[start // BLOCK_H].to(tl.float32)
        sums_b += x.to(tl.float32) * b[start // BLOCK_H].to(tl.float32)
    step = softplus(tl.sum(sums_a, axis=0).to(dtype).to(tl.float32) + dt_bias)
    beta = (1.0 / (1.0 + tl.exp(-tl.sum(sums_b, axis=0).to(dtype).to(tl.float32)))).to(dtype).to(tl.float32)
    decay = tl.exp(-rate * step)

    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + _L2_EPS) * query_scale
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _L2_EPS)
    recalled = decay * tl.sum(k[:, None] * state, axis=0)
    state = decay * state + k[:, None] * (beta * (v - recalled))[None, :]
    tl.store(memory.state + states[1] + at, state, mask=live_state)
    y = tl.sum(q[:, None] * state, axis=0).to(dtype).to(tl.float32)
    out_rstd = tl.rsqrt(tl.sum(y * y, axis=0) / VALUE + eps)
    y = rms_normalize(y, out_norm, out_rstd, dtype).to(tl.float32) * silu(gate)
    tl.store(out_ptr + row * VALUE_SIZE + head * VALUE + j, y.to(dtype), mask=j < VALUE)


def state_size(key_dim: int, value_dim: int) -> int:
    """Elements of a head's padded state, at most ``LARGEST_STATE``."""
    return triton.next_power_of_2(key_dim) * triton.next_power_of_2(value_dim)


def launch_delta_net(
    inputs: DeltaInput, weights: DeltaTensors, memory: DeltaMemory, rows: Rows, out: Tensor, *, key_heads: int,
    eps: float, pdl: bool = False, in_order: bool = False,
) -> None:  # fmt: skip
    """Launch one block's Gated DeltaNet for B rows: out (B, value_heads * value_dim). ``key_heads``: of queries and of
    keys; each serves a group of value heads. ``eps``: of the input's norm and of each head's output norm. ``in_order``:
    rows may be consecutive positions of one slot and are launched one after the other."""
    buffers, _, value_heads, key_dim, value_dim = memory.state.shape
    batch, hidden = inputs.hidden.shape
    parts = 1 if inputs.ssq is None else inputs.ssq.shape[1]
    ssq_pad = max(32, triton.next_power_of_2(parts))
    shape = _Shape(hidden, key_heads, value_heads, key_dim, value_dim, weights.kernel.shape[-1], ssq_pad, buffers)
    pdl = pdl and not in_order  # a row reads the state before gdc_wait
    # Enough warps that the state fits in registers with few spills.
    options = {"num_warps": max(1, min(16, state_size(key_dim, value_dim) // (32 * 32))), "launch_pdl": pdl}
    query_scale = key_dim**-0.5
    for first in range(batch) if in_order else (0,):
        _delta_net_kernel[(value_heads, 1 if in_order else batch)](
            inputs, weights, memory, rows, out, eps, query_scale, parts, first, shape, pdl, **options
        )
