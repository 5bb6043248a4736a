"""Keys and values of the positions seen so far; of recurrent blocks, their state instead.

Slots have addresses for their longest sequence and take memory for it in pages, as they grow, out of so many that they
share (as vAttention, arXiv 2405.04437). On a GPU pages are mapped; elsewhere they are counted, and the operating system
takes memory where it is first written.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wisparse.formats.errors import ResourceError, first_line
from wisparse.formats.model_config import Block, ModelConfig

log = logging.getLogger(__name__)

# torch's messages where the error has no type of its own.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
# What keys and values can be stored as beside the decoder's dtype, and the largest code.
_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
_PAGE_POSITIONS = 16  # of the largest block in a page that is only counted, as many as in a block of vLLM
# Bytes of pages that exist, by device: torch's allocator does not know of them.
mapped_bytes: Counter[torch.device] = Counter()


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


class Paging(NamedTuple):
    """How a cache's memory is divided. A slot takes whole pages in each block."""

    sizes: tuple[int, ...]  # bytes of a position, of each block that has keys and values
    page_bytes: int
    least: int = 0  # pages that the first slot always holds

    def pages(self, positions: int) -> int:
        """What so many positions of a slot take."""
        return sum(-(-positions * size // self.page_bytes) for size in self.sizes)

    def positions(self, pages: int, most: int) -> int:
        """That so many pages hold of one slot, up to ``most``, beside what the first slot holds."""
        return bisect.bisect_right(range(1, most + 1), pages - self.least, key=self.pages)


def paging_of(config: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str, page_bytes: int | None) -> Paging:
    """``page_bytes``: of memory that is mapped; None: pages are only counted."""
    kept = [block for block in config.blocks if not block.recurrent and block.kv_from is None]
    sizes = tuple(_padded(sum(_padded(size, 16) for _, size in _parts(one, dtype, kv_cache_dtype)), 32) for one in kept)
    if page_bytes is None:
        return Paging(sizes, _PAGE_POSITIONS * max(sizes, default=1))
    # Triton and torch ask the driver about the first address of each block.
    return Paging(sizes, page_bytes, Paging(sizes, page_bytes).pages(1))


def _parts(block: Block, dtype: torch.dtype, kv_cache_dtype: str) -> list[tuple[torch.dtype, int]]:
    """Type and bytes of what a position holds: keys, values, and of codes the scales of both."""
    coded = kv_cache_dtype != "auto"
    kind = _CODES[kv_cache_dtype][0] if coded else dtype
    scales = [(torch.float32, 4 * block.num_kv_heads)] * 2 if coded else []
    return [(kind, block.kv_size * kind.itemsize)] * 2 + scales


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Pages:
    """Addresses for ``size`` bytes on a device, of which pages are mapped. Here, where kernels are interpreted, all are."""

    page_bytes = 1 << 14
    taken = 0  # pages that exist

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def tensor(self) -> Tensor:
        """(size,) uint8 over all of it; the first page must be mapped."""
        return self._bytes

    def map(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Map pages at (offset, count); False, and nothing is mapped, if the device has no memory for them."""
        return True

    def unmap(self, ranges: Sequence[tuple[int, int]]) -> None:
        return None

    def close(self) -> None:
        return None


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
    """Some slots of up to ``length`` positions, which share so many pages of memory."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
        buffers: int = 1,
        *,
        memory: type[Pages] | None = None,
        pages: int | None = None,
    ) -> None:
        """``kv_cache_dtype``: what keys and values are stored as, one of ``KV_CACHE_DTYPES``. ``buffers``: a recurrent
        block's states after so many successive positions are kept: that after p positions in buffer p % buffers.
        ``memory``: where a position's keys, values and scales lie side by side; None: in plain tensors, head by head.
        ``pages``: that all slots may hold together; None: as many as they can."""
        self.buffers, self._dtype, self._kv_cache_dtype = buffers, dtype, kv_cache_dtype
        self.attention: dict[int, Stored] = {}  # by block that has keys and values of its own
        # Recurrent block -> its states, each tensor of a DeltaState with (buffers, slots) in front.
        self.recurrent: dict[int, DeltaState] = {}
        self.lengths = [0] * slots  # positions filled in each slot
        self.length = length  # positions that each can have
        kept = {i: block for i, block in enumerate(config.blocks) if not block.recurrent and block.kv_from is None}
        self.paging = paging = paging_of(config, dtype, kv_cache_dtype, None if memory is None else memory.page_bytes)
        self.pages = slots * paging.pages(length) if pages is None else pages
        self.free, self.taken = self.pages, [0] * slots  # pages, those that are only claimed included
        self.held = [0 if kept else length] * slots  # positions that each slot has memory for
        spans = [_padded(length * size, paging.page_bytes) for size in paging.sizes]  # of a slot
        self._regions = [
            (slots * sum(spans[:i]), span, size) for i, (span, size) in enumerate(zip(spans, paging.sizes, strict=True))
        ]
        delta, copies = config.delta_net, (buffers, slots)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        with memory_errors(device, f"for a cache of {slots} x {length} positions"):
            self._memory = memory(slots * sum(spans), device) if memory is not None and kept else None
            whole = None
            if self._memory is not None:
                if not self.grow(0, 1):
                    raise ResourceError(f"no memory on {device} for the first pages of a cache")
                whole = self._memory.tensor()
            for index, block in enumerate(config.blocks):
                if block.recurrent and delta is not None:
                    heads = delta.value_heads, delta.key_dim, delta.value_dim
                    self.recurrent[index] = DeltaState(
                        torch.zeros(*copies, delta.taps - 1, delta.mixed_size, dtype=dtype, device=device),
                        torch.zeros(*copies, *heads, dtype=accumulator, device=device),
                    )
            for (index, block), (at, span, size) in zip(kept.items(), self._regions, strict=True):
                tensors = []
                for kind, nbytes in _parts(block, dtype, kv_cache_dtype):
                    width = nbytes // kind.itemsize // block.num_kv_heads  # numbers of a head
                    shape = slots, block.num_kv_heads, length, width
                    if whole is None:
                        tensors.append(torch.empty(shape, dtype=kind, device=device))
                    else:
                        strides = span // kind.itemsize, width, size // kind.itemsize, 1
                        tensors.append(whole.view(kind).as_strided(shape, strides, at // kind.itemsize))
                    at += _padded(nbytes, 16)
                self.attention[index] = Stored(*tensors[:2], *(scales[..., 0] for scales in tensors[2:]))

    def __str__(self) -> str:
        size, held = self.pages * self.paging.page_bytes / 1e9, self.pages / max(self.paging.pages(self.length), 1)
        return f"up to {size:.1f} GB, {int(held * self.length):,} positions"

    def too_little(self, positions: int) -> ResourceError:
        """What to raise where a sequence has no room for so many positions."""
        return ResourceError(
            f"no memory for {positions} positions of a sequence: all of the cache, {self}, holds "
            f"{self.paging.positions(self.pages, self.length)} of one; end what else uses the device, or load with a smaller max_batch or max_seq_len"
        )

    def lacking(self, slot: int, positions: int) -> int:
        """Pages that would have to be free for so many positions of a slot, and are not."""
        return self.paging.pages(positions) - self.taken[slot] - self.free

    def spare(self, slot: int) -> int:
        """Pages that ``release`` of a slot would free."""
        return self.taken[slot] - (self.paging.least if slot == 0 else 0)

    def claim(self, slot: int, positions: int) -> bool:
        """Set pages aside for so many positions of a slot; False, and nothing changes, if too few are free."""
        more = self.paging.pages(positions) - self.taken[slot]
        if more > max(self.free, 0):
            return False
        if more > 0:
            self.free -= more
            self.taken[slot] += more
        return True

    def grow(self, slot: int, positions: int) -> bool:
        """Have memory for so many positions of a slot; False if too few pages are free, or the device has none left."""
        if positions <= self.held[slot]:
            return True
        if not self.claim(slot, positions):
            return False
        if self._memory is not None and not self._memory.map(self._ranges(slot, self.held[slot], positions)):
            self.pages = self._memory.taken
            self.free = self.pages - sum(self.taken)  # below 0 until some are released
            size = self.pages * self.paging.page_bytes / 1e9
            log.warning("others have taken the device's memory: keys and values have %.1f GB from now on", size)
            return False
        self.held[slot] = self._room(positions)
        return True

    def release(self, slot: int) -> None:
        """Give a slot's pages back: it holds nothing any more."""
        kept = 1 if slot == 0 and self.paging.least else 0
        if self._memory is not None:
            self._memory.unmap(self._ranges(slot, kept, self.held[slot]))
        elif self.held[slot]:
            for stored in self.attention.values():
                for tensor in stored:
                    if tensor is not None and tensor.device.type == "cpu":
                        for head in tensor[slot]:
                            _give_back(head)
        self.free += self.spare(slot)
        self.taken[slot] -= self.spare(slot)
        self.held[slot], self.lengths[slot] = self._room(kept), 0

    def _room(self, positions: int) -> int:
        """Positions that the pages for so many have room for."""
        page = self.paging.page_bytes
        return min((self.length, *(-(-positions * size // page) * page // size for size in self.paging.sizes)))

    def _ranges(self, slot: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Offset and number of the pages for a slot's positions from ``start`` to ``stop`` in each block."""
        page = self.paging.page_bytes
        found = []
        for at, span, size in self._regions:
            first, last = -(-start * size // page), -(-stop * size // page)
            found.append((at + slot * span + first * page, last - first))
        return [(offset, count) for offset, count in found if count > 0]

    def close(self) -> None:
        """Give all memory back; nothing may read or write it any more."""
        self.attention.clear()
        if self._memory is not None:
            self._memory.close()

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


def _give_back(x: Tensor) -> None:
    """Let the operating system take the memory of a contiguous tensor until it is written again, where it knows how."""
    page = mmap.PAGESIZE
    first, last = -(-x.data_ptr() // page) * page, (x.data_ptr() + x.nbytes) // page * page
    if sys.platform == "linux" and last > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
