"""Values of a ``config.json``, checked as they are read: a wrong one is an UnsupportedModelError that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError

__all__ = ["dimension", "listed", "number", "switch"]

# Far above any model there is; keeps a hostile config from asking for absurd memory before a tensor was looked at.
_LARGEST_DIMENSION = 2**27


def dimension(
    config: Mapping[str, Any], key: str, default: int | None = None, largest: int = _LARGEST_DIMENSION
) -> int:
    """A positive integer; ``default`` where the config has none."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive integer, found {value!r:.80}")
    if value > largest:
        raise UnsupportedModelError(f"config.json: {key}: expected at most {largest:,}, found {value!r:.40}")
    return value


def switch(config: Mapping[str, Any], key: str) -> bool:
    """True or false; false where the config has none."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModelError(f"config.json: {key}: expected true or false, found {value!r:.80}")
    return bool(value)


def number(config: Mapping[str, Any], key: str) -> float:
    """A positive number."""
    value = config.get(key)
    # The bounds keep sums, powers and quotients of it finite; NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-12 < value < 1e12:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive number, found {value!r:.80}")
    return float(value)


def listed(config: Mapping[str, Any], key: str, num_blocks: int) -> list[Any] | None:
    """A list with an entry for every block; None if the config has none."""
    values = config.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != num_blocks:
        raise UnsupportedModelError(f"config.json: {key}: expected {num_blocks} entries, found {values!r:.80}")
    return values
