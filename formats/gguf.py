"""GGUF files, llama.cpp's format: metadata, tensors, and rows of tensors as float32.

The header is parsed here, with bounds on everything a file can claim; the package ``gguf`` has the types' block sizes and
dequantises.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .errors import UnsupportedModelError, WisparseError
from .guard import identity, open_regular

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262,144 tokens takes about 15 MB
_MOST_TENSORS, _MOST_KEYS, _MOST_ITEMS, _MOST_DIMENSIONS = 1 << 20, 1 << 16, 1 << 22, 4
# Metadata types: numbers by struct's letter, then text and arrays.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # as in PyTorch, (out, in) for a weight
    kind: str  # ``Q4_K``, ``F16``, …
    offset: int  # in the file
    rows: int  # of the last dimension's size
    row_bytes: int


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise UnsupportedModelError(
            "a GGUF file needs the package gguf, which dequantises its weights: pip install 'wisparse[gguf]'"
        ) from None
    return gguf


class GgufFile:
    """A validated header; weights are read by `rows`, never more than asked for."""

    def __init__(self, path: str | os.PathLike[str], error: type[WisparseError] = UnsupportedModelError) -> None:
        path = Path(path)
        self.folder, self.name, self.error = path.parent, path.name, error
        with open_regular(self.folder, self.name, error) as file:
            self.identity = identity(file)
            self._read_header(io.BufferedReader(file, 1 << 20))

    def _read_header(self, file: io.BufferedReader) -> None:
        self._file, self._left, begin = file, min(self.identity[2], MAX_HEADER_BYTES), file.peek(8)[:8]
        if begin == b"version ":
            raise self._wrong("a Git LFS pointer instead of the file; run `git lfs pull` in the folder")
        if begin[:4] != _MAGIC:
            raise self._wrong(f"not a GGUF file: expected it to begin with {_MAGIC!r}, found {begin[:4]!r}")
        self._take(4)
        version = self._number("I")
        if version not in _VERSIONS:
            found = "big-endian" if version in (2 << 24, 3 << 24) else f"GGUF version {version}"
            raise self._wrong(f"expected GGUF version 2 or 3, little-endian, found {found}")
        count, keys = self._number("Q"), self._number("Q")
        if count > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self._wrong(f"claims {count:,} tensors and {keys:,} keys; it is damaged")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text()
            if key in self.metadata:
                raise self._wrong(f"the key {key!r:.100} stands there twice")
            self.metadata[key] = self._value(self._number("I"), key)
        if self.metadata.get("split.count", 0) not in (0, 1):
            parts = self.metadata["split.count"]
            raise self._wrong(f"one of {parts!r:.20} parts of a model; join them with llama-gguf-split --merge")
        self.tensors = self._read_tensors(count)
        del self._file

    def _wrong(self, what: str) -> WisparseError:
        return self.error(f"{self.name}: {what}")

    def _take(self, size: int) -> bytes:
        if size > self._left:
            large = self.identity[2] > MAX_HEADER_BYTES and f", or larger than {MAX_HEADER_BYTES:,} bytes"
            raise self._wrong(f"the header is cut off or damaged{large or ''}")
        self._left -= size
        return self._file.read(size)

    def _number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))[0]

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"text in the header is not UTF-8, before byte {self._file.tell()}") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            inner, length = self._number("I"), self._number("Q")
            if inner == _TEXT and length <= _MOST_ITEMS:
                return [self._text() for _ in range(length)]
            if inner in _NUMBERS and length <= _MOST_ITEMS:
                dtype = np.dtype(_NUMBERS[inner]).newbyteorder("<")
                return np.frombuffer(self._take(length * dtype.itemsize), dtype).tolist()
            raise self._wrong(f"{key!r:.100}: an array of {length:,} values of type {inner}; it is damaged")
        if kind not in _NUMBERS:
            raise self._wrong(f"{key!r:.100}: unknown type {kind}; it is damaged")
        value = self._number(_NUMBERS[kind])
        if kind not in (6, 12):
            return value
        if not math.isfinite(value):
            raise self._wrong(f"{key!r:.100}: expected a finite number, found {value}")
        # The decimal number that a single-precision one stands for: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == 6 else value

    def _read_tensors(self, count: int) -> Mapping[str, GgufTensor]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, dimensions = self._text(), self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise self._wrong(f"{name!r:.100} claims {dimensions} dimensions; it is damaged")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            found.append((name, shape, self._number("I"), self._number("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise self._wrong(f"general.alignment: expected a power of two, found {alignment!r:.40}")
        start, tensors = -(-self._file.tell() // alignment) * alignment, dict[str, GgufTensor]()
        for name, shape, number, offset in found:
            kind, block, block_bytes = _layout(number)
            if not block:
                raise self._wrong(
                    f"{name!r:.100} has the type {kind}, which is not read here; take another quantisation"
                )
            size = math.prod(shape)
            if not 0 < size <= 2**63 or shape[-1] % block:
                raise self._wrong(f"{name!r:.100}: shape {shape} is not possible for {kind}; it is damaged")
            row_bytes, rows = shape[-1] // block * block_bytes, size // shape[-1]
            if start + offset + rows * row_bytes > self.identity[2]:
                raise self._wrong(f"cut off: {name!r:.100} ends beyond the file's {self.identity[2]:,} bytes")
            if name in tensors:
                raise self._wrong(f"the tensor {name!r:.100} stands there twice")
            tensors[name] = GgufTensor(shape, kind, start + offset, rows, row_bytes)
        return tensors

    @property
    def kinds(self) -> Counter[str]:
        """Number of matrices by type, the most frequent first; vectors are F32 in all files."""
        counts = Counter(tensor.kind for tensor in self.tensors.values() if tensor.rows > 1)
        return Counter(dict(counts.most_common()))

    def rows(self, name: str, first: int, last: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Rows ``first`` to ``last`` of a tensor, (last - first, K), dequantised to float32; thread-safe."""
        tensor = self.tensors[name]
        with open_regular(self.folder, self.name, self.error, self.identity) as file:
            data = os.pread(file.fileno(), (last - first) * tensor.row_bytes, tensor.offset + first * tensor.row_bytes)
        raw = np.frombuffer(data, np.uint8)
        if tensor.kind in ("F32", "F16"):
            values = raw.view("<f4" if tensor.kind == "F32" else "<f2").astype(np.float32)
        else:
            gguf = _package()
            with np.errstate(all="ignore"):  # of damaged scales; the caller checks for infinity
                values = gguf.quants.dequantize(
                    raw.reshape(last - first, -1), gguf.GGMLQuantizationType[tensor.kind]
                ).astype(np.float32, copy=False)
        return values.reshape(last - first, tensor.shape[-1])


def _layout(number: int) -> tuple[str, int, int]:
    """Name, elements and bytes of a block of a tensor's type; 0 elements if it cannot be dequantised."""
    gguf = _package()
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in ("F32", "F16"):
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return (kind.name if number in {*gguf.GGMLQuantizationType} else str(number)), 0, 0
    return kind.name, block, size
