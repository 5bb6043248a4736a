"""What a chat's or a completion's answer looks like on the wire, finished or growing."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..generation.logits import TokenScore
from ..generation.request import Chunk, Generation
from .errors import ApiError
from .tools import CallDelta, CallParser, call_delta, same_call, whole_calls


def usage(answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int | None) -> dict[str, Any]:
    """Tokens in and out, and of those the thought ones if they are told; each prompt counts once, however many answers
    it has."""
    completion = sum(len(answer.token_ids) for answer in answers)
    found = tokens_used(completion, prompt_tokens, cached_tokens(answers, prompt_tokens))
    if thought_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": thought_tokens}
    return found


def cached_tokens(answers: Sequence[Generation], prompt_tokens: int) -> int:
    """Tokens of the prompts that the cache still held; of each prompt what its first answer found."""
    copies = sum(answer.prompt_tokens for answer in answers) // prompt_tokens
    return sum(min(one.cached_tokens for one in answers[at : at + copies]) for at in range(0, len(answers), copies))


def tokens_used(completion: int, prompt_tokens: int, cached: int) -> dict[str, Any]:
    """As OpenAI writes it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


# What JSON has for the logarithm of nothing, as OpenAI writes it.
_NEVER = -9999.0


def chat_logprobs(scores: Sequence[TokenScore | int], spell: Callable[[int], str]) -> dict[str, Any]:
    """Of a message's tokens."""

    def spelled(token: int, logprob: float) -> dict[str, Any]:
        text = spell(token)
        # A token may be part of a character, of which there is no text.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": octets}

    entries = []
    for score in scores:
        if isinstance(score, TokenScore):
            top = [spelled(token, logprob) for token, logprob in score.top]
            entries.append({**spelled(score.token_id, score.logprob), "top_logprobs": top})
    return {"content": entries, "refusal": None}


def completion_logprobs(
    scores: Sequence[TokenScore | int], spell: Callable[[int], str], offset: int
) -> tuple[dict[str, Any], int]:
    """Of a text's tokens, the first of which is at this character; and the character after the last. A token that is
    there by its id alone has no score: it is a prompt's first."""
    tokens = [spell(score if isinstance(score, int) else score.token_id) for score in scores]
    *offsets, end = itertools.accumulate(map(len, tokens), initial=offset)
    known = [None if isinstance(score, int) else score for score in scores]
    found = {
        "tokens": tokens,
        "token_logprobs": [None if score is None else _finite(score.logprob) for score in known],
        "top_logprobs": [None if score is None else _top(score, spell) for score in known],
        "text_offset": offsets,
    }
    return found, end


def _top(score: TokenScore, spell: Callable[[int], str]) -> dict[str, float]:
    """The most probable tokens, and the token itself; the likelier of two that are written alike."""
    found: dict[str, float] = {}
    for token, logprob in (*score.top, (score.token_id, score.logprob)):
        found.setdefault(spell(token), _finite(logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)


DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """One answer's text, of which the beginning may be thought. White space around either part is left out."""

    def __init__(self, *, begun: bool) -> None:
        """``begun``: the prompt ends with the opening tag, as some templates have it."""
        self._tag: str | None = CLOSE if begun else OPEN  # the next to come; None: the answer has begun
        self._held = ""
        self._started = False  # the part has shown something but white space

    def add(self, text: str) -> tuple[str, str]:
        """What a piece adds to the thought, and to the answer."""
        if self._tag is None:
            return "", self._strip(text)
        self._held += text
        if self._tag == OPEN:
            found = self._held.lstrip()
            if found.startswith(OPEN):
                self._tag, self._held = CLOSE, found[len(OPEN) :]
            elif OPEN.startswith(found):
                return "", ""
            else:  # it answers at once, and as it likes
                self._tag, self._started = None, True
                held, self._held = self._held, ""
                return "", held
        thought, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._tag, self._held = None, ""
            thought = self._strip(thought.rstrip())
            self._started = False
            return thought, self._strip(rest)
        # White space, and what may become the tag, waits for what follows.
        sure = len(thought.rstrip())
        for length in range(min(len(CLOSE) - 1, len(thought)), 0, -1):
            if thought.endswith(CLOSE[:length]):
                sure = len(thought[: len(thought) - length].rstrip())
                break
        self._held = thought[sure:]
        return self._strip(thought[:sure]), ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return ("", held) if self._tag == OPEN else (self._strip(held.rstrip()), "")

    def _strip(self, text: str) -> str:
        """Without the white space that a part begins with."""
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        return text


class ThoughtCount:
    """How many of one answer's tokens are thought, the tags among them."""

    def __init__(self, *, begun: bool) -> None:
        """``begun``: as for ``Thinking``."""
        self._tag: str | None = CLOSE if begun else OPEN  # the next to come; None: nothing more is thought
        self._held = ""
        self._seen = 0
        self.tokens = 0

    def add(self, text: str) -> None:
        """One more token, and the text that it adds."""
        if self._tag is None:
            return
        self._seen += 1
        self._held += text
        if self._tag == OPEN:
            found = self._held.lstrip()
            if not found.startswith(OPEN):
                if not OPEN.startswith(found):
                    self._tag = None
                return
            self._tag, self._held = CLOSE, found[len(OPEN) :]
        self.tokens = self._seen
        if CLOSE in self._held:
            self._tag = None
        self._held = self._held[1 - len(CLOSE) :]


@dataclass(frozen=True)
class Shape:
    """How one request's answer is dressed: as a chat's or as a completion's.

    Attributes:
        chat: the answer is a message, not a text.
        model: the name it is given under.
        spell: a token's text.
        echo: what is put before each answer, where that was asked for: its prompt, and that one's first token.
        scored: log-probabilities are told.
        thinks: whether an answer begins in the middle of a thought; None where there are none to split off.
        calls: makes what splits calls from an answer's text, held until they are whole or not; None: there are none.
        include_usage, continuous_usage: a stream tells its tokens at its end, or after all that it sends.
    """

    chat: bool
    model: str
    spell: Callable[[int], str]
    echo: Sequence[tuple[str, int]] = ()
    scored: bool = False
    thinks: bool | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    calls: Callable[[bool], CallParser] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int) -> dict[str, Any]:
        """A finished answer, or several; the prompts had ``prompt_tokens`` together, of the answers' own
        ``thought_tokens`` were thought."""
        choices = []
        for index, answer in enumerate(answers):
            prompt, scores = self.prompt(index, answer.prompt_scores)
            content: dict[str, Any] = {"text": prompt + answer.text}
            reason = answer.finish_reason
            if self.chat:
                message = self._parts(answer.text)
                reason = _reason(reason, "tool_calls" in message)
                content = {"message": {"role": "assistant", **message, "refusal": None}}
            logprobs, _ = self.logprobs([*scores, *(answer.scores or ())])
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": reason})
        spent = usage(answers, prompt_tokens, thought_tokens if self.chat else None)
        return {**self._head("chat.completion"), "choices": choices, "usage": spent}

    def _parts(self, text: str) -> dict[str, Any]:
        """A message's text, what was thought before it, and what it calls."""
        thought = ""
        if self.thinks is not None:
            thinking = Thinking(begun=self.thinks)
            thought, text = map("".join, zip(thinking.add(text), thinking.finish(), strict=True))
        message: dict[str, Any] = {"content": text}
        if thought:
            message["reasoning_content"] = thought
        if self.calls is not None:
            calls = self.calls(True)
            parts = [*calls.add(text), *calls.finish()]
            if calls.count:
                message["content"] = "".join(part for part in parts if isinstance(part, str)) or None
                message["tool_calls"] = whole_calls([part for part in parts if isinstance(part, CallDelta)])
        return message

    def growing(self, count: int) -> Growing:
        """The stream of so many answers."""
        return Growing(self, count)

    def usage(self, answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int) -> bytes:
        """The chunk that ``stream_options.include_usage`` asks for, if it does."""
        if not self.include_usage:
            return b""
        spent = usage(answers, prompt_tokens, thought_tokens if self.chat else None)
        if self.continuous_usage:
            # When events are read says little about how fast they were made: a busy reader finds several at once.
            spent["generation_seconds"] = max(answer.generation_seconds for answer in answers)
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": spent})

    def tally(self, tokens: int, prompt_tokens: int) -> bytes:
        """The chunk that ``stream_options.continuous_usage_stats`` asks for, if it does: tokens in and out so far."""
        if not self.continuous_usage:
            return b""
        head = self._head("chat.completion.chunk")
        return event(
            {**head, "choices": [], "usage": {**tokens_used(tokens, prompt_tokens, 0), "prompt_tokens_details": None}}
        )

    def prompt(self, index: int, scores: Sequence[TokenScore] | None) -> tuple[str, list[TokenScore | int]]:
        """An answer's prompt: its text and its tokens' scores, where they are told; of the first only the id."""
        if not self.echo:
            return "", []
        text, first = self.echo[index]
        return text, [] if scores is None else [first, *scores]

    def logprobs(self, scores: Sequence[TokenScore | int], offset: int = 0) -> tuple[dict[str, Any] | None, int]:
        """Tokens with their scores, the first of which is at this character; and the character after the last."""
        if not self.scored:
            return None, offset
        if self.chat:
            return chat_logprobs(scores, self.spell), offset
        return completion_logprobs(scores, self.spell, offset)

    def chunk(
        self,
        index: int,
        content: Mapping[str, Any],
        finish_reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        content = {"delta": content} if self.chat else content
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl-", kind) if self.chat else ("cmpl-", "text_completion")
        return {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.model}


class Growing:
    """Some answers of one request, piece by piece."""

    def __init__(self, shape: Shape, count: int) -> None:
        self._shape = shape
        self._begun = [False] * count
        self._ends = [0] * count  # of each answer's tokens so far, in characters
        self._thinking = None if shape.thinks is None else [Thinking(begun=shape.thinks) for _ in range(count)]
        self._calls = None if shape.calls is None else [shape.calls(False) for _ in range(count)]

    def opening(self) -> bytes:
        """What comes before an answer's first piece: a chat says whose turn it is."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._shape.chunk(index, role) for index in range(len(self._begun)) if self._shape.chat)

    def events(self, items: Sequence[tuple[int, Chunk]]) -> bytes:
        """What has come, in order: those pieces of an answer that came together as one."""
        pieces: dict[int, list[Chunk]] = {}
        for index, piece in items:
            pieces.setdefault(index, []).append(piece)
        return b"".join(self.piece(index, together) for index, together in pieces.items())

    def piece(self, index: int, pieces: Sequence[Chunk]) -> bytes:
        """Some pieces of an answer; the last one has a reason, and in a chat that is a chunk of its own."""
        shape, reason = self._shape, pieces[-1].finish_reason
        text = ""
        scores: list[TokenScore | int] = []
        if not self._begun[index]:
            text, scores = shape.prompt(index, pieces[0].prompt_scores)
            self._begun[index] = True
        text += "".join(piece.text for piece in pieces)
        scores += [piece.score for piece in pieces if piece.score is not None]
        logprobs, self._ends[index] = shape.logprobs(scores, self._ends[index])
        if not shape.chat:
            return shape.chunk(index, {"text": text}, reason, logprobs) if text or scores or reason else b""
        deltas = self._deltas(index, text, ended=reason is not None) or ([{}] if scores else [])
        told = [logprobs, *[None] * len(deltas)]  # with the first of what came together
        chunks = b"".join(shape.chunk(index, delta, None, told[at]) for at, delta in enumerate(deltas))
        if reason is None:
            return chunks
        called = self._calls is not None and self._calls[index].count > 0
        return chunks + shape.chunk(index, {}, _reason(reason, called))

    def tally(self, tokens: int, prompt_tokens: int) -> bytes:
        """What comes after the pieces so far."""
        return self._shape.tally(tokens, prompt_tokens)

    def closing(self, answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int) -> bytes:
        """What comes after the last piece."""
        return self._shape.usage(answers, prompt_tokens, thought_tokens) + DONE

    def failing(self, error: ApiError) -> bytes:
        """What comes instead of the rest."""
        return event(error.body) + DONE

    def _deltas(self, index: int, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """What some pieces add to a message, in order."""
        thought = ""
        if self._thinking is not None:
            thought, text = self._thinking[index].add(text)
            if ended:
                thought, text = map("".join, zip((thought, text), self._thinking[index].finish(), strict=True))
        parts: list[str | CallDelta] = [text] if text else []
        if self._calls is not None:
            parts = self._calls[index].add(text)
            if ended:
                parts += self._calls[index].finish()
        # Neighbours are one, but for a call's name, which comes before its arguments.
        deltas: list[dict[str, Any]] = [{"reasoning_content": thought}] if thought else []
        for called, group in itertools.groupby(parts, same_call):
            together = list(group)
            if called is None:
                said = {"content": "".join(map(str, together))}
                if deltas and "content" not in deltas[-1] and "tool_calls" not in deltas[-1]:
                    deltas[-1] |= said
                else:
                    deltas.append(said)
            else:
                deltas.append({"tool_calls": [call_delta([part for part in together if isinstance(part, CallDelta)])]})
        return deltas


def _reason(reason: str, called: bool) -> str:
    """Why a message ended, as OpenAI calls it."""
    return "tool_calls" if called and reason == "stop" else reason


def unsaid(piece: Chunk) -> Chunk:
    """The piece of an answer that was to have no token: without the one that ended its prompt."""
    answer = piece.generation
    if answer is not None:
        scores = None if answer.scores is None else ()
        answer = replace(answer, text="", token_ids=(), finish_reason="length", scores=scores)
    return replace(piece, text="", finish_reason="length", generation=answer, score=None)
