"""What the slots still hold of prompts that were read, and which slot a new prompt is read into.

    held:  [system, question 1 ...]            the prompt as it was read; the answer after it does not count
    new:   [system, question 1, answer 1, question 2]
            \\____ kept _________/ \\___ read ____________/

Only a prompt's positions serve again. An answer's were decoded sparse; as part of the next prompt its tokens are read
as that prompt's policy says, so an answer does not depend on what happened to be in the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Prefixes"]

_STRIDE = 256


@dataclass
class _Held:
    """Of one slot: the tokens at its first positions, how they were read, and when it was last used."""

    tokens: Sequence[int] = ()
    sparse_from: int = 0
    long: bool = False
    used: int = field(default=-1)


class Prefixes:
    """The prompts that some slots hold.

    Args:
        slots: how many there are.
        grain: positions serve again up to a multiple of it; see ``Decoder``.
        switch: from how many tokens on a sequence's positions are turned by other factors (``rotary.switch_length``).
    """

    def __init__(self, slots: int, grain: int, switch: int | None) -> None:
        self._held = [_Held() for _ in range(slots)]
        self._grain, self._switch = grain, switch
        self._clock = 0

    def choose(self, tokens: Sequence[int], sparse_from: int, idle: Collection[int]) -> tuple[int, int, int]:
        """Where to read a sequence.

        Args:
            tokens: the whole sequence.
            sparse_from: its first sparse position.
            idle: slots that serve nobody, one at least.

        Returns:
            The slot, one of ``idle``; the slot whose first positions serve, itself or another one; and how many: the
            last position is always left to be read.
        """
        source, length = -1, 0
        for slot in range(len(self._held)):
            shared = self._shared(self._held[slot], tokens, sparse_from)
            if shared > length:
                source, length = slot, shared
        oldest = min(idle, key=lambda slot: (self._held[slot].used, slot))
        if length == 0:
            return oldest, oldest, 0
        # In place what follows the shared part is lost, by copying it what the other slot holds.
        if source in idle and self._whole(len(self._held[source].tokens)) - length <= len(self._held[oldest].tokens):
            return source, source, length
        return oldest, source, length

    def note(self, slot: int, tokens: Sequence[int], total: int, sparse_from: int) -> None:
        """The slot holds these tokens now, read as the beginning of a sequence of ``total``."""
        self._clock += 1
        self._held[slot] = _Held(tokens, sparse_from, self._long(total), self._clock)

    def touch(self, slot: int) -> None:
        """The slot was used just now."""
        self._clock += 1
        self._held[slot].used = self._clock

    def keep_dense(self) -> None:
        """Other masks are in force: only what was read without any serves on."""
        for held in self._held:
            held.tokens = held.tokens[: held.sparse_from]

    def forget(self) -> None:
        """No slot's contents are known any more."""
        self._held = [_Held() for _ in self._held]

    def _shared(self, held: _Held, tokens: Sequence[int], sparse_from: int) -> int:
        """How many of the slot's positions are those of the sequence."""
        if held.long != self._long(len(tokens)):
            return 0
        most = min(len(held.tokens), len(tokens) - 1)
        if held.sparse_from != sparse_from:
            most = min(most, held.sparse_from, sparse_from)
        return self._whole(_common(held.tokens, tokens, most))

    def _long(self, total: int) -> bool:
        return self._switch is not None and total > self._switch

    def _whole(self, length: int) -> int:
        return length // self._grain * self._grain


def _common(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """How many tokens two sequences begin with alike, at most ``most``."""
    for start in range(0, most, _STRIDE):
        stop = min(start + _STRIDE, most)
        if first[start:stop] != second[start:stop]:
            return next(place for place in range(start, stop) if first[place] != second[place])
    return most
