"""Answers as items, and the responses of OpenAI's chat completions and completions, streamed or complete."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from ..detokenizer import Detokenizer
from ..generation.logits import TokenScore
from ..generation.request import Chunk, Generation
from ..tokenizer import Tokenizer
from .requests import ApiError, CompletionRequest
from .tools import Delta, ToolCallParser

DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0  # for minus infinity, as in OpenAI's API
_FIELDS = {"reasoning": "reasoning_content", "content": "content"}  # kind of item -> field of a chat's message

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would construct one at each call


def to_json(value: Mapping[str, Any]) -> bytes:
    return _JSON.encode(value).encode()


@dataclass(frozen=True)
class Context:
    """Data for formatting the response to a request, beside the request."""

    model: str  # its name
    tokenizer: Tokenizer | None
    count: int  # number of answers
    prompt_tokens: int  # of all prompts together
    # with ``echo``: by answer, the prompt's text and first token
    echo: Sequence[tuple[str, int]] = ()
    call_parser: Callable[..., ToolCallParser] | None = None  # constructor, with ``whole``; None: no tools

    def token_bytes(self, token: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)


@dataclass
class Item:
    """A thought, a text or a tool call of an answer."""

    kind: str  # of its deltas
    index: int = 0  # of a call, among the calls
    id: str | None = None  # of a call
    name: str | None = None  # of a called function
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: str = "in_progress"  # then completed, or incomplete if the answer was cut off
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments as JSON."""
        return "".join(self.parts)


ItemEvents = Iterator[tuple[str, Item, str]]  # begin, delta (with its text) or end, and the last item


class AnswerParser:
    """Splits the chunks of an answer into items. Deltas extend the last item or begin another one."""

    def __init__(self, context: Context, stream: bool) -> None:
        self._calls = None if context.call_parser is None else context.call_parser(whole=not stream)
        self.items: list[Item] = []

    def add(self, chunks: Sequence[Chunk]) -> ItemEvents:
        """The events of some chunks; adjacent deltas of an item are merged."""
        text = "".join(chunk.text for chunk in chunks)
        deltas = [Delta("reasoning", "".join(chunk.thought for chunk in chunks))]
        if self._calls is None:
            deltas.append(Delta("content", text))
        else:
            ended = chunks[-1].finish_reason is not None
            deltas += [*self._calls.add(text), *(self._calls.finish() if ended else ())]
        for (kind, index, id, name), group in itertools.groupby(deltas, attrgetter("kind", "index", "id", "name")):
            text = "".join(delta.text for delta in group)
            if name is not None or (text and (not self.items or self.items[-1].kind != kind)):
                yield from self._begin(Item(kind, index, id, name))
            if text:
                self.items[-1].parts.append(text)
                yield "delta", self.items[-1], text

    def finish(self, reason: str) -> ItemEvents:
        """The events of the answer's end: it has at least one item, maybe an empty text."""
        if not self.items:
            yield from self._begin(Item("content"))
        yield from self._end("incomplete" if reason == "length" else "completed")

    def _begin(self, item: Item) -> ItemEvents:
        yield from self._end("completed")
        self.items.append(item)
        yield "begin", item, ""

    def _end(self, status: str) -> ItemEvents:
        for item in self.items[-1:]:
            item.status = status
            yield "end", item, ""

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._calls is not None and self._calls.count else reason


def cached_tokens(answers: Sequence[Generation], copies: int) -> int:
    """Cached tokens of all prompts; for each prompt the minimum of its ``copies`` answers."""
    return sum(min(one.cached_tokens for one in answers[i : i + copies]) for i in range(0, len(answers), copies))


def event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + to_json({"type": kind, **more}) + b"\n\n"


class Formatter:
    """Formats the answer to one request as a list of items. Subclasses spell the events of an item, and the response."""

    id_prefix = ""
    failure: Callable[[ApiError], bytes]  # the events that end a failed stream
    item_events: Callable[[str, Item, str], bytes]  # see `ItemEvents`
    response: Callable[[Generation | None], dict[str, Any]]  # with the items so far; complete if it has the answer
    response_events: Callable[[Generation], bytes]  # those after the items'

    def __init__(self, request: Any, context: Context) -> None:
        self._request, self._context = request, context
        self._id, self._created = f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time())
        self._parsers = [AnswerParser(context, request.stream) for _ in range(context.count)]

    def start(self) -> bytes:
        return b""

    def events(self, items: Sequence[tuple[int, Chunk]]) -> bytes:
        """The events of some chunks, each with its answer's index."""
        return b"".join(self.item_events(*one) for one in self._parsers[0].add([chunk for _, chunk in items]))

    def end(self, answers: Sequence[Generation]) -> bytes:
        ends = self._parsers[0].finish(answers[0].finish_reason)
        return b"".join(self.item_events(*one) for one in ends) + self.response_events(answers[0])

    def complete(self, items: Sequence[tuple[int, Chunk]], answers: Sequence[Generation]) -> dict[str, Any]:
        """The complete response; ``items``: all chunks of all answers."""
        parser = self._parsers[0]
        deque(parser.add([chunk for _, chunk in items]), 0)
        deque(parser.finish(answers[0].finish_reason), 0)
        return self.response(answers[0])


class ChoiceFormatter(Formatter):
    """One or more answers as choices, in chat completions and completions."""

    complete_object, chunk_object, _tokens = "", "", 0

    def events(self, items: Sequence[tuple[int, Chunk]]) -> bytes:
        events = [self._chunk(choices=[choice]) for choice in self._choices(items, stream=True)]
        self._tokens += len(items)
        if self._request.stream_options.continuous_usage_stats:
            usage = {**self._usage(self._tokens, 0), "prompt_tokens_details": None}
            events.append(self._chunk(choices=[], usage=usage))
        return b"".join(events)

    def end(self, answers: Sequence[Generation]) -> bytes:
        options = self._request.stream_options
        if not options.include_usage:
            return DONE
        usage = self.final_usage(answers)
        if options.continuous_usage_stats:
            # The engine's time: a client that reads late receives several events at once.
            usage["generation_seconds"] = max(answer.generation_seconds for answer in answers)
        return self._chunk(choices=[], usage=usage) + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + to_json({"error": error.error}) + b"\n\n" + DONE

    def complete(self, items: Sequence[tuple[int, Chunk]], answers: Sequence[Generation]) -> dict[str, Any]:
        choices = list(self._choices(items, stream=False))
        return {**self._head(self.complete_object), "choices": choices, "usage": self.final_usage(answers)}

    def choices(self, index: int, chunks: Sequence[Chunk], stream: bool) -> Iterable[dict[str, Any]]:
        """The choices for chunks of one answer; a single one unless streaming."""
        raise NotImplementedError

    def final_usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        return self._usage(sum(len(one.token_ids) for one in answers), cached_tokens(answers, self._request.n))

    def _choices(self, items: Sequence[tuple[int, Chunk]], stream: bool) -> Iterable[dict[str, Any]]:
        for index, group in itertools.groupby(sorted(items, key=itemgetter(0)), itemgetter(0)):
            yield from self.choices(index, [chunk for _, chunk in group], stream)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._context.model}

    def _chunk(self, **fields: Any) -> bytes:
        return b"data: " + to_json({**self._head(self.chunk_object), **fields}) + b"\n\n"

    def _usage(self, completion_tokens: int, cached: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._context.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._context.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _choice(index: int, reason: str | None, logprobs: Any, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


class ChatFormatter(ChoiceFormatter):
    """``/v1/chat/completions``."""

    id_prefix, complete_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def start(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        answers = range(self._context.count)
        return b"".join(self._chunk(choices=[_choice(index, None, None, delta=delta)]) for index in answers)

    def choices(self, index: int, chunks: Sequence[Chunk], stream: bool) -> Iterable[dict[str, Any]]:
        parser, logprobs = self._parsers[index], self._logprobs(chunks)
        contents: list[dict[str, Any]] = []
        for what, item, text in parser.add(chunks):
            if item.kind == "tool_call" and what != "end":
                call = _call(item) if what == "begin" else {"function": {"arguments": text}}
                contents.append({"tool_calls": [{"index": item.index, **call}]})
            elif what == "delta":
                contents.append({_FIELDS[item.kind]: text})
        reason = parser.finish_reason(chunks[-1].finish_reason)
        if not stream:
            yield _choice(index, reason, logprobs, message=_message(parser.items))
            return
        for number, content in enumerate(contents or ([{}] if logprobs else [])):
            yield _choice(index, None, None if number else logprobs, delta=content)
        if reason is not None:
            yield _choice(index, reason, None, delta={})

    def final_usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        details = {"reasoning_tokens": sum(answer.thought_tokens for answer in answers)}
        return {**super().final_usage(answers), "completion_tokens_details": details}

    def _logprobs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            encoded = self._context.token_bytes(token)  # maybe a part of a character
            text = encoded.decode(errors="replace")
            return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(encoded)}

        scores = [chunk.score for chunk in chunks if chunk.score is not None]
        if not self._request.logprobs or not scores:
            return None
        content = [{**entry(s.token_id, s.logprob), "top_logprobs": [entry(*one) for one in s.top]} for s in scores]
        return {"content": content, "refusal": None}


def _call(item: Item) -> dict[str, Any]:
    return {"id": item.id, "type": "function", "function": {"name": item.name, "arguments": item.text}}


def _message(items: Sequence[Item]) -> dict[str, Any]:
    texts = {kind: "".join(item.text for item in items if item.kind == kind) for kind in _FIELDS}
    calls = [_call(item) for item in items if item.kind == "tool_call"]
    content = texts["content"] or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    return {**message, "tool_calls": calls} if calls else message


class CompletionFormatter(ChoiceFormatter):
    """``/v1/completions``."""

    id_prefix, complete_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, context: Context) -> None:
        super().__init__(request, context)
        self._echo = dict(enumerate(context.echo))  # of answers without events so far
        tokenizer = context.tokenizer
        self._detokenizers = [tokenizer.detokenizer() if tokenizer else None for _ in range(context.count)]
        self._lengths = [0] * context.count  # characters of each answer so far, with ``echo`` of its prompt too

    def choices(self, index: int, chunks: Sequence[Chunk], stream: bool) -> Iterable[dict[str, Any]]:
        echo, first = self._echo.pop(index, ("", None))
        prompt: list[TokenScore | int] = []
        if first is not None and chunks[0].prompt_scores is not None:
            prompt = [first, *chunks[0].prompt_scores]  # the prompt's first token has no score
        text = echo + "".join(chunk.text for chunk in chunks)
        scores = [chunk.score for chunk in chunks if chunk.score is not None]
        reason = chunks[-1].finish_reason
        if text or prompt or scores or reason:
            logprobs = None if self._request.logprobs is None else self._logprobs(index, echo, prompt, scores)
            yield _choice(index, reason, logprobs, text=text)

    def _logprobs(
        self, index: int, echo: str, prompt: Sequence[TokenScore | int], answer: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """The log-probabilities of tokens; an id stands for a token without a score."""
        scores, offsets, tokenizer = [*prompt, *answer], list[int](), self._context.tokenizer
        ids = [score if isinstance(score, int) else score.token_id for score in scores]
        if tokenizer is not None and prompt:
            # Special tokens before the prompt are no part of its text.
            shown = tokenizer.detokenizer(frozenset(i for name, i in tokenizer.special_ids.items() if name in echo))
            offsets += self._begins(index, shown, ids[: len(prompt)])
        self._lengths[index] = max(self._lengths[index], len(echo))
        offsets += self._begins(index, self._detokenizers[index], ids[len(offsets) :])
        logprobs = [None if isinstance(score, int) else max(score.logprob, _MIN_LOGPROB) for score in scores]
        tops: list[dict[str, float] | None] = []
        for score in scores:
            if isinstance(score, int):
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token, logprob in (*score.top, (score.token_id, score.logprob)):
                top.setdefault(self._spell(token), max(logprob, _MIN_LOGPROB))  # the larger of two with the same text
            tops.append(top)
        tokens = [*map(self._spell, ids)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _begins(self, index: int, detokenizer: Detokenizer | None, ids: Sequence[int]) -> Iterable[int]:
        """The character of the text that each of the next tokens begins with, or is a part of."""
        for token in ids:
            added = "" if detokenizer is None else detokenizer.add(token)
            own = self._spell(token)
            # Before it: the replacement character of an earlier token's incomplete character.
            yield self._lengths[index] + (len(added) - len(own) if added.endswith(own) else 0)
            self._lengths[index] += len(added)

    def _spell(self, token: int) -> str:
        return self._context.token_bytes(token).decode(errors="replace")
