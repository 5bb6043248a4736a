"""The decoder for NVIDIA GPUs: Triton kernels that load only the kept channels, one CUDA graph a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from typing import ClassVar, Self

import torch
import triton
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.errors import UsageError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.weight_types import WEIGHT_TYPES
from wisparse.kernels.backend import compiling_side_by_side
from wisparse.kernels.gpu.common import Input
from wisparse.kernels.gpu.count import launch_count
from wisparse.kernels.gpu.delta_net import LARGEST_STATE, state_size
from wisparse.kernels.gpu.experts import choose_experts
from wisparse.kernels.gpu.head import Logits, launch_logits
from wisparse.kernels.gpu.launch import Scratch
from wisparse.kernels.gpu.sample import SAMPLED_DTYPES
from wisparse.kernels.gpu.tiles import Tile
from wisparse.kernels.gpu.weights import FusedLinear

from ..decoding.cache import KVCache, Pages, RecurrentState
from ..decoding.decoder import Decoder, OnLogits, verified_settings
from ..decoding.heads import HeadFiles, MtpFiles
from ..decoding.sampling import SamplingParams, sample
from ..memory import memory_errors
from ..torch.block import Block, finish_logits
from .blocks import attention_parts, router_of
from .eager import attention, head_products, lower_right, project, run_experts
from .many_rows import MANY_ROWS, ManyRowsStep, takes_many_rows
from .pages import CudaPages
from .prefill import PIECE, PromptReader, chunk_size, too_little_memory
from .step import MAX_ROWS, DecodeStep, capture, contexts_between, kv_splits_for
from .weights import AnyLinear, CudaWeights, dense_linears, load_weights, put_masks, with_dense

log = logging.getLogger(__name__)

# Positions of each slot of a server whose memory is mapped in advance; mapping a page takes about 0.1 ms.
_READY_POSITIONS = 2048
# Index among the steps of a batch (-1: verifies), rows, KV splits.
_StepKey = tuple[int, int, int]


class TokenReadback:
    """Copies token ids to pinned host memory on a stream of its own, beside the next step's kernels."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._ids = torch.empty(size, dtype=torch.int64, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def send(self, parts: Sequence[Tensor]) -> None:
        """Start to copy the ids of all parts; the tensors must not change before ``read`` returns."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        first = 0
        with torch.cuda.stream(self._stream):
            for ids in parts:
                self._ids[first : first + len(ids)].copy_(ids, non_blocking=True)
                first += len(ids)

    def read(self, count: int) -> Tensor:
        """Wait for the copies; returns the first ``count`` ids."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._ids[:count].clone()


class CudaDecoder(Decoder):
    """For CUDA devices of compute capability 8.0 or later."""

    name: ClassVar[str] = "triton"
    weight_types: ClassVar[tuple[str, ...]] = tuple(WEIGHT_TYPES)
    prefix_block_size = 1
    verify_costs = (0.1, 0.08)  # an H200, 8B shape, bf16, int8 and int4
    verify_margin = 0.25
    verifies_alike = False  # a row's roundings depend on the number of rows
    max_verified_tokens = MAX_ROWS
    times_heads = False  # a draft head's first calls include its capture
    page_bytes = CudaPages.page_bytes
    _drafting: CudaDecoder | None
    attention = staticmethod(attention)

    def _load(self, bundle: Bundle, weights: str, cache: KVCache | None) -> None:
        config, device, dtype, max_batch = self.config, self.device, self.dtype, self.max_batch
        self.weights = load_weights(bundle, device, dtype, weights)
        self._embedding, self._blocks = self.weights.embedding, self.weights.blocks
        blocks, rotaries = self.weights.blocks, self._rotaries
        self._parts = attention_parts(config, blocks, rotaries, self.max_seq_len, device, dtype)
        options = max_batch, self.max_seq_len, device, dtype, self.kv_cache_dtype, max(2, self._state_buffers)
        memory = CudaPages if device.type == "cuda" else Pages
        self._cache = cache or KVCache(config, *options, memory=memory, pages=self._pages)
        self.prefill_chunk = chunk_size(config, dtype, quantized=self.weights.dequantized is not None)
        self.chunks_split_under_load = max(2, self.prefill_chunk // PIECE)
        refusal = PromptReader.refusal(config, dtype)
        self._scratch = Scratch(device, dtype, self.weights.dequantized)  # of prompts
        prompts = self.weights, config, self._cache, self._parts, self._scratch
        self._prompts = PromptReader(*prompts) if refusal is None else None
        self.max_joint_prefill = 0 if self._prompts is None else self._prompts.max_joint_prefill
        self._steps: dict[_StepKey, DecodeStep] = {}
        # Numbers of rows of verifying steps, one of them for the longest draft of one request.
        self._verified_rows = sorted({2, 4, 8, MAX_ROWS, min(self.max_drafted + 1, MAX_ROWS)} - {1})
        # Weights and steps by ``dense_linears`` of the masks: kernels are compiled for which linears are dense.
        self._by_dense: dict[tuple[bool, ...], tuple[CudaWeights, dict[_StepKey, DecodeStep]]] = {
            dense_linears(config, bundle.masks): (self.weights, self._steps)
        }
        self._most_rows = MANY_ROWS if takes_many_rows(self.weights) else MAX_ROWS  # of one step
        # The most rows of a DecodeStep; with more, cuBLAS is faster for unquantized weights.
        native = self._most_rows > MAX_ROWS and dtype != torch.float32 and self.weights.dequantized is None
        self._fused_rows = MAX_ROWS // 2 if native else MAX_ROWS
        # The step that was launched ahead: its input ids (negative for idle slots), each slot's sampling parameters,
        # and its captured steps.
        self._ahead: tuple[list[int], list[SamplingParams], list[DecodeStep]] | None = None
        self._readback = TokenReadback(max_batch, device)
        # For the realised sparsity: the weights that masked positions of prompts and the rows of counting steps read, then
        # the number of these rows. Of the steps launched every ``_every``-th counts, also if it is discarded.
        self._counted = torch.zeros(2, dtype=torch.int64, device=device)
        self._every, self._started = 0, 0  # 0: nothing is counted
        self._planes = planes_of(bundle.masks)

    @classmethod
    def refusal(cls, config: ModelConfig, weights: str) -> str | None:
        if (refused := super().refusal(config, weights)) is not None:
            return refused
        key, widest = "head_dim", max(block.head_dim for block in config.blocks)
        if config.latent is not None:
            key, widest = "kv_lora_rank", config.latent.rank
        if widest > 512:
            return f"its attention kernel keeps a head in registers: expected {key} of at most 512, found {widest}"
        if config.shares_kv:
            return "its kernels do not support keys and values shared between blocks"
        delta, mamba = config.delta_net, config.mamba2
        states = {
            "Gated DeltaNet": None if delta is None else (delta.key_dim, delta.value_dim),
            "Mamba-2": None if mamba is None else (mamba.state_dim, mamba.head_dim),
        }
        for name, sizes in states.items():
            if sizes is not None and state_size(*sizes) > LARGEST_STATE:
                return (
                    f"its {name} kernel keeps a head's state in registers: expected at most {LARGEST_STATE} elements, both "
                    f"sizes padded to powers of two, found {sizes[0]} x {sizes[1]}"
                )
        return None

    @classmethod
    def keeps(cls, stored: StoredWeight, graded: bool = False) -> bool:
        return True

    def bytes_read(self) -> tuple[int, int]:
        head, scales = self.weights.head, self.weights.head_scales
        return self.weights.num_bytes_read, head.nbytes + (0 if scales is None else scales.nbytes)

    def _prefill(self, slot: int, ids: Tensor, sparse_from: int, start: int, stop: int, on_logits: OnLogits) -> Tensor:
        self._forget_ahead()
        if self._prompts is not None and stop <= sparse_from and on_logits is None:
            read = self._prompts.read(slot, ids, start, stop, self.prefill_chunk)
            if read is not None:
                if self.head is not None:
                    self.head.note([slot] * (stop - start), range(start, stop), ids[start:stop].tolist())
                return finish_logits(self.config, read)
        return super()._prefill(slot, ids, sparse_from, start, stop, on_logits)

    @torch.inference_mode()
    def prefill_together(self, prompts: Sequence[tuple[int, Tensor, int]]) -> Tensor:
        assert self._prompts is not None
        self._forget_ahead()
        for slot, ids, start in prompts:
            self._grow(slot, len(ids))
            self._cache.begin(slot, start)
        logits = self._prompts.read_jointly(prompts)
        for slot, ids, _ in prompts:
            self._cache.lengths[slot] = len(ids)
        return finish_logits(self.config, logits)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int, states: Sequence[RecurrentState] = ()) -> None:
        self._forget_ahead()
        super().copy(source, target, length, states)

    def attach(self, files: HeadFiles | MtpFiles) -> None:
        super().attach(files)
        assert self.head is not None
        if self.head.experts is None:  # experts are chosen on the host, which cannot be captured
            self.head.capture = capture
        if self._prompts is not None:
            self._prompts.attach(self.head)
            self.max_joint_prefill = 0

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        return self._logits_of(self._replay(token_ids.tolist()), token_ids.tolist())

    @property
    def running_ahead(self) -> bool:  # type: ignore[override]
        return self._ahead is not None

    @torch.inference_mode()
    def verify(self, token_ids: Sequence[Sequence[int]], settings: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
        self._forget_ahead()
        lengths = self._cache.lengths
        rows = [(token, lengths[slot] + i, slot) for slot, one in enumerate(token_ids) for i, token in enumerate(one)]
        tokens, positions, slots = zip(*rows, strict=True)
        self._grow_verified(token_ids)
        step = self._verifying_step(len(rows), max(positions) + 1)
        chosen_by = verified_settings(token_ids, settings)
        on_device = self.dtype in SAMPLED_DTYPES or all(setting.greedy for setting in settings)
        step.set_inputs(tokens, positions, slots)
        step.replay(chosen_by if on_device else (), count=self._counts_next())
        if self.head is not None:
            self.head.note(slots, positions, tokens)
        for slot, one in enumerate(token_ids):
            lengths[slot] += len(one)
        logits = finish_logits(self.config, step.logits[: len(rows)])
        if on_device:
            return step.tokens[: len(rows)], logits
        return sample(logits, chosen_by, self._verified_positions(token_ids)), logits

    def _verifying_step(self, rows: int, context: int) -> DecodeStep:
        rows = next(size for size in self._verified_rows if size >= rows)
        kv_splits = kv_splits_for(context, rows)
        key = -1, rows, kv_splits
        if key not in self._steps:
            model = self.weights, self.config, self._cache, self._parts, self._counted
            self._steps[key] = DecodeStep(*model, rows=rows, kv_splits=kv_splits, verifies=True, head=self.head)
        return self._steps[key]

    @torch.inference_mode()
    def step(
        self, token_ids: Tensor, settings: Sequence[SamplingParams], adjust: OnLogits = None, last: bool = False
    ) -> Tensor:
        """A step launches the next one before it returns, whose input ids are already on the device, so that the GPU
        does not wait for the host. If the next call is a different one, the step launched ahead is discarded."""
        tokens, settings = token_ids.tolist(), list(settings)
        active = [slot for slot, token in enumerate(tokens) if token >= 0]
        on_device = all(setting.greedy for setting in settings) or adjust is not None or self.dtype in SAMPLED_DTYPES
        if not active or not on_device:
            return super().step(token_ids, settings, adjust, last)
        drawn = settings if adjust is None else []  # sampled within the graph; adjusted logits are sampled after it
        if self._ahead is not None and self._ahead[0] == tokens and (adjust is not None or self._ahead[1] == settings):
            _, _, steps = self._ahead
            self._ahead = None
            self._append(tokens)
        else:
            steps = self._replay(tokens, drawn)
        lengths, groups = self._cache.lengths, self._groups(active)
        if adjust is not None:
            # Nothing here may synchronize: the next step is launched before this one has completed.
            logits = self._logits_of(steps, tokens).clone()
            adjust(logits)
            adjusted = sample(logits, settings, lengths[: len(tokens)])
            for step, slots in zip(steps, groups, strict=True):
                step.tokens[: len(slots)] = adjusted[step.slots[: len(slots)]]
        self._readback.send([step.tokens[: len(slots)] for step, slots in zip(steps, groups, strict=True)])
        most = self.max_seq_len if self.head is None else self.head.length
        fits = all(lengths[slot] < most and self._cache.grow(slot, lengths[slot] + 1) for slot in active)
        launch_ahead = fits and not last and self._steps_for(groups) == steps
        if launch_ahead:
            counts = self._counts_next()
            for step, slots in zip(steps, groups, strict=True):
                step.replay([drawn[slot] for slot in slots] if drawn else (), count=counts)
        chosen = torch.full((len(tokens),), -1)
        chosen[active] = self._readback.read(len(active))
        if launch_ahead:
            self._ahead = chosen.tolist(), drawn, steps
        return chosen

    @torch.inference_mode()
    def _grow_head(self, positions: int) -> None:
        self._forget_ahead()
        # Captured steps hold the address of the head's smaller cache.
        captured = [steps for _, steps in self._by_dense.values()]
        if self._drafting is not None:
            captured += [steps for _, steps in self._drafting._by_dense.values()]
        for steps in captured:
            steps.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with memory_errors(self.device, f"for a head's cache of {positions} positions"):
            super()._grow_head(positions)

    @torch.inference_mode()
    def prepare(self, slots: Sequence[int], first: int, last: int, *, sampled: bool = False) -> None:
        sampled = sampled and self.dtype in SAMPLED_DTYPES
        if self.head is not None and last > self.head.length:  # growing later would drop the captured steps
            self._grow_head(last)
        groups, contexts = enumerate(self._groups(slots)), contexts_between(first, last)
        steps = [self.step_for(len(group), context, index) for index, group in groups for context in contexts]
        for step in steps + self._all_verifying(first, last):
            for count in self._count_options():
                step.prepare(sampled=sampled, count=count)
        if self._drafting is not None:
            self._drafting.prepare(slots, first, last, sampled=sampled)

    def _count_options(self) -> set[bool]:
        """Values of ``count`` of the steps to come."""
        return {self._every > 0, self._every == 1}

    def _all_verifying(self, first: int, last: int) -> list[DecodeStep]:
        """The verifying steps of contexts from ``first`` to ``last`` positions."""
        most = MAX_ROWS if self.max_batch > 1 else max(8, self.max_drafted + 1)
        rows = [size for size in self._verified_rows if size <= most] if self.speculates else ()
        return [self._verifying_step(count, context) for count in rows for context in contexts_between(first, last)]

    @torch.inference_mode()
    def prepare_prompts(self) -> None:
        if self.head is not None and self.head.length < self.max_seq_len:  # graphs hold its addresses
            self._grow_head(self.max_seq_len)
        cache = self._cache
        ready = cache.paging.positions(cache.pages // (4 * self.max_batch), min(_READY_POSITIONS, self.max_seq_len))
        for slot in range(self.max_batch):
            cache.grow(slot, ready)
        lower_right()
        refusal = too_little_memory(self.device) or PromptReader.refusal(self.config, self.dtype)
        if self._prompts is None or refusal is not None:
            log.info("no CUDA graphs for short prompts: %s", refusal)
        elif not self._prompts.captured:
            self._forget_ahead()
            self._prompts.capture(min(self.prefill_chunk, self.max_seq_len))

    @torch.inference_mode()
    def prepare_thread(self) -> None:
        if self._prompts is not None and too_little_memory(self.device) is None:
            self._prompts.prepare_cudnn(self.prefill_chunk)

    @torch.inference_mode()
    def prepare_batches(self) -> None:
        refusal = too_little_memory(self.device)
        if refusal is not None:
            log.info("no CUDA graphs captured in advance for batches: %s", refusal)
            return
        self._forget_ahead()
        # Warm up prefill on a scratch KV cache.
        size = min(self.prefill_chunk // self.chunks_split_under_load, self.max_seq_len)
        scratch = KVCache(self.config, 1, size, self.device, self.dtype, self.kv_cache_dtype)
        for _ in self._read(scratch, 0, torch.zeros(size, dtype=torch.int64), size, 0, size):
            pass
        for setting in (SamplingParams(), SamplingParams(1.0, 20, 0.9, 0.01, seed=0)):  # for a prompt's first token
            sample(torch.zeros(1, self.config.vocab_size, device=self.device), [setting], [0])
        steps = []
        for index, full in enumerate(range(0, self.max_batch, self._most_rows)):
            rows = 1
            while rows < 2 * min(self.max_batch - full, self._most_rows):
                steps += [self.step_for(rows, context, index) for context in contexts_between(1, self.max_seq_len)]
                rows *= 2
        steps += self._all_verifying(1, self.max_seq_len)
        choices = (False, True) if self.dtype in SAMPLED_DTYPES else (False,)
        if self._drafting is not None:
            self._drafting.prepare_batches()
        graphs = [
            (s, sampled, count) for s in dict.fromkeys(steps) for sampled in choices for count in self._count_options()
        ]
        if self.device.type == "cuda":
            with compiling_side_by_side():
                for step, sampled, count in graphs:
                    step.prepare(sampled=sampled, count=count, compile_only=True)
        for step, sampled, count in graphs:
            step.prepare(sampled=sampled, count=count)

    @torch.inference_mode()
    def _with_masks(self, masks: Mapping[str, ProjectionMask]) -> Self:
        other, dense = copy(self), dense_linears(self.config, masks)
        other.weights, other._steps = with_dense(self.weights, dense, copy_masks=True), {}
        put_masks(other.weights, self.config, masks)
        other._blocks, other._by_dense = other.weights.blocks, {dense: (other.weights, other._steps)}
        other.speculates, other._ahead, other._every = False, None, 0
        return other

    @torch.inference_mode()
    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        self._forget_ahead()
        dense = dense_linears(self.config, masks)
        if dense not in self._by_dense:
            self._by_dense[dense] = with_dense(self.weights, dense), {}
        # Masks with the same dense linears share captured steps: ``put_masks`` writes to the same memory.
        self.weights, self._steps = self._by_dense[dense]
        self._blocks = self.weights.blocks
        put_masks(self.weights, self.config, masks)

    @torch.inference_mode()
    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        self._forget_ahead()
        self._every, self._started, self._sparse_positions = every if enabled else 0, 0, 0
        self._counted.zero_()

    def realised_sparsity(self) -> float | None:
        if not self._every:
            return None
        read, rows = self._counted.tolist()
        per_position = sum(projection.num_parameters for projection in self.config.projections()) * self._planes
        weights = (self._sparse_positions + rows) * per_position
        return 1.0 - read / weights if weights else None

    def step_for(self, rows: int, context: int = 0, index: int = 0) -> DecodeStep:
        """The captured step of at least ``rows`` rows for contexts up to ``context`` positions; ``index``: of
        ``_groups``."""
        rows = triton.next_power_of_2(rows)
        key = index, rows, kv_splits_for(context, rows)
        if key not in self._steps:
            self._steps[key] = self.new_step(rows, context)
        return self._steps[key]

    def new_step(self, rows: int, context: int, tiles: dict[str, Tile] | None = None) -> DecodeStep:
        """A step as of :meth:`step_for` that is not kept; ``tiles``: by role, instead of the chosen ones."""
        rows = triton.next_power_of_2(rows)
        made = DecodeStep if rows <= self._fused_rows else ManyRowsStep
        model = self.weights, self.config, self._cache, self._parts, self._counted
        splits = kv_splits_for(context, rows)
        return made(*model, rows=rows, tiles=tiles, kv_splits=splits, head=self.head)

    def _groups(self, slots: Sequence[int]) -> list[Sequence[int]]:
        """Divide the slots of a batch among steps of at most ``_most_rows`` rows."""
        return [slots[first : first + self._most_rows] for first in range(0, len(slots), self._most_rows)]

    def _steps_for(self, groups: Sequence[Sequence[int]]) -> list[DecodeStep]:
        """The steps that append a token to each slot."""
        lengths = self._cache.lengths
        return [
            self.step_for(len(group), max(lengths[slot] for slot in group) + 1, index)
            for index, group in enumerate(groups)
        ]

    def _replay(self, tokens: Sequence[int], settings: Sequence[SamplingParams] = ()) -> list[DecodeStep]:
        """Append a token to each slot whose token is not negative; returns the steps."""
        if not 1 <= len(tokens) <= self.max_batch:
            raise UsageError(f"expected 1 to max_batch ({self.max_batch}) tokens, found {len(tokens)}")
        lengths = self._cache.lengths
        self._forget_ahead()
        self._grow_one(tokens)
        groups, counts = self._groups([slot for slot, token in enumerate(tokens) if token >= 0]), self._counts_next()
        steps = self._steps_for(groups)
        for step, slots in zip(steps, groups, strict=True):
            step.set_inputs([tokens[slot] for slot in slots], [lengths[slot] for slot in slots], slots)
            step.replay([settings[slot] for slot in slots] if settings else (), count=counts)
        self._append(tokens)
        return steps

    def _logits_of(self, steps: Sequence[DecodeStep], tokens: Sequence[int]) -> Tensor:
        """(B, V) logits of the steps that appended ``tokens``; zeros for idle slots."""
        active = [slot for slot, token in enumerate(tokens) if token >= 0]
        if len(steps) == 1 and len(active) == len(tokens):
            return finish_logits(self.config, steps[0].logits[: len(tokens)])
        logits = torch.zeros(len(tokens), self.config.vocab_size, device=self.device)
        for step, slots in zip(steps, self._groups(active), strict=True):
            logits[step.slots[: len(slots)]] = step.logits[: len(slots)]
        return finish_logits(self.config, logits)

    def _counts_next(self) -> bool:
        """Whether the step that is launched now counts: the first does, and every ``_every``-th."""
        self._started += 1
        return self._every > 0 and self._started % self._every == 1 % self._every

    def _append(self, tokens: Sequence[int]) -> None:
        for slot, token in enumerate(tokens):
            if token >= 0:
                if self.head is not None:
                    self.head.note([slot], [self._cache.lengths[slot]], [token])
                self._cache.lengths[slot] += 1

    def _forget_ahead(self) -> None:
        """Discard a step launched ahead: it wrote beyond every slot's length, or into the states' other buffer."""
        self._ahead = None

    def route(self, block: Block[AnyLinear], x: Tensor) -> tuple[Tensor, Tensor]:
        return choose_experts(x, router_of(block))

    def run_experts(
        self, block: Block[AnyLinear], x: Tensor, routing: tuple[Tensor, Tensor], first_sparse: int
    ) -> Tensor:
        return run_experts(self.config, block, x, routing, first_sparse, self._counted if self._every else None)

    def project(self, block: Block[AnyLinear], role: str, x: Tensor, first_sparse: int) -> tuple[Tensor, ...]:
        linear: FusedLinear = getattr(block, role)
        if self._every and first_sparse < len(x):
            launch_count(linear, Input(x[first_sparse:]), self._counted)
        return project(linear, x, first_sparse, self._scratch)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._output(self.weights.norm(hidden))

    def _output(self, x: Tensor) -> Tensor:
        head, scales = self.weights.head, self.weights.head_scales
        if scales is None or len(x) > MANY_ROWS:
            return finish_logits(self.config, head_products(self.weights, x).float())
        out = Logits.empty(len(x), head)
        launch_logits(x, None, None, head, scales, out)
        return finish_logits(self.config, out.logit)
