"""The product of a masked layer as one torch operator, ``wisparse::masked_linear``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.kernels.reference import keep_mask

from .launches import (
    SKIPPED_ROWS,
    SPARSE_ROWS,
    Layer,
    finish_compiling,
    fused_mask,
    mask_tile,
    masked_inputs,
    reserve_scratch,
    sparse,
    start_compiling,
)
from .rows import may_mask

_HALF = (torch.bfloat16, torch.float16)


def masked_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    thresholds: Tensor,
    masked: Tensor,
    widths: list[int],
    ready: bool = False,
) -> Tensor:
    """Projections of x (..., K) that read the same input, over the channels that each row keeps: (..., N).

    weight: (N, K), on a GPU with contiguous columns, the projections' outputs side by side; bias: (N,); scales:
    (projections, K) float32; thresholds: (projections,) float32; masked: (rows or more,) float32, 1 for a row that is
    masked, else 0; widths: outputs of each projection; ready: x comes from `mask_ahead`.
    """
    finish_compiling()
    count = x.numel() // x.shape[-1]
    if count > len(masked):
        raise RuntimeError(f"expected a batch of at most {len(masked)} tokens, found {count}")
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and not may_mask(masked):
        return functional.linear(x, weight, bias)
    rows, masked = x.reshape(-1, x.shape[-1]).contiguous(), masked[:count]
    layer = Layer(weight, bias, scales, thresholds, widths)
    on_gpu = x.is_cuda and x.dtype in _HALF
    tile = mask_tile(x.device, x.shape[-1], weight.shape[0], count) if on_gpu and not ready else None
    if tile is not None:
        y = fused_mask(rows, layer, masked, tile)
    elif on_gpu and count <= (SKIPPED_ROWS if ready else SPARSE_ROWS):
        y = sparse(rows, layer, masked)
    elif ready:
        y = functional.linear(rows, weight, bias)
    elif on_gpu:
        y = masked_inputs(rows, layer, masked)
    else:
        y = in_torch(rows, layer, masked)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _shape(x: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# Not by torch.library.custom_op, whose wrapper takes as long as a product's launch where no graph is replayed.
_LIBRARY = torch.library.Library("wisparse", "FRAGMENT")
_LIBRARY.define("masked_linear" + torch.library.infer_schema(masked_linear, mutates_args=()))
for _place in ("CUDA", "CPU"):
    _LIBRARY.impl("masked_linear", masked_linear, _place)
torch.library.register_fake("wisparse::masked_linear", _shape, lib=_LIBRARY)


def mask_ahead(x: Tensor, scale: Tensor, threshold: Tensor, masked: Tensor) -> Tensor:
    """x (M, K) with dropped channels at zero; scale: (K,), threshold: (), masked: as for `masked_linear`."""
    limit = threshold * masked.narrow(0, 0, x.shape[0])
    return torch.where(keep_mask(x, scale, limit[:, None]), x, x.new_zeros(()))


def reserve(layer: Layer, *, ahead: bool = False) -> None:
    """Before the first batch: allocate and compile. ``ahead``: the layer's inputs are masked by `mask_ahead`."""
    if layer.weight.is_cuda and layer.weight.dtype in _HALF:
        reserve_scratch(layer)
        start_compiling(layer, ahead=ahead)


def in_torch(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """The definition, projection by projection."""
    outputs = []
    for scale, threshold, (_, weight, bias) in zip(layer.scales, layer.thresholds, layer.parts(), strict=True):
        keep = keep_mask(x, scale, (threshold * masked)[:, None])
        outputs.append(functional.linear(torch.where(keep, x, x.new_zeros(())), weight, bias))
    return torch.cat(outputs, dim=-1)
