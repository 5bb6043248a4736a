"""Compiles the CPU's regions, each ``void region(int64 *parameters)``, and launches them on a team of OpenMP threads.

Code that numba has just compiled and the same code loaded from its cache may inline differently, and then sum in
another order. So a region is compiled by another process and always loaded from the cache: every process computes the
same bits. numba's own cache goes by the path of a function's source. This one goes by what the source says, so that
copies of the package share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import hashlib
import importlib
import inspect
import json
import logging
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from numba import types
from numba.core import serialize
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult

from ..backend import say_compiling
from . import linear
from .intrinsics import SYMBOLS
from .layout import TeamField
from .mlp import DENSE, EXPERTS
from .product import product
from .step import step

log = logging.getLogger(__name__)

_SIGNATURE = types.void(types.CPointer(types.int64))
_OPENMP = "omp_get_thread_num", "omp_get_num_threads"  # both in the order of SYMBOLS
_LIBC = "usleep", "clock_gettime", "madvise"
_LINE_S = 10.0
_NOT_WRITTEN = "not written: "  # how the compiling process says that the disk is full
_COMPILER = """
import json, sys
path, *given = json.loads(sys.argv[1])
sys.path[:] = path
from wisparse.kernels.cpu.launch import compile_here
compile_here(*given)
"""
_config: Any = numba.config  # its names come from the environment: unknown to a type checker
_regions: dict[str, Any] = {}  # compiled
_lock = threading.Lock()


def step_float32(p):
    step(p, np.float32(0), DENSE)


def step_bfloat16(p):
    step(p, np.uint16(0), DENSE)


def step_float16(p):
    step(p, np.int16(0), DENSE)


# Apart, as they take twice as long to compile.


def experts_float32(p):
    step(p, np.float32(0), EXPERTS)


def experts_bfloat16(p):
    step(p, np.uint16(0), EXPERTS)


def experts_float16(p):
    step(p, np.int16(0), EXPERTS)


def dequantize_float32(p):
    linear.dequantize(p, np.float32(0))


def dequantize_bfloat16(p):
    linear.dequantize(p, np.uint16(0))


def product_bfloat16(p):
    product(p)


REGIONS = {
    region.__name__: region
    for region in (
        *(step_float32, step_bfloat16, step_float16, experts_float32, experts_bfloat16, experts_float16),
        *(dequantize_float32, dequantize_bfloat16, product_bfloat16),
    )
}


def prepare(*names: str) -> None:
    """Compile the regions that are not on disk, side by side, and load all; RuntimeError if one cannot be compiled."""
    with _lock:
        missing = [name for name in dict.fromkeys(names) if name not in _regions]
        if missing:
            _register()
            _regions.update(zip(missing, _compiled(missing), strict=True))


def _compiled(names: Sequence[str]) -> list[Any]:
    folder = _cache_folder()
    if folder is not None:
        try:
            return _through_disk(names, folder)
        except OSError as error:  # the disk is full, say
            _warn(str(error))
    try:
        with tempfile.TemporaryDirectory() as passing:
            return _through_disk(names, Path(passing))
    except OSError as error:  # nothing can be written, or no process started
        log.info("%s compiled in memory: %s", ", ".join(names), error)
        return [numba.cfunc(_SIGNATURE)(REGIONS[name]) for name in names]


def _through_disk(names: Sequence[str], folder: Path) -> list[Any]:
    """Regions loaded from a folder, after other processes compiled those that it lacks."""
    missing = [name for name in names if not _file(REGIONS[name], folder).exists()]
    if missing and folder == _cache_folder():  # else a warning has said that every process compiles them
        say_compiling("CPU", len(missing))
    if missing and not sys.executable:
        raise OSError("this Python is inside another program, and its path is not known")
    with contextlib.ExitStack() as running:
        compilers = []
        for name in missing:
            given = json.dumps([sys.path, REGIONS[name].__module__, name, str(folder)])
            command = [sys.executable, "-c", _COMPILER, given]
            compilers.append(running.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        outputs = [_output(compiler) for compiler in compilers]
    for compiler, name, output in zip(compilers, missing, outputs, strict=True):
        reason = output.strip().rpartition("\n")[2]
        if reason.startswith(_NOT_WRITTEN):
            raise OSError(reason.removeprefix(_NOT_WRITTEN))
        if compiler.returncode:
            raise RuntimeError(
                f"{name} could not be compiled for this CPU, exit status {compiler.returncode}: {reason}"
            )
    return [_load(REGIONS[name], folder) for name in names]


def _output(compiler: subprocess.Popen[str]) -> str:
    """What a compiling process prints, awaited with a line every ten seconds."""
    began = time.monotonic()
    while True:
        try:
            return compiler.communicate(timeout=_LINE_S)[1]
        except subprocess.TimeoutExpired:
            log.warning("still compiling after %.0f s", time.monotonic() - began)


def compile_here(module: str, name: str, folder: str) -> None:
    """Compile a region into a folder: what the compiling process does, which runs nothing of it."""
    for symbol in SYMBOLS:  # they only have to be known
        llvmlite.binding.add_symbol(symbol, 1)
    try:
        _load(getattr(importlib.import_module(module), name), Path(folder))
    except OSError as error:
        sys.exit(f"{_NOT_WRITTEN}{error}")


class _OnDisk:
    """What a compiled function asks for its code, and gives it to: one file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def load_overload(self, signature: object, target: Any) -> Any:
        target.refresh()
        if self.file.exists():
            return CompileResult._rebuild(target, *pickle.loads(self.file.read_bytes()))
        return None

    def save_overload(self, signature: object, compiled: Any) -> None:
        whole = self.file.with_suffix(f".{uuid.uuid4().hex}")  # others may write the same code at the same time
        try:
            whole.write_bytes(serialize.dumps(compiled._reduce()))
            whole.replace(self.file)
        finally:
            whole.unlink(missing_ok=True)


def _load(region: Any, folder: Path) -> Any:
    function: Any = CFunc(region, (_SIGNATURE.args, _SIGNATURE.return_type), {}, {})
    function._cache = _OnDisk(_file(region, folder))
    function.compile()
    return function


def _file(region: Any, folder: Path) -> Path:
    """A region's code. The name changes with its source, the CPU back end's, the compiler and the processor."""
    name, features = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    asked = f"{_config.CPU_NAME} {_config.CPU_FEATURES}"  # by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
    versions = f"{platform.python_version()} {numba.__version__} {llvmlite.__version__}"
    digest = hashlib.sha256(f"{versions} {name} {features} {asked}".encode())
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(inspect.getfile(region))):
        digest.update(file.read_bytes())
    return folder / f"{region.__name__}-{digest.hexdigest()[:16]}.code"


@functools.cache
def _cache_folder() -> Path | None:
    """Where compiled code is kept: under NUMBA_CACHE_DIR or the user's cache; None, with a warning, if not writable."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wisparse"
        folder = Path(_config.CACHE_DIR or parent) / "wisparse-cpu"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _warn(str(error))
        return None
    return folder


def _warn(reason: str) -> None:
    log.warning(
        "the CPU kernels cannot be kept on disk and will be compiled again by every process, which takes seconds (%s); "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )


def team_size() -> int:
    """Threads of the next launch: torch's own setting, or 1 where no OpenMP runtime was found."""
    return torch.get_num_threads() if _openmp() is not None else 1


def launch(name: str, parameters: np.ndarray, threads: int) -> None:
    """Run a region on at most ``threads`` threads. parameters: int64, by its fields; what they point to stays alive."""
    if name not in _regions:
        prepare(name)
    address, runtime = _regions[name].address, _openmp()
    if runtime is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(parameters.ctypes.data)
    else:
        runtime.GOMP_parallel(address, parameters.ctypes.data, threads, 0)


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
    yield from filter(None, map(ctypes.util.find_library, ("gomp", "iomp5", "omp")))


@functools.cache
def _register() -> tuple[Any, ...]:
    """Give OpenMP's and libc's functions the names that compiled code uses; returns what must stay alive for them."""
    runtime = _openmp()
    if runtime is not None:
        libc = ctypes.CDLL(None)
        functions: tuple[Any, ...] = (runtime, libc)
        entries = [getattr(runtime, name) for name in _OPENMP] + [getattr(libc, name) for name in _LIBC]
        addresses = [ctypes.cast(entry, ctypes.c_void_p).value for entry in entries]
    else:  # one thread waits for nobody: it neither sleeps nor reads the clock, nor asks for memory
        functions = tuple(ctypes.CFUNCTYPE(ctypes.c_int32)(lambda number=number: number) for number in (0, 1))
        thread_num, num_threads = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        addresses = [thread_num, num_threads, *[thread_num] * len(_LIBC)]
    for symbol, address in zip(SYMBOLS, addresses, strict=True):
        llvmlite.binding.add_symbol(symbol, address)
    return functions


# A thread less costs at most 1 / size of the speed; half of that may be lost by waiting for longer.
_TOLERATED = 0.5
_DEBT_NS = 1_000_000  # shrink when this much more was lost: another program takes a core for milliseconds
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 10_000_000, 640_000_000  # between tries of a larger size
_CROWDED = 0.05  # share of a smaller team's time in which the calling thread had no core: no point in a try


class Team:
    """Launches regions, each on as many threads as found a core lately. All threads of a team wait for the last one,
    and where another program takes a core, for as long as the scheduler lets that run: ten decode steps of a small
    model. So a team that lost too much time shrinks by a thread, and tries the larger size again later, less often with
    every try that failed. Only the waits are measured: other programs cannot be counted in a container."""

    def __init__(self) -> None:
        self.size = 0  # threads of the last launch
        self.words = torch.zeros(TeamField.SIZE, dtype=torch.int64).numpy()  # of the barrier
        self._most = 0
        self._pause = _FIRST_PAUSE_NS
        self._since = self._retry = 0
        self._debt = 0.0
        self._ran = self._lost = 0

    def launch(self, name: str, parameters: np.ndarray, most: int) -> None:
        """Run a region on at most ``most`` threads; see :func:`launch`."""
        if most != self._most:
            self.size = self._most = most
            self._since = self._retry = self._debt = 0
        if most == 1:
            launch(name, parameters, 1)
            return
        start = time.perf_counter_ns()
        if self.size < most and start >= self._retry:
            if self._lost > self._ran * _CROWDED:
                self._retry, self._ran, self._lost = start + self._pause, 0, 0
            else:
                self._resize(self.size + 1, start, _FIRST_PAUSE_NS)
        small = self.size < most
        worked = time.thread_time_ns() if small else 0
        self.words[TeamField.WAITED_NS] = 0
        launch(name, parameters, self.size)
        end = time.perf_counter_ns()
        if small:
            self._ran += end - start
            self._lost += end - start - (time.thread_time_ns() - worked)
        if self.size == 1:
            return
        waited = int(self.words[TeamField.WAITED_NS])
        self._debt = max(0.0, self._debt + waited - (end - start) * _TOLERATED / self.size)
        if self._debt > _DEBT_NS:
            # A failed try doubles the pause, a size that had been good for long does not.
            failed = start - self._since < self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_NS) if failed else _FIRST_PAUSE_NS
            self._resize(self.size - 1, end, self._pause)

    def _resize(self, size: int, now: int, pause: int) -> None:
        self.size, self._since, self._retry, self._debt = size, now, now + pause, 0.0
        self._ran = self._lost = 0
