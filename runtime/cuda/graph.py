"""Streams and graphs of a CUDA device: capture and timing, token ids to the host, tensors from files to the device."""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from wisparse.formats.checkpoint import Checkpoint

_REPETITIONS = 20


def capture(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What repeats the launches that ``launch`` makes; asynchronous.

    ``launch`` runs once before it is captured, which compiles its kernels, so it must do no harm then. The tensors that
    it uses, but does not make, must be kept by the caller as long as the result: a graph keeps addresses.
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


_PART_BYTES = 8 << 20
_MOST_THREADS = 12


class _Stage:
    """Memory of one part, and the copy that last read from it."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def fill(self, checkpoint: Checkpoint, name: str, offset: int, count: int) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        checkpoint.read_part(name, offset, self._memory[:count])

    def copy_to(self, target: Tensor) -> None:
        """Start to copy the part."""
        target.copy_(self._memory[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@contextmanager
def staged_reads(
    checkpoint: Checkpoint,
    names: Iterable[str],
    device: torch.device,
    *,
    threads: int | None = None,
    part_bytes: int = _PART_BYTES,
) -> Iterator[Callable[[str], Tensor]]:
    """Gives ``read(name)``, which returns a tensor on ``device`` in its stored dtype; ordered on the current stream.

    ``names`` must be read in their order, each once. A tensor may be used before the host has finished copying it, as
    any work queued on the stream; it has been checked.
    """
    threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
    parts = (
        (name, offset, min(part_bytes, checkpoint.tensors[name].nbytes - offset))
        for name in names
        for offset in range(0, checkpoint.tensors[name].nbytes, part_bytes)
    )
    pending: deque[tuple[tuple[str, int, int], _Stage, Future[None]]] = deque()
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="staging") as pool:

        def submit(stage: _Stage) -> None:
            part = next(parts, None)
            if part is not None:
                pending.append((part, stage, pool.submit(stage.fill, checkpoint, *part)))

        def read(name: str) -> Tensor:
            info = checkpoint.tensors[name]
            tensor = torch.empty(info.shape, dtype=info.dtype, device=device)
            flat = tensor.view(-1).view(torch.uint8)
            for _ in range(0, info.nbytes, part_bytes):
                (owner, offset, count), stage, future = pending.popleft()
                if owner != name:
                    raise ValueError(f"expected {owner} to be read next, found {name}")
                future.result()
                stage.copy_to(flat[offset : offset + count])
                submit(stage)
            return tensor

        try:
            for _ in range(2 * threads):  # half of them being read, half on their way to the device
                submit(_Stage(part_bytes, device))
            yield read
        finally:
            for _, _, future in pending:
                future.cancel()
