"""A stranger's program in a process of its own: it gets so much time and memory, and then it is gone.

A chat template is a program, and a ``tokenizer.json`` is nearly one. Inside this process neither could be stopped: a
single call of a C or Rust function can take hours or all memory, and no list of such calls is ever complete. So they
run in a child (``worker``) that the operating system ends when its processor time is used up, that has a limit of its
address space, and that is killed after a multiple of that time on the clock. What it holds is made anew when it is
asked the next time. Time grows with what the user gives, never with what the stranger makes of it.

Not covered: macOS has no limit of address space, Windows none of processor time either; there the clock alone counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from ..errors import ResourceError

__all__ = ["Worker", "WorkerError", "together"]

# Of processor time, for one question: what it may take, and what each byte of it adds.
_SECONDS = 1.5
_SECONDS_PER_BYTE = 2e-6
# For all questions of one `together`, beside what their bytes add.
_SECONDS_TOGETHER = 3.0
# Reading what the worker is to hold is quicker: a tokenizer.json of 33 MB takes a second or two.
_SECONDS_PER_BYTE_HELD = 1e-7
_MOST_SECONDS_HELD = 4.0
# On the clock, as a multiple: the machine may be busy with something else. Where processor time is limited, the clock
# is there only for what waits without working, which nothing in a worker should.
_PATIENCE = 10 if hasattr(signal, "setitimer") else 3
_MOST_ANSWER = 128 << 20
# Kinds of exceptions that say nothing beside their message.
_TELLING_NOTHING = ("", "Exception", "MemoryError", "PanicException", "TooLong")
# What the worker imports; it is told where to find them, and sees nothing else that is installed.
_LIBRARIES = ("jinja2", "markupsafe", "tokenizers")
# Of the environment, only what an interpreter needs to start and a template to tell the time: no secrets.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LC_TIME")


class WorkerError(Exception):
    """What went wrong inside; ``kind`` is the name of the exception there, empty if the worker had to be ended."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.kind in _TELLING_NOTHING else f"{self.kind}: {message}"


class _Allowance:
    def __init__(self) -> None:
        self.left = _SECONDS_TOGETHER


_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What is asked in this block, of any worker, shares one allowance of processor time.

    For what a program asks on its own account, as when it opens a bundle: there are a dozen such questions, and a
    stranger's file that takes nearly as long as it may at each of them takes no longer than at two.
    """
    token = _allowance.set(_allowance.get() or _Allowance())
    try:
        yield
    finally:
        _allowance.reset(token)


class Worker:
    """One object of ``worker`` in a child process. Safe to use from several threads; they wait for each other.

    Args:
        kind: ``template`` or ``tokenizer``.
        megabytes: address space that the child may have.
        held: what it is made of, all of it the stranger's.

    Raises:
        WorkerError: it cannot be made of this text.
    """

    def __init__(self, kind: str, megabytes: int, **held: Any) -> None:
        self._kind, self._megabytes, self._held = kind, megabytes, held
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: Any = None
        with self._lock:
            self._start()

    def ask(self, do: str, **values: Any) -> Any:
        """What a method of the object returns.

        Raises:
            WorkerError: it failed, or needed too much time or memory.
            TypeError, ValueError, RecursionError: ``values`` cannot be written as JSON.
        """
        data = _written(values)
        with self._lock:
            # After a fork the child process is the parent's, and so are its answers.
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            return self._exchange(do, data, len(data) * _SECONDS_PER_BYTE)

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        if not sys.executable:
            raise ResourceError("chat templates and unusual tokenizers need a Python interpreter beside this program")
        command = [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("worker.py")), *_places()]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment | {"TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as error:
            raise ResourceError(f"cannot start a process for the bundle's text: {error.strerror}") from error
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, self._owner)
        data = _written(self._held)
        more = min(len(data) * _SECONDS_PER_BYTE_HELD, max(_MOST_SECONDS_HELD - _SECONDS, 0.0))
        try:
            self._exchange(self._kind, data, more)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _exchange(self, do: str, data: bytes, more: float) -> Any:
        """Ask, and wait for the answer; ``more`` seconds are for the question's size."""
        allowance = _allowance.get()
        own = _SECONDS if allowance is None else min(_SECONDS, allowance.left)
        if own <= 0:
            raise WorkerError("", f"it takes more than {_SECONDS_TOGETHER:.1f} seconds for a few questions together")
        seconds = own + more
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        head = json.dumps({"do": do, "seconds": seconds, "megabytes": self._megabytes})[:-1].encode()
        data = head + b', "with": ' + data + b"}"
        late = threading.Event()

        def expire() -> None:
            late.set()
            process.kill()

        clock = threading.Timer(_PATIENCE * seconds, expire)
        clock.daemon = True
        clock.start()
        answer = None
        try:
            with contextlib.suppress(BrokenPipeError, EOFError):
                process.stdin.write(struct.pack(">Q", len(data)) + data)
                process.stdin.flush()
                (length,) = struct.unpack(">Q", _read(process.stdout, 8))
                if length <= _MOST_ANSWER:
                    answer = json.loads(_read(process.stdout, length).decode("utf-8", "surrogatepass"))
        finally:
            clock.cancel()
            clock.join()
            if answer is None or late.is_set():  # interrupted, or ended: whatever it may still say is for nobody
                self._stop()
        if allowance is not None:
            allowance.left -= max(0.0, (seconds if answer is None else answer["seconds"]) - more)
        if answer is None:
            timed_out = late.is_set() or process.returncode == -getattr(signal, "SIGPROF", 0)
            what = (
                f"it takes more than {seconds:.1f} seconds"
                if timed_out
                else f"it crashes, or needs more than {self._megabytes} MB of memory"
            )
            raise WorkerError("", what)
        if "error" in answer:
            raise WorkerError(answer["error"], answer["message"])
        return answer["result"]


def _written(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """What is not of JSON's own types but means the same."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"expected texts, numbers, lists and mappings, found {type(value).__name__}")


def _read(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def _places() -> list[str]:
    """The folders that the worker's libraries lie in."""
    found = [importlib.util.find_spec(name) for name in _LIBRARIES]
    return list(dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in found if spec and spec.origin))


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill, and wait, so that nothing is left of it."""
    if os.getpid() != owner:
        return
    process.kill()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    process.wait()
