"""What goes over the wire while a client may go away: events, and work that ends when nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .metrics import Metrics

__all__ = ["PATIENCE_SECONDS", "EventStream", "unless_disconnected"]

# A client has so long to send its body, and to take what is sent to it.
PATIENCE_SECONDS = 30.0


class EventStream(Response):
    """Server-sent events; when the client goes, or does not read, ``cancel`` is called."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], cancel: Callable[[], None], metrics: Metrics) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._cancel, self._metrics = chunks, cancel, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                if chunk:
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _until_disconnected(receive, run())
        except (ClientDisconnect, TimeoutError):
            self._metrics.cancelled.inc()
        finally:
            self._cancel()


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """The work's result, unless the client goes before it is there.

    Raises:
        ClientDisconnect: it has gone; the work is cancelled.
    """
    return await _until_disconnected(request.receive, work)


async def _until_disconnected(receive: Receive, work: Awaitable[Any]) -> Any:
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
