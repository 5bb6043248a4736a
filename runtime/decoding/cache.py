"""The KV cache, and the states of recurrent blocks.

Each slot has a contiguous range of virtual addresses for its longest sequence. Memory is allocated in pages from a pool that
all slots share, as a sequence grows (as in vAttention, arXiv 2405.04437). On a GPU pages are mapped explicitly; on a CPU
they are only counted, and the operating system allocates memory at the first write.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from wisparse.formats.errors import ResourceError
from wisparse.formats.machine import shown_bytes
from wisparse.formats.model_config import ModelConfig

from ..memory import KV_CODES, memory_errors, padded, paging_of, state_shapes, stored_parts

log = logging.getLogger(__name__)


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

    def tensors(self) -> dict[str, Tensor]:
        """By name; values that are the keys once."""
        again = "value" if self.values is self.keys else "-"
        return {name: x for name, x in self._asdict().items() if x is not None and not name.startswith(again)}


def quantise(x: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor]:
    """Quantize vectors x (..., head_dim) to codes and float32 scales (...): x ~ codes * scales[..., None]."""
    dtype, limit = KV_CODES[kv_cache_dtype]
    amax = x.float().abs().amax(-1)
    codes = x.float() * (limit / amax.clamp(min=1e-30))[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), amax * (1.0 / limit)


@dataclass(frozen=True)
class RecurrentState:
    """The state of one recurrent block and one sequence."""

    inputs: Tensor  # (taps - 1, channels), the convolution's last inputs; zeros at the start
    state: Tensor  # of a gated DeltaNet (value_heads, key_dim, value_dim) float32, else (0,)

    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())

    def take(self, other: RecurrentState) -> None:
        for tensor, new in zip(self.tensors(), other.tensors(), strict=True):
            tensor.copy_(new)


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
        kept = {i: block for i, block in enumerate(config.blocks) if block.stores_kv}
        self.paging = paging = paging_of(config, dtype, kv_cache_dtype, None if memory is None else memory.page_bytes)
        self.pages = slots * paging.pages(length) if pages is None else pages
        self.free, self.taken = self.pages, [0] * slots  # pages, including claimed ones that are not mapped
        self.held = [0 if kept else length] * slots  # positions of each slot that memory is mapped for
        spans = [padded(length * size, paging.page_bytes) for size in paging.sizes]
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
                for kind, nbytes in stored_parts(block, dtype, kv_cache_dtype):
                    width = nbytes // kind.itemsize // block.num_kv_heads  # elements of a head
                    shape = slots, block.num_kv_heads, length, width
                    if mapped is None:
                        tensors.append(torch.empty(shape, dtype=kind, device=device))
                    else:
                        strides = span // kind.itemsize, width, size // kind.itemsize, 1
                        tensors.append(mapped.view(kind).as_strided(shape, strides, at // kind.itemsize))
                    at += padded(nbytes, 16)
                keys, values, *scales = [one for one in tensors for _ in range(1 + block.latent)]
                self.attention[index] = Stored(keys, values, *(one[..., 0] for one in scales))

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
            f"{self.paging.positions(self.pages, self.length)} of one; end what else uses the device, or load with a "
            "smaller max_batch or max_seq_len"
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
                for tensor in stored.tensors().values():
                    if tensor.device.type == "cpu":
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
                for tensor in self.state(block, slot, 0).tensors():
                    tensor.zero_()
        self.lengths[slot] = 0

    def write(self, block: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (num_kv_heads, T, head_dim) at positions from ``start`` on."""
        stop, stored = start + keys.shape[1], self.attention[block]
        parts = list(zip((keys, values), stored[:2], stored[2:], strict=True))
        for new, tensor, scales in parts[: 1 if stored.values is stored.keys else 2]:
            if scales is None:
                tensor[slot, :, start:stop] = new
            else:
                tensor[slot, :, start:stop], scales[slot, :, start:stop] = quantise(new, self._kv_cache_dtype)

    def read(self, block: int, slot: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions 0..stop of a slot, dequantized: (num_kv_heads, stop, head_dim) each."""
        kv, stored = list[Tensor](), self.attention[block]
        for tensor, scales in zip(stored[:2], stored[2:], strict=True):
            if kv and tensor is stored.keys:
                kv.append(kv[0])
            elif scales is None:
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

    def checkpoint(self, slot: int) -> list[RecurrentState]:
        """A copy of the states of all recurrent blocks after the slot's last position."""
        states = (self.state(block, slot, self.lengths[slot]) for block in self.recurrent)
        return [replace(state, **{name: tensor.clone() for name, tensor in vars(state).items()}) for state in states]

    def copy(self, source: int, target: int, length: int, states: Sequence[RecurrentState] = ()) -> None:
        """Copy the first ``length`` positions of slot ``source`` to slot ``target``, which may be the same. ``states``: the
        :meth:`checkpoint` after them; empty: the source has ``length`` positions."""
        if source != target:
            for stored in self.attention.values():
                for tensor in stored.tensors().values():
                    tensor[target, :, :length] = tensor[source, :, :length]
        states = states or [self.state(block, source, length) for block in self.recurrent]
        for block, state in zip(self.recurrent, states, strict=True):
            self.state(block, target, length).take(state)
        self.lengths[target] = length


def _discard(x: Tensor) -> None:
    """Free the physical pages of a contiguous tensor until its next write (Linux only)."""
    page = mmap.PAGESIZE
    first, last = -(-x.data_ptr() // page) * page, (x.data_ptr() + x.nbytes) // page * page
    if sys.platform == "linux" and last > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
