"""Plain products for quantised weights and experts, for vLLM's engine for CPUs, which has none for int8 and fp8.

vLLM's own loader and schemes read the config, choose the scheme, name, join and lay out the tensors; only the product
itself is from here: the weight times its scales, in the activations' type.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_WFP8A16_KERNELS,
    FP8ScaledMMLinearKernel,
    MPLinearKernel,
    register_linear_kernel,
)
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.platforms.interface import PlatformEnum


class PlainPacked(MPLinearKernel):
    """weight_packed: int32 (outputs, inputs / codes in 32 bits); weight_scale: (outputs, groups of inputs)."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return not c.zero_points, "only symmetric weights"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed, scale, _ = self._get_weight_params(layer)
        assert (packed.output_dim, packed.input_dim, packed.packed_dim) == (0, 1, 1)
        kind = self.config.weight_type
        codes = unpack_quantized_values_into_int32(packed.data, kind, 1) - kind.bias
        outputs, groups = scale.shape
        layer.plain_weight = (codes.view(outputs, groups, -1) * scale.data[..., None]).view(outputs, -1)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.plain_weight, bias)


class PlainFp8(FP8ScaledMMLinearKernel):
    """weight: fp8 (inputs, outputs); weight_scale: (outputs, 1)."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scale, *_ = self._get_layer_params(layer)
        assert scale.shape == (weight.shape[1], 1), (scale.shape, weight.shape)
        layer.plain_weight = (weight.data.t().float() * scale.data).to(self.config.out_dtype)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.plain_weight, bias)

    def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
        raise NotImplementedError("only apply_weights multiplies")


class PlainExperts(compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod):
    """w13_weight_packed, w2_weight_packed: int32 (experts, outputs, inputs / codes in 32 bits), with scales of groups."""

    is_monolithic = False

    def process_weights_after_loading(self, layer: Any) -> None:
        kind = self.quant_type
        for name in ("w13", "w2"):
            codes, scale = getattr(layer, f"{name}_weight_packed").data, getattr(layer, f"{name}_weight_scale").data
            codes = unpack_quantized_values_into_int32(codes, kind, 2) - kind.bias
            setattr(self, name, (codes.unflatten(2, (scale.shape[2], -1)) * scale[..., None]).flatten(2))

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.w13, self.w2, strict=True)):
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = torch.nn.functional.linear(x[rows], gate_up).chunk(2, -1)
            out = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
            y.index_add_(0, rows, out * topk_weights[rows, places, None].to(out.dtype))
        return y


def register_experts() -> None:
    """Take `PlainExperts` for quantised experts in this process."""
    module: Any = compressed_tensors_moe_wna16
    module.CompressedTensorsWNA16MoEMethod = PlainExperts
    module.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.MARLIN, None)
    module.check_moe_marlin_supports_config = lambda *_, **__: True


def register() -> None:
    """Offer both to an engine that this process makes."""
    register_linear_kernel(PlainPacked, PlatformEnum.CPU, "mp")
    _POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(PlainFp8)
