"""The scripts in benchmarks/: baselines against twins written out here, tables, and what they say without a GPU."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ablation
import baselines
import front
import pytest
import tables
import torch
from baselines import choose_rank, low_rank_factors, low_rank_sparsity
from quality import Evaluator
from tiny_bundle import write_tiny_model
from tiny_source import tiny_source, tiny_tokens
from torch.nn import functional

from wisparse.converter.masking import MaskedModel
from wisparse.formats.errors import UsageError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


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


def test_cats_by_hand() -> None:
    source = tiny_source()
    mlp = source.model.model.layers[0].mlp
    x = 3 * torch.randn(7, 32)
    with baselines.cats(source, tiny_tokens(8), 0.3) as found:
        with MaskedModel(found.places) as masked, masked.masking(found.result.apply_to(masked)):
            sparse = mlp(x[None])[0]
        torch.testing.assert_close(mlp(x), mlp.down_proj(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    thresholds = {name: entry.threshold for name, entry in found.result.projections.items()}
    assert {name.rsplit(".", 1)[1] for name, threshold in thresholds.items() if threshold} == {"act_fn"}
    gate = functional.silu(mlp.gate_proj(x))
    keep = gate.abs() >= thresholds["model.layers.0.mlp.act_fn"]
    assert 0.2 < keep.float().mean() < 0.8
    # Neither up's rows nor down's columns outside are touched.
    down, up = mlp.down_proj.weight, mlp.up_proj.weight
    rows = [down[:, k] @ (g[k] * (up[k] @ one)) for g, k, one in zip(gate, keep, x, strict=True)]
    torch.testing.assert_close(sparse, torch.stack(rows))
    assert isinstance(mlp.act_fn, torch.nn.SiLU) or "SiLU" in type(mlp.act_fn).__name__
    too_much = pytest.raises(UsageError, match=r"only up and down are sparse, at most 38\.0% .*found 0\.6")
    with too_much, baselines.cats(source, tiny_tokens(8), 0.6):
        pass


def test_rsparse_by_hand() -> None:
    torch.manual_seed(2)
    linear = torch.nn.Linear(16, 12).requires_grad_(False)
    x = torch.randn(3, 7, 16)
    left, right = low_rank_factors(linear.weight, 3)
    u, s, v = torch.linalg.svd(linear.weight)
    torch.testing.assert_close(left @ right, u[:, :3] @ torch.diag(s[:3]) @ v[:3])
    small = torch.where(x.abs() < 0.7, x, 0.0)
    expected = linear(x - small) + small @ (left @ right).T
    path = baselines._Path(linear, 3)
    with MaskedModel({"p": linear}) as masked:
        masked.set_scale("p", torch.ones(16))
        masked.set_threshold("p", 0.7)
        torch.testing.assert_close(linear(x), expected)
        masked.clear()
        torch.testing.assert_close(linear(x), x @ linear.weight.T + linear.bias)
    path.close()


def test_a_rank_is_chosen_where_it_pays() -> None:
    torch.manual_seed(3)
    x = torch.randn(200, 32)
    low = torch.randn(64, 4) @ torch.randn(4, 32)
    rank = choose_rank(x, low, 0.5)
    assert rank >= 4  # all of the weight
    assert low_rank_sparsity(low, 0.5, rank) == pytest.approx(0.5 + rank * 96 / 2048)
    spread = x * torch.logspace(-3, 0, 32)  # a few channels are all that matters, and the spectrum is flat
    assert choose_rank(spread, torch.linalg.qr(torch.randn(32, 32))[0], 0.5) == 0
    assert choose_rank(x, low, 0.0) == 0
    # It is for what the mask drops. The threshold is on a score that ties: channels at 2 are kept, those at 1, which
    # the weight ignores, dropped.
    x = torch.cat([torch.ones(50, 16), torch.full((50, 16), 2.0)], dim=1)
    weight = torch.cat([torch.zeros(16, 16), torch.eye(16)], dim=1)
    assert choose_rank(x, weight, 0.5) == 0


# By script; where one has several ways in, which stands behind a dot.
COMMANDS = {
    "gpu_decode": ["--shape", "llama-3.1-8b", "--parts", "baseline", "decode"],
    "gpu_tiles": ["sweep"],
    "gpu_tiles.check": ["check"],
    "gpu_sanitize": ["memcheck"],
    **{f"gpu_{script}": [] for script in ("serve", "tokens", "vllm", "weights")},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_gpu_they_say_so(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for start in ("subprocess.run", "subprocess.Popen"):
        monkeypatch.setattr(start, lambda *_, **__: pytest.fail("began to work"))
    monkeypatch.setenv("OUT", str(tmp_path / "results"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script = command.partition(".")[0]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *COMMANDS[command]])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    assert "GPU" in said.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_check_of_everything_says_so(tmp_path: Path) -> None:
    """Whether ``nvidia-smi`` is missing or finds no device: nothing is made, and nothing looks as if it had passed."""
    none = tmp_path / "bin" / "nvidia-smi"
    none.parent.mkdir()
    none.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    none.chmod(0o755)
    bash, tools = "/bin/bash", tmp_path / "tools"
    tools.mkdir()
    for tool in ("dirname", "wc", "mkdir", "rm", "grep", "basename", "tail", "cut", "tr"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    for path in (tools, f"{none.parent}{os.pathsep}{tools}"):
        command = [bash, str(BENCHMARKS / "gpu_check.sh"), str(tmp_path / "results"), "none"]
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(path)})
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.splitlines() == ["gpu_check.sh: expected an NVIDIA GPU, found none that nvidia-smi lists"]
        assert not (tmp_path / "results").exists()


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
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``tables.py`` of models by name and options; how many pieces were made in all."""
    labels = list(tables.ROWS.values())
    parts = {"baselines": [labels[i] for i in (0, 1, 6, 9, 10)], "paper": labels[2:6], "additive": labels[7:9]}
    for script in ("ablation.py", "methods.py"):
        (tmp_path / script).write_text(f"LABELS = {parts!r}\n{_FAKE}")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    options = f"--device cpu --jobs 3 --pieces {tmp_path}/pieces --out {tmp_path}/out".split()

    def run(*models: str, more: Sequence[str] = ()) -> int:
        for model in models:
            (tmp_path / model).mkdir(exist_ok=True)
        monkeypatch.setattr(sys, "argv", ["tables.py", *(str(tmp_path / model) for model in models), *more, *options])
        tables.main()
        return len((tmp_path / "calls").read_text().splitlines())

    return run


def test_one_command_writes_all(make: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make("one", "two") == 2 * (3 + 16)
    names = [*(f"{kind}-{model}" for kind in ("ablation", "methods") for model in ("one", "two")), "summary"]
    wanted = {f"{name}.{end}" for name in names for end in ("md", "json")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == wanted
    ablation = json.loads((tmp_path / "out" / "ablation-two.json").read_text())
    assert [row["recipe"] for row in ablation["rows"]] == list(tables.ROWS.values())
    assert "up to 3 processes on one CPU" in ablation["made by"]
    assert "mean of wisparse: 0.250 of uniform, 0.500 of TEAL" in capsys.readouterr().out
    assert make("one", "two") == 2 * (3 + 16), "nothing is made twice"
    assert make("one", more=["--eval-tokens", "512"]) == 3 * (3 + 16), "with other options everything is"


@pytest.mark.slow
def test_the_stages_of_a_search_give_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the searches themselves, which the fake above stands in for; but for the alphas, which take longest."""
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


def test_a_failed_piece_is_told(make: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make("one", "broken")
    assert caught.value.code == 1
    told = capsys.readouterr().out
    assert "methods-broken-0.5-wisparse: FAILED, exit status 1" in told
    assert "no such weights" in told
    assert "methods-one-0.5-wisparse: made" in told, "the others are made all the same"
    assert not (tmp_path / "out").exists()


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
