"""Failures as responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..protocol.errors import ApiError
from ..protocol.events import to_json

__all__ = ["not_found", "refusal", "wrong_method"]


def refusal(error: ApiError) -> Response:
    """What an error answers."""
    headers = {"retry-after": "1"} if error.status == 429 else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(to_json(error.body), error.status, headers, "application/json")


async def not_found(request: Request, error: Exception) -> Response:
    return refusal(ApiError(404, f"{request.url.path:.80}: no such address here", code="not_found"))


async def wrong_method(request: Request, error: Exception) -> Response:
    text = f"{request.url.path:.80}: {request.method:.20} is not for it"
    return refusal(ApiError(405, text, code="method_not_allowed"))
