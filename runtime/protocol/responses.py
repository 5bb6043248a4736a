"""OpenAI's newer protocol, ``/v1/responses``: the part of it that one answer to one conversation needs.

    body -> as_chat_body -> requests.read_chat ... pieces -> response_shape.ResponseShape -> wire

Nothing is stored: a conversation comes whole with each request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ApiError, bad
from .unsupported import RESPONSE, refuse_unsupported

__all__ = ["as_chat_body", "as_response_error"]

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
