"""The sparsity levels of the requests on one decoder: the level of its masks, and the turns in which levels are decoded."""

from __future__ import annotations

import time
from collections.abc import Collection

from wisparse.formats.bundle import Bundle

from ..decoding.decoder import Decoder

# Longest time of decoding one level while requests of another level wait.
TURN_SECONDS = 0.25


class Levels:
    """``default``: the level of requests that name none; ``current``: that of the decoder's masks, None after a failure."""

    def __init__(self, decoder: Decoder, bundle: Bundle | None) -> None:
        self._decoder, self._bundle = decoder, bundle
        self.default = self.current = None if bundle is None else bundle.sparsity
        self._turn: float | None = None  # the level whose turn it is
        self._began: dict[float | None, float] = {}  # by level, when its last turn began

    def resolve(self, sparsity: float | None) -> float | None:
        """The level of a request; UsageError if the bundle does not have it."""
        return self.default if sparsity is None or self._bundle is None else self._bundle.at(sparsity).sparsity

    def use(self, sparsity: float | None) -> None:
        """Set the decoder's masks to a level's. The slots are unchanged."""
        if sparsity != self.current:
            assert self._bundle is not None
            assert sparsity is not None
            self.current = None
            self._decoder.set_masks(self._bundle.at(sparsity).masks)
            self.current = sparsity

    def of_step(self, levels: Collection[float | None], *, all_levels: bool) -> list[float | None]:
        """Those of ``levels`` to decode in this step: the one whose turn it is, or all of them."""
        if all_levels or not levels:
            return sorted(levels, key=lambda level: level != self.current)  # the current masks' level first
        now = time.perf_counter()
        expired = len(levels) > 1 and now - self._began.get(self._turn, 0.0) >= TURN_SECONDS
        if self._turn not in levels or expired:
            self._turn = min(levels, key=lambda level: self._began.get(level, 0.0))
            self._began[self._turn] = now
        return [self._turn]
