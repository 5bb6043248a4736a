"""What handing over costs: a barrier over a whole grid, as a persistent kernel needs, or the next launch of a graph.

    PYTHONPATH=. python benchmarks/gpu_barrier.py

In each phase every program reads 512 bytes that another one wrote in the phase before, and writes 512.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gpu_tiles import time_graph

from wisparse.kernels.gpu.common import let_next_kernel_start, wait_for_previous_kernel

__all__: list[str] = []

PHASES, NUMBERS = 200, 128


@triton.jit
def _phase(x_ptr, phase, GRID: tl.constexpr, NUMBERS: tl.constexpr):
    program = tl.program_id(0)
    i = tl.arange(0, NUMBERS)
    source = x_ptr + (phase % 2) * GRID * NUMBERS + ((program * 7 + phase) % GRID) * NUMBERS
    x = tl.load(source + i, volatile=True)
    tl.store(x_ptr + ((phase + 1) % 2) * GRID * NUMBERS + program * NUMBERS + i, x + 1)


@triton.jit
def _persistent(
    x_ptr, arrived_ptr, PHASES: tl.constexpr, GRID: tl.constexpr, NUMBERS: tl.constexpr, BARRIER: tl.constexpr
):
    for phase in range(PHASES):
        _phase(x_ptr, phase, GRID, NUMBERS)
        if BARRIER:
            tl.debug_barrier()
            tl.atomic_add(arrived_ptr, 1, sem="release")
            while tl.load(arrived_ptr, volatile=True) < (phase + 1) * GRID:
                pass
            tl.debug_barrier()


@triton.jit
def _launched(x_ptr, phase, GRID: tl.constexpr, NUMBERS: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    _phase(x_ptr, phase, GRID, NUMBERS)


def main() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    for programs in (1, 2, 4):
        grid = processors * programs
        x = torch.zeros(2 * grid * NUMBERS, dtype=torch.int32, device="cuda")

        def persistent(barrier: bool, x=x, grid=grid) -> None:
            arrived.zero_()
            _persistent[(grid,)](x, arrived, PHASES, grid, NUMBERS, barrier, num_warps=4)

        def launched(pdl: bool, x=x, grid=grid) -> None:
            options = {"launch_pdl": True} if pdl else {}
            for phase in range(PHASES):
                _launched[(grid,)](x, phase, grid, NUMBERS, pdl, num_warps=4, **options)

        times = [time_graph(lambda p=p, f=f: f(p), PHASES) for f in (persistent, launched) for p in (True, False)]
        print(
            f"{programs} programs a multiprocessor, microseconds a phase: grid barrier {times[0]:.2f}, no barrier "
            f"{times[1]:.2f}, launches that start early {times[2]:.2f}, launches {times[3]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
