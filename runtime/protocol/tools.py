"""Tool calls: the models' syntaxes, the grammar of a required call, and an incremental parser of generated text."""

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

from ..generation.grammar import DATA_KEYWORDS, NAMED_KEYWORDS, Grammar, supported_schema
from ..generation.grammar_worker import JSON_SPACE
from ..tokenizer import partial_marker

_MAX_DEPTH = 32
_MAX_SPACE = 64  # characters; longer white space before a call is content
_MAX_HEAD = 1024
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE = re.compile(r"[ \t\r\n0-9A-Za-z+\-.:,]*")
_KEYS = ("name", "arguments", "parameters", "type", "id")
_WHITE = r"[ \t\r\n]*"
_BEGINNING = re.compile(rf'\{{{_WHITE}(?:"([a-z]*)("?))?')
# A call's object up to its arguments; the name is group 1.
_HEAD = re.compile(
    rf'\{{{_WHITE}(?:"type"{_WHITE}:{_WHITE}"function"{_WHITE},{_WHITE})?"name"{_WHITE}:{_WHITE}"([^"\\\x00-\x1f]*)"'
    rf'{_WHITE},{_WHITE}"(?:arguments|parameters)"{_WHITE}:{_WHITE}(?=\{{)'
)


@dataclass(frozen=True)
class ToolSyntax:
    opens: str  # marker before a call or the list of calls
    closes: str  # optional marker after a call
    key: str = "arguments"  # JSON field of the arguments
    listed: bool = False  # calls are a JSON list
    bare: bool = False  # the marker may be absent at the beginning of a line
    short_ids: bool = False  # the template accepts ids of nine letters and digits only


HERMES = ToolSyntax("<tool_call>", "</tool_call>")
LLAMA = ToolSyntax("<|python_tag|>", ";", key="parameters", bare=True)
MISTRAL = ToolSyntax("[TOOL_CALLS]", "]", listed=True, short_ids=True)


def syntax_of(template: str) -> ToolSyntax | None:
    """The syntax of a chat template's tool calls; None: no tools, or an unknown syntax."""
    text = template.replace('\\"', '"')
    if "tools" not in text:
        return None
    if "<tool_call>" in text:
        # Other syntaxes have <function=name> or <arg_key> between the same tags.
        return HERMES if "arguments" in text and "<function=" not in text and "<arg_key>" not in text else None
    if MISTRAL.opens in text:
        return None if "[ARGS]" in text else MISTRAL
    return LLAMA if '"parameters": ' in text and '{"name": ' in text else None


def short_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Replace call ids that are not nine letters and digits by hashes, in place."""

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
    """A grammar (llguidance's Lark) of one call of ``functions``, or ``several``. ``special``: ids of markers that are special
    tokens."""
    pointers = ["#"] if len(functions) == 1 else [f"#/anyOf/{index}" for index in range(len(functions))]
    schemas = []
    for pointer, function in zip(pointers, functions, strict=True):
        arguments = _relocate(supported_schema(function["parameters"]), f"{pointer}/properties/{syntax.key}")
        fields = {"name": {"const": function["name"]}, syntax.key: arguments}
        schemas.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    text = json.dumps({**schema, "x-guidance": JSON_SPACE}).replace("::=", ":\\u003a=")  # "::=" would mark GBNF
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


def _relocate(schema: Any, pointer: str, named: bool = False) -> Any:
    """A JSON schema with references for its position at ``pointer`` in a larger schema. ``named``: ``schema`` maps names to
    schemas, so its keys are no keywords."""
    if isinstance(schema, list):
        return [_relocate(item, pointer) for item in schema]
    if not isinstance(schema, dict) or (not named and "$id" in schema):  # references within $id are relative to it
        return schema
    relocated = {}
    for key, value in schema.items():
        if not named and key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            value = pointer + value[1:]
        elif named or key not in DATA_KEYWORDS:
            value = _relocate(value, pointer, not named and key in NAMED_KEYWORDS)
        relocated[key] = value
    return relocated


@dataclass(frozen=True)
class Delta:
    """A part of an answer. The first delta of a tool call has its id and name, further ones parts of its JSON arguments."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    index: int = 0
    id: str | None = None
    name: str | None = None


class JsonScanner:
    """Finds the end of a JSON object in growing text. ``at``: number of scanned characters; ``closers``: closing brackets of
    the objects and lists that are open at the start, outermost first."""

    def __init__(self, closers: str = "") -> None:
        self._closers = list(closers)
        self._in_string = False
        self.at = 0

    def reaches_end(self, text: str) -> bool | None:
        """Whether ``text`` contains the object's end, which is ``at`` then; None: ``text`` is no prefix of JSON."""
        while True:
            self.at = (_IN_STRING if self._in_string else _OUTSIDE).match(text, self.at).end()  # type: ignore[union-attr]
            if self.at == len(text):
                return False
            char = text[self.at]
            if char == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if char != "\\":
                    return None
                if self.at + 1 == len(text):
                    return False
                self.at += 1
            elif char in "{[" and len(self._closers) < _MAX_DEPTH:
                self._closers.append("}" if char == "{" else "]")
            elif self._closers and char == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    self.at += 1
                    return True
            else:
                return None
            self.at += 1


def _may_be_call(text: str) -> bool:
    match = _BEGINNING.match(text)
    key, closed = (None, None) if match is None else match.groups()
    if match is None or closed:
        return key in _KEYS
    return match.end() == len(text) and (key is None or any(known.startswith(key) for known in _KEYS))


def _read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and JSON arguments of a complete call; None if it is no call of a known function."""
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
    """Splits the text of an answer incrementally into content and tool calls."""

    def __init__(self, syntax: ToolSyntax, names: Collection[str], *, one: bool = False, whole: bool = True) -> None:
        """``one``: drop calls after the first. ``whole``: return the arguments of a call in one delta."""
        self._syntax, self._names, self._one, self._whole = syntax, names, one, whole
        self._deltas: list[Delta] = []
        self._text = ""  # not parsed yet
        self._num_calls = 0
        self._only_space = True  # since the beginning or the last call
        self._last = ""  # the last character of content
        self._ended = False
        self._steps = self._parse()

    @property
    def count(self) -> int:
        """Number of returned calls."""
        return min(self._num_calls, 1) if self._one else self._num_calls

    def add(self, text: str) -> list[Delta]:
        self._text += text
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """The deltas of the remaining text at the end of the answer."""
        self._ended = True
        return self.add("")

    def _parse(self) -> Iterator[None]:
        """A coroutine over the text; yields when it needs more."""
        while True:
            start, end = self._find_marker()
            if start >= 0:
                begin = self._without_space(start)
                self._emit(begin)
                end -= begin
                if not (yield from self._read_calls(end - (self._text[end - 1] == "{"))):
                    self._emit(end)
            elif self._ended:
                if not (self._num_calls and self._only_space and self._text.isspace()):
                    self._emit(len(self._text))
                return
            else:
                self._emit(self._without_space(len(self._text) - partial_marker(self._text, self._syntax.opens)))
                yield

    def _find_marker(self) -> tuple[int, int]:
        """Start and end of the next marker; start is -1 if there is none. A bare call's marker is its brace."""
        start, length = self._text.find(self._syntax.opens), len(self._syntax.opens)
        if self._syntax.bare:
            brace = self._text.find("\n{") + 1 or -1
            white = len(self._text) - len(self._text.lstrip())
            if self._text.startswith("{", white) and (self._only_space or (white == 0 and self._last == "\n")):
                brace = white
            if brace >= 0 and (start < 0 or brace < start):
                start, length = brace, 1
        return start, start + length

    def _without_space(self, end: int) -> int:
        """``end`` before its preceding white space, which is dropped if a call follows."""
        return max(len(self._text[:end].rstrip()), end - _MAX_SPACE)

    def _emit(self, length: int) -> None:
        """Return the next ``length`` characters as content."""
        content, self._text = self._text[:length], self._text[length:]
        if content:
            self._deltas.append(Delta("content", content))
            self._last = content[-1]
            self._only_space = self._only_space and content.isspace()

    def _skip_space(self, at: int) -> tuple[str, int]:
        """The text after the white space at ``at``, and the length of the white space."""
        rest = self._text[at:].lstrip()
        return rest, len(self._text) - at - len(rest)

    def _read_calls(self, at: int) -> Generator[None, None, bool]:
        """Parse the calls after the marker that ends at ``at``; False, with the text unchanged, if there are none."""
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
        while True:  # after a call
            rest, white = self._skip_space(0)
            closes = self._syntax.closes
            if white > _MAX_SPACE:
                return True
            if self._syntax.listed and rest.startswith(","):
                if not (yield from self._read_call(white + 1)):
                    self._emit(white + 1)
                    return True
            elif rest.startswith(closes):
                self._text = rest[len(closes) :]
                return True
            elif self._ended or not closes.startswith(rest):
                return True
            else:
                yield

    def _read_call(self, at: int) -> Generator[None, None, bool]:
        """Parse one call at ``at`` up to the end of its object; False, with the text unchanged, if there is none."""
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
                    if self._ended:  # in the middle of an escape sequence
                        self._text = ""
                        return True
                    yield
        return True

    def _begin_call(self, name: str) -> None:
        self._num_calls += 1
        self._only_space, self._last = True, ""
        if self._num_calls == self.count:
            id = uuid.uuid4().hex[:9] if self._syntax.short_ids else f"call_{uuid.uuid4().hex[:24]}"
            self._deltas.append(Delta("tool_call", index=self._num_calls - 1, id=id, name=name))

    def _add_arguments(self, arguments: str) -> None:
        if arguments and self._num_calls == self.count:
            self._deltas.append(Delta("tool_call", arguments, self._num_calls - 1))
