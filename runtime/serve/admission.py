"""What is let in: the key, and the body's type, size and time."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from starlette.requests import Request

from wisparse.formats.errors import UsageError
from wisparse.formats.guard.safe_json import parse_json

from ..protocol.errors import ApiError
from .wire import PATIENCE_SECONDS

__all__ = ["check_key", "check_name", "read_body"]

_MOST_BYTES = 8 * 2**20


def check_key(request: Request, key: str | None) -> None:
    """Let in who shows the key; None lets everybody in.

    Raises:
        ApiError: 401.
    """
    if key is None:
        return
    kind, _, shown = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), key.encode()):
        raise ApiError(
            401, "expected the server's key as Authorization: Bearer KEY", kind="authentication_error",
            code="invalid_api_key",
        )  # fmt: skip


async def read_body(request: Request, name: str) -> dict[str, Any]:
    """The request's JSON object, for the model of this name.

    Raises:
        ApiError: 404, 408, 413 or 415.
        UsageError: no JSON.
    """
    # A page of another origin can send a form's types unasked; JSON it has to ask for (CORS).
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected a body of type application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "expected a body that is not compressed", code="unsupported_media_type")
    too_large = ApiError(413, f"the body is larger than {_MOST_BYTES:,} bytes: shorten it", code="request_too_large")
    if int(request.headers.get("content-length", 0)) > _MOST_BYTES:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > _MOST_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(
            408, f"the body did not come within {PATIENCE_SECONDS:g} seconds", code="request_timeout"
        ) from error
    body = parse_json(bytes(data), "body", UsageError)
    if body.get("model") is not None:
        check_name(body["model"], name)
    return body


def check_name(found: Any, name: str) -> None:
    """Whether a request means the model of this name.

    Raises:
        ApiError: 404.
    """
    if found != name:
        raise ApiError(404, f"model: expected {name!r}, found {found!r:.80}", param="model", code="model_not_found")
