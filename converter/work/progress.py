"""Progress of long stages: what runs, how far it is, how long it still takes.

Drawn on stderr with rich when that is a terminal, and silent when it is not: a log file full of redrawn bars helps
nobody. A stage measures its own time either way, so that a conversion can say where the minutes went. Nothing here
reaches a bundle: two runs of different verbosity write the same bytes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

__all__ = ["Progress", "Stage"]

_log = logging.getLogger("wisparse")


class Stage:
    """One running stage; made by `Progress.stage`."""

    def __init__(self, bars: Bars | None, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, steps: int = 1) -> None:
        """Another ``steps`` units of work are done."""
        if self._bars is not None:
            self._bars.advance(self._task, steps)

    def note(self, text: str) -> None:
        """A short figure behind the bar, e.g. the best loss so far; replaces the last one."""
        if self._bars is not None:
            self._bars.update(self._task, note=text)


class Progress:
    """Where stages report.

    Args:
        enabled: True draws bars, False draws nothing, None draws if stderr is a terminal.

    Attributes:
        seconds: stage title -> wall-clock seconds spent in it, in the order of the first start; see `take_seconds`.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._console = Console(stderr=True)
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bars: Bars | None = None

    def take_seconds(self) -> dict[str, float]:
        """`seconds` so far; from now on they count anew."""
        taken, self.seconds = self.seconds, {}
        return taken

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Stage]:
        """A stage of ``total`` units (None: not known yet). Stages may nest; each has its own line."""
        began = time.perf_counter()
        outermost = self._enabled and self._bars is None
        if outermost:
            self._bars = Bars(
                TextColumn("{task.description:<24}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._bars.start()
        bars = self._bars
        task = bars.add_task(title, total=total, note="") if bars is not None else None
        try:
            yield Stage(bars, task)
        finally:
            spent = time.perf_counter() - began
            self.seconds[title] = self.seconds.get(title, 0.0) + spent
            _log.info("%s: %.1f s", title, spent)
            if outermost and bars is not None:
                bars.stop()
                self._bars = None
