"""OpenAI's ``/v1/responses``, without stored state: one answer to one conversation."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from ..generation.request import Generation
from . import requests as api
from .formatter import Formatter, Item, event

# Kind of item -> prefix of its id, its type, name of its text events, further fields of these.
_ITEMS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "reasoning": ("rs", "reasoning", "reasoning_text", {"content_index": 0}),
    "content": ("msg", "message", "output_text", {"content_index": 0, "logprobs": []}),
    "tool_call": ("fc", "function_call", "function_call_arguments", {}),
}
# Fields of the request that the response repeats.
_REPEATED = ("tool_choice", "tools", "instructions", "max_output_tokens", "temperature", "top_p")


class ReasoningPart(api.Strict):
    text: str


class ReasoningItem(api.Strict):
    content: list[ReasoningPart] = Field([])


class CallItem(api.Strict):
    name: str
    arguments: str
    call_id: str


class ResultItem(api.Strict):
    output: Any
    call_id: str


class Reasoning(api.Strict):
    effort: str | None = None


class _Chat(api.ChatRequest):
    prompt_field: ClassVar = "input"


class ResponsesRequest(api.GenerationRequest):
    """``/v1/responses``; also accepts the other fields of chat completions."""

    ignored: ClassVar = api.IGNORED | api.ChatRequest.model_fields.keys()
    unsupported: ClassVar = {
        **{field: neutral for field, neutral in api.UNSUPPORTED.items() if field != "reasoning"},
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
    reasoning: Reasoning = Field(Reasoning(), description="effort; summary is not read")
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
            raise api.FieldError("verbosity", "this server does not have it; leave it out")
        return text

    def as_chat(self) -> api.ChatRequest:
        """Convert to a chat completion; raises ApiError."""
        own = {"input", "instructions", "max_output_tokens", "text", "reasoning", *self.unsupported}
        body = {**self.model_dump(exclude_unset=True, by_alias=True, exclude=own), **(self.model_extra or {})}
        body["messages"] = self._messages()
        body["max_completion_tokens"] = self.max_output_tokens
        body["reasoning_effort"] = self.reasoning.effort or body.get("reasoning_effort")
        if (text_format := self.text.get("format")) is not None:
            body["response_format"] = api.as_response_format(text_format, "text.format")
        body["tools"] = []
        for index, tool in enumerate(self.tools):
            where, kind = f"tools[{index}]", tool.get("type")
            function: Any = {key: value for key, value in tool.items() if key != "type"}
            if kind == "function":
                function = api.validated(api.Function, function, where)
            body["tools"].append(api.validated(api.Tool, {"type": kind, "function": function}, where))
        match self.tool_choice:
            case {"type": "function", "name": name}:
                body["tool_choice"] = {"type": "function", "function": {"name": name}}
        return api.validated(_Chat, body)

    def _messages(self) -> list[api.Message]:
        messages: list[tuple[str, dict[str, Any]]] = []  # path in the body, message
        if self.instructions:
            messages.append(("instructions", {"role": "system", "content": self.instructions}))
        thought = ""  # of the assistant's next message
        for index, item in enumerate(self.input):
            where = f"input[{index}]"
            match item.get("type", "message"):
                case "reasoning":
                    thought = "".join(part.text for part in api.validated(ReasoningItem, item, where).content)
                    continue
                case "message":
                    message = {"role": item.get("role"), "content": _content(item.get("content"))}
                case "function_call":
                    called = api.validated(CallItem, item, where)
                    function = {"name": called.name, "arguments": called.arguments}
                    call = {"id": called.call_id, "type": "function", "function": function}
                    if messages and messages[-1][1]["role"] == "assistant":  # a turn is one message
                        messages[-1][1].setdefault("tool_calls", []).append(call)
                        continue
                    message = {"role": "assistant", "tool_calls": [call]}
                case "function_call_output":
                    result = api.validated(ResultItem, item, where)
                    message = {"role": "tool", "content": _content(result.output), "tool_call_id": result.call_id}
                case kind:
                    why = f"{where}: this server does not have items of type {kind!r:.40}"
                    raise api.ApiError(400, why, param=where, code="unsupported_parameter")
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            messages.append((where, message))
        if not messages:
            raise api.ApiError(400, "input: expected a message, found none", param="input", code="invalid_value")
        return [api.validated(api.Message, message, where) for where, message in messages]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    return [{**one, "type": "text"} if isinstance(one, dict) and one.get("type") in texts else one for one in content]


class ResponsesFormatter(Formatter):
    """``/v1/responses``."""

    id_prefix, _events_sent = "resp_", 0

    def start(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self.response()) for kind in kinds)

    def failure(self, error: api.ApiError) -> bytes:
        fields = {name: error.error[name] for name in ("code", "message", "param")}
        failed = {"status": "failed", "error": {"code": "server_error", "message": fields["message"]}}
        return self._event("error", **fields) + self._event("response.failed", response={**self.response(), **failed})

    def response_events(self, answer: Generation) -> bytes:
        response = self.response(answer)
        return self._event(f"response.{response['status']}", response=response)

    def response(self, answer: Generation | None = None) -> dict[str, Any]:
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
            "output": [*map(_output, self._parsers[0].items)],
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

    def item_events(self, what: str, item: Item, text: str) -> bytes:
        prefix, _, name, fields = _ITEMS[item.kind]
        index, is_call = len(self._parsers[0].items) - 1, item.kind == "tool_call"
        at = {"item_id": f"{prefix}_{item.uid}", "output_index": index}
        if what == "delta":
            return self._event(f"response.{name}.delta", delta=text, **at, **fields)
        if what == "begin":
            events = self._event("response.output_item.added", output_index=index, item=_output(item))
            added = "response.content_part.added"
            return events if is_call else events + self._event(added, content_index=0, part=_part(item), **at)
        whole = {"arguments": item.text, "name": item.name} if is_call else {"text": item.text}
        events = self._event(f"response.{name}.done", **whole, **at, **fields)
        if not is_call:
            events += self._event("response.content_part.done", content_index=0, part=_part(item), **at)
        return events + self._event("response.output_item.done", output_index=index, item=_output(item))

    def _event(self, kind: str, **more: Any) -> bytes:
        self._events_sent += 1
        return event(kind, sequence_number=self._events_sent - 1, **more)


def _part(item: Item) -> dict[str, Any]:
    part = {"type": _ITEMS[item.kind][2], "text": item.text}
    return part if item.kind == "reasoning" else {**part, "annotations": [], "logprobs": []}


def _output(item: Item) -> dict[str, Any]:
    prefix, kind, _, _ = _ITEMS[item.kind]
    ended = item.status != "in_progress"
    fields: dict[str, dict[str, Any]] = {
        "reasoning": {"summary": []},
        "message": {"role": "assistant"},
        "function_call": {"name": item.name, "call_id": item.id, "arguments": item.text if ended else ""},
    }
    content = {} if kind == "function_call" else {"content": [_part(item)] if ended else []}
    return {"id": f"{prefix}_{item.uid}", "type": kind, "status": item.status, **fields[kind], **content}
