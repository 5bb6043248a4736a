"""A sparse bundle: dense weights, the recipe, and in the sidecar a mask per projection and sparsity level. See FORMAT.md."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from . import guard
from .checkpoint import MAX_CONFIG_BYTES, Checkpoint
from .errors import BundleError, UsageError, printable
from .lazy import Tensor, torch
from .manifest import (
    MANIFEST,
    MAX_SPARSITY,
    SIDECAR,
    Manifest,
    Recipe,
    bits_of,
    require_version,
    sidecar_metadata,
    unread,
)
from .model_config import ModelConfig
from .packings import Packed
from .tensor_file import INDEX, MAX_INDEX_BYTES, Entry, build_header, parse_tensors
from .tensors import model_tensors

# Files that affect generation beside weights and sidecar, with their size limits.
SMALL_FILES: Mapping[str, int] = {
    **dict.fromkeys(("config.json", "generation_config.json", "special_tokens_map.json"), MAX_CONFIG_BYTES),
    **dict.fromkeys(("chat_template.jinja", "chat_template.json"), MAX_CONFIG_BYTES),
    **dict.fromkeys(("tokenizer_config.json", "added_tokens.json"), 16 << 20),
    **dict.fromkeys(("tokenizer.model", "vocab.json", "merges.txt"), 64 << 20),
    "tokenizer.json": 128 << 20,
}
# A chat template beside the default one, as transformers saves it.
NAMED_TEMPLATE = re.compile(r"additional_chat_templates/([A-Za-z0-9_][A-Za-z0-9 ._-]{0,99})\.jinja")
# Size limits of any file except weights, and of the sidecar: with 128 experts a level has 120 MB.
MAX_FILE_BYTES, _MAX_SIDECAR_BYTES = 256 << 20, 2 << 30
_LIMITS = {**SMALL_FILES, INDEX: MAX_INDEX_BYTES, SIDECAR: _MAX_SIDECAR_BYTES}
_JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_MAX_FILES = 10_000

# Documents: they do not affect generation, and may be edited.
_DOCUMENT = re.compile(r"(README|LICEN[SC]E|USE_POLICY|NOTICE)[^/]*|conversion_report\.json|figures/.*|\..*")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|pkl|pickle|ckpt)", re.IGNORECASE)
# Sparsities that differ by less are equal, for rounding.
_SAME_SPARSITY = 1e-6
ROTATION = "rotation"  # a tensor of the sidecar
# Share of exact zeros in a projection's input from which the dense model does not read their channels either. Below it a
# GPU's dense product is as fast.
LEAST_ZEROS = 0.4
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class ProjectionMask:
    """The mask of one projection at one sparsity level."""

    scale: Tensor | np.ndarray[Any, Any]  # `channel_scale`; converted to a tensor at its first use
    threshold: float  # keep a channel if ``|x| * channel_scale`` is at least this; finite, >= 0, a float32 value
    sparsity: float  # fraction of dropped channels, in [0, 0.95] as stored; 0 is dense, with threshold 0
    # Of a graded weight: the threshold of each plane, high plane first; ``sparsity`` is the fraction of dropped bits then.
    plane_thresholds: tuple[float, ...] = ()

    @cached_property
    def channel_scale(self) -> Tensor:
        """(K,) float32, finite and positive; (E, K) for experts."""
        return torch.from_numpy(self.scale) if isinstance(self.scale, np.ndarray) else self.scale


def planes_of(masks: Mapping[str, ProjectionMask]) -> int:
    """Number of planes of the weights; more than 1 in a graded bundle."""
    return len(next(iter(masks.values())).plane_thresholds) or 1


@dataclass(frozen=True)
class Bundle:
    """A validated bundle; constructed by ``Bundle.open``."""

    folder: Path
    config: ModelConfig
    config_dict: Mapping[str, Any]
    recipe: Recipe
    # sparsity -> masks, ascending: one mask per projection of the model, in the order of execution
    levels: Mapping[float, Mapping[str, ProjectionMask]]
    sparsity: float  # the chosen level, one of ``levels``, or 0 for the dense model
    checkpoint: Checkpoint
    manifest: Manifest
    # (hidden_size, hidden_size) float16: hidden states are x @ rotation where the source's are x. None: not rotated; or, if
    # the recipe has a rotation, an older conversion did not store it.
    rotation: np.ndarray[Any, Any] | None = None

    @cached_property
    def masks(self) -> Mapping[str, ProjectionMask]:
        """By projection, of the chosen level; at sparsity 0 they drop nothing but inputs that are exactly 0."""
        skipped = {one.name: one.zeros for one in self.recipe.projections if one.zeros >= LEAST_ZEROS}
        if self.sparsity or (0.0 in self.levels and not skipped):
            return self.levels[self.sparsity]
        found, planes = {}, len(self.recipe.plane_bits)
        for name, mask in self.levels[self.recipe.default].items():
            found[name] = ProjectionMask(mask.scale, 0.0, 0.0, (0.0,) * planes)
            if (zeros := skipped.get(name)) is not None:
                # Of a scale of 1, the least threshold that back ends which flush subnormal numbers to zero do not change.
                scale, least = np.ones(mask.scale.shape, "f4"), _SMALLEST_NORMAL
                found[name] = ProjectionMask(scale, least, zeros, (least,) * planes)
        return found

    @property
    def bits(self) -> float | None:
        """Bits read per weight at the chosen level; None unless the bundle is graded."""
        return bits_of(self.sparsity) if self.recipe.plane_bits else None

    def chosen(self, sparsity: float | None, bits: float | None) -> Bundle:
        """`at`, or this bundle if both are None."""
        return self if sparsity is None and bits is None else self.at(sparsity, bits)

    def at(self, sparsity: float | None = None, bits: float | None = None) -> Bundle:
        """This bundle with another chosen level: by sparsity, 0 for the dense model, or by the bits of a graded bundle, 8
        for the dense model. UsageError if there is no such level."""
        graded, value = bool(self.recipe.plane_bits), sparsity if bits is None else bits
        if bits is not None and (sparsity is not None or not graded):
            both = "bits, sparsity: expected one of them" if graded else "bits: expected a graded bundle"
            raise UsageError(f"{both}, found {'both' if graded else 'one with sparsity levels; choose a sparsity'}")
        # Compare before the subtraction: an int may be too large for a float.
        if isinstance(value, int | float) and not isinstance(value, bool) and -1 < value < 10:
            requested = value if bits is None else unread(value)
            for level in (*self.levels, 0.0):
                if abs(level - requested) < _SAME_SPARSITY:
                    return replace(self, sparsity=level)
        name, dense, known = "sparsity", 0, [level for level in self.levels if level]
        if graded:
            name, dense, known = "bits", 8, [round(bits_of(level), 6) for level in known]
        if bits is None and graded:
            name = "sparsity: this bundle is graded; bits"
        texts = [f"{level:g}" if float(f"{level:g}") == level else repr(level) for level in known]
        listed = f"one of the bundle's {'' if graded else 'sparsity '}levels, {', '.join(texts)}, or " if known else ""
        raise UsageError(f"{name}: expected {listed}{dense} for the dense model, found {value!r:.60}")

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, unfinished: bool = False) -> Bundle:
        """Validate and open a bundle. Files that affect generation must be regular files in the folder with the manifest's
        sha256; of weights only the headers are read. Recipe, sidecar, index, headers and config must agree."""
        folder = Path(folder)
        guard.require_folder(folder)
        where = guard.shown(folder)
        if os.path.realpath(folder).endswith(guard.PARTIAL) and not unfinished:
            raise BundleError(f"{where}: an unfinished conversion, not a bundle; run the conversion again")
        # lexists: a dangling symlink means a damaged bundle.
        if not os.path.lexists(folder / MANIFEST):
            kind = guard.folder_kind(folder)
            found = "one without it" if kind is None else kind.partition(":")[0]
            how = shlex.quote(where) if kind is None else "MODEL"
            wanted = f"expected a bundle, a folder with {MANIFEST}"
            raise BundleError(f"{where}: {wanted}, found {found}; make one with wisparse-convert {how}")
        manifest = Manifest.read(folder)
        recipe = manifest.recipe
        config_dict = guard.read_json(folder, "config.json", MAX_CONFIG_BYTES, BundleError)
        entry = config_dict.get("wisparse")
        if not isinstance(entry, dict):
            raise BundleError(f"config.json: expected an object under 'wisparse', found {entry!r:.80}")
        require_version(entry.get("format_version"), "config.json")
        expected = {"sidecar": SIDECAR, "sparsity": recipe.default, "sparsities": list(recipe.sparsities)}
        for key, value in expected.items():
            stated = entry.get(key)
            each = stated if isinstance(stated, list) else [stated]
            if stated != value or any(isinstance(one, bool) for one in each):
                raise BundleError(f"config.json: wisparse.{key}: expected {value!r}, found {stated!r:.80}")
        checkpoint = Checkpoint.open(folder, error=BundleError)
        orders = {one.name: one.order for one in model_tensors(checkpoint.config) if one.order}
        checkpoint = replace(checkpoint, orders=orders)
        # Manifest, index and folder must have the same files.
        required = {"config.json", INDEX, SIDECAR, *checkpoint.files}
        present = guard.list_files(folder, _MAX_FILES, BundleError)
        for name in sorted((required | (SMALL_FILES.keys() & present)) - set(manifest.sha256)):
            raise BundleError(f"{MANIFEST}: files: no entry for {name}")
        for name in filter(_WEIGHTS.fullmatch, sorted({*manifest.sha256, *present} - required)):
            if name in manifest.sha256:
                raise BundleError(f"{MANIFEST}: files: {name} is not among the files of {INDEX}")
            # Other tools may prefer this file to the index, and would load different weights.
            raise BundleError(f"{name}: weights that are not part of the bundle; remove the file")
        for name in (INDEX, *SMALL_FILES):
            if name in manifest.sha256:
                data = read_checked(folder, name, manifest)
                document = guard.parse_json(data, name, BundleError) if name in _JSON else None
                if name == "config.json" and not document == checkpoint.config_dict == config_dict:
                    raise BundleError(f"{name}: changed while the bundle was opened; open it again")
        shapes = scale_shapes(checkpoint.config)
        names, num_blocks = list(shapes), checkpoint.config.num_blocks
        for level in recipe.levels:
            at = f" of the sparsity level {level.sparsity!r:.20}" if len(recipe.levels) > 1 else ""
            listed, blocks = [entry.name for entry in level.projections], len(level.block_sparsities)
            if listed != names:
                missing = [name for name in names if name not in listed]
                extra = [name for name in listed if name not in names]
                what = f"no entry for {missing[0]}" if missing else f"unknown or repeated {(extra or listed)[0]!r:.200}"
                order = f"expected the model's {len(names)} in their order"
                raise BundleError(f"{MANIFEST}: projections{at}: {order}, {what}; convert again")
            if blocks != num_blocks:
                raise BundleError(f"{MANIFEST}: block_sparsities{at}: expected {num_blocks} values, found {blocks}")
        parts = (part for one in checkpoint.config.projections() for part in one.parts)
        for name in parts if recipe.plane_bits else ():
            stored = checkpoint.quantised.get(f"{name}.weight")
            packing = None if stored is None else stored.packing
            if not (
                isinstance(packing, Packed) and packing.kind == "int8" and packing.group and not packing.zero_points
            ):
                codes = "int8 codes in groups without zero points, pack-quantized, as plane_bits says"
                raise BundleError(f"{name}: expected {codes}, found {packing or 'plain numbers'}; convert again")
        hidden_size = checkpoint.config.hidden_size
        levels, rotation = read_masks(read_checked(folder, SIDECAR, manifest), shapes, manifest, hidden_size)
        return cls(
            folder, checkpoint.config, config_dict, recipe, levels, recipe.default, checkpoint, manifest, rotation
        )

    def read_bytes(self, name: str) -> bytes | None:
        """The bytes of a small file, verified by sha256; None if the bundle does not have it."""
        return read_checked(self.folder, name, self.manifest) if name in self.manifest.sha256 else None


def is_document(name: str) -> bool:
    """Whether a file may be edited after the conversion: model card, licences, figures."""
    return _DOCUMENT.fullmatch(name) is not None


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    data = guard.read_bounded(folder, name, _LIMITS.get(name, MAX_CONFIG_BYTES), BundleError)
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.sha256[name]:
        raise _damaged(name, manifest.sha256[name], found)
    return data


def _damaged(name: str, expected: str, found: str) -> BundleError:
    differs = f"expected sha256 {expected:.16}…, found {found:.16}…"
    return BundleError(f"{name}: {differs}; the file is damaged or was edited: fetch it again")


def scale_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """By projection, the shape of ``channel_scale``: (K,), or (E, K) for experts."""
    shapes = ((one.name, one.experts, one.in_features) for one in config.projections())
    return {name: (experts, width) if experts else (width,) for name, experts, width in shapes}


def read_masks(
    data: bytes, shapes: Mapping[str, tuple[int, ...]], manifest: Manifest, hidden_size: int
) -> tuple[dict[float, dict[str, ProjectionMask]], np.ndarray[Any, Any] | None]:
    """The masks by sparsity level, and the rotation or None, from the bytes of a sidecar. BundleError unless the sidecar
    matches ``manifest``, has exactly the tensors of ``shapes``, and all values are valid."""
    tensors, metadata = parse_tensors(data, SIDECAR)
    if metadata.get("format") != "wisparse":
        raise BundleError(f"{SIDECAR}: format: expected 'wisparse', found {metadata.get('format')!r:.80}")
    version = metadata.get("format_version", "")
    digits = version.isascii() and version.isdigit() and len(version) < 9
    require_version(int(version) if digits else version, SIDECAR)
    if metadata.get("recipe_sha256") != sidecar_metadata(manifest.recipe)["recipe_sha256"]:
        raise BundleError(f"{SIDECAR} and {MANIFEST} do not belong together (recipe_sha256 differs); convert again")
    rows, planes = len(manifest.recipe.levels), len(manifest.recipe.plane_bits)
    expected: dict[str, tuple[int, ...]] = {}
    for name, scale_shape in shapes.items():
        expected[f"{name}.channel_scale"] = (rows, *scale_shape)
        expected |= dict.fromkeys((f"{name}.threshold", f"{name}.sparsity"), (rows,))
        if planes:
            expected[f"{name}.plane_threshold"] = (rows, planes)
    for tensor, shape in expected.items():
        name, _, what = tensor.rpartition(".")
        entry = tensors[tensor][0] if tensor in tensors else None
        if entry != Entry("F32", shape):
            found = f"nothing in {SIDECAR}" if entry is None else f"{entry.shape} in {entry.code}"
            raise BundleError(f"{name}: expected {what} {shape} in F32, found {found}; convert again")
    rotation = None
    if ROTATION in tensors and manifest.recipe.rotation is not None:
        (entry, raw), square = tensors.pop(ROTATION), (hidden_size, hidden_size)
        if entry != Entry("F16", square):
            found = f"{entry.shape} in {entry.code}"
            raise BundleError(f"{SIDECAR}: {ROTATION}: expected {square} in F16, found {found}; convert again")
        rotation = np.frombuffer(raw, "<f2").reshape(square)
        if not np.isfinite(rotation).all():
            raise BundleError(f"{SIDECAR}: {ROTATION}: expected finite numbers, found NaN or Inf; convert again")
    for tensor in tensors:
        if tensor not in expected:
            raise BundleError(f"{SIDECAR}: unexpected tensor {tensor!r:.200}; convert again")
    values = {name: np.frombuffer(raw, "<f4").reshape(rows, -1) for name, (_, raw) in tensors.items()}
    levels: dict[float, dict[str, ProjectionMask]] = {level.sparsity: {} for level in manifest.recipe.levels}
    for index, level in enumerate(manifest.recipe.levels):
        for recipe in level.projections:
            fields = ("channel_scale", "threshold", "sparsity")
            scale, *numbers = (values[f"{recipe.name}.{field}"][index] for field in fields)
            threshold, sparsity = (float(number[0]) for number in numbers)
            by_plane = tuple(values[f"{recipe.name}.plane_threshold"][index].tolist()) if planes else ()
            ascending = all(low <= high < math.inf for low, high in pairwise(by_plane))  # False with a NaN
            low, high = float(scale.min()), float(scale.max())
            # No subnormal numbers: back ends that flush them to zero would have other masks.
            positive = low >= _SMALLEST_NORMAL and high < math.inf
            nonnegative = threshold == 0 or _SMALLEST_NORMAL <= threshold < math.inf
            normal = all(value == 0 or value >= _SMALLEST_NORMAL for value in by_plane)
            for valid, field, value, found in (
                (positive, "channel_scale", "finite positive values", f"{low:g} to {high:g}"),
                (nonnegative, "threshold", "a finite number, 0 or more", f"{threshold:g}"),
                (0 <= sparsity <= MAX_SPARSITY, "sparsity", f"a number in [0, {MAX_SPARSITY}]", f"{sparsity:g}"),
                (sparsity or not threshold, "sparsity 0 means dense", "threshold 0", f"{threshold:g}"),
                (ascending, "plane_threshold", "finite thresholds, none below an earlier plane's", f"{[*by_plane]}"),
                (normal, "plane_threshold", f"0 or at least {_SMALLEST_NORMAL:g}", f"{[*by_plane]}"),
                (
                    not planes or by_plane[0] == threshold,
                    "plane_threshold",
                    f"{threshold!r} for the first plane, the threshold",
                    f"{by_plane[0] if planes else None!r}",
                ),
                (sparsity or not any(by_plane), "sparsity 0 means dense", "plane thresholds 0", f"{[*by_plane]}"),
            ):
                if not valid:
                    raise BundleError(f"{recipe.name}: {field}: expected {value}, found {found}; convert again")
            for key, number in (("threshold", threshold), ("sparsity", sparsity)):
                stated = getattr(recipe, key)
                if float(np.float32(stated)) != number:
                    difference = f"{MANIFEST} says {key} {stated!r}, {SIDECAR} says {number!r}"
                    raise BundleError(f"{recipe.name}: {difference}; convert again")
            # The recipe's float64, which prints 0.35 as 0.35.
            levels[level.sparsity][recipe.name] = ProjectionMask(
                scale.reshape(shapes[recipe.name]).copy(), threshold, float(recipe.sparsity), by_plane
            )
    return levels, rotation


def sidecar_bytes(
    names: Iterable[str],
    recipe: Recipe,
    levels: Sequence[Mapping[str, ProjectionMask]],
    rotation: Tensor | None = None,
) -> bytes:
    """The sidecar's bytes. ``names``: of the projections; ``levels``: validated masks in the recipe's order."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in names:
        masks = [level[name] for level in levels]
        arrays |= {
            f"{name}.channel_scale": torch.stack([mask.channel_scale.detach().cpu() for mask in masks]).numpy(),
            f"{name}.threshold": np.array([mask.threshold for mask in masks]),
            f"{name}.sparsity": np.array([mask.sparsity for mask in masks]),
        }
        if recipe.plane_bits:
            arrays[f"{name}.plane_threshold"] = np.array([mask.plane_thresholds for mask in masks])
    stored = {name: (torch.float32, array.shape) for name, array in arrays.items()}
    parts = [array.astype("<f4").tobytes() for array in arrays.values()]
    if rotation is not None:
        stored[ROTATION] = torch.float16, tuple(rotation.shape)
        parts.append(rotation.cpu().numpy().astype("<f2").tobytes())
    return build_header(stored, sidecar_metadata(recipe)) + b"".join(parts)


@dataclass(frozen=True)
class VerifyReport:
    """What was checked. ``notes``: edited documents and unknown files."""

    folder: str
    num_files: int
    num_bytes: int
    num_tensors: int
    num_projections: int
    notes: tuple[str, ...]
    seconds: float


def verify_bundle(folder: str | os.PathLike[str], *, unfinished: bool = False) -> VerifyReport:
    """Check a bundle's structure, the sha256 of all files, and that all weights are finite; BundleError at the first fault."""
    started = time.monotonic()
    bundle = Bundle.open(folder, unfinished=unfinished)
    checkpoint, sha256 = bundle.checkpoint, bundle.manifest.sha256
    notes: list[str] = []
    weights = set(checkpoint.files)

    def check_file(name: str) -> int:
        """Check a file's sha256; returns its size. A missing or edited document is a note."""
        try:
            with guard.open_regular(bundle.folder, name, BundleError) as file:
                size = os.fstat(file.fileno()).st_size
                limit = _MAX_SIDECAR_BYTES if name == SIDECAR else MAX_FILE_BYTES
                if name not in weights and size > limit:
                    raise BundleError(f"{name}: expected at most {limit:,} bytes, found {size:,}")
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except BundleError as reason:
            if not is_document(name):
                raise
            notes.append(str(reason))
            return 0
        if found != sha256[name]:
            if not is_document(name):
                raise _damaged(name, sha256[name], found)
            notes.append(f"{name}: was edited after the conversion")
        return size

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        sizes = list(pool.map(check_file, sha256))
        list(pool.map(checkpoint.require_finite, (*checkpoint.tensors, *checkpoint.quantised)))
    for name in guard.list_files(bundle.folder, _MAX_FILES, BundleError, deep=True):
        if name not in sha256 and name != MANIFEST and not name.startswith("."):
            notes.append(f"{printable(name)}: not part of the bundle")
    num_tensors, seconds = len(checkpoint.tensors), time.monotonic() - started
    counts = len(sha256) + 1, sum(sizes), num_tensors, len(bundle.masks)
    return VerifyReport(str(bundle.folder), *counts, tuple(sorted(notes)), seconds)
