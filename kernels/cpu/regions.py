"""The regions: what ``threads.launch`` can run, each ``void region(int64 *parameters)``, compiled on first use.

A region is executed once by every thread of a team. They are written out one by one, because a function made in a
closure is never found in numba's disk cache.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from .rearrange import dequantize, pack, quantize, transpose
from .step import step

__all__ = ["REGIONS"]

_MOST_FIELDS = 64  # at least as many parameters as any region has


def _step_float32(p):
    step(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _step_bfloat16(p):
    step(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _step_float16(p):
    step(carray(p, (_MOST_FIELDS,)), np.int16(0))


def _transpose_float32(p):
    transpose(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _transpose_bfloat16(p):
    transpose(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _quantize_float32(p):
    quantize(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _quantize_bfloat16(p):
    quantize(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _quantize_float16(p):
    quantize(carray(p, (_MOST_FIELDS,)), np.int16(0))


def _pack_int4(p):
    pack(carray(p, (_MOST_FIELDS,)))


def _dequantize_float32(p):
    dequantize(carray(p, (_MOST_FIELDS,)), np.float32(0))


def _dequantize_bfloat16(p):
    dequantize(carray(p, (_MOST_FIELDS,)), np.uint16(0))


def _dequantize_float16(p):
    dequantize(carray(p, (_MOST_FIELDS,)), np.int16(0))


# Name -> what to compile, on first use. The transposition moves bits: two bytes are two bytes.
REGIONS = {
    "step_float32": _step_float32,
    "step_bfloat16": _step_bfloat16,
    "step_float16": _step_float16,
    "transpose_float32": _transpose_float32,
    "transpose_bfloat16": _transpose_bfloat16,
    "transpose_float16": _transpose_bfloat16,
    "quantize_float32": _quantize_float32,
    "quantize_bfloat16": _quantize_bfloat16,
    "quantize_float16": _quantize_float16,
    "pack_int4": _pack_int4,
    "dequantize_float32": _dequantize_float32,
    "dequantize_bfloat16": _dequantize_bfloat16,
    "dequantize_float16": _dequantize_float16,
}
