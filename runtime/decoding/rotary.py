"""Rotary position embeddings: plain, linear, dynamic, Llama 3's, YaRN's, LongRoPE's and Gemma 4's scalings.

    angle(p, i) = p * inv_freq_i          cos and sin in float32, then in the activations' type, as transformers does

LongRoPE has two sets of frequencies, for sequences up to the length of the pretraining and for longer ones
(https://arxiv.org/abs/2402.13753); which one is used depends on the length of the whole sequence, not on the position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wisparse.formats.model_config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, *, long: bool = False) -> Tensor:
    """Angle per position for every pair of dimensions.

    Args:
        rope: settings, checked by ``ModelConfig.from_dict``.
        long: LongRoPE only: the frequencies for sequences above ``original_max_position_embeddings``.

    Returns:
        (rotary_dim / 2,) float32, on the CPU.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    if rope.rope_type == "dynamic" and rope.parameters.get("alpha") is not None:
        # Hunyuan's: the base is stretched once for all. Without alpha nothing changes up to the length trained on.
        stretched = rope.theta * rope.parameters["alpha"] ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return 1.0 / stretched**exponents
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.parameters["long_factor" if long else "short_factor"], dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents)
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "proportional":
        turned = int(rope.parameters["partial_rotary_factor"] * rope.rotary_dim // 2)
        plain[turned:] = 0
        return plain / (rope.parameters.get("factor") or 1.0)
    if rope.rope_type == "linear":
        return plain / rope.parameters["factor"]
    if rope.rope_type == "llama3":
        return _llama3(plain, rope)
    if rope.rope_type == "yarn":
        return _yarn(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor, low, high = (float(rope.parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.parameters["original_max_position_embeddings"]
    turns = original * plain / (2 * math.pi)  # of each pair over the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Pairs that turn often over the original context are kept, slow ones stretched by ``factor``, others blended.

    https://arxiv.org/abs/2309.00071, section 3.2.
    """
    original, factor = rope.parameters["original_max_position_embeddings"], float(rope.parameters["factor"])

    def pair(turns: float) -> float:
        """The pair, as a fraction, that turns so often over the original context."""
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.parameters.get("beta_fast") or 32), pair(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    blend = ((steps - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return plain / factor * blend + plain * (1 - blend)


def attention_scaling(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: above 1 for LongRoPE and YaRN beyond the original context, else 1."""
    if rope.rope_type not in ("longrope", "yarn"):
        return 1.0
    given = rope.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    if rope.rope_type == "yarn":
        factor = rope.parameters["factor"]
        mscale, all_dim = (rope.parameters.get(key) for key in ("mscale", "mscale_all_dim"))
        return (
            _yarn_scaling(factor, mscale) / _yarn_scaling(factor, all_dim)
            if mscale and all_dim
            else _yarn_scaling(factor, 1.0)
        )
    original = rope.parameters["original_max_position_embeddings"]
    factor = rope.parameters.get("factor")
    if factor is None:
        factor = rope.parameters["max_position_embeddings"] / original
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_scaling(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def switch_length(config: ModelConfig) -> int | None:
    """The longest sequence that LongRoPE's short factors serve; None for other models.

    A sequence that grows beyond it has to be prefilled anew, because its cached keys were turned by other angles.
    """
    lengths = [
        int(rope.parameters["original_max_position_embeddings"])
        for rope in config.rotaries
        if rope.rope_type == "longrope"
    ]
    return min(lengths, default=None)


class Rotary:
    """One rotary embedding of a model on one device."""

    def __init__(self, rope: RopeConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._short = inverse_frequencies(rope).to(device)
        self._long = inverse_frequencies(rope, long=True).to(device)
        self._scaling = attention_scaling(rope)
        self._switch = rope.parameters["original_max_position_embeddings"] if rope.rope_type == "longrope" else None
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

    def step_tables(self, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first ``count`` positions, each with the factors that a token there is decoded with:
        LongRoPE's differ from those of a longer sequence.

        Returns:
            Two tensors (count, rotary_dim / 2) of the activations' type.
        """
        switch = min(self._switch or count, count)
        parts = [self.tables(0, switch, switch)]
        if switch < count:
            parts.append(self.tables(switch, count, count))
        cos, sin = (torch.cat(pieces).chunk(2, dim=1)[0].contiguous() for pieces in zip(*parts, strict=True))
        return cos, sin


def query_scales(config: ModelConfig, start: int, stop: int, device: torch.device) -> Tensor | None:
    """What queries at the positions ``start`` to ``stop`` - 1 are multiplied by; None where it is 1.

    Returns:
        (stop - start,) float32: 1 + beta * log(1 + floor(p / n)), Llama 4's and Ministral 3's temperature.
    """
    if config.query_scaling is None:
        return None
    beta, length = config.query_scaling
    positions = torch.arange(start, stop, device=device)
    return 1 + beta * torch.log(1 + torch.floor(positions / length))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn pairs of the first rotary_dim dimensions, (i, i + rotary_dim / 2) or (2i, 2i + 1); the others pass.

    Args:
        x: (heads, T, head_dim).
        cos, sin: (T, rotary_dim), from :meth:`Rotary.tables`.
        interleaved: neighbours are turned together, not halves.

    Returns:
        (heads, T, head_dim).
    """
    rotary_dim = cos.shape[-1]
    turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        half = rotary_dim // 2
        cos, sin = (table[:, :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
        crossed = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
    turned = turned * cos + crossed * sin
    return turned if not passed.shape[-1] else torch.cat((turned, passed), dim=-1)
