"""What is answered instead of an answer, in OpenAI's words."""

from __future__ import annotations

import logging
from typing import Any

from wisparse.formats.errors import ContextLengthError, UsageError, WisparseError

from ..generation.engine import QueueFullError

__all__ = ["ApiError", "as_api_error", "bad"]

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
