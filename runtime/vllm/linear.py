"""vLLM's linear layer with the masks of its projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.errors import BundleError

from .launches import Layer, channel_major, mask_tensors
from .product import mask_ahead, reserve
from .rows import MaskedRows

_AFTER_ELEMENTWISE = ".down_proj"  # reads the product of activation and `up`


@register_weight_loader_v2_supported_method
class WisparseLinearMethod(UnquantizedLinearMethod):
    """vLLM's own unquantised layer up to the loaded weights, our product from there on."""

    supports_pre_processed_weights = False

    def __init__(self, prefix: str, masks: Sequence[ProjectionMask], rows: MaskedRows) -> None:
        """masks: of the layer's projections, in the order of its outputs."""
        super().__init__()
        self._prefix, self._masks, self._rows = prefix, masks, rows
        self._ahead = prefix.endswith(_AFTER_ELEMENTWISE) and len(masks) == 1
        self._widths: list[int] = []
        self._in_features = 0

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """As vLLM's own, with the masks checked against the layer."""
        if len(self._masks) not in (1, len(output_partition_sizes)):
            raise BundleError(
                f"{self._prefix}: expected masks for {len(output_partition_sizes)} outputs, found {len(self._masks)}"
            )
        for mask in self._masks:
            if len(mask.channel_scale) != input_size:
                raise BundleError(
                    f"{self._prefix}: expected channel_scale ({input_size},), found {tuple(mask.channel_scale.shape)}; "
                    "the bundle is of another model"
                )
        # One mask for a stored qkv_proj or gate_up_proj: its outputs are one projection.
        self._widths = list(output_partition_sizes) if len(self._masks) > 1 else [sum(output_partition_sizes)]
        self._in_features = input_size_per_partition
        super().create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lay the weights out channel-major, with scales and thresholds beside them."""
        device = layer.weight.device
        layer.weight.data = channel_major(layer.weight.data)
        # A layer split along its inputs has a slice of them here.
        first = layer.tp_rank * self._in_features if len(self._masks[0].channel_scale) != self._in_features else 0
        scales, thresholds = mask_tensors(self._masks, slice(first, first + self._in_features))
        layer.register_buffer("wisparse_scales", scales.to(device), persistent=False)
        layer.register_buffer("wisparse_thresholds", thresholds.to(device), persistent=False)
        layer.register_buffer("wisparse_masked", self._rows.on(device), persistent=False)
        reserve(
            Layer(layer.weight, layer.bias, layer.wisparse_scales, layer.wisparse_thresholds, self._widths),
            ahead=self._ahead,
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) to (..., N) by one opaque operator, so that graphs and compilers see no branch."""
        ready = self._ahead and torch.compiler.is_compiling()
        if ready:
            x = mask_ahead(x, layer.wisparse_scales[0], layer.wisparse_thresholds[0], layer.wisparse_masked)
        return torch.ops.wisparse.masked_linear(
            x, layer.weight, bias, layer.wisparse_scales, layer.wisparse_thresholds, layer.wisparse_masked,
            self._widths, ready,
        )  # fmt: skip
