"""The whole conversion on tiny models: what is written, what is refused, what is left behind."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bundle import CLASSES, tiny_config, write_tiny_model

from wisparse.cli import convert_main
from wisparse.converter import pipeline, settings
from wisparse.converter.pipeline import convert
from wisparse.converter.search import search as search_module
from wisparse.converter.source import small_digests, weight_digests
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import ResourceError, UnsupportedModelError, UploadError, UsageError

FAST: dict[str, Any] = {
    "sparsity": 0.5,
    "search": "uniform",
    "method": "teal",
    "num_samples": 2,
    "seq_len": 16,
    "device": "cpu",
}
FLAGS = [str(word) for name, value in FAST.items() for word in ("--" + name.replace("_", "-"), value)]


@pytest.fixture(autouse=True)
def _without_figures() -> Iterator[None]:
    """They take longer than the rest of a conversion; tests/test_converter_report.py draws them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("wisparse.converter.report.render_figures", lambda report: {})
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "source" / "tiny")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "result").mkdir()
    return tmp_path / "result" / "bundle"


def digests(bundle: Path) -> dict[str, str]:
    files = (path for path in sorted(bundle.rglob("*")) if path.is_file())
    return {str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        convert_main([str(argument) for argument in arguments])
    return int(exit_.value.code or 0)


# ---------------------------------------------------------------------- what is written


@pytest.mark.parametrize("model_type", CLASSES)
def test_every_architecture_converts(model_type: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "tiny", tiny_config(model_type), shards=2)
    folder = convert(source, tmp_path / "out", **FAST)
    verify_bundle(folder)
    bundle = Bundle.open(folder)
    recipe = bundle.recipe
    assert recipe.base_model == "tiny"
    assert recipe.base_revision is None
    assert recipe.calibration.source == "self"
    assert recipe.calibration.num_tokens == 2 * 15
    sizes = [projection.num_parameters for projection in bundle.config.projections()]
    mean = sum(n * entry.sparsity for n, entry in zip(sizes, recipe.projections, strict=True)) / sum(sizes)
    assert mean == pytest.approx(0.5, abs=1e-6)
    dense = Checkpoint.open(source)
    assert all(torch.equal(bundle.checkpoint.tensor(name), dense.tensor(name)) for name in bundle.checkpoint.tensors)


def test_default_search_end_to_end(model: Path, out: Path) -> None:
    recipe = Bundle.open(convert(model, out, num_samples=2, seq_len=16, device="cpu", sparsity=0.4)).recipe
    assert recipe.method == "wisparse"
    assert recipe.search["settings"]["search"] == "refine"
    assert recipe.sparsity == 0.4
    assert len({entry.sparsity for entry in recipe.projections}) > 1


def test_sparsity_zero_is_dense(model: Path, out: Path) -> None:
    bundle = Bundle.open(convert(model, out, **FAST | {"sparsity": 0.0}))
    assert {mask.threshold for mask in bundle.masks.values()} == {0.0}


def test_same_seed_same_bytes_whatever_is_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    first = digests(convert(model, tmp_path / "first", **FAST, seed=3))
    torch.manual_seed(2)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.DEBUG):
        second = digests(convert(os.path.relpath(model), "second", **FAST, seed=3, progress=True, resume=False))
    assert first == second
    assert digests(convert(model, tmp_path / "third", **FAST, seed=4)) != first


def test_nothing_of_this_machine_is_in_the_bundle(model: Path, out: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text to calibrate on, long enough. " * 30)
    convert(model, out, **FAST, calibration=text)
    for path in out.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path.name
    assert Bundle.open(out).recipe.calibration.source == "text.txt"


def test_nothing_but_the_bundle_stays(model: Path, out: Path) -> None:
    convert(model, out, **FAST)
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


def test_dtype_and_shards(model: Path, out: Path) -> None:
    convert(model, out, **FAST, dtype="bfloat16", max_shard_size="8KB")
    bundle = Bundle.open(out)
    assert {info.dtype for info in bundle.checkpoint.tensors.values()} == {torch.bfloat16}
    assert len(bundle.checkpoint.files()) > 1


# ---------------------------------------------------------------------- the command


def test_command_prints_what_it_did(model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(model, "-o", out, *FLAGS) == 0
    shown = capsys.readouterr()
    assert f"wisparse generate {out}" in shown.out
    shown_words = " ".join(shown.out.split())
    assert "50.0% asked for" in shown_words
    assert "by passage). On text of another kind expect" in shown_words
    assert "that the model wrote, not what it was calibrated on; other text gives other figures" in shown_words
    card = (out / "README.md").read_text()
    assert "by passage). On text of another kind expect" in card
    assert shown.err == ""  # no progress bars where there is no terminal


def test_command_prints_json(model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(model, "-o", out, "--json", *FLAGS) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bundle"] == str(out)
    assert document["realised_sparsity"] == pytest.approx(0.5, abs=0.05)
    assert document["recipe"]["base_model"] == "tiny"
    assert document["seconds"]["Writing the bundle"] >= 0


def test_default_folder_is_named_after_the_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(model, *FLAGS, "--sparsity", "0.4") == 0
    assert Bundle.open(tmp_path / "tiny-wisparse-40").recipe.sparsity == 0.4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--sparsity", "0.96"], 2, "0 to 0.95"),
        (["--sparsity", "much"], 2, "several with commas between"),
        (["--method", "wisparce"], 2, "wisparce"),
        (["--calibration", "nothing-here.txt"], 2, "no such file or folder"),
        (["--calibration", "no/such-data"], 4, "no/such-data"),
        (["--num-generations", "5"], 2, "--search paper"),
        (["-v", "-q"], 2, "exclude"),
        (["--sparsity", "0.3,0.3"], 2, "different numbers"),
        (["--sparsity", "0.3,0.4", "--default", "0.5"], 2, "--default: expected one of the sparsities 0.3, 0.4"),
        (["--sparsity", "0.3,0.96"], 2, "0 to 0.95"),
        (["--sparsity", ",".join(f"0.{i}" for i in range(10, 27))], 2, "at most 16 of them"),
        (["--sparsity", ""], 2, "several with commas between"),
        (["--max-kl", "0.1"], 2, "--max-kl finds the sparsity, so there is none to give: leave --sparsity out"),
        (["--min-top1", "0.9"], 2, "leave --sparsity out"),
        (["--device", "cuda:77"], 2, "CUDA"),
        (["--upload-repo", "no-owner"], 2, "USER/NAME"),
    ],
)
def test_misuse_is_one_sentence_and_leaves_nothing(
    arguments: list[str],
    code: int,
    words: str,
    model: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run_command(model, "-o", out, *FLAGS, *arguments) == code
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not list(out.parent.iterdir())


def test_interrupt_says_how_to_go_on(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_search", interrupted)
    monkeypatch.setattr("sys.argv", ["wisparse-convert", str(model), "-o", str(out)])
    assert run_command(model, "-o", out, *FLAGS) == 130
    error = capsys.readouterr().err
    assert f"finished stages are kept; go on with: wisparse-convert {model} -o {out}" in error
    assert "Traceback" not in error
    assert [path.name for path in out.parent.iterdir()] == ["bundle.work"]
    monkeypatch.undo()
    assert run_command(model, "-o", out, *FLAGS) == 0
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


# ---------------------------------------------------------------------- several sparsities


def test_several_sparsities_are_levels_of_one_bundle(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--num-samples", "4", "--seq-len", "16", "--device", "cpu"]
    drawn = []
    fisher = search_module.fisher_diagonal
    monkeypatch.setattr(search_module, "fisher_diagonal", lambda *a, **k: drawn.append(1) or fisher(*a, **k))
    assert run_command(model, "-o", out, "--json", *flags) == 0
    document = json.loads(capsys.readouterr().out)
    bundle = Bundle.open(out)
    verify_bundle(out)
    assert bundle.recipe.sparsities == (0.3, 0.4, 0.5), "what most people want, without being asked"
    assert bundle.recipe.default == document["sparsity"] == 0.4
    assert [level["sparsity"] for level in document["levels"]] == [0.3, 0.4, 0.5]
    assert [level["sparsity"] for level in bundle.recipe.search["levels"]] == [0.3, 0.4, 0.5]
    assert len(drawn) == 1, "what no sparsity decides is measured once"
    sizes = [projection.num_parameters for projection in bundle.config.projections()]
    for level in bundle.recipe.levels:
        mean = sum(n * entry.sparsity for n, entry in zip(sizes, level.projections, strict=True)) / sum(sizes)
        assert mean == pytest.approx(level.sparsity, abs=1e-6)
        masks = bundle.at(level.sparsity).masks
        assert {entry.name: entry.threshold for entry in level.projections} == pytest.approx(
            {name: mask.threshold for name, mask in masks.items()}
        )
    report = json.loads((out / "conversion_report.json").read_text())
    card = (out / "README.md").read_text()
    for level in report["levels"]:
        found = level["quality"]["sparse"]
        assert level["verdict"].startswith(f"At {level['sparsity']:.0%} sparsity")
        assert f"{found['kl']:.4f} | {found['top1_agreement']:.3f} | {found['perplexity']:.3f}" in card
    assert [point["sparsity"] for point in report["quality_against_sparsity"]] == [0.3, 0.4, 0.5]
    # The first sparsity level that is searched for is what it would be alone; the others begin where it ended.
    alone = Bundle.open(convert(model, out.with_name("alone"), sparsity=0.5, num_samples=4, seq_len=16, device="cpu"))
    assert alone.recipe.projections == bundle.recipe.at(0.5).projections


def test_the_default_level(model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(model, "-o", out, *FLAGS, "--sparsity", "0.6,0.2", "--default", "0.6") == 0
    assert Bundle.open(out).recipe.default == 0.6
    assert "20.0% and 60.0% (default) asked for; at 60.0%, 60" in " ".join(capsys.readouterr().out.split())
    one = settings.ConvertSettings("model", out)
    assert one.default_of(one.levels) == 0.4
    assert one.default_of([0.3, 0.5]) == 0.3, "of two equally near the one that costs less"
    assert one.default_of([0.0, 0.5]) == 0.5


def test_levels_go_on_where_they_stopped(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = FAST | {"sparsity": [0.3, 0.5]}
    expected = digests(convert(model, out.with_name("expected"), **levels))
    original, asked = search_module.SparsityLevels.at, []

    def second_fails(self: Any, sparsity: float) -> Any:
        asked.append(sparsity)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return original(self, sparsity)

    with monkeypatch.context() as patch:
        patch.setattr(search_module.SparsityLevels, "at", second_fails)
        with pytest.raises(KeyboardInterrupt):
            convert(model, out, **levels)
    assert asked == [0.5, 0.3]
    assert digests(convert(model, out, **levels)) == expected
    assert sorted(path.name for path in out.parent.iterdir()) == ["bundle", "expected"]


# ---------------------------------------------------------------------- what goes wrong on the way


def test_nan_in_the_weights(model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][2, 3] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert run_command(model, "-o", out, *FLAGS) == 3
    assert "model.layers.0.mlp.up_proj.weight" in capsys.readouterr().err
    assert not out.exists()


def test_disk_full_while_writing_keeps_the_search(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digests(convert(model, out.with_name("expected"), **FAST))

    def full(*_: Any, **__: Any) -> None:
        raise ResourceError("the disk is full")

    monkeypatch.setattr(pipeline, "write_bundle", full)
    with pytest.raises(ResourceError):
        convert(model, out, **FAST)
    monkeypatch.undo()
    assert not out.exists()
    computed = []
    monkeypatch.setattr(pipeline, "load_calibration", lambda *_: computed.append(1))
    assert digests(convert(model, out, **FAST)) == expected
    assert not computed, "the calibration text came from the state"


def test_disk_full_in_mid_search(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.fsync

    def full(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if ".stage" in name and "calibration" not in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert run_command(model, "-o", out, *FLAGS) == 5
    assert "full" in capsys.readouterr().err
    assert not out.exists()
    assert (out.with_name("bundle.work") / "calibration.stage").exists()


def test_changed_setting_starts_over_and_says_which(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = digests(convert(model, out.with_name("expected"), **FAST | {"sparsity": 0.3}))

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_search", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(model, out, **FAST | {"sparsity": 0.4})
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "wisparse"):
        convert(model, out, **FAST | {"sparsity": 0.3})
    assert "sparsity: was [0.4], is [0.3]" in caplog.text
    assert digests(out) == expected


@pytest.mark.parametrize("damage", ["one", "all"])
def test_damaged_state_is_computed_again(
    damage: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = digests(convert(model, out.with_name("expected"), **FAST))

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "write_bundle", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(model, out, **FAST)
    monkeypatch.undo()
    units = sorted(out.with_name("bundle.work").rglob("*.stage"))
    assert len(units) >= 2
    for path in units if damage == "all" else units[:1]:
        path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "wisparse"):
        convert(model, out, **FAST)
    assert caplog.text.count("damaged") >= 1
    assert digests(out) == expected


def interrupt_writing(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """A conversion that ends where the bundle would be written: everything else is in its state."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "write_bundle", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(model, out, **FAST, **settings)


def zero_a_tenth_of_the_weights(model: Path) -> None:
    """In the middle of every block weight: sizes, names and both ends of each tensor stay what they were."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2:
            flat = tensor.view(-1)
            flat[flat.numel() // 4 : flat.numel() // 4 + flat.numel() // 10] = 0
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def test_other_weights_after_a_kill_start_over(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt_writing(model, out, monkeypatch)
    times = os.stat(model / "model.safetensors")
    zero_a_tenth_of_the_weights(model)
    os.utime(model / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    expected = digests(convert(model, out.with_name("undisturbed"), **FAST))
    with caplog.at_level(logging.WARNING, "wisparse"):
        convert(model, out, **FAST)
    assert "starting over, because this differs from the interrupted run: model.safetensors: was" in caplog.text
    assert digests(out) == expected


def test_every_file_of_the_source_counts(model: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model)
    for name in ("chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json", "generation_config.json"):
        (model / name).write_text("{}")
    for name in ("LICENSE", "NOTICE.md", "README.md"):
        (model / name).write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool.jinja").write_text("{}")
    before = small_digests(model, checkpoint.error)
    for path in sorted(path for path in model.rglob("*") if path.is_file() and path.suffix != ".safetensors"):
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        name = path.relative_to(model).as_posix()
        assert {one for one, digest in small_digests(model, checkpoint.error).items() if before[one] != digest} == {
            name
        }
        path.write_bytes(content)


def test_every_byte_of_the_weights_counts(model: Path) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    before = weight_digests(Checkpoint.open(model))
    for place in (len(content) - 1, len(content) // 2, len(content) - 5001, 10_001):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        now = weight_digests(Checkpoint.open(model))
        assert now["model.safetensors"] != before["model.safetensors"], place
    file.write_bytes(content)
    assert weight_digests(Checkpoint.open(model))["model.safetensors"] == before["model.safetensors"]


def test_a_source_that_changes_under_way_is_an_error(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pipeline._search

    def change(*arguments: Any) -> Any:
        (model / "generation_config.json").write_text('{"eos_token_id": 5}')
        return plain(*arguments)

    monkeypatch.setattr(pipeline, "_search", change)
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json: changed while the model was converted"):
        convert(model, out, **FAST)
    assert not out.exists()


@pytest.mark.parametrize("changed", ["generation_config.json", "LICENSE"])
def test_a_killed_overwrite_is_not_finished_by_the_old_bundle(
    changed: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Old and new bundle share settings and recipe: only what the recipe does not speak of is another."""
    (model / changed).write_text('{"eos_token_id": 1}')
    convert(model, out, **FAST)
    (model / changed).write_text('{"eos_token_id": 2}')

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:  # all is written, the mark too, and nothing is in place
        patched.setattr("wisparse.formats.folder._exchange", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(model, out, **FAST, overwrite=True)
    assert (out / changed).read_text() == '{"eos_token_id": 1}'
    with caplog.at_level(logging.WARNING, "wisparse"):
        convert(model, out, **FAST, overwrite=True)
    assert "complete already" not in caplog.text
    assert (out / changed).read_text() == '{"eos_token_id": 2}'
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


def test_a_run_killed_after_the_swap_is_finished_by_the_next(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "remove_state", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(model, out, **FAST)
    before = digests(out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["bundle", "bundle.work"]
    with caplog.at_level(logging.WARNING, "wisparse"):
        convert(model, out, **FAST)
    assert "was complete already" in caplog.text
    assert digests(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
    with pytest.raises(UsageError, match="already exists"):  # it is over
        convert(model, out, **FAST)


@pytest.mark.parametrize("change", ["weights", "licence", "settings", "bundle"])
def test_a_finished_bundle_of_something_else_is_not_taken(
    change: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "remove_state", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(model, out, **FAST)
    settings: dict[str, Any] = {}
    if change == "weights":
        zero_a_tenth_of_the_weights(model)
    elif change == "licence":
        (model / "LICENSE").write_text("of another kind")
    elif change == "settings":
        settings = {"dtype": "float16"}
    else:
        (out / "generation_config.json").write_text("{}")
    with pytest.raises(UsageError, match="already exists"):
        convert(model, out, **FAST, **settings)
    expected = digests(convert(model, out.with_name("undisturbed"), **FAST, **settings))
    assert digests(convert(model, out, **FAST, **settings, overwrite=True)) == expected
    assert sorted(path.name for path in out.parent.iterdir()) == ["bundle", "undisturbed"]


def test_a_symlinked_work_dir_stays_the_users(model: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    convert(model, out, **FAST, work_dir=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_overwrite_replaces_only_after_success(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(model, out, **FAST, seed=1)
    before = digests(out)

    def fail(*_: Any) -> None:
        raise UnsupportedModelError("no")

    monkeypatch.setattr(pipeline, "_search", fail)
    with pytest.raises(UnsupportedModelError):
        convert(model, out, **FAST, seed=2, overwrite=True)
    assert digests(out) == before
    monkeypatch.undo()
    convert(model, out, **FAST, seed=2, overwrite=True)
    assert digests(out) != before


def test_failed_upload_keeps_the_bundle(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, repo: str, private: bool) -> str:
        raise UploadError(f"the upload failed; repeat with: wisparse push {folder} {repo}")

    monkeypatch.setattr("wisparse.converter.preflight.check_write_access", lambda repo: None)
    monkeypatch.setattr(pipeline, "push_bundle", fail)
    assert run_command(model, "-o", out, "--upload-repo", "me/it", *FLAGS) == 7
    assert f"wisparse push {out} me/it" in capsys.readouterr().err
    verify_bundle(out)


def test_upload(model: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    monkeypatch.setattr("wisparse.converter.preflight.check_write_access", lambda repo: None)
    monkeypatch.setattr("wisparse.converter.preflight.is_public", lambda repo: False)
    monkeypatch.setattr(pipeline, "push_bundle", lambda *given: pushed.append(given) or "https://hub/me/it")
    assert run_command(model, "-o", out, "--upload-repo", "me/it", "--private", *FLAGS) == 0
    assert pushed == [(out, "me/it", True)]
    assert "https://hub/me/it" in capsys.readouterr().out
