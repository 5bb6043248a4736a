"""How much memory this process can still take: of a GPU, of the machine, and of the container it runs in.

A container's limit is a control group's (cgroup). It binds every process below it, so the tightest of the groups from
ours up to the root decides. What a group uses counts the files it has read; the kernel gives those pages back when
memory is asked for, so they are free: else a model would fit into a container only before its files were read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from .control_groups import group_folders, read_lines

__all__ = ["available_bytes", "free_memory_bytes"]

# Where nothing says how much there is.
_ASSUMED_BYTES = 8 << 30
# Names of limit, usage and, in memory.stat, what precedes the sums over sub-groups, by the version of control groups.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def available_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device; for the CPU those of :func:`free_memory_bytes`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return free_memory_bytes()


def free_memory_bytes(root: str | os.PathLike[str] = "/") -> int:
    """Bytes of memory that this process can still take without swapping; 0 or more.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    root = Path(root)
    return max(0, min([_machine(root), *_groups(root)]))


def _machine(root: Path) -> int:
    """What the kernel calls available; all memory where it does not say; 8 GiB where nobody does."""
    for key, value in _numbers(root / "proc/meminfo"):
        if key == "MemAvailable:":
            return value * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _ASSUMED_BYTES


def _groups(root: Path) -> Iterator[int]:
    """What each limited group above this process has left."""
    for folder, version in group_folders(root, "memory"):
        limit, usage, prefix = _FILES[version]
        bound, used = _number(folder / limit), _number(folder / usage)
        if bound is not None and used is not None:
            cache = sum(
                value
                for key, value in _numbers(folder / "memory.stat")
                if key in (f"{prefix}active_file", f"{prefix}inactive_file")
            )
            yield bound - max(0, used - cache)


def _number(path: Path) -> int | None:
    text = "".join(read_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _numbers(path: Path) -> Iterator[tuple[str, int]]:
    """The lines ``key number …`` of a file."""
    for line in read_lines(path):
        key, *rest = line.split()[:2] or [""]
        if rest and rest[0].isdigit():
            yield key, int(rest[0])
