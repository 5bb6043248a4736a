"""A JSON object's end, found while the object grows."""

from __future__ import annotations

import re

__all__ = ["BrokenError", "Nesting"]

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
