"""A body's fields, one by one: of the right type and in range, else refused by name. Null is as good as none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from wisparse.formats.errors import ContextLengthError, UsageError, WisparseError

from ..generation.engine import QueueFullError

log = logging.getLogger(__name__)


class ApiError(Exception):
    """What is answered instead: an HTTP status, and OpenAI's four words about it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad(field: str, expected: str, found: Any) -> ApiError:
    """A field whose value is not what it has to be."""
    return ApiError(400, f"{field}: expected {expected}, found {found!r:.80}", param=field, code="invalid_value")


def as_api_error(error: WisparseError, prompt: str = "messages") -> ApiError:
    """As OpenAI words it; ``prompt``: the field that held what was too long."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full")
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=prompt, code="context_length_exceeded")
    if isinstance(error, UsageError):
        named = str(error).partition(":")[0]
        return ApiError(400, str(error), param=named if named.isidentifier() else None)
    log.warning("a request failed: %s", error)
    return ApiError(500, str(error), kind="server_error")


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
