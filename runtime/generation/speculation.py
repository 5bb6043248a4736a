"""Speculation without a second model: tokens that followed the same words before are drafts, which one step verifies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wisparse.formats import guard
from wisparse.formats.errors import UsageError

METHODS = ("ngram",)
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_OTHERS = {
    "model": "draft models and heads are not there; expected the method ngram alone",
    "draft_tensor_parallel_size": "one device runs the model",
}
_MOST_DRAFTED = 15
# A sequence may spend so many steps' time on drafts in vain before any was accepted, gains this share of a step with each
# plain one, and never has more in hand than the last figure: text that does not repeat itself loses at most so much.
_CREDIT, _EARNED, _MOST_CREDIT = 2.0, 0.01, 4.0
# How often the token that followed a match of so many tokens is right, to begin with: below ``prompt_lookup_max``, below
# four times that, and above.
_RATES = (0.4, 0.8, 0.95)
_WEIGHT = 1 / 16  # of the newest observation
_LEAST_GAIN = 1.05


@dataclass(frozen=True)
class SpeculativeConfig:
    """vLLM's keys: how many tokens a draft has at most, and how many of the newest tokens must have stood there before."""

    num_speculative_tokens: int = 7
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 8

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str, field: str = "speculative") -> SpeculativeConfig:
        """The configuration, a mapping or its JSON; raises UsageError."""
        config: Any = given
        if isinstance(given, str):
            try:
                config = json.loads(given)
            except (ValueError, RecursionError):
                config = None
        wanted = 'a JSON object such as {"method": "ngram"}'
        guard.expect(isinstance(config, Mapping), field, wanted, given)
        unknown = next((key for key in config if key not in _KEYS), None)
        if unknown is not None:
            why = _OTHERS.get(str(unknown), f"unknown; expected {', '.join(_KEYS)}")
            raise UsageError(f"{field}: {str(unknown)[:40]!r}: {why}")
        guard.choice(f"{field}: method", config.get("method"), METHODS)
        numbers = {
            name: guard.integer(f"{field}: {name}", config.get(name, getattr(cls, name)), 1, most)
            for name, most in (
                ("num_speculative_tokens", _MOST_DRAFTED), ("prompt_lookup_min", 64), ("prompt_lookup_max", 64)
            )
        }  # fmt: skip
        found = cls(**numbers)
        if found.prompt_lookup_min > found.prompt_lookup_max:
            raise UsageError(
                f"{field}: prompt_lookup_min: expected at most prompt_lookup_max ({found.prompt_lookup_max}), "
                f"found {found.prompt_lookup_min}"
            )
        return found


@dataclass
class DraftCounts:
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens that a verified draft gave, the one that follows it included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0

    def __str__(self) -> str:
        return f"drafts {self.acceptance_rate:.0%} accepted, {self.mean_length:.1f} tokens each"


class Lookup:
    """The drafts of one sequence: what followed its newest tokens where they stood before, in prompt or answer. Each
    token takes the same time, however long the sequence is."""

    def __init__(self, config: SpeculativeConfig, costs: tuple[float, float], tokens: Sequence[int]) -> None:
        """``costs``: of a step that verifies, in plain steps: what it takes beyond one, and for each drafted token."""
        self._config, (self._beyond, self._each) = config, costs
        self._tokens = list(tokens)
        # The place behind the newest occurrence of so many tokens, by their hash: a collision makes a draft in vain.
        self._places = {
            size: dict(zip(map(hash, zip(*(tokens[i:] for i in range(size)))), range(size, len(tokens))))  # noqa: B905
            for size in {config.prompt_lookup_max, config.prompt_lookup_min}
        }
        # Where the token is that should come next, and how many tokens before it match; 0: nowhere.
        self._at = self._matched = 0
        self._rates, self._credit = list(_RATES), _CREDIT
        self._held = False  # the next step has to be a plain one
        self._find()

    def take(self, token: int) -> None:
        """Append a token, whatever step gave it."""
        tokens = self._tokens
        for size, places in self._places.items():
            if len(tokens) >= size:
                places[hash(tuple(tokens[-size:]))] = len(tokens)
        if self._at:  # what a draft would have been tells its worth, whether it was one or not
            hit = tokens[self._at] == token
            kind = self._kind(self._matched)
            self._rates[kind] += _WEIGHT * (hit - self._rates[kind])
            self._at, self._matched = (self._at + 1, self._matched + 1) if hit else (0, 0)
        tokens.append(token)
        if not self._at:
            self._find()

    def _find(self) -> None:
        for size in (self._config.prompt_lookup_max, self._config.prompt_lookup_min):
            at = self._places[size].get(hash(tuple(self._tokens[-size:])))
            if at is not None:
                self._at, self._matched = at, size
                return

    def _kind(self, matched: int) -> int:
        longest = self._config.prompt_lookup_max
        return 0 if matched < longest else 1 if matched < 4 * longest else 2

    def propose(self, most: int) -> list[int]:
        """A draft of at most so many tokens; empty where it is not likely to save time."""
        if not self._at or self._held:
            return []
        rate, tokens = self._rates[self._kind(self._matched)], self._tokens
        best, length, expected, right = _LEAST_GAIN, 0, 1.0, 1.0
        for count in range(1, min(most, self._config.num_speculative_tokens) + 1):
            right *= rate
            expected += right
            cost = self._beyond + self._each * count
            if cost > self._credit:
                break
            if expected / (1 + cost) > best:
                best, length = expected / (1 + cost), count
        period = len(tokens) - self._at  # beyond the newest token the text is taken to go on as it did
        return [tokens[self._at + i % period] for i in range(length)]

    def settle(self, drafted: int, accepted: int, *, undecided: bool = False) -> None:
        """Account for a step; ``drafted`` is 0 for a plain one. ``undecided``: the next one has to be plain."""
        self._held = undecided
        spent = self._beyond + self._each * drafted if drafted else -_EARNED
        self._credit = min(_MOST_CREDIT, self._credit + accepted - spent)
