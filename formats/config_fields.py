"""Validated reading of the fields of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import UnsupportedModelError

# Far above any model: bounds memory for a hostile config before the tensors are validated.
LARGEST_DIMENSION = 2**27


def require(valid: bool, key: str, what: str, found: Any, advice: str = "") -> None:
    if not valid:
        raise UnsupportedModelError(f"config.json: {key}: expected {what}, found {found!r:.80}{advice}")


def dimension(config: Mapping[str, Any], key: str, largest: int = LARGEST_DIMENSION) -> int:
    value: Any = config.get(key)
    require(type(value) is int and value > 0, key, "a positive integer", value)
    require(value <= largest, key, f"at most {largest:,}", value)
    return int(value)


def switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    require(value is None or isinstance(value, bool), key, "true or false", value)
    return bool(value)


def number(
    config: Mapping[str, Any], key: str, low: float = 1e-12, high: float = 1e12, what: str = "a positive number"
) -> float:
    """The bounds keep sums, powers and quotients finite; NaN fails every comparison."""
    value: Any = config.get(key.rpartition(".")[2])
    require(type(value) in (int, float) and low <= value < high, key, what, value)
    return float(value)


def listed(config: Mapping[str, Any], key: str, length: int, what: str = "entries") -> list[Any]:
    values: Any = config.get(key.rpartition(".")[2])
    require(isinstance(values, list) and len(values) == length, key, f"{length} {what}", values)
    return list(values)


def read_count(config: Mapping[str, Any], key: str | None) -> int:
    """A non-negative number; 0 if ``key`` is None or missing."""
    value = 0 if key is None or config.get(key) is None else config[key]
    require(type(value) is int and 0 <= value <= LARGEST_DIMENSION, str(key), "0 or a positive integer", value)
    return int(value)
