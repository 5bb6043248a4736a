"""The product of a masked layer as one torch operator, ``wisparse::masked_linear``, and its launches on a GPU."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.bundle import ProjectionMask
from wisparse.kernels.reference import keep_mask

from .settings import may_mask

_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 16  # elements: rows of the weights can be read 16 bytes at a time
# Up to so many rows:
SKIPPED_ROWS = 2  # the sparse kernels leave channels unread; for more rows they read all weights
SPARSE_ROWS = 8  # the sparse kernels are faster than masked copies: the rows fit in shared memory beside the weights
MASKED_ROWS = 128  # one tile holds all rows of the product that masks in its own loop
BATCHED_ROWS = 512  # projections of unlike widths share one batched product: narrow ones alone do not fill a GPU


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


def masked_inputs(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """All masks in one launch, then dense products."""
    from wisparse.kernels.gpu.masked_gemm import mask_rows
    from wisparse.kernels.gpu.plan import gpu_of

    piece = math.gcd(*layer.widths)
    copies = [width // piece for width in layer.widths]
    batched = len(set(copies)) > 1 and len(x) <= BATCHED_ROWS
    inputs = mask_rows(
        x, layer.scales, layer.thresholds, masked, copies=copies if batched else None, pdl=gpu_of(x.device).arch >= 90
    )
    return products(inputs, layer)


def products(inputs: Tensor, layer: Layer) -> Tensor:
    """y (M, N) of inputs (projections, M, K), one product each; or of (pieces, M, K), one batched product. Pieces: a
    copy of a projection's input for each of the equal pieces that all projections divide into."""
    pieces, rows, _ = inputs.shape
    out = inputs.new_empty(rows, layer.weight.shape[0])
    if pieces == len(layer.widths):
        for kept, part, (weight, bias) in zip(inputs, out.split(list(layer.widths), 1), layer.parts(), strict=True):
            if bias is None:
                torch.mm(kept, weight.t(), out=part)
            else:
                torch.addmm(bias, kept, weight.t(), out=part)
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
    """One product that masks x in its own loop."""
    from wisparse.kernels.gpu.masked_gemm import mask_gemm

    return mask_gemm(x, layer.linear(), masked, tile)


def sparse(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """One launch that reads the kept channels of up to SKIPPED_ROWS rows, or all channels once for up to SPARSE_ROWS."""
    from wisparse.kernels.gpu.common import Input, Output
    from wisparse.kernels.gpu.plan import launch_linear, plan

    linear = layer.linear()
    out = x.new_empty(len(x), layer.weight.shape[0])
    given = Input(x, row_mask=masked)
    launch_linear(linear, given, Output(out), _scratch(x.device, x.dtype), plan(linear.shape, len(x)))
    return out


@functools.cache
def mask_tile(device: torch.device, in_features: int, out_features: int, rows: int) -> Any:
    """The tile of `fused_mask`, None where none was measured."""
    if not SKIPPED_ROWS < rows <= MASKED_ROWS:
        return None
    from wisparse.kernels.gpu.plan import gpu_of, mask_gemm_tile

    return mask_gemm_tile(gpu_of(device), in_features, out_features, rows)


@functools.cache
def _scratch(device: torch.device, dtype: torch.dtype) -> Any:
    """One for all layers: their launches follow one another on one stream."""
    from wisparse.kernels.gpu.plan import Scratch

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
    from wisparse.kernels.gpu.masked_gemm import rows_of_tile
    from wisparse.kernels.gpu.plan import plan

    for rows in range(1, SPARSE_ROWS + 1):
        _scratch(weight.device, weight.dtype).reserve(plan(layer.linear().shape, rows))
    kind = (weight.device, weight.dtype, weight.shape[1], tuple(layer.widths), layer.bias is None)
    if kind in _known:
        return
    _known.add(kind)
    stream = torch.cuda.current_stream(weight.device)

    def launch_on_zeros(product: Callable[[Tensor, Layer, Tensor], Tensor], rows: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            masked = torch.ones(rows, dtype=torch.float32, device=weight.device)
            product(weight.new_zeros(rows, weight.shape[1]), layer, masked)

    # The products in graphs of vLLM's usual sizes, each for the fewest rows that take the same kernel.
    rows, compiled = 1, set()
    while rows <= (SKIPPED_ROWS if ahead else MASKED_ROWS):
        tile = mask_tile(weight.device, weight.shape[1], weight.shape[0], rows)
        if tile is None and rows <= SPARSE_ROWS:
            _running.append(_threads().submit(launch_on_zeros, sparse, rows))
        elif tile is not None and (tile, rows_of_tile(rows)) not in compiled:
            compiled.add((tile, rows_of_tile(rows)))
            _running.append(_threads().submit(launch_on_zeros, functools.partial(fused_mask, tile=tile), rows))
        rows *= 2
    if not ahead:
        _running.append(_threads().submit(launch_on_zeros, masked_inputs, SPARSE_ROWS + 1))


def finish_compiling() -> None:
    """Wait for the compilations of `reserve`, before a graph is captured. Raises what a launch raised."""
    if not _running:
        return
    while _running:
        _running.pop().result()
    _threads().shutdown()
    _threads.cache_clear()
