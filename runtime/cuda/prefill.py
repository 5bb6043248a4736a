"""Short pieces of prompts, dense, each read by one CUDA graph: a chat's next question behind what its slot holds.

Launched one by one, the hundreds of small kernels of a few positions cost the host 20 to 30 ms for an 8B model, several
times what the GPU needs to read the weights. A graph serves up to so many rows of any slot at any position: those stand
on the device (``kernels.gpu.prompt``). The block is ``prefill``'s; products of codes are the decode step's, for 16 rows
at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.backend import triton_compiling
from wisparse.kernels.gpu.gemv import GemvTile, Group, Scratch, launch_gemv, launch_kind
from wisparse.kernels.gpu.head import HEAD_ROWS, launch_logits
from wisparse.kernels.gpu.matrix import Matrix, widen
from wisparse.kernels.gpu.prompt import launch_piece_attention
from wisparse.kernels.gpu.tiles import choose_tile
from wisparse.kernels.reference import activation_dtype, keep_mask, wide_dtype

from ..decoding.cache import KVCache
from ..decoding.decoder import prompt_chunks
from ..decoding.rotary import Rotary, switch_length
from ..torch.block import Positions, capped_attention, causal_mask, drop_channels, embed, finish_block, run_block
from .graph import capture
from .step import MAX_ROWS, Places, describe, qk_norm_kind
from .weights import BlockWeights, CudaWeights

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
    for start, stop, first_sparse in prompt_chunks(places.start, places.stop, total, size, sparse_from):
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
        return _with_bias(group, y).split(group.widths, dim=-1)
    outputs = []
    for i in range(len(group.widths)):
        masked = x
        if not dense:
            keep = keep_mask(x[first_sparse:], group.scales[i], group.thresholds[i])
            masked = drop_channels(x, keep)
        outputs.append(masked @ _numbers(matrix, i, widened).to(x.dtype))
    return _with_bias(group, torch.cat(outputs, dim=-1)).split(group.widths, dim=-1)


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


def _with_bias(group: Group, y: Tensor) -> Tensor:
    return y if group.bias is None else y + group.bias


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


log = logging.getLogger(__name__)

# Rows of the graphs: a piece is read by the smallest that it fits into.
_ROWS = (16, 32, 64, 128)
# Bytes of the GPU that have to be free before the graphs are made: they take some tens of MB, and cuBLAS its room.
_FREE = 1 << 30


def too_little_memory(device: torch.device) -> str | None:
    """Why no graphs are made ahead, as a clause; None if there is room for them."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _FREE:
        return f"less than {_FREE >> 20} MiB of its memory are free"
    return None


class ShortPieces:
    """The graphs of one decoder. Half precision, and no recurrent blocks; see :meth:`refusal`."""

    def __init__(self, weights: CudaWeights, config: ModelConfig, cache: KVCache, places: Places) -> None:
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._switch = switch_length(config)
        products = _Products(weights)
        with triton_compiling(2 * len(set(config.blocks)) + len(_ROWS)):
            self._graphs = {rows: _Piece(weights, config, cache, places, products, rows) for rows in _ROWS}
        log.debug("captured prompts of up to %d positions on %s in %s", max(_ROWS), device, dtype)

    @staticmethod
    def refusal(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why prompts are not captured, as a clause; None if they are."""
        if dtype == torch.float32:
            return "float32 weights are multiplied in float64, which the tensor cores' attention does not know"
        if config.delta_net is not None:
            return "its recurrent blocks are read position by position"
        if len({(block.head_dim, block.num_kv_heads, block.shared_values) for block in config.blocks}) > 1:
            return "its heads differ from block to block"
        if config.architecture.value_norm:
            return "its values are normalised"
        return too_little_memory(device)

    def logits(self, slot: int, token_ids: Tensor, start: int, stop: int) -> Tensor | None:
        """Read some positions of a prompt into a slot, all dense; None if no graph serves them.

        Args:
            token_ids: (T,) int64, the whole prompt.

        Returns:
            (1, V) float32, the head's products of the last position read; valid until the next call.
        """
        graph = next((graph for rows, graph in self._graphs.items() if stop - start <= rows), None)
        if graph is None or (self._switch is not None and len(token_ids) > self._switch):
            return None
        return graph.read(slot, start, token_ids[start:stop])


class _Products:
    """Dense products of some rows: as torch has them, or of codes 16 rows at a time."""

    def __init__(self, weights: CudaWeights) -> None:
        dtype = weights.embedding.dtype
        arch, multiprocessors = describe(weights.embedding.device)
        self._scratch = Scratch(weights.embedding.device, dtype)
        self._coded: dict[int, tuple[Group, GemvTile]] = {}
        for block in weights.blocks:
            for group in block.groups:
                matrix = group.matrix
                if matrix.kind == "plain":
                    continue
                dense = replace(group, dense=True)
                tile = choose_tile(
                    arch, multiprocessors, group.in_features, group.widths, launch_kind(MAX_ROWS, dense=True), MAX_ROWS,
                    dtype, matrix.kind, matrix.group,
                )  # fmt: skip
                self._scratch.reserve(dense, tile, MAX_ROWS)
                self._coded[id(matrix.data)] = dense, tile

    def __call__(self, group: Group, x: Tensor) -> Tensor:
        """x (T, K) to (T, N), T a multiple of 16."""
        matrix = group.matrix
        if matrix.kind == "plain":
            y = x @ matrix.data[:, : group.out_features]
            return y if group.bias is None else y + group.bias
        dense, tile = self._coded[id(matrix.data)]
        y = x.new_empty(len(x), group.out_features)
        for rows, out in zip(x.split(MAX_ROWS), y.split(MAX_ROWS), strict=True):
            launch_gemv(dense, rows, out, self._scratch, tile, batch=MAX_ROWS)
        return y


class _Piece:
    """The graph of up to ``rows`` positions."""

    def __init__(
        self, weights: CudaWeights, config: ModelConfig, cache: KVCache, places: Places, products: _Products, rows: int
    ) -> None:
        self._weights, self._config, self._cache, self._places = weights, config, cache, places
        self._products, self._rows = products, rows
        device, dtype = weights.embedding.device, weights.embedding.dtype
        # Slot, first position and rows that there are, and their tokens. None yet: captured, it writes no cache.
        self._given = torch.zeros(3 + rows, dtype=torch.int64, device=device)
        self._queries = torch.empty(rows, config.num_heads, config.blocks[0].head_dim, dtype=dtype, device=device)
        self._logits = torch.empty(1, config.vocab_size, device=device)
        tiles = triton.cdiv(config.vocab_size, HEAD_ROWS)
        self._best = torch.empty(1, tiles, device=device)
        self._best_id = torch.empty(1, tiles, dtype=torch.int32, device=device)
        self._replay = capture(self._launch, device)

    def read(self, slot: int, start: int, token_ids: Tensor) -> Tensor:
        """Read a piece; asynchronous."""
        given = torch.zeros(3 + self._rows, dtype=torch.int64)
        given[:3] = torch.tensor((slot, start, len(token_ids)))
        given[3 : 3 + len(token_ids)] = token_ids
        self._given.copy_(given, non_blocking=True)
        self._replay()
        return self._logits

    def _launch(self) -> None:
        config, weights, products = self._config, self._weights, self._products
        x = embed(config, weights.embedding, self._given[3:])
        for index, block in enumerate(weights.blocks):

            def apply(role: str, n: Tensor, block: BlockWeights = block) -> tuple[Tensor]:
                return (products(getattr(block, role), n),)

            n = x if block.attention_input is None else block.attention_input(x)
            x = finish_block(config, block, x, self._attend(index, block, products(block.qkv, n)), apply)
        last = x.index_select(0, (self._given[2:3] - 1).clamp(min=0))
        launch_logits(
            last, last.float().square().sum(-1, keepdim=True), weights.norm.factors, weights.head, self._logits,
            self._best, self._best_id, eps=config.rms_norm_eps, scales=weights.head_scales,
        )  # fmt: skip

    def _attend(self, index: int, block: BlockWeights, qkv: Tensor) -> Tensor:
        """The block's attention, (rows, heads * D), with keys and values put into the cache."""
        config, facts = self._config, block.facts
        out = torch.empty_like(self._queries)
        keys, values = self._cache.attention[index]
        launch_piece_attention(
            qkv, self._given, keys, values, *self._places.rotary(facts.rotary),
            self._queries, out, scale=config.attention_scale, cap=config.attention_softcap, window=facts.window,
            interleaved=config.rotaries[0].interleaved, query_scales=self._places.query_scales, qk_norm=block.qk_norm,
            norm_of=qk_norm_kind(config), gated=config.architecture.attention_gate, eps=config.rms_norm_eps,
        )  # fmt: skip
        return out.flatten(1)
