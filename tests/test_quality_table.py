"""The quality table of a bundle: its figures are the runtime's, it survives the manifest, nonsense in it is refused."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wisparse import BundleError, load
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.evaluation import (
    Measured,
    dense_logits,
    estimate,
    evaluate_text,
    evaluate_together,
    reference_logits,
    rounded_weights,
)
from wisparse.converter.measurement import MaskedLogits, measure
from wisparse.converter.search.search import SearchResult
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.bundle import Bundle
from wisparse.formats.card import quality_cells, quality_note
from wisparse.formats.manifest import QualityRow, QualityTable, Recipe


@pytest.fixture(scope="module")
def source(example_model: Path) -> SourceModel:
    return load_source(example_model, dtype=torch.float32, device="cpu")


def result_of(bundle: Path) -> SearchResult:
    opened = Bundle.open(bundle)
    scales = {name: mask.channel_scale for name, mask in opened.masks.items()}
    return SearchResult({entry.name: entry for entry in opened.recipe.projections}, scales)


def tokens(samples: int, length: int, seed: int = 1) -> CalibrationTokens:
    ids = torch.randint(4, 8000, (samples, length), generator=torch.Generator().manual_seed(seed))
    return CalibrationTokens.from_rows(ids.tolist(), "file", 0)


def test_figures_are_the_runtimes(source: SourceModel, bundle: Path) -> None:
    text = tokens(4, 48)
    before = source.model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    found = measure(source, tokens(4, 48, 2), {0.4: result_of(bundle)}, ["file"], fresh=text)
    table = found.table
    assert table is not None
    assert torch.equal(source.model.state_dict()["model.layers.0.mlp.up_proj.weight"], before)
    assert [(row.weights, row.sparsity) for row in table.rows] == [
        (kind, level) for kind in ("native", "int8") for level in (0.0, 0.4)
    ]
    assert (table.num_tokens, table.noise_floor, table.rows[0].kl) == (4 * 47, 0.0, 0.0)
    for row in table.rows[:4]:
        how = {
            "weights": row.weights,
            "sparsity": row.sparsity,
            "backend": "numba" if row.weights == "int8" else "torch",
        }
        with load(bundle, dtype="float32", **how) as model, load(bundle, dtype="float32", backend="torch") as dense:
            unmasked = [dense.decoder.logits(ids, len(ids)).clone() for ids in text.input_ids]
            kept = dict(zip(map(str, text.input_ids.tolist()), unmasked, strict=True))
            reference = functools.partial(lambda kept, ids, _: kept[str(ids.tolist())], kept)
            wanted = evaluate_text(model.decoder.logits, text.input_ids, ["all"], reference=reference)
        figures = wanted["all"].sparse
        assert row.kl == pytest.approx(figures.kl, rel=0.02, abs=2e-6), row
        assert row.top1_agreement == pytest.approx(figures.top1_agreement, abs=0.011), row
        assert row.perplexity == pytest.approx(figures.perplexity, rel=0.01), row
    int8 = {row.sparsity: row.kl for row in table.rows if row.weights == "int8"}
    assert 0 < int8[0.0] < 0.1 * int8[0.4]


def test_stored_types_are_measured_against_the_weights_before(source: SourceModel, bundle: Path) -> None:
    text = tokens(2, 32)
    reference = reference_logits(source, text.input_ids)
    with rounded_weights(source, "int4"):  # in place of a conversion's own quantization
        found = measure(source, tokens(2, 32, 2), {0.4: result_of(bundle)}, ["file"], fresh=text, reference=reference)
    assert found.table is not None
    rows = {(row.weights, row.sparsity): row.kl for row in found.table.rows}
    assert rows.keys() == {("native", 0.0), ("native", 0.4)}
    assert 0.005 < rows["native", 0.0] < rows["native", 0.4]


def test_texts_of_one_pass(source: SourceModel, bundle: Path) -> None:
    texts = tokens(5, 32).input_ids

    def dense(ids: Tensor, _: int) -> Tensor:
        return dense_logits(source, ids)

    with MaskedLogits(source, result_of(bundle)) as logits:
        together = evaluate_together(logits, texts, dense, 2, logits)
        alone = evaluate_text(logits, texts, ["all"], reference=dense, counter=logits)["all"]
    for name, value in vars(alone.sparse).items():
        assert getattr(together.sparse, name) == pytest.approx(value, rel=1e-3), name
    assert together.realised_sparsity == pytest.approx(alone.realised_sparsity, abs=1e-6)


def test_estimate_from_fewer_tokens() -> None:
    whole, part = Measured(8192, 0.04, 12.0, 13.0, 0.9, 0.002), Measured(1024, 0.05, 10.0, 11.0, 0.88, 0.004)
    other = Measured(1024, 0.1, 10.0, 12.0, 0.82, 0.003)
    found = estimate(other, part, whole)
    assert (found.kl, found.perplexity, found.top1_agreement) == pytest.approx((0.08, 14.4, 0.85))
    assert found.kl_stderr == pytest.approx(0.1 * 0.05 * 0.8), "no less than the whole text's"
    assert estimate(part, part, whole).kl == pytest.approx(whole.kl)
    none = Measured(1024, 0.0, 10.0, 10.0, 1.0, 0.0)
    assert estimate(other, none, none).kl == other.kl, "a dense default level tells nothing"


ROWS = (
    QualityRow("native", 0.0, 4096, 0.0, 0.0, 1.0, 10.0),
    QualityRow("native", 0.4, 4096, 0.03, 0.001, 0.9, 10.3, 0.2),
    QualityRow("int8", 0.4, 1024, 0.031, None, 0.89, 10.4),
)
TABLE = QualityTable("text", 4096, 10.0, 0.0011, ROWS)


@pytest.fixture
def recipe(bundle: Path) -> Recipe:
    return dataclasses.replace(Bundle.open(bundle).recipe, quality=TABLE)


def test_manifest_and_text(recipe: Recipe, bundle: Path) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    plain = Bundle.open(bundle).recipe
    assert (plain.quality, "quality" in plain.to_dict(), quality_cells(plain)) == (None, False, [])
    known = [set(row) - {"perplexity_stderr"} != set(row) for row in recipe.to_dict()["quality"]["rows"]]
    assert known == [False, True, False], "the digest of bundles without it is the same"
    assert quality_cells(recipe)[1:] == [
        ("native", "40%", "0.03 ± 0.001", "90.0%", "10.300 ± 0.2", "4,096"),
        ("int8", "40%", "0.031", "89.0%", "10.400", "1,024"),
    ]
    assert "Noise floor of the arithmetic: KL 0.0011" in quality_note(recipe)


def _row(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["rows"][1].update(changes)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_row(kl=-0.1), "quality.rows[1].kl: expected a number, 0 or more, found -0.1"),
        (_row(kl=math.inf), "quality.rows[1].kl: expected a number, 0 or more, found inf"),
        (_row(kl=math.nan), "quality.rows[1].kl: expected a number, 0 or more, found nan"),
        (_row(kl=None), "quality.rows[1].kl: expected a number, 0 or more, found None"),
        (_row(top1_agreement=1.5), "quality.rows[1].top1_agreement: expected a number in [0, 1.0], found 1.5"),
        (_row(weights="int3"), "quality.rows[1].weights: expected one of native, int8, int4, fp8, found 'int3'"),
        (_row(weights=["native"]), "quality.rows[1].weights: expected a string"),
        (_row(sparsity=0.25), "quality.rows[1].sparsity: expected 0 or one of the sparsity levels 0.4, found 0.25"),
        (_row(sparsity=0), "quality.rows: expected each weight type and sparsity once, found one twice"),
        (lambda table: table.update(noise_floor="small"), "quality.noise_floor: expected a number, 0 or more"),
        (lambda table: table.update(rows={}), "quality.rows: expected a list"),
        (lambda table: table.update(num_tokens=1.5), "quality.num_tokens: expected a whole number"),
    ],
)
def test_nonsense_is_refused(damage: Callable[[dict[str, Any]], None], sentence: str, recipe: Recipe) -> None:
    document = json.loads(json.dumps(recipe.to_dict()))
    damage(document["quality"])
    with pytest.raises(BundleError) as refused:
        Recipe.from_dict(document)
    assert sentence in str(refused.value)
