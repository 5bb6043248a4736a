"""Launches of products: scratch memory, one launch with a linear's ends, or a product of many rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import Input, Output, Routing, Weights, Workspace
from .experts import ExpertLinear, expert_gemv_kernel
from .gemm import MOST_TILES, fused_gemm_kernel, gemm, mask_rows
from .packed_gemv import packed_gemv_kernel
from .products import Product
from .reduction import EMPTY
from .sparse_gemv import sparse_gemv_kernel
from .weights import DeviceWeight, FusedLinear, widen


class Scratch:
    """Scratch memory of products. The launches of a stream share one, as they run in order."""

    def __init__(self, device: torch.device, dtype: torch.dtype, widened: Tensor | None = None) -> None:
        """``widened``: (n,) of dtype, for the weights of a quantized projection."""
        self.widened, self.value = widened, torch.empty(0, dtype=dtype, device=device)
        self.partial = self.polled = self.index = self.value.to(torch.int32)  # each grows on its own
        self.counter = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        self.ones = torch.ones(0, dtype=torch.float32, device=device)  # the row mask if all rows are masked

    def holds(self, weight: DeviceWeight, projections: range) -> bool:
        """Whether these quantized projections can be widened at once."""
        columns = sum(weight.widths[projections.start : projections.stop])
        return self.widened is not None and weight.in_features * columns <= self.widened.numel()

    def widened_like(self, weight: DeviceWeight, projections: range) -> Tensor:
        """Where quantized projections are widened: (K, N)."""
        assert self.widened is not None
        k, width = weight.in_features, sum(weight.widths[projections.start : projections.stop])
        return self.widened[: k * width].view(k, width)

    def reserve(self, product: Product) -> None:
        """Grow to what a launch needs. Not during graph capture: a captured launch keeps the addresses."""
        launch, problem = product.launch, product.problem
        if launch is None or problem is None:
            if len(self.ones) < product.rows and (product.masks or product.copies):
                self.ones = self.ones.new_ones(product.rows)
            return
        lists = 0 if launch.smem else product.programs * launch.length
        for name, pair_size in (
            ("polled" if launch.reducers else "partial", launch.splits * problem.batch * problem.n),
            ("index", lists),
            ("value", problem.batch * lists),
            ("counter", launch.tiles),
        ):
            size = pair_size * product.pairs
            held = getattr(self, name)
            if held.numel() < size:
                # Each launch resets counters to 0 and polled sums to EMPTY; the others need no initial value.
                setattr(self, name, held.new_full((size,), EMPTY if name == "polled" else 0))

    def workspace(self, product: Product) -> Workspace:
        assert product.launch is not None
        spinning, in_scratch = product.launch.reducers > 0, product.launch.smem == ""
        return Workspace(
            self.polled if spinning else self.partial,
            None if spinning else self.counter,
            self.index if in_scratch and product.kernel == "sparse_gemv" else None,
            self.value if in_scratch else None,
        )


def launch_linear(
    linear: FusedLinear | ExpertLinear, inputs: Input, output: Output, scratch: Scratch, product: Product, *,
    eps: float = 0.0, routing: Routing | None = None,
) -> None:  # fmt: skip
    """Launch a linear with its ends, after ``scratch.reserve(product)``; nothing is checked or allocated. ``eps``: of the
    RMSNorm. Of experts, by ``routing``: gate_up from (B, K) to (B * k, I), down from (B * k, I) to (B, N)."""
    weight, problem, launch, tile = linear.weight, product.problem, product.launch, product.tile
    assert problem is not None
    assert tile is not None
    weights = Weights(weight.data, linear.bias, linear.scales, linear.thresholds, weight.scales, weight.zeros)
    ssq_parts = 1 if inputs.ssq is None else inputs.ssq.shape[1]
    shared = inputs, weights, output, scratch.workspace(product), eps, ssq_parts
    options: dict[str, Any] = {"num_warps": tile.warps, "launch_pdl": problem.pdl and tile.early}
    if routing is not None:
        chosen = routing.expert.shape[1]
        expert_gemv_kernel[(product.programs, product.pairs)](
            *shared, routing, problem, launch, product.packed, chosen, **options
        )
    elif product.packed is not None:
        options["maxnreg"] = tile.registers or None
        packed_gemv_kernel[(product.programs,)](*shared, problem, launch, product.packed, **options)
    else:
        kernel = sparse_gemv_kernel if product.kernel == "sparse_gemv" else fused_gemm_kernel
        kernel[(product.programs,)](*shared, problem, launch, **options)


def multiply(
    product: Product, linear: FusedLinear, x: Tensor, scratch: Scratch, *, row_mask: Tensor | None = None
) -> Tensor:
    """y (M, N) of x (M, K). ``row_mask``: (M,) float32, 1 for a masked row, 0 for one that keeps all channels; None: all
    are masked."""
    weight, n, bias = linear.weight, linear.out_features, linear.bias
    if product.fused:
        y = x.new_empty(len(x), n)
        launch_linear(linear, Input(x, row_mask=row_mask), Output(y), scratch, product)
        return y
    if (product.masks or product.copies) and row_mask is None:
        row_mask = scratch.ones[: len(x)]
    if product.copies:
        assert row_mask is not None
        x = mask_rows(x, linear.scales, linear.thresholds, row_mask, copies=product.copies, pdl=product.pdl)
    if product.tile is not None:
        return gemm(x, linear, product.tile, row_mask=row_mask if product.masks else None, counter=scratch.counter)
    if not product.copies and weight.quant == "none":  # one product for all projections
        y = x @ weight.data[:, :n]
        return y if bias is None else y + bias
    return (batched_product if product.batched else separate_products)(x, linear, scratch)


def batched_product(x: Tensor, linear: FusedLinear, scratch: Scratch | None = None) -> Tensor:
    """y (M, N) of x (pieces, M, K) by one batched product: a copy of a projection's input for each of the equal pieces
    that all projections divide into."""
    y, bias = x.new_empty(x.shape[1], linear.out_features), linear.bias
    weight_t = linear.weight.data[:, : linear.out_features]
    columns, outs = (matrix.unflatten(1, (len(x), -1)).transpose(0, 1) for matrix in (weight_t, y))
    if bias is None:
        torch.bmm(x, columns, out=outs)
    else:
        torch.baddbmm(bias.view(len(x), 1, -1), x, columns, out=outs)
    return y


def separate_products(x: Tensor, linear: FusedLinear, scratch: Scratch) -> Tensor:
    """y (M, N) of x (M, K) or (projections, M, K). Quantized weights are widened before: of an x (M, K) as many projections
    at once as the scratch memory holds, as narrow ones alone do not fill a GPU."""
    weight, widths, n, y = linear.weight, linear.widths, 0, x.new_empty(x.shape[-2], linear.out_features)
    last = 0
    while last < len(widths):
        first, column = last, n
        while last < len(widths) and (
            last == first or (x.dim() == 2 and scratch.holds(weight, range(first, last + 1)))
        ):
            n += widths[last]
            last += 1
        w = weight.data[:, column:n]
        if weight.quant != "none":
            w = widen(weight, range(first, last), scratch.widened_like(weight, range(first, last)))
        rows, out = x[first] if x.dim() == 3 else x, y[:, column:n]
        if linear.bias is None:
            torch.mm(rows, w, out=out)
        else:
            torch.addmm(linear.bias[column:n], rows, w, out=out)
    return y
