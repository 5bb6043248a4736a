"""Compiled: the barrier of a team's threads."""

from __future__ import annotations

import numpy as np

from .intrinsics import add_word, exact, get_word, now_ns, put_word, relax, sleep_us
from .layout import TeamField

_ARRIVED, _PASSED, _WAITED = (8 * field.value for field in TeamField if field != TeamField.SIZE)
_SPINS = 64  # between two readings of the clock
_SPIN_NS = 100_000  # a thread that is later than this has no core: sleep until it comes
_SLEEP_US = 50


@exact
def barrier(team, parts):
    """Wait until all ``parts`` threads are here: spin, then sleep; ``team`` is the address of a `TeamField`."""
    if parts == 1:
        return
    arrived, passed = team + _ARRIVED, team + _PASSED
    now = get_word(passed)
    place = add_word(arrived, np.int64(1))
    if place + 1 == parts:
        put_word(arrived, np.int64(0))
        put_word(passed, now + 1)
        return
    began = np.int64(0)
    while True:
        for _ in range(_SPINS):
            if get_word(passed) != now:
                return
            relax()
        if began == 0:
            began = now_ns()
        elif now_ns() - began > _SPIN_NS:
            break
    while get_word(passed) == now:
        sleep_us(np.uint32(_SLEEP_US))
    if place == 0:  # only the thread that waited longest counts it
        add_word(team + _WAITED, now_ns() - began)
