"""How much memory a model needs, how much was used, and what is said where there is not enough."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from wisparse.formats.errors import ResourceError, first_line
from wisparse.formats.machine.memory import available_bytes
from wisparse.formats.model.expected import LM_HEAD, expected_tensors
from wisparse.formats.model.model_config import ModelConfig
from wisparse.formats.model.weight_types import WEIGHT_TYPES, code_bytes
from wisparse.kernels.precision import activation_dtype

from .cache import bytes_per_position

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle
    from wisparse.formats.weights.checkpoint import StoredWeight

__all__ = ["default_max_seq_len", "memory_errors", "peak_bytes", "weight_bytes"]

# The cache may take this share of the memory that the weights leave free.
_CACHE_SHARE = 0.25
_FEWEST_POSITIONS = 256
# How torch says it where the error has no type of its own.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def weight_bytes(
    bundle: Bundle, dtype: torch.dtype, weights: str, keeps: Callable[[StoredWeight], bool] = lambda _: False
) -> int:
    """What a bundle's weights take in memory, matrices held as ``weights`` says, all else as numbers of ``dtype``. The
    files may hold another type.

    Args:
        keeps: whether a weight that is stored in codes stays so, as of a `decoder.Decoder`.
    """
    chosen = WEIGHT_TYPES[weights]
    total = 0
    for name, shape in expected_tensors(bundle.config).items():
        kind = "native" if "embed" in name else chosen.head if name == LM_HEAD else weights
        stored = bundle.checkpoint.quantised.get(name)
        if stored is not None and kind in ("native", stored.packing.kind) and keeps(stored):
            packing = stored.packing
            bits = 4 if packing.kind == "int4" else 8
            total += code_bytes(bits, shape, packing.group, zero_points=packing.zero_points)
        else:
            total += WEIGHT_TYPES[kind].nbytes(shape, dtype)
    return total


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Turn what torch raises when a device has no memory left into a sentence.

    Raises:
        ResourceError: there is not enough.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = str(error).lower()
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(one in words for one in _NO_MEMORY):
            raise
        raise ResourceError(
            f"not enough memory on {device} {doing} ({first_line(error)}): end what else uses it, choose another "
            "device, or load with a smaller max_seq_len or max_batch"
        ) from error


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: of the device on a GPU, else resident memory of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def default_max_seq_len(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_batch: int, weight_bytes: int
) -> int:
    """The model's context, or as many positions as fit into a quarter of the memory that the weights leave free.

    At least 256, and rounded down to a multiple of 256 unless it is the model's context.
    """
    if device.type == "cuda":
        dtype = activation_dtype(dtype)
    free = max(available_bytes(device) - weight_bytes, 0)
    fitting = int(free * _CACHE_SHARE) // (bytes_per_position(config, dtype) * max_batch)
    if fitting >= config.max_position_embeddings:
        return config.max_position_embeddings
    rounded = max(fitting // _FEWEST_POSITIONS * _FEWEST_POSITIONS, _FEWEST_POSITIONS)
    return min(rounded, config.max_position_embeddings)
