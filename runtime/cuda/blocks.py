"""A block's operations (``formats.block_ops``) as launches, for decode steps and prompts.

`BlockLauncher.launch_block` goes through the list. Neighbours that one launch computes:

    Norm -> Linear, Router, Experts   the reader norms its input (`DecodeStep`), or the Add before does
    Linear -> Activate                `DecodeStep`
    Linear, Experts -> Add            `DecodeStep`, unless the sum has a factor
    Norm, Sum -> Add -> Scale, Norm   the residual-add launch
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wisparse.formats import block_ops as ops
from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.gpu.attention import (
    AttentionShape,
    QKNorms,
    RotaryTables,
    Rows,
    launch_attention,
    launch_store_rows,
)
from wisparse.kernels.gpu.common import Input, KVSplits
from wisparse.kernels.gpu.experts import ExpertLinear, Router, choose_experts
from wisparse.kernels.gpu.kv_cache import KVSlots
from wisparse.kernels.gpu.latent import (
    LatentShape,
    launch_latent_attention,
    launch_latent_norms,
    launch_latent_queries,
    launch_latent_values,
)
from wisparse.kernels.gpu.reduction import Mask, ParallelExperts, launch_activate, launch_residual_add
from wisparse.kernels.gpu.short_conv import launch_short_conv

from ..decoding.heads import DraftHead
from ..decoding.rotary import Rotary, query_scales
from ..torch.block import Block, Norm
from .eager import run_experts
from .weights import AnyLinear, CudaWeights


class AttentionParts(NamedTuple):
    """What launches of a block's attention take beside its input; built once."""

    rotary: RotaryTables
    shape: AttentionShape
    norms: QKNorms


def attention_parts(
    config: ModelConfig, blocks: Sequence[Block[AnyLinear]], rotaries: Sequence[Rotary], max_seq_len: int,
    device: torch.device, dtype: torch.dtype,
) -> list[AttentionParts]:  # fmt: skip
    """Of each block."""
    scales, norm, arch = query_scales(config, 0, max_seq_len, device), config.architecture.qk_norm, config.architecture
    factors = None if scales is None else scales.to(dtype)
    tables = [RotaryTables(*one.step_tables(max_seq_len), factors) for one in rotaries]
    tables.append(RotaryTables(tables[0].cos[:, :0], tables[0].sin[:, :0], factors))  # no rotary embedding
    place = "whole" if norm and not norm.per_head else "rotated head" if norm and norm.after_rotary else "head"
    found = []
    for block in blocks:
        spec = block.spec
        rotary = tables[-1 if spec.rotary is None else spec.rotary]
        shape = AttentionShape(
            config.num_heads, spec.num_kv_heads, spec.head_dim, rotary.cos.shape[1] * 2, spec.window or 0,
            config.rotaries[0].interleaved, config.attention_softcap or 0.0, place,
            arch.attention_gate is not None, arch.attention_gate == "attention_gate_proj", spec.shared_values,
            arch.value_norm,
        )  # fmt: skip
        q_norm, k_norm = (None if one is None else one.factors for one in (block.q_norm, block.k_norm))
        found.append(AttentionParts(rotary, shape, QKNorms(q_norm, k_norm, config.rms_norm_eps)))
    return found


def router_of(block: Block[AnyLinear]) -> Router:
    experts, weight = block.spec.experts, block.router
    assert experts is not None
    assert weight is not None
    assert isinstance(block.gate_up, ExpertLinear)
    multiplier = 1.0 if block.router_scale is None else weight.shape[1] ** -0.5
    chosen, shared = experts.chosen, block.gate_up.chosen - experts.chosen
    return Router(
        weight, experts.count, chosen, shared, experts.renormalised, multiplier, block.router_bias, block.expert_scale,
        block.choice_bias, experts.score == "sigmoid", experts.norm, experts.scale, experts.rounded,
        experts.groups,
    )  # fmt: skip


def tensor_of(value: Input) -> Tensor:
    assert value.x is not None
    return value.x


def added_by_linears(listed: Sequence[ops.Op]) -> set[str]:
    """Roles of the linears whose launch may add its output to the residual stream: the sum has no factor."""
    found = set()
    for op, add, after in zip(listed, listed[1:], (*listed[2:], None), strict=False):
        added = isinstance(add, ops.Add) and add.multiplier == 1.0 and not isinstance(after, ops.Scale)
        if added and isinstance(op, ops.Linear | ops.Experts):
            found.add(op.role if isinstance(op, ops.Linear) else "down")
    return found


class BlockLauncher(ABC):
    """Launches blocks on the residual stream of T rows. A value of the list is an `Input`: a tensor, and the norm that
    its reader applies."""

    weights: CudaWeights
    config: ModelConfig
    hidden: Tensor  # (T, H), the residual stream
    # (T, H), the residual stream after the norm of its next reader; None: readers norm their input themselves.
    normed: Tensor | None = None
    pdl = False  # launches overlap by programmatic dependent launch
    _last_norm: Norm | None = None  # after the last block; None: not computed with its last addition
    _parts: Sequence[AttentionParts]
    _cache: dict[int, KVSlots]
    _kept: dict[int, Tensor]  # inputs of each short convolution
    _inputs: Rows
    _head: DraftHead | None
    _reads_prompts = False  # rows may be more positions of a sequence than the cache has states of
    _launches: dict[str, Callable[[], object]] | None = None  # by name, in place of being launched

    def launch_blocks(self, indices: Iterable[int] | None = None) -> None:
        """``indices``: of the blocks to launch; None: all. The draft head then receives the hidden states that it reads:
        inputs of blocks, or the last block's output."""
        count, taps = len(self.weights.blocks), self._head.taps if self._head is not None else ()
        states = self.hidden.new_empty(len(self.hidden), len(taps), self.config.hidden_size)
        for index in (*(range(count) if indices is None else indices), count):
            for at, tap in enumerate(taps):
                if tap == index:
                    states[:, at] = self.hidden
            if index < count:
                self.launch_block(index)
        if self._head is not None:
            tokens, positions, slots = self._inputs
            self._head.keep(slots, positions, states.flatten(1), tokens >= 0)

    def launch_block(self, index: int) -> None:
        block = self.weights.blocks[index]
        values: dict[str, Any] = {ops.HIDDEN: Input(self.hidden if self.normed is None else self.normed)}
        last = self._added_before(index)
        role, parallel = "", None
        for position, op in enumerate(block.ops):
            x, *others = (values[name] for name in op.inputs)
            match op:
                case ops.Norm():
                    factors = getattr(block, op.weight).factors
                    if x.x is self.hidden:
                        x = Input(x.x, self._sums(*last), factors)
                    elif x.x is not self.normed:
                        x = x._replace(norm=factors)
                case ops.Linear():
                    role = op.role
                    x = Input(self._linear(index, role, x))
                case ops.Activate():
                    x = self._activate(block, x)
                case ops.LatentQuery():
                    x = Input(self._latent_norms(index, tensor_of(x)))
                case ops.LatentKeys():
                    x = Input(self._latent_queries(index, tensor_of(x), stored=bool(others)))
                case ops.Attention() if block.latent is not None:
                    x = self._latent_attention(index, tensor_of(x))
                case ops.LatentValues():
                    x = Input(self._latent_values(index, x))
                case ops.Attention():
                    x = self._attend(index, x.x)
                case ops.DeltaNet():
                    x = Input(self._delta_net(index, x.x, others[0]))
                case ops.ShortConv():
                    x = Input(self._short_conv(index, x.x))
                case ops.Mamba2():
                    x = Input(self._mamba2(index, x.x))
                case ops.Router():
                    x = self._route(index, x)
                case ops.Experts():
                    role = "down"
                    x = Input(self._experts(index, x, others[0]))
                case ops.Sum():
                    (other,) = others
                    parallel = ParallelExperts(other.x, other.norm, x.norm)
                    x = Input(x.x)
                case ops.Add():
                    if others[0].x is not self.hidden:  # else the linear's launch has added it
                        self._add(index, role, others[0], parallel, op.multiplier, block.ops[position + 1 :])
                    last = index, role
                case ops.Scale():  # with the addition
                    pass
                case _:
                    raise TypeError(f"no launch of {op}")
            values[op.output] = x

    def _added_before(self, index: int) -> tuple[int, str]:
        """The linear whose output was added last before block ``index``: its block and role; (-1, "down"): the embedding."""
        return index - 1, "down" if index == 0 or self.weights.blocks[index - 1].spec.has_mlp else "o"

    def _launch(self, name: str, launch: Callable[..., object], *arguments: Any, **options: Any) -> None:
        if self._launches is None:
            launch(*arguments, **options)
        else:
            self._launches[name] = partial(launch, *arguments, **options)

    def _sums(self, index: int, role: str) -> Tensor | None:
        """Where the launch that adds the output of ``role`` stores sums of squares, for readers that norm their input."""
        return None

    @abstractmethod
    def _linear(self, index: int, role: str, value: Input) -> Tensor:
        """The projections of (T, K), side by side: (T, N)."""

    def _activate(self, block: Block[AnyLinear], x: Input) -> Input:
        if self.normed is None:  # gate and up's launch has computed it
            return x
        return Input(launch_activate(tensor_of(x), self.config.activation, self._mask(block, "down"), pdl=self.pdl))

    def _mask(self, block: Block[AnyLinear], role: str) -> Mask | None:
        """The mask of a linear that the launch before it applies; None: none."""
        return None

    @property
    def _overlaps(self) -> bool:
        """``pdl`` where readers norm their input themselves."""
        return self.pdl and self.normed is None

    @abstractmethod
    def _attend(self, index: int, qkv: Tensor) -> Input:
        """Attention of the rows, (T, heads * head_dim)."""

    def _attend_rows(
        self, index: int, qkv: Tensor, out: KVSplits, *, stored: bool, stages: int = 3, pdl: bool = False
    ) -> Input:
        """Attention of rows of any slots; ``stored``: they may be consecutive positions of one slot."""
        (rotary, shape, norms), cache, rows = self._parts[index], self._cache[index], self._inputs
        if stored:
            self._launch("store", launch_store_rows, qkv, cache, rows, rotary, shape, norms, pdl=pdl)
        sinks = self.weights.blocks[index].sinks
        options: dict[str, Any] = {"scale": self.config.attention_scale, "sinks": sinks, "stages": stages}
        options |= {"norms": norms, "stored": stored, "pdl": pdl}
        self._launch("attention", launch_attention, qkv, cache, rows, rotary, out, shape, **options)
        return Input(None, attention=out)

    @abstractmethod
    def _splits(self, width: int) -> KVSplits:
        """Where an attention whose values have ``width`` elements stores its results."""

    def _memory(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """What launches of this name write."""
        return self.hidden.new_empty(shape, dtype=dtype)

    def _latent_shape(self, index: int) -> LatentShape:
        latent = self.config.latent
        assert latent is not None
        sizes = latent.query_rank, latent.rank, latent.rotary_dim, latent.key_dim, latent.value_dim
        return LatentShape(self.config.num_heads, *sizes, latent.rotary_dim + latent.rank)

    def _latent_norms(self, index: int, projected: Tensor) -> Tensor:
        """The queries' normed latent; stores the rows' keys."""
        block, rotary, shape = self.weights.blocks[index], self._parts[index].rotary, self._latent_shape(index)
        assert block.latent is not None
        norm, query_norm = block.latent.norm, block.query_norm
        out = self._memory("query", len(projected), shape.query_rank)
        factors = query_norm and query_norm.factors, norm.factors
        parts = projected, *factors, rotary, self._cache[index], self._inputs, out, shape
        self._launch("latent norms", launch_latent_norms, *parts, eps=norm.eps, pdl=self._overlaps)
        return out

    def _latent_queries(self, index: int, queries: Tensor, *, stored: bool) -> Tensor:
        block, shape = self.weights.blocks[index], self._latent_shape(index)
        assert block.latent is not None
        if not stored:  # the queries have no latent, and are part of the projections' output
            self._latent_norms(index, queries)
        out = self._memory("latent queries", len(queries), shape.heads, shape.d)
        parts = queries, block.latent.kv_b, self._parts[index].rotary, self._inputs, out, shape
        self._launch("latent queries", launch_latent_queries, *parts, pdl=self._overlaps)
        return out

    def _latent_attention(self, index: int, queries: Tensor) -> Input:
        shape, scale = self._latent_shape(index), self.config.attention_scale
        out = self._splits(shape.rank)
        parts = queries, self._cache[index], self._inputs, out, shape, scale
        self._launch("attention", launch_latent_attention, *parts, pdl=self._overlaps)
        return Input(None, attention=out)

    def _latent_values(self, index: int, attended: Input) -> Tensor:
        latent, shape = self.weights.blocks[index].latent, self._latent_shape(index)
        assert latent is not None
        assert attended.attention is not None
        out = self._memory("latent values", len(attended.attention.x), shape.heads * shape.value_dim)
        parts = attended.attention, latent.kv_b, out, shape
        self._launch("latent values", launch_latent_values, *parts, pdl=self._overlaps)
        return out

    def _delta_net(self, index: int, projected: Tensor, x: Input) -> Tensor:
        raise NotImplementedError

    def _mamba2(self, index: int, projected: Tensor) -> Tensor:
        raise NotImplementedError

    def _short_conv(self, index: int, projected: Tensor) -> Tensor:
        conv, out = self.weights.blocks[index].conv, projected.new_empty(len(projected), self.config.hidden_size)
        assert conv is not None
        arguments = projected, conv.kernel, conv.bias, self._kept[index], self._inputs, out
        self._launch("short_conv", launch_short_conv, *arguments, prompt=self._reads_prompts, pdl=self._overlaps)
        return out

    def _route(self, index: int, x: Input) -> Any:
        return choose_experts(tensor_of(x), router_of(self.weights.blocks[index]))

    def _experts(self, index: int, x: Input, routing: Any) -> Tensor:
        n = tensor_of(x)
        return run_experts(self.config, self.weights.blocks[index], n, routing, len(n))

    def _add(
        self,
        index: int,
        role: str,
        y: Input,
        parallel: ParallelExperts | None,
        multiplier: float,
        later: Sequence[ops.Op],
    ) -> None:
        """Add y, the output of ``role``, to the residual stream; ``later``: the operations after the Add."""
        block = self.weights.blocks[index]
        scaled = bool(later) and isinstance(later[0], ops.Scale)
        norm = None if self.normed is None else self._next_norm(index, later[scaled:])
        self._launch(
            f"{role} add", launch_residual_add, y.x, self.hidden, self._sums(index, role), parallel=parallel, norm=y.norm,
            scalar=block.scalar if scaled else None, next_norm=None if norm is None else norm.factors,
            normed=self.normed, eps=self.config.rms_norm_eps, norm_eps=self.config.output_eps, multiplier=multiplier,
            pdl=self.pdl,
        )  # fmt: skip

    def _next_norm(self, index: int, later: Sequence[ops.Op]) -> Norm | None:
        """The norm that the next reader of the residual stream applies."""
        blocks = self.weights.blocks
        if not later and index + 1 == len(blocks):
            return self._last_norm
        block, op = (blocks[index], later[0]) if later else (blocks[index + 1], blocks[index + 1].ops[0])
        return getattr(block, op.weight) if isinstance(op, ops.Norm) else None
