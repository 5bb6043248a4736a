"""Everything that is generated with a model goes through its engine: requests join the running batch at any step, and
leave it at any step.

    submit(request) -> drive(until): scheduler.step(), again and again -> deliver(piece) for every token

Tokens that follow each other within a millisecond are handed on together; whoever joins, leaves or asks meanwhile is
let in before the next one all the same.

One thread at a time runs the steps, for all: whoever waits for an answer and finds nobody at it does it, until its own
answer is there; the next one takes over. So a call that is alone runs its steps itself, without a change of threads,
and calls from several threads are decoded together. A server has a thread that always runs them (``start``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from wisparse.formats.errors import ResourceError, UsageError, WisparseError

from ..decoding.decoder import Decoder, memory_errors, peak_bytes
from ..text.text import Text
from ..text.tokenizer import Detokenizer, StopStrings
from .choosing import TokenScore
from .scheduler import Job, Request, Scheduler, SparsityLevels, Tally

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer, special tokens and the stop string left out.
        token_ids: all generated ids, those of a stop token or stop string included.
        finish_reason: ``stop`` (a stop token or string) or ``length`` (``max_new_tokens``, or the context is full).
        seed: repeats a sampled answer; None for a greedy one.
        prompt_tokens: length of the prompt.
        prompt_seconds: from the prompt's first piece to the first token, on the clock.
        generation_seconds: from the first token to the last, on the clock: in a stream what its reader did between two
            tokens counts too, unless they came together. 0 if there was only one. What a first use compiles and
            captures comes before the prompt.
        peak_memory_bytes: the most memory used so far: on a GPU the device's, else this process's.
        realised_sparsity: share of the projections' weights that were not needed at the sparse positions; None unless
            asked for. In a batch it is that of all answers together.
        scores: what the model thought of each of ``token_ids``; None unless ``logprobs`` asks for it.
        prompt_scores: of the prompt's tokens but the first; None unless a request asks for it.
        cached_tokens: of the prompt's, how many were not read, as the cache still held them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int | None
    prompt_tokens: int
    prompt_seconds: float
    generation_seconds: float
    peak_memory_bytes: int
    realised_sparsity: float | None = None
    scores: tuple[TokenScore, ...] | None = None
    prompt_scores: tuple[TokenScore, ...] | None = None
    cached_tokens: int = 0

    @property
    def prompt_tok_per_s(self) -> float:
        """Prompt tokens read per second; those that the cache held were not."""
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tok_per_s(self) -> float:
        """Tokens decoded per second, the first not counted: the prefill gave it. 0 if it is the only one."""
        return (len(self.token_ids) - 1) / self.generation_seconds if self.generation_seconds else 0.0


@dataclass(frozen=True)
class Piece:
    """What one token added to a streamed answer.

    Attributes:
        text: whole characters, maybe none: an incomplete character or the beginning of a stop string is held back.
        token_id: the token.
        finish_reason: set on the last piece, as in ``Generation``.
        generation: the whole answer, on the last piece.
        score: what the model thought of the token; None unless ``logprobs`` asks for it.
        prompt_scores: on the first piece, of the prompt's tokens but the first; None unless a request asks for it.
    """

    text: str
    token_id: int
    finish_reason: str | None = None
    generation: Generation | None = None
    score: TokenScore | None = None
    prompt_scores: Sequence[TokenScore] | None = None


class Writer:
    """Turns one job's tokens into text, and ends the job at a stop string."""

    def __init__(self, job: Job, detokenizer: Detokenizer | None, stops: Sequence[str]) -> None:
        self.job = job
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._parts: list[str] = []
        self.taken = 0
        self.finish_reason: str | None = None

    def take(self) -> str:
        """The text that the first of the job's tokens that was not taken yet completes."""
        token = self.job.token_ids[self.taken]
        self.taken += 1
        self.finish_reason = self.job.finish_reason if self.taken == len(self.job.token_ids) else None
        piece = ""
        if self._detokenizer is not None:
            if self.finish_reason != "stop":  # a stop token has no text of its own
                piece = self._stops.add(self._detokenizer.add(token))
            if self.finish_reason is not None:
                piece += self._stops.add(self._detokenizer.finish()) + self._stops.finish()
            if self._stops.found:
                self.finish_reason = "stop"
        self._parts.append(piece)
        return piece

    def piece(self, text: str, generation: Generation | None = None) -> Piece:
        """What the token taken last added, as it is handed on."""
        index = self.taken - 1
        score = self.job.scores[index] if self.job.scores else None
        of_prompt = self.job.prompt_scores if index == 0 else None
        return Piece(text, self.job.token_ids[index], self.finish_reason, generation, score, of_prompt)

    def generation(self, device: torch.device, realised_sparsity: float | None) -> Generation:
        """The whole answer, when it has ended."""
        job = self.job
        return Generation(
            text="".join(self._parts),
            token_ids=tuple(job.token_ids[: self.taken]),
            finish_reason=str(self.finish_reason),
            seed=None if job.sampling.greedy else job.sampling.seed,
            prompt_tokens=len(job.request.token_ids),
            prompt_seconds=job.prompt_seconds,
            generation_seconds=job.generation_seconds,
            peak_memory_bytes=peak_bytes(device),
            realised_sparsity=realised_sparsity,
            scores=None if job.sampling.logprobs is None else tuple(job.scores[: self.taken]),
            prompt_scores=None if job.prompt_scores is None else tuple(job.prompt_scores),
            cached_tokens=job.cached_tokens,
        )


log = logging.getLogger(__name__)

T = TypeVar("T")


class QueueFullError(ResourceError):
    """As many requests wait as may."""


@dataclass(eq=False)
class Ticket:
    """A request under way: what :meth:`Engine.cancel` takes.

    Attributes:
        stops: texts before which the answer ends.
        deliver: called with every piece, the last of which has a ``finish_reason``; or once with the error that ended
            the request. By whichever thread runs the steps, so it must return at once. Not called any more after a
            cancel has taken effect.
        pieces: False: the last piece is enough.
        measure: tell the realised sparsity with the answer.
        done: nothing more will be delivered.
        failure: what ended the request, as it was raised.
    """

    request: Request
    stops: Sequence[str]
    deliver: Callable[[Piece | WisparseError], None]
    pieces: bool = True
    measure: bool = False
    done: bool = False
    failure: Exception | None = None
    writer: Writer | None = None


@dataclass(frozen=True)
class EngineState:
    """How busy an engine is: requests in the batch, and requests that wait for a place in it. Who has a place there and
    waits until the batch's sparsity level is its own counts as running."""

    running: int
    waiting: int


@dataclass(eq=False)
class _Waiter:
    """A thread that waits while another one runs the steps."""

    until: Callable[[], object]
    woken: threading.Event


class Engine:
    """Runs the requests for one decoder, which nobody else may use meanwhile but through :meth:`call`.

    Args:
        bundle: what the decoder was made of.
    """

    def __init__(self, decoder: Decoder, text: Text | None, bundle: Bundle) -> None:
        self.decoder = decoder
        self._text = text
        self._levels = SparsityLevels(decoder, bundle)
        self._scheduler = Scheduler(decoder, self._levels)
        self._jobs: dict[Job, Ticket] = {}  # of whoever runs the steps
        # Re-entrant: a forgotten stream may be collected, and so cancelled, wherever its thread happens to be.
        self._changed = threading.Condition()
        self._seat = threading.Lock()  # held by whoever runs the steps
        self._open: set[Ticket] = set()
        self._closed = False
        self._waiters: list[_Waiter] = []
        self._arrived: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._asked: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._thread: threading.Thread | None = None
        self._max_queue: int | None = None
        self._stopping = False

    @property
    def state(self) -> EngineState:
        """From any thread."""
        with self._changed:
            running = min(len(self._open), self.decoder.max_batch)
            return EngineState(running, len(self._open) - running)

    @property
    def tally(self) -> Tally:
        """Of the steps so far, a copy."""
        return Tally(self._scheduler.tally.tokens, self._scheduler.tally.seconds)

    @property
    def closed(self) -> bool:
        """Whether the decoder has been given back."""
        return self._closed

    def check(self, request: Request) -> None:
        """Raise what :meth:`submit` would, from any thread."""
        self._check_open()
        self._scheduler.check(request)

    def submit(
        self,
        request: Request,
        stops: Sequence[str],
        deliver: Callable[[Piece | WisparseError], None],
        *,
        pieces: bool = True,
        measure: bool = False,
    ) -> Ticket:
        """Queue a request, from any thread; see :class:`Ticket`. Somebody has to :meth:`drive`.

        Raises:
            QueueFullError: as many wait as may.
            ContextLengthError: the prompt is empty or longer than the decoder's context.
            UsageError: another value out of range, or the engine was closed or is being stopped.
        """
        self.check(request)
        ticket = Ticket(request, stops, deliver, pieces, measure)
        with self._changed:
            self._check_open()
            if self._stopping:
                raise UsageError("the server is shutting down: ask again when it runs")
            if self._max_queue is not None and len(self._open) >= self.decoder.max_batch + self._max_queue:
                raise QueueFullError(f"{self._max_queue} requests are waiting already: ask again later")
            self._open.add(ticket)
            self._arrived.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Take a request back, from any thread, wherever it is; one that has ended stays as it is. Waits for nobody:
        it takes effect before the next step."""
        with self._changed:
            if ticket in self._open:
                self._cancelled.append(ticket)
                self._changed.notify()

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """Have something done between two steps, by whoever runs them; from any thread, waits for nobody.

        Raises:
            UsageError: the engine was closed.
        """
        future: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._asked.append((function, future))  # type: ignore[arg-type]
            self._changed.notify()
        return future

    def call(self, function: Callable[[], T]) -> T:
        """:meth:`ask`, and wait for it."""
        future = self.ask(function)
        self.drive(future.done)
        return future.result()

    def realised_sparsity(self) -> Future[float | None]:
        """Share of the projections' weights left unread since somebody began to measure it, or since another sparsity level came
        in force."""
        return self.ask(self.decoder.realised_sparsity)

    def start_measuring(self, every: int = 1) -> Future[None]:
        """Count dropped channels, in one decode step of so many, until :meth:`stop_measuring`; from zero unless they
        are counted as often already."""
        return self.ask(lambda: self._levels.measure(every))

    def stop_measuring(self, every: int = 1) -> None:
        """As often as it was started."""
        if not self._closed:
            self.ask(lambda: self._levels.stop_measuring(every))

    def forget_prefixes(self) -> None:
        """What the cache holds of earlier prompts is not used again; within :meth:`call`."""
        self._scheduler.forget_prefixes()

    def set_sparsity(self, sparsity: float) -> None:
        """Choose the sparsity level of requests that name none, while nothing is under way; within :meth:`call`."""
        self._levels.own = self._levels.named(sparsity)
        self._put_back()

    def _put_back(self) -> None:
        if not self._scheduler.busy and self._levels.in_force != self._levels.own:
            self._scheduler.switch(self._levels.own)

    def start(self, max_queue: int) -> None:
        """Have a thread of the engine's own run the steps, and refuse what more than ``max_queue`` would wait for. What
        later requests take is prepared before, so that no running answer waits for it."""
        self.call(self.decoder.prepare_prompts)
        self.call(self.decoder.prepare_batches)
        with self._changed:
            if self._thread is not None:
                raise UsageError("a server runs on this model already: end it first")
            self._max_queue, self._stopping = max_queue, False
            self._thread = threading.Thread(target=self._serve, name="wisparse-engine", daemon=True)
        self._thread.start()

    def stop(self, *, drain: bool = True) -> None:
        """End that thread: after the answers under way, or at once without ``drain``. The sparsity level of requests that name
        none is in force then."""
        with self._changed:
            thread, self._stopping = self._thread, True
            if not drain:
                self._cancelled.extend(self._open)
            self._changed.notify()
        if thread is not None:
            thread.join()
        with self._changed:
            self._thread, self._max_queue, self._stopping = None, None, False
        if thread is not None and not self._closed:
            self.call(self._put_back)

    def close(self) -> None:
        """Give the decoder's memory back. What is under way ends with an error; closing twice is fine."""
        if not self._closed:
            self.call(self._close)

    def drive(self, until: Callable[[], object]) -> None:
        """Wait until something holds, and run the steps meanwhile unless another thread does.

        Args:
            until: asked after every step, by any thread.
        """
        while not until():
            if self._seat.acquire(blocking=False):
                try:
                    self._run(until)
                finally:
                    self._seat.release()
                    if self._waiters:  # one of them takes over
                        self._wake(lambda waiter: True)
                continue
            waiter = _Waiter(until, threading.Event())
            with self._changed:
                self._waiters.append(waiter)
            try:
                # What came to hold, or whoever left, before it could be seen that somebody waits, wakes nobody.
                if self._seat.locked() and not until():
                    waiter.woken.wait()
            finally:
                with self._changed:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

    def _serve(self) -> None:
        self.drive(lambda: self._stopping and not self._open)

    def _run(self, until: Callable[[], object]) -> None:
        """Do steps until ``until`` holds; this thread alone."""
        scheduler = self._scheduler
        while not until():
            try:
                if self._called():
                    self._take()
                elif not scheduler.busy:
                    self._wait(until)
                    continue
                if scheduler.busy:
                    # An answer that its text may end is looked at after every token.
                    watched = any(ticket.stops for ticket in self._jobs.values())
                    for job in scheduler.step(None if watched else self._called):
                        self._deliver(job)
                if self._waiters:
                    self._wake(lambda waiter: bool(waiter.until()))
            except Exception as error:  # the others must outlive what one request meets
                self._give_up(error)
            except BaseException:  # an interrupt, anywhere: the slots are undefined, and a token may be on its way
                scheduler.start_over()
                self._deliver_all()
                raise

    def _called(self) -> object:
        """Whether there is something to do before the next token."""
        return self._arrived or self._cancelled or self._asked

    def _wait(self, until: Callable[[], object]) -> None:
        """While there is nothing to do."""
        with self._changed:
            while not (self._called() or until()):
                self._changed.wait()

    def _wake(self, whom: Callable[[_Waiter], bool]) -> None:
        with self._changed:
            for waiter in [waiter for waiter in self._waiters if whom(waiter)]:
                self._waiters.remove(waiter)
                waiter.woken.set()

    def _take(self) -> None:
        """Let in who has arrived and out who was cancelled, and do what was asked for."""
        while self._arrived:
            ticket = self._arrived.popleft()
            detokenizer = None if self._text is None else self._text.detokenizer(ticket.request.spoken)
            job = self._scheduler.submit(ticket.request)
            ticket.writer = Writer(job, detokenizer, ticket.stops)
            self._jobs[job] = ticket
        while self._cancelled:
            ticket = self._cancelled.popleft()
            if ticket.writer is not None and self._jobs.pop(ticket.writer.job, None) is not None:
                self._scheduler.cancel(ticket.writer.job)
            self._forget(ticket)
        while self._asked:
            function, future = self._asked.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _deliver(self, job: Job) -> None:
        """Hand on what the job's newest tokens gave."""
        ticket = self._jobs.get(job)
        if ticket is None or ticket.writer is None:
            return
        writer = ticket.writer
        while not ticket.done and writer.taken < len(job.token_ids):
            try:
                text = writer.take()
            except WisparseError as error:  # a stranger's tokenizer
                self._scheduler.cancel(job)
                self._fail(job, error, error)
                return
            if writer.finish_reason is not None:
                self._scheduler.cancel(job)
                del self._jobs[job]
                realised = self.decoder.realised_sparsity() if ticket.measure else None
                self._end(ticket, writer.piece(text, writer.generation(self.decoder.device, realised)))
            elif ticket.pieces:
                ticket.deliver(writer.piece(text))

    def _deliver_all(self) -> None:
        """Hand on the tokens that came before a step that went wrong, the last ones of some answers among them."""
        for job in list(self._jobs):
            self._deliver(job)

    def _give_up(self, raised: Exception) -> None:
        """End those whom a failure concerns; they are told of it in a sentence."""
        self._deliver_all()
        try:
            with memory_errors(self.decoder.device, "for this prompt"):
                raise raised
        except WisparseError as error:
            told = raised = error
        except Exception as error:
            log.debug("the decoder failed", exc_info=True)
            told = WisparseError(f"the decoder failed: {error}")
        for job in self._scheduler.give_up():
            self._fail(job, told, raised)
        if self._waiters:
            self._wake(lambda waiter: bool(waiter.until()))

    def _fail(self, job: Job, told: WisparseError, raised: Exception) -> None:
        self._refuse(self._jobs.pop(job), told, raised)

    def _refuse(self, ticket: Ticket, told: WisparseError, raised: Exception) -> None:
        ticket.failure = raised
        self._end(ticket, told)

    def _end(self, ticket: Ticket, last: Piece | WisparseError) -> None:
        # Forgotten first: whoever learns that an answer has ended may count on its place.
        self._forget(ticket)
        ticket.deliver(last)

    def _forget(self, ticket: Ticket) -> None:
        with self._changed:
            self._open.discard(ticket)
        ticket.done = True

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the model was closed: load it again")

    def _close(self) -> None:
        error = UsageError("the model was closed before the answer was there")
        with self._changed:
            self._closed = True
            tickets = list(self._open)
        self._jobs.clear()
        self._arrived.clear()
        for ticket in tickets:
            self._refuse(ticket, error, error)
        self._scheduler = Scheduler(self.decoder, self._levels)  # whose jobs are gone
        self.decoder.close()
