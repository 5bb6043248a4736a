"""Continuous batching with chunked prefill, preemption, a prefix cache and speculation, on token ids."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import eq

import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.weight_types import sparse_from

from ..decoding.decoder import PROMPTS_TOGETHER, Decoder, check_prompt, next_chunk
from ..decoding.rotary import switch_length
from ..decoding.sampling import SamplingParams, sample
from .logits import LogitsProcessor, score_tokens
from .request import Request
from .speculation import DraftCounts, SpeculativeConfig, make_drafter

log = logging.getLogger(__name__)

_IDLE = SamplingParams()  # sampling of idle rows
# Positions of a prefill chunk whose logits are scored.
SCORE_CHUNK = 256
# Longest time of decoding one sparsity level while requests of another level wait.
TURN_SECONDS = 0.25


@dataclass
class Stats:
    """Decoded tokens of all requests and the wall time of decoding; without prefill and first tokens."""

    tokens: int = 0
    seconds: float = 0.0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    preemptions: int = 0  # requests that went back to the queue because cache pages ran out

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _CachedPrefix:
    """The tokens in a slot's KV cache, how they were computed, and when the slot was last used."""

    tokens: Sequence[int] = ()
    sparse_from: int = 0
    sparsity: float | None = None  # the level of the positions from ``sparse_from`` on
    long_factors: bool = False  # of LongRoPE
    last_used: int = -1


class PrefixCache:  # which prompt tokens each slot's KV cache holds
    def __init__(self, slots: int, block_size: int, switch: int | None) -> None:
        self._prefixes = [_CachedPrefix() for _ in range(slots)]
        self._block_size, self._switch = block_size, switch
        self._clock = 0

    def choose(
        self, tokens: Sequence[int], sparse_from: int, sparsity: float | None, idle: Collection[int]
    ) -> tuple[int, int, int]:
        """A slot of ``idle`` for a sequence, the slot with the longest common prefix, and its length: whole blocks, at
        most all tokens but the last."""
        source, length = -1, 0
        for slot, prefix in enumerate(self._prefixes):
            if prefix.long_factors != self._uses_long_factors(len(tokens)):
                continue
            limit = min(len(prefix.tokens), len(tokens) - 1)
            if (prefix.sparse_from, prefix.sparsity) != (sparse_from, sparsity):
                limit = min(limit, prefix.sparse_from, sparse_from)
            # Skip equal slices, which are compared in C, then find the first token that differs.
            common = 0
            while common < limit and prefix.tokens[common : common + 256] == tokens[common : common + 256]:
                common += 256
            common = next((i for i in range(common, limit) if prefix.tokens[i] != tokens[i]), limit)
            if self._whole_blocks(common) > length:
                source, length = slot, self._whole_blocks(common)
        oldest = self.oldest(idle)
        if length == 0:
            return oldest, oldest, 0
        # Reuse in place discards the rest of the source's prefix, a copy discards the oldest slot's: discard the shorter.
        rest = self._whole_blocks(len(self._prefixes[source].tokens)) - length
        if source in idle and rest <= len(self._prefixes[oldest].tokens):
            return source, source, length
        return oldest, source, length

    def note(self, slot: int, tokens: Sequence[int], total: int, sparse_from: int, sparsity: float | None) -> None:
        """Record the tokens in a slot, computed as the beginning of a sequence of ``total``."""
        self._clock += 1
        self._prefixes[slot] = _CachedPrefix(tokens, sparse_from, sparsity, self._uses_long_factors(total), self._clock)

    def oldest(self, slots: Iterable[int]) -> int:
        """The least recently used of these slots."""
        return min(slots, key=lambda slot: (self._prefixes[slot].last_used, slot))

    def forget(self, slot: int) -> None:
        self._prefixes[slot] = _CachedPrefix()

    def touch(self, slot: int) -> None:
        self._clock += 1
        self._prefixes[slot].last_used = self._clock

    def clear(self) -> None:
        self._prefixes = [_CachedPrefix() for _ in self._prefixes]

    def _uses_long_factors(self, total: int) -> bool:
        return self._switch is not None and total > self._switch

    def _whole_blocks(self, length: int) -> int:
        return length // self._block_size * self._block_size


class Scheduler:
    """Runs requests on one decoder. After other code has changed the decoder's slots, call ``start_over``. Only
    ``validate`` is thread-safe. Each step decodes only the requests of one sparsity level. Levels take turns; requests of
    the others keep their slots."""

    def __init__(
        self, decoder: Decoder, bundle: Bundle | None = None, speculative: SpeculativeConfig | None = None
    ) -> None:
        self.decoder, self.bundle, self.speculative = decoder, bundle, speculative
        # The level of requests that name none, and that of the decoder's masks: None after a failed ``set_masks``.
        self.default_sparsity = self.sparsity = None if bundle is None else bundle.sparsity
        self.stats = Stats()
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * decoder.max_batch
        self.prefilling: Request | None = None
        self._sequence = torch.empty(0, dtype=torch.int64)  # tokens of the request in prefill
        self._num_requests = 0
        self._out_of_pages = False  # the first waiting request lacks cache pages; reset when a request ends
        self._at_fault: list[Request] = []  # if a step raises, these requests fail; if empty, all running ones do
        self._failed: list[Request] = []  # requests that failed in this step, while the slots of the others are valid
        self._current_level: float | None = None  # the level that is decoded
        self._level_began: dict[float | None, float] = {}  # by level, when its last turn began
        self._prefilled = 0  # positions prefilled since the last decode step
        self._step_ended = 0.0
        self._measuring: list[int] = []  # the ``every`` of each ``start_measuring``
        self._switch = switch_length(decoder.config)
        self.prefixes = PrefixCache(decoder.max_batch, decoder.prefix_block_size, self._switch)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.slots)

    @property
    def running(self) -> list[Request]:
        return [request for request in self.slots if request is not None]

    @property
    def cache_usage(self) -> float:
        """Share of the cache's pages that running requests hold."""
        cache = self.decoder.cache
        used = sum(pages for pages, request in zip(cache.taken, self.slots, strict=True) if request is not None)
        return used / max(cache.pages, 1)

    def validate(self, request: Request) -> None:
        """Raise ContextLengthError or UsageError unless the request can be queued."""
        check_prompt(len(request.prompt_token_ids), self.decoder.max_seq_len)
        vocab_size = self.decoder.config.vocab_size
        sampling = request.sampling
        named = {
            name: getattr(sampling, name) or () for name in ("logit_bias", "suppress_tokens", "begin_suppress_tokens")
        }
        words = tuple(chain.from_iterable(sampling.bad_words_ids or ()))
        for name, ids in {"prompt": request.prompt_token_ids, **named, "bad_words_ids": words}.items():
            unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
            if unknown is not None:
                raise UsageError(f"{name}: expected token ids from 0 to {vocab_size - 1}, found {unknown}")
        self._resolve_level(request.sparsity)

    def _resolve_level(self, sparsity: float | None) -> float | None:
        if sparsity is None or self.bundle is None:
            return self.default_sparsity
        return self.bundle.at(sparsity).sparsity

    def add(self, request: Request) -> Request:
        if request.sampling.seed is None:
            request.sampling = replace(request.sampling, seed=secrets.randbits(62))
        request.sparsity = self._resolve_level(request.sparsity)
        limit = self.decoder.max_seq_len
        request.max_positions = min(len(request.prompt_token_ids) + (request.max_new_tokens or limit) - 1, limit)
        request.processor = LogitsProcessor(request.sampling, request.prompt_token_ids, request.constraint)
        self._num_requests += 1
        request.arrival, request.num_prefilled = self._num_requests, len(request.prompt_token_ids)
        self.waiting.append(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        """Remove a request from its slot or from the queue; no effect on a finished one."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self._out_of_pages = False
        if request in self.slots:
            self._free_slot(request)
        else:
            self.waiting = deque(other for other in self.waiting if other is not request)

    def _free_slot(self, request: Request) -> None:
        slot = self.slots.index(request)
        self.slots[slot], request.running, self._out_of_pages = None, False, False
        self.prefixes.touch(slot)
        if self.prefilling is request:
            self.prefilling = None

    def fail(self) -> list[Request]:
        """After :meth:`step` has raised, so the decoder's slots may be half written: finish and return the requests at fault,
        and queue the others again. An error in prefill fails one request, an error in decoding the rows of that step."""
        failed = self._at_fault or self.running
        for request in failed:
            self.finish(request, "error")
        self.start_over()
        self._failed = []
        return failed

    def _fail_alone(self, request: Request, error: Exception) -> None:
        """Finish a request with an error that leaves the slots of all others valid."""
        if request.finish_reason is None:
            request.error = error
            self.finish(request, "error")
            self._failed.append(request)

    def start_over(self) -> None:
        """After the slots' contents were lost: requeue the running requests first, with their generated tokens."""
        for request in reversed(self.running):
            request.running = False
            self.waiting.appendleft(request)
        self.slots = [None] * len(self.slots)
        self.prefilling, self._at_fault, self._out_of_pages = None, [], False
        self.prefixes.clear()

    def set_sparsity(self, sparsity: float | None) -> None:
        """Set the decoder's masks to a level's. The slots are unchanged."""
        if sparsity != self.sparsity:
            assert self.bundle is not None
            assert sparsity is not None
            self.sparsity = None
            self.decoder.set_masks(self.bundle.at(sparsity).masks)
            self.sparsity = sparsity

    def start_measuring(self, every: int) -> None:
        """Count dropped channels in one of ``every`` steps. Of several users the lowest ``every`` counts; a change of it
        starts from zero."""
        self._measure([*self._measuring, every])

    def stop_measuring(self, every: int) -> None:
        rest = self._measuring.copy()
        rest.remove(every)
        self._measure(rest)

    def _measure(self, users: list[int]) -> None:
        before, now = min(self._measuring, default=None), min(users, default=None)
        self._measuring = users
        if now is None:
            self.decoder.measure_sparsity(False)
        elif now != before:
            self.decoder.measure_sparsity(True, now)

    def step(self, interrupted: Callable[[], object] | None = None) -> list[Request]:
        """Prefill a chunk, or decode: one token, or until ``interrupted()``, the end of a request or
        ``Decoder.delivery_interval``. Returns the requests that may have new tokens, or failed."""
        self._at_fault = []
        advanced = self._step(interrupted)
        failed, self._failed = self._failed, []
        return advanced + failed

    def _step(self, interrupted: Callable[[], object] | None) -> list[Request]:
        if self.prefilling is None and self.waiting and None in self.slots and not self._out_of_pages:
            self._admit()
        if self.prefilling is not None:
            only = len(self.running) == 1
            size = self.decoder.prefill_chunk // (1 if only else self.decoder.chunks_split_under_load)
            if self.prefilling.needs_prompt_scores:
                size = min(size, SCORE_CHUNK)
            if only or self._prefilled < size:
                advanced = self._prefill_together(size) or self._prefill_chunk(self.prefilling, size)
                self._step_ended = time.perf_counter()
                return advanced
        self._prefilled = 0
        advanced = [request for level in self._levels() for request in self._decode(level, interrupted)]
        before, self._step_ended = self._step_ended, time.perf_counter()
        self.stats.seconds += self._step_ended - before
        return advanced

    def _levels(self) -> list[float | None]:
        """The levels to decode in this step: the current one; all of them, one token each, during a prefill."""
        levels = {request.sparsity for request in self.running if request is not self.prefilling}
        if self.prefilling is not None or not levels:
            return sorted(levels, key=lambda level: level != self.sparsity)  # the current masks' level first
        now = time.perf_counter()
        expired = len(levels) > 1 and now - self._level_began.get(self._current_level, 0.0) >= TURN_SECONDS
        if self._current_level not in levels or expired:
            self._current_level = min(levels, key=lambda level: self._level_began.get(level, 0.0))
            self._level_began[self._current_level] = now
        return [self._current_level]

    def _allocate(self, slot: int, positions: int, *kept: int, claim: bool = False) -> bool:
        """Allocate pages for ``positions`` of a slot; evict prefixes of idle slots, least recently used first, except
        ``kept``. False, and nothing is evicted, if the pages would not suffice. ``claim``: reserve, map later."""
        cache = self.decoder.cache
        while not (cache.claim if claim else cache.grow)(slot, positions):
            idle = [
                i
                for i, other in enumerate(self.slots)
                if other is None and i not in (slot, *kept) and cache.releasable_pages(i)
            ]
            if sum(map(cache.releasable_pages, idle)) < cache.missing_pages(slot, positions):
                return False
            oldest = self.prefixes.oldest(idle)
            cache.release(oldest)
            self.prefixes.forget(oldest)
        return True

    def _allocate_or_preempt(self, request: Request, positions: int) -> None:
        """Allocate pages for ``positions`` of a running request; preempt the newest requests, maybe this one, while pages
        are short. They go back to the queue with their generated tokens."""
        while request.running and not self._allocate(self.slots.index(request), positions):
            newest = max(self.running, key=lambda running: running.arrival)
            if newest is request and len(self.running) == 1:
                self._fail_alone(request, self.decoder.cache.out_of_memory(positions))
                return
            if not self.stats.preemptions:
                log.warning("the KV cache is full: requests are preempted and will be computed again")
            self.stats.preemptions += 1
            self._free_slot(newest)
            self.waiting.appendleft(newest)

    def _admit(self) -> bool:
        """Move the first waiting request to a slot if there are pages for its tokens and one more."""
        request = self.waiting.popleft()
        self._at_fault = [request]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        positions = min(len(tokens) + 1, request.max_positions)
        if self.decoder.verifies_alike:  # decoded tokens are decoded again: a prefill rounds differently
            tokens = tokens[: request.num_prefilled]
        sparse = sparse_from(request.prefill, len(request.prompt_token_ids))
        idle = [slot for slot, other in enumerate(self.slots) if other is None]
        slot, source, length = self.prefixes.choose(tokens, sparse, request.sparsity, idle)
        if request.needs_prompt_scores:
            request.prompt_scores, source, length = [], slot, 0
        claim = len(tokens) - length > self.decoder.prefill_chunk  # pages of later chunks are mapped during prefill
        allocated = self._allocate(slot, positions, source, claim=claim)
        if not allocated and source != slot and source in idle:  # no pages for a copy: reuse the prefix in place
            slot = source
            allocated = self._allocate(slot, positions, claim=claim)
        if not allocated and not self.running:
            self._fail_alone(request, self.decoder.cache.out_of_memory(positions))
        elif not allocated:
            self.waiting.appendleft(request)
            self._out_of_pages = True
        if not allocated:
            self._at_fault = []
            return False
        self.slots[slot], request.running = request, True
        # After the last of the waiting requests of this level: compile and capture for the batch.
        if len(idle) == 1 or not self.waiting or self.waiting[0].sparsity != request.sparsity:
            batch = {i: one for i, one in enumerate(self.slots) if one is not None and one.sparsity == request.sparsity}
            shortest = min(member.num_tokens for member in batch.values())
            longest = max(member.max_positions for member in batch.values())
            if longest > shortest:
                sampled = any(not member.sampling.greedy for member in batch.values())
                self.set_sparsity(request.sparsity)
                self.decoder.prepare(list(batch), shortest + 1, longest, sampled=sampled)
        began = time.perf_counter()
        if source != slot:
            self.decoder.copy(source, slot, length)
        self.prefixes.note(slot, tokens[:length], len(tokens), sparse, request.sparsity)
        if not request.output_token_ids:
            request.cached_tokens, request.prefill_started = length, began
        request.num_computed_tokens = length
        self._sequence = torch.tensor(tokens, dtype=torch.int64)
        self.prefilling, self._at_fault = request, []
        return True

    def _prefill_together(self, size: int) -> list[Request]:
        """Prefill the current prompt and waiting ones in one pass of up to ``size`` positions, if they are short and dense;
        nothing if there is only one."""
        request, budget, batch = self.prefilling, min(size, self.decoder.max_joint_prefill), []
        longest = min(self.decoder.max_joint_prefill // 2, self._switch or self.decoder.max_joint_prefill)

        def joins(other: Request) -> bool:
            count = len(other.prompt_token_ids)
            dense = sparse_from(other.prefill, count) == count and not other.output_token_ids
            return dense and count <= min(longest, budget) and not other.needs_prompt_scores

        if request is None or not (joins(request) and self.waiting and joins(self.waiting[0]) and None in self.slots):
            return []
        while request is not None:
            batch.append((request, self._sequence))
            budget -= len(self._sequence)
            more = self.waiting and None in self.slots and len(batch) < PROMPTS_TOGETHER and joins(self.waiting[0])
            request = self.prefilling if more and self._admit() else None
        requests = self._at_fault = [request for request, _ in batch]
        prompts = [(self.slots.index(request), tokens, request.num_computed_tokens) for request, tokens in batch]
        logits = self.decoder.prefill_together(prompts)
        totals = [len(tokens) for _, tokens in batch]
        for request, (slot, _, start), total in zip(requests, prompts, totals, strict=True):
            self.prefixes.note(slot, list(request.prompt_token_ids), total, total, request.sparsity)
            self._prefilled += total - start
            request.num_computed_tokens = total
        chosen = self._sample(logits, requests, totals)
        self.prefilling = None
        for request, token in zip(requests, chosen, strict=True):
            self._append(request, token, time.perf_counter())
        return requests

    def _prefill_chunk(self, request: Request, size: int) -> list[Request]:
        """Prefill positions up to the next multiple of ``size``; sample a token after the last one. Of a request that was
        preempted in decode, decode up to ``max_verified_tokens`` tokens again."""
        self._at_fault = [request]
        slot, start, total = self.slots.index(request), request.num_computed_tokens, len(self._sequence)
        if start == total:
            recomputed = start - len(request.prompt_token_ids)
            tokens = request.output_token_ids[recomputed:-1][: self.decoder.max_verified_tokens]
            if tokens:
                self.set_sparsity(request.sparsity)
                self.decoder.verify([*[[]] * slot, tokens], [_IDLE] * (slot + 1))
                self._sequence = torch.cat((self._sequence, torch.tensor(tokens)))
                request.num_computed_tokens += len(tokens)
                self._prefilled += size
            else:
                self.prefilling = None
            return []
        sparse = sparse_from(request.prefill, len(request.prompt_token_ids))
        score = partial(self._score_prompt, request) if request.needs_prompt_scores else None
        stop = min(next_chunk(start, size), total)
        self._allocate_or_preempt(request, stop)
        if not request.running:
            return []
        if stop > sparse:  # positions before it do not depend on the masks
            self.set_sparsity(request.sparsity)
        logits = self.decoder.prefill(slot, self._sequence, sparse, start=start, stop=stop, on_logits=score)
        # Map the next chunk's pages while a GPU runs this one. On failure, the next chunk's allocation preempts.
        self.decoder.cache.grow(slot, min(next_chunk(stop, size), total))
        # Generated tokens were computed with masks and are not reused as a prefix.
        self.prefixes.note(slot, list(request.prompt_token_ids[:stop]), total, sparse, request.sparsity)
        self._prefilled += stop - start
        request.num_computed_tokens = stop
        if stop == total == request.num_tokens:
            chosen = self._sample(logits[None], [request], [total])[0]
            self.prefilling = None
            self._append(request, chosen, time.perf_counter())
        return [request] if self.prefilling is None else []

    def _score_prompt(self, request: Request, logits: Tensor) -> None:
        """Append the log-probabilities of the next prompt tokens, by the logits (n, V) before them."""
        assert request.prompt_scores is not None
        assert request.sampling.logprobs is not None
        first = len(request.prompt_scores) + 1
        following = request.prompt_token_ids[first : first + len(logits)]
        request.prompt_scores += score_tokens(logits[: len(following)], following, request.sampling.logprobs)

    def _decode(self, level: float | None, interrupted: Callable[[], object] | None) -> list[Request]:
        """Decode one or more tokens of every request of a level, except the one in prefill."""
        for request in sorted(self.running, key=lambda request: request.arrival):
            if request is not self.prefilling and request.sparsity == level:
                self._allocate_or_preempt(request, request.num_tokens)
        rows = [None if one is None or one is self.prefilling or one.sparsity != level else one for one in self.slots]
        if self._switch is not None:
            # LongRoPE: keys rotated by the short factors are invalid in a longer sequence: prefill it again.
            for slot, row in enumerate(rows):
                if row is not None and row.num_tokens - 1 == self._switch:
                    rows[slot], row.num_prefilled = None, row.num_tokens
                    self._free_slot(row)
                    self.waiting.appendleft(row)
        while rows and rows[-1] is None:
            rows.pop()
        running = [request for request in rows if request is not None]
        if not running:
            return []
        self._at_fault = running
        self.set_sparsity(level)
        tokens = _last_tokens(rows)
        scored = any(request.sampling.logprobs is not None for request in running)
        settings = [request.sampling if request else _IDLE for request in rows]
        process = partial(self._process, rows=rows) if any(one.processor.active for one in running) else None
        deadline = time.perf_counter() + self.decoder.delivery_interval
        one_token = scored or interrupted is None or self.prefilling is not None or self._switch is not None
        while True:
            drafts = self._drafts(rows)
            verified = bool(drafts) and not self.decoder.running_ahead
            if verified:
                self._verify(rows, drafts)
                now = time.perf_counter()
            else:
                if scored:
                    chosen = self._sample(self.decoder.decode(tokens), rows, self.decoder.lengths[: len(rows)])
                else:  # with drafts, this step must not start the next one ahead
                    device_tokens = self.decoder.step(tokens, settings, process, bool(drafts))
                    chosen = device_tokens.tolist()
                now = time.perf_counter()
                for row, token in zip(rows, chosen, strict=True):
                    if row is not None:
                        if row.drafter is not None:
                            row.drafter.settle(0, 0)
                        self.stats.tokens += self._append(row, token, now)
            stop = any(
                row.finish_reason is not None or not self.decoder.cache.grow(slot, row.num_tokens)
                for slot, row in enumerate(rows)
                if row is not None
            )
            if one_token or stop or now >= deadline or (interrupted is not None and interrupted()):
                return running
            # Tokens of idle rows are undefined.
            tokens = device_tokens if len(running) == len(rows) and not verified else _last_tokens(rows)

    def _drafts(self, rows: Sequence[Request | None]) -> dict[int, list[int]]:
        """The drafts by slot, up to the tokens that one step verifies beside each row's newest token. Of a drafter that
        uses the decoder they are placeholders, which `_verify` replaces."""
        drafts: dict[int, list[int]] = {}
        if self.speculative is None or self.prefilling is not None:
            return drafts
        budget = self.decoder.max_verified_tokens - sum(request is not None for request in rows)
        for slot, request in enumerate(rows):
            if request is None or not request.speculative:
                continue
            if request.drafter is None:
                tokens = [*request.prompt_token_ids, *request.output_token_ids]
                costs = self.decoder.verify_costs, self.decoder.draft_cost
                request.drafter = make_drafter(self.speculative, *costs, tokens)
            limit = min(request.max_positions - request.num_tokens, budget)
            if self._switch is not None and request.num_tokens <= self._switch:
                limit = min(limit, self._switch - request.num_tokens)
            if draft := request.drafter.propose(limit):
                # A draft evicts and preempts nothing.
                if not self.decoder.cache.grow(slot, request.num_tokens + len(draft)):
                    continue
                drafts[slot] = draft
                budget -= len(draft)
        return drafts

    def _verify(self, rows: Sequence[Request | None], drafts: dict[int, list[int]]) -> None:
        """One step over every row's newest token and draft. Draft tokens are accepted up to the first that differs from the
        sampled token, which is appended in its place."""
        starts, settings = self.decoder.lengths, [request.sampling if request else _IDLE for request in rows]
        asked = (slot for slot in drafts if (row := rows[slot]) and row.drafter and row.drafter.uses_decoder)
        sizes = {slot: len(drafts[slot]) for slot in asked}
        if sizes:
            drafts = drafts | self.decoder.draft(_last_tokens(rows).tolist(), sizes, settings)
        tokens = [[row.output_token_ids[-1], *drafts.get(slot, ())] if row else [] for slot, row in enumerate(rows)]
        device_tokens, logits = self.decoder.verify(tokens, settings)
        chosen, now, margin = device_tokens.tolist(), time.perf_counter(), self.decoder.verify_margin
        close = _close_logits(logits, margin) if margin else [False] * len(chosen)
        end = 0
        for slot, request in enumerate(rows):
            if request is None:
                continue
            draft, first = drafts.get(slot, []), end
            end += len(draft) + 1
            processed = request.processor.active or request.sampling.logprobs is not None
            appended, undecided = 0, False
            for index in range(first, end):
                undecided = close[index] and bool(draft) and request.sampling.greedy
                if undecided:
                    break  # a plain step decides
                token = chosen[index]
                if processed:
                    (token,) = self._sample(logits[index : index + 1], [request], [starts[slot] + 1 + appended])
                if not self._append(request, token, now):
                    break
                appended += 1
                if request.finish_reason is not None or appended > len(draft) or token != draft[appended - 1]:
                    break
            self.decoder.truncate(slot, starts[slot] + appended)
            self.stats.tokens += appended
            if draft:
                accepted = sum(map(eq, draft, request.output_token_ids[len(request.output_token_ids) - appended :]))
                for counts in (request.drafts, self.stats.drafts):
                    counts.add(len(draft), accepted)
            if request.drafter is not None:
                request.drafter.settle(len(draft), appended - 1, undecided=undecided)

    def _sample(self, logits: Tensor, rows: Sequence[Request | None], positions: Sequence[int]) -> list[int]:
        """Sample a token for each row of logits (B, V); add its log-probability, by the unprocessed logits, if requested."""
        unprocessed = logits
        if any(request is not None and request.processor.active for request in rows):
            logits = logits.clone()
            self._process(logits, rows)
        settings = [request.sampling if request else _IDLE for request in rows]
        chosen: list[int] = sample(logits, settings, positions).tolist()
        for row, (request, token) in enumerate(zip(rows, chosen, strict=True)):
            if request is not None and request.sampling.logprobs is not None and token >= 0:
                request.scores += score_tokens(unprocessed[row : row + 1], [token], request.sampling.logprobs)
        return chosen

    def _process(self, logits: Tensor, rows: Sequence[Request | None]) -> None:
        """Apply penalties, biases and grammars to logits (B, V) in place. A request whose logits cannot be processed fails
        alone: the decoder's step goes on, and the row's token is not used."""
        for row, request in zip(logits, rows, strict=True):
            if request is not None and request.processor.active and request.finish_reason is None:
                try:
                    request.processor.process(row)
                except Exception as error:
                    self._fail_alone(request, error)

    def _append(self, request: Request, token: int, now: float) -> bool:
        """Append a sampled token; False if the request failed."""
        if token < 0 and request.finish_reason is None:
            if request in self.slots:
                self.prefixes.forget(self.slots.index(request))  # its keys and values may not be numbers either
            why = "activations overflow in this dtype; load with float32 or bfloat16"
            self._fail_alone(request, WisparseError(f"the model's output is not a number: {why}"))
        if request.finish_reason is not None:
            return False
        if not request.output_token_ids:
            request.first_token_time = now
        request.last_token_time = now
        request.output_token_ids.append(token)
        request.processor.take(token)
        if request.drafter is not None:
            request.drafter.take(token)
        if token in request.stop_token_ids:
            self.finish(request, "stop")
        elif request.num_tokens - 1 == request.max_positions:
            self.finish(request, "length")
        return True


def _close_logits(logits: Tensor, margin: float) -> list[bool]:
    """Whether the two largest logits of each row (R, V) are less than ``margin`` apart."""
    best = logits.max(dim=-1)
    second = logits.scatter(1, best.indices[:, None], -torch.inf).max(dim=-1).values
    close: list[bool] = (best.values - second < margin).tolist()
    return close


def _last_tokens(rows: Sequence[Request | None]) -> Tensor:
    """(B,) int64: the newest token of each row, -1 for an idle row."""
    return torch.tensor([request.output_token_ids[-1] if request else -1 for request in rows], dtype=torch.int64)
