"""Quantised checkpoints as people publish them: read to the very numbers they stand for, or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantised_models import PUBLISHED, change_config, change_tensors, quantise_model
from safetensors.torch import load_file
from tiny_bundle import tiny_config, write_tiny_model

from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.quantization import read_quantisation
from wisparse.formats.weight_types import QuantizedMatrix

FIRST = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def published(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A new copy of a quantised model by its name in `PUBLISHED`."""
    folder, made = tmp_path_factory.mktemp("published"), 0

    def make(name: str) -> Path:
        nonlocal made
        made += 1
        return quantise_model(plain, folder / f"{made}", *PUBLISHED[name]())

    return make


def by_the_package(folder: Path, name: str) -> torch.Tensor:
    """A weight as the package compressed-tensors widens it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    prefix = name.removesuffix("weight")
    stored = {
        key[len(prefix) :]: t for key, t in load_file(folder / "model.safetensors").items() if key.startswith(prefix)
    }
    return BaseCompressor.get_value_from_registry(config.format).decompress(stored, scheme)["weight"]


OF_THE_PACKAGE = [name for name in PUBLISHED if not name.startswith(("gptq", "awq")) and "s, as" not in name]
OF_THE_PACKAGE.remove("fp8 tensor, with activations' scales")


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_weights_are_those_that_compressed_tensors_reads(name: str, published: Callable[..., Path]) -> None:
    folder = published(name)
    checkpoint = Checkpoint.open(folder)
    assert len(checkpoint.quantised) == 14
    for weight in checkpoint.quantised:
        matrix = checkpoint.matrix(weight)
        assert isinstance(matrix, QuantizedMatrix)
        assert matrix.shape == checkpoint.shape(weight)
        if name == "pack int4 groups, zero points" and matrix.shape[0] == 8:
            continue  # a single word of zero points: the package trips over its own strides
        expected = by_the_package(folder, weight)
        assert expected.dtype is torch.float32
        assert torch.equal(checkpoint.tensor(weight), expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_near_those_they_were_made_from(name: str, plain: Path, published: Callable[..., Path]) -> None:
    checkpoint, source = Checkpoint.open(published(name)), Checkpoint.open(plain)
    for weight in checkpoint.quantised:
        matrix, exact = checkpoint.matrix(weight), source.tensor(weight)
        assert isinstance(matrix, QuantizedMatrix)
        step = matrix.scales.repeat_interleave(matrix.shape[1] // matrix.scales.shape[1], dim=1)
        # Half a step; of fp8 the largest numbers are 32 steps apart. Scales in half precision are a little off.
        bound = step * (16 if matrix.kind == "fp8" else 0.51)
        assert ((checkpoint.tensor(weight) - exact).abs() <= bound).all()
    for other in set(source.tensors) - set(checkpoint.quantised):
        assert torch.equal(checkpoint.tensor(other), source.tensor(other))


def test_a_weight_that_no_scheme_is_for_is_the_sources_own(published: Callable[..., Path]) -> None:
    """What is left out by name, by pattern and by block stays a plain weight; others are in codes."""
    folder = published("pack int4 groups")
    names = ["model.layers.0.mlp.down_proj", "re:.*layers\\.1\\.self_attn\\.o_proj$"]
    left = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"]

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in left:
            for part in ("weight_packed", "weight_scale"):
                del tensors[f"{name}.{part}"]
            tensors[f"{name}.weight"] = torch.ones(*tensors.pop(f"{name}.weight_shape").tolist())

    change_tensors(folder, widen)
    change_config(folder, lambda d: d["quantization_config"].update(ignore=names))
    checkpoint = Checkpoint.open(folder)
    assert len(checkpoint.quantised) == 12
    assert all(isinstance(checkpoint.matrix(f"{name}.weight"), torch.Tensor) for name in left)


def test_projections_may_differ_where_they_read_different_inputs(plain: Path, tmp_path: Path) -> None:
    four, config = PUBLISHED["pack int4 groups"]()
    eight, other = PUBLISHED["pack int8 rows"]()
    folder = quantise_model(plain, tmp_path / "mixed", lambda w: (eight if w.shape[1] == 24 else four)(w), config)
    groups = {**config["config_groups"], "down": other["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}}
    change_config(folder, lambda d: d["quantization_config"].update(config_groups=groups))
    kinds = {name: Checkpoint.open(folder).matrix(name).kind for name in Checkpoint.open(folder).quantised}
    assert {kind for name, kind in kinds.items() if "down_proj" in name} == {"int8"}
    assert {kind for name, kind in kinds.items() if "down_proj" not in name} == {"int4"}


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda t: t.pop(FIRST + name))


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda t: t.update({FIRST + name: change(t[FIRST + name])}))


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, lambda d: d["quantization_config"].update(changes))


def _weights(**changes: Any) -> Callable[[Path], None]:
    def change(document: dict[str, Any]) -> None:
        document["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)

    return lambda folder: change_config(folder, change)


def _group(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(
        folder, lambda d: d["quantization_config"]["config_groups"]["group_0"].update(changes)
    )


def _at(place: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[place] = value
        return tensor

    return change


_PACK, _SCALES = "pack int4 groups", r"q_proj\.weight_scale"
_OTHER = {"targets": ["re:.*k_proj"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "scales missing": (
        _PACK,
        _drop("weight_scale"),
        r"missing 1 tensor .*weight_scale.*does not say what the files hold",
    ),
    "scales misshaped": (
        _PACK,
        _set("weight_scale", lambda t: t[:, :1]),
        _SCALES + r": expected shape \(16, 2\), found",
    ),
    "scales of another type": (
        _PACK,
        _set("weight_scale", lambda t: t.int()),
        _SCALES + ": expected BF16 or F16 or F32",
    ),
    "a scale of zero": (_PACK, _set("weight_scale", _at(3, 0.0)), r"expected finite positive scales, found 0"),
    "a negative scale": (_PACK, _set("weight_scale", _at(3, -1.0)), r"expected finite positive scales, found -1"),
    "a scale without end": (_PACK, _set("weight_scale", _at(3, float("inf"))), "NaN or infinity"),
    "a scale that is no number": (_PACK, _set("weight_scale", _at(3, float("nan"))), "NaN or infinity"),
    "a scale too large": (_PACK, _set("weight_scale", _at(3, 3e38)), "expected finite positive scales, found"),
    "words missing": (_PACK, _set("weight_packed", lambda t: t[:, :1]), r"weight_packed: expected shape \(16, 2\)"),
    "words of another type": (
        _PACK,
        _set("weight_packed", lambda t: t.long()),
        "weight_packed: expected I32, found I64",
    ),
    "groups that do not divide": (_PACK, _weights(group_size=7), "groups of 7 do not divide its 16 channels"),
    "groups of another size": (
        _PACK,
        _weights(group_size=4),
        r"weight_scale: expected shape \(16, 4\), found \(16, 2\)",
    ),
    "a group of nothing": (_PACK, _weights(group_size=0), "group_size: expected a positive integer, found 0"),
    "another shape stated": (
        _PACK,
        _set("weight_shape", lambda t: t.flip(0) + 1),
        r"weight_shape: expected \[16, 16\]",
    ),
    "zero points not said": (_PACK, _weights(symmetric=False), "missing 14 tensors .*weight_zero_point"),
    "zero points said, not there": ("pack int4 groups, zero points", _weights(symmetric=True), "unexpected 14 tensors"),
    "three bits": (_PACK, _weights(num_bits=3), "3-bit 'int' by 'group' is not among the schemes"),
    "act-order": (_PACK, _weights(actorder="group"), "reordered by their activations"),
    "weights rounded at use": (_PACK, _weights(dynamic=True), "rounded anew at every use"),
    "another format": (_PACK, _config(format="marlin-24"), "'marlin-24' of 4-bit"),
    "four-bit floats": (_PACK, _config(format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized' of 4-bit"),
    "no groups": (_PACK, _config(config_groups={}), "config_groups: expected an object"),
    "groups of nonsense": (_PACK, _config(config_groups={"x": []}), "config_groups.x: expected an object"),
    "no weights": (_PACK, _group(weights=None), "weights: expected an object"),
    "no targets": (_PACK, _group(targets=["LayerNorm"]), "targets are none of the model's linear layers"),
    "targets of nonsense": (_PACK, _group(targets="Linear"), "targets: expected a list of names"),
    "not a pattern": (_PACK, _config(ignore=["re:("]), "not a regular expression"),
    "a pattern without end": (_PACK, _config(ignore=["re:(a*)*b"]), "too intricate"),
    "a long pattern": (_PACK, _config(ignore=["re:.*.*.*.*x"]), "too intricate"),
    "many patterns": (_PACK, _config(ignore=["re:x"] * 2000), "too many to be tried"),
    "left out, and there": (
        _PACK,
        _config(ignore=["model.layers.0.mlp.down_proj"]),
        "does not say what the files hold",
    ),
    "one of q, k, v left out": (_PACK, _config(ignore=["re:.*k_proj"]), "q_proj and k_proj read one input"),
    "one of q, k, v in other bits": (
        _PACK,
        lambda f: change_config(f, lambda d: d["quantization_config"]["config_groups"].update(other=_OTHER)),
        "q_proj and k_proj read one input",
    ),
    "two schemes for one": (
        _PACK,
        lambda f: change_config(
            f, lambda d: d["quantization_config"]["config_groups"].update(b=_OTHER | {"targets": ["Linear"]})
        ),
        "a target of two different schemes",
    ),
    "not compressed yet": (_PACK, _config(quantization_status="initialized"), "expected 'compressed'"),
    "a quantised cache": (_PACK, _config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "sparse as well": (_PACK, _config(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not known"),
    "turned as well": (_PACK, _config(transform_config={"config_groups": {}}), "transform_config is not known"),
    "plain weights said to be packed": (
        "int8 rows",
        lambda f: _config(format="pack-quantized")(f),
        "missing .*weight_packed.*does not say what the files hold",
    ),
    "packed weights said to be plain": (_PACK, _config(format="int-quantized"), "'int-quantized' of 4-bit"),
    "int8 said to be fp8": (
        "int8 rows",
        lambda f: (_config(format="float-quantized")(f), _weights(type="float")(f)),
        "expected F8_E4M3, found I8",
    ),
    "fp8 that is no number": ("fp8 rows", _set("weight", lambda t: _nan(t)), "hold NaN"),
    "fp8 with zero points": ("fp8 rows", _weights(symmetric=False), "is not among the schemes"),
    "fp8 of another kind": ("fp8 blocks, as DeepSeek's", _config(fmt="e5m2"), "fmt: expected 'e4m3'"),
    "blocks of nonsense": ("fp8 blocks, as DeepSeek's", _config(weight_block_size=[0, 8]), "a block of two sizes"),
    "blocks that do not divide": (
        "fp8 blocks, as DeepSeek's",
        _config(weight_block_size=[5, 7]),
        "groups of 7 do not divide",
    ),
    "gptq, act-order": ("gptq", _set("g_idx", lambda t: t.flip(0)), "act-order: desc_act"),
    "gptq, groups of another size": ("gptq", _config(group_size=4), r"qzeros: expected shape \(4, 2\), found \(2, 2\)"),
    "gptq, words missing": ("gptq", _set("qweight", lambda t: t[:1]), r"qweight: expected shape \(2, 16\)"),
    "gptq, other bits": ("gptq", _config(bits=3), "bits: expected 4, found 3"),
    "gptq, layers apart": ("gptq", _config(dynamic={"x": {}}), "settings of their own"),
    "gptq, another version": ("gptq", _config(checkpoint_format="marlin"), "found 'marlin', which is packed"),
    "gptq, a scale of zero": ("gptq", _set("scales", _at(3, 0.0)), "expected finite positive scales"),
    "awq, another version": ("awq", _config(version="gemv"), "found 'gemv', which is packed in another way"),
    "awq, words missing": ("awq", _set("qweight", lambda t: t[:, :1]), r"qweight: expected shape \(16, 2\)"),
    "awq, left out, and there": ("awq", _config(modules_to_not_convert=["down_proj"]), "what the files hold"),
    "bitsandbytes": (_PACK, _config(quant_method="bitsandbytes"), "by bitsandbytes: its codes are places in a table"),
    "unknown": (_PACK, _config(quant_method="zip"), "quantised by 'zip'; known are compressed-tensors"),
    "no method": (_PACK, _config(quant_method=7), "quantised by 7"),
    "a list": (_PACK, lambda f: change_config(f, lambda d: d.update(quantization_config=[1])), "expected an object"),
    "config says nothing": (
        "int8 rows",
        lambda f: change_config(f, lambda d: d.pop("quantization_config")),
        "unexpected 14 tensors .*does not say what the files hold",
    ),
}


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    codes = tensor.view(torch.uint8).clone()
    codes[2, 3] = 0xFF
    return codes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case: str, published: Callable[..., Path]) -> None:
    """With the error of a source, exit code 3, and of a bundle, 6."""
    name, change, words = REFUSED[case]
    folder = published(name)
    change(folder)
    # What only the numbers show is seen when a weight is read, before it is used.
    with pytest.raises(UnsupportedModelError, match=words):
        Checkpoint.open(folder).matrix(f"{FIRST}weight")
    names = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BundleError, match=words):
        Checkpoint.open(folder, error=BundleError).matrix(f"{FIRST}weight")


def test_reordered_channels_and_false_shapes_are_refused_before_any_weight_is_read(
    published: Callable[..., Path],
) -> None:
    for case in ("gptq, act-order", "another shape stated"):
        name, change, words = REFUSED[case]
        folder = published(name)
        change(folder)
        with pytest.raises(UnsupportedModelError, match=words):
            Checkpoint.open(folder)


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["re:.*", "group"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_keys = ["quant_method", "config_groups", "ignore", "format", "bits", "group_size", "version", "weight_block_size"]
_inner = ["num_bits", "type", "strategy", "group_size", "symmetric", "block_structure", "dynamic", "actorder"]


@given(
    name=st.sampled_from(["pack int4 groups", "fp8 blocks", "fp8 blocks, as DeepSeek's", "gptq", "awq"]),
    changes=st.dictionaries(st.sampled_from([*_keys, "modules_to_not_convert", "kv_cache_scheme"]), _junk, max_size=2),
    inner=st.dictionaries(st.sampled_from(_inner), _junk, max_size=2),
    beside=st.dictionaries(st.sampled_from(["targets", "input_activations", "format"]), _junk, max_size=1),
)
def test_any_config_is_read_or_refused(name: str, changes: Any, inner: Any, beside: Any) -> None:
    config = json.loads(json.dumps(CONFIGS[name]))
    if "config_groups" in config:
        config["config_groups"]["group_0"]["weights"].update(inner)
        config["config_groups"]["group_0"].update(beside)
    model = ModelConfig.from_dict(tiny_config())
    try:
        found = read_quantisation({"quantization_config": {**config, **changes}}, model)
    except UnsupportedModelError:
        return
    for packing in found.values():
        with suppress(ValueError):  # groups that do not divide
            assert packing.parts(16, 16)


CONFIGS = {name: make()[1] for name, make in PUBLISHED.items()}
