"""A fixed series of launches as one CUDA graph, its time, and tokens on their way to the host.

On the CPU, where Triton's interpreter runs the kernels, there are neither graphs nor pinned memory: launches then run
one by one, and everything around them is the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["TokenReadback", "capture", "elapsed_us", "time_launches"]

_REPETITIONS = 20


def capture(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What repeats the launches that ``launch`` makes; asynchronous.

    ``launch`` runs once before it is captured, which compiles its kernels, so it must do no harm then.
    """
    if device.type != "cuda":
        return launch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def time_launches(launch: Callable[[], None], count: int) -> float:
    """Microseconds of one of ``count`` launches that ``launch`` makes, replayed as a CUDA graph; the median."""
    replay = capture(launch, torch.device("cuda"))
    return statistics.median(elapsed_us(replay) for _ in range(_REPETITIONS)) / count


def elapsed_us(launch: Callable[[], None]) -> float:
    """Microseconds that the GPU takes for what ``launch`` gives it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


class TokenReadback:
    """Host memory that token ids are copied to beside what the device does next."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._ids = torch.empty(size, dtype=torch.int64, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def send(self, ids: Tensor) -> None:
        """Start to copy ``ids`` (n,), which must stay as they are until they are read."""
        if self._stream is None:
            self._ids[: len(ids)].copy_(ids)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._ids[: len(ids)].copy_(ids, non_blocking=True)

    def read(self, count: int) -> Tensor:
        """Wait for what was sent: the first ``count`` ids."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._ids[:count].clone()
