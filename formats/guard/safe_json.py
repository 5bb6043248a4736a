"""JSON a stranger wrote: bounded in size, depth and number of values, strict Unicode, no duplicate keys, no NaN.

Python's parser takes all of those silently, and a deep or wide document costs it far more memory than its bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WisparseError
from .files import read_bounded

__all__ = ["dump_json", "parse_json", "read_json"]

_MAX_DEPTH = 32
# Every value but the first is announced by one of these bytes; counting them is quick, and commas inside strings only
# err on the strict side.
_MAX_VALUES = 500_000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(folder: Path, name: str, limit: int, error: type[WisparseError]) -> dict[str, Any]:
    """Parse ``folder/name``, at most ``limit`` bytes, which has to hold a JSON object."""
    return parse_json(read_bounded(folder, name, limit, error), name, error)


def parse_json(data: bytes, where: str, error: type[WisparseError], most_values: int = _MAX_VALUES) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: the text.
        where: what the text is, for messages.
        most_values: more of them are a bomb.

    Raises:
        error: not UTF-8, not JSON, not an object, a key twice, NaN or Infinity, half a surrogate pair, or a bomb.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"{where}: the key {twice!r:.100} stands there twice")
        return found

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise error(f"{where}: expected finite numbers, found {text:.40}")
        return value

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{where}: expected UTF-8, found a wrong byte at {reason.start}") from None
    if data.count(b",") + data.count(b"[") + data.count(b"{") > most_values:
        raise error(f"{where}: expected at most {most_values:,} values, found more")
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except (json.JSONDecodeError, RecursionError, ValueError) as reason:
        raise error(f"{where}: expected JSON, found something else ({reason!s:.100})") from None
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    _refuse_deep(value, where, error)
    if _SURROGATE.search(data):
        _refuse_surrogates(value, where, error)
    return value


def dump_json(value: Mapping[str, Any]) -> bytes:
    """Readable JSON with the keys in their order; equal values give equal bytes.

    Raises:
        ValueError, TypeError: NaN, or something that is not JSON.
    """
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _refuse_deep(value: Any, where: str, error: type[WisparseError]) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise error(f"{where}: expected at most {_MAX_DEPTH} levels, found more")


def _refuse_surrogates(value: Any, where: str, error: type[WisparseError]) -> None:
    """Half of a surrogate pair is no character: such a text can be neither printed nor written nor hashed."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as reason:
        half = ascii(reason.object[reason.start])
        raise error(f"{where}: expected characters, found {half}, half of a surrogate pair") from None
