"""Writing bundles: the bytes, the files, and what is left after a failure at any point."""

import dataclasses
import errno
import hashlib
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_bundle import CLASSES, files_of, tiny_config, tiny_levels, tiny_recipe, write_tiny_bundle, write_tiny_model

from wisparse.formats import write as write_room
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, ResourceError, UnsupportedModelError, UsageError
from wisparse.formats.write import check_output, write_bundle

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@given(data=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_round_trip(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("round-trip")
    heads = data.draw(st.sampled_from([(4, 2), (3, 3), (2, 1)]))
    sizes = {"intermediate_size": 20, "num_hidden_layers": 3, "vocab_size": 40}
    drawn = {name: data.draw(st.integers(1, most)) for name, most in sizes.items()}
    drawn |= {"hidden_size": 2 * data.draw(st.integers(1, 9)), "tie_word_embeddings": data.draw(st.booleans())}
    heads = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    config = tiny_config(data.draw(st.sampled_from(CLASSES)), **drawn, **heads)
    stored = data.draw(st.sampled_from(list(DTYPES.values())))
    write_tiny_model(folder / "model", config, dtype=stored, shards=data.draw(st.integers(1, 3)))
    source = Checkpoint.open(folder / "model")
    sparsities = data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.95]), unique=True, min_size=1).map(sorted))
    levels = tiny_levels(source.config, *sparsities)
    recipe = tiny_recipe(source.config, levels, base_model=data.draw(st.text(max_size=8)))
    dtype = data.draw(st.sampled_from(["auto", *DTYPES]))
    size = data.draw(st.integers(1, 20_000))
    write_bundle(source, recipe, levels, folder / "out", dtype=dtype, max_shard_size=size)
    bundle = Bundle.open(folder / "out")
    verify_bundle(folder / "out")
    assert bundle.recipe == recipe
    assert bundle.config == dataclasses.replace(source.config, dtype=bundle.config.dtype)
    assert list(bundle.levels) == sparsities
    assert bundle.masks is bundle.levels[bundle.recipe.default]
    for sparsity, masks in levels.items():
        read = bundle.at(sparsity).masks
        assert list(read) == [projection.name for projection in source.config.projections()]
        for name, mask in read.items():
            assert torch.equal(mask.channel_scale, masks[name].channel_scale)
            assert (mask.threshold, mask.sparsity) == (masks[name].threshold, masks[name].sparsity)
    expected = stored if dtype == "auto" else DTYPES[dtype]
    for name in bundle.checkpoint.tensors:
        tensor = bundle.checkpoint.tensor(name)
        assert tensor.dtype is expected
        assert torch.equal(tensor, source.tensor(name).to(expected))
    for file in (bundle.folder / name for name in bundle.checkpoint.files):
        assert file.stat().st_size <= size + 4096 or len(load_file(file)) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it_dense_and_silently(tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    logging.getLogger("transformers").propagate = True

    config = tiny_config(tie_word_embeddings=tied, dtype="bfloat16")
    model = write_tiny_model(tmp_path / "model", config, dtype=torch.bfloat16)
    out = write_tiny_bundle(tmp_path / "out", model, max_shard_size="8KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    load = transformers.AutoModelForCausalLM.from_pretrained
    (ours, info), theirs = load(out, output_loading_info=True), load(model)
    assert [record.getMessage() for record in caplog.records] == []
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert ours.config.wisparse["sparsity"] == 0.5
    for (name, a), (_, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert a.dtype is torch.bfloat16, name
        assert torch.equal(a, b), name


def test_files(model: Path, tmp_path: Path) -> None:
    for name in ("USE_POLICY.md", "train_stats.json", "modeling_evil.py"):
        (model / name).write_text("{}")
    config = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoModel": "modeling_evil.X"}}
    (model / "config.json").write_text(json.dumps(config))
    extra = {"README.md": b"# Card", "figures/alpha.png": b"png", "conversion_report.json": b"{}"}
    out = write_tiny_bundle(tmp_path / "out", model, extra_files=extra)
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"}
    copied |= {"USE_POLICY.md"}
    written = {"config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    written |= {"wisparse.json", "wisparse.safetensors"}
    content = files_of(out)
    assert set(content) == copied | written | set(extra)
    assert all(content[name] == (model / name).read_bytes() for name in copied)
    assert all(content[name] == extra[name] for name in extra)
    sparse = {"format_version": 2, "sparsity": 0.5, "sparsities": [0.5], "sidecar": "wisparse.safetensors"}
    del config["auto_map"]
    assert json.loads(content["config.json"]) == {**config, "wisparse": sparse}
    files = json.loads(content.pop("wisparse.json"))["files"]
    assert files == {name: {"sha256": hashlib.sha256(data).hexdigest()} for name, data in content.items()}


def test_same_bytes_whatever_the_source(tmp_path: Path) -> None:
    outs = []
    for shards in (1, 3):
        model = write_tiny_model(tmp_path / str(shards), shards=shards)
        outs.append(files_of(write_tiny_bundle(tmp_path / f"out{shards}", model, max_shard_size="5KB")))
    assert outs[0] == outs[1]
    # Tied embeddings are written once.
    plain = write_tiny_model(tmp_path / "plain")
    head = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    twice = write_tiny_model(tmp_path / "twice", add={"lm_head.weight": head.clone()})
    assert files_of(write_tiny_bundle(tmp_path / "a", twice)) == files_of(write_tiny_bundle(tmp_path / "b", plain))
    other = write_tiny_model(tmp_path / "other", add={"lm_head.weight": head + 1})
    untied = Bundle.open(write_tiny_bundle(tmp_path / "c", other))
    assert not untied.config.tie_word_embeddings
    assert torch.equal(untied.checkpoint.tensor("lm_head.weight"), head + 1)


def test_dtype_is_told_in_the_config(model: Path, tmp_path: Path) -> None:
    config = json.loads((write_tiny_bundle(tmp_path / "a", model, dtype="bfloat16") / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    (model / "config.json").write_text(json.dumps(tiny_config(dtype=..., torch_dtype="float32")))
    config = json.loads((write_tiny_bundle(tmp_path / "b", model, dtype="float16") / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    assert "dtype" not in config


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_weights_that_are_not_finite(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    bad = torch.ones(16, dtype=dtype)
    bad[7] = value
    model = write_tiny_model(tmp_path / "model", dtype=dtype, add={"model.layers.1.input_layernorm.weight": bad})
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.input_layernorm\.weight: .* NaN or infinity"):
        write_tiny_bundle(tmp_path / "out", model)
    model = write_tiny_model(tmp_path / "model", add={"model.norm.weight": torch.full((16,), 7e4)})
    with pytest.raises(UnsupportedModelError, match=r"beyond float16's range; use bfloat16"):
        write_tiny_bundle(tmp_path / "out", model, dtype="float16")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]


def test_places_that_no_bundle_goes_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for out in (model, tmp_path):
        with pytest.raises(UsageError, match="source model"):
            check_output(out, True, source=model)
    with pytest.raises(UsageError, match=r"kept for unfinished work"):
        check_output(tmp_path / "x.partial", False)
    with pytest.raises(UsageError, match="is not a folder"):
        check_output(tmp_path / "thesis.tex" / "out", False)
    check_output(tmp_path / "new" / "deep", False, source=model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.full((16,), float("nan"))}, "expected finite positive values"),
        ({"scale": torch.ones(15)}, r"(channel_scale|expected)"),
        ({"threshold": 0.25}, "wisparse.json says threshold"),
        ({"sparsity": 0.96}, "sparsity"),
    ],
)
def test_what_could_not_be_read_is_not_left_behind(change: Any, message: str, model: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(model)
    levels = tiny_levels(source.config, 0.3, 0.5)
    recipe = tiny_recipe(source.config, levels)
    name = "model.layers.1.self_attn.q_proj"
    for masks in levels.values():
        masks[name] = dataclasses.replace(masks[name], **change)
    with pytest.raises(BundleError, match=message):
        write_bundle(source, recipe, levels, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def _fail_after(monkeypatch: pytest.MonkeyPatch, pieces: int, error: BaseException) -> None:
    """The n-th piece handed to the disk fails."""
    plain, left = write_room.write_all, iter(range(pieces))

    def write_all(file: Any, piece: Any) -> None:
        if next(left, None) is None:
            raise error
        plain(file, piece)

    monkeypatch.setattr(write_room, "write_all", write_all)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("pieces", "error", "expected", "words"),
    [
        *((pieces, FULL, ResourceError, "the disk is full") for pieces in (0, 1, 21, 24, 29)),
        (9, OSError(errno.EDQUOT, "Disk quota exceeded"), ResourceError, "the disk is full"),
        # Of a limit on the size of files.
        (9, OSError(errno.EFBIG, "File too large"), ResourceError, r"the disk is full \(File too large\)"),
        (9, OSError(errno.EIO, "Input/output error"), ResourceError, "cannot be written: Input/output error"),
        (9, KeyboardInterrupt(), KeyboardInterrupt, None),
        (9, MemoryError(), MemoryError, None),
    ],
)
def test_failure_leaves_nothing(
    pieces: int, error: BaseException, expected: type, words: str | None, model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    out = write_tiny_bundle(tmp_path / "out", model)
    before = files_of(out)
    _fail_after(monkeypatch, pieces, error)
    for folder, overwrite in ((tmp_path / "new", False), (out, True)):
        with pytest.raises(expected, match=words):
            write_tiny_bundle(folder, model, overwrite=overwrite)
        _fail_after(monkeypatch, 0, error)
    assert (sorted(file.name for file in tmp_path.iterdir()), files_of(out)) == (["model", "out"], before)


def test_too_little_room_is_seen_before_any_work(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = sum(map(len, files_of(write_tiny_bundle(tmp_path / "probe", model)).values()))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ResourceError, match=r"expected [\d,]+ bytes of free disk, found 1,000") as caught:
        write_tiny_bundle(tmp_path / "out", model)
    assert written <= int(str(caught.value).split("expected ")[1].split()[0].replace(",", "")) <= written + (2 << 20)
    assert not list(tmp_path.glob("out*"))


def test_damage_on_the_way_to_disk_is_seen(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_room.write_all

    def flip(file: Any, piece: Any) -> None:
        damaged = bytearray(piece)
        damaged[-1] ^= 1
        plain(file, damaged if file.name.endswith("of-00001.safetensors") else piece)

    monkeypatch.setattr(write_room, "write_all", flip)
    with pytest.raises((BundleError, ResourceError)):
        write_tiny_bundle(tmp_path / "out", model)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_memory_while_writing_is_not_the_model(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=512, vocab_size=100_000)
    model = write_tiny_model(tmp_path / "model", config, dtype=torch.float16)
    assert Checkpoint.open(model).nbytes > 100e6
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from tiny_bundle import write_tiny_bundle
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_tiny_bundle(Path({str(tmp_path / "out")!r}), Path({str(model)!r}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=120)
    assert int(done.stdout) < 60e3, done.stderr
