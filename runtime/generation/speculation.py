"""Speculative decoding: its configuration, and how long the draft of a sequence is in each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wisparse.formats import guard
from wisparse.formats.errors import UsageError

# By method: its own configuration keys, and the default of num_speculative_tokens.
METHODS: dict[str, tuple[tuple[str, ...], int]] = {
    "ngram": (("prompt_lookup_min", "prompt_lookup_max"), 7),
    "self": (("sparsity", "bits"), 4),
    "eagle3": (("model",), 4),
    "mtp": ((), 3),
}
_MISPLACED = {  # keys of other methods, and of vLLM
    "model": "only the method eagle3 has a model, its head",
    "draft_tensor_parallel_size": "one device runs the model",
}
_MAX_DRAFTED = 15
# Credit of a sequence, in the time of plain steps: at the start, gained with each plain step, and at most. Drafts spend it
# and accepted tokens earn it, which bounds the time that rejected drafts cost.
_CREDIT, _EARNED, _MAX_CREDIT = 2.0, 0.01, 4.0
# Initial acceptance rates of a token after a match of fewer tokens than ``prompt_lookup_max``, than four times that, and of
# more tokens.
_RATES = (0.4, 0.8, 0.95)
_DECODER_RATE = 0.8  # that of a token that the decoder drafts
_WEIGHT = 1 / 16  # of the newest observation in an acceptance rate
_MIN_SPEEDUP = 1.05  # expected tokens per plain step's time, for a draft to be made


@dataclass(frozen=True)
class SpeculativeConfig:
    """Keys are vLLM's where vLLM has the method. ``ngram``: the tokens after the last earlier occurrence of the newest
    ``prompt_lookup_max`` (or ``_min``) tokens. ``self``: the same weights at another level of the bundle, or rounded to
    int4. ``eagle3``: a head, ``model`` is its folder or Hub id. ``mtp``: the head in the bundle."""

    method: str = "ngram"
    num_speculative_tokens: int = METHODS["ngram"][1]  # most tokens of a draft
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 8
    sparsity: float | None = None
    bits: float | None = None
    model: str | None = None

    @classmethod
    def parse(cls, value: Mapping[str, Any] | str, field: str = "speculative") -> SpeculativeConfig:
        """Validate a mapping or its JSON; raises UsageError."""
        config: Any = value
        if isinstance(value, str):
            try:
                config = json.loads(value)
            except (ValueError, RecursionError):
                config = None
        guard.expect(isinstance(config, Mapping), field, 'a JSON object such as {"method": "ngram"}', value)
        method = config.get("method")
        guard.choice(f"{field}: method", method, tuple(METHODS))
        method_keys, default_tokens = METHODS[method]
        known = ("method", "num_speculative_tokens", *method_keys)
        unknown = next((key for key in config if key not in known), None)
        if unknown is not None:
            reason = _MISPLACED.get(str(unknown), f"unknown to the method {method}; expected {', '.join(known)}")
            raise UsageError(f"{field}: {str(unknown)[:40]!r}: {reason}")
        limits = {"num_speculative_tokens": _MAX_DRAFTED, "prompt_lookup_min": 64, "prompt_lookup_max": 64}
        values: dict[str, Any] = {"num_speculative_tokens": default_tokens}
        for name in known[1:]:
            if name == "model":
                if config.get(name) is None:
                    raise UsageError(f'{field}: expected the folder or Hub id of the head, "model", found none')
                values[name] = guard.place(f"{field}: model", config.get(name))
            elif name in config:
                values[name] = (
                    guard.integer(f"{field}: {name}", config[name], 1, limits[name])
                    if name in limits
                    else guard.number(f"{field}: {name}", config[name], 0.0, 10.0, "a level of the bundle")
                )
        parsed = cls(method, **values)
        if parsed.prompt_lookup_min > parsed.prompt_lookup_max:
            raise UsageError(
                f"{field}: prompt_lookup_min: expected at most prompt_lookup_max ({parsed.prompt_lookup_max}), "
                f"found {parsed.prompt_lookup_min}"
            )
        if method == "self" and parsed.sparsity is None and parsed.bits is None:
            raise UsageError(f'{field}: expected a level to draft at, "sparsity" or "bits", found none')
        return parsed


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
        """Mean number of tokens of a step with a draft: the accepted ones and the one after them."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0

    def __str__(self) -> str:
        return f"drafts {self.acceptance_rate:.0%} accepted, {self.mean_length:.1f} tokens each"


class Drafter:
    """Drafts of one sequence. Their length maximises the expected tokens per time, within the sequence's credit."""

    uses_decoder = False  # whether `Decoder.draft` makes the tokens; ``propose`` then returns -1 for each

    def __init__(self, limit: int, costs: tuple[float, float]) -> None:
        """``limit``: most tokens of a draft. ``costs``: additional time of a step with a draft, and of each of its tokens,
        in plain steps."""
        self._limit, (self._base_cost, self._token_cost) = limit, costs
        self._credit = _CREDIT
        self._plain_next = False  # the next step has to be a plain one

    def take(self, token: int) -> None:
        """Append a token of the sequence."""

    def propose(self, limit: int) -> list[int]:
        """A draft of at most ``limit`` tokens; empty if none is expected to save time."""
        raise NotImplementedError

    def settle(self, drafted: int, accepted: int, *, undecided: bool = False) -> None:
        """Update the credit after a step; ``drafted`` is 0 for a plain one. ``undecided``: the next one has to be plain."""
        self._plain_next = undecided
        spent = self._base_cost + self._token_cost * drafted if drafted else -_EARNED
        self._credit = min(_MAX_CREDIT, self._credit + accepted - spent)

    def _length(self, rate: float, limit: int) -> int:
        """The best length of a draft whose tokens are accepted at ``rate``."""
        best, length, expected, accepted = _MIN_SPEEDUP, 0, 1.0, 1.0
        for count in range(1, min(limit, self._limit) + 1):
            accepted *= rate
            expected += accepted
            cost = self._base_cost + self._token_cost * count
            if cost > self._credit:
                break
            if expected / (1 + cost) > best:
                best, length = expected / (1 + cost), count
        return length


class Chain(Drafter):
    """Drafts that the decoder makes token by token."""

    uses_decoder = True

    def __init__(self, limit: int, costs: tuple[float, float]) -> None:
        super().__init__(limit, costs)
        self._rate = _DECODER_RATE

    def propose(self, limit: int) -> list[int]:
        return [] if self._plain_next else [-1] * self._length(self._rate, limit)

    def settle(self, drafted: int, accepted: int, *, undecided: bool = False) -> None:
        super().settle(drafted, accepted, undecided=undecided)
        for _ in range(accepted):
            self._rate += _WEIGHT * (1 - self._rate)
        if accepted < drafted and not undecided:
            self._rate -= _WEIGHT * self._rate
        if not drafted:  # without observations the rate returns to its initial value
            self._rate += _EARNED * (_DECODER_RATE - self._rate)


class Lookup(Drafter):
    """Prompt lookup: the tokens after the last earlier occurrence of the newest ones, in prompt or answer. The time for a
    token does not depend on the sequence's length."""

    def __init__(self, config: SpeculativeConfig, costs: tuple[float, float], tokens: Sequence[int]) -> None:
        super().__init__(config.num_speculative_tokens, costs)
        self._config = config
        self._tokens = list(tokens)
        # By n-gram size and hash: the position after the n-gram's last occurrence. A collision costs one wrong draft.
        self._ngrams = {
            size: dict(zip(map(hash, zip(*(tokens[i:] for i in range(size)))), range(size, len(tokens))))  # noqa: B905
            for size in {config.prompt_lookup_max, config.prompt_lookup_min}
        }
        # Position of the predicted next token, and the length of the match before it; 0: no prediction.
        self._next = self._matched = 0
        self._rates = list(_RATES)
        self._match()

    def take(self, token: int) -> None:
        tokens = self._tokens
        for size, ngrams in self._ngrams.items():
            if len(tokens) >= size:
                ngrams[hash(tuple(tokens[-size:]))] = len(tokens)
        if self._next:  # the prediction updates the rate also when it was not drafted
            hit = tokens[self._next] == token
            kind = self._kind(self._matched)
            self._rates[kind] += _WEIGHT * (hit - self._rates[kind])
            self._next, self._matched = (self._next + 1, self._matched + 1) if hit else (0, 0)
        tokens.append(token)
        if not self._next:
            self._match()

    def _match(self) -> None:
        for size in (self._config.prompt_lookup_max, self._config.prompt_lookup_min):
            at = self._ngrams[size].get(hash(tuple(self._tokens[-size:])))
            if at is not None:
                self._next, self._matched = at, size
                return

    def _kind(self, matched: int) -> int:
        longest = self._config.prompt_lookup_max
        return 0 if matched < longest else 1 if matched < 4 * longest else 2

    def propose(self, limit: int) -> list[int]:
        if not self._next or self._plain_next:
            return []
        length, tokens = self._length(self._rates[self._kind(self._matched)], limit), self._tokens
        period = len(tokens) - self._next  # past the newest token the prediction repeats itself
        return [tokens[self._next + i % period] for i in range(length)]


def make_drafter(
    config: SpeculativeConfig, verify_costs: tuple[float, float], draft_cost: float, tokens: Sequence[int]
) -> Drafter:
    """The drafter of a sequence that begins with ``tokens``; for the costs see `Decoder`."""
    if config.method == "ngram":
        return Lookup(config, verify_costs, tokens)
    base, per_token = verify_costs
    return Chain(config.num_speculative_tokens, (base, per_token + draft_cost))
