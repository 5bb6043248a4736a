"""Quantising while converting: GPTQ loses less than rounding, int4 is fitted in the coordinates that cost less, a killed run
goes on, others load what is written."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from quantised_models import PUBLISHED, change_config, quantise_model
from safetensors.torch import load_file
from tiny_bundle import tiny_config, write_tiny_model
from tiny_source import tiny_source, tiny_tokens

from wisparse.converter import gptq, pipeline
from wisparse.converter.config import full_config
from wisparse.converter.gptq import compare_coordinates, fit_int4, quantise_weights, search_scales
from wisparse.converter.source import load_source
from wisparse.converter.state import Stages
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.weight_types import quantise
from wisparse.runtime.backends import make_decoder

Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("quick_conversion")
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def quantised(kind: str, stages: Stages) -> tuple[object, dict[str, torch.Tensor]]:
    source = tiny_source(**SIZES)
    matrices = quantise_weights(source, tiny_tokens(), kind, torch.bfloat16, stages)
    return source, {n: torch.cat((m.codes.view(torch.uint8).flatten(), m.scales.ravel())) for n, m in matrices.items()}


def inputs(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Correlated, of very different sizes, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, columns // 4), (columns // 4, columns), (rows, columns)
    few, mix, own = (torch.randn(shape, generator=generator) for shape in shapes)
    return (few @ mix + own) * torch.logspace(-1, 1, columns)


@pytest.mark.parametrize("columns", [128, 192])
def test_gptq_loses_less_than_rounding(columns: int) -> None:
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(1))
    x, fresh = inputs(400, columns), inputs(400, columns, seed=0)[200:]
    fitted = fit_int4(weight, x.T @ x, 64, torch.float32)
    rounded = quantise("int4", weight, group=64)
    lost, rounding = (((one.dequantise(torch.float32) - weight) @ fresh.T).square().mean() for one in (fitted, rounded))
    assert lost < 0.5 * rounding
    assert (fitted.group, fitted.zeros) == (64, None)


def test_scales_are_those_that_lose_least() -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    matrix = fit_int4(weight, torch.eye(128), 32, torch.float32)
    found, steps = matrix.dequantise(torch.float32), matrix.scales.repeat_interleave(32, dim=1)
    searched = search_scales(weight, torch.ones(128), 32, torch.float32).repeat_interleave(32, dim=1)
    codes = (weight / searched).round().clamp(-8, 7)
    torch.testing.assert_close(found / steps, codes)
    # Then the scales of least squares for these codes.
    groups = (1, (4, 32))
    best = (codes * weight).unflatten(*groups).sum(2) / codes.square().unflatten(*groups).sum(2)
    torch.testing.assert_close(matrix.scales, best, rtol=2e-3, atol=0)
    assert (found - weight).square().sum() < (codes * searched - weight).square().sum()


def test_what_comes_before_is_made_up_for() -> None:
    """Inputs here differ from those in the dense model, as behind rounded layers: the fit aims at the dense output."""
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    dense, shift = inputs(4000, 128), 0.2 * torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    here = dense + dense @ shift * 0.3

    def loss(cross: torch.Tensor | None) -> float:
        matrix = fit_int4(weight, here.T @ here, 64, torch.float32, cross)
        return float((here @ matrix.dequantise(torch.float32).T - dense @ weight.T).square().mean())

    assert loss(dense.T @ here) < 0.6 * loss(None)


@pytest.mark.parametrize("moments", [torch.zeros(64, 64), torch.ones(64, 64)])
def test_inputs_that_say_nothing_do_no_harm(moments: torch.Tensor) -> None:
    """A layer that saw only zeros, or one and the same input."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    found = fit_int4(weight, moments, 32, torch.float32).dequantise(torch.float32)
    assert found.isfinite().all()
    assert (found[3] == 0).all()
    assert (found - weight).abs().max() < weight.abs().max()


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_a_killed_run_goes_on_to_the_same_codes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, whole = quantised(kind, Stages(tmp_path))
    assert (tmp_path / "weights.stage").exists() == (kind == "int4")  # the others are rounded again
    monkeypatch.setattr(gptq, "fit_projections", None)
    again, resumed = quantised(kind, Stages(tmp_path))
    assert list(whole) == list(resumed) == list(source.projections)  # type: ignore[attr-defined]
    for name in whole:
        assert torch.equal(whole[name], resumed[name])
        assert torch.equal(source.projections[name].weight, again.projections[name].weight)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(hidden_size=64, head_dim=16, intermediate_size=96, dtype="bfloat16")
    return write_tiny_model(tmp_path_factory.mktemp("weights") / "plain", config, dtype=torch.bfloat16)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
def test_what_is_written_loads_in_transformers(kind: str, bits: int, plain: Path, tmp_path: Path, run: Run) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 60)
    options = f"--weights {kind} --search uniform -q --rotation none --num-samples 4 --seq-len 32".split()
    assert run("convert", plain, "-o", out, "--calibration", tmp_path / "text.txt", *options) == (0, "", "")  # -q
    document = json.loads((out / "config.json").read_text())["quantization_config"]
    assert document["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    bundle = Bundle.open(out)
    assert len(bundle.checkpoint.quantised) == 14
    kept = dict(chain.from_iterable(load_file(file).items() for file in out.glob("model-*.safetensors")))
    source = load_file(plain / "model.safetensors")
    assert all(torch.equal(kept[name], source[name]) for name in source if not name.endswith("_proj.weight"))
    tokens = torch.tensor([5, 17, 250, 3, 99, 101, 7])
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0, -1]
    decoder = make_decoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=64, backend="torch")
    torch.testing.assert_close(decoder.prefill(0, tokens, len(tokens)), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_is_said_before_any_work(plain: Path, tmp_path: Path, run: Run) -> None:
    narrow = write_tiny_model(tmp_path / "narrow")
    packed = quantise_model(narrow, tmp_path / "packed", *PUBLISHED["gptq"]())
    other = quantise_model(narrow, tmp_path / "other", *PUBLISHED["gptq"]())
    change_config(other, lambda d: d["quantization_config"].update(quant_method="bitsandbytes"))
    for model, options, code, words in (
        (narrow, "--weights int4", 3, "no group of 128, 64, 32 channels divides"),
        (plain, "--weights int8 --dtype float16", 2, "leave --dtype out"),
        (packed, "--weights int8", 2, "the model is quantised, and its weights stay as they are"),
        (packed, "--rotation pca", 3, "rotated weights would have to be rounded anew"),
        (other, "", 3, "quantised by bitsandbytes"),
    ):
        found, _, err = run("convert", model, "-o", tmp_path / "out", *options.split())
        assert (found, words in err) == (code, True), err


OPTIONS = ["--weights", "int4", "--sparsity", "0.3", "--search", "uniform"]
OPTIONS += ["--num-samples", "2", "--seq-len", "32", "--device", "cpu"]


def test_both_are_measured_and_nothing_is_left_behind(plain: Path, tmp_path: Path) -> None:
    source = load_source(plain, torch.float32, "cpu")
    checkpoint, tokens = Checkpoint.open(plain, complete=full_config), tiny_tokens()
    before = source.model(input_ids=tokens.input_ids).logits
    stages = Stages(tmp_path)
    found = compare_coordinates(
        source, checkpoint, tokens, lambda: tiny_tokens(seed=1), lambda: tiny_tokens(seed=2), 0.5, stages
    )
    assert sorted(found) == ["none", "pca"]
    assert all(0.0 < kl < 10.0 for kl in found.values())
    torch.testing.assert_close(source.model(input_ids=tokens.input_ids).logits, before, rtol=0, atol=0)
    # A killed run goes on with what was measured.
    assert sorted(path.stem for path in tmp_path.glob("*.stage")) == ["coordinates", "rotation"]
    assert compare_coordinates(source, checkpoint, tokens, None, None, 0.5, Stages(tmp_path)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize("better", ["none", "pca"])
def test_the_lower_kl_decides(better: str, plain: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    kls = {"none": 0.2, "pca": 0.2, better: 0.1}
    monkeypatch.setattr(pipeline, "compare_coordinates", lambda *_: kls)
    code, out, _ = run("convert", plain, "-o", tmp_path / "out", *OPTIONS)
    recipe = Bundle.open(tmp_path / "out").recipe
    assert (code, recipe.rotation is not None) == (0, better == "pca")
    assert recipe.search["coordinates"] == {"sparsity": 0.3, "kl": kls}
    assert f"KL {kls['pca']:.3g} nats/token rotated, {kls['none']:.3g} as the source has them" in out


def test_only_int4_is_measured_and_only_where_nobody_chose(plain: Path, tmp_path: Path, run: Run, monkeypatch):
    monkeypatch.setattr(pipeline, "compare_coordinates", None)
    monkeypatch.setattr("wisparse.runtime.forecast.ROUNDS", 1)
    for number, changes in enumerate((["--weights", "int8"], ["--rotation", "pca"], ["--rotation", "none"])):
        assert run("convert", plain, "-o", tmp_path / str(number), *OPTIONS, *changes, "-q")[0] == 0
    _, plan, _ = run("convert", plain, "-o", tmp_path / "dry", *OPTIONS, "--dry-run", "--json")
    assert json.loads(plan)["rotation"] == "auto"
