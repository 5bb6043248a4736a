"""HTTP around the endpoints: the key, bounded request bodies, event streams, clients that go away, and the page's files."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from importlib.resources import files
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wisparse.formats.errors import UsageError
from wisparse.formats.guard import parse_json

from ..protocol.errors import ApiError, as_api_error, from_validation
from .metrics import Metrics

# A client has so long to send a request, and to take each part of the answer.
CLIENT_SECONDS = 30.0
CLIENT_GONE = 499
_MAX_BODY_BYTES = 8 * 2**20
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_PAGE_HEADERS = {
    # Nothing from other hosts, nothing inline, in no frame: a model's text could do nothing even as HTML.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def error_response(error: ApiError) -> Response:
    return JSONResponse({"error": error.error}, error.status_code, error.headers)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """The answer to a body that is not valid, to an unknown address, and to other errors with a status."""
    if isinstance(error, RequestValidationError):
        return error_response(from_validation([{**one, "loc": one["loc"][1:]} for one in error.errors()]))
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        path = f"{request.url.path:.80}"
        match error.status_code:
            case 404:
                return error_response(ApiError(404, f"{path}: no such address here", code="not_found"))
            case 405:
                text = f"{path}: {request.method:.20} is not for it"
                return error_response(ApiError(405, text, code="method_not_allowed", headers=error.headers))
        return error_response(ApiError(error.status_code, str(error.detail)))
    return error_response(as_api_error(error))


class Guard:
    """Middleware that asks for the key, counts answers, and answers every exception by OpenAI's error object."""

    def __init__(self, app: ASGIApp, key: str | None, metrics: Metrics) -> None:
        self._app, self._key, self._metrics = app, key, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        guarded = scope["path"].startswith(("/v1/", "/metrics"))
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if guarded:
                    self._metrics.requests.labels(str(message["status"])).inc()
                if message["status"] == CLIENT_GONE:
                    self._metrics.cancelled.inc()
            await send(message)

        try:
            if guarded:
                self._check_key(Request(scope))
            await self._app(scope, receive, counted)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, counted)
        except Exception as error:
            answer = error_response(as_api_error(error))  # which logs what was not foreseen
            if not started:
                await answer(scope, receive, counted)

    def _check_key(self, request: Request) -> None:
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        right = kind.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), (self._key or "").encode())
        if self._key is not None and not right:
            raise ApiError(
                401,
                "expected the server's key as Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


class JsonRequest(Request):
    """A request whose body is one JSON object of bounded size, sent in time."""

    async def body(self) -> bytes:
        if hasattr(self, "_body"):
            return self._body
        # A web page of another origin can send a form without being asked (CORS), JSON it cannot.
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "expected a body of type application/json", code="unsupported_media_type")
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError(415, "expected a body that is not compressed", code="unsupported_media_type")
        too_large = ApiError(
            413, f"the body is larger than {_MAX_BODY_BYTES:,} bytes: shorten it", code="request_too_large"
        )
        if int(self.headers.get("content-length", 0)) > _MAX_BODY_BYTES:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(CLIENT_SECONDS):
                async for chunk in self.stream():
                    data += chunk
                    if len(data) > _MAX_BODY_BYTES:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not come within {CLIENT_SECONDS:g} seconds", code="request_timeout"
            ) from error
        except ClientDisconnect as error:
            raise ApiError(CLIENT_GONE, "the client has gone") from error
        self._body = bytes(data)
        return self._body

    async def json(self) -> Any:
        try:
            return parse_json(await self.body(), "body", UsageError)
        except UsageError as error:
            raise as_api_error(error) from error


class JsonRoute(APIRoute):
    """A route that reads its body as a ``JsonRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


async def unless_disconnected(receive: Receive, work: Awaitable[Any]) -> Any:
    """The work's result; it is cancelled, and ClientDisconnect raised, if the client goes before it is there."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Server-sent events; ``cancel`` is called when they have ended, or the client goes or does not read."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None], metrics: Metrics) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._cancel, self._metrics = events, cancel, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                if event:
                    async with asyncio.timeout(CLIENT_SECONDS):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_disconnected(receive, run())
        except (ClientDisconnect, TimeoutError):
            self._metrics.cancelled.inc()
        finally:
            self._cancel()


def page_routes() -> list[Route]:
    """The chat page's files; they hold no secret, so no key is asked for them."""
    folder = files(__package__).joinpath("web")
    return [
        Route(path, Response(folder.joinpath(name).read_bytes(), headers=_PAGE_HEADERS, media_type=media_type))
        for path, (name, media_type) in _PAGE.items()
    ]
