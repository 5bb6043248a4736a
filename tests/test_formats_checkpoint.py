"""Reading checkpoints: every architecture and layout, every way a source model can be wrong, safetensors files that lie."""

import contextlib
import json
import os
import shutil
import socket
import struct
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_models import make_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

from wisparse.converter.config import full_config
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import AccessError, BundleError, ResourceError, UnsupportedModelError
from wisparse.formats.tensor_file import DTYPES, INDEX, TensorFile, build_header, is_finite, parse_tensors

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_layouts(dtype: torch.dtype, shards: int, tied: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tiny_config(tie_word_embeddings=tied), dtype=dtype, shards=shards)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config.tie_word_embeddings is tied
    assert (HEAD in checkpoint.tensors) is not tied
    assert len(checkpoint.files) == shards
    stored = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(stored) == set(checkpoint.tensors)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in stored.values())
    for name in checkpoint.tensors:
        tensor = checkpoint.tensor(name)
        assert tensor.dtype is dtype
        assert torch.equal(tensor, stored[name])
        assert torch.equal(torch.cat([chunk.clone() for chunk in checkpoint.chunks(name, 64)]), stored[name].flatten())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_head_beside_tied_embeddings(shards: int, tmp_path: Path) -> None:
    """Tied if its values are the embedding's, whatever its dtype; else untied, with a note."""
    write_tiny_model(tmp_path, shards=shards)
    embedding = Checkpoint.open(tmp_path).tensor(EMBEDDING)
    other = embedding.clone()
    other[-1, -1] += 1e-3
    for head, tied in (
        (embedding, True), (embedding.bfloat16(), True), (embedding.half(), True),
        (other, False), (other.bfloat16() * 2, False), (torch.zeros_like(other), False),
    ):  # fmt: skip
        checkpoint = Checkpoint.open(write_tiny_model(tmp_path, shards=shards, add={HEAD: head}))
        assert checkpoint.config.tie_word_embeddings is checkpoint.config_dict["tie_word_embeddings"] is tied
        assert torch.equal(checkpoint.tensor(HEAD), head)
        assert len(checkpoint.notes) == (not tied)
    alone = Checkpoint.open(write_tiny_model(tmp_path, shards=shards, add={HEAD: other}, drop=(EMBEDDING,)))
    assert alone.config.tie_word_embeddings
    assert torch.equal(alone.tensor(EMBEDDING), other)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("model.layers.0.self_attn.rotary_emb.inv_freq",), "computed anew"),
        (("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.cos_cached"), "computed anew"),
        (("rope.freqs", "model.layers.0.self_attn.masked_bias", "position_ids"), "computed anew"),
        (("mtp.layers.0.qweight",), "MTP head"),
    ],
)
def test_tensors_that_loaders_ignore_are_ignored_with_a_note(names: tuple[str, ...], why: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny_model(tmp_path, shards=2, add={name: torch.ones(2) for name in names}))
    assert set(names).isdisjoint(checkpoint.tensors)
    (note,) = checkpoint.notes
    assert note.startswith(f"ignored {len(names)} tensor")
    assert why in note


def test_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Tensors that the index does not name or places elsewhere, files that it does not name, one file beside it."""
    from transformers import AutoModelForCausalLM

    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def change(file: str, value: float | None) -> None:
        tensors = load_file(tmp_path / file)
        tensors.pop(NORM, None)
        save_file(
            tensors | ({} if value is None else {NORM: torch.full((16,), value)}), tmp_path / file, {"format": "pt"}
        )

    for values, named, note in (
        ((3.0, None), first, None), ((3.0, 5.0), second, None), ((3.0, 5.0), first, "read from model-00002"),
        ((3.0, None), second, "read from model-00001"), ((None, 5.0), None, "read from model-00002"),
    ):  # fmt: skip
        write_tiny_model(tmp_path, shards=2)
        for file, value in zip((first, second), values, strict=True):
            change(file, value)
        index = json.loads((tmp_path / INDEX).read_text())
        index["weight_map"] |= {NORM: named}
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
        (tmp_path / INDEX).write_text(json.dumps(index))
        checkpoint = Checkpoint.open(tmp_path)
        assert torch.equal(checkpoint.tensor(NORM), AutoModelForCausalLM.from_pretrained(tmp_path).model.norm.weight)
        assert [note in one for one in checkpoint.notes] == [True] * (note is not None)
    shutil.copy(tmp_path / first, tmp_path / "model-00003-of-00003.safetensors")
    assert "not read" in Checkpoint.open(tmp_path).notes[-1]
    write_tiny_model(tmp_path, seed=1)
    whole = Checkpoint.open(tmp_path)
    assert "model.safetensors is read" in whole.notes[0]
    assert torch.equal(whole.tensor(NORM), AutoModelForCausalLM.from_pretrained(tmp_path).model.norm.weight)


@pytest.mark.parametrize(
    ("folder", "blobs"),
    [
        ("model", "blobs"),
        ("org/model", "blobs"),
        ("snapshots/model", "blobs"),
        ("org/snapshots/" + "a" * 40, "org/blobs"),
        ("models--org--name/" + "a" * 40, "models--org--name/blobs"),
        ("models--org--name/snapshots/main", "models--org--name/blobs"),
        ("models--org--name/snapshots/" + "a" * 40, "models--org--other/blobs"),
        ("models--org--name/snapshots/" + "a" * 40, "models--org--name/blobs/deeper"),
        ("models--org--name/snapshots/" + "a" * 40, "models--org--name/snapshots/blobs"),
    ],
)
def test_only_a_hub_snapshots_own_blobs_may_be_linked_to(folder: str, blobs: str, tmp_path: Path) -> None:
    (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    model = write_tiny_model(tmp_path / folder)
    (tmp_path / blobs).mkdir(parents=True)
    (model / "config.json").rename(model / "settings.json")
    (model / "config.json").symlink_to("settings.json")
    assert Checkpoint.open(model).config.hidden_size == 16
    (model / "config.json").unlink()
    (model / "settings.json").rename(tmp_path / blobs / "b10b")
    (model / "config.json").symlink_to(tmp_path / blobs / "b10b")
    with pytest.raises(UnsupportedModelError, match=r"config\.json: a symlink that leaves the folder"):
        Checkpoint.open(model)


@pytest.mark.parametrize("name", ["wisparse.json", "wisparse.safetensors"])
def test_a_bundle_is_told_by_its_own_files_and_not_by_an_entry_of_the_config(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config() | {"wisparse": {"format_version": 1}}))
    assert Checkpoint.open(tmp_path).config.hidden_size == 16
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="already a sparse bundle"):
        Checkpoint.open(tmp_path)


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_PARTIAL = {"model_type": "phi3", "rope_parameters": _ROPE | {"partial_rotary_factor": 0.3}}
_LLAMA3 = _ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = _ROPE | {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by HQQ: its scales"),
        ({"hidden_size": 32}, r"expected shape \(258, 32\), found \(258, 16\)"),
        ({"num_hidden_layers": 3}, "missing 9 tensors"),
        ({"num_hidden_layers": 1}, r"unexpected 9 tensors \('model\.layers\.1"),
        ({"num_hidden_layers": 9999}, "there are 20 tensors"),
        ({"num_hidden_layers": 2**26}, "num_hidden_layers: expected at most"),
        ({"attention_bias": True}, r"missing 8 tensors \('model\.layers\.0\.self_attn\.q_proj\.bias'"),
        ({"tie_word_embeddings": False}, r"missing 1 tensor \('lm_head\.weight'\)"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: expected true or false, found 'false'"),
        ({"model_type": "mistral", "sliding_window": -3}, "sliding_window: expected a positive integer"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings: expected at most"),
        ({"rope_parameters": _ROPE | {"rope_type": "linear"}}, "factor: expected a positive number, found None"),
        ({"rope_parameters": _ROPE | {"rope_theta": 1e40}}, "rope_theta: expected a positive number"),
        (_PARTIAL, "expected an even number of dimensions, found 1"),
        ({"rope_parameters": _LLAMA3 | {"factor": -1}}, "rope_parameters.factor: expected a positive number"),
        ({"rope_parameters": _LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor: expected another number than high"),
        ({"rope_parameters": _LONGROPE | {"long_factor": [1.0]}}, "long_factor: expected 2 numbers"),
        ({"rope_parameters": _LONGROPE | {"short_factor": [1, "x"]}}, "short_factor: expected a positive number"),
    ],
)
def test_config_that_does_not_fit(changes: dict, message: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config() | changes))
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint.open(tmp_path)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    for name, tensor, message in (
        ("model.norm.weight", torch.ones(17), r"model\.norm\.weight: expected shape \(16,\), found \(17,\)"),
        ("model.norm.weight", torch.ones(16).char(), "expected BF16, F16 or F32, found I8; quantised"),
        ("model.norm.weight", torch.ones(16).to(torch.float8_e4m3fn), "found F8_E4M3; quantised"),
        ("score.weight", torch.ones(1), r"unexpected 1 tensor \('score\.weight'\)"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            Checkpoint.open(write_tiny_model(tmp_path, add={name: tensor}))


def test_weights_in_mlx_layout(tmp_path: Path) -> None:
    """As mlx-lm stores LFM2's convolutions, and as it names Qwen3's experts."""
    for name, change, message in (
        ("lfm2", lambda t: {n: w.transpose(1, 2) if w.dim() == 3 else w for n, w in t.items()}, "expected shape"),
        ("qwen3-moe", lambda t: {n.replace("experts.", "switch_mlp."): w for n, w in t.items()}, "missing"),
    ):
        folder = make_checkpoint(name, tmp_path / name)
        tensors = {n: w.contiguous() for n, w in change(load_file(folder / "model.safetensors")).items()}
        for form, hint in (("pt", False), ("mlx", True)):
            save_file(tensors, folder / "model.safetensors", metadata={"format": form})
            with pytest.raises(UnsupportedModelError, match=message) as refusal:
                Checkpoint.open(folder, complete=full_config)
            assert ("convert the model that it was made from" in str(refusal.value)) is hint


def test_no_weights_and_no_folder(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"found pytorch_model\.bin; pickle files can run code"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UnsupportedModelError, match="no weights"):
        Checkpoint.open(tmp_path)
    with pytest.raises(AccessError, match="expected a folder, found nothing"):
        Checkpoint.open(tmp_path / "nope")
    with pytest.raises(AccessError, match="expected a folder, found a file"):
        Checkpoint.open(tmp_path / "config.json")


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    for name, make, opens in (
        (b"model\xff", write_tiny_model, Checkpoint.open),
        (b"bundle\xff", lambda folder: write_tiny_bundle(folder, write_tiny_model(tmp_path / "plain")), Bundle.open),
    ):
        folder = make(tmp_path / "made").rename(tmp_path / os.fsdecode(name))
        with pytest.raises((UnsupportedModelError, BundleError), match=r"path is not UTF-8, .*; rename it$") as caught:
            opens(folder)
        assert str(caught.value).isprintable()


_NO_NAME = "expected a .safetensors file in the folder"


@pytest.mark.parametrize(
    ("file", "message", "drop"),
    [
        ("../model-00001-of-00002.safetensors", _NO_NAME, ()),
        ("/etc/passwd", _NO_NAME, ()),
        ("pytorch_model-00001.bin", _NO_NAME, ()),
        (["model-00001-of-00002.safetensors"], _NO_NAME, ()),
        ("other.safetensors", "other.safetensors: missing", ()),
        ("model-00002-of-00002.safetensors", "is missing, the index places it there", ("model.norm.weight",)),
    ],
)
def test_index_paths(file: object, message: str, drop: tuple[str, ...], tmp_path: Path) -> None:
    write_tiny_model(tmp_path, shards=2, drop=drop)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket", "dangling", "loop", "outside"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.timeout(20)
def test_not_a_regular_file(name: str, kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    elif kind == "socket":
        with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as server:  # its path has to be short
            server.bind(name)
    else:
        (tmp_path / "elsewhere").write_bytes(data)
        links = {"device": "/dev/zero", "dangling": "nothing", "loop": name, "outside": tmp_path / "elsewhere"}
        (folder / name).symlink_to(links[kind])
    with pytest.raises(UnsupportedModelError, match=name):
        Checkpoint.open(folder)


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file may claim a terabyte, which an address space under a limit does not hold."""
    (tmp_path / "x").write_bytes(_content(GOOD, bytes(8)))
    monkeypatch.setattr("wisparse.formats.tensor_file.safe_open", Mock(side_effect=MemoryError("os error 12")))
    with pytest.raises(BundleError, match=r"x: its [\d,]+ bytes cannot be mapped into memory"):
        TensorFile(tmp_path, "x", BundleError)


def test_truncated_and_replaced_while_open(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny_model(tmp_path))
    file = tmp_path / "model.safetensors"
    status = file.stat()
    os.truncate(file, status.st_size - 4)
    with pytest.raises(UnsupportedModelError, match="changed on disk"):
        checkpoint.tensor("model.norm.weight")
    save_file(load_file(write_tiny_model(tmp_path / "b", seed=9) / file.name), file)
    with pytest.raises(UnsupportedModelError, match="changed on disk"):
        list(checkpoint.chunks("model.norm.weight"))
    with pytest.raises(UnsupportedModelError, match=r"nothing\.weight: not among the tensors"):
        checkpoint.tensor("nothing.weight")


def test_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(write_tiny_model(tmp_path))
    monkeypatch.setattr(np, "empty", Mock(side_effect=MemoryError))
    with pytest.raises(ResourceError, match="not enough memory for 64 bytes"):
        checkpoint.tensor("model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_is_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2]
    ordinary = torch.tensor(numbers, dtype=dtype)
    assert is_finite(ordinary)
    assert is_finite(-ordinary.abs() - 1)
    for odd in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(torch.cat((ordinary, torch.tensor([odd], dtype=dtype))))
    if dtype.itemsize == 2:  # every pattern there is
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        assert [is_finite(patterns[i : i + 1]) for i in range(0, 2**16, 7)] == patterns[::7].isfinite().tolist()


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def _content(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(**changes: Any) -> dict[str, Any]:
    return {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        *((_entry(shape=shape), bytes(8)) for shape in ([2**60], [2**59] * 8, [-2], "2")),
        *((_entry(data_offsets=place), bytes(8)) for place in ([-8, 0], [8, 0], [0, 4])),
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
def test_safetensors_files_that_lie_are_refused_in_bounded_time(header: Any, data: bytes, tmp_path: Path) -> None:
    started = time.monotonic()
    content = _content(header, data)
    (tmp_path / "x").write_bytes(content)
    for read in (lambda: TensorFile(tmp_path, "x", BundleError), lambda: parse_tensors(content, "x")):
        with pytest.raises(BundleError, match="x: no valid safetensors file, truncated or damaged"):
            read()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((_content(GOOD, bytes(8), n), "the header claims") for n in (2**63, 2**64 - 1, 2**31)),
        *((bytes(size), "no valid safetensors file, truncated or damaged") for size in (0, 1, 7)),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "run `git lfs pull` in the folder"),
    ],
)
def test_hardly_a_safetensors_file(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BundleError, match=message):
        TensorFile(tmp_path, "x", BundleError)


_NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__" and name.isprintable())
_SHAPES = st.lists(st.integers(0, 5), max_size=4)
_TENSORS = st.dictionaries(
    _NAMES, st.tuples(st.sampled_from([getattr(torch, name) for name, _ in DTYPES.values()]), _SHAPES), max_size=6
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
        found, _ = parse_tensors(content, name)
        entries = opened.entries.items()
        assert {key: (getattr(torch, DTYPES[entry.code][0]), entry.shape) for key, entry in entries} == shapes
        assert {key: entry for key, (entry, _) in found.items()} == opened.entries
        assert all(bytes(opened.read(key).numpy()) == bytes(data) for key, (_, data) in found.items())
    assert parse_tensors(ours, "ours")[1] == metadata
