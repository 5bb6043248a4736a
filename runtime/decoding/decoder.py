"""The base class of all decoders."""

from __future__ import annotations

import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from wisparse.formats.block_ops import not_yet
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.errors import ContextLengthError, PromptError, UsageError
from wisparse.formats.model_config import ModelConfig

from ..memory import states_kept
from ..torch.block import Block, Executor, PerLayer, Positions, embed, run_block
from .cache import KVCache, RecurrentState
from .heads import DraftHead, HeadFiles, MtpFiles
from .rotary import Rotary, query_scales
from .sampling import SamplingParams, sample

log = logging.getLogger(__name__)

_TIMED_STEPS = 12
_LOGITS_ROWS = 512  # positions of `Decoder.logits` per output layer product
_STATE_BLOCK = 128  # least distance of two positions at which recurrent states are kept for the prefix cache
_HEAD_POSITIONS = 1024  # initial length of a draft head's cache

PROMPTS_TOGETHER = 32  # most prompts of `prefill_together`

OnLogits = Callable[[Tensor], None] | None


class Decoder(Executor, ABC):
    """One model on one device, with ``max_batch`` slots of up to ``max_seq_len`` positions. Constructed by
    ``backends.make_decoder``, which calls ``refusal`` first. Not thread-safe. After an exception inside ``prefill``,
    ``decode`` or ``step``, including KeyboardInterrupt, a slot is undefined until it is prefilled from position 0."""

    name: ClassVar[str]  # torch, numba or triton
    weight_types: ClassVar[tuple[str, ...]]  # of WEIGHT_TYPES, those that it supports
    prefill_chunk: int  # prompts are read in chunks of this many positions, aligned to it
    max_joint_prefill = 0  # limit of positions of `prefill_together`; 0 if unsupported
    delivery_interval: ClassVar[float] = 0.001  # tokens decoded within this time are delivered together
    chunks_split_under_load = 1  # number of smaller chunks per chunk while other sequences decode
    # Reuse of a cached prefix ends at a multiple of this. With ``prefill_chunk``, results are bitwise equal with and
    # without reuse.
    prefix_block_size: int
    # Additional time of a step that verifies drafts, and of each drafted token, in plain steps.
    verify_costs: tuple[float, float] = (0.0, 1.0)
    page_bytes: ClassVar[int | None] = None  # size of the pages that the cache maps; None: pages are only counted
    draft_cost: float = 1.0  # time of each token of :meth:`draft`, in plain steps
    times_heads: ClassVar[bool] = True  # whether a head's ``draft_cost`` is measured; else estimated by bytes read
    max_verified_tokens: ClassVar[int] = 16  # most tokens of a verifying step, over all slots
    # Verification may pick another token than `decode` only where the two largest logits are closer than this.
    verify_margin: float = 0.0
    verifies_alike: ClassVar[bool] = True  # whether ``verify`` gives the bits of `decode`
    max_checkpoints = 0  # most copies of recurrent states that the prefix cache keeps, of all prompts
    speculates = False  # whether drafts will be verified; `prepare` covers those steps then
    running_ahead = False  # whether the step of the newest tokens has been launched
    head: DraftHead | None = None
    _embedding: Tensor  # (V, H)
    _per_layer: PerLayer | None = None
    _blocks: Sequence[Block]
    _cache: KVCache
    _drafting: Decoder | None = None  # decodes drafts: same slots, another level or rounded weights
    _sparse_positions = 0  # masked positions of ``_forward`` since ``measure_sparsity``

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
        max_drafted: int = 0,
        pages: int | None = None,
        lack: tuple[int, int] | None = None,
    ) -> None:
        """``dtype``: of weights, and of activations between projections; ``weights``: one of ``WEIGHT_TYPES``;
        ``kv_cache_dtype``: one of ``KV_CACHE_DTYPES``; ``cache``: another decoder's, to share; ``max_drafted``: most
        tokens of a verified draft; ``pages``: of the cache, None for full length in each slot; ``lack``: see
        `memory_shortfall`."""
        self.config, self._pages, self._lack = bundle.config, pages, lack
        self.max_drafted, self._state_buffers = max_drafted, states_kept(max_drafted)
        self.device, self.dtype, self.kv_cache_dtype = device, dtype, kv_cache_dtype
        self.max_batch, self.max_seq_len, self.weight_type = max_batch, max_seq_len, weights
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._rotaries = [Rotary(rope, device, dtype) for rope in self.config.rotaries]
            self._load(bundle, weights, cache)
        if self.config.has_states:  # states are kept at multiples of it
            self.prefix_block_size = max(self.prefix_block_size, _STATE_BLOCK)

    @abstractmethod
    def _load(self, bundle: Bundle, weights: str, cache: KVCache | None) -> None:
        """Load the weights; allocate the cache unless ``cache`` is another decoder's."""

    @classmethod
    def memory_shortfall(
        cls, bundle: Bundle, device: torch.device, dtype: torch.dtype, weights: str
    ) -> tuple[int, int] | None:
        """Bytes needed and bytes free if routed experts do not fit and will be mapped from a file; else None."""
        return None

    @classmethod
    def refusal(cls, config: ModelConfig, weights: str) -> str | None:
        """Why this decoder cannot run the model, as a clause without a full stop, or None."""
        lacking = not_yet(config, cls.name)
        if lacking is not None:
            return f"it does not run {lacking} yet"
        return None if weights in cls.weight_types else f"it has no {weights} weights"

    @classmethod
    def keeps(cls, stored: StoredWeight, graded: bool = False) -> bool:
        """Whether its kernels read the quantised weight as stored; if not, it is dequantised at load."""
        return False

    @property
    def lengths(self) -> list[int]:
        """Positions filled in each slot."""
        return list(self._cache.lengths)

    @property
    def cache(self) -> KVCache:
        """The scheduler allocates and releases its pages."""
        return self._cache

    @abstractmethod
    def bytes_read(self) -> tuple[int, int]:
        """Bytes of weights that a dense step reads: of projections, and of the output layer."""

    def _read(
        self, cache: KVCache, slot: int, token_ids: Tensor, sparse_from: int, start: int, stop: int
    ) -> Iterator[Tensor]:
        """Run positions start..stop of a prompt through the blocks, filling the cache; yields (T, H) for each chunk."""
        total, ids = len(token_ids), token_ids.to(self.device)
        while start < stop:
            end = min(next_chunk(start, self.prefill_chunk), stop)
            first_sparse = min(max(sparse_from - start, 0), end - start)
            yield self._forward(cache, slot, ids[start:end], start=start, total=total, first_sparse=first_sparse)
            start = end

    def _forward(self, cache: KVCache, slot: int, ids: Tensor, *, start: int, total: int, first_sparse: int) -> Tensor:
        """Token ids (T,) of positions from ``start`` on, in a sequence of ``total``, to hidden states (T, H); fills the
        cache. Rows from ``first_sparse`` on are masked."""
        config, stop = self.config, start + len(ids)
        self._sparse_positions += len(ids) - first_sparse
        tables = [rotary.tables(start, stop, total) for rotary in self._rotaries]
        x = embed(config, self._embedding, ids)
        per_layer = None if self._per_layer is None else self._per_layer(ids, x)
        scales = query_scales(config, start, stop, self.device)
        at = Positions(cache, slot, start, first_sparse, tables, scales, per_layer)
        head = self.head if cache is self._cache else None
        inputs = []
        for index, block in enumerate(self._blocks):
            inputs.append(x if head is not None and index in head.taps else None)
            x = run_block(config, index, block, x, at, self)
        if head is not None:
            taps = [tap for index in head.taps if (tap := [*inputs, x][index]) is not None]
            head.take([slot] * len(ids), range(start, stop), ids.tolist(), torch.cat(taps, dim=-1))
        return x

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (T, H) to logits (T, V) float32."""

    @abstractmethod
    def _output(self, x: Tensor) -> Tensor:
        """The output layer: normed states x (R, H) of few rows to logits (R, V); valid until the next step."""

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
        """Compute positions start..stop of a prompt (T,) int64 in a slot; returns the last one's logits (V,) float32, valid
        until the next call. Positions from ``sparse_from`` on (policy ``dense``: T, ``half``: T - T // 2, ``all``: 1) are
        masked. Positions before ``start`` must be in the slot, computed from the same tokens. ``on_logits`` is called
        with the logits (n, V) of each chunk. As in transformers, rotary scaling ``longrope`` uses its long factors if T
        is above ``original_max_position_embeddings``."""
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
        """:meth:`prefill` of up to ``PROMPTS_TOGETHER`` dense prompts in one pass of up to ``max_joint_prefill`` positions;
        each is slot, tokens and start. Returns the logits of each last position (len(prompts), V)."""
        return torch.stack([self.prefill(slot, ids, len(ids), start=start).clone() for slot, ids, start in prompts])

    def _prefill(self, slot: int, ids: Tensor, sparse_from: int, start: int, stop: int, on_logits: OnLogits) -> Tensor:
        """:meth:`prefill` after validation; returns logits (1, V)."""
        for hidden in self._read(self._cache, slot, ids, sparse_from, start, stop):
            if on_logits is not None:
                on_logits(self._logits(hidden))
            last = hidden[-1:]
        return self._logits(last)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        """Logits (T, V) float32 of all positions of a sequence. The slots are unchanged."""
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
        """Append one token to each of the slots 0..B-1, masked: (B,) int64 to logits (B, V) float32, valid until the next
        call. A negative id marks an idle row: its slot is unchanged, its logits are undefined. ``longrope``: a sequence
        that grows beyond ``switch_length`` must be prefilled again first."""

    def step(
        self, token_ids: Tensor, settings: Sequence[SamplingParams], adjust: OnLogits = None, last: bool = False
    ) -> Tensor:
        """``decode``, then sample the next token of every row: (B,) int64; idle rows are undefined. ``settings``: per row,
        with seeds. ``adjust`` changes the logits (B, V) in place. ``last``: do not launch the next step ahead. An
        implementation that samples on its device must return the tokens of ``sampling.sample``, at the slot's length
        after the append."""
        logits = self.decode(token_ids)
        if adjust is not None:
            logits = logits.clone()
            adjust(logits)
        return sample(logits, settings, self.lengths[: len(settings)])

    def verify(self, token_ids: Sequence[Sequence[int]], settings: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
        """Append the tokens of each slot 0..B-1 (none to an idle one), masked. Returns for each appended token, slot by
        slot, the next token, sampled as in :meth:`step`, (R,) int64, and its logits (R, V) float32; valid until the next
        call. The caller calls :meth:`truncate` next."""
        self._grow_verified(token_ids)
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
        """Drafts by slot, of up to ``counts`` tokens after the newest ones, ``tokens`` (of the slots 0..B-1), sampled by
        ``settings``; greedy by a head. The slots are unchanged. The caller calls :meth:`verify` of the same slots next."""
        starts, newest, drafts = self.lengths, list(tokens), {slot: list[int]() for slot in counts}
        for slot, count in counts.items():
            self._grow(slot, starts[slot] + count)
        if self.head is not None:
            return self.head.draft(starts, tokens, counts)
        assert self._drafting is not None
        for step in range(max(counts.values())):
            active = [step < counts.get(slot, 0) and newest[slot] >= 0 for slot in range(len(tokens))]
            ids = torch.tensor([token if drafting else -1 for token, drafting in zip(newest, active, strict=True)])
            newest = self._drafting.step(ids, settings, last=step + 1 == max(counts.values())).tolist()
            for slot in counts:
                if active[slot] and newest[slot] >= 0:  # negative: the logits are not finite
                    drafts[slot].append(newest[slot])
        for slot in counts:
            self.truncate(slot, starts[slot])
        return {slot: draft for slot, draft in drafts.items() if draft}

    def draft_by_steps(self, bundle: Bundle, weights: str) -> None:
        """Let :meth:`draft` decode with the masks of ``bundle`` and weights rounded to ``weights``; ``native``: the
        decoder's own. Measures ``draft_cost``; the slots must be empty."""
        if weights == "native":
            self._drafting = self._with_masks(bundle.masks)
        else:
            names = ("device", "dtype", "max_seq_len", "max_batch", "kv_cache_dtype")
            same = {name: getattr(self, name) for name in names}
            lack = self.memory_shortfall(bundle, self.device, self.dtype, weights)
            self._drafting = type(self)(bundle, weights=weights, cache=self._cache, lack=lack, **same)
        self.draft_cost = self._drafting._step_seconds() / self._step_seconds()
        log.info("a drafted token takes %.2f of a step", self.draft_cost)

    def _step_seconds(self) -> float:
        """Median time of a step; the slots must be empty before and are empty after."""
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
        """A decoder with the same weights and slots and other masks; it does not count channels."""

    def _grow_verified(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Reserve the cache for :meth:`verify`; ContextLengthError, before anything is changed, if it does not fit."""
        ends = [length + len(tokens) for length, tokens in zip(self._cache.lengths, token_ids, strict=False)]
        for slot, end in enumerate(ends):
            if token_ids[slot] and end > self.max_seq_len:
                raise ContextLengthError(f"slot {slot}: expected at most {self.max_seq_len} positions, found {end}")
        for slot, end in enumerate(ends):
            if token_ids[slot]:
                self._grow(slot, end)

    def _verified_positions(self, token_ids: Sequence[Sequence[int]]) -> list[int]:
        """After the append: the position of the token after each appended one."""
        ends = zip(self._cache.lengths, token_ids, strict=False)
        return [position for end, tokens in ends for position in range(end - len(tokens) + 1, end + 1)]

    def attach(self, files: HeadFiles | MtpFiles) -> None:
        """Load a draft head and set ``draft_cost``; the slots must be empty."""
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
        """Remove the last tokens of a slot; in models with recurrent blocks at most ``max_drafted`` + 1."""
        self._cache.lengths[slot] = length

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int, states: Sequence[RecurrentState] = ()) -> None:
        """Copy the first ``length`` positions of a slot to another slot, or truncate the same slot; see `KVCache.copy`."""
        self._grow(target, length)
        self._cache.copy(source, target, length, states)
        if self.head is not None and source != target:
            self.head.copy(source, target, length)

    def _grow(self, slot: int, positions: int) -> None:
        """Allocate cache for ``positions`` of a slot."""
        if self.head is not None and positions > self.head.length:
            self._grow_head(positions)
        if not self._cache.grow(slot, positions):
            raise self._cache.out_of_memory(positions)

    def _grow_one(self, token_ids: Sequence[int]) -> None:
        """Allocate cache for a token in each slot whose id is not negative; ContextLengthError if a slot is full."""
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
        """Compile and capture the steps of these slots while their longest context grows from first to last."""
        return None

    def prepare_prompts(self) -> None:
        """Compile and capture the prefill, for a server."""
        return None

    def prepare_thread(self) -> None:
        """Prepare what libraries keep by thread; on the thread that runs the steps, after the other preparations."""
        return None

    def prepare_batches(self) -> None:
        """Compile and capture the steps of larger batches, for a server."""
        return None

    @abstractmethod
    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        """Switch to the masks of another sparsity level, by projection name; takes milliseconds. The slots and the counts
        of ``measure_sparsity`` are unchanged."""

    @abstractmethod
    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        """Start counting dropped channels from zero, or stop. ``every``: a GPU counts the first of that many decode
        steps."""

    @abstractmethod
    def realised_sparsity(self) -> float | None:
        """Share of the projections' weights dropped at the masked positions since ``measure_sparsity``, of decode steps
        those that count, weighted by parameters, dense projections included; None without masked positions."""

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self.head = None
        if "_cache" in self.__dict__:
            self._cache.close()
        for name in [name for name in self.__dict__ if name.startswith("_") or name == "weights"]:
            del self.__dict__[name]


def verified_settings(token_ids: Sequence[Sequence[int]], settings: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The sampling settings of each token of `Decoder.verify`."""
    return [setting for setting, tokens in zip(settings, token_ids, strict=True) for _ in tokens]


def check_prompt(length: int, max_seq_len: int) -> None:
    """Raise PromptError for an empty prompt, ContextLengthError for one longer than ``max_seq_len``."""
    if length < 1:
        raise PromptError("the prompt has no tokens: give at least one")
    if length > max_seq_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens and the context holds {max_seq_len}: "
            "shorten it, or load with a larger max_seq_len if the model allows one"
        )


def next_chunk(start: int, size: int) -> int:
    """The end of the chunk that position ``start`` lies in."""
    return (start // size + 1) * size
