"""The header of a safetensors file, checked before a single byte of its data is believed.

    8 bytes little-endian: length n of the header | n bytes of JSON | data

Only what this project reads and writes is accepted: tensors that follow each other without gap or overlap and fill the
file to its last byte. Source: the format's own description, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .errors import WisparseError
from .guard import FileIdentity, identity, open_regular, parse_json

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """crc32 of A + B from those of A and of B, and B's length in bytes."""
    return _multiply(_appended(second_bytes), first) ^ second


@lru_cache(maxsize=64)
def _appended(count: int) -> int:
    """x**(8 count) modulo the polynomial."""
    power, factor = _ONE, 1 << 23  # x**8
    while count:
        if count & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        count >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)  # times x
    return product


# Of weights that are numbers, and of what else stands for weights in few bits.
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED_DTYPES: Mapping[str, torch.dtype] = {
    **DTYPES,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
_CODES = {dtype: code for code, dtype in STORED_DTYPES.items()}

# Bytes of every type the format knows, so that a quantised file is recognised as such and not as a damaged one.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64}
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8}
_BITS |= {"F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64}

_MAX_HEADER_BYTES = 32 << 20
_MAX_RANK = 8


@dataclass(frozen=True)
class Entry:
    """One tensor: ``code`` is the format's name of the dtype; ``start`` and ``end`` are bytes from the file's start."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says about itself, and the identity of the file when it said so."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    identity: FileIdentity


def read_header(folder: Path, name: str, error: type[WisparseError]) -> Header:
    """Read and check the header of ``folder/name``.

    Raises:
        error: anything that is not a well-formed safetensors file of exactly this length.
    """
    with open_regular(folder, name, error) as file:
        seen = identity(file)
        prefix = file.read(8) or b""
        if len(prefix) < 8:
            raise error(f"{name}: expected a safetensors file, found {seen.size} bytes")
        if prefix == b"version ":  # the first word of a pointer; as a length it would be absurd
            raise error(f"{name}: a Git LFS pointer instead of the weights; run `git lfs pull` in the folder")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(seen.size - 8, _MAX_HEADER_BYTES):
            raise error(f"{name}: the header claims {length:,} bytes of a file of {seen.size:,}; truncated or damaged")
        data = bytearray()
        while len(data) < length and (piece := file.read(length - len(data))):
            data += piece
    if len(data) != length:
        raise error(f"{name}: truncated while it was read")
    document = parse_json(bytes(data), f"{name}: header", error)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise error(f"{name}: __metadata__: expected an object of strings")
    entries = {tensor: _entry(f"{name}: {tensor!r:.200}", fields, error) for tensor, fields in document.items()}
    position = 0
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            kind = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise error(f"{name}: {tensor!r:.200} {kind}: expected offset {position:,}, found {entry.start:,}")
        position = entry.end
    if 8 + length + position != seen.size:
        raise error(f"{name}: expected {8 + length + position:,} bytes, found {seen.size:,}; truncated or damaged")
    shift = 8 + length
    moved = {t: Entry(e.code, e.shape, e.start + shift, e.end + shift) for t, e in entries.items()}
    return Header(moved, metadata, seen)


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Header bytes for tensors that will follow in this order, and the number of data bytes it promises."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        document[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # Padded with blanks so that the data begins at a multiple of 8, as the format recommends.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, position


def _entry(where: str, fields: Any, error: type[WisparseError]) -> Entry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise error(f"{where}: expected dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in _BITS:
        raise error(f"{where}: unknown dtype {code!r:.40}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(_is_size(size) for size in shape):
        raise error(f"{where}: expected a shape of at most {_MAX_RANK} sizes, found {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise error(f"{where}: expected two data_offsets, found {offsets!r:.80}")
    start, end = offsets
    bits = math.prod(shape) * _BITS[code]
    if bits % 8 or end - start != bits // 8:
        raise error(f"{where}: shape and dtype ask for {bits / 8:,.0f} bytes, data_offsets give {end - start:,}")
    return Entry(code, tuple(shape), start, end)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60
