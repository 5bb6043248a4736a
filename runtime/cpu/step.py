"""The tables and buffers of one compiled decode step (``kernels.cpu.step``, ``StepField``).

The kernel is given addresses, so everything it reads or writes is held here for as long as it may run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.machine import usable_cores
from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.cpu.layout import BlockField, DeltaField, FloatField, ProjectionField, StepField
from wisparse.kernels.cpu.matrix import Matrix
from wisparse.kernels.cpu.threads import Team, team_size

from ..decoding.cache import DeltaState, KVCache
from ..decoding.rotary import Rotary, query_scales
from ..torch.block import Block, Norm
from ..torch.delta_net import DeltaWeights
from .weights import CpuProjection

# A thread that reads less than this per step waits for the others for longer than it helps.
_BYTES_PER_THREAD = 1 << 20


class Step:
    """Decodes one token for some of the slots.

    Attributes:
        logits: (max_batch, V) float32, a slot's row is written by its step.
    """

    def __init__(
        self,
        region: str,
        config: ModelConfig,
        blocks: Sequence[Block],
        embedding: Tensor,
        final_norm: Norm,
        output: Matrix,
        rotaries: Sequence[Rotary],
        cache: KVCache,
    ) -> None:
        """
        Args:
            region: which of ``kernels.cpu.regions.REGIONS`` fits the type of the cache.
            embedding: (V, hidden), the type of the cache.
            output: the output layer, not transposed.
            rotaries: one for each of ``config.rotaries``.
        """
        self._region = region
        self._config = config
        max_batch, max_len = len(cache.lengths), cache.max_seq_len
        self.logits = torch.empty(max_batch, config.vocab_size)
        # slot, token and position of every row
        self._rows = torch.zeros(3, max_batch, dtype=torch.int64)
        self._rows_np = self._rows.numpy()
        self._projections: list[CpuProjection] = [p for block in blocks for p in block.projections]  # type: ignore[misc]
        self._parameters = np.zeros(len(StepField), dtype=np.int64)
        self._kept_alive: list[Tensor] = []
        self._threads = self._capacity = 0
        self._team = Team()
        self._parameters[StepField.TEAM] = self._team.address
        weights = output.nbytes + sum(p.matrix.nbytes for p in self._projections)
        self._most_threads = max(1, min(usable_cores(), weights // _BYTES_PER_THREAD))
        self._counts = torch.zeros(0, dtype=torch.int64)

        set_, qk_norm = self._set, config.architecture.qk_norm
        set_(StepField.SLOTS, self._rows[0])
        set_(StepField.TOKENS, self._rows[1])
        set_(StepField.POSITIONS, self._rows[2])
        for field, size in (
            (StepField.HIDDEN, config.hidden_size),
            (StepField.INTERMEDIATE, config.intermediate_size),
            (StepField.HEADS, config.num_heads),
            (StepField.MAX_LEN, max_len),
            (StepField.NUM_BLOCKS, config.num_blocks),
            (StepField.NUM_PROJECTIONS, len(self._projections)),
            (StepField.NUM_GATE_UP, len(config.architecture.gate_up)),
            (StepField.VOCAB, config.vocab_size),
            (StepField.QK_WHOLE, qk_norm is not None and not qk_norm.per_head),
            (StepField.QK_AFTER, qk_norm is not None and qk_norm.per_head and qk_norm.after_rotary),
            (StepField.GELU, config.activation == "gelu_tanh"),
            (StepField.GATED, config.architecture.attention_gate),
        ):
            self._parameters[field] = size
        set_(StepField.EMBEDDING, embedding)
        set_(StepField.HEAD, output.data)
        if output.scale is not None:
            set_(StepField.HEAD_SCALE, output.scale)
        set_(StepField.FINAL_NORM, _norm_weight(final_norm))
        found = [rotary.step_tables(max_len) for rotary in rotaries]
        tables = [(cos.float(), sin.float()) for cos, sin in found]
        self._input_width = max(sum(p.out_features for p in block.qkv) for block in blocks)
        set_(StepField.BLOCKS, torch.tensor(self._describe_blocks(blocks, tables, cache), dtype=torch.int64))
        scales = query_scales(config, 0, max_len, torch.device("cpu"))
        if scales is not None:
            set_(StepField.QUERY_SCALES, scales)
        self._table = torch.tensor([self._describe(p) for p in self._projections], dtype=torch.int64)
        self._thresholds = torch.zeros(len(self._projections))
        set_(StepField.PROJECTIONS, self._table)
        set_(StepField.THRESHOLDS, self._thresholds)
        self._masks: list[Tensor] = []
        self.take_masks()
        set_(StepField.FLOATS, _floats(config, embedding.dtype))
        set_(StepField.SCORES, torch.empty(config.num_heads, max_len))
        set_(StepField.LOGITS, self.logits)

    def run(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Append a token to some slots: ``rows`` are (slot, token, position), each slot at most once."""
        threads = min(team_size(), self._most_threads)
        if threads > self._threads or len(rows) > self._capacity:
            self._allocate(max(threads, self._threads), max(len(rows), self._capacity))
        self._rows_np[:, : len(rows)] = np.array(rows).T
        self._parameters[StepField.ROWS] = len(rows)
        self._team.launch(self._region, self._parameters, threads)

    def take_masks(self) -> None:
        """Put the masks that the projections have now into the tables; no step may run meanwhile."""
        masks = []
        for row, (table, projection) in enumerate(zip(self._table, self._projections, strict=True)):
            for field, tensor in (
                (ProjectionField.SCALE, projection.channel_scale),
                (ProjectionField.BIAS, projection.step_bias()),
            ):
                table[field] = 0 if tensor is None else tensor.data_ptr()
                if tensor is not None:
                    masks.append(tensor)
            self._thresholds[row] = projection.threshold
        self._masks = masks

    def kept(self) -> list[int]:
        """Channels kept since :meth:`forget`, over all rows, projection by projection."""
        count = len(self._projections)
        return self._counts.view(self._threads, count).sum(0).tolist()

    def forget(self) -> None:
        """Count kept channels from zero."""
        self._counts.zero_()

    def _set(self, field: StepField, tensor: Tensor) -> None:
        self._parameters[field] = self._address(tensor)

    def _address(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept_alive.append(tensor)
        return tensor.data_ptr()

    def _describe_blocks(
        self, blocks: Sequence[Block], tables: Sequence[tuple[Tensor, Tensor]], cache: KVCache
    ) -> list[list[int]]:
        """The table of blocks."""
        rows, first = [], 0
        for index, block in enumerate(blocks):
            row = self._describe_block(block, tables)
            row[BlockField.FIRST], row[BlockField.NUM_INPUTS] = first, len(block.qkv)
            row[BlockField.INPUT_WIDTH] = sum(projection.out_features for projection in block.qkv)
            if block.delta is None:
                keys, values = cache.attention[index]
                row[BlockField.KEYS], row[BlockField.VALUES] = self._address(keys), self._address(values)
            else:
                row[BlockField.DELTA] = self._describe_delta(block.delta, cache.recurrent[index])
            rows.append(row)
            first += len(block.projections)
        return rows

    def _describe_delta(self, delta: DeltaWeights, states: DeltaState) -> int:
        """Where a recurrent block's row is; ``states``: of all slots."""
        row = torch.zeros(len(DeltaField), dtype=torch.int64)
        fields: dict[DeltaField, Tensor | int] = {
            DeltaField.KEY_HEADS: delta.config.key_heads,
            DeltaField.VALUE_HEADS: delta.config.value_heads,
            DeltaField.KEY_DIM: delta.config.key_dim,
            DeltaField.VALUE_DIM: delta.config.value_dim,
            DeltaField.TAPS: delta.config.taps,
            DeltaField.A: delta.a.float(),
            DeltaField.B: delta.b.float(),
            DeltaField.KERNEL: delta.kernel[:, 0].t().float(),
            DeltaField.RATE: delta.log_rate.float().exp(),
            DeltaField.DT_BIAS: delta.dt_bias.float(),
            DeltaField.NORM: delta.norm.float(),
            DeltaField.INPUTS: states.inputs,
            DeltaField.STATES: states.state,
        }
        for field, value in fields.items():
            row[field] = self._address(value) if isinstance(value, Tensor) else value
        return self._address(row)

    def _describe_block(self, block: Block, tables: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """A block's row of the table; ``tables`` are the cosines and sines of every rotary embedding."""
        row = [0] * len(BlockField)
        norms = {
            BlockField.ATTENTION_INPUT: block.attention_input,
            BlockField.ATTENTION_OUTPUT: block.attention_output,
            BlockField.MLP_INPUT: block.mlp_input,
            BlockField.MLP_OUTPUT: block.mlp_output,
            BlockField.Q_NORM: block.q_norm,
            BlockField.K_NORM: block.k_norm,
        }
        for field, norm in norms.items():
            if norm is not None:
                row[field] = self._address(_norm_weight(norm))
        row[BlockField.WINDOW] = block.facts.window or 0
        row[BlockField.KV_HEADS], row[BlockField.HEAD_DIM] = block.facts.num_kv_heads, block.facts.head_dim
        if self._config.architecture.value_norm:
            row[BlockField.VALUE_NORM] = self._address(torch.ones(block.facts.head_dim))
        if block.scalar is not None:
            row[BlockField.SCALAR] = self._address(block.scalar.float())
        if block.facts.rotary is not None:
            rope, (cos, sin) = self._config.rotaries[block.facts.rotary], tables[block.facts.rotary]
            row[BlockField.ROTARY_HALF], row[BlockField.INTERLEAVED] = rope.rotary_dim // 2, rope.interleaved
            row[BlockField.COS], row[BlockField.SIN] = self._address(cos), self._address(sin)
        return row

    def _describe(self, projection: CpuProjection) -> list[int]:
        """A projection's row of the table, but for its mask (``take_masks``)."""
        row = [0] * len(ProjectionField)
        for field, value in projection.matrix.describe().items():
            row[field] = self._address(value) if isinstance(value, Tensor) else value
        return row

    def _allocate(self, threads: int, rows: int) -> None:
        """Buffers for a team of ``threads`` and ``rows`` rows; what was counted is kept."""
        config = self._config
        longest = max(config.hidden_size, max(projection.in_features for projection in self._projections))
        if config.delta_net is not None:  # what out_proj reads, and a head's scratch
            delta = config.delta_net
            longest = max(longest, delta.value_size, 2 * (delta.key_dim + delta.value_dim))
        widest = max(longest, self._input_width)
        # residual, normed, two accumulators, one list, sums: see `step`. Whole pages: threads share no cache line.
        scratch = 4 * (2 * rows * config.hidden_size + 2 * rows * widest + longest + rows * longest)
        scratch += 4 * rows * (widest + 2)
        scratch = -(-scratch // 4096) * 4096
        counts = torch.zeros(threads * len(self._projections), dtype=torch.int64)
        counts[: len(self._projections)] = torch.tensor(self.kept()) if self._threads else 0
        self._counts = counts
        self._threads, self._capacity = threads, rows
        self._buffers = {
            StepField.HALF: torch.empty(rows, config.hidden_size),
            StepField.QKV: torch.empty(rows, self._input_width),
            StepField.SEGMENT_INDEX: torch.empty(longest, dtype=torch.int32),
            StepField.SEGMENT_VALUE: torch.empty(rows, longest),
            StepField.SEGMENT_COUNT: torch.empty(threads, 2, dtype=torch.int64),
            StepField.SCRATCH: torch.empty(threads * scratch, dtype=torch.uint8),
            StepField.COUNTS: counts,
            StepField.SPARE_COUNTS: torch.empty(threads, dtype=torch.int64),
        }
        for field, tensor in self._buffers.items():
            self._parameters[field] = tensor.data_ptr()
        self._parameters[StepField.SCRATCH_BYTES] = scratch
        self._parameters[StepField.LIST_LENGTH] = longest
        self._parameters[StepField.ACC_LENGTH] = widest


def _norm_weight(norm: Norm) -> Tensor:
    """What a norm multiplies by, float32."""
    return norm.weight.float() + 1.0 if norm.offset else norm.weight.float()


def _floats(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """The step's numbers; the embedding's multiplier as the type of the embedding holds it."""
    numbers = {
        FloatField.EPS: config.rms_norm_eps,
        FloatField.ATTENTION_SCALE: config.attention_scale,
        FloatField.ATTENTION_CAP: config.attention_softcap or 0.0,
        FloatField.EMBEDDING_MULTIPLIER: torch.tensor(config.embedding_multiplier, dtype=dtype).item(),
        FloatField.RESIDUAL_MULTIPLIER: config.residual_multiplier,
        FloatField.LOGITS_MULTIPLIER: config.logits_multiplier,
        FloatField.LOGITS_CAP: config.logits_softcap or 0.0,
    }
    return torch.tensor([numbers[field] for field in FloatField], dtype=torch.float32)
