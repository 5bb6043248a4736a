"""How far a model's distributions are from a reference's, on the same tokens; the reference's logits, cached on disk."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.folder import write_file
from wisparse.formats.machine import cache_folder, shown_bytes

from .evaluation import json_values, mean_and_error, perplexity_of

_log = logging.getLogger("wisparse")

MAX_BYTES = 4 << 30  # of all files
_DIGEST_BYTES = hashlib.sha256().digest_size


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


# Edges of the buckets: the probability of the reference's most likely token.
CONFIDENCES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its standard error over sequences, NaN of one sequence."""

    mean: float
    stderr: float


@dataclass(frozen=True)
class Bucket:
    """The tokens at which the probability of the reference's most likely token is in [low, high)."""

    low: float
    high: float
    num_tokens: int
    kl: Estimate
    top1_agreement: Estimate


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) in nats per token, and what changes by token. Flips are over the tokens with a next token in the
    text: whether that one is the most likely."""

    num_tokens: int
    kl: Estimate
    kl_quantiles: dict[str, float]
    top1_agreement: Estimate
    flips_lost: Estimate  # right in the reference, wrong in the model
    flips_gained: Estimate
    probability_rms: Estimate  # root mean square change of the next token's probability
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: Estimate
    buckets: tuple[Bucket, ...]

    def to_dict(self) -> dict[str, Any]:
        return json_values(asdict(self))


def divergence(texts: Sequence[Tensor]) -> Divergence:
    """From the `token_figures` of each sequence."""

    def estimate(values: Sequence[Tensor]) -> Estimate:
        """Of values by token and sequence; NaN is left out."""
        known = [one[~one.isnan()] for one in values]
        sums = torch.stack([one.sum() for one in known])
        return Estimate(*mean_and_error(sums, torch.tensor([float(len(one)) for one in known])))

    columns = [[text[:, column] for text in texts] for column in range(7)]
    kl, agree, confidence, log_p, log_q, right_p, right_q = columns

    def pairs(first: Sequence[Tensor], second: Sequence[Tensor]) -> Any:
        return zip(first, second, strict=True)

    buckets = []
    for low, high in pairwise(CONFIDENCES):
        inside = [(one >= low) & ((one < high) | (high == 1.0)) for one in confidence]
        count = sum(int(one.sum()) for one in inside)
        if count:
            cells = ([one[mask] for one, mask in pairs(values, inside)] for values in (kl, agree))
            buckets.append(Bucket(low, high, count, *(estimate(cell) for cell in cells)))
    all_kl = torch.cat(kl)
    quantiles = [float(torch.quantile(all_kl, at)) for at in _QUANTILES] if len(all_kl) else [math.nan] * 4
    squares = estimate([(q.exp() - p.exp()).square() for p, q in pairs(log_p, log_q)])
    ratio = estimate([p - q for p, q in pairs(log_p, log_q)])  # its exponential is the ratio of the perplexities
    dense, root, change = perplexity_of(-estimate(log_p).mean), math.sqrt(squares.mean), perplexity_of(ratio.mean)
    return Divergence(
        num_tokens=len(all_kl),
        kl=estimate(kl),
        kl_quantiles=dict(zip(("median", "90%", "99%", "largest"), quantiles, strict=True)),
        top1_agreement=estimate(agree),
        flips_lost=estimate([p * (1 - q) for p, q in pairs(right_p, right_q)]),
        flips_gained=estimate([q * (1 - p) for p, q in pairs(right_p, right_q)]),
        probability_rms=Estimate(root, squares.stderr / (2 * root) if root else 0.0),
        reference_perplexity=dense,
        perplexity=perplexity_of(ratio.mean - estimate(log_p).mean),
        perplexity_ratio=Estimate(change, change * ratio.stderr),
        buckets=tuple(buckets),
    )
