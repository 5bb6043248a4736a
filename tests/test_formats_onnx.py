"""ONNX exports: our runtime's tokens in ONNX Runtime, the names others expect, and a check that can fail."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from bundle_maker import make_bundle
from click.testing import CliRunner
from runtime_models import VARIANTS, make_checkpoint

from wisparse.commands import export_onnx as verb
from wisparse.formats.bundle import Bundle, ProjectionMask
from wisparse.formats.errors import UnsupportedModelError, UsageError, WisparseError
from wisparse.kernels.reference import sparse_linear
from wisparse.runtime.torch.decoder import TorchDecoder

onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
pytest.importorskip("onnxruntime", reason="needs the onnx extra")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx.reference.op_run import OpRun  # noqa: E402

from wisparse.commands.export_onnx import OnnxDecoder, check_export, rotary_tables  # noqa: E402
from wisparse.formats.onnx.export import DOMAIN, export_onnx  # noqa: E402

PROMPTS = [[5, 17, 60, 4, 33, 8, 90, 21, 7, 12, 54], [44, 3, 71, 18], [9]]


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return make_bundle(make_checkpoint(request.param, folder / "source"), folder / "bundle")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    return make_bundle(make_checkpoint("llama-tied", folder / "source"), folder / "bundle")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    return make_bundle(make_checkpoint("gemma2", folder / "source"), folder / "bundle")


@pytest.fixture(scope="module")
def exported(bundle: Path) -> Path:
    return export(bundle, bundle.with_name("exported"))


def export(folder: Path, out: Path, sparsity: float | None = None, **kwargs: object) -> Path:
    opened = Bundle.open(folder) if sparsity is None else Bundle.open(folder).at(sparsity)
    return export_onnx(opened, out, rotary_tables(opened.config), **kwargs).folder


def runtime_tokens(folder: Path, prompt: list[int], count: int, sparsity: float | None = None) -> list[int]:
    bundle = Bundle.open(folder) if sparsity is None else Bundle.open(folder).at(sparsity)
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=len(prompt) + count)
    tokens = [int(decoder.prefill(0, torch.tensor(prompt), len(prompt)).argmax())]
    while len(tokens) < count:
        tokens.append(int(decoder.decode(torch.tensor(tokens[-1:]))[0].argmax()))
    return tokens


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_tokens_of_our_runtime_on_every_architecture(tiny: Path, tmp_path: Path) -> None:
    # 24 tokens take the sliding window (7) and LongRoPE's switch (32 positions) along; prompts of one batch are of
    # different lengths, so LongRoPE's would switch at different times: one by one.
    decoder = OnnxDecoder(export(tiny, tmp_path / "out"))
    expected = [runtime_tokens(tiny, prompt, 24) for prompt in PROMPTS]
    assert [decoder.generate([prompt], 24)[0] for prompt in PROMPTS] == expected
    if Bundle.open(tiny).config.rotaries[0].rope_type != "longrope":
        assert decoder.generate(PROMPTS, 24) == expected


def test_longrope_takes_long_prompts_and_says_what_it_cannot(tmp_path: Path) -> None:
    bundle = make_bundle(make_checkpoint("phi3-long", tmp_path / "source"), tmp_path / "bundle")
    result = CliRunner().invoke(verb.command, [str(bundle), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "note: LongRoPE" in result.stderr
    assert "beyond 32 positions" in result.stderr
    model = onnx.load(str(tmp_path / "out" / "model.onnx"), load_external_data=False)
    assert {prop.key: prop.value for prop in model.metadata_props}["longrope_switch_length"] == "32"
    long = [5 + index % 90 for index in range(48)]
    found = OnnxDecoder(tmp_path / "out").generate([long], 16)[0]
    assert found == runtime_tokens(bundle, long, 16)


@pytest.mark.parametrize("variant", ["qwen2", "phi3"])
def test_every_level(variant: str, tmp_path: Path) -> None:
    folder = make_bundle(make_checkpoint(variant, tmp_path / "source"), tmp_path / "bundle", 0.3, 0.5)
    seen = set()
    for sparsity in (0.0, 0.3, 0.5):
        expected = [runtime_tokens(folder, prompt, 16, sparsity) for prompt in PROMPTS]
        decoder = OnnxDecoder(out := export(folder, tmp_path / f"at {sparsity}", sparsity))
        assert decoder.generate(PROMPTS, 16) == expected
        model = onnx.load(str(out / "model.onnx"), load_external_data=False)
        assert {prop.key: prop.value for prop in model.metadata_props}["sparsity"] == str(sparsity)
        check_export(out, Bundle.open(folder).at(sparsity), "float32")
        seen.add(str(expected))
    assert len(seen) == 3
    with pytest.raises(WisparseError, match="the sparse projections differ by"):
        check_export(tmp_path / "at 0.5", Bundle.open(folder).at(0.3), "float32")


@pytest.mark.parametrize("model", ["example_model", "qwen_model"])
def test_tokens_on_a_real_model(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    bundle = make_bundle(request.getfixturevalue(model), tmp_path / "bundle")
    prompt = list(range(100, 130))
    decoder = OnnxDecoder(export(bundle, tmp_path / "out"))
    assert decoder.generate([prompt], 48)[0] == runtime_tokens(bundle, prompt, 48)


@pytest.mark.parametrize("opset", [18, 19, 20, 22, 23, 24])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_every_opset(family: str, bundle: Path, gemma: Path, tmp_path: Path, opset: int) -> None:
    folder = {"llama": bundle, "gemma": gemma}[family]
    out = export(folder, tmp_path / "out", opset=opset)
    model = onnx.load(str(out / "model.onnx"), load_external_data=False)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": opset, DOMAIN: 1}
    assert OnnxDecoder(out).generate(PROMPTS, 8) == [runtime_tokens(folder, prompt, 8) for prompt in PROMPTS]


def test_names_are_those_others_expect(bundle: Path, exported: Path) -> None:
    model = onnx.load(str(exported / "model.onnx"), load_external_data=False)
    config = Bundle.open(bundle).config
    pasts = [f"past_key_values.{i}.{what}" for i in range(config.num_blocks) for what in ("key", "value")]
    assert [value.name for value in model.graph.input] == ["input_ids", "attention_mask", "position_ids", *pasts]
    assert [value.name for value in model.graph.output] == [
        "logits",
        *(name.replace("past_key_values", "present") for name in pasts),
    ]
    dims = [dim.dim_param or dim.dim_value for dim in model.graph.input[3].type.tensor_type.shape.dim]
    assert dims == ["batch_size", config.num_kv_heads, "past_sequence_length", config.head_dim]
    sparse = [node for node in model.graph.node if node.domain == DOMAIN]
    assert [node.op_type for node in sparse] == ["SparseLinear"] * len(sparse)
    masks = {name: mask for name, mask in Bundle.open(bundle).masks.items() if mask.sparsity > 0}
    assert [node.name for node in sparse] == list(masks)
    assert len(masks) < len(Bundle.open(bundle).masks)  # a dense projection is a plain MatMul
    name = sparse[0].name
    assert list(sparse[0].input)[1:3] == [f"{name}.weight_t", f"{name}.channel_scale"]
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)
    assert [(function.domain, function.name) for function in model.functions] == [(DOMAIN, "SparseLinear")]
    assert {prop.key: prop.value for prop in model.metadata_props}["base_model"] == "org/source"


def test_the_file_says_what_it_is_and_its_names_can_be_read(exported: Path) -> None:
    model = onnx.load(str(exported / "model.onnx"), load_external_data=False)
    assert (model.producer_name, model.producer_version) == ("wisparse", metadata.version("wisparse"))
    for what in (model, model.graph, *model.functions):
        assert what.doc_string
    constants = [one for one in model.graph.initializer if one.name.startswith("const/")]
    assert constants
    for one in constants:
        _, dtype, written = one.name.split("/")
        value = onnx.numpy_helper.to_array(one)
        np.testing.assert_array_equal(np.array(json.loads(written), dtype=dtype), value)
        assert str(value.dtype) == dtype


def test_weights_are_external_aligned_and_stored_once(bundle: Path, exported: Path) -> None:
    model = onnx.load(str(exported / "model.onnx"), load_external_data=False)
    outside = {t.name: t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    checkpoint = Bundle.open(bundle).checkpoint
    assert {name.removesuffix("_t") for name in outside} == set(checkpoint.tensors)  # tied: no lm_head
    data = (exported / "model.onnx.data").read_bytes()
    for name, tensor in outside.items():
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert int(place["offset"]) % 4096 == 0
        stored = np.frombuffer(data, np.float32, int(place["length"]) // 4, int(place["offset"])).reshape(tensor.dims)
        original = checkpoint.tensor(name.removesuffix("_t")).float().numpy()
        np.testing.assert_array_equal(stored, original.T if name.endswith("_t") else original)
    inline = sum(len(t.raw_data) for t in model.graph.initializer)
    assert inline < 20_000


def test_what_lies_beside_the_model(bundle: Path, exported: Path) -> None:
    assert "wisparse" not in json.loads((exported / "config.json").read_text())
    described = json.loads((exported / "genai_config.json").read_text())
    config = Bundle.open(bundle).config
    decoder = described["model"]["decoder"]
    assert described["model"]["type"] == "decoder"
    assert described["model"]["eos_token_id"] == 2
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (config.num_kv_heads, config.head_dim)
    assert described["search"]["past_present_share_buffer"] is False


def body(function: onnx.FunctionProto, x: np.ndarray, weight_t: np.ndarray, mask: ProjectionMask) -> np.ndarray:
    feeds = {"x": x, "weight_t": weight_t, "channel_scale": mask.channel_scale.numpy()}
    feeds["threshold"] = np.float32(mask.threshold)
    return ReferenceEvaluator(function).run(None, feeds, attributes={})[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_functions_body_is_the_reference_kernel(exported: Path, dtype: type) -> None:
    function = onnx.load(str(exported / "model.onnx"), load_external_data=False).functions[0]
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 3, 33)).astype(dtype)
    weight = generator.normal(size=(17, 33)).astype(dtype)
    scale = torch.from_numpy(np.exp(generator.normal(size=33)).astype(np.float32))
    x[0, 0, 0] = np.inf
    x[0, 1, 1] = np.nan
    x[1, 2, 2] = 1.5
    score = float((torch.tensor(x[1, 2, 2]).float() * scale[2]).item())
    for threshold in (0.0, 0.7, score, 1e30):  # the third is met exactly, and kept
        mask = ProjectionMask(scale, threshold, 0.5)
        ours = sparse_linear(torch.from_numpy(x), torch.from_numpy(weight), None, scale, threshold).numpy()
        tolerance = 1e-2 if dtype is np.float16 else 1e-5
        np.testing.assert_allclose(body(function, x, weight.T, mask), ours, rtol=tolerance, atol=tolerance)


def test_a_runtimes_own_operator_takes_over(bundle: Path, exported: Path) -> None:
    """An evaluator that has SparseLinear itself skips the dropped channels, and gets the same logits."""
    used: list[float] = []

    class SparseLinear(OpRun):
        op_domain = DOMAIN

        def _run(self, x, weight_t, channel_scale, threshold):  # type: ignore[no-untyped-def]
            kept = ~(np.abs(x.astype(np.float32)) * channel_scale < threshold)
            used.append(kept.mean())
            flat, rows = x.reshape(-1, x.shape[-1]), kept.reshape(-1, x.shape[-1])
            y = np.stack([row[keep] @ weight_t[keep] for row, keep in zip(flat, rows, strict=True)])
            return (y.reshape(*x.shape[:-1], -1).astype(x.dtype),)

    model = onnx.load(str(exported / "model.onnx"))
    config = Bundle.open(bundle).config
    own = OnnxDecoder(exported)
    tokens = np.array([PROMPTS[0]])
    own.reset(np.ones_like(tokens))
    own.forward(tokens)
    feeds = {"input_ids": np.array([[54]]), "attention_mask": np.ones((1, 12), dtype=np.int64)}
    feeds |= {"position_ids": np.array([[11]]), **own._cache}
    theirs = ReferenceEvaluator(model, new_ops=[SparseLinear]).run(["logits"], feeds)[0]
    assert len(used) == 7 * config.num_blocks - 1
    assert 0.2 < np.mean(used) < 0.8
    np.testing.assert_allclose(theirs, own.forward(np.array([[54]])), atol=2e-4)


def test_float16(example_model: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(make_bundle(example_model, tmp_path / "bundle"))
    out = export(bundle.folder, tmp_path / "out", dtype="float16")
    report = check_export(out, bundle, "float16")
    assert 1e-5 < report["projection_error"] < 5e-3  # it did compute in float16
    assert report["dense_error"] < 2e-2
    assert (out / "model.onnx.data").stat().st_size < 15e6


def test_float16_on_every_architecture(tiny: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(tiny)
    report = check_export(export(tiny, tmp_path / "out", dtype="float16"), bundle, "float16")
    assert report["dense_error"] < 1e-2


def test_float16_holds_hidden_states_that_overflow_it(tmp_path: Path) -> None:
    """Gemma's norms of outputs can put them beyond 65,504; then the next norm squares them.

    ONNX's own evaluator rounds every value to float16, unlike ONNX Runtime on a CPU.
    """
    from safetensors.torch import load_file, save_file

    source = make_checkpoint("gemma2", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    for name in weights:
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            weights[name] *= 4e4
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    folder = make_bundle(source, tmp_path / "bundle")
    model = onnx.load(str(export(folder, tmp_path / "out", dtype="float16") / "model.onnx"))
    config, tokens = Bundle.open(folder).config, torch.tensor(PROMPTS[0])
    feeds = {"input_ids": tokens[None].numpy(), "attention_mask": np.ones((1, len(tokens)), dtype=np.int64)}
    feeds["position_ids"] = np.arange(len(tokens))[None]
    empty = np.zeros((1, config.num_kv_heads, 0, config.head_dim), dtype=np.float16)
    feeds |= {value.name: empty for value in model.graph.input if value.name not in feeds}
    found = torch.from_numpy(ReferenceEvaluator(model).run(["logits"], feeds)[0][0])
    decoder = TorchDecoder(Bundle.open(folder), device=torch.device("cpu"), dtype=torch.float32, max_seq_len=16)
    expected = decoder.logits(tokens, len(tokens))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_bfloat16_becomes_float32(example_model: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(make_bundle(example_model, tmp_path / "bundle"))
    assert bundle.config.dtype == "bfloat16"
    exported = export_onnx(bundle, tmp_path / "out", rotary_tables(bundle.config))
    assert exported.dtype == "float32"


def test_weights_too_large_for_float16(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_checkpoint("llama", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][3] = 1e6
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    bundle = make_bundle(source, tmp_path / "bundle")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight: holds values that"):
        export(bundle, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("what", ["threshold", "channel_scale", "rotary"])
def test_a_wrong_graph_is_noticed_and_not_written(bundle: Path, tmp_path: Path, what: str, dtype: str) -> None:
    right = Bundle.open(bundle)
    (rotary,) = rotary_tables(right.config)
    masks = dict(right.masks)
    name = "model.layers.1.self_attn.v_proj"
    mask = masks[name]
    if what == "threshold":
        masks[name] = dataclasses.replace(mask, threshold=mask.threshold * 1.2)
    elif what == "channel_scale":
        masks[name] = dataclasses.replace(mask, channel_scale=mask.channel_scale.flip(0))
    else:
        rotary = dataclasses.replace(rotary, frequencies=rotary.frequencies * 1.2)
    wrong = dataclasses.replace(right, levels={right.sparsity: masks})
    with pytest.raises(WisparseError, match="does not agree with our runtime"):
        export_onnx(
            wrong,
            tmp_path / "out",
            [rotary],
            dtype=dtype,
            check=lambda folder: print(check_export(folder, right, dtype)),
        )
    assert list(tmp_path.iterdir()) == []


def test_equal_bundles_give_equal_files(bundle: Path, exported: Path, tmp_path: Path) -> None:
    assert digests(export(bundle, tmp_path / "again")) == digests(exported)


def test_misuse(bundle: Path, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already exists"):
        export(bundle, exported)
    with pytest.raises(UsageError, match="not an ONNX export"):
        export(bundle, bundle, overwrite=True)
    with pytest.raises(UsageError, match="opset: expected 18 to 24, found 17"):
        export(bundle, tmp_path / "out", opset=17)
    with pytest.raises(UsageError, match="dtype"):
        export(bundle, tmp_path / "out", dtype="bfloat16")
    out = export(bundle, tmp_path / "out")
    before = digests(out)
    assert digests(export(bundle, out, overwrite=True)) == before


def test_overwrite_takes_nothing_but_an_export(bundle: Path, exported: Path, tmp_path: Path) -> None:
    """A bundle that somebody exported into, a folder of other work, an export with notes in it: all stay."""
    mixed, others, noted = (tmp_path / name for name in ("mixed", "others", "noted"))
    shutil.copytree(bundle, mixed)
    for name in ("model.onnx", "model.onnx.data", "wisparse_export.json"):
        shutil.copy(exported / name, mixed)
    others.mkdir()
    (others / "model.onnx").write_bytes(b"another program's")
    (others / "thesis.tex").write_text("years of work")
    shutil.copytree(exported, noted)
    (noted / "notes.txt").write_text("mine")
    before = digests(tmp_path)
    for out, message in (
        (mixed, r"holds '.*', which is not part of an ONNX export"),
        (others, "not an ONNX export"),
        (noted, r"holds 'notes\.txt'"),
    ):
        with pytest.raises(UsageError, match=message):
            export(bundle, out, overwrite=True)
    assert digests(tmp_path) == before


def test_anothers_partial_folder_is_left_alone(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model-00001-of-00001.safetensors").write_bytes(b"of a conversion")
    with pytest.raises(UsageError, match="not an ONNX export"):
        export(bundle, out)
    shutil.rmtree(tmp_path / "out.partial")

    def export_again(folder: Path) -> None:
        with pytest.raises(UsageError, match="another export is writing there"):
            export(bundle, out)

    export(bundle, out, check=export_again)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wisparse", "export-onnx", bundle, tmp_path / "out", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"]["dense_error"] < 1e-4
    assert report["num_sparse_projections"] == 20
    assert not (tmp_path / "out" / "check.onnx").exists()
    again = CliRunner().invoke(verb.command, [str(bundle), str(tmp_path / "out")])
    assert isinstance(again.exception, UsageError)
    found = verb.importlib.util.find_spec
    monkeypatch.setattr(verb.importlib.util, "find_spec", lambda name: None if name == "onnx" else found(name))
    lacking = CliRunner().invoke(verb.command, [str(bundle), str(tmp_path / "other")])
    assert isinstance(lacking.exception, UsageError)
    assert "pip install 'wisparse[onnx]'" in str(lacking.exception)


def test_nan_is_an_error(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, opened = export(bundle, tmp_path / "out"), Bundle.open(bundle)
    values = OnnxDecoder.values

    def broken(self: OnnxDecoder, *args: object) -> dict[str, np.ndarray]:
        found = values(self, *args)
        found["model.layers.1.mlp.up_proj_out"] = np.full_like(found["model.layers.1.mlp.up_proj_out"], np.nan)
        return found

    monkeypatch.setattr(OnnxDecoder, "values", broken)
    with pytest.raises(WisparseError, match="the sparse projections differ by nan"):
        check_export(out, opened, "float32")
