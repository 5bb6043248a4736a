"""Prefill. Dense prompts in half precision are read by ``PromptReader``, chunk by chunk as CUDA graphs; all others by
the block in ``runtime.torch.block``.

Without a graph the kernel launches of a short chunk take the host several times as long as the GPU needs to load the
weights. A graph serves any slot and position, which are in a tensor on the device. cuDNN (``kernels.gpu.cudnn``) needs
addresses and lengths on the host: the long chunks that it attends to faster are launched without a graph.
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
from wisparse.kernels.gpu.cudnn import attend_by_cudnn, cudnn_attends, merge
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
# Of quantized weights, which are dequantized for each chunk: 0.3 GB more activations of an 8B model.
_DEQUANTIZED_CHUNK = 4096
# With a sliding window or a soft cap, whose (chunk, context) mask or scores are stored.
_SMALL_CHUNK = 512
# Positions read between two decode steps of other sequences, at most half of a chunk.
PIECE = 512
# Rows of the graphs; a chunk is padded to the next size.
_ROWS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
# Rows of the graphs that read several short prompts together.
_JOINT_ROWS = (32, 128, 512)
# Hidden size from which on the GPU needs longer for a chunk than the host for launches without a graph.
LARGE = 2048
# Rows of a prompt's first chunk from which on cuDNN attends, of those above.
_FIRST_ROWS = 2048
# Positions up to which cuDNN's plans are built ahead: a plan takes about 0.05 s and stays.
_PLANNED = 32 * 1024
# Bytes of GPU memory that have to be free before graphs are captured: they take some tens of MB, and cuBLAS a
# workspace.
_FREE = 1 << 30


def chunk_size(config: ModelConfig, dtype: torch.dtype, *, quantized: bool) -> int:
    windows = any(block.window is not None for block in config.blocks)
    small = windows or config.latent is not None  # whose attention reads the cache for every row
    if dtype == torch.float32 or small or config.attention_softcap is not None:
        return _SMALL_CHUNK
    return _DEQUANTIZED_CHUNK if quantized else _CHUNK


def too_little_memory(device: torch.device) -> str | None:
    """Why no graphs are captured in advance, as a clause; None if there is memory for them."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _FREE:
        return f"less than {_FREE >> 20} MiB of its memory are free"
    return None


class _Inputs:
    """The positions of one prompt or of several, in one tensor that is copied to the device at once. Each part is aligned
    to 16 bytes: Triton compiles a kernel again for pointers of another alignment."""

    def __init__(self, rows: int, prompts: int, device: torch.device | str = "cpu") -> None:
        """No positions: a pass over them writes to no cache."""
        padded, even = -(-rows // 4) * 4, -(-prompts // 2) * 2
        self.data = torch.zeros(4 + padded + even + rows, dtype=torch.int64, device=device)
        chunk, places, last, self.tokens = self.data.split((4, padded, even, rows))
        self.chunk = chunk[:3]  # of one prompt: slot, first position, number of positions
        self.positions, self.slots = places.view(torch.int32).view(2, padded)[:, :rows]
        self.last = last[:prompts]  # index of each prompt's last row
        self.tokens.fill_(-1)  # negative for an idle row
        self.by_cudnn: tuple[int, int] | None = None  # slot and first position, on the host, if cuDNN attends


class _Graph(NamedTuple):
    """Captured prefill of up to ``rows`` positions, of one prompt or of several."""

    rows: int
    inputs: _Inputs
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
        self._graphs: dict[bool, list[_Graph]] = {False: [], True: []}  # of one prompt, of several; ascending
        self.head: DraftHead | None = None
        self.gpu = gpu_of(device)
        large, slots = config.hidden_size >= LARGE and config.latent is None, self.cache
        self._cudnn = large and all(cudnn_attends(one, parts[index].shape) for index, one in slots.items())

    @property
    def captured(self) -> bool:
        return bool(self._graphs[False])

    @property
    def max_joint_prefill(self) -> int:
        """The most positions of a call of ``read_jointly``."""
        return max(self._joint_rows, default=0)

    @staticmethod
    def refusal(config: ModelConfig, dtype: torch.dtype) -> str | None:
        """Why a model is not supported, as a clause; None if it is."""
        if dtype == torch.float32:
            return "its weights are float32"
        if config.delta_net is not None or config.mamba2 is not None:
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
        graphs = [
            (rows, several) for several in (False, True) for rows in (self._joint_rows[::-1] if several else sizes)
        ]
        with triton_compiling(2 * len(set(self.config.blocks)) + len(sizes)):
            if device.type == "cuda":
                distinct = {block: index for index, block in enumerate(self.config.blocks)}
                with compiling_side_by_side():
                    for rows, several in graphs:
                        self._launch(self._inputs(rows, several, device), distinct.values(), several=several)
            for rows, several in graphs:
                inputs = self._inputs(rows, several, device)
                replay = capture(partial(self._launch, inputs, several=several), device, pool)
                self._graphs[several].insert(0, _Graph(rows, inputs, replay))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the runs before each capture

    def prepare_cudnn(self, chunk: int) -> None:
        """Build cuDNN's plans and compile the kernels before and after it; on scratch memory with the strides of the cache,
        whose pages may be unmapped."""
        if not self._cudnn:
            return
        longest = len(self.parts[0].rotary.cos)
        firsts = {self._rows_by_cudnn(0, count, chunk) for count in range(1, min(chunk, longest) + 1)}
        later = range(chunk, min(longest, _PLANNED) - 3 * chunk // 4, chunk)
        planned = [*((rows, 0) for rows in firsts if rows is not None), *((chunk, start) for start in later)]
        if not planned:
            return
        one, end = next(iter(self.cache.values())), chunk + max(start for _, start in planned)
        _, kv_heads, _, width = one.k.shape
        memory = one.k.new_zeros((kv_heads - 1) * one.head_stride + end * one.stride)
        keys = memory.as_strided((1, kv_heads, end, width), one.k.stride())
        distinct = {self.parts[index].shape: index for index in self.cache}
        for rows, start in planned:
            inputs = self._inputs(rows, False, memory.device)
            inputs.by_cudnn = 0, start
            launched = _Pass(self, inputs, several=False)
            launched._cache = dict.fromkeys(self.cache, one._replace(k=keys, v=keys))
            for index in distinct.values():
                qkv = self.weights.blocks[index].qkv
                assert qkv is not None
                launched._attend(index, launched.hidden.new_zeros(rows, qkv.out_features))

    def _rows_by_cudnn(self, start: int, count: int, chunk: int) -> int | None:
        """Rows of a pass over ``count`` positions in which cuDNN attends, padding included; None: the kernel attends.
        cuDNN computes the padding too, at 1.3 times the kernel's rate or more."""
        if not self._cudnn or start % chunk:
            return None
        if start > 0:
            return chunk if count > 3 * chunk // 4 else None
        rows = next((rows for rows in _ROWS if count <= rows), chunk)
        return rows if _FIRST_ROWS <= rows <= chunk else None

    def read(self, slot: int, token_ids: Tensor, start: int, stop: int, chunk: int) -> Tensor | None:
        """Read positions ``start`` to ``stop`` of a prompt (T,) into a slot, dense, asynchronously: (1, V) float32, the
        last position's logits before multiplier and cap, valid until the next call; None if the prompt needs long
        rotary factors."""
        if self._switch is not None and len(token_ids) > self._switch:
            return None
        while start < stop:
            end = min((start // chunk + 1) * chunk, stop)
            rows = self._rows_by_cudnn(start, end - start, chunk)
            self._read([(slot, token_ids[:end], start)], several=False, by_cudnn=rows)
            start = end
        return self.logits.logit

    def read_jointly(self, prompts: Sequence[tuple[int, Tensor, int]]) -> Tensor:
        """Read several prompts to their ends; prompts: (slot, token ids, first position to read), in all at most
        ``max_joint_prefill`` positions. Returns (len(prompts), V) as :meth:`read`."""
        self._read(prompts, several=True)
        return self.joint_logits.logit[: len(prompts)]

    def _inputs(self, rows: int, several: bool, device: torch.device | str = "cpu") -> _Inputs:
        return _Inputs(rows, self.prompts if several else 1, device)

    def _read(self, prompts: Sequence[tuple[int, Tensor, int]], *, several: bool, by_cudnn: int | None = None) -> None:
        """``by_cudnn``: rows of a pass in which cuDNN attends."""
        count, device = sum(len(ids) - start for _, ids, start in prompts), self.logits.logit.device
        graph = next((graph for graph in self._graphs[several] if count <= graph.rows), None)
        rows = next(rows for rows in self._joint_rows if count <= rows) if several else by_cudnn or count
        if by_cudnn is not None:
            graph = None
        inputs, end = self._inputs(rows if graph is None else graph.rows, several), 0
        for index, (slot, ids, start) in enumerate(prompts):
            first, end = end, end + len(ids) - start
            inputs.tokens[first:end], inputs.positions[first:end] = ids[start:], torch.arange(start, len(ids))
            inputs.slots[first:end], inputs.last[index] = slot, end - 1
            inputs.chunk[:] = torch.tensor((slot, start, len(ids) - start))
        on_device = self._inputs(rows, several, device) if graph is None else graph.inputs
        on_device.data.copy_(inputs.data, non_blocking=True)
        if graph is None:
            on_device.by_cudnn = None if by_cudnn is None else prompts[0][::2]
            self._launch(on_device, several=several)
        else:
            graph.replay()

    def _launch(self, inputs: _Inputs, indices: Iterable[int] | None = None, *, several: bool) -> Tensor:
        """Read the positions of ``inputs`` and compute the last ones' logits. ``indices``: of the blocks to launch; None:
        all."""
        return _Pass(self, inputs, several=several).launch(indices)


class _Pass(BlockLauncher):
    """A dense pass over positions of one prompt or of several."""

    _reads_prompts = True

    def __init__(self, reader: PromptReader, inputs: _Inputs, *, several: bool) -> None:
        config, weights = reader.config, reader.weights
        self.config, self.weights, self._parts, self._cache = config, weights, reader.parts, reader.cache
        self._kept, self._by_cudnn = reader.kept, inputs.by_cudnn
        self._head, self._scratch, self._gpu = reader.head, reader.scratch, reader.gpu
        self._logits = reader.joint_logits if several else reader.logits
        self._chunk, self._last = inputs.chunk, inputs.last
        self._inputs = Rows(inputs.tokens, inputs.positions, inputs.slots)
        self.hidden = hidden = embed(config, weights.embedding, inputs.tokens.clamp(min=0))
        norm = self._next_norm(-1, ())
        self.normed = hidden.clone() if norm is None else norm(hidden)
        width = config.blocks[0].head_dim
        # Measured on an H200 with D = 128: 412 TFLOPS; 356 with two stages, 321 by torch's flash attention.
        self._stages = 3 if self._gpu.arch in (90, 100) and width <= 128 else 2
        self._queries = hidden.new_empty(len(hidden), config.num_heads, width)
        self._joint = self._splits(width) if several and config.latent is None else None

    def _splits(self, width: int) -> KVSplits:
        sums = self.hidden.new_empty(2, len(self.hidden), self.config.num_heads, 1, dtype=torch.float32)
        return KVSplits(self.hidden.new_empty(*sums.shape[1:], width, dtype=torch.float32), *sums)

    def launch(self, indices: Iterable[int] | None) -> Tensor:
        """All blocks, or those of ``indices``, and the logits of the last positions."""
        weights = self.weights
        self.launch_blocks(indices)
        ends = weights.norm(self.hidden.index_select(0, self._last))
        launch_logits(ends, None, None, weights.head, weights.head_scales, self._logits)
        return self._logits.logit

    def _attend(self, index: int, qkv: Tensor) -> Input:
        hidden, block = self.hidden, self.weights.blocks[index]
        if self._joint is not None:
            self._attend_rows(index, qkv, self._joint, stored=True)
            return Input(launch_combine(self._joint, hidden.dtype))
        (rotary, shape, norms), cache, scale = self._parts[index], self._cache[index], self.config.attention_scale
        rows, _, width = self._queries.shape
        if self._by_cudnn is None:
            launch_store_kv(qkv, self._chunk, cache, rotary, self._queries, shape, norms)
            out = torch.empty_like(self._queries)
            parts = self._queries, qkv, self._chunk, cache, out, shape, scale
            launch_chunk_attention(*parts, sinks=block.sinks, stages=self._stages)
        else:
            slot, start = self._by_cudnn
            own = hidden.new_empty(2, shape.kv_heads, rows, width)
            launch_store_kv(qkv, self._chunk, cache, rotary, self._queries, shape, norms, own)
            attended = [attend_by_cudnn(self._queries, own[0], own[1], scale, causal=True)]
            if start > 0:
                keys, values = cache.k[slot][:, :start], cache.v[slot][:, :start]
                attended.append(attend_by_cudnn(self._queries, keys, values, scale))
            out = merge(attended, qkv, block.sinks, shape)
        return Input(out.reshape(rows, -1))

    def _linear(self, index: int, role: str, value: Input) -> Tensor:
        x, linear = tensor_of(value), getattr(self.weights.blocks[index], role)
        return multiply(choose_product(linear.shape, len(x), "prompt", ready=True), linear, x, self._scratch)
