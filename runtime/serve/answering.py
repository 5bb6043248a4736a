"""One request's answers on their way from the engine's thread to the event loop.

Waking the loop costs more than a small model's token, and so does reading an event at the other end. So the loop is
woken by the first piece, and by an answer's last; between the two it comes by itself, once a sixtieth of a second has
passed since it last took something, and what has come meanwhile goes out together. A slower model's pieces find the
loop waiting and go out one by one, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from wisparse.formats.errors import WisparseError

from ..generation.answer import Piece
from ..generation.choosing import Constraint
from ..generation.engine import Engine, Ticket
from ..model import Model
from ..protocol.answers import unsaid
from ..protocol.requests import ApiCall
from ..protocol.thinking import ThoughtCount

__all__ = ["Answering"]

# A picture of a screen that shows sixty a second.
_GATHER_SECONDS = 1 / 60


class Answering:
    """The pieces of one request's answers, as they come from the engine's thread; ``thinks`` as for a ``Shape``."""

    def __init__(self, engine: Engine, thinks: bool | None = None) -> None:
        self._thinks = thinks
        self._thoughts: list[ThoughtCount] = []
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Piece | WisparseError]] = deque()
        self._woken = asyncio.Event()
        # Set by the loop before it looks a last time, read by the engine's thread after it has added: one of them sees
        # the other.
        self._waiting = False
        self._taken = float("-inf")
        self._tickets: list[Ticket] = []

    def submit(
        self, model: Model, call: ApiCall, prompts: Sequence[Sequence[int]], constraints: Sequence[Constraint | None]
    ) -> None:
        """Queue every answer of a call; ``constraints``: one for each of them."""
        for token_ids in prompts:
            for copy in range(call.n):
                seed = call.sampling.seed
                sampling = call.sampling if seed is None else replace(call.sampling, seed=(seed + copy) % 2**63)
                most = 1 if call.silent else call.max_tokens  # a prompt gives a token, wanted or not
                request, stops = model.request(token_ids, most, sampling, call.stop, model.prefill, call.sparsity)
                index = len(self._tickets)
                self._thoughts.append(ThoughtCount(begun=bool(self._thinks)))
                request = replace(request, score_prompt=call.echo, constraint=constraints[index], spoken=call.spoken)
                self._tickets.append(self._engine.submit(request, stops, self._receiver(index, call.silent)))

    def _receiver(self, index: int, silent: bool) -> Callable[[Piece | WisparseError], None]:
        def deliver(item: Piece | WisparseError) -> None:
            if silent and isinstance(item, Piece):
                item = unsaid(item)
            self._items.append((index, item))
            if self._waiting or isinstance(item, WisparseError) or item.finish_reason is not None:
                self._waiting = False
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to read it
                    self._loop.call_soon_threadsafe(self._woken.set)

        return deliver

    async def next(self, gather_seconds: float | None = None) -> list[tuple[int, Piece]]:
        """What has come since the last call, one piece at least.

        Args:
            gather_seconds: how long after the last call's return more pieces are waited for, unless an answer ends; a
                sixtieth of a second if None.

        Raises:
            WisparseError: what ended an answer.
        """
        until = self._taken + (_GATHER_SECONDS if gather_seconds is None else gather_seconds)
        if until > self._loop.time():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._woken.wait()
        self._waiting = True
        while not self._items:
            self._woken.clear()
            if not self._items:
                await self._woken.wait()
        self._waiting = False
        self._woken.clear()
        items = [self._items.popleft() for _ in range(len(self._items))]
        self._taken = self._loop.time()
        for index, item in items:
            if isinstance(item, WisparseError):
                raise item
            if self._thinks is not None:
                self._thoughts[index].add(item.text)
        return items  # type: ignore[return-value]

    @property
    def thought_tokens(self) -> int:
        """Of all answers so far."""
        return sum(one.tokens for one in self._thoughts)

    def cancel(self) -> None:
        """Take back what has not ended."""
        for ticket in self._tickets:
            self._engine.cancel(ticket)

    def __len__(self) -> int:
        return len(self._tickets)
