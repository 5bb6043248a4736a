"""The server: OpenAI's routes over one engine.

    body -> protocol.read_* -> token ids -> engine.submit ... pieces -> answers.Shape -> wire

Text becomes token ids in a thread apart (a chat template is a stranger's program, and may take its time); pieces come
from the engine's thread (``answering``). A client that goes away, or does not read for half a minute, takes its request
with it (``wire``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from wisparse.formats.errors import ContextLengthError, UsageError, WisparseError
from wisparse.formats.guard.safe_json import parse_json

from ..generation.answer import Generation, Piece
from ..generation.choosing import Constraint
from ..generation.engine import Engine, QueueFullError
from ..model import Model
from .answering import Answering
from .answers import Shape, to_json
from .calls import Calls
from .metrics import Metrics
from .page import page_routes
from .protocol import ApiError, Call, Defaults, read_chat, read_completion
from .response_shape import ResponseShape
from .responses import as_chat_body, as_response_error
from .syntax import syntax_of
from .thinking import OPEN
from .tools import short_ids
from .wire import PATIENCE_SECONDS, EventStream, unless_disconnected

__all__ = ["ServeSettings", "http_server", "make_app", "open_socket", "serve"]

log = logging.getLogger(__name__)

_MOST_BYTES = 8 * 2**20
# A thread that waits for the interpreter gets it after so long; Python's own 5 ms are longer than a step of a GPU.
_SWITCH_SECONDS = 0.0005
# How often the tokens of an answer that is not streamed are looked at.
_COLLECT_SECONDS = 1.0
# One step of so many has its dropped channels counted, for /metrics: a batch's count is not quite free.
_COUNTED = 16
# Tokens whose text is kept for the next who asks for log-probabilities.
_SPELLED = 1 << 16
_ELSEWHERE = ("/v1/embeddings", "/v1/images/generations", "/v1/audio/transcriptions", "/v1/audio/speech",
              "/v1/moderations")  # fmt: skip


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


def open_socket(settings: ServeSettings) -> socket.socket:
    """A listening socket at the settings' host and port.

    Raises:
        UsageError: there is no such host, or something listens there already.
    """
    if not settings.host.strip():
        raise UsageError("--host: expected an address, found an empty text; 0.0.0.0 is everywhere")
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UsageError(
            f"cannot listen at {settings.host:.80} port {settings.port}: {error}; choose another --host or --port"
        ) from error


def serve(model: Model, settings: ServeSettings, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish those under way; the model is held meanwhile."""
    # The event loop may hold the interpreter's lock for milliseconds, in which the engine's thread would start no step.
    sys.setswitchinterval(_SWITCH_SECONDS)
    http_server(make_app(model, settings)).run(sockets=[listener])


def http_server(app: Starlette) -> uvicorn.Server:
    """What speaks HTTP for the application."""
    # Of uvicorn's parsers only h11 bounds a request's headers; left to itself it takes httptools where there is one.
    config = uvicorn.Config(
        app, http="h11", h11_max_incomplete_event_size=32 * 1024, log_level="warning", access_log=False,
        timeout_graceful_shutdown=60, server_header=False,
    )  # fmt: skip
    return uvicorn.Server(config)


def make_app(model: Model, settings: ServeSettings) -> Starlette:
    """The ASGI application; the engine runs between its start and its end."""
    server = _Server(model, settings)
    routes = [
        *page_routes(),
        Route("/health", server.health),
        Route("/metrics", server.guarded(server.metrics_page)),
        Route("/v1/models", server.guarded(server.models)),
        Route("/v1/models/{name:path}", server.guarded(server.one_model)),
        Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
        Route("/v1/responses", server.guarded(server.respond), methods=["POST"]),
        Route("/v1/completions", server.guarded(server.complete), methods=["POST"]),
        *(Route(path, server.guarded(server.not_here), methods=["POST"]) for path in _ELSEWHERE),
    ]
    middleware = [
        Middleware(CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"])
    ]
    return Starlette(
        routes=routes,
        middleware=middleware if settings.cors else [],
        lifespan=server.lifespan,
        exception_handlers={404: _not_found, 405: _wrong_method},
    )


class _Server:
    def __init__(self, model: Model, settings: ServeSettings) -> None:
        self._model = model
        self._settings = settings
        self._defaults = _defaults(model)
        self._created = int(time.time())
        self._texts = ThreadPoolExecutor(1, "wisparse-text")
        # A special token would be no part of an answer's text.
        self._thinks = (
            model.text is not None and model.text.token_id(OPEN) is not None and not model.text.is_special(OPEN)
        )
        source = None if model.text is None else model.text.template_source
        self._syntax = None if source is None else syntax_of(source)
        self._markers = {} if self._syntax is None else _special(model, (self._syntax.opens, self._syntax.closes))
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
        self._engine.start(self._settings.max_queue)
        self._engine.start_measuring(_COUNTED)
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
                self._let_in(request)
                response = await endpoint(request)
            except ApiError as error:
                response = _refusal(error)
            except ClientDisconnect:
                self.metrics.cancelled.inc()
                response = Response(status_code=499)
            except WisparseError as error:
                response = _refusal(_as_api_error(error))
            self.metrics.requests.labels(str(response.status_code)).inc()
            return response

        return answer

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics_page(self, request: Request) -> Response:
        unread = await asyncio.wrap_future(self._running.realised_sparsity())
        return Response(self.metrics.text(unread), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._about()]})

    async def one_model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return _json(self._about())

    async def not_here(self, request: Request) -> Response:
        raise ApiError(
            501, f"{request.url.path}: this server completes text; it has no such thing", code="not_implemented"
        )

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        call = self._with_calls(read_chat(body, self._defaults, self._model.decoder.max_batch))
        return await self._answer(request, call, functools.partial(self._shape, True))

    async def complete(self, request: Request) -> Response:
        body = await self._body(request)
        call = read_completion(body, self._defaults, self._model.decoder.max_batch)
        try:
            return await self._answer(request, call, functools.partial(self._shape, False))
        except ContextLengthError as error:
            raise _as_api_error(error, "prompt") from error

    async def respond(self, request: Request) -> Response:
        body = await self._body(request)
        origins: list[int] = []
        try:
            asked, origins = as_chat_body(body)
            call = self._with_calls(read_chat(asked, self._defaults, 1))

            def shape(call: Call, prompts: Sequence[Sequence[int]], thinks: bool | None) -> ResponseShape:
                return ResponseShape(self._settings.name, body, thinks, self._calls(call))

            return await self._answer(request, call, shape)
        except ApiError as error:
            raise as_response_error(error, origins) from error
        except WisparseError as error:
            raise as_response_error(_as_api_error(error)) from error

    def _shape(self, chat: bool, call: Call, prompts: Sequence[Sequence[int]], thinks: bool | None) -> Shape:
        scored, echo = call.sampling.logprobs is not None, self._echo(call, prompts)
        usage = call.include_usage, call.continuous_usage
        return Shape(chat, self._settings.name, self._spell, echo, scored, thinks, *usage, calls=self._calls(call))

    def _calls(self, call: Call) -> Callable[[bool], Calls] | None:
        """What splits calls from an answer's text, if it may have some."""
        offer, syntax = call.offer, self._syntax
        if offer is None or syntax is None:
            return None
        return lambda held: Calls(syntax, offer.names, one=not offer.several, held=held)

    def _with_calls(self, call: Call) -> Call:
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
        return replace(call, grammar=grammar, spoken=frozenset(self._markers.values()))

    async def _answer(
        self,
        request: Request,
        call: Call,
        dress: Callable[[Call, Sequence[Sequence[int]], bool | None], Shape | ResponseShape],
    ) -> Response:
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        prompts, constraints, thinks = await loop.run_in_executor(self._texts, self._encode, call)
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
        return _json(shape.whole(whole, prompt_tokens, answering.thought_tokens))

    async def _collect(self, answering: Answering, first: list[tuple[int, Piece]]) -> list[Generation]:
        """The answers, when all have ended."""
        done: dict[int, Generation] = {}
        items = first
        while True:
            self._count(items, done)
            if len(done) == len(answering):
                return [done[index] for index in sorted(done)]
            items = await answering.next(_COLLECT_SECONDS)

    async def _chunks(
        self, answering: Answering, first: list[tuple[int, Piece]], shape: Shape | ResponseShape, prompt_tokens: int
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
                yield growing.failing(_as_api_error(error))
                return
        yield growing.closing([done[index] for index in sorted(done)], prompt_tokens, answering.thought_tokens)

    def _count(self, items: Sequence[tuple[int, Piece]], done: dict[int, Generation]) -> None:
        self.metrics.tokens.inc(len(items))
        for index, piece in items:
            if piece.generation is not None:
                done[index] = piece.generation
                if len(piece.generation.token_ids) > 1:
                    seconds = piece.generation.generation_seconds / (len(piece.generation.token_ids) - 1)
                    self.metrics.token_time.observe(seconds)

    def _echo(self, call: Call, prompts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """Of each answer to come its prompt's text and first token, where they are told."""
        if not call.echo:
            return []
        decode = self._model.tokenizer.decode
        texts = [
            prompt if isinstance(prompt, str) else decode(ids, skip_special_tokens=False)
            for prompt, ids in zip(call.prompts, prompts, strict=True)
        ]
        return [(text, ids[0]) for text, ids in zip(texts, prompts, strict=True) for _ in range(call.n)]

    def _encode(self, call: Call) -> tuple[list[list[int]], list[Constraint | None], bool | None]:
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

    async def _body(self, request: Request) -> dict[str, Any]:
        """The request's JSON object, for this server's model."""
        # A page of another origin can send a form's types unasked; JSON it has to ask for (CORS).
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "expected a body of type application/json", code="unsupported_media_type")
        data = bytearray()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > _MOST_BYTES:
                        raise ApiError(
                            413, f"the body is larger than {_MOST_BYTES:,} bytes: shorten it", code="request_too_large"
                        )
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not come within {PATIENCE_SECONDS:g} seconds", code="request_timeout"
            ) from error
        body = parse_json(bytes(data), "body", UsageError)
        if body.get("model") is not None:
            self._check_name(body["model"])
        return body

    def _check_name(self, name: Any) -> None:
        if name != self._settings.name:
            raise ApiError(
                404,
                f"model: expected {self._settings.name!r}, found {name!r:.80}",
                param="model",
                code="model_not_found",
            )

    def _about(self) -> dict[str, Any]:
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "wisparse",
            "max_model_len": self._model.max_seq_len,
            "sparsity": self._model.sparsity,
            "sparsities": sorted({0.0, *self._model.bundle.rungs}),
        }

    def _let_in(self, request: Request) -> None:
        if self._settings.api_key is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._settings.api_key.encode()):
            raise ApiError(
                401, "expected the server's key as Authorization: Bearer KEY", kind="authentication_error",
                code="invalid_api_key",
            )  # fmt: skip


def _special(model: Model, markers: Sequence[str]) -> dict[str, int]:
    """Ids of those that are special tokens."""
    text = model.tokenizer
    found = {marker: text.token_id(marker) for marker in markers if text.is_special(marker)}
    return {marker: token for marker, token in found.items() if token is not None}


def _defaults(model: Model) -> Defaults:
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


def _as_api_error(error: WisparseError, prompt: str = "messages") -> ApiError:
    """As OpenAI words it; ``prompt``: the field that held what was too long."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full")
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=prompt, code="context_length_exceeded")
    if isinstance(error, UsageError):
        named = str(error).partition(":")[0]
        return ApiError(400, str(error), param=named if named.isidentifier() else None)
    log.warning("a request failed: %s", error)
    return ApiError(500, str(error), kind="server_error")


def _refusal(error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status == 429 else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(to_json(error.body), error.status, headers, "application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    return _refusal(ApiError(404, f"{request.url.path}: no such address here", code="not_found"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    return _refusal(ApiError(405, f"{request.url.path}: {request.method} is not for it", code="method_not_allowed"))


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")
