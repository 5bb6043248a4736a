"""What tells one block of a model from another: how far it looks back, and which rotary embedding turns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        recurrent: it has a gated DeltaNet instead of attention, and neither a window nor a rotary embedding.
    """

    window: int | None
    rotary: int | None
    recurrent: bool = False


def read_blocks(config: Mapping[str, Any], arch: Architecture, num_blocks: int) -> tuple[Block, ...]:
    """Every block of a model, in order; raises UnsupportedModelError for a nonsensical list, window or period."""
    if arch.recurrent:
        return tuple(Block(None, None if one else 0, one) for one in _recurrent(config, num_blocks))
    windows = _windows(config, arch, num_blocks)
    unrotated: set[int] = set()
    if arch.unrotated == "full" and any(window is not None for window in windows):
        unrotated = {index for index, window in enumerate(windows) if window is None}
    elif arch.unrotated == "listed":
        unrotated = {index for index, rotated in enumerate(_rotated(config, num_blocks)) if not rotated}
    local = 0 if arch.local_theta is None else 1
    return tuple(
        Block(window, None if index in unrotated else 0 if window is None else local)
        for index, window in enumerate(windows)
    )


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
