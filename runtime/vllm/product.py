"""The product of a masked layer as one torch operator, ``wisparse::masked_linear``, and its launches on a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.bundle import ProjectionMask
from wisparse.kernels.reference import keep_mask

from .settings import may_mask

if TYPE_CHECKING:  # Triton need not be installed
    from wisparse.kernels.gpu.products import Product

_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 16  # elements: rows of the weights can be read 16 bytes at a time


def channel_major(weight: Tensor) -> Tensor:
    """The same (N, K) matrix with each column contiguous, on a GPU; a CPU has no kernel that would gain from it."""
    if not weight.is_cuda or weight.stride(0) == 1:
        return weight
    n, k = weight.shape
    weight_t = torch.empty(k, -(-n // _ALIGNED) * _ALIGNED, dtype=weight.dtype, device=weight.device)
    weight_t[:, :n] = weight.t()
    return weight_t[:, :n].t()


def mask_tensors(masks: Sequence[ProjectionMask], channels: slice) -> tuple[Tensor, Tensor]:
    """Scales (projections, K) of these channels and thresholds (projections,), both float32."""
    # Explicitly: vLLM builds models with the weights' type as torch's default.
    scales = torch.stack([mask.channel_scale[channels] for mask in masks]).float()
    return scales, torch.tensor([mask.threshold for mask in masks], dtype=torch.float32)


@dataclass(frozen=True)
class Layer:
    """Projections that read the same input, and their masks: arguments of `masked_linear`."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor
    thresholds: Tensor
    widths: Sequence[int]

    def linear(self) -> Any:
        from wisparse.kernels.gpu.weights import FusedLinear, unquantized

        # Never "dense", so that a compiled graph holds for any bundle: a threshold of 0 drops nothing.
        weight = unquantized(self.weight.t(), tuple(self.widths))
        return FusedLinear(weight, self.bias, self.scales, self.thresholds, dense=False)

    def parts(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Each projection's weight (width, K) and bias (width,)."""
        widths = list(self.widths)
        biases: Sequence[Tensor | None] = [None] * len(widths) if self.bias is None else self.bias.split(widths)
        return zip(self.weight.split(widths), biases, strict=True)


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
    """Projections of x (..., K) that read the same input, over the channels that each row keeps: (..., N). weight: (N,
    K), on a GPU with contiguous columns, the projections' outputs side by side; bias: (N,); scales: (projections, K)
    float32; thresholds: (projections,) float32; masked: (rows or more,) float32, 1 for a row that is masked, else 0;
    widths: outputs of each projection; ready: x comes from `mask_ahead`."""
    finish_compiling()
    count = x.numel() // x.shape[-1]
    if count > len(masked):
        raise RuntimeError(f"expected a batch of at most {len(masked)} tokens, found {count}")
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and not may_mask(masked):
        return functional.linear(x, weight, bias)
    rows, masked = x.reshape(-1, x.shape[-1]).contiguous(), masked[:count]
    layer = Layer(weight, bias, scales, thresholds, widths)
    if not (x.is_cuda and x.dtype in _HALF):
        y = functional.linear(rows, weight, bias) if ready else in_torch(rows, layer, masked)
    else:
        product = product_of(layer, count, ready)
        if ready and not product.fused:
            y = functional.linear(rows, weight, bias)
        else:
            y = launched(product, rows, layer, masked)
    return y.reshape(*x.shape[:-1], weight.shape[0])


# Not by torch.library.custom_op, whose wrapper takes as long as a product's launch where no graph is replayed.
_LIBRARY = torch.library.Library("wisparse", "FRAGMENT")
_LIBRARY.define("masked_linear" + torch.library.infer_schema(masked_linear, mutates_args=()))
for _place in ("CUDA", "CPU"):
    _LIBRARY.impl("masked_linear", masked_linear, _place)
torch.library.register_fake(
    "wisparse::masked_linear", lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_LIBRARY
)


def mask_ahead(x: Tensor, scale: Tensor, threshold: Tensor, masked: Tensor) -> Tensor:
    """x (M, K) with dropped channels at zero; scale: (K,), threshold: (), masked: as for `masked_linear`."""
    limit = threshold * masked.narrow(0, 0, x.shape[0])
    return torch.where(keep_mask(x, scale, limit[:, None]), x, x.new_zeros(()))


def in_torch(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """The definition, projection by projection."""
    parts = zip(layer.scales, layer.thresholds, layer.parts(), strict=True)
    inputs = ((mask_ahead(x, scale, threshold, masked), part) for scale, threshold, part in parts)
    return torch.cat([functional.linear(kept, weight, bias) for kept, (weight, bias) in inputs], dim=-1)


def product_of(layer: Layer, rows: int, ready: bool) -> Product:
    from wisparse.kernels.gpu.products import choose_product

    return choose_product(layer.linear().shape, rows, "plugin", ready=ready)


def launched(product: Product, x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    from wisparse.kernels.gpu.launch import multiply

    return multiply(product, layer.linear(), x, _scratch(x.device, x.dtype), row_mask=masked)


@functools.cache
def _scratch(device: torch.device, dtype: torch.dtype) -> Any:
    """One for all layers: their launches follow one another on one stream."""
    from wisparse.kernels.gpu.launch import Scratch

    return Scratch(device, dtype)


_known: set[tuple[Any, ...]] = set()  # kinds of layers whose kernels are compiled, or being compiled
_running: list[Future[None]] = []


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # A few: they share the interpreter with the tracing of the model.
    return ThreadPoolExecutor(min(3, len(os.sched_getaffinity(0))), "wisparse-compile")


def reserve(layer: Layer, *, ahead: bool = False) -> None:
    """Before the first batch: allocate the scratch memory, whose address graphs capture, and compile the layer's kernels
    in threads, unless a layer like it came before. ``ahead``: its inputs are masked by `mask_ahead`."""
    weight = layer.weight
    if not (weight.is_cuda and weight.dtype in _HALF):
        return
    from wisparse.kernels.gpu.products import MASKED_ROWS, PLUGIN_ROWS

    for rows in range(1, PLUGIN_ROWS + 1):
        _scratch(weight.device, weight.dtype).reserve(product_of(layer, rows, ahead))
    kind = (weight.device, weight.dtype, weight.shape[1], tuple(layer.widths), layer.bias is None)
    if kind in _known:
        return
    _known.add(kind)
    stream = torch.cuda.current_stream(weight.device)

    def launch_on_zeros(product: Product) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            masked = torch.ones(product.rows, dtype=torch.float32, device=weight.device)
            launched(product, weight.new_zeros(product.rows, weight.shape[1]), layer, masked)

    # The products in graphs of vLLM's usual sizes, each for the fewest rows that take the same kernel.
    compiled = set()
    for rows in (1, 2, 4, 8, 16, 32, 64, MASKED_ROWS, MASKED_ROWS + 1):
        product = product_of(layer, rows, ahead)
        key = product.kernel, product.problem, product.tile, product.copies
        if key not in compiled and (product.masks or product.copies):
            compiled.add(key)
            _running.append(_threads().submit(launch_on_zeros, product))


def finish_compiling() -> None:
    """Wait for the compilations of `reserve`, before a graph is captured. Raises what a launch raised."""
    if not _running:
        return
    while _running:
        _running.pop().result()
    _threads().shutdown()
    _threads.cache_clear()
