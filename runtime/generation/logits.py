"""Penalties, biases and grammars on the logits of a sequence, and log-probabilities of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.sampling import SamplingParams
from ..thoughts import LogitsMask

# Positions scored together, which bounds the memory of log-probabilities (T, V).
_SCORE_CHUNK = 64


@dataclass(frozen=True)
class TokenScore:
    """A token's log-probability, and the most probable tokens at its position with theirs, in descending order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogitsProcessor:
    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], constraint: LogitsMask | None = None) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._prompt = prompt
        self._counts: Tensor | None = None  # (V,) float32: occurrences of each token in the answer
        self._seen: Tensor | None = None  # (V,) bool: tokens of prompt and answer
        self._new: list[int] = []  # tokens not in _counts yet
        self._bias: tuple[Tensor, Tensor] | None = None
        self._is_first = True  # no token was taken
        words = sampling.bad_words_ids or ()
        self._recent = deque(prompt, max(map(len, words), default=1) - 1)
        self._forbidden: tuple[list[int], Tensor] | None = None  # those of the step before

    @property
    def active(self) -> bool:
        """Whether ``process`` changes the logits."""
        begins = self._is_first and self.sampling.begin_suppress_tokens is not None
        return self._constraint is not None or self.sampling.adjusts or begins

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
        if forbidden := self._list_forbidden():
            if self._forbidden is None or self._forbidden[0] != forbidden:  # a copy to a GPU waits for it
                self._forbidden = forbidden, torch.tensor(forbidden, device=device)
            allowed = logits.index_fill(0, self._forbidden[1], -torch.inf)
            # Where a grammar allows forbidden tokens only, it decides.
            logits.copy_(
                allowed if self._constraint is None else torch.where(allowed.max() > -torch.inf, allowed, logits)
            )

    def _list_forbidden(self) -> list[int]:
        sampling, recent = self.sampling, tuple(self._recent)
        first = (self._is_first and sampling.begin_suppress_tokens) or ()
        words = (word for word in sampling.bad_words_ids or () if recent[len(recent) + 1 - len(word) :] == word[:-1])
        return [*(sampling.suppress_tokens or ()), *first, *(word[-1] for word in words)]

    def take(self, token: int) -> None:
        self._new.append(token)
        self._recent.append(token)
        self._is_first = False
        if self._constraint is not None:
            self._constraint.take(token)


def score_tokens(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenScore]:
    """Log-probabilities of T tokens by logits (T, V), each with those of the ``count`` most probable tokens."""
    scores: list[TokenScore] = []
    for start in range(0, len(token_ids), _SCORE_CHUNK):
        tokens = token_ids[start : start + _SCORE_CHUNK]
        log_probs = logits[start : start + len(tokens)].float().log_softmax(dim=-1)
        logprobs = log_probs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        top = log_probs.topk(min(count, log_probs.shape[1]), dim=-1)
        tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        scores += map(TokenScore, tokens, logprobs, (tuple(zip(*pair, strict=True)) for pair in tops))
    return scores
