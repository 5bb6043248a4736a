"""The loop that generates every token: each step prefills a chunk of a prompt or decodes the running requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import eq

import torch
from torch import Tensor

from ..decoding.decoder import PROMPTS_TOGETHER, next_chunk
from ..decoding.sampling import SamplingParams, sample
from .logits import score_tokens
from .request import Request
from .scheduler import Scheduler
from .speculation import make_drafter

Rows = Sequence[Request | None]  # by slot; None: idle

_IDLE = SamplingParams()  # sampling of idle rows


def generate_step(scheduler: Scheduler, interrupted: Callable[[], object] | None = None) -> list[Request]:
    """Prefill a chunk, or decode: one token, or until ``interrupted()``, the end of a request or
    ``Decoder.delivery_interval``. Returns the requests that may have new tokens, or failed."""
    decoder, stats, advanced = scheduler.decoder, scheduler.stats, list[Request]()
    scheduler.at_fault = []
    if scheduler.prefilling is None:
        scheduler.admit()
    if size := scheduler.chunk_size():
        advanced += _prefill_jointly(scheduler, size) or _prefill_chunk(scheduler, size)
        scheduler.step_ended = time.perf_counter()
        return advanced + scheduler.take_failed()

    scheduler.prefilled = 0
    levels = {request.sparsity for request in scheduler.running if request is not scheduler.prefilling}
    # During a prefill all levels are decoded, one token each.
    for level in scheduler.levels.of_step(levels, all_levels=scheduler.prefilling is not None):
        rows = scheduler.rows_of(level)
        running = [request for request in rows if request is not None]
        if not running:
            continue
        advanced += running
        scheduler.at_fault = running
        scheduler.levels.use(level)
        tokens = _last_tokens(rows)
        scored = any(request.sampling.logprobs is not None for request in running)
        settings = [request.sampling if request else _IDLE for request in rows]
        process = partial(_process, scheduler, rows) if any(one.processor.active for one in running) else None
        one_token = scored or interrupted is None or scheduler.prefilling is not None or scheduler.switch is not None
        deadline = time.perf_counter() + decoder.delivery_interval
        while True:
            drafts = _propose(scheduler, rows)
            verified = bool(drafts) and not decoder.running_ahead
            if verified:
                _verify(scheduler, rows, drafts)
            else:
                if scored:
                    chosen = _sample(scheduler, rows, decoder.decode(tokens), decoder.lengths[: len(rows)])
                else:  # with drafts, this step must not start the next one ahead
                    device_tokens = decoder.step(tokens, settings, process, bool(drafts))
                    chosen = device_tokens.tolist()
                now = time.perf_counter()
                for row, token in zip(rows, chosen, strict=True):
                    if row is not None:
                        if row.drafter is not None:
                            row.drafter.settle(0, 0)
                        stats.tokens += scheduler.append(row, token, now)
            stop = any(
                row.finish_reason is not None or not decoder.cache.grow(slot, row.num_tokens)
                for slot, row in enumerate(rows)
                if row is not None
            )
            if one_token or stop or time.perf_counter() >= deadline or (interrupted is not None and interrupted()):
                break
            # Tokens of idle rows are undefined.
            tokens = device_tokens if len(running) == len(rows) and not verified else _last_tokens(rows)
    before, scheduler.step_ended = scheduler.step_ended, time.perf_counter()
    stats.seconds += scheduler.step_ended - before
    return advanced + scheduler.take_failed()


def _prefill_chunk(scheduler: Scheduler, size: int) -> list[Request]:
    """Prefill positions up to the next multiple of ``size``; sample a token after the last one. Of a request that was
    preempted in decode, decode up to ``max_verified_tokens`` again."""
    decoder, request = scheduler.decoder, scheduler.prefilling
    assert request is not None
    scheduler.at_fault = [request]
    slot, start, total = scheduler.slots.index(request), request.num_computed_tokens, len(scheduler.sequence)
    if start == total:
        recomputed = start - len(request.prompt_token_ids)
        tokens = request.output_token_ids[recomputed:-1][: decoder.max_verified_tokens]
        if tokens:
            scheduler.levels.use(request.sparsity)
            decoder.verify([*[[]] * slot, tokens], [_IDLE] * (slot + 1))
            scheduler.sequence = torch.cat((scheduler.sequence, torch.tensor(tokens)))
            request.num_computed_tokens += len(tokens)
            scheduler.prefilled += size
        else:
            scheduler.prefilling = None
        return []
    sparse = request.sparse_from
    checkpoints = scheduler.prefixes.checkpoints(len(request.prompt_token_ids), decoder.prefill_chunk)
    stop = min([next_chunk(start, size), total, *(position for position in checkpoints if position > start)])
    scheduler.allocate_or_preempt(request, stop)
    if not request.running:
        return []
    if stop > sparse:  # positions before it do not depend on the masks
        scheduler.levels.use(request.sparsity)
    score = request.score_prompt_tokens if request.needs_prompt_scores else None
    logits = decoder.prefill(slot, scheduler.sequence, sparse, start=start, stop=stop, on_logits=score)
    # Map the next chunk's pages while a GPU runs this one. On failure, the next chunk's allocation preempts.
    decoder.cache.grow(slot, min(next_chunk(stop, size), total))
    # Generated tokens were computed with masks and are not reused as a prefix.
    scheduler.prefixes.note(slot, list(request.prompt_token_ids[:stop]), total, sparse, request.sparsity)
    if stop in checkpoints:
        scheduler.prefixes.keep(slot, decoder.cache.checkpoint(slot))
    scheduler.prefilled += stop - start
    request.num_computed_tokens = stop
    if stop == total == request.num_tokens:
        (token,) = _sample(scheduler, [request], logits[None], [total])
        scheduler.prefilling = None
        scheduler.append(request, token, time.perf_counter())
    return [request] if scheduler.prefilling is None else []


def _prefill_jointly(scheduler: Scheduler, size: int) -> list[Request]:
    """Prefill the current prompt and waiting ones in one pass of up to ``size`` positions, if they are short and dense;
    nothing if there is only one."""
    decoder, request, waiting = scheduler.decoder, scheduler.prefilling, scheduler.waiting
    budget, batch = min(size, decoder.max_joint_prefill), list[tuple[Request, Tensor]]()
    longest = min(decoder.max_joint_prefill // 2, scheduler.switch or decoder.max_joint_prefill)

    def joins(other: Request) -> bool:
        count = len(other.prompt_token_ids)
        dense = other.sparse_from == count and not other.output_token_ids
        return dense and count <= min(longest, budget) and not other.needs_prompt_scores

    if request is None or not (joins(request) and waiting and joins(waiting[0]) and None in scheduler.slots):
        return []
    while request is not None:
        batch.append((request, scheduler.sequence))
        budget -= len(scheduler.sequence)
        more = scheduler.waiting and len(batch) < PROMPTS_TOGETHER and joins(scheduler.waiting[0])
        request = scheduler.prefilling if more and scheduler.admit() else None
    requests = scheduler.at_fault = [request for request, _ in batch]
    prompts = [(scheduler.slots.index(request), tokens, request.num_computed_tokens) for request, tokens in batch]
    logits = decoder.prefill_together(prompts)
    for request, (slot, tokens, start) in zip(requests, prompts, strict=True):
        total = len(tokens)
        scheduler.prefixes.note(slot, list(request.prompt_token_ids), total, total, request.sparsity)
        scheduler.prefilled += total - start
        request.num_computed_tokens = total
    chosen = _sample(scheduler, requests, logits, [len(tokens) for _, tokens in batch])
    scheduler.prefilling = None
    for request, token in zip(requests, chosen, strict=True):
        scheduler.append(request, token, time.perf_counter())
    return requests


def _propose(scheduler: Scheduler, rows: Rows) -> dict[int, list[int]]:
    """The drafts by slot, up to the tokens that one step verifies beside each row's newest token. Of a drafter that
    uses the decoder they are placeholders, which `_verify` replaces."""
    drafts: dict[int, list[int]] = {}
    decoder, switch = scheduler.decoder, scheduler.switch
    if scheduler.speculative is None or scheduler.prefilling is not None:
        return drafts
    budget = decoder.max_verified_tokens - sum(request is not None for request in rows)
    for slot, request in enumerate(rows):
        if request is None or not request.speculative:
            continue
        if request.drafter is None:
            tokens = [*request.prompt_token_ids, *request.output_token_ids]
            request.drafter = make_drafter(scheduler.speculative, decoder.verify_costs, decoder.draft_cost, tokens)
        limit = min(request.max_positions - request.num_tokens, budget)
        if switch is not None and request.num_tokens <= switch:
            limit = min(limit, switch - request.num_tokens)
        # A draft evicts and preempts nothing.
        if (draft := request.drafter.propose(limit)) and decoder.cache.grow(slot, request.num_tokens + len(draft)):
            drafts[slot] = draft
            budget -= len(draft)
    return drafts


def _verify(scheduler: Scheduler, rows: Rows, drafts: dict[int, list[int]]) -> None:
    """One step over every row's newest token and draft. Draft tokens are accepted up to the first that differs from the
    sampled token, which is appended in its place."""
    decoder, starts = scheduler.decoder, scheduler.decoder.lengths
    settings = [request.sampling if request else _IDLE for request in rows]
    asked = (slot for slot in drafts if (row := rows[slot]) and row.drafter and row.drafter.uses_decoder)
    sizes = {slot: len(drafts[slot]) for slot in asked}
    if sizes:
        drafts = drafts | decoder.draft(_last_tokens(rows).tolist(), sizes, settings)
    tokens = [[row.output_token_ids[-1], *drafts.get(slot, ())] if row else [] for slot, row in enumerate(rows)]
    device_tokens, logits = decoder.verify(tokens, settings)
    chosen, now, margin = device_tokens.tolist(), time.perf_counter(), decoder.verify_margin
    close = [False] * len(chosen)
    if margin:  # whether the two largest logits are less than the margin apart
        best = logits.max(dim=-1)
        second = logits.scatter(1, best.indices[:, None], -torch.inf).max(dim=-1).values
        close = (best.values - second < margin).tolist()
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
                (token,) = _sample(scheduler, [request], logits[index : index + 1], [starts[slot] + 1 + appended])
            if not scheduler.append(request, token, now):
                break
            appended += 1
            if request.finish_reason is not None or appended > len(draft) or token != draft[appended - 1]:
                break
        decoder.truncate(slot, starts[slot] + appended)
        scheduler.stats.tokens += appended
        if draft:
            accepted = sum(map(eq, draft, request.output_token_ids[len(request.output_token_ids) - appended :]))
            for counts in (request.drafts, scheduler.stats.drafts):
                counts.add(len(draft), accepted)
        if request.drafter is not None:
            request.drafter.settle(len(draft), appended - 1, undecided=undecided)


def _sample(scheduler: Scheduler, rows: Rows, logits: Tensor, positions: Sequence[int]) -> list[int]:
    """Sample a token for each row of logits (B, V); add its log-probability, by the unprocessed logits, if requested."""
    unprocessed = logits
    if any(request is not None and request.processor.active for request in rows):
        logits = logits.clone()
        _process(scheduler, rows, logits)
    settings = [request.sampling if request else _IDLE for request in rows]
    chosen: list[int] = sample(logits, settings, positions).tolist()
    for row, (request, token) in enumerate(zip(rows, chosen, strict=True)):
        if request is not None and request.sampling.logprobs is not None and token >= 0:
            request.scores += score_tokens(unprocessed[row : row + 1], [token], request.sampling.logprobs)
    return chosen


def _process(scheduler: Scheduler, rows: Rows, logits: Tensor) -> None:
    """Apply penalties, biases and grammars to logits (B, V) in place. A request whose logits cannot be processed fails
    alone: the decoder's step goes on, and the row's token is not used."""
    for row, request in zip(logits, rows, strict=True):
        if request is not None and request.processor.active and request.finish_reason is None:
            try:
                request.processor.process(row)
            except Exception as error:
                scheduler.fail_alone(request, error)


def _last_tokens(rows: Rows) -> Tensor:
    """(B,) int64: the newest token of each row, -1 for an idle row."""
    return torch.tensor([request.output_token_ids[-1] if request else -1 for request in rows], dtype=torch.int64)
