"""Evaluation against figures worked out by hand, transformers and the runtime; what a conversion measures at its end."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from bundle_maker import make_bundle
from torch import Tensor

from wisparse import AccessError, UsageError, load
from wisparse.converter import measurement
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.calibration_state import CalibrationState
from wisparse.converter.evaluation import evaluate_text, same_text
from wisparse.converter.measurement import MaskedLogits, block_sensitivity, measure
from wisparse.converter.processes import SILENT
from wisparse.converter.search.search import SearchResult
from wisparse.converter.sensitivity import kl_rows
from wisparse.converter.settings import ConvertSettings
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.bundle import Bundle
from wisparse.runtime.tasks.generators import NUM_LINES, SEED, make_problems

VOCABULARY = 11


def stand_in(noise: float) -> Callable[[Tensor, int], Tensor]:
    """A 'model' whose logits are a function of the token, with noise at the sparse positions."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    other = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def logits(ids: Tensor, start: int) -> Tensor:
        sparse = torch.arange(len(ids)) >= start
        return table[ids] + noise * sparse[:, None] * other[ids]

    return logits


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("evaluation") / "half", 0.5)


def test_policies() -> None:
    with pytest.raises(UsageError, match="expected one of dense, half, all, found 'most'"):
        evaluate_text(stand_in(1.0), sequences(3), ["most"])
    # Half goes by each sequence's own length.
    model = Mock(side_effect=stand_in(1.0))
    evaluate_text(model, sequences(5, 8, 1), ["half"])
    calls = [(len(ids), start) for (ids, start), _ in model.call_args_list]
    assert calls == [(5, 5), (5, 3), (8, 8), (8, 4), (1, 1), (1, 1)]
    # Dense policy costs nothing.
    quality = evaluate_text(stand_in(3.0), sequences(20), ["dense"])["dense"]
    assert (quality.sparse.num_tokens, quality.overall.kl, quality.overall.top1_agreement) == (0, 0.0, 1.0)
    # JSON knows no NaN.
    assert json.loads(json.dumps(quality.to_dict(), allow_nan=False))["sparse"]["kl"] is None


def test_figures_by_hand() -> None:
    texts = sequences(9, 400)  # the second one is longer than a piece
    model = stand_in(0.5)
    quality = evaluate_text(model, texts, ["half"])["half"]
    kl, agreeing, losses, dense_losses, everywhere = [], [], [], [], []
    for ids in texts:
        length = len(ids)
        start = length - length // 2
        p, q = (model(ids, at).double().log_softmax(-1) for at in (length, start))
        rows = (p.exp() * (p - q)).sum(-1)
        everywhere += rows.tolist()
        kl += rows[start:].tolist()
        agreeing += (p.argmax(-1) == q.argmax(-1))[start:].tolist()
        labelled = torch.arange(start, length - 1)
        losses += (-q[labelled, ids[labelled + 1]]).tolist()
        dense_losses += (-p[labelled, ids[labelled + 1]]).tolist()
    found = quality.sparse
    assert found.num_tokens == len(kl) == 204
    assert quality.overall.num_tokens == 409
    assert found.kl == pytest.approx(sum(kl) / len(kl), rel=1e-5)
    assert quality.overall.kl == pytest.approx(sum(everywhere) / 409, rel=1e-5)
    assert found.top1_agreement == pytest.approx(sum(agreeing) / len(agreeing))
    assert 0.2 < found.top1_agreement < 1.0
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert found.dense_perplexity == pytest.approx(math.exp(sum(dense_losses) / len(dense_losses)), rel=1e-5)


def test_standard_errors_are_the_spread_of_texts() -> None:
    """As many draws of texts say: tokens of one text are no draws of their own."""
    model = stand_in(0.5)
    texts = sequences(*[12, 30, 21, 40] * 6)
    found = evaluate_text(model, texts, ["all"])["all"].sparse
    alone = [evaluate_text(model, [ids], ["all"])["all"].sparse for ids in texts]
    assert math.isnan(alone[0].kl_stderr)
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, list[float]] = {"kl": [], "top1_agreement": [], "perplexity": []}
    for _ in range(4000):
        some = [alone[i] for i in torch.randint(len(texts), (len(texts),), generator=generator).tolist()]
        tokens = sum(one.num_tokens for one in some)
        labels = sum(one.num_tokens - 1 for one in some)
        change = sum(math.log(one.perplexity / one.dense_perplexity) * (one.num_tokens - 1) for one in some) / labels
        drawn["perplexity"].append(found.dense_perplexity * math.exp(change))
        for name in ("kl", "top1_agreement"):
            drawn[name].append(sum(getattr(one, name) * one.num_tokens for one in some) / tokens)
    expected = {name: float(torch.tensor(values).std()) for name, values in drawn.items()}
    errors = {"kl": found.kl_stderr, "top1_agreement": found.top1_stderr, "perplexity": found.perplexity_stderr}
    assert errors == pytest.approx(expected, rel=0.1)


def test_buffers_references_and_counters() -> None:
    buffer = torch.empty(30, VOCABULARY)
    model = stand_in(0.5)

    def logits(ids: Tensor, start: int) -> Tensor:
        buffer[: len(ids)] = model(ids, start)
        return buffer[: len(ids)]

    texts = sequences(20, 30)
    assert evaluate_text(logits, texts) == evaluate_text(model, texts)
    # Another reference.
    assert evaluate_text(model, texts, reference=stand_in(0.0)) == evaluate_text(model, texts)
    assert evaluate_text(model, texts, ["all"], reference=lambda ids, _: model(ids, 0))["all"].sparse.kl == 0
    # Realised sparsity is weighted by tokens.
    shares = iter([0.2, 0.6])
    counter = SimpleNamespace(measure_sparsity=lambda enabled: None, realised_sparsity=lambda: next(shares))
    found = evaluate_text(stand_in(0.1), sequences(11, 31), ["all"], counter=counter)
    assert (found["all"].realised_sparsity, found["all"].realised_range) == (pytest.approx(0.5), (0.2, 0.6))


def test_problems_are_right_and_repeat() -> None:
    problems = make_problems(60, 3)
    assert problems == make_problems(60, 3) != make_problems(60, 4)
    for problem in [*problems, *make_problems(NUM_LINES, SEED)]:
        lines = [*problem.prompt.splitlines(), problem.answer]
        assert len(lines) == 18
        for source, answer in zip(lines[::2], lines[1::2], strict=True):
            assert repr(eval(source.removeprefix(">>> "), {})) == answer
    asked = make_problems(NUM_LINES, SEED)
    assert len({problem.prompt for problem in asked}) == 500
    digest = "6df8436c660f292cd9c4a204f6434fe66884a58d2c26a4965ab9598edb0049a4"
    assert hashlib.sha256(json.dumps(asked).encode()).hexdigest() == digest, "figures are of these very problems"


def test_same_text() -> None:
    for calibrated, digest, source, seed, words in (
        ("corpus", "sha256:a", "other", 5, "very tokens"),
        ("corpus", "sha256:b", "corpus", 0, "name and seed"),
        ("corpus", "sha256:b", "corpus", 1, "has the name of"),
        ("corpus", "sha256:b", "other", 0, "None"),
        ("self", "sha256:b", "self", 0, "this seed (0)"),
        ("self", "sha256:b", "self", 1, "None"),
    ):
        calibration = SimpleNamespace(digest="sha256:a", source=calibrated, seed=0)
        assert words in str(same_text(digest, source, seed, calibration))


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]], stdlib_file: Path) -> Run:
    """What ``wisparse eval ARGS`` prints to its two streams; TEXT stands for two sequences of a text of that length."""

    def run_eval(*args: object, code: int = 0, text: int = 0) -> tuple[str, str]:
        shape = ("--text", stdlib_file, "--num-samples", 2, "--seq-len", text, "--dtype", "float32")
        ended, out, err = run("eval", *args, *(shape if text else ()))
        assert ended == code, err
        return out, err

    return run_eval


def test_command_on_text(bundle: Path, stdlib_file: Path, run: Run) -> None:
    document = json.loads(run(bundle, "--backend", "torch", "--json", text=64)[0])
    assert document["text"]["source"] == stdlib_file.name
    (row,) = document["bundles"]
    assert row["warning"] is None
    assert list(row["quality"]) == ["half", "all"]
    for policy, tokens in (("half", 64), ("all", 126)):
        found = row["quality"][policy]
        assert (found["sparse"]["num_tokens"], found["overall"]["num_tokens"]) == (tokens, 128)
        assert found["realised_sparsity"] == pytest.approx(0.5, abs=0.15)
        assert 0.01 < found["sparse"]["kl"] < 3
    out, _ = run("--compare", bundle, bundle, "--backend", "torch", "--prefill", "all", text=64)
    kl = f"{row['quality']['all']['sparse']['kl']:.4f}"
    assert out.count(kl) == 2  # two rows; the column of all positions counts the first ones too, which are dense
    assert "At 50% sparsity (every token sparse), KL" in out


def test_command_measures_every_level_or_the_one_asked_for(example_model: Path, tmp_path: Path, run: Run) -> None:
    levels = make_bundle(example_model, tmp_path / "levels", 0.3, 0.6)
    line = (levels, "--prefill", "all", "--backend", "torch")
    low, high = json.loads(run(*line, "--json", text=48)[0])["bundles"]
    assert (low["sparsity"], high["sparsity"]) == (0.3, 0.6)
    kl = [row["quality"]["all"]["sparse"]["kl"] for row in (low, high)]
    assert 3 * kl[0] < kl[1]
    assert all(row["quality"]["all"]["sparse"]["kl_stderr"] > 0 for row in (low, high))
    (alone,) = json.loads(run(*line, "--sparsity", 0.3, "--json", text=48)[0])["bundles"]
    assert alone == low, "a sparsity level that was switched to is the sparsity level that was loaded"
    out, _ = run(*line, text=48)
    assert [f"{one:.4f} ± " in out for one in kl] == [True, True]


def test_command_tells_rounding_from_masks(bundle: Path, run: Run) -> None:
    (row,) = json.loads(run(bundle, "--weights", "int8", "--json", text=64)[0])["bundles"]
    (native,) = json.loads(run(bundle, "--json", text=64)[0])["bundles"]
    assert "alone" not in native
    assert row["alone"]["masks"] == native["quality"]
    for policy in ("half", "all"):
        figures = row["alone"]["int8"], row["alone"]["masks"], row["quality"]
        rounded, masked, both = (found[policy]["sparse"] for found in figures)
        assert 0 < rounded["kl"] < 0.01 < masked["kl"]
        assert masked["kl"] / 2 < both["kl"] < masked["kl"] * 2
        assert both["kl"] != masked["kl"]
        for key in ("dense_perplexity", "num_tokens"):  # one dense model for all three
            assert rounded[key] == masked[key] == both[key]
        assert row["alone"]["int8"][policy]["realised_sparsity"] is None
    out, _ = run(bundle, "--weights", "int8", "--prefill", "all", text=64)
    assert all(label in out for label in ("all, int8 alone", "all, masks alone", "all, int8 and masks"))


def test_command_refuses(bundle: Path, run: Run, tmp_path: Path) -> None:
    for args, message in (
        ((bundle, bundle), "add --compare"),
        ((bundle, "--seq-len", 4096), "--seq-len: expected at most the model's context, 2048 tokens, found 4096"),
        ((bundle, "--max-seq-len", 10, "--seq-len", 32, "--num-samples", 1), "below --seq-len 32"),
        ((bundle, "--tasks", " , "), "expected names"),
        ((bundle, "--text", tmp_path / "missing.txt"), "no such file"),
    ):
        out, err = run(*args, code=2)
        assert (out, message in err, "Traceback" in err) == ("", True, False), err


def test_command_lets_the_model_write_the_text_and_warns_about_the_calibration_text(bundle: Path, run: Run) -> None:
    calibration = Bundle.open(bundle).recipe.calibration
    assert calibration.source == "self"
    shape = ("--num-samples", 2, "--seq-len", 16, "--backend", "torch", "--prefill", "all")
    out, err = run(bundle, *shape, "--seed", calibration.seed)
    assert f"2 x 16 tokens of self, seed {calibration.seed}" in out
    assert "warning: half: the model wrote the calibration text with this seed" in err


@pytest.fixture(scope="module")
def source(example_model: Path) -> SourceModel:
    return load_source(example_model, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def found(bundle: Path) -> SearchResult:
    """A search's outcome, read from a bundle."""
    opened = Bundle.open(bundle)
    return SearchResult(
        projections={entry.name: entry for entry in opened.recipe.projections},
        channel_scales={name: mask.channel_scale for name, mask in opened.masks.items()},
    )


def tokens(samples: int = 3, length: int = 24) -> CalibrationTokens:
    ids = torch.randint(4, 8000, (samples, length), generator=torch.Generator().manual_seed(1))
    return CalibrationTokens.from_rows(ids.tolist(), "self", 0)


@pytest.mark.parametrize("start", [0, 11, 24])
def test_masked_logits_are_the_runtimes(source: SourceModel, found: SearchResult, bundle: Path, start: int) -> None:
    ids = tokens(1).input_ids[0]
    with load(bundle, backend="torch", dtype="float32") as model:
        model.decoder.measure_sparsity(True)
        expected = model.decoder.logits(ids, start)
        realised = model.decoder.realised_sparsity()
    with MaskedLogits(source, found) as logits:
        logits.measure_sparsity(True)
        torch.testing.assert_close(logits(ids, start), expected, atol=2e-3, rtol=1e-3)
        if start < len(ids):
            assert logits.realised_sparsity() == pytest.approx(realised, abs=1e-4)
        logits.measure_sparsity(False)
        assert logits.realised_sparsity() is None
    plain = source.model(input_ids=ids[None]).logits[0]
    assert torch.equal(plain, source.model(input_ids=ids[None]).logits[0])  # the masks are off again


def test_measure(
    source: SourceModel, found: SearchResult, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (measure(source, tokens(), {0.5: found}, sensitivity_at=0.5) for _ in range(2))
    assert first == second
    assert first.text == "text that the model wrote, not what it was calibrated on"
    assert first.levels[0.5].sparse.num_tokens == 3 * 23  # all but the first of each
    assert 0.01 < first.levels[0.5].sparse.kl < 3
    assert first.levels[0.5].realised_sparsity == pytest.approx(0.5, abs=0.15)
    assert [len(row) for row in first.sensitivity.kl] == [6, 6, 6]
    assert all(low < high for low, high in zip(first.sensitivity.kl[0], first.sensitivity.kl[2], strict=True))
    # A data set that went away does not cost the search.
    monkeypatch.setattr(measurement, "load_calibration", Mock(side_effect=AccessError("no network")))
    result = measure(source, tokens(), {0.5: found}, ["org/corpus"])
    assert result.text == "the calibration text itself"
    assert "flatters it: no network" in caplog.text
    # Blocks are measured alone only where the report shows it.
    monkeypatch.setattr(measurement, "block_sensitivity", Mock(side_effect=AssertionError("nobody asked for it")))
    assert measure(source, tokens(), {0.5: found}).sensitivity is None
    for report, expected in (("auto", (False, True)), ("full", (True, True)), ("brief", (False, False))):
        given = ConvertSettings("model", Path("out"), report=report)
        assert (given.full_report("cpu"), given.full_report("cuda")) == expected


def test_block_sensitivity_by_hand(source: SourceModel, found: SearchResult) -> None:
    level, index = 0.5, 2
    with CalibrationState(source, tokens(), batch_size=2) as calib:
        for name in calib.names:
            calib.set_scale(name, found.channel_scales[name])
        sensitivity = block_sensitivity(calib, (level,), SILENT)
    ids, keep = tokens().input_ids, tokens().keep
    inputs: dict[str, Tensor] = {}

    def logits(hook: Callable[[str, Tensor], Tensor | None]) -> Tensor:
        """With a hook before every projection of the block."""
        hooks = [
            module.register_forward_pre_hook(lambda _, args, name=name: hook(name, args[0]))
            for name, module in source.projections.items()
            if f".{index}." in name
        ]
        found = source.model(input_ids=ids).logits
        for one in hooks:
            one.remove()
        return found

    def drop(name: str, x: Tensor) -> Tensor:
        scale = found.channel_scales[name]
        threshold = torch.quantile((inputs[name][keep].abs() * scale).flatten(), level)
        return torch.where((x.abs() * scale >= threshold) | ~keep[..., None], x, 0.0)

    dense = logits(lambda name, x: inputs.update({name: x}))
    expected = kl_rows(dense[keep].log_softmax(-1), logits(drop)[keep].log_softmax(-1)).mean()
    assert sensitivity.num_tokens == int(keep.sum())
    assert sensitivity.kl[0][index] == pytest.approx(float(expected), rel=0.02)
