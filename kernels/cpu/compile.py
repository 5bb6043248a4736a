"""Compiles a region, or takes it from the disk: the first use takes seconds, later ones in any process do not.

numba's cache notices a change of the file a function is defined in, but not of the files it calls into. So its folder
is named after the content of all of them: code from before an upgrade is never run.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types

__all__ = ["compile_region", "is_compiled", "is_kept"]

log = logging.getLogger(__name__)

_SIGNATURE = types.void(types.CPointer(types.int64))
_lock = threading.Lock()
_config: Any = numba.config  # its names come from the environment, so a type checker knows none of them


def compile_region(region: Callable[[Any], None]) -> Any:
    """A region as machine code for this processor; keep the result alive as long as its ``address`` is used."""
    folder = _cache_folder()
    if folder is not None:
        # numba takes the folder from its settings, which are the process's.
        with _lock:
            before, _config.CACHE_DIR = _config.CACHE_DIR, str(folder)
            try:
                return numba.cfunc(_SIGNATURE, cache=True)(region)
            except OSError as error:  # the disk is full, say
                _warn(str(error))
            finally:
                _config.CACHE_DIR = before
    return numba.cfunc(_SIGNATURE)(region)


def is_compiled(region: Callable[[Any], None]) -> bool:
    """Whether :func:`compile_region` finds the region on disk."""
    folder = _cache_folder()
    return folder is not None and any(folder.glob(f"*/*.{region.__name__}-*.nbi"))


def is_kept() -> bool:
    """Whether what is compiled is found again by the next process; a warning says so if it is not."""
    return _cache_folder() is not None


@functools.cache
def _cache_folder() -> Path | None:
    """Where compiled code is kept: under NUMBA_CACHE_DIR if it is set, else in the user's cache.

    Never beside the source: an installer leaves files that it did not write where they are, and a folder that outlives
    its package hides the next one. None if the folder cannot be written; a warning says so.
    """
    try:
        folder = _parent() / f"wisparse-cpu-{_digest()}"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _warn(str(error))
        return None
    return folder


def _parent() -> Path:
    if _config.CACHE_DIR:
        return Path(_config.CACHE_DIR)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wisparse"


def _digest() -> str:
    """Twelve characters that change with any of the CPU back end's files."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _warn(reason: str) -> None:
    log.warning(
        "the CPU kernels cannot be kept on disk and will be compiled again by every process, which takes seconds (%s); "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )
