"""One decoder, one thread: requests join the running batch at any step, and leave it at any step.

    submit(request) -> queue -> scheduler.step(), again and again -> deliver(piece) for every token

The engine knows nothing of who asks. What it delivers comes from its own thread, so a receiver must return at once;
``serve`` hands each piece on to its event loop.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from wisparse.formats.errors import ResourceError, UsageError, WisparseError

from ..generation import Job, Request, Scheduler
from ..memory import memory_errors
from ..model import Model, Piece, Writer

__all__ = ["Engine", "EngineState", "QueueFullError", "Ticket"]

log = logging.getLogger(__name__)


class QueueFullError(ResourceError):
    """As many requests wait as may."""


@dataclass(eq=False)
class Ticket:
    """A request under way: what :meth:`Engine.cancel` takes.

    Attributes:
        deliver: called with every piece, the last of which has a ``finish_reason``; or once with the error that ended
            the request. Not called any more after a cancel has taken effect.
    """

    request: Request
    stops: Sequence[str]
    deliver: Callable[[Piece | WisparseError], None]
    job: Job | None = None
    writer: Writer | None = None


@dataclass(frozen=True)
class EngineState:
    """How busy an engine is: requests in the batch, and requests that wait for a place in it."""

    running: int
    waiting: int


class Engine:
    """Runs the requests for one model, which it holds until it is closed.

    Args:
        model: nobody else can use it meanwhile; calls of its own methods wait.
        max_queue: requests that may wait beside those in the batch.
    """

    def __init__(self, model: Model, max_queue: int = 64) -> None:
        self.model = model
        self._scheduler = Scheduler(model.decoder)
        self._most = model.decoder.max_batch + max_queue
        self._max_queue = max_queue
        self._wake = threading.Condition()
        self._arrived: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._asked: deque[Future[float | None]] = deque()
        self._open: set[Ticket] = set()
        self._closing = False
        self._jobs: dict[Job, Ticket] = {}  # the thread's own
        self._thread = threading.Thread(target=self._run, name="wisparse-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """From any thread."""
        with self._wake:
            running = min(len(self._open), self.model.decoder.max_batch)
            return EngineState(running, len(self._open) - running)

    def submit(
        self, request: Request, stops: Sequence[str], deliver: Callable[[Piece | WisparseError], None]
    ) -> Ticket:
        """Queue a request, from any thread; see :class:`Ticket` for ``deliver``.

        Raises:
            QueueFullError: as many wait as may.
            UsageError: the engine is being closed.
        """
        ticket = Ticket(request, stops, deliver)
        with self._wake:
            if self._closing:
                raise UsageError("the server is shutting down: ask again when it runs")
            if len(self._open) >= self._most:
                raise QueueFullError(f"{self._max_queue} requests are waiting already: ask again later")
            self._open.add(ticket)
            self._arrived.append(ticket)
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Take a request back, from any thread, wherever it is; one that has ended stays as it is."""
        with self._wake:
            if ticket in self._open:
                self._cancelled.append(ticket)
                self._wake.notify()

    def realised_sparsity(self) -> Future[float | None]:
        """Share of the projections' weights left unread so far, once the thread comes to it; from any thread."""
        answer: Future[float | None] = Future()
        with self._wake:
            if self._closing:
                answer.set_result(None)
            else:
                self._asked.append(answer)
                self._wake.notify()
        return answer

    def close(self, *, drain: bool = True) -> None:
        """End the thread and let the model go: after the answers under way, or at once without ``drain``."""
        with self._wake:
            self._closing = True
            if not drain:
                self._cancelled.extend(self._open)
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        with self.model.held():
            self.model.decoder.measure_sparsity(True)
            while self._take():
                if not self._scheduler.busy:
                    continue
                try:
                    with memory_errors(self.model.decoder.device, "for this prompt"):
                        advanced = self._scheduler.step()
                except WisparseError as error:
                    self._give_up(error)
                except Exception as error:  # the thread must outlive what one request meets
                    log.exception("the decoder failed")
                    self._give_up(WisparseError(f"the decoder failed: {error}"))
                else:
                    for job in advanced:
                        self._deliver(job)

    def _take(self) -> bool:
        """Let in who has arrived and out who was cancelled; waits while there is nothing to do. False: to end."""
        with self._wake:
            while not (self._arrived or self._cancelled or self._asked or self._scheduler.busy):
                if self._closing:
                    return False
                self._wake.wait()
            arrived, cancelled, asked = list(self._arrived), list(self._cancelled), list(self._asked)
            for queue in (self._arrived, self._cancelled, self._asked):
                queue.clear()
        for ticket in arrived:
            try:
                ticket.job = self._scheduler.submit(ticket.request)
            except WisparseError as error:
                self._end(ticket, error)
                continue
            ticket.writer = self.model.writer(ticket.job, ticket.stops)
            self._jobs[ticket.job] = ticket
        for ticket in cancelled:
            if ticket.job is not None and self._jobs.pop(ticket.job, None) is not None:
                self._scheduler.cancel(ticket.job)
            self._forget(ticket)
        for answer in asked:
            answer.set_result(self.model.decoder.realised_sparsity())
        return True

    def _deliver(self, job: Job) -> None:
        """Hand on what the job's newest token gave."""
        ticket = self._jobs[job]
        assert ticket.writer is not None  # it has a job, so it has a writer
        text = ticket.writer.take()
        reason = ticket.writer.finish_reason
        prompt_scores = job.prompt_scores if len(job.token_ids) == 1 else None
        if reason is None:
            ticket.deliver(Piece(text, job.token_ids[-1], score=ticket.writer.score, prompt_scores=prompt_scores))
            return
        self._scheduler.cancel(job)
        del self._jobs[job]
        answer = self.model.answer(ticket.writer)
        self._end(ticket, Piece(text, job.token_ids[-1], reason, answer, ticket.writer.score, prompt_scores))

    def _give_up(self, error: WisparseError) -> None:
        for job in self._scheduler.give_up():
            self._end(self._jobs.pop(job), error)

    def _end(self, ticket: Ticket, last: Piece | WisparseError) -> None:
        # Forgotten first: whoever learns that an answer has ended may count on its place.
        self._forget(ticket)
        ticket.deliver(last)

    def _forget(self, ticket: Ticket) -> None:
        with self._wake:
            self._open.discard(ticket)
