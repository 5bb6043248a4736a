"""Findings written into a finished bundle, which is replaced as a whole, as a conversion replaces one.

Only the report, the card and their digests in ``wisparse.json`` change; every other file of the new folder is the old
one's, under a second name, so no weight is written again. A kill at any moment leaves the old bundle or the new one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import BundleError
from ..guard.files import open_regular, read_bounded, resolve_inside
from ..guard.folder import check_target, clear_leftovers, replaced_folder
from ..guard.safe_json import dump_json, parse_json, read_json
from .findings import CARD, REPORT, Finding, as_entries, merged, read_findings, with_table
from .manifest import BUNDLE, MANIFEST, MAX_MANIFEST_BYTES, listed_files

__all__ = ["check_amendable", "save_findings"]

_MAX_DOCUMENT_BYTES = 32 << 20


def check_amendable(folder: str | os.PathLike[str]) -> None:
    """Whether `save_findings` may write there; meant for before the work.

    Raises:
        UsageError: no permission, another process writes there, or the folder holds what is not part of the bundle.
        BundleError: no bundle, findings in it that are none, or a file that is a symlink out of the folder.
    """
    out = Path(os.path.realpath(folder))
    names = listed_files(out)
    check_target(out, BUNDLE, overwrite=True)
    for name in names:
        _own_file(out, name)
    _amended(out, ())


def save_findings(folder: str | os.PathLike[str], findings: Iterable[Finding]) -> None:
    """Put findings beside those that a bundle has, in its report and on its card.

    Raises:
        UsageError, BundleError: as `check_amendable`.
        ResourceError: the disk is full.
    """
    out, findings = Path(os.path.realpath(folder)), tuple(findings)
    clear_leftovers(out, BUNDLE)  # a kill between two renames leaves the bundle beside its place
    names = {*listed_files(out), MANIFEST, REPORT, CARD}
    with replaced_folder(out, BUNDLE, names, overwrite=True) as partial:
        # Read while no other process may replace it.
        documents = _amended(out, findings)
        kept = {*listed_files(out)} - {*documents}
        if not kept <= names:
            raise BundleError(f"{out}: was replaced by another bundle meanwhile; run this again")
        for name in kept:
            _link_or_copy(_own_file(out, name), partial / name)
        manifest = read_json(out, MANIFEST, MAX_MANIFEST_BYTES, BundleError)
        digests = {name: {"sha256": hashlib.sha256(data).hexdigest()} for name, data in documents.items()}
        manifest["files"] = dict(sorted({**manifest["files"], **digests}.items()))
        for name, data in {**documents, MANIFEST: dump_json(manifest)}.items():
            (partial / name).write_bytes(data)


def _amended(folder: Path, findings: Iterable[Finding]) -> Mapping[str, bytes]:
    """Report and card with these findings too."""
    text = {name: _document(folder, name) for name in (REPORT, CARD)}
    report = parse_json(text[REPORT] or b"{}", REPORT, BundleError)
    known = merged(read_findings(report), findings)
    try:
        card = text[CARD].decode("utf-8")
    except UnicodeDecodeError as reason:
        raise BundleError(f"{CARD}: expected UTF-8, found a wrong byte at {reason.start}") from None
    return {
        REPORT: dump_json({**report, "findings": as_entries(known)}),
        CARD: with_table(card, known).encode(),
    }


def _document(folder: Path, name: str) -> bytes:
    """A file for people, which its owner may have removed."""
    if not os.path.lexists(folder / name):
        return b""
    return read_bounded(folder, name, _MAX_DOCUMENT_BYTES, BundleError)


def _own_file(folder: Path, name: str) -> Path | None:
    """The bundle's own file, never what a symlink out of the folder points at; None for one that was removed."""
    if not os.path.lexists(folder / name):
        return None  # a document: the manifest still names it, and `verify` says so
    open_regular(folder, name, BundleError).close()
    return resolve_inside(folder, name, BundleError)


def _link_or_copy(old: Path | None, new: Path) -> None:
    """The same file under a second name, or a copy of it where the disk knows no such thing."""
    if old is None:
        return
    new.parent.mkdir(exist_ok=True)
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
