"""Prompts: read in chunks on the tensor cores by the block in ``runtime.torch.block``; short dense ones by a CUDA graph.

Launched one by one, the hundreds of small kernels of a few positions cost the host 20 to 30 ms for an 8B model, several
times what the GPU needs to read the weights. A graph (``ShortPrompts``: a chat's next question behind what its slot
holds) serves up to so many rows of any slot at any position: those are read from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.backend import triton_compiling
from wisparse.kernels.gpu.attention import KVSlots, launch_chunk_attention
from wisparse.kernels.gpu.common import Input, Output
from wisparse.kernels.gpu.head import Logits, launch_logits
from wisparse.kernels.gpu.plan import KernelPlan, Scratch, launch_linear, plan
from wisparse.kernels.gpu.weights import FusedLinear, dequantize
from wisparse.kernels.reference import keep_mask

from ..decoding.cache import KVCache
from ..decoding.rotary import switch_length
from ..torch.block import Block, drop_channels, embed, finish_block
from ..torch.block import attention as plain_attention
from .step import MAX_ROWS, PositionTables, attention_arguments, capture
from .weights import CudaWeights

# Chunks bound the activations of a long prompt, and the time that other sequences wait for theirs: half a chunk. For
# 1,024 positions of an 8B model they waited 52 to 56 ms on an H200, for 768 45 to 55, and they may for 50.
_CHUNK = 768
# With a sliding window an explicit (chunk, context) mask is needed; capped, scores are kept as well.
_SMALL_CHUNK = 512
# Up to so many positions after a cached prefix, an explicit mask costs less than it takes to import the other one.
_FEW = 64
# Rows of the short prompts' graphs: a chunk is read by the smallest that it fits into.
_ROWS = (16, 32, 64, 128)
# Bytes of the GPU that have to be free before the graphs are made: they take some tens of MB, and cuBLAS its workspace.
_FREE = 1 << 30


def chunk_size(config: ModelConfig, dtype: torch.dtype) -> int:
    windows = any(block.window is not None for block in config.blocks)
    return _SMALL_CHUNK if dtype == torch.float32 or windows or config.attention_softcap is not None else _CHUNK


def project(linear: FusedLinear, x: Tensor, first_sparse: int, scratch: Tensor | None) -> tuple[Tensor, ...]:
    """Each projection of x (T, K), masked from row ``first_sparse`` on; quantized ones are dequantized into ``scratch``."""
    weight, widths = linear.weight, linear.widths
    dense = linear.dense or first_sparse >= len(x)
    if dense and weight.quant == "none":  # one product for all of them
        y = x @ weight.data[:, : linear.out_features]
    else:
        outputs = []
        for i, width in enumerate(widths):
            masked, first = [x], weight.first(i)
            if not dense:
                limits = linear.thresholds[i * weight.planes : (i + 1) * weight.planes]
                keeps = (keep_mask(x[first_sparse:], linear.scales[i], limit) for limit in limits)
                masked = [drop_channels(x, keep) for keep in keeps]
            numbers = weight.data[:, first : first + width]
            if weight.quant != "none":
                assert scratch is not None
                numbers = scratch[: weight.in_features * width].view(weight.in_features, width)
                dequantize(weight, i, numbers)
            outputs.append(masked[0] @ numbers)
            if len(masked) > 1:  # the low plane of what is read by the high one alone
                outputs[-1] -= (masked[0] - masked[1]) @ dequantize(weight, i, numbers, low=True)
        y = torch.cat(outputs, dim=-1)
    return (y if linear.bias is None else y + linear.bias).split(widths, dim=-1)


def head_products(weights: CudaWeights, x: Tensor) -> Tensor:
    """x (T, H), normalized, times the output layer: (T, V) of x's dtype."""
    if weights.head_scales is None:
        return functional.linear(x, weights.head)
    assert weights.dequantized is not None
    # int8 codes are exact in every floating type; the sums are multiplied.
    rows = max(1, weights.dequantized.numel() // x.shape[1])
    parts = []
    for codes, scales in zip(weights.head.split(rows), weights.head_scales.split(rows), strict=True):
        numbers = weights.dequantized[: codes.numel()].view(codes.shape).copy_(codes)
        parts.append((functional.linear(x, numbers) * scales).to(x.dtype))
    return torch.cat(parts, dim=-1)


def lower_right() -> Callable[[int, int], Tensor]:
    """Makes the mask of a prompt's later chunks. Imported late: torch._dynamo comes with it and takes 2 to 3 seconds."""
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right


def attention(config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """As ``runtime.torch.block``'s, without an explicit mask where torch has kernels that need none."""
    count, stop = q.shape[1], keys.shape[1]
    behind = start > 0 and count > 1
    windowed = window is not None and stop > window
    if config.attention_softcap is not None or windowed or (behind and count <= _FEW):
        return plain_attention(config, q, keys, values, start, window)
    mask = lower_right()(count, stop) if behind else None
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, is_causal=start == 0 and count > 1,
        scale=config.attention_scale, enable_gqa=q.shape[0] != keys.shape[0],
    )[0]  # fmt: skip


def too_little_memory(device: torch.device) -> str | None:
    """Why no graphs are made ahead, as a clause; None if there is memory for them."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _FREE:
        return f"less than {_FREE >> 20} MiB of its memory are free"
    return None


class _Graph(NamedTuple):
    """A captured read of up to ``rows`` positions."""

    rows: int
    given: Tensor  # (3 + rows,) int64: slot, first position, number of positions, and their tokens
    logits: Tensor  # (1, V) float32, the head's products of the last position
    replay: Callable[[], None]
    launch: Callable[[], None]  # the graph itself keeps no memory that was there before its capture, as the queries'


class ShortPrompts:
    """The graphs of one decoder. Half precision, and no recurrent blocks; see :meth:`refusal`."""

    def __init__(self, weights: CudaWeights, config: ModelConfig, cache: KVCache, tables: PositionTables) -> None:
        self._weights, self._config, self._cache, self._tables = weights, config, cache, tables
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._switch = switch_length(config)
        # Quantized linears' products, MAX_ROWS rows at a time.
        self._scratch = Scratch(device, dtype)
        self._planned: dict[int, tuple[FusedLinear, KernelPlan]] = {}
        for linear in (linear for block in weights.blocks for linear in block.linears):
            if linear.weight.quant != "none":
                dense = replace(linear, dense=True)
                chosen = plan(dense.shape, MAX_ROWS, pdl=False)
                self._scratch.reserve(chosen)
                self._planned[id(linear.weight.data)] = dense, chosen
        with triton_compiling(2 * len(set(config.blocks)) + len(_ROWS)):
            self._graphs = [self._capture(rows) for rows in _ROWS]

    @staticmethod
    def refusal(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why prompts are not captured, as a clause; None if they are."""
        if dtype == torch.float32:
            return "its weights are float32"
        if config.delta_net is not None:
            return "its recurrent blocks are read position by position"
        if len({(block.head_dim, block.num_kv_heads, block.shared_values) for block in config.blocks}) > 1:
            return "its heads differ from block to block"
        if config.architecture.value_norm:
            return "its values are normalised"
        return too_little_memory(device)

    def logits(self, slot: int, token_ids: Tensor, start: int, stop: int) -> Tensor | None:
        """Read some positions of a prompt (T,) into a slot, all dense: (1, V) float32, the head's products of the last
        one read, valid until the next call; None if no graph serves them. Asynchronous."""
        count = stop - start
        graph = next((graph for graph in self._graphs if count <= graph.rows), None)
        if graph is None or (self._switch is not None and len(token_ids) > self._switch):
            return None
        given = torch.zeros(3 + graph.rows, dtype=torch.int64)
        given[:3] = torch.tensor((slot, start, count))
        given[3 : 3 + count] = token_ids[start:stop]
        graph.given.copy_(given, non_blocking=True)
        graph.replay()
        return graph.logits

    def _capture(self, rows: int) -> _Graph:
        weights, config = self._weights, self._config
        device, dtype = weights.embedding.device, weights.embedding.dtype
        given = torch.zeros(3 + rows, dtype=torch.int64, device=device)  # no positions: captured, it writes no cache
        queries = torch.empty(rows, config.num_heads, config.blocks[0].head_dim, dtype=dtype, device=device)
        logits = Logits.empty(1, config.vocab_size, device)

        def launch() -> None:
            x = embed(config, weights.embedding, given[3:])
            for index, block in enumerate(weights.blocks):

                def apply(role: str, n: Tensor, block: Block[FusedLinear] = block) -> tuple[Tensor]:
                    return (self._products(getattr(block, role), n),)

                n = x if block.attention_input is None else block.attention_input(x)
                keys, values = self._cache.attention[index]
                rotary, out = self._tables[block.spec.rotary], torch.empty_like(queries)
                launch_chunk_attention(
                    self._products(block.qkv, n), given, KVSlots(keys, values, keys.shape[2]), rotary, queries, out,
                    **attention_arguments(config, block, rotary),
                )  # fmt: skip
                x = finish_block(config, block, x, out.flatten(1), apply)
            last = x.index_select(0, (given[2:3] - 1).clamp(min=0))
            launch_logits(
                last, last.float().square().sum(-1, keepdim=True), weights.norm.factors, weights.head,
                weights.head_scales, logits, eps=config.rms_norm_eps,
            )  # fmt: skip

        return _Graph(rows, given, logits.logit, capture(launch, device), launch)

    def _products(self, linear: FusedLinear, x: Tensor) -> Tensor:
        """x (T, K) to (T, N), T a multiple of MAX_ROWS."""
        if linear.weight.quant == "none":
            y = x @ linear.weight.data[:, : linear.out_features]
            return y if linear.bias is None else y + linear.bias
        dense, chosen = self._planned[id(linear.weight.data)]
        y = x.new_empty(len(x), linear.out_features)
        for rows, out in zip(x.split(MAX_ROWS), y.split(MAX_ROWS), strict=True):
            launch_linear(dense, Input(rows), Output(out), self._scratch, chosen)
        return y
