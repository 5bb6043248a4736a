"""What a sequence's own history does to its next token, and what the model thought of each token.

    logits -> repetition penalty -> frequency and presence penalties -> bias -> grammar -> sampling.sample

A request that asks for none of this is left to its decoder's own step, which may choose on its device. One that does
has its row of logits looked at here, wherever the logits are: the same code for every back end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..decoding.sampling import SamplingParams

# Positions of a prompt that are scored together: their log-probabilities need as much memory as their logits.
_TOGETHER = 64


class Constraint(Protocol):
    """What an answer may say: a grammar, at the place to which one sequence has got."""

    def mask(self, logits: Tensor) -> None:
        """Set the logits (V,) float32 of what may not come next to minus infinity.

        Raises:
            WisparseError: nothing can be said about this place.
        """

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""


@dataclass(frozen=True)
class TokenScore:
    """What the model thought of a token.

    Attributes:
        token_id, logprob: the token, and its log-probability.
        top: the most probable tokens in its place, likeliest first, each with its log-probability.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class _Counts:
    """How often each token was there, where the logits are."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._ids = torch.empty(0, dtype=torch.int64)
        self._times = torch.empty(0)
        ordered = list(tokens)
        if ordered:
            ids, times = torch.tensor(ordered).unique(return_counts=True)
            self._places = {token: place for place, token in enumerate(ids.tolist())}
            self._ids, self._times = ids, times.float()

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):  # room for as many again
            room = max(64, place)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(room)])
            self._times = torch.cat([self._times, self._times.new_zeros(room)])
        self._ids[place] = token
        self._times[place] += 1

    def at(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids (n,) int64, each once, and how often they were there (n,) float32."""
        self._ids, self._times = self._ids.to(device), self._times.to(device)
        return self._ids[: len(self._places)], self._times[: len(self._places)]


class Chooser:
    """How one sequence's tokens are chosen, and what it has said so far."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], constraint: Constraint | None = None) -> None:
        """``sampling`` with its seed resolved."""
        self.sampling = sampling
        self._constraint = constraint
        self._said = _Counts() if sampling.frequency_penalty or sampling.presence_penalty else None
        self._seen = _Counts(prompt) if sampling.repetition_penalty != 1.0 else None
        self._biases: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias is not None:
            ids, values = list(sampling.logit_bias), list(sampling.logit_bias.values())
            self._biases = torch.tensor(ids), torch.tensor(values, dtype=torch.float32)

    @property
    def adjusts(self) -> bool:
        """Whether logits change before a token is chosen from them."""
        return self._constraint is not None or self.sampling.adjusts

    def adjust(self, logits: Tensor) -> None:
        """Change a row of logits (V,) float32 in place.

        Raises:
            WisparseError: its grammar fails at this place.
        """
        if self._seen is not None:
            ids, _ = self._seen.at(logits.device)
            found, penalty = logits[ids], self.sampling.repetition_penalty
            logits[ids] = torch.where(found < 0, found * penalty, found / penalty)
        if self._said is not None:
            ids, times = self._said.at(logits.device)
            logits[ids] -= times * self.sampling.frequency_penalty + self.sampling.presence_penalty
        if self._biases is not None:
            ids, values = (one.to(logits.device) for one in self._biases)
            self._biases = ids, values
            logits[ids] += values
        if self._constraint is not None:
            self._constraint.mask(logits)

    def take(self, token: int) -> None:
        """The sequence goes on by this token."""
        for counts in (self._said, self._seen):
            if counts is not None:
                counts.add(token)
        if self._constraint is not None:
            self._constraint.take(token)


def score(logits: Tensor, token: int, count: int) -> TokenScore:
    """What the model thought of a token, by its row of logits (V,) float32, and of the ``count`` most probable ones."""
    return _scores(logits[None], [token], count)[0]


def score_prompt(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenScore]:
    """What the model thought of each token of a prompt but the first, of which it had nothing to think from.

    Args:
        logits: (T, V) float32, of every position.
        token_ids: T of them.
        count: most probable tokens to tell beside each.
    """
    scores: list[TokenScore] = []
    for start in range(0, len(token_ids) - 1, _TOGETHER):
        following = token_ids[start + 1 : start + 1 + _TOGETHER]
        scores += _scores(logits[start : start + len(following)], following, count)
    return scores


def _scores(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenScore]:
    log_probs = logits.float().log_softmax(dim=-1)
    own = log_probs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    if not count:
        return [TokenScore(token, logprob) for token, logprob in zip(tokens, own, strict=True)]
    top = log_probs.topk(min(count, log_probs.shape[1]), dim=-1)
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenScore(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own, tops, strict=True)
    ]
