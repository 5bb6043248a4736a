"""A whole sequence through the blocks on a GPU: dense on the tensor cores, or masked for evaluation.

The weights are the decoder's own, (K, N). Masked positions multiply by the whole weight all the same: prefill is bound
by arithmetic, and a prompt's positions keep different channels. With float32 weights activations and products are
float64, as in the decode step (``kernels.gpu.common``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.architectures import ModelConfig
from wisparse.kernels.gpu.gemv import Group
from wisparse.kernels.precision import activation_dtype
from wisparse.kernels.reference import keep_mask

from ..cache import KVCache
from ..rotary import Rotary, rotate
from .weights import CudaWeights

__all__ = ["read_sequence", "rms_norm", "run_blocks"]

# Prompts are read in pieces: bounds the activations of a long one.
_PIECE = 2048
# With a sliding window an explicit (piece, context) mask is needed; in float64 torch keeps the scores as well.
_SHORT_PIECE = 512

Observer = Callable[[Group, Tensor, int], None]


def read_sequence(
    weights: CudaWeights,
    config: ModelConfig,
    rotary: Rotary,
    cache: KVCache,
    slot: int,
    token_ids: Tensor,
    sparse_from: int,
    observe: Observer | None = None,
) -> Iterator[Tensor]:
    """Fill a slot of the cache from position 0; yields hidden states piece by piece, (piece, H).

    Args:
        token_ids: (T,) int64 on the weights' device.
        sparse_from: positions from here on are masked.
        observe: called with each group, its input (piece, K) and the first masked row, before the product.
    """
    total = len(token_ids)
    short = weights.embedding.dtype == torch.float32 or any(block.window is not None for block in weights.blocks)
    size = _SHORT_PIECE if short else _PIECE
    for start in range(0, total, size):
        piece = token_ids[start : start + size]
        first_sparse = min(max(sparse_from - start, 0), len(piece))
        yield run_blocks(weights, config, rotary, cache, slot, piece, start, total, first_sparse, observe)


def run_blocks(
    weights: CudaWeights,
    config: ModelConfig,
    rotary: Rotary,
    cache: KVCache,
    slot: int,
    token_ids: Tensor,
    start: int,
    total: int,
    first_sparse: int,
    observe: Observer | None = None,
) -> Tensor:
    """Positions ``start``.. of a sequence of ``total`` positions: (T,) ids to (T, H) hidden states, filling the
    cache."""
    count = len(token_ids)
    cos, sin = rotary.tables(start, start + count, total)
    x = functional.embedding(token_ids, weights.embedding).to(activation_dtype(weights.embedding.dtype))

    def apply(group: Group, n: Tensor) -> list[Tensor]:
        if observe is not None:
            observe(group, n, first_sparse)
        return _project(group, n, first_sparse)

    for index, block in enumerate(weights.blocks):
        n = rms_norm(x, block.attention_norm, config.rms_norm_eps)
        qkv = torch.cat(apply(block.qkv, n), dim=-1).view(count, -1, config.head_dim).transpose(0, 1)
        q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads))
        if block.qk_norm is not None:
            q = rms_norm(q, block.qk_norm[0], config.rms_norm_eps)
            k = rms_norm(k, block.qk_norm[1], config.rms_norm_eps)
        keys, values = cache.write(index, slot, start, rotate(k, cos, sin), v)
        attended = _attention(rotate(q, cos, sin), keys, values, start, block.window)
        (o,) = apply(block.o, attended.transpose(0, 1).reshape(count, config.q_size))
        x = x + o
        m = rms_norm(x, block.mlp_norm, config.rms_norm_eps)
        gate, up = apply(block.gate_up, m)
        (down,) = apply(block.down, functional.silu(gate) * up)
        x = x + down
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; the mean in float32 (float64 for float64), the product in x's type."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _project(group: Group, x: Tensor, first_sparse: int) -> list[Tensor]:
    """Each projection of the group applied to x (T, K); rows from ``first_sparse`` on are masked."""
    outputs = []
    first = 0
    whole = group.dense or first_sparse >= len(x)
    if whole:  # one product for all of them
        y = x @ group.weight_t[:, : group.out_features].to(x.dtype)
        return list((y if group.bias is None else y + group.bias).split(group.widths, dim=-1))
    for i, width in enumerate(group.widths):
        tail = x[first_sparse:]
        keep = keep_mask(tail, group.scales[i], group.thresholds[i])
        masked = torch.cat((x[:first_sparse], torch.where(keep, tail, tail.new_zeros(()))))
        y = masked @ group.weight_t[:, first : first + width].to(x.dtype)
        outputs.append(y if group.bias is None else y + group.bias[first : first + width])
        first += width
    return outputs


def _attention(q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Causal attention of the positions from ``start`` on, (heads, T, D); ``window`` counts the position itself."""
    count, stop = q.shape[1], keys.shape[1]
    gqa = q.shape[0] != keys.shape[0]
    reach = stop if window is None else window
    # In float64 no kernel takes the lower-right mask.
    if stop <= reach and (q.dtype != torch.float64 or start == 0 or count == 1):
        mask = None
        if count > 1 and start > 0:
            # Here, because it imports torch._dynamo: a second that only long prompts need to spend.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(count, stop)
        return functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, is_causal=start == 0 and count > 1, enable_gqa=gqa
        )[0]
    first = max(start - reach + 1, 0)
    ahead = torch.arange(first, stop, device=q.device) - torch.arange(start, stop, device=q.device)[:, None]
    near = (ahead <= 0) & (ahead > -reach)
    return functional.scaled_dot_product_attention(
        q[None], keys[None, :, first:], values[None, :, first:], attn_mask=near, enable_gqa=gqa
    )[0]
