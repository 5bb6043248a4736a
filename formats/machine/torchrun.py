"""Which of torchrun's processes this is: the only reader of what torchrun leaves in the environment.

A process is one of several only if all that torchrun sets is there and agrees. A single variable that another program,
or a shell, left behind (RANK=1) must not make a worker of it: workers are silent, and wait for a first process that
nobody started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Place", "torchrun_place"]

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This process among those that torchrun started; the default is a process alone.

    Attributes:
        index: which one this is, from 0; the first one leads, the others are silent.
        size: how many there are, on all machines.
        local: which one this is on its machine, from 0.
        local_size: how many there are on this machine.
        ignored: why variables that are set are not taken for torchrun's, as a sentence; empty if there are none.
    """

    index: int = 0
    size: int = 1
    local: int = 0
    local_size: int = 1
    ignored: str = ""


def torchrun_place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place. Never fails: what torchrun cannot have set is ignored, and ``ignored`` says why."""
    found = {name: environment[name] for name in (*_NEEDED, "LOCAL_WORLD_SIZE") if environment.get(name)}
    # What a process alone has, or would ignore without a difference.
    if found.get("RANK", "0") == "0" and found.get("WORLD_SIZE", "1") == "1":
        return Place()
    told = ", ".join(f"{name}={found[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in found)
    if missing := [name for name in _NEEDED if name not in found]:
        return _ignored(told, f"torchrun sets {', '.join(missing)} too")
    numbers = [
        found.get(name, found["WORLD_SIZE"]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ]
    if not all(
        number.isascii() and number.isdigit() and len(number) < 10 for number in (*numbers, found["MASTER_PORT"])
    ):
        return _ignored(told, "torchrun sets whole numbers")
    index, size, local, local_size = map(int, numbers)
    if not (index < size and local < local_size <= size and local <= index and 0 < int(found["MASTER_PORT"]) < 2**16):
        return _ignored(told, "these contradict each other")
    return Place(index, size, local, local_size)


def _ignored(told: str, why: str) -> Place:
    return Place(ignored=f"{told} in the environment ignored: {why}; this process converts alone")
