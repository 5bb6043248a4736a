"""Replacing a folder: whole or not at all, whatever happens in between, and only one of our own."""

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wisparse.formats import folder
from wisparse.formats.errors import UsageError
from wisparse.formats.folder import UNFINISHED, Kind, check_target, clear_leftovers, replaced_folder

FILES = ["a.bin", "pictures/b.png", "list.json"]


def _files_of(folder: Path) -> set[str] | None:
    try:
        return set(json.loads((folder / "list.json").read_text()))
    except (OSError, ValueError):
        return None


THING = Kind("a thing", "maker", "list.json", _files_of)
OTHER = Kind("another thing", "maker", "other.json", lambda folder: None)


def write(out: Path, text: str, *, overwrite: bool = True) -> None:
    with replaced_folder(out, THING, FILES, overwrite=overwrite) as partial:
        (partial / "pictures").mkdir()
        for name in FILES[:2]:
            (partial / name).write_text(text)
        (partial / "list.json").write_text(json.dumps(FILES))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "out", "one")
    return tmp_path / "out"


def refused(out: Path, words: str) -> None:
    """Neither written to, nor found to be writable before the work."""
    for attempt in (lambda: write(out, "x"), lambda: check_target(out, THING, True)):
        with pytest.raises(UsageError, match=words):
            attempt()


def content(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


def whole(text: str) -> dict[str, str]:
    return {"a.bin": text, "pictures/b.png": text, "list.json": json.dumps(FILES)}


def test_made_and_replaced(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    write(out, "one")
    assert content(out) == whole("one")
    write(out, "two")
    assert (content(out), os.listdir(out.parent)) == (whole("two"), ["out"])
    with pytest.raises(UsageError, match="already exists; choose another output folder or pass --overwrite"):
        write(out, "three", overwrite=False)
    assert content(out) == whole("two")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for overwrite in (False, True):  # no advice that does not help
        with pytest.raises(UsageError, match="mine: not a thing, so it is not replaced; choose another output folder"):
            write(tmp_path / "mine", "four", overwrite=overwrite)


@pytest.mark.parametrize("name", ["notes.txt", ".git/HEAD", "pictures/mine.png", "pictures/deep/x", "empty/"])
def test_a_foreign_file_is_named_and_kept(name: str, out: Path) -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).mkdir() if name.endswith("/") else (out / name).write_text("mine")
    refused(out, f"holds '{name}', which is not part of a thing")
    assert (out / name).exists()
    assert (out / "a.bin").read_text() == "one"


@pytest.mark.parametrize("inside", ["", "pictures"])
def test_one_that_may_not_be_deleted_is_refused(inside: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != out / inside and plain(path, mode))
    refused(out, f"{out / inside} may not be written to: no permission; change that")
    assert content(out.parent) == {f"out/{name}": text for name, text in whole("one").items()}


def test_what_comes_in_while_the_new_one_is_made_is_kept(out: Path) -> None:
    def write_slowly() -> None:
        with replaced_folder(out, THING, FILES, overwrite=True) as partial:
            (partial / "list.json").write_text(json.dumps(FILES))
            (out / "notes.txt").write_text("mine")

    with pytest.raises(UsageError, match=r"holds 'notes\.txt'"):
        write_slowly()
    assert content(out) == {**whole("one"), "notes.txt": "mine"}


@pytest.mark.parametrize("suffix", ["", ".partial", ".being-replaced"])
@pytest.mark.parametrize("kind", ["others' work", "another kind", "link", "file"])
def test_nobody_elses_folder_is_touched(kind: str, suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / f"out{suffix}"
    if kind == "file":
        folder.write_text("years of work")
    else:
        place = tmp_path / "elsewhere" if kind == "link" else folder
        place.mkdir()
        (place / "thesis.tex").write_text("years of work")
    if kind == "another kind":
        (folder / UNFINISHED).write_text(json.dumps({"kind": OTHER.name, "files": ["thesis.tex"]}))
    if kind == "link":
        folder.symlink_to("elsewhere")
    before = content(tmp_path)
    refused(tmp_path / "out", r"not a thing|a symlink to elsewhere")
    assert content(tmp_path) == before


def test_a_link_inside_is_removed_and_not_followed(out: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (out / "a.bin").unlink()
    (out / "a.bin").symlink_to(tmp_path / "mine")
    write(out, "two")
    assert content(tmp_path) == {"mine": "mine"} | {f"out/{name}": text for name, text in whole("two").items()}
    (tmp_path / "album").mkdir()
    (tmp_path / "album/b.png").write_text("mine")
    folder.remove_files(out, ["pictures/b.png"])
    (out / "pictures").symlink_to(tmp_path / "album")
    with pytest.raises(UsageError, match="holds 'pictures'"):
        write(out, "three")
    assert (tmp_path / "album/b.png").read_text() == "mine"


def test_a_living_process_is_not_disturbed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replaced_folder(out, THING, FILES) as partial:
        (partial / "list.json").write_text(json.dumps(FILES))
        refused(out, "another maker is writing there")
    assert content(out) == {"list.json": json.dumps(FILES)}


def test_a_lock_on_a_file_that_was_taken_away_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    plain = fcntl.flock

    def too_late(file: Any, operation: int) -> None:
        (tmp_path / "lock").unlink()
        plain(file, operation)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with pytest.raises(UsageError, match="busy"):
        folder.lock_file(tmp_path / "lock", UsageError("busy"))


_CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")


def forked(action: Callable[[], object]) -> int:
    """Run ``action`` in a child, which this returns; it exits with status 0 if ``action`` returns, else with 1."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return child


def killed_at(number: int, action: Callable[[], object], *, interrupt: bool = False) -> int:
    """Run ``action`` in a child that kills itself, or is interrupted, at its n-th call that changes a disk; its exit
    status, 0 only if it came to the end."""

    def counted_action() -> None:
        calls = itertools.count()

        def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == number:
                    if interrupt:
                        raise KeyboardInterrupt
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(*args, **kwargs)

            return call

        for name in _CALLS:
            setattr(os, name, counted(getattr(os, name)))
        action()

    return os.waitstatus_to_exitcode(os.waitpid(forked(counted_action), 0)[1])


@pytest.fixture
def one_step(tmp_path: Path) -> None:
    """Skips where folders cannot change names in one step."""
    for name in ("one", "other"):
        (tmp_path / "probe" / name).mkdir(parents=True)
    if not folder.exchange(tmp_path / "probe" / "one", tmp_path / "probe" / "other"):
        pytest.skip("this system or disk does not exchange folders in one step")


@pytest.fixture
def two_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "exchange", lambda one, other: False)


@pytest.mark.parametrize("how", ["new", "one_step", "two_renames"])
@pytest.mark.parametrize("interrupt", [False, True])
def test_stopped_at_every_step(interrupt: bool, how: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whatever stands at OUT is one of the two, whole; the next run ends as if nothing had happened."""
    number, old, before = 0, how != "new", None
    if old:
        request.getfixturevalue(how)
    while True:
        home = tmp_path / str(number)
        out = home / "out"
        if old:
            write(out, "old")
            (out / "pictures/b.png").rename(out / "pictures/c.png")  # a name that the new one does not have
            (out / "list.json").write_text(json.dumps(["a.bin", "pictures/c.png", "list.json"]))
            before = content(out)
        status = killed_at(number, lambda out=out: write(out, "new"), interrupt=interrupt)
        # In one step it is never away, not for a moment; after an interrupt it is put back.
        assert out.exists() or how == "new" or (how == "two_renames" and not interrupt), number
        if out.exists():
            assert {name: text for name, text in content(out).items() if name != UNFINISHED} in (whole("new"), before)
        if interrupt and old and "pictures/c.png" in content(out):
            assert os.listdir(home) == ["out"], number
        check_target(out, THING, True)
        if number % 2:
            write(out, "newer")
            assert content(out) == whole("newer"), number
            assert os.listdir(home) == ["out"], number
        else:
            clear_leftovers(out, THING)
            assert os.listdir(home) == (["out"] if out.exists() else []) if home.exists() else True, number
            assert not old or out.exists()
        if status == 0:
            break
        number += 1
    assert number > 15  # it was stopped at all of them
