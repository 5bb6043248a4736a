"""The scheduler: which requests have slots and cache pages, which sparsity level is decoded, what the next step runs."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError, WisparseError

from ..decoding.decoder import Decoder, check_prompt
from ..decoding.rotary import switch_length
from .logits import LogitsProcessor
from .prefixes import PrefixCache, SavedPrompt
from .request import Request
from .speculation import DraftCounts, SpeculativeConfig

# Longest time of decoding one level while requests of another level wait.
TURN_SECONDS = 0.25


class Levels:
    """``default``: the level of requests that name none; ``current``: that of the decoder's masks, None after a failure."""

    def __init__(self, decoder: Decoder, bundle: Bundle | None) -> None:
        self._decoder, self._bundle = decoder, bundle
        self.default = self.current = None if bundle is None else bundle.sparsity
        self._turn: float | None = None  # the level whose turn it is
        self._began: dict[float | None, float] = {}  # by level, when its last turn began

    def resolve(self, sparsity: float | None) -> float | None:
        """The level of a request; UsageError if the bundle does not have it."""
        return self.default if sparsity is None or self._bundle is None else self._bundle.at(sparsity).sparsity

    def use(self, sparsity: float | None) -> None:
        """Set the decoder's masks to a level's. The slots are unchanged."""
        if sparsity != self.current:
            assert self._bundle is not None
            assert sparsity is not None
            self.current = None
            self._decoder.set_masks(self._bundle.at(sparsity).masks)
            self.current = sparsity

    def of_step(self, levels: Collection[float | None], *, all_levels: bool) -> list[float | None]:
        """Those of ``levels`` to decode in this step: the one whose turn it is, or all of them."""
        if all_levels or not levels:
            return sorted(levels, key=lambda level: level != self.current)  # the current masks' level first
        now = time.perf_counter()
        expired = len(levels) > 1 and now - self._began.get(self._turn, 0.0) >= TURN_SECONDS
        if self._turn not in levels or expired:
            self._turn = min(levels, key=lambda level: self._began.get(level, 0.0))
            self._began[self._turn] = now
        return [self._turn]


log = logging.getLogger(__name__)

# Positions of a prefill chunk whose logits are scored.
SCORE_CHUNK = 256


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


class Scheduler:
    """Requests on one decoder; ``generate_step`` runs them. After other code has changed the decoder's slots, call
    ``start_over``. Only ``validate`` is thread-safe. Each step decodes only the requests of one sparsity level. Levels take
    turns; requests of the others keep their slots."""

    def __init__(
        self, decoder: Decoder, bundle: Bundle | None = None, speculative: SpeculativeConfig | None = None
    ) -> None:
        self.decoder, self.speculative, self.levels = decoder, speculative, Levels(decoder, bundle)
        self.stats = Stats()
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * decoder.max_batch
        self.prefilling: Request | None = None
        self.sequence = torch.empty(0, dtype=torch.int64)  # tokens of the request in prefill
        self.prefilled = 0  # positions prefilled since the last decode step
        self.step_ended = 0.0  # time of the last step's end
        self.at_fault: list[Request] = []  # if a step raises, these requests fail; if empty, all running ones do
        self.switch = switch_length(decoder.config)
        most = decoder.max_checkpoints if decoder.config.has_states else None
        self.prefixes = PrefixCache(decoder.max_batch, decoder.prefix_block_size, self.switch, most)
        self.saved: list[SavedPrompt] = []  # prompts on disk
        self._num_requests = 0
        self._out_of_pages = False  # the first waiting request lacks cache pages; reset when a request ends
        self._failed: list[Request] = []  # requests that failed in this step, while the slots of the others are valid

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
            if name.endswith("suppress_tokens") and len(set(ids)) == vocab_size:
                raise UsageError(f"{name}: expected token ids that leave one to choose, found all {vocab_size}")
        self.levels.resolve(request.sparsity)

    def add(self, request: Request) -> Request:
        if request.sampling.seed is None:
            request.sampling = replace(request.sampling, seed=secrets.randbits(62))
        request.sparsity = self.levels.resolve(request.sparsity)
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
        """After a step has raised, so the decoder's slots may be half written: finish and return the requests at fault,
        and queue the others again. An error in prefill fails one request, an error in decoding the rows of that step."""
        failed = self.at_fault or self.running
        for request in failed:
            self.finish(request, "error")
        self.start_over()
        self._failed = []
        return failed

    def fail_alone(self, request: Request, error: Exception) -> None:
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
        self.prefilling, self.at_fault, self._out_of_pages = None, [], False
        self.prefixes.clear()

    def take_failed(self) -> list[Request]:
        failed, self._failed = self._failed, []
        return failed

    def chunk_size(self) -> int:
        """Positions of this step's prefill chunk; 0 for a decode step."""
        if self.prefilling is None:
            return 0
        alone = len(self.running) == 1
        size = self.decoder.prefill_chunk // (1 if alone else self.decoder.chunks_split_under_load)
        if self.prefilling.needs_prompt_scores:
            size = min(size, SCORE_CHUNK)
        return size if alone or self.prefilled < size else 0

    def rows_of(self, level: float | None) -> list[Request | None]:
        """By slot, the requests to decode of a level, with pages for one more token each; None: idle."""
        for request in sorted(self.running, key=lambda request: request.arrival):
            if request is not self.prefilling and request.sparsity == level:
                self.allocate_or_preempt(request, request.num_tokens)
        rows = [None if one is None or one is self.prefilling or one.sparsity != level else one for one in self.slots]
        if self.switch is not None:
            # LongRoPE: keys rotated by the short factors are invalid in a longer sequence: prefill it again.
            for slot, row in enumerate(rows):
                if row is not None and row.num_tokens - 1 == self.switch:
                    rows[slot], row.num_prefilled = None, row.num_tokens
                    self._free_slot(row)
                    self.waiting.appendleft(row)
        while rows and rows[-1] is None:
            rows.pop()
        return rows

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

    def allocate_or_preempt(self, request: Request, positions: int) -> None:
        """Allocate pages for ``positions`` of a running request; preempt the newest requests, maybe this one, while pages
        are short. They go back to the queue with their generated tokens."""
        while request.running and not self._allocate(self.slots.index(request), positions):
            newest = max(self.running, key=lambda running: running.arrival)
            if newest is request and len(self.running) == 1:
                self.fail_alone(request, self.decoder.cache.out_of_memory(positions))
                return
            if not self.stats.preemptions:
                log.warning("the KV cache is full: requests are preempted and will be computed again")
            self.stats.preemptions += 1
            self._free_slot(newest)
            self.waiting.appendleft(newest)

    def admit(self) -> bool:
        """Move the first waiting request to a slot if one is free, with pages for its tokens and one more."""
        if not self.waiting or None not in self.slots or self._out_of_pages:
            return False
        request = self.waiting.popleft()
        self.at_fault = [request]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        positions = min(len(tokens) + 1, request.max_positions)
        if self.decoder.verifies_alike:  # decoded tokens are decoded again: a prefill rounds differently
            tokens = tokens[: request.num_prefilled]
        sparse = request.sparse_from
        idle = [slot for slot, other in enumerate(self.slots) if other is None]
        if self.saved and not request.needs_prompt_scores:
            self._load_saved(tokens, sparse, request.sparsity, self.prefixes.oldest(idle))
        slot, source, length = self.prefixes.choose(tokens, sparse, request.sparsity, idle)
        if request.needs_prompt_scores:
            request.prompt_scores, source, length = [], slot, 0
        claim = len(tokens) - length > self.decoder.prefill_chunk  # pages of later chunks are mapped during prefill
        allocated = self._allocate(slot, positions, source, claim=claim)
        if not allocated and source != slot and source in idle:  # no pages for a copy: reuse the prefix in place
            slot = source
            allocated = self._allocate(slot, positions, claim=claim)
        if not allocated and not self.running:
            self.fail_alone(request, self.decoder.cache.out_of_memory(positions))
        elif not allocated:
            self.waiting.appendleft(request)
            self._out_of_pages = True
        if not allocated:
            self.at_fault = []
            return False
        self.slots[slot], request.running = request, True
        # After the last of the waiting requests of this level: compile and capture for the batch.
        if len(idle) == 1 or not self.waiting or self.waiting[0].sparsity != request.sparsity:
            batch = {i: one for i, one in enumerate(self.slots) if one is not None and one.sparsity == request.sparsity}
            shortest = min(member.num_tokens for member in batch.values())
            longest = max(member.max_positions for member in batch.values())
            if longest > shortest:
                sampled = any(not member.sampling.greedy for member in batch.values())
                self.levels.use(request.sparsity)
                self.decoder.prepare(list(batch), shortest + 1, longest, sampled=sampled)
        began = time.perf_counter()
        states = self.prefixes.prefix(source).states.get(length, ())
        if source != slot or states:
            self.decoder.copy(source, slot, length, states)
        self.prefixes.note(slot, tokens[:length], len(tokens), sparse, request.sparsity, source)
        if not request.output_token_ids:
            request.cached_tokens, request.prefill_started = length, began
        request.num_computed_tokens = length
        # torch.tensor takes four times as long.
        self.sequence = torch.from_numpy(np.array(tokens, dtype=np.int64))
        self.prefilling, self.at_fault = request, []
        return True

    def _load_saved(self, tokens: Sequence[int], sparse_from: int, sparsity: float | None, slot: int) -> None:
        """Load the saved prompt that begins like ``tokens`` for longest into an idle slot, if for longer than every slot's."""
        lengths = {self.prefixes.reusable(one.prefix, tokens, sparse_from, sparsity): one for one in self.saved}
        saved = lengths[length := max(lengths)]
        if length <= self.prefixes.choose(tokens, sparse_from, sparsity, [slot])[2] or not self._allocate(slot, length):
            return
        self.prefixes.forget(slot)
        try:
            states = saved.load(self.decoder.cache, slot, length)
        except WisparseError as error:
            self.saved.remove(saved)
            log.warning("ignored: %s", error)
            return
        self.prefixes.note(slot, tokens[:length], len(tokens), saved.prefix.sparse_from, saved.prefix.sparsity)
        if states:
            self.prefixes.keep(slot, states)

    def append(self, request: Request, token: int, now: float) -> bool:
        """Append a sampled token; False if the request failed."""
        if token < 0 and request.finish_reason is None:
            if request in self.slots:
                self.prefixes.forget(self.slots.index(request))  # its keys and values may not be numbers either
            why = "activations overflow in this dtype; load with float32 or bfloat16"
            self.fail_alone(request, WisparseError(f"the model's output is not a number: {why}"))
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
