"""A sparse bundle, opened: dense weights, one mask per projection, the recipe they come from. See FORMAT.md.

``Bundle.open`` checks everything that can be checked without reading the weights; each weight is checked when it is
read (``bundle.checkpoint.tensor``).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import INDEX, MAX_CONFIG_BYTES, MAX_INDEX_BYTES, Checkpoint
from .errors import BundleError
from .guard.files import PARTIAL, list_files, read_bounded, require_folder
from .guard.places import folder_kind, shown
from .guard.safe_json import parse_json, read_json
from .guard.safetensors_header import DTYPES, Header, read_header
from .model.model_config import ModelConfig, Projection
from .record.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_SPARSITY,
    SIDECAR,
    Manifest,
    recipe_digest,
    require_version,
)
from .record.recipe import Recipe

__all__ = ["MAX_FILE_BYTES", "SMALL_FILES", "Bundle", "ProjectionMask", "check_mask", "is_document"]

# Beside the weights and the sidecar, the files that decide what a model answers, and the most of each that is read.
# For scale: Llama 3's tokenizer.json has 17 MB.
SMALL_FILES: Mapping[str, int] = {
    "config.json": MAX_CONFIG_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
    "tokenizer_config.json": 16 << 20,
    "special_tokens_map.json": MAX_CONFIG_BYTES,
    "added_tokens.json": 16 << 20,
    "tokenizer.json": 128 << 20,
    "tokenizer.model": 64 << 20,
    "vocab.json": 64 << 20,
    "merges.txt": 64 << 20,
    "chat_template.jinja": MAX_CONFIG_BYTES,
    "chat_template.json": MAX_CONFIG_BYTES,
}
# Of any file but the weights.
MAX_FILE_BYTES = 256 << 20
# What CATS and R-Sparse had beside the three tensors of every projection, while a bundle could hold them.
_FORMER = (".low_rank_out", ".low_rank_in", ".gate_threshold")
_LIMITS = {**SMALL_FILES, INDEX: MAX_INDEX_BYTES, SIDECAR: MAX_FILE_BYTES}
_JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_MAX_FILES = 10_000

# Files for people: they decide nothing, and editing a model card must not break a bundle.
_DOCUMENT = re.compile(r"(README|LICEN[SC]E|USE_POLICY|NOTICE)[^/]*|conversion_report\.json|figures/.*|\..*")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|pkl|pickle|ckpt)", re.IGNORECASE)
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class ProjectionMask:
    """What decides which channels of one projection are kept.

    Attributes:
        channel_scale: (K,) float32, finite and positive.
        threshold: keep a channel if ``|x| * channel_scale`` is at least this; finite, 0 or more, a float32 value.
        sparsity: fraction of channels dropped, in [0, 0.95]; 0 means dense, and the threshold is 0 as well.
    """

    channel_scale: Tensor
    threshold: float
    sparsity: float


@dataclass(frozen=True)
class Bundle:
    """A checked bundle; make one with ``Bundle.open``.

    ``masks`` has one entry per projection of the model, under the projection's name, in the order of execution.
    """

    folder: Path
    config: ModelConfig
    config_dict: Mapping[str, Any]
    recipe: Recipe
    masks: Mapping[str, ProjectionMask]
    checkpoint: Checkpoint
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Bundle:
        """Check and open a bundle; no weight is read.

        Checked: that every file that decides anything is there, is a regular file inside the folder, and has its
        sha256 (the weights: their headers only); every name, shape, dtype and value of the sidecar; that recipe,
        sidecar, index, headers and config tell the same story; the format version.

        Raises:
            BundleError: anything is missing, damaged, contradictory or of a newer format.
            AccessError: no such folder, or no permission.
        """
        folder = Path(folder)
        require_folder(folder)
        if os.path.realpath(folder).endswith(PARTIAL):
            raise BundleError(f"{shown(folder)}: an unfinished conversion, not a bundle; run the conversion again")
        return _open(folder)

    def read_bytes(self, name: str) -> bytes | None:
        """A small file of the bundle, with its sha256 checked on the very bytes returned; None if it has no such file.

        Raises:
            BundleError: missing, changed or too large.
        """
        return _read_checked(self.folder, name, self.manifest) if name in self.manifest.sha256 else None


def is_document(name: str) -> bool:
    """Whether a file is for people only and may be edited after the conversion: model card, licences, figures."""
    return _DOCUMENT.fullmatch(name) is not None


def _open(folder: Path) -> Bundle:
    # lexists: a dangling symlink is a damaged bundle, not a folder that never was one.
    if not os.path.lexists(folder / MANIFEST):
        kind = folder_kind(folder)
        how = shlex.quote(shown(folder)) if kind is None else f"from a model (this is {kind})"
        raise BundleError(f"{shown(folder)}: not a bundle: no {MANIFEST}; make one with wisparse-convert {how}")
    manifest = Manifest.from_dict(read_json(folder, MANIFEST, MAX_MANIFEST_BYTES, BundleError))
    config_dict = read_json(folder, "config.json", MAX_CONFIG_BYTES, BundleError)
    _check_config_entry(config_dict, manifest.recipe)
    checkpoint = Checkpoint.open(folder, error=BundleError, checksums=manifest.crc32)
    _check_names(folder, checkpoint, manifest)
    for name in (INDEX, *SMALL_FILES):
        if name in manifest.sha256:
            data = _read_checked(folder, name, manifest)
            document = parse_json(data, name, BundleError) if name in _JSON else None
            if name == "config.json" and not document == checkpoint.config_dict == config_dict:
                raise BundleError(f"{name}: changed while the bundle was opened; open it again")
    projections = {projection.name: projection for projection in checkpoint.config.projections()}
    _check_recipe(projections, checkpoint.config, manifest.recipe)
    masks = _read_masks(folder, projections, manifest)
    return Bundle(folder, checkpoint.config, config_dict, manifest.recipe, masks, checkpoint, manifest)


def _read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    data = read_bounded(folder, name, _LIMITS.get(name, MAX_CONFIG_BYTES), BundleError)
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.sha256[name]:
        raise BundleError(
            f"{name}: expected sha256 {manifest.sha256[name]:.16}…, found {found:.16}…; the file is damaged or was "
            "edited: fetch it again"
        )
    return data


def _check_config_entry(config_dict: Mapping[str, Any], recipe: Recipe) -> None:
    entry = config_dict.get("wisparse")
    if not isinstance(entry, dict):
        raise BundleError(f"config.json: expected an object under 'wisparse', found {entry!r:.80}")
    require_version(entry.get("format_version"), "config.json")
    for key, wanted in (("sidecar", SIDECAR), ("sparsity", recipe.sparsity)):
        if entry.get(key) != wanted or isinstance(entry.get(key), bool):
            raise BundleError(f"config.json: wisparse.{key}: expected {wanted!r}, found {entry.get(key)!r:.80}")


def _check_names(folder: Path, checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Manifest, index and folder name the same files and tensors."""
    weights = {path.name for path in checkpoint.files()}
    needed = {"config.json", INDEX, SIDECAR} | weights
    for name in sorted(needed - set(manifest.sha256)):
        raise BundleError(f"{MANIFEST}: files: no entry for {name}")
    for name in sorted(set(manifest.sha256) - needed):
        if _WEIGHTS.fullmatch(name):
            raise BundleError(f"{MANIFEST}: files: {name} is not among the files of {INDEX}")
    if set(manifest.crc32) != set(checkpoint.tensors):
        odd = min(set(manifest.crc32) ^ set(checkpoint.tensors))
        found = "an entry" if odd in manifest.crc32 else "no entry"
        raise BundleError(f"{MANIFEST}: tensors: {found} for {odd!r:.200}, unlike {INDEX}")
    present = list_files(folder, _MAX_FILES, BundleError)
    for name in present:
        # Other tools prefer such a file to the ones of the index and would run different weights.
        if _WEIGHTS.fullmatch(name) and name not in needed:
            raise BundleError(f"{name}: weights that are not part of the bundle; remove the file")
        if name in SMALL_FILES and name not in manifest.sha256:
            raise BundleError(f"{MANIFEST}: files: no entry for {name}")


def _check_recipe(projections: Mapping[str, Projection], config: ModelConfig, recipe: Recipe) -> None:
    found = [entry.name for entry in recipe.projections]
    if found != list(projections):
        missing = [name for name in projections if name not in found]
        extra = [name for name in found if name not in projections]
        what = f"no entry for {missing[0]}" if missing else f"unknown or repeated {(extra or found)[0]!r:.200}"
        raise BundleError(
            f"{MANIFEST}: projections: expected the model's {len(projections)} in their order, {what}; convert again"
        )
    if len(recipe.block_sparsities) != config.num_blocks:
        raise BundleError(
            f"{MANIFEST}: block_sparsities: expected {config.num_blocks} values, found {len(recipe.block_sparsities)}"
        )


def _read_masks(folder: Path, projections: Mapping[str, Projection], manifest: Manifest) -> dict[str, ProjectionMask]:
    header = read_header(folder, SIDECAR, BundleError)
    _check_sidecar_header(header, projections, manifest.recipe)
    # Checked once more on exactly these bytes, so that nothing can change between the check and the use.
    data = _read_checked(folder, SIDECAR, manifest)
    if header.identity.size != len(data):
        raise BundleError(f"{SIDECAR}: changed while it was read; open it again")
    recipes = {entry.name: entry for entry in manifest.recipe.projections}

    def values(name: str) -> Tensor:
        entry = header.entries[name]
        array = np.frombuffer(data, dtype="<f4", count=(entry.end - entry.start) // 4, offset=entry.start)
        return torch.from_numpy(array.astype(np.float32)).reshape(entry.shape)

    masks = {}
    for name in projections:
        mask = ProjectionMask(
            channel_scale=values(f"{name}.channel_scale"),
            threshold=float(values(f"{name}.threshold")),
            sparsity=float(values(f"{name}.sparsity")),
        )
        check_mask(name, mask, BundleError)
        entry = recipes[name]
        for key, found in (("threshold", mask.threshold), ("sparsity", mask.sparsity)):
            if float(np.float32(getattr(entry, key))) != found:
                raise BundleError(
                    f"{name}: {MANIFEST} says {key} {getattr(entry, key)!r}, {SIDECAR} says {found!r}; convert again"
                )
        # What the recipe's double says, rounded once: 0.35 stays 0.35 for whoever prints it.
        masks[name] = replace(mask, sparsity=float(entry.sparsity))
    return masks


def _check_sidecar_header(header: Header, projections: Mapping[str, Projection], recipe: Recipe) -> None:
    metadata = header.metadata
    if metadata.get("format") != "wisparse":
        raise BundleError(f"{SIDECAR}: format: expected 'wisparse', found {metadata.get('format')!r:.80}")
    version = metadata.get("format_version", "")
    require_version(int(version) if version.isascii() and version.isdigit() and len(version) < 9 else version, SIDECAR)
    if metadata.get("recipe_sha256") != recipe_digest(recipe):
        raise BundleError(f"{SIDECAR} and {MANIFEST} do not belong together (recipe_sha256 differs); convert again")
    expected: dict[str, tuple[int, ...]] = {}
    for name, projection in projections.items():
        expected |= {
            f"{name}.channel_scale": (projection.in_features,),
            f"{name}.threshold": (),
            f"{name}.sparsity": (),
        }
    for tensor, shape in expected.items():
        name, _, what = tensor.rpartition(".")
        entry = header.entries.get(tensor)
        if entry is None:
            raise BundleError(f"{name}: expected {what} {shape}, found nothing in {SIDECAR}; convert again")
        if entry.shape != shape:
            raise BundleError(f"{name}: expected {what} {shape}, found {entry.shape}; convert again")
        if DTYPES.get(entry.code) is not torch.float32:
            raise BundleError(f"{name}: expected {what} in F32, found {entry.code}; convert again")
    for tensor in header.entries:
        if tensor.endswith(_FORMER):
            raise BundleError(
                f"{SIDECAR}: {tensor!r:.200}: gate masks and low-rank paths (methods cats and rsparse) are no longer "
                "part of a bundle; convert the model again with another --method"
            )
        if tensor not in expected:
            raise BundleError(f"{SIDECAR}: unexpected tensor {tensor!r:.200}; convert again")


def check_mask(name: str, mask: ProjectionMask, error: type[Exception]) -> None:
    """Raise ``error`` unless every value of ``mask`` is in its range.

    Subnormal numbers are out of range: back ends that flush them to zero would disagree about the mask.
    """
    scale = mask.channel_scale
    if scale.dtype is not torch.float32 or scale.dim() != 1:
        raise error(f"{name}: channel_scale: expected float32 (K,), found {scale.dtype} {tuple(scale.shape)}")
    low, high = (float(value) for value in torch.aminmax(scale))
    if not (low >= _SMALLEST_NORMAL and high < float("inf")):
        raise error(f"{name}: channel_scale: expected finite positive values, found {low:g} to {high:g}; convert again")
    threshold = mask.threshold
    if not (threshold == 0 or _SMALLEST_NORMAL <= threshold < float("inf")):
        raise error(f"{name}: threshold: expected a finite number, 0 or more, found {threshold:g}; convert again")
    if not 0 <= mask.sparsity <= MAX_SPARSITY:
        raise error(
            f"{name}: sparsity: expected a number in [0, {MAX_SPARSITY}], found {mask.sparsity:g}; convert again"
        )
    if mask.sparsity == 0 and threshold != 0:
        raise error(f"{name}: sparsity 0 means dense: expected threshold 0, found {threshold:g}; convert again")
