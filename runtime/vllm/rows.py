"""Which rows of a batch are masked: with the policy ``dense`` those of decoded tokens, not those of prompts."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wisparse.formats.errors import UsageError

_AT: weakref.WeakValueDictionary[int, MaskedRows] = weakref.WeakValueDictionary()


class MaskedRows:
    """For the next batch: 1 for a row that is masked, else 0."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._device: Tensor | None = None
        # The value of all rows, None if they differ. Every row is masked until the first batch, so that graphs are
        # captured with the masks in them, and always with the policy "all".
        self._uniform: float | None = 1.0
        self.any = True  # whether any row may be masked

    def on(self, device: torch.device) -> Tensor:
        """(rows,) float32 on ``device``, the same tensor for every layer."""
        if self._device is None:
            self._device = torch.ones(self._size, dtype=torch.float32, device=device)
            _AT[self._device.data_ptr()] = self
        return self._device

    def set(self, computed: np.ndarray, counts: np.ndarray, prompts: np.ndarray) -> None:
        """Describe the next batch; arguments as for `masked_positions`. Asynchronous on a GPU."""
        if self._device is None:
            return
        decoded = (computed >= prompts).all()
        if decoded or (computed + counts <= prompts).all():
            value = float(decoded)
            if self._uniform != value:
                self._device.fill_(value)
            self._uniform, self.any = value, value > 0
        else:
            masked = masked_positions(computed, counts, prompts)
            host = torch.from_numpy(masked.astype(np.float32))
            if self._device.is_cuda:
                host = host.pin_memory()
            self._device[: len(host)].copy_(host, non_blocking=True)
            self._uniform, self.any = None, True


def may_mask(masked: Tensor) -> bool:
    """Whether a row of (the beginning of) what `MaskedRows.on` returned may be masked, as the host knows it."""
    rows = _AT.get(masked.data_ptr())
    return rows is None or rows.any


def masked_positions(computed: np.ndarray, counts: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Which tokens of a batch were decoded, those behind their prompt: (sum(counts),) bool. Each (requests,): tokens
    that earlier batches have read, tokens in this batch, length of the prompt."""
    begins = np.cumsum(counts) - counts
    position = np.arange(int(counts.sum())) - np.repeat(begins - computed, counts)
    return position >= np.repeat(prompts, counts)


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
            "prefill dense: expected one of vLLM's own model runners (V1 or V2), found another; use the policy 'all'"
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
