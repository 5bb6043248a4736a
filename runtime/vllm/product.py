"""The product of a masked layer as one torch operator, ``wisparse::masked_linear``.

Which kernel does it is decided inside, where the number of rows is a plain number (while a CUDA graph is captured: the
graph's own):

    up to SPARSE_ROWS rows on a GPU          our sparse kernels, unless the next was measured to be faster
    up to MASKED_ROWS rows                   one product that masks in its own loop, where a tile for it was measured
    more of them, none of which is masked    vLLM's dense product
    more of them                             dense products of masked inputs, one for each projection
    on a CPU, and in float32                 the same in plain torch

The weights lie channel-major, (K, N), for all of them: the dense product of vLLM's reads either layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.kernels.reference import keep_mask

from .rows import may_mask

__all__ = ["SPARSE_ROWS", "Layer", "channel_major", "in_torch", "masked_inputs", "masked_linear", "reserve", "sparse"]

# Rows that the sparse kernels take in one launch. They could take 16, but are slower there than masked copies: eight
# rows' inputs fit in shared memory beside the weights.
SPARSE_ROWS = 8
# Rows that one tile of the product holds which masks in its own loop.
MASKED_ROWS = 128
# Rows of the weights start at multiples of so many elements, so that they can be read 16 bytes at a time.
_ALIGNED = 16

_HALF = (torch.bfloat16, torch.float16)
_compiled: set[tuple[torch.device, torch.dtype, int, int]] = set()


def channel_major(weight: Tensor) -> Tensor:
    """The same (N, K) matrix with each column contiguous, on a GPU; a CPU has no kernel that would gain from it."""
    if not weight.is_cuda or weight.stride(0) == 1:
        return weight
    n, k = weight.shape
    weight_t = torch.empty(k, -(-n // _ALIGNED) * _ALIGNED, dtype=weight.dtype, device=weight.device)
    weight_t[:, :n] = weight.t()
    return weight_t[:, :n].t()


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
        from wisparse.kernels.gpu.gemv import Group
        from wisparse.kernels.gpu.matrix import plain_matrix

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


@torch.library.custom_op("wisparse::masked_linear", mutates_args=())
def masked_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    thresholds: Tensor,
    masked: Tensor,
    widths: list[int],
    output_bias: Tensor | None = None,
) -> Tensor:
    """Projections that read the same input, over the channels that each row keeps.

    Args:
        x: (..., K).
        weight: (N, K), on a GPU with contiguous columns; the projections' outputs one after the other.
        bias: (N,) or None.
        scales: (projections, K) float32.
        thresholds: (projections,) float32.
        masked: (rows or more,) float32, 1 for a row that is masked, 0 for one that keeps all its channels.
        widths: outputs of each projection.
        output_bias: (N,) float32, added to the rows that are masked; None for nothing.

    Returns:
        (..., N).
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if len(rows) > len(masked):
        raise RuntimeError(f"expected a batch of at most {len(masked)} tokens, found {len(rows)}")
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    masked = masked[: len(rows)]
    layer = Layer(weight, bias, scales, thresholds, widths)
    on_gpu = x.is_cuda and x.dtype in _HALF
    tile = _mask_tile(x.device, x.shape[-1], weight.shape[0], len(rows)) if on_gpu else None
    if tile is not None:
        from wisparse.kernels.gpu.mask_gemm import mask_gemm

        y = mask_gemm(rows, layer.group(), masked, tile)
    elif on_gpu and len(rows) <= SPARSE_ROWS:
        y = sparse(rows, layer, masked)
    elif not capturing and not may_mask(masked):
        y = functional.linear(rows, weight, bias)
    elif on_gpu:
        y = masked_inputs(rows, layer, masked)
    else:
        y = in_torch(rows, layer, masked)
    if output_bias is not None:
        y = (y + masked[:, None] * output_bias).to(y.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


@masked_linear.register_fake
def _shape(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    thresholds: Tensor,
    masked: Tensor,
    widths: list[int],
    output_bias: Tensor | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def reserve(layer: Layer) -> None:
    """Make room for what the programs of a layer's launches share, before a graph keeps its address."""
    weight = layer.weight
    if not weight.is_cuda or weight.dtype not in _HALF:
        return
    scratch = _scratch(weight.device, weight.dtype)
    group = layer.group()
    for rows in range(1, SPARSE_ROWS + 1):
        scratch.reserve(group, _tile(weight.device, weight.dtype, group.in_features, group.widths, rows), rows)
    # A kernel is not to be compiled while a graph is captured, and vLLM's own first batches may not need this one.
    kind = (weight.device, weight.dtype, group.in_features, len(layer.widths))
    if kind not in _compiled:
        from wisparse.kernels.gpu.mask import mask_rows

        mask_rows(weight.new_zeros(1, group.in_features), layer.scales, layer.thresholds, layer.thresholds[:1])
        _compiled.add(kind)


def in_torch(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """The definition, projection by projection."""
    outputs = []
    for scale, threshold, (_, weight, bias) in zip(layer.scales, layer.thresholds, layer.parts(), strict=True):
        keep = keep_mask(x, scale, (threshold * masked)[:, None])
        outputs.append(functional.linear(torch.where(keep, x, x.new_zeros(())), weight, bias))
    return torch.cat(outputs, dim=-1)


def masked_inputs(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """The same with all masks in one launch, and products that write where their outputs belong."""
    from wisparse.kernels.gpu.mask import mask_rows

    inputs = mask_rows(x, layer.scales, layer.thresholds, masked)
    out = x.new_empty(len(x), layer.weight.shape[0])
    for kept, (part, weight, bias) in zip(inputs, layer.parts(), strict=True):
        if bias is None:
            torch.mm(kept, weight.t(), out=out[:, part])
        else:
            torch.addmm(bias, kept, weight.t(), out=out[:, part])
    return out


def sparse(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """One launch that reads the kept channels of one or two rows, or all of them once for up to SPARSE_ROWS."""
    from wisparse.kernels.gpu.gemv import launch_gemv

    group = layer.group()
    rows = len(x)
    out = x.new_empty(rows, layer.weight.shape[0])
    tile = _tile(x.device, x.dtype, group.in_features, group.widths, rows)
    launch_gemv(
        group, x, out, _scratch(x.device, x.dtype), tile, batch=rows, masked=masked, pdl=_arch(x.device)[0] >= 90
    )
    return out


@functools.cache
def _arch(device: torch.device) -> tuple[int, int]:
    """Compute capability (90 for 9.0) and multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


@functools.cache
def _tile(device: torch.device, dtype: torch.dtype, in_features: int, widths: tuple[int, ...], rows: int) -> Any:
    from wisparse.kernels.gpu.gemv import launch_kind
    from wisparse.kernels.gpu.tiles import choose_tile

    kind = launch_kind(rows, dense=False)
    return choose_tile(*_arch(device), in_features, widths, kind, rows, dtype)


@functools.cache
def _mask_tile(device: torch.device, in_features: int, out_features: int, rows: int) -> Any:
    """The tile of the product that masks in its own loop, None where another way is taken."""
    if not 2 < rows <= MASKED_ROWS:
        return None
    from wisparse.kernels.gpu.mask_gemm import mask_gemm_kind
    from wisparse.kernels.gpu.tiles import measured_tile

    return measured_tile(_arch(device)[0], in_features, out_features, mask_gemm_kind(rows))


@functools.cache
def _scratch(device: torch.device, dtype: torch.dtype) -> Any:
    """One for all layers: their launches follow one another on one stream."""
    from wisparse.kernels.gpu.gemv import Scratch

    return Scratch(device, dtype)
