"""The tables of quality are made in pieces: what fails is told, what is there is kept, what does not fit is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_bundle import write_tiny_model

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

# Stands in for the benchmarks: one row per call, as they write them; the model "broken" fails.
_FAKE = """
import json, sys
from collections.abc import Callable, Sequence
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
methods = sys.argv[sys.argv.index("--methods") + 1 : sys.argv.index("--out")] if "--methods" in sys.argv else []
if given["--model"].endswith("broken"):
    sys.exit("no such weights")
with open(Path(__file__).with_name("calls"), "a") as calls:
    print(sys.argv[1:], file=calls)
name, sparsity = Path(given["--model"]).name, float(given.get("--sparsities", 0.5))
figures = {"perplexity": 9.0, "top1_agreement": 0.8, "realised_sparsity": sparsity, "seconds": 1, "kl_evaluations": 1}
document = {"model": name, "device": "a fake"}
if "--parts" in given:
    labels = LABELS[given["--parts"]]
    document["rows"] = [{"recipe": label, "kl": 0.2, **figures} for label in labels]
else:
    kls = {"teal-uniform": 0.4, "teal": 0.2, "fisher": 0.15, "wisparse": 0.1}
    document["rows"] = [
        {"method": m, "sparsity": sparsity, "recipe": m, "kl": kls.get(m, 0.3), **figures} for m in methods
    ]
(Path(given["--out"]) / "result.json").write_text(json.dumps(document))
"""


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tables

    labels = list(tables.ROWS.values())
    parts = {"baselines": [labels[i] for i in (0, 1, 6, 9, 10)], "paper": labels[2:6], "additive": labels[7:9]}
    for script in ("ablation.py", "methods.py"):
        (tmp_path / script).write_text(f"LABELS = {parts!r}\n{_FAKE}")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    for model in ("one", "two", "broken"):
        (tmp_path / model).mkdir()
    return tables


def run(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    options = ["--device", "cpu", "--jobs", "3", "--pieces", str(folder / "pieces"), "--out", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", ["tables.py", *arguments, *options])
    tables.main()


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_one_command_writes_every_table(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tables, monkeypatch, tmp_path, str(tmp_path / "one"), str(tmp_path / "two"))
    names = [*(f"{kind}-{model}" for kind in ("ablation", "methods") for model in ("one", "two")), "summary"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{n}.{end}" for n in names for end in ("md", "json")
    }
    ablation = json.loads((tmp_path / "out" / "ablation-two.json").read_text())
    assert [row["recipe"] for row in ablation["rows"]] == list(tables.ROWS.values())
    assert "up to 3 processes on one CPU" in ablation["made by"]
    assert "mean of wisparse: 0.250 of uniform, 0.500 of TEAL" in capsys.readouterr().out
    assert calls(tmp_path) == 2 * (3 + 16)
    run(tables, monkeypatch, tmp_path, str(tmp_path / "one"), str(tmp_path / "two"))
    assert calls(tmp_path) == 2 * (3 + 16), "nothing is made twice"
    run(tables, monkeypatch, tmp_path, str(tmp_path / "one"), "--eval-tokens", "512")
    assert calls(tmp_path) == 3 * (3 + 16), "with other options everything is"


@pytest.mark.slow
def test_the_stages_of_a_search_give_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the searches themselves, which the fake above stands in for; but for the alphas, which take longest."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ablation

    few = ["--num-samples", "1", "--seq-len", "8", "--eval-tokens", "8", "--kl-tokens", "8", "--device", "cpu"]
    quick = ["--num-generations", "1", "--num-offspring", "2", "--parts", "paper", "additive"]
    model = write_tiny_model(tmp_path / "tiny")
    alphas = "wisparse.converter.search.search.search_alpha"

    def halves(error: Callable[[dict[str, float]], float], names: Sequence[str]) -> dict[str, float]:
        found = dict.fromkeys(names, 0.5)
        error(found)
        return found

    monkeypatch.setattr(alphas, halves)
    monkeypatch.setattr(sys, "argv", ["ablation.py", "--model", str(model), "--out", str(tmp_path), *few, *quick])
    ablation.main()
    document = json.loads((tmp_path / "ablation-tiny.json").read_text())
    made = ("alpha", "evolution", "greedy", "paper", "additive", "additive-alpha")
    assert [row["recipe"] for row in document["rows"]] == [ablation.ROWS[key] for key in made]


def test_a_piece_that_fails_is_told(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(tables, monkeypatch, tmp_path, str(tmp_path / "one"), str(tmp_path / "broken"))
    assert caught.value.code == 1
    told = capsys.readouterr().out
    assert "methods-broken-0.5-wisparse: FAILED, exit status 1" in told
    assert "no such weights" in told
    assert "methods-one-0.5-wisparse: made" in told, "the others are made all the same"
    assert not (tmp_path / "out").exists()


def test_pieces_of_different_machines_are_refused(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        tables.merged([{"device": "a", "rows": []}, {"device": "b", "rows": []}])


def test_every_gpu_gets_its_turn(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str | None] = []

    def made(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        used.append(env.get("CUDA_VISIBLE_DEVICES"))
        return subprocess.CompletedProcess([], 1)

    monkeypatch.setattr(tables.subprocess, "run", made)
    pieces = [tables.Piece(tmp_path / str(i), "methods.py", ()) for i in range(6)]
    assert not tables.make_all(pieces, 2, ["0", "3"])
    assert set(used) == {"0", "3"}
    assert len(used) == 6


def test_the_published_tables_are_what_their_rows_say(tables: ModuleType) -> None:
    """Ratios, tables and summary, worked out again from the rows that were measured."""
    results = BENCHMARKS / "results"
    methods: dict[str, Any] = {}
    ablations: dict[str, dict[str, Any]] = {}
    for name in ("pycode-llama-6m", "pycode-qwen2-37m"):
        methods[name] = json.loads((results / f"methods-{name}.json").read_text())
        bare = [{key: row[key] for key in row if key != "of_uniform"} for row in methods[name]["rows"]]
        rows = tables.of_uniform(bare)
        assert rows == methods[name]["rows"]
        written = (results / f"methods-{name}.md").read_text()
        assert tables.across(rows) in written
        assert tables.markdown_table(rows) in written
        rows = json.loads((results / f"ablation-{name}.json").read_text())["rows"]
        assert tables.markdown_table(rows) in (results / f"ablation-{name}.md").read_text()
        by_label = {row["recipe"]: row for row in rows}
        ablations[name] = {key: by_label[label] for key, label in tables.ROWS.items()}
    rows = tables.summary(methods, ablations)["rows"]
    assert rows == json.loads((results / "summary.json").read_text())["rows"]
    assert tables.summary_table(rows) in (results / "summary.md").read_text()


def test_every_script_says_what_it_is_for() -> None:
    """benchmarks/README.md names each script, and each file that it names is there."""
    told = (BENCHMARKS / "README.md").read_text()
    named = set(re.findall(r"`([a-z0-9_/]+\.(?:py|sh|md|json))`", told))
    scripts = {path.name for pattern in ("*.py", "*.sh") for path in BENCHMARKS.glob(pattern)}
    assert not scripts - named
    assert all((BENCHMARKS / name).exists() or (BENCHMARKS.parent / name).exists() for name in named)


def test_the_front_is_drawn_of_runs_that_belong_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pieces by kind and by model, in any order, become the published document, table and figure."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import front

    results = BENCHMARKS / "results"
    published = json.loads((results / "front-quality.json").read_text())
    pieces = []
    for model, rows in published["models"].items():
        for kind in reversed(front.KINDS):
            own = [row for row in rows if row["weights"] == kind]
            pieces.append(tmp_path / f"{model}-{kind}.json")
            pieces[-1].write_text(json.dumps({**published, "models": {model: own}}))
    speed, out, merged = results / "gpu-h200-weights.json", tmp_path / "figures", tmp_path / "merged.json"
    arguments = ["draw", "--speed", str(speed), "--out", str(out), "--merged", str(merged)]
    monkeypatch.setattr(sys, "argv", ["front.py", *arguments, "--quality", *map(str, pieces)])
    front.main()
    assert json.loads(merged.read_text()) == published
    assert (out / "front.md").read_text() == (BENCHMARKS.parent / "docs" / "figures" / "front.md").read_text()
    assert (out / "front.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="measured twice: pycode-llama-6m, native at 0%"):
        front.merged([published, published])
    with pytest.raises(ValueError, match="these do not belong together"):
        front.merged([published, {**published, "rotation": "none"}])
