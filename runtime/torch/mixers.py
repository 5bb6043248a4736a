"""Norms, and what mixes positions in place of plain attention: gated DeltaNet, short convolution, Mamba-2, latents."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import DeltaNet, Latent, Mamba2

from ..decoding.cache import RecurrentState

_CHUNK = 64  # positions of a chunk of the delta rule
_LENGTH_EPS = 1e-6  # added to the squared length of a delta net's queries and keys


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of computations that need full precision: float32, or float64 in a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last axis: x / rms(x) * weight, with ``offset`` * (1 + weight), rounded as in transformers: last, with
    ``offset`` or ``wide``, else before the weight too."""

    weight: Tensor
    eps: float
    offset: bool
    wide: bool = False
    factors: Tensor = field(init=False)  # the weight, in float32 if ``wide``, or 1 + weight in float32

    def __post_init__(self) -> None:
        weight = self.weight
        weight = weight.to(float_dtype(weight.dtype)) if self.offset or self.wide else weight
        object.__setattr__(self, "factors", 1.0 + weight if self.offset else weight)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(float_dtype(x.dtype))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.factors).to(x.dtype) if self.offset or self.wide else self.factors * normed.to(x.dtype)


@dataclass(frozen=True)
class DeltaWeights:
    """A gated DeltaNet's weights except its large projections."""

    config: DeltaNet
    a: Tensor  # (value_heads, H): decay
    b: Tensor  # (value_heads, H): beta
    kernel: Tensor  # (mixed_size, 1, taps)
    log_rate: Tensor  # (value_heads,)
    dt_bias: Tensor  # (value_heads,)
    norm: Tensor  # (value_dim,), over each head's output
    eps: float

    def __call__(self, x: Tensor, mixed: Tensor, gate: Tensor, cached: RecurrentState) -> Tensor:
        """The next T positions, (T, value_size), the input of out_proj; updates ``cached`` in place. x: (T, H), the block's
        normed input; mixed: (T, mixed_size), of in_proj_qkv; gate: (T, value_size), of in_proj_z."""
        delta, wide = self.config, float_dtype(x.dtype)
        inputs = torch.cat((cached.inputs, mixed))
        cached.inputs.copy_(inputs[len(mixed) :])
        mixed = functional.silu(functional.conv1d(inputs.t()[None], self.kernel, groups=delta.mixed_size)[0].t())
        parts = mixed.split((delta.key_size, delta.key_size, delta.value_size), dim=-1)
        sizes = (delta.key_dim, delta.key_dim, delta.value_dim)
        split = (part.view(len(x), -1, size) for part, size in zip(parts, sizes, strict=True))
        q, k, v = (part.transpose(0, 1).to(wide) for part in split)
        q, k = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + _LENGTH_EPS) for part in (q, k))
        q, k = (part.repeat_interleave(delta.value_heads // delta.key_heads, dim=0) for part in (q, k))
        beta = functional.linear(x, self.b).sigmoid().to(wide).t()
        steps = functional.softplus(functional.linear(x, self.a).to(wide) + self.dt_bias)
        log_decay = (-self.log_rate.to(wide).exp() * steps).t()
        out = apply_delta_rule(q * delta.key_dim**-0.5, k, v, log_decay, beta, cached.state)

        # RMSNorm per head, then the gate, rounded as in transformers.
        normed = Norm(self.norm, self.eps, offset=False)(out.transpose(0, 1).to(x.dtype))
        return (normed * functional.silu(gate.view_as(normed).to(wide))).to(x.dtype).reshape(len(x), delta.value_size)


@dataclass(frozen=True)
class ConvWeights:
    """The convolution of a gated short convolution."""

    kernel: Tensor  # (H, 1, taps)
    bias: Tensor | None = None  # (H,)

    def __call__(self, projected: Tensor, cached: RecurrentState) -> Tensor:
        """The next T positions, (T, H), the input of out_proj; updates ``cached`` in place. projected: (T, 3 H), of
        in_proj."""
        b, c, x = projected.chunk(3, dim=-1)
        inputs = torch.cat((cached.inputs, b * x))
        cached.inputs.copy_(inputs[len(x) :])
        return c * functional.conv1d(inputs.t()[None], self.kernel, self.bias, groups=x.shape[1])[0].t()


@dataclass(frozen=True)
class MambaWeights:
    """A Mamba-2 block's weights except its projections."""

    config: Mamba2
    kernel: Tensor  # (mixed_size, 1, taps)
    dt_bias: Tensor  # (heads,)
    log_rate: Tensor  # (heads,)
    skip: Tensor  # (heads,), factor of a head's values in its output
    norm: Tensor  # (inner,), over each group's outputs
    eps: float
    bias: Tensor | None = None  # (mixed_size,), of the convolution

    def __call__(self, projected: Tensor, cached: RecurrentState) -> Tensor:
        """The next T positions, (T, inner), the input of out_proj; updates ``cached`` in place. projected: of in_proj."""
        mamba, wide, count = self.config, float_dtype(projected.dtype), len(projected)
        gate, mixed, steps = projected.split((mamba.inner, mamba.mixed_size, mamba.heads), dim=-1)
        inputs = torch.cat((cached.inputs, mixed))
        cached.inputs.copy_(inputs[count:])
        convolved = functional.conv1d(inputs.t()[None], self.kernel, self.bias, groups=mamba.mixed_size)[0].t()
        of_group = mamba.groups * mamba.state_dim
        x, b, c = functional.silu(convolved).to(wide).split((mamba.inner, of_group, of_group), dim=-1)
        x = x.reshape(count, mamba.heads, -1).transpose(0, 1)
        each = mamba.heads // mamba.groups
        b, c = (p.reshape(count, mamba.groups, -1).transpose(0, 1).repeat_interleave(each, dim=0) for p in (b, c))
        dt = functional.softplus(steps + self.dt_bias).to(wide).t()
        log_decay = -self.log_rate.to(wide).exp()[:, None] * dt
        out = apply_delta_rule(c, b, x * dt[..., None], log_decay, None, cached.state)
        out += self.skip.to(wide)[:, None, None] * x
        gated = out.transpose(0, 1).reshape(count, -1).to(projected.dtype).to(wide) * functional.silu(gate.to(wide))
        groups = gated.view(count, mamba.groups, -1)
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.norm * normed.reshape(count, -1).to(projected.dtype)


def apply_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor) -> Tensor:
    """The gated delta rule over T positions, in chunks: returns (heads, T, value_dim), updates ``state`` (heads, key_dim,
    value_dim) in place. q, k: (heads, T, key_dim), k of norm 1; v: (heads, T, value_dim); log_decay <= 0, beta in
    [0, 1]: (heads, T). None: the selective scan of Mamba-2, which adds k v' to the state as they are."""
    outputs, first = [], 0
    for q_, k_, v_, decay in zip(*(part.split(_CHUNK, dim=1) for part in (q, k, v, log_decay)), strict=True):
        total = decay.cumsum(1)[..., None]  # G
        decays = (total - total.transpose(1, 2)).tril().exp().tril()  # (heads, T, T): from position j to i
        added = v_
        if beta is not None:
            beta_ = beta[:, first : first + _CHUNK, None]
            rhs = beta_ * (v_ - total.exp() * (k_ @ state))
            system = beta_ * (k_ @ k_.transpose(1, 2)) * decays
            added = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
        outputs.append(total.exp() * (q_ @ state) + ((q_ @ k_.transpose(1, 2)) * decays) @ added)
        last = total[:, -1:]
        state.copy_(last.exp() * state + ((last - total).exp() * k_).transpose(1, 2) @ added)
        first += _CHUNK
    return torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class LatentWeights:
    """Multi-head latent attention as attention with one KV head, whose keys are what a token's keys and values are made of.

    c    = norm(kv_a[: rank]),  r = kv_a[rank :]                             the latent, and the part with a position
    k, v = (K_h c, rotary(r)),  V_h c                                        of head h; kv_b stacks (K_h, V_h)
    q.k  = rotary(q_r).rotary(r) + (K_h^T q_n).c                             so the queries are (q_r, K_h^T q_n),
    out  = V_h (sum over positions of the softmax weight times c)            and keys and values both (r, c)
    """

    config: Latent
    norm: Norm  # of the latent
    kv_b: Tensor  # (heads * (key_dim + value_dim), rank)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values: (heads, key_dim or value_dim, rank)."""
        sizes = self.config.key_dim, self.config.value_dim
        keys, values = self.kv_b.view(-1, sum(sizes), self.config.rank).split(sizes, dim=1)
        return keys, values

    def queries_and_keys(self, q: Tensor, kv_a: Tensor) -> list[Tensor]:
        """q (T, heads * (key_dim + rotary_dim)), kv_a (T, rank + rotary_dim), of the projections, to queries
        (T, heads * (rotary_dim + rank)) and keys (T, rotary_dim + rank), before the rotation."""
        keys, config = self._parts()[0], self.config
        plain, rotated = q.view(len(q), len(keys), -1).split((config.key_dim, config.rotary_dim), dim=-1)
        queries = torch.cat((rotated, torch.einsum("thk,hkr->thr", plain, keys)), dim=-1)
        latent, position = kv_a.split((config.rank, config.rotary_dim), dim=-1)
        return [queries.flatten(1), torch.cat((position, self.norm(latent)), dim=-1)]

    def outputs(self, attended: Tensor) -> Tensor:
        """(T, heads * (rotary_dim + rank)), of the attention, to o_proj's input (T, heads * value_dim)."""
        values = self._parts()[1]
        latent = attended.view(len(attended), len(values), -1)[..., self.config.rotary_dim :]
        return torch.einsum("thr,hvr->thv", latent, values).flatten(1)
