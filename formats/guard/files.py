"""Opening files a stranger wrote: regular files inside their folder, read once, never blocking.

A name is refused when it is absolute or climbs out of the folder, when it is not a regular file (a FIFO would hang, a
device could do anything), or when a symlink leads out. One exception: the Hugging Face cache keeps its snapshots as
symlinks into the ``blobs`` of the same repository; those, and only those, may be followed.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import AccessError, WisparseError

__all__ = [
    "PARTIAL",
    "FileIdentity",
    "file_digest",
    "identity",
    "list_files",
    "open_regular",
    "read_bounded",
    "resolve_inside",
]

_COMMIT = re.compile("[0-9a-f]{40}")

# Ends the name of what is being written and not yet whole.
PARTIAL = ".partial"


@dataclass(frozen=True)
class FileIdentity:
    """Which file it was and when it was last written; another one under the same name means that it was replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int


def _identity_of(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def resolve_inside(folder: Path, name: str, error: type[WisparseError]) -> Path:
    """The real path of ``folder/name``.

    Raises:
        error: the name leaves the folder, or nothing is there.
    """
    if not name or "\0" in name or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        raise error(f"{name!r:.100}: expected a file inside the folder, found a path that leaves it")
    root = os.path.realpath(folder)
    try:
        real = os.path.realpath(os.path.join(root, name), strict=True)
    except OSError as reason:
        raise _unreadable(name, reason, error) from None
    if os.path.commonpath([root, real]) == root:
        return Path(real)
    if os.path.dirname(real) == _hub_blobs(root):
        return Path(real)
    raise error(f"{name}: a symlink that leaves the folder; copy the file itself into {Path(folder).name}")


def _hub_blobs(root: str) -> str | None:
    """Where the files of a snapshot in the Hub's cache really lie: ``models--OWNER--NAME/blobs``, its own and no other.

    The snapshot is ``models--OWNER--NAME/snapshots/COMMIT``; a folder called ``blobs`` anywhere else is just a folder.
    """
    snapshots, commit = os.path.split(root)
    repository, name = os.path.split(snapshots)
    if name == "snapshots" and _COMMIT.fullmatch(commit) and os.path.basename(repository).startswith("models--"):
        return os.path.join(repository, "blobs")
    return None


def open_regular(
    folder: Path, name: str, error: type[WisparseError], expected: FileIdentity | None = None
) -> io.FileIO:
    """Open ``folder/name`` for reading, unbuffered.

    Args:
        expected: what ``identity`` said before; a file that changed since is refused.

    Raises:
        error: not a regular file inside the folder, or not the expected one.
        AccessError: no permission to read it.
    """
    path = resolve_inside(folder, name, error)
    try:
        # Looked at before it is opened: opening a device can already have an effect.
        _require_regular(name, os.stat(path, follow_symlinks=False), error)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as reason:
        raise _unreadable(name, reason, error) from None
    file = io.FileIO(descriptor, "rb", closefd=True)
    try:
        status = os.fstat(descriptor)
        _require_regular(name, status, error)
        if expected is not None and _identity_of(status) != expected:
            raise error(f"{name}: changed on disk since it was checked; open it again")
    except BaseException:
        file.close()
        raise
    return file


def identity(file: io.FileIO) -> FileIdentity:
    """The identity of an open file."""
    return _identity_of(os.fstat(file.fileno()))


def read_bounded(folder: Path, name: str, limit: int, error: type[WisparseError]) -> bytes:
    """The whole of a small file.

    Raises:
        error: missing, not a regular file inside the folder, or longer than ``limit`` bytes.
    """
    with open_regular(folder, name, error) as file:
        size = identity(file).size
        if size > limit:
            raise error(f"{name}: expected at most {limit:,} bytes, found {size:,}")
        try:
            # A file of /proc says it is empty and is not, so ask for one byte more than allowed, not for the size.
            data = bytearray()
            while len(data) <= limit and (piece := file.read(min(1 << 20, limit + 1 - len(data)))):
                data += piece
        except OSError as reason:
            raise _unreadable(name, reason, error) from None
    if len(data) > limit:
        raise error(f"{name}: expected at most {limit:,} bytes, found more")
    return bytes(data)


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path, limit: int, error: type[WisparseError], *, deep: bool = False) -> list[str]:
    """Names of everything in ``folder`` that is not a folder, sorted.

    Args:
        deep: also what lies in its folders, as ``folder/name``; those that are symlinks or hidden are not entered.

    Raises:
        AccessError: no such folder.
        error: more than ``limit`` of them.
    """
    require_folder(folder)
    found: list[str] = []
    pending = [""]
    entries = 0
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(folder, prefix)) as scan:
            for entry in scan:
                entries += 1
                if entries > limit:
                    raise error(f"{folder.name}: expected at most {limit:,} files, found more")
                if not entry.is_dir(follow_symlinks=False):
                    found.append(f"{prefix}{entry.name}")
                elif deep and not entry.name.startswith("."):
                    pending.append(f"{prefix}{entry.name}/")
    return sorted(found)


def require_folder(folder: Path) -> None:
    """Raise AccessError unless ``folder`` is an existing folder."""
    try:
        if folder.is_dir():
            return
        found = "a file" if folder.exists() else "nothing"
    except OSError as reason:
        raise AccessError(f"{str(folder)!r:.200}: cannot be read: {reason.strerror}") from None
    raise AccessError(f"{folder}: expected a folder, found {found}")


def _require_regular(name: str, status: os.stat_result, error: type[WisparseError]) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    found = next((kind for test, kind in kinds if test(status.st_mode)), "a device")
    raise error(f"{name}: expected a regular file, found {found}")


def _unreadable(name: str, reason: OSError, error: type[WisparseError]) -> WisparseError:
    if isinstance(reason, FileNotFoundError):
        return error(f"{name}: missing")
    if reason.errno in (errno.EACCES, errno.EPERM):
        return AccessError(f"{name}: no permission to read it")
    return error(f"{name!r:.200}: cannot be read: {reason.strerror}")
