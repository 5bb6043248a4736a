"""Messages of a conversation, read as chat templates expect them: text alone, calls with their arguments as objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.guard.safe_json import parse_json

from .errors import ApiError, bad

__all__ = ["name_results", "read_message", "short_ids"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_CALLS = 128
_SHORT = 9


def read_message(message: Any, where: str) -> dict[str, Any]:
    """One message as templates expect it; ``where``: its place in the body.

    Raises:
        ApiError: with the field named.
    """
    if not isinstance(message, dict):
        raise bad(where, "an object with role and content", message)
    role = message.get("role")
    if role not in _ROLES:
        raise bad(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    for field in ("function_call", "audio") if role == "assistant" else ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise ApiError(
                400, f"{where}.{field}: this server does not have it yet", param=f"{where}.{field}",
                code="unsupported_parameter",
            )  # fmt: skip
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise bad(f"{where}.content", "a text, or a list of parts", content)
    more = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
    if role == "tool":
        more["tool_call_id"] = message.get("tool_call_id")
        if not isinstance(more["tool_call_id"], str):
            raise bad(f"{where}.tool_call_id", "the id of the call that this answers", more["tool_call_id"])
    if role == "assistant" and message.get("reasoning_content"):
        more["reasoning_content"] = message["reasoning_content"]
        if not isinstance(more["reasoning_content"], str):
            raise bad(f"{where}.reasoning_content", "a text", more["reasoning_content"])
    if message.get("tool_calls"):
        more["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return {"role": "system" if role == "developer" else role, "content": content, **more}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image_url", "input_image", "input_audio", "file", "video_url"):
        raise ApiError(
            501, f"{where}: this server reads text alone, not {kind}", param=where, code="unsupported_content"
        )
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise bad(where, "a part of type text", part)
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """An assistant message's ``tool_calls``, as templates expect them: their arguments are objects.

    Raises:
        ApiError: with the field named.
    """
    if not isinstance(calls, list) or len(calls) > _MOST_CALLS:
        raise bad(where, f"a list of up to {_MOST_CALLS} calls", calls)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"id": str(name), "function": {"name": str(function)} as called} if call.get("type", "function") == (
            "function"
        ):
            pass
        case _:
            raise bad(where, "an object of type function, with an id and a function with a name", call)
    arguments = called.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments.encode(), f"{where}.function.arguments", UsageError)
        except UsageError as error:
            raise ApiError(400, str(error), param=f"{where}.function.arguments", code="invalid_value") from error
    if not isinstance(arguments, dict):
        raise bad(f"{where}.function.arguments", "an object, or its JSON as a text", arguments)
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give the results among a conversation's messages the names of the functions that were called, where their client
    left them out, as OpenAI's may: some templates want them."""
    called = {call["id"]: call["function"]["name"] for one in messages for call in one.get("tool_calls", ())}
    for one in messages:
        if one["role"] == "tool" and one["tool_call_id"] in called:
            one.setdefault("name", called[one["tool_call_id"]])


def short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of nine letters and digits: a call's as long as it likes, say of another server, is known
    by its digest."""

    def short(name: str) -> str:
        fits = len(name) == _SHORT and name.isascii() and name.isalnum()
        return name if fits else hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_SHORT]

    found = [dict(one) for one in messages]
    for one in found:
        if "tool_calls" in one:
            one["tool_calls"] = [{**call, "id": short(call["id"])} for call in one["tool_calls"]]
        if "tool_call_id" in one:
            one["tool_call_id"] = short(one["tool_call_id"])
    return found
