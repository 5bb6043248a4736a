"""The decoder for CPUs: a decode step is one call of a compiled region (``kernels.cpu``), which reads only kept
channels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.checkpoint import StoredWeight
from wisparse.formats.machine import available_bytes, usable_cores
from wisparse.formats.model_config import ModelConfig, Projection
from wisparse.formats.weight_types import WEIGHT_TYPES
from wisparse.kernels.cpu.launch import Team, has_tiles, prepare, product_dtype, regions_of, team_size
from wisparse.kernels.cpu.layout import (
    BlockField,
    DeltaField,
    FloatField,
    MlpActivation,
    ProjectionField,
    StepField,
    StoredAs,
    scratch_layout,
)

from ..decoding.cache import KVCache
from ..decoding.decoder import OnLogits, verified_settings
from ..decoding.heads import HeadFiles, MtpFiles
from ..decoding.rotary import query_scales, switch_length
from ..decoding.sampling import SamplingParams, choose, sample
from ..memory import weight_bytes
from ..torch.block import Block, MaskedLinear, Norm, attention, finish_logits
from ..torch.decoder import TorchDecoder
from .weights import CpuProjection, MappedMemory, Matrix, read_matrix

_EMBEDDING = "model.embed_tokens.weight"
# With fewer bytes of weights for each thread, waiting at barriers costs more than an additional thread gains.
_BYTES_PER_THREAD = 1 << 20
_CACHED_AS = {"auto": StoredAs.BASE, "int8": StoredAs.INT8, "fp8": StoredAs.E4M3}
MOST_ROWS = 32  # the most tokens of a prompt that a step reads
_PREFIX_BLOCK = TorchDecoder.prefix_block_size


class CpuDecoder(TorchDecoder):
    name: ClassVar[str] = "numba"
    weight_types: ClassVar[tuple[str, ...]] = ("native", "int8", "int4")
    # Tokens are delivered at a display's rate: a delivery uses two cores and evicts the step's data from the caches,
    # which for every token would take a third of a small model's step.
    delivery_interval: ClassVar[float] = 1 / 60
    # A chunk converts the weights once. Its products are bitwise equal to those of a prefix block.
    prefill_chunk, chunks_split_under_load = 4 * _PREFIX_BLOCK, 4

    def _load(self, bundle: Bundle, weights: str, cache: KVCache | None) -> None:
        super()._load(bundle, weights, cache)
        if any(block.experts for block in self.config.blocks):  # their products' rows depend on the tokens' choices
            self.prefill_chunk, self.chunks_split_under_load = _PREFIX_BLOCK, 1
        # The most tokens of a prompt that a step reads faster than torch, which converts the weights. Measured.
        codes = any(projection.weight.scale is not None for projection in self._projections)
        converted = self.dtype != torch.float32 or codes
        fast = product_dtype(self.dtype) == torch.bfloat16
        if not codes:  # with codes every row costs as much as the first
            self.verify_costs = 0.3, 0.5
        tiled = self.dtype == torch.bfloat16 and has_tiles()
        few = 4 if codes else 2
        self._step_rows = few if tiled else 8 if fast else MOST_ROWS if converted else MOST_ROWS // 2
        self._step = Step(self)

    def _read_matrices(self, bundle: Bundle, weights: str) -> Callable[[Projection], list[MaskedLinear]]:
        config, dtype = self.config, self.dtype
        stored = {stored.packing.kind for stored in bundle.checkpoint.quantised.values()}
        int4 = weights == "int4" or (weights == "native" and ("int4" in stored or planes_of(bundle.masks) > 1))
        prepare(*regions_of(dtype, experts=config.has_experts, int4=int4))
        names = [f"{part}.weight" for projection in config.projections() for part in projection.parts]
        of_experts = [projection for projection in config.projections() if projection.experts]
        routed = {f"{part}.weight" for projection in of_experts for part in projection.parts}
        mapped = self._mapped = None if self._lack is None else MappedMemory()
        # Reading, checksums and transposition release the GIL.
        with ThreadPoolExecutor(max_workers=max(1, min(torch.get_num_threads(), 8, os.cpu_count() or 1))) as pool:

            def read(name: str) -> Matrix:
                empty = mapped.empty if mapped is not None and name in routed else torch.empty
                return read_matrix(bundle, name, dtype, weights, transposed=True, empty=empty)

            matrices = dict(zip(names, pool.map(read, names), strict=True))
        if mapped is not None:
            assert self._lack is not None
            mapped.close_files(*self._lack, of_experts[0].chosen / of_experts[0].experts)
        self._head = embedding = read_matrix(bundle, _EMBEDDING, dtype, "native", transposed=False)
        graded = planes_of(bundle.masks) > 1
        self._embedding, head_type = embedding.data, "int8" if graded else WEIGHT_TYPES[weights].head
        if not config.tie_word_embeddings or head_type != "native":
            head = _EMBEDDING if config.tie_word_embeddings else "lm_head.weight"
            self._head = read_matrix(bundle, head, dtype, head_type, transposed=False)

        def read_all(p: Projection) -> list[MaskedLinear]:
            parts = enumerate(p.parts)
            return [CpuProjection(bundle, p, matrices[f"{part}.weight"], self.device, dtype, at) for at, part in parts]

        return read_all

    @classmethod
    def memory_shortfall(
        cls, bundle: Bundle, device: torch.device, dtype: torch.dtype, weights: str
    ) -> tuple[int, int] | None:
        if not bundle.config.has_experts or not hasattr(os, "posix_fallocate"):
            return None
        needed, free = weight_bytes(bundle, dtype, weights, cls.keeps), available_bytes(device)
        return (needed, free) if needed > free else None

    @classmethod
    def refusal(cls, config: ModelConfig, weights: str) -> str | None:
        refused = super().refusal(config, weights)
        return refused and refused + "; int8 ones are as small" * (weights not in cls.weight_types)

    @classmethod
    def keeps(cls, stored: StoredWeight, graded: bool = False) -> bool:
        packing = stored.packing
        return (
            graded
            or packing.kind == "int4"
            or (packing.kind == "int8" and packing.group is None and not packing.zero_points)
        )

    def decode(self, token_ids: Tensor) -> Tensor:
        lengths, tokens = self._cache.lengths, token_ids.tolist()
        self._grow_one(tokens)
        rows = [(slot, token, lengths[slot]) for slot, token in enumerate(tokens) if token >= 0]
        if rows:
            self._step.run(rows, [slot for slot, _, _ in rows])
            for slot, _, length in rows:
                lengths[slot] = length + 1
            self._sparse_positions += len(rows)
            self._feed_head(rows)
        return self._step.first_logits[len(tokens)]

    def step(
        self, token_ids: Tensor, settings: Sequence[SamplingParams], adjust: OnLogits = None, last: bool = False
    ) -> Tensor:
        """The tokens are valid until the next call. They are chosen without torch, whose operations take 10 to 30 us
        each after a step has filled the caches with weights."""
        if adjust is not None:
            return super().step(token_ids, settings, adjust, last)
        self.decode(token_ids)
        return self._step.choose(settings, self._cache.lengths)

    def attach(self, files: HeadFiles | MtpFiles) -> None:
        self._step.tap(files.taps)
        super().attach(files)

    def _head_dtype(self) -> torch.dtype:
        return product_dtype(self.dtype)

    def _feed_head(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Pass the hidden states of the last step's rows (slot, token, position) to the draft head."""
        if self.head is not None:
            slots, tokens, positions = zip(*rows, strict=True)
            self.head.take(slots, positions, tokens, self._step.taps(len(rows)))

    def verify(self, token_ids: Sequence[Sequence[int]], settings: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
        self._grow_verified(token_ids)
        lengths = self._cache.lengths
        rows = [(slot, token, lengths[slot] + i) for slot, one in enumerate(token_ids) for i, token in enumerate(one)]
        self._step.run(rows, range(len(rows)))
        for slot, tokens in enumerate(token_ids):
            lengths[slot] += len(tokens)
        self._sparse_positions += len(rows)
        self._feed_head(rows)
        logits = self._step.logits[: len(rows)]
        return sample(logits, verified_settings(token_ids, settings), self._verified_positions(token_ids)), logits

    def _forward(self, cache: KVCache, slot: int, ids: Tensor, *, start: int, total: int, first_sparse: int) -> Tensor:
        """A few tokens, also those after the last whole prefix block, are read as rows of a decode step, which converts
        no weights."""
        switch = switch_length(self.config)  # a step has a single table of rotary factors
        one_table = switch is None or total <= switch
        rest = (start + len(ids)) % self.prefix_block_size
        if one_table and cache is self._cache and 0 < rest <= self._step_rows and rest < len(ids):
            head, first = len(ids) - rest, min(first_sparse, len(ids) - rest)
            before = self._forward(cache, slot, ids[:head], start=start, total=total, first_sparse=first)
            after = self._forward(
                cache, slot, ids[head:], start=start + head, total=total, first_sparse=first_sparse - first
            )
            return torch.cat((before, after))
        if cache is not self._cache or len(ids) > self._step_rows or not one_table:
            return super()._forward(cache, slot, ids, start=start, total=total, first_sparse=first_sparse)
        tokens = ids.tolist()
        self._sparse_positions += len(tokens) - first_sparse
        parts = ((tokens[:first_sparse], start, False), (tokens[first_sparse:], start + first_sparse, True))
        read = []
        for part, at, masked in parts:
            if part:
                read.append(self._step.read(slot, part, at, masked=masked).to(self.dtype))
                self._feed_head([(slot, token, at + i) for i, token in enumerate(part)])
        return torch.cat(read)

    @staticmethod
    def attention(
        config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """One prefix block of queries at a time, which bounds the scores' memory and makes results independent of
        chunks."""
        parts = []
        for first in range(0, q.shape[1], _PREFIX_BLOCK):
            some, at = q[:, first : first + _PREFIX_BLOCK], start + first
            stop = at + some.shape[1]
            parts.append(attention(config, some, keys[:, :stop], values[:, :stop], at, window, sinks))
        return torch.cat(parts, 1)

    def _with_masks(self, masks: Mapping[str, ProjectionMask]) -> Self:
        other = super()._with_masks(masks)
        other._step = Step(other)
        return other

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        super().set_masks(masks)
        self._step.take_masks()

    def measure_sparsity(self, enabled: bool, every: int = 1) -> None:
        super().measure_sparsity(enabled)
        self._step.counts[:] = 0

    def _kept_channels(self) -> list[int]:
        """Of prompts, if measured, and of decode steps, which always count."""
        return [prompt + decoded for prompt, decoded in zip(super()._kept_channels(), self._step.kept(), strict=True)]

    def _logits(self, hidden: Tensor) -> Tensor:
        if len(hidden) == 1 and self._head.scale is not None:  # without converting the codes
            return self._step.finish(hidden)
        return finish_logits(self.config, self._head.linear(self._norm(hidden), None).float())

    def _output(self, x: Tensor) -> Tensor:
        if self._head.scale is not None:
            return self._step.finish(x.to(self.dtype), normed=True)
        return finish_logits(self.config, self._head.linear(x.to(self.dtype), None).float())


class Step:
    def __init__(self, decoder: CpuDecoder) -> None:
        config, embedding, output, blocks = decoder.config, decoder._embedding, decoder._head, decoder._blocks
        (self._region, *_), self._config = regions_of(decoder.dtype, experts=config.has_experts, int4=False), config
        self._per_layer, self._dtype = decoder._per_layer, decoder.dtype
        self._kept_alive: list[Tensor] = []
        self._team = Team()
        self._threads = self._capacity = 0  # threads and rows of the allocated buffers
        self._projections = decoder._projections
        self.counts = np.zeros((1, len(self._projections)), dtype=np.int64)
        self._most_threads = max(1, min(usable_cores(), sum(decoder.bytes_read()) // _BYTES_PER_THREAD))
        self._input_width = max(sum(p.out_features for p in block.qkv) for block in blocks)

        max_batch, max_len = decoder.max_batch, decoder.max_seq_len
        self.logits = torch.empty(max(max_batch, decoder.max_verified_tokens), config.vocab_size)  # float32
        self._numpy_logits, self._chosen = self.logits.numpy(), np.zeros(max_batch, dtype=np.int64)
        # Views of the first rows, indexed by their number.
        self.first_logits = [self.logits[:count] for count in range(max_batch + 1)]
        self._first_chosen = [torch.from_numpy(self._chosen)[:count] for count in range(max_batch + 1)]
        # Slot, token, position and OUTPUTS of every row.
        rows = torch.zeros(4, max(max_batch, MOST_ROWS), dtype=torch.int64)
        self._rows = rows.numpy()
        tables = [tuple(table.float() for table in rotary.step_tables(max_len)) for rotary in decoder._rotaries]
        self._table = np.array([p.weight.row() for p in self._projections])  # the table of projections
        for row, projection in zip(self._table, self._projections, strict=True):
            if projection.bias is not None:
                self._kept_alive.append(projection.bias.float())
                row[ProjectionField.BIAS] = self._kept_alive[-1].data_ptr()
        self._thresholds = torch.zeros(len(self._projections), 2)
        qk_norm = config.architecture.qk_norm
        multiplier = torch.tensor(config.embedding_multiplier, dtype=embedding.dtype).item()
        caps = config.attention_softcap or 0.0, config.logits_softcap or 0.0
        floats = [config.rms_norm_eps, config.attention_scale, caps[0], multiplier]  # in the order of FloatField
        floats += [config.residual_multiplier, config.logits_multiplier, caps[1], *config.clamp]
        self._floats = torch.tensor(floats)
        self._parameters = self._fill(
            StepField,
            {
                StepField.SLOTS: rows[0],
                StepField.TOKENS: rows[1],
                StepField.POSITIONS: rows[2],
                StepField.OUTPUTS: rows[3],
                StepField.HIDDEN: config.hidden_size,
                StepField.PER_LAYER: config.per_layer_size,
                StepField.PER_LAYER_PROJECTION: None if self._per_layer is None else self._per_layer.projection,
                StepField.PER_LAYER_NORM: None if self._per_layer is None else self._per_layer.norm.factors.float(),
                StepField.ROW_NUMBERS: torch.arange(rows.shape[1]),
                StepField.HEADS: config.num_heads,
                StepField.MAX_LEN: max_len,
                StepField.VOCAB: config.vocab_size,
                StepField.NUM_BLOCKS: config.num_blocks,
                StepField.NUM_PROJECTIONS: len(self._projections),
                StepField.NUM_GATE_UP: len(config.architecture.gate_up),
                StepField.QK_WHOLE: qk_norm is not None and not qk_norm.per_head,
                StepField.QK_AFTER: qk_norm is not None and qk_norm.per_head and qk_norm.after_rotary,
                StepField.ACTIVATION: MlpActivation[config.activation.upper()],
                StepField.GATED: config.architecture.attention_gate,
                StepField.EMBEDDING: embedding,
                StepField.HEAD: output.data,
                StepField.HEAD_SCALE: output.scale,
                StepField.FINAL_NORM: decoder._norm.factors.float(),
                StepField.QUERY_SCALES: query_scales(config, 0, max_len, torch.device("cpu")),
                StepField.FLOATS: self._floats,
                StepField.BLOCKS: torch.from_numpy(self._block_table(blocks, tables, decoder._cache)),
                StepField.PROJECTIONS: torch.from_numpy(self._table),
                StepField.THRESHOLDS: self._thresholds,
                StepField.LOGITS: self.logits,
                StepField.SCORES: torch.empty(config.num_heads, max_len),
                StepField.TEAM: self._team.words.ctypes.data,
                StepField.MAPPED: decoder._mapped is not None,
                StepField.CACHED_AS: _CACHED_AS[decoder.kv_cache_dtype],
            },
        )
        self._taps: tuple[int, ...] = ()
        self.take_masks()

    def tap(self, taps: tuple[int, ...]) -> None:
        """Store the inputs of these blocks in each step; the number of blocks stands for the last one's output."""
        self._taps, self._threads, hidden = taps, 0, self._config.hidden_size
        offsets = torch.full((self._config.num_blocks + 2,), -1)
        offsets[sorted(set(taps))] = torch.arange(len(set(taps))) * hidden
        offsets[-1] = len(set(taps)) * hidden
        self._kept_alive.append(offsets)
        self._parameters[StepField.TAPPED] = offsets.data_ptr()

    def taps(self, rows: int) -> Tensor:
        """The hidden states that the last step stored: (rows, taps * H) float32, valid until the next step."""
        order, stored = sorted(set(self._taps)), self._buffers[StepField.TAPS][:rows]
        return stored[:, [order.index(tap) for tap in self._taps]].flatten(1)

    def run(self, rows: Sequence[tuple[int, int, int]], outputs: Sequence[int] = ()) -> None:
        """Append tokens to slots. rows: (slot, token, position), those of a slot in order of position. outputs: for
        each row the row of ``logits``."""
        threads = min(team_size(), self._most_threads)
        if threads > self._threads or len(rows) > self._capacity:
            self._allocate(max(threads, self._threads), max(len(rows), self._capacity))
        table = self._rows
        for row, (slot, token, position) in enumerate(rows):
            table[0, row], table[1, row], table[2, row] = slot, token, position
        table[3, : len(outputs)] = outputs
        self._parameters[StepField.ROWS] = len(rows)
        if self._per_layer is not None:
            with torch.inference_mode():
                of_tokens = self._per_layer.of_tokens(torch.from_numpy(self._rows[1, : len(rows)]), self._dtype)
                self._buffers[StepField.PER_LAYER_INPUTS][: len(rows)] = of_tokens
        self._team.launch(self._region, self._parameters, threads)

    def choose(self, settings: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
        """Sample from the logits of the first rows; valid until the next call."""
        for row, setting in enumerate(settings):
            self._chosen[row] = choose(self._numpy_logits[row], setting, positions[row])
        return self._first_chosen[len(settings)]

    def read(self, slot: int, tokens: Sequence[int], start: int, *, masked: bool) -> Tensor:
        """Read part of a prompt as rows of a step: hidden states (T, H) float32, valid until the next step."""
        thresholds, counts = self._thresholds.clone(), None if masked else self.kept()
        if not masked:
            self._thresholds.zero_()
        self._parameters[StepField.VOCAB] = 0  # no logits
        try:
            self.run([(slot, token, start + i) for i, token in enumerate(tokens)])
        finally:
            self._parameters[StepField.VOCAB] = self._config.vocab_size
            self._thresholds.copy_(thresholds)
        if counts is not None:  # only masked positions are counted
            self.counts[:] = 0
            self.counts[0] = counts
        hidden = self._config.hidden_size
        return self._buffers[StepField.SCRATCH][: 4 * len(tokens) * hidden].view(torch.float32).view(-1, hidden)

    def finish(self, hidden: Tensor, *, normed: bool = False) -> Tensor:
        """Logits (R, V) of hidden states (R, H), before the final norm or, if ``normed``, after it; valid until the
        next step. Runs a step without blocks, with the hidden states as its embedding."""
        hidden, count = hidden.contiguous(), len(hidden)
        replaced = {StepField.EMBEDDING: hidden.data_ptr(), StepField.NUM_BLOCKS: 0}
        if normed:
            replaced[StepField.FINAL_NORM] = 0
        saved = {field: self._parameters[field] for field in replaced}
        multiplier = self._floats[FloatField.EMBEDDING_MULTIPLIER].item()
        self._floats[FloatField.EMBEDDING_MULTIPLIER] = 1.0
        try:
            for field, value in replaced.items():
                self._parameters[field] = value
            self.run([(0, row, 0) for row in range(count)], range(count))
        finally:
            self._floats[FloatField.EMBEDDING_MULTIPLIER] = multiplier
            for field, value in saved.items():
                self._parameters[field] = value
        return self.logits[:count]

    def take_masks(self) -> None:
        """Write the projections' masks to the tables; not while a step runs."""
        for row, projection in enumerate(self._projections):
            scale = projection.channel_scale
            self._table[row, ProjectionField.SCALE] = 0 if scale is None else scale.data_ptr()
            self._thresholds[row] = torch.tensor(projection.thresholds)

    def kept(self) -> list[int]:
        """Kept channels of each projection, over all rows and threads."""
        return self.counts.sum(0).tolist()

    def _fill(self, fields: type[IntEnum], values: dict) -> np.ndarray:
        """A row of a table: integers, and addresses of tensors, which are kept alive; None is 0."""
        row = np.zeros(len(fields), dtype=np.int64)
        for field, value in values.items():
            if isinstance(value, Tensor):
                value = value.contiguous()
                self._kept_alive.append(value)
                row[field] = value.data_ptr()
            elif value is not None:
                row[field] = value
        return row

    def _block_table(self, blocks: Sequence[Block], tables: Sequence[tuple[Tensor, ...]], cache: KVCache) -> np.ndarray:
        rows, first = [], 0
        for index, block in enumerate(blocks):
            spec = block.spec
            row: dict[BlockField, Tensor | int | None] = {
                BlockField.VALUE_NORM: torch.ones(spec.head_dim) if self._config.architecture.value_norm else None,
                BlockField.WINDOW: spec.window,
                BlockField.KV_HEADS: spec.num_kv_heads,
                BlockField.HEAD_DIM: spec.head_dim,
                BlockField.FIRST: first,
                BlockField.NUM_INPUTS: len(block.qkv),
                BlockField.INPUT_WIDTH: sum(projection.out_features for projection in block.qkv),
                BlockField.SINKS: None if block.sinks is None else block.sinks.float(),
                BlockField.SCALAR: None if block.scalar is None else block.scalar.float(),
                BlockField.PER_LAYER_GATE: block.per_layer_gate,
                BlockField.PER_LAYER_PROJECTION: block.per_layer_projection,
            }
            if spec.experts is not None:
                row |= {
                    BlockField.EXPERTS: spec.experts.count,
                    BlockField.CHOSEN: spec.experts.chosen,
                    BlockField.EXPERT_SIZE: spec.experts.intermediate_size,
                    BlockField.RENORMALISED: spec.experts.renormalised,
                    BlockField.ROUTER: None if block.router is None else block.router.float(),
                    BlockField.ROUTER_BIAS: None if block.router_bias is None else block.router_bias.float(),
                    BlockField.BESIDE: spec.experts.parallel_mlp,
                    BlockField.EXPERT_SCALE: None if block.expert_scale is None else block.expert_scale.float(),
                    BlockField.SHARED_SIZE: spec.experts.shared_size,
                    BlockField.SHARED_GATE: None if block.shared_gate is None else block.shared_gate.float(),
                }
            if block.router_scale is not None:
                row[BlockField.ROUTER_SCALE] = block.router_scale.float() * self._config.hidden_size**-0.5
            norms = ("attention_input", "attention_output", "mlp_input", "mlp_output", "q_norm", "k_norm")
            for name in (*norms, "experts_input", "experts_output", "shared_output", "per_layer_output"):
                norm: Norm | None = getattr(block, name)
                row[BlockField[name.upper()]] = None if norm is None else norm.factors.float()
            if block.delta is None:
                stored = cache.attention[index if spec.kv_from is None else spec.kv_from]
                row[BlockField.KEYS], row[BlockField.VALUES] = stored.keys, stored.values
                row[BlockField.KEY_SCALES], row[BlockField.VALUE_SCALES] = stored.key_scales, stored.value_scales
            else:
                delta, states = block.delta, cache.recurrent[index]
                sizes = ("key_heads", "value_heads", "key_dim", "value_dim", "taps")
                tensors = ("a", "b", "dt_bias", "norm")
                fields = {
                    **{DeltaField[name.upper()]: getattr(delta.config, name) for name in sizes},
                    **{DeltaField[name.upper()]: getattr(delta, name).float() for name in tensors},
                    DeltaField.KERNEL: delta.kernel[:, 0].t().float(),
                    DeltaField.RATE: delta.log_rate.float().exp(),
                    DeltaField.INPUTS: states.inputs,
                    DeltaField.STATES: states.state,
                    DeltaField.BUFFERS: cache.buffers,
                    DeltaField.SLOTS: len(cache.lengths),
                }
                row[BlockField.DELTA] = torch.from_numpy(self._fill(DeltaField, fields))
            if spec.rotary is not None:
                rope, (cos, sin) = self._config.rotaries[spec.rotary], tables[spec.rotary]
                row[BlockField.ROTARY_HALF], row[BlockField.INTERLEAVED] = rope.rotary_dim // 2, rope.interleaved
                row[BlockField.COS], row[BlockField.SIN] = cos, sin
            rows.append(self._fill(BlockField, row))
            first += sum(map(len, block.linears))
        return np.array(rows)

    def _allocate(self, threads: int, rows: int) -> None:
        """Allocate the buffers for ``threads`` threads and ``rows`` rows; counts are preserved."""
        config = self._config
        longest = max(config.hidden_size, *(projection.in_features for projection in self._projections))
        if config.delta_net is not None:  # out_proj's input, and ``delta_net``'s scratch memory
            delta = config.delta_net
            longest = max(longest, delta.value_size, 2 * (delta.key_dim + delta.value_dim))
        planes = max(projection.weight.planes for projection in self._projections)
        listed = longest * planes
        layout = scratch_layout(rows, config.hidden_size, listed, max(longest, self._input_width))
        counts = torch.zeros(threads, len(self._projections), dtype=torch.int64)
        counts[0] = torch.tensor(self.kept())
        self.counts = counts.numpy()
        self._threads, self._capacity = threads, rows
        self._buffers = {
            StepField.HALF: torch.empty(rows, config.hidden_size),
            StepField.QKV: torch.empty(rows, self._input_width),
            StepField.SEGMENT_INDEX: torch.empty(listed, dtype=torch.int32),
            StepField.SEGMENT_VALUE: torch.empty(rows, listed),
            StepField.SEGMENT_COUNT: torch.empty(threads, 2, dtype=torch.int64),
            StepField.COUNTS: counts,
            StepField.SPARE_COUNTS: torch.empty(threads, dtype=torch.int64),
            StepField.SCRATCH: torch.empty(threads * layout[StepField.SCRATCH_BYTES], dtype=torch.uint8),
            StepField.PER_LAYER_INPUTS: torch.empty(rows, config.num_blocks * config.per_layer_size),
            StepField.PER_LAYER_PROJECTED: torch.empty(rows, config.num_blocks * config.per_layer_size),
            StepField.PER_LAYER_GATED: torch.empty(rows, config.per_layer_size),
            StepField.TAPS: torch.empty(rows, len(set(self._taps)), config.hidden_size),
        }
        for experts in {
            block.experts for block in config.blocks if block.experts is not None
        }:  # the same in all blocks
            slots, inner = experts.chosen + 1, planes * max(experts.intermediate_size, experts.shared_size)
            self._buffers |= {
                StepField.EXPERT_SCORES: torch.empty(experts.count),
                StepField.EXPERT_CHOICE: torch.empty(threads, slots, 2, dtype=torch.int64),
                StepField.EXPERT_INDEX: torch.empty(slots, inner, dtype=torch.int32),
                StepField.EXPERT_VALUE: torch.empty(slots, inner),
                StepField.EXPERT_COUNT: torch.empty(slots, threads, 2, dtype=torch.int64),
            }
            if experts.parallel_mlp:
                self._buffers[StepField.BESIDE] = torch.empty(rows, config.hidden_size)
            layout |= {StepField.EXPERT_SLOTS: slots, StepField.EXPERT_LENGTH: inner}
        for field, tensor in self._buffers.items():
            self._parameters[field] = tensor.data_ptr()
        for field, value in layout.items():
            self._parameters[field] = value
