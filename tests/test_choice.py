"""The choice of weight type and level by a KL: its rules on given pairs, and what load and the commands make of it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from wisparse import UsageError, load
from wisparse.formats.bundle import Bundle
from wisparse.formats.manifest import Manifest, QualityRow, QualityTable, Recipe, sidecar_metadata
from wisparse.runtime import measured_choice
from wisparse.runtime.choice import MAX_KL, Pair, auto_max_kl, choose

KL = {"native": {0.0: 0.0, 0.3: 0.01, 0.5: 0.07}, "int8": {0.0: 0.0004, 0.3: 0.011, 0.5: 0.071}}


def pairs(**speeds: tuple[float, ...]) -> list[Pair]:
    """By weight type the speeds dense, at 30% and at 50%."""
    rates = {kind: dict(zip((0.0, 0.3, 0.5), given, strict=False)) for kind, given in speeds.items()}
    return [Pair(kind, level, KL[kind][level], rate) for kind, row in rates.items() for level, rate in row.items()]


PAYS = pairs(native=(100, 120, 140), int8=(160, 180, 220))


@pytest.mark.parametrize(
    ("measured", "max_kl", "chosen", "down", "up"),
    [
        (PAYS, 0.05, ("int8", 0.3), ("int8", 0.0), ("int8", 0.5)),
        (PAYS, 0.2, ("int8", 0.5), ("int8", 0.3), None),
        (PAYS, 0.011, ("int8", 0.3), ("int8", 0.0), ("int8", 0.5)),  # the limit is included
        (PAYS, 0.0109, ("int8", 0.0), ("native", 0.0), ("int8", 0.3)),
        (PAYS, 0.0, ("native", 0.0), None, ("int8", 0.0)),
        # Masks that do not pay are never chosen, nor offered.
        (pairs(native=(1921, 1640, 1773), int8=(2586, 1980, 2016)), 0.5, ("int8", 0.0), ("native", 0.0), None),
        (pairs(native=(100, 101, 140)), 0.05, ("native", 0.0), None, ("native", 0.5)),  # 1% is noise
        (pairs(native=(100, 90, 140)), 0.2, ("native", 0.5), ("native", 0.0), None),
        # Of pairs that are about equally fast the nearest to the source.
        (pairs(native=(100, 160, 163)), 0.2, ("native", 0.3), ("native", 0.0), ()),
        # int8 may be slower than native.
        (pairs(native=(200, 230, 260), int8=(100, 120, 150)), 0.05, ("native", 0.3), ("native", 0.0), ("native", 0.5)),
        (pairs(native=(100,)), 0.05, ("native", 0.0), None, None),
        (pairs(int8=(100, 120, 150)), 0.0001, ("int8", 0.0), None, ("int8", 0.3)),  # none is within: the lowest
    ],
)
def test_rules(
    measured: list[Pair], max_kl: float, chosen: tuple[str, float], down: tuple[str, float] | None,
    up: tuple[str, float] | tuple[()] | None,
) -> None:  # fmt: skip
    found = choose(measured, max_kl)
    names = [None if one is None else (one.weights, one.sparsity) for one in (found.pair, found.down, found.up)]
    assert names[:2] == [chosen, down]
    assert up == () or names[2] == up
    dense = {pair.weights: pair.tok_per_s for pair in measured if pair.sparsity == 0}
    assert found.pair.tok_per_s >= dense[found.pair.weights], "never slower than dense of the same type"
    assert found.within == (found.pair.kl <= max_kl)
    if found.up is not None:  # the advice does what it says
        advised = float(str(found).rpartition("--max-kl ")[2].partition(":")[0])
        assert choose(measured, advised).pair.tok_per_s >= found.up.tok_per_s * 0.97


def test_words() -> None:
    assert str(choose(PAYS, 0.05)) == (
        "int8 30%, about 180 tok/s, KL 0.011: the fastest with KL at most 0.05; "
        "--max-kl 0.0004: int8 dense, about 160 tok/s, KL 0.0004; --max-kl 0.071: int8 50%, about 220 tok/s, KL 0.071"
    )
    assert "nothing has a KL of at most 0.0001; this is the lowest" in str(choose(pairs(int8=(1, 2, 3)), 0.0001))


def with_table(bundle: Path, out: Path, kl: dict[tuple[str, float], float]) -> Path:
    """A copy of a bundle with this quality table."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(bundle, out)
    manifest = Bundle.open(bundle).manifest
    rows = tuple(QualityRow(*pair, 4096, value, None, 0.9, 10.0) for pair, value in kl.items())
    table = QualityTable("text", 4096, 10.0, 0.0, rows)
    recipe: Recipe = dataclasses.replace(manifest.recipe, quality=table)
    file = out / "wisparse.safetensors"
    save_file(load_file(file), file, metadata=sidecar_metadata(recipe))
    import hashlib

    digests = {**manifest.sha256, file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    (out / "wisparse.json").write_bytes(Manifest(recipe, digests).to_bytes())
    return out


TABLE = {("native", 0.0): 0.0, ("native", 0.4): 0.03, ("int8", 0.0): 0.0004, ("int8", 0.4): 0.031}


@pytest.fixture
def tabled(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WISPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WISPARSE_MAX_KL")
    return with_table(bundle, tmp_path / "tabled", TABLE)


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[float, float]:
    """What a measurement finds, in place of one; counts as a key how often it was asked."""
    found = {0.0: 100.0, 0.4: 130.0}

    def time_levels(model: object, levels: list[float], steps: int) -> dict[float, float]:
        found[-1.0] = found.get(-1.0, 0) + 1
        return {level: found[level] for level in levels}

    monkeypatch.setattr(measured_choice, "_time_levels", time_levels)
    return found


def test_load_chooses(tabled: Path, bundle: Path, speeds: dict[float, float]) -> None:
    how = {"backend": "numba", "max_seq_len": 64}
    for options, expected in (
        ({}, ("int8", 0.4)),
        ({"max_kl": 0.01}, ("int8", 0.0)),
        ({"max_kl": 0}, ("native", 0.0)),
        ({"weights": "native"}, ("native", 0.4)),
        ({"weights": "native", "max_kl": 0.01}, ("native", 0.0)),
        ({"sparsity": 0.4, "max_kl": 0.01}, (None, 0.4)),
        ({"max_kl": None}, (None, 0.4)),
        ({"weights": "int4"}, (None, 0.4)),  # not in the table
    ):
        with load(tabled, **how, **options) as model:
            found = (model.choice and model.choice.pair.weights, model.sparsity)
            assert found == expected, options
            if options == {}:
                assert model.generate("def f(", max_new_tokens=4).token_ids
    assert speeds[-1.0] == 2, "int8 and native, measured once each"
    with load(bundle, **how) as model:
        assert (model.choice, model.sparsity) == (None, 0.4), "without a table as before"
    # The torch back end has no int8, and masks do not pay there.
    speeds[0.4] = 99.0
    with load(tabled, backend="torch", max_seq_len=64) as model:
        assert (str(model.choice).partition(",")[0], model.sparsity) == ("native dense", 0.0)
    for wrong in (-1, "off"):
        with pytest.raises(UsageError, match="max_kl: expected a number of nats per token, 0 or more, auto or None"):
            load(tabled, max_kl=wrong)


def test_measurement_is_real_and_remembered(tabled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "cache" / "speeds.json"
    for damage in (None, "{", "[1]", '{"a": 1}', "[" * 100_000):
        if damage is not None:
            file.write_text(damage)
        with load(tabled, backend="torch", max_seq_len=64) as model:
            first = model.choice
            assert first is not None
            assert model.generate("def f(", max_new_tokens=4).token_ids, "the slots are as before"
        with load(tabled, backend="torch", max_seq_len=64) as model:
            assert model.choice == first, "the second load reads what the first measured"
    (rates,) = [one for one in json.loads(file.read_text()).values() if isinstance(one, dict)]
    assert {*map(float, rates)} == {0.0, 0.4}
    assert sum("speeds.json is ignored" in message for message in caplog.messages) >= 1
    with load(tabled, backend="torch", max_seq_len=7) as model:  # too short to measure
        assert model.choice is not None


def test_commands(tabled: Path, speeds: dict[float, float], run: Callable[..., tuple[int, str, str]]) -> None:
    line = ("--backend", "numba", "--max-seq-len", 64)
    code, _, err = run("generate", tabled, "--prompt", "def f(", "--max-new-tokens", 2, *line)
    assert code == 0, err
    assert "int8 40%, about 130 tok/s, KL 0.031: the fastest with KL at most 0.05; --max-kl 0.0004: int8 dense" in err
    code, _, err = run("generate", tabled, "--prompt", "def f(", "--max-new-tokens", 2, *line, "--sparsity", 0.4)
    assert "fastest" not in err
    code, _, err = run("generate", tabled, "--prompt", "def f(", "--max-new-tokens", 2, *line, "--max-kl", "off")
    assert "fastest" not in err
    bench = ("bench", tabled, "--explain", "--runs", 1, "--max-new-tokens", 8, "--backend", "numba", "--device", "cpu")
    code, out, err = run(*bench, "--max-kl", 0.01)
    assert code == 0, err
    assert "int8 dense, about 100 tok/s" in out
    assert "weights int8, sparsity 0.4" in out
    for wrong in ("-1", "fast"):
        code, _, err = run("generate", tabled, "--prompt", "x", "--max-kl", wrong)
        assert (code, "--max-kl" in err, "nor one of auto, off" in err) == (2, True, True)


def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (("", MAX_KL), ("auto", MAX_KL), ("off", None), ("0.2", 0.2), ("0", 0.0)):
        monkeypatch.setenv("WISPARSE_MAX_KL", given)
        assert auto_max_kl() == expected
    for given in ("-1", "nan", "much"):
        monkeypatch.setenv("WISPARSE_MAX_KL", given)
        with pytest.raises(UsageError, match="WISPARSE_MAX_KL: expected a number of nats per token"):
            auto_max_kl()
