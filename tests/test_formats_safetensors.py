"""Safetensors files that lie are refused in bounded time and memory; written headers are the library's."""

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

from wisparse.formats.checkpoint import DTYPES, TensorFile, build_header, parse_tensors
from wisparse.formats.errors import BundleError

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def _content(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(**changes: Any) -> dict[str, Any]:
    return {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (_entry(shape=[2**60]), bytes(8)),
        (_entry(shape=[2**59] * 8), bytes(8)),
        (_entry(shape=[-2]), bytes(8)),
        (_entry(shape="2"), bytes(8)),
        (_entry(data_offsets=[-8, 0]), bytes(8)),
        (_entry(data_offsets=[8, 0]), bytes(8)),
        (_entry(data_offsets=[0, 4]), bytes(8)),
        (_entry(data_offsets=[4, 12]), bytes(12)),
        (_entry(dtype="Q4"), bytes(8)),
        ({"a": [1]}, bytes(8)),
        (GOOD | {"b": _entry(shape=[1], data_offsets=[4, 8])["a"]}, bytes(8)),
        (GOOD, bytes(7)),
        (GOOD, bytes(9)),
        (GOOD | {"__metadata__": {"format": 1}}, bytes(8)),
        (b"[" * 100_000, b""),
        (b'{"a":' * 900 + b"1" + b"}" * 900, b""),
        (b'{"a": [' + b"1," * 600_000 + b"1]}", b""),
        (b'{"\xff": 1}', b""),
        (b"", b""),
    ],
)
def test_refused(header: Any, data: bytes, tmp_path: Path) -> None:
    started = time.monotonic()
    content = _content(header, data)
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BundleError, match="x: no valid safetensors file, truncated or damaged"):
        TensorFile(tmp_path, "x", BundleError)
    with pytest.raises(BundleError, match="x: no valid safetensors file, truncated or damaged"):
        parse_tensors(content, "x", BundleError)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**31, 1000])
def test_header_longer_than_the_file(length: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(_content(GOOD, bytes(8), length))
    with pytest.raises(BundleError, match="the header claims"):
        TensorFile(tmp_path, "x", BundleError)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_hardly_a_file(size: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(size))
    with pytest.raises(BundleError, match="expected a safetensors file"):
        TensorFile(tmp_path, "x", BundleError)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(BundleError, match="run `git lfs pull` in the folder"):
        TensorFile(tmp_path, "x", BundleError)


_NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__" and name.isprintable())
_TENSORS = st.dictionaries(
    _NAMES, st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 5), max_size=4)), max_size=6
)


@given(tensors=_TENSORS, metadata=st.dictionaries(_NAMES, _NAMES, max_size=3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_with_the_library(tensors: dict, metadata: dict, tmp_path: Path) -> None:
    shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
    size = sum(torch.empty(shape, dtype=dtype).nbytes for dtype, shape in shapes.values())
    ours = build_header(shapes, metadata) + bytes(size)
    (tmp_path / "ours").write_bytes(ours)
    with safe_open(tmp_path / "ours", "pt") as file:
        read = {name: file.get_tensor(name) for name in list(file.keys())}
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read.items()} == shapes
        assert (file.metadata() or {}) == metadata
    theirs = save({name: torch.ones(s, dtype=d) for name, (d, s) in shapes.items()})
    (tmp_path / "theirs").write_bytes(theirs)
    for name, content in (("ours", ours), ("theirs", theirs)):
        opened = TensorFile(tmp_path, name, BundleError)
        found, _ = parse_tensors(content, name, BundleError)
        assert {key: (DTYPES[entry.code], entry.shape) for key, entry in opened.entries.items()} == shapes
        assert {key: entry for key, (entry, _) in found.items()} == opened.entries
        assert all(bytes(opened.read_bytes(key).numpy()) == bytes(data) for key, (_, data) in found.items())
    assert parse_tensors(ours, "ours", BundleError)[1] == metadata
