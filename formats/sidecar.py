"""``wisparse.safetensors``, the sidecar: every projection's masks, one a sparsity level. FORMAT.md has the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import Entry, build_header, parse_tensors
from .errors import BundleError
from .manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MAX_SPARSITY,
    SIDECAR,
    Manifest,
    ProjectionRecipe,
    Recipe,
    recipe_digest,
    require_version,
)
from .model_config import Projection

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class ProjectionMask:
    """What decides which channels of one projection are kept, at one sparsity level."""

    channel_scale: Tensor  # (K,) float32, finite and positive
    threshold: float  # keep a channel if ``|x| * channel_scale`` is at least this; finite, 0 or more, a float32 value
    sparsity: float  # fraction of channels dropped, in [0, 0.95]; 0 means dense, and the threshold is 0 as well


def read_masks(
    data: bytes, projections: Mapping[str, Projection], manifest: Manifest
) -> dict[float, dict[str, ProjectionMask]]:
    """The masks of every sparsity level, from the bytes of a sidecar. Raises BundleError unless it belongs to
    ``manifest``, holds the tensors of these projections alone, and every value is in its range and the manifest's."""
    tensors, metadata = parse_tensors(data, SIDECAR, BundleError)
    if metadata.get("format") != "wisparse":
        raise BundleError(f"{SIDECAR}: format: expected 'wisparse', found {metadata.get('format')!r:.80}")
    version = metadata.get("format_version", "")
    digits = version.isascii() and version.isdigit() and len(version) < 9
    require_version(int(version) if digits else version, SIDECAR)
    if metadata.get("recipe_sha256") != recipe_digest(manifest.recipe):
        raise BundleError(f"{SIDECAR} and {MANIFEST} do not belong together (recipe_sha256 differs); convert again")
    rows = len(manifest.recipe.levels)
    expected: dict[str, tuple[int, ...]] = {}
    for name, projection in projections.items():
        expected[f"{name}.channel_scale"] = (rows, projection.in_features)
        expected |= dict.fromkeys((f"{name}.threshold", f"{name}.sparsity"), (rows,))
    for tensor, shape in expected.items():
        name, _, what = tensor.rpartition(".")
        entry = tensors[tensor][0] if tensor in tensors else None
        if entry != Entry("F32", shape):
            found = f"nothing in {SIDECAR}" if entry is None else f"{entry.shape} in {entry.code}"
            raise BundleError(f"{name}: expected {what} {shape} in F32, found {found}; convert again")
    for tensor in tensors:
        if tensor not in expected:
            raise BundleError(f"{SIDECAR}: unexpected tensor {tensor!r:.200}; convert again")
    values = {name: torch.from_numpy(np.frombuffer(raw, "<f4").reshape(rows, -1)) for name, (_, raw) in tensors.items()}
    return {
        level.sparsity: {entry.name: _mask(values, index, entry) for entry in level.projections}
        for index, level in enumerate(manifest.recipe.levels)
    }


def _mask(values: Mapping[str, Tensor], level: int, recipe: ProjectionRecipe) -> ProjectionMask:
    """The mask of one projection, with every value checked. Subnormal numbers are out of range: back ends that flush
    them to zero would disagree about the mask."""
    scale, *numbers = (values[f"{recipe.name}.{field}"][level] for field in ("channel_scale", "threshold", "sparsity"))
    threshold, sparsity = map(float, numbers)
    low, high = (float(value) for value in torch.aminmax(scale))
    positive = low >= _SMALLEST_NORMAL and high < math.inf
    usual = threshold == 0 or _SMALLEST_NORMAL <= threshold < math.inf
    for valid, where, wanted, found in (
        (positive, "channel_scale", "finite positive values", f"{low:g} to {high:g}"),
        (usual, "threshold", "a finite number, 0 or more", f"{threshold:g}"),
        (0 <= sparsity <= MAX_SPARSITY, "sparsity", f"a number in [0, {MAX_SPARSITY}]", f"{sparsity:g}"),
        (sparsity or not threshold, "sparsity 0 means dense", "threshold 0", f"{threshold:g}"),
    ):
        if not valid:
            raise BundleError(f"{recipe.name}: {where}: expected {wanted}, found {found}; convert again")
    for key, number in (("threshold", threshold), ("sparsity", sparsity)):
        stated = getattr(recipe, key)
        if float(np.float32(stated)) != number:
            raise BundleError(
                f"{recipe.name}: {MANIFEST} says {key} {stated!r}, {SIDECAR} says {number!r}; convert again"
            )
    # The recipe's double, so that 0.35 is printed as 0.35.
    return ProjectionMask(scale.clone(), threshold, float(recipe.sparsity))


def sidecar_bytes(
    projections: Iterable[Projection], recipe: Recipe, levels: Sequence[Mapping[str, ProjectionMask]]
) -> bytes:
    """The file; ``levels`` in the recipe's order, checked."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in (projection.name for projection in projections):
        masks = [level[name] for level in levels]
        arrays |= {
            f"{name}.channel_scale": torch.stack([mask.channel_scale.detach().cpu() for mask in masks]).numpy(),
            f"{name}.threshold": np.array([mask.threshold for mask in masks]),
            f"{name}.sparsity": np.array([mask.sparsity for mask in masks]),
        }
    header = build_header(
        {name: (torch.float32, array.shape) for name, array in arrays.items()},
        {"format": "wisparse", "format_version": str(FORMAT_VERSION), "recipe_sha256": recipe_digest(recipe)},
    )
    return header + b"".join(array.astype("<f4").tobytes() for array in arrays.values())
