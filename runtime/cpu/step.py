"""The tables and buffers of one compiled decode step (``kernels.cpu.step``, ``StepField``).

The kernel is given addresses, so everything it reads or writes is held here for as long as it may run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.architectures import ModelConfig
from wisparse.formats.machine.cores import usable_cores
from wisparse.kernels.cpu.layout import ProjectionField, StepField
from wisparse.kernels.cpu.team import Team
from wisparse.kernels.cpu.threads import team_size

from ..cache import KVCache
from ..rotary import Rotary, switch_length
from ..torch.decoder import Block, Norm
from .weights import CpuProjection, Matrix

__all__ = ["Step"]

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
        rotary: Rotary,
        cache: KVCache,
    ) -> None:
        """
        Args:
            region: which of ``kernels.cpu.regions.REGIONS`` fits the types of the weights.
            embedding: (V, hidden), the type of the cache.
            output: the output layer, not transposed.
        """
        self._region = region
        self._config = config
        max_batch, max_len = cache.keys.shape[1], cache.keys.shape[3]
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
        weights = output.data.nbytes + sum(p.matrix.data.nbytes for p in self._projections)
        self._most_threads = max(1, min(usable_cores(), weights // _BYTES_PER_THREAD))
        self._counts = torch.zeros(0, dtype=torch.int64)

        set_ = self._set
        set_(StepField.SLOTS, self._rows[0])
        set_(StepField.TOKENS, self._rows[1])
        set_(StepField.POSITIONS, self._rows[2])
        for field, size in (
            (StepField.HIDDEN, config.hidden_size),
            (StepField.INTERMEDIATE, config.intermediate_size),
            (StepField.HEADS, config.num_heads),
            (StepField.KV_HEADS, config.num_kv_heads),
            (StepField.HEAD_DIM, config.head_dim),
            (StepField.ROTARY_HALF, config.rotaries[0].rotary_dim // 2),
            (StepField.MAX_LEN, max_len),
            (StepField.MAX_BATCH, max_batch),
            (StepField.NUM_BLOCKS, config.num_blocks),
            (StepField.NUM_QKV, len(config.architecture.qkv)),
            (StepField.NUM_GATE_UP, len(config.architecture.gate_up)),
            (StepField.VOCAB, config.vocab_size),
        ):
            self._parameters[field] = size
        set_(StepField.EMBEDDING, embedding)
        set_(StepField.HEAD, output.data)
        if output.scale is not None:
            set_(StepField.HEAD_SCALE, output.scale)
        norms = [
            norm.weight for block in blocks for norm in (block.attention_input, block.mlp_input) if norm is not None
        ]
        set_(StepField.NORMS, torch.stack([*norms, final_norm.weight]).float())
        if config.architecture.qk_norm:
            head_norms = [norm.weight for block in blocks for norm in (block.q_norm, block.k_norm) if norm is not None]
            set_(StepField.HEAD_NORMS, torch.stack(head_norms).float())
        cos, sin = _rotary_tables(rotary, config, max_len)
        set_(StepField.COS, cos)
        set_(StepField.SIN, sin)
        set_(StepField.WINDOWS, torch.tensor([block.facts.window or 0 for block in blocks], dtype=torch.int64))
        set_(StepField.KEYS, cache.keys)
        set_(StepField.VALUES, cache.values)
        set_(StepField.PROJECTIONS, torch.tensor([self._describe(p) for p in self._projections], dtype=torch.int64))
        set_(StepField.THRESHOLDS, torch.tensor([p.threshold for p in self._projections], dtype=torch.float32))
        set_(StepField.FLOATS, torch.tensor([config.rms_norm_eps, config.attention_scale], dtype=torch.float32))
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

    def kept(self) -> list[int]:
        """Channels kept since :meth:`forget`, over all rows, projection by projection."""
        count = len(self._projections)
        return self._counts.view(self._threads, count).sum(0).tolist()

    def forget(self) -> None:
        """Count kept channels from zero."""
        self._counts.zero_()

    def _set(self, field: StepField, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self._kept_alive.append(tensor)
        self._parameters[field] = tensor.data_ptr()

    def _describe(self, projection: CpuProjection) -> list[int]:
        """A projection's row of the table."""
        bias = None if projection.bias is None else projection.bias.float()
        tensors = {
            ProjectionField.WEIGHT: projection.matrix.data,
            ProjectionField.SCALE: projection.channel_scale,
            ProjectionField.BIAS: bias,
            ProjectionField.COLUMN_SCALE: projection.matrix.scale,
        }
        row = [0] * len(ProjectionField)
        row[ProjectionField.N], row[ProjectionField.K] = projection.out_features, projection.in_features
        for field, tensor in tensors.items():
            if tensor is not None:
                self._kept_alive.append(tensor)
                row[field] = tensor.data_ptr()
        return row

    def _allocate(self, threads: int, rows: int) -> None:
        """Buffers for a team of ``threads`` and ``rows`` rows; what was counted is kept."""
        config = self._config
        longest = max(config.hidden_size, config.q_size, config.intermediate_size)
        widest = max(longest, config.q_size + 2 * config.kv_size)
        # normed, two accumulators, one list: see `_step`. Whole pages, so that threads share no cache line.
        scratch = 4 * (rows * config.hidden_size + 2 * rows * widest + longest + rows * longest)
        scratch = -(-scratch // 4096) * 4096
        counts = torch.zeros(threads * len(self._projections), dtype=torch.int64)
        counts[: len(self._projections)] = torch.tensor(self.kept()) if self._threads else 0
        self._counts = counts
        self._threads, self._capacity = threads, rows
        self._buffers = {
            StepField.RESIDUAL: torch.empty(rows, config.hidden_size),
            StepField.QKV: torch.empty(rows, config.q_size + 2 * config.kv_size),
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


def _rotary_tables(rotary: Rotary, config: ModelConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (max_len, rotary_dim / 2) float32, each position with the factors it is decoded with."""
    switch = switch_length(config)
    short = max_len if switch is None else min(switch, max_len)
    parts = [rotary.tables(0, short, short)]
    if short < max_len:
        parts.append(rotary.tables(short, max_len, max_len))
    half = config.rotaries[0].rotary_dim // 2
    cos, sin = (torch.cat(pair)[:, :half].float().contiguous() for pair in zip(*parts, strict=True))
    return cos, sin
