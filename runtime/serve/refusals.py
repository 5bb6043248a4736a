"""What is answered instead of an answer, in OpenAI's words."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "bad"]


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
