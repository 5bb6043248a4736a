"""Products of weights in codes against their slow twin. Run by test_kernels_triton.py as triton_cases.py is.

TRITON_INTERPRET=1 python -m pytest tests/triton_codes_cases.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from triton_cases import DEVICE, INTERPRETED, assert_close, make_group, rows, twin

from wisparse.formats.weight_types import quantise_fp8, quantise_int4, quantise_int8
from wisparse.kernels.gpu.gemv import GemvTile, Group, Scratch, launch_gemv, program_lists, sparse_gemv
from wisparse.kernels.gpu.matrix import empty_matrix, plain_matrix, put_columns, widen
from wisparse.kernels.gpu.packed_gemv import PackedLists
from wisparse.kernels.gpu.reduction import NOTHING
from wisparse.kernels.reference import activation_dtype

HALF = [torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
# Kind, channels that share a scale (None: all), zero points.
KINDS = [("int4", 32, False), ("int4", 64, True), ("int8", None, False), ("int8", 32, True), ("fp8", None, False)]
# Few large blocks where kernels are interpreted.
TILES = {
    1: GemvTile(128, 16, 2, 4, chunk=32, unroll=2, lead=1),
    5: GemvTile(128, 64, 2, 4, stages=1, unroll=1),
}


def coded_group(
    kind: str,
    group: int | None,
    zero_points: bool,
    widths: tuple[int, ...],
    k: int,
    dtype: torch.dtype,
    sparsity: float,
    *,
    bias: bool = False,
) -> Group:
    """As ``make_group``, its weights rounded."""
    plain = make_group(widths, k, dtype, sparsity, bias=bias)
    matrix = empty_matrix(kind, k, widths, group, dtype, DEVICE, zeros=zero_points)
    generator = torch.Generator().manual_seed(3)
    for i, width in enumerate(widths):
        weight = torch.randn(width, k, generator=generator) / math.sqrt(k)
        weight *= torch.rand(width, 1, generator=generator) + 0.5
        if kind == "fp8":
            part = quantise_fp8(weight)
        else:
            part = (quantise_int4 if kind == "int4" else quantise_int8)(weight, group=group, zero_points=zero_points)
        put_columns(matrix, i, part.codes, part.scales, part.zeros)
    # Codes of columns that do not exist: whatever stands there must not show.
    poisoned = matrix.data.view(torch.uint8)
    for i, width in enumerate(widths):
        per_byte = 2 if kind == "int4" else 1
        poisoned[:, -(-(matrix.first(i) + width) // per_byte) : matrix.first(i + 1) // per_byte] = 0x5A
    return replace(plain, matrix=matrix)


def exact_twin(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``twin``, with the numbers that the codes stand for, to float32."""
    wide = torch.empty(group.in_features, group.out_features, device=DEVICE)
    return twin(x, replace(group, matrix=plain_matrix(widen(group.matrix, None, wide), group.widths)))


@pytest.mark.parametrize(("kind", "group", "zeros"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_products_of_codes_are_the_twins(kind, group, zeros, dtype, batch):
    x = rows(batch, 192, dtype)
    coded = coded_group(kind, group, zeros, (100, 37, 10), 192, dtype, 0.5, bias=True)
    assert_close(sparse_gemv(x, coded, TILES[1 if batch < 3 else 5]), exact_twin(x, coded), dtype)


@pytest.mark.parametrize(("kind", "group", "zeros"), [KINDS[1], KINDS[2]])
@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_all_channels_and_none(kind, group, zeros, sparsity):
    coded = coded_group(kind, group, zeros, (70,), 128, torch.float16, sparsity, bias=True)
    x = rows(1, 128, torch.float16)
    assert_close(sparse_gemv(x, coded, TILES[1]), exact_twin(x, coded), torch.float16)


@pytest.mark.parametrize(("kind", "group", "zeros"), [("int4", 7, True), ("int8", None, False), ("fp8", None, False)])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_odd_shapes_are_the_twins(kind, group, zeros, dtype, batch):
    coded = coded_group(kind, group, zeros, (33, 5), 77, dtype, 0.5, bias=True)
    x = rows(batch, 77, dtype)
    tile = TILES[1 if batch < 3 else 5]
    assert_close(sparse_gemv(x, coded, tile), exact_twin(x, coded), dtype)


# Warps that read 4, 8 and 16 bytes a lane; one turn of steps on its way and several; every way to add up. With a byte
# a code the last would be 32 bytes a lane: no program for the tensor cores, and any other spills and may take more
# shared memory than there is.
PACKED = [
    GemvTile(256, 16, 3, 4, chunk=128, unroll=1),
    GemvTile(512, 16, 2, 4, stages=2, chunk=16, unroll=2, pollers=2),
    GemvTile(512, 16, 4, 2, stages=3, chunk=64, unroll=4, trigger=2),
]


@pytest.mark.skipif(INTERPRETED, reason="interpreted, there are no tensor cores")
@pytest.mark.parametrize(("kind", "group", "zeros"), KINDS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("widths", "k", "sparsity"),
    [((300, 37, 60), 384, 0.5), ((1024, 256), 1024, 0.0), ((700,), 640, 1.0), ((512, 512), 1216, 0.7)],
)
def test_products_on_the_tensor_cores_are_the_twins(kind, group, zeros, dtype, batch, widths, k, sparsity):
    coded = coded_group(kind, group, zeros, widths, k, dtype, sparsity, bias=True)
    x = rows(batch, k, dtype)
    for tile in PACKED if kind == "int4" else PACKED[:2]:
        assert isinstance(program_lists(coded.layout, tile, batch), PackedLists)
        assert_close(sparse_gemv(x, coded, tile), exact_twin(x, coded), dtype)
    if kind != "int4":
        assert not isinstance(program_lists(coded.layout, PACKED[2], batch), PackedLists)


@pytest.mark.quick
@pytest.mark.parametrize(("group", "zeros"), [(64, True), (64, False), (128, True), (128, False)])
def test_a_product_of_four_bits_is_the_twins(group, zeros):
    coded = coded_group("int4", group, zeros, (64, 20), 256, torch.float16, 0.5, bias=True)
    x = rows(1, 256, torch.float16)
    assert_close(sparse_gemv(x, coded, TILES[1]), exact_twin(x, coded), torch.float16)


def test_float32_activations_are_added_up_in_float64():
    # A code times a scale is exact in float64, and rounded to float32 in what the twin multiplies by.
    coded = coded_group("int4", 64, True, (64, 37), 192, torch.float32, 0.5, bias=True)
    x = rows(1, 192, torch.float32)
    torch.testing.assert_close(sparse_gemv(x, coded, TILES[1]).double(), exact_twin(x, coded), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "group", "zeros"), [KINDS[1], KINDS[2]])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch", [1, 5])
def test_poison_does_not_show_and_launches_leave_no_trace(kind, group, zeros, dtype, batch):
    coded = coded_group(kind, group, zeros, (72,), 128, dtype, 0.5)
    x = rows(batch, 128, activation_dtype(dtype))
    tile = replace(TILES[1 if batch < 3 else 5], pollers=1)
    scratch = Scratch(DEVICE, dtype)
    scratch.reserve(coded, tile, batch)
    scratch.value.fill_(float("nan"))
    scratch.index.fill_(2**30)
    out = torch.full((batch, 72), float("nan"), dtype=x.dtype, device=DEVICE)
    for _ in range(2):
        launch_gemv(coded, x, out, scratch, tile, batch=batch)
        assert_close(out, exact_twin(x, coded), dtype)
    assert (scratch.awaited == NOTHING).all()
