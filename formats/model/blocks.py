"""What tells one block of a model from another: how far it looks back, which rotary embedding turns it, its heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UnsupportedModelError
from .architectures import Architecture
from .config_values import dimension, listed, switch

__all__ = ["Block", "read_blocks"]


@dataclass(frozen=True)
class Block:
    """What tells one block of a model from another.

    Attributes:
        window: how many positions it attends to, itself included; None for all.
        rotary: which of ``ModelConfig.rotaries`` turns its queries and keys; None where nothing does.
        head_dim, num_kv_heads: width of a head, and how many heads have keys and values.
        recurrent: it has a gated DeltaNet instead of attention, and neither a window nor a rotary embedding.
        shared_values: it has no ``v_proj``; its values are what ``k_proj`` gives.
    """

    window: int | None
    rotary: int | None
    head_dim: int
    num_kv_heads: int
    recurrent: bool = False
    shared_values: bool = False

    @property
    def kv_size(self) -> int:
        """Width of the keys and of the values."""
        return self.num_kv_heads * self.head_dim


def read_blocks(
    config: Mapping[str, Any], arch: Architecture, num_blocks: int, head_dim: int, num_kv_heads: int
) -> tuple[Block, ...]:
    """Every block of a model, in order; raises UnsupportedModelError for a nonsensical list, window, period or head."""
    if arch.recurrent:
        kinds = _recurrent(config, num_blocks)
        return tuple(Block(None, None if one else 0, head_dim, num_kv_heads, one) for one in kinds)
    windows = _windows(config, arch, num_blocks)
    if arch.full_heads:  # the last one attends to everything whatever else is said
        windows[-1] = None
    unrotated: set[int] = set()
    if arch.unrotated == "full" and any(window is not None for window in windows):
        unrotated = {index for index, window in enumerate(windows) if window is None}
    elif arch.unrotated == "listed":
        unrotated = {index for index, rotated in enumerate(_rotated(config, num_blocks)) if not rotated}
    local = 0 if arch.local_theta is None else 1
    blocks = [
        Block(window, None if index in unrotated else 0 if window is None else local, head_dim, num_kv_heads)
        for index, window in enumerate(windows)
    ]
    return tuple(_with_full_heads(config, arch, blocks) if arch.full_heads else blocks)


def _with_full_heads(config: Mapping[str, Any], arch: Architecture, blocks: list[Block]) -> list[Block]:
    """The same with heads of their own where there is no window: Gemma 4's."""
    shared = arch.shared_values is not None and switch(config, arch.shared_values)
    own = {"head_dim": config.get("global_head_dim")}
    if shared:
        own["num_key_value_heads"] = config.get("num_global_key_value_heads")
    full = {index: own for index, block in enumerate(blocks) if block.window is None}
    given = config.get("per_layer_config", full)
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: per_layer_config: expected an object, found {given!r:.80}")
    # The keys are numbers as JSON has them: "5", and "05" in a model of more than ten blocks.
    names = {int(key) if re.fullmatch("[0-9]{1,5}", str(key)) else -1: key for key in given}
    if unknown := set(names) - set(range(len(blocks))):
        raise UnsupportedModelError(
            f"config.json: per_layer_config: expected blocks, found {names[min(unknown)]!r:.80}"
        )
    found = []
    for index, block in enumerate(blocks):
        said = given[names[index]] if index in names else {}
        if not isinstance(said, Mapping) or not set(said) <= {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(
                f"config.json: per_layer_config: expected head_dim and num_key_value_heads, found {said!r:.80}"
            )
        found.append(
            replace(
                block,
                head_dim=dimension(said, "head_dim", default=block.head_dim),
                num_kv_heads=dimension(said, "num_key_value_heads", default=block.num_kv_heads),
                shared_values=shared and block.window is None,
            )
        )
    widths = [{block.head_dim for block in found if (block.window is None) == full} for full in (True, False)]
    if any(len(of_kind) > 1 for of_kind in widths):
        raise UnsupportedModelError("config.json: per_layer_config: expected one head_dim for blocks of a kind")
    return found


def _recurrent(config: Mapping[str, Any], num_blocks: int) -> list[bool]:
    kinds = listed(config, "layer_types", num_blocks)
    if kinds is None:
        every = dimension(config, "full_attention_interval", default=4)
        return [(index + 1) % every != 0 for index in range(num_blocks)]
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise UnsupportedModelError(
                f"config.json: layer_types: expected linear_attention or full_attention, found {kind!r:.80}"
            )
    return [kind == "linear_attention" for kind in kinds]


def _rotated(config: Mapping[str, Any], num_blocks: int) -> list[Any]:
    """SmolLM3's list of blocks that know positions, or its rule where there is no list."""
    given = listed(config, "no_rope_layers", num_blocks)
    if given is not None:
        return given
    every = dimension(config, "no_rope_layer_interval", default=4)
    return [(index + 1) % every for index in range(num_blocks)]


def _windows(config: Mapping[str, Any], arch: Architecture, num_blocks: int) -> list[int | None]:
    window = config.get("sliding_window")
    if window is not None:
        dimension(config, "sliding_window")
    if window is None or (arch.sliding is not None and not switch(config, arch.sliding)):
        return [None] * num_blocks
    kinds = listed(config, "layer_types", num_blocks)
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if arch.unrotated == "listed":
        # SmolLM3's rule: without a list of kinds, the window stands where positions are not told apart.
        return [None if rotated else window for rotated in _rotated(config, num_blocks)]
    if arch.full_every is not None:
        return [None if full else window for full in _full(config, arch.full_every, num_blocks)]
    # Qwen's rule before layer_types existed: the first max_window_layers blocks attend to everything.
    first = config.get("max_window_layers", 0) if arch.sliding is not None else 0
    if not isinstance(first, int):
        raise UnsupportedModelError(f"config.json: max_window_layers: expected a number, found {first!r:.80}")
    return [window if index >= first else None for index in range(num_blocks)]


def _full(config: Mapping[str, Any], every: int, num_blocks: int) -> list[bool]:
    """Which blocks attend to everything, by ``sliding_window_pattern``: a period, or a period spelled in L and G."""
    pattern = config.get("sliding_window_pattern", every)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        # The last block attends to everything whatever the letters say.
        return [pattern[index % len(pattern)] == "G" or index == num_blocks - 1 for index in range(num_blocks)]
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedModelError(
            f"config.json: sliding_window_pattern: expected a positive integer or letters, found {pattern!r:.80}"
        )
    return [(index + 1) % pattern == 0 for index in range(num_blocks)]
