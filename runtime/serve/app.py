"""The server: endpoints of OpenAI's and Anthropic's APIs over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from wisparse.formats.errors import UsageError, WisparseError

from ..decoding.sampling import SamplingParams
from ..generation.grammar import Grammar, RefusedGrammarError
from ..generation.request import Chunk, Generation, Request
from ..model import Model
from ..protocol.formatter import ChatFormatter, CompletionFormatter, Context, Formatter, cached_tokens, to_json
from ..protocol.messages import CountTokensRequest, MessagesFormatter, MessagesRequest
from ..protocol.requests import ApiError, ChatRequest, CompletionRequest, GenerationRequest, as_api_error
from ..protocol.responses import ResponsesFormatter, ResponsesRequest
from ..protocol.tools import HERMES, ToolCallParser, call_grammar, short_ids, syntax_of
from ..thoughts import HARMONY
from .transport import WARNING, EventStream, Metrics, http_server, set_up, unless_disconnected

# Shortest time between the events of a stream, except at the end of an answer: a screen shows no more.
FLUSH_SECONDS = 1 / 60
_EVENT_SECONDS = 0.001  # lower bound of that time per open stream: an event takes the event loop 0.2 ms
_COLLECT_SECONDS = 1.0  # between two collections of the chunks of a response that is not streamed
_MAX_FILES = 1 << 16
# Python's default, 5 ms that a thread waits for the interpreter's lock, is longer than a step on a GPU.
_SWITCH_SECONDS = 0.0005
# A grammar's refusal is sent this long after it is known, or ten times the time that it took, at most five seconds: a client
# that sends such grammars one after another takes little of the others' time.
_REFUSAL_SECONDS, _REFUSAL_FACTOR, _REFUSAL_MOST = 0.4, 10, 5.0
_GRAMMAR_THREADS = 4  # grammars that are compiled concurrently
log = logging.getLogger(__name__)
_UNSUPPORTED_PATHS = ("embeddings", "images/{rest:path}", "audio/{rest:path}", "moderations", "responses/{rest:path}")


@dataclass(frozen=True)
class ServeSettings:
    name: str  # of the model, in responses and in ``/v1/models``
    max_queue: int = 64  # most waiting requests
    # that clients send as ``Authorization: Bearer KEY``; None: no key is required
    api_key: str | None = field(default=None, repr=False)
    hosts: Sequence[str] = ()  # allowed Host headers, in lower case, without port; empty: any
    cors: Sequence[str] = ()  # allowed origins, ``*`` for all


class Encoder:
    """Converts validated HTTP requests to engine requests. Thread-safe."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._context = functools.partial(Context, name, model.text)
        text = model.text
        self._template = "" if text is None else text.template_source or ""
        self._syntax = syntax_of(self._template)
        markers = () if self._syntax is None else (self._syntax.opens, self._syntax.closes)
        # Markers that are special tokens: they have to be visible in the text.
        special = {} if text is None else text.special_ids
        self._special = {marker: special[marker] for marker in markers if marker in special}
        if model.thoughts is HARMONY:  # whose calls the parser of thoughts writes so
            self._syntax, self._special = HERMES, {}

    def encode(self, body: ChatRequest | CompletionRequest) -> tuple[list[Request], Context, Grammar | None]:
        """An engine request for each answer, the formatter's context, and a grammar if ``constrain`` has to compile it."""
        requests, context = self._chat(body) if isinstance(body, ChatRequest) else self._completion(body)
        grammar = body.constraint()
        if isinstance(body, ChatRequest) and body.forced and self._syntax is not None:
            grammar = call_grammar(body.forced, self._syntax, self._special, body.several_calls)
        if grammar is not None and self._model.grammars.known(grammar) is not None:
            self.constrain(requests, grammar)
            grammar = None
        return requests, context, grammar

    def constrain(self, requests: Sequence[Request], grammar: Grammar) -> None:
        """Set the grammar of each request; may take long to compile it."""
        for request in requests:
            self._model.constrain(request, grammar)

    def count(self, body: ChatRequest) -> int:
        return self._chat(body)[1].prompt_tokens

    def _completion(self, body: CompletionRequest) -> tuple[list[Request], Context]:
        requests: list[Request] = []
        echo: list[tuple[str, int]] = []
        count, text = 0, self._model.text
        for prompt in body.prompt:
            ids = self._encode(prompt) if isinstance(prompt, str) else prompt
            requests += self._requests(body, ids, max_new_tokens=body.max_tokens or 1, score_prompt=body.echo)
            count += len(ids)
            if body.echo:
                if not isinstance(prompt, str):
                    prompt = "" if text is None else text.decode(ids, skip_special_tokens=False)
                echo += [(prompt, ids[0])] * body.n
        return requests, self._context(len(requests), count, echo)

    def _chat(self, body: ChatRequest) -> tuple[list[Request], Context]:
        messages, functions, syntax = body.conversation(), body.functions, self._syntax
        calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if self._template and "tool" not in self._template and calls:
            raise _unsupported(
                body.prompt_field, "chat template ignores tool calls and their results; write them as text"
            )
        if functions and syntax is None:
            known = "Hermes's and Qwen's <tool_call>, Llama 3's JSON, Mistral's [TOOL_CALLS] with a list"
            why = f"chat template has no tools in a syntax that this server reads ({known}); leave them out"
            raise _unsupported("tools", why)
        if syntax is not None and syntax.short_ids:
            short_ids(messages)
        if self._model.thoughts is None and body.thinking_token_budget is not None:
            raise _unsupported("thinking_token_budget", "chat template marks no thoughts; leave it out")
        variables = body.template_variables()
        rendered = self._model.tokenizer.render(messages, **variables)
        if self._model.thoughts is HARMONY and body.forced:
            raise _unsupported("tool_choice", "calls are messages on a channel, which cannot be required; set auto")
        ids = self._encode(rendered, add_special_tokens=False)
        max_new_tokens = body.max_completion_tokens or body.max_tokens
        parser, visible = None, frozenset[int]()
        if functions and syntax is not None:
            names = [function["name"] for function in functions]
            parser = functools.partial(ToolCallParser, syntax, names, one=not body.several_calls)
            visible = frozenset(self._special.values())
        thinks = functools.partial(self._model.thinks, rendered, variables, body.thinking_token_budget, visible)
        requests = self._requests(body, ids, max_new_tokens=max_new_tokens, thinks=thinks)
        return requests, self._context(body.n, len(ids), call_parser=parser)

    def _encode(self, text: str, **options: bool) -> list[int]:
        return self._model.tokenizer.encode(text, most=self._model.max_seq_len, **options)

    def _requests(
        self,
        body: ChatRequest | CompletionRequest,
        ids: list[int],
        thinks: Callable[[], dict[str, Any]] = dict,
        **fields: Any,
    ) -> list[Request]:
        """``thinks``: makes the arguments of each request for its thoughts."""
        sampling = SamplingParams(**self._model.sampling(body.sampling(), body.n))
        seeds = [None if sampling.seed is None else (sampling.seed + copy) % 2**63 for copy in range(body.n)]
        sparsity = body.sparsity
        if body.bits is not None:
            sparsity = self._model.bundle.at(body.sparsity, body.bits).sparsity
        common = {"stop": body.stop, "sparsity": sparsity, "speculative": body.speculative, **fields}
        return [self._model.request(ids, sampling=replace(sampling, seed=seed), **common, **thinks()) for seed in seeds]


@functools.lru_cache(256)
def _log_warning(warning: str) -> None:
    log.warning("a client's request: %s", warning)


def warn(http: HttpRequest, warning: str) -> None:
    """Log a warning, once, and add it to the response's header, if that was not sent."""
    if warning:
        _log_warning(warning)
        http.scope[WARNING] = "; ".join(filter(None, (http.scope.get(WARNING), warning)))


def warn_of_thoughts(http: HttpRequest, answers: Sequence[Generation]) -> None:
    if not all(answer.thought_closed for answer in answers):
        warn(http, "a thought did not end: it has no answer, and calls in it were not read")


def _unsupported(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: this model's {why}", param=field, code="unsupported_parameter")


class AnswerQueue:
    """The answers to one HTTP request: passes their chunks from the engine's thread to the event loop."""

    def __init__(self, model: Model, metrics: Metrics) -> None:
        self._engine, self._metrics = model.engine, metrics
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Chunk | WisparseError]] = deque()
        self._wakeup = asyncio.Event()
        # The loop sets it before its last check of ``_items``; the engine's thread reads it after an append. So either the
        # loop sees the item or the thread wakes the loop.
        self._waiting = False
        self._last_return = float("-inf")
        self._requests: list[Request] = []
        self._finished: dict[int, Generation] = {}

    def submit(self, requests: Sequence[Request], score_only: bool) -> None:
        """Submit a request for each answer. ``score_only``: return prompt scores and discard the one token."""
        for index, request in enumerate(requests):
            self._requests.append(self._engine.submit(request, functools.partial(self._deliver, index, score_only)))

    def _deliver(self, index: int, score_only: bool, item: Chunk | WisparseError) -> None:
        if score_only and isinstance(item, Chunk):
            assert item.generation is not None
            scores = None if item.generation.scores is None else ()
            answer = replace(item.generation, text="", token_ids=(), finish_reason="length", scores=scores)
            item = replace(item, text="", finish_reason="length", generation=answer, score=None)
        self._items.append((index, item))
        if self._waiting or isinstance(item, WisparseError) or item.finish_reason is not None:
            self._waiting = False
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wakeup.set)

    async def next(self, gather_seconds: float | None = None) -> list[tuple[int, Chunk]]:
        """All chunks since the last call, at least one; raises the error that ended an answer. Waits for further chunks
        until ``gather_seconds`` (None: FLUSH_SECONDS) after the last call's return, unless an answer ends."""
        until = self._last_return + (FLUSH_SECONDS if gather_seconds is None else gather_seconds)
        if until > self._loop.time():
            timer = self._loop.call_at(until, self._wakeup.set)  # takes a quarter of asyncio.timeout's time
            await self._wakeup.wait()
            timer.cancel()
        self._waiting = True
        while not self._items:
            self._wakeup.clear()
            if not self._items:
                await self._wakeup.wait()
        self._waiting = False
        self._wakeup.clear()
        self._last_return = self._loop.time()
        chunks = []
        for _ in range(len(self._items)):
            index, item = self._items.popleft()
            if isinstance(item, WisparseError):
                raise item
            chunks.append((index, item))
            if (answer := item.generation) is not None:
                self._finished[index] = answer
                if len(answer.token_ids) > 1:
                    self._metrics.token_time.observe(answer.generation_seconds / (len(answer.token_ids) - 1))
        self._metrics.tokens.inc(len(chunks))
        return chunks

    @property
    def done(self) -> bool:
        return len(self._finished) == len(self._requests)

    @property
    def answers(self) -> list[Generation]:
        return [self._finished[index] for index in sorted(self._finished)]

    def cancel(self) -> None:
        for request in self._requests:
            self._engine.cancel(request)


class Server:
    """The endpoints. The engine runs between the lifespan's start and end."""

    def __init__(self, model: Model, settings: ServeSettings, ready: Callable[[], None]) -> None:
        self._model, self._settings, self._ready = model, settings, ready
        self._engine = model.engine
        self._encoder = Encoder(model, settings.name)
        self._created = int(time.time())
        self._streams = 0  # open streams
        self._texts = ThreadPoolExecutor(1, "wisparse-text")
        self._grammars = ThreadPoolExecutor(_GRAMMAR_THREADS, "wisparse-grammar")
        self.metrics = Metrics(lambda: self._engine.state)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._engine.start_measuring()  # before start, which captures: counting steps have graphs of their own
        self._engine.start(self._settings.max_queue)
        self._ready()
        try:
            yield
        finally:
            self._engine.stop_measuring()
            self._engine.stop(drain=False)
            self._texts.shutdown(cancel_futures=True)
            self._grammars.shutdown(cancel_futures=True)

    async def chat(self, body: ChatRequest, http: HttpRequest) -> Response:
        return await self._answer(http, body, body, ChatFormatter)

    async def complete(self, body: CompletionRequest, http: HttpRequest) -> Response:
        return await self._answer(http, body, body, CompletionFormatter)

    async def respond(self, body: ResponsesRequest, http: HttpRequest) -> Response:
        return await self._answer(http, body, body.as_chat(), ResponsesFormatter)

    async def message(self, body: MessagesRequest, http: HttpRequest) -> Response:
        chat = body.as_chat()
        if body.thinks and self._model.thoughts is None:  # Anthropic's clients ask all models for thoughts
            warn(http, "thinking: this model marks no thoughts")
            chat.thinking_token_budget = None
        return await self._answer(http, body, chat, MessagesFormatter)

    async def count_tokens(self, body: CountTokensRequest, http: HttpRequest) -> dict[str, int]:
        self._check_name(body.model)
        chat = body.as_chat().model_copy(update={"thinking_token_budget": None})
        count = asyncio.get_running_loop().run_in_executor(self._texts, self._encoder.count, chat)
        return {"input_tokens": await unless_disconnected(http.receive, count)}

    async def _answer(
        self, http: HttpRequest, asked: GenerationRequest, body: ChatRequest | CompletionRequest, kind: type[Formatter]
    ) -> Response:
        """Submit the engine requests of a body, and stream or collect their answers. ``asked``: what the client sent."""
        began = time.perf_counter()
        warn(http, asked.warning)
        self._check_name(body.model)
        run = asyncio.get_running_loop().run_in_executor
        answers = AnswerQueue(self._model, self.metrics)
        batch, prompts = self._model.decoder.max_batch, 1 if isinstance(body, ChatRequest) else len(body.prompt)
        try:
            if body.n > batch:
                raise UsageError(f"n: expected at most {batch}, found {body.n}")
            if prompts * body.n > (limit := batch + self._settings.max_queue):
                found = f"{prompts} prompts with n = {body.n}"
                raise UsageError(f"prompt: expected at most {limit} answers in one request, found {found}")
            encoding = run(self._texts, self._encoder.encode, body)
            requests, context, grammar = await unless_disconnected(http.receive, encoding)
            if grammar is not None:
                await unless_disconnected(http.receive, run(self._grammars, self._encoder.constrain, requests, grammar))
            formatter = kind(asked, context)
            answers.submit(requests, score_only=body.max_tokens == 0)
            # Errors of a request show before its first token, so before the status is sent.
            first = await unless_disconnected(http.receive, answers.next())
        except BaseException as error:
            answers.cancel()
            if isinstance(error, RefusedGrammarError):
                taken = _REFUSAL_FACTOR * (time.perf_counter() - began)
                await asyncio.sleep(min(max(_REFUSAL_SECONDS, taken), _REFUSAL_MOST))
            if isinstance(error, WisparseError):
                raise as_api_error(error, body.prompt_field) from error
            raise
        self.metrics.first_token.observe(time.perf_counter() - began)
        self.metrics.prompt_tokens.inc(context.prompt_tokens)
        if body.stream:
            events = self._events(http, answers, first, formatter, body.n)
            return EventStream(events, answers.cancel, formatter.failure, self.metrics)

        async def collect() -> None:
            while not answers.done:
                first.extend(await answers.next(_COLLECT_SECONDS))

        try:
            await unless_disconnected(http.receive, collect())
        finally:
            answers.cancel()
        warn_of_thoughts(http, answers.answers)
        self.metrics.cached_tokens.inc(cached_tokens(answers.answers, body.n))
        # In a thread: formatting the log-probabilities of a long prompt takes 0.1 s, which would block other streams.
        complete = functools.partial(formatter.complete, first, answers.answers)
        return Response(await run(self._texts, lambda: to_json(complete())), media_type="application/json")

    def _check_name(self, found: str | None) -> None:
        name = self._settings.name
        if found not in (None, name):
            raise ApiError(404, f"model: expected {name!r}, found {found!r:.80}", param="model", code="model_not_found")

    async def _events(
        self, http: HttpRequest, answers: AnswerQueue, items: list[tuple[int, Chunk]], formatter: Formatter, copies: int
    ) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            run = asyncio.get_running_loop().run_in_executor
            yield formatter.start() + await run(self._texts, formatter.events, items)
            while not answers.done:
                gather_seconds = max(FLUSH_SECONDS, self._streams * _EVENT_SECONDS)
                yield formatter.events(await answers.next(gather_seconds))
            self.metrics.cached_tokens.inc(cached_tokens(answers.answers, copies))
            warn_of_thoughts(http, answers.answers)
            yield formatter.end(answers.answers)
        except Exception as error:  # the status has been sent
            yield formatter.failure(as_api_error(error))
        finally:
            self._streams -= 1

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def metrics_page(self) -> Response:
        realised = await asyncio.wrap_future(self._engine.ask(self._model.decoder.realised_sparsity))
        return Response(
            self.metrics.page(realised, self._engine.scheduler), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.one_model(self._settings.name)]}

    async def one_model(self, name: str) -> dict[str, Any]:
        self._check_name(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "wisparse",
            "max_model_len": self._model.max_seq_len,
            "sparsity": self._model.sparsity,
            "sparsities": sorted({0.0, *self._model.bundle.levels}),
            **({} if self._model.bits is None else {"bits": self._model.bits}),
        }

    async def unsupported(self, http: HttpRequest) -> Response:
        text = f"{http.url.path:.80}: not supported; this server has chats and completions, no embeddings, files or batches"
        raise ApiError(501, text, code="not_implemented")


def make_app(model: Model, settings: ServeSettings, ready: Callable[[], None] = lambda: None) -> FastAPI:
    """The ASGI application. The engine runs during its lifespan; ``ready`` is called after the engine's start."""
    server = Server(model, settings, ready)
    app = FastAPI(title="WiSparse", redoc_url=None, lifespan=server.lifespan)
    set_up(app, settings.api_key, settings.hosts, settings.cors, server.metrics)
    app.get("/health")(server.health)
    app.head("/health", include_in_schema=False)(server.health)
    app.get("/metrics")(server.metrics_page)
    app.get("/v1/models")(server.models)
    app.head("/v1/models", include_in_schema=False)(server.models)
    app.get("/v1/models/{name:path}")(server.one_model)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.complete)
    app.post("/v1/responses")(server.respond)
    app.post("/v1/messages")(server.message)
    app.post("/v1/messages/count_tokens")(server.count_tokens)
    for path in _UNSUPPORTED_PATHS:
        app.api_route(f"/v1/{path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)(server.unsupported)
    return app


def serve(model: Model, settings: ServeSettings, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the open requests. ``ready`` is called after the engine's start."""
    # Otherwise the event loop may hold the interpreter's lock for milliseconds while the engine's thread waits.
    sys.setswitchinterval(_SWITCH_SECONDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a connection is an open file
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MAX_FILES)), hard))
    http_server(make_app(model, settings, ready)).run(sockets=[listener])
