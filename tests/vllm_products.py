"""Plain products for quantised weights, for vLLM's engine for CPUs, which has none for int8 and fp8.

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


def register() -> None:
    """Offer both to an engine that this process makes."""
    register_linear_kernel(PlainPacked, PlatformEnum.CPU, "mp")
    _POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(PlainFp8)
