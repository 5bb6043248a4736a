"""Functions that a request offers to the model: ``tools`` and ``tool_choice``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wisparse.formats.errors import UsageError

from ..generation.grammar import Grammar
from .errors import ApiError, bad
from .syntax import Syntax

__all__ = ["Offer", "read_offer"]

_MOST = 128
_MOST_CHARACTERS = 1 << 18
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
