"""Short pieces of prompts, dense, each read by one CUDA graph: a chat's next question behind what its slot holds.

Launched one by one, the hundreds of small kernels of a few positions cost the host 20 to 30 ms for an 8B model, several
times what the GPU needs to read the weights. A graph serves up to so many rows of any slot at any position: those stand
on the device (``kernels.gpu.prompt``). The block is ``prefill``'s; products of codes are the decode step's, for 16 rows
at a time.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import triton
from torch import Tensor

from wisparse.formats.model.model_config import ModelConfig
from wisparse.kernels.compiling import triton_compiling
from wisparse.kernels.gpu.head import HEAD_ROWS, launch_logits
from wisparse.kernels.gpu.products.gemv import GemvTile, Group, Scratch, launch_gemv, launch_kind
from wisparse.kernels.gpu.products.tiles import choose_tile
from wisparse.kernels.gpu.prompt import launch_piece_attention

from ..decoding.cache import KVCache
from ..decoding.rotary import switch_length
from ..torch.block import embed, finish_block
from .graph import capture
from .step import MAX_ROWS, Places, describe, qk_norm_kind
from .weights import BlockWeights, CudaWeights

__all__ = ["ShortPieces", "too_little_memory"]

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
                dense = replace(group, dense=True, masked_bias=None)
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
