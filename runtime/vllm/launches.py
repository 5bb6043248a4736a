"""The ways by which a GPU computes a masked layer's product, each for a range of rows, and their launches' tiles."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .layer import Layer

__all__ = [
    "MASKED_ROWS",
    "SKIPPED_ROWS",
    "SPARSE_ROWS",
    "fused_mask",
    "mask_tile",
    "masked_inputs",
    "products",
    "reserve_scratch",
    "sparse",
]

# Rows for which the sparse kernels leave channels unread; for more of them they read all weights, like a dense product.
SKIPPED_ROWS = 2
# Rows that the sparse kernels take in one launch. They could take 16, but are slower there than masked copies: eight
# rows' inputs fit in shared memory beside the weights.
SPARSE_ROWS = 8
# Rows that one tile of the product holds which masks in its own loop.
MASKED_ROWS = 128
# Up to so many rows, projections of unlike widths share one batched product: the narrow ones alone do not fill a GPU.
# With more rows they do, and the copies of the wide ones' inputs cost more.
BATCHED_ROWS = 512


def masked_inputs(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """The same with all masks in one launch, and products that write where their outputs belong."""
    from wisparse.kernels.gpu.mask import mask_rows

    piece = math.gcd(*layer.widths)
    copies = [width // piece for width in layer.widths]
    batched = len(set(copies)) > 1 and len(x) <= BATCHED_ROWS
    inputs = mask_rows(
        x, layer.scales, layer.thresholds, masked,
        copies=copies if batched else None, pdl=_arch(x.device)[0] >= 90,
    )  # fmt: skip
    return products(inputs, layer)


def products(inputs: Tensor, layer: Layer) -> Tensor:
    """y (M, N) of the projections' own inputs: one product for each, or one batched product of equal pieces.

    Args:
        inputs: (projections, M, K); or (pieces, M, K), a copy for each of the pieces that all projections divide into.
    """
    pieces, rows, _ = inputs.shape
    out = inputs.new_empty(rows, layer.weight.shape[0])
    if pieces == len(layer.widths):
        for kept, (part, weight, bias) in zip(inputs, layer.parts(), strict=True):
            if bias is None:
                torch.mm(kept, weight.t(), out=out[:, part])
            else:
                torch.addmm(bias, kept, weight.t(), out=out[:, part])
        return out
    weights, outs = (
        matrix.unflatten(1, (pieces, -1)).transpose(0, 1) for matrix in (layer.weight.t(), out)
    )  # (pieces, K, piece), (pieces, M, piece)
    if layer.bias is None:
        torch.bmm(inputs, weights, out=outs)
    else:
        torch.baddbmm(layer.bias.view(pieces, 1, -1), inputs, weights, out=outs)
    return out


def fused_mask(x: Tensor, layer: Layer, masked: Tensor, tile: Any) -> Tensor:
    """One launch that masks x beside its loads."""
    from wisparse.kernels.gpu.mask_gemm import mask_gemm

    return mask_gemm(x, layer.group(), masked, tile)


def sparse(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """One launch that reads the kept channels of one or two rows, or all of them once for up to SPARSE_ROWS."""
    from wisparse.kernels.gpu.products.gemv import launch_gemv

    group = layer.group()
    rows = len(x)
    out = x.new_empty(rows, layer.weight.shape[0])
    tile = _tile(x.device, x.dtype, group.in_features, group.widths, rows)
    launch_gemv(
        group, x, out, _scratch(x.device, x.dtype), tile, batch=rows, masked=masked, pdl=_arch(x.device)[0] >= 90
    )
    return out


def reserve_scratch(layer: Layer) -> None:
    """Make room for what the programs of a layer's sparse launches share, before a graph keeps its address."""
    group = layer.group()
    weight = layer.weight
    for rows in range(1, SPARSE_ROWS + 1):
        tile = _tile(weight.device, weight.dtype, group.in_features, group.widths, rows)
        _scratch(weight.device, weight.dtype).reserve(group, tile, rows)


@functools.cache
def _arch(device: torch.device) -> tuple[int, int]:
    """Compute capability (90 for 9.0) and multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


@functools.cache
def _tile(device: torch.device, dtype: torch.dtype, in_features: int, widths: tuple[int, ...], rows: int) -> Any:
    from wisparse.kernels.gpu.products.gemv import launch_kind
    from wisparse.kernels.gpu.products.tiles import choose_tile

    kind = launch_kind(rows, dense=False)
    return choose_tile(*_arch(device), in_features, widths, kind, rows, dtype)


@functools.cache
def mask_tile(device: torch.device, in_features: int, out_features: int, rows: int) -> Any:
    """The tile of the product that masks in its own loop, None where another way is taken."""
    if not SKIPPED_ROWS < rows <= MASKED_ROWS:
        return None
    from wisparse.kernels.gpu.mask_gemm import mask_gemm_kind
    from wisparse.kernels.gpu.products.tiles import measured_tile

    return measured_tile(_arch(device)[0], in_features, out_features, mask_gemm_kind(rows))


@functools.cache
def _scratch(device: torch.device, dtype: torch.dtype) -> Any:
    """One for all layers: their launches follow one another on one stream."""
    from wisparse.kernels.gpu.products.gemv import Scratch

    return Scratch(device, dtype)
