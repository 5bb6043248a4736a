"""Prompts kept on disk: tokens, keys, values and recurrent states, in safetensors files.

Tensors: ``tokens`` (T,) int64; ``cache.BLOCK.FIELD`` of an attention block's `Stored` (heads, T, ...);
``state.LENGTH.BLOCK.FIELD`` of a recurrent block's `RecurrentState` after LENGTH tokens. Nothing of a file is trusted:
names, shapes and dtypes must be those that the cache has, contents must have the checksums in the metadata.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.folder import require_writable
from wisparse.formats.guard import PARTIAL
from wisparse.formats.tensor_file import STORED_DTYPES, Entry, TensorFile, build_header, code_of

from ..decoding.cache import KVCache, RecurrentState
from ..decoding.decoder import Decoder
from .prefixes import CachedPrefix
from .scheduler import Scheduler

log = logging.getLogger(__name__)

_FORMAT = "wisparse-prompt-1"
_MOST_TOKENS, _FEWEST_TOKENS = 1 << 24, 64
_FILES = "wisparse-*.safetensors*"  # of a folder of prompts; also what a killed process left


class PromptFileError(WisparseError):
    """Damaged, or of something else."""


def fingerprint(bundle: Bundle, decoder: Decoder) -> str:
    """A digest of what a prompt's keys and states depend on, beside its tokens and sparsity level. UsageError with a draft
    head, whose own keys are not saved."""
    if decoder.head is not None:
        raise UsageError("prompts are not kept on disk with a draft head: choose another --speculative-config, or off")
    files = {
        name: digest for name, digest in bundle.manifest.sha256.items() if name.endswith((".safetensors", ".json"))
    }
    types = decoder.name, str(decoder.dtype), decoder.weight_type, decoder.kv_cache_dtype
    return hashlib.sha256(json.dumps([files, types], sort_keys=True).encode()).hexdigest()


def _tensors(cache: KVCache, slot: int, length: int) -> dict[str, Tensor]:
    """Views of a slot's first ``length`` positions, by name."""
    parts = ((f"{index}.{name}", x) for index, one in cache.attention.items() for name, x in one.tensors().items())
    return {f"cache.{name}": x[slot, :, :length] for name, x in parts}


def _state_tensors(length: int, states: Mapping[int, RecurrentState]) -> dict[str, Tensor]:
    parts = ((f"{block}.{name}", x) for block, state in states.items() for name, x in vars(state).items())
    return {f"state.{length}.{name}": x for name, x in parts}


@dataclass
class PromptFile:
    file: TensorFile
    checksums: Mapping[str, int]
    conversation: dict[str, Any]  # of `chat --session`; else empty
    prefix: CachedPrefix  # its states are empty

    @property
    def path(self) -> Path:
        return Path(self.file.folder, self.file.name)

    @classmethod
    def open(cls, path: Path) -> PromptFile:
        """Raises PromptFileError."""
        file = TensorFile(path.parent, path.name, PromptFileError)
        if file.metadata.get("format") != _FORMAT:
            raise PromptFileError(f"{path.name}: expected the format {_FORMAT}, found another one")
        try:
            prompt = file.metadata["prompt"].encode()
            if file.metadata["crc32"] != str(zlib.crc32(prompt)):
                raise ValueError("the checksum of the metadata differs")
            facts = guard.parse_json(prompt, f"{path.name}: prompt", PromptFileError)
            checksums, conversation, sparsity = facts["crc32"], facts["conversation"], facts["sparsity"]
            guard.expect(isinstance(checksums, dict) and isinstance(conversation, dict), "prompt", "objects", facts)
            if sparsity is not None:
                guard.number("sparsity", sparsity, 0, 1, "a level")
            ends = {int(name.split(".")[1]) for name in file.entries if name.startswith("state.")}
            states = dict.fromkeys(ends, ())
            sparse_from, entry = guard.integer("sparse_from", facts["sparse_from"], 0), file.entries["tokens"]
            prefix = CachedPrefix((), sparse_from, sparsity, bool(facts["long_factors"]), -1, states)
            found = cls(file, checksums, conversation, prefix)
            if entry.code != "I64" or len(entry.shape) != 1 or entry.shape[0] > _MOST_TOKENS:
                raise ValueError("expected tokens (T,) int64")
            found.prefix.tokens = found._read("tokens").tolist()
        except (KeyError, ValueError, UsageError) as error:
            raise PromptFileError(f"{path.name}: damaged: {error}") from None
        return found

    def check(self, decoder: Decoder, digest: str) -> None:
        """Raise PromptFileError unless keys and states are those of ``digest``, a `fingerprint`, and fit the cache."""
        cache, length, name = decoder.cache, len(self.prefix.tokens), self.file.name
        if self.file.metadata.get("fingerprint") != digest:
            raise PromptFileError(f"{name}: of another model, back end or type of weights")
        if length > cache.length:
            raise PromptFileError(f"{name}: expected at most {cache.length} positions, found {length}")
        expected = {"tokens": Entry("I64", (length,))}
        views = _tensors(cache, 0, length)
        for end in self.prefix.states:
            views |= _state_tensors(end, {block: cache.state(block, 0, 0) for block in cache.recurrent})
        expected |= {view: Entry(code_of(part.dtype), tuple(part.shape)) for view, part in views.items()}
        if self.file.entries != expected or any(not 0 < end <= length for end in self.prefix.states):
            raise PromptFileError(f"{name}: damaged: other tensors, shapes or dtypes than the cache has")

    @torch.inference_mode()
    def load(self, cache: KVCache, slot: int, length: int) -> list[RecurrentState]:
        """Fill the first ``length`` positions of a slot; returns the states after them. Raises PromptFileError."""
        for name, view in _tensors(cache, slot, length).items():
            view.copy_(self._read(name)[:, :length])
        states = []
        for block in cache.recurrent:
            like = cache.state(block, slot, length)
            read = {name: self._read(name) for name in _state_tensors(length, {block: like})}
            fields = zip(vars(like), read.values(), strict=True)
            states.append(replace(like, **{name: part.to(like.inputs.device, copy=True) for name, part in fields}))
        return states

    def _read(self, name: str) -> Tensor:
        """A tensor, memory-mapped. Raises PromptFileError if its checksum differs."""
        entry, data = self.file.entries[name], self.file.read(name)
        if zlib.crc32(data.numpy().data) != self.checksums.get(name):
            raise PromptFileError(f"{self.file.name}: damaged: the checksum of {name} differs")
        return data.view(getattr(torch, STORED_DTYPES[entry.code][0])).view(entry.shape)


def save(
    path: Path, scheduler: Scheduler, slot: int, digest: str, conversation: Mapping[str, Any] | None = None
) -> None:
    """Write what a slot holds of its prompt, atomically and for the user only. Raises OSError."""
    prefix, cache = scheduler.prefixes.prefix(slot), scheduler.decoder.cache
    views = {"tokens": torch.tensor(prefix.tokens, dtype=torch.int64), **_tensors(cache, slot, len(prefix.tokens))}
    for end, states in prefix.states.items():
        views |= _state_tensors(end, dict(zip(cache.recurrent, states, strict=True)))
    parts = {name: part.cpu().contiguous().flatten().view(torch.uint8).numpy().data for name, part in views.items()}
    facts = {name: getattr(prefix, name) for name in ("sparse_from", "sparsity", "long_factors")}
    checksums = {name: zlib.crc32(part) for name, part in parts.items()}
    prompt = json.dumps({"crc32": checksums, "conversation": conversation or {}, **facts})
    checksum = str(zlib.crc32(prompt.encode()))
    metadata = {"format": _FORMAT, "fingerprint": digest, "prompt": prompt, "crc32": checksum}
    shapes = {name: (part.dtype, tuple(part.shape)) for name, part in views.items()}
    handle, partial = tempfile.mkstemp(suffix=PARTIAL, prefix=path.name, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(build_header(shapes, metadata))
            for part in parts.values():
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


class PromptFolder:
    """The prompts in a folder that several models may share, of up to ``max_bytes`` in all. The first prompt makes it."""

    def __init__(self, folder: Path, scheduler: Scheduler, bundle: Bundle, max_bytes: int) -> None:
        """Let the scheduler use the folder's prompts of this model. Damaged files are ignored with a warning each."""
        require_writable(folder, "--prompt-cache", "choose another folder")
        self._folder, self._scheduler, self._max_bytes = folder, scheduler, max_bytes
        self._digest = fingerprint(bundle, scheduler.decoder)
        self._name = f"wisparse-{self._digest[:16]}-"
        for path in sorted(folder.glob(f"{self._name}*.safetensors")):
            try:
                saved = PromptFile.open(path)
                saved.check(scheduler.decoder, self._digest)
                scheduler.saved.append(saved)
            except WisparseError as error:
                log.warning("%s: ignored: %s", folder, error)

    def save(self) -> None:
        """Save the prompts of all slots, then delete the files that were not used for longest beyond ``max_bytes``."""
        scheduler, total = self._scheduler, 0
        try:
            for slot in range(scheduler.decoder.max_batch):
                prefix = scheduler.prefixes.prefix(slot)
                tokens = [*prefix.tokens]
                if len(tokens) < _FEWEST_TOKENS:
                    continue
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                name = hashlib.sha256(json.dumps([tokens, prefix.sparse_from, prefix.sparsity]).encode()).hexdigest()
                path = self._folder / f"{self._name}{name[:16]}.safetensors"
                save(path, scheduler, slot, self._digest)
                for old in scheduler.saved:  # of which this one is the continuation
                    if old.path != path and old.prefix.tokens == tokens[: len(old.prefix.tokens)]:
                        old.path.unlink(missing_ok=True)
            for path in sorted(self._folder.glob(_FILES), key=lambda path: path.stat().st_mtime, reverse=True):
                total += path.stat().st_size
                if total > self._max_bytes:
                    path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: prompts were not saved: %s", self._folder, error.strerror or error)
