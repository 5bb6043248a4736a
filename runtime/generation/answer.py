"""What comes of a request: its text as it grows, piece by piece, and the whole answer in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..decoding.memory import peak_bytes
from ..text.detokenize import Detokenizer, StopStrings
from .choosing import TokenScore
from .scheduler import Job

__all__ = ["Generation", "Piece", "Writer"]


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer, special tokens and the stop string left out.
        token_ids: all generated ids, those of a stop token or stop string included.
        finish_reason: ``stop`` (a stop token or string) or ``length`` (``max_new_tokens``, or the context is full).
        seed: repeats a sampled answer; None for a greedy one.
        prompt_tokens: length of the prompt.
        prompt_seconds: from the prompt's first piece to the first token, on the clock.
        generation_seconds: from the first token to the last, on the clock: in a stream what its reader did between two
            tokens counts too, unless they came together. 0 if there was only one. What a first use compiles and
            captures comes before the prompt.
        peak_memory_bytes: the most memory used so far: on a GPU the device's, else this process's.
        realised_sparsity: share of the projections' weights that were not needed at the sparse positions; None unless
            asked for. In a batch it is that of all answers together.
        scores: what the model thought of each of ``token_ids``; None unless ``logprobs`` asks for it.
        prompt_scores: of the prompt's tokens but the first; None unless a request asks for it.
        cached_tokens: of the prompt's, how many were not read, as the cache still held them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int | None
    prompt_tokens: int
    prompt_seconds: float
    generation_seconds: float
    peak_memory_bytes: int
    realised_sparsity: float | None = None
    scores: tuple[TokenScore, ...] | None = None
    prompt_scores: tuple[TokenScore, ...] | None = None
    cached_tokens: int = 0

    @property
    def prompt_tok_per_s(self) -> float:
        """Prompt tokens read per second; those that the cache held were not."""
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tok_per_s(self) -> float:
        """Tokens decoded per second, the first not counted: the prefill gave it. 0 if it is the only one."""
        return (len(self.token_ids) - 1) / self.generation_seconds if self.generation_seconds else 0.0


@dataclass(frozen=True)
class Piece:
    """What one token added to a streamed answer.

    Attributes:
        text: whole characters, maybe none: an incomplete character or the beginning of a stop string is held back.
        token_id: the token.
        finish_reason: set on the last piece, as in ``Generation``.
        generation: the whole answer, on the last piece.
        score: what the model thought of the token; None unless ``logprobs`` asks for it.
        prompt_scores: on the first piece, of the prompt's tokens but the first; None unless a request asks for it.
    """

    text: str
    token_id: int
    finish_reason: str | None = None
    generation: Generation | None = None
    score: TokenScore | None = None
    prompt_scores: Sequence[TokenScore] | None = None


class Writer:
    """Turns one job's tokens into text, and ends the job at a stop string."""

    def __init__(self, job: Job, detokenizer: Detokenizer | None, stops: Sequence[str]) -> None:
        self.job = job
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._parts: list[str] = []
        self.taken = 0
        self.finish_reason: str | None = None

    def take(self) -> str:
        """The text that the first of the job's tokens that was not taken yet completes."""
        token = self.job.token_ids[self.taken]
        self.taken += 1
        self.finish_reason = self.job.finish_reason if self.taken == len(self.job.token_ids) else None
        piece = ""
        if self._detokenizer is not None:
            if self.finish_reason != "stop":  # a stop token has no text of its own
                piece = self._stops.add(self._detokenizer.add(token))
            if self.finish_reason is not None:
                piece += self._stops.add(self._detokenizer.finish()) + self._stops.finish()
            if self._stops.found:
                self.finish_reason = "stop"
        self._parts.append(piece)
        return piece

    def piece(self, text: str, generation: Generation | None = None) -> Piece:
        """What the token taken last added, as it is handed on."""
        index = self.taken - 1
        score = self.job.scores[index] if self.job.scores else None
        of_prompt = self.job.prompt_scores if index == 0 else None
        return Piece(text, self.job.token_ids[index], self.finish_reason, generation, score, of_prompt)

    def generation(self, device: torch.device, realised_sparsity: float | None) -> Generation:
        """The whole answer, when it has ended."""
        job = self.job
        return Generation(
            text="".join(self._parts),
            token_ids=tuple(job.token_ids[: self.taken]),
            finish_reason=str(self.finish_reason),
            seed=None if job.sampling.greedy else job.sampling.seed,
            prompt_tokens=len(job.request.token_ids),
            prompt_seconds=job.prompt_seconds,
            generation_seconds=job.generation_seconds,
            peak_memory_bytes=peak_bytes(device),
            realised_sparsity=realised_sparsity,
            scores=None if job.sampling.logprobs is None else tuple(job.scores[: self.taken]),
            prompt_scores=None if job.prompt_scores is None else tuple(job.prompt_scores),
            cached_tokens=job.cached_tokens,
        )
