"""Launch a linear as its ``plan`` says: input (x, RMSNorm of the residual stream, or attention's splits) -> the kept
channels' product -> bias, activation or residual (``common.Input``, ``common.Output``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import Counting, Input, Output, Weights, Workspace
from .plan import GemvTile, KernelPlan, plan
from .reduction import EMPTY
from .sparse_gemv import sparse_gemv_kernel
from .weights import FusedLinear


class Scratch:
    """Memory the programs of a launch share; one is enough for all launches of a stream, as they run in order."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.partial = torch.empty(1, dtype=torch.int32, device=device)
        self.polled = torch.full((1,), EMPTY, dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.index = torch.empty(1, dtype=torch.int32, device=device)
        self.value = torch.empty(1, dtype=dtype, device=device)

    def reserve(self, plan: KernelPlan) -> None:
        """Grow to what a launch needs. Not during graph capture: a captured launch keeps the addresses it saw."""
        lists = 0 if plan.launch.smem else plan.programs * plan.launch.length
        for name, size in (
            ("polled" if plan.tile.reducers else "partial", plan.launch.splits * plan.rows * plan.problem.n),
            ("index", lists),
            ("value", plan.rows * lists),
            ("counter", plan.launch.tiles),
        ):
            held = getattr(self, name)
            if held.numel() < size:
                # Launches leave counters and polled sums as they found them; the rest may hold anything.
                content = EMPTY if name == "polled" else 0
                setattr(self, name, torch.full((size,), content, dtype=held.dtype, device=held.device))


def launch_linear(
    linear: FusedLinear,
    given: Input,
    output: Output,
    scratch: Scratch,
    plan: KernelPlan,
    *,
    eps: float = 0.0,
    counting: Counting | None = None,
) -> None:
    """Launch a linear on the current stream. Nothing is checked or allocated: ``scratch.reserve(plan)`` came before.

    ``eps``: of the RMSNorm; ``counting``: add up the kept channels (of a linear that is not dense).
    """
    weight, in_scratch = linear.weight, plan.launch.smem == ""
    arguments: tuple[Any, ...] = (
        given,
        Weights(weight.data, linear.bias, linear.scales, linear.thresholds, weight.scales, weight.zeros),
        output,
        Workspace(
            scratch.polled if plan.tile.reducers else scratch.partial,
            None if plan.tile.reducers else scratch.counter,
            scratch.index if in_scratch and plan.kernel is sparse_gemv_kernel else None,
            scratch.value if in_scratch else None,
        ),
        counting,
        eps,
        1 if given.ssq is None else given.ssq.shape[1],
        plan.problem,
        plan.launch,
    )
    if plan.packed is not None:
        arguments += (plan.packed,)
    plan.kernel[(plan.programs,)](*arguments, **plan.options)


def apply_linear(x: Tensor, linear: FusedLinear, tile: GemvTile | None = None) -> Tensor:
    """y (B, N) of x (B, K), allocated here: for tests and benchmarks."""
    chosen = plan(linear.shape, len(x), tile=tile)
    scratch = Scratch(x.device, x.dtype)
    scratch.reserve(chosen)
    out = torch.empty(len(x), linear.out_features, dtype=x.dtype, device=x.device)
    launch_linear(linear, Input(x), Output(out), scratch, chosen)
    return out
