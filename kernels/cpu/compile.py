"""The regions: what ``threads.launch`` can run, each ``void region(int64 *parameters)``, compiled on first use.

A region is executed once by every thread of a team. They are written out one by one, because a function made in a
closure is never found in numba's disk cache.
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

from .convert import dequantize, pack, quantize, transpose
from .step import step

log = logging.getLogger(__name__)

_SIGNATURE = types.void(types.CPointer(types.int64))
_lock = threading.Lock()
_FULL = "not written: "  # begins what the compiling process says of a disk
_config: Any = numba.config  # its names come from the environment, so a type checker knows none of them
_COMPILER = """
import json, sys
path, *given = json.loads(sys.argv[1])
sys.path[:] = path
from wisparse.kernels.cpu.compile import compile_here
compile_here(*given)
"""


def compile_region(region: Callable[[Any], None]) -> Any:
    """A region as machine code for this processor; keep the result alive as long as its ``address`` is used.

    Raises:
        RuntimeError: it could not be compiled; the message is the compiler's.
    """
    try:
        return _compiled(region)
    except OSError as error:  # nothing can be written, or no process be started
        log.info("%s is compiled in memory: %s", region.__name__, error)
        return numba.cfunc(_SIGNATURE)(region)


def _compiled(region: Callable[[Any], None]) -> Any:
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


def compile_regions(regions: Sequence[Callable[[Any], None]]) -> None:
    """Have those compiled that are not on disk, side by side; nothing where no folder can be written.

    Raises:
        OSError: the disk is full, say.
        RuntimeError: as for :func:`compile_region`.
    """
    folder = _cache_folder()
    if folder is not None:
        _compile([region for region in regions if not is_compiled(region)], folder)


def compile_here(module: str, name: str, folder: str) -> None:
    """Compile a region and put it into a folder: what the compiling process does, which runs nothing of it."""
    from .intrinsics import SYMBOLS

    for symbol in SYMBOLS:  # they only have to be known
        llvmlite.binding.add_symbol(symbol, 1)
    try:
        _load(getattr(importlib.import_module(module), name), Path(folder))
    except OSError as error:
        sys.exit(f"{_FULL}{error}")


def _compile(regions: Sequence[Callable[[Any], None]], folder: Path) -> None:
    if not sys.executable:
        raise OSError("this Python is inside another program, and its path is not known")
    with contextlib.ExitStack() as running:
        compilers = []
        for region in regions:
            given = json.dumps([sys.path, region.__module__, region.__name__, str(folder)])
            command = [sys.executable, "-c", _COMPILER, given]
            compilers.append(running.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        said = [compiler.communicate()[1] for compiler in compilers]
    for compiler, region, words in zip(compilers, regions, said, strict=True):
        reason = words.strip().rpartition("\n")[2]
        if reason.startswith(_FULL):
            raise OSError(reason.removeprefix(_FULL))
        if compiler.returncode:
            raise RuntimeError(
                f"{region.__name__.removeprefix('_')} could not be compiled for this CPU, exit status "
                f"{compiler.returncode}: {reason}"
            )


def _load(region: Callable[[Any], None], folder: Path) -> Any:
    # numba takes the folder from its settings, which are the process's.
    with _lock:
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
    """Whether what is compiled is found again by the next process; a warning says so if it is not."""
    return _cache_folder() is not None


@functools.cache
def _cache_folder() -> Path | None:
    """Where compiled code is kept: under NUMBA_CACHE_DIR if it is set, else in the user's cache.

    Never beside the source: an installer leaves files that it did not write where they are, and a folder that outlives
    its package hides the next one. None if the folder cannot be written; a warning says so.
    """
    try:
        folder = _parent() / f"wisparse-cpu-{_digest()}"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _warn(str(error))
        return None
    return folder


def _parent() -> Path:
    if _config.CACHE_DIR:
        return Path(_config.CACHE_DIR)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wisparse"


def _digest() -> str:
    """Twelve characters that change with any of the CPU back end's files, the compiler and the processor."""
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


_MOST_FIELDS = 64  # at least as many parameters as any region has


def _step_float32(p):
    step(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _step_bfloat16(p):
    step(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _step_float16(p):
    step(carray(p, (_MOST_FIELDS,)), np.int16(0))


def _transpose_float32(p):
    transpose(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _transpose_bfloat16(p):
    transpose(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _quantize_float32(p):
    quantize(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _quantize_bfloat16(p):
    quantize(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _quantize_float16(p):
    quantize(carray(p, (_MOST_FIELDS,)), np.int16(0))


def _pack_int4(p):
    pack(carray(p, (_MOST_FIELDS,)))


def _dequantize_float32(p):
    dequantize(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _dequantize_bfloat16(p):
    dequantize(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _dequantize_float16(p):
    dequantize(carray(p, (_MOST_FIELDS,)), np.int16(0))


# Name -> what to compile, on first use. The transposition moves bits: two bytes are two bytes.
REGIONS = {
    "step_float32": _step_float32,
    "step_bfloat16": _step_bfloat16,
    "step_float16": _step_float16,
    "transpose_float32": _transpose_float32,
    "transpose_bfloat16": _transpose_bfloat16,
    "transpose_float16": _transpose_bfloat16,
    "quantize_float32": _quantize_float32,
    "quantize_bfloat16": _quantize_bfloat16,
    "quantize_float16": _quantize_float16,
    "pack_int4": _pack_int4,
    "dequantize_float32": _dequantize_float32,
    "dequantize_bfloat16": _dequantize_bfloat16,
    "dequantize_float16": _dequantize_float16,
}
