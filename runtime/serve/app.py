"""The server: OpenAI's routes over one engine.

    body -> read_chat, read_completion -> token ids -> engine.submit ... pieces -> answers.Shape -> wire

Text becomes token ids in a thread apart (a chat template is a stranger's program, and may take its time); pieces come
from the engine's thread (``answering``). A client that goes away, or does not read for half a minute, takes its request
with it (``wire``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from wisparse.formats.errors import ContextLengthError, UsageError, WisparseError
from wisparse.formats.guard import parse_json

from ..generation.engine import Engine, EngineState
from ..generation.logits import Constraint
from ..generation.request import Chunk, Generation
from ..generation.request import Request as GenerationRequest
from ..model import Model
from ..protocol.answers import OPEN, Shape, ThoughtCount, cached_tokens, to_json, unsaid
from ..protocol.errors import ApiError, as_api_error
from ..protocol.requests import ApiCall, Defaults, read_chat, read_completion, short_ids
from ..protocol.responses import ResponseShape, as_chat_body, as_response_error
from ..protocol.tools import CallParser, syntax_of


@dataclass(frozen=True)
class ServeSettings:
    """How a server listens.

    Attributes:
        host, port: where; port 0 takes a free one.
        name: what the model is called in answers and in ``/v1/models``.
        max_queue: requests that may wait beside those in the batch.
        api_key: what clients have to show, as ``Authorization: Bearer KEY``; None lets everybody in. Never logged.
        cors: origins whose pages may ask, ``*`` for all.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_queue: int = 64
    api_key: str | None = field(default=None, repr=False)
    cors: Sequence[str] = ()


def refusal(error: ApiError) -> Response:
    """What an error answers."""
    headers = {"retry-after": "1"} if error.status == 429 else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(to_json(error.body), error.status, headers, "application/json")


async def not_found(request: Request, error: Exception) -> Response:
    return refusal(ApiError(404, f"{request.url.path:.80}: no such address here", code="not_found"))


async def wrong_method(request: Request, error: Exception) -> Response:
    text = f"{request.url.path:.80}: {request.method:.20} is not for it"
    return refusal(ApiError(405, text, code="method_not_allowed"))


def sampling_defaults(model: Model) -> Defaults:
    """The model's own sampling settings, where its generation config has them."""
    data = model.bundle.read_bytes("generation_config.json")
    config = {} if data is None else parse_json(data, "generation_config.json", UsageError)

    def number(key: str, fallback: float, least: float, most: float) -> float:
        value = config.get(key)
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        return float(value) if known else fallback  # type: ignore[arg-type]

    plain = Defaults()
    return Defaults(
        temperature=number("temperature", plain.temperature, 0.0, 100.0),
        top_k=int(number("top_k", plain.top_k, 0, 2**31)),
        top_p=number("top_p", plain.top_p, 1e-9, 1.0),
        repetition_penalty=number("repetition_penalty", plain.repetition_penalty, 0.01, 100.0),
    )


class Encoder:
    """Encodes requests to one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        # A special token would be no part of an answer's text.
        self._thinks = (
            model.text is not None and model.text.token_id(OPEN) is not None and not model.text.is_special(OPEN)
        )
        source = None if model.text is None else model.text.template_source
        self._syntax = None if source is None else syntax_of(source)
        self._markers = {} if self._syntax is None else _special(model, (self._syntax.opens, self._syntax.closes))

    def call_parser(self, call: ApiCall) -> Callable[[bool], CallParser] | None:
        """What splits calls from an answer's text, if it may have some."""
        offer, syntax = call.offer, self._syntax
        if offer is None or syntax is None:
            return None
        return lambda held: CallParser(syntax, offer.names, one=not offer.several, held=held)

    def with_calls(self, call: ApiCall) -> ApiCall:
        """The call with what the model's syntax needs, if functions are offered."""
        text = self._model.text
        source = (text and text.template_source) or "tool"  # without a template it is refused all the same
        if "tool" not in source and any("tool_calls" in one or one["role"] == "tool" for one in call.prompts[0]):
            raise ApiError(
                400, "messages: this model's chat template leaves calls and their results out; tell them as text",
                param="messages", code="unsupported_parameter",
            )  # fmt: skip
        if self._syntax is not None and self._syntax.short:
            call = replace(call, prompts=tuple(map(short_ids, call.prompts)))
        if call.offer is None:
            return call
        if self._syntax is None:
            raise ApiError(
                400, "tools: this model's chat template has no tools in a syntax that this server reads (Hermes's and "
                "Qwen's <tool_call>, Llama 3's JSON, Mistral's [TOOL_CALLS] with a list); leave them out",
                param="tools", code="unsupported_parameter",
            )  # fmt: skip
        grammar = call.offer.grammar(self._syntax, self._markers) if call.offer.forced else call.grammar
        return replace(call, grammar=grammar, visible_special_tokens=frozenset(self._markers.values()))

    def echo(self, call: ApiCall, prompts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """Of each answer to come its prompt's text and first token, where they are told."""
        if not call.echo:
            return []
        decode = self._model.tokenizer.decode
        texts = [
            prompt if isinstance(prompt, str) else decode(ids, skip_special_tokens=False)
            for prompt, ids in zip(call.prompts, prompts, strict=True)
        ]
        return [(text, ids[0]) for text, ids in zip(texts, prompts, strict=True) for _ in range(call.n)]

    def encode(self, call: ApiCall) -> tuple[list[list[int]], list[Constraint | None], bool | None]:
        """Token ids of a call's prompts, what each of its answers has to be, and whether it begins with a thought."""
        thinks: bool | None = None
        text, most = self._model.tokenizer, self._model.max_seq_len
        encoded = []
        for prompt in call.prompts:
            if isinstance(prompt, str):
                encoded.append(text.encode(prompt, most=most))
            elif isinstance(prompt[0], int):
                encoded.append(prompt)
            else:
                rendered = text.render(prompt, **call.template)
                thinks = True if rendered.rstrip().endswith(OPEN) else False if self._thinks else None
                encoded.append(text.encode(rendered, add_special_tokens=False, most=most))
        for ids in encoded:
            if len(ids) > most:
                raise ContextLengthError(f"the prompt has {len(ids)} tokens and the context holds {most}: shorten it")
        if thinks and call.offer is not None and call.offer.forced:
            raise ApiError(
                400, "tool_choice: this model's template begins with a thought, for which a call that has to be leaves "
                "no room; ask with auto, or switch thoughts off by chat_template_kwargs", param="tool_choice",
                code="invalid_value",
            )  # fmt: skip
        count, grammar = len(encoded) * call.n, call.grammar
        constraints: list[Constraint | None] = [
            None if grammar is None else self._model.grammars.begin(grammar) for _ in range(count)
        ]
        return encoded, constraints, thinks


def _special(model: Model, markers: Sequence[str]) -> dict[str, int]:
    """Ids of those that are special tokens."""
    text = model.tokenizer
    found = {marker: text.token_id(marker) for marker in markers if text.is_special(marker)}
    return {marker: token for marker, token in found.items() if token is not None}


# A picture of a screen that shows sixty a second.
_GATHER_SECONDS = 1 / 60


class Answering:
    """The pieces of one request's answers, as they come from the engine's thread; ``thinks`` as for a ``Shape``."""

    def __init__(self, engine: Engine, thinks: bool | None = None) -> None:
        self._thinks = thinks
        self._thoughts: list[ThoughtCount] = []
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, Chunk | WisparseError]] = deque()
        self._woken = asyncio.Event()
        # Set by the loop before it looks a last time, read by the engine's thread after it has added: one of them sees
        # the other.
        self._waiting = False
        self._taken = float("-inf")
        self._requests: list[GenerationRequest] = []

    def submit(
        self, model: Model, call: ApiCall, prompts: Sequence[Sequence[int]], constraints: Sequence[Constraint | None]
    ) -> None:
        """Queue every answer of a call; ``constraints``: one for each of them."""
        for token_ids in prompts:
            for copy in range(call.n):
                seed = call.sampling.seed
                sampling = call.sampling if seed is None else replace(call.sampling, seed=(seed + copy) % 2**63)
                most = 1 if call.silent else call.max_tokens  # a prompt gives a token, wanted or not
                index = len(self._requests)
                self._thoughts.append(ThoughtCount(begun=bool(self._thinks)))
                request = model.request(
                    token_ids,
                    max_new_tokens=most,
                    sampling=sampling,
                    stop=call.stop,
                    sparsity=call.sparsity,
                    constraint=constraints[index],
                    score_prompt=call.echo,
                    visible_special_tokens=call.visible_special_tokens,
                )
                self._requests.append(self._engine.submit(request, self._receiver(index, call.silent)))

    def _receiver(self, index: int, silent: bool) -> Callable[[Chunk | WisparseError], None]:
        def deliver(item: Chunk | WisparseError) -> None:
            if silent and isinstance(item, Chunk):
                item = unsaid(item)
            self._items.append((index, item))
            if self._waiting or isinstance(item, WisparseError) or item.finish_reason is not None:
                self._waiting = False
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to read it
                    self._loop.call_soon_threadsafe(self._woken.set)

        return deliver

    async def next(self, gather_seconds: float | None = None) -> list[tuple[int, Chunk]]:
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
        for request in self._requests:
            self._engine.cancel(request)

    def __len__(self) -> int:
        return len(self._requests)


_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, in nobody's frame: a model's words could do nothing even as HTML.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """Where the page's files are found; they hold no secret, so no key is asked for them."""
    return [Route(path, _sender(name, kind), methods=["GET"]) for path, (name, kind) in _FILES.items()]


def _sender(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__package__).joinpath("web", name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return send


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The counters of one server; a registry of its own, so that several servers may live in one process."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter("wisparse_requests", "Requests answered, by HTTP status", ["status"], registry=registry)
        self.prompt_tokens = Counter("wisparse_prompt_tokens", "Prompt tokens read", registry=registry)
        self.cached_tokens = Counter(
            "wisparse_cached_prompt_tokens", "Prompt tokens that the cache still held", registry=registry
        )
        self.tokens = Counter("wisparse_generated_tokens", "Tokens generated", registry=registry)
        self.cancelled = Counter("wisparse_cancelled", "Requests whose client went away", registry=registry)
        self.first_token = Histogram(
            "wisparse_time_to_first_token_seconds", "From the request to its first token", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.token_time = Histogram(
            "wisparse_time_per_token_seconds", "Mean time of an answer's tokens after its first",
            buckets=_TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        running = Gauge("wisparse_running", "Requests in the batch", registry=registry)
        running.set_function(lambda: state().running)
        waiting = Gauge("wisparse_waiting", "Requests that wait for a place in the batch", registry=registry)
        waiting.set_function(lambda: state().waiting)
        self._unread = Gauge(
            "wisparse_weights_unread_ratio", "Share of the projections' weights left unread at sparse positions",
            registry=registry,
        )  # fmt: skip

    def text(self, unread: float | None) -> bytes:
        """The page; ``unread`` is the share of weights left unread so far, None if nothing was decoded."""
        self._unread.set(float("nan") if unread is None else unread)
        return generate_latest(self._registry)


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


_MOST_BYTES = 8 * 2**20


def check_key(request: Request, key: str | None) -> None:
    """Let in who shows the key; None lets everybody in.

    Raises:
        ApiError: 401.
    """
    if key is None:
        return
    kind, _, shown = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), key.encode()):
        raise ApiError(
            401, "expected the server's key as Authorization: Bearer KEY", kind="authentication_error",
            code="invalid_api_key",
        )  # fmt: skip


async def read_body(request: Request, name: str) -> dict[str, Any]:
    """The request's JSON object, for the model of this name.

    Raises:
        ApiError: 404, 408, 413 or 415.
        UsageError: no JSON.
    """
    # A page of another origin can send a form's types unasked; JSON it has to ask for (CORS).
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected a body of type application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "expected a body that is not compressed", code="unsupported_media_type")
    too_large = ApiError(413, f"the body is larger than {_MOST_BYTES:,} bytes: shorten it", code="request_too_large")
    if int(request.headers.get("content-length", 0)) > _MOST_BYTES:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > _MOST_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(
            408, f"the body did not come within {PATIENCE_SECONDS:g} seconds", code="request_timeout"
        ) from error
    body = parse_json(bytes(data), "body", UsageError)
    if body.get("model") is not None:
        check_name(body["model"], name)
    return body


def check_name(found: Any, name: str) -> None:
    """Whether a request means the model of this name.

    Raises:
        ApiError: 404.
    """
    if found != name:
        raise ApiError(404, f"model: expected {name!r}, found {found!r:.80}", param="model", code="model_not_found")


# How often the tokens of an answer that is not streamed are looked at.
_COLLECT_SECONDS = 1.0
# One step of so many has its dropped channels counted, for /metrics: a batch's count is not quite free.
_COUNTED = 16
# Tokens whose text is kept for the next who asks for log-probabilities.
_SPELLED = 1 << 16


class Endpoints:
    """What each address answers; the engine runs between the lifespan's start and end."""

    def __init__(self, model: Model, settings: ServeSettings, ready: Callable[[], None]) -> None:
        self._model = model
        self._settings = settings
        self._ready = ready
        self._defaults = sampling_defaults(model)
        self._created = int(time.time())
        self._texts = ThreadPoolExecutor(1, "wisparse-text")
        self._encoder = Encoder(model)
        self._spell = functools.lru_cache(_SPELLED)(model.spell)
        self._engine: Engine | None = None
        self.metrics = Metrics(lambda: self._running.state)

    @property
    def _running(self) -> Engine:
        assert self._engine is not None, "requests come between the lifespan's start and end"
        return self._engine

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine = self._model.engine
        self._engine.start_measuring(_COUNTED)  # first, as steps that count are kernels of their own
        self._engine.start(self._settings.max_queue)
        self._ready()
        try:
            yield
        finally:
            self._engine.stop_measuring(_COUNTED)
            self._engine.stop(drain=False)
            self._texts.shutdown()

    def guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint behind the key, with every expected failure as OpenAI words it."""

        async def answer(request: Request) -> Response:
            try:
                check_key(request, self._settings.api_key)
                response = await endpoint(request)
            except ApiError as error:
                response = refusal(error)
            except ClientDisconnect:
                self.metrics.cancelled.inc()
                response = Response(status_code=499)
            except WisparseError as error:
                response = refusal(as_api_error(error))
            self.metrics.requests.labels(str(response.status_code)).inc()
            return response

        return answer

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics_page(self, request: Request) -> Response:
        unread = await asyncio.wrap_future(self._running.ask(self._model.decoder.realised_sparsity))
        return Response(self.metrics.text(unread), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._about()]})

    async def one_model(self, request: Request) -> Response:
        check_name(request.path_params["name"], self._settings.name)
        return _json(self._about())

    async def not_here(self, request: Request) -> Response:
        raise ApiError(
            501,
            f"{request.url.path:.80}: this server completes text, and keeps nothing; it has no such thing",
            code="not_implemented",
        )

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, self._settings.name)
        call = self._encoder.with_calls(read_chat(body, self._defaults, self._model.decoder.max_batch))
        return await self._answer(request, call, functools.partial(self._shape, True))

    async def complete(self, request: Request) -> Response:
        body = await read_body(request, self._settings.name)
        call = read_completion(body, self._defaults, self._model.decoder.max_batch, self._settings.max_queue)
        try:
            return await self._answer(request, call, functools.partial(self._shape, False))
        except ContextLengthError as error:
            raise as_api_error(error, "prompt") from error

    async def respond(self, request: Request) -> Response:
        body = await read_body(request, self._settings.name)
        origins: list[int] = []
        try:
            asked, origins = as_chat_body(body)
            call = self._encoder.with_calls(read_chat(asked, self._defaults, 1))

            def shape(call: ApiCall, prompts: Sequence[Sequence[int]], thinks: bool | None) -> ResponseShape:
                return ResponseShape(self._settings.name, body, thinks, self._encoder.call_parser(call))

            return await self._answer(request, call, shape)
        except ApiError as error:
            raise as_response_error(error, origins) from error
        except WisparseError as error:
            raise as_response_error(as_api_error(error)) from error

    def _shape(self, chat: bool, call: ApiCall, prompts: Sequence[Sequence[int]], thinks: bool | None) -> Shape:
        scored, echo = call.sampling.logprobs is not None, self._encoder.echo(call, prompts)
        usage = call.include_usage, call.continuous_usage
        return Shape(
            chat, self._settings.name, self._spell, echo, scored, thinks, *usage, calls=self._encoder.call_parser(call)
        )

    async def _answer(
        self,
        request: Request,
        call: ApiCall,
        dress: Callable[[ApiCall, Sequence[Sequence[int]], bool | None], Shape | ResponseShape],
    ) -> Response:
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        prompts, constraints, thinks = await loop.run_in_executor(self._texts, self._encoder.encode, call)
        shape = dress(call, prompts, thinks)
        answering = Answering(self._running, thinks)
        try:
            answering.submit(self._model, call, prompts, constraints)
            # Whatever can be wrong with a request is known by its first token, before a status is sent.
            first = await unless_disconnected(request, answering.next())
        except BaseException:
            answering.cancel()
            raise
        self.metrics.first_token.observe(time.perf_counter() - began)
        prompt_tokens = sum(map(len, prompts))
        self.metrics.prompt_tokens.inc(prompt_tokens)
        if call.stream:
            chunks = self._chunks(answering, first, shape, prompt_tokens)
            return EventStream(chunks, answering.cancel, self.metrics)
        try:
            whole = await unless_disconnected(request, self._collect(answering, first))
        finally:
            answering.cancel()
        self.metrics.cached_tokens.inc(cached_tokens(whole, prompt_tokens))
        return _json(shape.whole(whole, prompt_tokens, answering.thought_tokens))

    async def _collect(self, answering: Answering, first: list[tuple[int, Chunk]]) -> list[Generation]:
        """The answers, when all have ended."""
        done: dict[int, Generation] = {}
        items = first
        while True:
            self._count(items, done)
            if len(done) == len(answering):
                return [done[index] for index in sorted(done)]
            items = await answering.next(_COLLECT_SECONDS)

    async def _chunks(
        self, answering: Answering, first: list[tuple[int, Chunk]], shape: Shape | ResponseShape, prompt_tokens: int
    ) -> AsyncIterator[bytes]:
        """The stream's events, each batch of pieces as one."""
        done: dict[int, Generation] = {}
        growing = shape.growing(len(answering))
        yield growing.opening()
        items, tokens = first, 0
        while True:
            self._count(items, done)
            tokens += len(items)
            yield growing.events(items)
            yield growing.tally(tokens, prompt_tokens)
            if len(done) == len(answering):
                break
            try:
                items = await answering.next()
            except WisparseError as error:  # the status is out already
                yield growing.failing(as_api_error(error))
                return
        answers = [done[index] for index in sorted(done)]
        self.metrics.cached_tokens.inc(cached_tokens(answers, prompt_tokens))
        yield growing.closing(answers, prompt_tokens, answering.thought_tokens)

    def _count(self, items: Sequence[tuple[int, Chunk]], done: dict[int, Generation]) -> None:
        self.metrics.tokens.inc(len(items))
        for index, piece in items:
            if piece.generation is not None:
                done[index] = piece.generation
                if len(piece.generation.token_ids) > 1:
                    seconds = piece.generation.generation_seconds / (len(piece.generation.token_ids) - 1)
                    self.metrics.token_time.observe(seconds)

    def _about(self) -> dict[str, Any]:
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "wisparse",
            "max_model_len": self._model.max_seq_len,
            "sparsity": self._model.sparsity,
            "sparsities": sorted({0.0, *self._model.bundle.levels}),
        }


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")
