"""Products of weights in codes, and sampling on the device, against their slow twins. Run as triton_cases.py is."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from quantised_models import quantise_with_zeros
from triton_cases import DEVICE, INTERPRETED, apply_linear, assert_close, make_linear, pairwise, rows, twin

from wisparse.formats.weight_types import interleaved, quantise
from wisparse.kernels.gpu.gemm import gemm
from wisparse.kernels.gpu.head import Logits
from wisparse.kernels.gpu.launch import Scratch
from wisparse.kernels.gpu.packed_gemv import keeps_subnormals
from wisparse.kernels.gpu.products import choose_product
from wisparse.kernels.gpu.reduction import launch_activate
from wisparse.kernels.gpu.sample import Choice, SampleState, launch_sample
from wisparse.kernels.gpu.tiles import Tile
from wisparse.kernels.gpu.weights import FusedLinear, dequantize, empty_weight, store_columns, unquantized, widen
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.cuda.eager import project
from wisparse.runtime.decoding.sampling import SamplingParams, sample, uniform
from wisparse.runtime.vllm import product as vllm_product
from wisparse.runtime.vllm.blocks import Between, Linear, Norm
from wisparse.runtime.vllm.product import Layer, Placed, fused_products, of_codes, product_of, reserve, scratch_of

HALF = [torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
# Kind, channels that share a scale (None: all), zero points.
KINDS = [("int4", 32, False), ("int4", 64, True), ("int8", None, False), ("int8", 32, True), ("fp8", None, False)]
KINDS += [("graded", 32, False)]
# Few large blocks where kernels are interpreted.
TILES = {1: Tile(128, 16, 2, 4, chunk=32, unroll=2, lead=1), 5: Tile(128, 64, 2, 4, stages=1, unroll=1)}


def quantized_linear(
    kind: str, group: int | None, zero_points: bool, widths: tuple[int, ...], k: int, dtype: torch.dtype, sparsity: float,
    *, bias: bool = False, seed: int = 0,
) -> FusedLinear:  # fmt: skip
    plain = make_linear(widths, k, dtype, sparsity, bias=bias, seed=seed)
    graded = kind == "graded"  # a low plane is read from twice the threshold on
    stored, planes = ("int4", 2) if graded else (kind, 1)
    size = None if group is None else planes * group
    weight = empty_weight(stored, planes * k, widths, size, dtype, DEVICE, zeros=zero_points, planes=planes)
    generator = torch.Generator().manual_seed(3 + seed)
    for i, width in enumerate(widths):
        numbers = torch.randn(width, k, generator=generator) / math.sqrt(k)
        numbers *= torch.rand(width, 1, generator=generator) + 0.5
        if graded:
            part = interleaved(quantise("int8", numbers, group=group, graded=True))
        else:
            part = (quantise_with_zeros if zero_points else quantise)(kind, numbers, group=group)
        store_columns(weight, i, part.codes, part.scales, part.zeros)
    # Codes of columns that do not exist: whatever stands there must not show.
    poisoned = weight.data.view(torch.uint8)
    for i, width in enumerate(widths):
        per_byte = 2 if stored == "int4" else 1
        poisoned[:, -(-(weight.first(i) + width) // per_byte) : weight.first(i + 1) // per_byte] = 0x5A
    thresholds = torch.stack((plain.thresholds, 2 * plain.thresholds), 1).flatten() if graded else plain.thresholds
    return replace(plain, weight=weight, thresholds=thresholds)


def exact_twin(x: torch.Tensor, linear: FusedLinear) -> torch.Tensor:
    """``twin``, with the numbers that the codes stand for, to float32; of graded weights each plane a channel."""
    if linear.weight.planes == 2:
        of_planes = []
        for i, width in enumerate(linear.widths):
            both, low = torch.empty(2, linear.in_features, width, device=DEVICE)
            dequantize(linear.weight, i, both)
            dequantize(linear.weight, i, low, low=True)
            of_planes.append(torch.cat((both - low, low)))
        plain = replace(
            linear,
            weight=unquantized(torch.cat(of_planes, 1), linear.widths),
            scales=torch.cat((linear.scales, linear.scales / 2), 1),
            thresholds=linear.thresholds[::2].contiguous(),
        )
        return twin(torch.cat((x, x), 1), plain)
    room = [torch.empty(linear.in_features, width, device=DEVICE) for width in linear.widths]
    numbers = torch.cat([dequantize(linear.weight, i, out) for i, out in enumerate(room)], 1)
    return twin(x, replace(linear, weight=unquantized(numbers, linear.widths)))


@pytest.mark.parametrize(("kind", "group", "zero_points"), [*KINDS, ("int4", 7, True)])
def test_widened_weights_are_the_twins(kind, group, zero_points):
    """To the bit, whatever stood there; of one projection, and of neighbours side by side."""
    k = 441 if group == 7 else 448  # not a multiple of the channels of a program, or one
    weight = quantized_linear(kind, group, zero_points, (300, 41, 256), k, torch.float16, 0.5).weight
    for projections in (range(1), range(1, 3), range(3)):
        widths = weight.widths[projections.start : projections.stop]
        found, expected = torch.full((2, k, sum(widths)), math.nan, dtype=torch.float16, device=DEVICE)
        for i, out in zip(projections, expected.split(widths, 1), strict=True):
            dequantize(weight, i, out)
        assert torch.equal(widen(weight, projections, found), expected)


# Fewer rows than a tile has, several tiles; in one piece and in splits; a copy of x for each projection.
@pytest.mark.parametrize(
    ("kind", "group", "zero_points"), [("int4", 64, True), ("int8", None, False), ("fp8", None, False)]
)
@pytest.mark.parametrize(("count", "splits"), [(20, 1), (40, 3)])
def test_products_of_many_rows(kind, group, zero_points, count, splits):
    linear = quantized_linear(kind, group, zero_points, (300, 40), 256, torch.float16, 0.5, bias=splits > 1)
    x = rows(2 * count, 256, torch.float16).view(2, count, 256)
    tile, counter = Tile(128, 64, splits, stages=2, block_m=32), torch.zeros(8, dtype=torch.int32, device=DEVICE)
    dense = replace(linear, thresholds=torch.zeros_like(linear.thresholds))
    together, apart = (gemm(rows_of, linear, tile, counter=counter) for rows_of in (x[0], x))
    assert_close(together, exact_twin(x[0], dense), torch.float16)
    assert_close(apart[:, :300], exact_twin(x[0], dense)[:, :300], torch.float16)
    assert_close(apart[:, 300:], exact_twin(x[1], dense)[:, 300:], torch.float16)
    assert not counter.any()


def layer_of(linear: FusedLinear) -> Layer:
    """As the plug-in for vLLM has it."""
    weight, masks = linear.weight, (linear.scales, linear.thresholds)
    return Layer(weight.data, linear.bias, *masks, linear.widths, weight.quant, weight.scales, weight.zeros)


def twin_of_rows(x: torch.Tensor, linear: FusedLinear, masked: torch.Tensor) -> torch.Tensor:
    dense = exact_twin(x, replace(linear, thresholds=torch.zeros_like(linear.thresholds)))
    return torch.where(masked[:, None] > 0, exact_twin(x, linear), dense)


@pytest.mark.parametrize(
    ("kind", "group", "zero_points"), [("int4", 32, False), ("int8", 32, True), ("graded", 32, False)]
)
@pytest.mark.parametrize("count", [1, 5, 20, 40])
def test_products_of_the_plug_in_for_vllm(kind, group, zero_points, count):
    """Each row has its own mask or none."""
    linear = quantized_linear(kind, group, zero_points, (300, 40), 192, torch.float32, 0.5, bias=True)
    x, layer = rows(count, 192, torch.float32), layer_of(linear)
    masked = torch.arange(count, device=DEVICE).remainder(3).ne(1).float()
    reserve(layer, x.dtype, Placed(dense=False))
    expected = twin_of_rows(x, linear, masked)
    assert_close(of_codes(x, layer, masked, dense=False), expected, torch.float32)
    assert_close(of_codes(x, layer, masked, dense=True), twin_of_rows(x, linear, 0 * masked), torch.float32)


def test_batches_of_a_wide_output_layer_are_split(monkeypatch):
    """A piece has at most the rows of one tile, and its own rows of the mask."""
    linear, x = quantized_linear("int8", None, False, (100,), 64, torch.float32, 0.5), rows(130, 64, torch.float32)
    layer, masked = layer_of(linear), torch.arange(130, device=DEVICE).remainder(3).ne(1).float()
    monkeypatch.setattr(vllm_product, "WIDE", 99)
    reserve(layer, x.dtype, Placed(dense=False))
    for dense in (False, True):
        with mock.patch.object(vllm_product, "launched", wraps=vllm_product.launched) as launched:
            found = of_codes(x, layer, masked, dense=dense)
        assert [len(call.args[1]) for call in launched.call_args_list] == [128, 2]
        assert_close(found, twin_of_rows(x, linear, 0 * masked if dense else masked), torch.float32)


# Half precision without masks, which roundings would turn; compiled, these are the kernels that vLLM's users run.
@pytest.mark.parametrize(
    ("kind", "group", "dtype"),
    [("int4", 32, torch.float32), ("graded", 32, torch.float32), ("int4", 32, HALF[-1]), ("int8", None, HALF[-1])],
)
@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_block_of_the_plug_in_for_vllm(kind, group, dtype, count, biased):
    """From attention's output to the next block's projections, the residual stream updated."""
    hidden, inner, dense = 128, 192, dtype != torch.float32
    sparsity, shapes = 0.0 if dense else 0.5, [((hidden,), 64), ((inner, inner), hidden), ((hidden,), inner)]
    made = [
        quantized_linear(kind, group, False, widths, k, dtype, sparsity, bias=biased, seed=seed)
        for seed, (widths, k) in enumerate([*shapes, ((64, 32, 32), hidden)])
    ]
    o, gate_up, down, qkv = (Linear(layer_of(linear), Placed(dense)) for linear in made)
    first, second = (Norm(1 + rows(1, hidden, dtype, seed)[0] / 4, 1e-5) for seed in (7, 8))
    masked = torch.arange(count + 2, device=DEVICE).remainder(3).ne(1).float()
    between = Between(o, first, gate_up, "silu", down, second, qkv)
    attention, stream = rows(count, 64, dtype), rows(count, hidden, dtype, 2)
    for product in between.products(count, dtype):
        scratch_of(DEVICE, dtype).reserve(product)

    def by_twin(x: torch.Tensor, linear: FusedLinear) -> torch.Tensor:
        return twin_of_rows(x.to(dtype), linear, masked[:count])

    def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (hidden,), norm.weight.double(), norm.eps)

    expected = stream.double() + by_twin(attention, made[0])
    gate, up = by_twin(normed(expected, first), made[1]).chunk(2, dim=1)
    expected += by_twin(torch.nn.functional.silu(gate) * up, made[2])
    found = between.fused(attention, stream, masked)
    rounding = dtype if dtype == torch.float32 else torch.bfloat16  # of several steps
    assert_close(stream, expected, rounding)
    assert_close(found, by_twin(normed(expected, second), made[3]), rounding)


def test_an_activation_masks_some_rows():
    gate_up, scales = (
        rows(3, 80, torch.float32),
        torch.rand(1, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE),
    )
    threshold, masked = torch.full((1,), 0.1, device=DEVICE), torch.tensor([1.0, 0.0, 1.0, 1.0], device=DEVICE)
    whole = torch.nn.functional.silu(gate_up[:, :40].double()) * gate_up[:, 40:].double()
    kept = keep_mask(whole.float(), scales[0], (threshold * masked[:3])[:, None])
    assert_close(launch_activate(gate_up, "silu", (scales, threshold), masked), whole * kept, torch.float32)
    assert 0 < kept[0].sum() < 40
    assert kept[1].all()


@pytest.mark.parametrize("ready", [False, True])
def test_scratch_memory_of_the_plug_in_for_vllm(ready):
    """It is reserved for every product of a layer whose input a compiler masks, and of the same layer run eagerly."""
    weight, scales = torch.zeros(64, 704, dtype=torch.bfloat16, device=DEVICE), torch.ones(1, 704, device=DEVICE)
    layer = Layer(weight.t().contiguous().t(), None, scales, torch.ones(1, device=DEVICE), [64])
    reserved = list(fused_products(layer, weight.dtype, Placed(dense=False)))
    products = [product_of(layer, weight.dtype, count, ready=ready) for count in range(1, 33)]
    assert all(product in reserved for product in products if product.fused)
    assert sum(product.fused for product in products) == (2 if ready else 8)


@pytest.mark.parametrize(("kind", "group", "zero_points"), [("graded", 32, False), ("int8", None, False)])
@pytest.mark.parametrize("first", [0, 3, 6])
def test_prompts_without_a_graph(kind, group, zero_points, first):
    """Rows from ``first`` on are masked; of graded weights each plane is."""
    linear = quantized_linear(kind, group, zero_points, (100, 40), 192, torch.float32, 0.5, bias=True)
    x, whole = rows(6, 192, torch.float32), replace(linear, thresholds=torch.zeros_like(linear.thresholds))
    scratch = Scratch(DEVICE, torch.float32, torch.empty(192 * 100, device=DEVICE))
    found = torch.cat(project(linear, x, first, scratch), dim=1)
    assert_close(found, torch.cat((exact_twin(x[:first], whole), exact_twin(x[first:], linear))), torch.float32)


ODD = [("int4", 7, True), ("int8", None, False), ("fp8", None, False)]


# Widths, channels, sparsity; all channels and none are kept too; odd shapes.
@pytest.mark.parametrize(
    ("quant", "dtype", "batch", "shape"),
    [
        *pairwise(quant=KINDS, dtype=[torch.float32, *HALF], batch=[1, 2, 5], shape=[((100, 37, 10), 192, 0.5)])[1],
        *[(kind, torch.float16, 1, ((70,), 128, sparsity)) for kind in KINDS[1:3] for sparsity in (0.0, 1.0)],
        *pairwise(quant=ODD, dtype=HALF, batch=[1, 2, 3], shape=[((33, 5), 77, 0.5)])[1],
        *[
            pytest.param(("int4", group, zeros), torch.float16, 1, ((64, 20), 256, 0.5), marks=pytest.mark.quick)
            for group in (64, 128)
            for zeros in (False, True)
        ],
    ],
)
def test_quantized_linears_are_the_twins(quant, dtype, batch, shape):
    widths, k, sparsity = shape
    x = rows(batch, k, dtype)
    coded = quantized_linear(*quant, widths, k, dtype, sparsity, bias=True)
    assert_close(apply_linear(x, coded, TILES[1 if batch < 3 else 5]), exact_twin(x, coded), dtype)


# Warps that read 4, 8 and 16 bytes a lane; one turn of steps on its way and several; every way to add up. With a byte
# a code the last would be 32 bytes a lane: no program for the tensor cores, and any other spills and may take more
# shared memory than there is.
PACKED = [
    Tile(256, 16, 3, 4, chunk=128, unroll=1),
    Tile(512, 16, 2, 4, stages=2, chunk=16, unroll=2, reducers=2),
    Tile(512, 16, 4, 2, stages=3, chunk=64, unroll=4, trigger=2),
]


@pytest.mark.skipif(INTERPRETED, reason="interpreted, there are no tensor cores")
@pytest.mark.parametrize(("kind", "group", "zeros"), KINDS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch", [1, 2, 5, 16, 17, 32])
@pytest.mark.parametrize(
    ("widths", "k", "sparsity"),
    [((300, 37, 60), 384, 0.5), ((1024, 256), 1024, 0.0), ((700,), 640, 1.0), ((512, 512), 1216, 0.7)],
)
def test_products_on_the_tensor_cores_are_the_twins(kind, group, zeros, dtype, batch, widths, k, sparsity):
    k = k // 2 if kind == "graded" else k  # the lists of both planes' channels fit into shared memory
    coded = quantized_linear(kind, group, zeros, widths, k, dtype, sparsity, bias=True)
    x = rows(batch, k, dtype)
    few = kind in ("int4", "graded")
    for tile in PACKED if few and batch <= 16 else PACKED[:2]:
        assert choose_product(coded.shape, batch, tile=tile).packed is not None
        assert_close(apply_linear(x, coded, tile), exact_twin(x, coded), dtype)
    if not few:
        assert choose_product(coded.shape, batch, tile=PACKED[2]).packed is None


@pytest.mark.skipif(INTERPRETED, reason="interpreted, there are no tensor cores")
@pytest.mark.parametrize("dtype", HALF)
def test_tensor_cores_keep_subnormal_numbers(dtype):
    assert keeps_subnormals(DEVICE, dtype)


HEAD_TILE = 16


def draw(
    logits: torch.Tensor, settings: list[SamplingParams], positions: list[int], dtype: torch.dtype,
    state: SampleState | None = None, tokens: list[int] | None = None, **finish: float,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """One step's choice: token ids and the positions afterwards; positions as ``sampling.sample`` counts them."""
    batch, vocabulary = logits.shape
    logits = logits.to(DEVICE)
    padded = torch.nn.functional.pad(logits, (0, -vocabulary % HEAD_TILE), value=-torch.inf)
    tiles = padded.view(batch, -1, HEAD_TILE)
    best = tiles.amax(2).contiguous()
    first = torch.where(tiles == best[..., None], torch.arange(HEAD_TILE, device=DEVICE), HEAD_TILE).amin(2)
    best_id = (first + HEAD_TILE * torch.arange(tiles.shape[1], device=DEVICE)).int().contiguous()
    if state is None:  # what a step does not leave for the next one holds poison
        state = SampleState.empty(batch, vocabulary, DEVICE)
        for tensor in (state.block_sums, state.sums, state.largest):
            tensor.fill_(torch.nan)
        for tensor in (state.block_counts, state.threshold, state.likeliest):
            tensor.fill_(2**30)
    numbers = [[s.temperature, s.top_k, s.top_p, s.min_p] for s in settings]
    state.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
    state.seeds.copy_(torch.tensor([s.seed or 0 for s in settings]))
    given = torch.tensor(tokens or [0] * batch, device=DEVICE)
    places = torch.tensor([p - 1 for p in positions], dtype=torch.int32, device=DEVICE)
    launch_sample(Logits(logits, best, best_id), Choice(given, given, places), state, dtype, **finish)
    assert not state.counts.any()  # as the next step needs them
    assert not state.arrived.any()
    return given.tolist(), places.tolist()


def random_logits(batch: int, vocabulary: int, dtype: torch.dtype, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(batch, vocabulary, generator=generator)).to(dtype).float()


GRID = [
    SamplingParams(temperature, top_k, top_p, min_p, (2**63 - 1) // (1 + 7 * number))
    for number, (temperature, top_k, top_p, min_p) in enumerate(
        itertools.product([0.6, 1.0, 2.5], [0, 1, 7, 400, 10**9], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.05])
    )
]
VOCABULARIES = [(torch.bfloat16, 70), (torch.float16, 1024), (torch.bfloat16, 2500)]
VOCABULARIES += [(torch.float16, 128256)] * (not INTERPRETED)


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "multiplier", "cap"),
    [(*one, 1.0, None) for one in VOCABULARIES]
    + [(torch.bfloat16, 1500, *finish) for finish in ((0.125, None), (1.0, 4.0), (0.6, 2.5))],
)
def test_the_token_is_the_twins(dtype, vocabulary, multiplier, cap):
    # The interpreter takes 0.3 s for a row: a share of the grid, another one for each vocabulary.
    settings = [*(GRID[vocabulary % 13 :: 13] if INTERPRETED else GRID), SamplingParams()]
    logits = random_logits(len(settings), vocabulary, dtype)
    logits[:, 3] = logits[:, 60]  # equals, besides those that rounding makes
    logits[::3, 5:9] = -torch.inf
    logits[::5, 8], logits[::5, 9] = 0.0, -0.0
    positions = [1 + 1013 * i for i in range(len(settings))]
    finished = logits * multiplier
    finished = finished if cap is None else torch.where(logits.isinf(), logits, cap * torch.tanh(finished / cap))
    found, moved = draw(logits, settings, positions, dtype, multiplier=multiplier, cap=cap)
    assert (found, moved) == (sample(finished, settings, positions).tolist(), positions)


@pytest.mark.parametrize("spread", [1e-3, 2000.0])
def test_extreme_temperatures(spread):
    filters = ((0, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.99), (300, 0.999, 1e-4))
    settings = [
        SamplingParams(temperature, *filters[(i + shift) % 4], seed=i)
        for i, temperature in enumerate([5e-324, 1e-300, 1e-4, 0.05, 1e4])
        for shift in ([int(spread > 1)] if INTERPRETED else range(4))
    ]
    logits = random_logits(len(settings), 1500, torch.float16, spread)
    positions = [9] * len(settings)
    assert draw(logits, settings, positions, torch.float16)[0] == sample(logits, settings, positions).tolist()


@pytest.mark.quick
def test_the_nucleus_ends_with_the_token_that_reaches_top_p():
    # Weights of exactly 1, 1/2, 1/4 and 1/4 on neighbouring values: halves and quarters of the whole are reached with
    # nothing over. The random numbers are so high that any token beyond would be drawn.
    step = 2.0**-10
    logits = (1.25 - step * torch.tensor([[0.0, 1.0, 2.0, 2.0]])).half().float().expand(2, -1).contiguous()
    seeds = [seed for seed in range(200) if uniform(seed, 1) > 0.97][:2]
    settings = [
        SamplingParams(step / math.log(2), top_p=top_p, seed=seed)
        for top_p, seed in zip((0.5, 0.75), seeds, strict=True)
    ]
    assert sample(logits, settings, [1] * 2).tolist() == [0, 1]
    assert draw(logits, settings, [1] * 2, torch.float16)[0] == [0, 1]


def test_flat_and_single_valued_logits():
    settings = [SamplingParams(1.0, top_k, top_p, seed=s) for s, top_k in enumerate([0, 3, 50]) for top_p in (1, 0.3)]
    flat = torch.full((6, 3000), -2.5)
    assert draw(flat, settings, [1] * 6, torch.bfloat16)[0] == sample(flat, settings, [1] * 6).tolist()
    alone = torch.full((6, 3000), -torch.inf)
    alone[:, 2998] = 4.0
    assert draw(alone, settings, [1] * 6, torch.bfloat16)[0] == [2998] * 6


def test_rows_without_an_answer_and_idle_rows():
    logits = random_logits(6, 1100, torch.float16)
    logits[1, 1050], logits[2, 7] = torch.nan, torch.inf
    logits[3] = -torch.inf
    settings = [SamplingParams(0.8, 20, 0.9, 0.0, 1)] * 5 + [SamplingParams()]
    state = SampleState.empty(6, 1100, DEVICE)
    for tokens in ([0, 0, 0, 0, -1, 0], [0] * 6):
        found, moved = draw(logits, settings, [4] * 6, torch.float16, state, tokens)
        expected = sample(logits, settings, [4] * 6).tolist()
        assert expected[1:4] == [-1] * 3
        assert found == [-1 if token < 0 else chosen for token, chosen in zip(tokens, expected, strict=True)]
        assert moved == [4 if token >= 0 else 3 for token in tokens]
