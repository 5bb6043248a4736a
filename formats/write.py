"""Writing a bundle: weights streamed chunk by chunk into ``OUT.partial``, verified there, then renamed to ``OUT``.

Nothing that looks like a bundle stands on disk before it is one: ``wisparse.json`` is written last, and readers refuse
a folder named ``*.partial``. What a failed, interrupted or killed run leaves is `folder`'s business.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .bundle import SMALL_FILES
from .card import LICENCE_FILE
from .checkpoint import INDEX, Checkpoint, TensorInfo, is_finite
from .errors import ResourceError, UnsupportedModelError, UsageError, WisparseError
from .folder import check_target, replaced_folder
from .guard import dump_json, file_digest, list_files, read_bounded
from .manifest import (
    BUNDLE,
    FORMAT_VERSION,
    MANIFEST,
    SIDECAR,
    Manifest,
    Recipe,
    SparsityLevel,
    check_levels,
    is_file_name,
)
from .model_config import LM_HEAD, ModelConfig
from .safetensors_header import build_header
from .sidecar import ProjectionMask, check_mask, sidecar_bytes
from .verify import verify_files
from .weight_types import DTYPES

_MAX_COPIED_BYTES = 16 << 20
_CHUNK_BYTES = 32 << 20
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def write_bundle(
    source: Checkpoint,
    recipe: Recipe,
    levels: Mapping[float, Mapping[str, ProjectionMask]],
    out: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    max_shard_size: str | int = "5GB",
    extra_files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    before_swap: Callable[[str], None] | None = None,
) -> Path:
    """Write a bundle; equal arguments give equal bytes.

    Args:
        source: the dense model; its weights are copied byte for byte where ``dtype`` keeps theirs.
        recipe: what was decided; of each sparsity level one entry per projection of the model, in their order.
        sparsity levels: sparsity -> projection name -> mask, agreeing with the recipe.
        out: the folder to make.
        dtype: ``auto`` (each tensor as it is), ``bfloat16``, ``float16`` or ``float32``.
        max_shard_size: bytes of tensors per weight file, a number or a text such as ``5GB``.
        extra_files: name -> content of further files: ``README.md``, ``conversion_report.json``, ``figures/*.png``.
        overwrite: replace an existing bundle, once the new one is complete.
        before_swap: called when it is complete, with the sha256 of its ``wisparse.json``, which names all else in it.

    Returns:
        ``out``.

    Raises:
        UsageError: ``out`` exists, or recipe and masks do not fit the model.
        UnsupportedModelError: NaN or infinity in the weights, or values that ``dtype`` cannot hold.
        ResourceError: the disk is full.
    """
    out = Path(os.path.abspath(out))
    extra_files = dict(extra_files or {})
    _check_arguments(source, recipe, levels, dtype, extra_files)
    shards = _plan(source, dtype, parse_size(max_shard_size))
    check_output(out, overwrite, source=source.folder)
    copied = dict(copied_files(source.folder, source.error))
    weights = [_shard_name(index, len(shards)) for index in range(len(shards))]
    names = [*weights, INDEX, SIDECAR, *copied, *extra_files, "config.json", MANIFEST]
    with replaced_folder(out, BUNDLE, names, overwrite=overwrite) as partial:
        _require_space(out, estimate_bytes(source, dtype, len(levels)))
        writer = _Writer(partial)
        crc32: dict[str, int] = {}
        for file, tensors in zip(weights, shards, strict=True):
            writer.write_stream(file, lambda sink, tensors=tensors: _stream(source, tensors, dtype, sink, crc32))
        if source.tied and LM_HEAD in source.tensors:
            _check_tied(source)
        writer.write(INDEX, _index(source, shards, dtype))
        writer.write(SIDECAR, sidecar_bytes(source.config.projections(), recipe, list(levels.values())))
        for name, data in {**copied, **extra_files}.items():
            writer.write(name, data)
        writer.write("config.json", _config(source, recipe, dtype))
        ordered = {name: crc32[name] for tensors in shards for name in tensors}
        writer.write(MANIFEST, Manifest(recipe, writer.sha256, ordered).to_bytes())
        verify_files(partial)
        if before_swap is not None:
            before_swap(file_digest(partial / MANIFEST))
    return out


def check_output(out: str | os.PathLike[str], overwrite: bool, *, source: str | os.PathLike[str] | None = None) -> None:
    """Whether ``write_bundle`` may write to ``out``; meant for the preflight, before any work.

    Raises:
        UsageError: ``out`` exists (with ``overwrite``: and is not a bundle), is the source, or has no writable parent.
    """
    out = Path(os.path.abspath(out))
    if source is not None and os.path.realpath(source).startswith((os.path.realpath(out) + os.sep,)):
        raise UsageError(f"{out}: the source model lies inside the output folder; choose another")
    if source is not None and os.path.realpath(source) == os.path.realpath(out):
        raise UsageError(f"{out}: the output folder is the source model; choose another")
    check_target(out, BUNDLE, overwrite)


def estimate_bytes(source: Checkpoint, dtype: str = "auto", num_levels: int = 1) -> int:
    """Bytes a bundle of ``source`` takes on disk, within about a percent."""
    weights = sum(_nbytes(source.tensors[name], dtype) for name in _written(source))
    sidecar = num_levels * sum(4 * projection.in_features + 512 for projection in source.config.projections())
    small = sum(os.stat(source.folder / name).st_size for name in SMALL_FILES if (source.folder / name).is_file())
    return weights + sidecar + small + (1 << 20)


def parse_size(size: str | int) -> int:
    """Bytes, from a number or from a text such as ``5GB`` (powers of 1000) or ``500MiB`` (powers of 1024).

    Raises:
        UsageError: neither, or nothing.
    """
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?)\s*([KMGT]?I?B?)", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or not (value := int(float(match[1]) * _UNITS[match[2]])):
        raise UsageError(f"max_shard_size: expected a size such as 5GB, found {size!r:.40}")
    return value


class _Writer:
    """Writes files into a folder and remembers their sha256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sha256: dict[str, str] = {}

    def write(self, name: str, data: bytes) -> None:
        self.write_stream(name, lambda sink: sink(data))

    def write_stream(self, name: str, produce: Any) -> None:
        """``produce(sink)`` calls ``sink(bytes-like)`` for one piece after the other."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        digest = hashlib.sha256()
        with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:

            def sink(piece: Any) -> None:
                # The digest takes as long as the write: do both at once.
                hashed = hasher.submit(digest.update, piece)
                try:
                    _write_all(file, piece)
                finally:
                    hashed.result()

            produce(sink)
        if name != MANIFEST:
            self.sha256[name] = digest.hexdigest()


def _write_all(file: Any, piece: Any) -> None:
    view = memoryview(piece).cast("B")
    while len(view):
        view = view[file.write(view) :]


def _written(source: Checkpoint) -> list[str]:
    """The tensors a bundle holds: all but the second copy of tied embeddings."""
    return [name for name in source.tensors if not (source.tied and name == LM_HEAD)]


def _target(info: TensorInfo, dtype: str) -> torch.dtype:
    return info.dtype if dtype == "auto" else DTYPES[dtype]


def _nbytes(info: TensorInfo, dtype: str) -> int:
    return info.nbytes // info.dtype.itemsize * _target(info, dtype).itemsize


def _plan(source: Checkpoint, dtype: str, max_shard_bytes: int) -> list[list[str]]:
    """Which tensors go into which file: in the model's order, whatever the source's files are, each at most full."""
    shards: list[list[str]] = []
    room = 0
    for name in _written(source):
        size = _nbytes(source.tensors[name], dtype)
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _stream(source: Checkpoint, names: list[str], dtype: str, sink: Any, crc32: dict[str, int]) -> None:
    infos = {name: source.tensors[name] for name in names}
    header, _ = build_header(
        {name: (_target(info, dtype), info.shape) for name, info in infos.items()}, {"format": "pt"}
    )
    sink(header)
    for name, info in infos.items():
        target = _target(info, dtype)
        checksum = 0
        for chunk in source.chunks(name, _CHUNK_BYTES):
            if target != info.dtype:
                chunk = chunk.to(target)
                if not is_finite(chunk):
                    raise UnsupportedModelError(f"{name}: holds values beyond {dtype}'s range; use bfloat16")
            piece = chunk.view(torch.uint8).numpy().data
            checksum = zlib.crc32(piece, checksum)
            sink(piece)
        crc32[name] = checksum


def _check_tied(source: Checkpoint) -> None:
    embedding = "model.embed_tokens.weight"
    if source.tensors[embedding].dtype == source.tensors[LM_HEAD].dtype and all(
        torch.equal(a, b) for a, b in zip(source.chunks(embedding), source.chunks(LM_HEAD), strict=True)
    ):
        return
    raise UnsupportedModelError(
        f"config.json says that the embeddings are tied, but {LM_HEAD} differs from {embedding}; "
        "set tie_word_embeddings to false or remove the tensor"
    )


def _index(source: Checkpoint, shards: list[list[str]], dtype: str) -> bytes:
    weight_map = {name: _shard_name(index, len(shards)) for index, names in enumerate(shards) for name in names}
    total = sum(_nbytes(source.tensors[name], dtype) for name in weight_map)
    return dump_json({"metadata": {"total_size": total}, "weight_map": weight_map})


def _config(source: Checkpoint, recipe: Recipe, dtype: str) -> bytes:
    config = dict(source.config_dict)
    # It names Python files of the source's repository, which are not part of a bundle.
    config.pop("auto_map", None)
    if dtype != "auto":
        spelled = [key for key in ("dtype", "torch_dtype") if key in config]
        config |= dict.fromkeys(spelled or ["dtype"], dtype)
    config["wisparse"] = {
        "format_version": FORMAT_VERSION,
        "sparsity": recipe.default,
        "sparsities": list(recipe.sparsities),
        "sidecar": SIDECAR,
    }
    return dump_json(config)


def copied_files(folder: Path, error: type[WisparseError]) -> Iterator[tuple[str, bytes]]:
    """The files of a source that go into a bundle byte for byte, all but its weights: name and content.

    Raises:
        error: one of them is a link that leads out of the folder, no regular file, or too large.
        AccessError: no permission to read one.
    """
    for name in list_files(folder, 100_000, error):
        limit = SMALL_FILES.get(name, _MAX_COPIED_BYTES if LICENCE_FILE.fullmatch(name) else 0)
        if limit and name != "config.json" and is_file_name(name):
            yield name, read_bounded(folder, name, limit, error)


def _check_arguments(
    source: Checkpoint,
    recipe: Recipe,
    levels: Mapping[float, Mapping[str, ProjectionMask]],
    dtype: str,
    extra_files: Mapping[str, bytes],
) -> None:
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"dtype: expected auto, {', '.join(DTYPES)}, found {dtype!r}")
    if dtype != "auto" and source.quantised:
        raise UsageError(f"dtype: expected auto for a quantised model, whose weights stay as they are, found {dtype!r}")
    check_levels(recipe, UsageError)
    if tuple(levels) != recipe.sparsities:
        raise UsageError(f"expected masks of the recipe's sparsity levels {recipe.sparsities}, found {tuple(levels)}")
    for level in recipe.levels:
        _check_level(source.config, level, levels[level.sparsity])
    try:
        json.dumps(recipe.to_dict(), allow_nan=False)
    except (TypeError, ValueError) as reason:
        raise UsageError(f"recipe: expected JSON values only: {reason}") from None
    for name in extra_files:
        if not is_file_name(name) or name in SMALL_FILES or name in (MANIFEST, INDEX, SIDECAR):
            raise UsageError(f"extra_files: {name!r:.100} cannot be added to a bundle")


def _check_level(config: ModelConfig, level: SparsityLevel, masks: Mapping[str, ProjectionMask]) -> None:
    projections = list(config.projections())
    names = [projection.name for projection in projections]
    if [entry.name for entry in level.projections] != names or set(masks) != set(names):
        raise UsageError(
            f"expected a recipe and a mask for each of the model's {len(names)} projections, in their order; "
            f"found {len(level.projections)} and {len(masks)}"
        )
    if len(level.block_sparsities) != config.num_blocks:
        raise UsageError(f"block_sparsities: expected {config.num_blocks} values, found {len(level.block_sparsities)}")
    for projection, entry in zip(projections, level.projections, strict=True):
        mask = masks[projection.name]
        shape = tuple(mask.channel_scale.shape)
        if shape != (projection.in_features,):
            raise UsageError(f"{projection.name}: expected channel_scale ({projection.in_features},), found {shape}")
        check_mask(projection.name, mask, UsageError)
        for key in ("threshold", "sparsity"):
            if np.float32(getattr(entry, key)) != np.float32(getattr(mask, key)):
                raise UsageError(
                    f"{projection.name}: {key}: the recipe says {getattr(entry, key)}, the mask {getattr(mask, key)}"
                )


def _require_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ResourceError(f"{out.parent}: expected {needed:,} bytes of free disk, found {free:,}; free some space")
