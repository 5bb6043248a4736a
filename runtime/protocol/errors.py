"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from wisparse.formats.errors import ContextLengthError, UsageError, WisparseError

from ..generation.engine import QueueFullError

log = logging.getLogger(__name__)


class ApiError(HTTPException):
    """An HTTP status and the error object that is sent with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.error = {"message": message, "type": type, "param": param, "code": code}


def as_api_error(error: Exception, prompt: str = "messages") -> ApiError:
    """What to answer for an exception; ``prompt``: the request's field that holds the prompt."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(
                429, str(error), type="rate_limit_error", code="queue_full", headers={"retry-after": "1"}
            )  # fmt: skip
        case ContextLengthError():
            return ApiError(400, str(error), param=prompt, code="context_length_exceeded")
        case UsageError():
            field = str(error).partition(":")[0]
            return ApiError(400, str(error), param=field if field.isidentifier() else None, code="invalid_value")
        case WisparseError():
            log.warning("a request failed: %s", error)
            return ApiError(500, str(error), type="server_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed: its log has more", type="server_error")


class FieldError(ValueError):
    """Raised by validators; ``field`` of the model, or the field itself where it is empty."""

    def __init__(self, field: str, message: str, code: str = "unsupported_parameter") -> None:
        super().__init__(message)
        self.field, self.code = field, code


def invalid(field: str, expected: str, found: Any) -> FieldError:
    return FieldError(field, f"expected {expected}, found {found!r:.80}", "invalid_value")


def from_validation(errors: Sequence[Mapping[str, Any]], where: str = "") -> ApiError:
    """The first of pydantic's errors as "field: expected ..., found ..."; ``where``: what was validated."""
    error = errors[0]
    own = error.get("ctx", {}).get("error")
    names, code, message = list(error["loc"]), "invalid_value", error["msg"]
    if isinstance(own, FieldError):
        names, code, message = [*names, own.field] if own.field else names, own.code, str(own)
    elif error["type"] == "missing":
        message = "this field is required"
    elif error["type"] in ("model_type", "model_attributes_type"):
        message = f"expected an object, found {error['input']!r:.80}"
    else:
        message = f"{message.replace('Input should be', 'expected')}, found {error['input']!r:.80}"
    path = where + "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    param = path.lstrip(".") or "body"
    return ApiError(501 if code == "unsupported_content" else 400, f"{param}: {message}", param=param, code=code)
