"""The finished stages of a conversion, on disk, so that a killed run goes on after the last one and ends alike."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from wisparse.formats.errors import ResourceError, UsageError
from wisparse.formats.folder import entries, lock_file, remove_files, require_writable, write_file
from wisparse.formats.guard import file_digest
from wisparse.formats.manifest import MANIFEST

if TYPE_CHECKING:
    from .processes import Processes

_log = logging.getLogger("wisparse")
_OWN = re.compile(r"lock|(state\.json|[\w.-]+\.stage)(\.partial)?")


class Stages:
    """Results of finished stages; nothing is kept without a folder. Several processes share those of the first."""

    def __init__(self, folder: Path | None = None, processes: Processes | None = None) -> None:
        self.folder, self._processes = folder, processes
        self._lock: IO[str] | None = None
        self._state: dict[str, Any] = {}

    def run(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of ``compute``, from an interrupted run if that had finished this stage.

        A result is made of numbers, strings and tensors in dicts, lists and tuples. Every process calls this alike.
        """
        path, data = self.folder / f"{name}.stage" if self.folder is not None else None, None
        if path is not None and path.exists():
            content = path.read_bytes()
            if content[:64] == _digest(name, content[64:]):
                data = content[64:]
            else:
                _log.warning("the state of stage %s is damaged and will be computed again (%s)", name, path)
        if self._processes is not None:
            data = self._processes.broadcast(data)
        if data is not None:
            return torch.load(io.BytesIO(data), weights_only=True)
        value = compute()
        if path is not None:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            with _disk_errors(path.parent):
                write_file(path, _digest(name, buffer.getvalue()) + buffer.getvalue())
        return value

    @classmethod
    def open(
        cls, folder: Path, fingerprint: dict[str, Any], *, default: bool = False, processes: Processes | None = None
    ) -> Stages:
        """The results in ``folder``, made if need be, and emptied if they belong to another ``fingerprint``.

        ``default``: nobody chose this folder, so it is ours to remove, whoever made it.
        """
        check_folder(folder)
        folder = Path(os.path.realpath(folder))
        stages = cls(folder, processes)
        with _disk_errors(folder):
            made = default or not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            stages._lock = _lock(folder)
            found, wanted = _read_state(folder), json.loads(json.dumps(fingerprint))
            before = found.get("fingerprint", {})
            stages._state = {"fingerprint": wanted, "made folder": made or found.get("made folder", False)}
            if before != wanted:
                remove_files(folder, [name for name in entries(folder) if name != "lock"], keep=True)
                # After the results are gone: a kill in between leaves an empty folder, never a wrong result.
                write_file(folder / "state.json", json.dumps(stages._state, indent=1).encode())
        changed = [name for name in {**wanted, **before} if before.get(name) != wanted.get(name)]
        if found and changed:
            words = (f"{name}: was {before.get(name)!r:.60}, is {wanted.get(name)!r:.60}" for name in changed)
            _log.warning("starting over, because this differs from the interrupted run: %s", "; ".join(words))
        elif finished := sorted(path.stem for path in folder.glob("*.stage")):
            _log.warning("resuming from %s (finished: %s)", folder, ", ".join(finished))
        return stages

    def mark_bundle(self, manifest_sha256: str) -> None:
        """Note which bundle is about to be renamed to its place."""
        if self.folder is not None:
            with _disk_errors(self.folder):
                content = {**self._state, "bundle": manifest_sha256}
                write_file(self.folder / "state.json", json.dumps(content, indent=1).encode())

    def close(self) -> None:
        """Let other processes have the folder; what is saved stays."""
        if self._lock is not None:
            self._lock.close()


NO_STATE = Stages()


def check_folder(folder: Path) -> None:
    """Raise UsageError unless `Stages.open` may use ``folder``; changes nothing."""
    real = Path(os.path.realpath(folder))
    if os.path.lexists(real) and not real.is_dir():
        raise UsageError(f"--work-dir {folder}: expected a folder, found a file")
    foreign = [name for name in entries(real) if not _OWN.fullmatch(name)]
    if foreign:
        raise UsageError(f"--work-dir {folder}: expected an empty folder or a state, found {foreign[0]!r:.200}")
    require_writable(real, f"--work-dir {folder}", "choose another --work-dir")


def remove_state(folder: Path, *, default: bool) -> None:
    """Delete a state, if there is one, and its folder if we made it; ``default`` as in `Stages.open`."""
    check_folder(folder)
    if not folder.exists():
        return
    folder = Path(os.path.realpath(folder))
    with closing(_lock(folder)):
        keep = not (default or _read_state(folder).get("made folder", False))
        remove_files(folder, entries(folder), last=("lock", "state.json"), keep=keep)


def _lock(folder: Path) -> IO[str]:
    busy = f"another conversion is working in {folder}; wait for it, or choose another --work-dir"
    return lock_file(folder / "lock", UsageError(busy))


def placed_bundle(folder: Path, out: Path) -> dict[str, Any] | None:
    """The fingerprint of the bundle at ``out``, if an interrupted run with this state put it there."""
    state = _read_state(folder)
    try:
        return state["fingerprint"] if state.get("bundle") == file_digest(out / MANIFEST) else None
    except OSError:
        return None


def _digest(name: str, data: bytes) -> bytes:
    # The name is in the digest: a file that was renamed counts as damaged too.
    return hashlib.sha256(name.encode() + b"\0" + data).hexdigest().encode()


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "state.json").read_bytes()))
    except OSError:  # none, or a name that can be none
        return {}
    except (ValueError, TypeError):
        return {"fingerprint": {"state.json": "damaged"}}


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space and run the same command again: everything computed before is kept"
            raise ResourceError(f"the disk of {folder} is full; {advice}") from error
        why = f"cannot be written ({error.strerror})"
        raise UsageError(f"--work-dir {folder}: {why}; choose another --work-dir") from error
