"""Usable cores: the affinity mask's, and no more than the quotas of the control groups allow. Idle ones: those of them
that nobody computed on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wisparse.formats import machine
from wisparse.formats.machine import idle_cores, usable_cores


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def fake_machine(root: Path, groups: str) -> Path:
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
    root = fake_machine(tmp_path, "0::/a/b\n" if version == 2 else "4:cpu,cpuacct:/a/b\n3:memory:/\n")
    quota(root / "sys/fs/cgroup" / ("" if version == 2 else "cpu") / "a", version, given)
    assert usable_cores(root) == found


def test_the_tightest_group_decides(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, "0::/a/b\n")
    quota(root / "sys/fs/cgroup/a/b", 2, "700000")
    quota(root / "sys/fs/cgroup/a", 2, "200000")
    quota(root / "sys/fs/cgroup", 2, "max")
    assert usable_cores(root) == 2


def test_a_system_without_affinity_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    assert usable_cores(tmp_path) == (os.cpu_count() or 1)


def ticks(root: Path, free: list[int], passed: int = 25) -> None:
    """What ``/proc/stat`` says once so much has passed; a core beyond the mask is idle."""
    (root / "proc").mkdir(parents=True, exist_ok=True)
    cores = [(core, 100 + passed - idle, 100 + idle) for core, idle in [*enumerate(free), (99, passed)]]
    rows = [f"cpu{core} {busy} 0 0 {idle} 0 0 0 0 7 0" for core, busy, idle in cores]
    (root / "proc/stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "intr 5 0", ""]))


@pytest.mark.parametrize(
    ("free", "quota_us", "found"),
    [
        ([25] * 8, "max", 8),
        ([25] * 3 + [0] * 5, "max", 3),
        ([0] * 8, "max", 1),
        ([20] * 8, "max", 6),
        ([25] * 8, "2", 2),
    ],
)
def test_idle_cores_are_those_that_nobody_computed_on(
    free: list[int], quota_us: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_machine(tmp_path, "0::/a\n")
    quota(root / "sys/fs/cgroup/a", 2, quota_us, "1")
    ticks(root, [0] * 8, passed=0)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: ticks(root, free))
    assert idle_cores(root=root) == found


def test_where_the_system_tells_nothing_all_cores_count_as_idle(tmp_path: Path) -> None:
    assert idle_cores(0, tmp_path) == 8
