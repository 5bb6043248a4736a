"""Compiles the regions of ``cpu_kernels`` and runs them on torch's own OpenMP threads.

numba is used as a compiler only. Its threading layers are left alone: ``omp`` needs a system library that slim images
lack, keeps a second pool of spinning threads beside torch's and resets torch's thread count; ``workqueue`` aborts the
process when two threads use it. Torch always brings an OpenMP runtime, and ``GOMP_parallel`` is how every compiler enters
it: one launch costs about a microsecond, a barrier less.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from numba import types

from . import cpu_kernels

__all__ = ["launch", "prepare", "team_size"]

log = logging.getLogger(__name__)

_SIGNATURE = types.void(types.CPointer(types.int64))


def team_size() -> int:
    """Threads of the next launch: torch's own setting, or 1 where no OpenMP runtime was found."""
    return torch.get_num_threads() if _runtime() is not None else 1


def launch(name: str, parameters: np.ndarray, threads: int) -> None:
    """Run a region on a team of ``threads`` threads and wait for it.

    Args:
        name: a key of ``cpu_kernels.REGIONS``.
        parameters: int64, contiguous, laid out as the region's fields say. Every address in it must stay alive.
        threads: the caller sized its scratch for this many; the team is never larger.
    """
    address = prepare(name)
    runtime = _runtime()
    if runtime is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(parameters.ctypes.data)
    else:
        runtime.GOMP_parallel(address, parameters.ctypes.data, threads, 0)


@functools.cache
def prepare(name: str) -> int:
    """The address of a compiled region; compiles it on first use (seconds) or takes it from numba's disk cache.

    The cache lies beside the source or, if that folder cannot be written, in the user's cache folder; the environment
    variable NUMBA_CACHE_DIR names another. Without any, the code lives as long as the process, and a warning says so.
    """
    _register()
    return _compile(cpu_kernels.REGIONS[name]).address


def _compile(region: Callable[[Any], None]) -> Any:
    try:
        return numba.cfunc(_SIGNATURE, cache=True)(region)
    except (OSError, RuntimeError) as error:  # numba's "no locator available", a full disk, a foreign cache file
        log.warning(
            "the CPU kernels cannot be cached on disk and will be compiled again by every process, which takes seconds "
            "(%s); set NUMBA_CACHE_DIR to a folder that can be written",
            error,
        )
        return numba.cfunc(_SIGNATURE)(region)


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses, or None with the reason logged."""
    tried = []
    for library in _candidates():
        try:
            runtime = ctypes.CDLL(library)
            runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            runtime.GOMP_parallel.restype = None
            for function in _FUNCTIONS:
                getattr(runtime, function)
        except (OSError, AttributeError) as error:
            tried.append(f"{library}: {error}")
            continue
        log.debug("OpenMP runtime: %s", library)
        return runtime
    log.warning("the CPU kernels run on one thread: found no OpenMP runtime (%s)", "; ".join(tried) or "nothing to try")
    return None


# In the order of `cpu_kernels.SYMBOLS`.
_FUNCTIONS = ("GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


def _candidates() -> Iterator[str]:
    # The file inside torch's folder is loaded already, so this gives the very pool that torch computes on. Builds without
    # one (conda, distributions) load the system's, under one of these names; LLVM's and Intel's speak GOMP too.
    yield from sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("*omp*") if ".so" in path.name)
    for name in ("gomp", "iomp5", "omp"):
        found = ctypes.util.find_library(name)
        if found is not None:
            yield found


@functools.cache
def _register() -> None:
    """Give the OpenMP functions the names under which compiled code looks for them."""
    runtime = _runtime()
    if runtime is None:
        functions: tuple[Any, ...] = (
            numba.cfunc("void()")(_nothing),
            *[numba.cfunc("int32()")(f) for f in (_zero, _one)],
        )
        addresses = [function.address for function in functions]
        _register.keep = functions  # type: ignore[attr-defined]
    else:
        addresses = [ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    for symbol, address in zip(cpu_kernels.SYMBOLS, addresses, strict=True):
        llvmlite.binding.add_symbol(symbol, address)


def _nothing():
    return None


def _zero():
    return 0


def _one():
    return 1
