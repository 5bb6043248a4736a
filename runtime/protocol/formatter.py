"""Answers as OpenAI's protocol has them, streamed or complete."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..generation.logits import TokenScore
from ..generation.request import Chunk, Generation
from .errors import ApiError
from .requests import ChatRequest, CompletionRequest
from .tools import Delta, ToolCallParser

THINK, END_THINK = "<think>", "</think>"
DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0  # for minus infinity, as OpenAI has it


def to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class ThinkParser:
    """Splits one answer's text into a thought and what follows it, without the white space around either.

    Args:
        tokens: how many of the tokens were thought, the tags among them.
    """

    def __init__(self, *, begun: bool) -> None:
        """``begun``: the prompt ends with the opening tag."""
        self._tag: str | None = END_THINK if begun else THINK  # the next to come; None: the thought has ended
        self._held = ""
        self._started = False  # the part has more than white space
        self._seen = 0
        self.tokens = 0

    def add(self, text: str) -> tuple[str, str]:
        """What one token's text adds to the thought, and to the answer."""
        if self._tag is None:
            return "", self._strip(text)
        self._seen += 1
        self._held += text
        if self._tag == THINK:
            found = self._held.lstrip()
            if found.startswith(THINK):
                self._tag, self._held = END_THINK, found[len(THINK) :]
            elif THINK.startswith(found):
                return "", ""
            else:  # no thought
                self._tag, self._started = None, True
                held, self._held = self._held, ""
                return "", held
        self.tokens = self._seen
        thought, closed, rest = self._held.partition(END_THINK)
        if closed:
            self._tag, self._held = None, ""
            thought = self._strip(thought.rstrip())
            self._started = False
            return thought, self._strip(rest)
        # White space, and what may become the tag, waits for what follows.
        lengths = range(min(len(END_THINK) - 1, len(thought)), 0, -1)
        partial = next((length for length in lengths if thought.endswith(END_THINK[:length])), 0)
        sure = len(thought[: len(thought) - partial].rstrip())
        self._held = thought[sure:]
        return self._strip(thought[:sure]), ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return ("", held) if self._tag == THINK else (self._strip(held.rstrip()), "")

    def _strip(self, text: str) -> str:
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        return text


@dataclass(frozen=True)
class Context:
    """What formatting the answers to a request takes beside the request."""

    model: str  # its name
    spell: Callable[[int], str]  # a token's text
    count: int  # number of answers
    prompt_tokens: int  # of all prompts together
    # of each answer the prompt's text and first token, if the prompt is part of the answer
    echo: Sequence[tuple[str, int]] = ()
    thinks: bool | None = None  # whether answers begin inside a thought; None: no thoughts are split off
    # makes a parser of tool calls; its argument is ``ToolCallParser``'s ``whole``. None: no tools
    call_parser: Callable[[bool], ToolCallParser] | None = None


class AnswerParser:
    """Splits one answer, as it comes, into thought, content and tool calls."""

    def __init__(self, context: Context, stream: bool) -> None:
        self._thoughts = None if context.thinks is None else ThinkParser(begun=context.thinks)
        self._calls = None if context.call_parser is None else context.call_parser(not stream)

    def add(self, chunks: Sequence[Chunk]) -> list[Delta]:
        """What some chunks add; neighbours that can go out as one are one."""
        ended = chunks[-1].finish_reason is not None
        thought, text = "", "".join(chunk.text for chunk in chunks)
        if self._thoughts is not None:
            parts = [self._thoughts.add(chunk.text) for chunk in chunks]
            parts += [self._thoughts.finish()] if ended else []
            thought, text = ("".join(part) for part in zip(*parts, strict=True))
        deltas = [Delta("reasoning", thought)]
        if self._calls is None:
            deltas.append(Delta("content", text))
        else:
            deltas += [*self._calls.add(text), *(self._calls.finish() if ended else ())]
        merged = []
        # The name of a call stays apart from its arguments.
        for _, group in itertools.groupby(deltas, lambda delta: (delta.kind, delta.index, delta.name)):
            first, *rest = group
            merged.append(replace(first, text=first.text + "".join(delta.text for delta in rest)))
        return [delta for delta in merged if delta.text or delta.name is not None]

    def finish_reason(self, reason: str) -> str:
        called = self._calls is not None and self._calls.count > 0
        return "tool_calls" if called and reason == "stop" else reason

    @property
    def thought_tokens(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.tokens


class Formatter(Protocol):
    """The answers to one request as its protocol has them; chunks come with the index of their answer."""

    def start(self) -> bytes:
        """The events before the first chunk."""

    def events(self, items: Sequence[tuple[int, Chunk]]) -> bytes:
        """The events for some chunks."""

    def end(self, answers: Sequence[Generation]) -> bytes:
        """The events after the last chunk."""

    def failure(self, error: ApiError) -> bytes:
        """The events in place of the rest."""

    def complete(self, items: Sequence[tuple[int, Chunk]], answers: Sequence[Generation]) -> dict[str, Any]:
        """The finished answers; ``items``: all their chunks."""


def cached_tokens(answers: Sequence[Generation], copies: int) -> int:
    """Tokens of the prompts that the cache held; for each prompt the least that one of its ``copies`` answers found."""
    return sum(min(one.cached_tokens for one in answers[at : at + copies]) for at in range(0, len(answers), copies))


class _ChoicesFormatter:
    """What chats and completions have in common: choices, and usage at the end."""

    id_prefix, complete_object, chunk_object = "", "", ""

    def __init__(self, request: ChatRequest | CompletionRequest, context: Context) -> None:
        self._options, self._copies, self._context = request.stream_options, request.n, context
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._tokens = 0

    def choices(self, index: int, chunks: Sequence[Chunk], stream: bool) -> Iterable[dict[str, Any]]:
        """The choices for some chunks of one answer; one, if those are all and nothing is streamed."""
        raise NotImplementedError

    def start(self) -> bytes:
        return b""

    def events(self, items: Sequence[tuple[int, Chunk]]) -> bytes:
        found = [self._chunk(choices=[choice]) for choice in self._choices(items, True)]
        self._tokens += len(items)
        if self._options.continuous_usage_stats:
            usage = {**self._usage(self._tokens, 0), "prompt_tokens_details": None}
            found.append(self._chunk(choices=[], usage=usage))
        return b"".join(found)

    def end(self, answers: Sequence[Generation]) -> bytes:
        if not self._options.include_usage:
            return DONE
        usage = self.final_usage(answers)
        if self._options.continuous_usage_stats:
            # The times at which a client reads events say little about the speed: a busy client finds several at once.
            usage["generation_seconds"] = max(answer.generation_seconds for answer in answers)
        return self._chunk(choices=[], usage=usage) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event({"error": error.error}) + DONE

    def complete(self, items: Sequence[tuple[int, Chunk]], answers: Sequence[Generation]) -> dict[str, Any]:
        head = {"id": self.id_prefix + self._id, "object": self.complete_object, "created": self._created}
        choices = sorted(self._choices(items, False), key=lambda choice: choice["index"])
        return {**head, "model": self._context.model, "choices": choices, "usage": self.final_usage(answers)}

    def _choices(self, items: Sequence[tuple[int, Chunk]], stream: bool) -> Iterable[dict[str, Any]]:
        by_answer: dict[int, list[Chunk]] = {}
        for index, chunk in items:
            by_answer.setdefault(index, []).append(chunk)
        for index, chunks in by_answer.items():
            yield from self.choices(index, chunks, stream)

    def _chunk(self, **fields: Any) -> bytes:
        head = {"id": self.id_prefix + self._id, "object": self.chunk_object, "created": self._created}
        return event({**head, "model": self._context.model, **fields})

    def _usage(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._context.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._context.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def final_usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        return self._usage(sum(len(answer.token_ids) for answer in answers), cached_tokens(answers, self._copies))


def _choice(index: int, reason: str | None, logprobs: Any, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


class ChatFormatter(_ChoicesFormatter):
    """``/v1/chat/completions``."""

    id_prefix, complete_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, context: Context) -> None:
        super().__init__(request, context)
        self._scored = request.logprobs
        self._parsers = [AnswerParser(context, request.stream) for _ in range(context.count)]

    def start(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        answers = range(self._context.count)
        return b"".join(self._chunk(choices=[_choice(index, None, None, delta=delta)]) for index in answers)

    def choices(self, index: int, chunks: Sequence[Chunk], stream: bool) -> Iterable[dict[str, Any]]:
        parser, logprobs = self._parsers[index], self._logprobs(chunks)
        deltas = [_delta(delta) for delta in parser.add(chunks)] or [{}]
        reason = chunks[-1].finish_reason
        if reason is not None:
            reason = parser.finish_reason(reason)
        if not stream:
            yield _choice(index, reason, logprobs, message=_message(deltas))
            return
        for number, delta in enumerate(deltas):
            if delta or logprobs:
                yield _choice(index, None, None if number else logprobs, delta=delta)
        if reason is not None:
            yield _choice(index, reason, None, delta={})

    def final_usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        details = {"reasoning_tokens": sum(parser.thought_tokens for parser in self._parsers)}
        return {**super().final_usage(answers), "completion_tokens_details": details}

    def _logprobs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._context.spell(token)
            # A token may be a part of a character, which has no text.
            encoded = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": encoded}

        scores = [chunk.score for chunk in chunks if chunk.score is not None]
        if not self._scored or not scores:
            return None
        content = [
            {**entry(score.token_id, score.logprob), "top_logprobs": [entry(*one) for one in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}


def _delta(delta: Delta) -> dict[str, Any]:
    """As a chat's stream has it."""
    if delta.kind != "tool_call":
        return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}
    if delta.name is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": delta.text}
    return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}


def _message(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas add up to."""
    thought, content = ("".join(one.get(key, "") for one in deltas) for key in ("reasoning_content", "content"))
    calls: list[dict[str, Any]] = []
    for (call,) in (one["tool_calls"] for one in deltas if "tool_calls" in one):
        if "id" in call:
            calls.append({"id": call["id"], "type": "function", "function": call["function"]})
        else:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    message |= {"reasoning_content": thought} if thought else {}
    return message | ({"tool_calls": calls} if calls else {})


class CompletionFormatter(_ChoicesFormatter):
    """``/v1/completions``."""

    id_prefix, complete_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, context: Context) -> None:
        super().__init__(request, context)
        self._scored = request.logprobs is not None
        self._echo = dict(enumerate(context.echo))  # of the answers that have not begun
        self._offsets = [0] * context.count  # characters of each answer's tokens so far

    def choices(self, index: int, chunks: Sequence[Chunk], stream: bool) -> Iterable[dict[str, Any]]:
        text, first = self._echo.pop(index, ("", None))
        scores: list[TokenScore | int] = []
        if first is not None and chunks[0].prompt_scores is not None:
            scores = [first, *chunks[0].prompt_scores]  # the prompt's first token has no score
        text += "".join(chunk.text for chunk in chunks)
        scores += [chunk.score for chunk in chunks if chunk.score is not None]
        reason = chunks[-1].finish_reason
        if text or scores or reason:
            yield _choice(index, reason, self._logprobs(index, scores) if self._scored else None, text=text)

    def _logprobs(self, index: int, scores: Sequence[TokenScore | int]) -> dict[str, Any]:
        """Of tokens with scores, or of an id without one."""
        spell = self._context.spell
        tokens = [spell(score if isinstance(score, int) else score.token_id) for score in scores]
        *offsets, self._offsets[index] = itertools.accumulate(map(len, tokens), initial=self._offsets[index])
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for score in scores:
            if isinstance(score, int):
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(max(score.logprob, _MIN_LOGPROB))
            top: dict[str, float] = {}
            for token, logprob in (*score.top, (score.token_id, score.logprob)):
                top.setdefault(spell(token), max(logprob, _MIN_LOGPROB))  # the likelier of two that are written alike
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
