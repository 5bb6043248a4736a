"""ONNX exports: our runtime's tokens in ONNX Runtime and its peers, the names others expect, and a check that can fail."""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from bundle_maker import make_bundle
from click.testing import CliRunner
from family_cases import runtime_tokens
from runtime_models import FAMILIES, VARIANTS, featured, make_checkpoint
from safetensors.torch import load_file, save_file
from tiny_bundle import digests

from wisparse.commands import export_onnx as verb
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UnsupportedModelError, UsageError, WisparseError
from wisparse.kernels.reference import sparse_linear
from wisparse.runtime.torch.decoder import TorchDecoder

onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
pytest.importorskip("onnxruntime", reason="needs the onnx extra")

from onnx.reference import ReferenceEvaluator  # noqa: E402

from wisparse.runtime import onnx_export, onnx_graph  # noqa: E402
from wisparse.runtime.onnx_export import OnnxDecoder, check_export, export_onnx  # noqa: E402
from wisparse.runtime.onnx_graph import DOMAIN  # noqa: E402

PROMPTS = [[5, 17, 60, 4, 33, 8, 90, 21, 7, 12, 54], [44, 3, 71, 18], [9]]
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
# optimum-onnx's transformers does not know the newest families.
_NEW = ("ministral3", "gemma4", "gemma4-unified", "granite-swa", "cwm", "internlm3", "iquestcoder", "youtu", "flint")
PEER_VARIANTS = (
    *("llama-tied", "llama-head-dim", "mistral-window", "qwen2", "qwen3", "phi3-partial"),
    *(name for name in FAMILIES if name not in _NEW),
)


@pytest.fixture(scope="module")
def bundle(variant_bundle: Callable[[str], Path]) -> Path:
    return variant_bundle("llama-tied")


@pytest.fixture(scope="module")
def exported(bundle: Path) -> Path:
    return export(bundle, bundle.with_name("exported"))


def export(folder: Path, out: Path, sparsity: float | None = None, **options: object) -> Path:
    opened = Bundle.open(folder) if sparsity is None else Bundle.open(folder).at(sparsity)
    export_onnx(opened, out, **{"check": False, **options})
    return out


def load(folder: Path, weights: bool = False) -> onnx.ModelProto:
    return onnx.load(str(folder / "model.onnx"), load_external_data=weights)


def properties(folder: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in load(folder).metadata_props}


def onnx_tokens(decoder: OnnxDecoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of prompts decoded in one batch, padded on the left."""
    longest = max(map(len, prompts))
    padded = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = np.array([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    decoder.reset(len(prompts))
    tokens = decoder.run(padded, mask)["logits"][:, -1:].argmax(axis=-1)
    while tokens.shape[1] < count:
        tokens = np.concatenate((tokens, decoder.run(tokens[:, -1:])["logits"].argmax(axis=-1)), axis=1)
    return tokens.tolist()


# The others are refused, as a test of families holds.
@pytest.mark.parametrize("variant", featured(name for name in VARIANTS if name not in ("muse-glimmer", "youtu")))
def test_tokens_are_our_runtimes(variant_bundle: Callable[[str], Path], tmp_path: Path, variant: str) -> None:
    # 24 tokens take the sliding window (7) and LongRoPE's switch (32 positions) along; prompts of one batch are of
    # different lengths, so LongRoPE's would switch at different times: one by one.
    bundle, prompts = variant_bundle(variant), PROMPTS[::2]
    decoder = OnnxDecoder(export(bundle, tmp_path / "out"))
    expected = [runtime_tokens(bundle, prompt, 24) for prompt in prompts]
    assert [onnx_tokens(decoder, [prompt], 24)[0] for prompt in prompts] == expected
    if Bundle.open(bundle).config.rotaries[0].rope_type != "longrope":
        assert onnx_tokens(decoder, prompts, 24) == expected
    half = export(bundle, tmp_path / "half", dtype="float16")
    assert check_export(half, Bundle.open(bundle), "float16")["dense_error"] < 1e-2


def test_longrope_takes_long_prompts(variant_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = variant_bundle("phi3-long")
    result = CliRunner().invoke(verb.command, [str(bundle), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "note: LongRoPE" in result.stderr
    assert "beyond 32 positions" in result.stderr
    assert properties(tmp_path / "out")["longrope_switch_length"] == "32"
    long = [5 + index % 90 for index in range(48)]
    assert onnx_tokens(OnnxDecoder(tmp_path / "out"), [long], 16)[0] == runtime_tokens(bundle, long, 16)


@pytest.mark.parametrize("variant", ["qwen2", "phi3"])
def test_every_level(variant: str, tmp_path: Path) -> None:
    folder = make_bundle(make_checkpoint(variant, tmp_path / "source"), tmp_path / "bundle", 0.3, 0.5)
    seen = set()
    for sparsity in (0.0, 0.3, 0.5):
        expected = [runtime_tokens(folder, prompt, 16, sparsity=sparsity) for prompt in PROMPTS]
        out = export(folder, tmp_path / f"at {sparsity}", sparsity, check=True)
        assert onnx_tokens(OnnxDecoder(out), PROMPTS, 16) == expected
        assert properties(out)["sparsity"] == str(sparsity)
        seen.add(str(expected))
    assert len(seen) == 3
    with pytest.raises(WisparseError, match="the sparse projections differ by"):
        check_export(tmp_path / "at 0.5", Bundle.open(folder).at(0.3), "float32")


@pytest.mark.parametrize("opset", [18, 19, 20, 22, 23, 24])
@pytest.mark.parametrize("variant", ["llama-tied", "gemma2"])
def test_every_opset(variant_bundle: Callable[[str], Path], tmp_path: Path, variant: str, opset: int) -> None:
    out = export(variant_bundle(variant), tmp_path / "out", opset=opset)
    assert {entry.domain: entry.version for entry in load(out).opset_import} == {"": opset, DOMAIN: 1}
    expected = [runtime_tokens(variant_bundle(variant), prompt, 8) for prompt in PROMPTS]
    assert onnx_tokens(OnnxDecoder(out), PROMPTS, 8) == expected


def test_names_and_weights_are_where_others_expect_them(bundle: Path, exported: Path) -> None:
    model, opened = load(exported), Bundle.open(bundle)
    config, graph = opened.config, model.graph
    pasts = [f"past_key_values.{i}.{what}" for i in range(config.num_blocks) for what in ("key", "value")]
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask", "position_ids", *pasts]
    presents = [name.replace("past_key_values", "present") for name in pasts]
    assert [value.name for value in graph.output] == ["logits", *presents]
    dims = [dim.dim_param or dim.dim_value for dim in graph.input[3].type.tensor_type.shape.dim]
    assert dims == ["batch_size", config.num_kv_heads, "past_sequence_length", config.head_dim]
    sparse = [node for node in graph.node if node.domain == DOMAIN]
    masks = [name for name, mask in opened.masks.items() if mask.sparsity > 0]
    assert [(node.op_type, node.name) for node in sparse] == [("SparseLinear", name) for name in masks]
    assert len(masks) < len(opened.masks)  # a dense projection is a plain MatMul
    assert list(sparse[0].input)[1:3] == [f"{masks[0]}.weight_t", f"{masks[0]}.channel_scale"]
    assert len({node.name for node in graph.node}) == len(graph.node)
    assert [(function.domain, function.name) for function in model.functions] == [(DOMAIN, "SparseLinear")]
    assert properties(exported)["base_model"] == "org/source"
    assert (model.producer_name, model.producer_version) == ("wisparse", metadata.version("wisparse"))
    assert all(what.doc_string for what in (model, graph, *model.functions))
    constants = [one for one in graph.initializer if one.name.startswith("const/")]
    assert constants
    for one in constants:  # the name is the value
        _, dtype, written = one.name.split("/")
        value = onnx.numpy_helper.to_array(one)
        np.testing.assert_array_equal(np.array(json.loads(written), dtype=dtype), value)
        assert str(value.dtype) == dtype
    assert "wisparse" not in json.loads((exported / "config.json").read_text())
    described = json.loads((exported / "genai_config.json").read_text())
    decoder = described["model"]["decoder"]
    assert (described["model"]["type"], described["model"]["eos_token_id"]) == ("decoder", 2)
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (config.num_kv_heads, config.head_dim)
    assert described["search"]["past_present_share_buffer"] is False
    initializers = load(exported).graph.initializer
    outside = {t.name: t for t in initializers if t.data_location == onnx.TensorProto.EXTERNAL}
    checkpoint = Bundle.open(bundle).checkpoint
    assert {name.removesuffix("_t") for name in outside} == set(checkpoint.tensors)  # tied: no lm_head
    data = (exported / "model.onnx.data").read_bytes()
    for name, tensor in outside.items():
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert int(place["offset"]) % 4096 == 0
        stored = np.frombuffer(data, np.float32, int(place["length"]) // 4, int(place["offset"])).reshape(tensor.dims)
        original = checkpoint.tensor(name.removesuffix("_t")).float().numpy()
        np.testing.assert_array_equal(stored, original.T if name.endswith("_t") else original)
    assert sum(len(t.raw_data) for t in initializers) < 20_000


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 1e-2)])
def test_the_functions_body_is_the_reference_kernel(exported: Path, dtype: type, tolerance: float) -> None:
    body = ReferenceEvaluator(load(exported).functions[0])
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 3, 33)).astype(dtype)
    weight = generator.normal(size=(17, 33)).astype(dtype)
    scale = torch.from_numpy(np.exp(generator.normal(size=33)).astype(np.float32))
    x[0, 0, 0], x[0, 1, 1], x[1, 2, 2] = np.inf, np.nan, 1.5
    score = float((torch.tensor(x[1, 2, 2]).float() * scale[2]).item())
    for threshold in (0.0, 0.7, score, 1e30):  # the third is met exactly, and kept
        feeds = {"x": x, "weight_t": weight.T, "channel_scale": scale.numpy(), "threshold": np.float32(threshold)}
        ours = sparse_linear(torch.from_numpy(x), torch.from_numpy(weight), None, scale, threshold).numpy()
        np.testing.assert_allclose(body.run(None, feeds, attributes={})[0], ours, rtol=tolerance, atol=tolerance)


def scaled_weights(variant: str, factor: float, folder: Path, *endings: str) -> Path:
    source = make_checkpoint(variant, folder / "source")
    weights = load_file(source / "model.safetensors")
    weights = {name: weight * factor if name.endswith(endings) else weight for name, weight in weights.items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return make_bundle(source, folder / "bundle")


def test_float16_holds_hidden_states_that_overflow_it(tmp_path: Path) -> None:
    """Gemma's norms of outputs can put them beyond 65,504; then the next norm squares them. ONNX's own evaluator rounds
    every value to float16, unlike ONNX Runtime on a CPU."""
    norms = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    folder = scaled_weights("gemma2", 4e4, tmp_path, *norms)
    model = load(export(folder, tmp_path / "out", dtype="float16"), weights=True)
    config, tokens = Bundle.open(folder).config, torch.tensor(PROMPTS[0])
    feeds = {"input_ids": tokens[None].numpy(), "attention_mask": np.ones((1, len(tokens)), dtype=np.int64)}
    feeds["position_ids"] = np.arange(len(tokens))[None]
    empty = np.zeros((1, config.num_kv_heads, 0, config.head_dim), dtype=np.float16)
    feeds |= {value.name: empty for value in model.graph.input if value.name not in feeds}
    found = torch.from_numpy(ReferenceEvaluator(model).run(["logits"], feeds)[0][0])
    decoder = TorchDecoder(Bundle.open(folder), device=torch.device("cpu"), dtype=torch.float32, max_seq_len=16)
    expected = decoder.logits(tokens, len(tokens))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_weights_too_large_for_float16(tmp_path: Path) -> None:
    bundle = scaled_weights("llama", 1e6, tmp_path, "model.norm.weight")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight: holds values that"):
        export(bundle, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("what", ["threshold", "channel_scale", "rotary", "nan"])
def test_a_wrong_graph_is_noticed_and_not_written(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, dtype: str
) -> None:
    right = Bundle.open(bundle)
    masks = dict(right.masks)
    name = "model.layers.1.self_attn.v_proj"
    message = "does not agree with our runtime"
    if what == "threshold":
        masks[name] = dataclasses.replace(masks[name], threshold=masks[name].threshold * 1.2)
    elif what == "channel_scale":
        masks[name] = dataclasses.replace(masks[name], scale=masks[name].channel_scale.flip(0))
    elif what == "rotary":
        frequencies = onnx_graph.inverse_frequencies
        monkeypatch.setattr(onnx_graph, "inverse_frequencies", lambda rope: frequencies(rope) * 1.2)
    else:
        run, message = OnnxDecoder.run, "the sparse projections differ by nan"

        def broken(self: OnnxDecoder, *args: object) -> dict[str, np.ndarray]:
            found = run(self, *args)
            wrong = [name for name in found if name.endswith("1.mlp.up_proj_out")]
            return {**found, **{name: found[name] * np.nan for name in wrong}}

        monkeypatch.setattr(OnnxDecoder, "run", broken)
    monkeypatch.setattr(onnx_export, "check_export", lambda folder, _, dtype: check_export(folder, right, dtype))
    wrong = dataclasses.replace(right, levels={right.sparsity: masks})
    with pytest.raises(WisparseError, match=message):
        export_onnx(wrong, tmp_path / "out", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_misuse(bundle: Path, exported: Path, tmp_path: Path) -> None:
    out, noted = export(bundle, tmp_path / "out"), tmp_path / "noted"
    shutil.copytree(exported, noted)
    (noted / "notes.txt").write_text("mine")
    for place, options, message in (
        (out, {}, "already exists"),
        (bundle, {"overwrite": True}, "not an ONNX export"),
        (noted, {"overwrite": True}, r"holds 'notes\.txt'"),
        (tmp_path / "other", {"opset": 17}, "opset: expected 18 to 24, found 17"),
        (tmp_path / "other", {"dtype": "bfloat16"}, "dtype"),
    ):
        with pytest.raises(UsageError, match=message):
            export(bundle, place, **options)
    assert digests(export(bundle, out, overwrite=True)) == digests(exported)  # equal bundles give equal files


def test_float16_and_bfloat16(example_model: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(make_bundle(example_model, tmp_path / "bundle"))
    report = export_onnx(bundle, tmp_path / "out", dtype="float16")["check"]
    assert 1e-5 < report["projection_error"] < 5e-3  # it did compute in float16
    assert report["dense_error"] < 2e-2
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size < 15e6
    assert bundle.config.dtype == "bfloat16"
    assert export_onnx(bundle, tmp_path / "auto", check=False)["dtype"] == "float32"


def test_the_command(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(verb.command, [str(bundle), str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["check"]["dense_error"] < 1e-4
    assert report["num_sparse_projections"] == 20
    again = CliRunner().invoke(verb.command, [str(bundle), str(tmp_path / "out")])
    assert isinstance(again.exception, UsageError)
    found = verb.importlib.util.find_spec
    monkeypatch.setattr(verb.importlib.util, "find_spec", lambda name: None if name == "onnx" else found(name))
    lacking = CliRunner().invoke(verb.command, [str(bundle), str(tmp_path / "other")])
    assert isinstance(lacking.exception, UsageError)
    assert "pip install onnx" in str(lacking.exception)


@pytest.mark.exhaustive  # needs another environment
def test_tokens_in_its_peers(example_model: Path, variant_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    python = os.environ.get("WISPARSE_ONNX_PEERS_PYTHON")
    if not python:
        pytest.skip(
            "needs onnxruntime-genai and optimum-onnx in an environment of their own: python -m venv onnx-peers && "
            "onnx-peers/bin/pip install -r benchmarks/onnx_peers.txt && "
            "export WISPARSE_ONNX_PEERS_PYTHON=$PWD/onnx-peers/bin/python"
        )
    # Not ours: what surrounds this test has another transformers.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}

    def compare(*arguments: Path) -> tuple[int, list[tuple[bool, bool]]]:
        command = [python, BENCHMARKS / "onnx_peers.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
        reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(reports) == len(arguments) // 2, done.stderr[-3000:]
        return done.returncode, [(one["optimum_onnx"], one["onnxruntime_genai"]) for one in reports]

    arguments = []
    bundles = {name: variant_bundle(name) for name in PEER_VARIANTS}
    bundles["example"] = make_bundle(example_model, tmp_path / "bundle")
    for name, bundle in bundles.items():
        tokens = tmp_path / f"{name}.json"
        answers = [runtime_tokens(bundle, prompt, 24) for prompt in PROMPTS]
        tokens.write_text(json.dumps({"prompts": PROMPTS, "answers": answers}))
        arguments += [export(bundle, tmp_path / name), tokens]
    assert compare(*arguments) == (0, [(True, True)] * len(bundles))
    # And it would see another model: the same weights, the masks of a sparser one.
    sparser = make_bundle(example_model, tmp_path / "sparser", 0.6)
    assert compare(export(sparser, tmp_path / "wrong"), arguments[-1]) == (1, [(False, False)])
