"""State survives kills, notices damage, and never serves results under another fingerprint."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from wisparse.converter.state import NO_STATE, StateStore
from wisparse.formats.errors import ResourceError, UsageError

FINGERPRINT = {"model": "abc", "sparsity": 0.5}


def test_saved_results_are_there_again(tmp_path: Path) -> None:
    with StateStore.open(tmp_path / "work", FINGERPRINT) as store:
        assert store.load("alpha/0") is None
        store.save("alpha/0", b"x\n\0y")
        store.save("alpha/0", b"second\n")
        store.save("empty", b"")
    with StateStore.open(tmp_path / "work", FINGERPRINT) as store:
        assert store.load("alpha/0") == b"second\n"
        assert store.load("empty") == b""
        assert store.resumed == 2
        assert store.changed == ()


def test_changed_setting_starts_over_and_is_named(tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.save("a", b"1")
    with StateStore.open(tmp_path, FINGERPRINT | {"sparsity": 0.4, "seed": 1}) as store:
        assert store.load("a") is None
        assert store.changed == ("sparsity: was 0.5, is 0.4", "seed: was None, is 1")
    with StateStore.open(tmp_path, FINGERPRINT | {"sparsity": 0.4, "seed": 1}) as store:
        assert store.changed == ()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "headless", "swap"])
def test_damaged_result_counts_as_not_done(damage: str, tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.save("a", b"x" * 100)
        store.save("b", b"y" * 100)
    path, other = (tmp_path / "units" / f"{key}.state" for key in "ab")
    content = path.read_bytes()
    path.write_bytes(
        {
            "flip": content[:-5] + b"z" + content[-4:],
            "cut": content[:-1],
            "empty": b"",
            "headless": content.partition(b"\n")[2],
            "swap": other.read_bytes(),
        }[damage]
    )
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        assert store.load("a") is None
        assert store.load("b") == b"y" * 100
        store.save("a", b"again")
        assert store.load("a") == b"again"


def test_damaged_fingerprint_starts_over(tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.save("a", b"1")
    (tmp_path / "fingerprint.json").write_text('{"model": ')
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        assert store.load("a") is None
        assert store.changed


def test_kill_between_emptying_and_fingerprint_leaves_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.save("a", b"1")

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        StateStore.open(tmp_path, {"model": "other"})
    monkeypatch.undo()
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        assert store.load("a") is None


def test_half_written_file_is_no_result(tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        (tmp_path / "units" / "a.state.partial").write_bytes(b"wisparse-state 1 ")
        assert store.load("a") is None
        store.save("a", b"1")
        assert store.load("a") == b"1"


def test_disk_full_loses_only_the_unit_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.save("a", b"1")

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ResourceError, match="everything computed before is kept"):
            store.save("b", b"2")
        with pytest.raises(ResourceError):
            store.save("a", b"2")
        monkeypatch.undo()
        assert store.load("a") == b"1"
        assert store.load("b") is None
    assert not list(tmp_path.rglob("*.partial"))


def test_two_conversions_in_one_folder(tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT), pytest.raises(UsageError, match="another conversion"):
        StateStore.open(tmp_path, FINGERPRINT)
    StateStore.open(tmp_path, FINGERPRINT).close()


@pytest.mark.parametrize("name", ["thesis.tex", "units/thesis.tex", "units/a/thesis.tex", ".git/HEAD"])
def test_a_strangers_file_is_never_removed(name: str, tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.save("a/b", b"1")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("years of work")
    for fingerprint in (FINGERPRINT, {"seed": 1}, None):
        with pytest.raises(UsageError, match=f"found '{name}'"):
            StateStore.open(tmp_path, fingerprint)
    assert (tmp_path / name).read_text() == "years of work"


def test_a_folder_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        StateStore.open(tmp_path, FINGERPRINT)
    with pytest.raises(UsageError, match="found a file"):
        StateStore.open(tmp_path / "thesis.tex", FINGERPRINT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_remove(tmp_path: Path) -> None:
    store = StateStore.open(tmp_path / "work", FINGERPRINT)
    store.save("a/b", b"1")
    store.remove()
    assert not (tmp_path / "work").exists()


def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    """Also if the run that found it was killed, and another one finishes; the default place is always ours."""
    mine, link, default = tmp_path / "mine", tmp_path / "link", tmp_path / "out.work"
    for folder in (mine, default, tmp_path / "linked"):
        folder.mkdir()
    link.symlink_to("linked")
    for folder in (mine, link, default):
        for _ in range(2):
            with StateStore.open(folder, FINGERPRINT, default=folder == default) as store:
                store.save("a/b", b"1")
        StateStore.open(folder, None, default=folder == default).remove()
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "linked", "mine"]


@pytest.mark.parametrize("survived", range(5))
def test_removal_that_is_killed(survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    store = StateStore.open(work, FINGERPRINT)
    store.save("a/b", b"1")
    store.save("c", b"2")
    original, done = Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append(path)
        original(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    if survived < 4:
        with pytest.raises(KeyboardInterrupt):
            store.remove()
    else:
        store.remove()
    monkeypatch.undo()
    store.close()
    with StateStore.open(work, None, default=True) as again:
        again.remove()
    assert not work.exists()


def test_a_read_only_file_system_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UsageError, match=r"--work-dir .*; choose another --work-dir"):
            StateStore.check(tmp_path / "work")
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", refuse)
        with pytest.raises(UsageError, match=r"--work-dir .*Read-only file system.*choose another"):
            StateStore.open(tmp_path / "work", FINGERPRINT)


def test_hashes_outlive_the_fingerprint(tmp_path: Path) -> None:
    assert StateStore.hashes(tmp_path) == {}
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.keep_hashes({"a": [1, "x"]})
    with StateStore.open(tmp_path, FINGERPRINT | {"seed": 1}):
        assert StateStore.hashes(tmp_path) == {"a": [1, "x"]}
    (tmp_path / "hashes.json").write_text("{")
    assert "a" not in StateStore.hashes(tmp_path)


@pytest.mark.parametrize("key", ["", "/a", "a/", "../a", "a/../b", "a b", "a//b"])
def test_keys_stay_inside(key: str, tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store, pytest.raises(ValueError, match="key"):
        store.save(key, b"")


def test_no_state_keeps_nothing() -> None:
    NO_STATE.save("a", b"1")
    assert NO_STATE.load("a") is None
