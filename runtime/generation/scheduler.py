"""The generation loop, on token ids: prompts in, one more token per sequence and step out.

A scheduler keeps the decoder's slots busy. A step is either a piece of a prompt or one token for every sequence under
way; a sequence that ends frees its slot for the next prompt. While prompts are read, a piece's worth of their positions
comes between two tokens of the others. What a slot still holds of an earlier prompt is not read again (``prefix``).
Sequences may be added, and taken back, at any time. Nothing here depends on what else is in the batch or was before, so
a sequence is the same alone and among others.

All sequences under way are at one sparsity level. Prompts are taken in the order in which they came: one for another sparsity level waits
until those before it have ended, and those behind it wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wisparse.formats import guard
from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.weight_types import sparse_from

from ..decoding.decoder import Decoder, check_prompt, next_chunk
from ..decoding.rotary import switch_length
from ..decoding.sampling import SamplingParams, resolve_seed, sample
from .choosing import Chooser, Constraint, TokenScore, score, score_prompt

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle


class SparsityLevels:
    """The sparsity levels of one decoder, of which one at a time is in force, for all its slots. Not thread-safe, but for
    :meth:`named`.

    Args:
        decoder: nobody else sets its masks.
        bundle: what it was made of, with the sparsity level in force that it was made at.

    Attributes:
        own: the sparsity level of those who name none.
        in_force: the sparsity level of the next step; None after a switch that failed.
    """

    def __init__(self, decoder: Decoder, bundle: Bundle) -> None:
        self.own = bundle.sparsity
        self.in_force: float | None = bundle.sparsity
        self._decoder, self._bundle = decoder, bundle
        self._measuring: list[int] = []  # of whom each wants one step of so many counted

    def named(self, sparsity: float | None) -> float:
        """The sparsity level that is meant; None: the own one.

        Raises:
            UsageError: the bundle has no such sparsity level.
        """
        return self.own if sparsity is None else self._bundle.at(sparsity).sparsity

    def switch(self, sparsity: float) -> None:
        """Put a sparsity level in force, one that :meth:`named` gave. Dropped channels are counted from zero again."""
        self.in_force = None
        self._decoder.set_masks(self._bundle.at(sparsity).masks)
        if self._measuring:
            self._decoder.measure_sparsity(True, min(self._measuring))
        self.in_force = sparsity

    def measure(self, every: int) -> None:
        """Have dropped channels counted, in one step of so many at least, until :meth:`stop_measuring`. From zero, if
        they were counted less often."""
        before = min(self._measuring, default=None)
        self._measuring.append(every)
        if before is None or every < before:
            self._decoder.measure_sparsity(True, every)

    def stop_measuring(self, every: int) -> None:
        """As often as they were asked for."""
        self._measuring.remove(every)
        if not self._measuring:
            self._decoder.measure_sparsity(False)


_STRIDE = 256


@dataclass
class _Held:
    """Of one slot: the tokens at its first positions, how they were read, and when it was last used."""

    tokens: Sequence[int] = ()
    sparse_from: int = 0
    long: bool = False
    used: int = field(default=-1)


class Prefixes:
    """The prompts that some slots hold.

    Args:
        slots: how many there are.
        prefix_block_size: positions serve again up to a multiple of it; see ``Decoder``.
        switch: from how many tokens on a sequence's positions are turned by other factors (``rotary.switch_length``).
    """

    def __init__(self, slots: int, prefix_block_size: int, switch: int | None) -> None:
        self._held = [_Held() for _ in range(slots)]
        self._prefix_block_size, self._switch = prefix_block_size, switch
        self._clock = 0

    def choose(self, tokens: Sequence[int], sparse_from: int, idle: Collection[int]) -> tuple[int, int, int]:
        """Where to read a sequence.

        Args:
            tokens: the whole sequence.
            sparse_from: its first sparse position.
            idle: slots that serve nobody, one at least.

        Returns:
            The slot, one of ``idle``; the slot whose first positions serve, itself or another one; and how many: the
            last position is always left to be read.
        """
        source, length = -1, 0
        for slot in range(len(self._held)):
            shared = self._shared(self._held[slot], tokens, sparse_from)
            if shared > length:
                source, length = slot, shared
        oldest = min(idle, key=lambda slot: (self._held[slot].used, slot))
        if length == 0:
            return oldest, oldest, 0
        # In place what follows the shared part is lost, by copying it what the other slot holds.
        if source in idle and self._whole(len(self._held[source].tokens)) - length <= len(self._held[oldest].tokens):
            return source, source, length
        return oldest, source, length

    def note(self, slot: int, tokens: Sequence[int], total: int, sparse_from: int) -> None:
        """The slot holds these tokens now, read as the beginning of a sequence of ``total``."""
        self._clock += 1
        self._held[slot] = _Held(tokens, sparse_from, self._long(total), self._clock)

    def touch(self, slot: int) -> None:
        """The slot was used just now."""
        self._clock += 1
        self._held[slot].used = self._clock

    def keep_dense(self) -> None:
        """Other masks are in force: only what was read without any serves on."""
        for held in self._held:
            held.tokens = held.tokens[: held.sparse_from]

    def forget(self) -> None:
        """No slot's contents are known any more."""
        self._held = [_Held() for _ in self._held]

    def _shared(self, held: _Held, tokens: Sequence[int], sparse_from: int) -> int:
        """How many of the slot's positions are those of the sequence."""
        if held.long != self._long(len(tokens)):
            return 0
        most = min(len(held.tokens), len(tokens) - 1)
        if held.sparse_from != sparse_from:
            most = min(most, held.sparse_from, sparse_from)
        return self._whole(_common(held.tokens, tokens, most))

    def _long(self, total: int) -> bool:
        return self._switch is not None and total > self._switch

    def _whole(self, length: int) -> int:
        return length // self._prefix_block_size * self._prefix_block_size


def _common(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """How many tokens two sequences begin with alike, at most ``most``."""
    for start in range(0, most, _STRIDE):
        stop = min(start + _STRIDE, most)
        if first[start:stop] != second[start:stop]:
            return next(place for place in range(start, stop) if first[place] != second[place])
    return most


_IDLE = SamplingParams()

# Handing a token on (its text, a thread to wake, a line to print) costs more than a tenth of a small model's step, and
# a tenth of that for tokens that are handed on together. Nobody sees so short a delay; slower steps have none.
_TOGETHER_SECONDS = 0.001


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
        sparsity: the sparsity level to decode at, 0 for the dense model; None: the decoder's own, see :class:`Sparsity levels`.
        spoken: special tokens that are part of the answer's text.
    """

    token_ids: Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    prefill: str = "dense"
    constraint: Constraint | None = None
    score_prompt: bool = False
    sparsity: float | None = None
    spoken: frozenset[int] = frozenset()


@dataclass(eq=False)
class Job:
    """A request under way.

    Attributes:
        sampling: the request's, with a seed.
        sparsity: the sparsity level it is decoded at; None: the only one that its scheduler knows.
        chooser: how its tokens are chosen, at the newest one.
        token_ids: generated so far, a stop token included.
        scores: what the model thought of each of them; empty unless ``sampling.logprobs`` asks for it.
        prompt_scores: of the prompt's tokens but the first, where the request asks for it.
        finish_reason: None while under way; ``stop`` (a stop token), ``length`` (``max_new_tokens`` reached or the
            context filled to its last position), ``cancelled`` or ``error``.
        cached_tokens: of the prompt's, how many a slot held already.
        prompt_seconds: from the prompt's first piece to the first token, on the clock.
        generation_seconds: from the first token to the newest, on the clock: whatever happens between two steps counts.
    """

    request: Request
    sampling: SamplingParams
    sparsity: float | None
    chooser: Chooser
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
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


@dataclass
class _Reading:
    """A sequence on its way into its slot.

    Attributes:
        tokens: (T,) int64, the prompt and what was generated after it.
        sparse_from: its first sparse position.
        at: the next position to read.
        began: when its first piece was.
    """

    job: Job
    slot: int
    tokens: Tensor
    sparse_from: int
    at: int
    began: float


class Scheduler:
    """Runs jobs on one decoder. Not thread-safe; the decoder must serve nobody else meanwhile.

    Args:
        sparsity levels: the decoder's; None if requests name none.

    Attributes:
        tally: the steps so far.
    """

    def __init__(self, decoder: Decoder, levels: SparsityLevels | None = None) -> None:
        self.tally = Tally()
        self._levels = levels
        self._ended = 0.0  # the newest prefill or step
        self._decoder = decoder
        self._waiting: deque[Job] = deque()
        self._slots: list[Job | None] = [None] * decoder.max_batch
        self._reading: _Reading | None = None
        self._inside: Job | None = None  # whom alone a failure concerns: its prompt is being read, say
        self._read_since = 0  # positions, since the last step of the others
        self._switch = switch_length(decoder.config)
        self._prefixes = Prefixes(decoder.max_batch, decoder.prefix_block_size, self._switch)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting) or any(self._slots)

    def check(self, request: Request) -> None:
        """Whether a request can be queued; from any thread.

        Raises:
            ContextLengthError: the prompt is empty or longer than the decoder's context.
            UsageError: another value out of range.
        """
        check_prompt(len(request.token_ids), self._decoder.max_seq_len)
        vocab_size = self._decoder.config.vocab_size
        strange = next((token for token in request.token_ids if not 0 <= token < vocab_size), None)
        if strange is not None:
            raise UsageError(f"prompt: expected token ids from 0 to {vocab_size - 1}, found {strange}")
        if request.max_new_tokens is not None:
            guard.integer("max_new_tokens", request.max_new_tokens, 1)
        sparse_from(request.prefill, len(request.token_ids))
        biased = max(request.sampling.logit_bias or (0,))
        if biased >= vocab_size:
            raise UsageError(f"logit_bias: expected token ids from 0 to {vocab_size - 1}, found {biased}")
        self._level(request)

    def submit(self, request: Request) -> Job:
        """Queue a request; raises what :meth:`check` does."""
        self.check(request)
        sampling = resolve_seed(request.sampling)
        chooser = Chooser(sampling, request.token_ids, request.constraint)
        job = Job(request, sampling, self._level(request), chooser)
        self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Take a job back, wherever it is; one that has ended stays as it is."""
        if job.finish_reason is None:
            self._finish(job, "cancelled")

    def give_up(self) -> list[Job]:
        """Go on after :meth:`step` has raised: drop whom it failed for.

        If that was while a prompt was read or a grammar asked, its job; else every job of the batch. What the slots
        hold is undefined by then: the other jobs are queued again, first, and read anew with what they have generated.

        Returns:
            The jobs that ended so, with the reason ``error``.
        """
        running = [job for job in self._slots if job is not None]
        failed = running if self._inside is None else [self._inside]
        for job in failed:
            job.finish_reason = "error"
        self._waiting = deque(job for job in self._waiting if job.finish_reason is None)
        self.start_over()
        return failed

    def start_over(self) -> None:
        """Go on after something else has used the decoder, or stopped it in the middle of a step: every job of the
        batch is queued again, first, and read anew."""
        self._waiting.extendleft(job for job in reversed(self._slots) if job is not None and job.finish_reason is None)
        self._slots = [None] * len(self._slots)
        self._reading = self._inside = None
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """What slots hold of earlier prompts is not used again."""
        self._prefixes.forget()

    def switch(self, sparsity: float) -> None:
        """Put another sparsity level in force, while no slot is in use. What slots hold of dense prompts is used on."""
        assert self._levels is not None
        assert not any(self._slots)
        self._levels.switch(sparsity)
        self._prefixes.keep_dense()

    def step(self, called: Callable[[], object] | None = None) -> list[Job]:
        """Read a piece of a prompt if one waits and a slot is free and the others had their token, else decode.

        Args:
            called: whether somebody waits for this to return. Until then, until a job ends or until a millisecond
                has passed, decoding goes on from token to token. None: one token.

        Returns:
            The jobs that got tokens: the last of their ``token_ids``. After a piece that is not a prompt's last none.
        """
        if self._reading is None and self._waiting and None in self._slots and self._turn(self._waiting[0]):
            self._admit(self._waiting.popleft())
        if self._reading is not None:
            others = sum(job is not None for job in self._slots) > 1
            size = self._decoder.prefill_chunk_under_load if others else self._decoder.prefill_chunk
            if not others or self._read_since < size:
                advanced = self._read(self._reading, size)
                self._ended = time.perf_counter()
                return advanced
        self._read_since = 0
        advanced = self._decode(called)
        before, self._ended = self._ended, time.perf_counter()
        self.tally.seconds += self._ended - before
        return advanced

    def _level(self, request: Request) -> float | None:
        if self._levels is not None:
            return self._levels.named(request.sparsity)
        if request.sparsity is not None:
            raise UsageError(
                f"sparsity: expected none, as there are no sparsity levels to choose from, found {request.sparsity}"
            )
        return None

    def _turn(self, job: Job) -> bool:
        """Whether the next job's sparsity level is in force; it is put in force as soon as nobody needs another one."""
        if self._levels is None or job.sparsity is None or job.sparsity == self._levels.in_force:
            return True
        if any(self._slots):
            return False
        self._inside = job
        self.switch(job.sparsity)
        self._inside = None
        return True

    def _admit(self, job: Job) -> None:
        """Give a job a slot."""
        tokens = [*job.request.token_ids, *job.token_ids]
        sparse = sparse_from(job.request.prefill, len(job.request.token_ids))
        idle = [slot for slot, other in enumerate(self._slots) if other is None]
        slot, source, length = self._prefixes.choose(tokens, sparse, idle)
        self._slots[slot] = job
        self._inside = job
        alone = not self._waiting or self._waiting[0].sparsity != job.sparsity
        if len(idle) == 1 or alone:  # whoever comes with it is there by now
            self._prepare()
        began = time.perf_counter()
        if source != slot:
            self._decoder.copy(source, slot, length)
        self._inside = None
        self._prefixes.note(slot, tokens[:length], len(tokens), sparse)
        if not job.token_ids:
            job.cached_tokens = length
        self._reading = _Reading(job, slot, torch.tensor(tokens, dtype=torch.int64), sparse, length, began)

    def _prepare(self) -> None:
        """Have the decoder compile and capture what the batch will need, so that no step has to."""
        limit = self._decoder.max_seq_len
        jobs = [job for job in self._slots if job is not None]
        lengths = [self._filled(job) + 1 for job in jobs]
        # An answer's last token is never read.
        lasts = [
            limit if most is None else min(len(job.request.token_ids) + most - 1, limit)
            for job, most in zip(jobs, (job.request.max_new_tokens for job in jobs), strict=True)
        ]
        if max(lasts) > min(lengths):
            sampled = any(not job.sampling.greedy for job in jobs)
            slots = [slot for slot, job in enumerate(self._slots) if job is not None]
            self._decoder.prepare(slots, min(lengths) + 1, max(lasts), sampled=sampled)

    def _read(self, reading: _Reading, size: int) -> list[Job]:
        """Read the next piece of a sequence, up to a multiple of ``size``; after its last one append a token."""
        job, total = reading.job, len(reading.tokens)
        stop = min(next_chunk(reading.at, size), total)
        self._inside = job
        logits = self._score_prompt(reading)
        if logits is not None:
            stop = total
        else:
            logits = self._decoder.prefill(
                reading.slot, reading.tokens, reading.sparse_from, start=reading.at, stop=stop
            )
            # Beyond the prompt it is the answer, which is none of the next prompt's.
            held = job.request.token_ids[:stop]
            self._prefixes.note(reading.slot, list(held), total, reading.sparse_from)
        self._read_since += stop - reading.at
        reading.at = stop
        first = not job.token_ids
        if stop == total:
            chosen = self._choose(logits[None], [job], [total])[0]
            self._reading = None
            self._append(job, chosen, time.perf_counter())
        self._inside = None
        if stop < total:
            return []
        if first:
            job.prompt_seconds = job._began - reading.began
        return [job]

    def _score_prompt(self, reading: _Reading) -> Tensor | None:
        """Score a prompt's tokens if that is asked for; the last position's logits if nothing else is needed."""
        job = reading.job
        if not job.request.score_prompt or job.sampling.logprobs is None or job.prompt_scores is not None:
            return None
        job.cached_tokens = 0
        every = self._decoder.logits(reading.tokens, reading.sparse_from)
        job.prompt_scores = score_prompt(every, job.request.token_ids, job.sampling.logprobs)
        # Of a single token nothing is ever decoded from the slot.
        return every[-1] if job.request.max_new_tokens == 1 else None

    def _decode(self, called: Callable[[], object] | None) -> list[Job]:
        reading = None if self._reading is None else self._reading.job
        rows = [None if job is reading else job for job in self._slots]
        # LongRoPE's cached keys do not fit once a sequence outgrows the short factors: it is read anew, which gives its
        # next token too.
        for slot, job in enumerate(rows if self._switch is not None else ()):
            if job is not None and self._filled(job) == self._switch:
                rows[slot] = self._slots[slot] = None
                self._waiting.appendleft(job)
        while rows and rows[-1] is None:
            rows.pop()
        running = [job for job in rows if job is not None]
        if not running:
            return []
        if any(job.sampling.logprobs is not None for job in running):
            logits = self._decoder.decode(_newest(rows))
            self._take(rows, self._choose(logits, rows, self._decoder.lengths[: len(rows)]))
            return running
        settings = [job.sampling if job else _IDLE for job in rows]
        adjusts = any(job.chooser.adjusts for job in running)
        adjust = partial(self._adjust, rows=rows) if adjusts else None
        until = time.perf_counter() + _TOGETHER_SECONDS
        tokens = _newest(rows)
        while True:
            chosen = self._decoder.step(tokens, settings, adjust)
            now = self._take(rows, chosen.tolist())
            if called is None or reading is not None or self._switch is not None or now >= until or called():
                return running
            if any(job.finish_reason is not None for job in running):
                return running
            # Of idle rows it says anything.
            tokens = chosen if len(running) == len(rows) else _newest(rows)

    def _take(self, rows: Sequence[Job | None], chosen: Sequence[int]) -> float:
        """Append every row's token; gives the time."""
        now = time.perf_counter()
        for job, token in zip(rows, chosen, strict=True):
            if job is not None:
                self._append(job, token, now)
                self.tally.tokens += 1
        return now

    def _choose(self, logits: Tensor, rows: Sequence[Job | None], positions: Sequence[int]) -> list[int]:
        """The next token of each row of logits (B, V), which stay as they are; scored where that is asked for."""
        given = logits
        if any(job is not None and job.chooser.adjusts for job in rows):
            logits = logits.clone()
            self._adjust(logits, rows)
        chosen: list[int] = sample(logits, [job.sampling if job else _IDLE for job in rows], positions).tolist()
        for row, job, token in zip(given, rows, chosen, strict=True):
            if job is not None and job.sampling.logprobs is not None and token >= 0:
                job.scores.append(score(row, token, job.sampling.logprobs))
        return chosen

    def _adjust(self, logits: Tensor, rows: Sequence[Job | None]) -> None:
        """Change the logits (B, V) of those who ask for it, in place."""
        before = self._inside
        for row, job in zip(logits, rows, strict=True):
            if job is not None and job.chooser.adjusts:
                self._inside = job  # a grammar that fails here ends its own answer alone
                job.chooser.adjust(row)
        self._inside = before

    def _filled(self, job: Job) -> int:
        """Positions of the job's slot that are filled: all but its newest token's."""
        return len(job.request.token_ids) + len(job.token_ids) - 1

    def _append(self, job: Job, token: int, now: float) -> None:
        if token < 0:
            raise WisparseError(
                "the model's output is not a number: its activations overflow in this dtype; load with dtype float32 "
                "or bfloat16"
            )
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
            slot = self._slots.index(job)
            self._slots[slot] = None
            self._prefixes.touch(slot)
            if self._reading is not None and self._reading.job is job:
                self._reading = None
        else:
            self._waiting = deque(other for other in self._waiting if other is not job)


def _newest(rows: Sequence[Job | None]) -> Tensor:
    """(B,) int64: every row's newest token; -1 marks an idle one."""
    return torch.tensor([job.token_ids[-1] if job else -1 for job in rows], dtype=torch.int64)
