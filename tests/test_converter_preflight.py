"""The preflight finds what is wrong before a weight is read, says it in one sentence, and writes nothing."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model
from transformers import AutoModelForCausalLM

from wisparse.commands.convert import command
from wisparse.converter import preflight as module
from wisparse.converter.preflight import preflight
from wisparse.converter.settings import ConvertSettings, auto_seq_len, default_output
from wisparse.formats import machine
from wisparse.formats.architectures import ARCHITECTURES
from wisparse.formats.errors import (
    AccessError,
    CalibrationError,
    ResourceError,
    UnsupportedModelError,
    UsageError,
    WisparseError,
)
from wisparse.formats.machine import free_memory_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> ConvertSettings:
    return ConvertSettings(str(model), tmp_path / "out", num_samples=2, seq_len=16, device="cpu")


def refused(settings: ConvertSettings, error: type[WisparseError], **changes: Any) -> str:
    before = sorted(settings.output_dir.parent.rglob("*"))
    with pytest.raises(error) as raised:
        preflight(replace(settings, **changes))
    assert type(raised.value) is error
    assert sorted(settings.output_dir.parent.rglob("*")) == before
    message = str(raised.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------- the plan


def test_plan_of_a_folder(settings: ConvertSettings) -> None:
    plan = preflight(settings)
    assert plan.source.name == "model"
    assert plan.source.commit is None
    assert plan.tokens is None
    assert plan.calibration == "self"
    assert plan.num_parameters == sum(
        tensor.numel() for tensor in load_file(Path(settings.model) / "model.safetensors").values()
    )
    assert 0 < plan.projection_parameters < plan.num_parameters
    assert plan.download_bytes == 0
    assert plan.memory_bytes < plan.memory_free_bytes
    assert not settings.output_dir.exists()
    assert not settings.state_dir.exists()
    json.dumps(plan.to_dict())


def test_plan_holds_the_calibration_tokens_of_a_path(settings: ConvertSettings, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words " * 100)
    plan = preflight(replace(settings, calibration=(str(tmp_path / "text.txt"),)))
    assert plan.tokens is not None
    assert plan.tokens.input_ids.shape == (2, 16)
    assert str(tmp_path) not in json.dumps(plan.to_dict()["calibration"])


def test_no_weight_is_read(settings: ConvertSettings) -> None:
    # Every weight is NaN, the headers are whole: only the conversion itself can notice.
    file = Path(settings.model) / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    content[length:] = b"\xff" * (len(content) - length)
    file.write_bytes(content)
    preflight(settings)


def test_memory_of_this_machine_is_plausible() -> None:
    assert 2**20 < machine.available_bytes(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(
    ("model", "sparsity", "expected"),
    [
        ("org/Llama-3.1-8B", 0.5, "Llama-3.1-8B-wisparse-50"),
        ("nothing-here", 0.4, "nothing-here-wisparse-40"),
        ("a/b", 0.125, "b-wisparse-12p5"),
    ],
)
def test_default_output(model: str, sparsity: float, expected: str) -> None:
    assert default_output(model, (sparsity,)) == Path(expected)
    assert default_output(model) == default_output(model, (0.3, 0.4)) == Path(expected.rsplit("-", 1)[0])


def test_length_of_the_sequences_fits_the_device_and_the_model(settings: ConvertSettings) -> None:
    plan = preflight(replace(settings, seq_len=None))
    assert plan.settings.seq_len == 128  # the model's context
    assert auto_seq_len("cpu", 4096) == 512
    assert auto_seq_len("cuda", 131072) == 2048


def test_default_output_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tune").mkdir()
    assert default_output(f"{tmp_path}/tune/", (0.5,)) == Path("tune-wisparse-50")
    monkeypatch.chdir(tmp_path / "tune")
    assert default_output(".", (0.5,)) == Path("tune-wisparse-50")


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize("sparsity", [-0.1, 0.96, 1.0, 50.0, float("nan"), float("inf")])
def test_sparsity_out_of_range(sparsity: float, settings: ConvertSettings) -> None:
    assert "0 to 0.95" in refused(settings, UsageError, sparsity=(sparsity,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_kl": -0.1}, "--max-kl: expected a number of nats per token, 0 or more, found -0.1"),
        ({"max_kl": float("nan")}, "--max-kl: expected"),
        ({"max_kl": float("inf")}, "--max-kl: expected"),
        ({"min_top1": 1.01}, "--min-top1: expected a share of tokens, from 0 to 1, found 1.01"),
        ({"min_top1": float("nan")}, "--min-top1: expected"),
        ({"max_kl": 0.1, "sparsity": (0.4,)}, "leave --sparsity out"),
        ({"min_top1": 0.9, "default": 0.4}, "leave --default out"),
        ({"default": 0.35}, "--default: expected one of the sparsities 0.3, 0.4, 0.5, found 0.35"),
        ({"sparsity": (0.4, 0.4)}, "different numbers, found 0.4, 0.4"),
    ],
)
def test_a_target_that_cannot_be(changes: dict[str, Any], words: str, settings: ConvertSettings) -> None:
    assert words in refused(settings, UsageError, **changes)


def test_the_plan_knows_levels_and_budgets(settings: ConvertSettings) -> None:
    assert {"sparsity": [0.3, 0.4, 0.5], "default": 0.4}.items() <= preflight(settings).to_dict().items()
    found = preflight(replace(settings, max_kl=0.02)).to_dict()
    assert {"max_kl": 0.02, "min_top1": None}.items() <= found.items()
    assert "sparsity" not in found


@pytest.mark.parametrize("sparsity", [0.0, 0.95])
def test_sparsity_at_the_ends(sparsity: float, settings: ConvertSettings) -> None:
    preflight(replace(settings, sparsity=(sparsity,)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "wisparce"}, "did you mean 'wisparse'"),
        ({"search": "random"}, "--search"),
        ({"dtype": "int8"}, "--dtype"),
        ({"num_samples": 0}, "--num-samples"),
        ({"seq_len": 2}, "--seq-len"),
        ({"seq_len": 4096}, "context is 128"),
        ({"seed": -1}, "--seed"),
        ({"num_generations": 5, "search": "uniform"}, "--num-generations"),
        ({"num_offspring": 5, "search": "uniform"}, "--num-offspring"),
        ({"calibration": ("self", "paper")}, "stand alone"),
        ({"calibration": ()}, "--calibration"),
        ({"private": True}, "--upload-repo"),
        ({"work_dir": Path("w"), "resume": False}, "--no-resume"),
        ({"device": "tpu"}, "--device"),
        ({"max_shard_size": "huge"}, "5GB"),
        ({"revision": "main"}, "--revision"),
    ],
)
def test_contradictory_settings(changes: dict[str, Any], words: str, settings: ConvertSettings) -> None:
    assert words in refused(settings, UsageError, **changes)


def test_work_dir_inside_the_output(settings: ConvertSettings) -> None:
    for work in (settings.output_dir, settings.output_dir / "work", settings.output_dir.parent):
        assert "within each other" in refused(settings, UsageError, work_dir=work)


# ---------------------------------------------------------------------- the model


def test_no_such_model(settings: ConvertSettings, tmp_path: Path) -> None:
    assert "no such folder" in refused(settings, AccessError, model=str(tmp_path / "nowhere"))


def test_unknown_architecture(settings: ConvertSettings, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(tiny_config() | {"model_type": "lama"}))
    message = refused(settings, UnsupportedModelError)
    assert "did you mean 'llama'" in message
    assert ", ".join(ARCHITECTURES) in message


def test_quantised_source(settings: ConvertSettings, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(tiny_config() | {"quantization_config": {"quant_method": "hqq"}}))
    assert "quantised" in refused(settings, UnsupportedModelError)


def test_source_that_is_a_bundle(settings: ConvertSettings, tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", Path(settings.model))
    assert "already a sparse bundle" in refused(settings, UnsupportedModelError, model=str(bundle))


def test_what_transformers_saves_of_a_bundle_is_dense_again(settings: ConvertSettings, tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", Path(settings.model))
    saved = tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(bundle).save_pretrained(saved)
    shutil.copy(bundle / "tokenizer.json", saved)
    shutil.copy(bundle / "tokenizer_config.json", saved)
    assert "wisparse" in json.loads((saved / "config.json").read_text())
    assert preflight(replace(settings, model=str(saved))).source.name == "saved"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file(name: str, settings: ConvertSettings, model: Path) -> None:
    (model / name).unlink()
    (model / "tokenizer_config.json").unlink()
    refused(settings, UnsupportedModelError)


def test_config_that_is_no_json(settings: ConvertSettings, model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "config.json" in refused(settings, UnsupportedModelError)


def test_truncated_weights(settings: ConvertSettings, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors" in refused(settings, UnsupportedModelError)


def test_tokenizer_of_another_model(settings: ConvertSettings, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", tiny_config(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=2))
    (tmp_path / "text.txt").write_text("words and words " * 50)
    message = refused(settings, UnsupportedModelError, calibration=(str(tmp_path / "text.txt"),))
    assert "do not belong together" in message


# ---------------------------------------------------------------------- the output, the calibration, the machine


def test_output_exists(settings: ConvertSettings) -> None:
    settings.output_dir.mkdir()
    assert "--overwrite" in refused(settings, UsageError)


def test_output_is_the_source(settings: ConvertSettings) -> None:
    assert refused(settings, UsageError, output_dir=Path(settings.model), overwrite=True)


def test_output_that_is_no_bundle_is_not_overwritten(settings: ConvertSettings) -> None:
    settings.output_dir.mkdir()
    (settings.output_dir / "thesis.tex").write_text("years of work")
    assert "not a bundle" in refused(settings, UsageError, overwrite=True)


def test_calibration_is_read_before_the_weights(settings: ConvertSettings, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    assert "found 9" in refused(settings, CalibrationError, calibration=(str(tmp_path / "short.txt"),))
    assert "no such file" in refused(settings, CalibrationError, calibration=(str(tmp_path / "none"),))


def test_not_enough_disk(settings: ConvertSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    assert "disk" in refused(settings, ResourceError)


def test_not_enough_memory(settings: ConvertSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda device: 10)
    assert "GB of memory" in refused(settings, ResourceError)


def test_a_containers_memory_limit_counts(
    settings: ConvertSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "machine/sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "machine/proc/self").mkdir(parents=True)
    (tmp_path / "machine/proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{500 << 20}\n")
    (group / "memory.current").write_text(f"{100 << 20}\n")
    monkeypatch.setattr(machine, "free_memory_bytes", partial(free_memory_bytes, tmp_path / "machine"))
    assert "0.4 GB are free" in refused(settings, ResourceError)


def test_a_licence_that_is_a_symlink_outwards(settings: ConvertSettings, model: Path, tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("MIT")
    (model / "LICENSE").unlink(missing_ok=True)
    (model / "LICENSE").symlink_to(tmp_path / "LICENSE")
    assert "LICENSE: a symlink that leaves the folder" in refused(settings, UnsupportedModelError)


def test_a_hub_snapshot_is_made_of_symlinks(settings: ConvertSettings, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (model / "LICENSE").write_text("MIT")
    for file in model.iterdir():
        shutil.move(file, cache / "blobs" / f"b{file.name}")
        (snapshot / file.name).symlink_to(cache / "blobs" / f"b{file.name}")
    preflight(replace(settings, model=str(snapshot)))


def test_upload_without_permission(settings: ConvertSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repo: str) -> None:
        raise AccessError(f"you may not write to {repo}")

    monkeypatch.setattr(module, "check_write_access", refuse)
    assert "me/x" in refused(settings, AccessError, upload_repo="me/x")


def test_gated_model(settings: ConvertSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: str) -> None:
        raise AccessError(f"{model!r} is gated: ask for access")

    monkeypatch.setattr(module, "check_read_access", refuse)
    assert "gated" in refused(settings, AccessError, model="org/gated")


# ---------------------------------------------------------------------- the command


def test_dry_run_prints_the_plan_and_stops(settings: ConvertSettings, caplog: pytest.LogCaptureFixture) -> None:
    arguments = [settings.model, "-o", str(settings.output_dir), "--dry-run", "--device", "cpu", "--seq-len", "16"]
    with caplog.at_level(logging.WARNING):
        shown = CliRunner().invoke(command, arguments)
        document = CliRunner().invoke(command, [*arguments, "--json"])
    assert shown.exit_code == document.exit_code == 0, shown.output
    assert "nothing was converted" in shown.stdout
    assert "llama, 2 blocks" in shown.stdout
    assert json.loads(document.stdout)["model"] == "model"
    assert shown.stderr == document.stderr == ""
    assert not settings.output_dir.exists()
