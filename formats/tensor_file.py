"""safetensors files, the folders that hold them, and their headers."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize, safe_open

from . import guard
from .errors import BundleError, WisparseError
from .lazy import Tensor, torch

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt", "model.bin")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")

MAX_INDEX_BYTES, _MAX_HEADER_BYTES = 16 << 20, 32 << 20
# dtype -> integer of the same size, bits of infinity. fp8 has no infinity, and `Plain.decode` checks it for NaN.
INFINITY = {"float32": ("int32", 0x7F800000), "bfloat16": ("int16", 0x7F80), "float16": ("int16", 0x7C00)}
# safetensors' dtype -> torch's, bytes: of floating-point weights, and of all supported tensors.
DTYPES: Mapping[str, tuple[str, int]] = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
STORED_DTYPES: Mapping[str, tuple[str, int]] = dict(
    DTYPES, I8=("int8", 1), I32=("int32", 4), I64=("int64", 8), U8=("uint8", 1), F8_E4M3=("float8_e4m3fn", 1)
)
_CODES = {name: code for code, (name, _) in STORED_DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    code: str  # the dtype, as safetensors names it
    shape: tuple[int, ...]


class TensorFile:
    dequantised = False  # whether `read` computes the tensors, which the file has in another form

    def __init__(self, folder: Path, name: str, error: type[WisparseError]) -> None:
        self.folder, self.name, self.error, self._place = folder, name, error, os.path.join(folder, name)
        with guard.open_regular(folder, name, error) as file:
            self.identity = guard.identity(file)
            prefix = file.read(8) or b""
        if prefix == b"version ":  # the first word of a Git LFS pointer
            raise error(f"{name}: a Git LFS pointer instead of the weights; run `git lfs pull` in the folder")
        length = int.from_bytes(prefix, "little")
        if length > _MAX_HEADER_BYTES:
            raise error(f"{name}: the header claims {length:,} bytes, more than {_MAX_HEADER_BYTES:,}; damaged")
        path = guard.resolve_inside(folder, name, error)
        try:
            str(path).encode()
            opened = safe_open(path, "np")  # "pt" would import torch
            self.metadata: dict[str, str] = opened.metadata() or {}
            slices = {tensor: opened.get_slice(tensor) for tensor in opened.keys()}  # noqa: SIM118
        except UnicodeEncodeError:
            raise error(f"{str(path)!r:.200}: the path is not UTF-8, which safetensors requires; rename it") from None
        except MemoryError:
            size = path.stat().st_size
            why = "the file is damaged, or the address space is limited (ulimit -v)"
            raise error(f"{name}: its {size:,} bytes cannot be mapped into memory; {why}") from None
        except (SafetensorError, OSError) as reason:
            raise error(f"{name}: no valid safetensors file, truncated or damaged: {reason!s:.300}") from None
        self.entries = {name: Entry(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        self._path = path

    @cached_property
    def _file(self) -> Any:
        return safe_open(self._path, "pt")

    def read(self, tensor: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor's bytes from ``start`` to ``stop``, or to its end, (n,) uint8, memory-mapped. Raises if the file changed
        since it was opened; a truncation during the read ends the process (SIGBUS)."""
        # One stat call for the validated file: experts' weights are thousands of reads.
        try:
            same = guard.identity(self._place) == self.identity
        except OSError:
            same = False
        if not same:
            guard.open_regular(self.folder, self.name, self.error, self.identity).close()
        data: Tensor = self._file.get_tensor(tensor)
        return data.view(-1).view(torch.uint8)[start:stop]


def code_of(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype."""
    return _CODES[str(dtype).removeprefix("torch.")]


def is_finite(values: Tensor) -> bool:
    name = str(values.dtype).removeprefix("torch.")
    if name not in INFINITY:
        return True
    # As integers, the bits of infinity and NaN exceed all others of their sign: 20 times as fast as isfinite().all().
    integer, infinity = INFINITY[name]
    signed = values.detach().cpu().contiguous().view(getattr(torch, integer)).numpy()
    unsigned = signed.view(f"u{signed.itemsize}")
    return bool(signed.max() < infinity and unsigned.max() < infinity + 2 ** (8 * signed.itemsize - 1))


def same_values(*places: tuple[TensorFile, str]) -> bool:
    """Whether two tensors of one shape have the same values but for their dtype's rounding."""
    entries = [file.entries.get(name) for file, name in places]
    dtypes = [getattr(torch, DTYPES[entry.code][0]) for entry in entries if entry and entry.code in DTYPES]
    if len(dtypes) < 2 or len({entry and entry.shape for entry in entries}) > 1:
        return True  # refused where the tensors are validated
    coarse = next(dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if dtype in dtypes)
    both = (file.read(name).view(dtype).split(1 << 22) for (file, name), dtype in zip(places, dtypes, strict=True))
    return all(torch.equal(a.to(coarse), b.to(coarse)) for a, b in zip(*both, strict=True))


def open_files(
    folder: Path, bundle: bool, error: type[WisparseError]
) -> tuple[dict[str, str], dict[str, TensorFile], list[str]]:
    """Tensor name -> file name, by the index or the single file's header; the opened files, validated against it; and what
    was ignored, as sentences."""
    notes: list[str] = []
    # If there are both, transformers loads the single file; a bundle must have the index.
    if os.path.lexists(folder / _SINGLE) and not bundle:
        single = TensorFile(folder, _SINGLE, error)
        if os.path.lexists(folder / INDEX):
            notes.append(f"{_SINGLE} is read, as transformers does, and not the files that {INDEX} names")
        return dict.fromkeys(single.entries, _SINGLE), {_SINGLE: single}, notes
    if not os.path.lexists(folder / INDEX):
        pickles = [name for name in _PICKLES if os.path.lexists(folder / name)]
        if pickles:
            found = f"{guard.shown(folder)}: expected safetensors weights, found {pickles[0]}"
            advice = "pickle files can run code and are never loaded: save the model again with save_pretrained()"
            raise error(f"{found}; {advice}")
        gguf = any(name.endswith(".gguf") for name in os.listdir(folder))
        hint = "; found GGUF files: give one of them, or its name with --gguf-file" if gguf else ""
        expected = INDEX if bundle else f"{INDEX} or {_SINGLE}"
        raise error(f"{guard.shown(folder)}: no weights: expected {expected}{hint}")
    weight_map = guard.read_json(folder, INDEX, MAX_INDEX_BYTES, error).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise error(f"{INDEX}: expected an object weight_map, found {type(weight_map).__name__}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise error(f"{INDEX}: {name!r:.200}: expected a .safetensors file in the folder, found {file!r:.200}")
    files = {name: TensorFile(folder, name, error) for name in dict.fromkeys(weight_map.values())}
    if not bundle:
        # As transformers: all tensors of the named files; of two with one name, the one in the last file.
        places = {name: file for file in sorted(files) for name in files[file].entries}
        moved = [name for name, file in places.items() if weight_map.get(name) != file]
        if moved:
            notes.append(
                f"{INDEX} does not say where {len(moved)} tensor{'s' * (len(moved) > 1)} ({moved[0]!r:.200}) lie: read from "
                f"{places[moved[0]]}, as transformers does"
            )
        others = [n for n in os.listdir(folder) if n not in files and re.fullmatch(r"model.*\.safetensors", n)]
        if others:
            notes.append(f"{min(others)!r:.200} is not read: {INDEX} does not name it")
        return weight_map | places, files, notes
    for file, opened in files.items():
        for name in opened.entries:
            if weight_map.get(name) != file:
                raise error(f"{file}: holds {name!r:.200}, which the index does not place there")
    return weight_map, files, notes


def parse_tensors(data: bytes, name: str) -> tuple[dict[str, tuple[Entry, bytearray]], dict[str, str]]:
    """The tensors and the metadata of a safetensors file's bytes."""
    try:
        tensors = {tensor: (Entry(e["dtype"], tuple(e["shape"])), e["data"]) for tensor, e in deserialize(data)}
    except SafetensorError as reason:
        raise BundleError(f"{name}: no valid safetensors file, truncated or damaged: {reason!s:.300}") from None
    (length,) = struct.unpack("<Q", data[:8])
    metadata: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    return tensors, metadata


def build_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file whose data follow in this order."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        document[name] = {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # Padded with spaces to a multiple of 8 bytes, as the format recommends.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
