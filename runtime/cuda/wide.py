"""A decode step of 17 to 32 rows: products by cuBLAS, of quantized weights by ``packed_gemv`` or ``code_gemm``.

    embed -> [mask, qkv -> attention -> combine and mask, o -> add, norm, mask, gate and up -> activate and mask, down
    -> add, norm] x blocks -> logits -> next token

Up to 16 rows (``step``), each program recomputes its masked, normed and activated inputs. Beyond that recomputing them
costs more than loading the weights, so masks, norms and activations get launches of their own. Only ``packed_gemv``
applies masks itself: to the inputs of qkv, gate and up, and of all linears with graded weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from wisparse.kernels.gpu.code_gemm import MOST_TILES, code_gemm, code_gemm_tile
from wisparse.kernels.gpu.common import Input, Output
from wisparse.kernels.gpu.experts import ExpertLinear
from wisparse.kernels.gpu.head import launch_logits
from wisparse.kernels.gpu.masked_gemm import mask_gemm, mask_rows
from wisparse.kernels.gpu.plan import GemvTile, gpu_of, launch_linear, mask_gemm_tile, plan
from wisparse.kernels.gpu.reduction import Mask, launch_combine
from wisparse.kernels.gpu.weights import FusedLinear
from wisparse.kernels.reference import keep_mask

from ..torch.block import LINEARS, Block
from .blocks import tensor_of
from .step import DecodeStep
from .weights import AnyLinear, CudaWeights

WIDE_ROWS = 32
_MOST_BATCHED = 16  # products of a bmm


def takes_wide_steps(weights: CudaWeights) -> bool:
    """Whether the weights support a step of ``WIDE_ROWS`` rows."""
    linears = [linear for block in weights.blocks for linear in block.linears]
    half, processors = weights.embedding.dtype != torch.float32, gpu_of(weights.embedding.device).multiprocessors
    return not any(isinstance(linear, ExpertLinear) for linear in linears) and all(
        linear.weight.quant == "none"
        or plan(cast("FusedLinear", linear).shape, WIDE_ROWS).packed is not None
        or (half and code_gemm_tile(cast("FusedLinear", linear), WIDE_ROWS, processors) is not None)
        for linear in linears
    )


class WideStep(DecodeStep):
    def _plan(self, tiles: dict[str, GemvTile], kv_splits: int) -> None:
        self._last_norm = self.weights.norm
        device = self.weights.embedding.device
        self._gpu, self._all_masked = gpu_of(device), torch.ones(self.rows, device=device)
        self._counter = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        # Plans of the linears that ``packed_gemv`` computes; dense if their input is already masked.
        for block in self.weights.blocks:
            self.plans.append({})
            for role in LINEARS:
                linear, first = getattr(block, role), getattr(self.weights.blocks[0], role)
                if linear.weight.quant == "none":
                    continue
                chosen = plan(
                    linear.shape._replace(dense=linear.dense or _comes_masked(block, role)), self.rows,
                    tile=tiles.get(role) if linear.widths == first.widths else None, pdl=self.pdl,
                )  # fmt: skip
                if chosen.packed is not None:
                    self.plans[-1][role] = chosen
                    self._scratch.reserve(chosen)

    def block_launches(self, index: int) -> dict[str, Callable[[], object]]:
        """One block's products by name, of inputs of zeros, for per-kernel timings."""
        self._counts_now, n, block = False, self.hidden, self.weights.blocks[index]
        zeros = {role: Input(n.new_zeros(len(n), getattr(block, role).in_features)) for role in LINEARS}
        return {role: partial(self._linear, index, role, x) for role, x in zeros.items()}

    def _launch_blocks(self, count: bool, indices: Iterable[int]) -> None:
        if count:  # this step's buffer starts from the totals of the steps before
            self.counts.cells[self._buffer].copy_(self.counts.cells[1 - self._buffer])
        norm = self._next_norm(-1, ())
        self.normed = self.hidden.clone() if norm is None else norm(self.hidden)
        super()._launch_blocks(count, indices)

    def launch_logits(self) -> None:
        weights, normed = self.weights, self.hidden if self.normed is None else self.normed
        launch_logits(normed, None, None, weights.head, weights.head_scales, self._logits, pdl=self.pdl)

    def _attend(self, index: int, qkv: Tensor) -> Input:
        super()._attend(index, qkv)
        mask = self._mask(self.weights.blocks[index], "o")
        return Input(launch_combine(self._attended[index], qkv.dtype, mask))

    def _mask(self, block: Block[AnyLinear], role: str) -> Mask | None:
        linear = getattr(block, role)
        return None if linear.dense or not _comes_masked(block, role) else (linear.scales, linear.thresholds)

    def _linear(self, index: int, role: str, value: Input) -> Tensor:
        """A linear of (rows, K): (rows, N), masked here unless ``_comes_masked``."""
        x = tensor_of(value)
        linear, chosen = cast("FusedLinear", getattr(self.weights.blocks[index], role)), self.plans[index].get(role)
        weight_t, k = linear.weight.data, linear.in_features
        tile = code_gemm_tile(linear, len(x), self._gpu.multiprocessors)
        counting = self.counts.of(index, role, self._buffer) if self._counts_now else None
        masks_itself = chosen is not None and not chosen.shape.dense
        if counting is not None and not masks_itself:
            active = (counting.token >= 0)[:, None]
            for cell, scales, threshold in zip(counting.after, linear.scales, linear.thresholds, strict=True):
                cell += (keep_mask(x, scales, threshold) & active).sum()
        if chosen is not None:
            y = x.new_empty(len(x), linear.out_features)
            launch_linear(
                linear, Input(x), Output(y), self._scratch, chosen, counting=counting if masks_itself else None
            )
            return y
        if linear.dense or _comes_masked(self.weights.blocks[index], role):
            if tile is not None:
                return code_gemm(x, linear, self._counter, tile)
            y = x @ weight_t[:, : linear.out_features]
            return y if linear.bias is None else y + linear.bias
        if tile is not None:
            masked = mask_rows(x, linear.scales, linear.thresholds, self._all_masked)
            return code_gemm(masked, linear, self._counter, tile)
        measured = mask_gemm_tile(self._gpu, k, linear.out_features, len(x))
        if measured is not None and x.dtype != torch.float32:
            return mask_gemm(x, linear, self._all_masked, measured)
        y, w = x.new_empty(len(x), linear.out_features), weight_t[:, : linear.out_features]
        # Projections of unequal widths as one bmm of equal column blocks: 19 instead of 31 us for 8B's qkv.
        width = math.gcd(*linear.widths)
        copies = [n // width for n in linear.widths]
        if 2 < sum(copies) <= _MOST_BATCHED:
            masked = mask_rows(x, linear.scales, linear.thresholds, self._all_masked, copies=copies)
            w_blocks, y_blocks = (matrix.unflatten(1, (-1, width)).transpose(0, 1) for matrix in (w, y))
            torch.bmm(masked, w_blocks, out=y_blocks)
        else:
            masked = mask_rows(x, linear.scales, linear.thresholds, self._all_masked)
            for rows, part, out in zip(masked, w.split(linear.widths, 1), y.split(linear.widths, 1), strict=True):
                torch.mm(rows, part, out=out)
        return y if linear.bias is None else y + linear.bias


def _comes_masked(block: Block[AnyLinear], role: str) -> bool:
    """Whether the launch before a linear masks its input; not for graded weights, whose planes have a mask each."""
    before = role == "down" or (role == "o" and block.delta is None)
    return before and getattr(block, role).weight.planes == 1
