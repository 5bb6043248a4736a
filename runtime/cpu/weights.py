"""A bundle's weights as the CPU kernels want them: projections channel-major, optionally rounded to int8 on the way.

A weight is read in pieces of a few rows that still lie in the processor's cache when they are transposed, so a model is
never in memory twice, and several weights are read at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ResourceError
from wisparse.formats.model.model_config import Projection
from wisparse.kernels.cpu.operations import aligned_empty, quantize_into, transpose_into

from ..torch.decoder import MaskedLinear

__all__ = ["CpuProjection", "Matrix", "read_matrices", "read_matrix"]

_PIECE_BYTES = 4 << 20
# Small enough for the allocator to hand out the same memory again, instead of fresh pages every time.
_WIDENED_BYTES = 8 << 20
# Rows of a piece: whole cache lines of the transposed weight, whatever its type.
_ROW_STEP = 64


@dataclass(frozen=True)
class Matrix:
    """A weight (N, K), stored as ``data``.

    Attributes:
        data: (K, N) if ``transposed``, else (N, K); the decoder's type, or int8.
        scale: (N,) float32 for int8: weight ~ data * scale; else None.
    """

    data: Tensor
    scale: Tensor | None
    transposed: bool

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (T, K) times the weight, as a dense product in x's type: (T, N); int8 is widened piece by piece."""
        weight = self.data.t() if self.transposed else self.data
        if self.scale is None:
            return functional.linear(x, weight, bias)
        y = torch.empty(len(x), len(weight))
        columns = max(1, _WIDENED_BYTES // (x.element_size() * weight.shape[1]))
        for first in range(0, len(weight), columns):
            # int8 is exact in bfloat16 and float16; the scale is applied to the sums.
            y[:, first : first + columns] = functional.linear(x, weight[first : first + columns].to(x.dtype))
        y *= self.scale
        return (y if bias is None else y + bias).to(x.dtype)


class CpuProjection(MaskedLinear):
    """One linear layer with its mask, if it has one.

    Attributes:
        matrix: the weight (N, K).
        bias: (N,), the decoder's type, or None.
    """

    def __init__(self, bundle: Bundle, projection: Projection, matrix: Matrix, dtype: torch.dtype) -> None:
        name = projection.name
        super().__init__(name, projection.in_features, projection.out_features, torch.device("cpu"))
        self.matrix = matrix
        self.bias = bundle.checkpoint.tensor(f"{name}.bias").to(dtype) if projection.bias else None
        self.set_mask(bundle.masks.get(name))

    def product(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x, self.bias)

    def step_bias(self) -> Tensor | None:
        """(N,) float32: what a decode step adds, whose position is always masked; None for nothing."""
        if self.bias is None or self.output_bias is None:
            return self.output_bias if self.bias is None else self.bias.float()
        return self.bias.float() + self.output_bias


def read_matrices(
    bundle: Bundle, names: Iterable[str], dtype: torch.dtype, weights: str, *, transposed: bool
) -> dict[str, Matrix]:
    """Read several weights side by side; arguments as for :func:`read_matrix`."""
    names = list(names)
    # Reading, checksums and the transposition all run without the interpreter's lock.
    with ThreadPoolExecutor(max_workers=max(1, min(torch.get_num_threads(), 8, os.cpu_count() or 1))) as pool:
        futures = [pool.submit(read_matrix, bundle, name, dtype, weights, transposed=transposed) for name in names]
        try:
            return {name: future.result() for name, future in zip(names, futures, strict=True)}
        finally:
            for future in futures:
                future.cancel()


def read_matrix(bundle: Bundle, name: str, dtype: torch.dtype, weights: str, *, transposed: bool) -> Matrix:
    """Read one weight.

    Args:
        bundle: where it is.
        name: of the tensor, (N, K).
        dtype: its type in memory, unless ``weights`` is int8.
        weights: ``native`` or ``int8``.
        transposed: lay it out as (K, N).

    Raises:
        BundleError: damaged, or holding a number that is not finite (int8 only: it has no place for one).
        ResourceError: not enough memory.
    """
    checkpoint = bundle.checkpoint
    n, k = checkpoint.shape(name)
    quantized = weights == "int8"
    try:
        data = aligned_empty((k, n) if transposed else (n, k), torch.int8 if quantized else dtype)
    except (OSError, MemoryError, RuntimeError):
        raise ResourceError(f"{name}: not enough memory for its {n} x {k} weights") from None
    scale = torch.empty(n) if quantized else None
    rows = max(_ROW_STEP, _PIECE_BYTES // (k * checkpoint.dtype.itemsize) // _ROW_STEP * _ROW_STEP)
    first = 0
    for stored in checkpoint.row_pieces(name, rows):
        piece = stored.to(dtype)
        last = first + len(piece)
        if scale is not None:
            quantize_into(piece, data, scale, first, transposed=transposed)
        elif transposed:
            transpose_into(piece, data, first)
        else:
            data[first:last] = piece
        first = last
    if scale is not None and not bool(scale.isfinite().all()):
        raise checkpoint.error(
            f"{name}: expected finite weights, found NaN or Inf in row {int((~scale.isfinite()).nonzero()[0])}"
        )
    return Matrix(data, scale, transposed)
