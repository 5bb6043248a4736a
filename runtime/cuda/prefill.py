"""Prefill. Dense prompts in half precision are read by ``PromptReader``, chunk by chunk as CUDA graphs; all others by
the block in ``runtime.torch.block``.

Without a graph the kernel launches of a short chunk take the host several times as long as the GPU needs to load the
weights. A graph serves any slot and position, which are in a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.backend import compiling_side_by_side, triton_compiling
from wisparse.kernels.gpu.attention import (
    AttentionShape,
    Rows,
    launch_attention,
    launch_chunk_attention,
    launch_store_kv,
    launch_store_rows,
)
from wisparse.kernels.gpu.code_gemm import MOST_TILES, code_gemm, code_gemm_tile
from wisparse.kernels.gpu.common import KVSplits
from wisparse.kernels.gpu.expert_gemm import expert_gemm, sort_by_expert
from wisparse.kernels.gpu.experts import ExpertLinear, choose_experts
from wisparse.kernels.gpu.head import Logits, launch_logits
from wisparse.kernels.gpu.kv_cache import kv_slots
from wisparse.kernels.gpu.plan import Gpu, gpu_of
from wisparse.kernels.gpu.reduction import launch_activate, launch_combine, launch_residual_add
from wisparse.kernels.gpu.weights import FusedLinear, dequantize, widen
from wisparse.kernels.reference import keep_mask

from ..decoding.cache import KVCache
from ..decoding.decoder import PROMPTS_TOGETHER
from ..decoding.heads import DraftHead
from ..decoding.rotary import switch_length
from ..torch.block import Block, Norm, drop_channels, embed
from ..torch.block import attention as plain_attention
from .step import PositionTables, attention_arguments, capture, router_of
from .weights import AnyLinear, CudaWeights

# Positions of a chunk, which bounds the activations' memory; cuBLAS reaches its full rate at about this size.
_CHUNK = 2048
# With a sliding window or a soft cap, whose (chunk, context) mask or scores are stored.
_SMALL_CHUNK = 512
# Positions read between two decode steps of other sequences, at most half of a chunk.
PIECE = 512
# Up to this many positions after a cached prefix an explicit mask is faster than the import in ``lower_right``.
_FEW = 64
# Rows of the graphs; a chunk is padded to the next size.
_ROWS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
# Rows of the graphs that read several short prompts together.
_ROWS_TOGETHER = (32, 128, 512)
# Up to this many rows ``code_gemm`` is used. ``widen`` and cuBLAS are as fast from 256 rows on and take 1.9 times as
# long with 128 (H100, 8B shape).
_CODE_ROWS = 128
# Bytes of GPU memory that have to be free before graphs are captured: they take some tens of MB, and cuBLAS a
# workspace.
_FREE = 1 << 30


# Called with a linear, its input (T, K) and the first masked row.
Observer = Callable[[FusedLinear, Tensor, int], None]


def chunk_size(config: ModelConfig, dtype: torch.dtype) -> int:
    windows = any(block.window is not None for block in config.blocks)
    return _SMALL_CHUNK if dtype == torch.float32 or windows or config.attention_softcap is not None else _CHUNK


def project(linear: FusedLinear, x: Tensor, first_sparse: int, scratch: Tensor | None) -> tuple[Tensor, ...]:
    """Each projection of x (T, K), masked from row ``first_sparse`` on; quantized weights are widened into
    ``scratch``."""
    weight, widths = linear.weight, linear.widths
    dense = linear.dense or first_sparse >= len(x)
    if dense and weight.quant == "none":  # one product for all projections
        y = x @ weight.data[:, : linear.out_features]
    else:
        outputs = []
        for i, width in enumerate(widths):
            masked, first = [x], weight.first(i)
            if not dense:
                limits = linear.thresholds[i * weight.planes : (i + 1) * weight.planes]
                keeps = (keep_mask(x[first_sparse:], linear.scales[i], limit) for limit in limits)
                masked = [drop_channels(x, keep) for keep in keeps]
            w = weight.data[:, first : first + width]
            if weight.quant != "none":
                assert scratch is not None
                w = widen(weight, i, scratch[: weight.in_features * width].view(weight.in_features, width))
            outputs.append(masked[0] @ w)
            if len(masked) > 1:  # subtract the low plane of channels that keep the high plane only
                outputs[-1] -= (masked[0] - masked[1]) @ dequantize(weight, i, w, low=True)
        y = torch.cat(outputs, dim=-1)
    return (y if linear.bias is None else y + linear.bias).split(widths, dim=-1)


def run_experts(
    config: ModelConfig, block: Block[AnyLinear], x: Tensor, routing: tuple[Tensor, Tensor], first_sparse: int, gpu: Gpu,
    observe: Observer | None = None,
) -> Tensor:  # fmt: skip
    """A block's experts of x (T, H); rows from ``first_sparse`` on are masked. ``routing``: the chosen experts and their
    weights; ``observe``: called for each expert's linears."""
    gate_up, down, (expert, weight) = block.gate_up, block.down, routing
    assert isinstance(gate_up, ExpertLinear)
    assert isinstance(down, ExpertLinear)
    groups, masked_from = sort_by_expert(expert, len(gate_up.scales)), first_sparse if first_sparse < len(x) else None
    activated = x.new_empty(expert.numel(), down.in_features)
    expert_gemm(
        x, gate_up, groups, activated, gpu, activation=config.activation, clamp=config.clamp, first_sparse=masked_from
    )
    out = x.new_empty(len(x), expert.shape[1], down.out_features)
    expert_gemm(activated, down, groups, out, gpu, weight=weight, first_sparse=masked_from)
    offsets = pairwise(groups.offset.tolist() if observe is not None else ())
    for index, (first, end) in enumerate(offsets):
        assert observe is not None
        rows = groups.order[first:end] // expert.shape[1]
        dense = int((rows < first_sparse).sum())
        observe(gate_up.one(index), x[rows], dense)
        observe(down.one(index), activated[first:end], dense)
    return out.sum(1)


def head_products(weights: CudaWeights, x: Tensor) -> Tensor:
    """The logits (T, V), in x's dtype, of normalized x (T, H)."""
    if weights.head_scales is None:
        return functional.linear(x, weights.head)
    assert weights.dequantized is not None
    # int8 codes are exact in every dtype; their scales multiply the products.
    rows = max(1, weights.dequantized.numel() // x.shape[1])
    parts = []
    for codes, scales in zip(weights.head.split(rows), weights.head_scales.split(rows), strict=True):
        w = weights.dequantized[: codes.numel()].view(codes.shape).copy_(codes)
        parts.append((functional.linear(x, w) * scales).to(x.dtype))
    return torch.cat(parts, dim=-1)


def lower_right() -> Callable[[int, int], Tensor]:
    """torch's causal mask for a prompt's later chunks. Imported here, as it imports torch._dynamo, which takes 2 to 3
    s."""
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right


def attention(
    config: ModelConfig, q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``runtime.torch.block.attention`` without an explicit mask where torch's kernels need none. These do not support
    sinks; in half precision ``launch_chunk_attention`` does."""
    count, stop = q.shape[1], keys.shape[1]
    if sinks is not None and q.dtype != torch.float32:
        queries, slots = q.transpose(0, 1).contiguous(), kv_slots(keys[None], values[None])
        chunk, out = torch.tensor((0, start, count)).to(q.device, non_blocking=True), torch.empty_like(queries)
        shape = AttentionShape(len(q), len(keys), q.shape[2], 0, window or 0)
        launch_chunk_attention(queries, queries, chunk, slots, out, shape, config.attention_scale, sinks=sinks)
        return out.transpose(0, 1)
    later_chunk = start > 0 and count > 1
    windowed = window is not None and stop > window
    if config.attention_softcap is not None or sinks is not None or windowed or (later_chunk and count <= _FEW):
        return plain_attention(config, q, keys, values, start, window, sinks)
    mask = lower_right()(count, stop) if later_chunk else None
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, is_causal=start == 0 and count > 1,
        scale=config.attention_scale, enable_gqa=q.shape[0] != keys.shape[0],
    )[0]  # fmt: skip


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
    given: Tensor
    replay: Callable[[], object]


class PromptReader:
    """Dense prefill of a decoder's prompts; see :meth:`refusal` for what is not supported."""

    def __init__(self, weights: CudaWeights, config: ModelConfig, cache: KVCache, tables: PositionTables) -> None:
        self._weights, self._config, self._cache = weights, config, cache
        self._switch = switch_length(config)
        device = weights.embedding.device
        self._logits = Logits.empty(1, weights.head)
        self._prompts = min(PROMPTS_TOGETHER, len(cache.lengths))  # the most in one call of ``read_together``
        fitting = -(-len(cache.lengths) * len(tables[0].cos) // 16) * 16
        self._together_rows = sorted({min(rows, fitting) for rows in _ROWS_TOGETHER}) if self._prompts > 1 else []
        self._logits_together = Logits.empty(self._prompts, weights.head)
        self._graphs: list[_Graph] = []
        self._together: list[_Graph] = []
        self._head: DraftHead | None = None
        rotaries = [tables[block.spec.rotary] for block in weights.blocks]
        self._attention = [
            (attention_arguments(config, block, rotary), rotary)
            for block, rotary in zip(weights.blocks, rotaries, strict=True)
        ]
        self._gpu = gpu_of(device)
        self._counter = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    @property
    def most_together(self) -> int:
        """The most positions of a call of ``read_together``."""
        return max(self._together_rows, default=0)

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
        self._head, self._together_rows = head, []

    def capture(self, chunk: int) -> None:
        """Capture the graphs of up to ``chunk`` rows, largest first, in one memory pool, as one runs at a time."""
        device, pool = self._weights.embedding.device, None
        if device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
        sizes = sorted({min(rows, chunk) for rows in _ROWS}, reverse=True)
        graphs = [(3 + rows, rows, False) for rows in sizes]
        graphs += [(2 * rows + self._prompts, rows, True) for rows in reversed(self._together_rows)]
        with triton_compiling(2 * len(set(self._config.blocks)) + len(sizes)):
            if device.type == "cuda":
                distinct = {block: index for index, block in enumerate(self._config.blocks)}
                with compiling_side_by_side():
                    for size, _, several in graphs:
                        given = torch.zeros(size, dtype=torch.int64, device=device)
                        self._launch(given, distinct.values(), several=several)
            for size, rows, several in graphs:
                # No positions, or idle rows, so that the run before the capture writes no cache.
                given = torch.full((size,), -1 if several else 0, device=device)
                given[rows * several :].zero_()
                launch = partial(self._launch, given, several=several)
                (self._together if several else self._graphs).insert(
                    0, _Graph(rows, given, capture(launch, device, pool))
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
            given = torch.zeros(3 + (count if graph is None else graph.rows), dtype=torch.int64)
            given[:3] = torch.tensor((slot, start, count))
            given[3 : 3 + count] = token_ids[start:end]
            if graph is None:
                self._launch(given.to(self._logits.logit.device, non_blocking=True))
            else:
                graph.given.copy_(given, non_blocking=True)
                graph.replay()
            start = end
        return self._logits.logit

    def read_together(self, prompts: Sequence[tuple[int, Tensor, int]]) -> Tensor:
        """Read several prompts to their ends; prompts: (slot, token ids, first position to read), in all at most
        ``most_together`` positions. Returns (len(prompts), V) as :meth:`read`."""
        parts = [(slot, start, ids[start:]) for slot, ids, start in prompts]
        count, device = sum(len(ids) for *_, ids in parts), self._logits.logit.device
        rows = next(rows for rows in self._together_rows if count <= rows)
        given = torch.zeros(2 * rows + self._prompts, dtype=torch.int64)
        given[:rows] = -1
        given[:count] = torch.cat([ids for *_, ids in parts])
        positions, slots = given[rows : 2 * rows].view(torch.int32).view(2, rows)
        end = 0
        for index, (slot, start, ids) in enumerate(parts):
            first, end = end, end + len(ids)
            positions[first:end] = torch.arange(start, start + len(ids))
            slots[first:end], given[2 * rows + index] = slot, end - 1
        graph = next((graph for graph in self._together if graph.rows == rows), None)
        if graph is None:
            self._launch(given.to(device, non_blocking=True), several=True)
        else:
            graph.given.copy_(given, non_blocking=True)
            graph.replay()
        return self._logits_together.logit[: len(prompts)]

    def _launch(self, given: Tensor, indices: Iterable[int] | None = None, *, several: bool = False) -> Tensor:
        """Read the positions of ``given``, as in ``_Graph``, and compute the last ones' logits. ``indices``: of the
        blocks to launch; None: all."""
        config, weights = self._config, self._weights
        blocks, eps = weights.blocks, config.rms_norm_eps
        tokens, last, logits = given[3:], (given[2:3] - 1).clamp(min=0), self._logits
        if several:
            size = (len(given) - self._prompts) // 2
            tokens, last, logits = given[:size], given[2 * size :], self._logits_together
            rows = Rows(tokens, *given[size : 2 * size].view(torch.int32).view(2, size))
        hidden = embed(config, weights.embedding, tokens.clamp(min=0))
        first = blocks[0].attention_input
        n = hidden.clone() if first is None else first(hidden)
        # Measured on an H100 with D = 128: 412 TFLOPS; 356 with two stages, 321 by torch's flash attention.
        stages = 3 if self._gpu.arch in (90, 100) and config.blocks[0].head_dim <= 128 else 2
        queries = hidden.new_empty(len(hidden), config.num_heads, config.blocks[0].head_dim)
        tapped, inputs = () if self._head is None else self._head.taps, [hidden] * (len(blocks) + 1)
        if several:
            sums = hidden.new_empty(2, len(hidden), config.num_heads, 1, dtype=torch.float32)
            splits = KVSplits(queries.new_empty(*sums.shape[1:], queries.shape[2], dtype=torch.float32), *sums)

        def add(half: Tensor, norm: Norm | None, next_norm: Norm | None, scalar: Tensor | None = None) -> None:
            factors, next_factors = (None if one is None else one.factors for one in (norm, next_norm))
            launch_residual_add(
                half, hidden, None, norm=factors, scalar=scalar, next_norm=next_factors, normed=n, eps=eps,
                multiplier=config.residual_multiplier,
            )  # fmt: skip

        for index in range(len(blocks)) if indices is None else indices:
            block = blocks[index]
            inputs[index] = hidden.clone() if index in tapped else hidden
            qkv = self._products(block.qkv, n)
            slots, (arguments, rotary) = kv_slots(*self._cache.attention[index]), self._attention[index]
            shape, scale = arguments["shape"], arguments["scale"]
            if several:
                launch_store_rows(qkv, slots, rows, rotary, shape, arguments["norms"])
                launch_attention(qkv, slots, rows, rotary, splits, **arguments, stored=True)
                attended = launch_combine(splits, hidden.dtype)
            else:
                launch_store_kv(qkv, given, slots, rotary, queries, shape, arguments["norms"])
                attended = torch.empty_like(queries)
                launch_chunk_attention(
                    queries, qkv, given, slots, attended, shape, scale, sinks=block.sinks, stages=stages
                )
            add(self._products(block.o, attended.reshape(len(hidden), -1)), block.attention_output, block.mlp_input)
            if block.spec.experts is None:
                half = self._products(block.down, launch_activate(self._products(block.gate_up, n), config.activation))
            else:
                half = run_experts(config, block, n, choose_experts(n, router_of(block)), len(n), self._gpu)
            next_norm = blocks[index + 1].attention_input if index + 1 < len(blocks) else None
            add(half, block.mlp_output, next_norm, block.scalar)
        if self._head is not None:
            offsets = torch.arange(len(hidden), device=hidden.device)
            taps = torch.cat([inputs[tap] for tap in tapped], dim=-1)
            self._head.keep(given[0].expand_as(offsets), given[1] + offsets, taps, offsets < given[2])
        ends = weights.norm(hidden.index_select(0, last))
        launch_logits(ends, None, None, weights.head, weights.head_scales, logits)
        return logits.logit

    def _products(self, linear: AnyLinear, x: Tensor) -> Tensor:
        """x (T, K) to (T, N), dense."""
        assert isinstance(linear, FusedLinear)
        weight = linear.weight
        if weight.quant == "none":
            y = x @ weight.data[:, : linear.out_features]
            return y if linear.bias is None else y + linear.bias
        tile = code_gemm_tile(linear, len(x), self._gpu.multiprocessors) if len(x) <= _CODE_ROWS else None
        if tile is not None:
            return code_gemm(x, linear, self._counter, tile)
        assert self._weights.dequantized is not None
        y = x.new_empty(len(x), linear.out_features)
        for i, (width, out) in enumerate(zip(linear.widths, y.split(linear.widths, dim=1), strict=True)):
            scratch = self._weights.dequantized[: weight.in_features * width].view(weight.in_features, width)
            torch.mm(x, widen(weight, i, scratch), out=out)
        return y if linear.bias is None else y.add_(linear.bias)
