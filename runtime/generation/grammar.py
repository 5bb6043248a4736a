"""What an answer may say: a JSON schema or a grammar, kept by llguidance.

    Grammar (data) -> Grammars.begin -> Derivation: which tokens may come next, token by token

A grammar comes from strangers. Its size is bounded, the library bounds the work of compiling it and of every step, and
its first step is taken while it is compiled, which is where a costly one costs most. One that asks for more at a later
step ends its own answer.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats import guard
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.guard import parse_json

_MOST_CHARACTERS = 1 << 17
_KEPT = 32
# The library's measure of work, about a third of a second of it; without `precompute_large_lexemes`, which is its
# default, some grammars would find no end all the same.
_FUEL = 300_000
# JSON on one line, as Python writes it: white space that may be any has no end, and a small model hides in it.
_JSON_SPACE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# (256, 8) float32: what each byte of a bit mask adds to its eight tokens' logits, lowest bit first.
_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    -np.float32(np.inf),
)


@dataclass(frozen=True)
class Grammar:
    """What an answer has to be.

    Attributes:
        field: the argument or field that it came with, for error messages.
        source: a JSON schema, or a grammar as llguidance's Lark or llama.cpp's GBNF writes it.
        schema: whether it is a JSON schema.
    """

    field: str
    source: str
    schema: bool

    @classmethod
    def of_schema(cls, field: str, schema: Any) -> Grammar:
        """Of a JSON schema: a mapping, or its text.

        Raises:
            UsageError: neither, or too large.
        """
        if isinstance(schema, str):
            text = schema
        elif isinstance(schema, Mapping):
            try:
                text = json.dumps(schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"{field}: expected a JSON schema, found what JSON cannot hold: {error}") from error
        else:
            raise UsageError(f"{field}: expected a JSON schema, found {guard.quoted(schema)}")
        return cls(field, _bounded(field, text), True)

    @classmethod
    def of_text(cls, field: str, text: Any) -> Grammar:
        """Of a grammar's text.

        Raises:
            UsageError: no text, or too long.
        """
        return cls(field, _bounded(field, guard.text(field, text, empty=False)), False)


def _bounded(field: str, text: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{field}: expected at most {_MOST_CHARACTERS:,} characters, found {len(text):,}")
    return guard.text(field, text)


ANY_OBJECT = '{"type": "object"}'


class Derivation:
    """One answer on its way through a grammar; a ``choosing.Constraint``."""

    def __init__(self, matcher: Any, field: str) -> None:
        self._matcher = matcher
        self._field = field

    def mask(self, logits: Tensor) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"{self._field}: it cannot be followed further: {_library_error(self._matcher)}")
        added = _added(bits, logits.device)[: len(logits)]
        logits[: len(added)] += added
        logits[len(added) :] = -torch.inf  # the vocabulary may be padded beyond what the tokenizer knows

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)  # what goes wrong is told by the next mask


def _added(bits: np.ndarray, device: torch.device) -> Tensor:
    """What a mask, (n,) uint8, adds to the logits of its tokens, (8n,) float32 there."""
    if device.type == "cpu":
        return torch.from_numpy(np.take(_ADDED, bits, axis=0).reshape(-1))
    return _added_on_device(bits, device)


def _added_on_device(bits: np.ndarray, device: torch.device) -> Tensor:
    """The bits alone go over, while the step that gives the logits may still run."""
    moved = torch.from_numpy(bits.copy()).to(device, non_blocking=True)
    return _table(device)[moved.long()].view(-1)


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.from_numpy(_ADDED).to(device)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the newest; from any thread."""

    def __init__(self, tokenizer_json: Callable[[], bytes | None], stop_ids: frozenset[int]) -> None:
        """``tokenizer_json`` reads the file; asked by the first grammar."""
        self._tokenizer_json = tokenizer_json
        self._stop_ids = stop_ids
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, grammar: Grammar) -> Derivation:
        """An answer at its beginning.

        Raises:
            UsageError: it does not compile, is too costly, or this model or installation cannot do it.
        """
        with self._lock:
            matcher = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return Derivation(matcher.deep_copy(), grammar.field)

    def _compile(self, grammar: Grammar) -> Any:
        tokenizer = self._read(grammar.field)
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            if grammar.schema:
                text = LLMatcher.grammar_from_json_schema(grammar.source, defaults=_JSON_SPACE)
            else:
                text = LLMatcher.grammar_from_lark(any_to_lark(grammar.source))
        except Exception as error:  # of no class of its own, and deep nesting is a RecursionError
            raise UsageError(f"{grammar.field}: it does not compile: {' '.join(str(error).split())[:300]}") from error
        limits = LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise UsageError(f"{grammar.field}: it does not compile: {_library_error(matcher)}")
        return matcher

    def _read(self, field: str) -> Any:
        """The tokenizer as the library wants it, made by the first grammar."""
        if self._tokenizer is not None:
            return self._tokenizer
        if importlib.util.find_spec("llguidance") is None:
            raise UsageError(f"{field}: it needs the package llguidance: pip install 'wisparse[serve]'")
        from llguidance import LLTokenizer

        data = self._tokenizer_json()
        if data is None or not self._stop_ids:
            lacks = "tokenizer" if data is None else "token that ends a text"
            raise UsageError(f"{field}: this bundle has no {lacks}, which a grammar needs")
        if parse_json(data, "tokenizer.json", BundleError)["model"]["type"] != "BPE":
            raise UsageError(f"{field}: it needs a byte-pair tokenizer, and this model has another")
        try:
            self._tokenizer = LLTokenizer(data.decode(), eos_token=sorted(self._stop_ids))
        except Exception as error:
            raise UsageError(f"{field}: llguidance cannot use this model's tokenizer: {error!s:.200}") from error
        return self._tokenizer


def _library_error(matcher: Any) -> str:
    """The library's own words, on one line."""
    return " ".join(str(matcher.get_error()).split())[:300]
