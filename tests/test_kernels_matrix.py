"""Weights in codes as the GPU's products read them: what is put in is what comes out."""

from __future__ import annotations

import pytest
import torch

from wisparse.formats.weight_types import QuantizedMatrix, quantise_fp8, quantise_int4, quantise_int8
from wisparse.kernels.gpu.weights import COLUMN_BLOCK, DeviceWeight, dequantize, empty_weight, store_columns

WIDTHS = (37, 300, 8)
K = 30  # three groups of ten; no multiple of what a word holds


def quantised(kind: str, width: int, seed: int, group: int | None, *, zero_points: bool = False) -> QuantizedMatrix:
    weight = torch.randn(width, K, generator=torch.Generator().manual_seed(seed))
    if kind == "fp8":
        return quantise_fp8(weight)
    return (quantise_int4 if kind == "int4" else quantise_int8)(weight, group=group, zero_points=zero_points)


def filled(kind: str, parts: list[QuantizedMatrix], group: int | None, *, zeros: bool) -> DeviceWeight:
    weight = empty_weight(kind, K, WIDTHS, group, torch.bfloat16, "cpu", zeros=zeros)
    for i, part in enumerate(parts):
        store_columns(weight, i, part.codes, part.scales, part.zeros)
    return weight


@pytest.mark.parametrize(
    ("kind", "group", "zeros"),
    [("int4", 10, False), ("int4", 10, True), ("int4", None, True), ("int8", None, False), ("int8", 10, True),
     ("fp8", None, False)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_put_in_is_dequantized_as_its_file_says(kind, group, zeros, dtype, monkeypatch):
    monkeypatch.setattr("wisparse.kernels.gpu.weights._PIECE", 1000)  # several pieces
    parts = [quantised(kind, width, i, group, zero_points=zeros) for i, width in enumerate(WIDTHS)]
    weight = filled(kind, parts, group, zeros=zeros)
    expected = [part.dequantise(dtype) for part in parts]
    for i, one in enumerate(expected):
        out = torch.full((WIDTHS[i], K), float("nan"), dtype=dtype)
        assert torch.equal(dequantize(weight, i, out.T), one.T)
        assert torch.equal(out, one)
    together = torch.empty(K, sum(WIDTHS), dtype=dtype)
    assert torch.equal(dequantize(weight, None, together), torch.cat(expected).T)


def test_no_block_of_columns_spans_two_projections():
    parts = [quantised("int4", width, i, None) for i, width in enumerate(WIDTHS)]
    weight = filled("int4", parts, None, zeros=False)
    assert [weight.first(i) for i in range(4)] == [0, COLUMN_BLOCK, 3 * COLUMN_BLOCK, 4 * COLUMN_BLOCK]
    assert weight.data.shape == (K, 4 * COLUMN_BLOCK // 8)
    assert weight.scales.shape == (1, 4 * COLUMN_BLOCK)
    assert not weight.scales[:, 37:COLUMN_BLOCK].any()
    assert weight.num_bytes == K * 4 * COLUMN_BLOCK // 2 + 4 * 4 * COLUMN_BLOCK


def test_unquantized_weights_are_laid_side_by_side():
    fused = empty_weight("none", K, WIDTHS, None, torch.float32, "cpu")
    weights = [torch.randn(width, K) for width in WIDTHS]
    for i, weight in enumerate(weights):
        store_columns(fused, i, weight)
    assert torch.equal(dequantize(fused, None, torch.empty(K, sum(WIDTHS))), torch.cat(weights).T)


def test_a_scale_may_serve_several_groups_and_one_projection_have_no_zero_points():
    parts = [quantised("int4", width, i, 10, zero_points=i == 1) for i, width in enumerate(WIDTHS)]
    rows = quantised("int4", 8, 7, None)
    weight = filled("int4", [*parts[:2], rows], 10, zeros=True)
    expected = torch.cat([part.dequantise(torch.bfloat16) for part in (*parts[:2], rows)]).T
    assert torch.equal(dequantize(weight, None, torch.empty(K, sum(WIDTHS), dtype=torch.bfloat16)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(37, K, dtype=torch.uint8)}, r"codes: expected \(37, 15\), found \(37, 30\)"),
        ({"scales": torch.ones(37, 2)}, r"scales: expected \(37, 3\), found \(37, 2\)"),
        ({"scales": None}, r"scales: expected \(37, 3\), found None"),
        ({"zeros": torch.zeros(37, 3)}, "zeros: the weight was made without zero points"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    weight = empty_weight("int4", K, WIDTHS, 10, torch.bfloat16, "cpu")
    given = {"codes": torch.zeros(37, 15, dtype=torch.uint8), "scales": torch.ones(37, 3), "zeros": None}
    with pytest.raises(ValueError, match=message):
        store_columns(weight, 0, **{**given, **change})


@pytest.mark.parametrize(
    ("kind", "group", "message"), [("int3", None, "quant: expected none"), ("int4", 7, "expected a divisor of 30")]
)
def test_no_such_weight(kind, group, message):
    with pytest.raises(ValueError, match=message):
        empty_weight(kind, K, WIDTHS, group, torch.bfloat16, "cpu")
