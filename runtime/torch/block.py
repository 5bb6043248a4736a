"""The block in plain PyTorch: what the decoders' prompts go through, and what every faster step must agree with.

    block:  x = x + out_norm(o(attention(q(n), k(n), v(n))))        n = in_norm(x)
            x = x + out_norm(down(activation(gate(m)) * up(m)))     m = in_norm(x)

Which norms there are, and everything else in which families differ, is data (``formats.model.architectures``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats import model_config
from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.reference import keep_mask, soft_cap

from ..decoding.cache import KVCache
from ..decoding.rotary import Rotary, query_scales, rotate
from .delta_net import DeltaWeights, read_delta_weights

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle, ProjectionMask


def drop_channels(x: Tensor, keep: Tensor) -> Tensor:
    """x (T, K) with its last rows' dropped channels at zero; ``keep``: (rows, K)."""
    dense, masked = x[: len(x) - len(keep)], x[len(x) - len(keep) :]
    return torch.cat((dense, torch.where(keep, masked, masked.new_zeros(()))))


class MaskedLinear:
    """One linear layer with its mask, if it has one; a subclass knows how its weight is stored.

    Attributes:
        channel_scale: (K,) float32, or None for a dense projection.
        threshold: keep a channel if ``|x| * channel_scale`` is at least this.
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
        keep = keep_mask(x[first_sparse:], self.channel_scale, self.threshold)
        if self.kept is not None:
            self.kept += keep.sum()
        return self.product(drop_channels(x, keep))


def attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
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
    mask = causal_mask(start, stop, first, window, q.device) if count > 1 else None
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


def causal_mask(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the positions ``first`` to ``stop`` - 1 those from ``start`` on see: (stop - start, stop - first)."""
    ahead = torch.arange(first, stop, device=device) - torch.arange(start, stop, device=device)[:, None]
    return ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)


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


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last axis, by a weight or by 1 + weight."""

    weight: Tensor
    eps: float
    offset: bool

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


N = TypeVar("N", bound=Norm)


@dataclass(frozen=True, kw_only=True)
class BlockFacts(Generic[N]):
    """All of a block but its products.

    A norm that the architecture does not have is None, and so is ``scalar`` (1,), what the block's output is multiplied
    by. A recurrent block has ``delta``.
    """

    facts: model_config.Block
    attention_input: N | None
    attention_output: N | None
    mlp_input: N | None
    mlp_output: N | None
    q_norm: N | None
    k_norm: N | None
    delta: DeltaWeights | None = None
    scalar: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Block(BlockFacts[Norm]):
    """One transformer block's weights; the projections are whatever maps x (T, K) and a first sparse row to (T, N).

    A recurrent block's ``qkv`` are the products of the DeltaNet's input (queries, keys and values; then the gate), its
    ``o`` that of its output.
    """

    qkv: list[MaskedLinear]
    o: MaskedLinear
    gate_up: list[MaskedLinear]
    down: MaskedLinear

    @property
    def projections(self) -> list[MaskedLinear]:
        return [*self.qkv, self.o, *self.gate_up, self.down]


@dataclass(frozen=True)
class Positions:
    """The positions that a piece of a sequence takes.

    Attributes:
        start: the first one, in ``slot`` of ``cache``.
        tables: cosines and sines of every rotary embedding there, from ``Rotary.tables``.
        scales: (T,) what queries are multiplied by, from ``query_scales``; None for 1.
    """

    cache: KVCache
    slot: int
    start: int
    tables: Sequence[tuple[Tensor, Tensor]]
    scales: Tensor | None

    @classmethod
    def of(
        cls, config: ModelConfig, rotaries: Sequence[Rotary], cache: KVCache, slot: int, places: range, total: int,
        device: torch.device,
    ) -> Positions:  # fmt: skip
        """``places`` of a sequence of ``total`` positions."""
        tables = [rotary.tables(places.start, places.stop, total) for rotary in rotaries]
        return cls(cache, slot, places.start, tables, query_scales(config, places.start, places.stop, device))


def run_block(
    config: ModelConfig,
    index: int,
    block: BlockFacts[Any],
    x: Tensor,
    at: Positions,
    apply: Callable[[str, Tensor], Sequence[Tensor]],
    attend: Callable[[ModelConfig, Tensor, Tensor, Tensor, int, int | None], Tensor] = attention,
) -> Tensor:
    """One block: x (T, H) to (T, H), filling the cache.

    Args:
        apply: applies the projections that read one input, ``qkv``, ``o``, ``gate_up`` or ``down``: (T, K) to the
            output of each, or to one that has them side by side.
        attend: as ``attention``, which it is if nothing else is given.
    """
    n = _maybe(block.attention_input, x)
    if block.delta is not None:
        mixed, gate = apply("qkv", n)
        attended = block.delta(n, mixed, gate, at.cache.moving(index, at.slot, at.start, at.start + len(x)))
    else:
        parts, gates = _split_heads(config, block.facts, apply("qkv", n))
        q, k, v = _place(config, block, parts, at.tables, at.scales)
        keys, values = at.cache.write(index, at.slot, at.start, k, v)
        attended = attend(config, q, keys, values, at.start, block.facts.window).transpose(0, 1).reshape(len(x), -1)
        attended = attended if gates is None else attended * gates.sigmoid()
    return finish_block(config, block, x, attended, apply)


def finish_block(
    config: ModelConfig,
    block: BlockFacts[Any],
    x: Tensor,
    attended: Tensor,
    apply: Callable[[str, Tensor], Sequence[Tensor]],
) -> Tensor:
    """The rest of a block, whose input is x, from what its attention gave, (T, heads * head_dim), to (T, H)."""
    (half,) = apply("o", attended)
    x = _add_half(config, x, half, block.attention_output)
    gate, up = _split(apply("gate_up", _maybe(block.mlp_input, x)), (config.intermediate_size,) * 2)
    (half,) = apply("down", _activate(config, gate) * up)
    x = _add_half(config, x, half, block.mlp_output)
    return x if block.scalar is None else x * block.scalar


def _split_heads(
    config: ModelConfig, facts: model_config.Block, outputs: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Tensor | None]:
    """What the projections of a block's attention give as queries, keys and values, and the queries' gates, if any."""
    q_size, gated = config.num_heads * facts.head_dim, config.architecture.attention_gate
    sizes = (q_size * (2 if gated else 1), *[facts.kv_size] * (1 if facts.shared_values else 2))
    q, k, *own = _split(outputs, sizes)
    gates = None
    if gated:  # each head's query, and then its gate
        q, gates = (
            half.reshape(-1, q_size) for half in q.view(len(q), config.num_heads, 2 * facts.head_dim).chunk(2, dim=-1)
        )
    return (q, k, own[0] if own else k), gates


def _split(outputs: Sequence[Tensor], sizes: tuple[int, ...]) -> Sequence[Tensor]:
    """The outputs of the projections that share an input; a fused one's as the parts it stands for."""
    return outputs if len(outputs) == len(sizes) else outputs[0].split(sizes, dim=-1)


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
    # A number, not a tensor: that would have to be copied, which no graph may capture.
    return x * float(torch.tensor(config.embedding_multiplier, dtype=x.dtype))


def _place(
    config: ModelConfig,
    block: BlockFacts[Any],
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


def _activate(config: ModelConfig, gate: Tensor) -> Tensor:
    """The MLP's activation of its gate."""
    return functional.silu(gate) if config.activation == "silu" else functional.gelu(gate, approximate="tanh")


def _add_half(config: ModelConfig, x: Tensor, half: Tensor, norm: Norm | None) -> Tensor:
    """x and the output of attention or MLP, normalised and multiplied where the architecture says so."""
    half = _maybe(norm, half)
    return x + (half if config.residual_multiplier == 1.0 else half * config.residual_multiplier)


def finish_logits(config: ModelConfig, logits: Tensor) -> Tensor:
    """The head's products (…, V) float32 to logits: multiplied and capped where the architecture says so."""
    if config.logits_multiplier != 1.0:
        logits = logits * config.logits_multiplier
    return soft_cap(logits, config.logits_softcap)


def _maybe(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
