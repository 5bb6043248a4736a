"""Products, experts and attention of prompts without a graph: what ``runtime.torch.block`` calls for masked prompts, in
float32, and for families that `PromptReader` refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig
from wisparse.kernels.gpu.attention import AttentionShape, launch_chunk_attention
from wisparse.kernels.gpu.common import Input
from wisparse.kernels.gpu.count import launch_count
from wisparse.kernels.gpu.expert_gemm import expert_gemm, sort_by_expert
from wisparse.kernels.gpu.experts import ExpertLinear
from wisparse.kernels.gpu.kv_cache import kv_slots
from wisparse.kernels.gpu.launch import Scratch, multiply, separate_products
from wisparse.kernels.gpu.products import choose_product
from wisparse.kernels.gpu.weights import FusedLinear, dequantize
from wisparse.kernels.reference import keep_mask

from ..torch.block import Block, drop_channels
from ..torch.block import attention as plain_attention
from .weights import AnyLinear, CudaWeights

# Up to this many positions after a cached prefix an explicit mask is faster than the import in ``lower_right``.
_FEW = 64


def project(linear: FusedLinear, x: Tensor, first_sparse: int, scratch: Scratch) -> tuple[Tensor, ...]:
    """Each projection of x (T, K), masked from row ``first_sparse`` on."""
    weight, widths = linear.weight, linear.widths
    if linear.dense or first_sparse >= len(x):
        product = choose_product(linear.shape, len(x), "prompt", ready=True)
        return multiply(product, linear, x, scratch).split(widths, dim=-1)
    limits = linear.thresholds.view(len(widths), weight.planes)
    masked = [  # of each projection, for each plane
        [drop_channels(x, keep_mask(x[first_sparse:], scale, limit)) for limit in own]
        for scale, own in zip(linear.scales, limits, strict=True)
    ]
    y = separate_products(torch.stack([high for high, *_ in masked]), linear, scratch).split(widths, dim=-1)
    for i, (high, *lows) in enumerate(masked):
        for low in lows:  # subtract the low plane of channels that keep the high plane only
            y[i].sub_((high - low) @ dequantize(weight, i, scratch.widened_like(weight, range(i, i + 1)), low=True))
    return y


def run_experts(
    config: ModelConfig, block: Block[AnyLinear], x: Tensor, routing: tuple[Tensor, Tensor], first_sparse: int,
    counted: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A block's experts of x (T, H); rows from ``first_sparse`` on are masked. ``routing``: the chosen experts and their
    weights; ``counted``: as of ``launch_count``."""
    gate_up, down, (expert, weight) = block.gate_up, block.down, routing
    assert isinstance(gate_up, ExpertLinear)
    assert isinstance(down, ExpertLinear)
    groups, masked_from = sort_by_expert(expert, len(gate_up.scales)), first_sparse if first_sparse < len(x) else None
    activated = x.new_empty(expert.numel(), down.in_features)
    tiles: list[Any] = [choose_product(linear.shape, len(x), "prompt").tile for linear in (gate_up, down)]
    ends: dict[str, Any] = {"activation": config.activation, "clamp": config.clamp, "first_sparse": masked_from}
    expert_gemm(x, gate_up, groups, activated, tiles[0], **ends)
    out = x.new_empty(len(x), expert.shape[1], down.out_features)
    expert_gemm(activated, down, groups, out, tiles[1], weight=weight, first_sparse=masked_from)
    if counted is not None and masked_from is not None:
        launch_count(gate_up, Input(x[first_sparse:]), counted, expert=expert[first_sparse:])
        order = groups.order.long()
        tokens, sorted_expert = order // expert.shape[1] - first_sparse, expert.flatten()[order][:, None]
        launch_count(down, Input(activated), counted, tokens=tokens, expert=sorted_expert)
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
    masked = config.latent is not None or config.attention_softcap is not None  # heads wider than 256 have no kernel
    if masked or sinks is not None or windowed or (later_chunk and count <= _FEW):
        return plain_attention(config, q, keys, values, start, window, sinks)
    mask = lower_right()(count, stop) if later_chunk else None
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, is_causal=start == 0 and count > 1,
        scale=config.attention_scale, enable_gqa=q.shape[0] != keys.shape[0],
    )[0]  # fmt: skip
