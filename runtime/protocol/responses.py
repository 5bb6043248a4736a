"""OpenAI's ``/v1/responses``, without stored state: one answer to one conversation."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from ..generation.request import Chunk, Generation
from .formatter import Context, Formatter, to_json
from .requests import (
    IGNORED,
    UNSUPPORTED,
    ApiError,
    ChatRequest,
    FieldError,
    GenerationRequest,
    Message,
    Strict,
    validated,
)
from .tools import Delta

# Chat completions' field -> this API's field, for errors.
_RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_RENAMED |= {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}

# Item type -> prefix of its id, name of its text events, further fields of these.
_ITEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reasoning": ("rs", "reasoning_text", {"content_index": 0}),
    "message": ("msg", "output_text", {"content_index": 0, "logprobs": []}),
    "function_call": ("fc", "function_call_arguments", {}),
}
# Fields of the request that the response repeats.
_REPEATED = ("tool_choice", "tools", "instructions", "max_output_tokens", "temperature", "top_p")


class ReasoningPart(Strict):
    text: str


class ReasoningItem(Strict):
    content: list[ReasoningPart] = Field([])


class CallItem(Strict):
    name: str
    arguments: str
    call_id: str


class ResultItem(Strict):
    output: Any
    call_id: str


class ResponsesRequest(GenerationRequest):
    """``/v1/responses``; also accepts the other fields of chat completions."""

    ignored: ClassVar = IGNORED | ChatRequest.model_fields.keys()
    unsupported: ClassVar = {
        **{field: neutral for field, neutral in UNSUPPORTED.items() if field != "reasoning"},
        "background": (False,),
        "conversation": (),
        # Thoughts are sent unencrypted.
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    n: int = Field(1, ge=1, le=1)
    input: list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**63 - 1)
    text: dict[str, Any] = Field({})
    reasoning: dict[str, Any] = Field({}, description="effort; summary is not read")
    tools: list[dict[str, Any]] = Field([], max_length=128)
    tool_choice: Any = "auto"

    @field_validator("input", mode="before", json_schema_input_type=str | list[dict[str, Any]])
    @classmethod
    def _one_message(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("text")
    @classmethod
    def _without_verbosity(cls, text: dict[str, Any]) -> dict[str, Any]:
        if text.get("verbosity") not in (None, "medium"):
            raise FieldError("verbosity", "this server does not have it; leave it out")
        return text

    def as_chat(self) -> ChatRequest:
        """Convert to a chat completion; raises ApiError with the chat's field names."""
        own = {"input", "instructions", "max_output_tokens", "text", "reasoning", *self.unsupported}
        body = {**self.model_dump(exclude_unset=True, by_alias=True, exclude=own), **(self.model_extra or {})}
        body["messages"] = self._messages()
        body["max_completion_tokens"] = self.max_output_tokens
        body["reasoning_effort"] = self.reasoning.get("effort", body.get("reasoning_effort"))
        match self.text.get("format"):
            case {"type": "json_schema"} as text_format:
                body["response_format"] = {"type": "json_schema", "json_schema": text_format}
            case text_format if text_format is not None:
                body["response_format"] = text_format
        body["tools"] = [
            {"type": tool.get("type"), "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in self.tools
        ]
        match self.tool_choice:
            case {"type": "function", "name": name}:
                body["tool_choice"] = {"type": "function", "function": {"name": name}}
        return validated(ChatRequest, body)

    def _messages(self) -> list[Message]:
        messages: list[tuple[str, dict[str, Any]]] = []  # path in the body, message
        if self.instructions:
            messages.append(("instructions", {"role": "system", "content": self.instructions}))
        thought = ""  # of the assistant's next message
        for index, item in enumerate(self.input):
            where = f"input[{index}]"
            match item.get("type", "message"):
                case "reasoning":
                    thought = "".join(part.text for part in validated(ReasoningItem, item, where).content)
                    continue
                case "message":
                    message = {"role": item.get("role"), "content": _content(item.get("content"))}
                case "function_call":
                    called = validated(CallItem, item, where)
                    function = {"name": called.name, "arguments": called.arguments}
                    call = {"id": called.call_id, "type": "function", "function": function}
                    if messages and messages[-1][1]["role"] == "assistant":  # a turn is one message
                        messages[-1][1].setdefault("tool_calls", []).append(call)
                        continue
                    message = {"role": "assistant", "tool_calls": [call]}
                case "function_call_output":
                    result = validated(ResultItem, item, where)
                    message = {"role": "tool", "content": _content(result.output), "tool_call_id": result.call_id}
                case kind:
                    why = f"{where}: this server does not have items of type {kind!r:.40}"
                    raise ApiError(400, why, param=where, code="unsupported_parameter")
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            messages.append((where, message))
        return [validated(Message, message, where) for where, message in messages]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    return [{**one, "type": "text"} if isinstance(one, dict) and one.get("type") in texts else one for one in content]


def renamed(error: ApiError) -> ApiError:
    """Rename a chat completion's fields in an error to this API's."""
    param = error.error["param"]
    if param is not None:
        name = param.replace("].function", "]")
        for chat, field in _RENAMED.items():
            name = field + name.removeprefix(chat) if name.startswith(chat) else name
        error.error |= {"param": name, "message": str(error.error["message"]).replace(param, name, 1)}
    return error


class ResponsesFormatter(Formatter):
    """``/v1/responses``: the answer is a list of items; deltas extend the last one."""

    id_prefix = "resp_"

    def __init__(self, request: ResponsesRequest, context: Context) -> None:
        super().__init__(request, context)
        self._parser = self._parsers[0]
        self._events_sent = 0
        self._item_open = False  # whether the last item is unfinished
        self._text = ""  # of the last item
        self._items: list[dict[str, Any]] = []

    def start(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response()) for kind in kinds)

    def events(self, items: Sequence[tuple[int, Chunk]]) -> bytes:
        return b"".join(self._add(delta) for delta in self._parser.add([chunk for _, chunk in items]))

    def end(self, answers: Sequence[Generation]) -> bytes:
        cut = answers[0].finish_reason == "length"
        events = b"" if self._items else self._begin_item("message")  # there is at least one item, maybe empty
        events += self._end_item("incomplete" if cut else "completed")
        response = self._response(answers[0])
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        fields = {name: error.error[name] for name in ("code", "message", "param")}
        failed = {"status": "failed", "error": {"code": "server_error", "message": fields["message"]}}
        return self._event("error", **fields) + self._event("response.failed", response={**self._response(), **failed})

    def complete(self, items: Sequence[tuple[int, Chunk]], answers: Sequence[Generation]) -> dict[str, Any]:
        self.events(items)
        self.end(answers)
        return self._response(answers[0])

    def _response(self, answer: Generation | None = None) -> dict[str, Any]:
        """The response object, complete if ``answer`` is its result."""
        request, extra = self._request, self._request.model_extra or {}
        status, usage, incomplete = "in_progress", None, None
        if answer is not None:
            incomplete = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
            status = "incomplete" if incomplete else "completed"
            usage = {
                "input_tokens": self._context.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": len(answer.token_ids),
                "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
                "total_tokens": self._context.prompt_tokens + len(answer.token_ids),
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._context.model,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": self._items,
            "usage": usage,
            "parallel_tool_calls": extra.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "text": request.text or {"format": {"type": "text"}},
            "truncation": "disabled",
            **{name: getattr(request, name) for name in _REPEATED},
            "metadata": extra.get("metadata"),
            "user": extra.get("user"),
        }

    def _add(self, delta: Delta) -> bytes:
        """The events of a delta, which extends the last item or begins another one."""
        kind = {"content": "message", "tool_call": "function_call"}.get(delta.kind, delta.kind)
        if delta.name is not None:
            return self._begin_item(kind, name=delta.name, call_id=delta.id)
        events = b"" if self._item_open and self._items[-1]["type"] == kind else self._begin_item(kind)
        self._text += delta.text
        return events + self._text_event("delta", delta=delta.text)

    def _begin_item(self, kind: str, **more: Any) -> bytes:
        events = self._end_item("completed") if self._item_open else b""
        self._item_open, self._text = True, ""
        fields: dict[str, dict[str, Any]] = {
            "reasoning": {"summary": [], "content": []},
            "message": {"role": "assistant", "content": []},
            "function_call": {**more, "arguments": ""},
        }
        id = f"{_ITEMS[kind][0]}_{uuid.uuid4().hex}"
        self._items.append({**fields[kind], "id": id, "type": kind, "status": "in_progress"})
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        return events + (b"" if kind == "function_call" else self._part_event("added"))

    def _end_item(self, status: str) -> bytes:
        item, self._item_open = self._items[-1], False
        if item["type"] == "function_call":
            item["arguments"] = self._text
            events = self._text_event("done", arguments=self._text, name=item["name"])
        else:
            item["content"] = [self._part()]
            events = self._text_event("done", text=self._text) + self._part_event("done")
        item["status"] = status
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part(self) -> dict[str, Any]:
        """The content part of the last item."""
        part = {"type": _ITEMS[self._items[-1]["type"]][1], "text": self._text}
        return part if part["type"] == "reasoning_text" else {**part, "annotations": [], "logprobs": []}

    def _part_event(self, what: str) -> bytes:
        return self._item_event(f"response.content_part.{what}", content_index=0, part=self._part())

    def _text_event(self, what: str, **more: Any) -> bytes:
        _, name, fields = _ITEMS[self._items[-1]["type"]]
        return self._item_event(f"response.{name}.{what}", **more, **fields)

    def _item_event(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._events_sent, **more})
        self._events_sent += 1
        return f"event: {kind}\n".encode() + b"data: " + data + b"\n\n"
