"""A gated DeltaNet's dimensions: the recurrent half that stands where other blocks have attention.

    S  <-  exp(g) S + k (beta (v - k^T exp(g) S))^T,   o = S^T q        for each value head, position by position

q, k and v are ``in_proj_qkv``'s outputs after a short convolution over positions; k and q have length 1 in each head.
Instead of keys and values of every position, a sequence has the state S and the convolution's last inputs. Names are
Hugging Face's (Qwen3.5); the rule is eq. 10 of Yang, Kautz, Hatamizadeh (2024), "Gated Delta Networks".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModelError
from .config_values import dimension

__all__ = ["DeltaNet", "read_delta_net"]


@dataclass(frozen=True)
class DeltaNet:
    """Dimensions of a model's recurrent blocks.

    Attributes:
        key_heads, value_heads: value heads share the keys and queries of one key head in groups.
        key_dim, value_dim: numbers in a head; the state of a value head is (key_dim, value_dim).
        taps: positions that the convolution sees, the current one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_size(self) -> int:
        """Width of the keys, and of the queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of the values, of the gate, and of what ``out_proj`` reads."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Width of queries, keys and values together, which is what the convolution goes over."""
        return 2 * self.key_size + self.value_size

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name below ``linear_attn.`` -> shape of all that is not a projection in scope: too little to be worth a mask,
        and what it says decides how long the state remembers."""
        return {
            "in_proj_b.weight": (self.value_heads, hidden_size),
            "in_proj_a.weight": (self.value_heads, hidden_size),
            "conv1d.weight": (self.mixed_size, 1, self.taps),
            "dt_bias": (self.value_heads,),
            "A_log": (self.value_heads,),
            "norm.weight": (self.value_dim,),
        }


def read_delta_net(config: Mapping[str, Any]) -> DeltaNet:
    """From a parsed ``config.json``; raises UnsupportedModelError for a missing or nonsensical dimension."""
    found = DeltaNet(
        key_heads=dimension(config, "linear_num_key_heads"),
        value_heads=dimension(config, "linear_num_value_heads"),
        key_dim=dimension(config, "linear_key_head_dim"),
        value_dim=dimension(config, "linear_value_head_dim"),
        taps=dimension(config, "linear_conv_kernel_dim", largest=64),
    )
    if found.value_heads % found.key_heads:
        raise UnsupportedModelError(
            f"config.json: linear_num_value_heads ({found.value_heads}) is not a multiple of linear_num_key_heads "
            f"({found.key_heads})"
        )
    if found.taps < 2:
        raise UnsupportedModelError("config.json: linear_conv_kernel_dim: expected 2 or more, found 1")
    return found
