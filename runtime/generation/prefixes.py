"""Which prompt tokens the slots' caches hold, so that a prompt which shares a beginning is not read again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..decoding.cache import KVCache, RecurrentState


@dataclass
class CachedPrefix:
    """The tokens in a slot's KV cache, how they were computed, when the slot was last used, and recurrent states."""

    tokens: Sequence[int] = ()
    sparse_from: int = 0
    sparsity: float | None = None  # the level of the positions from ``sparse_from`` on
    long_factors: bool = False  # of LongRoPE
    last_used: int = -1
    states: Mapping[int, Sequence[RecurrentState]] = field(default_factory=dict)  # by the positions that they follow


class SavedPrompt(Protocol):
    @property
    def path(self) -> Path: ...
    @property
    def prefix(self) -> CachedPrefix: ...  # of its states the positions alone

    def load(self, cache: KVCache, slot: int, length: int) -> Sequence[RecurrentState]:
        """Fill the first ``length`` positions of a slot; returns the states after them. Raises WisparseError."""


class PrefixCache:
    """Which prompt tokens each slot's KV cache holds, and copies of recurrent states after some of them."""

    def __init__(self, slots: int, block_size: int, switch: int | None, max_checkpoints: int | None = None) -> None:
        """``max_checkpoints``: most copies of recurrent states; None: the model has no recurrent blocks."""
        self._prefixes = [CachedPrefix() for _ in range(slots)]
        self._block_size, self._switch, self._max_checkpoints = block_size, switch, max_checkpoints
        self._clock = 0

    def choose(
        self, tokens: Sequence[int], sparse_from: int, sparsity: float | None, idle: Collection[int]
    ) -> tuple[int, int, int]:
        """A slot of ``idle`` for a sequence, the slot with the longest reusable prefix, and its length: whole blocks, after
        which states were kept if the model has them, at most all tokens but the last."""
        source, length = -1, 0
        for slot, prefix in enumerate(self._prefixes):
            if (reusable := self.reusable(prefix, tokens, sparse_from, sparsity)) > length:
                source, length = slot, reusable
        oldest = self.oldest(idle)
        if length == 0:
            return oldest, oldest, 0
        # Reuse in place discards the rest of the source's prefix, a copy discards the oldest slot's: discard the shorter.
        rest = self._whole_blocks(len(self._prefixes[source].tokens)) - length
        if source in idle and rest <= len(self._prefixes[oldest].tokens):
            return source, source, length
        return oldest, source, length

    def reusable(self, prefix: CachedPrefix, tokens: Sequence[int], sparse_from: int, sparsity: float | None) -> int:
        """How many positions of a prefix a sequence can go on from."""
        if prefix.long_factors != self._uses_long_factors(len(tokens)):
            return 0
        limit = min(len(prefix.tokens), len(tokens) - 1)
        if (prefix.sparse_from, prefix.sparsity) != (sparse_from, sparsity):
            limit = min(limit, prefix.sparse_from, sparse_from)
        # Skip equal slices, which are compared in C, then find the first token that differs.
        common = 0
        while common < limit and prefix.tokens[common : common + 256] == tokens[common : common + 256]:
            common += 256
        common = next((i for i in range(common, limit) if prefix.tokens[i] != tokens[i]), limit)
        if self._max_checkpoints is None:
            return self._whole_blocks(common)
        return max((position for position in prefix.states if position <= common), default=0)

    def note(
        self, slot: int, tokens: Sequence[int], total: int, sparse_from: int, sparsity: float | None, source: int = -1
    ) -> None:
        """Record the tokens in a slot, computed as the beginning of a sequence of ``total`` from what slot ``source`` (-1:
        the same one) holds."""
        self._clock += 1
        before = self._prefixes[slot if source < 0 else source].states
        states = {position: state for position, state in before.items() if position <= len(tokens)}
        long_factors = self._uses_long_factors(total)
        self._prefixes[slot] = CachedPrefix(tokens, sparse_from, sparsity, long_factors, self._clock, states)

    def checkpoints(self, length: int, chunk_size: int) -> list[int]:
        """The positions at which to keep states of a prompt of ``length`` tokens: the end of its last whole block, and at
        twice the distance from it each, ends of blocks, then of whole chunks. A prompt that differs in the last d tokens
        is read from about 2 d before the end on."""
        end, positions, distance = self._whole_blocks(length - 1), list[int](), 0
        while self._max_checkpoints and distance < end:
            position = end - distance
            positions.append(position // chunk_size * chunk_size if distance >= chunk_size else position)
            distance = 2 * distance or self._block_size
        return [position for position in positions if position]

    def keep(self, slot: int, states: Sequence[RecurrentState]) -> None:
        """Keep the states after a slot's tokens. Beyond the limit, the prefix that has most of them loses one, not the
        last: where its neighbours are closest, relative to the distance from the last."""
        assert self._max_checkpoints is not None
        prefix = self._prefixes[slot]
        prefix.states = {**prefix.states, len(prefix.tokens): states}
        while len({id(one) for prefix in self._prefixes for one in prefix.states.values()}) > self._max_checkpoints:
            prefix = max(self._prefixes, key=lambda prefix: (len(prefix.states), -prefix.last_used))
            ends = [0, *sorted(prefix.states)]
            between = range(1, len(ends) - 1)
            dropped = min(between, key=lambda i: (ends[i + 1] - ends[i - 1]) / (ends[-1] - ends[i]), default=-1)
            prefix.states = {at: one for at, one in prefix.states.items() if at != ends[dropped]}

    def prefix(self, slot: int) -> CachedPrefix:
        return self._prefixes[slot]

    def newest(self) -> int:
        """The most recently used slot."""
        return max(range(len(self._prefixes)), key=lambda slot: self._prefixes[slot].last_used)

    def oldest(self, slots: Iterable[int]) -> int:
        """The least recently used of these slots."""
        return min(slots, key=lambda slot: (self._prefixes[slot].last_used, slot))

    def forget(self, slot: int) -> None:
        self._prefixes[slot] = CachedPrefix()

    def touch(self, slot: int) -> None:
        self._clock += 1
        self._prefixes[slot].last_used = self._clock

    def clear(self) -> None:
        self._prefixes = [CachedPrefix() for _ in self._prefixes]

    def _uses_long_factors(self, total: int) -> bool:
        return self._switch is not None and total > self._switch

    def _whole_blocks(self, length: int) -> int:
        return length // self._block_size * self._block_size
