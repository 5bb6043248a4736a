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
        self._measuring: list[int] = []  # of whom each wants one step of so many counted

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
            self._decoder.measure_sparsity(True, min(self._measuring))
        self.in_force = sparsity

    def measure(self, every: int) -> None:
        """Have dropped channels counted, in one step of so many at least, until :meth:`stop_measuring`. From zero, if
        they were counted less often."""
        before = min(self._measuring, default=None)
        self._measuring.append(every)
        if before is None or every < before:
            self._decoder.measure_sparsity(True, every)

    def stop_measuring(self, every: int) -> None:
        """As often as they were asked for."""
        self._measuring.remove(every)
        if not self._measuring:
            self._decoder.measure_sparsity(False)
