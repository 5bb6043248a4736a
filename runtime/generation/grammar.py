"""What an answer may be: a JSON schema or a grammar, compiled and followed by llguidance."""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
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
_KEPT = 32  # compiled grammars
_FUEL = 300_000  # the library's measure of work, about a third of a second
# JSON on one line, as Python writes it: any amount of white space would let a small model write nothing else.
_JSON_SPACE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Grammar:
    """What an answer has to be."""

    field: str  # the argument or field that it came with, for error messages
    source: str  # a JSON schema, or a grammar as llguidance's Lark or llama.cpp's GBNF writes it
    schema: bool  # whether it is a JSON schema

    @classmethod
    def of_schema(cls, field: str, schema: Any) -> Grammar:
        """A JSON schema: a mapping, or its text."""
        if isinstance(schema, Mapping):
            try:
                schema = json.dumps(schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"{field}: expected a JSON schema, found what JSON cannot hold: {error}") from error
        elif not isinstance(schema, str):
            raise UsageError(f"{field}: expected a JSON schema, found {guard.quoted(schema)}")
        return cls(field, guard.text(field, schema), True)

    @classmethod
    def of_text(cls, field: str, text: Any) -> Grammar:
        return cls(field, guard.text(field, text, empty=False), False)

    def __post_init__(self) -> None:
        if (found := len(self.source)) > _MOST_CHARACTERS:
            raise UsageError(f"{self.field}: expected at most {_MOST_CHARACTERS:,} characters, found {found:,}")


class Constraint:
    """What one answer may be: a grammar, at the place that the answer has reached."""

    def __init__(self, matcher: Any, field: str) -> None:
        self._matcher, self._field = matcher, field

    def mask(self, logits: Tensor) -> None:
        """Set the logits (V,) float32 of what may not come next to minus infinity, in place."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"{self._field}: it cannot be followed further: {_library_error(self._matcher)}")
        mask_bits(logits, bits)

    def take(self, token: int) -> None:
        """Advance by an allowed token."""
        self._matcher.consume_token(token)  # an error shows at the next mask


def mask_bits(logits: Tensor, bits: np.ndarray) -> None:
    """Set logits (V,) whose bit in (n,) uint8, lowest first, is 0 to minus infinity; also those that have no bit, as the
    vocabulary may be padded beyond what the tokenizer knows. Only the bits are copied to the logits' device."""
    on_device = torch.from_numpy(bits.copy()).to(logits.device, non_blocking=True)
    place = torch.arange(8, dtype=torch.uint8, device=logits.device)
    banned = ((on_device[:, None] >> place) & 1 == 0).view(-1)[: len(logits)]
    logits[: len(banned)].masked_fill_(banned, -torch.inf)
    logits[len(banned) :] = -torch.inf


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the newest; from any thread."""

    def __init__(self, tokenizer_json: Callable[[], bytes | None], stop_ids: frozenset[int]) -> None:
        """``tokenizer_json`` reads the file; called for the first grammar."""
        self._tokenizer_json, self._stop_ids = tokenizer_json, stop_ids
        self._tokenizer: Any = None
        self._compile = functools.lru_cache(_KEPT)(self._compile_anew)
        self._lock = threading.Lock()

    def begin(self, grammar: Grammar) -> Constraint:
        """An answer at its beginning. UsageError: it does not compile, is too costly, or cannot be used here."""
        with self._lock:
            return Constraint(self._compile(grammar).deep_copy(), grammar.field)

    def _compile_anew(self, grammar: Grammar) -> Any:
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
