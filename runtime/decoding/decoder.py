"""The interface of all decoders with what they share, and how much memory a model needs."""

from __future__ import annotations

import logging
import resource
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.errors import ContextLengthError, ResourceError, UsageError
from wisparse.formats.machine import available_bytes
from wisparse.formats.model_config import LM_HEAD, PER_LAYER_EMBEDDING, ModelConfig, expected_tensors
from wisparse.formats.weight_types import WEIGHT_TYPES, code_bytes

from ..torch.block import Block, PerLayer, Positions, attention, embed, run_block
from .cache import KVCache, mapped_bytes, paging_of, state_bytes
from .heads import DraftHead, HeadFiles, MtpFiles
from .rotary import Rotary, query_scales
from .sampling import SamplingParams, sample

log = logging.getLogger(__name__)

_TIMED_STEPS = 12
# Of the memory that the weights leave free, what keys and values may take. Activations and graphs take 1 to 2 GB of a
# GPU's; other programs share a CPU's, so that it has the larger share only where both sizes are given.
_CACHE_SHARES = {"cuda": 0.7, "cpu": 0.25}
_FEWEST_POSITIONS = 256
_LOGITS_ROWS = 512  # that are worked out at a time
_SERVED_POSITIONS = 2048  # for which there is memory for each of a server's slots, before there are more slots
_MOST_SLOTS = {"cuda": 32, "cpu": 8}
_HEAD_POSITIONS = 1024  # that a head's cache has room for before more are asked for

PROMPTS_TOGETHER = 32  # at most, of `prefill_together`

OnLogits = Callable[[Tensor], None] | None


class Decoder(ABC):
    """One model on one device, with ``max_batch`` slots of up to ``max_seq_len`` positions. Constructed by
    ``backends.make_decoder`` after ``refusal`` was asked. Not thread-safe. After an exception inside ``prefill``,
    ``decode`` or ``step``, also a KeyboardInterrupt, a slot is undefined until it is prefilled from 0."""

    name: ClassVar[str]  # torch, numba or triton
    weight_types: ClassVar[tuple[str, ...]]  # which of WEIGHT_TYPES it can hold weights as
    prefill_chunk: int  # positions of a prompt that are read together; chunks begin at multiples of it
    most_together = 0  # positions of short dense prompts that `prefill_together` reads; 0: it cannot
    together_seconds: ClassVar[float] = 0.001  # tokens that are decoded within this time are delivered together
    pieces_under_load = 1  # that a chunk is read in while other sequences wait for their next token
    # The first positions of a slot can serve another prompt up to a multiple of this. Where it is the prefill chunk,
    # the rest has the same bits whether they were read anew or not, as each chunk is the same matrix products.
    prefix_block_size: int
    # Of a step that verifies drafts, in steps of one token: what it takes beyond one, and for each drafted token.
    verify_costs: tuple[float, float] = (0.0, 1.0)
    page_bytes: ClassVar[int | None] = None  # of memory that the cache maps; None: its pages are only counted
    draft_cost: float = 1.0  # of each token that :meth:`draft` gives, in plain steps
    times_heads: ClassVar[bool] = True  # that of a head is measured; else it follows from the bytes that are read
    most_verified: ClassVar[int] = 16  # tokens of such a step, of all slots together
    # A verified token is what `decode` gives where the two largest logits are at least so far apart.
    verify_margin: float = 0.0
    verifies_alike: ClassVar[bool] = True  # whether that holds for every token, bit for bit
    speculates = False  # whether drafts will be verified: what that takes is prepared too
    running_ahead = False  # whether the step for the newest tokens is under way already
    head: DraftHead | None = None  # that drafts
    _embedding: Tensor  # (V, H)
    _per_layer: PerLayer | None = None
    _blocks: Sequence[Block]
    _cache: KVCache
    _drafting: Decoder | None = None  # whose steps are drafts: the same slots at another level, or of rounded weights
    _sparse_positions = 0  # that ``_forward`` has read since ``measure_sparsity``
    _attention = staticmethod(attention)

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_seq_len: int,
        max_batch: int = 1,
        weights: str = "native",
        kv_cache_dtype: str = "auto",
        cache: KVCache | None = None,
        most_drafted: int = 0,
        pages: int | None = None,
        lack: tuple[int, int] | None = None,
    ) -> None:
        """``dtype``: of weights, and of activations between projections; ``weights``: one of ``WEIGHT_TYPES``;
        ``kv_cache_dtype``: one of ``KV_CACHE_DTYPES``; ``cache``: another decoder's, to read and append to;
        ``most_drafted``: tokens of a draft, at most, that will be verified; ``pages``: of the cache, None: all;
        ``lack``: see `lack_of_memory`."""
        self.config, self._pages, self._lack = bundle.config, pages, lack
        self.most_drafted, self._state_buffers = most_drafted, states_kept(most_drafted)
        self.device, self.dtype, self.kv_cache_dtype = device, dtype, kv_cache_dtype
        self.max_batch, self.max_seq_len = max_batch, max_seq_len
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._rotaries = [Rotary(rope, device, dtype) for rope in self.config.rotaries]
            self._load(bundle, weights, cache)
        if self.config.delta_net is not None:  # its state cannot be taken back to an earlier position: none serves
            self.prefix_block_size = max_seq_len + 1

    @abstractmethod
    def _load(self, bundle: Bundle, weights: str, cache: KVCache | None) -> None:
        """Read the weights, and allocate the cache unless one is given."""

    @classmethod
    def lack_of_memory(
        cls, bundle: Bundle, device: torch.device, dtype: torch.dtype, weights: str
    ) -> tuple[int, int] | None:
        """Bytes needed and bytes free, where routed experts will be mapped from a file because they do not fit."""
        return None

    @classmethod
    def refusal(cls, config: ModelConfig, weights: str) -> str | None:
        """Why it cannot run such a model where its back end runs, as a clause without a full stop, or None."""
        return None if weights in cls.weight_types else f"it has no {weights} weights"

    @classmethod
    def keeps(cls, stored: StoredWeight, graded: bool = False) -> bool:
        """Whether it multiplies with a quantised weight as stored; if not, the weight is dequantised at load."""
        return False

    @property
    def lengths(self) -> list[int]:
        """Positions filled in each slot, counted on the host."""
        return list(self._cache.lengths)

    @property
    def cache(self) -> KVCache:
        """Its pages are given to slots, and taken from idle ones, by whoever runs the decoder."""
        return self._cache

    @abstractmethod
    def bytes_read(self) -> tuple[int, int]:
        """Bytes of the projections' weights and of the output layer's."""

    def _read(
        self, cache: KVCache, slot: int, token_ids: Tensor, sparse_from: int, start: int, stop: int
    ) -> Iterator[Tensor]:
        """Run positions start..stop of a prompt through the blocks, filling the cache: hidden states of each chunk."""
        total, ids = len(token_ids), token_ids.to(self.device)
        while start < stop:
            end = min(next_chunk(start, self.prefill_chunk), stop)
            first_sparse = min(max(sparse_from - start, 0), end - start)
            yield self._forward(cache, slot, ids[start:end], start=start, total=total, first_sparse=first_sparse)
            start = end

    def _forward(self, cache: KVCache, slot: int, ids: Tensor, *, start: int, total: int, first_sparse: int) -> Tensor:
        """Positions from ``start`` on, of a sequence of ``total``: (T,) ids to (T, H) hidden states, filling the cache.
        Those from the chunk's ``first_sparse``-th on are masked."""
        config, stop = self.config, start + len(ids)
        self._sparse_positions += len(ids) - first_sparse
        tables = [rotary.tables(start, stop, total) for rotary in self._rotaries]
        x = embed(config, self._embedding, ids)
        per_layer = None if self._per_layer is None else self._per_layer(ids, x)
        at = Positions(cache, slot, start, tables, query_scales(config, start, stop, self.device), per_layer)
        head = self.head if cache is self._cache else None
        inputs = []
        for index, block in enumerate(self._blocks):
            inputs.append(x if head is not None and index in head.taps else None)
            x = run_block(config, index, block, x, at, partial(self._apply, block, first_sparse), self._attention)
        if head is not None:
            taps = [found for one in head.taps if (found := [*inputs, x][one]) is not None]
            head.take([slot] * len(ids), range(start, stop), ids.tolist(), torch.cat(taps, dim=-1))
        return x

    @abstractmethod
    def _apply(self, block: Any, first_sparse: int, role: str, x: Tensor) -> Sequence[Tensor]:
        """The projections of a block that share the input x (T, K), as `run_block` wants them."""

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """(T, H) to (T, V) float32."""

    @abstractmethod
    def _output(self, x: Tensor) -> Tensor:
        """The same from what the last norm gives, x (R, H) of a few rows; valid until the next step."""

    @torch.inference_mode()
    def prefill(
        self,
        slot: int,
        token_ids: Tensor,
        sparse_from: int,
        *,
        start: int = 0,
        stop: int | None = None,
        on_logits: OnLogits = None,
    ) -> Tensor:
        """Read positions start..stop of a prompt (T,) int64 into a slot: the last one's logits (V,) float32. Positions
        from ``sparse_from`` on (policy ``dense``: T, ``half``: T - T // 2, ``all``: 0) run with the bundle's masks.
        Those before ``start`` must stand in the slot already, read from the same tokens. ``on_logits`` is called with
        the logits (n, V) of each chunk. The result is valid until the next call. Rotary scaling ``longrope`` takes its
        long factors if T is above ``original_max_position_embeddings``, as transformers does."""
        total = len(token_ids)
        check_prompt(total, self.max_seq_len)
        stop = total if stop is None else stop
        if not 0 <= start < stop <= total:
            raise UsageError(f"start, stop: expected 0 <= start < stop <= {total}, found {start} and {stop}")
        self._grow(slot, stop)
        self._cache.begin(slot, start)
        if self.head is not None:
            self.head.begin(slot, start)
        logits = self._prefill(slot, token_ids, sparse_from, start, stop, on_logits)
        self._cache.lengths[slot] = stop
        return logits[0]

    def prefill_together(self, prompts: Sequence[tuple[int, Tensor, int]]) -> Tensor:
        """:meth:`prefill` of several dense prompts, in one pass: of each its slot, its tokens, and where to start; in
        all at most ``most_together`` positions of ``PROMPTS_TOGETHER``. The last ones' logits (len(prompts), V)."""
        return torch.stack([self.prefill(slot, ids, len(ids), start=start).clone() for slot, ids, start in prompts])

    def _prefill(self, slot: int, ids: Tensor, sparse_from: int, start: int, stop: int, on_logits: OnLogits) -> Tensor:
        """:meth:`prefill`, with its arguments checked: logits (1, V)."""
        for hidden in self._read(self._cache, slot, ids, sparse_from, start, stop):
            if on_logits is not None:
                on_logits(self._logits(hidden))
            last = hidden[-1:]
        return self._logits(last)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        """Logits (T, V) float32 of every position of one sequence; no slot is changed."""
        total = len(token_ids)
        check_prompt(total, self.max_seq_len)
        scratch = KVCache(self.config, 1, total, self.device, self.dtype, self.kv_cache_dtype)
        result = torch.empty(total, self.config.vocab_size, device=self.device)
        start = 0
        for hidden in self._read(scratch, 0, token_ids, sparse_from, 0, total):
            for part in hidden.split(_LOGITS_ROWS):
                result[start : start + len(part)] = self._logits(part)
                start += len(part)
        return result

    @abstractmethod
    def decode(self, token_ids: Tensor) -> Tensor:
        """Append one token to each of the slots 0..B-1, with the bundle's masks: (B,) int64 to logits (B, V) float32. A
        negative id marks an idle row: its slot stays as it is, its logits are undefined. The result is valid until the
        next call. ``longrope``: a sequence that grows beyond ``switch_length`` must be prefilled anew first."""

    def step(
        self, token_ids: Tensor, settings: Sequence[SamplingParams], adjust: OnLogits = None, last: bool = False
    ) -> Tensor:
        """``decode``, then choose the next token of every row: (B,) int64; idle rows are undefined. ``settings``: one
        for each row, seeds resolved. ``adjust`` changes the logits (B, V) in place. ``last``: no such step follows. An
        implementation that samples on its device must give the tokens of ``sampling.sample``, at the slot's length after
        the append."""
        logits = self.decode(token_ids)
        if adjust is not None:
            logits = logits.clone()
            adjust(logits)
        return sample(logits, settings, self.lengths[: len(settings)])

    def verify(self, token_ids: Sequence[Sequence[int]], settings: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
        """Append several tokens to each of the slots 0..B-1, none to an idle one, with the bundle's masks: of every token,
        slot by slot, the one that follows it, as :meth:`step` chooses (R,) int64, and its logits (R, V) float32, as
        :meth:`decode` gives them. Valid until the next call; :meth:`truncate` follows."""
        rows = []
        for slot, tokens in enumerate(token_ids):
            for token in tokens:
                ids = torch.full((len(token_ids),), -1)
                ids[slot] = token
                rows.append(self.decode(ids)[slot].clone())
        logits, positions = torch.stack(rows), self._verified_positions(token_ids)
        return sample(logits, verified_settings(token_ids, settings), positions), logits

    def draft(
        self, tokens: Sequence[int], counts: Mapping[int, int], settings: Sequence[SamplingParams]
    ) -> dict[int, list[int]]:
        """By slot, up to ``counts`` tokens that are likely to follow the newest one, ``tokens`` (of the slots 0..B-1),
        as ``settings`` choose, or a head without them. The slots stay as they are; :meth:`verify` of the same slots
        follows."""
        starts, newest, found = self.lengths, list(tokens), {slot: list[int]() for slot in counts}
        for slot, count in counts.items():
            self._grow(slot, starts[slot] + count)
        if self.head is not None:
            return self.head.draft(starts, tokens, counts)
        assert self._drafting is not None
        for step in range(max(counts.values())):
            wanted = [step < counts.get(slot, 0) and newest[slot] >= 0 for slot in range(len(tokens))]
            given = torch.tensor([token if drafts else -1 for token, drafts in zip(newest, wanted, strict=True)])
            newest = self._drafting.step(given, settings, last=step + 1 == max(counts.values())).tolist()
            for slot, drafts in enumerate(wanted):
                if drafts and newest[slot] >= 0:  # negative: no number came out
                    found[slot].append(newest[slot])
        for slot in counts:
            self.truncate(slot, starts[slot])
        return {slot: draft for slot, draft in found.items() if draft}

    def draft_by_steps(self, bundle: Bundle, weights: str) -> None:
        """Let :meth:`draft` take steps with the masks of ``bundle`` and weights rounded as ``weights`` says; ``native``:
        the decoder's own. Measures what they cost; the slots must be empty."""
        if weights == "native":
            self._drafting = self._with_masks(bundle.masks)
        else:
            self._drafting = type(self)(
                bundle, device=self.device, dtype=self.dtype, max_seq_len=self.max_seq_len, max_batch=self.max_batch,
                weights=weights, kv_cache_dtype=self.kv_cache_dtype, cache=self._cache,
                lack=self.lack_of_memory(bundle, self.device, self.dtype, weights),
            )  # fmt: skip
        self.draft_cost = self._drafting._step_seconds() / self._step_seconds()
        log.info("a drafted token takes %.2f of a step", self.draft_cost)

    def _step_seconds(self) -> float:
        """A step's median; the slots must be empty, and are again."""
        seconds, token = [], torch.zeros(1, dtype=torch.int64)
        steps = min(_TIMED_STEPS, self.max_seq_len)
        for step in range(steps):
            began = time.perf_counter()
            token = self.step(token, [SamplingParams()], last=step + 1 == steps).clamp(min=0)
            seconds.append(time.perf_counter() - began)
        self._cache.begin(0, 0)
        return statistics.median(seconds)

    @abstractmethod
    def _with_masks(self, masks: Mapping[str, ProjectionMask]) -> Decoder:
        """A decoder of the same weights and slots by other masks; it counts nothing."""

    def _verified_positions(self, token_ids: Sequence[Sequence[int]]) -> list[int]:
        """After the append: where each token is that follows."""
        ends = zip(self._cache.lengths, token_ids, strict=False)
        return [position for end, tokens in ends for position in range(end - len(tokens) + 1, end + 1)]

    def attach(self, files: HeadFiles | MtpFiles) -> None:
        """Load a head that drafts, and measure what that costs; before any slot is filled."""
        lengths = min(self.max_seq_len, _HEAD_POSITIONS), self.max_seq_len
        dtype, read = self._head_dtype(), self.bytes_read()
        weights = files.weights(self.device, dtype)
        self.head = DraftHead(weights, self._embedding, self._output, self.max_batch, lengths, dtype)
        if self.times_heads:
            step, seconds, length = self._step_seconds(), [], min(_TIMED_STEPS, self.max_seq_len)
            for _ in range(_TIMED_STEPS):
                began = time.perf_counter()
                self.head.draft([length], [0], {0: 1})
                seconds.append(time.perf_counter() - began)
            self.head.begin(0, 0)
            self.draft_cost = statistics.median(seconds) / step
        else:
            self.draft_cost = self.head.bytes_read(read[1]) / max(sum(read), 1)

    def _head_dtype(self) -> torch.dtype:
        return self.dtype

    def truncate(self, slot: int, length: int) -> None:
        """Take the last tokens of a slot back; where blocks are recurrent at most ``most_drafted`` and one."""
        self._cache.lengths[slot] = length

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Fill a slot with the first ``length`` positions of another one."""
        self._grow(target, length)
        self._cache.copy(source, target, length)
        if self.head is not None:
            self.head.copy(source, target, length)

    def _grow(self, slot: int, positions: int) -> None:
        """Make room for so many positions of a slot, before they are filled."""
        if self.head is not None and positions > self.head.length:
            self._grow_head(positions)
        if not self._cache.grow(slot, positions):
            raise self._cache.too_little(positions)

    def _grow_one(self, token_ids: Sequence[int]) -> None:
        """Make room for a token in each slot that is given one (none is negative); ContextLengthError if it is full."""
        lengths, held, head = self._cache.lengths, self._cache.held, self.head
        for slot, token in enumerate(token_ids):
            length = lengths[slot]
            if token >= 0 and (length >= held[slot] or (head is not None and length >= head.length)):
                if length >= self.max_seq_len:
                    raise ContextLengthError(f"slot {slot} is full: it holds {self.max_seq_len} positions")
                self._grow(slot, length + 1)

    def _grow_head(self, positions: int) -> None:
        assert self.head is not None
        self.head.grow(min(max(positions, 2 * self.head.length), self.max_seq_len))

    def prepare(self, slots: Sequence[int], first: int, last: int, *, sampled: bool = False) -> None:
        """Compile and capture what steps of these slots need while their longest context grows from first to last."""
        return None

    def prepare_prompts(self) -> None:
        """Compile and capture what prompts need, for a server."""
        return None

    def prepare_batches(self) -> None:
        """Compile and capture the steps of larger batches, for a server."""
        return None

    @abstractmethod
    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        """Use other masks, one for every projection by name: another sparsity level. Takes milliseconds. The slots stay
        as they are, and so do the counts of ``measure_sparsity``, which are of all levels together."""

    @abstractmethod
    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        """Start counting dropped channels from zero, or stop; ``every``: one decode step of so many is enough."""

    @abstractmethod
    def realised_sparsity(self) -> float | None:
        """Share of the projections' weights that the sparse positions since then did not need; None without any. Each
        projection weighs as many as its parameters; dense projections are included."""

    def close(self) -> None:
        """Free the memory. Closing twice is fine."""
        self.head = None
        if "_cache" in self.__dict__:
            self._cache.close()
        for name in [name for name in self.__dict__ if name.startswith("_") or name == "weights"]:
            del self.__dict__[name]


def states_kept(most_drafted: int) -> int:
    """Of a recurrent block, in each slot: before the newest token and a draft, and after each of them."""
    return most_drafted + 2 if most_drafted else 1


def verified_settings(
    token_ids: Sequence[Sequence[int]], settings: Sequence[SamplingParams]
) -> list[SamplingParams]:  # fmt: skip
    """One for each token of `Decoder.verify`."""
    return [setting for setting, tokens in zip(settings, token_ids, strict=True) for _ in tokens]


def check_prompt(length: int, max_seq_len: int) -> None:
    """Raise ContextLengthError unless ``1 <= length <= max_seq_len``."""
    if length < 1:
        raise ContextLengthError("the prompt has no tokens: give at least one")
    if length > max_seq_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens and the context holds {max_seq_len}: "
            "shorten it, or load with a larger max_seq_len if the model allows one"
        )


def next_chunk(start: int, size: int) -> int:
    """The end of the chunk that position ``start`` lies in."""
    return (start // size + 1) * size


def weight_bytes(
    bundle: Bundle,
    dtype: torch.dtype,
    weights: str,
    keeps: Callable[[StoredWeight, bool], bool],
    *,
    routed: bool = True,
) -> int:
    """What a bundle's weights take in memory as ``weights``, all else in ``dtype``; keeps: as of a `Decoder`. ``routed``:
    with those of routed experts."""
    chosen = WEIGHT_TYPES[weights]
    left_out = () if routed else {part for one in bundle.config.projections() if one.experts for part in one.parts}
    total = 0
    for name, shape in expected_tensors(bundle.config).items():
        if name.removesuffix(".weight") in left_out:
            continue
        head = "int8" if bundle.recipe.graded else chosen.head
        kind = "native" if "embed" in name else head if name == LM_HEAD else weights
        # Embeddings for each block stay in the type that they are stored in.
        held = getattr(torch, bundle.config.dtype, dtype) if name == PER_LAYER_EMBEDDING else dtype
        stored = bundle.checkpoint.quantised.get(name)
        if stored is not None and kind in ("native", stored.packing.kind) and keeps(stored, bundle.recipe.graded):
            packing = stored.packing
            bits = 4 if packing.kind == "int4" else 8
            total += code_bytes(bits, shape, packing.group, zero_points=packing.zero_points)
        else:
            total += WEIGHT_TYPES[kind].nbytes(shape, held) * (2 if bundle.recipe.graded and stored else 1)
    if bundle.config.tie_word_embeddings and chosen.head != "native":  # the output layer is a second copy
        total += WEIGHT_TYPES[chosen.head].nbytes((bundle.config.vocab_size, bundle.config.hidden_size), dtype)
    return total


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: of a GPU, else the resident memory of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) + mapped_bytes[device]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def default_limits(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_batch: int | None, max_seq_len: int | None,
    weight_bytes: int, kv_cache_dtype: str = "auto", states: int = 1, *, page_bytes: int | None = None,
    memory_bytes: int | None = None, beside: int = 0,
) -> tuple[int, int, int]:  # fmt: skip
    """``max_batch`` and ``max_seq_len``, where they are None, and the cache's pages. The batch: as many slots as have
    ``_SERVED_POSITIONS`` each, up to ``_MOST_SLOTS``. The length: the model's context, or the positions, a multiple of
    256, that all pages hold of one sequence. ``states``: of recurrent blocks, that each slot keeps. ``page_bytes``: as of
    a `Decoder`; ``memory_bytes``: of the cache, else a share of what the weights leave free; ``beside``: bytes that a slot
    takes beside its pages and states."""
    paging, of_slot = paging_of(config, dtype, kv_cache_dtype, page_bytes), beside + states * state_bytes(config, dtype)
    longest = config.max_position_embeddings
    memory = memory_bytes
    if memory is None:
        given = max_batch is not None and max_seq_len is not None
        share = _CACHE_SHARES["cuda" if given else device.type]
        memory = int(max(available_bytes(device) - weight_bytes, 0) * share)
    if max_batch is None:
        each = paging.pages(min(max_seq_len or longest, _SERVED_POSITIONS)) * paging.page_bytes + of_slot
        max_batch = min(max(memory // each, 1), _MOST_SLOTS[device.type])
    pages = max(memory - max_batch * of_slot, 0) // paging.page_bytes
    fitting = paging.positions(pages, longest)
    if memory_bytes is not None and fitting < min(max_seq_len or _FEWEST_POSITIONS, longest):
        raise ResourceError(
            f"kv_cache_memory_bytes: {memory_bytes} bytes hold {fitting} positions of one sequence, expected "
            f"{min(max_seq_len or _FEWEST_POSITIONS, longest)}: give more, or a smaller max_seq_len"
        )
    if max_seq_len is None:
        whole = max(fitting // _FEWEST_POSITIONS * _FEWEST_POSITIONS, _FEWEST_POSITIONS)
        max_seq_len = longest if fitting >= longest else min(whole, longest)
    one = paging.pages(max_seq_len)
    return max_batch, max_seq_len, min(max(pages, one + paging.least), max_batch * one)
