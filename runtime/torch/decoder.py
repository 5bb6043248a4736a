"""The decoder in plain PyTorch: the one to read, and the one the faster ones must agree with.

    block:  x = x + out_norm(o(attention(q(n), k(n), v(n))))        n = in_norm(x)
            x = x + out_norm(down(activation(gate(m)) * up(m)))     m = in_norm(x)

Which norms there are, and everything else in which families differ, is data (``formats.model.architectures``). Every
projection q … down drops the channels its mask drops (``kernels.reference``), on the sparse positions. It multiplies
by the whole weight all the same, so it is right, not fast. Slots are decoded one after the other: a sequence then meets
the same matrix shapes, and so gives the same bits, alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.errors import ContextLengthError, UsageError
from wisparse.formats.model import model_config
from wisparse.formats.model.model_config import ModelConfig
from wisparse.kernels.reference import keep_mask, soft_cap

from ..decoding.cache import KVCache, prefix_grain
from ..decoding.decoder import Decoder, check_part, check_prompt, next_piece
from ..decoding.rotary import Rotary, query_scales, rotate
from .delta_net import DeltaWeights, read_delta_weights

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask

__all__ = [
    "Block",
    "MaskedLinear",
    "Norm",
    "TorchDecoder",
    "activate",
    "add_half",
    "capped_attention",
    "embed",
    "finish_logits",
    "place",
    "read_block",
    "read_norm",
    "rms_norm",
    "split_gate",
]

# Prompts are read in pieces: bounds the activations and the (piece, T) attention mask of a long prompt, and the time
# that other sequences wait for theirs. What a chat's turns share is read again up to a piece.
PIECE = 128


class MaskedLinear:
    """One linear layer with its mask, if it has one; a subclass knows how its weight is stored.

    Attributes:
        channel_scale: (K,) float32, or None for a dense projection.
        threshold: keep a channel if ``|x| * channel_scale`` is at least this.
        output_bias: (N,) float32, added where the mask is in force; None for nothing.
        kept: () int64 while kept channels are counted, else None.
    """

    def __init__(self, name: str, in_features: int, out_features: int, device: torch.device) -> None:
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self._device = device
        self.kept: Tensor | None = None
        self.set_mask(None)

    def set_mask(self, mask: ProjectionMask | None) -> None:
        """Put a mask in force; None or one of sparsity 0: the projection is dense."""
        sparse = mask is not None and mask.sparsity > 0
        self.channel_scale = mask.channel_scale.contiguous().to(self._device) if mask is not None and sparse else None
        self.threshold = mask.threshold if mask is not None and sparse else 0.0
        added = mask.output_bias if mask is not None and sparse else None
        self.output_bias = None if added is None else added.to(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x (T, K) to (T, N), the weight's bias included, if it has one."""
        raise NotImplementedError

    def __call__(self, x: Tensor, first_sparse: int) -> Tensor:
        """Apply it to x (T, K); rows from ``first_sparse`` on are masked."""
        if self.channel_scale is None or first_sparse >= len(x):
            return self.product(x)
        tail = x[first_sparse:]
        keep = keep_mask(tail, self.channel_scale, self.threshold)
        if self.kept is not None:
            self.kept += keep.sum()
        y = self.product(torch.cat((x[:first_sparse], torch.where(keep, tail, tail.new_zeros(())))))
        if self.output_bias is not None:
            y[first_sparse:] += self.output_bias
        return y


class _Projection(MaskedLinear):
    def __init__(self, bundle: Bundle, name: str, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = bundle.checkpoint.tensor(f"{name}.weight", device).to(dtype)
        self.bias = bundle.checkpoint.tensor(f"{name}.bias", device).to(dtype) if bias else None
        out_features, in_features = self.weight.shape
        super().__init__(name, in_features, out_features, device)
        self.set_mask(bundle.masks.get(name))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last axis, by a weight or by 1 + weight."""

    weight: Tensor
    eps: float
    offset: bool

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


@dataclass(frozen=True)
class Block:
    """One transformer block's weights; the projections are whatever maps x (T, K) and a first sparse row to (T, N).

    A norm that the architecture does not have is None, and so is ``scalar`` (1,), what the block's output is multiplied
    by. A recurrent block has ``delta``; its ``qkv`` are the products of
    the DeltaNet's input (queries, keys and values; then the gate), its ``o`` that of its output.
    """

    facts: model_config.Block
    attention_input: Norm | None
    attention_output: Norm | None
    mlp_input: Norm | None
    mlp_output: Norm | None
    qkv: list[MaskedLinear]
    o: MaskedLinear
    gate_up: list[MaskedLinear]
    down: MaskedLinear
    q_norm: Norm | None
    k_norm: Norm | None
    delta: DeltaWeights | None = None
    scalar: Tensor | None = None

    @property
    def projections(self) -> list[MaskedLinear]:
        return [*self.qkv, self.o, *self.gate_up, self.down]


class Placed(Protocol):
    """What :func:`place` needs of a block."""

    @property
    def facts(self) -> model_config.Block: ...

    @property
    def q_norm(self) -> Norm | None: ...

    @property
    def k_norm(self) -> Norm | None: ...


class TorchDecoder(Decoder):
    """See :class:`runtime.decoding.decoder.Decoder`; any device, any floating dtype."""

    name: ClassVar[str] = "torch"
    weight_types: ClassVar[tuple[str, ...]] = ("native",)
    piece = PIECE

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_seq_len: int,
        max_batch: int = 1,
        weights: str = "native",
    ) -> None:
        self.config: ModelConfig = bundle.config
        self.device, self.dtype = device, dtype
        self.max_batch, self.max_seq_len = max_batch, max_seq_len
        self._embedding = bundle.checkpoint.tensor("model.embed_tokens.weight", device).to(dtype)
        self._blocks = [
            read_block(bundle, index, device, dtype, lambda p: _Projection(bundle, p.name, p.bias, device, dtype))
            for index in range(self.config.num_blocks)
        ]
        self._norm = read_norm(bundle, "model.norm", device, dtype)
        tied = self.config.tie_word_embeddings
        self._head = self._embedding if tied else bundle.checkpoint.tensor("lm_head.weight", device).to(dtype)
        self._rotaries = [Rotary(rope, device, dtype) for rope in self.config.rotaries]
        self._cache = KVCache(self.config, max_batch, max_seq_len, device, dtype)
        self.grain = prefix_grain(self.config, PIECE, max_seq_len)
        self._sparse_positions = 0

    @classmethod
    def refusal(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, weights: str) -> str | None:
        return None if weights in cls.weight_types else f"it has no {weights} weights"

    def bytes_read(self) -> tuple[int, int]:
        inside = sum(projection.nbytes for block in self._blocks for projection in block.projections)
        return inside, self._head.nbytes

    @property
    def lengths(self) -> list[int]:
        return list(self._cache.lengths)

    @torch.inference_mode()
    def prefill(
        self, slot: int, token_ids: Tensor, sparse_from: int, *, start: int = 0, stop: int | None = None
    ) -> Tensor:
        stop = check_part(token_ids, self.max_seq_len, start, stop)
        self._cache.begin(slot, start)
        for hidden in self._read(self._cache, slot, token_ids, sparse_from, start, stop):
            last = hidden[-1:]
        self._cache.lengths[slot] = stop
        return self._logits(last)[0]

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        lengths = self._cache.lengths
        tokens = token_ids.tolist()
        rows = []
        for slot, token in enumerate(tokens):
            if token >= 0 and lengths[slot] >= self.max_seq_len:
                raise ContextLengthError(f"slot {slot} is full: it holds {self.max_seq_len} positions")
        for slot, token in enumerate(tokens):
            if token < 0:
                rows.append(torch.zeros(1, self.config.vocab_size, device=self.device))
                continue
            one = torch.tensor([token], device=self.device)
            hidden = self._forward(self._cache, slot, one, start=lengths[slot], total=lengths[slot] + 1, first_sparse=0)
            lengths[slot] += 1
            rows.append(self._logits(hidden))
        return torch.cat(rows)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        self._cache.copy(source, target, length)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        total = len(token_ids)
        check_prompt(total, self.max_seq_len)
        scratch = KVCache(self.config, 1, total, self.device, self.dtype)
        result = torch.empty(total, self.config.vocab_size, device=self.device)
        start = 0
        for hidden in self._read(scratch, 0, token_ids, sparse_from, 0, total):
            result[start : start + len(hidden)] = self._logits(hidden)
            start += len(hidden)
        return result

    def set_masks(self, masks: Mapping[str, ProjectionMask]) -> None:
        self.measure_sparsity(False)
        self._cache.forget()
        for block in self._blocks:
            for projection in block.projections:
                projection.set_mask(masks[projection.name])

    def measure_sparsity(self, enabled: bool) -> None:
        self._sparse_positions = 0
        for block in self._blocks:
            for projection in block.projections:
                projection.kept = torch.zeros((), dtype=torch.int64, device=self.device) if enabled else None

    def realised_sparsity(self) -> float | None:
        positions = self._sparse_positions
        dropped = total = 0
        for block in self._blocks:
            for projection in block.projections:
                if projection.kept is None or not positions:
                    return None
                outputs, channels = projection.out_features, projection.in_features
                total += outputs * channels * positions
                if projection.channel_scale is not None:
                    dropped += outputs * (channels * positions - int(projection.kept))
        return dropped / total

    def close(self) -> None:
        for name in ("_embedding", "_blocks", "_norm", "_head", "_cache"):
            self.__dict__.pop(name, None)

    def _read(self, cache: KVCache, slot: int, token_ids: Tensor, sparse_from: int, start: int, stop: int):
        """Run positions of a sequence through the blocks; yields their hidden states piece by piece, (piece, H)."""
        total = len(token_ids)
        if not 0 <= sparse_from <= total:
            raise UsageError(f"sparse_from: expected 0 to {total}, found {sparse_from}")
        while start < stop:
            piece = token_ids[start : min(next_piece(start, self.piece), stop)].to(self.device)
            first_sparse = min(max(sparse_from - start, 0), len(piece))
            yield self._forward(cache, slot, piece, start=start, total=total, first_sparse=first_sparse)
            start += len(piece)

    def _forward(
        self, cache: KVCache, slot: int, token_ids: Tensor, *, start: int, total: int, first_sparse: int
    ) -> Tensor:
        """Positions ``start``.. of a sequence of ``total``: (T,) ids to (T, H) hidden states, filling the cache."""
        config = self.config
        count = len(token_ids)
        self._sparse_positions += count - first_sparse
        tables = [rotary.tables(start, start + count, total) for rotary in self._rotaries]
        scales = query_scales(config, start, start + count, self.device)
        x = embed(config, self._embedding, token_ids)
        for index, block in enumerate(self._blocks):
            n = _maybe(block.attention_input, x)
            if block.delta is not None:
                mixed, gate = (projection(n, first_sparse) for projection in block.qkv)
                attended = block.delta(n, mixed, gate, cache.moving(index, slot, start, start + count))
            else:
                own = block.facts
                q_size, gate = config.num_heads * own.head_dim, None
                if own.shared_values:
                    q, k = (projection(n, first_sparse) for projection in block.qkv)
                    parts = [q, k, k]
                else:
                    parts = _fan_out(block.qkv, n, first_sparse, (q_size, own.kv_size, own.kv_size))
                if config.architecture.attention_gate:
                    parts[0], gate = split_gate(config, parts[0])
                q, k, v = place(config, block, parts, tables, scales)
                keys, values = cache.write(index, slot, start, k, v)
                attended = _attention(config, q, keys, values, start, block.facts.window)
                attended = attended.transpose(0, 1).reshape(count, q_size)
                attended = attended if gate is None else attended * gate.sigmoid()
            half = block.o(attended, first_sparse)
            x = add_half(config, x, half, block.attention_output)
            m = _maybe(block.mlp_input, x)
            gate, up = _fan_out(block.gate_up, m, first_sparse, (config.intermediate_size,) * 2)
            half = block.down(activate(config, gate) * up, first_sparse)
            x = add_half(config, x, half, block.mlp_output)
            x = x if block.scalar is None else x * block.scalar
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        """(T, H) to (T, V) float32."""
        return finish_logits(self.config, functional.linear(self._norm(hidden), self._head).float())


def read_norm(bundle: Bundle, name: str, device: torch.device, dtype: torch.dtype) -> Norm:
    """A norm of the checkpoint under its module's name."""
    config = bundle.config
    weight = bundle.checkpoint.tensor(f"{name}.weight", device).to(dtype)
    return Norm(weight, config.rms_norm_eps, config.architecture.norm_offset)


def read_block(
    bundle: Bundle,
    index: int,
    device: torch.device,
    dtype: torch.dtype,
    read_projection: Callable[[model_config.Projection], MaskedLinear],
) -> Block:
    """Read one block's weights; projections come in the order of execution."""
    arch = bundle.config.architecture
    prefix = f"model.layers.{index}."
    by_role = {p.role: read_projection(p) for p in bundle.config.projections(index)}

    def norm(name: str | None) -> Norm | None:
        return None if name is None else read_norm(bundle, prefix + name, device, dtype)

    recurrent = bundle.config.blocks[index].recurrent
    q_norm, k_norm = (None, None) if arch.qk_norm is None or recurrent else arch.qk_norm.names
    return Block(
        facts=bundle.config.blocks[index],
        attention_input=norm(arch.norms.attention_input),
        attention_output=norm(arch.norms.attention_output),
        mlp_input=norm(arch.norms.mlp_input),
        mlp_output=norm(arch.norms.mlp_output),
        qkv=[by_role[role] for role in (("in_proj_qkv", "in_proj_z") if recurrent else bundle.config.qkv(index))],
        o=by_role["out_proj" if recurrent else "o_proj"],
        gate_up=[by_role[role] for role in arch.gate_up],
        down=by_role["down_proj"],
        q_norm=norm(q_norm and f"self_attn.{q_norm}"),
        k_norm=norm(k_norm and f"self_attn.{k_norm}"),
        delta=read_delta_weights(bundle.config, index, lambda name: bundle.checkpoint.tensor(name, device).to(dtype)),
        scalar=None
        if arch.block_scalar is None
        else bundle.checkpoint.tensor(prefix + arch.block_scalar, device).to(dtype),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    """x / rms(x) * weight over the last axis; the mean in float32, the product in x's type, as transformers has it.

    With ``offset`` it is x / rms(x) * (1 + weight), all in float32 (Gemma's). In float64, which is there to compare
    with, everything is float64.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return weight * normed.to(x.dtype)


def embed(config: ModelConfig, embedding: Tensor, token_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(T,) ids to (T, H) in ``dtype`` (None: the embedding's); the multiplier is rounded to that type first, as Gemma's
    is in transformers."""
    x = functional.embedding(token_ids, embedding).to(dtype or embedding.dtype)
    if config.embedding_multiplier == 1.0:
        return x
    return x * torch.tensor(config.embedding_multiplier, dtype=x.dtype, device=x.device)


def place(
    config: ModelConfig,
    block: Placed,
    parts: Sequence[Tensor],
    tables: Sequence[tuple[Tensor, Tensor]],
    scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as attention takes them: normalised, and turned to their positions.

    Args:
        parts: the projections' outputs, (T, num_heads * head_dim) and twice (T, num_kv_heads * head_dim).
        tables: cosines and sines of every rotary embedding, from ``Rotary.tables``.
        scales: (T,) what queries are multiplied by, from ``query_scales``; None for 1.

    Returns:
        (num_heads, T, head_dim) and twice (num_kv_heads, T, head_dim).
    """
    norm = config.architecture.qk_norm
    q, k, v = parts
    if norm is not None and not norm.per_head:
        q, k = _maybe(block.q_norm, q), _maybe(block.k_norm, k)
    q, k, v = (part.view(len(part), -1, block.facts.head_dim).transpose(0, 1) for part in (q, k, v))
    if config.architecture.value_norm:
        v = rms_norm(v, v.new_ones(()), config.rms_norm_eps)
    if norm is not None and norm.per_head and not norm.after_rotary:
        q, k = _maybe(block.q_norm, q), _maybe(block.k_norm, k)
    if block.facts.rotary is not None:
        (cos, sin), rope = tables[block.facts.rotary], config.rotaries[block.facts.rotary]
        q, k = (rotate(x, cos, sin, interleaved=rope.interleaved) for x in (q, k))
    if norm is not None and norm.per_head and norm.after_rotary:
        q, k = _maybe(block.q_norm, q), _maybe(block.k_norm, k)
    if scales is not None:
        q = q * scales[:, None].to(q.dtype)
    return q, k, v


def activate(config: ModelConfig, gate: Tensor) -> Tensor:
    """The MLP's activation of its gate."""
    return functional.silu(gate) if config.activation == "silu" else functional.gelu(gate, approximate="tanh")


def add_half(config: ModelConfig, x: Tensor, half: Tensor, norm: Norm | None) -> Tensor:
    """x and the output of attention or MLP, normalised and multiplied where the architecture says so."""
    half = _maybe(norm, half)
    return x + (half if config.residual_multiplier == 1.0 else half * config.residual_multiplier)


def finish_logits(config: ModelConfig, logits: Tensor) -> Tensor:
    """The head's products (…, V) float32 to logits: multiplied and capped where the architecture says so."""
    if config.logits_multiplier != 1.0:
        logits = logits * config.logits_multiplier
    return soft_cap(logits, config.logits_softcap)


def split_gate(config: ModelConfig, fused: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's query and then its gate, (T, 2 * q_size), to queries and gates, (T, q_size) each."""
    query, gate = fused.view(len(fused), config.num_heads, 2 * config.head_dim).chunk(2, dim=-1)
    return query.reshape(len(fused), config.q_size), gate.reshape(len(fused), config.q_size)


def _maybe(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _fan_out(projections: Sequence[MaskedLinear], x: Tensor, first_sparse: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """Apply the projections that share an input; a fused one's output is split into the parts it stands for."""
    outputs = [projection(x, first_sparse) for projection in projections]
    return outputs if len(outputs) == len(sizes) else list(outputs[0].split(sizes, dim=-1))


def _attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Causal attention of the positions from ``start`` on, over at most ``window`` positions each, itself included.

    Args:
        q: (num_heads, T, head_dim).
        keys, values: (num_kv_heads, start + T, head_dim).

    Returns:
        (num_heads, T, head_dim).
    """
    count, stop = q.shape[1], keys.shape[1]
    first = 0 if window is None else max(start - window + 1, 0)  # nobody here looks further back
    keys, values = keys[:, first:], values[:, first:]
    mask = None
    if count > 1:
        ahead = torch.arange(first, stop, device=q.device) - torch.arange(start, stop, device=q.device)[:, None]
        mask = ahead <= 0
        if window is not None:
            mask &= ahead > -window
    if config.attention_softcap is not None:
        return capped_attention(config, q, keys, values, mask)
    return functional.scaled_dot_product_attention(
        q[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=config.attention_scale,
        enable_gqa=q.shape[0] != keys.shape[0],
    )[0]


def capped_attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention whose scores are capped before the softmax, which torch's own has no place for.

    Args:
        q: (num_heads, T, head_dim).
        keys, values: (num_kv_heads, context, head_dim).
        mask: (T, context), True where a position is seen; None for all.

    Returns:
        (num_heads, T, head_dim).
    """
    keys, values = (x.repeat_interleave(q.shape[0] // len(x), dim=0) for x in (keys, values))
    scores = soft_cap(q @ keys.transpose(1, 2) * config.attention_scale, config.attention_softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return scores.softmax(dim=-1, dtype=wide).to(q.dtype) @ values
