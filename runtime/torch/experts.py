"""Routed experts in plain PyTorch: the router chooses for each token, and each expert reads the tokens that chose it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.model_config import ModelConfig

from .block import Block, Norm, activate, float_dtype


def router_input(block: Block[Any], x: Tensor) -> Tensor:
    """What the router multiplies, of what enters the experts (T, H)."""
    if block.router_scale is None or block.mlp_input is None:
        return x
    return Norm(block.router_scale, block.mlp_input.eps, offset=False)(x) * x.shape[1] ** -0.5


def route(block: Block[Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the chosen experts, in x's type, and which these are: (T, chosen) each, from x (T, H)."""
    experts, router = block.spec.experts, block.router
    assert experts is not None
    assert router is not None
    logits = functional.linear(router_input(block, x), router, block.router_bias)
    shares = logits.softmax(-1, dtype=float_dtype(x.dtype))
    weights, chosen = shares.topk(experts.chosen, dim=-1)
    if experts.renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if block.expert_scale is not None:
        weights = weights * block.expert_scale[chosen]
    return weights.to(x.dtype), chosen


def run_experts(config: ModelConfig, block: Block[Any], x: Tensor, first_sparse: int) -> Tensor:
    """A block's MLP of experts, x (T, H) to (T, H); rows from ``first_sparse`` on are masked. ``gate_up`` lists the
    linears of all experts' gates, then of their ups."""
    count, out = len(block.down), torch.zeros_like(x)
    weights, chosen = route(block, x)
    entered = x if block.experts_input is None else block.experts_input(x)
    for expert in chosen.unique().tolist():
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        rows, dense = entered[tokens], int((tokens < first_sparse).sum())
        gate, up = (block.gate_up[at](rows, dense) for at in (expert, count + expert))
        half = block.down[expert](activate(config, gate, up), dense)
        out.index_add_(0, tokens, half * weights[tokens, place, None])
    if block.shared_gate_up is None or block.shared_down is None:
        return out
    n = block.mlp_input(x) if block.shared_output is not None and block.mlp_input is not None else x
    gate, up = (linear(n, first_sparse) for linear in block.shared_gate_up)
    half = block.shared_down[0](activate(config, gate, up), first_sparse)
    if block.shared_output is not None and block.experts_output is not None:
        return block.shared_output(half) + block.experts_output(out)
    assert block.shared_gate is not None
    return out + functional.linear(x, block.shared_gate).sigmoid() * half
