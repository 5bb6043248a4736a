"""What ``gpu_vllm.py`` asks of a model inside vLLM: functions that run in a process with a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from wisparse.runtime.vllm import product


def reserved_gib(model: Any) -> float:
    """What the process of a model's first part has reserved at most."""
    return round(torch.cuda.max_memory_reserved() / 2**30, 2) if torch.cuda.is_available() else 0.0


def watch_products(model: Any, choose: bool) -> int:
    """From here on products of prompts choose thresholds that drop half of their rows' channels, or count what is
    dropped; returns how many layers there are."""
    layers = {
        module.weight.data_ptr(): module.wisparse_thresholds
        for module in model.modules()
        if hasattr(module, "wisparse_thresholds")
    }
    dropped: list[float] = []

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        thresholds, sizes = layers[weight.data_ptr()], x[::16].abs().float().flatten()
        if choose:
            thresholds.fill_(float(sizes.kthvalue(sizes.numel() // 2).values))
        dropped.append(float((sizes < thresholds[0]).float().mean()))
        return torch.nn.functional.linear(x, weight, bias)

    product.functional = SimpleNamespace(linear=linear, dropped=dropped)
    return len(layers)


def watched(model: Any) -> list[float]:
    """The share of the channels that each layer's threshold drops; products are as before."""
    dropped: list[float] = product.functional.dropped
    product.functional = torch.nn.functional
    return dropped
