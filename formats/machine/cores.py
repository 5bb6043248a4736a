"""How many cores this process may use: of the machine, within its affinity mask and its container's quota; and how many
of them other programs leave idle.

A quota is a control group's (cgroup): so many microseconds of processor time in every period. It binds every process
below it, so the tightest of the groups from ours up to the root decides. Two threads on a quota of one core run for
half of every period and stand still for the other half, and each waits for the other meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from .control_groups import group_folders, read_lines

__all__ = ["idle_cores", "usable_cores"]

_IDLE, _WAITING_FOR_A_DISK = 3, 4  # columns of /proc/stat


def usable_cores(root: str | os.PathLike[str] = "/") -> int:
    """Cores that a team of threads can keep busy all the time; 1 or more.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([float(mask), *_quotas(Path(root))])))


def idle_cores(seconds: float = 0.25, root: str | os.PathLike[str] = "/") -> int:
    """Of :func:`usable_cores` those that nobody computed on for the next ``seconds``, which this process sleeps; at
    least 1. All of them where the system does not tell."""
    before = _cores(Path(root))
    time.sleep(seconds)
    idle = 0.0
    for name, after in _cores(Path(root)).items():
        ticks = [new - old for new, old in zip(after, before.get(name, after), strict=True)]
        total = sum(ticks)
        idle += (ticks[_IDLE] + ticks[_WAITING_FOR_A_DISK]) / total if total > 0 else 1.0
    usable = usable_cores(root)
    return max(1, min(usable, round(idle))) if before else usable


def _cores(root: Path) -> dict[str, list[int]]:
    """What each core in this process's affinity mask did since the system's start, in ticks; the columns behind the
    eighth are counted among the first ones too."""
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    names = {f"cpu{number}" for number in mask}
    rows = (line.split() for line in read_lines(root / "proc" / "stat"))
    return {row[0]: [int(ticks) for ticks in row[1:9]] for row in rows if len(row) > 8 and row[0] in names}


def _quotas(root: Path) -> Iterator[float]:
    """The quotas of the groups above this process, in cores."""
    for folder, version in group_folders(root, "cpu"):
        if version == 2:
            numbers = " ".join(read_lines(folder / "cpu.max")).split()
        else:
            numbers = [" ".join(read_lines(folder / f"cpu.cfs_{name}_us")).strip() for name in ("quota", "period")]
        # "max", and -1 in version 1, is no limit.
        if len(numbers) == 2 and all(number.isdigit() for number in numbers) and int(numbers[1]) > 0:
            yield int(numbers[0]) / int(numbers[1])
