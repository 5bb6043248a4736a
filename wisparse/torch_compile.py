"""The baseline: a dense model as transformers runs it, or any step, compiled whole by ``torch.compile``.

A static cache, ``mode="reduce-overhead"`` (CUDA graphs on an NVIDIA GPU), the greedy choice inside the graph, and no
token read by the host between two steps, where our own runs read each: in the baseline's favour, as gpt-fast measures
(https://github.com/pytorch-labs/gpt-fast). The prompt is read outside the graph and is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .converter.model.source import load_source
from .formats.bundle import Bundle
from .formats.errors import UnsupportedModelError, UsageError, first_line
from .runtime.benchmark import Workload, prompts
from .runtime.decoding.memory import memory_errors
from .runtime.timing import wait

__all__ = ["NAME", "CompiledSpeed", "check_compiler", "compiled_rates", "time_compiled"]

NAME = "torch.compile"
_MODE = "reduce-overhead"


@dataclass(frozen=True)
class CompiledSpeed:
    """How fast the baseline was: ``tok_per_s`` the median of ``runs``, all rows together; ``step_ms`` one step."""

    dtype: str
    tok_per_s: float
    step_ms: float
    runs: tuple[float, ...]
    name: str = NAME
    mode: str = _MODE


def check_compiler(device: torch.device) -> None:
    """Raise UsageError where ``torch.compile`` would find no C++ compiler; a GPU's kernels need none."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UsageError(
            f"--baseline {NAME} needs a C++ compiler on a CPU, and there is none: install g++, or let CXX name one"
        ) from error


@torch.no_grad()
def compiled_rates(
    prefill: Callable[[], Tensor], step: Callable[[Tensor, Tensor], Tensor], workload: Workload, device: torch.device
) -> tuple[float, ...]:
    """Tokens a second, all rows together, of every run but a first one, which compiles and captures.

    Args:
        prefill: empties the cache, reads the prompts, and gives the first ids (B, 1).
        step: ids (B, 1) and their position (1,), int64, to the next ids (B, 1).
        workload: ``prompt_length`` is the first position of a step, ``new_tokens`` their number.

    Raises:
        UnsupportedModelError: the step cannot be compiled whole.
    """
    compiled = torch.compile(step, mode=_MODE, fullgraph=True)
    first = workload.prompt_length
    positions = [torch.tensor([place], device=device) for place in range(first, first + workload.new_tokens)]
    rates = []
    try:
        for run in range(1 + workload.runs):
            token = prefill()
            wait(device)
            began = time.perf_counter()
            for position in positions:
                token = compiled(token, position).clone()  # out of the graph's own memory
            wait(device)
            if run:
                rates.append(workload.batch * workload.new_tokens / (time.perf_counter() - began))
    except torch._dynamo.exc.TorchDynamoException as error:
        raise UnsupportedModelError(
            f"--baseline {NAME}: this model cannot be compiled whole here: {first_line(error)}; go without"
        ) from error
    finally:
        torch._dynamo.reset()  # gives back the graphs' memory
    return tuple(rates)


def time_compiled(bundle: Bundle, workload: Workload, device: torch.device, dtype: torch.dtype) -> CompiledSpeed:
    """A bundle's dense model, its weights as numbers of ``dtype`` whatever they are stored as; ids as `compare` has.

    Raises:
        BundleError, UnsupportedModelError: the weights cannot be loaded, or the model cannot be compiled whole.
        ResourceError: not enough memory.
    """
    from transformers import StaticCache

    with memory_errors(device, f"for the dense model under {NAME}"):
        model = load_source(bundle.folder, dtype, device, bundle=True).model
        length = workload.prompt_length + workload.new_tokens
        cache = StaticCache(config=model.config, max_cache_len=length)
        ids = torch.stack(prompts(bundle.config, workload)).to(device)

        def step(tokens: Tensor, positions: Tensor) -> Tensor:
            seen = model(input_ids=tokens, position_ids=positions[None], past_key_values=cache, use_cache=True)
            return seen.logits[:, -1].argmax(-1, keepdim=True)

        def prefill() -> Tensor:
            cache.reset()
            return step(ids, torch.arange(workload.prompt_length, device=device))

        rates = compiled_rates(prefill, step, workload, device)
    rate = statistics.median(rates)
    return CompiledSpeed(str(dtype).removeprefix("torch."), rate, workload.batch / rate * 1e3, rates)
