"""How many threads the next launch gets: as many as find a core, found out by what they waited for each other.

All threads of a team wait for the last one. Where another program takes a core, the thread that is left without one
holds up all others for as long as the scheduler lets the other program run, which is longer than ten whole decode
steps of a small model. So a team that lost too much time becomes smaller by a thread, and tries a larger size again
later: soon at first, and less often with every try that failed. Nothing but the waits is looked at: not how many
programs run (in a container one cannot see them), and not how fast a step was (its work differs).
"""

from __future__ import annotations

import time

import numpy as np

from .layout import TeamField
from .threads import launch

__all__ = ["Team"]

_CACHE_LINE = 64
# A thread less costs 1/size of the speed or less, so half of that is what waiting may cost for longer.
_TOLERATED = 0.5
_DEBT_NS = 1_000_000  # beyond it, at once: a program that takes a core takes it for a slice of some milliseconds
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 10_000_000, 640_000_000  # a failed try costs a slice
_CROWDED = 0.05  # of a smaller team's time, in which its calling thread had no core


class Team:
    """Launches one region after the other, each on as many threads as have found a core lately.

    Attributes:
        size: threads of the last launch.
    """

    def __init__(self) -> None:
        self.size = 0
        self._most = 0
        self._words = np.zeros(TeamField.SIZE + _CACHE_LINE // 8, dtype=np.int64)
        skip = -self._words.ctypes.data % _CACHE_LINE // 8
        self._words = self._words[skip : skip + TeamField.SIZE]
        self._pause = _FIRST_PAUSE_NS
        self._since = self._retry = 0
        self._debt = 0.0
        self._ran = self._lost = 0

    @property
    def address(self) -> int:
        """Of the words by which the team's threads meet: the region's TEAM."""
        return self._words.ctypes.data

    def launch(self, name: str, parameters: np.ndarray, most: int) -> None:
        """Run a region on at most ``most`` threads; see :func:`threads.launch`."""
        if most != self._most:
            self.size = self._most = most
            self._since = self._retry = self._debt = 0
        now = time.perf_counter_ns() if most > 1 else 0
        if self.size < most and now >= self._retry:
            if self._lost > self._ran * _CROWDED:
                self._retry, self._ran, self._lost = now + self._pause, 0, 0
            else:
                self._resize(self.size + 1, now, _FIRST_PAUSE_NS)
        small = self.size < most
        worked = time.thread_time_ns() if small else 0
        self._words[TeamField.WAITED_NS] = 0
        launch(name, parameters, self.size)
        if most == 1:
            return
        end = time.perf_counter_ns()
        if small:
            self._ran += end - now
            self._lost += end - now - (time.thread_time_ns() - worked)
        if self.size > 1:
            self._learn(end, end - now, int(self._words[TeamField.WAITED_NS]))

    def _learn(self, now: int, took: int, waited: int) -> None:
        """All in nanoseconds: the time, how long a launch took, and how much of that was waiting for a core."""
        self._debt = max(0.0, self._debt + waited - took * _TOLERATED / self.size)
        if self._debt > _DEBT_NS:
            # A try, not a size that had been good for long; the wait itself may be longer than the pause.
            failed = now - took - self._since < self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_NS) if failed else _FIRST_PAUSE_NS
            self._resize(self.size - 1, now, self._pause)

    def _resize(self, size: int, now: int, pause: int) -> None:
        self.size, self._since, self._retry, self._debt = size, now, now + pause, 0.0
        self._ran = self._lost = 0
