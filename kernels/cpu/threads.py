"""How many threads the next launch gets: as many as find a core, found out by what they waited for each other.

All threads of a team wait for the last one. Where another program takes a core, the thread that is left without one
holds up all others for as long as the scheduler lets the other program run, which is longer than ten whole decode
steps of a small model. So a team that lost too much time becomes smaller by a thread, and tries a larger size again
later: soon at first, and less often with every try that failed. Nothing but the waits is looked at: not how many
programs run (in a container one cannot see them), and not how fast a step was (its work differs).
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
from .layout import TeamField

log = logging.getLogger(__name__)

_regions: dict[str, Any] = {}
_lock = threading.Lock()


def team_size() -> int:
    """Threads of the next launch: torch's own setting, or 1 where no OpenMP runtime was found."""
    return torch.get_num_threads() if _runtime() is not None else 1


def launch(name: str, parameters: np.ndarray, threads: int) -> None:
    """Run a region on a team of ``threads`` threads and wait for it.

    Args:
        name: a key of ``regions.REGIONS``.
        parameters: int64, contiguous, laid out as the region's fields say. Every address in it must stay alive.
        threads: what the caller sized its scratch for; the team is never larger.
    """
    address = prepare(name)
    runtime = _runtime()
    if runtime is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(parameters.ctypes.data)
    else:
        runtime.GOMP_parallel(address, parameters.ctypes.data, threads, 0)


def prepare_all(names: Sequence[str]) -> None:
    """Compile regions, side by side, before several threads would each compile them; says so if they are not on
    disk."""
    missing = [name for name in names if name not in _regions and not is_compiled(REGIONS[name])]
    if missing and is_kept():  # else it is said already that every process compiles them
        say_compiling("CPU", len(missing))
        with contextlib.suppress(OSError):  # said below, by the region that is compiled again
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
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses, or None with the reason logged."""
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


# Together in the order of `SYMBOLS`.
_OPENMP = ("omp_get_thread_num", "omp_get_num_threads")
_C = ("usleep", "clock_gettime")


def _candidates() -> Iterator[str]:
    # The file inside torch's folder is loaded already, so this gives the very pool that torch computes on. Builds
    # without one (conda, distributions) load the system's, under one of these names; LLVM's and Intel's speak GOMP too.
    yield from sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("*omp*") if ".so" in path.name)
    for name in ("gomp", "iomp5", "omp"):
        found = ctypes.util.find_library(name)
        if found is not None:
            yield found


@functools.cache
def _register() -> tuple[Any, ...]:
    """Give OpenMP's and the C library's functions the names under which compiled code looks for them.

    Returns:
        What has to stay alive for them.
    """
    runtime = _runtime()
    if runtime is not None:
        libc = ctypes.CDLL(None)
        functions: tuple[Any, ...] = (runtime, libc)
        entries = [getattr(runtime, name) for name in _OPENMP] + [getattr(libc, name) for name in _C]
        addresses = [ctypes.cast(entry, ctypes.c_void_p).value for entry in entries]
    else:  # one thread waits for nobody, so it never sleeps nor looks at the clock
        functions = (numba.cfunc("int32()")(_zero), numba.cfunc("int32()")(_one))
        addresses = [functions[0].address, functions[1].address, functions[0].address, functions[0].address]
    for symbol, address in zip(SYMBOLS, addresses, strict=True):
        llvmlite.binding.add_symbol(symbol, address)
    return functions


def _zero():
    return 0


def _one():
    return 1


_CACHE_LINE = 64
# A thread less costs 1/size of the speed or less, so half of that is what waiting may cost for longer.
_TOLERATED = 0.5
_DEBT_NS = 1_000_000  # beyond it, at once: a program that takes a core takes it for a slice of some milliseconds
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 10_000_000, 640_000_000  # a failed try costs a slice
_CROWDED = 0.05  # of a smaller team's time, in which its calling thread had no core


class Team:
    """Launches one region after the other, each on as many threads as have found a core lately.

    Attributes:
        size: threads of the last launch.
    """

    def __init__(self) -> None:
        self.size = 0
        self._most = 0
        self._words = np.zeros(TeamField.SIZE + _CACHE_LINE // 8, dtype=np.int64)
        skip = -self._words.ctypes.data % _CACHE_LINE // 8
        self._words = self._words[skip : skip + TeamField.SIZE]
        self._pause = _FIRST_PAUSE_NS
        self._since = self._retry = 0
        self._debt = 0.0
        self._ran = self._lost = 0

    @property
    def address(self) -> int:
        """Of the words by which the team's threads meet: the region's TEAM."""
        return self._words.ctypes.data

    def launch(self, name: str, parameters: np.ndarray, most: int) -> None:
        """Run a region on at most ``most`` threads; see :func:`threads.launch`."""
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
        """All in nanoseconds: the time, how long a launch took, and how much of that was waiting for a core."""
        self._debt = max(0.0, self._debt + waited - took * _TOLERATED / self.size)
        if self._debt > _DEBT_NS:
            # A try, not a size that had been good for long; the wait itself may be longer than the pause.
            failed = now - took - self._since < self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_NS) if failed else _FIRST_PAUSE_NS
            self._resize(self.size - 1, now, self._pause)

    def _resize(self, size: int, now: int, pause: int) -> None:
        self.size, self._since, self._retry, self._debt = size, now, now + pause, 0.0
        self._ran = self._lost = 0
