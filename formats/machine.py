"""CPU cores, memory, device and torchrun rank of this process."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from .errors import UsageError
from .guard import quoted
from .lazy import torch


def shown_bytes(count: float) -> str:
    """A size as text: GB or MB, and no less than 1 MB unless it is 0."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{math.ceil(count / 1e6)} MB"


def cache_folder() -> Path:
    """Where results that can be made again are kept: ``$WISPARSE_CACHE``, or ``wisparse`` in the user's cache folder."""
    folder = os.environ.get("WISPARSE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "wisparse")
    return Path(folder).expanduser()


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of the affinity mask, up to the cgroups' CPU quotas; at least 1."""
    cores = float(len(_affinity()))
    for folder, version in _control_groups(root, "cpu"):
        if version == 2:
            quota, period, *_ = (*_read(folder / "cpu.max").split(), "", "")
        else:
            quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        # "max", or -1 in version 1, means no limit.
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def idle_cores(seconds: float = 0.25) -> int:
    """Number of usable cores that are idle during the next ``seconds``; at least 1."""

    def idle_seconds() -> float:
        # Not cpu_times_percent, whose percentages over less than a second refer to a second.
        times = enumerate(psutil.cpu_times(percpu=True))
        return sum(core.idle + getattr(core, "iowait", 0.0) for number, core in times if number in mask)

    mask = _affinity()
    before = idle_seconds()
    time.sleep(seconds)
    return max(1, min(usable_cores(), round((idle_seconds() - before) / seconds)))


def _affinity() -> set[int]:
    # macOS has no affinity masks.
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(psutil.cpu_count() or 1))


def available_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory_bytes()


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can allocate without swapping, by the machine and the cgroups."""
    free = psutil.virtual_memory().available
    for folder, version in _control_groups(root, "memory"):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        limit, usage = (_read(folder / f"memory.{name}").strip() for name in names)
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
            sums = "" if version == 2 else "total_"  # including child groups
            cache = sum(int(stat.get(f"{sums}{kind}_file", 0)) for kind in ("active", "inactive"))
            free = min(free, int(limit) - max(0, int(usage) - cache))
    return max(0, free)


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's cgroups up to the root; version 1 has a hierarchy per controller."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            mount, version = "", 2
        elif controller in controllers.split(","):
            mount, version = controller, 1
        else:
            continue
        # In a container the path may be the host's, where only the mount's root is visible.
        group = PurePosixPath("/", path)
        for above in (group, *group.parents):
            yield root / "sys/fs/cgroup" / mount / above.relative_to("/"), version


def _read(path: Path) -> str:
    """A file's text; empty if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def choose_device(requested: Any = "auto", name: str = "device") -> torch.device:
    """``auto`` (the first NVIDIA GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``."""
    if isinstance(requested, str) and requested == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    spelled = str(requested) if isinstance(requested, torch.device) else requested
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", spelled) if isinstance(spelled, str) else None
    if match is None:
        raise UsageError(f"{name}: expected auto, cpu, cuda or cuda:N, found {quoted(requested)}")
    if spelled == "cpu":
        return torch.device("cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        found = f"found {spelled!r}, and torch sees {count} NVIDIA GPUs here"
        raise UsageError(f"{name}: expected a device of this machine, {found}; use cpu, or a torch with CUDA")
    return torch.device("cuda", index)


_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This process's torchrun ranks; the default is a single process. ``ignored``: why variables that are set are not
    torchrun's, or empty."""

    index: int = 0
    size: int = 1
    local: int = 0
    local_size: int = 1
    ignored: str = ""


def torchrun_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Read the environment. Values that torchrun cannot have set are ignored, with the reason in ``ignored``."""
    found = {name: environment[name] for name in (*_NEEDED, "LOCAL_WORLD_SIZE") if environment.get(name)}
    # The values of a single process, or without effect on one.
    if found.get("RANK", "0") == "0" and found.get("WORLD_SIZE", "1") == "1":
        return Place()
    told = ", ".join(f"{name}={found[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in found)
    ignored = f"{told} in the environment ignored: {{}}; this process converts alone"
    if missing := [name for name in _NEEDED if name not in found]:
        return Place(ignored=ignored.format(f"torchrun sets {', '.join(missing)} too"))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    numbers = [found.get(name, found["WORLD_SIZE"]) for name in names]
    if all(re.fullmatch("[0-9]{1,9}", number) for number in numbers):
        index, size, local, local_size, port = map(int, numbers)
        if index < size and local < local_size <= size and local <= index and 0 < port < 2**16:
            return Place(index, size, local, local_size)
    return Place(ignored=ignored.format("these are not whole numbers that agree with each other"))
