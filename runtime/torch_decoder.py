"""The decoder in plain PyTorch: the one to read, and the one the faster ones must agree with.

    block:  x = x + o(attention(rotate(q(n), k(n)), v(n)))      n = RMSNorm(x)
            x = x + down(SiLU(gate(m)) * up(m))                 m = RMSNorm(x)

Every projection q … down drops the channels its mask drops (``kernels.reference``), on the sparse positions. It
multiplies by the whole weight all the same, so it is right, not fast. Slots are decoded one after the other: a
sequence then meets the same matrix shapes, and so gives the same bits, alone and in a batch.

Two baselines ask for more than a mask on a projection's input, and only this decoder gives it to them:

    rsparse:  y = W x_kept + left (right x_dropped)         low-rank factors of W beside the mask
    cats:     SiLU(gate(m)) * up(m) kept where |SiLU(gate(m))| >= the block's gate_threshold
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.architectures import ModelConfig
from wisparse.formats.errors import ContextLengthError, UsageError
from wisparse.kernels.reference import keep_mask

from .cache import KVCache
from .decoder import Decoder, check_prompt
from .rotary import Rotary, rotate

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle

__all__ = ["Block", "MaskedLinear", "TorchDecoder", "rms_norm"]

# Prompts are read in pieces: bounds the activations and the (piece, T) attention mask of a long prompt.
_PIECE = 512


class _Projection:
    """One linear layer with its mask, if it has one."""

    def __init__(self, bundle: Bundle, name: str, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = bundle.checkpoint.tensor(f"{name}.weight", device).to(dtype)
        self.out_features, self.in_features = self.weight.shape
        self.bias = bundle.checkpoint.tensor(f"{name}.bias", device).to(dtype) if bias else None
        mask = bundle.masks.get(name)
        self.low_rank: tuple[Tensor, Tensor] | None = None
        if mask is not None and mask.sparsity > 0:
            self.channel_scale: Tensor | None = mask.channel_scale.to(device)
            self.threshold = mask.threshold
            if mask.low_rank is not None:
                left, right = mask.low_rank
                self.low_rank = left.to(device, dtype), right.to(device, dtype)
        else:
            self.channel_scale = None
        self.kept: Tensor | None = None  # () int64 while channels are counted

    def __call__(self, x: Tensor, first_sparse: int) -> Tensor:
        """Apply it to x (T, K); rows from ``first_sparse`` on are masked."""
        if self.channel_scale is not None and first_sparse < len(x):
            tail = x[first_sparse:]
            keep = keep_mask(tail, self.channel_scale, self.threshold)
            if self.kept is not None:
                self.kept += keep.sum()
            x = torch.cat((x[:first_sparse], torch.where(keep, tail, tail.new_zeros(()))))
            if self.low_rank is not None:
                y = functional.linear(x, self.weight, self.bias)
                left, right = self.low_rank
                dropped = torch.where(keep, tail.new_zeros(()), tail)
                y[first_sparse:] += functional.linear(functional.linear(dropped, right), left)
                return y
        return functional.linear(x, self.weight, self.bias)


class _GateMask:
    """Keeps the MLP's channels whose activated gate is large; the others are needed neither of up nor by down."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.kept: Tensor | None = None

    def __call__(self, activated: Tensor, product: Tensor, first_sparse: int) -> Tensor:
        """Both (T, intermediate_size); rows of ``product`` from ``first_sparse`` on are masked."""
        keep = keep_mask(activated[first_sparse:], activated.new_ones((), dtype=torch.float32), self.threshold)
        if self.kept is not None:
            self.kept += keep.sum()
        tail = torch.where(keep, product[first_sparse:], product.new_zeros(()))
        return torch.cat((product[:first_sparse], tail))


class MaskedLinear(Protocol):
    """What a block needs of a projection, however its weight is stored.

    Attributes:
        channel_scale: (K,) float32, or None for a dense projection.
        kept: () int64 while kept channels are counted, else None.
    """

    in_features: int
    out_features: int
    channel_scale: Tensor | None
    kept: Tensor | None

    def __call__(self, x: Tensor, first_sparse: int) -> Tensor:
        """x (T, K) to (T, N); rows from ``first_sparse`` on are masked."""
        ...


@dataclass(frozen=True)
class Block:
    """One transformer block's weights; the projections are whatever maps x (T, K) and a first sparse row to (T, N)."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: list[MaskedLinear]
    o: MaskedLinear
    gate_up: list[MaskedLinear]
    down: MaskedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None
    gate: _GateMask | None = None

    @property
    def projections(self) -> list[MaskedLinear]:
        return [*self.qkv, self.o, *self.gate_up, self.down]


class TorchDecoder(Decoder):
    """See :class:`runtime.decoder.Decoder`; any device, any floating dtype."""

    name: ClassVar[str] = "torch"

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
        self._blocks = [_read_block(bundle, index, device, dtype) for index in range(self.config.num_blocks)]
        self._norm = bundle.checkpoint.tensor("model.norm.weight", device).to(dtype)
        tied = self.config.tie_word_embeddings
        self._head = self._embedding if tied else bundle.checkpoint.tensor("lm_head.weight", device).to(dtype)
        self._rotary = Rotary(self.config, device, dtype)
        self._cache = KVCache(self.config, max_batch, max_seq_len, device, dtype)
        self._sparse_positions = 0
        paths = [mask.low_rank for mask in bundle.masks.values() if mask.low_rank is not None and mask.sparsity > 0]
        self._low_rank_size = sum(factor.numel() for path in paths for factor in path)

    @classmethod
    def refusal(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, weights: str) -> str | None:
        return None if weights == "native" else f"it has no {weights} weights"

    @property
    def lengths(self) -> list[int]:
        return list(self._cache.lengths)

    @torch.inference_mode()
    def prefill(self, slot: int, token_ids: Tensor, sparse_from: int) -> Tensor:
        check_prompt(len(token_ids), self.max_seq_len)
        self._cache.lengths[slot] = 0
        for hidden in self._read(self._cache, slot, token_ids, sparse_from):
            last = hidden[-1:]
        self._cache.lengths[slot] = len(token_ids)
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
                lengths[slot] = 0
                rows.append(torch.zeros(1, self.config.vocab_size, device=self.device))
                continue
            one = torch.tensor([token], device=self.device)
            hidden = self._forward(self._cache, slot, one, start=lengths[slot], total=lengths[slot] + 1, first_sparse=0)
            lengths[slot] += 1
            rows.append(self._logits(hidden))
        return torch.cat(rows)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, sparse_from: int) -> Tensor:
        total = len(token_ids)
        check_prompt(total, self.max_seq_len)
        scratch = KVCache(self.config, 1, total, self.device, self.dtype)
        result = torch.empty(total, self.config.vocab_size, device=self.device)
        start = 0
        for hidden in self._read(scratch, 0, token_ids, sparse_from):
            result[start : start + len(hidden)] = self._logits(hidden)
            start += len(hidden)
        return result

    def measure_sparsity(self, enabled: bool) -> None:
        self._sparse_positions = 0
        for block in self._blocks:
            counters: list[MaskedLinear | _GateMask] = [*block.projections]
            for counter in (*counters, block.gate) if block.gate else counters:
                counter.kept = torch.zeros((), dtype=torch.int64, device=self.device) if enabled else None

    def realised_sparsity(self) -> float | None:
        positions = self._sparse_positions
        dropped, total = -self._low_rank_size * positions, 0
        for block in self._blocks:
            for projection in block.projections:
                if projection.kept is None or not positions:
                    return None
                outputs, channels = projection.out_features, projection.in_features
                total += outputs * channels * positions
                if projection.channel_scale is not None:
                    dropped += outputs * (channels * positions - int(projection.kept))
            if block.gate is not None and block.gate.kept is not None:
                # A channel that the gate drops is an output of up and an input of down.
                outside = self.config.intermediate_size * positions - int(block.gate.kept)
                dropped += 2 * self.config.hidden_size * outside
        return dropped / total

    def close(self) -> None:
        for name in ("_embedding", "_blocks", "_norm", "_head", "_cache"):
            self.__dict__.pop(name, None)

    def _read(self, cache: KVCache, slot: int, token_ids: Tensor, sparse_from: int):
        """Run a whole sequence through the blocks; yields its hidden states piece by piece, (piece, H)."""
        total = len(token_ids)
        if not 0 <= sparse_from <= total:
            raise UsageError(f"sparse_from: expected 0 to {total}, found {sparse_from}")
        for start in range(0, total, _PIECE):
            piece = token_ids[start : start + _PIECE].to(self.device)
            first_sparse = min(max(sparse_from - start, 0), len(piece))
            yield self._forward(cache, slot, piece, start=start, total=total, first_sparse=first_sparse)

    def _forward(
        self, cache: KVCache, slot: int, token_ids: Tensor, *, start: int, total: int, first_sparse: int
    ) -> Tensor:
        """Positions ``start``.. of a sequence of ``total``: (T,) ids to (T, H) hidden states, filling the cache."""
        config = self.config
        count = len(token_ids)
        self._sparse_positions += count - first_sparse
        cos, sin = self._rotary.tables(start, start + count, total)
        x = functional.embedding(token_ids, self._embedding)
        for index, block in enumerate(self._blocks):
            n = rms_norm(x, block.attention_norm, config.rms_norm_eps)
            q, k, v = (
                part.view(count, -1, config.head_dim).transpose(0, 1)
                for part in _fan_out(block.qkv, n, first_sparse, (config.q_size, config.kv_size, config.kv_size))
            )
            if block.q_norm is not None and block.k_norm is not None:
                q = rms_norm(q, block.q_norm, config.rms_norm_eps)
                k = rms_norm(k, block.k_norm, config.rms_norm_eps)
            keys, values = cache.write(index, slot, start, rotate(k, cos, sin), v)
            attended = _attention(rotate(q, cos, sin), keys, values, start, block.window)
            x = x + block.o(attended.transpose(0, 1).reshape(count, config.q_size), first_sparse)
            m = rms_norm(x, block.mlp_norm, config.rms_norm_eps)
            gate, up = _fan_out(block.gate_up, m, first_sparse, (config.intermediate_size,) * 2)
            activated = functional.silu(gate)
            product = activated * up
            if block.gate is not None and first_sparse < count:
                product = block.gate(activated, product, first_sparse)
            x = x + block.down(product, first_sparse)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        """(T, H) to (T, V) float32."""
        return functional.linear(rms_norm(hidden, self._norm, self.config.rms_norm_eps), self._head).float()


def _read_block(bundle: Bundle, index: int, device: torch.device, dtype: torch.dtype) -> Block:
    """Read one block's weights; projections come in the order of execution."""
    arch = bundle.config.architecture
    prefix = f"model.layers.{index}."
    by_role = {p.role: _Projection(bundle, p.name, p.bias, device, dtype) for p in bundle.config.projections(index)}

    down = bundle.masks.get(f"{prefix}mlp.down_proj")

    def norm(name: str) -> Tensor:
        return bundle.checkpoint.tensor(f"{prefix}{name}.weight", device).to(dtype)

    return Block(
        attention_norm=norm("input_layernorm"),
        mlp_norm=norm("post_attention_layernorm"),
        qkv=[by_role[role] for role in arch.qkv],
        o=by_role["o_proj"],
        gate_up=[by_role[role] for role in arch.gate_up],
        down=by_role["down_proj"],
        q_norm=norm("self_attn.q_norm") if arch.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if arch.qk_norm else None,
        window=bundle.config.sliding_windows[index],
        gate=None if down is None or down.gate_threshold is None else _GateMask(down.gate_threshold),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; the mean in float32, the product in x's type, as transformers has it.

    In float64, which is there to compare with, the mean is float64 too.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _fan_out(projections: Sequence[MaskedLinear], x: Tensor, first_sparse: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """Apply the projections that share an input; a fused one's output is split into the parts it stands for."""
    outputs = [projection(x, first_sparse) for projection in projections]
    return outputs if len(outputs) == len(sizes) else list(outputs[0].split(sizes, dim=-1))


def _attention(q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
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
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, enable_gqa=q.shape[0] != keys.shape[0]
    )[0]
