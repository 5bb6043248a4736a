"""What callers pass: one check for each kind of argument, and one sentence for what is not of that kind.

Every check returns the value as plain Python has it, so that numpy's and torch's numbers are taken, and raises a
UsageError that names the argument, what was expected and what was found. A bool is never a number.
"""

from __future__ import annotations

import difflib
import numbers
import operator
import os
import reprlib
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError

__all__ = ["choice", "integer", "number", "place", "quoted", "switch", "text"]

# Longer than any path that a system takes, and than any Hub id.
_LONGEST_PLACE = 4096

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def quoted(value: Any) -> str:
    """A value as an error message shows it: on one line, and not all of a long one."""
    return " ".join(_short.repr(value).split())


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer of at least ``least`` and at most ``most``; numpy's and torch's are integers too.

    Raises:
        UsageError: it is none, or out of range.
    """
    try:
        plain = None if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool" else value
        plain = operator.index(plain)  # type: ignore[arg-type]  # what is no integer has none
    except TypeError:
        plain = None
    if plain is None or plain < least or (most is not None and plain > most):
        if most is None:
            words = {0: "an integer, 0 or more", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
        else:
            words = f"an integer from {least} to {most:,}"
        raise UsageError(f"{name}: expected {words}, found {quoted(value)}")
    return plain


def number(name: str, value: Any, low: float, high: float, words: str, *, above: bool = False) -> float:
    """A number from ``low`` to ``high``, which are never NaN; ``above``: ``low`` itself is not one of them.

    Raises:
        UsageError: it is none, or out of range; ``words`` say what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name}: expected {words}, found {quoted(value)}")
    # NaN is not less than anything, and not at most anything.
    if value < low or not value <= high or (above and value == low):
        raise UsageError(f"{name}: expected {words}, found {quoted(value)}")
    return float(value)


def switch(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        UsageError: something else, also what Python would count as true.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name}: expected True or False, found {quoted(value)}")
    return value


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """One of some words.

    Raises:
        UsageError: another; a close one is suggested.
    """
    if not isinstance(value, str) or value not in known:
        close = difflib.get_close_matches(value[:80], known, n=1) if isinstance(value, str) else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"{name}: expected one of {', '.join(known)}, found {quoted(value)}{hint}")
    return value


def text(name: str, value: Any, *, empty: bool = True) -> str:
    """A text that can be written as UTF-8.

    Raises:
        UsageError: no str, one with half of a surrogate pair in it, or an ``empty`` one where that means nothing.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name}: expected a text (str), found {quoted(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{name}: expected text, found half of a surrogate pair in {quoted(value)}, which no text holds; was it "
            "read as another encoding than UTF-8?"
        ) from None
    if not empty and not value:
        raise UsageError(f"{name}: expected a text of at least one character, found an empty one")
    return value


def place(name: str, value: Any) -> str:
    """A folder's path or a Hub id, as a str; nothing is looked up.

    Raises:
        UsageError: no str and no path, empty, or nothing that a file system could hold.
    """
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise UsageError(f"{name}: expected a path or a Hub id (str or pathlib.Path), found {quoted(value)}")
    if not given:
        raise UsageError(f"{name}: expected a path or a Hub id, found an empty text")
    try:
        encoded = os.fsencode(given)
    except UnicodeEncodeError:
        raise UsageError(f"{name}: expected a path or a Hub id, found half of a surrogate pair in it") from None
    if b"\0" in encoded:
        raise UsageError(f"{name}: expected a path or a Hub id, found a null character in {quoted(given)}")
    if len(encoded) > _LONGEST_PLACE:
        raise UsageError(f"{name}: expected a path or a Hub id, found {len(given):,} characters: {quoted(given)}")
    return given
