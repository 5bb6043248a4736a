"""The bundle as vLLM's quantization config: it is opened and checked here, before any weight is read."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.errors import BundleError, UnsupportedModelError, UsageError
from wisparse.formats.hub import fetch_bundle

from .linear import WisparseLinearMethod
from .rows import MaskedRows, watch_runners

# Those in between were not run; what differs between the two that were is in the code beside it.
FIRST, BEFORE = (0, 26), (0, 33)


def require_known_version(found: str) -> None:
    """Raise UsageError unless ``found``, vLLM's own ``__version__``, is in the declared range."""
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) < BEFORE:
        raise UsageError(
            f"vLLM: expected a version from {_text(FIRST)} to before {_text(BEFORE)}, found {found}; install one "
            "(pip install 'wisparse[vllm]') or run the dense model: VLLM_PLUGINS='' vllm serve …"
        )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# "half" is a protocol for measuring accuracy: it needs whole prompts, and vLLM reads them in pieces.
POLICIES = ("dense", "all")
ENVIRONMENT = {"prefill": "WISPARSE_VLLM_PREFILL", "sparsity": "WISPARSE_VLLM_SPARSITY"}


@dataclass(frozen=True)
class Settings:
    """How a bundle is run.

    Attributes:
        prefill: ``dense``: prompt tokens are not masked; ``all``: every token is.
        sparsity: of a sparsity level, or 0: nothing is masked. Whether the bundle has it is asked of the bundle.
    """

    prefill: str
    sparsity: float

    @classmethod
    def read(cls, additional: Any, environment: Mapping[str, str], default: float) -> Settings:
        """From vLLM's ``additional_config`` and the environment; ``default`` is the sparsity of the default sparsity level.

        Raises:
            UsageError: a key, a policy, or a sparsity that is no number.
        """
        if isinstance(additional, Mapping):
            _refuse_strays(additional)
        entry = additional.get("wisparse") if isinstance(additional, Mapping) else None
        if entry is not None and not isinstance(entry, Mapping):
            raise UsageError(f"additional_config: wisparse: expected an object, found {entry!r:.80}")
        given = {key: environment[name] for key, name in ENVIRONMENT.items() if environment.get(name)}
        given |= dict(entry or {})
        for key in given:
            if key not in ENVIRONMENT:
                raise UsageError(
                    f"additional_config: wisparse: expected {' or '.join(ENVIRONMENT)}, found {str(key)!r:.80}"
                )
        prefill = given.get("prefill", "dense")
        if prefill not in POLICIES:
            raise UsageError(f"prefill: expected one of {', '.join(POLICIES)} in vLLM, found {prefill!r:.80}")
        return cls(prefill, _sparsity(given.get("sparsity", default)))


def _refuse_strays(additional: Mapping[Any, Any]) -> None:
    """Other keys are other plug-ins', but these would be meant for us and change nothing."""
    for key in map(str, additional):
        nearly = key != "wisparse" and difflib.get_close_matches(key.lower(), ["wisparse"], cutoff=0.8)
        if key in ENVIRONMENT or nearly:
            raise UsageError(
                f'additional_config: expected {{"wisparse": {{"sparsity": …}}}} or the like, found the key {key!r:.80}'
            )


def require_cards(size: int, model: Any) -> None:
    """Raise UsageError unless a model of this config can be cut into ``size`` parts, as tensor parallel."""
    for key in ("num_attention_heads", "hidden_size", "intermediate_size"):
        value = getattr(model, key)
        if value % size:
            raise UsageError(f"tensor_parallel_size: expected a divisor of {key} ({value}), found {size}")
    heads = getattr(model, "num_key_value_heads", None) or size
    if heads % size and size % heads:
        raise UsageError(
            f"tensor_parallel_size: expected a divisor or a multiple of num_key_value_heads ({heads}), found {size}"
        )


def _sparsity(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"sparsity: expected a number, found {value!r:.80}") from None


NAME = "wisparse"
_BLOCKS = "model.layers."

log = logging.getLogger("vllm.wisparse")


class WisparseConfig(QuantizationConfig):
    """A bundle's masks. vLLM copies and pickles it, so it holds no GPU memory but in the process that runs layers."""

    def __init__(self, stored: str | None = None) -> None:
        """``stored``: how ``config.json`` says that the weights are quantised."""
        super().__init__()
        self._stored = stored
        self._bundle: Bundle | None = None
        self._masks: Mapping[str, ProjectionMask] = {}
        self._settings: Settings | None = None
        self.rows: MaskedRows | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": None, "_settings": None}

    @classmethod
    def get_name(cls) -> str:
        """The name for ``--quantization``."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """float32 is for comparing: on a GPU it has no sparse kernels here."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None that vLLM should read: ``maybe_update_config`` opens the bundle."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WisparseConfig:
        """From the entry that ``plugin`` adds to a bundle's config."""
        return cls(config.get("stored"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Raises UsageError if a bundle is to run by another method."""
        if not isinstance(hf_quant_cfg, dict) or hf_quant_cfg.get("quant_method") != NAME:
            return None
        if user_quant not in (None, NAME):
            raise UsageError(
                f"--quantization: expected {NAME} or nothing for a bundle, found {user_quant}; to run the dense "
                "weights by that method switch the plug-in off: VLLM_PLUGINS=''"
            )
        return NAME

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Open and check the bundle.

        Raises:
            UsageError: a version of vLLM that is not known.
            UnsupportedModelError: quantised weights, or recurrent blocks.
            BundleError, AccessError: as ``Bundle.open``.
        """
        require_known_version(vllm.__version__)
        if self._stored is not None:
            raise UnsupportedModelError(
                f"expected a bundle of bf16, fp16 or fp32 weights in vLLM, found weights quantised by {self._stored}: "
                "vLLM's kernels for them cannot leave channels unread; run the bundle dense here (VLLM_PLUGINS='' vllm "
                "serve …) or with its masks by `wisparse serve`, or convert the unquantised model"
            )
        bundle = Bundle.open(fetch_bundle(model_name, revision))
        if bundle.config.delta_net is not None:
            raise UnsupportedModelError(
                f"{bundle.config.model_type}: expected blocks with attention, found recurrent ones, which the plug-in "
                "cannot mask yet; run the bundle dense: VLLM_PLUGINS=''"
            )
        if bundle.config.architecture.full_heads:
            raise UnsupportedModelError(
                f"{bundle.config.model_type}: expected the same heads in every block, found blocks whose values are "
                "their keys, which the plug-in cannot mask yet; run the bundle dense: VLLM_PLUGINS=''"
            )
        self._bundle = bundle

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for the linear layers inside blocks, vLLM's own for all else.

        Raises:
            BundleError: a layer without an entry in the bundle.
            UsageError: settings that there are not, or that this plug-in cannot run with.
        """
        if prefix.startswith("draft_model."):
            raise UnsupportedModelError("a bundle does not run as a draft model in vLLM yet: expected a dense draft")
        # Before the first block, the embedding asks: what a block cannot be cut into ends there in a bare assertion.
        if self._settings is None:
            self._settings = self._prepare()
        if not isinstance(layer, LinearBase):
            return None
        if not prefix.startswith(_BLOCKS):
            return UnquantizedLinearMethod()
        parent, _, last = prefix.rpartition(".")
        names = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(last, [last])]
        masks = []
        for name in names:
            mask = self._masks.get(name)
            if mask is None:
                raise BundleError(f"{name}: expected an entry in the bundle for this layer of vLLM's, found none")
            masks.append(mask)
        assert self.rows is not None
        return WisparseLinearMethod(prefix, masks, self.rows)

    def _prepare(self) -> Settings:
        """Once in each process that builds layers."""
        if self._bundle is None:
            raise UsageError("--quantization wisparse: expected a bundle, found a model that was not opened as one")
        current = get_current_vllm_config()
        _refuse(current)
        settings = Settings.read(current.additional_config, os.environ, self._bundle.sparsity)
        chosen = self._bundle.at(settings.sparsity)
        self._masks = chosen.masks
        graphs = current.compilation_config.cudagraph_capture_sizes or [0]
        self.rows = MaskedRows(max(current.scheduler_config.max_num_batched_tokens, *graphs))
        if settings.prefill == "dense":
            watch_runners()
        log.info(
            "masks %s: sparsity %g (the bundle has %s, and 0), prefill %s",
            "on" if chosen.sparsity else "off",
            chosen.sparsity,
            ", ".join(f"{level:g}" for level in self._bundle.levels if level),
            settings.prefill,
        )
        return settings


def _refuse(current: Any) -> None:
    """Raise UsageError for what was asked of vLLM and does not go together with masks here."""
    parallel = current.parallel_config
    reasons = {
        "LoRA adapters": current.lora_config is not None,
        "two batches that overlap (enable_dbo)": getattr(parallel, "enable_dbo", False),
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
    }
    for what, found in reasons.items():
        if found:
            raise UsageError(f"a bundle does not run with {what} in vLLM yet; leave the option out")
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise UsageError(
            f"a bundle runs in vLLM on NVIDIA GPUs and on CPUs, found {current_platform.device_name}; load it dense: "
            "VLLM_PLUGINS=''"
        )
    require_cards(parallel.tensor_parallel_size, current.model_config.hf_text_config)
