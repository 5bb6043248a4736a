"""Device memory that is mapped by need into a range of addresses (CUDA's virtual memory management): tensors keep their
addresses while the memory behind them comes and goes, so captured graphs stay valid."""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_OUT_OF_MEMORY = 2


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: memory of a device, not shared with other processes."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int),
        ("device", ctypes.c_int), ("windows", ctypes.c_void_p), ("flags", ctypes.c_uint64),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("CUDA out of memory")
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {text.value.decode() if text.value else code}")


class MappedMemory:
    """Addresses for ``size`` bytes on a device, and pages of physical memory mapped at some of them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._properties = _Properties(1, 0, 1, device.index or 0, None, 0)
        self._access = _Access(1, device.index or 0, 3)
        page = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(self._properties), 0)
        self.page = page.value
        self._size = -(-size // self.page) * self.page
        base = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(self._size), ctypes.c_size_t(0),
              ctypes.c_uint64(0), ctypes.c_uint64(0))  # fmt: skip
        self._base = base.value
        self._pages: dict[int, int] = {}  # number of a page -> its handle
        self.map(0, 1)  # torch asks the driver whose the first address is
        interface = {"shape": (size,), "typestr": "|u1", "data": (self._base, False), "version": 3}
        self.bytes: Tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)

    def map(self, first: int, stop: int) -> None:
        """Memory behind the bytes from ``first`` to ``stop``, where there is none yet."""
        for number in range(first // self.page, -(-stop // self.page)):
            if number in self._pages:
                continue
            handle, at = ctypes.c_uint64(), ctypes.c_uint64(self._base + number * self.page)
            size = ctypes.c_size_t(self.page)
            _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
            _call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            _call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))
            self._pages[number] = handle.value

    def unmap(self, first: int, stop: int) -> None:
        """Give back the pages that lie wholly between two bytes."""
        for number in range(-(-first // self.page), stop // self.page):
            if number in self._pages:
                _call("cuMemUnmap", ctypes.c_uint64(self._base + number * self.page), ctypes.c_size_t(self.page))
                _call("cuMemRelease", ctypes.c_uint64(self._pages.pop(number)))

    def close(self) -> None:
        if self._base:
            self.unmap(0, self._size)
            _call("cuMemAddressFree", ctypes.c_uint64(self._base), ctypes.c_size_t(self._size))
            self._base = 0
