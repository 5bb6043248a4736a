"""A whole sequence through the blocks on a GPU: dense on the tensor cores, or masked for evaluation.

The block is the plain decoder's (``runtime.torch.block``), the weights are this decoder's own, (K, N). Masked
positions multiply by the whole weight all the same: prefill is bound by arithmetic, and a prompt's positions keep
different channels. Codes are widened one projection at a time, in memory that all share. With float32 weights
activations and products are float64, as in the decode step (``kernels.precision``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model.model_config import ModelConfig
from wisparse.kernels.gpu.products.gemv import Group
from wisparse.kernels.gpu.products.matrix import Matrix, widen
from wisparse.kernels.precision import activation_dtype, wide_dtype
from wisparse.kernels.reference import keep_mask

from ..decoding.cache import KVCache
from ..decoding.decoder import pieces
from ..decoding.rotary import Rotary
from ..torch.attention import capped_attention, causal_mask
from ..torch.block import Positions, embed, run_block
from ..torch.linear import drop_channels
from .weights import BlockWeights, CudaWeights

__all__ = ["head_products", "lower_right", "piece_size", "read_sequence", "run_blocks"]

# Prompts are read in pieces: bounds the activations of a long one, and the time that other sequences wait for theirs.
# Others wait for half of one: for 1,024 positions of an 8B model they waited 52 to 56 ms on an H200, for 768 45 to 55,
# and they may for 50.
_PIECE = 768
# With a sliding window an explicit (piece, context) mask is needed; in float64, or capped, scores are kept as well.
_SHORT_PIECE = 512
# Up to so many positions after a cached prefix, say, an explicit mask costs less than it takes to import the other one.
_FEW = 64

Observer = Callable[[Group, Tensor, int], None]


def piece_size(config: ModelConfig, dtype: torch.dtype) -> int:
    """Positions that are read in one go, for weights of a type."""
    windows = any(block.window is not None for block in config.blocks)
    short = dtype == torch.float32 or windows or config.attention_softcap is not None
    return _SHORT_PIECE if short else _PIECE


def read_sequence(
    weights: CudaWeights,
    config: ModelConfig,
    rotaries: Sequence[Rotary],
    cache: KVCache,
    slot: int,
    token_ids: Tensor,
    sparse_from: int,
    places: range,
    size: int,
    observe: Observer | None = None,
) -> Iterator[Tensor]:
    """Fill some positions of a slot; yields hidden states piece by piece, (piece, H).

    Args:
        token_ids: (T,) int64 on the weights' device.
        sparse_from: positions from here on are masked.
        places: positions to fill, one after the other; those before stand in the slot.
        size: of a piece; pieces begin at multiples of it.
        observe: called with each group, its input (piece, K) and the first masked row, before the product.
    """
    total = len(token_ids)
    for start, stop, first_sparse in pieces(places.start, places.stop, total, size, sparse_from):
        piece = token_ids[start:stop]
        yield run_blocks(weights, config, rotaries, cache, slot, piece, start, total, first_sparse, observe)


def run_blocks(
    weights: CudaWeights,
    config: ModelConfig,
    rotaries: Sequence[Rotary],
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
    places = range(start, start + len(token_ids))
    at = Positions.of(config, rotaries, cache, slot, places, total, token_ids.device)
    x = embed(config, weights.embedding, token_ids, activation_dtype(weights.embedding.dtype))
    for index, block in enumerate(weights.blocks):

        def apply(role: str, n: Tensor, block: BlockWeights = block) -> tuple[Tensor, ...]:
            group = getattr(block, role)
            if observe is not None:
                observe(group, n, first_sparse)
            return _project(group, n, first_sparse, weights.widened)

        x = run_block(config, index, block, x, at, apply, _attention)
    return x


def _project(group: Group, x: Tensor, first_sparse: int, widened: Tensor | None) -> tuple[Tensor, ...]:
    """Each projection of the group applied to x (T, K); rows from ``first_sparse`` on are masked."""
    matrix = group.matrix
    dense = group.dense or first_sparse >= len(x)
    if dense and matrix.kind == "plain":  # one product for all of them
        y = x @ matrix.data[:, : group.out_features].to(x.dtype)
        return _with_bias(group, y, first_sparse).split(group.widths, dim=-1)
    outputs = []
    for i in range(len(group.widths)):
        masked = x
        if not dense:
            keep = keep_mask(x[first_sparse:], group.scales[i], group.thresholds[i])
            masked = drop_channels(x, keep)
        outputs.append(masked @ _numbers(matrix, i, widened).to(x.dtype))
    return _with_bias(group, torch.cat(outputs, dim=-1), first_sparse).split(group.widths, dim=-1)


def _numbers(matrix: Matrix, index: int, widened: Tensor | None) -> Tensor:
    """One projection's weight (K, N), codes in ``widened``, which the next one overwrites."""
    width = matrix.widths[index]
    if matrix.kind == "plain":
        first = matrix.first(index)
        return matrix.data[:, first : first + width]
    assert widened is not None
    return widen(matrix, index, widened[: matrix.in_features * width].view(matrix.in_features, width))


def head_products(weights: CudaWeights, x: Tensor) -> Tensor:
    """x (T, H), normalised, times the output layer: (T, V) of x's type."""
    if weights.head_scales is None:
        return functional.linear(x, weights.head.to(x.dtype))
    assert weights.widened is not None
    # Codes of eight bits are exact in every floating type; the sums are multiplied.
    rows = max(1, weights.widened.numel() // x.shape[1])
    parts = []
    for codes, scales in zip(weights.head.split(rows), weights.head_scales.split(rows), strict=True):
        wide = weights.widened[: codes.numel()].view(codes.shape).copy_(codes)
        parts.append((functional.linear(x, wide.to(x.dtype)) * scales.to(wide_dtype(x.dtype))).to(x.dtype))
    return torch.cat(parts, dim=-1)


def _with_bias(group: Group, y: Tensor, first_sparse: int) -> Tensor:
    """The products (T, N) of a group with what is added to dense rows, and to those from ``first_sparse`` on."""
    if group.masked_bias is None:
        return y if group.bias is None else y + group.bias
    dense, sparse = y[:first_sparse], y[first_sparse:]
    dense = dense if group.bias is None else dense + group.bias
    return torch.cat((dense, (sparse + group.masked_bias).to(y.dtype)))


def lower_right() -> Callable[[int, int], Tensor]:
    """What makes the mask of a prompt's later pieces, for torch's fastest attention. Imported when it is needed first:
    torch._dynamo comes with it, which takes seconds (2 to 3 beside an H200)."""
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right


def _attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Causal attention of the positions from ``start`` on, (heads, T, D); ``window`` counts the position itself."""
    count, stop = q.shape[1], keys.shape[1]
    gqa, scale = q.shape[0] != keys.shape[0], config.attention_scale
    reach = stop if window is None else window
    # In float64 no kernel takes the lower-right mask, and a few positions do not need it.
    plain = config.attention_softcap is None
    behind = start > 0 and count > 1
    if plain and stop <= reach and not (behind and (q.dtype == torch.float64 or count <= _FEW)):
        mask = lower_right()(count, stop) if behind else None
        return functional.scaled_dot_product_attention(
            q[None], keys[None], values[None],
            attn_mask=mask, is_causal=start == 0 and count > 1, scale=scale, enable_gqa=gqa,
        )[0]  # fmt: skip
    first = max(start - reach + 1, 0)
    near = causal_mask(start, stop, first, window, q.device)
    keys, values = keys[:, first:], values[:, first:]
    if not plain:
        return capped_attention(config, q, keys, values, near)
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=near, scale=scale, enable_gqa=gqa
    )[0]
