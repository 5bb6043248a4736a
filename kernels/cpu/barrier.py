"""Compiled: where the threads of a team wait for each other.

Work is cut into even parts, so a wait is some microseconds, and spinning is the fastest way through it. A long wait
means that a thread of the team has no core: another program has it. Whoever spins on then keeps the very core on which
the missing thread could run, so a waiting thread gives its own away, and what was lost is counted: `team` makes the
team smaller by it.
"""

from __future__ import annotations

import numpy as np

from .intrinsics import add_word, exact, get_word, now_ns, put_word, relax, sleep_us
from .layout import TeamField

__all__ = ["barrier"]

_ARRIVED, _PASSED, _WAITED = (8 * field.value for field in TeamField if field != TeamField.SIZE)
_LOOKS = 64  # between two looks at the clock
_BRIEF_NS = 100_000  # a thread that is late for longer has no core; putting one to sleep and waking it costs a tenth
_SLEEP_US = 50


@exact
def barrier(team, parts):
    """Wait until all ``parts`` threads of a team are here; ``team`` is the address of its `TeamField`."""
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
        for _ in range(_LOOKS):
            if get_word(passed) != now:
                return
            relax()
        if began == 0:
            began = now_ns()
        elif now_ns() - began > _BRIEF_NS:
            break
    while get_word(passed) == now:
        sleep_us(np.uint32(_SLEEP_US))
    if place == 0:  # one of them counts it, the one who waited longest
        add_word(team + _WAITED, now_ns() - began)
