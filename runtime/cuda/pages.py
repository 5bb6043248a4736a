"""KV cache pages by CUDA's virtual memory management: a reserved address range to which physical pages are mapped.

The addresses stay valid in kernels and captured graphs while pages are mapped and unmapped. Unmapped addresses must not
be accessed. Mapping is not synchronized with the device; unmapping synchronizes with it first.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.errors import ResourceError

from ..decoding.cache import Pages
from ..memory import mapped_bytes

_OUT_OF_MEMORY = 2
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # enumerators of cuda.h


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProp(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def load_driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class CudaPages(Pages):
    page_bytes = 2 << 20  # a multiple of the allocation granularity, which is checked

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.init()  # loads the driver
        self._driver, self._device = load_driver(), device
        location = _Location(_DEVICE, torch.cuda.current_device() if device.index is None else device.index)
        self._prop, self._access = _AllocationProp(type=_PINNED, location=location), _Access(location, _READ_WRITE)
        granularity, address = ctypes.c_size_t(), ctypes.c_uint64()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), 0)
        if self.page_bytes % granularity.value:
            raise ResourceError(
                f"{device}: expected pages that divide {self.page_bytes} bytes, found {granularity.value}"
            )
        zero = ctypes.c_uint64(0)
        self._size = ctypes.c_size_t(size)
        self._call("cuMemAddressReserve", ctypes.byref(address), self._size, ctypes.c_size_t(0), zero, zero)
        self._address = address.value
        self._mapped: dict[int, int] = {}  # offset -> handle
        self._unused: list[int] = []  # handles of allocated pages that are not mapped
        # Not at interpreter exit: the driver may be unloaded by then, and frees everything itself.
        self._finalizer = weakref.finalize(
            self, _free, self._driver, device, self._address, size, self.page_bytes, self._mapped, self._unused
        )
        self._finalizer.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size.value,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device)

    def map(self, ranges: Sequence[tuple[int, int]]) -> bool:
        missing = sum(count for _, count in ranges) - len(self._unused)
        for _ in range(missing):
            handle = ctypes.c_uint64()
            size, flags = ctypes.c_size_t(self.page_bytes), ctypes.c_uint64(0)
            arguments = ctypes.byref(handle), size, ctypes.byref(self._prop), flags
            if self._call("cuMemCreate", *arguments, allowed=_OUT_OF_MEMORY) == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # torch's allocator may hold free memory
                if self._call("cuMemCreate", *arguments, allowed=_OUT_OF_MEMORY) == _OUT_OF_MEMORY:
                    return False
            self._unused.append(handle.value)
            self.taken += 1
            mapped_bytes[self._device] += self.page_bytes
        for first, count in ranges:
            for offset in range(first, first + count * self.page_bytes, self.page_bytes):
                where = ctypes.c_uint64(self._address + offset), ctypes.c_size_t(self.page_bytes), ctypes.c_size_t(0)
                self._call("cuMemMap", *where, ctypes.c_uint64(self._unused[-1]), ctypes.c_uint64(0))
                self._mapped[offset] = self._unused.pop()
            begin, size = ctypes.c_uint64(self._address + first), ctypes.c_size_t(count * self.page_bytes)
            self._call("cuMemSetAccess", begin, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        return True

    def unmap(self, ranges: Sequence[tuple[int, int]]) -> None:
        torch.cuda.synchronize(self._device)
        for first, count in ranges:
            for offset in range(first, first + count * self.page_bytes, self.page_bytes):
                where = ctypes.c_uint64(self._address + offset), ctypes.c_size_t(self.page_bytes)
                self._call("cuMemUnmap", *where)
                self._unused.append(self._mapped.pop(offset))

    def close(self) -> None:
        self._finalizer()

    def _call(self, name: str, *arguments: Any, allowed: int = 0) -> int:
        return _checked(self._driver, name, *arguments, allowed=allowed)


def _checked(driver: Any, name: str, *arguments: Any, allowed: int = 0) -> int:
    """Call a driver function; raises ResourceError unless the result is 0 or ``allowed``."""
    result: int = getattr(driver, name)(*arguments)
    if result not in (0, allowed):
        error_name = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(error_name))
        error = error_name.value.decode() if error_name.value else f"error {result}"
        raise ResourceError(f"{name} failed: {error}; end other GPU processes, or load with a smaller max_batch")
    return result


def _free(
    driver: Any, device: torch.device, address: int, size: int, page_bytes: int, mapped: dict[int, int],
    unused: list[int],
) -> None:  # fmt: skip
    torch.cuda.synchronize(device)
    for offset, handle in mapped.items():
        _checked(driver, "cuMemUnmap", ctypes.c_uint64(address + offset), ctypes.c_size_t(page_bytes))
        unused.append(handle)
    for handle in unused:
        _checked(driver, "cuMemRelease", ctypes.c_uint64(handle))
    mapped_bytes[device] -= page_bytes * len(unused)
    mapped.clear()
    unused.clear()
    _checked(driver, "cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))
