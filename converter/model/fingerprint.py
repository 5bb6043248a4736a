"""Which model a conversion started from: a digest of every byte that its result can depend on.

Weights are hashed in pieces, several at once: 16 GB take seconds, next to a conversion of many minutes. A file hashed
before counts as unchanged while the system says so: the same file, of the same size, neither written nor replaced nor
touched since (its inode's change time cannot be set back, unlike its modification time).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from wisparse.formats.bundle import SMALL_FILES
from wisparse.formats.errors import WisparseError
from wisparse.formats.guard.files import identity, list_files, open_regular, read_bounded
from wisparse.formats.weights.checkpoint import INDEX, Checkpoint
from wisparse.formats.write import copied_files

__all__ = ["Hashes", "small_digests", "weight_digests"]

# File name -> what the system says of it, and its digest at that time.
Hashes = dict[str, list[int | str]]

_PIECE_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_MAX_TEXT_BYTES = 16 << 20


def small_digests(folder: Path, error: type[WisparseError]) -> dict[str, str]:
    """sha256 of every file beside the weights that a conversion reads or copies, by name."""
    contents = dict(copied_files(folder, error))
    for name in list_files(folder, 100_000, error, deep=True):
        if name in ("config.json", "README.md", INDEX) or name.startswith("additional_chat_templates/"):
            contents[name] = read_bounded(folder, name, max(_MAX_TEXT_BYTES, SMALL_FILES.get(name, 0)), error)
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(contents.items())}


def weight_digests(checkpoint: Checkpoint, known: Mapping[str, list[int | str]] | None = None) -> Hashes:
    """A digest of every byte of every weight file, by name; files that ``known`` still describes are not read.

    Raises:
        WisparseError: the checkpoint's own, for a file that changed since it was opened.
    """
    found: Hashes = {}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for path in checkpoint.files():
            before = _described(checkpoint, path.name)
            size = int(before[1])
            earlier = (known or {}).get(path.name)
            if isinstance(earlier, list) and earlier[:-1] == before:
                found[path.name] = earlier
                continue
            pieces = pool.map(partial(_piece, checkpoint, path.name), range(0, size, _PIECE_BYTES))
            digest = hashlib.sha256(b"".join(pieces)).hexdigest()
            if _described(checkpoint, path.name) != before:
                raise checkpoint.error(f"{path.name}: changed while it was read; run this again")
            found[path.name] = [*before, digest]
    return found


def _described(checkpoint: Checkpoint, name: str) -> list[int | str]:
    with open_regular(checkpoint.folder, name, checkpoint.error, checkpoint.identities[name]) as file:
        which = identity(file)
        return [which.inode, which.size, which.modified_ns, os.fstat(file.fileno()).st_ctime_ns]


def _piece(checkpoint: Checkpoint, name: str, start: int) -> bytes:
    hashed = hashlib.sha256()
    with open_regular(checkpoint.folder, name, checkpoint.error, checkpoint.identities[name]) as file:
        file.seek(start)
        left = _PIECE_BYTES
        while left and (read := file.read(min(left, _READ_BYTES))):
            hashed.update(read)
            left -= len(read)
    return hashed.digest()
