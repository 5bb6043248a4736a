"""The rungs of one bundle: switching on a running model is loading at that rung, on every back end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import make_bundle
from click.testing import CliRunner
from runtime_models import make_checkpoint

import wisparse
from wisparse.cli import cli
from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError
from wisparse.runtime.cpu.decoder import CpuDecoder
from wisparse.runtime.decoder import Decoder
from wisparse.runtime.torch.decoder import TorchDecoder

RUNGS = (0.3, 0.5, 0.7)
CPU = torch.device("cpu")
DECODERS: dict[str, type[Decoder]] = {"torch": TorchDecoder, "numba": CpuDecoder}
PROMPT = torch.arange(3, 15)


@pytest.fixture(scope="module", params=["qwen2", "phi3"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rungs with output biases; biases of its own, or fused projections."""
    folder = tmp_path_factory.mktemp("rungs")
    return make_bundle(make_checkpoint(request.param, folder / "source"), folder / "bundle", *RUNGS, bias=0.5)


@pytest.fixture(scope="module")
def example(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("rungs") / "bundle", *RUNGS, bias=0.02)


def make(bundle: Bundle, backend: str, **settings: Any) -> Decoder:
    settings = {"device": CPU, "dtype": torch.float32, "max_seq_len": 64, "max_batch": 2} | settings
    return DECODERS[backend](bundle, **settings)


def run(decoder: Decoder, sparse_from: int = 7) -> torch.Tensor:
    """Logits (S, B, V) of a prompt in two slots, part of it sparse, and of some steps."""
    rows = [torch.stack([decoder.prefill(slot, PROMPT + slot, sparse_from).clone() for slot in range(2)])]
    for token in (5, 9, 33, 2):
        rows.append(decoder.decode(torch.tensor([token, token + 1])).clone())
    return torch.stack(rows)


@pytest.mark.parametrize("backend", DECODERS)
def test_other_masks_are_what_loading_them_gives(bundle: Path, backend: str) -> None:
    """To the bit, whatever was in force before; dense too."""
    opened = Bundle.open(bundle)
    decoder = make(opened, backend)
    expected = {sparsity: run(make(opened.at(sparsity), backend)) for sparsity in (0.0, *RUNGS)}
    for sparsity in (0.7, 0.3, 0.0, 0.5, 0.3, 0.7, 0.0):
        decoder.set_masks(opened.at(sparsity).masks)
        assert decoder.lengths == [0, 0]
        assert torch.equal(run(decoder), expected[sparsity]), sparsity
    assert not torch.equal(expected[0.3], expected[0.5])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_stay_rounded(bundle: Path, weights: str) -> None:
    opened = Bundle.open(bundle)
    decoder = make(opened, "numba", weights=weights)
    for sparsity in (0.3, 0.0):
        decoder.set_masks(opened.at(sparsity).masks)
        assert torch.equal(run(decoder), run(make(opened.at(sparsity), "numba", weights=weights)))


@pytest.mark.parametrize("sparsity", [0.0, *RUNGS])
def test_back_ends_agree_at_every_rung(bundle: Path, sparsity: float) -> None:
    opened = Bundle.open(bundle).at(sparsity)
    found, expected = run(make(opened, "numba")), run(make(opened, "torch"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_output_biases_are_added_where_the_masks_are_in_force(bundle: Path) -> None:
    """By hand: a projection's dense rows have none, its sparse rows have it once."""
    opened = Bundle.open(bundle)
    decoder = make(opened, "torch")
    projection = next(p for p in decoder._blocks[0].projections if p.output_bias is not None)  # type: ignore[attr-defined]
    x = torch.randn(5, projection.in_features)
    added = opened.masks[projection.name].output_bias
    with_bias = projection(x, 2)
    projection.output_bias = None
    without = projection(x, 2)
    assert torch.equal(with_bias[:2], without[:2])
    assert torch.equal(with_bias[2:], without[2:] + added)


@pytest.mark.parametrize("backend", DECODERS)
def test_a_running_model_switches(example: Path, backend: str) -> None:
    """Token for token what loading at the rung gives, and at 0 what the dense model gives."""

    def tokens(model: wisparse.Model) -> list[tuple[int, ...]]:
        answers = model.generate(["def f(x):\n", "import os\n"], max_new_tokens=12, prefill="half")
        return [answer.token_ids for answer in answers]

    settings: dict[str, Any] = {"backend": backend, "device": "cpu", "dtype": "float32", "max_seq_len": 64}
    expected = {}
    for sparsity in (0, *RUNGS):
        with wisparse.load(example, sparsity=sparsity, **settings) as alone:
            assert alone.sparsity == sparsity
            expected[sparsity] = tokens(alone)
    assert len({str(answer) for answer in expected.values()}) > 1
    with wisparse.load(example, **settings) as model:
        assert model.sparsity == RUNGS[-1]
        for sparsity in (*RUNGS, 0, 0.3):
            model.sparsity = sparsity
            assert model.sparsity == sparsity
            assert f"sparsity {sparsity:g}," in repr(model)
            assert tokens(model) == expected[sparsity]
            assert model.generate("x", max_new_tokens=3, measure_sparsity=True).realised_sparsity == pytest.approx(
                sparsity, abs=0.15
            )


def test_what_cannot_be_set(example: Path) -> None:
    model = wisparse.load(example, backend="torch", device="cpu", max_seq_len=64)
    with pytest.raises(
        UsageError, match=r"one of the bundle's rungs, 0\.3, 0\.5, 0\.7, or 0 for the dense model, found"
    ):
        model.sparsity = 0.4
    stream = model.stream("def f", max_new_tokens=8)
    next(stream)
    with pytest.raises(UsageError, match=r"an answer is in progress at 0\.7; wait for its end or close\(\) the stream"):
        model.sparsity = 0.3
    stream.close()
    model.sparsity = 0.3
    assert model.sparsity == 0.3
    model.close()
    with pytest.raises(UsageError, match="the model was closed"):
        model.sparsity = 0.5
    with pytest.raises(UsageError, match="one of the bundle's rungs"):
        wisparse.load(example, sparsity=0.31)


def test_verbs_take_a_rung(example: Path) -> None:
    """And what they print is that rung's answer."""
    model = wisparse.load(example, device="cpu", sparsity=0.3)
    expected = model.generate("def f", max_new_tokens=8).text
    run = CliRunner().invoke
    wanted = ["--prompt", "def f", "--max-new-tokens", "8", "--device", "cpu"]
    found = run(cli, ["generate", str(example), "--sparsity", "0.3", *wanted])
    assert found.exit_code == 0
    assert found.stdout.strip() == expected.strip()
    for verb, more in {
        "generate": wanted,
        "inspect": [],
        "bench": [],
        "eval": ["--text", str(example / "wisparse.json")],
    }.items():
        refused = run(cli, [verb, str(example), "--sparsity", "0.4", *more])
        assert isinstance(refused.exception, UsageError), (verb, refused.output)
        assert "one of the bundle's rungs, 0.3, 0.5, 0.7, or 0" in str(refused.exception)
    assert "at 30.0%" in run(cli, ["inspect", str(example), "--sparsity", "0.3"]).stdout


def test_three_rungs_take_hardly_more_room_than_one(example_model: Path, tmp_path: Path) -> None:
    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    one = make_bundle(example_model, tmp_path / "one", 0.5)
    three = make_bundle(example_model, tmp_path / "three", *RUNGS)
    # 1.009: this model's rows are short, so a scale weighs more beside its row than in any model in use.
    assert size(three) < 1.01 * size(one)
