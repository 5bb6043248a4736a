"""The application's addresses, and what listens and speaks HTTP for it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from wisparse.formats.errors import UsageError

from ..model import Model
from .app import Endpoints
from .connection import BACKLOG, Connection, allow_many_files
from .page import page_routes
from .refusals import not_found, wrong_method
from .settings import ServeSettings

__all__ = ["http_server", "make_app", "open_socket", "serve"]

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
