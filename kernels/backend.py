"""Choice of the back end, the implementation of the sparse projections.

torch    plain PyTorch, any device: the readable reference; masks the input and multiplies densely, so not faster
numba    CPU: reads the kept channels only
triton   NVIDIA GPUs: reads the kept channels only
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

BACKENDS = ("torch", "numba", "triton")
_warned: set[str] = set()


def warn_compiling(device: str, count: int) -> None:
    """Warn, once for each device, that kernels are being compiled."""
    if device in _warned:
        return
    _warned.add(device)
    text = "compiling %d kernel%s for the %s, which takes some seconds; it happens once, later runs find %s on disk"
    log.warning(text, count, "s"[: count != 1], device, "them" if count != 1 else "it")


@contextmanager
def triton_compiling(count: int) -> Iterator[None]:
    """Around the first launches of ``count`` Triton kernels: warn if one of them is not in Triton's cache on disk."""
    import triton

    compilation: Any = triton.knobs.compilation
    before = compilation.listener

    def listen(*, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            warn_compiling("GPU", count)
        if before is not None:
            before(cache_hit=cache_hit, **more)

    compilation.listener = listen
    try:
        yield
    finally:
        compilation.listener = before


class ForkedCompilations(Executor):
    """Runs tasks whose result is a file in as many forked processes as there are cores; tasks that children ran are
    then repeated here, where they find the file. In threads a third of a compilation, Python code, would hold the
    GIL."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, task: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        self._tasks.append((task, Future()))
        return self._tasks[-1][1]

    def run(self) -> None:
        read, write = os.pipe()
        for index in range(len(self._tasks)):  # a pipe's buffer holds 16,000
            os.write(write, index.to_bytes(4, "little"))
        os.close(write)
        children = []
        for _ in range(min(os.cpu_count() or 1, len(self._tasks)) - 1):
            with warnings.catch_warnings():
                # fork warns about threads, which are not copied. A child only compiles: it uses no thread and no GPU.
                warnings.simplefilter("ignore", DeprecationWarning)
                children.append(os.fork())
            if children[-1] == 0:
                gc.disable()  # no finalizers of the parent's objects
                logging.disable()  # the parent logs
                with suppress(BaseException):
                    while number := os.read(read, 4):
                        with suppress(Exception):  # raised again when the parent repeats the task
                            self._tasks[int.from_bytes(number, "little")][0]()
                os._exit(0)
        done = []
        try:
            while number := os.read(read, 4):
                done.append(int.from_bytes(number, "little"))
                self._finish(*self._tasks[done[-1]])
            deadline = time.monotonic() + 60  # a child may wait for a lock that a thread held at the fork
            for child in children:
                while os.waitpid(child, os.WNOHANG) == (0, 0):
                    if time.monotonic() > deadline:
                        os.kill(child, signal.SIGKILL)
                    time.sleep(0.01)
            for index in set(range(len(self._tasks))).difference(done):
                self._finish(*self._tasks[index])
        finally:  # after an interrupt
            os.close(read)
            for _, future in self._tasks:
                future.cancel()

    @staticmethod
    def _finish(task: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)


@contextmanager
def compiling_side_by_side() -> Iterator[None]:
    """Triton kernels launched within are compiled, in as many processes as there are cores, and not run. Only for
    launches that do not depend on each other's results; a kernel with ``is_probe`` is run, as plans depend on its
    result."""
    import triton
    from triton.runtime import JITFunction

    run, kernels = JITFunction.run, ForkedCompilations()

    def compile_only(self: Any, *given: Any, warmup: bool, **options: Any) -> Any:
        if getattr(self, "is_probe", False):  # in a context without AsyncCompileMode: compiled now
            return Context().run(run, self, *given, warmup=warmup, **options)
        return run(self, *given, warmup=True, **options)

    with triton.AsyncCompileMode(kernels):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
            kernels.run()


def choose_backend(device: torch.device, dtype: torch.dtype, requested: str = "auto") -> tuple[str, str]:
    """The back end and, for the log, the reason; raises ValueError if ``requested`` cannot run."""
    if requested == "auto":
        fast = "triton" if device.type == "cuda" else "numba"
        refused = _refusal(fast, device, dtype)
        return ("torch", f"{fast} cannot: {refused}") if refused else (fast, f"the fastest for {device.type}")
    if requested not in BACKENDS:
        raise ValueError(f"unknown back end {requested!r}; known ones: auto, {', '.join(BACKENDS)}")
    refused = _refusal(requested, device, dtype)
    if refused is not None:
        raise ValueError(f"back end {requested} cannot run on {device} in {dtype}: {refused}")
    return requested, "asked for"


def _refusal(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    import torch

    if name == "torch":
        return None
    wanted = {"numba": "cpu", "triton": "cuda"}[name]
    if device.type != wanted:
        return f"it runs on {wanted}, the device is {device.type}"
    if importlib.util.find_spec(name) is None:
        return f"the package {name} is not installed"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it knows float32, bfloat16 and float16, not {dtype}"
    if name == "triton":
        if torch.version.hip is not None:
            return "its kernels are for NVIDIA's GPUs, this PyTorch is for AMD's"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):  # Triton's tensor-core code and bf16 need Ampere
            return f"it needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    return None
