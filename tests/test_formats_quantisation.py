"""Quantised checkpoints as people publish them: read to the very numbers they stand for, or refused in one sentence; and
weights rounded to codes, at most half a step away."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from quantised_models import PUBLISHED, change_config, change_tensors, gptq, quantise_model
from safetensors.torch import load_file
from test_formats_architectures import JUNK
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

from wisparse.formats import weight_types
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.quantization import read_packings, read_quantisation
from wisparse.formats.weight_types import QuantizedMatrix, quantise

FIRST = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def published(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A new copy of a quantised model by its name in `PUBLISHED`."""
    return lambda name: quantise_model(plain, tmp_path_factory.mktemp("published") / "model", *PUBLISHED[name]())


def by_the_package(folder: Path, name: str) -> torch.Tensor:
    """A weight as the package compressed-tensors widens it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    prefix, tensors = name.removesuffix("weight"), load_file(folder / "model.safetensors")
    stored = {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    return BaseCompressor.get_value_from_registry(config.format).decompress(stored, scheme)["weight"]


OF_THE_PACKAGE = [name for name in PUBLISHED if not name.startswith(("gptq", "awq", "auto")) and "s, as" not in name]
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
        step = matrix.scales.repeat_interleave(matrix.shape[1] // matrix.scales.shape[1], dim=1)
        # Half a step; of fp8 the largest numbers are 32 steps apart. Scales in half precision are a little off.
        bound = step * (16 if matrix.kind == "fp8" else 0.51)
        assert ((checkpoint.tensor(weight) - exact).abs() <= bound).all()
    for other in set(source.tensors) - set(checkpoint.quantised):
        assert torch.equal(checkpoint.tensor(other), source.tensor(other))


def test_a_weight_that_no_scheme_is_for_is_the_sources_own(published: Callable[..., Path]) -> None:
    """What is left out by name, by pattern and by block stays a plain weight; others are in codes."""
    folder = published("pack int4 groups")
    left = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"]
    names = [left[0], "re:.*layers\\.1\\.self_attn\\.o_proj$"]

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


_TEXT = "model.language_model.layers"  # as of a model that reads images
_DOWN = {f"{_TEXT}.0.mlp.down_proj": {"bits": 16, "data_type": "float"}, f"{_TEXT}.1.mlp.down_proj": {"group_size": 4}}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("auto-round", {"extra_config": _DOWN, "block_name_to_quantize": [_TEXT]}),
        # As AutoRound 0.16 writes them; a name comes before a pattern, the first pattern before others.
        ("auto-round", {"extra_config": {
            r".*layers\.0\.mlp\.down_proj.*": {"bits": 16}, r".*mlp\.down_proj.*": {"group_size": 4}, ".*q_proj": {},
        }}),
        ("auto-round", {"extra_config": {
            "model.layers.0.mlp.down_proj": {"bits": 16}, r".*model\.language_model\.layers\.[01]\.mlp\.down.*": {"group_size": 4},
        }}),
        # As AutoRound and GPTQModel write them.
        ("gptq", {"dynamic": {r"-:.*model\.layers\.0\.mlp\.down_proj.*": {}, r"+:.*\.down_proj": {"group_size": 4}}}),
        ("gptq", {"dynamic": {"lm_head": {}, "-:model.layers.0.mlp.d": {"bits": 8}, ".*mlp.down": {"group_size": 4}}}),
    ],
)  # fmt: skip
def test_settings_by_layer(name: str, changed: dict[str, Any], plain: Path, published: Callable[..., Path]) -> None:
    folder, left = published(name), "model.layers.0.mlp.down_proj."
    weight = Checkpoint.open(plain).tensor(f"{left}weight")

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[left + part]
        tensors[f"{left}weight"] = weight
        other = "model.layers.1.mlp.down_proj."
        tensors |= {other + part: one for part, one in gptq(Checkpoint.open(plain).tensor(f"{other}weight"), 4).items()}

    change_tensors(folder, widen)
    change_config(folder, lambda d: d["quantization_config"].update(changed))
    found = Checkpoint.open(folder)
    assert found.quantised["model.layers.1.mlp.down_proj.weight"].packing.group == 4
    assert len(found.quantised) == 13
    assert torch.equal(found.tensor(f"{left}weight"), weight)


def test_patterns_of_all_routers_of_a_large_model() -> None:
    """AutoRound names each router of a mixture by a pattern, which is tried on every expert."""
    layers = [
        f"model.layers.{at}.mlp.experts.{e}.{p}_proj" for at in range(94) for e in range(128) for p in ("gate", "up")
    ]
    routers = {rf".*model\.layers\.{at}\.mlp\.gate.*": {"bits": 16} for at in range(94)}
    found = read_packings(PUBLISHED["auto-round"]()[1] | {"extra_config": routers}, layers)
    assert found.keys() == set(layers)


Change = Callable[[Path], None]


@pytest.mark.parametrize(
    ("offset", "said", "form"),
    [
        (0, "auto_round:auto_gptq", "auto_round:gptqmodel"),
        (1, "auto_round:gptqmodel", "auto_round:auto_gptq"),
        (0, "gptq", "gptq_v2"),
        (0, ..., "gptq_v2"),
        (1, "gptq_v2", "gptq"),
        (1, "gptq", None),
        (0, "gptq_v2", None),
    ],
)
def test_symmetric_zero_points_are_read_from_the_data(
    offset: int, said: Any, form: str | None, plain: Path, tmp_path: Path
) -> None:
    """Whatever ``checkpoint_format`` says, which a bundle then says right."""
    auto = str(said).startswith("auto")
    key = "packing_format" if auto else "checkpoint_format"
    settings = PUBLISHED["auto-round" if auto else "gptq"]()[1] | ({} if said is ... else {key: said})
    right = Checkpoint.open(quantise_model(plain, tmp_path / "right", *PUBLISHED["gptq"]()))
    folder = quantise_model(plain, tmp_path / "model", partial(gptq, offset=offset), settings)
    found = Checkpoint.open(folder)
    for name in right.quantised:
        assert torch.equal(found.tensor(name), right.tensor(name))
    assert [f"are those of {form!r}: read so" in note for note in found.notes] == [True] * (form is not None)
    bundle = Bundle.open(write_tiny_bundle(tmp_path / "bundle", folder)).checkpoint
    assert bundle.config_dict["quantization_config"].get(key, ...) == (said if form is None else form)
    assert torch.equal(bundle.tensor(f"{FIRST}weight"), right.tensor(f"{FIRST}weight"))
    last = "model.layers.1.mlp.down_proj."
    change_tensors(folder, lambda t: t[f"{last}qzeros"].view(-1)[1:2].fill_(0x11111111))
    said = r"down_proj.*expected zero points of 8, as sym is true, found [12] to 8"
    with pytest.raises(UnsupportedModelError, match=said):
        Checkpoint.open(folder).tensor(f"{last}weight")


@pytest.mark.parametrize(
    ("name", "scale"),
    [("gptq", "scales"), ("awq", "scales"), ("pack int4 groups", "weight_scale"), ("int8 rows", "weight_scale"),
     ("pack int8 groups, zero points", "weight_scale"), ("fp8 blocks, as DeepSeek's", "weight_scale_inv")],
)  # fmt: skip
def test_scales_may_be_negative_or_zero(name: str, scale: str, published: Callable[..., Path]) -> None:
    """AutoRound's are negative in half of the groups, those of pruned rows are 0."""
    folder = published(name)
    before = Checkpoint.open(folder).tensor(f"{FIRST}weight")
    for factor in (-1.0, 0.0):
        change_tensors(folder, lambda t, factor=factor: t.update({FIRST + scale: (t[FIRST + scale] * factor)}))
        assert torch.equal(Checkpoint.open(folder).tensor(f"{FIRST}weight"), before * factor)
    change_tensors(folder, lambda t: t[FIRST + scale].view(-1)[::3].fill_(-0.5))
    matrix = Checkpoint.open(folder).matrix(f"{FIRST}weight")
    assert isinstance(matrix, QuantizedMatrix)
    np.testing.assert_allclose(matrix.dequantise(torch.float32).double().numpy(), dequantised(matrix), rtol=2**-23)


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda folder: change_tensors(folder, lambda t: t.update({FIRST + name: change(t[FIRST + name])}))


def _at(name: str, value: float) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return _set(name, change)


def _config(at: str = "", **changes: Any) -> Change:
    """Changes in ``quantization_config``, or in an object inside it: ``a.b``."""

    def change(document: dict[str, Any]) -> None:
        found = document["quantization_config"]
        for key in filter(None, at.split(".")):
            found = found[key]
        found.update(changes)

    return lambda folder: change_config(folder, change)


_weights, _group = partial(_config, "config_groups.group_0.weights"), partial(_config, "config_groups.group_0")


def _float_config(folder: Path) -> None:
    _config(format="float-quantized")(folder)
    _weights(type="float")(folder)


_PACK, _SCALE, _BLOCKS = "pack int4 groups", "weight_scale", "fp8 blocks, as DeepSeek's"
_OTHER = {"targets": ["re:.*k_proj"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
_STORED = r"expected stored zero points of 7 \(gptq\) or 8 \(gptq_v2\)"
# What only the numbers show: seen when a weight is read, before it is used.
IN_NUMBERS: list[tuple[str, Change, str]] = [
    *((_PACK, _at(_SCALE, value), "expected finite scales, found 3e") for value in (3e38, -3e38)),
    *((_PACK, _at(_SCALE, float(value)), "NaN or infinity") for value in ("inf", "nan")),
    ("fp8 rows", _set("weight", lambda t: (t.view(torch.uint8) | 0x7F).view(t.dtype)), "hold NaN"),
]
REFUSED: list[tuple[str, Change, str]] = [
    # Tensors.
    (_PACK, lambda f: change_tensors(f, lambda t: t.pop(FIRST + _SCALE)), "missing 1 tensor .*weight_scale.*does not"),
    (_PACK, _set(_SCALE, lambda t: t[:, :1]), r"q_proj\.weight_scale: expected shape \(16, 2\), found"),
    (_PACK, _set(_SCALE, lambda t: t.int()), r"q_proj\.weight_scale: expected BF16 or F16 or F32"),
    (_PACK, _set("weight_packed", lambda t: t[:, :1]), r"weight_packed: expected shape \(16, 2\)"),
    (_PACK, _set("weight_packed", lambda t: t.long()), "weight_packed: expected I32, found I64"),
    (_PACK, _set("weight_shape", lambda t: t.flip(0) + 1), r"weight_shape: expected \[16, 16\]"),
    ("gptq", _at("qzeros", 0x77777776), "expected stored zero points of 7 .*, found 6 to 7"),
    ("gptq", _set("qzeros", lambda t: t * 0 + 0x66666666), "expected stored zero points of 7 .*or 8 .*, found 6"),
    ("gptq, zero points", _config(sym=True), rf"{_STORED}.* found \d+ to"),
    ("gptq", _set("g_idx", lambda t: t.flip(0)), "GPTQ with act-order is not supported"),
    ("gptq", _set("qweight", lambda t: t[:1]), r"qweight: expected shape \(2, 16\)"),
    ("awq", _set("qweight", lambda t: t[:, :1]), r"qweight: expected shape \(16, 2\)"),
    # Schemes.
    (_PACK, _weights(group_size=7), "groups of 7 do not divide its 16 channels"),
    (_PACK, _weights(group_size=4), r"weight_scale: expected shape \(16, 4\), found \(16, 2\)"),
    (_PACK, _weights(group_size=0), "group_size: expected a positive integer, found 0"),
    (_PACK, _weights(symmetric=False), "missing 14 tensors .*weight_zero_point"),
    ("pack int4 groups, zero points", _weights(symmetric=True), "unexpected 14 tensors"),
    (_PACK, _weights(num_bits=3), "3-bit 'int' by 'group' is not among the schemes"),
    (_PACK, _weights(actorder="group"), "reordered by their activations"),
    (_PACK, _weights(dynamic=True), "rounded anew at every use"),
    (_PACK, _config(format="marlin-24"), "'marlin-24' of 4-bit"),
    (_PACK, _config(format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized' of 4-bit"),
    (_PACK, _config(format="int-quantized"), "'int-quantized' of 4-bit"),
    ("int8 rows", _config(format="pack-quantized"), "missing .*weight_packed.*does not say what the files hold"),
    ("int8 rows", _float_config, "expected F8_E4M3, found I8"),
    ("fp8 rows", _weights(symmetric=False), "is not among the schemes"),
    (_BLOCKS, _config(fmt="e5m2"), "fmt: expected 'e4m3'"),
    (_BLOCKS, _config(weight_block_size=[0, 8]), "a block of two sizes"),
    (_BLOCKS, _config(weight_block_size=[5, 7]), "groups of 7 do not divide"),
    ("gptq", _config(group_size=4), r"qzeros: expected shape \(4, 2\), found \(2, 2\)"),
    ("gptq", _config(desc_act=True), r"GPTQ with act-order is not supported.*desc_act=False, or .*--weights int4"),
    (
        "auto-round",
        _config(packing_format="auto_round:exllamav2"),
        "found 'auto_round:exllamav2'; export it again as auto_round",
    ),
    ("auto-round", _config(bits=3), "bits: expected 4, found 3"),
    ("auto-round", _config(data_type="mx_fp"), "data_type: expected 'int', found 'mx_fp'"),
    ("auto-round", _config(extra_config={".*proj": {"bits": 8}}), "bits: expected 4, found 8"),
    ("auto-round", _config(extra_config={".*(": {"bits": 16}}), "extra_config: not a regular expression"),
    ("auto-round", _config(extra_config={"model.layers.0.self_attn.q_proj": {"bits": 8}}), "bits: expected 4, found 8"),
    ("auto-round", _config(block_name_to_quantize="model.layers.0"), "does not say what the files hold"),
    ("gptq", _config(bits=3), "bits: expected 4, found 3"),
    ("gptq", _config(dynamic={".*": {"bits": 8}}), "bits: expected 4, found 8"),
    ("gptq", _config(dynamic={".*": {"desc_act": True}}), "act-order is not supported"),
    ("gptq", _config(dynamic={"-:(a*)*b": {}}), "dynamic: a pattern too intricate"),
    ("gptq", _config(dynamic={"-:.*v_proj": {}}), "q_proj and v_proj read one input"),
    ("gptq", _config(dynamic=["x"]), "dynamic: expected an object of objects"),
    ("gptq", _config(checkpoint_format="marlin"), "found 'marlin', which is packed"),
    ("awq", _config(version="gemv"), "found 'gemv', which is packed in another way"),
    # Which layers.
    (_PACK, _config(config_groups={}), "config_groups: expected an object"),
    (_PACK, _config(config_groups={"x": []}), "config_groups.x: expected an object"),
    (_PACK, _group(weights=None), "weights: expected an object"),
    (_PACK, _group(targets=["LayerNorm"]), "targets are none of the model's linear layers"),
    (_PACK, _group(targets="Linear"), "targets: expected a list of names"),
    (_PACK, _config(ignore=["re:("]), "not a regular expression"),
    (_PACK, _config(ignore=["re:(a*)*b"]), "too intricate"),
    (_PACK, _config(ignore=["re:.*.*.*.*x"]), "too intricate"),
    (_PACK, _config(ignore=["re:.*x.*y.*z"] * 2000), "too many to be tried"),
    (_PACK, _config(ignore=["model.layers.0.mlp.down_proj"]), "does not say what the files hold"),
    ("awq", _config(modules_to_not_convert=["down_proj"]), "does not say what the files hold"),
    (_PACK, _config(ignore=["re:.*k_proj"]), "q_proj and k_proj read one input"),
    (_PACK, _config("config_groups", other=_OTHER), "q_proj and k_proj read one input"),
    (_PACK, _config("config_groups", b=_OTHER | {"targets": ["Linear"]}), "a target of two different schemes"),
    # What is not known.
    (_PACK, _config(quantization_status="initialized"), "expected 'compressed'"),
    (_PACK, _config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (_PACK, _config(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not known"),
    (_PACK, _config(transform_config={"config_groups": {}}), "transform_config is not known"),
    (_PACK, _config(quant_method="bitsandbytes"), "by bitsandbytes: its codes are places in a table"),
    (_PACK, _config(quant_method="zip"), "quantised by 'zip'; known are compressed-tensors"),
    (_PACK, _config(quant_method=7), "quantised by 7"),
    (_PACK, lambda f: change_config(f, lambda d: d.update(quantization_config=[1])), "expected an object"),
    ("int8 rows", lambda f: change_config(f, lambda d: d.pop("quantization_config")), "unexpected 14 .*does not say"),
]


@pytest.mark.parametrize(("name", "change", "words"), [*REFUSED, *IN_NUMBERS])
def test_refused_in_one_sentence(name: str, change: Change, words: str, published: Callable[..., Path]) -> None:
    """With the error of a source, exit code 3, and of a bundle, 6; before any weight is read if that is possible."""
    folder = published(name)
    change(folder)
    read = (name, change, words) in IN_NUMBERS
    with pytest.raises(UnsupportedModelError, match=words):
        (Checkpoint.open(folder).matrix if read else Checkpoint.open)(f"{FIRST}weight" if read else folder)
    names = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BundleError, match=words):
        Checkpoint.open(folder, error=BundleError).matrix(f"{FIRST}weight")


_junk = JUNK | st.sampled_from(["re:.*", "group", ["re:.*"]])
_keys = [
    "dynamic",
    "extra_config",
    "quant_method",
    "config_groups",
    "ignore",
    "format",
    "bits",
    "group_size",
    "version",
    "weight_block_size",
]
_inner = ["num_bits", "type", "strategy", "group_size", "symmetric", "block_structure", "dynamic", "actorder"]


@given(
    name=st.sampled_from(["pack int4 groups", "fp8 blocks", "fp8 blocks, as DeepSeek's", "gptq", "awq", "auto-round"]),
    changes=st.dictionaries(st.sampled_from([*_keys, "modules_to_not_convert", "kv_cache_scheme"]), _junk, max_size=2),
    inner=st.dictionaries(st.sampled_from(_inner), _junk, max_size=2),
    beside=st.dictionaries(st.sampled_from(["targets", "input_activations", "format"]), _junk, max_size=1),
)
def test_any_config_is_read_or_refused(name: str, changes: Any, inner: Any, beside: Any) -> None:
    config = json.loads(json.dumps(PUBLISHED[name]()[1]))
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


def dequantised(matrix: QuantizedMatrix) -> np.ndarray:
    """The definition, number by number, in float64."""
    rows, columns = matrix.shape
    weight = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            g = 0 if matrix.group is None else k // matrix.group
            if matrix.kind == "int4":
                code = int(matrix.codes[n, k // 2]) >> (4 * (k % 2)) & 15
                zero = 8 if matrix.zeros is None else int(matrix.zeros[n, g])
            else:
                code = float(matrix.codes[n, k])
                zero = 0 if matrix.zeros is None else int(matrix.zeros[n, g])
            weight[n, k] = (code - zero) * float(matrix.scales[n, g])
    return weight


@st.composite
def weights(draw: st.DrawFn) -> tuple[torch.Tensor, int | None]:
    groups, group = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    rows = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    weight = torch.randn(rows, groups * group, generator=generator) * 10.0 ** draw(st.integers(-36, 36))
    weight += weight.abs().amax() * draw(st.sampled_from([0.0, 0.0, 0.5, -2.0]))
    weight[:, : draw(st.integers(0, 3))] = 0
    return weight, draw(st.sampled_from([None, group]))


@given(weights(), st.sampled_from(["int8", "int4"]), st.sampled_from([1, 40, 10**6]))
def test_rounding_to_integers_loses_at_most_half_a_step(given_weight, kind, piece):
    weight, group = given_weight
    with patch.object(weight_types, "_CHUNK", piece):
        matrix = quantise(kind, weight, group=group)
        found = matrix.dequantise(torch.float32)
    np.testing.assert_allclose(found.double().numpy(), dequantised(matrix), rtol=2**-23)
    steps = matrix.scales.double().repeat_interleave(weight.shape[1] // matrix.scales.shape[1], dim=1)
    # A part in 2**18 for the rounding of scale and quotient to float32 before the code is chosen.
    assert ((found.double() - weight.double()).abs() <= steps * (0.5 + 2**-18)).all()
    if matrix.kind == "int8":
        assert int(matrix.codes.min()) >= -127


@given(weights())
@example((torch.tensor([[-1e-35, -3e-41]]), None))  # below the smallest normal float32
def test_rounding_to_fp8_loses_at_most_a_sixteenth_of_the_value(given_weight):
    weight, _ = given_weight
    matrix = quantise("fp8", weight)
    found = matrix.dequantise(torch.float32)
    half = 2**-150  # of the steps of float32 below its smallest normal number: the rounding of each product
    np.testing.assert_allclose(found.double().numpy(), dequantised(matrix), rtol=2**-23, atol=half)
    # Three bits behind the point; below 2**-6 steps of 2**-9 that no longer shrink.
    bound = torch.maximum(weight.double().abs() / 16, matrix.scales.double() * 2**-10) * (1 + 2**-18)
    assert ((found.double() - weight.double()).abs() <= bound + half).all()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_scales_are_numbers_of_the_type_they_are_stored_in_and_zeros_exact(kind):
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        scales = quantise(kind, weight, scale_dtype=dtype).scales
        assert torch.equal(scales, scales.to(dtype).float())
    matrix = quantise(kind, torch.zeros(3, 8), group=None if kind == "fp8" else 4)
    assert (matrix.dequantise(torch.float32) == 0).all()
    assert (matrix.scales == 1).all()
