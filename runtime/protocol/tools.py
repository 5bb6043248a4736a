"""Functions that a request offers to the model: ``tools`` and ``tool_choice``."""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.guard import parse_json

from ..generation.grammar import Grammar
from .errors import ApiError, bad

_DEPTH = 32
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE = re.compile(r"[ \t\r\n0-9A-Za-z+\-.:,]*")


class BrokenError(Exception):
    """No JSON goes on like this."""


class Nesting:
    """Follows a JSON object to its end, through pieces; ``at`` characters of the text are looked at."""

    def __init__(self, closers: str = "") -> None:
        self._closers = list(closers)
        self._in_string = False
        self.at = 0

    def reaches_end(self, text: str) -> bool:
        """Whether the object ends in ``text``, then before ``at``; of more text the beginning is the same.

        Raises:
            BrokenError: at ``at``.
        """
        while True:
            self.at = (_IN_STRING if self._in_string else _OUTSIDE).match(text, self.at).end()  # type: ignore[union-attr]
            if self.at == len(text):
                return False
            found = text[self.at]
            if found == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if found != "\\":
                    raise BrokenError
                if self.at + 1 == len(text):
                    return False
                self.at += 1
            elif found in "{[" and len(self._closers) < _DEPTH:
                self._closers.append("}" if found == "{" else "]")
            elif self._closers and found == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    self.at += 1
                    return True
            else:
                raise BrokenError
            self.at += 1


@dataclass(frozen=True)
class Syntax:
    """How a model writes calls.

    Attributes:
        opens: the marker before a call, or before the list of them.
        closes: what may stand behind a call, and belongs to it.
        listed: calls are a JSON list.
        bare: a call may do without its marker where a line begins.
        key: how the model calls the arguments.
        short: ids have nine characters, else the template refuses them.
    """

    opens: str
    closes: str
    key: str = "arguments"
    listed: bool = False
    bare: bool = False
    short: bool = False

    def new_id(self) -> str:
        """A name for a call."""
        return uuid.uuid4().hex[:9] if self.short else f"call_{uuid.uuid4().hex[:24]}"


HERMES = Syntax("<tool_call>", "</tool_call>")
LLAMA = Syntax("<|python_tag|>", ";", key="parameters", bare=True)
MISTRAL = Syntax("[TOOL_CALLS]", "]", listed=True, short=True)


def syntax_of(template: str) -> Syntax | None:
    """The syntax that a chat template writes; None if it knows no tools, or has a syntax that is not known here."""
    text = template.replace('\\"', '"')
    if "tools" not in text:
        return None
    if "<tool_call>" in text:
        # Others write <function=name> or <arg_key> between the same tags.
        return HERMES if "arguments" in text and "<function=" not in text and "<arg_key>" not in text else None
    if MISTRAL.opens in text:
        return None if "[ARGS]" in text else MISTRAL
    return LLAMA if '"parameters": ' in text and '{"name": ' in text else None


_KEYS = ("name", "arguments", "parameters", "type", "id")
_WHITE = r"[ \t\r\n]*"
_BEGINNING = re.compile(rf'\{{{_WHITE}(?:"([a-z]*)("?))?')
HEAD = re.compile(
    rf'\{{{_WHITE}(?:"type"{_WHITE}:{_WHITE}"function"{_WHITE},{_WHITE})?"name"{_WHITE}:{_WHITE}"([^"\\\x00-\x1f]*)"'
    rf'{_WHITE},{_WHITE}"(?:arguments|parameters)"{_WHITE}:{_WHITE}(?=\{{)'
)


def may_be_call(text: str) -> bool:
    """Whether a call's object may begin like this; quick, since much begins with a brace."""
    found = _BEGINNING.match(text)
    if found is None:
        return False
    key, closed = found.groups()
    if closed:
        return key in _KEYS
    return found.end() == len(text) and (key is None or any(known.startswith(key) for known in _KEYS))


def read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """A call's name and its arguments' JSON; None if it is no call."""
    try:
        call = parse_json(text.encode(), "call", UsageError)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or name not in names:
            return None
        match arguments:
            case None | "":
                return name, "{}"
            case str():
                parse_json(arguments.encode(), "arguments", UsageError)
                return name, arguments
            case dict():
                head, nesting = HEAD.match(text), Nesting()
                if head is None:
                    return name, json.dumps(arguments, ensure_ascii=False)
                nesting.at = head.end()
                nesting.reaches_end(text)
                return name, text[head.end() : nesting.at]
    except (UsageError, UnicodeEncodeError):
        pass
    return None


@dataclass(frozen=True)
class CallDelta:
    """What a piece adds to a call: its beginning, which has a name, or some of its arguments' JSON."""

    index: int
    text: str = ""
    id: str | None = None
    name: str | None = None


def same_call(part: str | CallDelta) -> tuple[int, bool] | None:
    """What neighbours have in common that may go out as one: a call's name comes before its arguments; None: text."""
    return (part.index, part.name is not None) if isinstance(part, CallDelta) else None


def call_delta(parts: Sequence[CallDelta]) -> dict[str, Any]:
    """A call's name, or some more of its arguments."""
    first, text = parts[0], "".join(part.text for part in parts)
    if first.name is None:
        return {"index": first.index, "function": {"arguments": text}}
    return {
        "index": first.index, "id": first.id, "type": "function", "function": {"name": first.name, "arguments": text}
    }  # fmt: skip


def whole_calls(parts: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Calls from their parts, in order."""
    calls = []
    for _, group in itertools.groupby(parts, lambda part: part.index):
        first, *rest = group
        arguments = "".join(part.text for part in rest)
        calls.append({"id": first.id, "type": "function", "function": {"name": first.name, "arguments": arguments}})
    return calls


# White space before a call belongs to neither; more of it than this is text.
_SPACE = 64
_HEAD_CHARACTERS = 1024


class CallParser:
    """One answer's text, and the calls in it.

    Args:
        syntax: how they are written.
        names: the functions that there are; an object that names another is text.
        one: only the first call counts.
        held: a call is told when it is whole, so that one whose arguments break is text. Else a call is told from its
            name on, and one that breaks later keeps the arguments that it has.
    """

    def __init__(self, syntax: Syntax, names: Collection[str], *, one: bool = False, held: bool = True) -> None:
        self._syntax, self._names, self._one, self._held = syntax, names, one, held
        self._out: list[str | CallDelta] = []
        self._step: Callable[[], bool] = self._plain
        self._text = ""  # not told yet; behind ``_marker``, which is text again if no call follows
        self._marker = ""
        self._at = 0  # where the object begins
        self._nesting = Nesting()
        self._fresh = True  # nothing but white space since the beginning, or since a call
        self._last = ""  # character of the text told
        self._ended = False
        self._found = 0

    @property
    def count(self) -> int:
        """Calls that were told."""
        return min(self._found, 1) if self._one else self._found

    def add(self, text: str) -> list[str | CallDelta]:
        """What a piece adds: to the text, and to calls."""
        self._text += text
        while self._step():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[str | CallDelta]:
        """What was held back, at the end."""
        self._ended = True
        return self.add("")

    def _say(self, text: str) -> None:
        if text:
            self._out.append(text)
            self._last = text[-1]
            self._fresh = self._fresh and text.isspace()

    def _plain(self) -> bool:
        """In the text."""
        text = self._text
        start, length = self._next_marker()
        if start < 0:
            if self._ended:
                self._say("" if self._fresh and self.count and text.isspace() else text)
                self._text = ""
                return False
            self._text = text[self._sure(len(text) - self._opening()) :]
            self._say(text[: len(text) - len(self._text)])
            return False
        sure = self._sure(start)
        self._say(text[:sure])
        self._marker, self._text = text[sure : start + length], text[start + length :]
        self._at = 0
        self._begin(self._list if self._syntax.listed else self._object)
        if text[start] == "{":
            self._marker, self._text = self._marker[:-1], "{" + self._text
        return True

    def _begin(self, step: Callable[[], bool]) -> None:
        self._step, self._nesting = step, Nesting()

    def _next_marker(self) -> tuple[int, int]:
        """Where the next call may begin, and the length of its marker."""
        start, length = self._text.find(self._syntax.opens), len(self._syntax.opens)
        if self._syntax.bare:
            bare = self._text.find("\n{") + 1 or -1
            white = len(self._text) - len(self._text.lstrip())
            if self._text.startswith("{", white) and (self._fresh or (white == 0 and self._last == "\n")):
                bare = white
            if bare >= 0 and (start < 0 or bare < start):
                return bare, 1
        return start, length

    def _opening(self) -> int:
        """Length of the text's end that may become a marker."""
        opens = self._syntax.opens
        lengths = range(min(len(opens) - 1, len(self._text)), 0, -1)
        return next((length for length in lengths if self._text.endswith(opens[:length])), 0)

    def _sure(self, end: int) -> int:
        """How much of the text before ``end`` is text whatever follows: without the white space that it ends with."""
        return max(len(self._text[:end].rstrip()), end - _SPACE)

    def _fail(self) -> bool:
        """It was no call: the marker is text, and what follows is looked at again."""
        if not self._marker.strip():  # a bare object's brace
            self._marker, self._text = self._marker + self._text[:1], self._text[1:]
        self._say(self._marker)
        self._marker, self._step = "", self._plain
        return True

    def _list(self) -> bool:
        """Behind the marker of a list."""
        found = self._text.lstrip()
        white = len(self._text) - len(found)
        if found.startswith("[") and white <= _SPACE:
            self._at, self._step = white + 1, self._object
            return True
        return self._fail() if found or self._ended or white > _SPACE else False

    def _object(self) -> bool:
        """Where a call's object has to be."""
        found = self._text[self._at :].lstrip()
        start = len(self._text) - len(found)
        if start - self._at > _SPACE or (found and not may_be_call(found)):
            return self._fail()
        head = None if self._held else HEAD.match(self._text, start, start + _HEAD_CHARACTERS)
        if head is not None:
            if head[1] not in self._names:
                return self._fail()
            self._tell(head[1])
            self._text = self._text[head.end() :]
            self._begin(self._arguments)
            return True
        self._nesting.at = max(self._nesting.at, start)
        try:
            if not self._nesting.reaches_end(self._text):
                return self._fail() if self._ended else False
        except BrokenError:
            return self._fail()
        call = read_call(self._text[start : self._nesting.at], self._names)
        if call is None:
            return self._fail()
        name, arguments = call
        self._tell(name)
        self._add(arguments)
        self._text = self._text[self._nesting.at :]
        self._begin(self._between)
        return True

    def _tell(self, name: str) -> None:
        """A call begins."""
        self._found += 1
        self._marker, self._fresh, self._last = "", True, ""
        if self._found == self.count:
            self._out.append(CallDelta(self._found - 1, id=self._syntax.new_id(), name=name))

    def _add(self, arguments: str) -> None:
        if arguments and self._found == self.count:
            self._out.append(CallDelta(self._found - 1, arguments))

    def _arguments(self) -> bool:
        """In a call's arguments, told as they come."""
        ends, following = False, self._plain
        try:
            ends, following = self._nesting.reaches_end(self._text), self._tail
        except BrokenError:
            ends = True
        at, self._nesting.at = self._nesting.at, 0
        self._add(self._text[:at])
        self._text = self._text[at:]
        if ends:
            self._step, self._nesting = following, Nesting("}")
        elif self._ended:
            self._text = ""  # half of an escape
        return ends

    def _tail(self) -> bool:
        """Behind the arguments, before the end of the object."""
        ends = False
        following = self._plain
        try:
            ends, following = self._nesting.reaches_end(self._text), self._between
        except BrokenError:
            ends = True
        self._text = self._text[self._nesting.at :]
        self._nesting.at = 0
        if ends:
            self._step = following
        return ends

    def _between(self) -> bool:
        """Behind a call."""
        found, closes = self._text.lstrip(), self._syntax.closes
        white = len(self._text) - len(found)
        self._step = self._plain
        if white > _SPACE:
            return True
        if self._syntax.listed and found.startswith(","):
            self._marker, self._text, self._at = self._text[: white + 1], found[1:], 0
            self._begin(self._object)
        elif found.startswith(closes):
            self._text = found[len(closes) :]
        elif closes.startswith(found) and not self._ended:
            self._step = self._between
            return False
        return True


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
