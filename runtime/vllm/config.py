"""The bundle as vLLM's quantization config, opened and checked before any weight is read, and its linear layers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from wisparse.formats.block_ops import not_yet
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.errors import BundleError, UnsupportedModelError, UsageError
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.tensors import block_fields

from .product import Layer, channel_major, mask_ahead, mask_tensors, reserve
from .settings import NAME, MaskedRows, Settings, require_cards, require_known_version, watch_runners

log = logging.getLogger("vllm.wisparse")


class WisparseConfig(QuantizationConfig):
    """A bundle's masks. vLLM copies and pickles it: it holds open files or GPU memory only where layers run."""

    def __init__(self, refused: str | None = None) -> None:
        """``refused``: why a bundle does not run, where its ``config.json`` says so."""
        super().__init__()
        self._refused = refused
        self._folder: Path | None = None  # of the bundle, once it was checked
        self._masks: Mapping[str, ProjectionMask] = {}
        self._dense: frozenset[str] = frozenset()  # tensors that no mask belongs to
        self.rows: MaskedRows | None = None  # None until a process builds layers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": None}

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """float32 is computed by plain torch on a GPU."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: ``maybe_update_config`` opens the bundle."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WisparseConfig:
        """From the entry that `plugin` adds to a bundle's config."""
        return cls(config.get("refused"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Ours for a bundle; UsageError if it is to run by another method."""
        if not isinstance(hf_quant_cfg, dict) or hf_quant_cfg.get("quant_method") != NAME:
            return None
        if user_quant not in (None, NAME):
            raise UsageError(
                f"--quantization: expected {NAME} or nothing for a bundle, found {user_quant}; to run the dense "
                "weights by that method switch the plug-in off: VLLM_PLUGINS=''"
            )
        return NAME

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        require_known_version(vllm.__version__)
        if self._refused is not None:
            raise UnsupportedModelError(self._refused)
        bundle = Bundle.open(fetch_bundle(model_name, revision))
        unsupported = None
        if lacking := not_yet(bundle.config, "vllm"):
            unsupported = f"expected blocks with attention, found {lacking}"
        elif bundle.config.architecture.full_heads:
            unsupported = "expected the same heads in every block, found blocks whose values are their keys"
        if unsupported is not None:
            raise UnsupportedModelError(
                f"{bundle.config.model_type}: {unsupported}, which the plug-in cannot mask yet; run the bundle dense: "
                "VLLM_PLUGINS=''"
            )
        self._folder = bundle.folder

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for the linear layers inside blocks, vLLM's own for all else: experts and their routers are dense."""
        if prefix.startswith("draft_model."):
            raise UnsupportedModelError("a bundle does not run as a draft model in vLLM yet: expected a dense draft")
        # The embedding asks first: a bad tensor-parallel size would fail later in a bare assertion of vLLM's.
        rows = self.rows = self.rows or self._prepare()
        if not isinstance(layer, linear.LinearBase):
            return None
        if not prefix.startswith("model.layers."):
            return linear.UnquantizedLinearMethod()
        # In vLLM's gpt_oss `self_attn` is `attn`; its qwen3_moe states `gate_up_proj` after this was given the mapping.
        prefix = prefix.replace(".attn.", ".self_attn.")
        if f"{prefix}.weight" in self._dense:  # routers and gates of shared experts
            return linear.UnquantizedLinearMethod()
        parent, _, last = prefix.rpartition(".")
        fused = {"gate_up_proj": ["gate_proj", "up_proj"], **self.packed_modules_mapping}
        names = [prefix] if prefix in self._masks else [f"{parent}.{part}" for part in fused.get(last, [last])]
        for name in names:
            if name not in self._masks:
                raise BundleError(f"{name}: expected an entry in the bundle for this layer of vLLM's, found none")
        return WisparseLinearMethod(prefix, [self._masks[name] for name in names], rows)

    def _prepare(self) -> MaskedRows:
        """Once in each process that builds layers."""
        if self._folder is None:
            raise UsageError("--quantization wisparse: expected a bundle, found a model that was not opened as one")
        bundle = Bundle.open(self._folder)
        current = get_current_vllm_config()
        parallel = current.parallel_config
        reasons = {
            "LoRA adapters": current.lora_config is not None,
            "two batches that overlap (enable_dbo)": getattr(parallel, "enable_dbo", False),
            "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        }
        for what in (what for what, found in reasons.items() if found):
            raise UsageError(f"a bundle does not run with {what} in vLLM yet; leave the option out")
        if not (current_platform.is_cuda() or current_platform.is_cpu()):
            raise UsageError(
                f"a bundle runs in vLLM on NVIDIA GPUs and on CPUs, found {current_platform.device_name}; load it dense: "
                "VLLM_PLUGINS=''"
            )
        require_cards(parallel.tensor_parallel_size, current.model_config.hf_text_config)
        settings = Settings.read(current.additional_config, os.environ, bundle.sparsity)
        chosen = bundle.at(settings.sparsity)
        self._masks = chosen.masks
        blocks = range(bundle.config.num_blocks)
        self._dense = frozenset(one.name for index in blocks for one in block_fields(bundle.config, index).values())
        watch_runners()
        levels = ", ".join(f"{level:g}" for level in bundle.levels if level)
        on, prefill = "on" if chosen.sparsity else "off", settings.prefill
        whole = ", experts are read whole" if bundle.config.has_experts else ""
        said = "masks %s: sparsity %g (the bundle has %s, and 0), prefill %s%s"
        log.info(said, on, chosen.sparsity, levels, prefill, whole)
        graphs = current.compilation_config.cudagraph_capture_sizes or [0]
        rows = max(current.scheduler_config.max_num_batched_tokens, *graphs)
        return MaskedRows(rows, prompts=settings.prefill == "all")


@linear.register_weight_loader_v2_supported_method
class WisparseLinearMethod(linear.UnquantizedLinearMethod):
    """vLLM's own unquantised layer up to the loaded weights, our product from there on."""

    supports_pre_processed_weights = False

    def __init__(self, prefix: str, masks: Sequence[ProjectionMask], rows: MaskedRows) -> None:
        """masks: of the layer's projections, in the order of its outputs."""
        super().__init__()
        self._prefix, self._masks, self._rows = prefix, masks, rows
        # It reads the product of activation and up: a compiler fuses the mask into that.
        self._ahead = prefix.endswith(".down_proj") and len(masks) == 1
        self._widths: list[int] = []
        self._in_features = 0

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        *rest: Any,
        **more: Any,
    ) -> None:
        """As vLLM's own, with the masks checked against the layer."""
        outputs, found = len(output_partition_sizes), len(self._masks)
        if found not in (1, outputs):
            raise BundleError(f"{self._prefix}: expected masks for {outputs} outputs, found {found}")
        for mask in self._masks:
            if len(mask.channel_scale) != input_size:
                raise BundleError(
                    f"{self._prefix}: expected channel_scale ({input_size},), found {tuple(mask.channel_scale.shape)}; "
                    "the bundle is of another model"
                )
        # One mask for a stored qkv_proj or gate_up_proj: its outputs are one projection.
        self._widths = list(output_partition_sizes) if len(self._masks) > 1 else [sum(output_partition_sizes)]
        self._in_features = input_size_per_partition
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, input_size, *rest, **more)

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
        given = Layer(layer.weight, layer.bias, layer.wisparse_scales, layer.wisparse_thresholds, self._widths)
        reserve(given, ahead=self._ahead)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) to (..., N) by one opaque operator, so that graphs and compilers see no branch."""
        ready = self._ahead and torch.compiler.is_compiling()
        if ready:
            x = mask_ahead(x, layer.wisparse_scales[0], layer.wisparse_thresholds[0], layer.wisparse_masked)
        masks = layer.wisparse_scales, layer.wisparse_thresholds, layer.wisparse_masked
        return torch.ops.wisparse.masked_linear(x, layer.weight, bias, *masks, self._widths, ready)
