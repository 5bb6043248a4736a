"""The generation loop, on token ids: prompts in, one more token per sequence and step out.

A scheduler keeps the decoder's slots busy. A step is either one waiting prompt's prefill or one token for every
sequence under way; a sequence that ends frees its slot for the next prompt. Sequences may be added, and taken back, at
any time. Nothing here depends on what else is in the batch, so a sequence is the same alone and among others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.guard import arguments
from wisparse.formats.prefill import sparse_from

from .choosing import Chooser, Constraint, TokenScore, score, score_prompt
from .decoder import Decoder, check_prompt
from .rotary import switch_length
from .sampling import SamplingSettings, resolve_seed, sample

__all__ = ["Job", "Request", "Scheduler", "Tally"]

_IDLE = SamplingSettings()


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        token_ids: the prompt.
        max_new_tokens: at most so many; None until the context is full.
        sampling: how tokens are chosen.
        stop_ids: a token of these ends the sequence, and is its last.
        prefill: one of ``PREFILL_POLICIES``.
        constraint: what the answer may say, at its beginning; for this request alone. None: anything.
        score_prompt: tell what the model thought of the prompt's tokens too; needs ``sampling.logprobs``.
    """

    token_ids: Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_ids: frozenset[int] = frozenset()
    prefill: str = "dense"
    constraint: Constraint | None = None
    score_prompt: bool = False


@dataclass(eq=False)
class Job:
    """A request under way.

    Attributes:
        sampling: the request's, with a seed.
        chooser: how its tokens are chosen, at the newest one.
        token_ids: generated so far, a stop token included.
        scores: what the model thought of each of them; empty unless ``sampling.logprobs`` asks for it.
        prompt_scores: of the prompt's tokens, where the request asks for it.
        finish_reason: None while under way; ``stop`` (a stop token), ``length`` (``max_new_tokens`` reached or the
            context filled to its last position), ``cancelled`` or ``error``.
        prompt_seconds: the prefill's time, with the choice of the first token.
        generation_seconds: from the first token to the newest, on the clock: whatever happens between two steps counts.
    """

    request: Request
    sampling: SamplingSettings
    chooser: Chooser
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore | None] | None = None
    finish_reason: str | None = None
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    _began: float = 0.0


@dataclass
class Tally:
    """What the decode steps of some jobs gave and took; the prompts and their first tokens are left out.

    Attributes:
        tokens: of all sequences together.
        seconds: on the clock, from the end of what came before a step to the step's end.
    """

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tok_per_s(self) -> float:
        """0 if no token was decoded."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Scheduler:
    """Runs jobs on one decoder. Not thread-safe; the decoder must serve nobody else meanwhile.

    Attributes:
        tally: the steps so far.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.tally = Tally()
        self._ended = 0.0  # the newest prefill or step
        self._decoder = decoder
        self._waiting: deque[Job] = deque()
        self._slots: list[Job | None] = [None] * decoder.max_batch
        self._reading: Job | None = None  # whom alone a failure concerns: its prompt is being read, say
        self._switch = switch_length(decoder.config)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting) or any(self._slots)

    def prepare(self) -> None:
        """Have the decoder compile and capture what the waiting jobs will need, so that no step has to."""
        limit = self._decoder.max_seq_len
        lengths = [len(job.request.token_ids) for job in self._waiting]
        new = [limit if job.request.max_new_tokens is None else job.request.max_new_tokens for job in self._waiting]
        # An answer's last token is never read.
        last = max((length + count - 1 for length, count in zip(lengths, new, strict=True)), default=0)
        if last > min(lengths, default=0):
            rows = min(len(self._waiting), len(self._slots))
            sampled = any(not job.sampling.greedy for job in list(self._waiting)[:rows])
            self._decoder.prepare(rows, min(lengths) + 1, min(last, limit), sampled=sampled)

    def submit(self, request: Request) -> Job:
        """Queue a request.

        Raises:
            ContextLengthError: the prompt is empty or longer than the decoder's context.
            UsageError: another value out of range.
        """
        check_prompt(len(request.token_ids), self._decoder.max_seq_len)
        vocab_size = self._decoder.config.vocab_size
        strange = next((token for token in request.token_ids if not 0 <= token < vocab_size), None)
        if strange is not None:
            raise UsageError(f"token ids: expected 0 to {vocab_size - 1}, found {strange}")
        if request.max_new_tokens is not None:
            arguments.integer("max_new_tokens", request.max_new_tokens, 1)
        sparse_from(request.prefill, len(request.token_ids))
        biased = max(request.sampling.logit_bias or (0,))
        if biased >= vocab_size:
            raise UsageError(f"logit_bias: expected token ids from 0 to {vocab_size - 1}, found {biased}")
        sampling = resolve_seed(request.sampling)
        job = Job(request, sampling, Chooser(sampling, request.token_ids, request.constraint))
        self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Take a job back, wherever it is; one that has ended stays as it is."""
        if job.finish_reason is None:
            self._finish(job, "cancelled")

    def give_up(self) -> list[Job]:
        """Go on after :meth:`step` has raised: drop whom it failed for.

        If that was while a prompt was read or a grammar asked, its job; else every job of the batch. What the other
        slots hold is undefined by then: their jobs are queued again, first, and read anew with what they have
        generated.

        Returns:
            The jobs that ended so, with the reason ``error``.
        """
        failed = [self._reading] if self._reading is not None else [job for job in self._slots if job is not None]
        others = [job for job in self._slots if job is not None and job not in failed]
        self._slots = [None] * len(self._slots)
        self._waiting.extendleft(reversed(others))
        self._reading = None
        for job in failed:
            job.finish_reason = "error"
        return failed

    def step(self) -> list[Job]:
        """Do one prefill if a prompt waits and a slot is free, else decode.

        Returns:
            The jobs that got a token: the last of their ``token_ids``.
        """
        if self._waiting and None in self._slots:
            job = self._waiting.popleft()
            self._slots[self._slots.index(None)] = job
            start = time.perf_counter()
            first = not job.token_ids
            self._prefill(job)
            if first:
                job.prompt_seconds = job._began - start
            self._ended = time.perf_counter()
            return [job]
        advanced = self._decode()
        before, self._ended = self._ended, time.perf_counter()
        self.tally.tokens += len(advanced)
        self.tally.seconds += self._ended - before
        return advanced

    def _prefill(self, job: Job) -> None:
        """Read a job's prompt, and what it has generated so far, into its slot; append one token."""
        tokens = torch.tensor([*job.request.token_ids, *job.token_ids], dtype=torch.int64)
        dense = sparse_from(job.request.prefill, len(job.request.token_ids))
        self._reading = job
        scored = job.request.score_prompt and job.sampling.logprobs is not None and job.prompt_scores is None
        if scored:
            every = self._decoder.logits(tokens, dense)
            job.prompt_scores = score_prompt(every, job.request.token_ids, job.sampling.logprobs or 0)
        if scored and job.request.max_new_tokens == 1:  # nothing is ever decoded from its slot
            logits = every[-1]
        else:
            logits = self._decoder.prefill(self._slots.index(job), tokens, dense)
        self._append(job, self._choose(logits[None], [job], [len(tokens)])[0])
        self._reading = None

    def _decode(self) -> list[Job]:
        # LongRoPE's cached keys do not fit once a sequence outgrows the short factors: read it anew, which gives its
        # next token too. The others wait for the next step.
        outgrown = [job for job in self._slots if job is not None and self._filled(job) == self._switch]
        for job in outgrown:
            self._prefill(job)
        if outgrown:
            return outgrown
        rows = list(self._slots)
        while rows and rows[-1] is None:
            rows.pop()
        if not rows:
            return []
        tokens = torch.tensor([job.token_ids[-1] if job else -1 for job in rows], dtype=torch.int64)
        if all(job is None or job.chooser.plain for job in rows):
            chosen = self._decoder.step(tokens, [job.sampling if job else _IDLE for job in rows]).tolist()
        else:
            logits = self._decoder.decode(tokens)
            chosen = self._choose(logits, rows, self._decoder.lengths[: len(rows)])
        advanced = [(job, token) for job, token in zip(rows, chosen, strict=True) if job is not None]
        for job, token in advanced:
            self._append(job, token)
        return [job for job, _ in advanced]

    def _choose(self, logits: Tensor, rows: Sequence[Job | None], positions: Sequence[int]) -> list[int]:
        """The next token of each row of logits (B, V), which stay as they are; scored where that is asked for."""
        given = logits
        if any(job is not None and job.chooser.adjusts for job in rows):
            logits = logits.clone()
        before = self._reading
        for row, job in zip(logits, rows, strict=True):
            if job is not None and job.chooser.adjusts:
                self._reading = job  # a grammar that fails here ends its own answer alone
                job.chooser.adjust(row)
        self._reading = before
        chosen: list[int] = sample(logits, [job.sampling if job else _IDLE for job in rows], positions).tolist()
        for row, job, token in zip(given, rows, chosen, strict=True):
            if job is not None and job.sampling.logprobs is not None and token >= 0:
                job.scores.append(score(row, token, job.sampling.logprobs))
        return chosen

    def _filled(self, job: Job) -> int:
        """Positions of the job's slot that are filled: all but its newest token's."""
        return len(job.request.token_ids) + len(job.token_ids) - 1

    def _append(self, job: Job, token: int) -> None:
        if token < 0:
            raise WisparseError(
                "the model's output is not a number: its activations overflow in this dtype; load with dtype float32 "
                "or bfloat16"
            )
        now = time.perf_counter()
        if not job.token_ids:
            job._began = now
        job.generation_seconds = now - job._began
        job.token_ids.append(token)
        job.chooser.take(token)
        if token in job.request.stop_ids:
            self._finish(job, "stop")
        elif len(job.token_ids) == job.request.max_new_tokens or self._filled(job) == self._decoder.max_seq_len:
            self._finish(job, "length")

    def _finish(self, job: Job, reason: str) -> None:
        job.finish_reason = reason
        if job in self._slots:
            self._slots[self._slots.index(job)] = None
        else:
            self._waiting = deque(other for other in self._waiting if other is not job)
