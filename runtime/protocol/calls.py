"""Calls of functions in what a model writes, split from its text wherever the borders of pieces fall.

What does not become a call is text as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .call_deltas import CallDelta
from .call_objects import HEAD, may_be_call, read_call
from .nesting import BrokenError, Nesting
from .syntax import Syntax

__all__ = ["CallParser"]

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
