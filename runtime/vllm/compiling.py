"""A layer's kernels are compiled in threads beside what vLLM does from its loaded weights to its first batch, instead
of one by one while it captures graphs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .launches import MASKED_ROWS, SKIPPED_ROWS, SPARSE_ROWS, fused_mask, mask_tile, masked_inputs, sparse
from .layer import Layer

__all__ = ["finish_compiling", "start_compiling"]

_THREADS = 3
# Kinds of layers whose kernels are compiled, and those that are being compiled.
_known: set[tuple[Any, ...]] = set()
_running: list[Future[None]] = []


def start_compiling(layer: Layer, *, ahead: bool = False) -> None:
    """Have the kernels of a layer's launches compiled, if none like it came before. Each is launched once, on the
    current stream, with rows of zeros; ``ahead``: as for `reserve`."""
    weight = layer.weight
    kind = (weight.device, weight.dtype, weight.shape[1], tuple(layer.widths), layer.bias is None)
    if kind in _known:
        return
    _known.add(kind)
    stream = torch.cuda.current_stream(weight.device)
    for run, rows in _ways(layer, ahead):
        _running.append(_threads().submit(_launch_once, stream, run, layer, rows))


def finish_compiling() -> None:
    """Wait for them: a graph that is being captured is no place for their launches. Raises what a launch raised."""
    if not _running:
        return
    while _running:
        _running.pop().result()
    _threads().shutdown()
    _threads.cache_clear()


def _ways(layer: Layer, ahead: bool) -> Iterator[tuple[Callable[[Tensor, Layer, Tensor], Tensor], int]]:
    """Launches that graphs of vLLM's usual sizes hold, each for the fewest rows that take the same kernel."""
    from wisparse.kernels.gpu.mask_gemm import rows_of_tile

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
    # A few: what they do in Python takes turns with the tracing of the model, which a start waits for.
    return ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), "wisparse-compile")
