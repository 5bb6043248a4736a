"""A body's fields, one by one: of the right type and in range, else refused by name. Null is as good as none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import bad

__all__ = ["checked", "integer", "number", "switch"]


def checked(
    body: Mapping[str, Any], field: str, default: Any, fits: Callable[[Any], bool], expected: str, prefix: str = ""
) -> Any:
    value = body.get(field)
    if value is None:
        return default
    if not fits(value):
        raise bad(prefix + field, expected, value)
    return value


def switch(body: Mapping[str, Any], field: str, default: bool, prefix: str = "") -> bool:
    found: bool = checked(body, field, default, lambda value: isinstance(value, bool), "true or false", prefix)
    return found


def integer(body: Mapping[str, Any], field: str, default: int | None, least: int, most: int) -> int | None:
    found: int | None = checked(
        body, field, default, lambda value: type(value) is int and least <= value <= most,
        f"a whole number from {least} to {most}",
    )  # fmt: skip
    return found


def number(body: Mapping[str, Any], field: str, default: float, least: float, most: float) -> float:
    # NaN fails both comparisons.
    found = checked(
        body, field, default, lambda value: type(value) in (int, float) and least <= value <= most,
        f"a number from {least:g} to {most:g}",
    )  # fmt: skip
    return float(found)
