"""Free memory: the machine's, and that of the control groups which bound a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from wisparse.formats.machine import free_memory_bytes

GB = 1 << 30


def machine(root: Path, groups: str, available: int = 64 * GB) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {128 * GB // 1024} kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(folder: Path, version: int, limit: int | str, used: int, cache: int = 0) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = {"anon": 5, f"{prefix}inactive_file": cache // 4, f"{prefix}active_file": cache // 4 * 3}
    (folder / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in stat.items()))


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/user.slice/session\n")
    assert free_memory_bytes(root) == 64 * GB
    group(root / "sys/fs/cgroup/user.slice", 2, "max", 3 * GB)
    assert free_memory_bytes(root) == 64 * GB


@pytest.mark.parametrize("path", ["/", "/docker/0123abc"], ids=["own namespace", "the host's path"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit(version: int, path: str, tmp_path: Path) -> None:
    line = f"0::{path}\n" if version == 2 else f"12:cpu,cpuacct:/\n7:hugetlb,memory:{path}\n"
    root = machine(tmp_path, line)
    group(root / "sys/fs/cgroup" / ("" if version == 2 else "memory"), version, 4 * GB, 1 * GB)
    assert free_memory_bytes(root) == 3 * GB


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a/b/c\n")
    group(root / "sys/fs/cgroup/a/b/c", 2, 30 * GB, 1 * GB)
    group(root / "sys/fs/cgroup/a/b", 2, 8 * GB, 6 * GB)
    group(root / "sys/fs/cgroup/a", 2, 16 * GB, 7 * GB)
    assert free_memory_bytes(root) == 2 * GB


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_were_read_are_given_back(version: int, tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n" if version == 2 else "3:memory:/\n")
    group(root / "sys/fs/cgroup" / ("" if version == 2 else "memory"), version, 4 * GB, 4 * GB, cache=3 * GB)
    assert free_memory_bytes(root) == 3 * GB


def test_no_limit_of_version_1_is_a_huge_number(tmp_path: Path) -> None:
    root = machine(tmp_path, "7:memory:/\n")
    group(root / "sys/fs/cgroup/memory", 1, 0x7FFFFFFFFFFFF000, 1 * GB)
    assert free_memory_bytes(root) == 64 * GB


def test_more_used_than_allowed_is_nothing_free(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n")
    group(root / "sys/fs/cgroup", 2, 1 * GB, 2 * GB)
    assert free_memory_bytes(root) == 0


def test_a_system_without_any_of_these_files(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) > 0
