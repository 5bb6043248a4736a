"""Keys and values of the positions seen so far; of recurrent blocks, their state instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wisparse.formats.errors import ResourceError, first_line
from wisparse.formats.model_config import ModelConfig

# torch's messages where the error has no type of its own.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
# What keys and values can be stored as beside the decoder's dtype, and the largest code.
_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def bytes_per_position(config: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> int:
    """Bytes that one position of one slot takes over all blocks that have keys and values of their own."""
    if kv_cache_dtype == "auto":
        return 2 * config.kv_size * dtype.itemsize
    blocks = [block for block in config.blocks if not block.recurrent and block.kv_from is None]
    return 2 * sum(block.kv_size + block.num_kv_heads * torch.float32.itemsize for block in blocks)


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one state of one slot, over all recurrent blocks."""
    delta = config.delta_net
    if delta is None:
        return 0
    inputs, state = (delta.taps - 1) * delta.mixed_size, delta.value_heads * delta.key_dim * delta.value_dim
    return sum(block.recurrent for block in config.blocks) * (inputs * dtype.itemsize + 4 * state)


class Stored(NamedTuple):
    """Keys and values of an attention block, uninitialised beyond each slot's length."""

    keys: Tensor  # (slots, num_kv_heads, length, head_dim): the decoder's dtype, or codes
    values: Tensor
    key_scales: Tensor | None = None  # of codes: (slots, num_kv_heads, length) float32
    value_scales: Tensor | None = None


def quantise(x: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor]:
    """Codes of vectors x (..., head_dim) and a float32 scale (...) for each: x is about codes * scale."""
    dtype, limit = _CODES[kv_cache_dtype]
    largest = x.float().abs().amax(-1)
    codes = x.float() * (limit / largest.clamp(min=1e-30))[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), largest * (1.0 / limit)


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
        self,
        config: ModelConfig,
        slots: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
        buffers: int = 1,
    ) -> None:
        """``kv_cache_dtype``: what keys and values are stored as, one of ``KV_CACHE_DTYPES``. ``buffers``: a recurrent
        block's states after so many successive positions are kept: that after p positions in buffer p % buffers."""
        self.buffers, self._dtype, self._kv_cache_dtype = buffers, dtype, kv_cache_dtype
        self.attention: dict[int, Stored] = {}  # by block that has keys and values of its own
        # Recurrent block -> its states, each tensor of a DeltaState with (buffers, slots) in front.
        self.recurrent: dict[int, DeltaState] = {}
        self.lengths = [0] * slots  # positions filled in each slot
        self.length = length  # positions that each has room for
        delta, copies = config.delta_net, (buffers, slots)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        each = bytes_per_position(config, dtype, kv_cache_dtype) * length + buffers * state_bytes(config, dtype)
        size = slots * each / 1e9
        with memory_errors(device, f"for a cache of {size:.1f} GB, {slots} x {length} positions"):
            for index, block in enumerate(config.blocks):
                if block.recurrent and delta is not None:
                    heads = delta.value_heads, delta.key_dim, delta.value_dim
                    self.recurrent[index] = DeltaState(
                        torch.zeros(*copies, delta.taps - 1, delta.mixed_size, dtype=dtype, device=device),
                        torch.zeros(*copies, *heads, dtype=accumulator, device=device),
                    )
                elif block.kv_from is None:
                    shape = (2, slots, block.num_kv_heads, length, block.head_dim)
                    if kv_cache_dtype == "auto":
                        self.attention[index] = Stored(*torch.empty(shape, dtype=dtype, device=device))
                    else:
                        codes = torch.empty(shape, dtype=_CODES[kv_cache_dtype][0], device=device)
                        self.attention[index] = Stored(*codes, *torch.empty(shape[:-1], device=device))

    def grow(self, length: int) -> None:
        """Make room for ``length`` positions in each slot: block by block, as each is copied to where there is room."""
        filled = max(self.lengths)
        for index in self.attention:
            wider = []
            for old in self.attention[index]:
                if old is not None:
                    wider.append(old.new_empty(*old.shape[:2], length, *old.shape[3:]))
                    wider[-1][:, :, :filled] = old[:, :, :filled]
            self.attention[index], old = Stored(*wider), None
            if wider[0].is_cuda:
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

    def write(self, block: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values (num_kv_heads, T, head_dim) at ``start``."""
        stop, stored = start + keys.shape[1], self.attention[block]
        for new, numbers, scales in zip((keys, values), stored[:2], stored[2:], strict=True):
            if scales is None:
                numbers[slot, :, start:stop] = new
            else:
                numbers[slot, :, start:stop], scales[slot, :, start:stop] = quantise(new, self._kv_cache_dtype)

    def read(self, block: int, slot: int, stop: int) -> tuple[Tensor, Tensor]:
        """A slot's keys and values up to ``stop``, as they are stored."""
        own, stored = [], self.attention[block]
        for numbers, scales in zip(stored[:2], stored[2:], strict=True):
            if scales is None:
                own.append(numbers[slot, :, :stop])
            else:
                own.append((numbers[slot, :, :stop].float() * scales[slot, :, :stop, None]).to(self._dtype))
        return own[0], own[1]

    def state(self, block: int, slot: int, position: int) -> DeltaState:
        """Where a recurrent block's state after that many positions of a slot lies."""
        states, buffer = self.recurrent[block], position % self.buffers
        return DeltaState(states.inputs[buffer, slot], states.state[buffer, slot])

    def moving(self, block: int, slot: int, start: int, stop: int) -> DeltaState:
        """The state after ``start`` positions, in the place of the one after ``stop``, for the caller to update."""
        target = self.state(block, slot, stop)
        if (stop - start) % self.buffers:
            target.take(self.state(block, slot, start))
        return target

    def copy(self, source: int, target: int, length: int) -> None:
        """Fill ``target`` with the first ``length`` positions of ``source``."""
        for stored in self.attention.values():
            for tensor in stored:
                if tensor is not None:
                    tensor[target, :, :length] = tensor[source, :, :length]
        for block in self.recurrent:
            self.state(block, target, length).take(self.state(block, source, length))
        self.lengths[target] = length
