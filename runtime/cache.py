"""Keys and values of the positions seen so far, allocated once.

Memory of one position: ``2 * num_blocks * num_kv_heads * head_dim`` numbers (``bytes_per_position``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wisparse.formats.errors import ResourceError
from wisparse.formats.model.model_config import ModelConfig

__all__ = ["KVCache", "bytes_per_position"]


def bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one position of one slot takes over all blocks."""
    return 2 * config.num_blocks * config.kv_size * dtype.itemsize


class KVCache:
    """``max_batch`` slots of ``max_seq_len`` positions.

    Attributes:
        keys, values: (num_blocks, max_batch, num_kv_heads, max_seq_len, head_dim), uninitialised beyond ``lengths``.
        lengths: positions filled, slot by slot.
    """

    def __init__(
        self, config: ModelConfig, max_batch: int, max_seq_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.num_blocks, max_batch, config.num_kv_heads, max_seq_len, config.head_dim)
        try:
            self.keys = torch.empty(shape, dtype=dtype, device=device)
            self.values = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # torch's CPU allocator raises a plain RuntimeError
            size = bytes_per_position(config, dtype) * max_batch * max_seq_len
            raise ResourceError(
                f"no memory for a cache of {size / 1e9:.1f} GB ({max_batch} x {max_seq_len} positions): "
                "load with a smaller max_seq_len or max_batch"
            ) from error
        self.lengths = [0] * max_batch

    def write(self, block: int, slot: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``keys`` and ``values`` (num_kv_heads, T, head_dim) at ``start``; ``lengths`` is the caller's.

        Returns:
            The slot's keys and values up to the end of what was written, (num_kv_heads, start + T, head_dim).
        """
        stop = start + keys.shape[1]
        self.keys[block, slot, :, start:stop] = keys
        self.values[block, slot, :, start:stop] = values
        return self.keys[block, slot, :, :stop], self.values[block, slot, :, :stop]

    def copy(self, source: int, target: int, length: int) -> None:
        """Fill ``target`` with the first ``length`` positions of ``source``."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]
        self.lengths[target] = length
