"""The regions that ``threads.launch`` can run, each ``void region(int64 *parameters)``, compiled on first use.

Code that numba has just compiled and the same code loaded from its cache may inline differently, and then sum in
another order. So a region is compiled by another process and always loaded from the cache: every process computes the
same bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import carray, types

from . import convert
from .intrinsics import SYMBOLS
from .step import step

log = logging.getLogger(__name__)

_SIGNATURE = types.void(types.CPointer(types.int64))
_MOST_FIELDS = 64  # at least as many parameters as any region has
_NOT_WRITTEN = "not written: "  # how the compiling process says that the disk is full
_lock = threading.Lock()
_config: Any = numba.config  # its names come from the environment: unknown to a type checker
_COMPILER = """
import json, sys
path, *given = json.loads(sys.argv[1])
sys.path[:] = path
from wisparse.kernels.cpu.compile import compile_here
compile_here(*given)
"""


def compile_region(region: Callable[[Any], None]) -> Any:
    """A region as machine code for this CPU; its ``address`` is valid while the result lives. RuntimeError if it cannot
    be compiled."""
    try:
        folder = _cache_folder()
        if folder is not None:
            try:
                compile_regions([region])
                return _load(region, folder)
            except OSError as error:  # the disk is full, say
                _warn(str(error))
        with tempfile.TemporaryDirectory() as passing:
            _compile([region], Path(passing))
            return _load(region, Path(passing))
    except OSError as error:  # nothing can be written, or no process started
        log.info("%s is compiled in memory: %s", region.__name__, error)
        return numba.cfunc(_SIGNATURE)(region)


def compile_regions(regions: Sequence[Callable[[Any], None]]) -> None:
    """Compile those that are not on disk, side by side; nothing where no folder can be written."""
    folder = _cache_folder()
    if folder is not None:
        _compile([region for region in regions if not is_compiled(region)], folder)


def compile_here(module: str, name: str, folder: str) -> None:
    """Compile a region into a folder: what the compiling process does, which runs nothing of it."""
    for symbol in SYMBOLS:  # they only have to be known
        llvmlite.binding.add_symbol(symbol, 1)
    try:
        _load(getattr(importlib.import_module(module), name), Path(folder))
    except OSError as error:
        sys.exit(f"{_NOT_WRITTEN}{error}")


def _compile(regions: Sequence[Callable[[Any], None]], folder: Path) -> None:
    if not sys.executable:
        raise OSError("this Python is inside another program, and its path is not known")
    with contextlib.ExitStack() as running:
        compilers = []
        for region in regions:
            given = json.dumps([sys.path, region.__module__, region.__name__, str(folder)])
            command = [sys.executable, "-c", _COMPILER, given]
            compilers.append(running.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        outputs = [compiler.communicate()[1] for compiler in compilers]
    for compiler, region, output in zip(compilers, regions, outputs, strict=True):
        reason = output.strip().rpartition("\n")[2]
        if reason.startswith(_NOT_WRITTEN):
            raise OSError(reason.removeprefix(_NOT_WRITTEN))
        if compiler.returncode:
            raise RuntimeError(
                f"{region.__name__} could not be compiled for this CPU, exit status {compiler.returncode}: {reason}"
            )


def _load(region: Callable[[Any], None], folder: Path) -> Any:
    with _lock:  # numba takes the folder from its settings, which are the process's
        before, _config.CACHE_DIR = _config.CACHE_DIR, str(folder)
        try:
            return numba.cfunc(_SIGNATURE, cache=True)(region)
        finally:
            _config.CACHE_DIR = before


def is_compiled(region: Callable[[Any], None]) -> bool:
    """Whether :func:`compile_region` finds the region on disk."""
    folder = _cache_folder()
    return folder is not None and any(folder.glob(f"*/*.{region.__name__}-*.nbi"))


def is_kept() -> bool:
    """Whether the next process finds what is compiled now; a warning says so if not."""
    return _cache_folder() is not None


@functools.cache
def _cache_folder() -> Path | None:
    """Where compiled code is kept: under NUMBA_CACHE_DIR or the user's cache; None, with a warning, if not writable.

    Never beside the source, where uninstalling would leave it. The name changes with the CPU back end's source, the
    compiler and the processor.
    """
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wisparse"
        folder = Path(_config.CACHE_DIR or parent) / f"wisparse-cpu-{_digest()}"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _warn(str(error))
        return None
    return folder


def _digest() -> str:
    features = llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()} {features}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _warn(reason: str) -> None:
    log.warning(
        "the CPU kernels cannot be kept on disk and will be compiled again by every process, which takes seconds (%s); "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )


# Written out, because numba's disk cache never finds a function that was made in a closure.


def step_float32(p):
    step(carray(p, (_MOST_FIELDS,)), np.float32(0))


def step_bfloat16(p):
    step(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def step_float16(p):
    step(carray(p, (_MOST_FIELDS,)), np.int16(0))


def transpose_float32(p):
    convert.transpose(carray(p, (_MOST_FIELDS,)), np.float32(0))


def transpose_16bit(p):
    convert.transpose(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def quantize(p):
    convert.quantize(carray(p, (_MOST_FIELDS,)))


def pack_int4(p):
    convert.pack(carray(p, (_MOST_FIELDS,)))


def dequantize_float32(p):
    convert.dequantize(carray(p, (_MOST_FIELDS,)), np.float32(0))


def dequantize_bfloat16(p):
    convert.dequantize(carray(p, (_MOST_FIELDS,)), np.uint16(0))


REGIONS = {
    region.__name__: region
    for region in (
        step_float32,
        step_bfloat16,
        step_float16,
        transpose_float32,
        transpose_16bit,
        quantize,
        pack_int4,
        dequantize_float32,
        dequantize_bfloat16,
    )
}
REGIONS["transpose_bfloat16"] = REGIONS["transpose_float16"] = transpose_16bit
