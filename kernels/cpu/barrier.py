"""Compiled: the barrier of a team of threads."""

from __future__ import annotations

import numpy as np

from .intrinsics import add_word, exact, get_word, now_ns, put_word, relax, sleep_us
from .layout import TeamField

_ARRIVED, _PASSED, _WAITED = (8 * field.value for field in TeamField if field != TeamField.SIZE)
_SPINS = 64  # polls between two readings of the clock
_SPIN_NS = 100_000  # spin this long, then sleep: the thread that is waited for probably has no core
_SLEEP_US = 50


@exact
def barrier(team, threads):
    """Wait until all threads have arrived: spin, then sleep. team: the address of the words of `TeamField`."""
    if threads == 1:
        return
    arrived, passed = team + _ARRIVED, team + _PASSED
    generation = get_word(passed)
    order = add_word(arrived, np.int64(1))
    if order + 1 == threads:
        put_word(arrived, np.int64(0))
        put_word(passed, generation + 1)
        return
    began = np.int64(0)
    while True:
        for _ in range(_SPINS):
            if get_word(passed) != generation:
                return
            relax()
        if began == 0:
            began = now_ns()
        elif now_ns() - began > _SPIN_NS:
            break
    while get_word(passed) == generation:
        sleep_us(np.uint32(_SLEEP_US))
    if order == 0:  # counted by the thread that waited longest
        add_word(team + _WAITED, now_ns() - began)
