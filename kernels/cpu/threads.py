"""Launches regions on a team of OpenMP threads, as many as find a core.

All threads of a team wait for the last one. Where another program takes a core, the thread without one holds up the
others for as long as the scheduler lets that program run, which is longer than ten decode steps of a small model. So a
team that lost too much time shrinks by a thread, and tries the larger size again later, less often with every try that
failed. Only the waits are measured: other programs cannot be counted in a container, and a step's work differs.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch

from ..backend import say_compiling
from .compile import REGIONS, compile_region, compile_regions, is_compiled, is_kept
from .intrinsics import SYMBOLS
from .layout import TeamField, aligned_empty

log = logging.getLogger(__name__)

# Together in the order of `SYMBOLS`.
_OPENMP = ("omp_get_thread_num", "omp_get_num_threads")
_LIBC = ("usleep", "clock_gettime")
_regions: dict[str, Any] = {}
_lock = threading.Lock()


def team_size() -> int:
    """Threads of the next launch: torch's own setting, or 1 where no OpenMP runtime was found."""
    return torch.get_num_threads() if _openmp() is not None else 1


def launch(name: str, parameters: np.ndarray, threads: int) -> None:
    """Run a region of ``compile.REGIONS`` on at most ``threads`` threads and wait for it.

    parameters: int64, by the region's fields; what they point to must stay alive.
    """
    address = prepare(name)
    runtime = _openmp()
    if runtime is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(parameters.ctypes.data)
    else:
        runtime.GOMP_parallel(address, parameters.ctypes.data, threads, 0)


def prepare_all(names: Sequence[str]) -> None:
    """Compile the regions that are not on disk, side by side, and say so."""
    missing = [name for name in names if name not in _regions and not is_compiled(REGIONS[name])]
    if missing and is_kept():  # else a warning has said that every process compiles them
        say_compiling("CPU", len(missing))
        with contextlib.suppress(OSError):  # reported below, by the region that is compiled again
            compile_regions([REGIONS[name] for name in missing])
    for name in names:
        prepare(name)


def prepare(name: str) -> int:
    """The address of a region, compiled if this is its first use."""
    region = _regions.get(name)
    if region is None:
        with _lock:
            _register()
            region = _regions.setdefault(name, compile_region(REGIONS[name]))
    return region.address


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses; None, with a warning, where none was found."""
    tried = []
    for library in _candidates():
        try:
            runtime = ctypes.CDLL(library)
            runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            runtime.GOMP_parallel.restype = None
            for function in _OPENMP:
                getattr(runtime, function)
        except (OSError, AttributeError) as error:
            tried.append(f"{library}: {error}")
            continue
        log.debug("OpenMP runtime: %s", library)
        return runtime
    log.warning("the CPU kernels run on one thread: found no OpenMP runtime (%s)", "; ".join(tried) or "nothing to try")
    return None


def _candidates() -> Iterator[str]:
    # The library in torch's folder is loaded already, so its threads are torch's own. Builds without one (conda,
    # distributions) load the system's, under one of these names; LLVM's and Intel's have GOMP's entry points too.
    yield from sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("*omp*") if ".so" in path.name)
    for name in ("gomp", "iomp5", "omp"):
        found = ctypes.util.find_library(name)
        if found is not None:
            yield found


@functools.cache
def _register() -> tuple[Any, ...]:
    """Give OpenMP's and libc's functions the names that compiled code uses; returns what must stay alive for them."""
    runtime = _openmp()
    if runtime is not None:
        libc = ctypes.CDLL(None)
        functions: tuple[Any, ...] = (runtime, libc)
        entries = [getattr(runtime, name) for name in _OPENMP] + [getattr(libc, name) for name in _LIBC]
        addresses = [ctypes.cast(entry, ctypes.c_void_p).value for entry in entries]
    else:  # one thread waits for nobody: it neither sleeps nor reads the clock
        functions = (numba.cfunc("int32()")(_zero), numba.cfunc("int32()")(_one))
        addresses = [functions[0].address, functions[1].address, functions[0].address, functions[0].address]
    for symbol, address in zip(SYMBOLS, addresses, strict=True):
        llvmlite.binding.add_symbol(symbol, address)
    return functions


def _zero():
    return 0


def _one():
    return 1


# A thread less costs at most 1 / size of the speed; half of that may be lost by waiting for longer.
_TOLERATED = 0.5
_DEBT_NS = 1_000_000  # shrink when this much more was lost: another program takes a core for milliseconds
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 10_000_000, 640_000_000  # between tries of a larger size
_CROWDED = 0.05  # share of a smaller team's time in which the calling thread had no core: no point in a try


class Team:
    """Launches one region after the other, each on as many threads as found a core lately."""

    def __init__(self) -> None:
        self.size = 0  # threads of the last launch
        self._most = 0
        self._words = aligned_empty((TeamField.SIZE,), torch.int64).zero_().numpy()
        self._pause = _FIRST_PAUSE_NS
        self._since = self._retry = 0
        self._debt = 0.0
        self._ran = self._lost = 0

    @property
    def address(self) -> int:
        """Of the barrier's `TeamField`."""
        return self._words.ctypes.data

    def launch(self, name: str, parameters: np.ndarray, most: int) -> None:
        """Run a region on at most ``most`` threads; see :func:`launch`."""
        if most != self._most:
            self.size = self._most = most
            self._since = self._retry = self._debt = 0
        now = time.perf_counter_ns() if most > 1 else 0
        if self.size < most and now >= self._retry:
            if self._lost > self._ran * _CROWDED:
                self._retry, self._ran, self._lost = now + self._pause, 0, 0
            else:
                self._resize(self.size + 1, now, _FIRST_PAUSE_NS)
        small = self.size < most
        worked = time.thread_time_ns() if small else 0
        self._words[TeamField.WAITED_NS] = 0
        launch(name, parameters, self.size)
        if most == 1:
            return
        end = time.perf_counter_ns()
        if small:
            self._ran += end - now
            self._lost += end - now - (time.thread_time_ns() - worked)
        if self.size > 1:
            self._learn(end, end - now, int(self._words[TeamField.WAITED_NS]))

    def _learn(self, now: int, took: int, waited: int) -> None:
        """After a launch that took ``took`` ns, ``waited`` of them for a core."""
        self._debt = max(0.0, self._debt + waited - took * _TOLERATED / self.size)
        if self._debt > _DEBT_NS:
            # A failed try doubles the pause, a size that had been good for long does not.
            failed = now - took - self._since < self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_NS) if failed else _FIRST_PAUSE_NS
            self._resize(self.size - 1, now, self._pause)

    def _resize(self, size: int, now: int, pause: int) -> None:
        self.size, self._since, self._retry, self._debt = size, now, now + pause, 0.0
        self._ran = self._lost = 0
