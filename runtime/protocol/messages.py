"""Anthropic's ``/v1/messages``: conversion of requests to chat completions, and responses as content blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ..generation.request import Generation
from . import requests as api
from .formatter import Formatter, Item, event

PATH = "/v1/messages"
# Claude Code's first system block. It differs in each request, which would defeat the prefix cache.
_BILLING = "x-anthropic-billing-header:"
_STATUS = {429: 529, 501: 400}  # clients retry after 5xx
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 529: "overloaded_error"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {"content": "text", "reasoning": "thinking", "tool_call": "tool_use"}  # kind of item -> type of block


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise api.invalid("", "a block of type text, as this server reads text alone", block)
    return "".join(block["text"] for block in content)


def _without_billing(system: Any) -> Any:
    if not isinstance(system, list):
        return system
    return [block for block in system if not (isinstance(block, dict) and str(block.get("text")).startswith(_BILLING))]


_Text = Annotated[str, BeforeValidator(_joined, str | list[dict[str, Any]])]
_OR_TEXT = BeforeValidator(
    lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value, str | list[dict[str, Any]]
)


class TextBlock(api.Strict):
    text: str


class ThinkingBlock(api.Strict):
    thinking: str = ""


class ToolUseBlock(api.Strict):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(api.Strict):
    tool_use_id: str
    content: _Text = ""
    is_error: bool = False


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
# By role, the types of blocks that its messages may have.
_THOUGHTS: Mapping[str, type[Block]] = dict.fromkeys(("thinking", "redacted_thinking"), ThinkingBlock)
_BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, **_THOUGHTS, "tool_use": ToolUseBlock},
}


class InputMessage(api.Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[dict[str, Any]], _OR_TEXT]

    def blocks(self, where: str) -> list[Block]:
        """The content's blocks; ``where``: the message's path in the body. Raises ApiError."""
        blocks: list[Block] = []
        known = _BLOCKS[self.role]
        for index, block in enumerate(self.content):
            path, kind = f"{where}.content[{index}]", str(block.get("type"))
            if kind not in known:
                expected = f"{' or '.join(known)}, as this server reads text alone"
                why = f"{path}: expected a block of type {expected}, found {kind!r:.40}"
                raise api.ApiError(400, why, param=path, code="unsupported_content")
            blocks.append(api.validated(known[kind], block, path))
        return blocks


class ToolParam(api.Strict):
    type: Literal["custom"] = Field("custom", description="this server runs no tools of its own")
    name: api.FunctionName
    description: str = ""
    input_schema: api.ObjectSchema


class ToolChoice(api.Strict):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(api.Strict):
    type: Literal["enabled", "disabled", "adaptive"] = "disabled"
    budget_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None


class CountTokensRequest(api.GenerationRequest):
    """``/v1/messages/count_tokens``."""

    unsupported: ClassVar = {
        **{field: neutral for field, neutral in api.UNSUPPORTED.items() if field != "thinking"},
        "container": (),
        "mcp_servers": ([],),
        "output_format": (),
    }

    n: int = Field(1, ge=1, le=1)
    messages: list[InputMessage] = Field(min_length=1)
    system: Annotated[_Text, BeforeValidator(_without_billing, str | list[dict[str, Any]])] = ""
    tools: list[ToolParam] = Field([], max_length=128)
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Field(Thinking(), description="the template's switch, and the limit of the thought")
    output_config: dict[str, Any] = Field({}, description="format; effort is not read")
    chat_template_kwargs: dict[str, Any] = Field({})

    @model_validator(mode="after")
    def _has_the_tool(self) -> Self:
        names, name = [tool.name for tool in self.tools], self.tool_choice.name
        if self.tool_choice.type == "tool" and name not in names:
            raise api.invalid("tool_choice.name", "the name of one of the tools", name)
        if self.tool_choice.type == "any" and not names:
            raise api.invalid("tool_choice", "tools, one of which has to be called", "none")
        return self

    @property
    def thinks(self) -> bool:
        return self.thinking.type != "disabled"

    def as_chat(self) -> api.ChatRequest:
        """Convert to a chat completion; raises ApiError."""
        body = self.model_dump(exclude_unset=True, by_alias=True, include=set(api.GenerationRequest.model_fields))
        body["messages"] = self._messages()
        thinks = self.thinks
        switches = {"enable_thinking": thinks, "thinking": thinks}
        given = self.chat_template_kwargs
        body["chat_template_kwargs"] = given if switches.keys() & given.keys() else {**switches, **given}
        body["thinking_token_budget"] = self.thinking.budget_tokens if thinks else None
        if (output_format := self.output_config.get("format")) is not None:
            body["response_format"] = api.as_response_format(output_format, "output_config.format")
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in self.tools
        ]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        named = {"type": "function", "function": {"name": self.tool_choice.name}}
        body["tool_choice"] = {"any": "required", "tool": named}.get(self.tool_choice.type, self.tool_choice.type)
        body["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return api.validated(api.ChatRequest, body)

    def _messages(self) -> list[dict[str, Any]]:
        """Messages of a chat completion: one for each tool result, and one for adjacent messages of the same role."""
        chat: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for number, message in enumerate(self.messages):
            for index, block in enumerate(message.blocks(f"messages[{number}]")):
                if isinstance(block, ToolResultBlock):
                    text = f"Error: {block.content}" if block.is_error else block.content
                    chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
                    continue
                if not chat or chat[-1]["role"] != message.role:
                    chat.append({"role": message.role, "content": ""})
                elif index == 0 and chat[-1]["content"]:
                    chat[-1]["content"] += "\n\n"
                match block:
                    case TextBlock():
                        chat[-1]["content"] += block.text
                    case ThinkingBlock():
                        chat[-1]["reasoning_content"] = chat[-1].get("reasoning_content", "") + block.thinking
                    case ToolUseBlock():
                        function = {"name": block.name, "arguments": block.input}
                        call = {"id": block.id, "type": "function", "function": function}
                        chat[-1].setdefault("tool_calls", []).append(call)
        return chat


class MessagesRequest(CountTokensRequest):
    """``/v1/messages``."""

    max_tokens: int = Field(ge=1, le=2**63 - 1)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field([], max_length=api.MAX_STOPS)

    @model_validator(mode="after")
    def _ends_with_a_user(self) -> Self:
        if self.messages[-1].role == "assistant":
            expected = "a user's message at the end, as this server does not continue an assistant's"
            raise api.invalid("messages", expected, "assistant")
        return self

    def as_chat(self) -> api.ChatRequest:
        update = {"max_tokens": self.max_tokens, "stop": [*self.stop, *self.stop_sequences]}
        return super().as_chat().model_copy(update=update)


def error_answer(error: api.ApiError) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error in Anthropic's format."""
    status = _STATUS.get(error.status_code, error.status_code)
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = str(error.error["message"])
    if error.error["code"] == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # clients recognise this text and shorten the prompt
    return status, {"type": "error", "error": {"type": kind, "message": message}}


class MessagesFormatter(Formatter):
    """``/v1/messages``: items are content blocks."""

    id_prefix = "msg_"

    def start(self) -> bytes:
        return event("message_start", message=self.response())

    def failure(self, error: api.ApiError) -> bytes:
        _, body = error_answer(error)
        return event(body.pop("type"), **body)

    def response_events(self, answer: Generation) -> bytes:
        delta = event("message_delta", delta=self._stop(answer), usage=self._usage(answer))
        return delta + event("message_stop")

    def response(self, answer: Generation | None = None) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._context.model}
        content = [_block(item, item.text) for item in self._parsers[0].items]
        return {**head, "content": content, "usage": self._usage(answer), **self._stop(answer)}

    def item_events(self, what: str, item: Item, text: str) -> bytes:
        index = len(self._parsers[0].items) - 1
        if what == "begin":
            return event("content_block_start", index=index, content_block=_block(item, ""))
        if what == "end":
            return event("content_block_stop", index=index)
        kind = _KINDS[item.kind]
        name, field = ("input_json", "partial_json") if kind == "tool_use" else (kind, kind)
        return event("content_block_delta", index=index, delta={"type": f"{name}_delta", field: text})

    def _stop(self, answer: Generation | None) -> dict[str, Any]:
        if answer is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason = _STOP_REASONS[str(self._parsers[0].finish_reason(answer.finish_reason))]
        stopped = answer.stop_string is not None
        return {"stop_reason": "stop_sequence" if stopped else reason, "stop_sequence": answer.stop_string}

    def _usage(self, answer: Generation | None) -> dict[str, Any]:
        cached = 0 if answer is None else answer.cached_tokens
        return {
            "input_tokens": self._context.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if answer is None else len(answer.token_ids),
        }


def _block(item: Item, text: str) -> dict[str, Any]:
    kind = _KINDS[item.kind]
    if kind == "tool_use":
        return {"type": kind, "id": item.id, "name": item.name, "input": json.loads(text or "{}")}
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}
