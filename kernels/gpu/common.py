"""Shared by the Triton kernels: argument tuples, shared memory, programmatic dependent launch, RMSNorm."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class KVSplits(NamedTuple):
    """Partial results of split-KV attention, one for each KV split."""

    x: Tensor  # (B, heads, kv_splits, head_dim) float32, softmax-weighted sums of values, not divided by ``total``
    maximum: Tensor  # (B, heads, kv_splits) float32, of the scores, log2 domain
    total: Tensor  # the same shape, softmax denominators


class Input(NamedTuple):
    """A linear's input: x; RMSNorm of x (``ssq``, ``norm``); or attention's combined KV splits."""

    x: Tensor | None  # (B, K) dtype
    ssq: Tensor | None = None  # (B, ssq_parts) float32, partial sums of squares of x's rows
    norm: Tensor | None = None  # (K,) of the weights' dtype; float32: 1 + weight, multiplied before x is rounded
    attention: KVSplits | None = None
    row_mask: Tensor | None = None  # (B,) float32, 1 for a masked row, 0 for one that keeps all channels; None: all 1


class Weights(NamedTuple):
    weight_t: Tensor  # (K, stride), the projections' columns side by side; quantized: int32 words, see ``weights``
    bias: Tensor | None  # (N,) of the weights' dtype; of experts (E, N)
    scales: Tensor | None  # (projections, K) float32, channel scales; they and thresholds: None if not read
    thresholds: Tensor | None  # (projections * planes,) float32
    quant_scales: Tensor | None  # quantized: (K / group, padded columns) float32
    quant_zeros: Tensor | None  # zero points, the same shape; None: the type's default


class Output(NamedTuple):
    out: Tensor  # dtype: (B, N), "residual": read and updated; an activation: (B, n0)
    ssq: Tensor | None = None  # "residual": (B, tiles * max(1, reducers)) float32, sums of squares for the next norm


class Routing(NamedTuple):
    expert: Tensor  # (B, chosen) int32
    weight: Tensor  # (B, chosen) float32


class Workspace(NamedTuple):
    partial: Tensor  # (splits, B, N) int32, bits of float32; with spinning reducers EMPTY before and after
    counter: Tensor | None  # no spinning reducers: (tiles,) int32, 0 before and after
    list_index: Tensor | None  # compacted index lists outside shared memory: (programs, length) int32
    list_value: Tensor | None  # and (programs, B, length) dtype
    # Within ``experts``' down kernel: the program's index among the row's chosen experts, their weights, their ids.
    chosen: Any = None
    chosen_weight: Any = None
    chosen_expert: Any = None


class Problem(NamedTuple):
    """Compile-time constants: what is computed. Defaults: a product of plain x without ends."""

    k: int  # rows of weight_t: channels times planes
    n0: int  # the projections' widths, and their sum
    n1: int
    n2: int
    n3: int
    n: int
    stride: int  # of weight_t
    quant: str  # "none", "int4", "int8", "fp8"
    group: int  # rows of weight_t that share a quantization scale
    planes: int  # 2: graded weights, row 2 k is the high plane of channel k, row 2 k + 1 the low one
    dense: bool  # no channel is dropped
    batch: int = 0  # rows of x; 0: not a constant
    kv_splits: int = 1  # of the attention that is read
    head_dim: int = 1
    ssq_pad: int = 32  # the most partial sums of squares of a row, a multiple of 32
    output: str = "plain"  # y; "residual": residual + y; or the activation of gate and up, see ``reduction.activate``
    pdl: bool = False  # programmatic dependent launch
    experts: int = 0  # chosen experts whose weighted products the epilogue adds up; 0: none
    clamp: tuple[float, float] = (0.0, 0.0)  # slope and limit of "clamped"


class LaunchConfig(NamedTuple):
    """Compile-time constants: how it is computed. Fields of ``tiles.Tile``, and constants derived from them."""

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
    length: int  # entries of its index list, and of each row's list of x values
    smem: str  # PTX that declares the lists' shared memory; "": the lists are in scratch memory
    reduce_splits: int  # splits whose partial sums the epilogue loads at a time


@triton.jit
def smem_alloc(SOURCE: tl.constexpr, scalar):
    """The shared-memory address of what ``LaunchConfig.smem`` declares; ``scalar``: any int32. Once in a kernel."""
    return tl.inline_asm_elementwise(SOURCE, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


_STORE = "{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b{} [$1], $2; mov.b32 $0, 0; }}"
_STORE_16 = tl.constexpr(_STORE.format(16))
_STORE_32 = tl.constexpr(_STORE.format(32))


@triton.jit
def smem_store(base, index, value, mask, SHARED: tl.constexpr):
    """base[index] = value (int32, float32, fp16, bf16) where ``mask``; SHARED: base is a shared-memory address."""
    if SHARED:
        HALF: tl.constexpr = value.dtype.primitive_bitwidth == 16
        # float32 is passed in an "f" register: bitcast to int32 the kernel takes a quarter more registers.
        REGISTER: tl.constexpr = "h" if HALF else "f" if value.dtype.is_floating() else "r"
        if HALF:
            value = value.to(tl.int16, bitcast=True)
        tl.inline_asm_elementwise(
            _STORE_16 if HALF else _STORE_32, "=r,r," + REGISTER + ",r",
            [base + index * (2 if HALF else 4), value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(base + index, value.to(base.dtype.element_ty), mask=mask)


def _store_run(count: int) -> tuple[str, str]:
    """PTX and constraints: store ``count`` (2 or 4) 16-bit values of each thread, at once if their addresses are
    consecutive, which depends on the tensor's layout and is the same for all threads."""
    address, value, mask = count, 2 * count, 2 * count + count // 2
    lines = [".reg .pred apart, wanted;", ".reg .b32 last;", f".reg .b16 h<{count}>;"]
    lines += [f"add.u32 last, ${address}, {2 * count - 2};", f"setp.ne.b32 apart, last, ${address + count - 1};"]
    lines += [f"setp.ne.b32 wanted, ${mask}, 0;", "@apart bra.uni APART;"]
    words = ", ".join(f"${value + i}" for i in range(count // 2))
    lines += [
        f"@wanted st.shared{'.v2' if count == 4 else ''}.b32 [${address}], {{{words}}};",
        "bra.uni DONE;",
        "APART:",
    ]
    lines += [f"mov.b32 {{h{2 * i}, h{2 * i + 1}}}, ${value + i};" for i in range(count // 2)]
    for i in range(count):
        lines += [f"setp.ne.b32 wanted, ${mask + i}, 0;", f"@wanted st.shared.b16 [${address + i}], h{i};"]
    source = f"{{ {' '.join(lines)} DONE: {' '.join(f'mov.b32 ${i}, 0;' for i in range(count))} }}"
    return source, ",".join(["=r"] * count + ["r"] * (2 * count + count // 2))


_STORE_2 = tl.constexpr(_store_run(2))
_STORE_4 = tl.constexpr(_store_run(4))


@triton.jit
def smem_store_runs(base, index, value, mask, RUN: tl.constexpr):
    """Vectorized ``smem_store`` of fp16 or bf16; ``mask`` is the same for each aligned run of RUN (2 or 4) indices."""
    SOURCE: tl.constexpr = _STORE_2 if RUN == 2 else _STORE_4
    PTX: tl.constexpr = SOURCE[0]
    CONSTRAINTS: tl.constexpr = SOURCE[1]
    tl.inline_asm_elementwise(
        PTX, CONSTRAINTS, [base + index * 2, value.to(tl.int16, bitcast=True), mask.to(tl.int32)], dtype=tl.int32,
        is_pure=False, pack=RUN,
    )  # fmt: skip


@triton.jit
def smem_load(base, index, dtype: tl.constexpr, SHARED: tl.constexpr):
    """base[index], after ``smem_barrier``; as for ``smem_store``."""
    if SHARED:
        HALF: tl.constexpr = dtype.primitive_bitwidth == 16
        value = tl.inline_asm_elementwise(
            "ld.shared.b16 $0, [$1];" if HALF else "ld.shared.b32 $0, [$1];", "=h,r" if HALF else "=r,r",
            [base + index * (2 if HALF else 4)], dtype=tl.int16 if HALF else tl.int32, is_pure=True, pack=1,
        ).to(dtype, bitcast=True)  # fmt: skip
    else:
        value = tl.load(base + index)
    return value


@triton.jit
def smem_barrier(base, SHARED: tl.constexpr):
    """__syncthreads; returns ``base``, so that loads through the result cannot be moved before the barrier."""
    if SHARED:
        # Not tl.debug_barrier: the compiler does not pipeline the loads of a loop that contains one.
        base = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [base], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()
    return base


@triton.jit
def issue_loads(scalar):
    """Keep the loads above this call above the code below it; the compiler moves each to its first use."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def gdc_wait(PDL: tl.constexpr, START_NEXT: tl.constexpr = True):
    """griddepcontrol.wait: the previous kernel has completed and its writes are visible. Code before this call overlaps
    that kernel and may only read constants (weights, scales). START_NEXT: also ``gdc_launch``."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        if START_NEXT:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gdc_launch(PDL: tl.constexpr):
    """griddepcontrol.launch_dependents: the next kernel may start; its ``gdc_wait`` waits for this kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rms_normalize(x, weight, rstd, dtype):
    """``dtype(weight * dtype(x * rstd))``; float32 weights (Gemma's norms): ``dtype(weight * x * rstd)``."""
    scaled = x.to(tl.float32) * rstd
    if weight.dtype != tl.float32:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight.to(tl.float32)).to(dtype)


@triton.jit
def load_squares(ssq_ptr, row, parts, SSQ_PAD: tl.constexpr):
    """A row's partial sums of squares, added up to (32,), which a reduction within one warp finishes. SSQ_PAD: the most
    ``parts``, a multiple of 32."""
    i = tl.arange(0, 32)
    squares = tl.load(ssq_ptr + row * parts + i, mask=i < parts, other=0.0)
    for start in tl.static_range(32, SSQ_PAD, 32):
        squares += tl.load(ssq_ptr + row * parts + start + i, mask=start + i < parts, other=0.0)
    return squares


@triton.jit
def reciprocal_rms(squares, eps, K: tl.constexpr):
    """1 / rms of a row of K values; ``squares``: of ``load_squares``."""
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def soft_cap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), with an absolute error of a few ulps of CAP."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))
