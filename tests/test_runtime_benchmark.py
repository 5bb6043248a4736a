"""`wisparse bench`: the figures hang together, and options that do not fit the machine are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle
from click.testing import CliRunner

from wisparse.commands.bench import command
from wisparse.formats.errors import UsageError
from wisparse.runtime.benchmark import Workload, compare
from wisparse.runtime.loader import load
from wisparse.runtime.timing import read_bandwidth_gbps


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(example_model, tmp_path_factory.mktemp("bench") / "bundle")


def test_figures_hang_together(bundle: Path) -> None:
    work = Workload(prompt_length=4, new_tokens=6, batch=2, runs=3)
    model = load(bundle, device="cpu", backend="torch", max_seq_len=16, max_batch=2)
    found = compare(model, work)
    assert found.sparsity == model.sparsity == 0.5
    assert found.dense.realised_sparsity == 0.0 < found.sparse.realised_sparsity < 1.0
    assert found.sparse.bytes_per_step < found.dense.bytes_per_step
    for speed in (found.dense, found.sparse):
        assert len(speed.runs) == 3
        assert speed.tok_per_s == pytest.approx(work.batch / speed.step_ms * 1e3)
        assert speed.gbps == pytest.approx(speed.bytes_per_step / speed.step_ms * 1e-6)
        assert speed.ideal_ms == pytest.approx(speed.bytes_per_step / found.read_gbps * 1e-6)
    assert found.speedup == pytest.approx(found.sparse.tok_per_s / found.dense.tok_per_s)


def test_the_dense_model_is_not_compared_with_itself(bundle: Path) -> None:
    result = CliRunner().invoke(command, [str(bundle), "--backend", "torch", "--sparsity", "0"])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == "sparsity: expected a rung to compare with the dense model, found 0"


def test_command_compares_all_that_weights_can_be_held_as(bundle: Path) -> None:
    arguments = [str(bundle), "--device", "cpu", "--runs", "1", "--max-new-tokens", "3", "--all-weights"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    *table, document = result.stdout.strip().splitlines()
    found = json.loads(document)
    assert list(found) == ["native", "int8", "int4"]
    for kind in ("dense", "sparse"):
        read = [found[name][kind]["bytes_per_step"] for name in found]
        assert read[0] > read[1] > read[2]
    assert [line.split()[:2] for line in table if line.startswith(("native ", "int"))] == [
        [name, sparsity] for name in found for sparsity in ("dense", "0.5")
    ]
    result = CliRunner().invoke(command, [*arguments, "--weights", "int8"])
    assert result.exit_code == 2
    assert "--all-weights goes without --weights" in result.output


def test_command_prints_one_json_document(bundle: Path) -> None:
    arguments = [str(bundle), "--backend", "torch", "--runs", "1", "--max-new-tokens", "3", "--json"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)  # nothing beside it
    assert found["backend"] == "torch"
    assert found["workload"]["new_tokens"] == 3
    assert found["sparse"]["tok_per_s"] > 0


@pytest.mark.parametrize("columns", ["", "80"])
def test_command_prints_a_whole_table(bundle: Path, columns: str) -> None:
    # An empty COLUMNS is none: as in a pipe. rich believes in a terminal if told to, and takes its width from COLUMNS.
    environment = {"COLUMNS": columns, "FORCE_COLOR": "1" if columns else None, "NO_COLOR": "1", "TERM": "xterm"}
    arguments = [str(bundle), "--backend", "torch", "--runs", "1", "--max-new-tokens", "3"]
    result = CliRunner().invoke(command, arguments, env=environment)
    assert result.exit_code == 0, result.output
    assert "sparse over dense" in result.stdout
    assert "…" not in result.stdout
    (head,) = [line for line in result.stdout.splitlines() if "ms/step" in line]
    for name in ("tok/s", "ceiling", "share", "GB/s", "unread", "prefill", "peak GB"):
        assert name in head
    assert json.loads(result.stdout.splitlines()[-1])["backend"] == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what a machine without an NVIDIA GPU says")
@pytest.mark.parametrize("option", ["--kernels", "--tune"])
def test_gpu_options_are_refused_without_one(bundle: Path, option: str) -> None:
    result = CliRunner().invoke(command, [str(bundle), "--backend", "torch", option])
    assert isinstance(result.exception, UsageError)
    assert f"{option}: expected the triton back end" in str(result.exception)


def test_bandwidth_is_a_bandwidth() -> None:
    assert 0.5 < read_bandwidth_gbps(torch.device("cpu")) < 5000
