"""Token ids to text, one id at a time: never half a character, never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopStrings"]

# What a decoder prints for bytes that are no UTF-8, among them a character whose last bytes have not come yet.
_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so of one that is still incomplete at most 3 are there.
_MOST_INCOMPLETE = 3
# A window of more ids that are not context is made shorter: decoding it again for each id would take quadratic time.
_LONG = 64
# How many ids are looked at instead, and how many at the end of a window may still change what comes before them.
_CONTEXT = 32
_UNSETTLED = 8


class Detokenizer:
    """Decodes a growing sequence in pieces that join to the text of the whole.

    A piece is the difference between decoding a window of ids with and without the newest ones; the window begins some
    ids back, because many tokenizers decode an id differently at the beginning (they drop a leading space there).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` maps ids to text, special tokens left out."""
        self._decode = decode
        self._ids: list[int] = []  # the window: context, then ids whose text is not out yet
        self._context = 0  # how many of them are context
        self._out = 0  # characters after the context's that are out already
        self._silent = False  # all after the context gives no text so far
        self._long = _LONG

    def add(self, token_id: int) -> str:
        """The text that this id completes; often all of its own, empty while a character is incomplete."""
        self._ids.append(token_id)
        return self._emit(final=False)

    def finish(self) -> str:
        """What is still held back: bytes that never became a character, as replacement characters."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        # Special tokens, say: as long as the newest ids give nothing, no more are looked at.
        fresh_ids = len(self._ids) - self._context
        if not final and self._silent and fresh_ids > _LONG and not self._decode(self._ids[-_CONTEXT:]):
            return ""
        fresh = self._decode(self._ids)[len(self._decode(self._ids[: self._context])) :]
        held = 0
        if not final:
            while held < min(_MOST_INCOMPLETE, len(fresh)) and fresh[-1 - held] == _REPLACEMENT:
                held += 1
        piece = fresh[self._out : len(fresh) - held]
        self._out += len(piece)
        if not held and fresh:
            # Everything is out: what was fresh becomes the context of what follows.
            self._ids = self._ids[self._context :]
            self._context, self._out, self._long = len(self._ids), 0, _LONG
        elif held and fresh_ids > self._long:
            self._shorten(fresh, held)
        self._silent = not fresh
        return piece

    def _shorten(self, fresh: str, held: int) -> None:
        """Let the window begin later, although its last characters are held: bytes without end that are no UTF-8."""
        ids = self._ids[-_CONTEXT - _UNSETTLED :]
        context, whole = self._decode(ids[:_CONTEXT]), self._decode(ids)
        rest = whole[len(context) :]
        if whole.startswith(context) and fresh.endswith(rest) and len(rest) >= held:
            self._ids, self._context, self._out, self._long = ids, _CONTEXT, len(rest) - held, _LONG
        else:
            self._long = 2 * (len(self._ids) - self._context)  # the place was no border between characters


class StopStrings:
    """Cuts a text off before the first stop string, wherever the pieces' borders fall.

    Of several stop strings the one that is complete first wins, the longest of those that end together.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that is certain not to belong to a stop string; nothing any more once one was found."""
        if self.found:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = self._open(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the text: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stops):
                return length
        return 0
