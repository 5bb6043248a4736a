"""The JSON object that a call of a function is: how it may begin, and what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from wisparse.formats.errors import UsageError
from wisparse.formats.guard.safe_json import parse_json

from .nesting import Nesting

__all__ = ["HEAD", "may_be_call", "read_call"]

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
