"""The engine: runs the scheduler's steps and delivers the tokens of each request."""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ResourceError, UnavailableError, UsageError, WisparseError

from ..decoding.decoder import Decoder
from ..detokenizer import Detokenizer
from ..memory import memory_errors, peak_bytes
from ..tokenizer import StopStrings, Tokenizer
from .generate import generate_step
from .request import Chunk, Generation, Request
from .scheduler import Scheduler
from .speculation import SpeculativeConfig


class Delivery:
    """``receive`` gets the chunks, of ``final_only`` just the last one, or the error."""

    def __init__(
        self, request: Request, receive: Callable[[Chunk | WisparseError], None], *, final_only: bool = False
    ) -> None:
        self.receive, self.final_only = receive, final_only
        self._request = request
        self._stop_strings: StopStrings  # by ``begin``
        self._detokenizer: Detokenizer | None = None
        self._texts: list[str] = []  # by delivered token
        self._thoughts: list[str] = []

    def begin(self, tokenizer: Tokenizer | None) -> None:
        self._stop_strings = StopStrings(self._request.stop)
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(self._request.visible_special_tokens)

    @property
    def pending(self) -> int:
        """Tokens without a chunk."""
        return len(self._request.output_token_ids) - len(self._texts)

    def next_chunk(self) -> Chunk:
        """The first pending token as a chunk; its ``finish_reason`` is ``stop`` if it completes a stop string."""
        request, index = self._request, len(self._texts)
        token = request.output_token_ids[index]
        last = self.pending == 1 and request.error is None
        finish_reason = request.finish_reason if last else None
        text = ""
        if self._detokenizer is not None:
            if finish_reason != "stop":  # a stop token has no text of its own
                text = self._stop_strings.add(self._detokenizer.add(token))
            if finish_reason is not None:
                text += self._stop_strings.add(self._detokenizer.finish()) + self._stop_strings.finish()
            if self._stop_strings.found is not None:
                finish_reason = "stop"
        thought = ""
        if request.thoughts is not None:
            thought, text = request.thoughts.add(text, finish_reason is not None)
            self._thoughts.append(thought)
        self._texts.append(text)
        score = request.scores[index] if request.scores else None
        return Chunk(text, token, finish_reason, None, score, request.prompt_scores if index == 0 else None, thought)

    def generation(self, finish_reason: str, device: torch.device, realised_sparsity: float | None) -> Generation:
        """The result of the chunks so far."""
        request, count = self._request, len(self._texts)
        return Generation(
            text="".join(self._texts),
            token_ids=tuple(request.output_token_ids[:count]),
            finish_reason=finish_reason,
            seed=None if request.sampling.greedy else request.sampling.seed,
            prompt_tokens=len(request.prompt_token_ids),
            prompt_seconds=request.first_token_time - request.prefill_started,
            generation_seconds=request.last_token_time - request.first_token_time,
            peak_memory_bytes=peak_bytes(device),
            realised_sparsity=realised_sparsity,
            scores=None if request.sampling.logprobs is None else tuple(request.scores[:count]),
            prompt_scores=None if request.prompt_scores is None else tuple(request.prompt_scores),
            cached_tokens=request.cached_tokens,
            stop_string=self._stop_strings.found,
            drafts=request.drafts,
            thought="".join(self._thoughts),
            thought_tokens=0 if request.thoughts is None else request.thoughts.tokens,
            thought_closed=request.thoughts is None or request.thoughts.closed,
        )


log = logging.getLogger(__name__)

# A decoder on a GPU counts dropped channels in one of so many steps: its counting launches lengthen a step.
_COUNTED_STEPS = 16
SHUTTING_DOWN = "the server is shutting down: ask again when it runs"

T = TypeVar("T")


class QueueFullError(ResourceError):
    """The waiting queue is full."""


class EngineState(NamedTuple):
    """Number of requests that have a slot of the decoder, and of requests that wait for one."""

    running: int
    waiting: int


class Engine:
    """Runs requests on one decoder. Other code may use the decoder only within :meth:`call`."""

    def __init__(
        self, decoder: Decoder, text: Tokenizer | None, bundle: Bundle, speculative: SpeculativeConfig | None = None
    ) -> None:
        self.decoder = decoder
        self.scheduler = Scheduler(decoder, bundle, speculative)
        self.closed = False
        self._text, self._bundle = text, bundle
        # Re-entrant: garbage collection may cancel a stream at any point of any thread.
        self._changed = threading.Condition()
        self._run_lock = threading.Lock()  # held by the thread that runs the steps
        self._tasks: deque[Callable[[], None]] = deque()  # tasks for the next step, in order
        self._open: dict[Request, Delivery] = {}  # submitted, not done
        self._waiting: list[Callable[[], object]] = []  # conditions of threads that wait for the running one
        self._thread: threading.Thread | None = None
        self._max_queue: int | None = None
        self._stopping = False
        self._measuring = 0  # users of ``start_measuring``

    @property
    def state(self) -> EngineState:
        """Thread-safe."""
        with self._changed:
            running = sum(request.running for request in self._open)
            return EngineState(running, len(self._open) - running)

    def validate(self, request: Request) -> None:
        """Raise ContextLengthError or UsageError unless the request can be submitted. Thread-safe."""
        self._check_open()
        self.scheduler.validate(request)

    def submit(
        self, request: Request, deliver: Callable[[Chunk | WisparseError], None], *, final_only: bool = False
    ) -> Request:
        """Queue a validated request. It runs while a thread is in :meth:`drive`. Thread-safe."""
        with self._changed:
            self._check_open()
            if self._stopping:
                raise UnavailableError(SHUTTING_DOWN)
            if self._max_queue is not None and len(self._open) >= self.decoder.max_batch + self._max_queue:
                raise QueueFullError(f"{self._max_queue} requests are waiting already: ask again later")
            self._open[request] = Delivery(request, deliver, final_only=final_only)
            self._add_task(partial(self._add, request))
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request before the next step; no effect on one that is done. Thread-safe."""
        with self._changed:
            if request in self._open:
                self._add_task(partial(self._cancel, request))

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """Schedule a function between two steps, on the thread that runs them. Thread-safe; does not wait."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        with self._changed:
            self._check_open()
            self._add_task(run)
        return future

    def call(self, function: Callable[[], T]) -> T:
        future = self.ask(function)
        self.drive(future.done)
        return future.result()

    def start_measuring(self) -> Future[None]:
        """Count dropped channels until :meth:`stop_measuring`; from zero, unless another user does so already."""
        return self.ask(partial(self._measure, 1))

    def stop_measuring(self) -> None:
        with self._changed:
            if not self.closed:
                self.ask(partial(self._measure, -1))

    def _measure(self, users: int) -> None:
        before, self._measuring = self._measuring, self._measuring + users
        if not before or not self._measuring:
            self.decoder.measure_sparsity(not before, _COUNTED_STEPS)

    def start(self, max_queue: int) -> None:
        """Compile and capture, then run the steps in a thread, with at most ``max_queue`` waiting requests."""
        self.call(self.decoder.prepare_prompts)
        self.call(self._prepare_levels)
        # Exclude permanent objects from later collections: one collection took 0.2 s between two decode steps.
        gc.collect()
        gc.freeze()
        with self._changed:
            if self._thread is not None:
                raise UsageError("a server runs on this model already: stop it first")
            self._max_queue, self._stopping = max_queue, False

            def stopped() -> bool:
                return self.closed or (self._stopping and not self._open)

            self._thread = threading.Thread(target=self.drive, args=(stopped,), name="wisparse-engine", daemon=True)
        self._thread.start()
        self.call(self.decoder.prepare_thread)

    def _prepare_levels(self) -> None:
        """Compile and capture the steps of every sparsity level that a request may name."""
        for level in {*self._bundle.levels, 0.0}:
            self.scheduler.levels.use(level)
            self.decoder.prepare_batches()
        self.scheduler.levels.use(self.scheduler.levels.default)

    def stop(self, *, drain: bool = True) -> None:
        """Stop the thread of :meth:`start`. ``drain``: finish the open requests first; else cancel them."""
        with self._changed:
            thread, self._stopping = self._thread, True
            for request in () if drain else self._open:
                self._add_task(partial(self._cancel, request))
            self._changed.notify_all()
        if thread is not None:
            thread.join()
            gc.unfreeze()
        with self._changed:
            self._thread, self._max_queue, self._stopping = None, None, False
        if thread is not None and not self.closed:
            self.call(self.restore_sparsity)

    def restore_sparsity(self) -> None:
        """Set the default sparsity level if the scheduler is idle; within :meth:`call`."""
        if not self.scheduler.busy:
            self.scheduler.levels.use(self.scheduler.levels.default)

    def close(self) -> None:
        """Free the decoder's memory. Open requests end with an error. Idempotent, also from several threads."""

        def close() -> None:
            with self._changed:
                self.closed = True
                requests = list(self._open)
            for request in requests:
                self._fail(request, UsageError("the model was closed before the request finished"))
            self.decoder.close()

        with self._changed:
            closing = None if self.closed else self.ask(close)
        if closing is not None:
            self.drive(closing.done)
            closing.result()

    def drive(self, until: Callable[[], object]) -> None:
        """Run steps until ``until()``, which is checked after every step; wait while another thread runs them."""
        while not until():
            if self._run_lock.acquire(blocking=False):
                try:
                    while not until():
                        self._step(until)
                finally:
                    self._run_lock.release()
                    self._wake(take_over=True)
                continue
            with self._changed:
                self._waiting.append(until)
                try:
                    self._changed.wait_for(lambda: until() or not self._run_lock.locked())
                finally:
                    self._waiting.remove(until)

    def _step(self, until: Callable[[], object]) -> None:
        """Wait for work, run the queued tasks, prefill a chunk or decode, and deliver the tokens."""
        try:
            if not (self._tasks or self.scheduler.busy):
                with self._changed:
                    while not (self._tasks or until()):
                        self._changed.wait()
            while self._tasks:
                self._tasks.popleft()()
            if self.scheduler.busy:
                # A stop string may end the request after any token.
                one_token = any(request.stop for request in self.scheduler.running)
                with memory_errors(self.decoder.device, "for this prompt"):
                    advanced = generate_step(self.scheduler, None if one_token else self._tasks.__len__)
                for request in advanced:
                    self._deliver(request)
        except Exception as error:
            self._deliver_all()  # tokens of earlier steps
            for request in self.scheduler.fail():
                self._fail(request, error)
        except BaseException:  # KeyboardInterrupt: the slots are undefined, and tokens may be undelivered
            self.scheduler.start_over()
            self._deliver_all()
            raise
        self._wake()

    def _add_task(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._changed.notify_all()

    def _wake(self, take_over: bool = False) -> None:
        """Wake the waiting threads if the condition of one holds, or if one has to run the steps."""
        if self._waiting:
            with self._changed:
                if take_over or any(until() for until in self._waiting):
                    self._changed.notify_all()

    def _add(self, request: Request) -> None:
        if (delivery := self._open.get(request)) is None:
            return
        try:
            delivery.begin(self._text)
            self.scheduler.add(request)
        except Exception as error:
            self._fail(request, error)

    def _cancel(self, request: Request) -> None:
        self.scheduler.finish(request, "cancelled")
        self._close_request(request)

    def _deliver(self, request: Request) -> None:
        """Deliver the request's new tokens. An error ends this request only."""
        delivery = self._open.get(request)
        try:
            while delivery is not None and not request.done and delivery.pending:
                chunk = delivery.next_chunk()
                if chunk.finish_reason is not None:
                    self.scheduler.finish(request, "stop")  # no effect if a token finished it
                    realised = self.decoder.realised_sparsity() if request.measure_sparsity else None
                    generation = delivery.generation(chunk.finish_reason, self.decoder.device, realised)
                    # Before delivery: a receiver of the last chunk may rely on the free slot.
                    self._close_request(request)
                    delivery.receive(replace(chunk, generation=generation))
                elif not delivery.final_only:
                    delivery.receive(chunk)
            if request.error is not None:
                self._fail(request, request.error)
        except Exception as error:
            self._fail(request, error)

    def _deliver_all(self) -> None:
        with self._changed:
            requests = list(self._open)
        for request in requests:
            self._deliver(request)

    def _fail(self, request: Request, error: Exception) -> None:
        """Finish a request with an error, unless it is done."""
        if (delivery := self._open.get(request)) is None:
            return
        self.scheduler.finish(request, "error")
        request.error = error
        self._close_request(request)
        if not isinstance(error, WisparseError):
            cause, error = error, WisparseError(f"generation failed: {error}")
            error.__cause__ = cause
        try:
            delivery.receive(error)
        except Exception:
            log.debug("a request's receiver failed", exc_info=True)

    def _close_request(self, request: Request) -> None:
        with self._changed:
            self._open.pop(request, None)
        request.done = True

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("the model was closed: load it again")
