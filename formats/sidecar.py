"""``wisparse.safetensors``, the sidecar: of every projection its masks, one a sparsity level, and how they are checked. FORMAT.md
has the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from .safetensors_header import DTYPES, Header, build_header

# What CATS and R-Sparse had beside the three tensors of every projection, while a bundle could hold them.
_FORMER = (".low_rank_out", ".low_rank_in", ".gate_threshold")
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class ProjectionMask:
    """What decides which channels of one projection are kept, at one sparsity level.

    Attributes:
        channel_scale: (K,) float32, finite and positive.
        threshold: keep a channel if ``|x| * channel_scale`` is at least this; finite, 0 or more, a float32 value.
        sparsity: fraction of channels dropped, in [0, 0.95]; 0 means dense, and the threshold is 0 as well.
        output_bias: (N,) float32, finite, added to the product where the mask is in force; None for nothing, and
            always None where the sparsity is 0.
    """

    channel_scale: Tensor
    threshold: float
    sparsity: float
    output_bias: Tensor | None = None


def check_header(header: Header, projections: Mapping[str, Projection], manifest: Manifest) -> None:
    """Raise BundleError unless a sidecar belongs to ``manifest`` and holds the tensors of these projections alone."""
    metadata = header.metadata
    if metadata.get("format") != "wisparse":
        raise BundleError(f"{SIDECAR}: format: expected 'wisparse', found {metadata.get('format')!r:.80}")
    version = metadata.get("format_version", "")
    digits = version.isascii() and version.isdigit() and len(version) < 9
    require_version(int(version) if digits else version, SIDECAR, manifest.version)
    if metadata.get("recipe_sha256") != recipe_digest(manifest.recipe, manifest.version):
        raise BundleError(f"{SIDECAR} and {MANIFEST} do not belong together (recipe_sha256 differs); convert again")
    rows = () if manifest.version == 1 else (len(manifest.recipe.levels),)
    expected: dict[str, tuple[int, ...]] = {}
    for name, projection in projections.items():
        expected |= {
            f"{name}.channel_scale": (*rows, projection.in_features),
            f"{name}.threshold": rows,
            f"{name}.sparsity": rows,
        }
        if rows and f"{name}.output_bias" in header.entries:
            expected[f"{name}.output_bias"] = (*rows, projection.out_features)
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


def read_masks(header: Header, data: bytes, manifest: Manifest) -> dict[float, dict[str, ProjectionMask]]:
    """The masks of every sparsity level, from the bytes of a sidecar whose header was checked.

    Raises:
        BundleError: a value out of its range, or unlike the manifest's.
    """
    return {
        level.sparsity: {entry.name: _mask(header, data, index, entry) for entry in level.projections}
        for index, level in enumerate(manifest.recipe.levels)
    }


def _mask(header: Header, data: bytes, index: int, entry: ProjectionRecipe) -> ProjectionMask:
    """One projection's mask at the sparsity level of this ``index``: the tensors' rows, which version 1 had one of."""

    def row(field: str, width: int) -> Tensor:
        start = header.entries[f"{entry.name}.{field}"].start + 4 * width * index
        return torch.from_numpy(np.frombuffer(data, "<f4", width, start).astype(np.float32))

    width = header.entries[f"{entry.name}.channel_scale"].shape[-1]
    stored = header.entries.get(f"{entry.name}.output_bias")
    mask = ProjectionMask(
        channel_scale=row("channel_scale", width),
        threshold=float(row("threshold", 1)),
        sparsity=float(row("sparsity", 1)),
        output_bias=None if stored is None else row("output_bias", stored.shape[-1]),
    )
    # A projection without a mask has nothing to add either; others may have a bias at another sparsity level alone.
    if mask.output_bias is not None and not bool(mask.output_bias.any()):
        mask = replace(mask, output_bias=None)
    check_mask(entry.name, mask, BundleError)
    for key, found in (("threshold", mask.threshold), ("sparsity", mask.sparsity)):
        if float(np.float32(getattr(entry, key))) != found:
            raise BundleError(
                f"{entry.name}: {MANIFEST} says {key} {getattr(entry, key)!r}, {SIDECAR} says {found!r}; convert again"
            )
    # What the recipe's double says, rounded once: 0.35 stays 0.35 for whoever prints it.
    return replace(mask, sparsity=float(entry.sparsity))


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
    bias = mask.output_bias
    if bias is None:
        return
    if bias.dtype is not torch.float32 or bias.dim() != 1:
        raise error(f"{name}: output_bias: expected float32 (N,), found {bias.dtype} {tuple(bias.shape)}")
    if not bool(torch.isfinite(bias).all()):
        raise error(f"{name}: output_bias: expected finite values, found NaN or infinity; convert again")
    if mask.sparsity == 0:
        raise error(f"{name}: sparsity 0 means dense: expected no output_bias, found one; convert again")


def sidecar_bytes(
    projections: Iterable[Projection], recipe: Recipe, levels: Sequence[Mapping[str, ProjectionMask]]
) -> bytes:
    """The file; ``sparsity levels`` in the recipe's order, checked."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for projection in projections:
        masks = [level[projection.name] for level in levels]
        arrays |= {
            f"{projection.name}.channel_scale": np.stack([_numpy(mask.channel_scale) for mask in masks]),
            f"{projection.name}.threshold": np.array([mask.threshold for mask in masks]),
            f"{projection.name}.sparsity": np.array([mask.sparsity for mask in masks]),
        }
        if any(mask.output_bias is not None for mask in masks):
            none = torch.zeros(projection.out_features)
            arrays[f"{projection.name}.output_bias"] = np.stack(
                [_numpy(none if mask.output_bias is None else mask.output_bias) for mask in masks]
            )
    header, _ = build_header(
        {name: (torch.float32, array.shape) for name, array in arrays.items()},
        {"format": "wisparse", "format_version": str(FORMAT_VERSION), "recipe_sha256": recipe_digest(recipe)},
    )
    return header + b"".join(array.astype("<f4").tobytes() for array in arrays.values())


def _numpy(values: Tensor) -> np.ndarray[Any, Any]:
    return values.detach().cpu().contiguous().numpy()
