"""Which of its bundle's rungs a decoder runs at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..decoding.decoder import Decoder

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle

__all__ = ["Rungs"]


class Rungs:
    """The rungs of one decoder, of which one at a time is in force, for all its slots. Not thread-safe, but for
    :meth:`named`.

    Args:
        decoder: nobody else sets its masks.
        bundle: what it was made of, with the rung in force that it was made at.

    Attributes:
        own: the rung of those who name none.
        in_force: the rung of the next step; None after a switch that failed.
    """

    def __init__(self, decoder: Decoder, bundle: Bundle) -> None:
        self.own = bundle.sparsity
        self.in_force: float | None = bundle.sparsity
        self._decoder, self._bundle = decoder, bundle
        self._measuring = 0

    def named(self, sparsity: float | None) -> float:
        """The rung that is meant; None: the own one.

        Raises:
            UsageError: the bundle has no such rung.
        """
        return self.own if sparsity is None else self._bundle.at(sparsity).sparsity

    def switch(self, sparsity: float) -> None:
        """Put a rung in force, one that :meth:`named` gave. Dropped channels are counted from zero again."""
        self.in_force = None
        self._decoder.set_masks(self._bundle.at(sparsity).masks)
        if self._measuring:
            self._decoder.measure_sparsity(True)
        self.in_force = sparsity

    def measure(self, more: int) -> None:
        """Have dropped channels counted while somebody wants it: 1 to begin, -1 to end."""
        before, self._measuring = self._measuring, self._measuring + more
        if bool(before) != bool(self._measuring):
            self._decoder.measure_sparsity(self._measuring > 0)
