"""The product of a masked layer as one torch operator, ``wisparse::masked_linear``.

Which kernel does it is decided inside, where the number of rows is a plain number (while a CUDA graph is captured: the
graph's own):

    up to SPARSE_ROWS rows on a GPU          our sparse kernels, unless the next was measured to be faster
    up to MASKED_ROWS rows                   one product that masks in its own loop, where a tile for it was measured
    more of them, none of which is masked    vLLM's dense product
    more of them                             dense products of masked inputs, one for each projection
    on a CPU, and in float32                 the same in plain torch

The weights lie channel-major, (K, N), for all of them: the dense product of vLLM's reads either layout.

A layer with one projection whose input comes out of an elementwise step is masked by `mask_ahead`, in plain torch,
where the compiler sees it and makes it part of that step; the operator then gets inputs that are ``ready``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.kernels.reference import keep_mask

from .compiling import finish_compiling, start_compiling
from .launches import SPARSE_ROWS, in_its_loop, mask_tile, masked_inputs, reserve_scratch, sparse
from .layer import Layer
from .rows import may_mask

__all__ = ["in_torch", "mask_ahead", "masked_linear", "reserve"]

_HALF = (torch.bfloat16, torch.float16)


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
    ready: bool = False,
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
        ready: x comes from `mask_ahead`.

    Returns:
        (..., N).
    """
    finish_compiling()
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if len(rows) > len(masked):
        raise RuntimeError(f"expected a batch of at most {len(masked)} tokens, found {len(rows)}")
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    masked = masked[: len(rows)]
    layer = Layer(weight, bias, scales, thresholds, widths)
    on_gpu = x.is_cuda and x.dtype in _HALF
    tile = mask_tile(x.device, x.shape[-1], weight.shape[0], len(rows)) if on_gpu and not ready else None
    if tile is not None:
        y = in_its_loop(rows, layer, masked, tile)
    elif on_gpu and len(rows) <= SPARSE_ROWS:
        y = sparse(rows, layer, masked)
    elif ready or (not capturing and not may_mask(masked)):
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
    ready: bool = False,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def mask_ahead(x: Tensor, scale: Tensor, threshold: Tensor, masked: Tensor) -> Tensor:
    """x with its dropped channels at zero, for one projection.

    Args:
        x: (M, K).
        scale: (K,) float32.
        threshold: () float32.
        masked: (M or more,) as `masked_linear` has it.
    """
    limit = threshold * masked.narrow(0, 0, x.shape[0])
    return torch.where(keep_mask(x, scale, limit[:, None]), x, x.new_zeros(()))


def reserve(layer: Layer) -> None:
    """Before the first batch: make room for a layer's launches, and begin to compile them."""
    if layer.weight.is_cuda and layer.weight.dtype in _HALF:
        reserve_scratch(layer)
        start_compiling(layer)


def in_torch(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """The definition, projection by projection."""
    outputs = []
    for scale, threshold, (_, weight, bias) in zip(layer.scales, layer.thresholds, layer.parts(), strict=True):
        keep = keep_mask(x, scale, (threshold * masked)[:, None])
        outputs.append(functional.linear(torch.where(keep, x, x.new_zeros(())), weight, bias))
    return torch.cat(outputs, dim=-1)
