"""One decode step of a gated DeltaNet, the recurrent half of a hybrid's blocks: convolution, state, norm and gate.

    c     = silu(sum over taps of kernel * inputs)                     of queries, keys and values, channel by channel
    S     = exp(g) S + k (beta (v - exp(g) k^T S))^T,   o = S^T q      for each value head; q and k have length 1
    out   = norm(o) * silu(z)
    g     = -rate * softplus(a.x + dt_bias),  beta = sigmoid(b.x)      x: the half's input

Each program has one value head of one row: its state fits in registers, and a norm needs all of it. States and inputs
have two sides: at position p the one with p's parity is read and the other one written. So value heads that share a
key head read the same inputs whoever writes first, and a step that was started ahead and is not wanted has destroyed
nothing. Roundings are transformers'. With float32 weights all of it is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    exact_argument,
    inverse_root,
    let_next_kernel_start,
    load_squares,
    normalise,
    reciprocal_rms,
    wait_for_previous_kernel,
)

LARGEST_STATE = 128 * 128  # numbers of a head's state, either side padded to a power of two: they stay in registers
_LENGTH_EPS = tl.constexpr(1e-6)  # of the squared length by which queries and keys are divided
_BLOCK_H = 1024


class DeltaTensors(NamedTuple):
    """A block's own weights, of the activations' type."""

    a: Tensor  # (value_heads, H)
    b: Tensor  # (value_heads, H)
    kernel: Tensor  # (mixed, 1, taps)
    log_rate: Tensor  # (value_heads,)
    dt_bias: Tensor  # (value_heads,)
    norm: Tensor  # (value_dim,)


class DeltaInput(NamedTuple):
    """What the products before left; the half's input is the residual stream, normalised as ``launch_gemv`` does."""

    mixed: Tensor  # (B, mixed + value_size) dtype: queries, keys and values, then the gate z
    hidden: Tensor  # (B, H) dtype
    ssq: Tensor | None  # (B, parts) wide, partial sums of squares; None: no norm
    norm: Tensor | None  # (H,) of the weights' type, or wide: 1 + weight


class DeltaMemory(NamedTuple):
    """Both sides; slot = row. A side's slots lie behind each other, the second side ``…_stride`` numbers after the
    first."""

    inputs: Tensor  # (2, slots, taps - 1, mixed) dtype, oldest first
    state: Tensor  # (2, slots, value_heads, key_dim, value_dim) wide
    inputs_stride: int
    state_stride: int


class _Rows(NamedTuple):
    """(B,) int64, negative for an idle row, and int32."""

    token: Tensor
    position: Tensor


class _Shape(NamedTuple):
    """Known at compile time; ``…_pad``: powers of two, ``ssq_pad`` a multiple of 32."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    taps_pad: int
    key_pad: int
    value_pad: int
    ssq_pad: int
    block_h: int


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _earlier(weights, inputs, before, channel, live, MIXED: tl.constexpr, TAPS: tl.constexpr, TAPS_PAD: tl.constexpr):
    """The kernel (taps_pad, channels), and the inputs of earlier positions, 0 in the last row of taps.

    Taps and channels in one tensor, because the compiler reads small ones once for every thread that needs them: each
    of many would hold many of the channels then."""
    t = tl.arange(0, TAPS_PAD)[:, None]
    kernel = tl.load(weights.kernel + channel[None, :] * TAPS + t, mask=(t < TAPS) & live[None, :], other=0.0)
    at = before + t * MIXED + channel[None, :]
    return kernel, tl.load(inputs + at, mask=(t < TAPS - 1) & live[None, :], other=0.0)


@triton.jit
def _convolved(
    kernel, earlier, inputs, new_ptr, after, channel, live, moves, MIXED: tl.constexpr, TAPS: tl.constexpr,
    dtype: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The convolution of some channels, wide; their inputs move on by one position."""
    t = tl.arange(0, kernel.shape[0])[:, None]
    new = tl.load(new_ptr + channel[None, :] + t * 0, mask=(t == TAPS - 1) & live[None, :], other=0.0)
    x = tl.where(t == TAPS - 1, new, earlier)
    at = after + (t - 1) * MIXED + channel[None, :]
    tl.store(inputs + at, x, mask=(t >= 1) & (t < TAPS) & moves[None, :])
    total = tl.sum(kernel.to(wide) * x.to(wide), axis=0)
    return _silu(total.to(dtype).to(wide)).to(dtype).to(wide)


@triton.jit
def _unit(x):
    return x * inverse_root(tl.sum(x * x, axis=0) + _LENGTH_EPS)


@triton.jit
def _delta_net_kernel(
    given,  # DeltaInput
    weights,  # DeltaTensors
    memory,  # DeltaMemory
    rows,  # _Rows
    out_ptr,  # (B, value_size) dtype
    eps,  # of both norms
    query_scale,
    ssq_parts,  # columns of given.ssq
    shape: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wide: tl.constexpr = memory.state.dtype.element_ty
    H: tl.constexpr = shape.hidden
    BLOCK_H: tl.constexpr = shape.block_h
    KEY: tl.constexpr = shape.key_dim
    VALUE: tl.constexpr = shape.value_dim
    KEY_SIZE: tl.constexpr = shape.key_heads * KEY
    VALUE_SIZE: tl.constexpr = shape.value_heads * VALUE
    MIXED: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    TAPS: tl.constexpr = shape.taps
    SHARE: tl.constexpr = shape.value_heads // shape.key_heads
    NORMED: tl.constexpr = given.norm is not None
    head = tl.program_id(0)
    row = tl.program_id(1)
    key_head = head // SHARE

    # Tokens, positions and states are older than this step, weights than all steps: they are read while the products
    # before this launch still run.
    busy = tl.load(rows.token + row) >= 0  # an idle row moves nothing
    side = tl.where(busy, tl.load(rows.position + row), 0).to(tl.int64) % 2
    i = tl.arange(0, shape.key_pad)
    j = tl.arange(0, shape.value_pad)
    keys = tl.where(busy, KEY, 0)
    live_key = i < keys
    live_value = j < tl.where(busy, VALUE, 0)
    # One of the heads that share them writes a key head's inputs.
    moves_key = i < tl.where(head % SHARE == 0, keys, 0)
    own = live_key[:, None] & live_value[None, :]
    at = ((row * shape.value_heads + head).to(tl.int64) * KEY + i[:, None]) * VALUE + j[None, :]
    state = tl.load(memory.state + side * memory.state_stride + at, mask=own, other=0.0)
    slot = row.to(tl.int64) * (TAPS - 1) * MIXED
    before = side * memory.inputs_stride + slot
    after = (1 - side) * memory.inputs_stride + slot
    q_at = key_head * KEY + i
    k_at = KEY_SIZE + q_at
    v_at = 2 * KEY_SIZE + head * VALUE + j
    q_kernel, q = _earlier(weights, memory.inputs, before, q_at, live_key, MIXED, TAPS, shape.taps_pad)
    k_kernel, k = _earlier(weights, memory.inputs, before, k_at, live_key, MIXED, TAPS, shape.taps_pad)
    v_kernel, v = _earlier(weights, memory.inputs, before, v_at, live_value, MIXED, TAPS, shape.taps_pad)
    h = tl.arange(0, BLOCK_H)
    of_a = ()
    of_b = ()
    of_norm = ()
    for start in tl.static_range(0, H, BLOCK_H):
        there = start + h < H
        a = tl.load(weights.a + head * H + start + h, mask=there, other=0.0)
        b = tl.load(weights.b + head * H + start + h, mask=there, other=0.0)
        factors = a
        if NORMED:
            factors = tl.load(given.norm + start + h, mask=there, other=0.0)
        of_a = of_a + (a,)  # noqa: RUF005 (the compiler knows no unpacking)
        of_b = of_b + (b,)  # noqa: RUF005
        of_norm = of_norm + (factors,)  # noqa: RUF005
    rate = tl.exp(tl.load(weights.log_rate + head).to(wide))
    dt_bias = tl.load(weights.dt_bias + head).to(wide)
    out_norm = tl.load(weights.norm + j, mask=j < VALUE, other=0.0).to(wide)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)

    new_ptr = given.mixed + row * (MIXED + VALUE_SIZE)
    gate = tl.load(new_ptr + MIXED + head * VALUE + j, mask=j < VALUE, other=0.0).to(wide)
    q = _convolved(q_kernel, q, memory.inputs, new_ptr, after, q_at, live_key, moves_key, MIXED, TAPS, dtype, wide)
    k = _convolved(k_kernel, k, memory.inputs, new_ptr, after, k_at, live_key, moves_key, MIXED, TAPS, dtype, wide)
    v = _convolved(v_kernel, v, memory.inputs, new_ptr, after, v_at, live_value, live_value, MIXED, TAPS, dtype, wide)
    sums_a = tl.zeros((BLOCK_H,), wide)
    sums_b = tl.zeros((BLOCK_H,), wide)
    rstd = eps
    if NORMED:
        # Factors that are wide are multiplied by before the only rounding.
        ONCE: tl.constexpr = given.norm.dtype.element_ty == wide
        rstd = reciprocal_rms(load_squares(given.ssq, row, ssq_parts, shape.ssq_pad), eps, H)
    for start in tl.static_range(0, H, BLOCK_H):
        x = tl.load(given.hidden + row * H + start + h, mask=start + h < H, other=0.0)
        if NORMED:
            x = normalise(x.to(wide), of_norm[start // BLOCK_H].to(wide), rstd, dtype, ONCE)
        sums_a += x.to(wide) * of_a[start // BLOCK_H].to(wide)
        sums_b += x.to(wide) * of_b[start // BLOCK_H].to(wide)
    step = tl.sum(sums_a, axis=0).to(dtype).to(wide) + dt_bias
    # softplus; above 20 it is the number itself
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    beta = (1.0 / (1.0 + tl.exp(-tl.sum(sums_b, axis=0).to(dtype).to(wide)))).to(dtype).to(wide)
    decay = tl.exp(-rate * step)

    q = _unit(q) * query_scale
    k = _unit(k)
    recalled = decay * tl.sum(k[:, None] * state, axis=0)
    state = decay * state + k[:, None] * (beta * (v - recalled))[None, :]
    tl.store(memory.state + (1 - side) * memory.state_stride + at, state, mask=own)
    y = tl.sum(q[:, None] * state, axis=0).to(dtype).to(wide)
    out_rstd = inverse_root(tl.sum(y * y, axis=0) / VALUE + eps)
    y = normalise(y, out_norm, out_rstd, dtype, False).to(wide) * _silu(gate)
    tl.store(out_ptr + row * VALUE_SIZE + head * VALUE + j, y.to(dtype), mask=j < VALUE)


def delta_state_size(key_dim: int, value_dim: int) -> int:
    """Numbers of a head's state as a program holds it, at most ``LARGEST_STATE``."""
    return triton.next_power_of_2(key_dim) * triton.next_power_of_2(value_dim)


def warps_for(shape: _Shape, exact: bool) -> int:
    """Of a program, for a state in float32 or, ``exact``, float64: so many that nearly nothing is spilled. (For float64
    the compiler wants few threads with many registers each.)"""
    return max(1, min(8 if exact else 16, shape.key_pad * shape.value_pad // (32 * 32)))


def launch_delta_net(
    given: DeltaInput,
    weights: DeltaTensors,
    memory: DeltaMemory,
    tokens: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    key_heads: int,
    eps: float,
    pdl: bool = False,
) -> None:
    """Launch one block's recurrent half for B rows on the current stream. Nothing is checked or allocated here.

    Args:
        tokens: (B,) int64; a negative one marks an idle row, whose state and inputs are neither read nor written.
        positions: (B,) int32: which side is read.
        out: (B, value_heads * value_dim) dtype.
        key_heads: as many of queries and of keys; each serves a group of value heads.
        eps: of the norm of the half's input and of that of each head's output.
    """
    _, _, value_heads, key_dim, value_dim = memory.state.shape
    batch, hidden = given.hidden.shape
    wide = memory.state.dtype
    parts = 1 if given.ssq is None else given.ssq.shape[1]
    shape = _Shape(
        hidden, key_heads, value_heads, key_dim, value_dim, weights.kernel.shape[-1],
        taps_pad=triton.next_power_of_2(weights.kernel.shape[-1]),
        key_pad=triton.next_power_of_2(key_dim),
        value_pad=triton.next_power_of_2(value_dim),
        ssq_pad=max(32, triton.next_power_of_2(parts)),
        block_h=min(_BLOCK_H, triton.next_power_of_2(hidden)),
    )  # fmt: skip
    options = {"launch_pdl": True} if pdl else {}
    _delta_net_kernel[(value_heads, batch)](
        given,
        weights,
        memory,
        _Rows(tokens, positions),
        out,
        exact_argument(eps, wide),
        exact_argument(key_dim**-0.5, wide),
        parts,
        shape,
        pdl,
        num_warps=warps_for(shape, wide == torch.float64),
        **options,
    )
