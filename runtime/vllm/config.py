"""A bundle, or a quantised checkpoint, as vLLM's quantization config, checked before any weight is read."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from wisparse.formats.block_ops import not_yet
from wisparse.formats.bundle import Bundle, ProjectionMask, planes_of
from wisparse.formats.errors import BundleError, UnsupportedModelError, UsageError
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.packings import Packing, Plain
from wisparse.formats.quantization import read_packings
from wisparse.formats.tensors import block_fields

from .blocks import DRAFTS, watch_loader
from .linear import Projections, WisparseLinearMethod
from .product import CODE_ROWS, HALF
from .settings import NAME, PLAIN, MaskedRows, Settings, require_cards, require_known_version, watch_runners

log = logging.getLogger("vllm.wisparse")


class WisparseConfig(QuantizationConfig):
    """A bundle's masks and weights, or those of a quantised checkpoint without masks. vLLM copies and pickles it: it holds
    open files or GPU memory only where layers run."""

    def __init__(self, stored: Mapping[str, Any] | None = None, refused: str | None = None) -> None:
        """``stored``: the ``quantization_config`` of the weights; ``refused``: why a bundle does not run, where its
        ``config.json`` says so."""
        super().__init__()
        self._stored, self._refused = None if stored is None else {**stored}, refused
        self._plain = False  # not a bundle
        self._vllm: Any = None  # vLLM's own config of quantised weights
        self._folder: Path | None = None  # of the bundle, once it was checked
        self._masks: Mapping[str, ProjectionMask] = {}
        self._packings: Mapping[str, Packing] = {}  # of the bundle, by the names of weights
        self._unmasked: frozenset[str] = frozenset()  # tensors in blocks that no mask belongs to
        self.output_layer = "stored"  # or int8; known with ``rows``
        self._both = False  # layouts of quantised weights
        self._joins = False  # blocks may be computed by ``blocks``
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
        """From the entry that `plugin` adds to a bundle's config, or from a quantised checkpoint's own."""
        if config.get("quant_method") == NAME:
            return cls(config.get("stored"), config.get("refused"))
        found = cls(config)
        found._plain = True
        return found

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Ours for a bundle, or for a quantised checkpoint if asked for; UsageError if a bundle is to run by another."""
        method = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, dict) else None
        if user_quant == NAME and method in PLAIN:
            return NAME
        if method != NAME:
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
        if self._plain:
            self._open_stored(model_name, hf_config, revision)
            return
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
        if self._stored is not None:
            self._open_stored(str(bundle.folder), hf_config, None)

    def _open_stored(self, *model: Any) -> None:
        assert self._stored is not None
        self._vllm = get_quantization_config(self._stored["quant_method"]).from_config(copy.deepcopy(self._stored))
        self._vllm.maybe_update_config(*model)
        if self._plain:  # which layers are quantised, by the files
            if names := getattr(self._vllm, "modules_to_not_convert", None):
                self._stored["modules_to_not_convert"] = list(names)
            if names := getattr(self._vllm, "modules_in_block_to_quantize", None):
                self._stored["modules_in_block_to_quantize"] = [name.partition(".")[2] or name for name in names]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names in the config become vLLM's."""
        if self._vllm is not None and self._stored is not None:
            self._vllm.apply_vllm_mapper(hf_to_vllm_mapper)
            for key in ("ignore", "modules_to_not_convert"):
                if self._plain and isinstance(names := self._stored.get(key), list):
                    self._stored[key] = hf_to_vllm_mapper.apply_list(names)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for the linear layers inside blocks and for a quantised output layer, vLLM's own for all else."""
        if prefix.startswith("draft_model."):
            raise UnsupportedModelError("a bundle does not run as a draft model in vLLM yet: expected a dense draft")
        # The embedding asks first: a bad tensor-parallel size would fail later in a bare assertion of vLLM's.
        rows = self.rows = self.rows or self._prepare()
        if self._vllm is not None:
            self._vllm.packed_modules_mapping = self.packed_modules_mapping
        if not isinstance(layer, linear.LinearBase | ParallelLMHead):
            return None if self._vllm is None else self._vllm.get_quant_method(layer, prefix)
        # In vLLM's gpt_oss `self_attn` is `attn`; its qwen3_moe states `gate_up_proj` after this was given the mapping.
        name = prefix.replace(".attn.", ".self_attn.")
        parent, _, last = name.rpartition(".")
        fused = {"gate_up_proj": ["gate_proj", "up_proj"], **self.packed_modules_mapping}
        names = [f"{parent}.{part}" if parent else part for part in fused.get(last, [last])]
        if name in self._masks or last not in fused:
            names = [name]
        masks, packing = [self._masks[one] for one in names if one in self._masks], self._packing(names)
        masked = name.startswith("model.layers.") and f"{name}.weight" not in self._unmasked and not self._plain
        if masked and len(masks) < len(names):
            lacking = next(one for one in names if one not in self._masks)
            raise BundleError(f"{lacking}: expected an entry in the bundle for this layer of vLLM's, found none")
        rounded = self.output_layer == "int8" and isinstance(layer, ParallelLMHead)
        if rounded and packing is not None:
            if packing.kind != "int8":
                raise UsageError(
                    f"output_layer: expected stored for one that is {packing.kind} in the files, found int8"
                )
            rounded = False
        if not masks and packing is None and not rounded:
            dense = None if isinstance(layer, ParallelLMHead) else linear.UnquantizedLinearMethod()
            return dense if self._vllm is None else self._vllm.get_quant_method(layer, prefix)
        dense = not any(threshold for mask in masks for threshold in (mask.threshold, *mask.plane_thresholds))
        other = None
        if self._both and packing is not None:

            def other(given: Any) -> tuple[Any, torch.nn.Module]:
                method, twin = self._vllm.get_quant_method(given, prefix), torch.nn.Module()
                twin.__dict__ |= {key: value for key, value in vars(given).items() if key not in vars(twin)}
                return method, twin

        return WisparseLinearMethod(
            Projections(name, len(names), masks, packing, dense, rows, other, rounded, self._joins)
        )

    def _packing(self, names: list[str]) -> Packing | None:
        """How the weights of fused projections are stored; None: vLLM loads them."""
        if self._plain and self._stored is not None:
            each = read_packings(self._stored, names)
            found = {each.get(name) for name in names}
        else:
            found = {self._packings.get(f"{name}.weight") for name in names}
        if len(found) > 1:
            raise UnsupportedModelError(f"{', '.join(names)}: expected one quantisation scheme for all, found several")
        packing = found.pop()
        by_blocks = isinstance(packing, Plain) and packing.block_rows is not None
        return None if by_blocks else packing

    def served(self, additional: Any) -> tuple[float, str, float]:
        """Sparsity, weight type, and the share of the blocks' weights that the masks dropped on the calibration text."""
        if self._folder is None:
            return 0.0, str((self._stored or {}).get("quant_method")), 0.0
        bundle = Bundle.open(self._folder)
        chosen = bundle.at(Settings.read(additional, os.environ, bundle.sparsity).sparsity)
        kinds = {weight.packing.kind for weight in bundle.checkpoint.quantised.values()}
        weights = (
            "graded" if planes_of(chosen.masks) > 1 else min(kinds, default=bundle.config_dict.get("dtype", "native"))
        )
        unread, size = 0.0, 0
        for one in bundle.config.projections():
            size += one.num_parameters
            unread += 0.0 if one.experts else chosen.masks[one.name].sparsity * one.num_parameters
        return chosen.sparsity, str(weights), unread / size

    def _prepare(self) -> MaskedRows:
        """Once in each process that builds layers."""
        if self._folder is None and not self._plain:
            raise UsageError("--quantization wisparse: expected a bundle, found a model that was not opened as one")
        current = get_current_vllm_config()
        parallel, offload = current.parallel_config, current.offload_config
        reasons = {
            "LoRA adapters": current.lora_config is not None,
            "two batches that overlap (enable_dbo)": getattr(parallel, "enable_dbo", False),
            "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            # It would take our layers for unquantised ones and replace their method.
            "weights quantised at load time (quantization_config)": getattr(self, "online_quantization_config", None),
            "weights in the CPU's memory (cpu_offload_gb)": offload.uva.cpu_offload_gb
            or offload.prefetch.offload_group_size,
            # Our products differ with the number of rows.
            "batch-invariant kernels (VLLM_BATCH_INVARIANT)": envs.VLLM_BATCH_INVARIANT,
            # The GPU decides how many rows a request has.
            "adaptive verification of drafts": getattr(
                current.speculative_config, "enable_adaptive_verification", False
            ),
        }
        what = "a bundle" if self._folder is not None else "--quantization wisparse"
        for option in (option for option, found in reasons.items() if found):
            raise UsageError(f"{what} does not run with {option} in vLLM yet; leave the option out")
        if not (current_platform.is_cuda() or current_platform.is_cpu()):
            raise UsageError(
                f"{what} runs in vLLM on NVIDIA GPUs and on CPUs, found {current_platform.device_name}; load it dense: "
                "VLLM_PLUGINS=''"
            )
        require_cards(parallel.tensor_parallel_size, current.model_config.hf_text_config)
        drafts = None if current.speculative_config is None else current.speculative_config.method
        one_card = parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1
        self._joins = one_card and drafts in (None, *DRAFTS)
        watch_loader()
        bundle = None if self._folder is None else Bundle.open(self._folder)
        settings = Settings.read(current.additional_config, os.environ, 0.0 if bundle is None else bundle.sparsity)
        self.output_layer = settings.output_layer
        parts = [f"rank {get_tensor_model_parallel_rank()} of {parallel.tensor_parallel_size}"]
        if self._vllm is not None and self._stored is not None:
            half = current.model_config.dtype in HALF
            if settings.layouts == "both" and not half:
                raise UsageError(f"layouts: expected ours in {current.model_config.dtype}, found both")
            self._both = half and (
                settings.layouts == "both" or (settings.layouts is None and current_platform.is_cuda())
            )
            by = f"vLLM's kernels from {CODE_ROWS + 1} tokens on, dense" if self._both else "our kernels alone"
            parts.insert(0, f"weights quantised by {self._stored['quant_method']}, {by}")
        chosen = None if bundle is None else bundle.at(settings.sparsity)
        if chosen is not None and planes_of(chosen.masks) > 1:  # int8 in every back end
            self.output_layer = "int8"
        if self.output_layer == "int8":
            if current.model_config.head_dtype != current.model_config.dtype:
                raise UsageError("an output layer in int8 has the model's dtype; leave head_dtype out")
            parts.insert(0, "output layer int8")
        if bundle is None or chosen is None:
            log.info("no masks: %s", ", ".join(parts))
        else:
            self._masks = chosen.masks
            self._packings = {name: weight.packing for name, weight in bundle.checkpoint.quantised.items()}
            blocks = range(bundle.config.num_blocks)
            fields = (block_fields(bundle.config, index).values() for index in blocks)
            self._unmasked = frozenset(one.name for each in fields for one in each)
            watch_runners()
            levels = ", ".join(f"{level:g}" for level in bundle.levels if level)
            on = "on" if chosen.sparsity else "off"
            if bundle.config.has_experts:
                parts.insert(0, "experts are read whole")
            said = "masks %s: sparsity %g (the bundle has %s, and 0), prefill %s, %s"
            log.info(said, on, chosen.sparsity, levels, settings.prefill, ", ".join(parts))
        graphs = current.compilation_config.cudagraph_capture_sizes or [0]
        rows = max(current.scheduler_config.max_num_batched_tokens, *graphs)
        rows += parallel.tensor_parallel_size  # to a multiple of which sequence parallelism pads a batch
        return MaskedRows(rows, prompts=settings.prefill == "all")
