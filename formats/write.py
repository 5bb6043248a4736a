"""Writing a bundle: shards are streamed into ``OUT.partial``, verified, then the folder is renamed to ``OUT``."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import torch

from .bundle import NAMED_TEMPLATE, SMALL_FILES, ProjectionMask, scale_shapes, sidecar_bytes, verify_bundle
from .card import LICENCE_FILE
from .checkpoint import MAX_CONFIG_BYTES, Checkpoint, TensorInfo
from .errors import ResourceError, UnsupportedModelError, UsageError, WisparseError
from .folder import check_target, replaced_folder
from .guard import dump_json, file_digest, list_files, read_bounded
from .manifest import BUNDLE, FILE_NAME, FORMAT_VERSION, MANIFEST, SIDECAR, Manifest, Recipe
from .model_config import LM_HEAD
from .tensor_file import INDEX, build_header, is_finite

_MAX_COPIED_BYTES, _CHUNK_BYTES = 16 << 20, 32 << 20
_SIDE_BY_SIDE = 4  # shards that are written concurrently
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
    """Write a bundle, deterministically. ``dtype``: ``auto`` (unchanged) or a name."""
    out = Path(os.path.abspath(out))
    if dtype != "auto" and source.quantised:
        raise UsageError(f"dtype: expected auto for a quantised model, whose weights stay as they are, found {dtype!r}")
    # Tensors in the model's order; each shard up to its size limit.
    shards: list[list[str]] = []
    room, most = 0, parse_size(max_shard_size)
    # The copy of tied embeddings is omitted.
    second = LM_HEAD in source.tensors and source.config.tie_word_embeddings
    for name in source.tensors:
        if second and name == LM_HEAD:
            continue
        size = _nbytes(source, source.tensors[name], dtype)
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    check_output(out, overwrite, source=source.folder)
    files = {**dict(copied_files(source.folder, source.error)), **(extra_files or {})}
    weights = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}
    written = [*weights, INDEX, SIDECAR, *files, "config.json", MANIFEST]
    scales = scale_shapes(source.config)
    with replaced_folder(out, BUNDLE, written, overwrite=overwrite) as partial:
        weight_map = {name: file for file, tensors in weights.items() for name in tensors}
        total = sum(_nbytes(source, source.tensors[name], dtype) for name in weight_map)
        sidecar = sum(4 * math.prod(shape) + 512 for shape in scales.values())
        # An estimate within about 1%; the megabyte is for the other files.
        sidecar = len(levels) * sidecar + (0 if source.rotation is None else 2 * source.rotation.numel())
        needed = total + sidecar + sum(map(len, files.values())) + (1 << 20)
        free = shutil.disk_usage(out.parent).free
        if free < needed:
            raise ResourceError(f"{out.parent}: expected {needed:,} bytes of free disk, found {free:,}; make room")
        stopped = threading.Event()

        def write(name: str) -> str:
            return _write_hashed(partial / name, _shard(source, weights[name], dtype, stopped))

        # In threads: sha256 is the bottleneck, on one core each. An error or interrupt stops the others at their next chunk.
        pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1))
        try:
            sha256 = dict(zip(weights, pool.map(write, weights), strict=True))
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
        if second:
            embedding = source.config.embedding
            same = source.tensors[embedding].dtype == source.tensors[LM_HEAD].dtype
            pairs = zip(source.chunks(embedding), source.chunks(LM_HEAD), strict=True)
            if not same or not all(torch.equal(one, other) for one, other in pairs):
                differs = f"config.json says that the embeddings are tied, but {LM_HEAD} differs from {embedding}"
                raise UnsupportedModelError(f"{differs}; set tie_word_embeddings to false or remove the tensor")
        # auto_map refers to Python files of the source, which are not part of a bundle.
        config = {key: value for key, value in source.config_dict.items() if key != "auto_map"}
        if dtype != "auto":
            spelled = [key for key in ("dtype", "torch_dtype") if key in config]
            config |= dict.fromkeys(spelled or ["dtype"], dtype)
        config["wisparse"] = {"format_version": FORMAT_VERSION, "sparsity": recipe.default}
        config["wisparse"] |= {"sparsities": list(recipe.sparsities), "sidecar": SIDECAR}
        files = {
            INDEX: dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}),
            SIDECAR: sidecar_bytes(scales, recipe, [*levels.values()], source.rotation),
            **files,
            "config.json": dump_json(config),
        }
        for name, data in files.items():
            sha256[name] = _write_hashed(partial / name, [data])
        _write_hashed(partial / MANIFEST, [Manifest(recipe, sha256).to_bytes()])
        verify_bundle(partial, unfinished=True)
        if before_swap is not None:
            before_swap(file_digest(partial / MANIFEST))
    return out


def check_output(out: str | os.PathLike[str], overwrite: bool, *, source: str | os.PathLike[str] | None = None) -> None:
    """UsageError unless ``write_bundle`` may write to ``out``; for the preflight."""
    out = Path(os.path.abspath(out))
    if source is not None:
        real_source, real_out = Path(os.path.realpath(source)), Path(os.path.realpath(out))
        if real_source == real_out:
            raise UsageError(f"{out}: the output folder is the source model; choose another")
        if real_source.is_relative_to(real_out):
            raise UsageError(f"{out}: the source model lies inside the output folder; choose another")
    check_target(out, BUNDLE, overwrite)


def parse_size(size: str | int) -> int:
    """Parse a number of bytes, or a text such as ``5GB`` (powers of 1000) or ``500MiB`` (powers of 1024)."""
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?)\s*([KMGT]?I?B?)", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or not (value := int(float(match[1]) * _UNITS[match[2]])):
        raise UsageError(f"--max-shard-size: expected a size such as 5GB or 500MiB, found {size!r:.40}")
    return value


def copied_files(folder: Path, error: type[WisparseError]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the source's files that a bundle copies, without weights."""
    for name in list_files(folder, 100_000, error, deep=True):
        limit = SMALL_FILES.get(name, _MAX_COPIED_BYTES if LICENCE_FILE.fullmatch(name) else 0)
        limit = MAX_CONFIG_BYTES if NAMED_TEMPLATE.fullmatch(name) else limit
        if limit and name != "config.json" and FILE_NAME.fullmatch(name):
            yield name, read_bounded(folder, name, limit, error)


def _write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    path.parent.mkdir(exist_ok=True)
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for piece in pieces:
            # Hash and write concurrently; both take about the same time.
            hashed = hasher.submit(digest.update, piece)
            try:
                write_all(file, piece)
            finally:
                hashed.result()
    return digest.hexdigest()


def write_all(file: FileIO, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while len(view):
        view = view[file.write(view) :]


def _target(source: Checkpoint, info: TensorInfo, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)
    return source.dtype if source.is_dequantised and info.code == "F32" else info.dtype


def _nbytes(source: Checkpoint, info: TensorInfo, dtype: str) -> int:
    return info.nbytes // info.dtype.itemsize * _target(source, info, dtype).itemsize


def _shard(source: Checkpoint, names: list[str], dtype: str, stopped: threading.Event) -> Iterator[bytes | memoryview]:
    infos = [source.tensors[name] for name in names]
    yield build_header({info.name: (_target(source, info, dtype), info.shape) for info in infos}, {"format": "pt"})
    for info in infos:
        target = _target(source, info, dtype)
        for chunk in source.chunks(info.name, _CHUNK_BYTES):
            if stopped.is_set():
                return
            if target != info.dtype:
                chunk = chunk.to(target)
                if not is_finite(chunk):
                    raise UnsupportedModelError(f"{info.name}: holds values beyond {dtype}'s range; use bfloat16")
            yield chunk.view(torch.uint8).numpy().data
