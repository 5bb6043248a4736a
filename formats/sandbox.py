"""Chat templates: messages to the text a model was trained on, rendered as transformers does, in a process apart.

The template is a program that came with the model: it runs without access to Python, and on a budget (``sandbox``).
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
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from .errors import BundleError, ResourceError, UsageError

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
        command = [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("sandbox_worker.py")), *_places()]
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


_MEGABYTES = 512
# A rendered conversation is its messages, tools and documents, each maybe indented or told twice, between fixed words.
_CHARACTERS = 200_000
_TIMES = 8


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        variables: what the template sees beside the messages: ``bos_token``, ``eos_token`` and the like.

    Raises:
        BundleError: not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        try:
            self._worker = Worker("template", _MEGABYTES, source=source, variables=dict(variables))
        except WorkerError as error:
            raise BundleError(f"the chat template is no valid Jinja: {error}; convert again without it") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """The conversation as text, ready for the model's answer.

        Args:
            messages: each with ``role`` and ``content``; texts, numbers, lists and mappings, as in JSON.
            add_generation_prompt: end with the opening of an assistant's turn.
            more: further variables the template may know (``enable_thinking``, ``tools``, …).

        Raises:
            UsageError: the template refuses these messages, or they hold something else than JSON has.
            BundleError: the template itself fails, takes too long, or makes far more text than it was given.
        """
        values = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **more,
        }
        try:
            text: str = self._worker.ask("render", values=values, most=_CHARACTERS + _TIMES * _length(values))
        except WorkerError as error:
            if error.kind == "Refusal":
                reason = error.args[0]
                raise UsageError(f"the model's chat template refuses these messages: {reason}") from error
            raise BundleError(f"the chat template fails ({error}); use --ignore-chat-template") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"messages: {error}") from error
        return text


def _length(value: Any) -> int:
    """Characters of all texts in ``value``."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_length(key) + _length(item) for key, item in value.items())
    return sum(map(_length, value)) if isinstance(value, (list, tuple)) else 8
