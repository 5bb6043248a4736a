"""Graded weights: int8 codes in a high and a low plane, read as far as a channel's value is worth."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import cpu_decoder
from cpu_linear import sparse_linear
from safetensors.torch import load_file, save_file
from served import Running
from test_formats_bundle import RECIPE, SIDECAR, Change, put
from tiny_bundle import change_tensor, resign, tiny_config, write_tiny_bundle, write_tiny_model
from tiny_source import tiny_source, tiny_tokens
from torch import Tensor

import wisparse
from wisparse.converter.gptq import quantise_weights
from wisparse.converter.planes import plane_ratios, read_in_planes, tied
from wisparse.converter.search.refinement import Channels
from wisparse.converter.search.search import SearchSettings, SparsityLevels
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.errors import BundleError, UsageError, WisparseError
from wisparse.formats.manifest import bits_of
from wisparse.formats.weight_types import interleaved, quantise, round_weight, split_planes
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.cpu.weights import Matrix
from wisparse.runtime.generation.speculation import Chain

Run = Callable[..., tuple[int, str, str]]
TOKENS = torch.tensor([5, 17, 250, 3, 99, 101, 7, 7, 30, 31])
O_PROJ = "model.layers.1.self_attn.o_proj"

pytestmark = pytest.mark.usefixtures("quick_conversion")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "tie_word_embeddings": False}
    config = tiny_config(dtype="bfloat16", max_position_embeddings=256, **changes)
    return write_tiny_model(tmp_path_factory.mktemp("graded") / "plain", config)


@pytest.fixture(scope="module")
def bundle(plain: Path) -> Path:
    text = plain.parent / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 90)
    return wisparse.convert(
        plain, plain.parent / "bundle", weights="graded", bits=[5, 3], calibration=text, num_samples=4, seq_len=48,
        rotation="none", progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_reads_each_plane_from_its_threshold_on(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, scale = torch.randn(rows, 96, generator=generator), torch.rand(96, generator=generator) + 0.5
    weight, bias = torch.randn(193, 96, generator=generator), torch.randn(193, generator=generator)
    matrix = quantise("int8", weight, group=32, graded=True)
    assert (matrix.dequantise(torch.float32) - weight).abs().max() < weight.abs().max() / 120
    laid = Matrix.int4((193, 96), 32, torch.float32, False, planes=2)
    laid.store(0, interleaved(matrix))
    high, low = (replace(matrix, codes=codes).dequantise(torch.float64) for codes in split_planes(matrix.codes))

    def product(x: Tensor, *limits: float) -> Tensor:
        first, second = (torch.where(keep_mask(x, scale, limit), x, 0.0).double() for limit in limits)
        return first @ (16 * high).T + second @ low.T + bias

    whole = x.double() @ matrix.dequantise(torch.float64).T + bias
    for limits, expected in (
        ((0.4, 1.2), product(x, 0.4, 1.2)),
        ((1e-30, 1e-30), whole),
        ((1e-30, 1e30), x.double() @ (16 * high).T + bias),
    ):
        found = sparse_linear(x, laid, bias, scale, torch.tensor(limits))
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
        for given in (x, x.bfloat16()):  # as alone; of 16-bit numbers by products of integers
            together = sparse_linear(given, laid, bias.to(given.dtype), scale, torch.tensor(limits))
            wanted = product(given.float(), *limits) - bias + bias.to(given.dtype)
            allowed = 1e-4 + wanted.abs() * 1e-5
            if given is not x:  # the precision in docs/performance.md, relative to the row's largest 16 x
                largest = 16 * given.float().abs().amax(1, keepdim=True)
                allowed += largest * (high.abs() + low.abs()).sum(1) / 64_000 + wanted.abs() * 2**-8
                allowed = torch.minimum(allowed, 2e-3 + wanted.abs() * 2**-7)
            assert bool(((together.double() - wanted).abs() <= allowed).all())
            alone = [sparse_linear(row, laid, bias.to(given.dtype), scale, torch.tensor(limits)) for row in given]
            assert torch.equal(together, torch.stack(alone))
        torch.set_num_threads(1)
        assert torch.equal(sparse_linear(x, laid, bias, scale, torch.tensor(limits)), found)
        torch.set_num_threads(2)
    torch.testing.assert_close(laid.linear(x, bias).double(), whole, rtol=1e-5, atol=1e-4)
    of_planes = laid.linear(x, bias, torch.zeros_like(x)).double()
    torch.testing.assert_close(of_planes, x.double() @ (16 * high).T + bias, rtol=1e-5, atol=1e-4)


def test_the_converters_model_reads_planes_and_its_scales_are_tied() -> None:
    source = tiny_source(hidden_size=64, intermediate_size=96)
    matrices = quantise_weights(source, tiny_tokens(), "graded", torch.bfloat16)
    ids = tiny_tokens().input_ids
    whole = source.model(ids).logits
    read = read_in_planes(source, matrices)
    torch.testing.assert_close(read.model(ids).logits, whole, rtol=1e-4, atol=1e-3)
    for by in ("fisher", "refine"):
        with SparsityLevels(read, tiny_tokens(), SearchSettings(search=by, refine_steps=2)) as levels:
            result = levels.at(0.5)
        for name, scale in result.channel_scales.items():
            torch.testing.assert_close(tied(scale, 2), scale, rtol=1e-5, atol=0)
            ratio = plane_ratios(scale, 2)
            assert ratio[0] == 1 < ratio[1]
            assert 0 < result.projections[name].realised_sparsity < 1
    channels = Channels({"a": 8, "b": 4}, {"a": 80, "b": 40}, planes=2)
    change = channels.tie(torch.randn(12))
    difference = [high - low for high, low in (part.view(2, -1) for part in channels.split(change).values())]
    assert all(float(one.std()) < 1e-6 for one in difference)
    torch.testing.assert_close(channels.tie(change), change)


def test_transformers_loads_it_as_int8_with_equal_logits(bundle: Path) -> None:
    from transformers import AutoModelForCausalLM

    verify_bundle(bundle)
    opened = Bundle.open(bundle)
    assert opened.recipe.plane_bits == (4, 4)
    assert [bits_of(level) for level in opened.levels] == [5, 3]
    weights = json.loads((bundle / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"][
        "weights"
    ]
    assert (weights["num_bits"], weights["strategy"], weights["group_size"]) == (8, "group", 32)
    model = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32).eval()
    with torch.inference_mode():  # our output layer is int8
        model.lm_head.weight.copy_(round_weight(model.lm_head.weight, "int8").dequantise(torch.float32))
        expected = model(TOKENS[None]).logits[0]
    for backend in ("torch", "numba"):
        found = cpu_decoder(opened.at(bits=8), backend, max_seq_len=16).logits(TOKENS, 0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="sparsify: a graded bundle is read by planes"):
        wisparse.sparsify(model, bundle)
    wisparse.sparsify(model, bundle, sparsity=0)


def test_back_ends_agree_alone_and_in_batches(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    decoders = [cpu_decoder(opened, backend, max_seq_len=32, max_batch=2) for backend in ("torch", "numba")]
    for bits in (8, 5, 3):
        read = []
        for decoder in decoders:
            decoder.set_masks(opened.at(bits=bits).masks)
            decoder.measure_sparsity(True)
        for length in (4, len(TOKENS)):  # a step's rows, and a prompt in torch
            slow, fast = (decoder.prefill(0, TOKENS[:length], 2).clone() for decoder in decoders)
            torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
        for slot in range(2):
            for decoder in decoders:
                decoder.prefill(slot, TOKENS[: 4 + slot], 5)
        for step in range(3):
            slow, fast = (decoder.decode(torch.tensor([7 + step, 90 + step])).clone() for decoder in decoders)
            torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
        read = [bits_of(decoder.realised_sparsity() or 0.0) for decoder in decoders]
        assert read[0] == pytest.approx(read[1])
        assert read[0] == pytest.approx(bits, abs=0.8)
    slow, fast = (decoder.logits(TOKENS, 3).clone() for decoder in decoders)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_dense_positions_do_not_depend_on_sparse_ones_behind_them(
    backend: str, dtype: torch.dtype, bundle: Path
) -> None:
    """To the bit: a prompt may begin with what another one has in the cache."""
    decoder = cpu_decoder(Bundle.open(bundle).at(bits=3), backend, dtype, max_seq_len=64)
    half, dense = (decoder.logits(TOKENS, first_sparse)[:5].clone() for first_sparse in (5, len(TOKENS)))
    assert torch.equal(half, dense)


def test_the_high_planes_draft(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the planes of a level; the int8 model's answers are those without."""
    monkeypatch.setattr(Chain, "_length", lambda self, rate, most: min(most, 4))
    for backend in ("torch", "numba"):
        found = []
        for config in (None, {"method": "self", "bits": 4}, {"method": "self", "bits": 3}):
            with wisparse.load(bundle, backend=backend, device="cpu", bits=8, speculative=config) as model:
                answers = model.generate([[5, 6, 7], [9, 8, 7]], max_new_tokens=16)
                found.append([answer.token_ids for answer in answers])
                assert (model.engine.scheduler.stats.drafts.accepted_tokens > 3) == (config is not None)
        assert found[0] == found[1] == found[2]
    with pytest.raises(UsageError, match="speculative: bits: expected one of the bundle's levels, 5, 3, or 8"):
        wisparse.load(bundle, device="cpu", speculative={"method": "self", "bits": 6})


def test_bits_choose_the_level(bundle: Path, plain: Path, run: Run) -> None:
    model = wisparse.load(bundle, dtype="float32", device="cpu", bits=3)
    assert (model.bits, model.sparsity) == (3, 0.625)
    answers = {bits: model.generate([5, 6, 7], max_new_tokens=8).token_ids for bits in (3, 8)}
    model.bits = 8
    dense = model.generate([5, 6, 7], max_new_tokens=8).token_ids
    request = model.request([5, 6, 7], sparsity=model.bundle.at(bits=3).sparsity)
    assert request.sparsity == 0.625
    model.close()
    assert min(len(answers[3]), len(dense)) >= 1
    for options, words in (
        ({"bits": 4}, "bits: expected one of the bundle's levels, 5, 3, or 8 for the dense model, found 4"),
        ({"bits": 3, "sparsity": 0}, "bits, sparsity: expected one of them, found both"),
        ({"sparsity": 0.3}, "sparsity: this bundle is graded; bits: expected one of the bundle's levels, 5, 3, or 8"),
        ({"weights": "int4"}, "weights: expected native for a graded bundle, which has its own, found 'int4'"),
    ):
        with pytest.raises(UsageError, match=words):
            wisparse.load(bundle, **options)
    other = write_tiny_bundle(plain.parent / "masks", plain)
    with pytest.raises(UsageError, match="bits: expected a graded bundle, found one with sparsity levels"):
        wisparse.load(other, bits=3)
    for options, code, words in (
        ("--bits 3", 2, "--bits: expected --weights graded, found --weights native"),
        ("--weights graded --sparsity 0.5", 2, "expected levels by --bits, found --sparsity"),
        ("--weights graded --search greedy", 2, "--search refine or fisher, found wisparse and greedy"),
        ("--weights graded --bits 9", 2, "--bits: expected a number of bits from 0.4 to 8, or several, found 9"),
        ("--weights graded --default 4", 2, "--default: expected one of the bits 4.25, 3.5, 3, found 4.0"),
        ("--weights graded --bits 4 --max-kl 0.1", 2, "leave --bits out"),
    ):
        found, _, err = run("convert", plain, "-o", plain.parent / "none", *options.split())
        assert (found, words in err) == (code, True), err
    found, out, err = run("inspect", bundle, "--bits", "5")
    assert found == 0, err
    assert "5 bits, 3 bits (the default)" in out


def test_a_request_and_a_saved_speed_name_their_bits(bundle: Path, tmp_path: Path, run: Run) -> None:
    expected = {}
    for bits in (3, 5, 8):
        with wisparse.load(bundle, dtype="float32", backend="torch", bits=bits) as alone:
            expected[bits] = alone.generate([5, 6, 7], max_new_tokens=12).text
    with Running(bundle) as running:

        def post(**more: float) -> tuple[int, dict[str, Any]]:
            return running.post("/v1/completions", {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 12, **more})

        found = {bits: post(bits=bits)[1]["choices"][0]["text"] for bits in (8, 3, 5)}
        assert found == expected
        assert post()[1]["choices"][0]["text"] == expected[3]
        for more, words in ({"bits": 4}, "found 4"), ({"bits": 5, "sparsity": 0}, "one of them, found both"):
            status, refused = post(**more)
            assert (status, words in refused["error"]["message"]) == (400, True), refused
        (about,) = running.client().models.list()
        assert about.model_extra["bits"] == 3
    copy = Path(shutil.copytree(bundle, tmp_path / "saved"))
    code, _, err = run("bench", copy, "--bits", 5, "--save", "--max-new-tokens", 4, "--runs", 1)
    assert (code, "| | dense | 5 bits |" in (copy / "README.md").read_text()) == (0, True), err
    code, _, err = run("bench", copy, "--bits", 8)
    assert (code, "bits: expected a level to compare with the dense model (5, 3), found 8" in err) == (2, True), err


def test_an_onnx_export_is_the_dense_model(bundle: Path, tmp_path: Path, run: Run) -> None:
    """With the output layer as it is stored, which our back ends round to int8."""
    pytest.importorskip("onnx", reason="needs the onnx extra")
    pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    code, _, errors = run("export-onnx", str(bundle), str(tmp_path / "out"))
    assert (code, "a graded bundle is exported as its dense model alone: add --sparsity 0" in errors) == (2, True)
    code, output, errors = run("export-onnx", str(bundle), str(tmp_path / "out"), "--sparsity", "0")
    assert (code, "0 sparse projections" in output, "agrees with our runtime" in output) == (0, True, True), errors


def limits(values: list[float]) -> Change:
    return lambda folder: change_tensor(folder / SIDECAR, f"{O_PROJ}.plane_threshold", values)


def narrow(folder: Path) -> None:
    tensors = load_file(folder / SIDECAR)
    tensors[f"{O_PROJ}.plane_threshold"] = tensors[f"{O_PROJ}.plane_threshold"][:, :1].contiguous()
    save_file(tensors, folder / SIDECAR, metadata={"format": "wisparse", "format_version": "2"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(RECIPE, "plane_bits", [4, 3]), r"plane_bits: expected \[4, 4\], .* the 8 bits of a code, found \[4, 3\]"),
        (put(RECIPE, "plane_bits", [8]), r"plane_bits: expected \[4, 4\]"),
        (put(RECIPE, "plane_bits"), "unexpected tensor"),
        (limits([0.1, 0.05, 0.2, 0.4]), "plane_threshold: expected finite thresholds, none below an earlier plane's"),
        (limits([0.1, float("nan"), 0.2, 0.4]), "plane_threshold: expected finite thresholds"),
        (limits([0.1, float("inf"), 0.2, 0.4]), "plane_threshold: expected finite thresholds"),
        (limits([0.0, 1e-40, 0.2, 0.4]), "plane_threshold: expected 0 or at least 1.17549e-38"),
        (limits([1e-3, 1e9, 1e-3, 1e9]), "plane_threshold: expected .* for the first plane, the threshold"),
        (narrow, r"expected plane_threshold \(2, 2\) in F32, found \(2, 1\)"),
    ],
)
def test_planes_that_do_not_fit_are_refused(change: Change, words: str, bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "broken"))
    change(folder)
    resign(folder)
    with pytest.raises(BundleError, match=words) as caught:
        Bundle.open(folder)
    assert "\n" not in str(caught.value)


def test_codes_without_planes_are_refused(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "broken"))
    (file,) = folder.glob("model-*.safetensors")
    tensors = load_file(file)
    tensors[f"{O_PROJ}.weight_packed"].view(torch.uint8)[0, 0] = 128 + 120
    save_file(tensors, file, metadata={"format": "pt"})
    resign(folder)
    for backend in ("torch", "numba"):
        with pytest.raises(
            WisparseError, match=f"{O_PROJ}.*: expected int8 codes up to 119, which have planes, found 120"
        ):
            cpu_decoder(Bundle.open(folder), backend, max_seq_len=16)
