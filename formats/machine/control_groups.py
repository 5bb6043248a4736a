"""The control groups (cgroups) that bind this process: a container's limits stand in one folder for each group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["group_folders", "read_lines"]


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
