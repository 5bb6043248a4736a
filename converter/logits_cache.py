"""Logits of a reference model on disk, in float16, keyed by model and tokens."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.folder import write_file
from wisparse.formats.machine import cache_folder, shown_bytes

_log = logging.getLogger("wisparse")

MAX_BYTES = 4 << 30  # of all files
_DIGEST_BYTES = hashlib.sha256().digest_size


def rounded(logits: Tensor) -> Tensor:
    """Logits (T, V) as stored: relative to each row's largest one, in float16. Their KL to the given ones is below 1e-6."""
    return (logits.float() - logits.float().amax(dim=-1, keepdim=True)).clamp(min=-6e4).half()


class LogitsCache:
    """Files of one sequence each: the sha256 of its logits, then these. ``model`` is a digest of the weights and of what else
    the logits depend on."""

    def __init__(self, model: str, vocab_size: int, max_bytes: int = MAX_BYTES, folder: Path | None = None) -> None:
        self._model, self._vocab_size, self._max_bytes = model, vocab_size, max_bytes
        self._folder = folder or cache_folder() / "logits"

    def holds(self, num_tokens: int) -> bool:
        """Whether this many tokens fit at once; if not, a warning says so."""
        needed = num_tokens * self._vocab_size * 2
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free + sum(stat.st_size for _, stat in self._files())
        except OSError as error:
            _log.warning("the reference's logits are not cached: %s: %s", self._folder, error.strerror or error)
            return False
        limit = min(self._max_bytes, free // 2)
        if needed > limit:
            sizes = shown_bytes(needed), shown_bytes(limit)
            _log.warning("the reference's logits are not cached: they take %s, the limit is %s", *sizes)
        return needed <= limit

    def read(self, ids: Tensor) -> Tensor | None:
        """The logits (T, V) float16 of token ids (T,), or None. A damaged file is removed, with a warning."""
        path = self._path(ids)
        try:
            data = bytearray(path.read_bytes())
        except OSError:
            return None
        size = len(ids) * self._vocab_size * 2
        content = memoryview(data)[_DIGEST_BYTES:]
        if len(content) != size or hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
            _log.warning("%s is damaged and ignored; it is computed again", path)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # another user's file
            path.touch()
        return torch.from_numpy(np.frombuffer(content, np.float16)).view(len(ids), -1)

    def write(self, ids: Tensor, logits: Tensor) -> None:
        """Store `rounded` logits; the files that were used least recently are removed first if all exceed the limit."""
        content = logits.cpu().contiguous().numpy().tobytes()
        try:
            files = sorted(self._files(), key=lambda one: one[1].st_mtime)
            total = len(content) + sum(stat.st_size for _, stat in files)
            for path, stat in files:
                if total <= self._max_bytes:
                    break
                total -= stat.st_size
                path.unlink(missing_ok=True)
            write_file(self._path(ids), hashlib.sha256(content).digest() + content)
        except OSError as error:
            _log.warning("%s: cannot be written: %s", self._folder, error.strerror or error)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The folder's files; other processes may remove some meanwhile."""
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if S_ISREG((stat := path.lstat()).st_mode):
                    yield path, stat

    def _path(self, ids: Tensor) -> Path:
        key = f"{self._model} {self._vocab_size} {ids.tolist()}"
        return self._folder / hashlib.sha256(key.encode()).hexdigest()
