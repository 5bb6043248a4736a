"""Runs compiled regions on torch's own OpenMP threads.

numba is used as a compiler only. Its threading layers are left alone: ``omp`` needs a system library that slim images
lack, keeps a second pool of spinning threads beside torch's and resets torch's thread count; ``workqueue`` aborts the
process when two threads use it. Torch always brings an OpenMP runtime, and ``GOMP_parallel`` is how every compiler
enters it: one launch costs about a microsecond. Inside a region threads wait at `barrier`, not at OpenMP's, which
spins for milliseconds while the partner that it waits for has no core.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch

from ..compiling import say_compiling
from .compile import compile_region, compile_regions, is_compiled, is_kept
from .intrinsics import SYMBOLS
from .regions import REGIONS

__all__ = ["launch", "prepare", "prepare_all", "team_size"]

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
