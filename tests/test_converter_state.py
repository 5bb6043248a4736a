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
    store.save("end", b"2")
    store.remove("end")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("survived", range(4))
def test_removal_that_is_killed(survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore.open(tmp_path, FINGERPRINT)
    store.save("a/b", b"1")
    store.save("c", b"2")
    store.save("end", b"3")
    original, done = Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append(path)
        original(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        store.remove("end")
    monkeypatch.undo()
    store.close()
    assert StateStore.peek(tmp_path, "end") == b"3"
    with StateStore.open(tmp_path, FINGERPRINT) as again:
        again.save("a/b", b"1")


def test_peek(tmp_path: Path) -> None:
    assert StateStore.peek(tmp_path / "none", "a") is None
    with StateStore.open(tmp_path, FINGERPRINT) as store:
        store.save("a", b"1")
        assert StateStore.peek(tmp_path, "a") == b"1"
        (tmp_path / "units" / "a.state").write_bytes(b"damaged")
        assert StateStore.peek(tmp_path, "a") is None


@pytest.mark.parametrize("key", ["", "/a", "a/", "../a", "a/../b", "a b", "a//b"])
def test_keys_stay_inside(key: str, tmp_path: Path) -> None:
    with StateStore.open(tmp_path, FINGERPRINT) as store, pytest.raises(ValueError, match="key"):
        store.save(key, b"")


def test_no_state_keeps_nothing() -> None:
    NO_STATE.save("a", b"1")
    assert NO_STATE.load("a") is None
