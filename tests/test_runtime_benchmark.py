"""`wisparse bench`: the figures hang together, and options that do not fit the machine are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from family_cases import greedy
from quantised_models import PUBLISHED, quantise_model
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

from wisparse import UnsupportedModelError, UsageError, load
from wisparse.commands import bench as bench_module
from wisparse.commands.bench import command
from wisparse.compiled import compiled_rates, time_compiled
from wisparse.formats.bundle import Bundle
from wisparse.runtime.benchmark import Workload, compare_weights, prompts, time_run


def bench(bundle: Path, *options: str, env: dict[str, str | None] | None = None) -> Result:
    short = ["--device", "cpu", "--runs", "1", "--max-new-tokens", "3"]
    return CliRunner().invoke(command, [str(bundle), *short, *options], env=env)


def test_figures_hang_together(bundle: Path) -> None:
    work = Workload(prompt_length=4, new_tokens=40, batch=2, runs=3)
    model = load(bundle, device="cpu", backend="torch", max_seq_len=48, max_batch=2)
    found = compare_weights({"native": model}, work)["native"]
    assert found.sparsity == model.sparsity == 0.4
    assert found.dense.realised_sparsity == 0.0 < found.sparse.realised_sparsity < 1.0
    assert found.sparse.bytes_per_step < found.dense.bytes_per_step
    for speed in (found.dense, found.sparse):
        assert len(speed.runs) == 3
        assert speed.tok_per_s == pytest.approx(work.batch / speed.step_ms * 1e3)
        assert speed.gbps == pytest.approx(speed.bytes_per_step / speed.step_ms * 1e-6)
        assert speed.ideal_ms == pytest.approx(speed.bytes_per_step / found.read_gbps * 1e-6)
    assert 0.5 < found.read_gbps < 5000
    assert found.speedup == pytest.approx(found.sparse.tok_per_s / found.dense.tok_per_s)
    model.decoder.measure_sparsity(True)
    time_run(model.decoder, work)
    assert found.sparse.realised_sparsity == model.decoder.realised_sparsity()


@pytest.mark.parametrize("columns", ["", "80"])
def test_command_prints_a_whole_table(bundle: Path, columns: str) -> None:
    # An empty COLUMNS is none: as in a pipe. rich believes in a terminal if told to, and takes its width from COLUMNS.
    environment = {"COLUMNS": columns, "FORCE_COLOR": "1" if columns else None, "NO_COLOR": "1", "TERM": "xterm"}
    result = bench(bundle, "--backend", "torch", env=environment)
    assert result.exit_code == 0, result.output
    assert "sparse over dense" in result.stdout
    assert "…" not in result.stdout
    (head,) = [line for line in result.stdout.splitlines() if "ms/step" in line]
    for name in ("tok/s", "ceiling", "share", "GB/s", "unread", "prefill", "peak GB"):
        assert name in head
    assert "{" not in result.stdout  # JSON is for --json


def test_options_that_do_not_fit_are_refused(bundle: Path) -> None:
    assert "--all-weights goes without --weights" in bench(bundle, "--all-weights", "--weights", "int8").output
    for option, sentence in (
        ("--sparsity=0", "sparsity: expected a level to compare with the dense model (0.4), found 0"),
        ("--kernels", "--kernels: expected the triton back end on an NVIDIA GPU, found torch on cpu"),
        ("--tune", "--tune: expected the triton back end on an NVIDIA GPU, found torch on cpu"),
    ):
        result = bench(bundle, "--backend", "torch", option)
        assert isinstance(result.exception, UsageError)
        assert sentence in str(result.exception)


@pytest.mark.parametrize("kind", [None, "pack int4 groups", "fp8 rows", "gptq"])
def test_the_baseline_is_the_dense_model(kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_model(tmp_path / "source", tiny_config(tie_word_embeddings=False))
    if kind:
        source = quantise_model(source, tmp_path / "small", *PUBLISHED[kind]())
    opened = Bundle.open(write_tiny_bundle(tmp_path / "bundle", source))
    work = Workload(prompt_length=4, new_tokens=6, batch=2, runs=2)
    seen: list[torch.Tensor] = []

    def watched(step: Callable[..., torch.Tensor], **how: Any) -> Callable[..., torch.Tensor]:
        assert how == {"mode": "reduce-overhead", "fullgraph": True}

        def call(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            seen.append(step(token, position))
            return seen[-1]

        return call

    monkeypatch.setattr(torch, "compile", watched)
    found = time_compiled(opened, work, torch.device("cpu"), torch.float32)
    assert len(found.runs) == 2
    assert found.tok_per_s == pytest.approx(work.batch / found.step_ms * 1e3)
    model = load(opened.folder, device="cpu", dtype="float32", backend="torch", sparsity=0, max_seq_len=16)
    for row, prompt in enumerate(prompts(opened.config, work)):
        expected, _ = greedy(model.decoder, prompt, 1 + work.new_tokens)
        for run in range(3):
            taken = seen[run * work.new_tokens : (run + 1) * work.new_tokens]
            assert [int(token[row]) for token in taken] == expected[1:]


def test_one_table_of_all_weights_with_the_baseline(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)  # a minute: the next test
    shown: list[Any] = []
    printed = bench_module.print_tables
    monkeypatch.setattr(bench_module, "print_tables", lambda *given: [shown.append(given), printed(*given)])
    result = bench(bundle, "--runs", "2", "--baseline", "torch.compile", "--all-weights")
    assert result.exit_code == 0, result.output
    ((found, baseline, _),) = shown
    assert (list(found), baseline.name, len(baseline.runs)) == (["native", "int8", "int4"], "torch.compile", 2)
    for kind in ("dense", "sparse"):
        read = [getattr(one, kind).bytes_per_step for one in found.values()]
        assert read[0] > read[1] > read[2]
    table = result.stdout.splitlines()
    (head,) = [line for line in table if line.startswith("weights ")]
    assert head.index("sparsity") < head.index("tok/s") < head.index("over torch.compile") < head.index("over own")
    rows = [line.split() for line in table if line.startswith(("native ", "int"))]
    assert [row[:2] for row in rows] == [[name, sparsity] for name in found for sparsity in ("dense", "0.4")]
    own = found["native"].dense.tok_per_s
    assert rows[0][4:6] == [f"{own / baseline.tok_per_s:.2f}x", "1.00x"]
    assert list(json.loads(bench(bundle, "--all-weights", "--json").stdout)) == list(found)
    alone = json.loads(bench(bundle, "--baseline", "torch.compile", "--json").stdout)
    assert (alone["workload"]["new_tokens"], alone["baseline"]["name"]) == (3, "torch.compile")


@pytest.mark.exhaustive  # a C++ compiler is called
def test_the_baseline_is_really_compiled(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", tiny_config(num_hidden_layers=1))
    opened = Bundle.open(write_tiny_bundle(tmp_path / "bundle", source))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = time_compiled(opened, Workload(4, 3, 2, 2), torch.device("cpu"), torch.bfloat16)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled + 1  # one for all positions
    assert (len(found.runs), found.dtype) == (2, "bfloat16")


def test_a_baseline_that_cannot_be(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    monkeypatch.setattr("wisparse.runtime.backends.load", lambda *_, **__: pytest.fail("loaded first"))
    result = bench(bundle, "--baseline", "torch.compile")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == (
        "--baseline torch.compile needs a C++ compiler on a CPU, and there is none: install g++, or let CXX name one"
    )

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return token

    with pytest.raises(UnsupportedModelError, match=r"--baseline torch\.compile: this model cannot be compiled whole"):
        compiled_rates(lambda: torch.ones(1, 1), step, Workload(1, 1, 1, 1), torch.device("cpu"))
