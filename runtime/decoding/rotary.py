"""Rotary position embeddings: plain, and scaled as linear, dynamic, Llama 3, YaRN, LongRoPE and Gemma 4."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wisparse.formats.config_fields import RopeConfig
from wisparse.formats.model_config import ModelConfig


def inverse_frequencies(rope: RopeConfig, *, long: bool = False) -> Tensor:
    """Angle per position of every pair of dimensions: (rotary_dim / 2,) float32, on the CPU."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    if rope.rope_type == "dynamic" and rope.parameters.get("alpha") is not None:
        # Hunyuan's. Without alpha, dynamic scaling changes nothing up to the trained length.
        stretched = rope.theta * rope.parameters["alpha"] ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return 1.0 / stretched**exponents
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.parameters["long_factor" if long else "short_factor"], dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents)
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "proportional":
        plain[int(rope.parameters["partial_rotary_factor"] * rope.rotary_dim // 2) :] = 0
        return plain / (rope.parameters.get("factor") or 1.0)
    if rope.rope_type == "linear":
        return plain / rope.parameters["factor"]
    if rope.rope_type == "llama3":  # long wavelengths are scaled, short ones kept, those between interpolated
        factor, low, high = (float(rope.parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        rotations = rope.parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
        blend = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * plain / factor + blend * plain
    if rope.rope_type != "yarn":
        return plain
    # As llama3, interpolated by the pair's index: https://arxiv.org/abs/2309.00071, section 3.2.
    original, factor = rope.parameters["original_max_position_embeddings"], float(rope.parameters["factor"])

    def pair(rotations: float) -> float:
        """The fractional index of the pair with that many rotations over the original context."""
        return rope.rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.parameters.get("beta_fast") or 32), pair(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    blend = ((steps - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return plain / factor * blend + plain * (1 - blend)


def attention_scaling(rope: RopeConfig) -> float:
    """Factor of cos and sin: above 1 for LongRoPE and YaRN, else 1."""
    if rope.rope_type not in ("longrope", "yarn"):
        return 1.0
    if rope.parameters.get("attention_factor") is not None:
        return float(rope.parameters["attention_factor"])
    if rope.rope_type == "yarn":
        factor = rope.parameters["factor"]
        mscale, all_dim = (rope.parameters.get(key) for key in ("mscale", "mscale_all_dim"))

        def scaling(mscale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

        return scaling(mscale) / scaling(all_dim) if mscale and all_dim else scaling(1.0)
    original = rope.parameters["original_max_position_embeddings"]
    factor = rope.parameters.get("factor")
    if factor is None:
        factor = rope.parameters["max_position_embeddings"] / original
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def switch_length(config: ModelConfig) -> int | None:
    """The longest sequence with LongRoPE's short factors; None for other models. A sequence that grows beyond it must be
    prefilled again, as its cached keys were rotated by other angles."""
    scaled = [rope.parameters for rope in config.rotaries if rope.rope_type == "longrope"]
    return min((int(parameters["original_max_position_embeddings"]) for parameters in scaled), default=None)


class Rotary:
    def __init__(self, rope: RopeConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._short = inverse_frequencies(rope).to(device)
        self._long = inverse_frequencies(rope, long=True).to(device)
        self._scaling = attention_scaling(rope)
        self._switch = rope.parameters["original_max_position_embeddings"] if rope.rope_type == "longrope" else None
        self._dtype = dtype

    def tables(self, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions start..stop of ``length``: (stop - start, rotary_dim) each, in equal halves."""
        long = self._switch is not None and length > self._switch
        positions = torch.arange(start, stop, dtype=torch.float32, device=self._short.device)
        angles = positions[:, None] * (self._long if long else self._short)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return cos.to(self._dtype), sin.to(self._dtype)

    def step_tables(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin for decoding at the first ``count`` positions: (count, rotary_dim / 2) each."""
        switch = min(self._switch or count, count)
        parts = [self.tables(0, switch, switch)]
        if switch < count:
            parts.append(self.tables(switch, count, count))
        cos, sin = (torch.cat(tables).chunk(2, dim=1)[0].contiguous() for tables in zip(*parts, strict=True))
        return cos, sin


def query_scales(config: ModelConfig, start: int, stop: int, device: torch.device) -> Tensor | None:
    """Attention temperature of Llama 4 and Ministral 3, a factor of queries at positions start..stop: (stop - start,)
    float32, 1 + beta * log(1 + floor(p / n)); None for other models."""
    if config.query_scaling is None:
        return None
    beta, length = config.query_scaling
    return 1 + beta * torch.log(1 + torch.floor(torch.arange(start, stop, device=device) / length))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the first rotary_dim dimensions of x (heads, T, head_dim); cos, sin: from :meth:`Rotary.tables`.
    Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) if ``interleaved``."""
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        half = rotary_dim // 2
        cos, sin = (table[:, :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
        crossed = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos + crossed * sin
    return rotated if not rest.shape[-1] else torch.cat((rotated, rest), dim=-1)
