"""What listens and speaks HTTP for the application: uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from wisparse.formats.errors import UsageError

from ..model import Model
from . import transport
from .app import ServeSettings, make_app

_BACKLOG = 128
_MAX_FILES = 1 << 16
# Python's own 5 ms, for which a thread waits for the interpreter, are longer than a step of a GPU.
_SWITCH_SECONDS = 0.0005


class TimedConnection(H11Protocol):
    """uvicorn has no time limit for a request's headers: a connection that sends no request in time is closed."""

    _timer: asyncio.TimerHandle

    def connection_made(self, connection: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(connection)
        self._timer = self.loop.call_later(transport.CLIENT_SECONDS, self._close_if_idle, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self, last: Any) -> None:
        """``last``: the newest request when this was called before."""
        if self.cycle is last and (last is None or last.response_complete):
            # Not kept open to send what nobody reads.
            (self.transport.abort if self.transport.is_closing() else self.transport.close)()
        self._timer = self.loop.call_later(transport.CLIENT_SECONDS, self._close_if_idle, self.cycle)


def open_socket(settings: ServeSettings) -> socket.socket:
    """A listening socket at the settings' host and port; raises UsageError."""
    if not settings.host.strip():
        raise UsageError("--host: expected an address, found an empty text; 0.0.0.0 is everywhere")
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UsageError(
            f"cannot listen at {settings.host:.80} port {settings.port}: {error}; choose another --host or --port"
        ) from error


def http_server(app: ASGIApp) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=TimedConnection,
            ws="none",
            h11_max_incomplete_event_size=32 * 1024,  # a request's headers
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=60,
            server_header=False,
            backlog=_BACKLOG,
        )
    )


def serve(model: Model, settings: ServeSettings, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish those under way. ``ready`` is called once everything is
    prepared; requests that come before wait."""
    # The event loop may hold the interpreter's lock for milliseconds, in which the engine's thread would start no step.
    sys.setswitchinterval(_SWITCH_SECONDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a connection is an open file
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MAX_FILES)), hard))
    http_server(make_app(model, settings, ready)).run(sockets=[listener])
