"""A decode step on the CPU: its parameters, its buffers, and the list of operations that the compiled region runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats import block_ops
from wisparse.formats.block_ops import HIDDEN
from wisparse.formats.machine import usable_cores
from wisparse.kernels.cpu.launch import Team, regions_of, team_size
from wisparse.kernels.cpu.layout import (
    AttentionRow,
    DeltaRow,
    ExpertsRow,
    LatentRow,
    MambaRow,
    MlpActivation,
    OpCode,
    OpRow,
    PerLayerRow,
    ProjectionField,
    ShortConvRow,
    StepRow,
    StoredAs,
    scratch_layout,
)

from ..decoding.rotary import query_scales
from ..decoding.sampling import SamplingParams, choose
from ..torch.block import Block
from ..torch.mixers import Norm

# With fewer bytes of weights for each thread, waiting at barriers costs more than an additional thread gains.
_BYTES_PER_THREAD = 1 << 20
_CACHED_AS = {"auto": StoredAs.BASE, "int8": StoredAs.INT8, "fp8": StoredAs.E4M3}
MOST_ROWS = 32  # the most tokens of a prompt that a step reads
Buffer = tuple[int, int]  # address of a value, and bytes between the threads' copies; 0: they share it


class Step:
    def __init__(self, decoder: Any) -> None:
        """``decoder``: a `decoder.CpuDecoder`, of a module that imports this one."""
        config, embedding, output = decoder.config, decoder._embedding, decoder._head
        parts = {"mixers": config.has_mixers, "experts": config.has_experts}
        (self._region, *_), self._config = regions_of(decoder.dtype, **parts, int4=False), config
        self._per_layer, self._dtype, self._cache = decoder._per_layer, decoder.dtype, decoder._cache
        self._blocks: Sequence[Block[Any]] = decoder._blocks
        self._team = Team()
        self._threads = self._capacity = 0  # threads and rows of the allocated buffers
        self._projections = decoder._projections
        self.counts = np.zeros((1, len(self._projections)), dtype=np.int64)
        self._most_threads = max(1, min(usable_cores(), sum(decoder.bytes_read()) // _BYTES_PER_THREAD))
        self._taps: list[int] = []

        max_batch, max_len = decoder.max_batch, decoder.max_seq_len
        self.logits = torch.empty(max(max_batch, decoder.max_verified_tokens), config.vocab_size)  # float32
        self._numpy_logits, self._chosen = self.logits.numpy(), np.zeros(max_batch, dtype=np.int64)
        # Views of the first rows, indexed by their number.
        self.first_logits = [self.logits[:count] for count in range(max_batch + 1)]
        self._first_chosen = [torch.from_numpy(self._chosen)[:count] for count in range(max_batch + 1)]
        rows = torch.zeros(4, max(max_batch, MOST_ROWS), dtype=torch.int64)
        self._rows = rows.numpy()  # slot, token, position and OUTPUTS of every row
        self._rotary = [tuple(table.float() for table in rotary.step_tables(max_len)) for rotary in decoder._rotaries]
        table = [projection.weight.row() for projection in self._projections]
        for row, projection in zip(table, self._projections, strict=True):
            row.bias = None if projection.bias is None else projection.bias.float()
        self._kept_alive = table
        self._table = np.array([row.words for row in table])
        self._thresholds = torch.zeros(len(self._projections), 2)
        qk_norm, p = config.architecture.qk_norm, StepRow()
        self._p = p
        p.slots, p.tokens, p.positions, p.outputs = rows
        p.hidden, p.heads, p.max_len, p.vocab = config.hidden_size, config.num_heads, max_len, config.vocab_size
        p.qk_whole = qk_norm is not None and not qk_norm.per_head
        p.qk_after = qk_norm is not None and qk_norm.per_head and qk_norm.after_rotary
        p.activation = MlpActivation[config.activation.upper()]
        p.embedding, p.head, p.head_scale, p.final_norm = embedding, output.data, output.scale, _floats(decoder._norm)
        p.query_scales = query_scales(config, 0, max_len, torch.device("cpu"))
        p.cached_as, p.mapped = _CACHED_AS[decoder.kv_cache_dtype], decoder._mapped is not None
        p.projections, p.num_projections, p.thresholds = self._table, len(self._projections), self._thresholds
        p.eps, p.attention_scale = config.rms_norm_eps, config.attention_scale
        p.embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=embedding.dtype).item()
        p.logits_multiplier, (p.clamp_slope, p.clamp_limit) = config.logits_multiplier, config.clamp
        p.attention_cap, p.logits_cap = config.attention_softcap or 0.0, config.logits_softcap or 0.0
        p.logits, p.scores, p.team = self.logits, torch.empty(config.num_heads, max_len), self._team.words
        p.row_numbers, p.per_layer, p.num_blocks = torch.arange(rows.shape[1]), config.per_layer_size, config.num_blocks
        if self._per_layer is not None:
            p.per_layer_projection, p.per_layer_norm = self._per_layer.projection, _floats(self._per_layer.norm)
        self.take_masks()

    def tap(self, taps: tuple[int, ...]) -> None:
        """Store the inputs of these blocks in each step; the number of blocks stands for the last one's output."""
        self._taps, self._threads = list(taps), 0

    def taps(self, rows: int) -> Tensor:
        """The hidden states that the last step stored: (rows, taps * H) float32, valid until the next step."""
        taps: Tensor = self._p.taps[:rows]
        return taps.flatten(1)

    def run(self, rows: Sequence[tuple[int, int, int]], outputs: Sequence[int] = ()) -> None:
        """Append tokens to slots. rows: (slot, token, position), those of a slot in order of position. outputs: for
        each row the row of ``logits``."""
        threads, table = self._reserve(len(rows)), self._rows
        for row, (slot, token, position) in enumerate(rows):
            table[0, row], table[1, row], table[2, row] = slot, token, position
        table[3, : len(outputs)] = outputs
        self._p.rows = len(rows)
        if self._per_layer is not None:
            with torch.inference_mode():
                of_tokens = self._per_layer.of_tokens(torch.from_numpy(self._rows[1, : len(rows)]), self._dtype)
                self._p.per_layer_inputs[: len(rows)] = of_tokens
        self._team.launch(self._region, self._p.words, threads)

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
        self._p.vocab = 0  # no logits
        try:
            self.run([(slot, token, start + i) for i, token in enumerate(tokens)])
        finally:
            self._p.vocab = self._config.vocab_size
            self._thresholds.copy_(thresholds)
        if counts is not None:  # only masked positions are counted
            self.counts[:] = 0
            self.counts[0] = counts
        hidden, scratch = self._config.hidden_size, self._p.scratch  # which begins with the residual stream
        states: Tensor = scratch[: 4 * len(tokens) * hidden].view(torch.float32).view(-1, hidden)
        return states

    def finish(self, hidden: Tensor, *, normed: bool = False) -> Tensor:
        """Logits (R, V) of hidden states (R, H), before the final norm or, if ``normed``, after it; valid until the
        next step. Runs a step without operations, with the hidden states as its embedding."""
        count, p = len(hidden), self._p
        self._reserve(count)
        saved = p.embedding, p.num_ops, p.final_norm, p.embedding_multiplier
        p.embedding, p.num_ops, p.embedding_multiplier = hidden, 0, 1.0
        p.final_norm = None if normed else p.final_norm
        try:
            self.run([(0, row, 0) for row in range(count)], range(count))
        finally:
            p.embedding, p.num_ops, p.final_norm, p.embedding_multiplier = saved
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

    def _reserve(self, rows: int) -> int:
        """Allocate the buffers for ``rows`` rows if they are too small; returns the number of threads."""
        threads = min(team_size(), self._most_threads)
        if threads > self._threads or rows > self._capacity:
            self._allocate(max(threads, self._threads), max(rows, self._capacity))
        return threads

    def _allocate(self, threads: int, rows: int) -> None:
        """Allocate the buffers for ``threads`` threads and ``rows`` rows; counts are preserved."""
        config, p = self._config, self._p
        width = max(sum(one.out_features for one in block.qkv or ()) for block in self._blocks)
        longest = max(config.hidden_size, *(projection.in_features for projection in self._projections))
        if config.delta_net is not None:  # out_proj's input, and ``delta_net``'s scratch memory
            delta = config.delta_net
            longest = max(longest, delta.value_size, 2 * (delta.key_dim + delta.value_dim))
        if config.mamba2 is not None:
            longest = max(longest, config.mamba2.mixed_size)
        if config.latent is not None:
            longest = max(longest, config.head_dim)
        rank = config.latent.query_rank if config.latent is not None else 0
        planes = max(projection.weight.planes for projection in self._projections)
        listed = longest * planes
        layout, offsets = scratch_layout(rows, max(config.hidden_size, rank), listed, max(longest, width))
        counts = torch.zeros(threads, len(self._projections), dtype=torch.int64)
        counts[0] = torch.tensor(self.kept())
        self.counts = counts.numpy()
        self._threads, self._capacity = threads, rows
        for name, value in layout.items():
            setattr(p, name, value)
        p.scratch = torch.empty(threads * p.scratch_bytes, dtype=torch.uint8)
        p.segment_index, p.segment_value = torch.empty(listed, dtype=torch.int32), torch.empty(rows, listed)
        p.segment_count = torch.empty(threads, 2, dtype=torch.int64)
        p.counts, p.spare_counts = counts, torch.empty(threads, dtype=torch.int64)
        p.taps = torch.empty(rows, len(self._taps), config.hidden_size)
        per_layer = config.num_blocks * config.per_layer_size
        p.per_layer_inputs, p.per_layer_projected = torch.empty(rows, per_layer), torch.empty(rows, per_layer)
        p.per_layer_gated = torch.empty(rows, config.per_layer_size)
        experts = next((block.experts for block in config.blocks if block.experts is not None), None)
        if experts is not None:  # the same in all blocks
            slots, inner = experts.chosen + 1, planes * max(experts.intermediate_size, experts.shared_size)
            p.expert_slots, p.expert_length = slots, inner
            p.expert_scores = torch.empty(rows, experts.count)
            p.expert_keys = torch.empty(threads, 3, experts.count)
            p.expert_choice = torch.empty(threads, rows, slots, 2, dtype=torch.int64)
            p.expert_index, p.expert_value = torch.empty(slots, inner, dtype=torch.int32), torch.empty(slots, inner)
            p.expert_count = torch.empty(slots, threads, 2, dtype=torch.int64)

        queries = max((one.out_features for block in self._blocks for one in block.q_b or ()), default=0)
        self._shared = torch.empty(rows, width), torch.empty(rows, queries), torch.empty(2, rows, config.hidden_size)
        *inputs, outputs = self._shared
        own = [(p.scratch.data_ptr() + offset, p.scratch_bytes) for offset in offsets]
        divided = p.scratch.data_ptr() + p.acc_at, p.scratch_bytes
        shared = [(output.data_ptr(), 0) for output in outputs]
        self._ops = list(self._rows_of_ops(own, divided, [(one.data_ptr(), 0) for one in inputs], shared))
        p.ops, p.num_ops = np.array([row.words for row in self._ops]), len(self._ops)

    def _rows_of_ops(
        self, own: Sequence[Buffer], divided: Buffer, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> Iterator[OpRow]:
        """The operations of all blocks. Buffers: ``own`` ones of each thread, of which the first holds the residual stream;
        for a ``divided`` value; for a mixer's ``inputs``; and for linears' ``outputs``."""
        config, first = self._config, 0  # row of the next projection
        parameters: Any
        fields: dict[str, Any]

        def row(code: OpCode, x: Buffer, y: Buffer, parameters: Any = None, **fields: Any) -> OpRow:
            fields = {"eps": config.rms_norm_eps, "count": config.hidden_size, "width": config.hidden_size, **fields}
            return OpRow(code=code, x=x[0], x_step=x[1], y=y[0], y_step=y[1], parameters=parameters, **fields)

        def taps(block: int) -> Iterator[OpRow]:
            for number, tap in enumerate(self._taps):
                if tap == block:
                    y = self._p.taps.data_ptr() + 4 * number * config.hidden_size
                    yield row(OpCode.TAP, own[0], (y, 0), width=len(self._taps) * config.hidden_size)

        for index, block in enumerate(self._blocks):
            yield from taps(index)
            values, ops, experts = {HIDDEN: own[0]}, block.ops, _experts(block) if block.spec.experts else None
            for op, later in zip(ops, range(1, len(ops) + 1), strict=True):
                x = [values[name] for name in op.inputs if name in values]
                needed = {values.get(name) for one in ops[later:] for name in one.inputs}
                free = next(buffer for buffer in own[1:] if buffer not in needed)
                output = next(buffer for buffer in outputs if buffer not in needed)
                y, parameters, fields = x[0], None, {}  # by default the operation changes its first input
                match op:
                    case block_ops.Norm():
                        norm = getattr(block, op.weight)
                        code, y, parameters, fields = OpCode.NORM, free, _floats(norm), {"eps": norm.eps}
                    case block_ops.Linear():
                        count, width = len(op.projections), sum(one.out_features for one in op.projections)
                        fields, first = {"first": first, "count": count, "width": width}, first + count
                        if isinstance(ops[later], block_ops.Activate):
                            code, y = OpCode.GATE_UP, divided
                            fields["width"] = width // 2 if config.architecture.gated else width
                        elif x[0] == divided:
                            code, y = OpCode.LINEAR_OF_PARTS, output
                        else:
                            code, y = OpCode.LINEAR, next(buffer for buffer in inputs if buffer not in needed)
                    case block_ops.Activate():
                        values[op.output] = divided
                        continue
                    case block_ops.LatentQuery():
                        assert block.query_norm is not None
                        code, y, parameters = OpCode.NORM, free, _floats(block.query_norm)
                        width = sum(one.out_features for one in block.qkv or ())
                        fields = {"eps": block.query_norm.eps, "count": len(parameters), "width": width}
                    case block_ops.LatentKeys():
                        values[op.output], keys = x[0], x[-1]
                        continue
                    case block_ops.LatentValues():
                        continue
                    case block_ops.Attention() if block.latent is not None:
                        code, y, parameters = OpCode.LATENT_ATTENTION, divided, self._latent(index, block)
                        fields = {"z": keys[0], "z_step": keys[1], "eps": block.latent.norm.eps}
                    case block_ops.Attention():
                        code, y, parameters = OpCode.ATTENTION, divided, self._attention(index, block)
                    case block_ops.DeltaNet():
                        code, y, parameters = OpCode.DELTA_NET, divided, self._delta_net(index, block)
                        fields = {"z": x[1][0], "z_step": x[1][1]}
                    case block_ops.ShortConv():
                        code, y, parameters = OpCode.SHORT_CONV, divided, self._short_conv(index, block)
                    case block_ops.Mamba2():
                        code, y, parameters = OpCode.MAMBA2, divided, self._mamba2(index, block)
                    case block_ops.Router():
                        if op.normed:
                            assert block.router_scale is not None
                            yield row(OpCode.NORM, x[0], free, block.router_scale.float() * config.hidden_size**-0.5)
                            x = [free]
                        code, parameters = OpCode.ROUTER, experts
                    case block_ops.Experts():
                        code, y, parameters, fields = OpCode.EXPERTS, output, experts, {"first": first}
                        first += sum(len(one.parts) for one in op.projections)
                    case block_ops.PerLayer():
                        gate, projection = block.per_layer_gate, block.per_layer_projection
                        parameters = PerLayerRow(block=index, gate=gate, projection=projection)
                        yield row(OpCode.PER_LAYER, x[0], output, parameters)
                        yield row(OpCode.NORM, output, free, _floats(block.per_layer_output))
                        code, x, parameters = OpCode.ADD, [free], 1.0
                    case block_ops.Sum() | block_ops.Add():
                        code, x, parameters = OpCode.ADD, x[1:], op.multiplier if isinstance(op, block_ops.Add) else 1.0
                    case block_ops.Scale():
                        assert block.scalar is not None
                        code, parameters = OpCode.SCALE, block.scalar.item()
                    case _:
                        raise TypeError(f"no such operation: {op}")
                yield row(code, x[0], y, parameters, **fields)
                values[op.output] = y
        yield from taps(config.num_blocks)

    def _attention(self, index: int, block: Block[Any]) -> AttentionRow:
        spec, source = block.spec, index if block.spec.kv_from is None else block.spec.kv_from
        row = AttentionRow(**self._cache.attention[source]._asdict())
        row.q_norm, row.k_norm, row.sinks = (_floats(one) for one in (block.q_norm, block.k_norm, block.sinks))
        row.value_norm = torch.ones(spec.head_dim) if self._config.architecture.value_norm else None
        row.window, row.kv_heads, row.head_dim = spec.window, spec.num_kv_heads, spec.head_dim
        gate = self._config.architecture.attention_gate
        row.query_stride = (2 if gate == "q_proj" else 1) * spec.head_dim
        row.gate_from = {None: 0, "q_proj": spec.head_dim}.get(gate, self._config.q_size(index))
        row.input_width = sum(projection.out_features for projection in block.qkv or ())
        if spec.rotary is not None:
            rope, (row.cos, row.sin) = self._config.rotaries[spec.rotary], self._rotary[spec.rotary]
            row.rotary_half, row.interleaved = rope.rotary_dim // 2, rope.interleaved
        return row

    def _latent(self, index: int, block: Block[Any]) -> LatentRow:
        latent = block.latent
        assert latent is not None
        assert block.qkv is not None
        width = sum(projection.out_features for projection in block.qkv)
        row = LatentRow(
            attention=self._attention(index, block), norm=_floats(latent.norm), kv_b=latent.kv_b, width=width
        )
        for name in ("key_dim", "value_dim", "rotary_dim"):
            setattr(row, name, getattr(latent.config, name))
        row.query_width = width if block.q_b is None else block.q_b[0].out_features
        row.latent_from = block.qkv[0].out_features
        return row

    def _delta_net(self, index: int, block: Block[Any]) -> DeltaRow:
        delta, cache = block.delta, self._cache
        assert delta is not None
        row = DeltaRow(kernel=delta.kernel[:, 0].t().float(), rate=delta.log_rate.float().exp())
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"):
            setattr(row, name, getattr(delta.config, name))
        row.a, row.b, row.dt_bias, row.norm = (_floats(one) for one in (delta.a, delta.b, delta.dt_bias, delta.norm))
        row.inputs, row.states = cache.recurrent[index].inputs, cache.recurrent[index].state
        row.buffers, row.slots = cache.buffers, len(cache.lengths)
        return row

    def _mamba2(self, index: int, block: Block[Any]) -> MambaRow:
        mamba, cache = block.mamba, self._cache
        assert mamba is not None
        row = MambaRow(
            kernel=mamba.kernel[:, 0].t().float(), rate=mamba.log_rate.float().exp(), bias=_floats(mamba.bias)
        )
        for name in ("heads", "groups", "head_dim", "state_dim", "taps"):
            setattr(row, name, getattr(mamba.config, name))
        row.dt_bias, row.skip, row.norm = (_floats(one) for one in (mamba.dt_bias, mamba.skip, mamba.norm))
        row.inputs, row.states = cache.recurrent[index].inputs, cache.recurrent[index].state
        row.buffers, row.slots = cache.buffers, len(cache.lengths)
        return row

    def _short_conv(self, index: int, block: Block[Any]) -> ShortConvRow:
        conv, cache = block.conv, self._cache
        assert conv is not None
        row = ShortConvRow(kernel=conv.kernel[:, 0].t().float(), bias=_floats(conv.bias), taps=conv.kernel.shape[-1])
        row.inputs, row.buffers, row.slots = cache.recurrent[index].inputs, cache.buffers, len(cache.lengths)
        return row


def _experts(block: Block[Any]) -> ExpertsRow:
    spec, gate = block.spec.experts, block.shared_gate
    assert spec is not None
    row = ExpertsRow(count=spec.count, chosen=spec.chosen, size=spec.intermediate_size, renormalised=spec.renormalised)
    row.router, row.router_bias = _floats(block.router), _floats(block.router_bias)
    row.scale, row.shared_gate = _floats(block.expert_scale), _floats(gate)
    row.choice_bias, row.sigmoid, row.factor = _floats(block.choice_bias), spec.score == "sigmoid", spec.scale
    row.norm_least, row.norm_added = spec.norm
    row.groups, row.groups_kept, row.group_best = spec.groups or (0, 0, 0)
    row.shared_size = 0 if spec.parallel_mlp else spec.shared_size
    return row


def _floats(tensor: Tensor | Norm | None) -> Tensor | None:
    tensor = tensor.factors if isinstance(tensor, Norm) else tensor
    return None if tensor is None else tensor.float()
