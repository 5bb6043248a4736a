"""A client's connection: one that asks nothing is closed, as is one whose client does not take what is left to send."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .wire import PATIENCE_SECONDS

__all__ = ["BACKLOG", "Connection", "allow_many_files"]

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
