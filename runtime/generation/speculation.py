"""Speculation without a second model: cheap guesses of the next tokens are drafts, which one step verifies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wisparse.formats import guard
from wisparse.formats.errors import UsageError

# By method: the keys that it has beside the two that all have, and how many tokens a draft has at most by default.
METHODS: dict[str, tuple[tuple[str, ...], int]] = {
    "ngram": (("prompt_lookup_min", "prompt_lookup_max"), 7),
    "self": (("sparsity", "bits"), 4),
    "eagle3": (("model",), 4),
    "mtp": ((), 3),
}
_OTHERS = {
    "model": "only the method eagle3 has a model, its head",
    "draft_tensor_parallel_size": "one device runs the model",
}
_MOST_DRAFTED = 15
# A sequence may spend so many steps' time on drafts in vain before any was accepted, gains this share of a step with each
# plain one, and never has more in hand than the last figure: text whose drafts are wrong loses at most so much.
_CREDIT, _EARNED, _MOST_CREDIT = 2.0, 0.01, 4.0
# How often the token that followed a match of so many tokens is right, to begin with: below ``prompt_lookup_max``, below
# four times that, and above.
_RATES = (0.4, 0.8, 0.95)
_DECODER_RATE = 0.8  # the same of a token that the decoder drafts
_WEIGHT = 1 / 16  # of the newest observation
_LEAST_GAIN = 1.05


@dataclass(frozen=True)
class SpeculativeConfig:
    """Keys as vLLM has them where it has the method. ``ngram``: what followed the newest ``prompt_lookup_max`` (or
    ``_min``) tokens where they stood before. ``self``: steps of the same weights at another level of the bundle, or
    rounded to int4. ``eagle3``: a head, ``model`` is its folder or Hub id. ``mtp``: the head in the bundle."""

    method: str = "ngram"
    num_speculative_tokens: int = METHODS["ngram"][1]  # that a draft has at most
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 8
    sparsity: float | None = None
    bits: float | None = None
    model: str | None = None

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
        method = config.get("method")
        guard.choice(f"{field}: method", method, tuple(METHODS))
        own, drafted = METHODS[method]
        known = ("method", "num_speculative_tokens", *own)
        unknown = next((key for key in config if key not in known), None)
        if unknown is not None:
            why = _OTHERS.get(str(unknown), f"unknown to the method {method}; expected {', '.join(known)}")
            raise UsageError(f"{field}: {str(unknown)[:40]!r}: {why}")
        most = {"num_speculative_tokens": _MOST_DRAFTED, "prompt_lookup_min": 64, "prompt_lookup_max": 64}
        values: dict[str, Any] = {"num_speculative_tokens": drafted}
        for name in known[1:]:
            if name == "model":
                if config.get(name) is None:
                    raise UsageError(f'{field}: expected the folder or Hub id of the head, "model", found none')
                values[name] = guard.place(f"{field}: model", config.get(name))
            elif name in config:
                value = config[name]
                values[name] = (
                    guard.integer(f"{field}: {name}", value, 1, most[name])
                    if name in most
                    else guard.number(f"{field}: {name}", value, 0.0, 10.0, "a level of the bundle")
                )
        found = cls(method, **values)
        if found.prompt_lookup_min > found.prompt_lookup_max:
            raise UsageError(
                f"{field}: prompt_lookup_min: expected at most prompt_lookup_max ({found.prompt_lookup_max}), "
                f"found {found.prompt_lookup_min}"
            )
        if method == "self" and found.sparsity is None and found.bits is None:
            raise UsageError(f'{field}: expected a level to draft at, "sparsity" or "bits", found none')
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


class Drafter:
    """How long the drafts of one sequence are: as they are likely to save time, and as far as its credit goes."""

    asks = False  # whether `Decoder.draft` gives the tokens; -1 stands for each in what ``propose`` gives

    def __init__(self, most: int, costs: tuple[float, float]) -> None:
        """``most``: tokens of a draft. ``costs``: of a step with its draft, in plain steps: what it takes beyond one,
        and for each drafted token."""
        self._most, (self._beyond, self._each) = most, costs
        self._credit = _CREDIT
        self._held = False  # the next step has to be a plain one

    def take(self, token: int) -> None:
        """Append a token, whatever step gave it."""

    def propose(self, most: int) -> list[int]:
        """A draft of at most so many tokens; empty where it is not likely to save time."""
        raise NotImplementedError

    def settle(self, drafted: int, accepted: int, *, undecided: bool = False) -> None:
        """Account for a step; ``drafted`` is 0 for a plain one. ``undecided``: the next one has to be plain."""
        self._held = undecided
        spent = self._beyond + self._each * drafted if drafted else -_EARNED
        self._credit = min(_MOST_CREDIT, self._credit + accepted - spent)

    def _length(self, rate: float, most: int) -> int:
        """Of the best draft of tokens that are right so often."""
        best, length, expected, right = _LEAST_GAIN, 0, 1.0, 1.0
        for count in range(1, min(most, self._most) + 1):
            right *= rate
            expected += right
            cost = self._beyond + self._each * count
            if cost > self._credit:
                break
            if expected / (1 + cost) > best:
                best, length = expected / (1 + cost), count
        return length


class Chain(Drafter):
    """Drafts that the decoder makes token by token."""

    asks = True

    def __init__(self, most: int, costs: tuple[float, float]) -> None:
        super().__init__(most, costs)
        self._rate = _DECODER_RATE

    def propose(self, most: int) -> list[int]:
        return [] if self._held else [-1] * self._length(self._rate, most)

    def settle(self, drafted: int, accepted: int, *, undecided: bool = False) -> None:
        super().settle(drafted, accepted, undecided=undecided)
        for _ in range(accepted):
            self._rate += _WEIGHT * (1 - self._rate)
        if accepted < drafted and not undecided:
            self._rate -= _WEIGHT * self._rate
        if not drafted:  # what has become of the text since the last draft is not known
            self._rate += _EARNED * (_DECODER_RATE - self._rate)


class Lookup(Drafter):
    """The drafts of one sequence: what followed its newest tokens where they stood before, in prompt or answer. Each
    token takes the same time, however long the sequence is."""

    def __init__(self, config: SpeculativeConfig, costs: tuple[float, float], tokens: Sequence[int]) -> None:
        super().__init__(config.num_speculative_tokens, costs)
        self._config = config
        self._tokens = list(tokens)
        # The place behind the newest occurrence of so many tokens, by their hash: a collision makes a draft in vain.
        self._places = {
            size: dict(zip(map(hash, zip(*(tokens[i:] for i in range(size)))), range(size, len(tokens))))  # noqa: B905
            for size in {config.prompt_lookup_max, config.prompt_lookup_min}
        }
        # Where the token is that should come next, and how many tokens before it match; 0: nowhere.
        self._at = self._matched = 0
        self._rates = list(_RATES)
        self._find()

    def take(self, token: int) -> None:
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
        if not self._at or self._held:
            return []
        length, tokens = self._length(self._rates[self._kind(self._matched)], most), self._tokens
        period = len(tokens) - self._at  # beyond the newest token the text is taken to go on as it did
        return [tokens[self._at + i % period] for i in range(length)]


def make_drafter(
    config: SpeculativeConfig, verify_costs: tuple[float, float], draft_cost: float, tokens: Sequence[int]
) -> Drafter:
    """Of a sequence that begins with these tokens; costs as a `Decoder` has them."""
    if config.method == "ngram":
        return Lookup(config, verify_costs, tokens)
    beyond, each = verify_costs
    return Chain(config.num_speculative_tokens, (beyond, each + draft_cost))
