"""The report says what the recipe says, in the same bytes every time; the figures are drawn from it."""

import dataclasses
import json
import math
import random

import matplotlib
import pytest
from tiny_bundle import tiny_config

from wisparse.converter.evaluation import Measured, Quality
from wisparse.converter.measurement import BlockSensitivity, Measurement
from wisparse.converter.report import CHANGED, Report, answers_changed, verdict
from wisparse.formats.card import REPORT, Inherited
from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, RotationRecord, SparsityLevel
from wisparse.formats.model_config import ModelConfig


def config(model_type: str = "llama", num_blocks: int = 3) -> ModelConfig:
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 160, "num_hidden_layers": num_blocks}
    return ModelConfig.from_dict(tiny_config(model_type, **sizes))


def recipe(of: ModelConfig, realised: float | None = None, **changes: object) -> Recipe:
    draw = random.Random(0)
    projections = []
    for one in of.projections():
        found = draw.random() * 0.9, draw.randrange(31) * 0.05, draw.random()
        projections.append(ProjectionRecipe(one.name, *found, draw.random() if realised is None else realised))
    calibration = CalibrationRecord("self", 2, 8, 14, 0, "sha256:0")
    level = SparsityLevel(0.5, tuple(projections), (0.5,) * of.num_blocks)
    made = Recipe("org/model", "abc", "wisparse", 0.5, (level,), calibration)
    return dataclasses.replace(made, **changes)


def quality(
    kl: float = 0.05,
    policy: str = "all",
    perplexity: float = 8.4,
    top1: float = 0.88,
    num_tokens: int = 4000,
    stderr: float = math.nan,
) -> Quality:
    measured = Measured(num_tokens, kl, 8.0, perplexity, top1, stderr)
    return Quality(policy, measured, measured, 0.49)


def sensitivity(num_blocks: int = 3) -> BlockSensitivity:
    return BlockSensitivity((0.4, 0.5, 0.6), ((0.01,) * num_blocks, (0.02,) * num_blocks, (0.04,) * num_blocks), 99)


def measured(**changes: object) -> Measurement:
    return dataclasses.replace(Measurement({0.5: quality()}, "held out", None), **changes)


def test_what_the_report_says() -> None:
    assert verdict(0.5, quality()) == (
        "At 50% sparsity (every token sparse), KL 0.05 nats/token, top-1 agreement 88%, perplexity 8 -> 8.4 (+5.0%); "
        f"about {CHANGED[4][1]} to {CHANGED[4][2]} of 100 greedy answers of 32 tokens change."
    )
    assert answers_changed(0.0) == (0, 0)
    assert answers_changed(2.0) == CHANGED[-1][1:]
    assert answers_changed(0.03, 0.025) == (CHANGED[2][1], CHANGED[4][2]), "of the rows within a standard error"
    assert tuple(zip(*map(sorted, zip(*CHANGED, strict=True)), strict=True)) == CHANGED, "all three columns rise"
    assert "100 greedy" not in verdict(0.5, quality(math.nan))
    assert "perplexity" not in verdict(0.5, quality(perplexity=math.nan))
    assert "not measured" in verdict(0.5, None)
    assert "KL 0.05 ± 0.002 nats" in verdict(0.5, quality(stderr=0.002))
    errors = dataclasses.replace(quality().sparse, perplexity_stderr=0.26, top1_stderr=0.011)
    with_errors = verdict(0.5, dataclasses.replace(quality(), sparse=errors))
    assert "agreement 88% ± 1, perplexity 8 -> 8.4 ± 0.3 (+5.0%)" in with_errors
    few, falling = verdict(0.5, quality(num_tokens=100)), verdict(0.5, quality(0.3, perplexity=7.0))
    assert few.endswith("(+5.0%); too few tokens to tell: 100, expected 2,048 or more.")
    assert "(-12.5%); about" in falling
    assert "the probability of the text's own tokens, which can rise while" in falling
    # The report says what sparsity to expect on other text.
    found = dataclasses.replace(quality(), realised_range=(0.478, 0.512))
    model = config()
    made = recipe(model, realised=0.5)

    def words(recipe: Recipe, quality: Quality | None = found) -> str:
        measurement = measured(levels={0.5: quality}) if quality else None
        return Report(recipe, model, measurement).expectation(0.5)

    unread = "50.0% of the weights are left unread on the calibration text, 49.0% on the text measured on"
    assert words(made).startswith(unread)
    assert "(47.8% to 51.2% by passage)" in words(made)
    assert "text of another kind expect up to about 3 points more or less" in words(made)
    assert "measured on" not in words(made, None)
    assert words(recipe(model, realised=0.0)) == "no weight is left unread."
    rotated = dataclasses.replace(made, rotation=RotationRecord("pca", 0.0, 256))
    assert "about 3 points" in words(rotated), "the model's own text is of all kinds it knows"
    given = dataclasses.replace(made.calibration, source="files")
    assert "about 3 points" in words(dataclasses.replace(made, calibration=given))
    assert "up to about 8 points less" in words(dataclasses.replace(rotated, calibration=given))
    assert (
        Report(made, model, None).calibrated_on
        == "self, 14 tokens; very few: 8,192 are the least default (--num-samples)"
    )
    enough = dataclasses.replace(made, calibration=dataclasses.replace(given, num_tokens=16_352))
    assert Report(enough, model, None).calibrated_on == "files, 16,352 tokens"
    report = Report(made, model, measured(levels={0.5: found})).to_json()["sparsity"]
    assert (report["realised_on_text_measured_on"], report["expect"]) == (0.49, words(made))


def test_report_agrees_with_the_recipe() -> None:
    model = config()
    made = recipe(model)
    report = Report(made, model, measured(sensitivity=sensitivity())).to_json()
    entries = {entry.name: entry for entry in made.projections}
    total = weighted = 0.0
    for projection in model.projections():
        found = report["blocks"][projection.block]["projections"][projection.role]
        entry = entries[projection.name]
        for key in ("sparsity", "alpha", "threshold", "realised_sparsity"):
            assert found[key] == pytest.approx(getattr(entry, key), rel=1e-5)
        total += projection.num_parameters
        weighted += projection.num_parameters * entry.sparsity
    assert report["sparsity"]["mean"] == pytest.approx(weighted / total, rel=1e-5)
    assert report["model"]["parameters_in_scope"] == total
    block = report["blocks"][1]
    attention, mlp = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 160
    both = (attention * block["self_attn"] + mlp * block["mlp"]) / (attention + mlp)
    assert block["sparsity"] == pytest.approx(both, rel=1e-5)
    assert report["quality"]["text"] == "held out"
    assert report["block_sensitivity"]["kl"][2] == [0.04] * 3


def test_the_report_is_always_the_same() -> None:
    model = config(num_blocks=4)
    made = recipe(model, search={"name": "paper", "history": [math.inf, *(1 / (i + 1) for i in range(999))]})
    measurement = measured(sensitivity=sensitivity(4), curve=((0.3, quality(0.01)), (0.5, quality())))
    first, second = (Report(made, model, measurement).files(Inherited()) for _ in range(2))
    assert first == second
    report = json.loads(first[REPORT], parse_constant=pytest.fail)
    assert [point["sparsity"] for point in report["quality_against_sparsity"]] == [0.3, 0.5]
    history = report["search"]["history"]
    assert len(history) == 60
    assert history[0] is None  # infinity is no JSON
    assert history[-1] == pytest.approx(1 / 999)
    # A user's style changes nothing.
    model = config()
    expected = Report(recipe(model), model, measured()).files(Inherited())
    with matplotlib.rc_context({"figure.dpi": 50, "lines.linewidth": 9, "font.size": 30, "savefig.facecolor": "red"}):
        assert Report(recipe(model), model, measured()).files(Inherited()) == expected
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize(
    ("model_type", "num_blocks", "more"),
    [("llama", 1, True), ("phi3", 2, True), ("llama", 80, True), ("llama", 3, False)],
)
def test_figures_are_those_that_have_data(model_type: str, num_blocks: int, more: bool) -> None:
    model, measurement = config(model_type, num_blocks), measured()
    if more:
        curve = ((0.3, quality(0.01)), (0.5, quality(perplexity=math.nan)))
        measurement = measured(sensitivity=sensitivity(num_blocks), curve=curve)
    files = Report(recipe(model), model, measurement).files(Inherited())
    drawn = ["alpha", "block_sensitivity", "quality", "sparsity"] if more else ["alpha", "sparsity"]
    assert sorted(files) == ["README.md", REPORT, *(f"figures/{name}.png" for name in drawn)]
    for data in (data for name, data in files.items() if name.endswith(".png")):
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert not [word for word in (b"Software", b"tIME") if word in data]
