"""OpenAI's newer protocol, ``/v1/responses``: the part of it that one answer to one conversation needs.

    body -> as_chat_body -> protocol.read_chat ... pieces -> ResponseShape -> wire

Nothing is stored: a conversation comes whole with each request.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..generation.answer import Generation, Piece
from .answers import to_json
from .protocol import ApiError
from .thinking import Thinking

__all__ = ["ResponseGrowing", "ResponseShape", "as_chat_body", "as_response_error"]

# What would change the answer, or need an earlier one; and the values that would not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# This protocol's names of what a chat calls otherwise.
_RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
_PARTS = ("input_text", "output_text", "text")


def as_chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of ``/v1/chat/completions`` that asks for the same.

    Raises:
        ApiError: with the field named.
    """
    for name, neutral in _NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(
                400, f"{name}: this server does not have it; leave it out", param=name, code="unsupported_parameter"
            )
    own = {"input", "instructions", "max_output_tokens", "text", *_NEUTRAL}
    chat = {name: value for name, value in body.items() if name not in own}
    chat["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    match body.get("text"):
        case None | {"format": None}:
            pass
        case {"format": {"type": "json_schema"} as wanted}:
            chat["response_format"] = {"type": "json_schema", "json_schema": wanted}
        case {"format": wanted}:
            chat["response_format"] = wanted
        case dict():
            pass
        case other:
            raise _bad("text", "an object with a format", other)
    return chat


def as_response_error(error: ApiError) -> ApiError:
    """A refusal of the chat's body, in this protocol's words."""
    told: dict[str, Any] = error.body["error"]
    for theirs, ours in _RENAMED.items():
        if str(told["param"]).startswith(theirs):
            told["param"] = ours + told["param"][len(theirs) :]
            told["message"] = told["message"].replace(theirs, ours)
    return error


def _messages(body: Mapping[str, Any]) -> list[Any]:
    given, instructions = body.get("input"), body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise _bad("instructions", "a text", instructions)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _bad("input", "a text, or a list of messages", given)
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [_message(item, f"input[{index}]") for index, item in enumerate(given)]
    return [*system, *(message for message in messages if message is not None)]


def _message(item: Any, where: str) -> Any:
    """A message as a chat has it; None for a thought of an earlier answer, which no template wants back."""
    if not isinstance(item, dict):
        raise _bad(where, "an object with role and content", item)
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind != "message":
        raise ApiError(400, f"{where}: this server does not have items of type {kind!r:.40}", param=where)
    content = item.get("content")
    if isinstance(content, list):
        content = [
            {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _PARTS else part
            for part in content
        ]
    return {"role": item.get("role"), "content": content}


def _bad(name: str, expected: str, found: Any) -> ApiError:
    return ApiError(400, f"{name}: expected {expected}, found {found!r:.80}", param=name, code="invalid_value")


@dataclass(frozen=True)
class ResponseShape:
    """How an answer is dressed as a response; the same calls as ``answers.Shape`` has.

    Attributes:
        model: the name it is given under.
        asked: the request's body, some of which is told again.
        thinks: as for ``answers.Shape``.
    """

    model: str
    asked: Mapping[str, Any]
    thinks: bool | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Generation], prompt_tokens: int) -> dict[str, Any]:
        """A finished response."""
        (answer,) = answers
        thought, text = "", answer.text
        if self.thinks is not None:
            thinking = Thinking(begun=self.thinks)
            thought, text = map("".join, zip(thinking.add(text), thinking.finish(), strict=True))
        return self.response(thought, text, answer, prompt_tokens)

    def growing(self, count: int) -> ResponseGrowing:
        """The stream of the one answer."""
        return ResponseGrowing(self)

    def message(self, text: str | None, *, status: str) -> dict[str, Any]:
        """The message; without a text it has no part yet."""
        content = [] if text is None else [self.part(text)]
        return {"id": f"msg_{self.id}", "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def response(
        self, thought: str, text: str, answer: Generation | None = None, prompt_tokens: int = 0
    ) -> dict[str, Any]:
        """The response with its answer, or before it has one."""
        status, output, usage = "in_progress", [], None
        cut = answer is not None and answer.finish_reason == "length"
        if answer is not None:
            status = "incomplete" if cut else "completed"
            if thought:
                inside = [{"type": "reasoning_text", "text": thought}]
                output.append({"id": f"rs_{self.id}", "type": "reasoning", "summary": [], "content": inside})
            output.append(self.message(text, status=status))
            usage = {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": len(answer.token_ids),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt_tokens + len(answer.token_ids),
            }
        told = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": usage,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "text": self.asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            **{name: self.asked.get(name) for name in told},
        }


class ResponseGrowing:
    """A response, event by event."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._number = 0
        self._thinking = None if shape.thinks is None else Thinking(begun=shape.thinks)
        self._thoughts: list[str] = []
        self._texts: list[str] = []

    def opening(self) -> bytes:
        """What comes before the first piece."""
        shape = self._shape
        response = shape.response("", "")
        message = shape.message(None, status="in_progress")
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=message),
                self._part("response.content_part.added", part=shape.part("")),
            )
        )

    def events(self, items: Sequence[tuple[int, Piece]]) -> bytes:
        """What has come, as one event."""
        text, thought = "".join(piece.text for _, piece in items), ""
        if self._thinking is not None:
            thought, text = self._thinking.add(text)
            if items[-1][1].finish_reason is not None:
                held = self._thinking.finish()
                thought, text = thought + held[0], text + held[1]
        self._thoughts.append(thought)
        self._texts.append(text)
        return self._part("response.output_text.delta", delta=text, logprobs=[]) if text else b""

    def tally(self, tokens: int, prompt_tokens: int) -> bytes:
        """What comes after the pieces so far: nothing, the last event has the count."""
        return b""

    def closing(self, answers: Sequence[Generation], prompt_tokens: int) -> bytes:
        """What comes after the last piece."""
        shape, text = self._shape, "".join(self._texts)
        response = shape.response("".join(self._thoughts), text, answers[0], prompt_tokens)
        message = response["output"][-1]
        return b"".join(
            (
                self._part("response.output_text.done", text=text, logprobs=[]),
                self._part("response.content_part.done", part=shape.part(text)),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def _part(self, kind: str, **more: Any) -> bytes:
        item = self._shape.message(None, status="")["id"]
        return self._event(kind, item_id=item, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        data = to_json({"type": kind, "sequence_number": self._number - 1, **more})
        return f"event: {kind}\n".encode() + b"data: " + data + b"\n\n"
