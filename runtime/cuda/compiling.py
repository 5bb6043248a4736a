"""The kernels of several steps, compiled side by side before a server's first request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from wisparse.kernels.compiling import triton_compiling

from .step import DecodeStep

__all__ = ["compile_steps"]


def compile_steps(steps: Sequence[Sequence[DecodeStep]], ways: Sequence[tuple[bool, bool]]) -> None:
    """Launch every step once in each way, a thread for each list of them: most of what a compiler does lets other
    threads go on. Steps write to memory of their own alone, so two of them may take turns on the stream.

    Args:
        steps: on one GPU; those of a list differ in their attention.
        ways: sampled, and counted, as :meth:`DecodeStep.prepare` takes them.
    """
    stream = torch.cuda.current_stream(steps[0][0].positions.device)

    def run(some: Sequence[DecodeStep]) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            for step in some:
                for sampled, count in ways:
                    step.compile(sampled=sampled, count=count)

    sampled, counts = any(sampled for sampled, _ in ways), len({count for _, count in ways})
    kernels = sum(some[0].num_kernels(sampled=sampled, counts=counts) + len(some) - 1 for some in steps)
    with triton_compiling(kernels), ThreadPoolExecutor(len(steps), "wisparse-compile") as pool:
        list(pool.map(run, steps))
