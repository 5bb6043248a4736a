"""The products of a block in one launch whose programs wait for exactly the tiles that they need, beside launches.

    PYTHONPATH=. python benchmarks/gpu_counters.py
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_counters.py --tiny   # without a GPU: is it right

q, k, v; o; gate and up; down: Llama-3.1-8B's shapes in bf16, dense, one row, so that the bytes are the same on both
sides. The attention is left out: o reads q. Both sides run the same code for a tile of columns and a segment of
channels, first weights before the wait included; only the waiting differs:

    counters   one launch for all blocks, as many programs as run at once; a tile that is added up sets its flag, and a
               program looks at the flags of the tiles that its own channels come from. No barrier over the grid.
    launches   four a block, each begins early and waits for the end of the one before (programmatic dependent launch)

A prototype: nothing of it is in the package. LOG.md says what came out.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from wisparse.kernels.gpu.common import let_next_kernel_start, wait_for_previous_kernel


class Phase(NamedTuple):
    """One product: K channels, N columns, segments of K / ``splits`` channels. ``normed``: x is normalised, and all of
    its tiles are needed for that; else those of a segment's own channels are. ``pairs``: a tile of the first half and
    the same of the second make one of the output."""

    k: int
    n: int
    splits: int
    normed: bool
    pairs: bool
    residual: bool


class Cut(NamedTuple):
    block_n: int
    rows: int  # channels of one load
    unroll: int


@triton.jit
def _rows_of(w_ptr, first, n, N: tl.constexpr, cut: tl.constexpr):
    ROWS: tl.constexpr = cut.rows
    UNROLL: tl.constexpr = cut.unroll
    ws = ()
    for i in tl.static_range(UNROLL):
        k = first + i * ROWS + tl.arange(0, ROWS)
        ws = ws + (  # noqa: RUF005
            tl.load(w_ptr + k.to(tl.int64)[:, None] * N + n[None, :], eviction_policy="evict_first"),
        )
    return ws


@triton.jit
def _item(
    item, x_ptr, ssq_ptr, w_ptr, residual_ptr, out_ptr, ssq_out_ptr, partial_ptr, arrived_ptr, needed_ptr, ready_ptr,
    phase: tl.constexpr, cut: tl.constexpr, HIDDEN_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile and segment; ``needed_ptr`` None: the launch before has ended instead."""
    K: tl.constexpr = phase.k
    N: tl.constexpr = phase.n
    BLOCK_N: tl.constexpr = cut.block_n
    TILES: tl.constexpr = N // BLOCK_N
    SEGMENT: tl.constexpr = K // phase.splits
    ROWS: tl.constexpr = cut.rows
    UNROLL: tl.constexpr = cut.unroll
    STEP: tl.constexpr = ROWS * UNROLL
    SPLITS: tl.constexpr = phase.splits
    tile = item % TILES
    split = item // TILES
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = split * SEGMENT
    ahead = _rows_of(w_ptr, begin, n, N, cut)
    tl.debug_barrier()
    if needed_ptr is None:
        wait_for_previous_kernel(PDL)
        let_next_kernel_start(PDL)
    else:
        flag = tl.arange(0, 64)
        if phase.normed:
            first = 0
            last = HIDDEN_TILES
        else:
            first = begin // BLOCK_N
            last = (begin + SEGMENT + BLOCK_N - 1) // BLOCK_N
        there = (flag >= first) & (flag < last)
        while tl.min(tl.load(needed_ptr + flag, mask=there, other=1, volatile=True)) == 0:
            pass
        tl.debug_barrier()
    scale = 1.0
    if phase.normed:
        part = tl.arange(0, HIDDEN_TILES)
        scale = tl.rsqrt(tl.sum(tl.load(ssq_ptr + part, cache_modifier=".cg")) / K + 1e-5)
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in tl.range(begin, begin + SEGMENT, STEP, num_stages=1):
        ws = ahead
        ahead = _rows_of(w_ptr, tl.minimum(start + STEP, begin + SEGMENT - STEP), n, N, cut)
        tl.debug_barrier()
        for i in tl.static_range(UNROLL):
            k = start + i * ROWS + tl.arange(0, ROWS)
            x = tl.load(x_ptr + k, cache_modifier=".cg").to(tl.float32) * scale
            acc += x[:, None] * ws[i].to(tl.float32)
    tl.store(partial_ptr + split * N + n, tl.sum(acc, axis=0))
    tl.debug_barrier()
    PAIRED: tl.constexpr = N // 2
    OUT_TILES: tl.constexpr = TILES // 2 if phase.pairs else TILES
    ARRIVALS: tl.constexpr = phase.splits * 2 if phase.pairs else phase.splits
    place = tile % OUT_TILES
    if tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == ARRIVALS - 1:
        tl.store(arrived_ptr + place, 0)  # as the next replay finds it
        c = place * BLOCK_N + tl.arange(0, BLOCK_N)
        y = tl.zeros((BLOCK_N,), tl.float32)
        up = tl.zeros((BLOCK_N,), tl.float32)
        for s in range(SPLITS):
            y += tl.load(partial_ptr + s * N + c, cache_modifier=".cg")
            if phase.pairs:
                up += tl.load(partial_ptr + s * N + PAIRED + c, cache_modifier=".cg")
        if phase.pairs:
            y = y / (1.0 + tl.exp(-y)) * up
        if phase.residual:
            y += tl.load(residual_ptr + c, cache_modifier=".cg").to(tl.float32)
            tl.store(ssq_out_ptr + place, tl.sum(y * y))
        tl.store(out_ptr + c, y.to(out_ptr.dtype.element_ty))
        if ready_ptr is not None:
            tl.debug_barrier()
            tl.atomic_add(ready_ptr + place, 1, sem="release")


@triton.jit
def _counters_kernel(
    hidden_ptr, ssq_ptr, qkv_ptr, middle_ptr, middle_ssq_ptr, inner_ptr, weights, partials, arrived_ptr, ready_ptr,
    QKV: tl.constexpr, O: tl.constexpr, GATE_UP: tl.constexpr, DOWN: tl.constexpr,  # phases  # noqa: E741
    BLOCKS: tl.constexpr, cut: tl.constexpr, FLAGS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """``hidden`` (BLOCKS + 1, H) and so on: a buffer of its own for every block; ``ready`` zeroed before."""
    H: tl.constexpr = QKV.k
    Q: tl.constexpr = QKV.n
    INNER: tl.constexpr = DOWN.k
    TILES: tl.constexpr = H // cut.block_n
    program = tl.program_id(0)
    for block in range(BLOCKS):
        flags = ready_ptr + (block + 1) * 4 * FLAGS
        hidden = hidden_ptr + block * H
        ssq = ssq_ptr + block * TILES
        middle = middle_ptr + block * H
        middle_ssq = middle_ssq_ptr + block * TILES
        wide = (program * 0 + block).to(tl.int64)
        for item in range(program, QKV.n // cut.block_n * QKV.splits, PROGRAMS):
            _item(
                item, hidden, ssq, weights[0] + wide * (H * Q), hidden, qkv_ptr + block * Q, ssq, partials[0],
                arrived_ptr, flags - FLAGS, flags, QKV, cut, TILES, False,
            )  # fmt: skip
        for item in range(program, O.n // cut.block_n * O.splits, PROGRAMS):
            _item(
                item, qkv_ptr + block * Q, ssq, weights[1] + wide * (H * H), hidden, middle, middle_ssq, partials[1],
                arrived_ptr + FLAGS, flags, flags + FLAGS, O, cut, TILES, False,
            )  # fmt: skip
        for item in range(program, GATE_UP.n // cut.block_n * GATE_UP.splits, PROGRAMS):
            _item(
                item, middle, middle_ssq, weights[2] + wide * (2 * H * INNER), middle, inner_ptr + block * INNER,
                middle_ssq, partials[2], arrived_ptr + 2 * FLAGS, flags + FLAGS, flags + 2 * FLAGS, GATE_UP, cut,
                TILES, False,
            )  # fmt: skip
        for item in range(program, DOWN.n // cut.block_n * DOWN.splits, PROGRAMS):
            _item(
                item, inner_ptr + block * INNER, ssq, weights[3] + wide * (H * INNER), middle, hidden + H, ssq + TILES,
                partials[3], arrived_ptr + 3 * FLAGS, flags + 2 * FLAGS, flags + 3 * FLAGS, DOWN, cut, TILES,
                False,
            )  # fmt: skip


@triton.jit
def _launched_kernel(
    x_ptr, ssq_ptr, w_ptr, residual_ptr, out_ptr, ssq_out_ptr, partial_ptr, arrived_ptr,
    phase: tl.constexpr, cut: tl.constexpr, HIDDEN_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _item(
        tl.program_id(0), x_ptr, ssq_ptr, w_ptr, residual_ptr, out_ptr, ssq_out_ptr, partial_ptr, arrived_ptr, None,
        None, phase, cut, HIDDEN_TILES, PDL,
    )  # fmt: skip


class Blocks:
    """Weights and buffers of so many blocks, and both ways to run them."""

    def __init__(
        self, h: int, kv: int, inner: int, blocks: int, splits: tuple[int, ...], cut: Cut, device: str
    ) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        self.cut, self.blocks, self.h = cut, blocks, h
        self.phases = (
            Phase(h, h + 2 * kv, splits[0], True, False, False),
            Phase(h, h, splits[1], False, False, True),
            Phase(h, 2 * inner, splits[2], True, True, False),
            Phase(inner, h, splits[3], False, False, True),
        )
        self.weights = tuple(
            torch.randn(blocks, p.k, p.n, device=device, dtype=dtype).div_(p.k**0.5) for p in self.phases
        )
        tiles = h // cut.block_n
        self.hidden = torch.randn(blocks + 1, h, device=device, dtype=dtype)
        self.ssq = torch.zeros(blocks + 1, tiles, device=device)
        self.ssq[0] = self.hidden[0].float().view(tiles, -1).square().sum(1)
        self.middle, self.middle_ssq = torch.empty_like(self.hidden), torch.empty_like(self.ssq)
        self.qkv = torch.empty(blocks, h + 2 * kv, device=device, dtype=dtype)
        self.inner = torch.empty(blocks, inner, device=device, dtype=dtype)
        self.partials = tuple(torch.empty(p.splits, p.n, device=device) for p in self.phases)
        self.flags = max(64, *(p.n // cut.block_n for p in self.phases))
        self.arrived = torch.zeros(4, self.flags, dtype=torch.int32, device=device)
        # What the first block needs is there; the rest is zeroed before each launch.
        self.ready = torch.ones(blocks + 1, 4, self.flags, dtype=torch.int32, device=device)

    def counters(self, programs: int, warps: int, registers: int = 168) -> None:
        """``registers``: at most so many a thread, so that all programs run at once: they wait for each other."""
        self.ready[1:].zero_()
        _counters_kernel[(programs,)](
            self.hidden, self.ssq, self.qkv, self.middle, self.middle_ssq, self.inner, self.weights, self.partials,
            self.arrived, self.ready, *self.phases, self.blocks, self.cut, self.flags, programs, num_warps=warps,
            maxnreg=registers,
        )  # fmt: skip

    def launches(self, warps: int, pdl: bool) -> None:
        options = {"launch_pdl": True} if pdl else {}
        for b in range(self.blocks):
            hidden, ssq, middle = (self.hidden[b], self.ssq[b]), (self.hidden[b + 1], self.ssq[b + 1]), self.middle[b]
            ends = (
                (*hidden, hidden[0], self.qkv[b], hidden[1]),
                (self.qkv[b], hidden[1], hidden[0], middle, self.middle_ssq[b]),
                (middle, self.middle_ssq[b], middle, self.inner[b], self.middle_ssq[b]),
                (self.inner[b], hidden[1], middle, *ssq),
            )
            for i, phase in enumerate(self.phases):
                x, norm, residual, out, squares = ends[i]
                _launched_kernel[(phase.n // self.cut.block_n * phase.splits,)](
                    x, norm, self.weights[i][b], residual, out, squares, self.partials[i], self.arrived[i], phase,
                    self.cut, self.h // self.cut.block_n, pdl, num_warps=warps, **options,
                )  # fmt: skip

    def exact(self) -> torch.Tensor:
        """The last block's output in float64, every intermediate result rounded as the kernels round it."""

        def kept(x: torch.Tensor) -> torch.Tensor:
            return x.to(self.hidden.dtype).double()

        def normed(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean() + 1e-5)

        x = self.hidden[0].double()
        for b in range(self.blocks):
            qkv, o, gate_up, down = (w[b].double() for w in self.weights)
            q = kept(normed(x) @ qkv)[: self.h]
            x = kept(x + q @ o)
            gate, up = (normed(x) @ gate_up).chunk(2)
            x = kept(x + kept(torch.nn.functional.silu(gate) * up) @ down)
        return x


def check(of: Blocks, run) -> float:
    """Largest relative error of the last block's output after ``run``, nothing of the run before left."""
    for tensor in (of.hidden[1:], of.middle, of.qkv, of.inner, *of.partials):
        tensor.fill_(float("nan"))
    run()
    expected = of.exact()
    return float((of.hidden[-1].double() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, one program; interpreted, without a GPU")
    parser.add_argument("--blocks", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.tiny:
        of = Blocks(256, 64, 512, 2, (2, 4, 2, 8), Cut(64, 4, 2), "cuda" if torch.cuda.is_available() else "cpu")
        for name, run in (("counters", partial(of.counters, 1, 4)), ("launches", partial(of.launches, 4, False))):
            error = check(of, run)
            print(f"{name}: error {error:.1e}")
            if not error < 1e-2:
                raise SystemExit(f"expected the block's output within 1e-2, found {error:.1e}")
        return
    from gpu_models import need_gpu
    from gpu_tiles import time_graph

    need_gpu(parser)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for warps, cut, splits in (
        (4, Cut(256, 4, 8), (16, 16, 4, 28)),
        (4, Cut(256, 4, 8), (16, 32, 8, 56)),
        (2, Cut(256, 2, 8), (16, 32, 8, 56)),
    ):
        of = Blocks(4096, 1024, 14336, arguments.blocks, splits, cut, "cuda")
        each = 12 // warps
        ways = {
            f"counters, {each} programs a multiprocessor": partial(of.counters, processors * each, warps),
            f"counters, {16 // warps}": partial(of.counters, processors * 16 // warps, warps, 128),
            "launches": partial(of.launches, warps, True),
            "launches that begin late": partial(of.launches, warps, False),
        }
        for name, run in ways.items():
            error = check(of, run)
            us = time_graph(run, of.blocks)
            print(f"{warps} warps, {cut}, splits {splits}: {name}: {us:.1f} us a block, error {error:.1e}", flush=True)
        del of, ways
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
