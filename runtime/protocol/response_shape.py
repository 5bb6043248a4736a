"""What an answer looks like as a response of ``/v1/responses``: items, and the events in which they grow.

Items come in the order in which the model writes: what it thinks, what it says, what it calls.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..generation.answer import Generation, Piece
from .call_deltas import CallDelta
from .calls import CallParser
from .errors import ApiError
from .events import to_json
from .thinking import Thinking

__all__ = ["ResponseGrowing", "ResponseShape"]


@dataclass(frozen=True)
class ResponseShape:
    """How an answer is dressed as a response; the same calls as ``answers.Shape`` has.

    Attributes:
        model: the name it is given under.
        asked: the request's body, some of which is told again.
        thinks, calls: as for ``answers.Shape``.
    """

    model: str
    asked: Mapping[str, Any]
    thinks: bool | None
    calls: Callable[[bool], CallParser] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int) -> dict[str, Any]:
        """A finished response."""
        growing = ResponseGrowing(self, held=True)
        growing.add(answers[0].text, ended=True)
        growing.close(answers[0])
        return self.response(growing.items, answers[0], prompt_tokens, thought_tokens)

    def growing(self, count: int) -> ResponseGrowing:
        """The stream of the one answer."""
        return ResponseGrowing(self, held=False)

    def response(
        self,
        items: Sequence[Mapping[str, Any]],
        answer: Generation | None = None,
        prompt_tokens: int = 0,
        thought_tokens: int = 0,
    ) -> dict[str, Any]:
        """The response with its answer, or before it has one."""
        status, usage = "in_progress", None
        cut = answer is not None and answer.finish_reason == "length"
        if answer is not None:
            status = "incomplete" if cut else "completed"
            usage = {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": len(answer.token_ids),
                "output_tokens_details": {"reasoning_tokens": thought_tokens},
                "total_tokens": prompt_tokens + len(answer.token_ids),
            }
        told = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
        several = self.asked.get("parallel_tool_calls")
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(items),
            "usage": usage,
            "parallel_tool_calls": several is not False,
            "previous_response_id": None,
            "store": False,
            "text": self.asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": self.asked.get("tool_choice") or "auto",
            "tools": self.asked.get("tools") or [],
            "truncation": "disabled",
            **{name: self.asked.get(name) for name in told},
        }


class ResponseGrowing:
    """A response, event by event.

    Args:
        held: its calls are told when they are whole; see ``CallParser``.

    Attributes:
        items: finished ones, the last of which may be growing.
    """

    def __init__(self, shape: ResponseShape, *, held: bool) -> None:
        self._shape = shape
        self._number = 0
        self._thinking = None if shape.thinks is None else Thinking(begun=shape.thinks)
        self._calls = None if shape.calls is None else shape.calls(held)
        self._text = ""  # of the item that grows
        self._open = False
        self.items: list[dict[str, Any]] = []

    def opening(self) -> bytes:
        """What comes before the first piece."""
        response = self._shape.response([])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, items: Sequence[tuple[int, Piece]]) -> bytes:
        """What has come, as few events as it takes."""
        text = "".join(piece.text for _, piece in items)
        return self.add(text, ended=items[-1][1].finish_reason is not None)

    def add(self, text: str, *, ended: bool) -> bytes:
        """What some more of the answer's text adds."""
        thought = ""
        if self._thinking is not None:
            thought, text = self._thinking.add(text)
            if ended:
                held = self._thinking.finish()
                thought, text = thought + held[0], text + held[1]
        parts: list[str | CallDelta] = [text] if text else []
        if self._calls is not None:
            parts = self._calls.add(text)
            if ended:
                parts += self._calls.finish()
        events = self._grow("reasoning", thought) if thought else b""
        said = ""
        for part in parts:
            if isinstance(part, str):
                said += part
                continue
            if said:
                events += self._grow("message", said)
                said = ""
            if part.name is not None:
                events += self._begin("function_call", name=part.name, call_id=part.id)
            if part.text:
                events += self._grow("function_call", part.text)
        return events + (self._grow("message", said) if said else b"")

    def tally(self, tokens: int, prompt_tokens: int) -> bytes:
        """What comes after the pieces so far: nothing, the last event has the count."""
        return b""

    def close(self, answer: Generation) -> bytes:
        """End the last item; there is one, though it may be empty."""
        events = b"" if self.items else self._begin("message")
        return events + self._end("incomplete" if answer.finish_reason == "length" else "completed")

    def closing(self, answers: Sequence[Generation], prompt_tokens: int, thought_tokens: int) -> bytes:
        """What comes after the last piece."""
        events = self.close(answers[0])
        response = self._shape.response(self.items, answers[0], prompt_tokens, thought_tokens)
        return events + self._event(f"response.{response['status']}", response=response)

    def failing(self, error: ApiError) -> bytes:
        """What comes instead of the rest."""
        told = error.body["error"]
        about = {name: told[name] for name in ("code", "message", "param")}
        failed = {"status": "failed", "error": {"code": "server_error", "message": told["message"]}}
        response = {**self._shape.response(self.items), **failed}
        return self._event("error", **about) + self._event("response.failed", response=response)

    def _begin(self, kind: str, **more: Any) -> bytes:
        """Another item, after those that there are."""
        events = self._end("completed") if self._open else b""
        self._open, self._text = True, ""
        about: dict[str, Any] = {
            "reasoning": {"id": "rs", "summary": [], "content": []},
            "message": {"id": "msg", "role": "assistant", "content": []},
            "function_call": {"id": "fc", **more, "arguments": ""},
        }[kind]
        self.items.append({**about, "id": f"{about['id']}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"})
        events += self._event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])
        if kind == "function_call":
            return events
        return events + self._of_item("response.content_part.added", content_index=0, part=self._part())

    def _grow(self, kind: str, text: str) -> bytes:
        """More of the item that grows, if it is of this kind; else of another one."""
        events = b"" if self._open and self.items[-1]["type"] == kind else self._begin(kind)
        self._text += text
        match kind:
            case "function_call":
                return events + self._of_item("response.function_call_arguments.delta", delta=text)
            case "reasoning":
                return events + self._of_item("response.reasoning_text.delta", content_index=0, delta=text)
        return events + self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _end(self, status: str) -> bytes:
        """The item that grows is done; those before it are."""
        item, text, self._open = self.items[-1], self._text, False
        match item["type"]:
            case "function_call":
                events = self._of_item("response.function_call_arguments.done", arguments=text, name=item["name"])
                item["arguments"] = text
            case "reasoning":
                events = self._of_item("response.reasoning_text.done", content_index=0, text=text)
            case _:
                events = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
        if "content" in item:
            part = self._part()
            item["content"] = [part]
            events += self._of_item("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        return events + self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _part(self) -> dict[str, Any]:
        """The one part of the item that grows."""
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _of_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        data = to_json({"type": kind, "sequence_number": self._number - 1, **more})
        return f"event: {kind}\n".encode() + b"data: " + data + b"\n\n"
