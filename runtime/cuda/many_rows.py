"""A decode step of 17 to 32 rows, whose masks, norms and activations have launches of their own:

    embed -> [mask, qkv -> attention -> combine and mask, o -> add, norm, mask, gate and up -> activate and mask, down
    -> add, norm] x blocks -> logits -> next token

Up to 16 rows (``step``), each program recomputes its masked, normed and activated inputs. Beyond that recomputing them
costs more than loading the weights. The inputs of o and down come masked; those of qkv, gate and up, and all those of
graded weights, whose planes have a mask each, are masked by their product or by a launch before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from wisparse.kernels.gpu.common import Input
from wisparse.kernels.gpu.experts import ExpertLinear
from wisparse.kernels.gpu.head import launch_logits
from wisparse.kernels.gpu.launch import multiply
from wisparse.kernels.gpu.products import Product, choose_product
from wisparse.kernels.gpu.reduction import Mask, launch_combine
from wisparse.kernels.gpu.tiles import Tile

from ..torch.block import Block
from .blocks import tensor_of
from .step import DecodeStep
from .weights import AnyLinear, CudaWeights

MANY_ROWS = 32


def takes_many_rows(weights: CudaWeights) -> bool:
    """Whether the weights support a step of ``MANY_ROWS`` rows: quantized ones if a kernel multiplies their codes."""
    linears = [linear for block in weights.blocks for linear in block.linears]
    latent = weights.blocks[0].latent is not None
    return not (latent or any(isinstance(linear, ExpertLinear) for linear in linears)) and all(
        linear.weight.quant == "none" or choose_product(linear.shape, MANY_ROWS, "rows").kernel != "cuBLAS"
        for linear in linears
    )


class ManyRowsStep(DecodeStep):
    def _plan(self, block: Block[AnyLinear], kv_splits: int, tiles: dict[str, Tile]) -> dict[str, Product]:
        ready = {role: _comes_masked(block, role) for role in block.roles}
        return {role: self._choose(block, role, "rows", tiles, ready=ready[role]) for role in block.roles}

    def block_launches(self, index: int) -> dict[str, Callable[[], object]]:
        """One block's products by name, of inputs of zeros, for per-kernel timings."""
        self._counting, n, block = False, self.hidden, self.weights.blocks[index]
        zeros = {role: Input(n.new_zeros(len(n), getattr(block, role).in_features)) for role in block.roles}
        return {role: partial(self._linear, index, role, x) for role, x in zeros.items()}

    def launch_blocks(self, indices: Iterable[int] | None = None) -> None:
        self._last_norm, norm = self.weights.norm, self._next_norm(-1, ())
        self.normed = self.hidden.clone() if norm is None else norm(self.hidden)
        super().launch_blocks(indices)

    def launch_logits(self) -> None:
        weights, normed = self.weights, self.hidden if self.normed is None else self.normed
        launch_logits(normed, None, None, weights.head, weights.head_scales, self._logits, pdl=self.pdl)

    def _attend(self, index: int, qkv: Tensor) -> Input:
        splits = super()._attend(index, qkv).attention
        assert splits is not None
        return Input(launch_combine(splits, qkv.dtype, self._mask(self.weights.blocks[index], "o"), pdl=self.pdl))

    def _mask(self, block: Block[AnyLinear], role: str) -> Mask | None:
        linear = getattr(block, role)
        return None if linear.dense or not _comes_masked(block, role) else (linear.scales, linear.thresholds)

    def _linear(self, index: int, role: str, value: Input) -> Tensor:
        """A linear of (rows, K): (rows, N), masked here unless ``_comes_masked``."""
        linear = getattr(self.weights.blocks[index], role)
        self._count(linear, value)
        return multiply(self.plans[index][role], linear, tensor_of(value), self._scratch)


def _comes_masked(block: Block[AnyLinear], role: str) -> bool:
    """Whether the launch before a linear masks its input; not for graded weights, whose planes have a mask each."""
    before = role == "down" or (role == "o" and not block.spec.recurrent)
    return before and getattr(block, role).weight.planes == 1
