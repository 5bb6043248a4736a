"""State survives kills, notices damage, and never serves results under another fingerprint."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from wisparse.converter.state import NO_STATE, Stages, check_folder, placed_bundle, remove_state
from wisparse.formats.errors import ResourceError, UsageError

FINGERPRINT = {"model": "abc", "sparsity": [0.5]}
VALUE = {"scale": torch.arange(3.0), "rows": [[1, 2], [3]], "name": "x"}


def fail() -> Any:
    raise AssertionError("computed again")


def saved(folder: Path, fingerprint: dict[str, Any] = FINGERPRINT, **stages: Any) -> Stages:
    """A state with these results, closed."""
    state = Stages.open(folder, fingerprint)
    for name, value in stages.items():
        state.run(name, lambda value=value: value)
    state.close()
    return state


def test_finished_stages_are_not_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "work", first=VALUE, second=None)
    state = Stages.open(tmp_path / "work", FINGERPRINT)
    found = state.run("first", fail)
    assert torch.equal(found.pop("scale"), VALUE["scale"])
    assert found == {"rows": [[1, 2], [3]], "name": "x"}
    assert state.run("second", fail) is None
    assert state.run("third", lambda: 3) == 3
    assert "(finished: first, second)" in caplog.text


def test_changed_setting_starts_over_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, a=1)
    state = Stages.open(tmp_path, {"model": "abc", "sparsity": [0.4], "seed": 1})
    assert "this differs from the interrupted run: model" not in caplog.text
    assert "sparsity: was [0.5], is [0.4]; seed: was None, is 1" in caplog.text
    assert state.run("a", lambda: 2) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "headless", "swap"])
def test_damaged_result_counts_as_not_done(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, a="x" * 100, b="y" * 100)
    path, other = tmp_path / "a.stage", tmp_path / "b.stage"
    content = path.read_bytes()
    changed = {"flip": content[:-5] + b"z" + content[-4:], "cut": content[:-1], "empty": b"", "headless": content[64:]}
    path.write_bytes(changed.get(damage, other.read_bytes()))
    state = Stages.open(tmp_path, FINGERPRINT)
    assert state.run("b", fail) == "y" * 100
    assert state.run("a", lambda: "again") == "again"
    assert "the state of stage a is damaged" in caplog.text
    assert state.run("a", fail) == "again"


@pytest.mark.parametrize("content", ['{"fingerprint": ', "[]", '{"fingerprint": {}}'])
def test_damaged_fingerprint_starts_over(content: str, tmp_path: Path) -> None:
    saved(tmp_path, a=1)
    (tmp_path / "state.json").write_text(content)
    assert Stages.open(tmp_path, FINGERPRINT).run("a", lambda: 2) == 2


def test_kill_between_emptying_and_fingerprint_leaves_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, a=1)

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Stages.open(tmp_path, {"model": "other"})
    assert Stages.open(tmp_path, FINGERPRINT).run("a", lambda: 2) == 2


def test_disk_full_loses_only_the_stage_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Stages.open(tmp_path, FINGERPRINT)
    state.run("a", lambda: 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ResourceError, match="everything computed before is kept"):
            state.run("b", lambda: 2)
    assert state.run("a", fail) == 1
    assert state.run("b", lambda: 3) == 3
    assert not list(tmp_path.rglob("*.partial"))


def test_two_conversions_in_one_folder(tmp_path: Path) -> None:
    state = Stages.open(tmp_path, FINGERPRINT)
    with pytest.raises(UsageError, match="another conversion"):
        Stages.open(tmp_path, FINGERPRINT)
    with pytest.raises(UsageError, match="another conversion"):
        remove_state(tmp_path, default=True)
    state.close()
    Stages.open(tmp_path, FINGERPRINT).close()


@pytest.mark.parametrize("name", ["thesis.tex", "units/thesis.tex", ".git/HEAD"])
def test_other_files_are_never_removed(name: str, tmp_path: Path) -> None:
    saved(tmp_path, a=1)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("years of work")
    for action in (
        lambda: Stages.open(tmp_path, FINGERPRINT),
        lambda: Stages.open(tmp_path, {"seed": 1}),
        lambda: remove_state(tmp_path, default=True),
        lambda: check_folder(tmp_path),
    ):
        with pytest.raises(UsageError, match=f"found '{name}'"):
            action()
    with pytest.raises(UsageError, match="found a file"):
        check_folder(tmp_path / name)
    assert (tmp_path / name).read_text() == "years of work"


def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    """Also if the run that found it was killed, and another one finishes; the default place is always ours."""
    mine, link, default, made = (tmp_path / name for name in ("mine", "link", "out.work", "made"))
    for folder in (mine, default, tmp_path / "linked"):
        folder.mkdir()
    link.symlink_to("linked")
    for folder in (mine, link, default, made):
        for _ in range(2):
            saved(folder, a=1)
        remove_state(folder, default=folder == default)
    remove_state(tmp_path / "never", default=True)
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "linked", "mine"]


@pytest.mark.parametrize("survived", range(5))
def test_removal_that_is_killed(survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, original, done = tmp_path / "work", Path.unlink, []
    saved(work, a=1, b=2)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append(path.name)
        original(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        if survived < 4:
            with pytest.raises(KeyboardInterrupt):
                remove_state(work, default=True)
        else:
            remove_state(work, default=True)
            assert done == ["a.stage", "b.stage", "lock", "state.json"], "what tells of the bundle goes last"
    remove_state(work, default=True)
    assert not work.exists()


def test_a_read_only_file_system_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UsageError, match=r"--work-dir .*; choose another --work-dir"):
            check_folder(tmp_path / "work")
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", refuse)
        with pytest.raises(UsageError, match=r"--work-dir .*Read-only file system.*choose another"):
            Stages.open(tmp_path / "work", FINGERPRINT)


def test_the_bundle_in_place_is_known_by_its_manifest(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "out.work"
    assert placed_bundle(work, out) is None
    state = Stages.open(work, FINGERPRINT)
    state.mark_bundle("ab" * 32)
    assert placed_bundle(work, out) is None, "not in its place yet"
    out.mkdir()
    (out / "wisparse.json").write_text("{}")
    assert placed_bundle(work, out) is None, "another bundle"
    state.mark_bundle("44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a")  # sha256 of {}
    assert placed_bundle(work, out) == FINGERPRINT


def test_no_state_keeps_nothing() -> None:
    assert [NO_STATE.run("a", lambda value=value: value) for value in (1, 2)] == [1, 2]
