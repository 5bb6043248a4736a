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
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from wisparse.formats.errors import ResourceError, UsageError

__all__ = ["NO_STATE", "NoState", "SharedStore", "StateStore", "Store"]

_log = logging.getLogger("wisparse")
_MAGIC = b"wisparse-state 1 "
_OWN = {"lock", "fingerprint.json", "fingerprint.json.partial", "units"}
_KEY = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


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


class SharedStore:
    """A store whose results under certain keys other conversions of this process have as well.

    Args:
        own: keeps everything, also what came from another conversion: each can be resumed alone.
        shared: key -> data, common to the conversions.
        prefixes: which keys are shared.
    """

    def __init__(self, own: Store, shared: dict[str, bytes], prefixes: tuple[str, ...]) -> None:
        self._own, self._shared, self._prefixes = own, shared, prefixes

    def load(self, key: str) -> bytes | None:
        data = self._own.load(key)
        if data is None and key in self._shared:
            data = self._shared[key]
            self._own.save(key, data)
        elif data is not None and key.startswith(self._prefixes):
            self._shared[key] = data
        return data

    def save(self, key: str, data: bytes) -> None:
        self._own.save(key, data)
        if key.startswith(self._prefixes):
            self._shared[key] = data


class StateStore:
    """Results in a folder. Make one with `open`; close it, or use it as a context manager.

    Attributes:
        folder: where the results lie.
        resumed: how many results were there at the start.
        changed: what made an earlier state useless, as ``name: was X, is Y``; empty if nothing did.
    """

    def __init__(self, folder: Path, lock: IO[str], resumed: int, changed: tuple[str, ...]) -> None:
        self.folder, self.resumed, self.changed = folder, resumed, changed
        self._lock = lock

    @classmethod
    def open(cls, folder: Path, fingerprint: Mapping[str, Any] | None) -> StateStore:
        """The state in ``folder``, made if need be, emptied if it belongs to another ``fingerprint``.

        Args:
            fingerprint: JSON values by name; the names appear in the message about what changed. None takes the state
                as it is, to remove it.

        Raises:
            UsageError: another process works in this folder, or it holds something else than a state.
            ResourceError: the disk is full.
        """
        wanted = json.loads(json.dumps(fingerprint))
        _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            units = folder / "units"
            found = _read_fingerprint(folder)
            changed: tuple[str, ...] = ()
            if fingerprint is not None and found != wanted:
                if found is not None:
                    changed = _differences(found, wanted)
                if units.exists():
                    shutil.rmtree(units)
                # After the results are gone: a kill in between leaves a state that is emptied again, never a wrong one.
                _write(folder / "fingerprint.json", json.dumps(wanted, indent=1, sort_keys=True).encode())
            units.mkdir(exist_ok=True)
            resumed = sum(1 for path in units.rglob("*") if path.is_file() and path.suffix != ".partial")
        except BaseException:
            lock.close()
            raise
        return cls(folder, lock, resumed, changed)

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have the folder; what is saved stays."""
        self._lock.close()

    @staticmethod
    def peek(folder: Path, key: str) -> bytes | None:
        """A result in ``folder``, whatever fingerprint it stands under; None if there is none or it is damaged."""
        try:
            return _checked(key, (folder / "units" / (key + ".state")).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove(self, last: str) -> None:
        """Delete the state: the bundle is written. The result under the key ``last`` goes last."""
        kept = self._path(last)
        for path in sorted((self.folder / "units").rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            elif path != kept:
                path.unlink()
        for name in ("fingerprint.json", "fingerprint.json.partial", "lock"):
            (self.folder / name).unlink(missing_ok=True)
        kept.unlink(missing_ok=True)
        shutil.rmtree(self.folder)
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
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _header(key, data) + b"\n" + data)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key) or ".." in key:
            raise ValueError(f"a state's key is words of letters, digits, '_', '-' and '.' with '/' between: {key!r}")
        return self.folder / "units" / (key + ".state")


def _header(key: str, data: bytes) -> bytes:
    # The key is in the digest: a file that was renamed or copied is damaged too.
    return _MAGIC + hashlib.sha256(key.encode() + b"\0" + data).hexdigest().encode()


def _checked(key: str, content: bytes) -> bytes | None:
    """What a result's file holds; None if it is damaged."""
    header, newline, data = content.partition(b"\n")
    return data if newline and header == _header(key, data) else None


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk of {path.parent} is full; free some space and run the same command again: "
                "everything computed before is kept"
            ) from error
        raise


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--work-dir {folder}: expected a folder, found a file")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    foreign = sorted(names - _OWN)
    if foreign:
        raise UsageError(f"--work-dir {folder}: expected an empty folder or an earlier state, found {foreign[0]!r}")


def _lock(folder: Path) -> IO[str]:
    lock = open(folder / "lock", "a")  # noqa: SIM115 - held until the store is closed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UsageError(
            f"another conversion is working in {folder}; wait for it, or choose another --work-dir"
        ) from error
    return lock


def _read_fingerprint(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "fingerprint.json").read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {"fingerprint": "damaged"}
    return found if isinstance(found, dict) else {"fingerprint": "damaged"}


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, ...]:
    names = [*wanted, *(name for name in found if name not in wanted)]
    return tuple(
        f"{name}: was {found.get(name)!r:.60}, is {wanted.get(name)!r:.60}"
        for name in names
        if found.get(name) != wanted.get(name)
    )
