"""OpenAI's answers: what a finished or a growing answer looks like on the wire. Plain data, no HTTP."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model import Generation

__all__ = ["DONE", "Shape", "event", "to_json", "usage"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """How one request's answer is dressed: as a chat's or as a completion's.

    Attributes:
        chat: the answer is a message, not a text.
        model: the name it is given under.
    """

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Generation], prompt_tokens: int) -> dict[str, Any]:
        """A finished answer, or several; the prompts had ``prompt_tokens`` together."""
        choices = []
        for index, answer in enumerate(answers):
            content: dict[str, Any] = {"text": answer.text}
            if self.chat:
                content = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": answer.finish_reason})
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(answers, prompt_tokens)}

    def opening(self, index: int) -> bytes | None:
        """What comes before an answer's first piece: a chat says whose turn it is."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """A piece of an answer; the last one has a reason, and in a chat it is a chunk of its own."""
        if not self.chat:
            return self._chunk(index, {"text": text}, finish_reason)
        chunks = self._chunk(index, {"content": text}, None) if text else b""
        return chunks if finish_reason is None else chunks + self._chunk(index, {}, finish_reason)

    def usage(self, answers: Sequence[Generation], prompt_tokens: int) -> bytes:
        """The chunk that ``stream_options.include_usage`` asks for."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(answers, prompt_tokens)})

    def _chunk(self, index: int, content: Mapping[str, Any], finish_reason: str | None) -> bytes:
        content = {"delta": content} if self.chat else content
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl-", kind) if self.chat else ("cmpl-", "text_completion")
        return {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.model}


def usage(answers: Sequence[Generation], prompt_tokens: int) -> dict[str, Any]:
    """Tokens in and out. Nothing is taken from an earlier request's cache."""
    completion = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
