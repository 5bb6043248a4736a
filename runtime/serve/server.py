"""The application's addresses, and what listens and speaks HTTP for it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from wisparse.formats.errors import UsageError

from ..model import Model
from .app import PATIENCE_SECONDS, Endpoints, ServeSettings, not_found, page_routes, wrong_method

# Connections that wait to be taken, and are in one go.
BACKLOG = 128
# Files to be left when there are most: what comes in meanwhile, and what the process has open for other things.
_SPARE_FILES = 4 * BACKLOG + 64
# As many as are ever wanted; and as many as macOS gives, whatever it says.
_FILES = (1 << 16, 10_240)


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for the rest of a request's headers, and for the rest of a body that was refused.

    Each connection is looked at once in ``PATIENCE_SECONDS``: it is closed if no request is under way, and none has
    come since it was looked at before. Where there are more than the process may have files open, the oldest that asks
    nothing makes room: without a file left asyncio takes no connection at all, and says so thousands of times a second.
    """

    _look: asyncio.TimerHandle | None = None
    _last: Any = None  # the request that was the newest when it was looked at
    _began = 0.0

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began = self.loop.time()
        self._look = self.loop.call_later(PATIENCE_SECONDS, self._look_at_it)
        if len(self.connections) > (most := most_connections()):
            # One that was closed already is there until the loop comes by.
            alive = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
            if len(alive) > most:
                min((one for one in alive if one._idle), key=lambda one: one._began).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_at_it(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
            return
        if self._idle and self.cycle is self._last:
            self.transport.close()
        self._last = self.cycle
        self._look = self.loop.call_later(PATIENCE_SECONDS, self._look_at_it)


def allow_many_files() -> None:
    """Let the process open as many files as the system lets it: a connection is one."""
    for wanted in _FILES:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> float:
    """How many there may be at a time."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else max(soft // 2, soft - _SPARE_FILES)


# A thread that waits for the interpreter gets it after so long; Python's own 5 ms are longer than a step of a GPU.
_SWITCH_SECONDS = 0.0005
_ELSEWHERE = (
    "/v1/embeddings", "/v1/images/{rest:path}", "/v1/audio/{rest:path}", "/v1/moderations", "/v1/responses/{rest:path}"
)  # fmt: skip


def open_socket(settings: ServeSettings) -> socket.socket:
    """A listening socket at the settings' host and port.

    Raises:
        UsageError: there is no such host, or something listens there already.
    """
    if not settings.host.strip():
        raise UsageError("--host: expected an address, found an empty text; 0.0.0.0 is everywhere")
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UsageError(
            f"cannot listen at {settings.host:.80} port {settings.port}: {error}; choose another --host or --port"
        ) from error


def serve(model: Model, settings: ServeSettings, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish those under way; the model is held meanwhile. ``ready`` is
    called once everything is prepared; who connects before waits."""
    # The event loop may hold the interpreter's lock for milliseconds, in which the engine's thread would start no step.
    sys.setswitchinterval(_SWITCH_SECONDS)
    allow_many_files()
    http_server(make_app(model, settings, ready)).run(sockets=[listener])


def http_server(app: Starlette) -> uvicorn.Server:
    """What speaks HTTP for the application."""
    # Of uvicorn's parsers only h11, which this is, bounds a request's headers.
    config = uvicorn.Config(
        app, http=Connection, ws="none", h11_max_incomplete_event_size=32 * 1024, log_level="warning", access_log=False,
        timeout_graceful_shutdown=60, server_header=False, backlog=BACKLOG,
    )  # fmt: skip
    return uvicorn.Server(config)


def make_app(model: Model, settings: ServeSettings, ready: Callable[[], None] = lambda: None) -> Starlette:
    """The ASGI application; the engine runs between its start, after which ``ready`` is called, and its end."""
    endpoints = Endpoints(model, settings, ready)
    routes = [
        *page_routes(),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.guarded(endpoints.metrics_page)),
        Route("/v1/models", endpoints.guarded(endpoints.models)),
        Route("/v1/models/{name:path}", endpoints.guarded(endpoints.one_model)),
        Route("/v1/chat/completions", endpoints.guarded(endpoints.chat), methods=["POST"]),
        Route("/v1/responses", endpoints.guarded(endpoints.respond), methods=["POST"]),
        Route("/v1/completions", endpoints.guarded(endpoints.complete), methods=["POST"]),
        *(Route(path, endpoints.guarded(endpoints.not_here), methods=["GET", "POST", "DELETE"]) for path in _ELSEWHERE),
    ]
    middleware = [
        Middleware(CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"])
    ]
    return Starlette(
        routes=routes,
        middleware=middleware if settings.cors else [],
        lifespan=endpoints.lifespan,
        exception_handlers={404: not_found, 405: wrong_method},
    )
