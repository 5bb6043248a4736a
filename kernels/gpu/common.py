"""What the Triton kernels share: groups of arguments, shared memory, programmatic dependent launch, RMSNorm."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class KVSplits(NamedTuple):
    """Attention's partial results, one for each split of the context."""

    x: Tensor  # (B, heads, kv_splits, head_dim) float32, softmax-weighted sums
    maximum: Tensor  # (B, heads, kv_splits) float32, log2 domain
    total: Tensor  # the same shape, denominators


class Input(NamedTuple):
    """A linear's input: x as it is; x after an RMSNorm (``ssq``, ``norm``); or attention's splits, combined."""

    x: Tensor | None  # (B, K) dtype
    ssq: Tensor | None = None  # (B, ssq_parts) float32, partial sums of squares of x's rows
    norm: Tensor | None = None  # (K,) of the weights' dtype; float32 if multiplied before any rounding: 1 + weight
    attention: KVSplits | None = None
    row_mask: Tensor | None = None  # (B,) float32, 1 for a masked row, 0 for one that keeps all channels; None: all 1


class Weights(NamedTuple):
    weight_t: Tensor  # (K, stride), channel-major; the projections' columns side by side; quantized: int32 words
    bias: Tensor | None  # (N,) of the weights' dtype; of experts (E, N)
    scales: Tensor | None  # (projections, K) float32, channel scales; None: as thresholds, not read
    thresholds: Tensor | None  # (projections * planes,) float32
    quant_scales: Tensor | None  # quantized: (K / group, padded columns) float32
    quant_zeros: Tensor | None  # zero points other than the type's own: the same shape


class Output(NamedTuple):
    out: Tensor  # dtype: (B, N), "residual" read and written; of an activation (B, n0)
    ssq: Tensor | None = None  # "residual": (B, tiles * max(1, reducers)) float32, sums of squares for the next norm


class Routing(NamedTuple):
    expert: Tensor  # (B, chosen) int32
    weight: Tensor  # (B, chosen) float32


class Workspace(NamedTuple):
    partial: Tensor  # (splits, B, N) int32, bits of float32; with spinning reducers EMPTY before and after
    counter: Tensor | None  # no spinning reducers: (tiles,) int32, 0 before and after
    list_index: Tensor | None  # compacted index lists outside shared memory: (programs, length) int32
    list_value: Tensor | None  # and (programs, B, length) dtype
    # Within a kernel of experts whose products are added up: which of the chosen ones, the weights of all of them, and
    # which experts they are.
    chosen: Any = None
    chosen_weight: Any = None
    chosen_expert: Any = None


class Counting(NamedTuple):
    token: Tensor  # (B,) int64, negative for a row that is not counted
    before: Tensor  # (projections, splits) int64
    after: Tensor  # the same shape: before, and what this launch keeps


class Problem(NamedTuple):
    """Compiled in: what is computed."""

    k: int  # rows of weight_t: channels times planes
    n0: int  # the projections' widths, and their sum
    n1: int
    n2: int
    n: int
    stride: int  # of weight_t
    batch: int
    kv_splits: int  # of the attention that is read
    head_dim: int
    ssq_pad: int  # partial sums of squares at most, a multiple of 32
    output: str  # "plain" (y), "residual" (residual + y), or an activation of gate and up, as of ``reduction.activate``
    dense: bool  # no channel is dropped
    pdl: bool  # programmatic dependent launch
    quant: str  # "none", "int4", "int8", "fp8"
    group: int  # rows of weight_t that share a quantization scale
    planes: int  # 2 of graded weights: row 2 k is the high plane of channel k, row 2 k + 1 the low one
    experts: int = 0  # chosen experts whose products are added up, times their weights; 0: none
    clamp: tuple[float, float] = (0.0, 0.0)  # slope and limit of "clamped"


class LaunchConfig(NamedTuple):
    """Compiled in: how it is computed. Fields as in ``GemvTile``, and what follows from it."""

    tiles: int  # of columns
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    chunk: int
    unroll: int
    trigger: int
    lead: int
    reducers: int
    segment: int  # a program's channels, a power of two
    length: int  # entries of each of its lists
    smem: str  # PTX that declares the lists' shared memory; "": they lie in scratch memory
    reduce_splits: int  # splits whose partial sums are read at a time


@triton.jit
def smem_alloc(SOURCE: tl.constexpr, scalar):
    """The address of what ``LaunchConfig.smem`` declares; ``scalar`` is any int32. Once in a kernel."""
    return tl.inline_asm_elementwise(SOURCE, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


_STORE = "{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b{} [$1], $2; mov.b32 $0, 0; }}"
_STORE_16 = tl.constexpr(_STORE.format(16))
_STORE_32 = tl.constexpr(_STORE.format(32))


@triton.jit
def smem_store(items, place, value, wanted, SHARED: tl.constexpr):
    """items[place] = value (int32, float32, fp16 or bf16) where wanted, in shared or global memory."""
    if SHARED:
        HALF: tl.constexpr = value.dtype.primitive_bitwidth == 16
        # A float32 as such: as bits among integers it costs a quarter more registers.
        KIND: tl.constexpr = "h" if HALF else "f" if value.dtype.is_floating() else "r"
        if HALF:
            value = value.to(tl.int16, bitcast=True)
        tl.inline_asm_elementwise(
            _STORE_16 if HALF else _STORE_32, "=r,r," + KIND + ",r",
            [items + place * (2 if HALF else 4), value, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(items + place, value.to(items.dtype.element_ty), mask=wanted)


def _store_run(count: int) -> str:
    """PTX: ``count`` (2 or 4) 16-bit values of each thread, at once where their addresses are neighbours, which the
    compiler's layout decides for all threads alike."""
    at, values, wanted = count, 2 * count, 2 * count + count // 2
    halves = [f"h{i}" for i in range(count)]
    lines = [".reg .pred apart, wanted;", ".reg .b32 last;", f".reg .b16 h<{count}>;"]
    lines += [f"add.u32 last, ${at}, {2 * count - 2};", f"setp.ne.b32 apart, last, ${at + count - 1};"]
    lines += [f"setp.ne.b32 wanted, ${wanted}, 0;", "@apart bra.uni APART;"]
    words = ", ".join(f"${values + i}" for i in range(count // 2))
    lines += [f"@wanted st.shared{'.v2' if count == 4 else ''}.b32 [${at}], {{{words}}};", "bra.uni DONE;", "APART:"]
    lines += [f"mov.b32 {{h{2 * i}, h{2 * i + 1}}}, ${values + i};" for i in range(count // 2)]
    for i, half in enumerate(halves):
        lines += [f"setp.ne.b32 wanted, ${wanted + i}, 0;", f"@wanted st.shared.b16 [${at + i}], {half};"]
    return f"{{ {' '.join(lines)} DONE: {' '.join(f'mov.b32 ${i}, 0;' for i in range(count))} }}"


_STORE_2 = tl.constexpr((_store_run(2), "=r,=r,r,r,r,r,r"))
_STORE_4 = tl.constexpr((_store_run(4), "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r"))


@triton.jit
def smem_store_runs(items, place, value, wanted, RUN: tl.constexpr):
    """``smem_store`` of fp16 or bf16 in shared memory, of which RUN (2 or 4) neighbouring places, from a multiple of RUN
    on, are all wanted or none."""
    SOURCE: tl.constexpr = _STORE_2 if RUN == 2 else _STORE_4
    PTX: tl.constexpr = SOURCE[0]
    CONSTRAINTS: tl.constexpr = SOURCE[1]
    tl.inline_asm_elementwise(
        PTX, CONSTRAINTS, [items + place * 2, value.to(tl.int16, bitcast=True), wanted.to(tl.int32)], dtype=tl.int32,
        is_pure=False, pack=RUN,
    )  # fmt: skip


@triton.jit
def smem_load(items, place, dtype: tl.constexpr, SHARED: tl.constexpr):
    """items[place], after ``smem_barrier``."""
    if SHARED:
        HALF: tl.constexpr = dtype.primitive_bitwidth == 16
        value = tl.inline_asm_elementwise(
            "ld.shared.b16 $0, [$1];" if HALF else "ld.shared.b32 $0, [$1];", "=h,r" if HALF else "=r,r",
            [items + place * (2 if HALF else 4)], dtype=tl.int16 if HALF else tl.int32, is_pure=True, pack=1,
        ).to(dtype, bitcast=True)  # fmt: skip
    else:
        value = tl.load(items + place)
    return value


@triton.jit
def smem_barrier(items, SHARED: tl.constexpr):
    """``items`` again, once every thread of the program has stored."""
    if SHARED:
        # Not the compiler's own barrier: it reads no weights ahead in a loop that has one.
        items = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [items], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()
    return items


@triton.jit
def issue_loads(scalar):
    """Issue the loads before this before what follows: left alone, the compiler moves each to where it is needed."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def gdc_wait(PDL: tl.constexpr, START_NEXT: tl.constexpr = True):
    """Wait until the previous kernel has written everything. What precedes this call may only read constants (weights,
    scales): it overlaps the previous kernel's tail. START_NEXT: ``gdc_launch`` too."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        if START_NEXT:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gdc_launch(PDL: tl.constexpr):
    """Let the next kernel's programs start; they wait for this kernel's end before they read its results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rms_normalize(x, weight, rstd, dtype):
    """``dtype(weight * dtype(x * rstd))``; with weights of float32 only the outer rounding, as Gemma's norms have."""
    scaled = x.to(tl.float32) * rstd
    if weight.dtype != tl.float32:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight.to(tl.float32)).to(dtype)


@triton.jit
def load_squares(ssq_ptr, row, parts, SSQ_PAD: tl.constexpr):
    """(32,) sums of a row's partial sums of squares: as many as one warp adds up by itself, where more would have to be
    exchanged between warps. SSQ_PAD: ``parts`` at most, a multiple of 32."""
    i = tl.arange(0, 32)
    squares = tl.load(ssq_ptr + row * parts + i, mask=i < parts, other=0.0)
    for start in tl.static_range(32, SSQ_PAD, 32):
        squares += tl.load(ssq_ptr + row * parts + start + i, mask=start + i < parts, other=0.0)
    return squares


@triton.jit
def reciprocal_rms(squares, eps, K: tl.constexpr):
    """1 / rms of a row, from what ``load_squares`` gives."""
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def soft_cap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), to a few roundings of CAP."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))
