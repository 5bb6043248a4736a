"""Usable cores: the affinity mask's, and no more than the quotas of the control groups allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wisparse.formats.machine import cores
from wisparse.formats.machine.cores import usable_cores


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def machine(root: Path, groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    return root


def quota(folder: Path, version: int, quota: str, period: str = "100000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(quota.replace("max", "-1") + "\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_without_control_groups_it_is_the_affinity_mask(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("given", "found"), [("max", 8), ("300000", 3), ("250000", 2), ("50000", 1), ("6400000", 8), ("broken", 8)]
)
def test_a_quota_gives_whole_cores(version: int, given: str, found: int, tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a/b\n" if version == 2 else "4:cpu,cpuacct:/a/b\n3:memory:/\n")
    quota(root / "sys/fs/cgroup" / ("" if version == 2 else "cpu") / "a", version, given)
    assert usable_cores(root) == found


def test_the_tightest_group_decides(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a/b\n")
    quota(root / "sys/fs/cgroup/a/b", 2, "700000")
    quota(root / "sys/fs/cgroup/a", 2, "200000")
    quota(root / "sys/fs/cgroup", 2, "max")
    assert usable_cores(root) == 2


def test_a_system_without_affinity_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cores.os, "sched_getaffinity", raising=False)
    assert usable_cores(tmp_path) == (os.cpu_count() or 1)
