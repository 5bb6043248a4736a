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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from wisparse.formats.errors import ContextLengthError, WisparseError

from ..generation.answer import Generation, Piece
from ..generation.engine import Engine
from ..model import Model
from ..protocol.answers import Shape
from ..protocol.errors import ApiError, as_api_error
from ..protocol.events import to_json
from ..protocol.requests import ApiCall, read_chat, read_completion
from ..protocol.response_shape import ResponseShape
from ..protocol.responses import as_chat_body, as_response_error
from ..protocol.usage import cached_tokens
from .admission import check_key, check_name, read_body
from .answering import Answering
from .encoder import Encoder
from .metrics import Metrics
from .refusals import refusal
from .sampling_defaults import sampling_defaults
from .settings import ServeSettings
from .wire import EventStream, unless_disconnected

__all__ = ["Endpoints"]

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
        unread = await asyncio.wrap_future(self._running.realised_sparsity())
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
                yield growing.failing(as_api_error(error))
                return
        answers = [done[index] for index in sorted(done)]
        self.metrics.cached_tokens.inc(cached_tokens(answers, prompt_tokens))
        yield growing.closing(answers, prompt_tokens, answering.thought_tokens)

    def _count(self, items: Sequence[tuple[int, Piece]], done: dict[int, Generation]) -> None:
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
            "sparsities": sorted({0.0, *self._model.bundle.rungs}),
        }


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")
