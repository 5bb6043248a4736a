"""Headers that lie, and JSON that bites: refused in bounded time and memory, before anything is allocated."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from wisparse.formats.errors import BundleError
from wisparse.formats.guard import dump_json, parse_json
from wisparse.formats.safetensors_header import DTYPES, build_header, read_header

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def _file(folder: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "x").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return folder


def _entry(**changes: Any) -> dict[str, Any]:
    return {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (_entry(shape=[2**60]), bytes(8), "unknown|shape"),
        (_entry(shape=[2**59]), bytes(8), "shape and dtype ask for 2,305,843,009,213,693,952 bytes"),
        (_entry(shape=[2**59] * 8), bytes(8), "shape and dtype ask for"),
        (_entry(shape=[2] * 9), bytes(8), "expected a shape of at most 8"),
        (_entry(shape=[-2]), bytes(8), "expected a shape"),
        (_entry(shape=[True, 2]), bytes(8), "expected a shape"),
        (_entry(shape=[2.0]), bytes(8), "expected a shape"),
        (_entry(shape="2"), bytes(8), "expected a shape"),
        (_entry(data_offsets=[-8, 0]), bytes(8), "expected two data_offsets"),
        (_entry(data_offsets=[8, 0]), bytes(8), "data_offsets give -8"),
        (_entry(data_offsets=[0, 4]), bytes(8), "ask for 8 bytes, data_offsets give 4"),
        (_entry(data_offsets=[4, 12]), bytes(12), "leaves a gap before it"),
        (_entry(data_offsets=[0]), bytes(8), "expected two data_offsets"),
        (_entry(dtype="Q4"), bytes(8), "unknown dtype 'Q4'"),
        (_entry(dtype=["F32"]), bytes(8), "unknown dtype"),
        (_entry(dtype="F4", shape=[3]), bytes(8), "ask for 2 bytes"),
        (_entry(more=1), bytes(8), "expected dtype, shape and data_offsets"),
        ({"a": [1]}, bytes(8), "expected dtype, shape and data_offsets"),
        (GOOD | {"b": GOOD["a"]}, bytes(8), "overlaps the tensor before it"),
        (GOOD, bytes(7), "expected .* bytes, found .*; truncated"),
        (GOOD, bytes(9), "expected .* bytes, found .*; truncated"),
        (GOOD | {"__metadata__": {"format": 1}}, bytes(8), "__metadata__: expected an object of strings"),
        (GOOD | {"__metadata__": []}, bytes(8), "__metadata__: expected an object of strings"),
        (b'{"a": 1, "a": 2}', b"", "the key 'a' stands there twice"),
        (b"[" * 100_000, b"", "expected JSON"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, b"", "expected at most 32 levels"),
        (b'{"a": [' + b"1," * 600_000 + b"1]}", b"", "expected at most 500,000 values"),
        (b'{"a": NaN}', b"", "expected finite numbers, found NaN"),
        (b'{"a": -Infinity}', b"", "expected finite numbers"),
        (b'{"a": 1e999}', b"", "expected finite numbers"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "expected JSON"),
        (b'{"\xff": 1}', b"", "expected UTF-8, found a wrong byte at 2"),
        (b'"text"', b"", "expected a JSON object, found str"),
        (b"", b"", "expected JSON"),
    ],
)
def test_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(BundleError, match=message):
        read_header(_file(tmp_path, header, data), "x", BundleError)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**31, 1000])
def test_header_longer_than_the_file(length: int, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="the header claims"):
        read_header(_file(tmp_path, GOOD, bytes(8), length), "x", BundleError)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_hardly_a_file(size: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(size))
    with pytest.raises(BundleError, match="expected a safetensors file"):
        read_header(tmp_path, "x", BundleError)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(BundleError, match="run `git lfs pull` in the folder"):
        read_header(tmp_path, "x", BundleError)


_NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__" and name.isprintable())
_TENSORS = st.dictionaries(
    _NAMES, st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 5), max_size=4)), max_size=6
)


@given(tensors=_TENSORS, metadata=st.dictionaries(_NAMES, _NAMES, max_size=3))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_with_the_library(tensors: dict, metadata: dict, tmp_path: Path) -> None:
    shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
    header, size = build_header(shapes, metadata)
    (tmp_path / "ours").write_bytes(header + bytes(size))
    with safe_open(tmp_path / "ours", "pt") as file:
        read = {name: file.get_tensor(name) for name in list(file.keys())}
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read.items()} == shapes
        assert (file.metadata() or {}) == metadata
    (tmp_path / "theirs").write_bytes(save({name: torch.zeros(s, dtype=d) for name, (d, s) in shapes.items()}))
    for name in ("ours", "theirs"):
        entries = read_header(tmp_path, name, BundleError).entries
        assert {key: (DTYPES[entry.code], entry.shape) for key, entry in entries.items()} == shapes


_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    _SCALARS | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(_TEXT, _JSON, max_size=4))
def test_json_round_trip(document: dict) -> None:
    assert parse_json(dump_json(document), "it", BundleError) == document
