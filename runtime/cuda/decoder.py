"""The decoder for NVIDIA GPUs: Triton kernels that read only the kept channels, one CUDA graph a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import triton
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.errors import UsageError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import WEIGHT_TYPES
from wisparse.kernels.gpu.delta_net import LARGEST_STATE, delta_state_size
from wisparse.kernels.gpu.sample import SAMPLED_DTYPES
from wisparse.kernels.gpu.weights import FusedLinear
from wisparse.kernels.reference import keep_mask

from ..decoding.cache import KVCache
from ..decoding.decoder import Decoder, OnLogits, check_capacity
from ..decoding.sampling import SamplingParams, sample
from ..torch.block import Block, finish_logits
from .prefill import ShortPrompts, attention, chunk_size, head_products, lower_right, project, too_little_memory
from .step import MAX_ROWS, DecodeStep, contexts_between, kv_splits_for, position_tables
from .weights import CudaWeights, dense_linears, load_weights, put_masks, with_dense

log = logging.getLogger(__name__)

# First slot, rows, KV splits.
_StepKey = tuple[int, int, int]


class TokenReadback:
    """Host memory that token ids are copied to beside what the device does next."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._ids = torch.empty(size, dtype=torch.int64, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def send(self, ids: Tensor) -> None:
        """Start to copy ``ids`` (n,), which must stay as they are until they are read."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._ids[: len(ids)].copy_(ids, non_blocking=True)

    def read(self, count: int) -> Tensor:
        """Wait for what was sent: the first ``count`` ids."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._ids[:count].clone()


class CudaDecoder(Decoder):
    """For CUDA devices of compute capability 8.0 or later."""

    name: ClassVar[str] = "triton"
    weight_types: ClassVar[tuple[str, ...]] = tuple(WEIGHT_TYPES)
    prefix_block_size, pieces_under_load = 1, 2
    _attention = staticmethod(attention)

    def _load(self, bundle: Bundle, weights: str) -> None:
        config, device, dtype, max_batch = self.config, self.device, self.dtype, self.max_batch
        self.weights = load_weights(bundle, device, dtype, weights)
        self._embedding, self._blocks = self.weights.embedding, self.weights.blocks
        self._tables = position_tables(config, self._rotaries, self.max_seq_len, device, dtype)
        self._cache = KVCache(config, max_batch, self.max_seq_len, device, dtype, buffers=2)
        # Graphs are padded to 1, 2, 4, 8 or 16 rows.
        self._positions = torch.zeros(-(-max_batch // MAX_ROWS) * MAX_ROWS, dtype=torch.int32, device=device)
        self.prefill_chunk = chunk_size(config, dtype)
        self._steps: dict[_StepKey, DecodeStep] = {}
        # The weights and steps by which linears masks leave dense; now these are in force.
        self._by_dense: dict[tuple[bool, ...], tuple[CudaWeights, dict[_StepKey, DecodeStep]]] = {
            dense_linears(config, bundle.masks): (self.weights, self._steps)
        }
        # A step's successor, started before anybody asked for it: its input ids, how it chooses, the step, and whether
        # it is counted.
        self._ahead: tuple[list[int], list[SamplingParams], DecodeStep, bool] | None = None
        self._readback = TokenReadback(MAX_ROWS, device)
        self._short: ShortPrompts | None = None  # once somebody has asked for it
        # Counting: the prompts' kept weights, on the device; decoded rows that were counted, and the weights of dense
        # linears that they read; one of so many steps is counted, and so many have been started.
        self._observe: Callable[[FusedLinear, Tensor, int], None] | None = None  # see _apply; None: nothing is counted
        self._kept_in_prompts = torch.zeros((), dtype=torch.float64, device=device)
        self._decoded, self._kept_dense, self._every, self._started = 0, 0, 1, 0
        self._planes = planes_of(bundle.masks)
        self._dense_weights = self._count_dense()

    @classmethod
    def refusal(cls, config: ModelConfig, weights: str) -> str | None:
        widest = max(block.head_dim for block in config.blocks)
        if widest > 512:
            return f"its attention keeps one head in registers, up to 512 wide; head_dim is {widest}"
        delta = config.delta_net
        if delta is not None and delta_state_size(delta.key_dim, delta.value_dim) > LARGEST_STATE:
            return (
                f"its recurrent blocks keep a head's state in registers, up to {LARGEST_STATE} numbers with both sides padded "
                f"to powers of two; linear_key_head_dim is {delta.key_dim}, linear_value_head_dim {delta.value_dim}"
            )
        return None

    @classmethod
    def keeps(cls, stored: StoredWeight, graded: bool = False) -> bool:
        return True

    def bytes_read(self) -> tuple[int, int]:
        head, scales = self.weights.head, self.weights.head_scales
        return self.weights.num_bytes_inside, head.nbytes + (0 if scales is None else scales.nbytes)

    def _prefill(self, slot: int, ids: Tensor, sparse_from: int, start: int, stop: int, on_logits: OnLogits) -> Tensor:
        self._forget_ahead()
        dense = stop <= sparse_from and on_logits is None
        short = self._short.logits(slot, ids, start, stop) if dense and self._short is not None else None
        if short is not None:
            logits = finish_logits(self.config, short)
        else:
            logits = super()._prefill(slot, ids, sparse_from, start, stop, on_logits)
        self._positions[slot : slot + 1].fill_(stop)
        return logits

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        self._forget_ahead()
        self._cache.copy(source, target, length)
        self._positions[target : target + 1].fill_(length)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        return self._logits_of(self._replay(token_ids), len(token_ids))

    @torch.inference_mode()
    def step(self, token_ids: Tensor, settings: Sequence[SamplingParams], adjust: OnLogits = None) -> Tensor:
        """A step starts the one after it before it returns, as its input is known by then: the GPU does not wait for the
        host to read the token. If something else is asked for next, that step is forgotten."""
        batch, settings = len(token_ids), list(settings)
        greedy = all(setting.greedy for setting in settings)
        tokens = token_ids.tolist()
        known = greedy or adjust is not None or self.dtype in SAMPLED_DTYPES
        if batch > MAX_ROWS or max(tokens) < 0 or not known:
            return super().step(token_ids, settings, adjust)
        drawn = settings if adjust is None else []  # how the graph chooses; adjusted logits are chosen from behind it
        if self._ahead is not None and self._ahead[0] == tokens and (adjust is not None or self._ahead[1] == settings):
            _, _, step, counted = self._ahead
            self._ahead = None
            self._append(tokens, counted=counted)
        else:
            (step,) = self._replay(token_ids, drawn).values()
        first, following = self._step_of(tokens)
        landed = min(step.rows, batch - first)
        lengths = self._cache.lengths
        if adjust is not None:
            # Nothing here may wait for the device: the step that follows is on its way before this one has ended.
            logits = self._logits_of({first: step}, batch).clone()
            adjust(logits)
            served = slice(first, first + landed)
            adjusted = sample(logits[served], settings[served], lengths[served])
            for row, token in enumerate(tokens[served]):
                if token < 0:
                    adjusted[row] = -1
            step.tokens[:landed] = adjusted
        self._readback.send(step.tokens)
        room = all(token < 0 or lengths[slot] < self.max_seq_len for slot, token in enumerate(tokens))
        follows = room and following is step
        counts = follows and self._counts_next()
        if follows:
            step.replay(drawn[first : first + step.rows], count=counts)
        chosen = torch.full((batch,), -1)
        chosen[first : first + landed] = self._readback.read(landed)
        if follows:
            self._ahead = chosen.tolist(), drawn, step, counts
        return chosen

    @torch.inference_mode()
    def prepare(self, slots: Sequence[int], first: int, last: int, *, sampled: bool = False) -> None:
        sampled = sampled and self.dtype in SAMPLED_DTYPES and max(slots) < MAX_ROWS
        for start, rows in _blocks(slots):
            for context in contexts_between(first, last):
                step = self.step_for(rows, start, context)
                for count in {self._observe is not None, self._observe is not None and self._every == 1}:
                    step.prepare(sampled=sampled, count=count)

    @torch.inference_mode()
    def prepare_prompts(self) -> None:
        lower_right()
        if self._short is not None:
            return
        refusal = ShortPrompts.refusal(self.config, self.dtype, self.device)
        if refusal is None:
            self._forget_ahead()
            self._short = ShortPrompts(self.weights, self.config, self._cache, self._tables)
        else:
            log.info("short prompts are read without graphs: %s", refusal)

    @torch.inference_mode()
    def prepare_batches(self) -> None:
        """Those that begin at the first slot: other batches have the same kernels, and are captured as they come."""
        refusal = too_little_memory(self.device)
        if refusal is not None:
            log.info("batches are prepared as they come: %s", refusal)
            return
        self._forget_ahead()
        # Warm up prefill on a scratch KV cache.
        size = min(self.prefill_chunk // self.pieces_under_load, self.max_seq_len)
        scratch = KVCache(self.config, 1, size, self.device, self.dtype)
        for _ in self._read(scratch, 0, torch.zeros(size, dtype=torch.int64), size, 0, size):
            pass
        most = min(triton.next_power_of_2(self.max_batch), MAX_ROWS)
        for sampled in (False, True):
            for power in range(most.bit_length()):
                self.prepare(range(1 << power), 1, self.max_seq_len, sampled=sampled)

    @torch.inference_mode()
    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        self._forget_ahead()
        dense = dense_linears(self.config, masks)
        if dense not in self._by_dense:
            self._by_dense[dense] = with_dense(self.weights, dense), {}
        # Steps captured for such masks go on with these, which lie where those lay.
        self.weights, self._steps = self._by_dense[dense]
        self._blocks, self._dense_weights = self.weights.blocks, self._count_dense()
        put_masks(self.weights, self.config, masks)

    @torch.inference_mode()
    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        self._forget_ahead()
        self._decoded, self._kept_dense, self._every, self._started, self._sparse_positions = 0, 0, every, 0, 0
        self._observe = self._count_prompt if enabled else None
        self._kept_in_prompts.zero_()
        for step in self._all_steps():
            step.counts.cells.zero_()

    def realised_sparsity(self) -> float | None:
        per_position = sum(projection.num_parameters for projection in self.config.projections()) * self._planes
        positions = self._sparse_positions + self._decoded
        if self._observe is None or not positions:
            return None
        kept = self._kept_dense
        for step in self._all_steps():
            kept += step.counts.weights(but_last=self._ahead is not None and self._ahead[2] is step)
        return 1.0 - (kept + float(self._kept_in_prompts)) / (positions * per_position)

    def step_for(self, rows: int, first: int = 0, context: int = 0) -> DecodeStep:
        """The captured step of ``rows`` slots from ``first`` on, for contexts up to ``context`` positions."""
        kv_splits = kv_splits_for(context, rows)
        key = (first, rows, kv_splits)
        if key not in self._steps:
            self._steps[key] = DecodeStep(
                self.weights, self.config, self._cache, self._positions, self._tables,
                first=first, rows=rows, kv_splits=kv_splits,
            )  # fmt: skip
        return self._steps[key]

    def _replay(self, token_ids: Tensor, settings: Sequence[SamplingParams] = ()) -> dict[int, DecodeStep]:
        """Append the tokens, with settings at most ``MAX_ROWS``; gives the steps by the first of their slots."""
        tokens = token_ids.tolist()
        if not 1 <= len(tokens) <= self.max_batch:
            raise UsageError(f"expected 1 to max_batch ({self.max_batch}) tokens, found {len(tokens)}")
        check_capacity(tokens, self._cache.lengths, self.max_seq_len)
        self._forget_ahead()
        steps, counts = {}, self._counts_next()
        for first in range(0, len(tokens), MAX_ROWS):
            group = [-1] * first + tokens[first : first + MAX_ROWS]
            if max(group) < 0:
                continue
            start, step = self._step_of(group)
            padded = (group + [-1] * step.rows)[start : start + step.rows]
            step.tokens.copy_(torch.tensor(padded), non_blocking=True)
            step.replay(settings[start : start + step.rows], count=counts)
            steps[start] = step
        self._append(tokens, counted=counts)
        return steps

    def _logits_of(self, steps: Mapping[int, DecodeStep], batch: int) -> Tensor:
        if list(steps) == [0] and steps[0].rows >= batch:
            return finish_logits(self.config, steps[0].logits[:batch])
        logits = torch.zeros(self.max_batch + MAX_ROWS, self.config.vocab_size, device=self.device)
        for first, step in steps.items():
            logits[first : first + step.rows] = step.logits
        return finish_logits(self.config, logits[:batch])

    def _step_of(self, tokens: Sequence[int]) -> tuple[int, DecodeStep]:
        """The step that appends one more token to the slots whose ``tokens`` are not negative, and its first slot."""
        active = [slot for slot, token in enumerate(tokens) if token >= 0]
        ((first, rows),) = _blocks(active)
        return first, self.step_for(rows, first, max(self._cache.lengths[slot] for slot in active) + 1)

    def _counts_next(self) -> bool:
        """Whether the step that is started now is counted: the first is, and one of so many."""
        self._started += 1
        return self._observe is not None and self._started % self._every == 1 % self._every

    def _append(self, tokens: Sequence[int], *, counted: bool) -> None:
        for slot, token in enumerate(tokens):
            if token >= 0:
                self._cache.lengths[slot] += 1
                self._decoded += counted
                self._kept_dense += counted * self._dense_weights

    def _forget_ahead(self) -> None:
        """Undo a step that ran ahead: what it wrote lies beyond every slot's length, or in the states' other side; the
        positions moved, and what it kept was counted."""
        if self._ahead is not None:
            self._ahead[2].counts.forget_last()
            self._ahead = None
            self._positions[: self.max_batch].copy_(torch.tensor(self._cache.lengths, dtype=torch.int32))

    def _all_steps(self) -> list[DecodeStep]:
        return [step for _, steps in self._by_dense.values() for step in steps.values()]

    def _count_dense(self) -> int:
        """Weights, of graded ones planes, of the linears that the masks in force leave dense."""
        linears = (linear for block in self.weights.blocks for linear in block.linears if linear.dense)
        return sum(linear.in_features * linear.out_features * self._planes for linear in linears)

    def _apply(self, block: Block[FusedLinear], first_sparse: int, role: str, x: Tensor) -> tuple[Tensor, ...]:
        """``_observe`` is called with each linear, its input (T, K) and the first masked row, before the product."""
        linear: FusedLinear = getattr(block, role)
        if self._observe is not None:
            self._observe(linear, x, first_sparse)
        return project(linear, x, first_sparse, self.weights.dequantized)

    def _logits(self, hidden: Tensor) -> Tensor:
        return finish_logits(self.config, head_products(self.weights, self.weights.norm(hidden)).float())

    def _count_prompt(self, linear: FusedLinear, x: Tensor, first_sparse: int) -> None:
        tail = x[first_sparse:]
        for i, width in enumerate(linear.widths if len(tail) else ()):
            for limit in linear.thresholds[i * self._planes : (i + 1) * self._planes]:
                self._kept_in_prompts.add_(keep_mask(tail, linear.scales[i], limit).sum(), alpha=width)


def _blocks(slots: Sequence[int]) -> list[tuple[int, int]]:
    """The first slot and the rows of each step that serves ``slots``: a power of two up to ``MAX_ROWS``, beginning at a
    multiple of itself, so that there are few different steps, each of which has graphs of its own."""
    found = []
    for group in sorted({slot // MAX_ROWS for slot in slots}):
        inside = [slot for slot in slots if slot // MAX_ROWS == group]
        rows = 1
        while min(inside) // rows != max(inside) // rows:
            rows *= 2
        found.append((min(inside) // rows * rows, rows))
    return found
