"""Keys and values of the positions seen so far; of recurrent blocks, their state instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from wisparse.formats.errors import ResourceError, first_line
from wisparse.formats.model_config import ModelConfig

# torch's messages where the error has no type of its own.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one position of one slot takes over all blocks."""
    return 2 * sum(block.kv_size for block in config.blocks if not block.recurrent) * dtype.itemsize


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Raise ResourceError for what torch raises when a device has no memory left."""
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


@dataclass(frozen=True)
class DeltaState:
    """What one recurrent block remembers of one sequence."""

    inputs: Tensor  # (taps - 1, mixed_size), the convolution's last inputs, zero before the first position
    state: Tensor  # (value_heads, key_dim, value_dim) float32

    def take(self, other: DeltaState) -> None:
        self.inputs.copy_(other.inputs)
        self.state.copy_(other.state)


class KVCache:
    """Some slots of ``length`` positions, which can become more."""

    def __init__(
        self, config: ModelConfig, slots: int, length: int, device: torch.device, dtype: torch.dtype, buffers: int = 1
    ) -> None:
        """``buffers``: 1, or 2: the state after p positions then lies in buffer p % 2, beside that of p - 1."""
        self._buffers = buffers
        # Block -> keys and values, each (slots, num_kv_heads, length, head_dim), uninitialised beyond lengths.
        self.attention: dict[int, tuple[Tensor, Tensor]] = {}
        # Recurrent block -> its states, each tensor of a DeltaState with (buffers, slots) in front.
        self.recurrent: dict[int, DeltaState] = {}
        self.lengths = [0] * slots  # positions filled in each slot
        self.length = length  # positions that each has room for
        delta, copies = config.delta_net, (buffers, slots)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        size = bytes_per_position(config, dtype) * slots * length / 1e9
        with memory_errors(device, f"for a cache of {size:.1f} GB, {slots} x {length} positions"):
            for index, block in enumerate(config.blocks):
                if block.recurrent and delta is not None:
                    heads = delta.value_heads, delta.key_dim, delta.value_dim
                    self.recurrent[index] = DeltaState(
                        torch.zeros(*copies, delta.taps - 1, delta.mixed_size, dtype=dtype, device=device),
                        torch.zeros(*copies, *heads, dtype=accumulator, device=device),
                    )
                else:
                    shape = (2, slots, block.num_kv_heads, length, block.head_dim)
                    keys, values = torch.empty(shape, dtype=dtype, device=device)
                    self.attention[index] = keys, values

    def grow(self, length: int) -> None:
        """Make room for ``length`` positions in each slot: block by block, as each is copied to where there is room."""
        filled = max(self.lengths)
        for index, (keys, values) in self.attention.items():
            slots, heads, _, width = keys.shape
            wider = keys.new_empty(2, slots, heads, length, width)
            for old, new in zip((keys, values), wider, strict=True):
                new[:, :, :filled] = old[:, :, :filled]
            self.attention[index] = wider[0], wider[1]
            del keys, values, old
            if wider.is_cuda:
                torch.cuda.empty_cache()  # what was freed is too small for the next block
        self.length = length

    def begin(self, slot: int, start: int) -> None:
        """Before a slot's positions from ``start`` on are read; ``lengths`` is 0 until the caller sets it."""
        if start == 0:
            for block in self.recurrent:
                state = self.state(block, slot, 0)
                state.inputs.zero_()
                state.state.zero_()
        self.lengths[slot] = 0

    def write(self, block: int, slot: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values (num_kv_heads, T, head_dim) at ``start``; returns the slot's own up to start + T."""
        stop = start + keys.shape[1]
        own_keys, own_values = (tensor[slot] for tensor in self.attention[block])
        own_keys[:, start:stop] = keys
        own_values[:, start:stop] = values
        return own_keys[:, :stop], own_values[:, :stop]

    def state(self, block: int, slot: int, position: int) -> DeltaState:
        """Where a recurrent block's state after that many positions of a slot lies."""
        states, buffer = self.recurrent[block], position % self._buffers
        return DeltaState(states.inputs[buffer, slot], states.state[buffer, slot])

    def moving(self, block: int, slot: int, start: int, stop: int) -> DeltaState:
        """The state after ``start`` positions, in the place of the one after ``stop``, for the caller to update."""
        target = self.state(block, slot, stop)
        if (stop - start) % self._buffers:
            target.take(self.state(block, slot, start))
        return target

    def copy(self, source: int, target: int, length: int) -> None:
        """Fill ``target`` with the first ``length`` positions of ``source``."""
        for pair in self.attention.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]
        for block in self.recurrent:
            self.state(block, target, length).take(self.state(block, source, length))
        self.lengths[target] = length
