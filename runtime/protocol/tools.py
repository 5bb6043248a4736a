"""Tool calls: how models write them, the grammar that forces one, and a parser that finds them in generated text."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wisparse.formats.errors import UsageError
from wisparse.formats.guard import parse_json

from ..generation.grammar import Grammar
from ..generation.grammar_worker import JSON_SPACE
from ..tokenizer import partial_marker

_MAX_DEPTH = 32
_MAX_SPACE = 64  # longer white space before a call is text
_MAX_HEAD = 1024
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE = re.compile(r"[ \t\r\n0-9A-Za-z+\-.:,]*")
_KEYS = ("name", "arguments", "parameters", "type", "id")
# Keywords of JSON schemas whose values are data, and those whose values map names to schemas.
_DATA = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_WHITE = r"[ \t\r\n]*"
_BEGINNING = re.compile(rf'\{{{_WHITE}(?:"([a-z]*)("?))?')
# A call's object up to its arguments; the name is group 1.
_HEAD = re.compile(
    rf'\{{{_WHITE}(?:"type"{_WHITE}:{_WHITE}"function"{_WHITE},{_WHITE})?"name"{_WHITE}:{_WHITE}"([^"\\\x00-\x1f]*)"'
    rf'{_WHITE},{_WHITE}"(?:arguments|parameters)"{_WHITE}:{_WHITE}(?=\{{)'
)


@dataclass(frozen=True)
class ToolSyntax:
    opens: str  # marker before a call, or before the list of calls
    closes: str  # optional marker behind a call
    key: str = "arguments"  # name of the arguments' field
    listed: bool = False  # calls are a JSON list
    bare: bool = False  # a call may stand without its marker at the beginning of a line
    short_ids: bool = False  # the template accepts ids of nine letters and digits only


HERMES = ToolSyntax("<tool_call>", "</tool_call>")
LLAMA = ToolSyntax("<|python_tag|>", ";", key="parameters", bare=True)
MISTRAL = ToolSyntax("[TOOL_CALLS]", "]", listed=True, short_ids=True)


def syntax_of(template: str) -> ToolSyntax | None:
    """The syntax that a chat template writes; None: it has no tools, or an unknown syntax."""
    text = template.replace('\\"', '"')
    if "tools" not in text:
        return None
    if "<tool_call>" in text:
        # Others write <function=name> or <arg_key> between the same tags.
        return HERMES if "arguments" in text and "<function=" not in text and "<arg_key>" not in text else None
    if MISTRAL.opens in text:
        return None if "[ARGS]" in text else MISTRAL
    return LLAMA if '"parameters": ' in text and '{"name": ' in text else None


def short_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Make call ids of nine letters and digits, in place; another server's longer ids are hashed."""

    def short(id: str) -> str:
        fits = len(id) == 9 and id.isascii() and id.isalnum()
        return id if fits else hashlib.sha256(id.encode(errors="surrogatepass")).hexdigest()[:9]

    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = short(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = short(message["tool_call_id"])


def call_grammar(
    functions: Sequence[Mapping[str, Any]], syntax: ToolSyntax, special: Mapping[str, int], several: bool
) -> Grammar:
    """A grammar (llguidance's Lark) for one call of one of ``functions``, or ``several``, and nothing else;
    ``special``: ids of those markers that are special tokens."""
    places = ["#"] if len(functions) == 1 else [f"#/anyOf/{index}" for index in range(len(functions))]
    schemas = []
    for place, function in zip(places, functions, strict=True):
        arguments = _moved(function["parameters"], f"{place}/properties/{syntax.key}")
        fields = {"name": {"const": function["name"]}, syntax.key: arguments}
        schemas.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    text = json.dumps({**schema, "x-guidance": JSON_SPACE}).replace("::=", ":\\u003a=")  # else taken for GBNF
    markers = (syntax.opens, syntax.closes)
    opens, closes = (f"<[{special[one]}]>" if one in special else json.dumps(one) for one in markers)
    if syntax.listed:
        start, call, between = f'{opens} "[" calls "]"', "object", '", "'
    elif syntax.bare:
        start, call, between = "calls", "object", '"; "'
    else:
        start, call, between = "calls", f'{opens} "\\n" object "\\n" {closes}', '"\\n"'
    calls = f"{call} ({between} {call})*" if several else call
    return Grammar("tool_choice", f"start: {start}\ncalls: {calls}\nobject: %json {text}\n")


def _moved(schema: Any, place: str, named: bool = False) -> Any:
    """A JSON schema that stands at the pointer ``place`` of a larger one: its references begin there. ``named``: a mapping
    from names, which may be a keyword's, to schemas."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict) or (not named and "$id" in schema):  # below $id, references are relative to it
        return schema
    moved = {}
    for key, value in schema.items():
        if not named and key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            value = place + value[1:]
        elif named or key not in _DATA:
            value = _moved(value, place, not named and key in _NAMED)
        moved[key] = value
    return moved


@dataclass(frozen=True)
class Delta:
    """What some text adds to an answer; of a tool call first its id and name, then its arguments' JSON as text."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    index: int = 0
    id: str | None = None
    name: str | None = None


class JsonScanner:
    """Finds the end of a JSON object in growing text; ``at``: how many characters are scanned. ``closers`` are the
    brackets that are open at the start, outermost first."""

    def __init__(self, closers: str = "") -> None:
        self._closers = list(closers)
        self._in_string = False
        self.at = 0

    def reaches_end(self, text: str) -> bool | None:
        """Whether the object ends in ``text``, then before ``at``; None: ``text`` cannot be continued to JSON."""
        while True:
            self.at = (_IN_STRING if self._in_string else _OUTSIDE).match(text, self.at).end()  # type: ignore[union-attr]
            if self.at == len(text):
                return False
            found = text[self.at]
            if found == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if found != "\\":
                    return None
                if self.at + 1 == len(text):
                    return False
                self.at += 1
            elif found in "{[" and len(self._closers) < _MAX_DEPTH:
                self._closers.append("}" if found == "{" else "]")
            elif self._closers and found == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    self.at += 1
                    return True
            else:
                return None
            self.at += 1


def _may_be_call(text: str) -> bool:
    found = _BEGINNING.match(text)
    key, closed = (None, None) if found is None else found.groups()
    if found is None or closed:
        return key in _KEYS
    return found.end() == len(text) and (key is None or any(known.startswith(key) for known in _KEYS))


def _read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments' JSON of a whole call; None if it is no call of a known function."""
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
                head, scanner = _HEAD.match(text), JsonScanner()
                if head is None:
                    return name, json.dumps(arguments, ensure_ascii=False)
                scanner.at = head.end()
                scanner.reaches_end(text)
                return name, text[head.end() : scanner.at]
    except (UsageError, UnicodeEncodeError):
        pass
    return None


class ToolCallParser:
    """Splits the text of one answer, as it comes, into content and tool calls."""

    def __init__(self, syntax: ToolSyntax, names: Collection[str], *, one: bool = False, whole: bool = True) -> None:
        self._syntax, self._names, self._one, self._whole = syntax, names, one, whole
        self._deltas: list[Delta] = []
        self._text = ""  # not given yet
        self._found = 0  # calls
        self._fresh = True  # only white space since the beginning or the last call
        self._last = ""  # the last character given as content
        self._ended = False
        self._steps = self._parse()

    @property
    def count(self) -> int:
        """Calls that were given."""
        return min(self._found, 1) if self._one else self._found

    def add(self, text: str) -> list[Delta]:
        self._text += text
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the answer."""
        self._ended = True
        return self.add("")

    def _parse(self) -> Iterator[None]:
        """Runs through the text; yields where it needs more."""
        while True:
            start, end = self._find_marker()
            if start >= 0:
                begin = self._without_space(start)
                self._give(begin)
                end -= begin
                if not (yield from self._read_calls(end - (self._text[end - 1] == "{"))):
                    self._give(end)
            elif self._ended:
                if not (self._found and self._fresh and self._text.isspace()):
                    self._give(len(self._text))
                return
            else:
                self._give(self._without_space(len(self._text) - partial_marker(self._text, self._syntax.opens)))
                yield

    def _find_marker(self) -> tuple[int, int]:
        """Where the next call may begin, and the end of its marker; -1 if nowhere. A bare call's marker is its brace."""
        start, length = self._text.find(self._syntax.opens), len(self._syntax.opens)
        if self._syntax.bare:
            bare = self._text.find("\n{") + 1 or -1
            white = len(self._text) - len(self._text.lstrip())
            if self._text.startswith("{", white) and (self._fresh or (white == 0 and self._last == "\n")):
                bare = white
            if bare >= 0 and (start < 0 or bare < start):
                start, length = bare, 1
        return start, start + length

    def _without_space(self, end: int) -> int:
        """``end`` without the white space before it, which belongs to a call that may follow."""
        return max(len(self._text[:end].rstrip()), end - _MAX_SPACE)

    def _give(self, length: int) -> None:
        """The text's beginning is content."""
        content, self._text = self._text[:length], self._text[length:]
        if content:
            self._deltas.append(Delta("content", content))
            self._last = content[-1]
            self._fresh = self._fresh and content.isspace()

    def _skip_space(self, at: int) -> tuple[str, int]:
        """The text behind the white space at ``at``, and the length of that."""
        rest = self._text[at:].lstrip()
        return rest, len(self._text) - at - len(rest)

    def _read_calls(self, at: int) -> Generator[None, None, bool]:
        """Reads the calls behind the marker that ends at ``at``; False, with the text unchanged, if there are none."""
        if self._syntax.listed:
            rest, white = self._skip_space(at)
            while not rest and white <= _MAX_SPACE and not self._ended:
                yield
                rest, white = self._skip_space(at)
            if not rest.startswith("[") or white > _MAX_SPACE:
                return False
            at += white + 1
        if not (yield from self._read_call(at)):
            return False
        while True:  # behind a call
            rest, white = self._skip_space(0)
            closes = self._syntax.closes
            if white > _MAX_SPACE:
                return True
            if self._syntax.listed and rest.startswith(","):
                if not (yield from self._read_call(white + 1)):
                    self._give(white + 1)
                    return True
            elif rest.startswith(closes):
                self._text = rest[len(closes) :]
                return True
            elif self._ended or not closes.startswith(rest):
                return True
            else:
                yield

    def _read_call(self, at: int) -> Generator[None, None, bool]:
        """Reads one call at ``at``, up to the end of its object; False, with the text unchanged, if there is none."""
        scanner = JsonScanner()
        while True:
            rest, white = self._skip_space(at)
            if white > _MAX_SPACE or (rest and not _may_be_call(rest)):
                return False
            start = at + white
            head = None if self._whole else _HEAD.match(self._text, start, start + _MAX_HEAD)
            if head is not None:
                break
            scanner.at = max(scanner.at, start)
            ends = scanner.reaches_end(self._text)
            if ends:
                call = _read_call(self._text[start : scanner.at], self._names)
                if call is None:
                    return False
                self._begin_call(call[0])
                self._add_arguments(call[1])
                self._text = self._text[scanner.at :]
                return True
            if ends is None or self._ended:
                return False
            yield
        if head[1] not in self._names:
            return False
        self._begin_call(head[1])
        self._text = self._text[head.end() :]
        for closers in ("", "}"):  # the arguments' object, then the rest of the call's object
            scanner, ends = JsonScanner(closers), False
            while not ends:
                ends = scanner.reaches_end(self._text)
                if not closers:
                    self._add_arguments(self._text[: scanner.at])
                self._text, scanner.at = self._text[scanner.at :], 0
                if ends is None:
                    return True
                if not ends:
                    if self._ended:  # half of an escape is left
                        self._text = ""
                        return True
                    yield
        return True

    def _begin_call(self, name: str) -> None:
        self._found += 1
        self._fresh, self._last = True, ""
        if self._found == self.count:
            id = uuid.uuid4().hex[:9] if self._syntax.short_ids else f"call_{uuid.uuid4().hex[:24]}"
            self._deltas.append(Delta("tool_call", index=self._found - 1, id=id, name=name))

    def _add_arguments(self, arguments: str) -> None:
        if arguments and self._found == self.count:
            self._deltas.append(Delta("tool_call", arguments, self._found - 1))
