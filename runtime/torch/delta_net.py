"""The recurrent half of a hybrid model's blocks in plain PyTorch: a gated DeltaNet. Names are Hugging Face's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import DeltaNet

from ..decoding.cache import DeltaState

_CHUNK = 64
_LENGTH_EPS = 1e-6  # added to the squared length of queries and keys


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of what must not be in half precision: float32, or float64 in a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class DeltaWeights:
    """A recurrent half without its large projections."""

    config: DeltaNet
    a: Tensor  # (value_heads, H): decay
    b: Tensor  # (value_heads, H): beta
    kernel: Tensor  # (mixed_size, 1, taps)
    log_rate: Tensor  # (value_heads,)
    dt_bias: Tensor  # (value_heads,)
    norm: Tensor  # (value_dim,), over each head's output
    eps: float

    def __call__(self, x: Tensor, mixed: Tensor, gate: Tensor, memory: DeltaState) -> Tensor:
        """Positions that follow those in ``memory``, which is updated: to (T, value_size), the input of out_proj. x:
        (T, H), the block's normalised input; mixed: (T, mixed_size) of in_proj_qkv; gate: (T, value_size) of
        in_proj_z."""
        delta, wide = self.config, float_dtype(x.dtype)
        seen = torch.cat((memory.inputs, mixed))
        memory.inputs.copy_(seen[len(mixed) :])
        mixed = functional.silu(functional.conv1d(seen.t()[None], self.kernel, groups=delta.mixed_size)[0].t())
        q, k, v = (
            part.view(len(x), -1, size).transpose(0, 1).to(wide)
            for part, size in zip(
                mixed.split((delta.key_size, delta.key_size, delta.value_size), dim=-1),
                (delta.key_dim, delta.key_dim, delta.value_dim),
                strict=True,
            )
        )
        q, k = (
            (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + _LENGTH_EPS)).repeat_interleave(
                delta.value_heads // delta.key_heads, dim=0
            )
            for part in (q, k)
        )
        beta = functional.linear(x, self.b).sigmoid().to(wide).t()
        steps = functional.softplus(functional.linear(x, self.a).to(wide) + self.dt_bias)
        log_decay = (-self.log_rate.to(wide).exp() * steps).t()
        out = apply_delta_rule(q * delta.key_dim**-0.5, k, v, log_decay, beta, memory.state)

        # Normalised by head, then gated, rounded where transformers rounds.
        normed = out.transpose(0, 1).to(x.dtype).to(wide)
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = self.norm * normed.to(x.dtype)
        return (normed * functional.silu(gate.view_as(normed).to(wide))).to(x.dtype).reshape(len(x), delta.value_size)


def apply_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule over T positions: (heads, T, value_dim); ``state`` (heads, key_dim, value_dim) is updated.
    q, k: (heads, T, key_dim), k of length 1; v: (heads, T, value_dim); log_decay: (heads, T), at most 0; beta: (heads,
    T), between 0 and 1."""
    outputs = []
    for chunk in zip(*(part.split(_CHUNK, dim=1) for part in (q, k, v, log_decay, beta)), strict=True):
        q_, k_, v_, decay, beta_ = chunk
        total = decay.cumsum(1)[..., None]  # G
        since = (total - total.transpose(1, 2)).tril().exp().tril()
        first = beta_[..., None] * (v_ - total.exp() * (k_ @ state))
        system = beta_[..., None] * (k_ @ k_.transpose(1, 2)) * since
        added = torch.linalg.solve_triangular(system, first, upper=False, unitriangular=True)
        outputs.append(total.exp() * (q_ @ state) + ((q_ @ k_.transpose(1, 2)) * since) @ added)
        last = total[:, -1:]
        state.copy_(last.exp() * state + ((last - total).exp() * k_).transpose(1, 2) @ added)
    return torch.cat(outputs, dim=1)
