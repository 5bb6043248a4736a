"""Sampling parameters, and sampling of a token from logits; ``generation.logits`` applies penalties and biases before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats import guard

MAX_LOGPROBS = 100  # the largest number of top log-probabilities beside each token

_MASK = 2**64 - 1
_MAX_BIASES = 10_000
_NUMBERS = (  # name, lower bound, upper bound, expected, whether the lower bound is excluded
    ("temperature", 0.0, 1e4, "a number from 0 (greedy) to 10000", False),
    ("top_p", 0.0, 1.0, "a number above 0, at most 1", True),
    ("min_p", 0.0, 1.0, "a number from 0 to 1", False),
    ("repetition_penalty", 0.0, 100.0, "a number above 0, at most 100", True),
    ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2", False),
    ("presence_penalty", -2.0, 2.0, "a number from -2 to 2", False),
)


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the largest probability
    seed: int | None = None  # None: chosen by the scheduler; a decoder needs a number
    repetition_penalty: float = 1.0  # for tokens in prompt or answer, as in transformers
    frequency_penalty: float = 0.0  # for tokens in the answer, as in OpenAI's API
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None  # number of top log-probabilities, by the unprocessed logits
    suppress_tokens: Sequence[int] | None = None  # never generated; this and the next two: as in transformers
    begin_suppress_tokens: Sequence[int] | None = None  # not the answer's first token
    bad_words_ids: Sequence[Sequence[int]] | None = None  # sequences that are not completed

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"top_k": guard.integer("top_k", self.top_k, 0, 2**63 - 1)}
        for name, low, high, expected, above in _NUMBERS:
            checked[name] = guard.number(name, getattr(self, name), low, high, expected, above=above)
        for name, limit in (("seed", 2**63 - 1), ("logprobs", MAX_LOGPROBS)):
            value = getattr(self, name)
            checked[name] = None if value is None else guard.integer(name, value, 0, limit)
        biases: Any = {} if self.logit_bias is None else self.logit_bias
        expected = f"a mapping of up to {_MAX_BIASES:,} token ids to numbers"
        guard.expect(isinstance(biases, Mapping) and len(biases) <= _MAX_BIASES, "logit_bias", expected, biases)
        ids = [guard.integer("logit_bias", token, 0, 2**31 - 1) for token in biases]
        expected = "numbers from -100 to 100"
        values = [guard.number("logit_bias", bias, -100.0, 100.0, expected) for bias in biases.values()]
        checked["logit_bias"] = dict(zip(ids, values, strict=True)) or None
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            checked[name] = _token_ids(name, getattr(self, name))
        words = () if self.bad_words_ids is None else self.bad_words_ids
        lists = isinstance(words, (list, tuple)) and all(isinstance(word, (list, tuple)) and word for word in words)
        guard.expect(lists, "bad_words_ids", "a list of lists of token ids", words)
        checked["bad_words_ids"] = tuple(_token_ids("bad_words_ids", word) or () for word in words) or None
        for name, value in checked.items():  # as int and float, also from numpy scalars
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """Whether penalties, biases or forbidden tokens change the logits after the first token."""
        penalties = self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return penalties or bool(self.logit_bias or self.suppress_tokens or self.bad_words_ids)


def _token_ids(name: str, ids: Any) -> tuple[int, ...] | None:
    guard.expect(ids is None or isinstance(ids, (list, tuple)), name, "a list of token ids", ids)
    return tuple(guard.integer(name, token, 0, 2**31 - 1) for token in ids or ()) or None


def _mix(state: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number for the token at ``position``: a multiple of 2**-24 in [0, 1), exact in float32."""
    start = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    return (_mix((start + (position + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 40) * 2.0**-24


def choose(logits: np.ndarray, settings: SamplingParams, position: int) -> int:
    """Sample a token from logits (V,); -1 if one is NaN or the largest is infinite. In numpy, whose small operations take a
    third of torch's time."""
    best = int(np.argmax(logits))  # the lowest id of the largest logit, or the first NaN
    if not math.isfinite(logits[best]):
        return -1
    return best if settings.greedy else _draw(logits, settings, position)


def sample(logits: Tensor, settings: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Sample a token per row of logits (B, V) float32: (B,) int64; positions: of the sampled tokens. -1 for a row with a
    NaN or whose largest logit is infinite."""
    if logits.device.type == "cpu":
        return torch.tensor(list(map(choose, logits.numpy(), settings, positions)), dtype=torch.int64)
    best = logits.max(dim=-1)
    chosen = torch.where(best.values.isfinite(), best.indices, -1)
    for row, (setting, position) in enumerate(zip(settings, positions, strict=True)):
        if not setting.greedy:
            chosen[row] = choose(logits[row].cpu().numpy(), setting, position)
    return chosen


def _draw(logits: np.ndarray, settings: SamplingParams, position: int) -> int:
    """A random token by logits (V,), whose largest is finite."""
    assert settings.seed is not None
    # Subtract the maximum first: a tiny temperature must not overflow.
    scaled = (logits.astype(np.float64) - logits.max()) / settings.temperature
    weights = np.exp(scaled)  # the largest is 1, as min_p expects
    if 0 < settings.top_k < len(scaled):
        weights[scaled < np.partition(scaled, -settings.top_k)[-settings.top_k]] = 0.0
    if settings.top_p < 1.0:
        total = weights.sum()
        for count in (1024, len(weights)):  # the largest 1024 are nearly always enough and much faster to sort
            largest = np.partition(weights, -count)[-count:] if count < len(weights) else weights
            ordered = np.sort(largest)[::-1]
            sums = ordered.cumsum() / total
            if sums[-1] >= settings.top_p:
                break
        # Keep the smallest set of most probable tokens whose probabilities sum to top_p, at least one.
        kept = sums - ordered / total < settings.top_p
        weights[weights < ordered[np.count_nonzero(kept) - 1]] = 0.0
    if settings.min_p > 0.0:
        weights[weights < settings.min_p] = 0.0
    sums = weights.cumsum()
    drawn = int(sums.searchsorted(uniform(settings.seed, position) * sums[-1], side="right"))
    return min(drawn, len(sums) - 1)
