"""Continuous batching on token ids: which request is prefilled or decoded next."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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

_IDLE = SamplingParams()
# Logits of this many prompt positions are held at a time to score them.
_SCORE_CHUNK = 256
# A sparsity level is decoded for at most this long while rows of another level wait.
TURN_SECONDS = 0.25


@dataclass
class Stats:
    """Tokens that decode steps gave, of all requests together, and their wall time. Prefill and first tokens are not counted."""

    tokens: int = 0
    seconds: float = 0.0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    preemptions: int = 0  # requests that went back to the queue for want of cache memory

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _CachedPrefix:
    """The tokens at a slot's first positions, how they were computed, and when the slot was last used."""

    tokens: Sequence[int] = ()
    sparse_from: int = 0
    sparsity: float | None = None  # the level of the positions from ``sparse_from`` on
    long_factors: bool = False
    used: int = -1


class PrefixCache:
    def __init__(self, slots: int, block_size: int, switch: int | None) -> None:
        self._held = [_CachedPrefix() for _ in range(slots)]
        self._block_size, self._switch = block_size, switch
        self._clock = 0

    def choose(
        self, tokens: Sequence[int], sparse_from: int, sparsity: float | None, idle: Collection[int]
    ) -> tuple[int, int, int]:
        """Where to compute a sequence: a slot of ``idle``, the slot to reuse positions of, and how many (not the last)."""
        source, length = -1, 0
        for slot, held in enumerate(self._held):
            if held.long_factors != self._long(len(tokens)):
                continue
            most = min(len(held.tokens), len(tokens) - 1)
            if (held.sparse_from, held.sparsity) != (sparse_from, sparsity):
                most = min(most, held.sparse_from, sparse_from)
            # The first position that differs: slices are compared in C.
            common = 0
            while common < most and held.tokens[common : common + 256] == tokens[common : common + 256]:
                common += 256
            common = next((at for at in range(common, most) if held.tokens[at] != tokens[at]), most)
            if self._whole(common) > length:
                source, length = slot, self._whole(common)
        oldest = self.oldest(idle)
        if length == 0:
            return oldest, oldest, 0
        # Reusing a slot in place loses what follows the common part; copying loses what the oldest slot holds.
        if source in idle and self._whole(len(self._held[source].tokens)) - length <= len(self._held[oldest].tokens):
            return source, source, length
        return oldest, source, length

    def note(self, slot: int, tokens: Sequence[int], total: int, sparse_from: int, sparsity: float | None) -> None:
        """The slot now holds these tokens, computed as the beginning of a sequence of ``total``."""
        self._clock += 1
        self._held[slot] = _CachedPrefix(tokens, sparse_from, sparsity, self._long(total), self._clock)

    def oldest(self, slots: Iterable[int]) -> int:
        """The least recently used."""
        return min(slots, key=lambda slot: (self._held[slot].used, slot))

    def forget(self, slot: int) -> None:
        self._held[slot] = _CachedPrefix()

    def touch(self, slot: int) -> None:
        self._clock += 1
        self._held[slot].used = self._clock

    def clear(self) -> None:
        self._held = [_CachedPrefix() for _ in self._held]

    def _long(self, total: int) -> bool:
        return self._switch is not None and total > self._switch

    def _whole(self, length: int) -> int:
        return length // self._block_size * self._block_size


class Scheduler:
    """Runs requests on one decoder, which nobody else may use between two steps but through ``start_over``. Only
    ``validate`` is thread-safe. Requests of any sparsity level share the slots: a step decodes the rows of one, the
    others are idle in it, and the levels take turns."""

    def __init__(
        self, decoder: Decoder, bundle: Bundle | None = None, speculative: SpeculativeConfig | None = None
    ) -> None:
        self.decoder, self.bundle, self.speculative = decoder, bundle, speculative
        # The level of requests that name none, and the level of the decoder's masks: None after a switch that failed.
        self.default_sparsity = self.sparsity = None if bundle is None else bundle.sparsity
        self.stats = Stats()  # of the decode steps so far
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * decoder.max_batch
        self.prefilling: Request | None = None
        self._sequence = torch.empty(0, dtype=torch.int64)  # tokens of the request that is being prefilled
        self._added = 0  # requests so far
        self._full = False  # the first in the queue waits for memory, which only a request's end can give
        self._culprits: list[Request] = []  # the requests that an error concerns; none: the whole batch
        self._turn: float | None = None  # the level that is decoded
        self._turn_began: dict[float | None, float] = {}  # when each level's last turn began
        self._prefilled = 0  # positions since the others' last token
        self._step_ended = 0.0
        self._measuring: list[int] = []  # each wants one step of so many counted
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
        used = sum(taken for taken, one in zip(cache.taken, self.slots, strict=True) if one is not None)
        return used / max(cache.pages, 1)

    def validate(self, request: Request) -> None:
        """Raise ContextLengthError or UsageError unless the request can be queued."""
        check_prompt(len(request.prompt_token_ids), self.decoder.max_seq_len)
        vocab_size = self.decoder.config.vocab_size
        for name, ids in (("prompt", request.prompt_token_ids), ("logit_bias", request.sampling.logit_bias or ())):
            unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
            if unknown is not None:
                raise UsageError(f"{name}: expected token ids from 0 to {vocab_size - 1}, found {unknown}")
        self._level(request.sparsity)

    def _level(self, sparsity: float | None) -> float | None:
        if sparsity is None or self.bundle is None:
            return self.default_sparsity
        return self.bundle.at(sparsity).sparsity

    def add(self, request: Request) -> Request:
        if request.sampling.seed is None:
            request.sampling = replace(request.sampling, seed=secrets.randbits(62))
        request.sparsity = self._level(request.sparsity)
        limit = self.decoder.max_seq_len
        request.most_positions = min(len(request.prompt_token_ids) + (request.max_new_tokens or limit) - 1, limit)
        request.processor = LogitsProcessor(request.sampling, request.prompt_token_ids, request.constraint)
        self._added += 1
        request.number, request.num_prefilled = self._added, len(request.prompt_token_ids)
        self.waiting.append(request)
        return request

    def finish(self, request: Request, reason: str) -> None:
        """Take a request out, wherever it is; one that has finished stays as it is."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self._full = False
        if request in self.slots:
            self._take_out(request)
        else:
            self.waiting = deque(other for other in self.waiting if other is not request)

    def _take_out(self, request: Request) -> None:
        slot = self.slots.index(request)
        self.slots[slot], request.running, self._full = None, False, False
        self.prefixes.touch(slot)
        if self.prefilling is request:
            self.prefilling = None

    def fail(self) -> list[Request]:
        """After :meth:`step` has raised: finish and return the requests it failed for, and queue the others again. An
        error in prefill or in a grammar concerns one request, one in decoding the rows of that step."""
        failed = self._culprits or self.running
        for request in failed:
            self.finish(request, "error")
        self.start_over()
        return failed

    def start_over(self) -> None:
        """After the slots' contents were lost: queue running requests again, first, with what they have generated."""
        for request in reversed(self.running):
            request.running = False
            self.waiting.appendleft(request)
        self.slots = [None] * len(self.slots)
        self.prefilling, self._culprits, self._full = None, [], False
        self.prefixes.clear()

    def set_sparsity(self, sparsity: float | None) -> None:
        """Put a level's masks in force, unless they are. The slots stay as they are."""
        if sparsity != self.sparsity:
            assert self.bundle is not None
            assert sparsity is not None
            self.sparsity = None
            self.decoder.set_masks(self.bundle.at(sparsity).masks)
            self.sparsity = sparsity

    def start_measuring(self, every: int) -> None:
        """Count dropped channels in one step of so many, from zero unless that is done already."""
        if every < min(self._measuring, default=every + 1):
            self.decoder.measure_sparsity(True, every)
        self._measuring.append(every)

    def stop_measuring(self, every: int) -> None:
        self._measuring.remove(every)
        if not self._measuring:
            self.decoder.measure_sparsity(False)

    def step(self, interrupted: Callable[[], object] | None = None) -> list[Request]:
        """Prefill a chunk, or decode: one token, or until ``interrupted()``, a request's end, or for
        ``Decoder.together_seconds``."""
        if self.prefilling is None and self.waiting and None in self.slots and not self._full:
            self._admit()
        if self.prefilling is not None:
            alone = len(self.running) == 1
            size = self.decoder.prefill_chunk // (1 if alone else self.decoder.pieces_under_load)
            if self.prefilling.needs_prompt_scores:
                size = min(size, _SCORE_CHUNK)
            if alone or self._prefilled < size:
                advanced = self._prefill_together(size) or self._prefill_chunk(self.prefilling, size)
                self._step_ended = time.perf_counter()
                return advanced
        self._prefilled = 0
        advanced = [request for level in self._levels() for request in self._decode(level, interrupted)]
        before, self._step_ended = self._step_ended, time.perf_counter()
        self.stats.seconds += self._step_ended - before
        return advanced

    def _levels(self) -> list[float | None]:
        """The levels to decode in this step: the one whose turn it is; beside a prefill all, a token each."""
        levels = {request.sparsity for request in self.running if request is not self.prefilling}
        if self.prefilling is not None or not levels:
            return sorted(levels, key=lambda level: level != self.sparsity)  # the level in force first
        now = time.perf_counter()
        over = len(levels) > 1 and now - self._turn_began.get(self._turn, 0.0) >= TURN_SECONDS
        if self._turn not in levels or over:
            self._turn = min(levels, key=lambda level: self._turn_began.get(level, 0.0))
            self._turn_began[self._turn] = now
        return [self._turn]

    def _make_room(self, slot: int, positions: int, *kept: int, claim: bool = False) -> bool:
        """Room for so many positions of a slot, at the cost of idle slots' prefixes but ``kept``, least recently used
        first; False, and none is given up, if all of them would not do. ``claim``: its memory is mapped later."""
        cache = self.decoder.cache
        while not (cache.claim if claim else cache.grow)(slot, positions):
            idle = [i for i, one in enumerate(self.slots) if one is None and i not in (slot, *kept) and cache.spare(i)]
            if sum(map(cache.spare, idle)) < cache.lacking(slot, positions):
                return False
            oldest = self.prefixes.oldest(idle)
            cache.release(oldest)
            self.prefixes.forget(oldest)
        return True

    def _keep_room(self, request: Request, positions: int) -> None:
        """Room for so many positions of a running request. If memory is short, the youngest goes back to the queue with
        what it has generated: maybe this one. One alone has all memory."""
        while request.running and not self._make_room(self.slots.index(request), positions):
            youngest = max(self.running, key=lambda one: one.number)
            if youngest is request and len(self.running) == 1:
                self._culprits = [request]
                raise self.decoder.cache.too_little(positions)
            if not self.stats.preemptions:
                log.warning("memory for keys and values is short: requests go back to the queue, to be read again")
            self.stats.preemptions += 1
            self._take_out(youngest)
            self.waiting.appendleft(youngest)

    def _admit(self) -> bool:
        """Give the first in the queue a slot, if there is memory for its tokens so far and one more."""
        request = self.waiting.popleft()
        self._culprits = [request]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        positions = min(len(tokens) + 1, request.most_positions)
        if self.decoder.verifies_alike:  # what was decoded will be decoded again: a prompt's products round otherwise
            tokens = tokens[: request.num_prefilled]
        sparse = sparse_from(request.prefill, len(request.prompt_token_ids))
        idle = [slot for slot, other in enumerate(self.slots) if other is None]
        slot, source, length = self.prefixes.choose(tokens, sparse, request.sparsity, idle)
        if request.needs_prompt_scores:
            request.prompt_scores, source, length = [], slot, 0
        later = len(tokens) - length > self.decoder.prefill_chunk  # memory is mapped beside the chunk before
        room = self._make_room(slot, positions, source, claim=later)
        if not room and source != slot and source in idle:  # there is none for a copy
            slot = source
            room = self._make_room(slot, positions, claim=later)
        if not room and not self.running:
            raise self.decoder.cache.too_little(positions)
        if not room:
            self.waiting.appendleft(request)
            self._full, self._culprits = True, []
            return False
        self.slots[slot], request.running = request, True
        # Compile and capture what the batch needs once the requests that came together have been admitted.
        if len(idle) == 1 or not self.waiting or self.waiting[0].sparsity != request.sparsity:
            batch = {i: one for i, one in enumerate(self.slots) if one is not None and one.sparsity == request.sparsity}
            shortest = min(one.num_tokens for one in batch.values())
            longest = max(one.most_positions for one in batch.values())
            if longest > shortest:
                sampled = any(not one.sampling.greedy for one in batch.values())
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
        self.prefilling, self._culprits = request, []
        return True

    def _prefill_together(self, size: int) -> list[Request]:
        """Read the prompt that is being prefilled beside others that wait, up to ``size`` positions, if all are short; one
        alone is not read."""
        request, room, together = self.prefilling, min(size, self.decoder.most_together), []
        longest = min(self.decoder.most_together // 2, self._switch or self.decoder.most_together)

        def joins(other: Request) -> bool:
            count = len(other.prompt_token_ids)
            dense = sparse_from(other.prefill, count) == count and not other.output_token_ids
            return dense and count <= min(longest, room) and not other.needs_prompt_scores

        if request is None or not (joins(request) and self.waiting and joins(self.waiting[0]) and None in self.slots):
            return []
        while request is not None:
            together.append((request, self._sequence))
            room -= len(self._sequence)
            follows = (
                self.waiting and None in self.slots and len(together) < PROMPTS_TOGETHER and joins(self.waiting[0])
            )
            request = self.prefilling if follows and self._admit() else None
        requests = self._culprits = [request for request, _ in together]
        prompts = [(self.slots.index(one), sequence, one.num_computed_tokens) for one, sequence in together]
        logits = self.decoder.prefill_together(prompts)
        totals = [len(sequence) for _, sequence in together]
        for one, (slot, _, start), total in zip(requests, prompts, totals, strict=True):
            self.prefixes.note(slot, list(one.prompt_token_ids), total, total, one.sparsity)
            self._prefilled += total - start
            one.num_computed_tokens = total
        chosen = self._sample(logits, requests, totals)
        self.prefilling = None
        for one, token in zip(requests, chosen, strict=True):
            self._append(one, token, time.perf_counter())
        self._culprits = []
        return requests

    def _prefill_chunk(self, request: Request, size: int) -> list[Request]:
        """Compute positions up to the next multiple of ``size``; after the last of them sample a token. Of a request that
        was taken out while it was decoded, decode some of its tokens again."""
        self._culprits = [request]
        slot, start, total = self.slots.index(request), request.num_computed_tokens, len(self._sequence)
        if start == total:
            done = start - len(request.prompt_token_ids)
            again = request.output_token_ids[done:-1][: self.decoder.most_verified]
            if again:
                self.set_sparsity(request.sparsity)
                self.decoder.verify([*[[]] * slot, again], [_IDLE] * (slot + 1))
                self._sequence = torch.cat((self._sequence, torch.tensor(again)))
                request.num_computed_tokens += len(again)
                self._prefilled += size
            else:
                self.prefilling = None
            self._culprits = []
            return []
        sparse = sparse_from(request.prefill, len(request.prompt_token_ids))
        score = partial(self._score_prompt, request) if request.needs_prompt_scores else None
        stop = min(next_chunk(start, size), total)
        self._keep_room(request, stop)
        if not request.running:
            return []
        if stop > sparse:  # positions before it do not depend on the masks
            self.set_sparsity(request.sparsity)
        logits = self.decoder.prefill(slot, self._sequence, sparse, start=start, stop=stop, on_logits=score)
        # What the next chunk needs is mapped while a GPU reads this one. It was claimed; if not, the next chunk sees to it.
        self.decoder.cache.grow(slot, min(next_chunk(stop, size), total))
        # Generated tokens were computed with masks: they are no prefix of a next prompt.
        self.prefixes.note(slot, list(request.prompt_token_ids[:stop]), total, sparse, request.sparsity)
        self._prefilled += stop - start
        request.num_computed_tokens = stop
        if stop == total == request.num_tokens:
            chosen = self._sample(logits[None], [request], [total])[0]
            self.prefilling = None
            self._append(request, chosen, time.perf_counter())
        self._culprits = []
        return [request] if self.prefilling is None else []

    def _score_prompt(self, request: Request, logits: Tensor) -> None:
        """Score the next positions of a prompt, whose logits (n, V) these are, by the tokens that follow them."""
        assert request.prompt_scores is not None
        assert request.sampling.logprobs is not None
        first = len(request.prompt_scores) + 1
        following = request.prompt_token_ids[first : first + len(logits)]
        request.prompt_scores += score_tokens(logits[: len(following)], following, request.sampling.logprobs)

    def _decode(self, level: float | None, interrupted: Callable[[], object] | None) -> list[Request]:
        """One token, or several, for every request of a level that is not being prefilled."""
        for one in sorted(self.running, key=lambda one: one.number):
            if one is not self.prefilling and one.sparsity == level:
                self._keep_room(one, one.num_tokens)
        rows = [None if one is None or one is self.prefilling or one.sparsity != level else one for one in self.slots]
        if self._switch is not None:
            # LongRoPE: keys cached with the short factors do not fit a longer sequence; prefill it anew.
            for slot, request in enumerate(rows):
                if request is not None and request.num_tokens - 1 == self._switch:
                    rows[slot], request.num_prefilled = None, request.num_tokens
                    self._take_out(request)
                    self.waiting.appendleft(request)
        while rows and rows[-1] is None:
            rows.pop()
        running = [request for request in rows if request is not None]
        if not running:
            return []
        self._culprits = running
        self.set_sparsity(level)
        tokens = _last_tokens(rows)
        scored = any(request.sampling.logprobs is not None for request in running)
        settings = [request.sampling if request else _IDLE for request in rows]
        process = partial(self._process, rows=rows) if any(one.processor.active for one in running) else None
        until = time.perf_counter() + self.decoder.together_seconds
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
                else:  # with drafts at hand the step that is under way is the last plain one
                    device_tokens = self.decoder.step(tokens, settings, process, bool(drafts))
                    chosen = device_tokens.tolist()
                now = time.perf_counter()
                for request, token in zip(rows, chosen, strict=True):
                    if request is not None:
                        if request.drafter is not None:
                            request.drafter.settle(0, 0)
                        self._append(request, token, now)
                        self.stats.tokens += 1
            over = any(
                request.finish_reason is not None or not self.decoder.cache.grow(slot, request.num_tokens)
                for slot, request in enumerate(rows)
                if request is not None
            )
            if one_token or over or now >= until or (interrupted is not None and interrupted()):
                self._culprits = []
                return running
            # Tokens of idle rows are undefined.
            tokens = device_tokens if len(running) == len(rows) and not verified else _last_tokens(rows)

    def _drafts(self, rows: Sequence[Request | None]) -> dict[int, list[int]]:
        """By slot, the drafts of those rows that have one, as many as a step verifies beside every row's own token; those
        of a drafter that asks are yet to be made."""
        drafts: dict[int, list[int]] = {}
        if self.speculative is None or self.prefilling is not None:
            return drafts
        room = self.decoder.most_verified - sum(request is not None for request in rows)
        for slot, request in enumerate(rows):
            if request is None or not request.speculative:
                continue
            if request.drafter is None:
                tokens = [*request.prompt_token_ids, *request.output_token_ids]
                costs = self.decoder.verify_costs, self.decoder.draft_cost
                request.drafter = make_drafter(self.speculative, *costs, tokens)
            most = request.most_positions - request.num_tokens
            if self._switch is not None and request.num_tokens <= self._switch:
                most = min(most, self._switch - request.num_tokens)
            if draft := request.drafter.propose(min(most, room)):
                # No neighbour is disturbed for the sake of a draft.
                if not self.decoder.cache.grow(slot, request.num_tokens + len(draft)):
                    continue
                drafts[slot] = draft
                room -= len(draft)
        return drafts

    def _verify(self, rows: Sequence[Request | None], drafts: dict[int, list[int]]) -> None:
        """A step that reads every row's newest token and its draft. What a row's sampling chooses behind a token is taken;
        where it is what the draft has next, so is what follows that."""
        starts, settings = self.decoder.lengths, [request.sampling if request else _IDLE for request in rows]
        asked = {i: len(draft) for i, draft in drafts.items() if (one := rows[i]) and one.drafter and one.drafter.asks}
        if asked:
            drafts = drafts | self.decoder.draft(_last_tokens(rows).tolist(), asked, settings)
        given = [[one.output_token_ids[-1], *drafts.get(slot, ())] if one else [] for slot, one in enumerate(rows)]
        device_tokens, logits = self.decoder.verify(given, settings)
        chosen, now, margin = device_tokens.tolist(), time.perf_counter(), self.decoder.verify_margin
        close = _closest(logits, margin) if margin else [False] * len(chosen)
        row = 0
        for slot, request in enumerate(rows):
            if request is None:
                continue
            draft, first = drafts.get(slot, []), row
            row += len(draft) + 1
            processed = request.processor.active or request.sampling.logprobs is not None
            taken, undecided = 0, False
            for index in range(first, row):
                undecided = close[index] and bool(draft) and request.sampling.greedy
                if undecided:
                    break  # a plain step decides
                token = chosen[index]
                if processed:
                    (token,) = self._sample(logits[index : index + 1], [request], [starts[slot] + 1 + taken])
                self._append(request, token, now)
                taken += 1
                if request.finish_reason is not None or taken > len(draft) or token != draft[taken - 1]:
                    break
            self.decoder.truncate(slot, starts[slot] + taken)
            self.stats.tokens += taken
            if draft:
                accepted = sum(map(eq, draft, request.output_token_ids[len(request.output_token_ids) - taken :]))
                for counts in (request.drafts, self.stats.drafts):
                    counts.add(len(draft), accepted)
            if request.drafter is not None:
                request.drafter.settle(len(draft), taken - 1, undecided=undecided)

    def _sample(self, logits: Tensor, rows: Sequence[Request | None], positions: Sequence[int]) -> list[int]:
        """The next token of each row of logits (B, V); scored by the unchanged logits where that is asked for."""
        given = logits
        if any(request is not None and request.processor.active for request in rows):
            logits = logits.clone()
            self._process(logits, rows)
        settings = [request.sampling if request else _IDLE for request in rows]
        chosen: list[int] = sample(logits, settings, positions).tolist()
        for row, (request, token) in enumerate(zip(rows, chosen, strict=True)):
            if request is not None and request.sampling.logprobs is not None and token >= 0:
                request.scores += score_tokens(given[row : row + 1], [token], request.sampling.logprobs)
        return chosen

    def _process(self, logits: Tensor, rows: Sequence[Request | None]) -> None:
        """Apply penalties, bias and grammars to the logits (B, V), in place."""
        before = self._culprits
        for row, request in zip(logits, rows, strict=True):
            if request is not None and request.processor.active:
                self._culprits = [request]
                request.processor.process(row)
        self._culprits = before

    def _append(self, request: Request, token: int, now: float) -> None:
        if token < 0:
            self._culprits = [request]
            raise WisparseError(
                "the model's output is not a number: activations overflow in this dtype; load with float32 or bfloat16"
            )
        if not request.output_token_ids:
            request.first_token_time = now
        request.last_token_time = now
        request.output_token_ids.append(token)
        request.processor.take(token)
        if request.drafter is not None:
            request.drafter.take(token)
        if token in request.stop_token_ids:
            self.finish(request, "stop")
        elif request.num_tokens - 1 == request.most_positions:
            self.finish(request, "length")


def _closest(logits: Tensor, margin: float) -> list[bool]:
    """Of each row of logits (R, V), whether the two largest are less than ``margin`` apart."""
    best = logits.max(dim=-1)
    second = logits.scatter(1, best.indices[:, None], -torch.inf).max(dim=-1).values
    close: list[bool] = (best.values - second < margin).tolist()
    return close


def _last_tokens(rows: Sequence[Request | None]) -> Tensor:
    """(B,) int64: every row's newest token; -1 marks an idle one."""
    return torch.tensor([request.output_token_ids[-1] if request else -1 for request in rows], dtype=torch.int64)
