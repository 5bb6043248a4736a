"""What an answer may be: penalties, bias and grammars (llguidance's) on a sequence's logits, and log-probabilities."""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats import guard
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.guard import parse_json

from ..decoding.sampling import SamplingParams

_MOST_CHARACTERS = 1 << 17
_KEPT = 32  # compiled grammars
_FUEL = 300_000  # the library's measure of work, about a third of a second
# JSON on one line, as Python writes it: any amount of white space would let a small model write nothing else.
JSON_SPACE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Grammar:
    """What an answer has to be."""

    field: str  # the argument or field that it came with, for error messages
    source: str  # a JSON schema, or a grammar as llguidance's Lark or llama.cpp's GBNF writes it
    schema: bool = False  # whether it is a JSON schema

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
        return cls(field, schema, True)

    def __post_init__(self) -> None:
        guard.text(self.field, self.source, empty=self.schema)
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
                text = LLMatcher.grammar_from_json_schema(grammar.source, defaults=JSON_SPACE)
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


# Positions of a prompt scored together: their log-probabilities need as much memory as their logits.
_SCORE_CHUNK = 64


@dataclass(frozen=True)
class TokenScore:
    """A token's log-probability, and the most probable tokens in its place with theirs, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogitsProcessor:
    """Penalties, bias and grammar of one sequence."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], constraint: Constraint | None = None) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._prompt = prompt
        self._counts: Tensor | None = None  # (V,) float32: how often the answer holds each token
        self._seen: Tensor | None = None  # (V,) bool: tokens of prompt and answer
        self._new: list[int] = []  # not counted yet
        self._bias: tuple[Tensor, Tensor] | None = None

    @property
    def active(self) -> bool:
        """Whether logits change before a token is sampled."""
        return self._constraint is not None or self.sampling.adjusts

    def process(self, logits: Tensor) -> None:
        """Change a row of logits (V,) float32 in place."""
        sampling, device = self.sampling, logits.device
        if sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty:
            if self._counts is None or self._seen is None:
                self._counts = torch.zeros(len(logits), device=device)
                self._seen = torch.zeros(len(logits), dtype=torch.bool, device=device)
                self._seen[torch.tensor(self._prompt, dtype=torch.int64, device=device)] = True
            for token in self._new:
                self._counts[token] += 1
                self._seen[token] = True
            self._new.clear()
            if (penalty := sampling.repetition_penalty) != 1.0:
                penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
                logits.copy_(torch.where(self._seen, penalised, logits))
            logits -= self._counts * sampling.frequency_penalty + (self._counts > 0) * sampling.presence_penalty
        if sampling.logit_bias is not None:
            if self._bias is None:
                ids, values = list(sampling.logit_bias), list(sampling.logit_bias.values())
                self._bias = torch.tensor(ids, device=device), torch.tensor(values, dtype=torch.float32, device=device)
            logits[self._bias[0]] += self._bias[1]
        if self._constraint is not None:
            self._constraint.mask(logits)

    def take(self, token: int) -> None:
        """The sequence continues with this token."""
        self._new.append(token)
        if self._constraint is not None:
            self._constraint.take(token)


def score_tokens(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenScore]:
    """The log-probability of each token by its logits (T, V), and the ``count`` most probable tokens in its place."""
    scores: list[TokenScore] = []
    for start in range(0, len(token_ids), _SCORE_CHUNK):
        tokens = token_ids[start : start + _SCORE_CHUNK]
        log_probs = logits[start : start + len(tokens)].float().log_softmax(dim=-1)
        own = log_probs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        top = log_probs.topk(min(count, log_probs.shape[1]), dim=-1)
        tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        scores += [
            TokenScore(token, logprob, tuple(zip(ids, values, strict=True)))
            for token, logprob, (ids, values) in zip(tokens, own, tops, strict=True)
        ]
    return scores
