"""Compiles the CPU's parallel regions, ``void region(int64 *parameters)``, and launches them on a team of OpenMP
threads.

Code just compiled by numba and the same code loaded from its cache may be inlined differently, and then sum in another
order. A region is therefore compiled in another process and always loaded from the cache, so that all processes compute
the same bits. numba's own cache is keyed by the path of the source file; this one by its contents, so that copies of
the package share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import fcntl
import functools
import hashlib
import importlib
import inspect
import json
import logging
import os
import pickle
import platform
import stat
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

from ..backend import warn_compiling
from . import linear
from .intrinsics import HAS_TILES, SYMBOLS
from .layout import NAMES, TeamField
from .product import product
from .step import step

log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size

_SIGNATURE = types.void(types.CPointer(types.int64))
_OPENMP = "omp_get_thread_num", "omp_get_num_threads"  # both in the order of SYMBOLS
_LIBC = "usleep", "clock_gettime", "madvise"
_LINE_S = 10.0
_NOT_WRITTEN = "not written: "  # prefix of the compiling process's message after an OSError
_COMPILER = """
import gc, json, sys
gc.disable()  # a fifth of the time to compile
path, *arguments = json.loads(sys.argv[1])
sys.path[:] = path
from wisparse.kernels.cpu.launch import compile_here
compile_here(*arguments)
"""
_config: Any = numba.config  # Any: its attributes are defined at run time
regions: dict[str, Any] = {}  # compiled regions by name
_lock = threading.Lock()


def _region(name: str, function: Any, *arguments: Any) -> tuple[str, Any]:
    """A function of the parameters alone, to be compiled; dtypes and switches are constants in its code."""

    def region(p):
        function(p, *arguments)

    region.__name__ = region.__qualname__ = name
    return name, region


# A value of each dtype: compiled code has the 16-bit ones as integers.
_TAGS = {"float32": np.float32(0), "bfloat16": np.uint16(0), "float16": np.int16(0)}
REGIONS = dict(
    (
        *(_region(f"step_{name}", step, tag, None, None) for name, tag in _TAGS.items()),
        *(_region(f"mixers_{name}", step, tag, True, None) for name, tag in _TAGS.items()),
        *(_region(f"experts_{name}", step, tag, True, True) for name, tag in _TAGS.items()),
        *(_region(f"dequantize_{name}", linear.dequantize, _TAGS[name]) for name in ("float32", "bfloat16")),
        _region("product_bfloat16", product),
    )
)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch multiplies matrices of ``dtype`` fastest on this CPU. torch 2.13 takes 80 times as long
    for a transposed bfloat16 matrix as for a row-major one without AVX-512; with AVX-512 but without its bfloat16
    instructions twice as long as for float32 including the conversion."""
    fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512") and torch.cpu._is_avx512_bf16_supported()
    return dtype if fast and dtype == torch.bfloat16 else torch.float32


@functools.cache
def has_tiles() -> bool:
    """Whether this process may use AMX tiles, for which Linux requires a permission request."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return HAS_TILES and ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def regions_of(dtype: torch.dtype, *, mixers: bool, experts: bool, int4: bool) -> list[str]:
    """The regions that a model's decoder runs. ``mixers``: with others than attention with a KV cache of heads; ``int4``:
    weights are stored so, or in planes."""
    names = [f"{'experts' if experts else 'mixers' if mixers else 'step'}_{NAMES[dtype]}"]
    if int4:
        names.append(f"dequantize_{NAMES[product_dtype(dtype)]}")
    if dtype == torch.bfloat16 and has_tiles():
        names.append("product_bfloat16")
    return names


def prepare(*names: str) -> None:
    """Compile the regions that are not on disk, in parallel, and load all; RuntimeError if one cannot be compiled."""
    with _lock:
        missing = [name for name in dict.fromkeys(names) if name not in regions]
        if missing:
            _register()
            regions.update(zip(missing, _compiled(missing), strict=True))


def _compiled(names: Sequence[str]) -> list[Any]:
    folder = cache_folder()
    if folder is not None:
        try:
            return _through_disk(names, folder)
        except OSError as error:  # for example, the disk is full
            _warn(str(error))
    try:
        with tempfile.TemporaryDirectory() as temporary:
            return _through_disk(names, Path(temporary))
    except OSError as error:  # no folder is writable, or no process can be started
        log.info("%s compiled in memory: %s", ", ".join(names), error)
        return [numba.cfunc(_SIGNATURE)(REGIONS[name]) for name in names]


def _through_disk(names: Sequence[str], folder: Path) -> list[Any]:
    """Load regions from a folder, after other processes have compiled the missing ones into it."""
    found = {name: _found(REGIONS[name], folder) for name in names}
    missing = [name for name, region in found.items() if region is None]
    if missing and folder == cache_folder():  # else ``_warn`` has been logged
        warn_compiling("CPU", len(missing))
    if missing and not sys.executable:
        raise OSError("sys.executable is not set, as this Python is embedded in another program")
    with contextlib.ExitStack() as running:
        compilers = [running.enter_context(_start_compiler(name, folder)) for name in missing]
        outputs = [_output(compiler, compilers) for compiler in compilers]
    for compiler, name, output in zip(compilers, missing, outputs, strict=True):
        reason = output.strip().rpartition("\n")[2]
        if reason.startswith(_NOT_WRITTEN):
            raise OSError(reason.removeprefix(_NOT_WRITTEN))
        if compiler.returncode:
            raise RuntimeError(
                f"{name} could not be compiled for this CPU, exit status {compiler.returncode}: {reason}"
            )
    return [found[name] or _load(REGIONS[name], folder) for name in names]


def start_compiling(names: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Start a process for each region that is not on disk; `prepare` tells why one failed. The processes outlive this
    one, and each leaves its region on disk when it has ended."""
    folder = cache_folder()
    if folder is None or not sys.executable:
        return []
    missing = [name for name in names if not _file(REGIONS[name], folder).exists()]
    return [_start_compiler(name, folder, stderr=subprocess.DEVNULL) for name in missing]


def _start_compiler(name: str, folder: Path, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    arguments = json.dumps([sys.path, REGIONS[name].__module__, str(folder), name])
    return subprocess.Popen([sys.executable, "-c", _COMPILER, arguments], stderr=stderr, text=True)


def _found(region: Any, folder: Path) -> Any:
    """A region from its file; None if there is none, or none that loads, which is deleted."""
    file = _file(region, folder)
    try:
        return _load(region, folder) if file.exists() else None
    except Exception as error:  # cut or changed on the disk; in unpickling anything can fail
        log.warning("%s is damaged: deleted, and compiled again (%s)", file, error or type(error).__name__)
        file.unlink(missing_ok=True)
        return None


def _output(compiler: subprocess.Popen[str], all_: Sequence[subprocess.Popen[str]]) -> str:
    """The standard error of a compiling process; logs a line every ten seconds."""
    while True:
        try:
            return compiler.communicate(timeout=_LINE_S)[1]
        except subprocess.TimeoutExpired:
            log.warning("compiling CPU kernels: %d of %d done", sum(x.poll() is not None for x in all_), len(all_))


def compile_here(module: str, folder: str, *names: str) -> None:
    """Compile regions into a folder, in the compiling process, which does not run them. A region that another process
    compiles is waited for."""
    for symbol in SYMBOLS:  # any address: the code is not run here
        llvmlite.binding.add_symbol(symbol, 1)
    importlib.import_module(module)  # that of a test has regions of its own
    try:
        with contextlib.ExitStack() as files:
            locks = {name: files.enter_context(open(Path(folder) / f"{name}.lock", "w")) for name in sorted(names)}
            for lock in locks.values():
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
            for name in names:
                _load(REGIONS[name], Path(folder))
                locks[name].close()
    except OSError as error:
        sys.exit(f"{_NOT_WRITTEN}{error}")


class _OnDisk:
    """numba's cache interface of a function, backed by one file: the sha256 digest of the compiled code, then the code.
    The digest finds damage; that unpickling is safe, as no other user could write the file, is `cache_folder`'s part."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def load_overload(self, signature: object, target: Any) -> Any:
        target.refresh()
        if not self.file.exists():
            return None
        stored = self.file.read_bytes()
        digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            raise ValueError("its digest differs")
        return CompileResult._rebuild(target, *pickle.loads(code))

    def save_overload(self, signature: object, compiled: Any) -> None:
        temporary = self.file.with_suffix(f".{uuid.uuid4().hex}")  # other processes may write the same file
        try:
            code = serialize.dumps(compiled._reduce())
            with open(temporary, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave an empty file under the final name
            temporary.replace(self.file)
        finally:
            temporary.unlink(missing_ok=True)


def _load(region: Any, folder: Path) -> Any:
    function: Any = CFunc(region, (_SIGNATURE.args, _SIGNATURE.return_type), {}, {})
    function._cache = _OnDisk(_file(region, folder))
    function.compile()
    return function


def _file(region: Any, folder: Path) -> Path:
    """The file of a region's code, named by a digest of the back end's sources, the compiler and the processor."""
    name, features = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    target = f"{_config.CPU_NAME} {_config.CPU_FEATURES}"  # NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
    versions = f"{platform.python_version()} {numba.__version__} {llvmlite.__version__}"
    digest = hashlib.sha256(f"{versions} {name} {features} {target}".encode())
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(inspect.getfile(region))):
        digest.update(file.read_bytes())
    return folder / f"{region.__name__}-{digest.hexdigest()[:16]}.code"


@functools.cache
def cache_folder() -> Path | None:
    """The folder of compiled code, under NUMBA_CACHE_DIR or the user's cache; None, with a warning, if it cannot be
    written, or others could put code there: it is another user's, or all may write to it."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wisparse"
        folder = Path(_config.CACHE_DIR or parent) / "wisparse-cpu"
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            raise OSError(f"{folder} belongs to another user, or all users may write to it")
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
    """Threads of the next launch: torch's setting, or 1 without an OpenMP runtime."""
    return torch.get_num_threads() if _openmp() is not None else 1


def launch(name: str, parameters: np.ndarray, threads: int) -> None:
    """Run a region on at most ``threads`` threads. parameters: int64; the caller keeps alive what they point to."""
    if name not in regions:
        prepare(name)
    address, runtime = regions[name].address, _openmp()
    if runtime is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(parameters.ctypes.data)
    else:
        runtime.GOMP_parallel(address, parameters.ctypes.data, threads, 0)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses; None, with a warning, if none was found."""
    tried = []
    for library in openmp_libraries():
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


def openmp_libraries() -> Iterator[str]:
    """Those to try. The library in torch's folder is already loaded, so threads are shared with torch. Builds without one
    (conda, distributions) use the system's, under one of these names; LLVM's and Intel's also have GOMP's entry points."""
    yield from sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("*omp*") if ".so" in path.name)
    yield from filter(None, map(ctypes.util.find_library, ("gomp", "iomp5", "omp")))


@functools.cache
def _register() -> tuple[Any, ...]:
    """Register OpenMP's and libc's functions under SYMBOLS; returns objects that must stay alive."""
    runtime = _openmp()
    if runtime is not None:
        libc = ctypes.CDLL(None)
        functions: tuple[Any, ...] = (runtime, libc)
        entries = [getattr(runtime, name) for name in _OPENMP] + [getattr(libc, name) for name in _LIBC]
        addresses = [ctypes.cast(entry, ctypes.c_void_p).value for entry in entries]
    else:  # a single thread calls none of libc's functions, so any address will do
        functions = tuple(ctypes.CFUNCTYPE(ctypes.c_int32)(lambda number=number: number) for number in (0, 1))
        thread_num, num_threads = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        addresses = [thread_num, num_threads, *[thread_num] * len(_LIBC)]
    for symbol, address in zip(SYMBOLS, addresses, strict=True):
        llvmlite.binding.add_symbol(symbol, address)
    return functions


# Tolerated waiting, as a fraction of 1 / size of the run time, which is what one thread less would cost.
_TOLERATED = 0.5
_DEBT_NS = 1_000_000  # waiting beyond the tolerated time from which a team shrinks
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 10_000_000, 640_000_000  # between attempts at a larger size
_CROWDED = 0.05  # fraction of time in which the calling thread had no core, from which no attempt is made


class Team:
    """Launches regions with a number of threads adapted to the cores that are free. All threads wait for the last one;
    if another process takes its core, for a time slice of the scheduler, about ten decode steps of a small model. A
    team that waited too long shrinks by a thread and attempts the larger size again later, with exponential backoff.
    Only waiting times are measured, as other processes are not visible in a container."""

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
        cpu_start = time.thread_time_ns() if small else 0
        self.words[TeamField.WAITED_NS] = 0
        launch(name, parameters, self.size)
        end = time.perf_counter_ns()
        if small:
            self._ran += end - start
            self._lost += end - start - (time.thread_time_ns() - cpu_start)
        if self.size == 1:
            return
        waited = int(self.words[TeamField.WAITED_NS])
        self._debt = max(0.0, self._debt + waited - (end - start) * _TOLERATED / self.size)
        if self._debt > _DEBT_NS:
            # The pause doubles after a failed attempt, not after a size that lasted longer than the pause.
            failed = start - self._since < self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_NS) if failed else _FIRST_PAUSE_NS
            self._resize(self.size - 1, end, self._pause)

    def _resize(self, size: int, now: int, pause: int) -> None:
        self.size, self._since, self._retry, self._debt = size, now, now + pause, 0.0
        self._ran = self._lost = 0
