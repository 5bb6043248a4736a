"""The epilogue of a linear's kernel: split-K reduction, bias, activation, residual; and the elementwise kernels between
products where these are launches of their own.

Each program stores its partial sums. Those of a tile are added in the order of the splits, so results are reproducible.
The caller chooses who adds them:

reducers = 0: the last program of the tile to arrive, found by an atomic counter.

reducers > 0: waiting reducers, the tile's last ``reducers`` programs, each for a share of the columns. The workspace
holds EMPTY before and after a launch: they poll until the partial sums of every split are stored, and reset them to EMPTY.
This saves two L2 round trips, but polling takes bandwidth from programs that still load weights, and spinning programs
occupy multiprocessors.

Progress: all other programs finish without waiting. A single reducer of a tile waits only for programs with lower ids,
which started earlier. Several also wait for each other, so the reducers * tiles spinning programs of a launch have to
be resident at once: ``plan`` allows one for each multiprocessor. Where a process may not use all multiprocessors that
the driver reports (MPS with a limited share, a persistent kernel beside it), WISPARSE_SPINNING=0 selects the counter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channels import is_dropped
from .common import KVSplits, gdc_wait, rms_normalize

# All bits set: a NaN that arithmetic does not produce. ``_bits`` replaces it, so that it is never stored as a sum.
EMPTY = -1
_EMPTY = tl.constexpr(EMPTY)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _bits(y):
    """float32 as int32, EMPTY replaced by the canonical NaN."""
    bits = y.to(tl.int32, bitcast=True)
    return tl.where(bits == _EMPTY, _NAN, bits)


@triton.jit
def store_partial(partial_ptr, offset, y, mask):
    """Store float32 partial sums for ``reduce_tile``."""
    tl.store(partial_ptr + offset, _bits(y), mask=mask)


_STORE4 = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)


@triton.jit
def store_partial4(at, a, b, c, d, mask):
    """The same for four consecutive sums of each thread, 16-byte aligned."""
    operands = (at.to(tl.int64), _bits(a), _bits(b), _bits(c), _bits(d), mask.to(tl.int32))
    tl.inline_asm_elementwise(_STORE4, "=r,l,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def reduce_tile(of, bias_ptr, output, workspace, problem: tl.constexpr, launch: tl.constexpr, ROW_TENSOR: tl.constexpr):
    """Called at the end of every program: a reducer adds up its columns' partial sums of all splits and stores the
    result, row by row, or all rows as one (rows, columns) tensor. ``of``: the tile's ``Columns``."""
    BATCH: tl.constexpr = problem.batch
    PAIRS: tl.constexpr = problem.output != "plain" and problem.output != "residual" and problem.output != "relu2"
    RESULTS: tl.constexpr = 2 if PAIRS else 1  # of a row: gate, then up
    OUT_N: tl.constexpr = problem.n0 if PAIRS else problem.n
    REDUCERS: tl.constexpr = launch.reducers if launch.reducers > 0 else 1
    COLUMNS: tl.constexpr = launch.block_n // REDUCERS  # of a reducer
    SSQ_PARTS: tl.constexpr = launch.tiles * REDUCERS
    SPLIT_BLOCK: tl.constexpr = launch.reduce_splits
    EXPERTS: tl.constexpr = problem.experts
    SPLITS: tl.constexpr = launch.splits * (EXPERTS if EXPERTS > 0 else 1)  # expert by expert
    dtype: tl.constexpr = output.out.dtype.element_ty
    # Programs whose partial sums a tile's result needs; gate's and up's are reduced together.
    PROGRAMS: tl.constexpr = SPLITS * RESULTS
    program = of.split + of.projection * launch.splits if PAIRS else of.split
    partial_ptr = workspace.partial
    if EXPERTS > 0:
        program += workspace.chosen * launch.splits
        partial_ptr -= workspace.chosen * (launch.splits * problem.n)  # of the first chosen expert
    # Index of this program among the tile's reducers; negative: it is none.
    if launch.reducers > 0:
        reducer = program - (PROGRAMS - launch.reducers)
    else:
        counter_ptr = workspace.counter + (of.local if PAIRS else of.tile)
        tl.debug_barrier()
        if PROGRAMS > 1:
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
            reducer = tl.where(arrived == PROGRAMS, 0, -1)
            tl.store(counter_ptr, 0, mask=arrived == PROGRAMS)
        else:
            reducer = program
    if reducer >= 0:
        n = of.local * launch.block_n + reducer * COLUMNS + tl.arange(0, COLUMNS)
        live = n < of.width
        # Columns of the partial sums and the bias; of gate, where up's follow n0 later.
        columns = n if PAIRS else of.first + n
        ssq_at = of.tile * REDUCERS + reducer
        if ROW_TENSOR:
            ROWS: tl.constexpr = triton.next_power_of_2(BATCH)
            row = tl.arange(0, ROWS)
            live_rows = (row < BATCH)[:, None] & live[None, :]
            out_at = output.out + row[:, None] * OUT_N + columns[None, :]
            hidden = tl.zeros((ROWS, COLUMNS), dtype)
            if problem.output == "residual":  # prefetch
                hidden = tl.load(out_at, mask=live_rows, other=0.0)
            y = tl.zeros((ROWS, COLUMNS), tl.float32)
            up = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in tl.range(0, launch.splits, SPLIT_BLOCK, num_stages=1):
                splits = start + tl.arange(0, SPLIT_BLOCK)
                sum_row = splits[:, None] * BATCH + row[None, :]
                at = workspace.partial + sum_row[:, :, None] * problem.n + columns[None, None, :]
                mask = (splits < launch.splits)[:, None, None] & live_rows[None, :, :]
                bits = _load_partial(at, mask, launch.reducers)
                if PAIRS:
                    up_bits = _load_partial(at + problem.n0, mask, launch.reducers)
                    up += _sum_splits(up_bits, at + problem.n0, mask, launch.reducers)
                y += _sum_splits(bits, at, mask, launch.reducers)
            y = _add_bias_and_activate(y, up, bias_ptr, columns[None, :], live[None, :], dtype, problem)
            if problem.output == "residual":
                y = (hidden.to(tl.float32) + y.to(tl.float32)).to(dtype)
                squares = tl.where(live_rows, y.to(tl.float32) * y.to(tl.float32), 0.0)
                tl.store(output.ssq + row * SSQ_PARTS + ssq_at, tl.sum(squares, axis=1), mask=row < BATCH)
            tl.store(out_at, y, mask=live_rows)
        else:
            hidden = ()
            if problem.output == "residual":  # prefetch
                for row in tl.static_range(BATCH):
                    hidden += (tl.load(output.out + row * problem.n + columns, mask=live, other=0.0),)
            sums = ()
            for _ in tl.static_range(BATCH * RESULTS):
                sums += (tl.zeros((COLUMNS,), tl.float32),)
            if EXPERTS > 0 and bias_ptr is not None:  # each expert's bias, times its weight
                for i in tl.static_range(EXPERTS):
                    expert = tl.load(workspace.chosen_expert + i, cache_modifier=".cg").to(tl.int64)
                    bias = tl.load(bias_ptr + expert * problem.n + columns, mask=live, other=0.0).to(tl.float32)
                    sums = (sums[0] + bias * tl.load(workspace.chosen_weight + i),)
            for start in tl.range(0, SPLITS, SPLIT_BLOCK, num_stages=1):
                # All loads are issued before the first one is waited for.
                pointers = ()
                loaded = ()
                for i in tl.static_range(BATCH * RESULTS):
                    splits = start + tl.arange(0, SPLIT_BLOCK)
                    column = columns + i % RESULTS * problem.n0
                    at = partial_ptr + (splits * BATCH + i // RESULTS)[:, None] * problem.n + column[None, :]
                    mask = (splits < SPLITS)[:, None] & live[None, :]
                    pointers += ((at, mask),)
                    loaded += (_load_partial(at, mask, launch.reducers),)
                factor = 1.0
                if EXPERTS > 0:
                    chosen = (start + tl.arange(0, SPLIT_BLOCK)) // launch.splits
                    factor = tl.load(workspace.chosen_weight + chosen, mask=chosen < EXPERTS, other=0.0)[:, None]
                added = ()
                for i in tl.static_range(BATCH * RESULTS):
                    at, mask = pointers[i]
                    added += (sums[i] + _sum_splits(loaded[i], at, mask, launch.reducers, factor),)
                sums = added
            for row in tl.static_range(BATCH):
                y = sums[row * RESULTS]
                up = sums[row * RESULTS + RESULTS - 1]  # not used without gate and up
                y = _add_bias_and_activate(y, up, None if EXPERTS > 0 else bias_ptr, columns, live, dtype, problem)
                if problem.output == "residual":
                    y = (hidden[row].to(tl.float32) + y.to(tl.float32)).to(dtype)
                    squares = tl.where(live, y.to(tl.float32) * y.to(tl.float32), 0.0)
                    tl.store(output.ssq + row * SSQ_PARTS + ssq_at, tl.sum(squares, axis=0))
                tl.store(output.out + row * OUT_N + columns, y, mask=live)


@triton.jit
def _load_partial(at, mask, REDUCERS: tl.constexpr):
    """The bits of partial sums, loaded past L1; EMPTY where not yet stored."""
    if REDUCERS > 0:
        bits = tl.load(at, mask=mask, other=0, volatile=True)
    else:
        bits = tl.load(at, mask=mask, other=0, cache_modifier=".cg")
    return bits


@triton.jit
def _sum_splits(bits, at, mask, REDUCERS: tl.constexpr, factor=1.0):
    """The sum over the splits (axis 0), each times its factor. Spinning reducers first poll until all partial sums are
    stored, and reset them to EMPTY."""
    if REDUCERS > 0:
        while tl.max((bits == _EMPTY).to(tl.int32)) > 0:
            bits = tl.load(at, mask=bits == _EMPTY, other=bits, volatile=True)
        tl.store(at, tl.full(bits.shape, _EMPTY, bits.dtype), mask=mask)
    return tl.sum(bits.to(tl.float32, bitcast=True) * factor, axis=0)


@triton.jit
def _add_bias_and_activate(y, up, bias_ptr, columns, live, dtype: tl.constexpr, problem: tl.constexpr):
    """y + bias, relu(y + bias)**2, or activation(y + bias) * (up + bias), in dtype, with the roundings of transformers."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=live, other=0.0).to(tl.float32)
    y = y.to(dtype)
    OUTPUT: tl.constexpr = problem.output
    if OUTPUT == "relu2":
        y = relu_squared(y)
    elif OUTPUT != "plain" and OUTPUT != "residual":
        if bias_ptr is not None:
            up += tl.load(bias_ptr + problem.n0 + columns, mask=live, other=0.0).to(tl.float32)
        y = activate(y.to(tl.float32), up.to(dtype).to(tl.float32), dtype, OUTPUT, problem.clamp[0], problem.clamp[1])
    return y


@triton.jit
def relu_squared(y):
    """max(y, 0)**2 in y's dtype; keeps a NaN."""
    wide = y.to(tl.float32)
    return tl.where(wide < 0.0, 0.0, wide * wide).to(y.dtype)


@triton.jit
def activate(
    gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr = 0.0, LIMIT: tl.constexpr = 0.0
):
    """activation(gate) * up in dtype; gate and up: float32 already rounded to dtype. ACTIVATION: "silu", "gelu_tanh",
    or gpt-oss's "clamped": gate * sigmoid(SLOPE * gate) * (up + 1), gate at most LIMIT, up in [-LIMIT, LIMIT]."""
    exponent = gate
    if ACTIVATION == "clamped":
        # tl.minimum would replace a NaN by LIMIT.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        up = (up + 1.0).to(dtype).to(tl.float32)
        exponent = gate * SLOPE
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with 2 u = sqrt(8 / pi) * (gate + 0.044715 gate**3)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32)
    return (activated * up).to(dtype)


class ParallelExperts(NamedTuple):
    """The output of experts parallel a dense MLP, and the norms of both outputs before they are added."""

    output: Tensor  # (B, K), of the experts
    norm: Tensor  # (K,)
    norm_of_first: Tensor  # (K,), of the dense MLP's output


@triton.jit
def _residual_add_kernel(
    # As of launch_residual_add.
    output_ptr, parallel, hidden_ptr, norm_ptr, scalar_ptr, ssq_ptr, next_ptr, normed_ptr, norm_eps, eps,
    MULTIPLIER: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    live = k < K
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=live, other=0.0)
    gdc_wait(PDL)
    hidden = tl.load(hidden_ptr + row * K + k, mask=live, other=0.0).to(tl.float32)
    y = tl.load(output_ptr + row * K + k, mask=live, other=0.0).to(tl.float32)
    if parallel is not None:
        other = tl.load(parallel.output + row * K + k, mask=live, other=0.0).to(tl.float32)
        norm_y = tl.load(parallel.norm_of_first + k, mask=live, other=0.0)
        norm_other = tl.load(parallel.norm + k, mask=live, other=0.0)
        y = rms_normalize(y, norm_y, tl.rsqrt(tl.sum(y * y, axis=0) / K + norm_eps), dtype).to(tl.float32)
        other = rms_normalize(other, norm_other, tl.rsqrt(tl.sum(other * other, axis=0) / K + norm_eps), dtype)
        y = (y + other.to(tl.float32)).to(dtype).to(tl.float32)
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(y * y, axis=0) / K + norm_eps)
        y = rms_normalize(y, norm, rstd, dtype).to(tl.float32)
    if MULTIPLIER != 1.0:
        y = (y * MULTIPLIER).to(dtype).to(tl.float32)
    y = (hidden + y).to(dtype)
    if scalar_ptr is not None:
        y = (y.to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)).to(dtype)
    tl.store(hidden_ptr + row * K + k, y, mask=live)
    y = y.to(tl.float32)
    squares = tl.sum(y * y, axis=0)
    if ssq_ptr is not None:
        tl.store(ssq_ptr + row, squares)
    if normed_ptr is not None:
        if next_ptr is not None:
            next_norm = tl.load(next_ptr + k, mask=live, other=0.0)
            y = rms_normalize(y, next_norm, tl.rsqrt(squares / K + eps), dtype).to(tl.float32)
        tl.store(normed_ptr + row * K + k, y.to(dtype), mask=live)


def launch_residual_add(
    output: Tensor, hidden: Tensor, ssq: Tensor | None, *, parallel: ParallelExperts | None = None, norm: Tensor | None = None,
    scalar: Tensor | None = None, next_norm: Tensor | None = None, normed: Tensor | None = None, eps: float = 0.0,
    norm_eps: float | None = None, multiplier: float = 1.0, pdl: bool = False,
) -> None:  # fmt: skip
    """hidden = (hidden + multiplier * norm?(output)) * scalar?, both (B, K), with the roundings of transformers; norm
    (K,) as ``common.Input.norm``, scalar (1,). ``ssq`` (B, 1) float32 receives the sums of squares of hidden's rows,
    ``normed`` (B, K) the RMSNorm ``next_norm`` of hidden, or a copy. ``norm_eps``: of the outputs' norms, if it is another.
    One program computes a row."""
    batch, width = hidden.shape
    _residual_add_kernel[(batch,)](
        output, parallel, hidden, norm, scalar, ssq, next_norm, normed,
        eps if norm_eps is None else norm_eps, eps, multiplier, width,
        triton.next_power_of_2(width), pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


# Between the products of many rows. With sixteen rows and fewer ``channels.load_input`` and ``reduce_tile`` do the
# same, with the same roundings.

Mask = tuple[Tensor, Tensor]  # of a linear with one projection: channel scales (1, K), thresholds (1,)
_ACTIVATED = tl.constexpr(2048)  # the most columns of a program of ``_activate_kernel``


@triton.jit
def _masked(y, k, live, mask, row_mask_ptr, row):
    """y, zero where the next linear's mask drops channel k; y if there is no mask."""
    if mask is not None:
        scale = tl.load(mask[0] + k, mask=live, other=0.0)
        threshold = tl.load(mask[1])
        if row_mask_ptr is not None:
            threshold *= tl.load(row_mask_ptr + row)
        y = tl.where(is_dropped(y, scale, threshold), 0.0, y)
    return y


@triton.jit
def _activate_kernel(
    gate_up_ptr, mask, row_mask_ptr, out_ptr, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    BLOCK: tl.constexpr = min(_ACTIVATED, triton.next_power_of_2(WIDTH))
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    at = gate_up_ptr + row * (WIDTH if ACTIVATION == "relu2" else 2 * WIDTH) + n
    gate = tl.load(at, mask=n < WIDTH, other=0.0)
    if ACTIVATION == "relu2":
        y = relu_squared(gate)
    else:
        up = tl.load(at + WIDTH, mask=n < WIDTH, other=0.0).to(tl.float32)
        y = activate(gate.to(tl.float32), up, dtype, ACTIVATION)
    y = _masked(y, n, n < WIDTH, mask, row_mask_ptr, row)
    tl.store(out_ptr + row * WIDTH + n, y, mask=n < WIDTH)


def launch_activate(
    gate_up: Tensor, activation: str, mask: Mask | None = None, row_mask: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """activation(gate) * up, masked: (T, I) of ``gate_up`` (T, 2 I); ``silu`` or ``gelu_tanh``. ``relu2``: of up (T, I).
    ``row_mask``: (T or more,) float32, 0 for a row that keeps all its channels; None: all are masked."""
    rows, width = len(gate_up), gate_up.shape[1] // (1 if activation == "relu2" else 2)
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = rows, triton.cdiv(width, min(_ACTIVATED.value, triton.next_power_of_2(width)))
    _activate_kernel[grid](gate_up, mask, row_mask, out, activation, width, pdl, num_warps=4, launch_pdl=pdl)
    return out


@triton.jit
def _combine_kernel(
    splits, mask, out_ptr, HEADS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr
):
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    gdc_wait(PDL)
    at = tl.program_id(0).to(tl.int64) * SPLITS
    d = tl.arange(0, D_PAD)
    m = tl.load(splits.maximum + at)
    for s in tl.static_range(1, SPLITS):
        m = tl.maximum(m, tl.load(splits.maximum + at + s))
    x = tl.zeros((D_PAD,), tl.float32)
    total = tl.zeros((), tl.float32)
    for s in tl.static_range(SPLITS):
        factor = tl.exp2(tl.load(splits.maximum + at + s) - m)
        total += tl.load(splits.total + at + s) * factor
        x += tl.load(splits.x + (at + s) * D + d, mask=d < D, other=0.0) * factor
    y = (x / total).to(out_ptr.dtype.element_ty)
    y = _masked(y, tl.program_id(0) % HEADS * D + d, d < D, mask, None, 0)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * D + d, y, mask=d < D)


def launch_combine(splits: KVSplits, dtype: torch.dtype, mask: Mask | None = None, *, pdl: bool = False) -> Tensor:
    """The attention's output (B, heads * D) from its KV splits, masked."""
    batch, heads, count, d = splits.x.shape
    out = torch.empty(batch, heads * d, dtype=dtype, device=splits.x.device)
    _combine_kernel[(batch * heads,)](splits, mask, out, heads, count, d, pdl, num_warps=1, launch_pdl=pdl)
    return out
