"""``wisparse.safetensors``, the sidecar: every projection's masks, one a sparsity level. FORMAT.md has the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import build_header, parse_tensors
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
    """The masks of every sparsity level, from the bytes of a sidecar.

    Raises BundleError unless it belongs to ``manifest``, holds the tensors of these projections alone, and every value
    is in its range and the manifest's.
    """
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
        expected |= {
            f"{name}.channel_scale": (rows, projection.in_features),
            f"{name}.threshold": (rows,),
            f"{name}.sparsity": (rows,),
        }
    for tensor, shape in expected.items():
        name, _, what = tensor.rpartition(".")
        if tensor not in tensors:
            raise BundleError(f"{name}: expected {what} {shape}, found nothing in {SIDECAR}; convert again")
        entry, _ = tensors[tensor]
        if entry.shape != shape:
            raise BundleError(f"{name}: expected {what} {shape}, found {entry.shape}; convert again")
        if entry.code != "F32":
            raise BundleError(f"{name}: expected {what} in F32, found {entry.code}; convert again")
    for tensor in tensors:
        if tensor not in expected:
            raise BundleError(f"{SIDECAR}: unexpected tensor {tensor!r:.200}; convert again")
    values = {name: torch.from_numpy(np.frombuffer(raw, "<f4").reshape(rows, -1)) for name, (_, raw) in tensors.items()}
    return {
        level.sparsity: {entry.name: _mask(values, index, entry) for entry in level.projections}
        for index, level in enumerate(manifest.recipe.levels)
    }


def _mask(values: Mapping[str, Tensor], level: int, recipe: ProjectionRecipe) -> ProjectionMask:
    scale, threshold, sparsity = (
        values[f"{recipe.name}.{field}"][level] for field in ("channel_scale", "threshold", "sparsity")
    )
    mask = ProjectionMask(scale.clone(), float(threshold), float(sparsity))
    check_mask(recipe.name, mask, BundleError)
    for key, found in (("threshold", mask.threshold), ("sparsity", mask.sparsity)):
        wanted = getattr(recipe, key)
        if float(np.float32(wanted)) != found:
            raise BundleError(
                f"{recipe.name}: {MANIFEST} says {key} {wanted!r}, {SIDECAR} says {found!r}; convert again"
            )
    # The recipe's double, so that 0.35 is printed as 0.35.
    return replace(mask, sparsity=float(recipe.sparsity))


def check_mask(name: str, mask: ProjectionMask, error: type[Exception]) -> None:
    """Raise ``error`` unless every value of ``mask`` is in its range.

    Subnormal numbers are out of range: back ends that flush them to zero would disagree about the mask.
    """
    scale, threshold = mask.channel_scale, mask.threshold
    if scale.dtype is not torch.float32 or scale.dim() != 1:
        raise error(f"{name}: channel_scale: expected float32 (K,), found {scale.dtype} {tuple(scale.shape)}")
    low, high = (float(value) for value in torch.aminmax(scale))
    if not (low >= _SMALLEST_NORMAL and high < float("inf")):
        raise error(f"{name}: channel_scale: expected finite positive values, found {low:g} to {high:g}; convert again")
    if not (threshold == 0 or _SMALLEST_NORMAL <= threshold < float("inf")):
        raise error(f"{name}: threshold: expected a finite number, 0 or more, found {threshold:g}; convert again")
    if not 0 <= mask.sparsity <= MAX_SPARSITY:
        raise error(
            f"{name}: sparsity: expected a number in [0, {MAX_SPARSITY}], found {mask.sparsity:g}; convert again"
        )
    if mask.sparsity == 0 and threshold != 0:
        raise error(f"{name}: sparsity 0 means dense: expected threshold 0, found {threshold:g}; convert again")


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
