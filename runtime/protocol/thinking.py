"""What a model thinks before it answers, split off: ``<think>…</think>``, wherever the borders of pieces fall."""

from __future__ import annotations

__all__ = ["OPEN", "Thinking", "ThoughtCount"]

OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """One answer's text, of which the beginning may be thought. White space around either part is left out."""

    def __init__(self, *, begun: bool) -> None:
        """``begun``: the prompt ends with the opening tag, as some templates have it."""
        self._tag: str | None = CLOSE if begun else OPEN  # the next to come; None: the answer has begun
        self._held = ""
        self._started = False  # the part has shown something but white space

    def add(self, text: str) -> tuple[str, str]:
        """What a piece adds to the thought, and to the answer."""
        if self._tag is None:
            return "", self._strip(text)
        self._held += text
        if self._tag == OPEN:
            found = self._held.lstrip()
            if found.startswith(OPEN):
                self._tag, self._held = CLOSE, found[len(OPEN) :]
            elif OPEN.startswith(found):
                return "", ""
            else:  # it answers at once, and as it likes
                self._tag, self._started = None, True
                held, self._held = self._held, ""
                return "", held
        thought, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._tag, self._held = None, ""
            thought = self._strip(thought.rstrip())
            self._started = False
            return thought, self._strip(rest)
        # White space, and what may become the tag, waits for what follows.
        sure = len(thought.rstrip())
        for length in range(min(len(CLOSE) - 1, len(thought)), 0, -1):
            if thought.endswith(CLOSE[:length]):
                sure = len(thought[: len(thought) - length].rstrip())
                break
        self._held = thought[sure:]
        return self._strip(thought[:sure]), ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return ("", held) if self._tag == OPEN else (self._strip(held.rstrip()), "")

    def _strip(self, text: str) -> str:
        """Without the white space that a part begins with."""
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        return text


class ThoughtCount:
    """How many of one answer's tokens are thought, the tags among them."""

    def __init__(self, *, begun: bool) -> None:
        """``begun``: as for ``Thinking``."""
        self._tag: str | None = CLOSE if begun else OPEN  # the next to come; None: nothing more is thought
        self._held = ""
        self._seen = 0
        self.tokens = 0

    def add(self, text: str) -> None:
        """One more token, and the text that it adds."""
        if self._tag is None:
            return
        self._seen += 1
        self._held += text
        if self._tag == OPEN:
            found = self._held.lstrip()
            if not found.startswith(OPEN):
                if not OPEN.startswith(found):
                    self._tag = None
                return
            self._tag, self._held = CLOSE, found[len(OPEN) :]
        self.tokens = self._seen
        if CLOSE in self._held:
            self._tag = None
        self._held = self._held[1 - len(CLOSE) :]
