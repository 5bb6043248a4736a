"""The launches of a mixture of experts against slow twins. Run as triton_cases.py is."""

from dataclasses import replace

import pytest
import torch
from triton_cases import DEVICE, DTYPES, PDL, assert_close, make_linear, pairwise, rows, twin
from triton_codes_cases import KINDS, exact_twin, quantized_linear

from wisparse.kernels.gpu.common import Input, Output, Routing
from wisparse.kernels.gpu.count import launch_count
from wisparse.kernels.gpu.expert_gemm import expert_gemm, sort_by_expert
from wisparse.kernels.gpu.experts import (
    ExpertLinear,
    Router,
    choose_experts,
    launch_router,
)
from wisparse.kernels.gpu.launch import Scratch, launch_linear
from wisparse.kernels.gpu.products import choose_product
from wisparse.kernels.gpu.tiles import Tile
from wisparse.kernels.reference import keep_mask

CLAMP = (1.3, 0.8)
ACTIVATIONS = {
    "silu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "relu2": lambda up, _: up.relu().square(),  # without a gate
    "clamped": lambda gate, up: (up.clamp(-0.8, 0.8) + 1) * gate.clamp(max=0.8) * (1.3 * gate.clamp(max=0.8)).sigmoid(),
}
QUANTS = [None, *KINDS]


def make_experts(
    count: int, chosen: int, widths: tuple[int, ...], k: int, dtype: torch.dtype, sparsity: float, quant=None,
    biased: bool = False,
):  # fmt: skip
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
    bias = rows(count, sum(widths), dtype, seed=7) if biased else None
    return ExpertLinear(weight, torch.stack([linear.scales for linear in linears]), own, linears[0].dense, chosen, bias)


def choose(batch: int, count: int, chosen: int, seed: int = 5) -> Routing:
    logits = torch.rand(batch, count, generator=torch.Generator().manual_seed(seed))
    weight, expert = logits.softmax(-1).topk(chosen)
    return Routing(expert.to(DEVICE, torch.int32), weight.to(DEVICE).contiguous())


def one_twin(experts: ExpertLinear, expert: int, x: torch.Tensor) -> torch.Tensor:
    linear = experts.one(expert)
    return (twin if experts.weight.quant == "none" else exact_twin)(x, linear)


@pytest.mark.parametrize(
    *pairwise(
        dtype=DTYPES, batch=[1, 3], case=[(8, 2, 0, True), (40, 5, 2, False)],
        k=[64, 77], more=["", "logits", "sigmoid", "choice"],
    )
)  # fmt: skip
def test_the_router_chooses_as_its_twin(dtype, batch, case, k, more):
    count, chosen, shared, renormalised = case
    hidden, norm, eps = rows(batch, k, dtype), (1 + 0.1 * rows(1, k, dtype, seed=2)[0]).to(dtype), 1e-5
    gated = shared > 0 and more != "choice"
    weight = rows(count + gated, k, dtype, seed=3)
    router = Router(weight, count, chosen, shared, renormalised)
    bias, scale = torch.zeros(len(weight), dtype=dtype, device=DEVICE), torch.ones(count, device=DEVICE)
    choice_bias, least, added = torch.zeros(count, device=DEVICE), 0.0, 0.0
    if more == "logits":  # gpt-oss has the first, Gemma 4 the others
        bias, scale = rows(1, len(weight), dtype, seed=8)[0], rows(1, count, dtype, seed=9)[0].abs()
        router = router._replace(multiplier=0.3, bias=bias, expert_scale=scale)
    elif more:  # as of LFM2; of ERNIE 4.5
        choice_bias, least, added = rows(1, count, torch.float32, seed=8)[0], 0.9 * (more == "choice"), 1e-3
        router = router._replace(choice_bias=choice_bias, norm=(least, added), factor=1.5, sigmoid=more == "sigmoid")
        router = router._replace(rounded="scores" if router.sigmoid else None)
        weight = weight.float() if router.rounded is None else weight
    router = router._replace(weight=weight)
    total, logits = chosen + shared, torch.full((batch, len(weight)), float("nan"), device=DEVICE)
    found = Routing(
        *(torch.full((batch, total), -7, dtype=kind, device=DEVICE) for kind in (torch.int32, torch.float32))
    )
    ssq, counter = hidden.float().square().sum(1, keepdim=True), torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        launch_router(Input(hidden, ssq, norm), router, logits, counter, found, eps=eps, pdl=PDL)
        assert not counter.any()
    x = norm * (hidden.float() * torch.rsqrt(hidden.float().square().mean(1, keepdim=True) + eps)).to(dtype)
    x = (x * router.multiplier).to(dtype)
    assert_close(logits, x.double() @ weight.double().T + bias.double(), dtype)
    # In a step, and for a prompt's rows, whose products are torch's.
    for routing, of in ((found, logits), (choose_experts(x, router), (x.to(weight.dtype) @ weight.T + bias).float())):
        # Of equal logits the expert of the lower number.
        values = of[:, :count].softmax(-1) if not router.sigmoid else of[:, :count].sigmoid().to(dtype).float()
        keys = values + choice_bias if router.choice_bias is not None else of[:, :count]
        expert = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :chosen]
        assert torch.equal(routing.expert[:, :chosen].long(), expert)
        weights = values.gather(1, expert)
        if renormalised:
            weights = weights / (weights.sum(-1, keepdim=True).clamp(min=least) + added)
        weights = weights * router.factor * scale.float()[expert]
        assert_close(routing.weight[:, :chosen], weights, dtype)
        for i in range(shared):
            assert (routing.expert[:, chosen + i] == count + i).all()
            assert_close(
                routing.weight[:, chosen + i],
                of[:, count].sigmoid() if gated else torch.ones(batch, device=DEVICE),
                dtype,
            )


@pytest.mark.parametrize("best", [1, 2])
def test_experts_are_chosen_of_the_best_groups(best):
    """By softmax as in DeepSeek-V2, by sigmoids and a bias as in V3."""
    x, weight = rows(9, 64, torch.float32), rows(40, 64, torch.float32, seed=3)
    router, keys = Router(weight, 40, 3, 0, False, rounded=None, groups=(5, 2, best)), x @ weight.T
    if best == 2:
        router = router._replace(sigmoid=True, choice_bias=rows(1, 40, torch.float32, seed=8)[0])
        keys = keys.sigmoid() + router.choice_bias
    kept = keys.view(9, 5, 8).topk(best).values.sum(-1).topk(2).indices
    outside = torch.ones(9, 5, dtype=torch.bool, device=DEVICE).scatter(1, kept, False).repeat_interleave(8, 1)
    expected = keys.masked_fill(outside, float("-inf")).topk(3).indices
    assert not torch.equal(expected, keys.topk(3).indices)
    assert torch.equal(choose_experts(x, router).expert.long(), expected)


def test_logits_that_are_no_numbers_still_choose_experts_that_exist():
    hidden = rows(2, 64, torch.float32)
    hidden[0, 3] = float("nan")
    router, counter = Router(rows(8, 64, torch.float32), 8, 3, 0, True), torch.zeros(2, dtype=torch.int32)
    found = choose(2, 8, 3)
    launch_router(Input(hidden), router, torch.empty(2, 8, device=DEVICE), counter.to(DEVICE), found)
    assert found.expert[0].tolist() == [0, 1, 2]
    assert found.weight[0].isnan().all()
    assert found.weight[1].isfinite().all()


GATE_UP = [
    Tile(64, 8, 3, 2, unroll=2, chunk=32),
    Tile(128, 16, 2, 4, chunk=32, unroll=2, lead=1, reducers=1),
    None,
]


@pytest.mark.parametrize(
    *pairwise(
        quant=QUANTS, dtype=DTYPES, batch=[1, 4], tile=GATE_UP, sparsity=[0.0, 0.5],
        output=["silu", "clamped", "relu2", "residual"], biased=[False, True],
    )
)  # fmt: skip
def test_products_of_the_chosen_experts_are_the_twins(quant, dtype, batch, tile, sparsity, output, biased):
    """gate_up and down, counted; twice, as the first launch leaves the second's workspace."""
    count, chosen, k, eps = 5, 3, 192, 1e-5
    gate_up = output != "residual"
    widths, routing = (72,) * (1 + (output != "relu2")) if gate_up else (104,), choose(batch, count, chosen)
    linear = make_experts(count, chosen, widths, k, dtype, sparsity, quant, biased)
    product = choose_product(linear.shape, batch, output=output, tile=tile, pdl=PDL, clamp=CLAMP)
    scratch, x = Scratch(DEVICE, dtype), rows(batch if gate_up else batch * chosen, k, dtype)
    scratch.reserve(product)
    tokens, read = torch.arange(batch, device=DEVICE) - int(batch > 1), torch.tensor([7], device=DEVICE)
    norm, ssq = (1 + 0.1 * rows(1, k, dtype, seed=2)[0]).to(dtype), x.float().square().sum(1, keepdim=True)
    outs: list[torch.Tensor] = []
    for _ in range(2):
        if gate_up:
            out = torch.full((batch * chosen, 72), float("nan"), dtype=dtype, device=DEVICE)
            given, target = Input(x, ssq, norm), Output(out)
        else:
            out = rows(batch, 104, dtype, seed=9)
            before, sums = out.double(), torch.full((batch, product.ssq_parts), float("nan"), device=DEVICE)
            given, target = Input(x), Output(out, sums)
        launch_linear(linear, given, target, scratch, product, routing=routing, eps=eps)
        launch_count(linear, given, read, tokens=tokens, expert=routing.expert, eps=eps, pdl=PDL)
        assert (scratch.polled == -1).all()
        assert not scratch.counter.any()
        outs.append(out)
    assert torch.equal(*outs)
    if gate_up:
        x = norm * (x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + eps)).to(dtype)
    kept = 0
    for row in range(batch):
        total = torch.zeros(104, dtype=torch.float64, device=DEVICE)
        for j, expert in enumerate(routing.expert[row].tolist()):
            mine = x[row : row + 1] if gate_up else x[row * chosen + j : row * chosen + j + 1]
            y = one_twin(linear, expert, mine)[0]
            if gate_up:
                assert_close(out[row * chosen + j], ACTIVATIONS[output](y[:72], y[72:]), dtype)
            else:
                total += y * float(routing.weight[row, j])
            if int(tokens[row]) >= 0:
                one = linear.one(expert)
                limits = one.thresholds.unflatten(0, (len(widths), -1))
                kept += sum(int(keep_mask(mine, one.scales[i], x).sum()) for i in range(len(widths)) for x in limits[i])
        if not gate_up:
            assert_close(out[row], before[row] + total, dtype)
            torch.testing.assert_close(sums.sum(1), out.float().square().sum(1))
    assert int(read) - 7 == 2 * kept * widths[0]


@pytest.mark.parametrize(
    *pairwise(
        quant=[*QUANTS, ("int4", 24, True)],
        dtype=DTYPES,
        batch=[1, 30],
        k=[192, 240],
        sparsity=[0.0, 0.5],
        first=[None, 3],
        activation=["silu", "clamped", "relu2"],  # the second with biases
    )
)
def test_many_rows_are_multiplied_expert_by_expert(quant, dtype, batch, k, sparsity, first, activation):
    if quant is not None and quant[1] is not None and k % quant[1]:
        k = 192
    count, chosen, width, n = 5, 3, 72, 104
    biased = activation == "clamped"
    gate_up = make_experts(count, chosen, (width,) * (1 + (activation != "relu2")), k, dtype, sparsity, quant, biased)
    down = make_experts(count, chosen, (n,), 192 if quant else 70, dtype, sparsity, quant, biased)
    x, routing = rows(batch, k, dtype), choose(batch, count, chosen)
    groups, flat = sort_by_expert(routing.expert, count), routing.expert.flatten()
    assert torch.equal(groups.order.long(), torch.sort(flat, stable=True).indices)
    assert groups.offset.tolist() == [int((flat < e).sum()) for e in range(count + 1)]
    left = torch.full((batch * chosen, width), float("nan"), dtype=dtype, device=DEVICE)
    expert_gemm(
        x,
        gate_up,
        groups,
        left,
        choose_product(gate_up.shape, batch, "prompt").tile,
        activation=activation,
        clamp=CLAMP,
        first_sparse=first,
    )
    # down's input has a width of its own here, so that its groups are whole.
    given = rows(batch * chosen, down.in_features, dtype, seed=4)
    out = torch.full((batch, chosen, n), float("nan"), dtype=dtype, device=DEVICE)
    expert_gemm(
        given,
        down,
        groups,
        out,
        choose_product(down.shape, batch, "prompt").tile,
        weight=routing.weight,
        first_sparse=first,
    )
    for place, pair in enumerate(groups.order.tolist()):
        row, j = divmod(pair, chosen)
        expert = int(flat[pair])
        masked = first is not None and row >= first
        gate_up_of, down_of = (
            linear if masked else replace(linear, thresholds=torch.zeros_like(linear.thresholds))
            for linear in (gate_up, down)
        )
        y = one_twin(gate_up_of, expert, x[row : row + 1])[0]
        assert_close(left[place], ACTIVATIONS[activation](y[:width], y[width:]), dtype)
        y = one_twin(down_of, expert, given[place : place + 1])[0]
        assert_close(out[row, j], y * float(routing.weight[row, j]), dtype)
