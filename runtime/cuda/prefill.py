"""Prefill. Dense prompts in half precision are read by ``PromptReader``, chunk by chunk as CUDA graphs; all others by
the block in ``runtime.torch.block``.

Without a graph the kernel launches of a short chunk take the host several times as long as the GPU needs to load the
weights. A graph serves any slot and position, which are in a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.backend import compiling_side_by_side, triton_compiling
from wisparse.kernels.gpu.attention import Rows, launch_chunk_attention, launch_store_kv
from wisparse.kernels.gpu.common import Input, KVSplits
from wisparse.kernels.gpu.head import Logits, launch_logits
from wisparse.kernels.gpu.kv_cache import kv_slots
from wisparse.kernels.gpu.launch import Scratch, multiply
from wisparse.kernels.gpu.products import choose_product
from wisparse.kernels.gpu.reduction import launch_combine
from wisparse.kernels.gpu.tiles import gpu_of

from ..decoding.cache import KVCache
from ..decoding.decoder import PROMPTS_TOGETHER
from ..decoding.heads import DraftHead
from ..decoding.rotary import switch_length
from ..torch.block import embed
from .blocks import AttentionParts, BlockLauncher, tensor_of
from .step import capture
from .weights import CudaWeights

# Positions of a chunk, which bounds the activations' memory; cuBLAS reaches its full rate at about this size.
_CHUNK = 2048
# With a sliding window or a soft cap, whose (chunk, context) mask or scores are stored.
_SMALL_CHUNK = 512
# Positions read between two decode steps of other sequences, at most half of a chunk.
PIECE = 512
# Rows of the graphs; a chunk is padded to the next size.
_ROWS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
# Rows of the graphs that read several short prompts together.
_JOINT_ROWS = (32, 128, 512)
# Bytes of GPU memory that have to be free before graphs are captured: they take some tens of MB, and cuBLAS a
# workspace.
_FREE = 1 << 30


def chunk_size(config: ModelConfig, dtype: torch.dtype) -> int:
    windows = any(block.window is not None for block in config.blocks)
    return _SMALL_CHUNK if dtype == torch.float32 or windows or config.attention_softcap is not None else _CHUNK


def too_little_memory(device: torch.device) -> str | None:
    """Why no graphs are captured in advance, as a clause; None if there is memory for them."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _FREE:
        return f"less than {_FREE >> 20} MiB of its memory are free"
    return None


class _Graph(NamedTuple):
    """Captured prefill of up to ``rows`` positions, of one prompt or of several."""

    rows: int
    # int64. One prompt: slot, first position, number of positions, token ids. Several: each row's token id, negative
    # for an idle row, then its position and its slot as int32 (rows,) each, then the index of each prompt's last row.
    inputs: Tensor
    replay: Callable[[], object]


class PromptReader:
    """Dense prefill of a decoder's prompts; see :meth:`refusal` for what is not supported."""

    def __init__(
        self,
        weights: CudaWeights,
        config: ModelConfig,
        cache: KVCache,
        parts: Sequence[AttentionParts],
        scratch: Scratch,
    ) -> None:
        self.weights, self.config, self.parts, self.scratch = weights, config, parts, scratch
        self.cache = {index: kv_slots(*stored) for index, stored in cache.attention.items()}
        self.kept = {index: states.inputs for index, states in cache.recurrent.items()}
        self._switch = switch_length(config)
        device = weights.embedding.device
        self.logits = Logits.empty(1, weights.head)
        self.prompts = min(PROMPTS_TOGETHER, len(cache.lengths))  # the most in one call of ``read_jointly``
        fitting = -(-len(cache.lengths) * len(parts[0].rotary.cos) // 16) * 16
        self._joint_rows = sorted({min(rows, fitting) for rows in _JOINT_ROWS}) if self.prompts > 1 else []
        self.joint_logits = Logits.empty(self.prompts, weights.head)
        self._graphs: list[_Graph] = []
        self._joint_graphs: list[_Graph] = []
        self.head: DraftHead | None = None
        self.gpu = gpu_of(device)

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    @property
    def max_joint_prefill(self) -> int:
        """The most positions of a call of ``read_jointly``."""
        return max(self._joint_rows, default=0)

    @staticmethod
    def refusal(config: ModelConfig, dtype: torch.dtype) -> str | None:
        """Why a model is not supported, as a clause; None if it is."""
        if dtype == torch.float32:
            return "its weights are float32"
        if config.delta_net is not None:
            return "its recurrent blocks are read position by position"
        if len({(block.head_dim, block.num_kv_heads, block.shared_values) for block in config.blocks}) > 1:
            return "its heads differ from block to block"
        if config.architecture.value_norm:
            return "its values are normalised"
        return None

    def attach(self, head: DraftHead) -> None:
        """Store the hidden states that a draft head reads. Prompts are then read one by one."""
        self.head, self._joint_rows = head, []

    def capture(self, chunk: int) -> None:
        """Capture the graphs of up to ``chunk`` rows, largest first, in one memory pool, as one runs at a time."""
        device, pool = self.weights.embedding.device, None
        if device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
        sizes = sorted({min(rows, chunk) for rows in _ROWS}, reverse=True)
        graphs = [(3 + rows, rows, False) for rows in sizes]
        graphs += [(2 * rows + self.prompts, rows, True) for rows in reversed(self._joint_rows)]
        with triton_compiling(2 * len(set(self.config.blocks)) + len(sizes)):
            if device.type == "cuda":
                distinct = {block: index for index, block in enumerate(self.config.blocks)}
                with compiling_side_by_side():
                    for size, _, several in graphs:
                        inputs = torch.zeros(size, dtype=torch.int64, device=device)
                        self._launch(inputs, distinct.values(), several=several)
            for size, rows, several in graphs:
                # No positions, or idle rows, so that the run before the capture writes no cache.
                inputs = torch.full((size,), -1 if several else 0, device=device)
                inputs[rows * several :].zero_()
                launch = partial(self._launch, inputs, several=several)
                (self._joint_graphs if several else self._graphs).insert(
                    0, _Graph(rows, inputs, capture(launch, device, pool))
                )
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the runs before each capture

    def read(self, slot: int, token_ids: Tensor, start: int, stop: int, chunk: int) -> Tensor | None:
        """Read positions ``start`` to ``stop`` of a prompt (T,) into a slot, dense, asynchronously: (1, V) float32, the
        last position's logits before multiplier and cap, valid until the next call; None if the prompt needs long
        rotary factors."""
        if self._switch is not None and len(token_ids) > self._switch:
            return None
        while start < stop:
            end = min((start // chunk + 1) * chunk, stop)
            count = end - start
            graph = next((graph for graph in self._graphs if count <= graph.rows), None)
            inputs = torch.zeros(3 + (count if graph is None else graph.rows), dtype=torch.int64)
            inputs[:3] = torch.tensor((slot, start, count))
            inputs[3 : 3 + count] = token_ids[start:end]
            if graph is None:
                self._launch(inputs.to(self.logits.logit.device, non_blocking=True))
            else:
                graph.inputs.copy_(inputs, non_blocking=True)
                graph.replay()
            start = end
        return self.logits.logit

    def read_jointly(self, prompts: Sequence[tuple[int, Tensor, int]]) -> Tensor:
        """Read several prompts to their ends; prompts: (slot, token ids, first position to read), in all at most
        ``max_joint_prefill`` positions. Returns (len(prompts), V) as :meth:`read`."""
        parts = [(slot, start, ids[start:]) for slot, ids, start in prompts]
        count, device = sum(len(ids) for *_, ids in parts), self.logits.logit.device
        rows = next(rows for rows in self._joint_rows if count <= rows)
        inputs = torch.zeros(2 * rows + self.prompts, dtype=torch.int64)
        inputs[:rows] = -1
        inputs[:count] = torch.cat([ids for *_, ids in parts])
        positions, slots = inputs[rows : 2 * rows].view(torch.int32).view(2, rows)
        end = 0
        for index, (slot, start, ids) in enumerate(parts):
            first, end = end, end + len(ids)
            positions[first:end] = torch.arange(start, start + len(ids))
            slots[first:end], inputs[2 * rows + index] = slot, end - 1
        graph = next((graph for graph in self._joint_graphs if graph.rows == rows), None)
        if graph is None:
            self._launch(inputs.to(device, non_blocking=True), several=True)
        else:
            graph.inputs.copy_(inputs, non_blocking=True)
            graph.replay()
        return self.joint_logits.logit[: len(prompts)]

    def _launch(self, inputs: Tensor, indices: Iterable[int] | None = None, *, several: bool = False) -> Tensor:
        """Read the positions of ``inputs``, as in ``_Graph``, and compute the last ones' logits. ``indices``: of the
        blocks to launch; None: all."""
        return _Pass(self, inputs, several=several).launch(indices)


class _Pass(BlockLauncher):
    """A dense pass over positions of one prompt or of several."""

    _reads_prompts = True

    def __init__(self, reader: PromptReader, inputs: Tensor, *, several: bool) -> None:
        """``inputs``: as in ``_Graph``."""
        config, weights = reader.config, reader.weights
        self.config, self.weights, self._parts, self._cache = config, weights, reader.parts, reader.cache
        self._kept, self._several = reader.kept, several
        self._head, self._scratch, self._gpu = reader.head, reader.scratch, reader.gpu
        self._chunk, self._logits = inputs, reader.logits
        tokens, self._last = inputs[3:], (inputs[2:3] - 1).clamp(min=0)
        if several:
            size = (len(inputs) - reader.prompts) // 2
            tokens, self._last, self._logits = inputs[:size], inputs[2 * size :], reader.joint_logits
            self._inputs = Rows(tokens, *inputs[size : 2 * size].view(torch.int32).view(2, size))
        elif config.short_conv is not None:
            slot, start, count = inputs[:3]
            offsets = torch.arange(len(tokens), device=tokens.device)
            positions, slots = (start + offsets).int(), slot.int().expand(len(tokens)).contiguous()
            self._inputs = Rows(tokens.where(offsets < count, -1), positions, slots)
        self.hidden = hidden = embed(config, weights.embedding, tokens.clamp(min=0))
        norm = self._next_norm(-1, ())
        self.normed = hidden.clone() if norm is None else norm(hidden)
        width = config.blocks[0].head_dim
        # Measured on an H200 with D = 128: 412 TFLOPS; 356 with two stages, 321 by torch's flash attention.
        self._stages = 3 if self._gpu.arch in (90, 100) and width <= 128 else 2
        self._queries = hidden.new_empty(len(hidden), config.num_heads, width)
        if several:
            sums = hidden.new_empty(2, len(hidden), config.num_heads, 1, dtype=torch.float32)
            self._splits = KVSplits(hidden.new_empty(*sums.shape[1:], width, dtype=torch.float32), *sums)

    def launch(self, indices: Iterable[int] | None) -> Tensor:
        """All blocks, or those of ``indices``, and the logits of the last positions."""
        count, hidden, weights = len(self.weights.blocks), self.hidden, self.weights
        taps = () if self._head is None else self._head.taps
        inputs = [hidden] * (count + 1)
        for index in range(count) if indices is None else indices:
            inputs[index] = hidden.clone() if index in taps else hidden
            self.launch_block(index)
        if self._head is not None:
            slot, start, length = self._chunk[:3]
            offsets = torch.arange(len(hidden), device=hidden.device)
            states = torch.cat([inputs[tap] for tap in taps], dim=-1)
            self._head.keep(slot.expand_as(offsets), start + offsets, states, offsets < length)
        ends = weights.norm(hidden.index_select(0, self._last))
        launch_logits(ends, None, None, weights.head, weights.head_scales, self._logits)
        return self._logits.logit

    def _attend(self, index: int, qkv: Tensor) -> Input:
        hidden, block = self.hidden, self.weights.blocks[index]
        if self._several:
            self._attend_rows(index, qkv, self._splits, stored=True)
            return Input(launch_combine(self._splits, hidden.dtype))
        (rotary, shape, norms), cache, out = self._parts[index], self._cache[index], torch.empty_like(self._queries)
        launch_store_kv(qkv, self._chunk, cache, rotary, self._queries, shape, norms)
        arguments = self._queries, qkv, self._chunk, cache, out, shape, self.config.attention_scale
        launch_chunk_attention(*arguments, sinks=block.sinks, stages=self._stages)
        return Input(out.reshape(len(hidden), -1))

    def _linear(self, index: int, role: str, value: Input) -> Tensor:
        x, linear = tensor_of(value), getattr(self.weights.blocks[index], role)
        return multiply(choose_product(linear.shape, len(x), "prompt", ready=True), linear, x, self._scratch)
