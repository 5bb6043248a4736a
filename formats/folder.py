"""Atomic writing and replacement of output folders."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .errors import ResourceError, UsageError
from .guard import PARTIAL, quoted

PREVIOUS, UNFINISHED = ".being-replaced", ".wisparse-unfinished"
_MAX_MARKER_BYTES = 4 << 20


@dataclass(frozen=True)
class Kind:
    name: str  # in words: ``a bundle``; ``maker``: who writes one: ``conversion``
    maker: str
    manifest: str  # a file that identifies a complete folder; deleted last
    # names of all files of a complete folder, by its manifest; None for other folders
    files: Callable[[Path], Collection[str] | None]


def check_target(out: Path, kind: Kind, overwrite: bool) -> None:
    """UsageError unless `replaced_folder` may write to ``out``; for a preflight."""
    partial, previous = _beside(out)
    if out.name.endswith((PARTIAL, PREVIOUS)):
        raise UsageError(f"{out}: names ending in {PARTIAL} or {PREVIOUS} are kept for unfinished work; choose another")
    require_writable(out.parent, f"{out}", "choose another output folder", previous.name)
    # A process killed between the two renames of a swap has left OUT only under its other name.
    _check_out(out if os.path.lexists(out) else previous, kind, overwrite)
    for folder in (partial, previous):
        if os.path.lexists(folder):
            _owned(folder, kind)
    with contextlib.suppress(FileNotFoundError):
        _lock_marker(partial, kind, "r+").close()


def require_writable(folder: Path, option: str, advice: str, name: str = "") -> None:
    """Raise UsageError unless ``name`` can be created in ``folder``, which may be missing, as may its parents."""
    missing = [name]
    while not os.path.lexists(folder):
        missing.append(folder.name)
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{option}: {folder} is not a folder; {advice}")
    longest = os.pathconf(folder, "PC_NAME_MAX")
    for name in missing:
        if len(os.fsencode(name)) > longest:
            raise UsageError(f"{option}: expected names of at most {longest} bytes, found {quoted(name)}; {advice}")
    if not os.access(folder, os.W_OK | os.X_OK):
        readonly = os.statvfs(folder).f_flag & os.ST_RDONLY
        reason = "is on a read-only file system" if readonly else "may not be written to: no permission"
        raise UsageError(f"{option}: {folder} {reason}; {advice}")
    if not os.statvfs(folder).f_blocks:  # /proc and similar file systems: writable by root, but without files
        try:
            os.rmdir(tempfile.mkdtemp(dir=folder))
        except OSError:
            raise UsageError(f"{option}: {folder} cannot be written to; {advice}") from None


@contextlib.contextmanager
def replaced_folder(out: Path, kind: Kind, files: Iterable[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A context manager that yields a folder ``partial``, and renames it to ``out`` (absolute) after the block. After an
    exception nothing has changed; after a kill, only files that the next run deletes. ``files``: all names that may be
    written; ``overwrite``: replace an ``out`` of the same kind."""
    names = {*files, UNFINISHED}
    partial, previous = _beside(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_target(out, kind, overwrite)
        clear_leftovers(out, kind)
        try:
            partial.mkdir()
            marker = _lock_marker(partial, kind)
        except (FileExistsError, FileNotFoundError):
            raise _busy(partial, kind) from None  # another process created or removed the folder meanwhile
        with marker:
            try:
                marker.write(json.dumps({"kind": kind.name, "files": sorted(names)}))
                marker.flush()
                yield partial
                # fsync before the rename, so that the renamed folder is complete after a crash.
                for where, _, inside in os.walk(partial):
                    for name in (*inside, "."):
                        _sync(Path(where, name))
                _check_out(out, kind, overwrite)
                # Delete the old folder only after the new one is in place.
                if not os.path.lexists(out):
                    os.rename(partial, out)
                elif exchange(partial, out):
                    os.rename(partial, previous)
                else:
                    os.rename(out, previous)
                    try:
                        os.rename(partial, out)
                    except BaseException:
                        os.rename(previous, out)
                        raise
                _sync(out.parent)
                clear_leftovers(out, kind)
            except BaseException:
                # Without the marker it is the former OUT; the next run deletes it, as after a kill.
                if (partial / UNFINISHED).is_file():
                    remove_files(partial, names, last=(UNFINISHED,))
                raise
    except OSError as reason:
        full = reason.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = f"the disk is full ({reason.strerror}); the folder was not written, free some space"
        other = f"cannot be written: {reason.strerror or reason}"
        raise ResourceError(f"{out}: {what if full else other}") from None


def clear_leftovers(out: Path, kind: Kind) -> None:
    """Undo or complete the swap of a killed process at ``out``; UsageError for other files or a live process."""
    partial, previous = _beside(out)
    if os.path.lexists(previous):
        names = _owned(previous, kind)
        if os.path.lexists(out):
            remove_files(previous, names, last=(kind.manifest,))
        else:
            os.rename(previous, out)
    if os.path.lexists(partial):
        names = _owned(partial, kind)
        with contextlib.suppress(FileNotFoundError), _lock_marker(partial, kind):
            remove_files(partial, names, last=(kind.manifest, UNFINISHED))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (out / UNFINISHED).unlink()


def entries(folder: Path) -> list[str]:
    """Sorted paths of all files in a folder, as ``a`` or ``a/b``, of symlinks, which are not followed, and of empty folders,
    as ``a/``."""
    found = []
    for where, folders, files in os.walk(folder):
        prefix = "" if where == str(folder) else os.path.relpath(where, folder) + "/"
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        if prefix and not folders and not files:
            found.append(prefix)
        found += [prefix + name for name in (*files, *links)]
    return sorted(found)


def remove_files(folder: Path, names: Collection[str], last: Iterable[str] = (), *, keep: bool = False) -> None:
    """Delete these files, the folders that become empty and, unless ``keep``, ``folder`` itself if it is empty. ``last``:
    names that are deleted last, in this order."""
    ending = list(last)
    first = sorted(name for name in {*names} - {*ending} if not name.endswith("/"))
    inner = {str(one) for name in names for one in Path(name, "_").parents if name.endswith("/") or one != Path(name)}
    for name in (*first, *sorted(inner, reverse=True), *ending, *([] if keep else [""])):
        path = folder / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if name and name not in inner:
                path.unlink()
            elif not os.listdir(path):  # files of others are kept
                path.rmdir()


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write or replace a file atomically."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.write_bytes(content)
        _sync(partial)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def lock_file(path: Path, busy: UsageError, mode: str = "a+") -> IO[str]:
    """Open a file and lock it for this process until it is closed; ``busy`` if another process has it."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, mode, encoding="utf-8"))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                stack.pop_all()  # the caller closes it
                return file
    raise busy


def _beside(out: Path) -> tuple[Path, Path]:
    return out.with_name(out.name + PARTIAL), out.with_name(out.name + PREVIOUS)


def _check_out(out: Path, kind: Kind, overwrite: bool) -> None:
    if os.path.lexists(out):
        owned = _owned(out, kind)  # nothing else is ever replaced
        if not overwrite:
            raise UsageError(f"{out}: already exists; choose another output folder or pass --overwrite")
        # Its files will be deleted; check now that this is possible.
        for inside in sorted({(out / name).parent for name in (*owned, kind.manifest)}):
            require_writable(inside, f"{out}", "change that, or choose another output folder")


def _owned(folder: Path, kind: Kind) -> set[str]:
    """The names of the files in one of our folders; UsageError for other folders, or for unknown files."""
    if folder.is_symlink():
        raise UsageError(f"{folder}: a symlink to {os.readlink(folder)}; give the folder itself")
    if not folder.is_dir():
        raise UsageError(f"{folder}: not {kind.name} but a file, so it is not replaced; choose another output folder")
    found = entries(folder)
    planned, finished = _planned(folder, kind), kind.files(folder)
    known = {*(planned or ()), *(finished or ()), UNFINISHED}
    if found and planned is None and finished is None:
        raise UsageError(f"{folder}: not {kind.name}, so it is not replaced; choose another output folder")
    for name in found:
        if name not in known and not (name.endswith("/") and any(one.startswith(name) for one in known)):
            raise UsageError(f"{folder}: holds {name!r:.200}, which is not part of {kind.name}; move it away first")
    return set(found)


def _planned(folder: Path, kind: Kind) -> set[str] | None:
    """The file names in the marker of an unfinished folder; None without a marker of this kind."""
    marker = folder / UNFINISHED
    if marker.is_symlink() or not marker.is_file() or marker.stat().st_size > _MAX_MARKER_BYTES:
        return None
    try:
        content = json.loads(marker.read_bytes())
        return set(content["files"]) if content["kind"] == kind.name else None
    except (ValueError, KeyError, TypeError):
        return set()  # killed while it was written, and before anything else was


def _lock_marker(partial: Path, kind: Kind, mode: str = "a+") -> IO[str]:
    return lock_file(partial / UNFINISHED, _busy(partial, kind), mode)


def _busy(partial: Path, kind: Kind) -> UsageError:
    return UsageError(f"{partial}: another {kind.maker} is writing there; wait for it or choose another output folder")


def exchange(one: Path, other: Path) -> bool:
    """Atomically exchange the names of two folders; False, and no change, if the system (other than Linux) or the file
    system does not support it."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
