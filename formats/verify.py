"""Verifying a bundle: everything ``Bundle.open`` checks, and every byte of every file."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .bundle import MAX_FILE_BYTES, Bundle, is_document
from .errors import BundleError, printable
from .guard import list_files, open_regular
from .manifest import MANIFEST

_READ_BYTES = 1 << 20
_MAX_FILES = 10_000


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at. ``notes`` are remarks about files that decide nothing: edited documents, unknown files."""

    folder: str
    num_files: int
    num_bytes: int
    num_tensors: int
    num_projections: int
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def verify_bundle(folder: str | os.PathLike[str]) -> VerifyReport:
    """Check a bundle completely: structure, sha256 of every file, every weight finite; BundleError at the first fault."""
    started = time.monotonic()
    return _verify(Bundle.open(folder), started)


def verify_files(folder: Path) -> VerifyReport:
    """``verify_bundle`` for a folder that still has its unfinished name."""
    return _verify(Bundle.open(folder, unfinished=True), time.monotonic())


def _verify(bundle: Bundle, started: float) -> VerifyReport:
    notes: list[str] = []
    checkpoint = bundle.checkpoint
    names = list(bundle.manifest.sha256)
    weights = {path.name for path in checkpoint.files()}

    def require_finite(name: str) -> None:
        for _ in checkpoint.chunks(name):
            pass

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        sizes = list(pool.map(lambda name: _check_file(bundle, name, weights, notes), names))
        list(pool.map(require_finite, checkpoint.tensors))
        list(pool.map(checkpoint.require_matrix, checkpoint.quantised))
    known = {*names, MANIFEST}
    notes += [
        f"{printable(name)}: not part of the bundle"
        for name in list_files(bundle.folder, _MAX_FILES, BundleError, deep=True)
        if name not in known and not name.startswith(".")
    ]
    return VerifyReport(
        folder=str(bundle.folder),
        num_files=len(names) + 1,
        num_bytes=sum(sizes),
        num_tensors=len(checkpoint.tensors),
        num_projections=len(bundle.masks),
        notes=tuple(sorted(notes)),
        seconds=time.monotonic() - started,
    )


def _check_file(bundle: Bundle, name: str, weights: Collection[str], notes: list[str]) -> int:
    """Check the sha256 of one file; returns its size. A document that is missing or edited is a note."""
    try:
        with open_regular(bundle.folder, name, BundleError) as file:
            size = os.fstat(file.fileno()).st_size
            if name not in weights and size > MAX_FILE_BYTES:
                raise BundleError(f"{name}: expected at most {MAX_FILE_BYTES:,} bytes, found {size:,}")
            digest = hashlib.sha256()
            while data := file.read(_READ_BYTES):
                digest.update(data)
    except BundleError as reason:
        if not is_document(name):
            raise
        notes.append(str(reason))
        return 0
    expected = bundle.manifest.sha256[name]
    if digest.hexdigest() != expected:
        if not is_document(name):
            raise BundleError(
                f"{name}: expected sha256 {expected:.16}…, found {digest.hexdigest():.16}…; the file is damaged or was "
                "edited: fetch it again"
            )
        notes.append(f"{name}: was edited after the conversion")
    return size
