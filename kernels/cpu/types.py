"""Names of the types that the CPU kernels know, and memory aligned for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["aligned_empty", "type_name"]

_CACHE_LINE = 64
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def type_name(dtype: torch.dtype) -> str:
    """The part of a region's name that tells its floating type.

    Raises:
        TypeError: not one of float32, bfloat16 and float16.
    """
    if dtype not in _NAMES:
        raise TypeError(f"expected float32, bfloat16 or float16, found {dtype}")
    return _NAMES[dtype]


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory that starts on a cache line, so that rows of whole lines do."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = torch.empty(size + _CACHE_LINE - 1, dtype=torch.uint8)
    skip = -buffer.data_ptr() % _CACHE_LINE
    return buffer[skip : skip + size].view(dtype).view(shape)
