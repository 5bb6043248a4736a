"""The dense model in transformers under ``torch.compile``: what ``wisparse bench --baseline`` compares with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wisparse.converter.source import cache_argument, load_source
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UnsupportedModelError, UsageError, first_line
from wisparse.runtime.benchmark import Workload, prompts, wait
from wisparse.runtime.memory import memory_errors

_BASELINE, _MODE = "torch.compile", "reduce-overhead"


@dataclass(frozen=True)
class CompiledSpeed:
    """Speed of the baseline, in tokens per second of all sequences together."""

    dtype: str
    tok_per_s: float  # the median of ``runs``
    step_ms: float
    runs: tuple[float, ...]
    name: str = _BASELINE
    mode: str = _MODE


@torch.no_grad()
def compiled_rates(
    prefill: Callable[[], Tensor], step: Callable[[Tensor, Tensor], Tensor], workload: Workload, device: torch.device
) -> tuple[float, ...]:
    """Tokens per second, of all sequences together, of each run after a warm-up run, which compiles. ``prefill`` resets
    the cache and returns the first ids (B, 1); ``step`` maps ids and their position (1,), int64, to the next ids."""
    compiled = torch.compile(step, mode=_MODE, fullgraph=True)
    first = workload.prompt_length
    positions = [torch.tensor([index], device=device) for index in range(first, first + workload.new_tokens)]
    rates = []
    try:
        for run in range(1 + workload.runs):
            token = prefill()
            wait(device)
            began = time.perf_counter()
            for position in positions:
                token = compiled(token, position).clone()  # CUDA graphs reuse their outputs' memory
            wait(device)
            if run:
                rates.append(workload.batch * workload.new_tokens / (time.perf_counter() - began))
    except torch._dynamo.exc.TorchDynamoException as error:
        why = f"this model cannot be compiled whole here: {first_line(error)}"
        raise UnsupportedModelError(f"--baseline {_BASELINE}: {why}; go without") from error
    finally:
        torch._dynamo.reset()  # frees the graphs' memory
    return tuple(rates)


def time_compiled(bundle: Bundle, workload: Workload, device: torch.device, dtype: torch.dtype) -> CompiledSpeed:
    from transformers import StaticCache

    with memory_errors(device, f"for the dense model under {_BASELINE}"):
        model = load_source(bundle.folder, dtype, device, bundle=True).model
        length = workload.prompt_length + workload.new_tokens
        cache, argument = StaticCache(config=model.config, max_cache_len=length), cache_argument(model)
        ids = torch.stack(prompts(bundle.config, workload)).to(device)

        def step(tokens: Tensor, positions: Tensor) -> Tensor:
            out = model(input_ids=tokens, position_ids=positions[None], **{argument: cache}, use_cache=True)
            return out.logits[:, -1].argmax(-1, keepdim=True)

        def prefill() -> Tensor:
            cache.reset()
            return step(ids, torch.arange(workload.prompt_length, device=device))

        rates = compiled_rates(prefill, step, workload, device)
    rate = statistics.median(rates)
    return CompiledSpeed(str(dtype).removeprefix("torch."), rate, workload.batch / rate * 1e3, rates)


def require_compiler(device: torch.device) -> None:
    """UsageError if ``device`` is the CPU and there is no C++ compiler for torch.compile."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        lack = f"--baseline {_BASELINE} needs a C++ compiler on a CPU, and there is none"
        raise UsageError(f"{lack}: install g++, or let CXX name one") from error
