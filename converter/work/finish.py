"""The mark of a conversion whose bundle is in place, and which is not quite over: ``OUT.finished``, beside the bundle.

It is written with the swap that puts the bundle there, and is the last trace to go. It names what the bundle was made
from (the source's every byte, the settings, the text) and the bundle itself, by its manifest's digest. So a run that
was killed after the swap is told from one that was killed before it, and from any other conversion to the same place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.guard.files import PARTIAL, file_digest
from wisparse.formats.guard.folder import require_writable, write_file
from wisparse.formats.record.manifest import MANIFEST
from wisparse.formats.verify import verify_bundle

__all__ = ["check_mark", "is_finished", "names_the_bundle", "remove_mark", "write_mark"]

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
