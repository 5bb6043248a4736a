"""What the operator of a masked layer is given, beside the rows that it gets: weights, and the masks of projections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.bundle import ProjectionMask

__all__ = ["Layer", "channel_major", "mask_tensors"]

# Rows of the weights start at multiples of so many elements, so that they can be read 16 bytes at a time.
_ALIGNED = 16


def channel_major(weight: Tensor) -> Tensor:
    """The same (N, K) matrix with each column contiguous, on a GPU; a CPU has no kernel that would gain from it."""
    if not weight.is_cuda or weight.stride(0) == 1:
        return weight
    n, k = weight.shape
    weight_t = torch.empty(k, -(-n // _ALIGNED) * _ALIGNED, dtype=weight.dtype, device=weight.device)
    weight_t[:, :n] = weight.t()
    return weight_t[:, :n].t()


def mask_tensors(
    masks: Sequence[ProjectionMask], widths: Sequence[int], channels: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scales (projections, K) of these channels, thresholds (projections,) and the outputs' biases (sum(widths),) or
    None, all float32: vLLM builds models with the weights' type as torch's default, to which a threshold would be
    rounded."""
    scales = torch.stack([mask.channel_scale[channels] for mask in masks]).float()
    thresholds = torch.tensor([mask.threshold for mask in masks], dtype=torch.float32)
    if all(mask.output_bias is None for mask in masks):
        return scales, thresholds, None
    biases = [
        torch.zeros(width, dtype=torch.float32) if mask.output_bias is None else mask.output_bias.float()
        for mask, width in zip(masks, widths, strict=True)
    ]
    return scales, thresholds, torch.cat(biases)


@dataclass(frozen=True)
class Layer:
    """Projections that read the same input, and their masks: the operator's arguments, beside the rows that it gets.

    Attributes: as `masked_linear` has them.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor
    thresholds: Tensor
    widths: Sequence[int]

    def group(self) -> Any:
        """The same for our GPU kernels."""
        from wisparse.kernels.gpu.products.gemv import Group
        from wisparse.kernels.gpu.products.matrix import plain_matrix

        # Never "dense": a layer without a threshold drops nothing all the same, and a compiled graph holds for any
        # bundle.
        widths = tuple(self.widths)
        matrix = plain_matrix(self.weight.t(), widths)
        return Group(matrix, widths, self.bias, self.scales, self.thresholds, dense=False)

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Of each projection: which outputs are its, its weight (width, K) and bias (width,)."""
        first = 0
        for width in self.widths:
            part = slice(first, first + width)
            yield part, self.weight[part], None if self.bias is None else self.bias[part]
            first += width
