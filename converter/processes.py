"""Progress, and several processes at one conversion, one per GPU."""

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
        """A short figure behind the bar, e.g. the best loss so far; replaces the last one."""
        self.bars.update(self.task, note=text)


# Between two lines of a stage, where stderr is no terminal.
_LINE_S = 10.0


class Progress:
    """Where stages report: bars if ``enabled``, nothing if not; None: bars on a terminal, else a line on stderr at the
    start of a stage and every ten seconds. ``seconds`` is wall-clock time by title."""

    def __init__(self, enabled: bool | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._lines = enabled is None and not self._enabled
        self._began = time.monotonic()
        self._bars: rich.Progress | None = None
        self._running: list[rich.TaskID] = []

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Stage]:
        """A stage of ``total`` units (None: not known yet). Stages may nest; each has its own line."""
        began = time.perf_counter()
        bars, outermost = self._bars, self._bars is None
        if bars is None:
            bars = self._bars = rich.Progress(
                rich.TextColumn("{task.description:<24}"),
                rich.BarColumn(bar_width=24),
                rich.MofNCompleteColumn(),
                rich.TaskProgressColumn(),
                rich.TimeElapsedColumn(),
                rich.TextColumn("left"),
                rich.TimeRemainingColumn(),
                rich.TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
                disable=not self._enabled,
            )
            bars.start()
        ended = threading.Event()
        self._running.append(bars.add_task(title, total=total, note=""))
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
                if self._enabled:  # rich prints an empty line even if it has shown nothing
                    bars.stop()
                self._bars = None

    def _print_lines(self, ended: threading.Event) -> None:
        while not ended.wait(_LINE_S):
            self._print_line()

    def _print_line(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # stderr is closed, or the stage has just ended
            assert self._bars is not None
            task = self._bars.tasks[self._running[-1]]
            done = "" if task.total is None else f": {task.completed:.0f} of {task.total:.0f}"
            note = f", {task.fields['note']}" if task.fields["note"] else ""
            seconds = time.monotonic() - self._began
            print(f"{seconds:4.0f} s  {task.description}{done}{note}", file=sys.stderr, flush=True)


SILENT = Progress(enabled=False)
T = TypeVar("T")

# The others wait while the first one measures or writes; it ends one that hangs: torchrun itself sees one that failed.
_TIMEOUT = timedelta(hours=2)
_FAILED = "wisparse/failed"


class Processes:
    """Process ``index`` of ``size`` that work together; made by `joined`, or `ALONE`. The first one leads."""

    def __init__(self, index: int = 0, size: int = 1, objects: Any = None) -> None:
        self.index, self.size, self.leads = index, size, index == 0
        self._objects = objects  # the process group for Python objects

    def add(self, counts: Tensor) -> Tensor:
        """The sum of an integer tensor over all processes, in its place."""
        if self.size > 1:
            torch.distributed.all_reduce(counts)
        return counts

    def gather(self, value: T) -> list[T]:
        """What every process gives, in their order; everybody gets all of it."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(found, value, group=self._objects)
        return found

    def broadcast(self, value: T) -> T:
        """What the first process gives."""
        box = [value]
        if self.size > 1:
            torch.distributed.broadcast_object_list(box, src=0, group=self._objects)
        return box[0]

    def in_order(self, values: Sequence[T]) -> list[T]:
        """What every process found for its own items (every ``size``-th one), in the order of all items."""
        found = self.gather(list(values))
        return [found[i % self.size][i // self.size] for i in range(sum(len(one) for one in found))]

    def spread(self, items: Sequence[Any], compute: Callable[[Any], T]) -> list[T]:
        """``compute`` of every item, each by one process; in the order of the items."""
        return self.in_order([compute(item) for item in items[self.index :: self.size]])

    def spread_tensors(
        self, items: Sequence[Any], compute: Callable[[Any], Tensor], length: int, device: torch.device
    ) -> list[Tensor]:
        """As `spread`, of float64 vectors of one length: exchanged between devices, without a copy on the CPU."""
        if self.size == 1:
            return [compute(item) for item in items]
        found: list[Tensor] = []
        for first in range(0, len(items), self.size):
            mine = items[first + self.index] if first + self.index < len(items) else None
            vector = torch.zeros(length, dtype=torch.float64, device=device) if mine is None else compute(mine)
            parts = [torch.empty_like(vector) for _ in range(self.size)]
            torch.distributed.all_gather(parts, vector)
            found += parts[: len(items) - first]
        return found


ALONE = Processes()


@contextmanager
def joined(device: str) -> Iterator[tuple[Processes, str]]:
    """Join the processes that torchrun started; yields them, and the device of this one. Without torchrun: `ALONE`. An
    error in any process ends all: it is raised where it happened; the others leave silently with its exit code."""
    from torch import distributed

    place, gpus = torchrun_place(), torch.cuda.device_count()
    index, size = place.index, place.size
    if size == 1:
        yield ALONE, device
        return
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if place.local_size != size:
        raise UsageError("processes of several machines cannot convert together; start all of them on one")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: under torchrun every process takes a GPU of its own; leave it at auto")
    if device == "cuda" and size > gpus:
        advice = f"start as many as there are GPUs: torchrun --nproc-per-node {gpus} …"
        raise UsageError(f"{size} processes, but {gpus} GPU(s); {advice}")
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(place.local)
        device = f"cuda:{place.local}"
    store, _, _ = next(distributed.rendezvous("env://", timeout=_TIMEOUT))
    distributed.init_process_group(
        "nccl" if cuda else "gloo", store=distributed.PrefixStore("all", store), rank=index, world_size=size,
        timeout=_TIMEOUT,
    )  # fmt: skip
    processes = Processes(index, size, distributed.new_group(backend="gloo", timeout=_TIMEOUT) if cuda else None)
    if cuda:
        processes.add(torch.ones(1, dtype=torch.int64, device=device))  # connects, before anything is timed
    try:
        yield processes, device
    except BaseException as error:
        mine = f"{index} {error.exit_code if isinstance(error, WisparseError) else 1}"
        try:
            first = store.compare_set(_FAILED, "", mine).decode()
        except RuntimeError:  # the store went with the process that failed
            first = "0 1"
        if first == mine or isinstance(error, KeyboardInterrupt):
            raise
        # Somebody else's failure came first, and broke the connection this one was waiting at.
        sys.stderr.flush()
        os._exit(int(first.split()[1]))
    processes.gather(None)  # the first one is still writing
    distributed.destroy_process_group()
