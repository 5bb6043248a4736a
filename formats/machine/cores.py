"""How many cores this process may use: of the machine, within its affinity mask and its container's quota.

A quota is a control group's (cgroup): so many microseconds of processor time in every period. It binds every process
below it, so the tightest of the groups from ours up to the root decides. Two threads on a quota of one core run for
half of every period and stand still for the other half, and each waits for the other meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .control_groups import group_folders, read_lines

__all__ = ["usable_cores"]


def usable_cores(root: str | os.PathLike[str] = "/") -> int:
    """Cores that a team of threads can keep busy all the time; 1 or more.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([float(mask), *_quotas(Path(root))])))


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
