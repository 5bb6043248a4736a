"""What a conversion has finished so far, on disk, so that a killed run goes on where it stood.

Work is cut into units (a block's statistics, a generation of a search); each unit's result is saved under a key,
atomically and with its digest. A unit found damaged counts as not done. The whole store stands under a fingerprint of
everything a result depends on: another model, other tokens or another setting must never meet old results.

    with StateStore.open(folder, fingerprint) as store:
        data = store.load("alpha/3")
        if data is None:
            store.save("alpha/3", data := compute())
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from wisparse.formats.errors import BundleError, ResourceError, UsageError
from wisparse.formats.folder import entries, lock_file, remove_files, require_writable, write_file
from wisparse.formats.guard import PARTIAL, file_digest
from wisparse.formats.manifest import MANIFEST
from wisparse.formats.verify import verify_bundle

_MAGIC = b'{"wisparse finish mark": 1, '


def check_mark(out: Path) -> None:
    """Raise UsageError if somebody else's file stands where the mark would."""
    mark = _path(out)
    partial = mark.with_name(mark.name + PARTIAL)
    require_writable(out.parent, f"{out}", "choose another output folder", partial.name)
    for path in (mark, partial):
        if path.is_symlink() or path.is_dir() or (path.exists() and not _is_ours(path)):
            raise UsageError(f"{path}: in the way; move it or choose another output folder")


def write_mark(out: Path, made_from: Mapping[str, Any], manifest_digest: str) -> None:
    """Say what the bundle with this manifest is made from, before it is put in place."""
    check_mark(out)
    content = json.dumps({"made from": made_from, "manifest": manifest_digest}, sort_keys=True)
    write_file(_path(out), _MAGIC + content[1:].encode())


def names_the_bundle(out: Path) -> bool:
    """Whether there is a mark, and it means the bundle in place."""
    mark = _read(out)
    try:
        return mark is not None and not out.is_symlink() and mark.get("manifest") == file_digest(out / MANIFEST)
    except OSError:
        return False


def is_finished(out: Path, made_from: Mapping[str, Any]) -> bool:
    """Whether the bundle in place, all of it, is what a conversion of these things gives."""
    mark = _read(out)
    if mark is None or not names_the_bundle(out) or mark.get("made from") != json.loads(json.dumps(made_from)):
        return False
    try:
        verify_bundle(out)
    except BundleError:
        return False
    return True


def remove_mark(out: Path) -> None:
    """The conversion is over."""
    check_mark(out)
    _path(out).with_name(_path(out).name + PARTIAL).unlink(missing_ok=True)
    _path(out).unlink(missing_ok=True)


def _path(out: Path) -> Path:
    return out.with_name(out.name + ".finished")


def _is_ours(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC))
    return head == _MAGIC or (path.name.endswith(PARTIAL) and _MAGIC.startswith(head))


def _read(out: Path) -> dict[str, Any] | None:
    try:
        content = _path(out).read_bytes()
        mark = json.loads(content) if content.startswith(_MAGIC) else None
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) else None


_log = logging.getLogger("wisparse")
_state_MAGIC = b"wisparse-state 1 "
_OWN = re.compile(r"lock|(fingerprint|hashes)\.json(\.partial)?|units/(.*/|.*\.state(\.partial)?)?")
_MADE = "made\n"
_KEY = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


def pack(value: Any) -> bytes:
    """Numbers, strings and tensors in dicts and lists, as bytes for a `Store`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` was given; no code is run."""
    return torch.load(io.BytesIO(data), weights_only=True)


class Store(Protocol):
    """What a search sees of the state: results by key."""

    def load(self, key: str) -> bytes | None:
        """The bytes saved under ``key``; None if there are none, or none that are whole."""

    def save(self, key: str, data: bytes) -> None:
        """Keep ``data`` under ``key``, all of it or nothing."""


class NoState:
    """A store that keeps nothing: ``--no-resume``, and calls from Python that want no files."""

    def load(self, key: str) -> bytes | None:
        return None

    def save(self, key: str, data: bytes) -> None:
        return None


NO_STATE = NoState()


class Prefixed:
    """A part of a store: its keys begin with a name."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    def load(self, key: str) -> bytes | None:
        return self._store.load(f"{self._name}/{key}")

    def save(self, key: str, data: bytes) -> None:
        self._store.save(f"{self._name}/{key}", data)


class StateStore:
    """Results in a folder. Make one with `open`; close it, or use it as a context manager.

    Attributes:
        folder: where the results lie.
        resumed: how many results were there at the start.
        changed: what made an earlier state useless, as ``name: was X, is Y``; empty if nothing did.
    """

    def __init__(self, folder: Path, lock: IO[str], made: bool, resumed: int, changed: tuple[str, ...]) -> None:
        self.folder, self.resumed, self.changed = folder, resumed, changed
        self._lock, self._made = lock, made

    @staticmethod
    def check(folder: Path) -> None:
        """Raise UsageError unless `open` may use ``folder``; changes nothing."""
        _require_own(folder)
        require_writable(Path(os.path.realpath(folder)), f"--work-dir {folder}", "choose another --work-dir")

    @classmethod
    def open(cls, folder: Path, fingerprint: Mapping[str, Any] | None, *, default: bool = False) -> StateStore:
        """The state in ``folder``, made if need be, emptied if it belongs to another ``fingerprint``.

        Args:
            folder: a symlink stands for what it leads to.
            fingerprint: JSON values by name; the names appear in the message about what changed. None takes the state
                as it is, to remove it.
            default: nobody chose this folder: it is ours, whoever made it.

        Raises:
            UsageError: another process works in this folder, it holds something else than a state, or it cannot be
                written to.
            ResourceError: the disk is full.
        """
        cls.check(folder)
        folder = Path(os.path.realpath(folder))
        wanted = json.loads(json.dumps(fingerprint))
        existed = folder.exists()
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_file(folder / "lock", _busy(folder))
            try:
                made = _remember_made(lock, default or not existed)
                _require_own(folder)
                found = _read_json(folder / "fingerprint.json")
                changed: tuple[str, ...] = ()
                if fingerprint is not None and found != wanted:
                    if found is not None:
                        changed = _differences(found, wanted)
                    remove_files(folder, _units(folder), keep=True)
                    # After the results are gone: a kill in between leaves a state that is emptied again, never a
                    # wrong one.
                    write_file(folder / "fingerprint.json", json.dumps(wanted, indent=1, sort_keys=True).encode())
                (folder / "units").mkdir(exist_ok=True)
                resumed = sum(1 for name in _units(folder) if name.endswith(".state"))
            except BaseException:
                lock.close()
                raise
        return cls(folder, lock, made, resumed, changed)

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have the folder; what is saved stays."""
        self._lock.close()

    @staticmethod
    def hashes(folder: Path) -> dict[str, Any]:
        """What `keep_hashes` kept here; empty if nothing."""
        return _read_json(folder / "hashes.json") or {}

    def keep_hashes(self, hashes: Mapping[str, Any]) -> None:
        """Remember digests of the source's files; they hold whatever the fingerprint is."""
        with _disk_errors(self.folder):
            write_file(self.folder / "hashes.json", json.dumps(hashes).encode())

    def remove(self) -> None:
        """Delete the state; a folder that was there before us stays, empty."""
        remove_files(self.folder, entries(self.folder), last=("lock",), keep=not self._made)
        self.close()

    def load(self, key: str) -> bytes | None:
        """The bytes saved under ``key``; None if there are none or they are damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        data = _checked(key, content)
        if data is None:
            _log.warning("state of %s is damaged and will be computed again (%s)", key, path)
            path.unlink(missing_ok=True)
            return None
        return data

    def save(self, key: str, data: bytes) -> None:
        """Keep ``data`` under ``key``, replacing what was there; a kill at any moment leaves the old or the new.

        Raises:
            ResourceError: the disk is full; everything saved before is intact.
        """
        path = self._path(key)
        with _disk_errors(self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, _header(key, data) + b"\n" + data)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key) or ".." in key:
            raise ValueError(f"a state's key is words of letters, digits, '_', '-' and '.' with '/' between: {key!r}")
        return self.folder / "units" / (key + ".state")


def _header(key: str, data: bytes) -> bytes:
    # The key is in the digest: a file that was renamed or copied is damaged too.
    return _state_MAGIC + hashlib.sha256(key.encode() + b"\0" + data).hexdigest().encode()


def _checked(key: str, content: bytes) -> bytes | None:
    """What a result's file holds; None if it is damaged."""
    header, newline, data = content.partition(b"\n")
    return data if newline and header == _header(key, data) else None


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk of {folder} is full; free some space and run the same command again: "
                "everything computed before is kept"
            ) from error
        raise UsageError(
            f"--work-dir {folder}: cannot be written ({error.strerror}); choose another --work-dir"
        ) from error


def _units(folder: Path) -> list[str]:
    return [name for name in entries(folder) if name.startswith("units/")]


def _require_own(folder: Path) -> None:
    real = Path(os.path.realpath(folder))
    if os.path.lexists(real) and not real.is_dir():
        raise UsageError(f"--work-dir {folder}: expected a folder, found a file")
    foreign = [name for name in entries(real) if not _OWN.fullmatch(name)]
    if foreign:
        raise UsageError(
            f"--work-dir {folder}: expected an empty folder or an earlier state, found {foreign[0]!r:.200}"
        )


def _remember_made(lock: IO[str], made: bool) -> bool:
    """Whether the folder of this lock is ours to remove; what the first run knew is in the lock."""
    lock.seek(0)
    if lock.read() == _MADE:
        return True
    if made:
        lock.write(_MADE)
        lock.flush()
    return made


def _busy(folder: Path) -> UsageError:
    return UsageError(f"another conversion is working in {folder}; wait for it, or choose another --work-dir")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {"file": "damaged"}
    return found if isinstance(found, dict) else {"file": "damaged"}


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, ...]:
    names = [*wanted, *(name for name in found if name not in wanted)]
    return tuple(
        f"{name}: was {found.get(name)!r:.60}, is {wanted.get(name)!r:.60}"
        for name in names
        if found.get(name) != wanted.get(name)
    )
