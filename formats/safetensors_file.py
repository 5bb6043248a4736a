"""Safetensors files: opened and checked by the ``safetensors`` library, and headers written for streamed data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize, safe_open
from torch import Tensor

from .errors import WisparseError
from .guard import FileIdentity, identity, open_regular, resolve_inside

# Weights that are numbers, and what else stands for weights in few bits.
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED_DTYPES: Mapping[str, torch.dtype] = {
    **DTYPES,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
_CODES = {dtype: code for code, dtype in STORED_DTYPES.items()}
_MAX_HEADER_BYTES = 32 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a header; ``code`` is the format's name of the dtype."""

    code: str
    shape: tuple[int, ...]


class TensorFile:
    """An open safetensors file, mapped into memory."""

    def __init__(self, folder: Path, name: str, error: type[WisparseError]) -> None:
        self._folder, self._name, self._error = folder, name, error
        with open_regular(folder, name, error) as file:
            self.identity: FileIdentity = identity(file)
            prefix = file.read(8) or b""
        if prefix == b"version ":  # the first word of a pointer
            raise error(f"{name}: a Git LFS pointer instead of the weights; run `git lfs pull` in the folder")
        if len(prefix) < 8:
            raise error(f"{name}: expected a safetensors file, found {self.identity.size} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(self.identity.size - 8, _MAX_HEADER_BYTES):
            size = self.identity.size
            raise error(f"{name}: the header claims {length:,} bytes of a file of {size:,}; truncated or damaged")
        try:
            self._file = safe_open(resolve_inside(folder, name, error), "pt")
            slices = {tensor: self._file.get_slice(tensor) for tensor in self._file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as reason:
            raise error(f"{name}: no valid safetensors file, truncated or damaged: {reason!s:.300}") from None
        self.entries = {name: Entry(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}

    def read_bytes(self, tensor: str) -> Tensor:
        """The bytes of a tensor, (n,) uint8, in the mapped file: read when they are used.

        A file that changed since it was opened is refused; one that is truncated while it is read ends the process.
        """
        open_regular(self._folder, self._name, self._error, self.identity).close()
        found: Tensor = self._file.get_tensor(tensor)
        return found.view(-1).view(torch.uint8)


def parse_tensors(
    data: bytes, name: str, error: type[WisparseError]
) -> tuple[dict[str, tuple[Entry, bytearray]], dict[str, str]]:
    """The tensors and the metadata of a safetensors file that was read as a whole."""
    try:
        found = {tensor: (Entry(e["dtype"], tuple(e["shape"])), e["data"]) for tensor, e in deserialize(data)}
    except SafetensorError as reason:
        raise error(f"{name}: no valid safetensors file, truncated or damaged: {reason!s:.300}") from None
    (length,) = struct.unpack("<Q", data[:8])
    metadata: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    return found, metadata


def build_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Header bytes for tensors whose data will follow in this order."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        document[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # Padded with blanks so that the data begins at a multiple of 8, as the format recommends.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
