"""The KV cache, and the states of recurrent blocks.

Each slot has a contiguous range of virtual addresses for its longest sequence. Memory is allocated in pages from a pool that
all slots share, as a sequence grows (as in vAttention, arXiv 2405.04437). On a GPU pages are mapped explicitly; on a CPU
they are only counted, and the operating system allocates memory at the first write.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import math
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
from wisparse.formats.machine import shown_bytes
from wisparse.formats.model_config import Block, ModelConfig

log = logging.getLogger(__name__)

# In torch's messages for errors that are a plain RuntimeError.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
# Quantized types of keys and values, and the largest code.
_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
_PAGE_POSITIONS = 16  # of the widest block in a page that is only counted; vLLM's block size
# Bytes of created pages by device, which torch.cuda.memory_allocated does not include.
mapped_bytes: Counter[torch.device] = Counter()


def bytes_per_position(config: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> int:
    """Bytes of one position's keys and values in all blocks that have their own."""
    if kv_cache_dtype == "auto":
        return 2 * config.kv_size * dtype.itemsize
    blocks = [block for block in config.blocks if not block.recurrent and block.kv_from is None]
    return 2 * sum(block.kv_size + block.num_kv_heads * torch.float32.itemsize for block in blocks)


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one state of a slot in all recurrent blocks."""
    shapes = [state_shapes(config, block) for block in config.blocks if block.recurrent]
    return sum(math.prod(inputs) * dtype.itemsize + 4 * math.prod(state) for inputs, state in shapes)


def state_shapes(config: ModelConfig, block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the tensors of a block's `RecurrentState`."""
    if config.short_conv is not None and block.mixer == "short_conv":
        return (config.short_conv.taps - 1, config.hidden_size), (0,)
    assert config.delta_net is not None
    delta = config.delta_net
    return (delta.taps - 1, delta.mixed_size), (delta.value_heads, delta.key_dim, delta.value_dim)


class Paging(NamedTuple):
    """How the cache's memory is divided. A page belongs to one block of one slot."""

    sizes: tuple[int, ...]  # bytes of a position in each block that has keys and values
    page_bytes: int
    least: int = 0  # pages that slot 0 never releases

    def pages(self, positions: int) -> int:
        """Pages of ``positions`` of a slot."""
        return sum(-(-positions * size // self.page_bytes) for size in self.sizes)

    def positions(self, pages: int, limit: int) -> int:
        """Most positions of one slot in ``pages``, less those of slot 0, up to ``limit``."""
        return bisect.bisect_right(range(1, limit + 1), pages - self.least, key=self.pages)


def paging_of(config: ModelConfig, dtype: torch.dtype, kv_cache_dtype: str, page_bytes: int | None) -> Paging:
    """``page_bytes``: of mapped pages; None: pages are only counted."""
    kept = [block for block in config.blocks if not block.recurrent and block.kv_from is None]
    sizes = tuple(_padded(sum(_padded(size, 16) for _, size in _parts(one, dtype, kv_cache_dtype)), 32) for one in kept)
    if page_bytes is None:
        return Paging(sizes, _PAGE_POSITIONS * max(sizes, default=1))
    # The first page of each block stays mapped: Triton and torch query the driver about its address.
    return Paging(sizes, page_bytes, Paging(sizes, page_bytes).pages(1))


def _parts(block: Block, dtype: torch.dtype, kv_cache_dtype: str) -> list[tuple[torch.dtype, int]]:
    """Dtype and bytes of a position's keys and values, and of their scales if quantized."""
    quantised = kv_cache_dtype != "auto"
    kind = _CODES[kv_cache_dtype][0] if quantised else dtype
    scales = [(torch.float32, 4 * block.num_kv_heads)] * 2 if quantised else []
    return [(kind, block.kv_size * kind.itemsize)] * 2 + scales


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Pages:
    """``size`` bytes of device memory, mapped by page. This class, for interpreted kernels, allocates all of them."""

    page_bytes = 1 << 14
    taken = 0  # pages that exist

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def tensor(self) -> Tensor:
        """(size,) uint8; the first page must be mapped."""
        return self._bytes

    def map(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Map ``count`` pages at each (offset, count); False, and nothing is mapped, if the device is out of memory."""
        return True

    def unmap(self, ranges: Sequence[tuple[int, int]]) -> None:
        return None

    def close(self) -> None:
        return None


class Stored(NamedTuple):
    """An attention block's keys and values; uninitialised beyond each slot's length."""

    keys: Tensor  # (slots, num_kv_heads, length, head_dim): the decoder's dtype, or codes
    values: Tensor
    key_scales: Tensor | None = None  # if quantized: (slots, num_kv_heads, length) float32
    value_scales: Tensor | None = None


def quantise(x: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor]:
    """Quantize vectors x (..., head_dim) to codes and float32 scales (...): x ~ codes * scales[..., None]."""
    dtype, limit = _CODES[kv_cache_dtype]
    amax = x.float().abs().amax(-1)
    codes = x.float() * (limit / amax.clamp(min=1e-30))[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), amax * (1.0 / limit)


@contextmanager
def memory_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Convert out-of-memory errors of Python and torch to ResourceError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(one in text for one in _NO_MEMORY):
            raise
        raise ResourceError(
            f"not enough memory on {device} {doing} ({first_line(error)}): end what else uses it, choose another "
            "device, or load with a smaller max_seq_len or max_batch"
        ) from error


@dataclass(frozen=True)
class RecurrentState:
    """The state of one recurrent block and one sequence."""

    inputs: Tensor  # (taps - 1, channels), the convolution's last inputs; zeros at the start
    state: Tensor  # of a gated DeltaNet (value_heads, key_dim, value_dim) float32, else (0,)

    def take(self, other: RecurrentState) -> None:
        self.inputs.copy_(other.inputs)
        self.state.copy_(other.state)


class KVCache:
    """``slots`` sequences of up to ``length`` positions, which share ``pages`` of memory."""

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
        """``kv_cache_dtype``: one of ``KV_CACHE_DTYPES``. ``buffers``: number of successive states that a recurrent block
        keeps; that after p positions is in buffer p % buffers. ``memory``: mapped memory, in which the keys, values and
        scales of a position are contiguous; None: plain tensors, in which the positions of a head are. ``pages``: of all
        slots; None: full length in each slot."""
        self.buffers, self._dtype, self._kv_cache_dtype = buffers, dtype, kv_cache_dtype
        self.attention: dict[int, Stored] = {}  # by index of a block that has its own keys and values
        # By index of a recurrent block; each tensor of a RecurrentState with leading (buffers, slots).
        self.recurrent: dict[int, RecurrentState] = {}
        self.lengths = [0] * slots  # positions filled in each slot
        self.length = length  # most positions of a slot
        kept = {i: block for i, block in enumerate(config.blocks) if not block.recurrent and block.kv_from is None}
        self.paging = paging = paging_of(config, dtype, kv_cache_dtype, None if memory is None else memory.page_bytes)
        self.pages = slots * paging.pages(length) if pages is None else pages
        self.free, self.taken = self.pages, [0] * slots  # pages, including claimed ones that are not mapped
        self.held = [0 if kept else length] * slots  # positions of each slot that memory is mapped for
        spans = [_padded(length * size, paging.page_bytes) for size in paging.sizes]
        self._regions = [  # by block: offset of slot 0, bytes of a slot, bytes of a position
            (slots * sum(spans[:i]), span, size) for i, (span, size) in enumerate(zip(spans, paging.sizes, strict=True))
        ]
        copies = buffers, slots
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        with memory_errors(device, f"for a cache of {slots} x {length} positions"):
            self._memory = memory(slots * sum(spans), device) if memory is not None and kept else None
            mapped = None
            if self._memory is not None:
                if not self.grow(0, 1):
                    raise ResourceError(f"no memory on {device} for the first pages of a cache")
                mapped = self._memory.tensor()
            for index, block in enumerate(config.blocks):
                if block.recurrent:
                    inputs, state = state_shapes(config, block)
                    self.recurrent[index] = RecurrentState(
                        torch.zeros(*copies, *inputs, dtype=dtype, device=device),
                        torch.zeros(*copies, *state, dtype=accumulator, device=device),
                    )
            for (index, block), (at, span, size) in zip(kept.items(), self._regions, strict=True):
                tensors = []
                for kind, nbytes in _parts(block, dtype, kv_cache_dtype):
                    width = nbytes // kind.itemsize // block.num_kv_heads  # elements of a head
                    shape = slots, block.num_kv_heads, length, width
                    if mapped is None:
                        tensors.append(torch.empty(shape, dtype=kind, device=device))
                    else:
                        strides = span // kind.itemsize, width, size // kind.itemsize, 1
                        tensors.append(mapped.view(kind).as_strided(shape, strides, at // kind.itemsize))
                    at += _padded(nbytes, 16)
                self.attention[index] = Stored(*tensors[:2], *(scales[..., 0] for scales in tensors[2:]))

    def __str__(self) -> str:
        size, held = (
            shown_bytes(self.pages * self.paging.page_bytes),
            self.pages / max(self.paging.pages(self.length), 1),
        )
        return f"up to {size}, {int(held * self.length):,} positions"

    def out_of_memory(self, positions: int) -> ResourceError:
        """The error for a sequence whose positions do not fit the cache."""
        return ResourceError(
            f"no memory for {positions} positions of a sequence: all of the cache, {self}, holds "
            f"{self.paging.positions(self.pages, self.length)} of one; end what else uses the device, or load with a smaller max_batch or max_seq_len"
        )

    def missing_pages(self, slot: int, positions: int) -> int:
        """Pages beyond the free ones that ``positions`` of a slot need; negative if enough are free."""
        return self.paging.pages(positions) - self.taken[slot] - self.free

    def releasable_pages(self, slot: int) -> int:
        """Pages that :meth:`release` of a slot frees."""
        return self.taken[slot] - (self.paging.least if slot == 0 else 0)

    def claim(self, slot: int, positions: int) -> bool:
        """Reserve pages for ``positions`` of a slot without mapping them; False, and no change, if too few are free."""
        more = self.paging.pages(positions) - self.taken[slot]
        if more > max(self.free, 0):
            return False
        if more > 0:
            self.free -= more
            self.taken[slot] += more
        return True

    def grow(self, slot: int, positions: int) -> bool:
        """Reserve and map pages for ``positions`` of a slot; False if too few are free or the device is out of memory."""
        if positions <= self.held[slot]:
            return True
        if not self.claim(slot, positions):
            return False
        if self._memory is not None and not self._memory.map(self._ranges(slot, self.held[slot], positions)):
            self.pages = self._memory.taken
            self.free = self.pages - sum(self.taken)  # may be negative until slots are released
            size = self.pages * self.paging.page_bytes / 1e9
            log.warning("the device is out of memory: the KV cache is limited to %.1f GB from now on", size)
            return False
        self.held[slot] = self._capacity(positions)
        return True

    def release(self, slot: int) -> None:
        """Free a slot's pages; its contents are lost."""
        kept = 1 if slot == 0 and self.paging.least else 0
        if self._memory is not None:
            self._memory.unmap(self._ranges(slot, kept, self.held[slot]))
        elif self.held[slot]:
            for stored in self.attention.values():
                for tensor in stored:
                    if tensor is not None and tensor.device.type == "cpu":
                        for head in tensor[slot]:
                            _discard(head)
        self.free += self.releasable_pages(slot)
        self.taken[slot] -= self.releasable_pages(slot)
        self.held[slot], self.lengths[slot] = self._capacity(kept), 0

    def _capacity(self, positions: int) -> int:
        """Positions that fit the pages of ``positions``."""
        page = self.paging.page_bytes
        return min((self.length, *(-(-positions * size // page) * page // size for size in self.paging.sizes)))

    def _ranges(self, slot: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Offset and count of the pages for positions start..stop of a slot, by block; without empty ranges."""
        page = self.paging.page_bytes
        ranges = []
        for offset, span, size in self._regions:
            first, last = -(-start * size // page), -(-stop * size // page)
            ranges.append((offset + slot * span + first * page, last - first))
        return [(offset, count) for offset, count in ranges if count > 0]

    def close(self) -> None:
        """Free all memory; the cache cannot be used afterwards."""
        self.attention.clear()
        if self._memory is not None:
            self._memory.close()

    def begin(self, slot: int, start: int) -> None:
        """Prepare a slot for positions from ``start`` on: zero the states at 0, and ``lengths`` until the caller sets it."""
        if start == 0:
            for block in self.recurrent:
                state = self.state(block, slot, 0)
                state.inputs.zero_()
                state.state.zero_()
        self.lengths[slot] = 0

    def write(self, block: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (num_kv_heads, T, head_dim) at positions from ``start`` on."""
        stop, stored = start + keys.shape[1], self.attention[block]
        for new, tensor, scales in zip((keys, values), stored[:2], stored[2:], strict=True):
            if scales is None:
                tensor[slot, :, start:stop] = new
            else:
                tensor[slot, :, start:stop], scales[slot, :, start:stop] = quantise(new, self._kv_cache_dtype)

    def read(self, block: int, slot: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions 0..stop of a slot, dequantized: (num_kv_heads, stop, head_dim) each."""
        kv, stored = [], self.attention[block]
        for tensor, scales in zip(stored[:2], stored[2:], strict=True):
            if scales is None:
                kv.append(tensor[slot, :, :stop])
            else:
                kv.append((tensor[slot, :, :stop].float() * scales[slot, :, :stop, None]).to(self._dtype))
        return kv[0], kv[1]

    def state(self, block: int, slot: int, position: int) -> RecurrentState:
        """Views of a recurrent block's state after ``position`` positions of a slot."""
        states, buffer = self.recurrent[block], position % self.buffers
        return RecurrentState(states.inputs[buffer, slot], states.state[buffer, slot])

    def advance(self, block: int, slot: int, start: int, stop: int) -> RecurrentState:
        """The buffer of the state after ``stop`` positions, filled with that after ``start``, for in-place update."""
        target = self.state(block, slot, stop)
        if (stop - start) % self.buffers:
            target.take(self.state(block, slot, start))
        return target

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of slot ``source`` to slot ``target``."""
        for stored in self.attention.values():
            for tensor in stored:
                if tensor is not None:
                    tensor[target, :, :length] = tensor[source, :, :length]
        for block in self.recurrent:
            self.state(block, target, length).take(self.state(block, source, length))
        self.lengths[target] = length


def _discard(x: Tensor) -> None:
    """Free the physical pages of a contiguous tensor until its next write (Linux only)."""
    page = mmap.PAGESIZE
    first, last = -(-x.data_ptr() // page) * page, (x.data_ptr() + x.nbytes) // page * page
    if sys.platform == "linux" and last > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
