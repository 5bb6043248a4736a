"""How a bundle is run in vLLM: versions, settings, and which rows of a batch are masked: with the policy ``dense`` those
of decoded tokens, with ``all`` every one but the first of a sequence. What needs no vLLM to decide."""

from __future__ import annotations

import difflib
import functools
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.architectures import ARCHITECTURES, has_experts
from wisparse.formats.errors import UsageError
from wisparse.formats.guard import expect

# 0.26 and 0.32 were run; where they differ the code says so.
FIRST, BEFORE = (0, 26), (0, 33)
NAME = "wisparse"
PLAIN = ("compressed-tensors", "gptq", "awq")  # methods of checkpoints that run by ours if asked for
POLICIES = ("dense", "all")  # "half" needs whole prompts, and vLLM reads them in chunks
LAYOUTS = ("ours", "both")  # of quantised weights
OUTPUT_LAYERS = ("stored", "int8")
ENVIRONMENT = {
    "prefill": "WISPARSE_VLLM_PREFILL",
    "sparsity": "WISPARSE_VLLM_SPARSITY",
    "layouts": "WISPARSE_VLLM_LAYOUTS",
    "output_layer": "WISPARSE_VLLM_OUTPUT_LAYER",
}
_AT: weakref.WeakValueDictionary[int, MaskedRows] = weakref.WeakValueDictionary()


def require_known_version(found: str) -> None:
    """Raise UsageError unless ``found``, vLLM's ``__version__``, is in the declared range."""
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) < BEFORE:
        first, before = (f"{major}.{minor}" for major, minor in (FIRST, BEFORE))
        raise UsageError(
            f"vLLM: wisparse {metadata.version('wisparse')} expected a version from {first} to before {before}, found "
            f"{found}; install one "
            f"(pip install 'vllm>={first},<{before}') or run the dense model: VLLM_PLUGINS='' vllm serve …"
        )


def why_experts_are_refused(config: Mapping[str, Any], stored: Mapping[str, Any]) -> str | None:
    """None where vLLM can read the quantised experts of a bundle, or there are none. config: ``config.json``, stored: its
    ``quantization_config``."""
    row = ARCHITECTURES.get(str(config.get("model_type")))
    groups = stored.get("config_groups")
    given = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    reason = None
    if not has_experts(config):
        return None
    if row is not None and row.experts is not None and row.experts.stacked is not None:
        reason = "found quantised ones apart, where vLLM reads those of a block in one tensor"
    elif any("'type': 'float'" in str(group.get("weights")) and not group.get("input_activations") for group in given):
        reason = "found fp8 with activations of 16 bits, for which vLLM has no kernel"
    if reason is None:
        return None
    return (
        f"{config.get('model_type')}: expected experts in bf16, fp16, int8 or int4 as vLLM reads them, {reason}; run the "
        "bundle by `wisparse serve`, or convert the unquantised model"
    )


def require_cards(size: int, model: Any) -> None:
    """Raise UsageError unless a model of this config can be split into ``size`` parts by tensor parallelism."""
    for key in ("num_attention_heads", "hidden_size", "intermediate_size"):
        value = getattr(model, key)
        expect(value % size == 0, "tensor_parallel_size", f"a divisor of {key} ({value})", size)
    heads = getattr(model, "num_key_value_heads", None) or size
    words = f"a divisor or a multiple of num_key_value_heads ({heads})"
    expect(heads % size == 0 or size % heads == 0, "tensor_parallel_size", words, size)


@dataclass(frozen=True)
class Settings:
    prefill: str  # dense: prompt tokens are not masked; all: every token but the first
    sparsity: float  # of a sparsity level, or 0
    layouts: str | None = None  # ours: quantised weights are held once; both: in vLLM's layout too, for larger batches
    output_layer: str = "stored"  # int8: rounded when it is loaded, with a scale a row

    @classmethod
    def read(cls, additional: Any, environment: Mapping[str, str], default: float) -> Settings:
        """From vLLM's ``additional_config`` and the environment; default: the default level's sparsity."""
        additional = additional if isinstance(additional, Mapping) else {}
        for key in map(str, additional):  # other keys are other plug-ins', but these were meant for us
            nearly = key != NAME and difflib.get_close_matches(key.lower(), [NAME], cutoff=0.8)
            if key in ENVIRONMENT or nearly:
                right = '{"wisparse": {"sparsity": …}}'
                raise UsageError(f"additional_config: expected {right} or the like, found the key {key!r:.80}")
        entry = additional.get(NAME) or {}
        expect(isinstance(entry, Mapping), "additional_config: wisparse", "an object", entry)
        given = {key: environment[name] for key, name in ENVIRONMENT.items() if environment.get(name)} | {**entry}
        unknown = next((str(key) for key in given if key not in ENVIRONMENT), None)
        expect(unknown is None, "additional_config: wisparse", " or ".join(ENVIRONMENT), unknown)
        prefill, sparsity, layouts = given.get("prefill", "dense"), given.get("sparsity", default), given.get("layouts")
        output_layer = given.get("output_layer", "stored")
        expect(prefill in POLICIES, "prefill", f"one of {', '.join(POLICIES)} in vLLM", prefill)
        expect(layouts in (None, *LAYOUTS), "layouts", f"one of {', '.join(LAYOUTS)}", layouts)
        expect(output_layer in OUTPUT_LAYERS, "output_layer", f"one of {', '.join(OUTPUT_LAYERS)}", output_layer)
        try:
            if isinstance(sparsity, bool):
                raise ValueError
            return cls(prefill, float(sparsity), layouts, output_layer)
        except (TypeError, ValueError):
            raise UsageError(f"sparsity: expected a number, found {sparsity!r:.80}") from None


class MaskedRows:
    """For the next batch: 1 for a row that is masked, else 0."""

    def __init__(self, size: int, *, prompts: bool) -> None:
        """``prompts``: with the policy ``all``, whose masks begin with a prompt's second token."""
        self._size, self._prompts = size, prompts
        self._device: Tensor | None = None
        # The value of all rows, None if they differ. Every row is masked until the first batch, so that graphs are
        # captured with the masks in them.
        self._uniform: float | None = 1.0
        self.any = True  # whether any row may be masked

    def on(self, device: torch.device) -> Tensor:
        """(rows,) float32 on ``device``, the same tensor for every layer."""
        if self._device is None:
            self._device = torch.ones(self._size, dtype=torch.float32, device=device)
            _AT[self._device.data_ptr()] = self
        return self._device

    def set(self, computed: np.ndarray, counts: np.ndarray, prompts: np.ndarray) -> None:
        """Describe the next batch; asynchronous on a GPU. Each (requests,): tokens that earlier batches have read, tokens in
        this batch, length of the prompt. Tokens behind their prompt were decoded, and are masked."""
        if self._device is None:
            return
        if self._prompts:
            prompts = np.minimum(prompts, 1)
        decoded = (computed >= prompts).all()
        if decoded or (computed + counts <= prompts).all():
            value = float(decoded)
            if self._uniform != value:
                self._device.fill_(value)
            self._uniform, self.any = value, value > 0
        else:
            begins = np.cumsum(counts) - counts
            position = np.arange(int(counts.sum())) - np.repeat(begins - computed, counts)
            host = torch.from_numpy((position >= np.repeat(prompts, counts)).astype(np.float32))
            if self._device.is_cuda:
                host = host.pin_memory()
            self._device[: len(host)].copy_(host, non_blocking=True)
            self._uniform, self.any = None, True


def may_mask(masked: Tensor) -> bool:
    """Whether a row of (the beginning of) what `MaskedRows.on` returned may be masked, as the host knows it."""
    rows = _AT.get(masked.data_ptr())
    return rows is None or rows.any


def _of_v1(runner: Any, batch: Any, scheduled: Any, counts: np.ndarray, *rest: Any) -> tuple[Any, Any, Any]:
    requests = runner.input_batch
    count = requests.num_reqs
    return requests.num_computed_tokens_cpu[:count], counts, requests.num_prompt_tokens[:count]


def _of_v2(runner: Any, batch: Any, *rest: Any) -> tuple[Any, Any, Any]:
    prompts = runner.req_states.prompt_len.np[batch.idx_mapping_np]
    return batch.num_computed_tokens_np, batch.num_scheduled_tokens, prompts


# A runner's module, its method that prepares a batch, and the arguments of ``MaskedRows.set`` from that method's.
# vLLM has two runners and picks one by model and version.
_RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "_prepare_inputs", _of_v1),
    ("vllm.v1.worker.gpu.model_runner", "prepare_inputs", _of_v2),
)


def watch_runners() -> None:
    """Wrap vLLM's model runners, once in a process, so that they describe each batch."""
    found = [(sys.modules[module].GPUModelRunner, *rest) for module, *rest in _RUNNERS if module in sys.modules]
    for runner, method, describe in found:
        original = getattr(runner, method)
        if not hasattr(original, "__wrapped__"):
            setattr(runner, method, _watched(original, describe))
    if not found:
        raise UsageError(
            "expected one of vLLM's own model runners (V1 or V2), found another, which does not say which rows of a batch "
            "are prompts; load the dense model: VLLM_PLUGINS='' vllm serve …"
        )


def _watched(original: Callable[..., Any], describe: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_inputs(runner: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = original(runner, *arguments, **keywords)
        rows = getattr(runner.vllm_config.quant_config, "rows", None)
        if isinstance(rows, MaskedRows):
            rows.set(*describe(runner, batch, *arguments))
        return batch

    return prepare_inputs
