"""OpenAI's newer protocol, ``/v1/responses``: the part of it that one answer to one conversation needs.

    body -> as_chat_body -> requests.read_chat ... pieces -> response_shape.ResponseShape -> wire

Nothing is stored: a conversation comes whole with each request.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..generation.request import Chunk, Generation
from .answers import Thinking, to_json
from .errors import ApiError, bad
from .requests import RESPONSE, refuse_unsupported
from .tools import CallDelta, CallParser


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

    def events(self, items: Sequence[tuple[int, Chunk]]) -> bytes:
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


# This protocol's names of what a chat calls otherwise.
_RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
_PARTS = ("input_text", "output_text", "text")
_TOOL = ("name", "description", "parameters", "strict")
_MESSAGE = re.compile(r"messages\[(\d+)\]")


def as_chat_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """The body of ``/v1/chat/completions`` that asks for the same; and of each message the item that it comes from, -1
    for the instructions.

    Raises:
        ApiError: with the field named.
    """
    refuse_unsupported(body, RESPONSE)
    own = {"input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", *RESPONSE}
    chat = {name: value for name, value in body.items() if name not in own}
    chat["messages"], origins = _messages(body)
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
            raise bad("text", "an object with a format", other)
    tools, choice = body.get("tools"), body.get("tool_choice")
    chat["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    chat["tool_choice"] = choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    return chat, origins


def as_response_error(error: ApiError, origins: Sequence[int] = ()) -> ApiError:
    """A refusal of the chat's body, in this protocol's words."""
    told: dict[str, Any] = error.body["error"]

    def origin(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"messages[{origins[index]}]" if index < len(origins) else found[0]

    def ours(text: str) -> str:
        text = _MESSAGE.sub(origin, text).replace("].function", "]")
        theirs = next((name for name in _RENAMED if text.startswith(name)), None)
        return text if theirs is None else _RENAMED[theirs] + text[len(theirs) :]

    if told["param"] is not None:
        told["message"], told["param"] = ours(told["message"]), ours(told["param"])
    return error


def _tool(tool: Any) -> Any:
    """A function as a chat has it; anything else as it stands, to be refused there."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: tool[name] for name in _TOOL if name in tool}}


def _messages(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    given, instructions = body.get("input"), body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise bad("instructions", "a text", instructions)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad("input", "a text, or a list of messages", given)
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    origins = [-1] * len(messages)
    thought = ""  # of the assistant's message to come
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad(where, "an object with role and content", item)
        match item.get("type", "message"):
            case "reasoning":
                thought = _thought(item, where)
                continue
            case "message":
                message = {"role": item.get("role"), "content": _content(item.get("content"))}
            case "function_call":
                call = _call(item, where)
                if messages and messages[-1]["role"] == "assistant":  # a turn is one message
                    messages[-1].setdefault("tool_calls", []).append(call)
                    continue
                message = {"role": "assistant", "content": None, "tool_calls": [call]}
            case "function_call_output":
                message = {"role": "tool", "content": _output(item, where), "tool_call_id": _id(item, where)}
            case kind:
                raise ApiError(
                    400, f"{where}: this server does not have items of type {kind!r:.40}", param=where,
                    code="unsupported_parameter",
                )  # fmt: skip
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        messages.append(message)
        origins.append(index)
    return messages, origins


def _content(content: Any) -> Any:
    """A message's content as a chat has it."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _PARTS else part for part in content
    ]


def _output(item: Mapping[str, Any], where: str) -> Any:
    output = item.get("output")
    if not isinstance(output, (str, list)):
        raise bad(f"{where}.output", "a text, or a list of parts", output)
    return _content(output)


def _thought(item: Mapping[str, Any], where: str) -> str:
    match item.get("content"):
        case None:
            return ""
        case list(parts) if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
        case other:
            raise bad(f"{where}.content", "a list of parts of type reasoning_text", other)


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str):
        raise bad(f"{where}.name", "the function's name", name)
    if not isinstance(arguments, str):
        raise bad(f"{where}.arguments", "the JSON of an object, as a text", arguments)
    return {"id": _id(item, where), "type": "function", "function": {"name": name, "arguments": arguments}}


def _id(item: Mapping[str, Any], where: str) -> str:
    found = item.get("call_id")
    if not isinstance(found, str):
        raise bad(f"{where}.call_id", "the id of a call", found)
    return found
