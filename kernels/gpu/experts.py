"""A mixture of experts in a decode step of 1 to 16 rows: three launches, without synchronization with the host.

    router    logits = router @ n, softmax, top k experts and their weights          (``Routing``, on the device)
    gate_up   activation(gate[e] n) * up[e] n   for each row's chosen experts e      h (rows * k, I); or activation(up[e] n)
    down      residual + sum over the chosen e of weight[e] * down[e] h[e]           (rows, N)

n is the RMSNorm of the residual stream; each product may have a bias. gate_up and down are one-row products by
sparse_gemv or packed_gemv, with a grid of (programs, pairs of a row and a chosen expert): a program loads its pair's
expert id and offsets its pointers. Down's reducers add up the partial sums of all chosen experts in order, so results are
reproducible.

A shared expert is stored after the others, as one or more experts of their size. Its weight is 1 or the sigmoid of its gate,
the router's last row. Bytes: the chosen experts' kept channels and the router; rows with the same expert load it
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from .common import Input, Output, Routing, Weights, Workspace, gdc_wait, load_squares, reciprocal_rms, rms_normalize
from .packed_gemv import packed_gemv_kernel
from .sparse_gemv import sparse_gemv_kernel
from .weights import DeviceWeight, FusedLinear, LinearShape, empty_weight

_ROUTER_ROWS = 4  # rows of the router's weights of a program


@dataclass(frozen=True)
class ExpertLinear:
    """A linear of E experts. ``weight``: as of one expert, its tensors with an additional first dimension E."""

    weight: DeviceWeight
    scales: Tensor  # (E, projections, K) float32, channel scales
    thresholds: Tensor  # (E, projections * planes) float32
    dense: bool  # no channel is ever dropped
    chosen: int  # experts of a row
    bias: Tensor | None = None  # (E, N) of the weights' dtype

    @property
    def widths(self) -> tuple[int, ...]:
        return self.weight.widths

    @property
    def in_features(self) -> int:
        return self.weight.data.shape[1] // self.weight.planes

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    @property
    def num_bytes_read(self) -> int:
        """For one row."""
        return self.weight.num_bytes * self.chosen // len(self.scales)

    @cached_property
    def shape(self) -> LinearShape:
        return self.one(0).shape._replace(experts=len(self.scales), chosen=self.chosen)

    def one(self, expert: int) -> FusedLinear:
        """A view of one expert."""
        weight = self.weight
        scales, zeros = (None if part is None else part[expert] for part in (weight.scales, weight.zeros))
        weight = replace(weight, data=weight.data[expert], scales=scales, zeros=zeros)
        bias = None if self.bias is None else self.bias[expert]
        return FusedLinear(weight, bias, self.scales[expert], self.thresholds[expert], self.dense)


class Choice(NamedTuple):
    """The constants of a `Router` in the kernels."""

    experts: int
    chosen: int
    shared: int
    gated: bool  # the shared experts' weight is the sigmoid of another logit, not 1
    norm: tuple[float, float] | None  # None: not renormalised
    sigmoid: bool
    factor: float
    rounded: str | None
    groups: tuple[int, int, int] | None


class Router(NamedTuple):
    """How a block's experts are chosen."""

    weight: Tensor  # (E, K) of dtype; with a gate of the shared experts (E + 1, K), its row last
    experts: int  # E
    chosen: int  # k
    shared: int  # experts, after the others, that every row uses; 0 or more
    renormalised: bool  # the chosen experts' weights are divided by their sum
    multiplier: float = 1.0  # of n
    bias: Tensor | None = None  # (E,) of the logits
    expert_scale: Tensor | None = None  # (E,), factors of the experts' weights
    choice_bias: Tensor | None = None  # (E,), added to the scores for the choice
    sigmoid: bool = False  # scores are the logits' sigmoids, not their softmax
    norm: tuple[float, float] = (0.0, 0.0)  # the sum is at least the first; the second is added to it
    factor: float = 1.0  # of the weights
    rounded: str | None = "logits"  # what is rounded to the dtype of x: logits; their "scores" too; None: neither
    # Of experts, how many are chosen from, and whose how many best experts decide (1 or 2); None: none.
    groups: tuple[int, int, int] | None = None

    @property
    def total(self) -> int:
        """Experts of a row."""
        return self.chosen + self.shared

    @property
    def choice(self) -> Choice:
        norm, gated = self.norm if self.renormalised else None, len(self.weight) > self.experts
        return Choice(
            self.experts, self.chosen, self.shared, gated, norm, self.sigmoid, self.factor, self.rounded, self.groups
        )


@triton.jit(do_not_specialize=["ssq_parts"])
def _router_kernel(
    inputs, weight_ptr, bias_ptr, scale_ptr, choice_bias_ptr, logit_ptr, counter_ptr, routing, eps, ssq_parts,
    K: tl.constexpr, SSQ_PAD: tl.constexpr, MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    choice: tl.constexpr,  # Choice
):  # fmt: skip
    K_PAD: tl.constexpr = triton.next_power_of_2(K)
    ROWS: tl.constexpr = choice.experts + (1 if choice.gated else 0)
    row = tl.program_id(1)
    k = tl.arange(0, K_PAD)
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (expert < ROWS)[:, None] & (k < K)[None, :]
    w = tl.load(weight_ptr + expert[:, None] * K + k[None, :], mask=live, other=0.0)
    if inputs.norm is not None:
        norm = tl.load(inputs.norm + k, mask=k < K, other=0.0)
    gdc_wait(PDL)
    x = tl.load(inputs.x + row * K + k, mask=k < K, other=0.0)
    dtype: tl.constexpr = x.dtype
    if inputs.norm is not None:
        rstd = reciprocal_rms(load_squares(inputs.ssq, row, ssq_parts, SSQ_PAD), eps, K)
        x = rms_normalize(x, norm, rstd, dtype)
    if MULTIPLIER != 1.0:
        x = (x.to(tl.float32) * MULTIPLIER).to(dtype)
    logit = tl.sum(x.to(tl.float32)[None, :] * w.to(tl.float32), axis=1)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr + expert, mask=expert < ROWS, other=0.0).to(tl.float32)
    if choice.rounded is not None:
        logit = logit.to(dtype).to(tl.float32)
    logit_ptr += row * ROWS
    tl.store(logit_ptr + expert, logit, mask=expert < ROWS)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel")
    if arrived == (ROWS + BLOCK - 1) // BLOCK - 1:
        tl.store(counter_ptr + row, 0)
        _choose(logit_ptr, scale_ptr, choice_bias_ptr, row, routing, dtype, choice)


@triton.jit
def _score(logit, largest, total, dtype: tl.constexpr, choice: tl.constexpr):
    if choice.sigmoid:
        score = 1.0 / (1.0 + tl.exp(-logit))
        return score.to(dtype).to(tl.float32) if choice.rounded == "scores" else score
    return tl.exp(logit - largest) / total


@triton.jit
def _kept_groups(order, e, choice: tl.constexpr):
    """Whether experts are chosen of each group, as a tuple."""
    GROUPS: tl.constexpr = choice.groups[0]
    SIZE: tl.constexpr = choice.experts // GROUPS
    sums = ()
    for g in tl.static_range(GROUPS):
        of_group = tl.where(e // SIZE == g, order, float("-inf"))
        best, at = tl.max(of_group, axis=0, return_indices=True)
        if choice.groups[2] == 2:
            best += tl.max(tl.where(e == at, float("-inf"), of_group), axis=0)
        sums += (best,)  # type: ignore[assignment]
    kept = ()
    for g in tl.static_range(GROUPS):
        before = 0
        for other in tl.static_range(GROUPS):
            before += (sums[other] >= sums[g] if other < g else sums[other] > sums[g]).to(tl.int32)
        kept += (before < choice.groups[1],)  # type: ignore[assignment]
    return kept


@triton.jit
def _in_groups(value, e, kept, choice: tl.constexpr):
    """The values of experts ``e``, -inf outside the groups ``kept``."""
    GROUPS: tl.constexpr = choice.groups[0]  # by an annotation: Triton 3.6 takes no tuple's element in static_range
    SIZE: tl.constexpr = choice.experts // GROUPS
    for g in tl.static_range(GROUPS):
        value = tl.where((e // SIZE == g) & (kept[g] == 0), float("-inf"), value)
    return value


@triton.jit
def _choose(logit_ptr, scale_ptr, choice_bias_ptr, row, routing, dtype: tl.constexpr, choice: tl.constexpr):
    """Choose a row's experts and compute their weights, with the roundings of transformers."""
    E: tl.constexpr = choice.experts
    CHOSEN: tl.constexpr = choice.chosen
    SHARED: tl.constexpr = choice.shared
    E_PAD: tl.constexpr = triton.next_power_of_2(E)
    OTHERS: tl.constexpr = 32
    TOTAL: tl.constexpr = CHOSEN + SHARED
    e = tl.arange(0, E_PAD)
    logit = tl.load(logit_ptr + e, mask=e < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    largest = tl.max(tl.where(logit == logit, logit, float("-inf")), axis=0)
    total = tl.sum(tl.where(e < E, tl.exp(logit - largest), 0.0), axis=0)
    weight = tl.where(e < E, _score(logit, largest, total, dtype, choice), 0.0)
    # An expert's rank: the number of experts with a larger key (its logit, or score plus bias), or an equal one and a lower
    # id. NaN sorts last.
    order = logit
    if choice_bias_ptr is not None:
        order = weight + tl.load(choice_bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    order = tl.where(order == order, order, float("-inf"))
    if choice.groups is not None:
        kept = _kept_groups(order, e, choice)
        order = _in_groups(order, e, kept, choice)
    rank = tl.zeros((E_PAD,), tl.int32)
    for start in tl.static_range(0, E_PAD, OTHERS):
        other = start + tl.arange(0, OTHERS)
        value = tl.load(logit_ptr + other, mask=other < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
        if choice_bias_ptr is not None:
            value = _score(value, largest, total, dtype, choice)
            value += tl.load(choice_bias_ptr + other, mask=other < E, other=0.0).to(tl.float32)
        value = tl.where(value == value, value, float("-inf"))
        if choice.groups is not None:
            value = _in_groups(value, other, kept, choice)
        higher = (value[None, :] > order[:, None]) & (other < E)[None, :]
        equal = (value[None, :] == order[:, None]) & (other[None, :] < e[:, None])
        rank += tl.sum((higher | equal).to(tl.int32), axis=1)
    wanted = (rank < CHOSEN) & (e < E)
    if choice.norm is not None:
        of_chosen = tl.sum(tl.where(wanted, weight, 0.0), axis=0)
        weight = weight / (tl.maximum(of_chosen, choice.norm[0]) + choice.norm[1])
    weight = weight * choice.factor
    if scale_ptr is not None:
        weight = weight * tl.load(scale_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * TOTAL + rank
    tl.store(routing.expert + at, e, mask=wanted)
    tl.store(routing.weight + at, weight.to(dtype).to(tl.float32), mask=wanted)
    if SHARED > 0:
        gate = 1.0
        if choice.gated:
            gate = tl.load(logit_ptr + E, cache_modifier=".cg").to(tl.float32)
            gate = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        for i in tl.static_range(SHARED):
            tl.store(routing.expert + row.to(tl.int64) * TOTAL + CHOSEN + i, E + i)
            tl.store(routing.weight + row.to(tl.int64) * TOTAL + CHOSEN + i, gate)


@triton.jit
def _choose_kernel(logit_ptr, x_ptr, scale_ptr, choice_bias_ptr, routing, choice: tl.constexpr):  # x_ptr: for its dtype
    ROWS: tl.constexpr = choice.experts + (1 if choice.gated else 0)
    row = tl.program_id(0)
    logits = logit_ptr + row.to(tl.int64) * ROWS
    _choose(logits, scale_ptr, choice_bias_ptr, row, routing, x_ptr.dtype.element_ty, choice)


def launch_router(
    inputs: Input, router: Router, logits: Tensor, counter: Tensor, routing: Routing, *, eps: float = 0.0,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Each row's experts, by descending logit and then ascending id, and their weights. ``logits``: (B, rows of the
    router's weights) float32 scratch memory; ``counter``: (B,) int32, 0 before and after."""
    assert inputs.x is not None
    ssq_parts = 1 if inputs.ssq is None else inputs.ssq.shape[1]
    rows, k = router.weight.shape
    _router_kernel[(triton.cdiv(rows, _ROUTER_ROWS), len(inputs.x))](
        inputs, router.weight, router.bias, router.expert_scale, router.choice_bias, logits, counter, routing, eps,
        ssq_parts, k,
        max(32, triton.next_power_of_2(ssq_parts)), router.multiplier, _ROUTER_ROWS, pdl, router.choice, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


def choose_experts(x: Tensor, router: Router) -> Routing:
    """``launch_router`` for the rows x (T, K) of a prompt, already normalized and multiplied."""
    expert = torch.empty(len(x), router.total, dtype=torch.int32, device=x.device)
    routing = Routing(expert, torch.empty_like(expert, dtype=torch.float32))
    logits = functional.linear(x.to(router.weight.dtype), router.weight, router.bias)
    scale, choice_bias = router.expert_scale, router.choice_bias
    _choose_kernel[(len(x),)](logits, x, scale, choice_bias, routing, router.choice, num_warps=1)
    return routing


@triton.jit
def weights_of(weights, expert, bias, PROJECTIONS: tl.constexpr, problem: tl.constexpr):
    """Those of an expert (int64), with its ``bias``."""
    quant_scales = weights.quant_scales
    quant_zeros = weights.quant_zeros
    if problem.quant != "none":
        EACH: tl.constexpr = 8 if problem.quant == "int4" else 4
        quant_at = expert * ((problem.k // problem.group) * problem.stride * EACH)
        quant_scales += quant_at
        if quant_zeros is not None:
            quant_zeros += quant_at
    weight_t = weights.weight_t + expert * (problem.k * problem.stride)
    scales = weights.scales + expert * (PROJECTIONS * (problem.k // problem.planes))
    thresholds = weights.thresholds + expert * (PROJECTIONS * problem.planes)
    return Weights(weight_t, bias, scales, thresholds, quant_scales, quant_zeros)


@triton.jit(do_not_specialize=["ssq_parts"])
def expert_gemv_kernel(
    inputs, weights, output, workspace, eps, ssq_parts,  # as of sparse_gemv_kernel
    routing,  # Routing
    problem: tl.constexpr, launch: tl.constexpr,
    packed: tl.constexpr,  # PackedConfig; None: sparse_gemv_kernel
    CHOSEN: tl.constexpr,  # experts of a row
):  # fmt: skip
    ADDS: tl.constexpr = problem.experts > 0
    K: tl.constexpr = problem.k // problem.planes
    N: tl.constexpr = problem.n
    PROJECTIONS: tl.constexpr = 1 + (1 if problem.n1 > 0 else 0)
    PARTS: tl.constexpr = launch.tiles * (launch.reducers if launch.reducers > 0 else 1)
    pair = tl.program_id(1)
    row = pair // CHOSEN
    in_row = pair if ADDS else row
    out_row = row if ADDS else pair
    # ``down`` needs only the router's result to choose its weights, and the router finished two launches ago; so it loads
    # weights before it waits for gate_up. The load of the expert ids bypasses L1, which may still hold those of the block
    # before.
    if not ADDS:
        gdc_wait(problem.pdl, False)
    expert = tl.load(routing.expert + pair, cache_modifier=".cg").to(tl.int64)

    # --- offset all pointers to this expert and this row
    x = inputs.x + in_row * K
    if inputs.norm is not None:
        inputs = Input(x, inputs.ssq + in_row * ssq_parts, inputs.norm, None, None)
    else:
        inputs = Input(x, None, None, None, None)
    bias = weights.bias
    if bias is not None and not ADDS:
        bias += expert * N
    weights = weights_of(weights, expert, bias, PROJECTIONS, problem)
    out = output.out + out_row * (N if ADDS else problem.n0)
    ssq = output.ssq
    if ssq is not None:
        ssq += out_row * PARTS
    output = Output(out, ssq)
    counter = workspace.counter
    if counter is not None:
        counter += out_row * launch.tiles
    index = workspace.list_index
    value = workspace.list_value
    LISTS: tl.constexpr = launch.tiles * launch.splits * launch.length
    if index is not None:
        index += pair * LISTS
    if value is not None:
        value += pair * LISTS
    chosen_weight = None
    chosen_expert = None
    if ADDS:
        chosen_weight = routing.weight + row * CHOSEN
        chosen_expert = routing.expert + row * CHOSEN
    partial = workspace.partial + pair * (launch.splits * N)
    workspace = Workspace(partial, counter, index, value, pair - row * CHOSEN, chosen_weight, chosen_expert)
    if packed is not None:
        packed_gemv_kernel(inputs, weights, output, workspace, eps, ssq_parts, problem, launch, packed)
    else:
        sparse_gemv_kernel(inputs, weights, output, workspace, eps, ssq_parts, problem, launch)


def empty_experts(
    experts: int, chosen: int, quant: str, k: int, widths: tuple[int, ...], group: int | None, dtype: torch.dtype,
    device: torch.device | str, *, zeros: bool = False, planes: int = 1,
) -> ExpertLinear:  # fmt: skip
    """A linear without masks, whose experts ``one`` and ``store_columns`` fill; arguments as of ``empty_weight``."""
    one = empty_weight(quant, k, widths, group, dtype, "meta", zeros=zeros, planes=planes)
    # Zeros: a shared expert whose size is no multiple of the others' is padded.
    data, scales, zero_points = (
        None if part is None else torch.zeros(experts, *part.shape, dtype=part.dtype, device=device)
        for part in (one.data, one.scales, one.zeros)
    )
    assert data is not None
    return ExpertLinear(
        replace(one, data=data, scales=scales, zeros=zero_points),
        torch.ones(experts, len(widths), k // planes, dtype=torch.float32, device=device),
        torch.zeros(experts, len(widths) * planes, dtype=torch.float32, device=device), True, chosen,
    )  # fmt: skip
