"""How much memory there is, and how much was used."""

from __future__ import annotations

import sys

import torch

from wisparse.formats.architectures import ModelConfig
from wisparse.kernels.precision import activation_dtype

from .cache import bytes_per_position

__all__ = ["available_bytes", "default_max_seq_len", "peak_bytes"]

# The cache may take this share of the memory that the weights leave free.
_CACHE_SHARE = 0.25
_FEWEST_POSITIONS = 256


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device; of the machine for the CPU (on Linux: what the kernel calls
    available; elsewhere 8 GB are assumed)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 8 << 30


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
