"""Cores, memory, device and torchrun place of this process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from .errors import UsageError
from .guard import quoted


def group_folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version) of the groups from ours up to the root; version 1 has a hierarchy for each controller.

    Args:
        root: where ``proc`` and ``sys`` lie.
        controller: ``memory`` or ``cpu``.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            mount, version = "", 2
        elif controller in controllers.split(","):
            mount, version = controller, 1
        else:
            continue
        # Inside a container the path is often the host's, and only the mount's own top is there to be seen.
        group = PurePosixPath("/", path)
        for above in (group, *group.parents):
            yield root / "sys/fs/cgroup" / mount / above.relative_to("/"), version


def read_lines(path: Path) -> list[str]:
    """A file's lines; none if it cannot be read: another system, or not ours to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


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


_NAME = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")


def choose_device(requested: Any = "auto", name: str = "device") -> torch.device:
    """``auto`` is the first NVIDIA GPU, or the CPU where there is none; else ``cpu``, ``cuda`` or ``cuda:N``.

    Args:
        requested: the name, or a ``torch.device``.
        name: what the caller calls this argument, for the message.

    Raises:
        UsageError: not a device, or one that this machine lacks.
    """
    import torch

    if isinstance(requested, str) and requested == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    spelled = str(requested) if isinstance(requested, torch.device) else requested
    match = _NAME.fullmatch(spelled) if isinstance(spelled, str) else None
    if match is None:
        raise UsageError(f"{name}: expected auto, cpu, cuda or cuda:N, found {quoted(requested)}")
    if spelled == "cpu":
        return torch.device("cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise UsageError(
            f"{name}: expected a device of this machine, found {spelled!r}, and torch sees {count} NVIDIA GPUs here; "
            "use cpu, or a torch with CUDA"
        )
    return torch.device("cuda", index)


# Where nothing says how much there is.
_ASSUMED_BYTES = 8 << 30
# Names of limit, usage and, in memory.stat, what precedes the sums over sub-groups, by the version of control groups.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def available_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device; for the CPU those of :func:`free_memory_bytes`."""
    import torch

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
