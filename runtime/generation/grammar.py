"""Grammars that constrain an answer, by llguidance. Each is first compiled in a worker process under limits of time, memory
and stack. A grammar that exceeds them is refused; this process compiles only accepted ones."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats import guard
from wisparse.formats.errors import UnavailableError, UsageError

from ..tokenizer import Tokenizer
from . import grammar_worker
from .grammar_worker import MAX_DEPTH, MAX_PARTS, STACK_BYTES, Vocabulary, build, one_line

log = logging.getLogger(__name__)

_MAX_CHARACTERS = 1 << 17
MAX_SECONDS = 2  # of processor time
MAX_BYTES = 512 << 20  # beyond the worker's memory before it compiles
WAIT_SECONDS = 20.0  # for a reply, on a busy machine
# Limits of the caches of compiled grammars, and of error messages.
_CACHE_SIZE, _CACHE_BYTES, _MAX_REFUSED = 32, 256 << 20, 1024
# Error messages by exceeded limit.
_EXCEEDED = {
    "depth": f"expected at most {MAX_DEPTH} rules or references within one another, found {{found:,}}; flatten it",
    "parts": f"expected at most {MAX_PARTS:,} names of rules and optional parts, found {{found:,}}; shorten it",
    "stack": f"expected at most {STACK_BYTES >> 20} MiB of stack to compile it, found more: rules, references or "
    "optional properties stand too deep within one another; flatten it, or split it",
    "time": "expected at most {seconds} seconds of processor time to compile it, found more; simplify it",
    "memory": "expected at most {mebibytes} MiB of memory to compile it, found more; simplify it",
    "unknown": "expected a grammar that compiles, found one that ended llguidance by {found}; simplify it",
}


# Keywords of JSON schemas whose values are data, and those whose values map names to schemas.
DATA_KEYWORDS = ("const", "enum", "default", "examples")
NAMED_KEYWORDS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# What llguidance knows of ``format``; it refuses schemas with others and with these keywords, which pydantic writes.
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
_UNENFORCED = ("uniqueItems", "propertyNames")
# llguidance holds numbers as doubles, and ends of ranges also as 64-bit integers.
_LARGEST_EXACT, _LARGEST_BOUND = 1 << 53, (1 << 63) - 1024
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")


@functools.lru_cache(256)
def _log_ignored(what: str) -> None:
    log.warning("JSON schemas: %s does not constrain answers", what)


def supported_schema(schema: Any, named: bool = False) -> Any:
    """A JSON schema without unknown formats, which do not constrain (JSON Schema's rule), and ``uniqueItems`` and
    ``propertyNames``, which a grammar cannot check. A pattern that looks around, which llguidance refuses, is left out
    beside a known format, and with its branch of ``anyOf`` if another is left. Integers as bounds are moved inwards to
    such as llguidance holds. ``named``: ``schema`` maps names to schemas, so its keys are no keywords. UsageError: an
    integer of ``const`` or ``enum`` would be rounded."""
    if isinstance(schema, list):
        return [supported_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    if not named and "pattern" in schema:
        form = str(schema.get("format"))
        # A time of zod's has no time zone, RFC 3339's needs one: together they fit no text.
        dropped = "pattern" if form in _FORMATS and _looks_around(schema) else "format" if form == "time" else None
        schema = {key: value for key, value in schema.items() if key != dropped}
    for key, value in schema.items():
        if not named and key == "format" and isinstance(value, str) and value not in _FORMATS:
            if re.fullmatch("uuid[1-8]", value):
                kept[key] = "uuid"
            else:
                _log_ignored(f"the format {value!r:.40}")
        elif not named and key in _UNENFORCED:
            _log_ignored(key)
        elif not named and key in (*_LOWER, *_UPPER) and type(value) is int:
            kept[key] = _bound(value) if key in _LOWER else -_bound(-value)
        else:
            data = not named and key in DATA_KEYWORDS
            if data and key in ("const", "enum"):
                _require_exact(value)
            kept[key] = value if data else supported_schema(value, not named and key in NAMED_KEYWORDS)
    if not named and isinstance(branches := kept.get("anyOf"), list):
        kept["anyOf"] = [branch for branch in branches if not _looks_around(branch)] or branches
    return kept


def _bound(value: int) -> int:
    """The least number of ``value`` and above that is a double, and above the least 64-bit integer."""
    value = min(max(value, -_LARGEST_BOUND), 1 << 64)
    near = float(value)
    return int(near if near >= value else math.nextafter(near, math.inf))


def _require_exact(value: Any) -> None:
    if isinstance(value, int) and abs(value) > _LARGEST_EXACT:
        size = f"{_LARGEST_EXACT:,}"
        raise UsageError(
            f"JSON schemas: expected integers in const and enum from -{size} to {size}, found {value!s:.40}; larger ones "
            "would be rounded: make it a string"
        )
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_exact(item)


def _looks_around(schema: Any) -> bool:
    return isinstance(schema, dict) and _LOOK_AROUND.search(str(schema.get("pattern"))) is not None


@dataclass(frozen=True)
class Grammar:
    field: str  # the argument's or JSON field's name, for error messages
    source: str  # a JSON schema, or a grammar in llguidance's Lark or llama.cpp's GBNF
    schema: bool = False  # whether ``source`` is a JSON schema

    @classmethod
    def of_schema(cls, field: str, schema: Any) -> Grammar:
        """A JSON schema: a mapping, or its text."""
        if isinstance(schema, str):
            with contextlib.suppress(ValueError, RecursionError):  # llguidance reports the error
                schema = json.dumps(supported_schema(json.loads(schema)))
        elif isinstance(schema, Mapping):
            try:
                schema = json.dumps(supported_schema(dict(schema)))
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"{field}: expected a JSON schema, found what JSON cannot hold: {error}") from error
        guard.expect(isinstance(schema, str), field, "a JSON schema", schema)
        return cls(field, schema, True)

    def __post_init__(self) -> None:
        guard.text(self.field, self.source, empty=self.schema)
        if (found := len(self.source)) > _MAX_CHARACTERS:
            raise UsageError(f"{self.field}: expected at most {_MAX_CHARACTERS:,} characters, found {found:,}")

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.schema} {self.source}".encode(errors="surrogatepass")).digest()


class RefusedGrammarError(UsageError):
    """A grammar that does not compile, exceeds a limit, or could not be followed in an answer."""


class Constraint:
    """A grammar's matcher, in its state after the tokens of one answer. ``refuse`` is called with the reason if the
    grammar cannot be followed further."""

    def __init__(self, matcher: Any, field: str, refuse: Callable[[str], None]) -> None:
        self._matcher, self._field, self._refuse = matcher, field, refuse

    def mask(self, logits: Tensor) -> None:
        """Set the logits (V,) float32 of tokens that are not allowed next to minus infinity, in place."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            why = f"it cannot be followed further: {one_line(self._matcher.get_error())}"
            self._refuse(why)
            raise RefusedGrammarError(f"{self._field}: {why}")
        mask_bits(logits, bits)

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)  # an error shows at the next mask


def mask_bits(logits: Tensor, bits: np.ndarray) -> None:
    """Set logits (V,) whose bit in (n,) uint8, lowest first, is 0 to minus infinity, and those beyond the last bit: V may
    be padded beyond the tokenizer's vocabulary. Only the bits are copied to the logits' device."""
    on_device = torch.from_numpy(bits.copy()).to(logits.device, non_blocking=True)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    banned = ((on_device[:, None] >> shifts) & 1 == 0).view(-1)[: len(logits)]
    logits[: len(banned)].masked_fill_(banned, -torch.inf)
    logits[len(banned) :] = -torch.inf


class GrammarProcess:
    """The worker process, ``grammar_worker.py``: started for the first grammar, and again if it died. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: list[int]) -> None:
        self._vocabulary, self._stop_ids = vocabulary, stop_ids
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    def compile(self, grammar: Grammar) -> tuple[str, int]:
        """The grammar in llguidance's format, and bytes of memory that compiling it took; GrammarError if refused."""
        task = {"source": grammar.source, "schema": grammar.schema, "seconds": MAX_SECONDS, "bytes": MAX_BYTES}
        reply = self._ask(task) or self._ask(task)  # one retry if the worker died
        if reply is None:
            raise UnavailableError("the process that compiles grammars ended without an answer, twice; try again")
        if "converted" in reply:
            return reply["converted"], reply["bytes"]
        if "error" in reply:
            raise GrammarError(f"it does not compile: {reply['error']}")
        raise GrammarError(_EXCEEDED[reply["exceeded"]].format(**reply, seconds=MAX_SECONDS, mebibytes=MAX_BYTES >> 20))

    def _ask(self, task: Mapping[str, Any]) -> dict[str, Any] | None:
        """The worker's reply; None if it died. One that does not reply in time is ended."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(WAIT_SECONDS)
            with theirs, self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                try:
                    assert self._control is not None
                    asked = self._process
                    socket.send_fds(self._control, [b"0"], [theirs.fileno()])
                except OSError:  # the worker died
                    self._stop()
                    return None
            try:
                ours.sendall(json.dumps(task).encode())
                ours.shutdown(socket.SHUT_WR)
                reply = b"".join(iter(lambda: ours.recv(1 << 16), b""))
                return json.loads(reply) if reply else None
            except TimeoutError as error:
                log.warning(
                    "the process that compiles grammars did not answer in %g seconds; it is replaced", WAIT_SECONDS
                )
                with self._lock:
                    if self._process is asked:
                        self._stop()
                        self._process = None
                raise UnavailableError(f"a grammar was not compiled in {WAIT_SECONDS:g} seconds; try again") from error
            except (OSError, ValueError):  # the worker died while it replied
                return None

    def _start(self) -> None:
        if self._process is not None:
            log.warning("the process that compiles grammars had ended (%s); starting it again", self._process.poll())
            self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: do not add the script's folder to sys.path.
            command = [sys.executable, "-P", grammar_worker.__file__, str(theirs.fileno())]
            options: dict[str, Any] = {"pass_fds": [theirs.fileno()], "start_new_session": True}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, **options)
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            tokens = [token.decode("latin-1") for token in self._vocabulary.tokens]
            process.stdin.write(json.dumps([tokens, self._vocabulary.special_token_ids, self._stop_ids]).encode())
        self._process, self._control = process, ours
        self._stop = weakref.finalize(self, _end, process, ours)

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._stop()
                self._process = None


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with its forks
    process.wait()


class GrammarError(ValueError):
    """Why a grammar is refused; the message has no field name."""


class Grammars:
    """Compiles grammars for one tokenizer; caches compiled ones and refusals (LRU). Thread-safe."""

    def __init__(self, text: Tokenizer | None, stop_ids: frozenset[int]) -> None:
        self._text, self._stop_ids = text, sorted(stop_ids)
        self._tokenizer: Any = None
        self._process: GrammarProcess | None = None
        self._compiled: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()  # matcher, its bytes
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._lock, self._init_lock = threading.Lock(), threading.Lock()

    def known(self, grammar: Grammar) -> Constraint | None:
        """``begin`` without waiting: None if the grammar has to be compiled first."""
        digest = grammar.digest
        with self._lock:
            if digest in self._refused:
                self._refused.move_to_end(digest)
                raise RefusedGrammarError(f"{grammar.field}: {self._refused[digest]}")
            if digest not in self._compiled:
                return None
            self._compiled.move_to_end(digest)
            return self._constraint(self._compiled[digest][0], grammar)

    def begin(self, grammar: Grammar) -> Constraint:
        """The constraint of a new answer. UsageError: it does not compile, exceeds a limit, or lacks a tokenizer."""
        if (constraint := self.known(grammar)) is not None:
            return constraint
        tokenizer, process = self._initialise(grammar.field)
        try:
            converted, size = process.compile(grammar)
            matcher = build(tokenizer, converted)
            if matcher.is_error():
                raise GrammarError(f"it does not compile: {one_line(matcher.get_error())}")
        except GrammarError as error:
            self._refuse(grammar.digest, str(error))
            raise RefusedGrammarError(f"{grammar.field}: {error}") from None
        with self._lock:
            self._compiled[grammar.digest] = matcher, size
            while len(self._compiled) > _CACHE_SIZE or sum(size for _, size in self._compiled.values()) > _CACHE_BYTES:
                self._compiled.popitem(last=False)
        return self._constraint(matcher, grammar)

    def _constraint(self, matcher: Any, grammar: Grammar) -> Constraint:
        return Constraint(matcher.deep_copy(), grammar.field, functools.partial(self._refuse, grammar.digest))

    def _refuse(self, digest: bytes, why: str) -> None:
        """Remember a grammar that does not compile or failed in an answer, to refuse it at once from now on."""
        with self._lock:
            self._compiled.pop(digest, None)
            self._refused[digest] = why
            while len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _initialise(self, field: str) -> tuple[Any, GrammarProcess]:
        """llguidance's tokenizer and the worker process, created for the first grammar."""
        with self._init_lock:
            if self._process is not None:
                return self._tokenizer, self._process
            if importlib.util.find_spec("llguidance") is None:
                raise UsageError(f"{field}: it needs the package llguidance: pip install llguidance")
            text = self._text
            if text is None or not self._stop_ids:
                missing = "tokenizer" if text is None else "token that ends a text"
                raise UsageError(f"{field}: this bundle has no {missing}, which a grammar needs")
            if (tokens := text.vocabulary()) is None:
                kinds = "a byte-level tokenizer or one of SentencePiece's form"
                raise UsageError(f"{field}: it needs {kinds}, and this model has another")
            special = sorted(text.special_ids.values())
            encode = text.literal_encoder({*special, *self._stop_ids})
            try:
                vocabulary = Vocabulary(tokens, special, self._stop_ids, encode)
            except Exception as error:
                raise UsageError(f"{field}: llguidance cannot use this model's tokenizer: {error!s:.200}") from error
            self._tokenizer, self._process = vocabulary.library, GrammarProcess(vocabulary, self._stop_ids)
            return self._tokenizer, self._process
