"""A linear layer with its mask, however its weight is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wisparse.kernels.reference import keep_mask

if TYPE_CHECKING:
    from wisparse.formats.bundle import ProjectionMask

__all__ = ["MaskedLinear", "drop_channels"]


def drop_channels(x: Tensor, keep: Tensor) -> Tensor:
    """x (T, K) with its last rows' dropped channels at zero; ``keep``: (rows, K)."""
    dense, masked = x[: len(x) - len(keep)], x[len(x) - len(keep) :]
    return torch.cat((dense, torch.where(keep, masked, masked.new_zeros(()))))


class MaskedLinear:
    """One linear layer with its mask, if it has one; a subclass knows how its weight is stored.

    Attributes:
        channel_scale: (K,) float32, or None for a dense projection.
        threshold: keep a channel if ``|x| * channel_scale`` is at least this.
        output_bias: (N,) float32, added where the mask is in force; None for nothing.
        kept: () int64 while kept channels are counted, else None.
    """

    def __init__(self, name: str, in_features: int, out_features: int, device: torch.device) -> None:
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self._device = device
        self.kept: Tensor | None = None
        self.set_mask(None)

    def set_mask(self, mask: ProjectionMask | None) -> None:
        """Put a mask in force; None or one of sparsity 0: the projection is dense."""
        sparse = mask is not None and mask.sparsity > 0
        self.channel_scale = mask.channel_scale.contiguous().to(self._device) if mask is not None and sparse else None
        self.threshold = mask.threshold if mask is not None and sparse else 0.0
        added = mask.output_bias if mask is not None and sparse else None
        self.output_bias = None if added is None else added.to(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x (T, K) to (T, N), the weight's bias included, if it has one."""
        raise NotImplementedError

    def __call__(self, x: Tensor, first_sparse: int) -> Tensor:
        """Apply it to x (T, K); rows from ``first_sparse`` on are masked."""
        if self.channel_scale is None or first_sparse >= len(x):
            return self.product(x)
        keep = keep_mask(x[first_sparse:], self.channel_scale, self.threshold)
        if self.kept is not None:
            self.kept += keep.sum()
        y = self.product(drop_channels(x, keep))
        if self.output_bias is not None:
            y[first_sparse:] += self.output_bias
        return y
