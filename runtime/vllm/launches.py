"""How a GPU computes a masked layer's product, for each range of rows, and which tiles the launches take."""

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

from wisparse.formats.bundle import ProjectionMask

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
    """Scales (projections, K) of these channels and thresholds (projections,), both float32.

    Explicitly: vLLM builds models with the weights' type as torch's default.
    """
    scales = torch.stack([mask.channel_scale[channels] for mask in masks]).float()
    thresholds = torch.tensor([mask.threshold for mask in masks], dtype=torch.float32)
    return scales, thresholds


@dataclass(frozen=True)
class Layer:
    """Projections that read the same input, and their masks: arguments of `masked_linear`."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor
    thresholds: Tensor
    widths: Sequence[int]

    def linear(self) -> Any:
        """For our GPU kernels."""
        from wisparse.kernels.gpu.weights import FusedLinear, unquantized

        # Never "dense", so that a compiled graph holds for any bundle: a threshold of 0 drops nothing.
        weight = unquantized(self.weight.t(), tuple(self.widths))
        return FusedLinear(weight, self.bias, self.scales, self.thresholds, dense=False)

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Each projection's outputs, weight (width, K) and bias (width,)."""
        first = 0
        for width in self.widths:
            part = slice(first, first + width)
            yield part, self.weight[part], None if self.bias is None else self.bias[part]
            first += width


# Up to so many rows:
SKIPPED_ROWS = 2  # the sparse kernels leave channels unread; for more rows they read all weights
SPARSE_ROWS = 8  # the sparse kernels are faster than masked copies: the rows fit in shared memory beside the weights
MASKED_ROWS = 128  # one tile holds all rows of the product that masks in its own loop
BATCHED_ROWS = 512  # projections of unlike widths share one batched product: narrow ones alone do not fill a GPU


def masked_inputs(x: Tensor, layer: Layer, masked: Tensor) -> Tensor:
    """All masks in one launch, then dense products."""
    from wisparse.kernels.gpu.masked_gemm import mask_rows
    from wisparse.kernels.gpu.plan import gpu_of

    piece = math.gcd(*layer.widths)
    copies = [width // piece for width in layer.widths]
    batched = len(set(copies)) > 1 and len(x) <= BATCHED_ROWS
    inputs = mask_rows(
        x, layer.scales, layer.thresholds, masked,
        copies=copies if batched else None, pdl=gpu_of(x.device).arch >= 90,
    )  # fmt: skip
    return products(inputs, layer)


def products(inputs: Tensor, layer: Layer) -> Tensor:
    """y (M, N) of inputs (projections, M, K), one product each; or of (pieces, M, K), one batched product.

    Pieces: a copy of a projection's input for each of the equal pieces that all projections divide into.
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


def reserve_scratch(layer: Layer) -> None:
    """Allocate what a layer's sparse launches share, before a graph captures its address."""
    from wisparse.kernels.gpu.plan import plan

    for rows in range(1, SPARSE_ROWS + 1):
        _scratch(layer.weight.device, layer.weight.dtype).reserve(plan(layer.linear().shape, rows))


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


_THREADS = 3
_known: set[tuple[Any, ...]] = set()  # kinds of layers whose kernels are compiled, or being compiled
_running: list[Future[None]] = []


def start_compiling(layer: Layer, *, ahead: bool = False) -> None:
    """Compile the kernels of a layer's launches, if none like it came before, by launching each once on zeros.

    ``ahead``: as for `reserve`.
    """
    weight = layer.weight
    kind = (weight.device, weight.dtype, weight.shape[1], tuple(layer.widths), layer.bias is None)
    if kind in _known:
        return
    _known.add(kind)
    stream = torch.cuda.current_stream(weight.device)
    for run, rows in _ways(layer, ahead):
        _running.append(_threads().submit(_launch_once, stream, run, layer, rows))


def finish_compiling() -> None:
    """Wait for `start_compiling`, before a graph is captured. Raises what a launch raised."""
    if not _running:
        return
    while _running:
        _running.pop().result()
    _threads().shutdown()
    _threads.cache_clear()


def _ways(layer: Layer, ahead: bool) -> Iterator[tuple[Callable[[Tensor, Layer, Tensor], Tensor], int]]:
    """The launches in graphs of vLLM's usual sizes, each for the fewest rows that take the same kernel."""
    from wisparse.kernels.gpu.masked_gemm import rows_of_tile

    rows = 1
    tiles = set()
    while rows <= (SKIPPED_ROWS if ahead else MASKED_ROWS):
        tile = mask_tile(layer.weight.device, layer.weight.shape[1], layer.weight.shape[0], rows)
        if tile is not None:
            kernel = tile, rows_of_tile(rows)
            if kernel not in tiles:
                yield functools.partial(fused_mask, tile=tile), rows
            tiles.add(kernel)
        elif rows <= SPARSE_ROWS:
            yield sparse, rows
        rows *= 2
    if not ahead:
        yield masked_inputs, SPARSE_ROWS + 1


def _launch_once(stream: Any, run: Callable[[Tensor, Layer, Tensor], Tensor], layer: Layer, rows: int) -> None:
    weight = layer.weight
    with torch.inference_mode(), torch.cuda.stream(stream):
        masked = torch.ones(rows, dtype=torch.float32, device=weight.device)
        run(weight.new_zeros(rows, weight.shape[1]), layer, masked)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # A few: they share the interpreter with the tracing of the model.
    return ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), "wisparse-compile")
