"""The state of a conversion on disk: results of finished stages, with which an interrupted run resumes."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from wisparse.formats.errors import ResourceError, UsageError
from wisparse.formats.folder import entries, lock_file, remove_files, require_writable, write_file
from wisparse.formats.guard import file_digest
from wisparse.formats.manifest import MANIFEST

from .processes import ALONE, SILENT, Processes, Progress

_log = logging.getLogger("wisparse")


@dataclass
class Stages:
    """Results of finished stages, saved to a folder after `open`. Rank 0 reads and writes them for all processes."""

    folder: Path | None = None
    processes: Processes = ALONE
    progress: Progress = SILENT
    lock: IO[str] | None = None
    state: dict[str, Any] = field(default_factory=dict)

    def run(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of ``compute`` (numbers, strings and tensors in containers), or the one saved by an earlier run."""
        path, data = self.folder / f"{name}.stage" if self.folder is not None else None, None
        if path is not None and path.exists():
            read = memoryview(path.read_bytes())  # the codes of a large model take gigabytes: avoid copies
            data = read[64:] if self.processes.world_size == 1 else bytes(read[64:])
            if read[:64] != _digest(name, data):
                _log.warning("the state of stage %s is damaged and will be computed again (%s)", name, path)
                data = None
        if (data := self.processes.broadcast(data)) is not None:
            return torch.load(io.BytesIO(data), weights_only=True)
        value = compute()
        if path is not None:
            buffer = io.BytesIO()
            buffer.write(bytes(64))
            torch.save(value, buffer)
            content = buffer.getbuffer()
            content[:64] = _digest(name, content[64:])
            self._write(path.name, content)
        return value

    def open(self, folder: Path, fingerprint: dict[str, Any], *, default: bool = False) -> Stages:
        """Save results to ``folder``, emptied if its fingerprint differs; a ``default`` folder is removed with the state."""
        check_folder(folder)
        folder = Path(os.path.realpath(folder))
        with _disk_errors(folder):
            created = default or not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self.lock, self.folder = _lock(folder), folder
            saved, now = _read_state(folder), json.loads(json.dumps(fingerprint))
            before = saved.get("fingerprint", {})
            self.state |= {"fingerprint": now, "made folder": created or saved.get("made folder", False)}
            if before != now:
                remove_files(folder, [name for name in entries(folder) if name != "lock"], keep=True)
                # After the results are removed: a kill in between leaves an empty folder, not results of another run.
                self._write("state.json", json.dumps(self.state).encode())
        changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        if saved and changed:
            changes = (f"{name}: was {before.get(name)!r:.60}, is {now.get(name)!r:.60}" for name in changed)
            _log.warning("starting over, because this differs from the interrupted run: %s", "; ".join(changes))
        elif finished := sorted(path.stem for path in folder.glob("*.stage")):
            _log.warning("resuming from %s (finished: %s)", folder, ", ".join(finished))
        return self

    def mark_bundle(self, manifest_sha256: str) -> None:
        """Record the bundle that is about to be renamed to the output folder."""
        self._write("state.json", json.dumps({**self.state, "bundle": manifest_sha256}).encode())

    def _write(self, name: str, content: bytes | memoryview) -> None:
        if self.folder is not None:
            with _disk_errors(self.folder):
                write_file(self.folder / name, content)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


NO_STATE = Stages()


def check_folder(folder: Path) -> None:
    """UsageError if `Stages.open` cannot use ``folder``."""
    real = Path(os.path.realpath(folder))
    foreign = [e for e in entries(real) if not re.fullmatch(r"lock|(state\.json|[\w.-]+\.stage)(\.partial)?", e)]
    if foreign:
        raise UsageError(f"--work-dir {folder}: expected an empty folder or a state, found {foreign[0]!r:.200}")
    require_writable(real, f"--work-dir {folder}", "choose another --work-dir")


def remove_state(folder: Path, *, default: bool) -> None:
    """Delete a state, if it exists, and its folder if it was created for it; ``default`` as in `Stages.open`."""
    check_folder(folder)
    if (folder := Path(os.path.realpath(folder))).exists():
        with _lock(folder):
            keep = not (default or _read_state(folder).get("made folder", False))
            remove_files(folder, entries(folder), last=("lock", "state.json"), keep=keep)


def placed_bundle(folder: Path, out: Path) -> dict[str, Any] | None:
    """The fingerprint of the bundle at ``out``, if an interrupted run with this state wrote it."""
    state = _read_state(folder)
    placed = "bundle" in state and (out / MANIFEST).is_file() and state["bundle"] == file_digest(out / MANIFEST)
    return state["fingerprint"] if placed else None


def _lock(folder: Path) -> IO[str]:
    busy = f"another conversion is working in {folder}; wait for it, or choose another --work-dir"
    return lock_file(folder / "lock", UsageError(busy))


def _digest(name: str, data: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0")  # with the name, so that a renamed file counts as damaged
    digest.update(data)
    return digest.hexdigest().encode()


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "state.json").read_bytes()))
    except OSError:  # the file does not exist, or the folder's name is not valid
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
        why = f"cannot be written ({error.strerror}); choose another --work-dir"
        raise UsageError(f"--work-dir {folder}: {why}") from error
