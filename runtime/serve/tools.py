"""Functions that a request offers to the model: ``tools`` and ``tool_choice``, and the calls among its messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.guard.safe_json import parse_json

from ..generation.grammar import Grammar
from .refusals import ApiError, bad
from .syntax import Syntax

__all__ = ["Offer", "name_results", "read_calls", "read_offer", "short_ids"]

_MOST = 128
_MOST_CHARACTERS = 1 << 18
_SHORT = 9
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)
_CHOICES = "none, auto, required, or an object of type function that names one of the tools"
_NO_PARAMETERS = {"type": "object", "properties": {}}
# As in a ``response_format``: on one line, as Python writes it.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Offer:
    """What may be called.

    Attributes:
        tools: as the template is given them.
        forced: those of which one has to be called; none: the model is free.
        several: an answer may have more than one call.
    """

    tools: Sequence[Mapping[str, Any]]
    forced: Sequence[Mapping[str, Any]]
    several: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def grammar(self, syntax: Syntax, special: Mapping[str, int]) -> Grammar:
        """The forced calls and nothing else, as llguidance's Lark writes it; ``special``: ids of special tokens.

        Raises:
            ApiError: too long.
        """
        schemas = [_call_schema(tool["function"], syntax.key) for tool in self.forced]
        schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        text = json.dumps({**schema, "x-guidance": _SPACES}).replace("::=", ":\\u003a=")  # no GBNF
        opens = f"<[{special[syntax.opens]}]>" if syntax.opens in special else json.dumps(syntax.opens)
        closes = f"<[{special[syntax.closes]}]>" if syntax.closes in special else json.dumps(syntax.closes)
        if syntax.listed:
            start = f'{opens} "[" calls "]"'
            call, between = "object", '", "'
        elif syntax.bare:
            start, call, between = "calls", "object", '"; "'
        else:
            start, call, between = "calls", f'{opens} "\\n" object "\\n" {closes}', '"\\n"'
        calls = f"{call} ({between} {call})*" if self.several else call
        try:
            return Grammar.of_text("tool_choice", f"start: {start}\ncalls: {calls}\nobject: %json {text}\n")
        except UsageError as error:
            raise ApiError(400, str(error), param="tool_choice", code="invalid_value") from error


def _call_schema(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            key: function["parameters"],
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def read_offer(body: Mapping[str, Any]) -> Offer | None:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``; None where nothing may be called.

    Raises:
        ApiError: with the field named.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    several = body.get("parallel_tool_calls")
    if several is not None and not isinstance(several, bool):
        raise bad("parallel_tool_calls", "true or false", several)
    if given is None:
        given = []
    if not isinstance(given, list) or len(given) > _MOST:
        raise bad("tools", f"a list of up to {_MOST} functions", given)
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise bad("tools", "a name for each of them", twice)
    if len(json.dumps(tools)) > _MOST_CHARACTERS:
        raise ApiError(
            400, f"tools: expected at most {_MOST_CHARACTERS:,} characters of JSON, found more", param="tools"
        )
    forced: list[dict[str, Any]] = []
    match choice:
        case None | "auto":
            pass
        case "none":
            return None
        case "required":
            forced = tools
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            forced, several = [tools[names.index(name)]], False
        case _:
            raise bad("tool_choice", _CHOICES, choice)
    if choice == "required" and not tools:
        raise bad("tool_choice", "tools, one of which has to be called", "none")
    if forced and any(body.get(field) not in (None, "", {"type": "text"}) for field in ("grammar", "response_format")):
        raise bad("tool_choice", "none or auto beside a response_format or a grammar", choice)
    return Offer(tools, forced, several is not False) if tools else None


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad(where, "an object of type function", tool)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad(f"{where}.function", "an object with name, description and parameters", function)
    function = {key: value for key, value in function.items() if value is not None}
    name, description = function.get("name"), function.get("description", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad(f"{where}.function.name", "1 to 64 letters, digits, dots, dashes or underscores", name)
    if not isinstance(description, str):
        raise bad(f"{where}.function.description", "a text", description)
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict) or (parameters and parameters.get("type", "object") != "object"):
        raise bad(f"{where}.function.parameters", "the JSON schema of an object", parameters)
    if not isinstance(function.get("strict", False), bool):
        raise bad(f"{where}.function.strict", "true or false", function["strict"])
    # Templates count on what transformers' own schemas have.
    filled = {"name": name, "description": description, "parameters": parameters or dict(_NO_PARAMETERS)}
    return {"type": "function", "function": {**filled, **function, "parameters": filled["parameters"]}}


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """An assistant message's ``tool_calls``, as templates expect them: their arguments are objects.

    Raises:
        ApiError: with the field named.
    """
    if not isinstance(calls, list) or len(calls) > _MOST:
        raise bad(where, f"a list of up to {_MOST} calls", calls)
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
