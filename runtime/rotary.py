"""Rotary position embeddings: plain, linear, Llama 3's and LongRoPE's scalings, whole or partial heads.

    angle(p, i) = p * inv_freq_i          cos and sin in float32, then in the activations' type, as transformers does

LongRoPE has two sets of frequencies, for sequences up to the length of the pretraining and for longer ones
(https://arxiv.org/abs/2402.13753); which one is used depends on the length of the whole sequence, not on the position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wisparse.formats.architectures import ModelConfig, RopeConfig

__all__ = ["Rotary", "attention_scaling", "inverse_frequencies", "rotate", "switch_length"]


def inverse_frequencies(rope: RopeConfig, *, long: bool = False) -> Tensor:
    """Angle per position for every pair of dimensions.

    Args:
        rope: settings, checked by ``ModelConfig.from_dict``.
        long: LongRoPE only: the frequencies for sequences above ``original_max_position_embeddings``.

    Returns:
        (rotary_dim / 2,) float32, on the CPU.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.parameters["long_factor" if long else "short_factor"], dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents)
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return plain / rope.parameters["factor"]
    if rope.rope_type == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor, low, high = (float(rope.parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.parameters["original_max_position_embeddings"]
    turns = original * plain / (2 * math.pi)  # of each pair over the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


def attention_scaling(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: above 1 for LongRoPE beyond the original context, else 1."""
    if rope.rope_type != "longrope":
        return 1.0
    given = rope.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    original = rope.parameters["original_max_position_embeddings"]
    factor = rope.parameters.get("factor")
    if factor is None:
        factor = rope.parameters["max_position_embeddings"] / original
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def switch_length(config: ModelConfig) -> int | None:
    """The longest sequence that LongRoPE's short factors serve; None for other models.

    A sequence that grows beyond it has to be prefilled anew, because its cached keys were turned by other angles.
    """
    if config.rope.rope_type != "longrope":
        return None
    return int(config.rope.parameters["original_max_position_embeddings"])


class Rotary:
    """The frequencies of one model on one device."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._short = inverse_frequencies(config.rope).to(device)
        self._long = inverse_frequencies(config.rope, long=True).to(device)
        self._scaling = attention_scaling(config.rope)
        self._switch = switch_length(config)
        self._dtype = dtype

    def tables(self, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions ``start`` to ``stop`` - 1 in a sequence of ``length`` positions.

        Returns:
            Two tensors (stop - start, rotary_dim) of the activations' type; the halves of the last axis are equal.
        """
        long = self._switch is not None and length > self._switch
        positions = torch.arange(start, stop, dtype=torch.float32, device=self._short.device)
        angles = positions[:, None] * (self._long if long else self._short)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return cos.to(self._dtype), sin.to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + rotary_dim / 2) of the first rotary_dim dimensions; the others pass.

    Args:
        x: (heads, T, head_dim).
        cos, sin: (T, rotary_dim), from :meth:`Rotary.tables`.

    Returns:
        (heads, T, head_dim).
    """
    rotary_dim = cos.shape[-1]
    turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if not passed.shape[-1] else torch.cat((turned, passed), dim=-1)
