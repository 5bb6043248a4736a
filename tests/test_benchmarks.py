"""The scripts in benchmarks/: baselines against twins written out here, tables, their help, and what they say without a GPU."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import baselines
import front
import pytest
import tables
import torch
from click.testing import CliRunner
from quality import Evaluator
from tiny_source import tiny_source, tiny_tokens

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


# KL and realised sparsity, as these methods gave them when the search itself made them and bundles held them.
@pytest.mark.parametrize(
    ("kind", "method", "shares", "sparsity", "kl", "realised"),
    [
        ("llama", "cats", None, 0.3, 0.024667106550348022, 0.30086805555555557),
        ("llama", "rsparse", None, 0.3, 0.06385724101011102, 0.29408275462962963),
        ("llama", "rsparse", (0.4,), 0.3, 0.16437731189291357, 0.2950231481481482),
        ("qwen2", "cats", None, 0.3, 0.02900091016856632, 0.2917534722222222),
        ("qwen2", "rsparse", (0.4,), 0.5, 0.9440165931379014, 0.5063512731481482),
    ],
)
def test_figures_are_those_of_before(
    kind: str, method: str, shares: Any, sparsity: float, kl: float, realised: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shares:  # random weights have no directions to spare; have some paths all the same
        monkeypatch.setattr(baselines, "SHARES", shares)
    source, ids = tiny_source(kind), tiny_tokens(4, 24, 1).input_ids
    dense = source.model(input_ids=ids).logits
    with baselines.BASELINES[method](source, tiny_tokens(8), sparsity) as found:
        measured = found.measure(Evaluator(source, ids))
    assert measured.kl == pytest.approx(kl, rel=1e-6)  # another CPU rounds otherwise
    assert measured.realised_sparsity == pytest.approx(realised, abs=1e-6)
    assert torch.equal(source.model(input_ids=ids).logits, dense)


CASES = [["weights"], ["first"], ["experts"], ["tokens"], ["tiles"], ["sanitize", "memcheck"], ["vllm"]]


@pytest.mark.parametrize("command", CASES, ids=lambda command: command[0])
def test_without_a_gpu_they_say_so(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for start in ("subprocess.run", "subprocess.Popen"):
        monkeypatch.setattr(start, lambda *_, **__: pytest.fail("began to work"))
    monkeypatch.setenv("OUT", str(tmp_path / "results"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    said = CliRunner().invoke(gpu.cases, command)
    assert said.exit_code == 2
    assert not said.stdout
    assert "GPU" in said.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", BENCHMARKS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = {
    match.group(2, 3)
    for page in PAGES
    for match in re.finditer(r"(benchmarks/|`)([a-z]\w+\.(?:py|sh))(?: ([a-z]+))?\b", page.read_text("utf-8"))
    if match[1] == "benchmarks/" or page.parent == BENCHMARKS
}


@pytest.mark.parametrize(("script", "case"), sorted(NAMED, key=str), ids=str)
def test_every_script_that_a_page_names_exists_and_has_help(
    script: str, case: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (BENCHMARKS / script).read_text("utf-8")
    if '__name__ == "__main__"' not in text or ("argparse" not in text and "import click" not in text):
        return
    if script == "gpu.py":
        pytest.importorskip("triton")
    case_of = [case] if case and script == "gpu.py" else []
    monkeypatch.setattr(sys, "argv", [script, *case_of, "--help"])
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    except ModuleNotFoundError as missing:
        if missing.name not in ("anthropic", "openai", "psutil"):
            raise
        pytest.skip(f"needs {missing.name}")
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out.lower()


def test_the_published_tables_are_what_their_rows_say() -> None:
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


def test_the_front_is_drawn_of_runs_that_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces by kind and by model, in any order, become the published document, table and figure."""
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
