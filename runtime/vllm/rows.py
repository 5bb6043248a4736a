"""Which rows of a batch are masked: with the policy ``dense`` those of decoded tokens, not those of prompts.

A batch of vLLM's mixes both, a CUDA graph is captured once for all of them, and one row of a prompt looks like a
decoded one. So every product reads, row by row, a tensor on the device that is written before each batch. vLLM tells
nobody but its model runner how long a request's prompt is; the runners' step that lays out a batch is therefore
wrapped. (With a public hook before each forward pass, or with prompt lengths in the attention's metadata, nothing
would have to be.)
"""

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

# Module of a runner -> its method that lays out a batch. vLLM has two runners and picks one by model and version.
_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "_prepare_inputs",
    "vllm.v1.worker.gpu.model_runner": "prepare_inputs",
}


_AT: weakref.WeakValueDictionary[int, MaskedRows] = weakref.WeakValueDictionary()


class MaskedRows:
    """1 for a row that is masked, 0 for one that is not, for the batch that runs next.

    Attributes:
        any: whether any row may be masked; False lets a product skip the masks where no graph is captured.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._device: Tensor | None = None
        # What all of it holds, None if a batch mixes both. Until the first batch (and with the policy "all" for ever)
        # every row is masked: graphs are captured with the masks in them.
        self._uniform: float | None = 1.0
        self.any = True

    def on(self, device: torch.device) -> Tensor:
        """(rows,) float32 on ``device``, the same tensor for every layer."""
        if self._device is None:
            self._device = torch.ones(self._size, dtype=torch.float32, device=device)
            _AT[self._device.data_ptr()] = self
        return self._device

    def set(self, computed: np.ndarray, counts: np.ndarray, prompts: np.ndarray) -> None:
        """Write what the next batch needs; arguments as for ``masked_positions``. Asynchronous on a GPU."""
        if self._device is None:
            return
        if (computed >= prompts).all():
            self._fill(1.0)
        elif (computed + counts <= prompts).all():
            self._fill(0.0)
        else:
            masked = masked_positions(computed, counts, prompts)
            host = torch.from_numpy(masked.astype(np.float32))
            if self._device.is_cuda:
                host = host.pin_memory()
            self._device[: len(host)].copy_(host, non_blocking=True)
            self._uniform, self.any = None, True

    def _fill(self, value: float) -> None:
        assert self._device is not None
        if self._uniform != value:
            self._device.fill_(value)
        self._uniform, self.any = value, value > 0


def may_mask(masked: Tensor) -> bool:
    """Whether a row of what ``MaskedRows.on`` gave, or of its beginning, may be masked: what the host knows of it."""
    rows = _AT.get(masked.data_ptr())
    return rows is None or rows.any


def masked_positions(computed: np.ndarray, counts: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Which tokens of a batch were decoded, (sum(counts),) bool: those at or after the end of their prompt.

    Args:
        computed: (requests,) tokens of each request that earlier batches have read.
        counts: (requests,) tokens of each in this batch, one request after the other.
        prompts: (requests,) length of each prompt.
    """
    begins = np.cumsum(counts) - counts
    position = np.arange(int(counts.sum())) - np.repeat(begins - computed, counts)
    return position >= np.repeat(prompts, counts)


def watch_runners() -> None:
    """Have vLLM's model runners say what each batch is made of; once in a process, later calls do nothing.

    Raises:
        UsageError: this process has none of the runners that are known.
    """
    found = [(sys.modules[name].GPUModelRunner, method) for name, method in _RUNNERS.items() if name in sys.modules]
    for runner, method in found:
        original = getattr(runner, method)
        if not hasattr(original, "__wrapped__"):
            setattr(runner, method, _watched(original, _describe[method]))
    if not found:
        raise UsageError(
            "prefill dense: expected one of vLLM's own model runners (V1 or V2), found another; use the policy 'all'"
        )


def _watched(original: Callable[..., Any], describe: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lay_out(runner: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = original(runner, *arguments, **keywords)
        rows = getattr(runner.vllm_config.quant_config, "rows", None)
        if isinstance(rows, MaskedRows):
            rows.set(*describe(runner, batch, *arguments))
        return batch

    return lay_out


def _of_v1(runner: Any, batch: Any, scheduled: Any, counts: np.ndarray, *rest: Any) -> tuple[Any, Any, Any]:
    requests = runner.input_batch
    count = requests.num_reqs
    return requests.num_computed_tokens_cpu[:count], counts, requests.num_prompt_tokens[:count]


def _of_v2(runner: Any, batch: Any, *rest: Any) -> tuple[Any, Any, Any]:
    prompts = runner.req_states.prompt_len.np[batch.idx_mapping_np]
    return batch.num_computed_tokens_np, batch.num_scheduled_tokens, prompts


_describe = {"_prepare_inputs": _of_v1, "prepare_inputs": _of_v2}
