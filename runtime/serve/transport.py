"""HTTP around the endpoints: the socket, the API key, limits of request bodies, event streams, timeouts and disconnects of
clients, metrics, and the chat page's files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import logging
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from importlib.resources import files
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from wisparse.formats.errors import UnavailableError, UsageError
from wisparse.formats.guard import parse_json

from ..generation.engine import SHUTTING_DOWN, EngineState
from ..generation.scheduler import Scheduler
from ..protocol.messages import PATH, error_answer
from ..protocol.requests import ApiError, as_api_error, from_validation

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
# Time limit of a client to send a request, and to receive each part of the response.
CLIENT_SECONDS = 30.0
CLIENT_GONE = 499
# Key of a request's scope: the text of the response's header of this name; absent or empty: no header.
WARNING = "x-wisparse-warning"
_LAST_SECONDS = 1.0  # for a stream's last event when the server ends without waiting
_BACKLOG = 128
_MAX_BODY_BYTES = 8 * 2**20
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/markdown-it.min.js": ("markdown-it.min.js", "text/javascript"),
}
_PAGE_HEADERS = {
    # No other hosts, nothing inline, no frames: a model's text is harmless even if it were interpreted as HTML.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Metrics:
    """Prometheus metrics, in a registry of their own as several servers can run in one process."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        registry = self._registry = CollectorRegistry()
        counter, gauge = functools.partial(Counter, registry=registry), functools.partial(Gauge, registry=registry)
        histogram = functools.partial(Histogram, registry=registry)
        self.requests = counter("wisparse_requests", "Requests answered, by HTTP status", ["status"])
        self.cancelled = counter("wisparse_cancelled", "Requests whose client disconnected")
        self.tokens = counter("wisparse_generated_tokens", "Tokens generated")
        self.prompt_tokens = counter("wisparse_prompt_tokens", "Prompt tokens, including cached ones")
        self.cached_tokens = counter("wisparse_cached_prompt_tokens", "Prompt tokens reused from the prefix cache")
        self.first_token = histogram(
            "wisparse_time_to_first_token_seconds", "From the request to its first token", buckets=_SECONDS
        )
        self.token_time = histogram(
            "wisparse_time_per_token_seconds", "Mean time of an answer's tokens after its first", buckets=_TOKEN_SECONDS
        )
        # vLLM's names and meaning.
        self._totals = [
            counter("wisparse:spec_decode_num_drafts", "Drafts verified"),
            counter("wisparse:spec_decode_num_draft_tokens", "Tokens of drafts"),
            counter("wisparse:spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted"),
            counter("wisparse:num_preemptions", "Requests that were preempted because the KV cache was full"),
        ]
        self._last_totals = [0, 0, 0, 0]
        self._cache = gauge("wisparse:kv_cache_usage_perc", "Share of the KV cache that running requests use, 0 to 1")
        self._realised_sparsity = gauge(
            "wisparse_weights_unread_ratio", "Share of the projections' weights left unread at sparse positions"
        )
        gauge("wisparse_running", "Requests in the batch").set_function(lambda: state().running)
        gauge("wisparse_waiting", "Requests in the waiting queue").set_function(lambda: state().waiting)

    def page(self, realised_sparsity: float | None, scheduler: Scheduler) -> bytes:
        """The text of ``/metrics``; ``realised_sparsity``: None if nothing was decoded."""
        drafts = scheduler.stats.drafts
        totals = [drafts.drafts, drafts.drafted_tokens, drafts.accepted_tokens, scheduler.stats.preemptions]
        for counter, total, last in zip(self._totals, totals, self._last_totals, strict=True):
            counter.inc(total - last)
        self._last_totals = totals
        self._cache.set(scheduler.cache_usage)
        self._realised_sparsity.set(float("nan") if realised_sparsity is None else realised_sparsity)
        return generate_latest(self._registry)


class TimedConnection(H11Protocol):
    """Closes a connection that sends no complete request in time. uvicorn's ``timeout_keep_alive`` runs from the end of a
    response to the next byte: it covers neither a first request nor endless headers. The base class is not public, so
    pyproject.toml pins uvicorn's versions."""

    _timer: asyncio.TimerHandle

    def connection_made(self, connection: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(connection)
        self._timer = self.loop.call_later(CLIENT_SECONDS, self._close_if_idle, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self, last: Any) -> None:
        """``last``: the connection's request at the previous call."""
        if self.cycle is last and (last is None or last.response_complete):
            # Abort a closing connection whose client does not read the rest.
            (self.transport.abort if self.transport.is_closing() else self.transport.close)()
        self._timer = self.loop.call_later(CLIENT_SECONDS, self._close_if_idle, self.cycle)


def error_response(path: str, error: Exception) -> Response:
    """Anthropic's error object on its paths, OpenAI's on all others."""
    api_error = as_api_error(error)  # logs unexpected errors
    status, body = api_error.status_code, {"error": api_error.error}
    if path.startswith(PATH):
        status, body = error_answer(api_error)
    return JSONResponse(body, status, api_error.headers)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """The response to an invalid body, an unknown path, and other errors with a status."""
    if isinstance(error, RequestValidationError):
        error = from_validation([{**entry, "loc": entry["loc"][1:]} for entry in error.errors()])
    elif isinstance(error, HTTPException) and not isinstance(error, ApiError):
        path = f"{request.url.path:.80}"
        known = {
            404: (f"{path}: no such path on this server", "not_found"),
            405: (f"{path}: does not allow the method {request.method:.20}", "method_not_allowed"),
        }
        text, code = known.get(error.status_code, (str(error.detail), None))
        error = ApiError(error.status_code, text, code=code, headers=error.headers)
    return error_response(request.url.path, error)


class Guard:
    """Middleware: checks the Host header and the API key, counts responses, converts exceptions to error responses."""

    def __init__(self, app: ASGIApp, key: str | None, hosts: Collection[str], metrics: Metrics) -> None:
        self._app, self._key, self._hosts, self._metrics = app, key, hosts, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        guarded = scope["path"].startswith(("/v1/", "/metrics"))
        started = False

        async def send_counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if guarded:
                    self._metrics.requests.labels(str(message["status"])).inc()
                if message["status"] == CLIENT_GONE:
                    self._metrics.cancelled.inc()
                if warning := scope.get(WARNING):
                    message["headers"] = [*message.get("headers", ()), (WARNING.encode(), warning.encode())]
            await send(message)

        try:
            headers = Request(scope).headers
            host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
            if self._hosts and host not in self._hosts:
                expected = f"expected one of {', '.join(self._hosts)} in the Host header, found {host!r:.80}"
                text = f"{expected}; wisparse serve --allowed-host NAME allows another name"
                raise ApiError(400, text, code="host_not_allowed")
            scheme, _, token = headers.get("authorization", "").partition(" ")
            key = (self._key or "").encode()
            valid = scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), key)
            if scope["path"].startswith(PATH) and not valid:
                valid = hmac.compare_digest(headers.get("x-api-key", "").encode(), key)
            if guarded and self._key is not None and not valid:
                text, fields = "expected the server's key as Authorization: Bearer KEY", {"www-authenticate": "Bearer"}
                text += " or x-api-key: KEY" if scope["path"].startswith(PATH) else ""
                raise ApiError(401, text, type="authentication_error", code="invalid_api_key", headers=fields)
            await self._app(scope, receive, send_counted)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send_counted)
        except asyncio.CancelledError:  # the server ends without waiting
            if started:
                raise
            await error_response(scope["path"], UnavailableError(SHUTTING_DOWN))(scope, receive, send_counted)
        except Exception as error:
            response = error_response(scope["path"], error)
            if not started:
                await response(scope, receive, send_counted)


class JsonRequest(Request):
    """A request with limits of the body's type, size and time."""

    async def body(self) -> bytes:
        if hasattr(self, "_body"):
            return self._body
        kind, encoding = (self.headers.get(f"content-{name}", "").partition(";")[0] for name in ("type", "encoding"))
        # A page of another origin can send a form without a CORS preflight, but not JSON.
        if kind.strip().lower() != "application/json" or encoding.strip().lower() not in ("", "identity"):
            text = "expected a body of type application/json that is not compressed"
            raise ApiError(415, text, code="unsupported_media_type")
        text = f"the body is larger than {_MAX_BODY_BYTES:,} bytes: shorten it"
        too_large = ApiError(413, text, code="request_too_large")
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
            text = f"the body did not come within {CLIENT_SECONDS:g} seconds"
            raise ApiError(408, text, code="request_timeout") from error
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
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


async def unless_disconnected(receive: Receive, work: Awaitable[Any]) -> Any:
    """Await ``work``; if the client disconnects first, cancel it and raise ClientDisconnect."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    result, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({result, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        for task in (result, disconnect):
            task.cancel()
        await asyncio.gather(result, disconnect, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. ``cancel`` is called at their end, and if the client disconnects or does not read; ``failure``
    makes the last event if the server ends without waiting."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        cancel: Callable[[], None],
        failure: Callable[[ApiError], bytes],
        metrics: Metrics,
    ) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._cancel, self._failure, self._metrics = cancel, failure, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.body_iterator:
                if event:
                    async with asyncio.timeout(CLIENT_SECONDS):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_disconnected(receive, run())
        except (ClientDisconnect, TimeoutError):
            self._metrics.cancelled.inc()
        except asyncio.CancelledError:
            last = self._failure(as_api_error(UnavailableError(SHUTTING_DOWN)))
            async with asyncio.timeout(_LAST_SECONDS):  # the client may not read
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._cancel()


def set_up(app: FastAPI, key: str | None, hosts: Collection[str], cors: Sequence[str], metrics: Metrics) -> None:
    """Add limits of request bodies, error responses, API key, allowed hosts and origins, and the chat page's files, which
    need no key."""
    app.router.route_class = JsonRoute
    folder = files(__package__).joinpath("web")
    for path, (name, media_type) in _PAGE.items():
        page = Response(folder.joinpath(name).read_bytes(), headers=_PAGE_HEADERS, media_type=media_type)
        app.router.routes.append(Route(path, page))
    for error in (HTTPException, RequestValidationError):
        app.add_exception_handler(error, handle_http_error)
    app.add_middleware(Guard, key=key, hosts=hosts, metrics=metrics)
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"])


def open_socket(host: str, port: int) -> socket.socket:
    if not host.strip():
        raise UsageError("--host: expected an address, found an empty text; 0.0.0.0 is everywhere")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        # create_server repeats the address in its strerror.
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise UsageError(f"cannot listen at {host:.80} port {port}: {why}; choose another --host or --port") from error


def allowed_hosts(listener: socket.socket, names: Sequence[str]) -> list[str]:
    """Allowed Host headers: ``names`` and the loopback names; empty: any. A server on a loopback address allows no others,
    against DNS rebinding: a web page whose host name resolves to that address could read its responses."""
    address = listener.getsockname()[0]
    if "*" in names or not (names or ipaddress.ip_address(address).is_loopback):
        return []
    host = f"[{address}]" if ":" in address else address
    return list(dict.fromkeys((*LOOPBACK_HOSTS, host, *(name.lower() for name in names))))


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for a CancelledError: a second Ctrl-C and the shutdown timeout cancel open requests."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not (cancelled or "CancelledError" in record.getMessage())


class Server(uvicorn.Server):
    """SIGTERM or Ctrl-C: finish the open requests. A second Ctrl-C: answer them with an error. Before and after, signals have
    their usual effect; uvicorn's own server raises those that it handled once more."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:
            # Since Python 3.12.1 a listener's end is waited for until all of its connections are closed.
            for task in list(self.server_state.tasks):
                task.cancel()


def http_server(app: ASGIApp) -> Server:
    config = uvicorn.Config(
        app,
        http=TimedConnection,
        ws="none",
        h11_max_incomplete_event_size=32 * 1024,  # largest size of a request's headers
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=60,
        server_header=False,
        backlog=_BACKLOG,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_relevant)
    return Server(config)
