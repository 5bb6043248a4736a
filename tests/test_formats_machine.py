"""Usable and idle cores, and free memory, within the limits of control groups."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from wisparse.formats import machine
from wisparse.formats.machine import free_memory_bytes, idle_cores, usable_cores

GB = 1 << 30


@pytest.fixture(autouse=True)
def machine_of_eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GB))


def with_groups(root: Path, groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    return root


def put(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def set_quota(folder: Path, version: int, quota: str) -> None:
    old = {"cpu.cfs_quota_us": quota.replace("max", "-1"), "cpu.cfs_period_us": 100000}
    put(folder, {"cpu.max": f"{quota} 100000"} if version == 2 else old)


def set_memory(folder: Path, version: int, limit: int | str, used: int, cache: int = 0) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    stat = f"anon 5\n{prefix}inactive_file {cache // 4}\n{prefix}active_file {cache // 4 * 3}"
    put(folder, {**dict(zip(names, (limit, used), strict=True)), "memory.stat": stat})


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("given", "found"), [("max", 8), ("300000", 3), ("250000", 2), ("50000", 1), ("6400000", 8), ("broken", 8)]
)
def test_a_quota_gives_whole_cores(version: int, given: str, found: int, tmp_path: Path) -> None:
    root = with_groups(tmp_path, "0::/a/b\n" if version == 2 else "4:cpu,cpuacct:/a/b\n3:memory:/\n")
    set_quota(root / "sys/fs/cgroup" / ("" if version == 2 else "cpu") / "a", version, given)
    assert usable_cores(root) == found


def test_the_tightest_group_decides(tmp_path: Path) -> None:
    root = with_groups(tmp_path, "0::/a/b\n")
    set_quota(root / "sys/fs/cgroup/a/b", 2, "700000")
    set_quota(root / "sys/fs/cgroup/a", 2, "200000")
    set_quota(root / "sys/fs/cgroup", 2, "max")
    assert usable_cores(root) == 2
    set_memory(root / "sys/fs/cgroup/a/b", 2, 8 * GB, 6 * GB)
    set_memory(root / "sys/fs/cgroup/a", 2, 16 * GB, 7 * GB)
    assert free_memory_bytes(root) == 2 * GB


def test_a_system_without_control_groups_and_affinity_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (usable_cores(tmp_path), free_memory_bytes(tmp_path)) == (8, 64 * GB)
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    assert usable_cores(tmp_path) == psutil.cpu_count()


@pytest.mark.parametrize(("idle", "found"), [([100] * 8, 8), ([100] * 3 + [0] * 5, 3), ([0] * 8, 1), ([80] * 8, 6)])
def test_idle_cores_of_the_mask(idle: list[int], found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``idle``: percent of a quarter of a second, of cores that were idle for an hour before."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    clock = [0.0]
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: clock.append(clock[-1] + seconds))

    def times(percpu: bool) -> list[SimpleNamespace]:
        shares = [*idle, 100]  # the last core is not in the mask
        return [SimpleNamespace(idle=3600.0, iowait=clock[-1] * share / 100) for share in shares]

    monkeypatch.setattr(psutil, "cpu_times", times)
    assert idle_cores() == found
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    assert idle_cores() == min(found, 2)


@pytest.mark.parametrize("path", ["/", "/docker/0123abc"], ids=["own namespace", "the host's path"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_memory(version: int, path: str, tmp_path: Path) -> None:
    line = f"0::{path}\n" if version == 2 else f"12:cpu,cpuacct:/\n7:hugetlb,memory:{path}\n"
    root = with_groups(tmp_path, line)
    folder = root / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    set_memory(folder, version, 4 * GB, 1 * GB)
    assert free_memory_bytes(root) == 3 * GB
    set_memory(folder, version, 4 * GB, 4 * GB, cache=3 * GB)  # the page cache can be reclaimed
    assert free_memory_bytes(root) == 3 * GB
    set_memory(folder, version, 1 * GB, 2 * GB)
    assert free_memory_bytes(root) == 0
    set_memory(folder, version, "max" if version == 2 else 0x7FFFFFFFFFFFF000, 3 * GB)
    assert free_memory_bytes(root) == 64 * GB
