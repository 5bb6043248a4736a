"""A body's fields, one by one: of the right type and in range, else refused by name. Null is as good as none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import ApiError, bad

__all__ = ["checked", "integer", "number", "refuse_unsupported", "switch"]


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


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuse fields that would change the answer; ``neutral``: of each the values that would not, beside null.

    Raises:
        ApiError: with the field named.
    """
    for field, values in neutral.items():
        value = body.get(field)
        # True equals 1 in Python, and nothing else here means the same.
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            continue
        raise ApiError(
            400, f"{field}: this server does not have it; leave it out", param=field, code="unsupported_parameter"
        )
