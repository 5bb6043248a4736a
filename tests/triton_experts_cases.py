"""The launches of a mixture of experts against slow twins. Run as triton_cases.py is."""

from dataclasses import replace

import pytest
import torch
from triton_cases import DEVICE, DTYPES, assert_close, make_linear, pairwise, rows, twin
from triton_codes_cases import KINDS, exact_twin, quantized_linear

from wisparse.kernels.gpu.common import Input, Routing
from wisparse.kernels.gpu.expert_gemm import expert_gemm, sort_by_expert
from wisparse.kernels.gpu.experts import (
    ExpertLinear,
    Router,
    launch_router,
)
from wisparse.kernels.gpu.plan import gpu_of

GPU = gpu_of(DEVICE)
QUANTS = [None, *(kind for kind in KINDS if kind[0] != "graded")]


def make_experts(
    count: int, chosen: int, widths: tuple[int, ...], k: int, dtype: torch.dtype, sparsity: float, quant=None
):
    """Each with weights, scales and thresholds of its own."""
    if quant is None:
        linears = [make_linear(widths, k, dtype, sparsity, seed=seed) for seed in range(count)]
    else:
        linears = [quantized_linear(*quant, widths, k, dtype, sparsity, seed=seed) for seed in range(count)]
    ws = [linear.weight for linear in linears]
    data, scales, zeros = (
        None if parts[0] is None else torch.stack(parts)
        for parts in ([w.data for w in ws], [w.scales for w in ws], [w.zeros for w in ws])
    )
    weight = replace(ws[0], data=data, scales=scales, zeros=zeros)
    own = torch.stack([linear.thresholds * (1 + 0.1 * i) for i, linear in enumerate(linears)])
    return ExpertLinear(weight, torch.stack([linear.scales for linear in linears]), own, linears[0].dense, chosen)


def choose(batch: int, count: int, chosen: int, seed: int = 5) -> Routing:
    logits = torch.rand(batch, count, generator=torch.Generator().manual_seed(seed))
    weight, expert = logits.softmax(-1).topk(chosen)
    return Routing(expert.to(DEVICE, torch.int32), weight.to(DEVICE).contiguous())


def one_twin(experts: ExpertLinear, expert: int, x: torch.Tensor) -> torch.Tensor:
    linear = experts.one(expert)
    return (twin if experts.weight.quant == "none" else exact_twin)(x, linear)


def test_logits_that_are_no_numbers_still_choose_experts_that_exist():
    hidden = rows(2, 64, torch.float32)
    hidden[0, 3] = float("nan")
    router, counter = Router(rows(8, 64, torch.float32), 8, 3, 0, True), torch.zeros(2, dtype=torch.int32)
    found = choose(2, 8, 3)
    launch_router(Input(hidden), router, torch.empty(2, 8, device=DEVICE), counter.to(DEVICE), found)
    assert found.expert[0].tolist() == [0, 1, 2]
    assert found.weight[0].isnan().all()
    assert found.weight[1].isfinite().all()


@pytest.mark.parametrize(
    *pairwise(
        quant=[*QUANTS, ("int4", 24, True)],
        dtype=DTYPES,
        batch=[1, 30],
        k=[192, 240],
        sparsity=[0.0, 0.5],
        first=[None, 3],
    )
)
def test_many_rows_are_multiplied_expert_by_expert(quant, dtype, batch, k, sparsity, first):
    if quant is not None and quant[1] is not None and k % quant[1]:
        k = 192
    count, chosen, width, n = 5, 3, 72, 104
    gate_up = make_experts(count, chosen, (width, width), k, dtype, sparsity, quant)
    down = make_experts(count, chosen, (n,), 192 if quant else 70, dtype, sparsity, quant)
    x, routing = rows(batch, k, dtype), choose(batch, count, chosen)
    groups, flat = sort_by_expert(routing.expert, count), routing.expert.flatten()
    assert torch.equal(groups.order.long(), torch.sort(flat, stable=True).indices)
    assert groups.offset.tolist() == [int((flat < e).sum()) for e in range(count + 1)]
    left = torch.full((batch * chosen, width), float("nan"), dtype=dtype, device=DEVICE)
    expert_gemm(x, gate_up, groups, left, GPU, activation="silu", first_sparse=first)
    # down's input has a width of its own here, so that its groups are whole.
    given = rows(batch * chosen, down.in_features, dtype, seed=4)
    out = torch.full((batch, chosen, n), float("nan"), dtype=dtype, device=DEVICE)
    expert_gemm(given, down, groups, out, GPU, weight=routing.weight, first_sparse=first)
    for place, pair in enumerate(groups.order.tolist()):
        row, j = divmod(pair, chosen)
        expert = int(flat[pair])
        masked = first is not None and row >= first
        gate_up_of, down_of = (
            linear if masked else replace(linear, thresholds=torch.zeros_like(linear.thresholds))
            for linear in (gate_up, down)
        )
        y = one_twin(gate_up_of, expert, x[row : row + 1])[0]
        assert_close(left[place], torch.nn.functional.silu(y[:width]) * y[width:], dtype)
        y = one_twin(down_of, expert, given[place : place + 1])[0]
        assert_close(out[row, j], y * float(routing.weight[row, j]), dtype)
