"""Weights in codes: rounding loses at most half a step, codes stay in range, the stored layout is the stated one."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from wisparse.formats import weight_types
from wisparse.formats.weight_types import (
    QuantizedMatrix,
    pack_int4,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    unpack_int4,
)


def dequantised(matrix: QuantizedMatrix) -> np.ndarray:
    """The definition, number by number, in float64."""
    rows, columns = matrix.shape
    weight = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            g = 0 if matrix.group is None else k // matrix.group
            if matrix.kind == "int4":
                code = int(matrix.codes[n, k // 2]) >> (4 * (k % 2)) & 15
                zero = 8 if matrix.zeros is None else int(matrix.zeros[n, g])
            else:
                code = float(matrix.codes[n, k])
                zero = 0 if matrix.zeros is None else int(matrix.zeros[n, g])
            weight[n, k] = (code - zero) * float(matrix.scales[n, g])
    return weight


@st.composite
def weights(draw: st.DrawFn) -> tuple[torch.Tensor, int | None]:
    groups, group = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    rows = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    weight = torch.randn(rows, groups * group, generator=generator) * 10.0 ** draw(st.integers(-36, 36))
    weight += weight.abs().amax() * draw(st.sampled_from([0.0, 0.0, 0.5, -2.0]))
    weight[:, : draw(st.integers(0, 3))] = 0
    return weight, draw(st.sampled_from([None, group]))


@given(weights(), st.sampled_from([quantise_int8, quantise_int4]), st.booleans(), st.sampled_from([1, 40, 10**6]))
def test_rounding_to_integers_loses_at_most_half_a_step(given_weight, quantise, zero_points, piece):
    weight, group = given_weight
    with patch.object(weight_types, "_CHUNK", piece):
        matrix = quantise(weight, group=group, zero_points=zero_points)
        found = matrix.dequantise(torch.float32)
    np.testing.assert_allclose(found.double().numpy(), dequantised(matrix), rtol=2**-23)
    steps = matrix.scales.double().repeat_interleave(weight.shape[1] // matrix.scales.shape[1], dim=1)
    # A part in 2**18 for the rounding of scale and quotient to float32 before the code is chosen.
    assert ((found.double() - weight.double()).abs() <= steps * (0.5 + 2**-18)).all()
    if matrix.kind == "int8" and not zero_points:
        assert int(matrix.codes.min()) >= -127


@given(weights(), st.booleans())
def test_rounding_to_fp8_loses_at_most_a_sixteenth_of_the_value(given_weight, per_row):
    weight, _ = given_weight
    matrix = quantise_fp8(weight, per_row=per_row)
    found = matrix.dequantise(torch.float32)
    np.testing.assert_allclose(found.double().numpy(), dequantised(matrix), rtol=2**-23)
    # Three bits behind the point; below 2**-6 steps of 2**-9 that no longer shrink.
    bound = torch.maximum(weight.double().abs() / 16, matrix.scales.double() * 2**-10) * (1 + 2**-18)
    assert ((found.double() - weight.double()).abs() <= bound).all()
    assert per_row or len(matrix.scales.unique()) == 1


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_four_bits_are_packed_low_half_first(rows, columns, seed):
    codes = torch.randint(16, (rows, columns), generator=torch.Generator().manual_seed(seed))
    packed = pack_int4(codes)
    assert packed.shape == (rows, (columns + 1) // 2)
    assert [int(packed[0, 0]) & 15, columns > 1 and int(packed[0, 0]) >> 4] == [
        codes[0, 0],
        columns > 1 and codes[0, 1],
    ]
    assert torch.equal(unpack_int4(packed, columns).long(), codes)


def test_scales_are_numbers_of_the_type_they_are_stored_in():
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    for quantise in (quantise_int8, quantise_int4, quantise_fp8):
        for dtype in (torch.bfloat16, torch.float16):
            scales = quantise(weight, scale_dtype=dtype).scales
            assert torch.equal(scales, scales.to(dtype).float())


def test_a_group_of_zeros_is_exactly_zero():
    for zero_points in (False, True):
        for quantise in (quantise_int8, quantise_int4):
            matrix = quantise(torch.zeros(3, 8), group=4, zero_points=zero_points)
            assert (matrix.dequantise(torch.float32) == 0).all()
            assert (matrix.scales == 1).all()
    assert (quantise_fp8(torch.zeros(3, 8)).dequantise(torch.bfloat16) == 0).all()


def test_rows_are_those_rows():
    weight = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    matrix = quantise_int4(weight, group=5, zero_points=True)
    assert torch.equal(matrix.rows(2, 5).dequantise(torch.float32), matrix.dequantise(torch.float32)[2:5])
    assert matrix.nbytes == 7 * 5 + 7 * 2 * 4 + 7 * 2
