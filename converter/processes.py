"""Progress reports, and the collectives of a conversion by several processes, one per GPU."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from rich import progress as rich
from rich.console import Console
from torch import Tensor

from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.machine import torchrun_place

_log = logging.getLogger("wisparse")


@dataclass(frozen=True)
class Stage:
    bars: rich.Progress
    task: rich.TaskID

    def advance(self, steps: int = 1) -> None:
        self.bars.advance(self.task, steps)

    def note(self, text: str) -> None:
        """Show a short text behind the bar, such as the best loss so far, in place of the one before."""
        self.bars.update(self.task, note=text)


# Seconds between two progress lines, where stderr is not a terminal.
_LINE_S = 10.0
# The parts of a conversion, by the titles of their stages; a conversion may skip some.
_PARTS = (
    ("Checking",),
    ("Fetching weights", "Reading the weights", "Loading the model"),
    ("Writing calibration text",),
    ("Principal directions", "Rotating", "Equalising", "Quantising"),
    ("Quantiles", "Sensitivities", "Predicted damage", "Block search", "Refinement", "Thresholds", "Trying"),
    ("Measuring", "Block sensitivity"),
    ("Writing the bundle", "Compiling CPU kernels", "Uploading"),
)


class Progress:
    """Progress of stages: bars if ``enabled``, nothing if not; None: bars on a terminal, else a line on stderr at the
    start of a stage and every ten seconds. ``seconds``: wall-clock time by title."""

    def __init__(self, enabled: bool | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._lines = enabled is None and not self._enabled
        self._began = time.monotonic()
        self._bars: rich.Progress | None = None
        self._running: list[rich.TaskID] = []
        self._part = 0  # of a conversion, from 1; 0: of another command

    def _numbered(self, title: str) -> str:
        """The title behind the number of its part, which never falls; a part of other commands has none."""
        found = next((number for number, titles in enumerate(_PARTS, 1) if title in titles), 0)
        if self._part or found == 1:
            self._part = max(self._part, found)
        return f"[{self._part}/{len(_PARTS)}] {title}" if self._part else title

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Stage]:
        """A stage of ``total`` units (None: unknown). Stages may nest; each has a bar of its own."""
        began = time.perf_counter()
        bars, outermost = self._bars, self._bars is None
        if bars is None:
            bars = self._bars = rich.Progress(
                # Fits 80 columns with the longest title, and beside "Refinement" with a note of 19 characters.
                rich.TextColumn("{task.description:<18}"),
                rich.BarColumn(bar_width=4),
                rich.MofNCompleteColumn(),
                rich.TextColumn("elapsed"),
                rich.TimeElapsedColumn(),
                rich.TextColumn("left"),
                rich.TimeRemainingColumn(),
                rich.TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
                disable=not self._enabled,
            )
            bars.start()
        ended = threading.Event()
        self._running.append(bars.add_task(self._numbered(title), total=total, note=""))
        try:
            if self._lines:
                self._print_line()
                if outermost:
                    threading.Thread(target=self._print_lines, args=(ended,), daemon=True).start()
            yield Stage(bars, self._running[-1])
        finally:
            ended.set()
            self._running.pop()
            spent = time.perf_counter() - began
            self.seconds[title] = self.seconds.get(title, 0.0) + spent
            _log.info("%s: %.1f s", title, spent)
            if outermost:
                if self._enabled:  # stop() prints an empty line even if nothing was shown
                    bars.stop()
                self._bars = None

    def expect(self, estimate: Callable[[], float | None]) -> None:
        """Say how long all stages take together, in seconds; None: unknown. ``estimate`` runs only if progress is shown."""
        if (self._enabled or self._lines) and (seconds := estimate()) is not None:
            shown = f"{seconds / 60:.2g} minutes" if seconds < 6000 else f"{seconds / 3600:.2g} hours"
            elapsed = time.monotonic() - self._began
            print(f"{elapsed:4.0f} s elapsed  About {shown} in all (half to twice that)", file=sys.stderr, flush=True)

    def _print_lines(self, ended: threading.Event) -> None:
        while not ended.wait(_LINE_S):
            self._print_line()

    def _print_line(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # stderr is closed, or the stage ended meanwhile
            assert self._bars is not None
            task = self._bars.tasks[self._running[-1]]
            done = "" if task.total is None else f": {task.completed:.0f} of {task.total:.0f}"
            note = f", {task.fields['note']}" if task.fields["note"] else ""
            seconds, remaining = time.monotonic() - self._began, task.time_remaining
            left = f", about {remaining:.0f} s left in it" if remaining else ""
            print(f"{seconds:4.0f} s elapsed  {task.description}{done}{left}{note}", file=sys.stderr, flush=True)


SILENT = Progress(enabled=False)
T = TypeVar("T")

# Of a collective: the other ranks wait in one while rank 0 measures or writes the bundle.
_TIMEOUT = timedelta(hours=2)
_FAILED = "wisparse/failed"  # the store's key for the first failure: its rank and exit code


class Processes:
    """The processes of a conversion and this one's rank; made by `joined`, or `ALONE`."""

    def __init__(self, rank: int = 0, world_size: int = 1, object_group: Any = None) -> None:
        self.rank, self.world_size, self.is_main = rank, world_size, rank == 0
        self._object_group = object_group  # the process group for Python objects

    def add(self, counts: Tensor) -> Tensor:
        """Sum an integer tensor over all processes, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(counts)
        return counts

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value, group=self._object_group)
        return values

    def broadcast(self, value: T) -> T:
        """The value of rank 0."""
        values = [value]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(values, src=0, group=self._object_group)
        return values[0]

    def in_order(self, values: Sequence[T]) -> list[T]:
        """Gather the results of items that were dealt out round robin, in the order of the items."""
        by_rank = self.gather(list(values))
        return [by_rank[i % self.world_size][i // self.world_size] for i in range(sum(map(len, by_rank)))]

    def spread(self, items: Sequence[Any], compute: Callable[[Any], T]) -> list[T]:
        """Map ``compute`` over the items, round robin over the processes; results in the order of the items."""
        return self.in_order([compute(item) for item in items[self.rank :: self.world_size]])

    def spread_tensors(
        self, items: Sequence[Any], compute: Callable[[Any], Tensor], length: int, device: torch.device
    ) -> list[Tensor]:
        """`spread` for float64 vectors (length,), which are gathered on the devices, without a copy to the CPU."""
        if self.world_size == 1:
            return [compute(item) for item in items]
        vectors: list[Tensor] = []
        for first in range(0, len(items), self.world_size):
            vector = torch.zeros(length, dtype=torch.float64, device=device)
            if first + self.rank < len(items):
                vector = compute(items[first + self.rank])
            gathered = [torch.empty_like(vector) for _ in range(self.world_size)]
            torch.distributed.all_gather(gathered, vector)
            vectors += gathered[: len(items) - first]
        return vectors


ALONE = Processes()


@contextmanager
def joined(device: str) -> Iterator[tuple[Processes, str]]:
    """Join the processes that torchrun started; yields them, and this process's device. Without torchrun: `ALONE`. The
    first error in any process is raised there and ends all; the other processes exit silently with its exit code."""
    from torch import distributed

    place, gpus = torchrun_place(), torch.cuda.device_count()
    rank, world_size = place.index, place.size
    if world_size == 1:
        yield ALONE, device
        return
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if place.local_size != world_size:
        raise UsageError("processes of several machines cannot convert together; start all of them on one")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: under torchrun every process takes a GPU of its own; leave it at auto")
    if device == "cuda" and world_size > gpus:
        advice = f"start as many as there are GPUs: torchrun --nproc-per-node {gpus} …"
        raise UsageError(f"{world_size} processes, but {gpus} GPU(s); {advice}")
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(place.local)
        device = f"cuda:{place.local}"
    store, _, _ = next(distributed.rendezvous("env://", timeout=_TIMEOUT))
    backend, store = "nccl" if cuda else "gloo", distributed.PrefixStore("all", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    processes = Processes(rank, world_size, distributed.new_group(backend="gloo", timeout=_TIMEOUT) if cuda else None)
    if cuda:
        processes.add(torch.ones(1, dtype=torch.int64, device=device))  # NCCL connects at its first collective
    try:
        yield processes, device
    except BaseException as error:
        failure = f"{rank} {error.exit_code if isinstance(error, WisparseError) else 1}"
        try:
            first = store.compare_set(_FAILED, "", failure).decode()
        except RuntimeError:  # the process that hosts the store has ended
            first = "0 1"
        if first == failure or isinstance(error, KeyboardInterrupt):
            raise
        # Another process failed first, and this error follows from the connection that it closed.
        sys.stderr.flush()
        os._exit(int(first.split()[1]))
    processes.gather(None)  # rank 0 may still be writing the bundle
    distributed.destroy_process_group()
