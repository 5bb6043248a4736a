"""A client's connection: one that asks nothing is closed, as is one whose client does not take what is left to send."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .wire import PATIENCE_SECONDS

__all__ = ["Connection"]


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for the rest of a request's headers, and for the rest of a body that was refused.

    Each connection is looked at once in ``PATIENCE_SECONDS``: it is closed if no request is under way, and none has
    come since it was looked at before.
    """

    _look: asyncio.TimerHandle | None = None
    _last: Any = None  # the request that was the newest when it was looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look = self.loop.call_later(PATIENCE_SECONDS, self._look_at_it)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_at_it(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._last:
            self.transport.close()
        self._last = self.cycle
        self._look = self.loop.call_later(PATIENCE_SECONDS, self._look_at_it)
