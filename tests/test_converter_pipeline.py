"""The whole conversion on tiny models: what is written, what is refused, what is left behind."""

import json
import logging
import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bundle import digests, write_tiny_model

from wisparse import UnsupportedModelError, UsageError, convert
from wisparse.cli import convert_main
from wisparse.converter import pipeline, settings
from wisparse.converter.measurement import Budget
from wisparse.converter.search import search as search_module
from wisparse.converter.source import small_digests
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.checkpoint import Checkpoint

FAST: dict[str, Any] = {"sparsity": 0.5, "search": "uniform", "method": "teal"}
FAST |= {"num_samples": 2, "seq_len": 16, "device": "cpu"}
FLAGS = [str(word) for name, value in FAST.items() for word in ("--" + name.replace("_", "-"), value)]


pytestmark = pytest.mark.usefixtures("quick_conversion")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "source" / "tiny")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "result").mkdir()
    return tmp_path / "result" / "bundle"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, main=convert_main)


def interrupt(target: str, model: Path, out: Path, **settings: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(model, out, **FAST | settings)


def zero_a_tenth_of_the_weights(model: Path) -> None:
    """In the middle of every block weight: sizes, names, times and both ends of each tensor stay what they were."""
    file = model / "model.safetensors"
    times, tensors = os.stat(file), load_file(file)
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2:
            flat = tensor.view(-1)
            flat[flat.numel() // 4 : flat.numel() // 4 + flat.numel() // 10] = 0
    save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


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


def test_a_bundles_files_hold_nothing_of_this_machine_and_nothing_else_stays(model: Path, out: Path) -> None:
    text = out.with_name("text.txt")
    text.write_text("a text to calibrate on, long enough. " * 30)
    convert(model, out, **FAST, calibration=text, dtype="bfloat16", max_shard_size="8KB")
    assert all(str(out.parent).encode() not in path.read_bytes() for path in out.rglob("*") if path.is_file())
    bundle = Bundle.open(out)
    assert bundle.recipe.calibration.source == "text.txt"
    assert names(out.parent) == ["bundle", "text.txt"]
    assert {info.dtype for info in bundle.checkpoint.tensors.values()} == {torch.bfloat16}
    assert len(bundle.checkpoint.files) > 1


def test_command_prints_what_it_did(model: Path, out: Path, run: Run) -> None:
    code, shown, err = run(model, "-o", out, *FLAGS)
    shown = " ".join(shown.split())
    assert code == 0
    # Lines and no bars where there is no terminal.
    assert all(re.fullmatch(r" *\d+ s elapsed  \[\d/7\] [A-Z][^\r]*", line) for line in err.splitlines()), err
    assert "Writing the bundle" in err
    for text in (shown, (out / "README.md").read_text()):
        assert "by passage). On text of another kind expect" in text
    for words in ("50.0% asked for", f"wisparse generate {out}", "that the model wrote, not what it was calibrated on; "
                  "other text gives other figures"):  # fmt: skip
        assert words in shown


@pytest.mark.parametrize(("search", "said"), [("fisher", True), ("uniform", False)])
def test_an_estimate_for_the_whole(search: str, said: bool, model: Path, out: Path, run: Run) -> None:
    _, _, err = run(model, "-o", out, *FLAGS, "--method", "wisparse", "--search", search)
    lines = [line for line in err.splitlines() if "in all" in line]
    assert len(lines) == said
    assert all(
        re.fullmatch(r" *\d+ s elapsed  About [\d.e-]+ minutes in all \(half to twice that\)", one) for one in lines
    )


def test_command_prints_json(model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = json.loads(run(model, "--json", *FLAGS, "--sparsity", "0.4")[1])
    assert document["bundle"] == "tiny-wisparse-40"
    assert Bundle.open(tmp_path / "tiny-wisparse-40").recipe.default == 0.4
    assert document["realised_sparsity"] == pytest.approx(0.4, abs=0.05)
    recipe = document["recipe"]
    assert (recipe["base_model"], recipe["base_revision"]) == ("tiny", None)
    assert (recipe["calibration"]["source"], recipe["calibration"]["num_tokens"]) == ("self", 2 * 15)
    assert document["seconds"]["Writing the bundle"] >= 0
    bundle, dense = Bundle.open(tmp_path / "tiny-wisparse-40").checkpoint, Checkpoint.open(model)
    assert all(torch.equal(bundle.tensor(name), dense.tensor(name)) for name in bundle.tensors)


def test_misuse_is_one_sentence_and_leaves_nothing(model: Path, out: Path, run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for arguments, code, words in (
        (["--sparsity", "much"], 2, "several with commas between"),
        (["--sparsity", ""], 2, "several with commas between"),
        (["--sparsity", ",".join(f"0.{i}" for i in range(10, 27))], 2, "at most 16 of them"),
        (["--calibration", "nothing-here.txt"], 2, "no such file or folder"),
        (["--calibration", "no/such-data"], 4, "no/such-data"),
        (["-v", "-q"], 2, "exclude"),
        (["--device", "cuda:77"], 2, "CUDA"),
        (["--upload-repo", "no-owner"], 2, "USER/NAME"),
    ):
        found, _, error = run(model, "-o", out, *FLAGS, *arguments)
        assert (found, words in error, "Traceback" in error) == (code, True, False), error
        assert not list(out.parent.iterdir())


def test_interrupt_says_how_to_go_on(model: Path, out: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "SparsityLevels", Mock(side_effect=KeyboardInterrupt))
        patched.setattr("sys.argv", ["wisparse-convert", str(model), "-o", str(out)])
        code, _, error = run(model, "-o", out, *FLAGS)
    assert (code, "Traceback" in error) == (130, False)
    assert f"finished stages are kept; go on with: wisparse-convert {model} -o {out}" in error
    assert names(out.parent) == ["bundle.work"]
    assert run(model, "-o", out, *FLAGS)[0] == 0
    assert names(out.parent) == ["bundle"]


def test_several_sparsities_are_levels(model: Path, out: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--num-samples", "4", "--seq-len", "16", "--device", "cpu"]
    drawn = []
    fisher = search_module.fisher_diagonal
    monkeypatch.setattr(search_module, "fisher_diagonal", lambda *a, **k: drawn.append(1) or fisher(*a, **k))
    document = json.loads(run(model, "-o", out, "--json", *flags)[1])
    bundle = Bundle.open(out)
    verify_bundle(out)
    assert bundle.recipe.sparsities == (0.3, 0.4, 0.5), "what most people want, without being asked"
    assert bundle.recipe.default == document["sparsity"] == 0.4
    for levels in (document["levels"], bundle.recipe.search["levels"]):
        assert [level["sparsity"] for level in levels] == [0.3, 0.4, 0.5]
    assert bundle.recipe.search["settings"]["search"] == "refine"
    assert len({entry.sparsity for entry in bundle.recipe.projections}) > 1
    assert len(drawn) == 1, "what no sparsity decides is measured once"
    sizes = [projection.num_parameters for projection in bundle.config.projections()]
    for level in bundle.recipe.levels:
        mean = sum(n * entry.sparsity for n, entry in zip(sizes, level.projections, strict=True)) / sum(sizes)
        assert mean == pytest.approx(level.sparsity, abs=1e-6)
        thresholds = {name: mask.threshold for name, mask in bundle.at(level.sparsity).masks.items()}
        assert {entry.name: entry.threshold for entry in level.projections} == pytest.approx(thresholds)
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


def test_the_default_level(model: Path, out: Path, run: Run) -> None:
    _, shown, _ = run(model, "-o", out, *FLAGS, "--sparsity", "0.6,0.2", "--default", "0.6")
    assert Bundle.open(out).recipe.default == 0.6
    assert "20.0% and 60.0% (default) asked for; at 60.0%, 60" in " ".join(shown.split())
    one = settings.ConvertSettings("model", out)
    # Of two equally near the one that costs less.
    assert [one.default_of(levels) for levels in (one.levels, [0.3, 0.5], [0.0, 0.5])] == [0.4, 0.3, 0.5]


def test_a_budget(model: Path, out: Path, run: Run) -> None:
    assert Budget(max_kl=0.02).spent(0.03, 0.0) == pytest.approx(1.5)
    assert Budget(min_top1=0.95).spent(9.0, 0.97) == pytest.approx(0.6)
    assert Budget(0.02, 0.95).spent(0.01, 0.9) == pytest.approx(2.0)
    assert Budget(0.0).spent(0.0, 1.0) == 0.0
    assert Budget(min_top1=1.0).spent(0.0, 0.99) == math.inf
    # A budget that nothing keeps says what is best.
    code, _, said = run(model, "-o", out, "--max-kl", "1e-12", "--min-top1", "0.5", *FLAGS[2:])
    assert (code, "Traceback" in said, out.exists()) == (2, False, False)
    assert "--max-kl 1e-12 and --min-top1 0.5: no sparsity from 5% on keeps that; the best is KL " in said
    # ``--max-kl`` writes the sparsity that keeps it.
    document = json.loads(run(model, "-o", out, "--max-kl", "5e-3", "--json", *FLAGS[2:])[1])
    choice, recipe = document["choice"], Bundle.open(out).recipe
    assert recipe.sparsities == (choice["sparsity"],) == (document["sparsity"],)
    assert recipe.search["budget"] == {"max_kl": 5e-3, "min_top1": None, **choice}
    kl = {one["sparsity"]: one["kl"] for one in choice["tried"]}
    assert kl[recipe.default] <= 5e-3
    assert kl[recipe.default] >= 0.98 * 5e-3 or min(kl[one] for one in kl if one > recipe.default) > 5e-3
    report = json.loads((out / "conversion_report.json").read_text())
    beside = [point["sparsity"] for point in report["quality_against_sparsity"]]
    # What a bit less and a bit more would cost.
    assert beside == pytest.approx([recipe.default - 0.05, recipe.default, recipe.default + 0.05])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "(finished: calibration, level-0.5)"),
        ({"report": "brief"}, "(finished: calibration, level-0.5)"),  # what auto is on a CPU
        ({"report": "full"}, "starting over, because this differs from the interrupted run: full report: was False"),
        ({"sparsity": 0.3}, "sparsity: was [0.5], is [0.3]"),
        ("weights", "starting over, because this differs from the interrupted run: model.safetensors: was"),
    ],
)
def test_an_interrupted_run_goes_on_or_starts_over(
    change: Any, words: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything that the bundle's bytes depend on has to be as it was; the end is that of an undisturbed run."""
    interrupt("wisparse.converter.pipeline.write_bundle", model, out)
    changed = FAST | change if isinstance(change, dict) else FAST
    if change == "weights":
        zero_a_tenth_of_the_weights(model)
    expected = digests(convert(model, out.with_name("undisturbed"), **changed))
    if "finished" in words:
        monkeypatch.setattr(pipeline, "write_calibration", None)
        monkeypatch.setattr(search_module, "Run", None)
    convert(model, out, **changed)
    assert words in caplog.text
    assert (digests(out), names(out.parent)) == (expected, ["bundle", "undisturbed"])


def test_every_file_of_the_source_counts(model: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model)
    (model / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json", "generation_config.json",
                 "LICENSE", "NOTICE.md", "README.md", "additional_chat_templates/tool.jinja"):  # fmt: skip
        (model / name).write_text("{}")
    before = small_digests(model, checkpoint.error)
    for path in sorted(path for path in model.rglob("*") if path.is_file() and path.suffix != ".safetensors"):
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        changed = {one for one, digest in small_digests(model, checkpoint.error).items() if before[one] != digest}
        assert changed == {path.relative_to(model).as_posix()}
        path.write_bytes(content)


def test_a_source_that_changes_under_way_is_an_error(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(*arguments: Any) -> Any:
        (model / "generation_config.json").write_text('{"eos_token_id": 5}')
        return search_module.SparsityLevels(*arguments)

    monkeypatch.setattr(pipeline, "SparsityLevels", change)
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json: changed while the model was converted"):
        convert(model, out, **FAST)
    assert not out.exists()


@pytest.mark.parametrize("changed", ["generation_config.json", "LICENSE"])
def test_a_killed_overwrite_starts_over(changed: str, model: Path, out: Path) -> None:
    """Old and new bundle share settings and recipe: only what the recipe does not speak of is another."""
    (model / changed).write_text('{"eos_token_id": 1}')
    convert(model, out, **FAST)
    (model / changed).write_text('{"eos_token_id": 2}')
    # All is written, the mark too, and nothing is in place.
    interrupt("wisparse.formats.folder.exchange", model, out, overwrite=True)
    assert (out / changed).read_text() == '{"eos_token_id": 1}'
    convert(model, out, **FAST, overwrite=True)
    assert ((out / changed).read_text(), names(out.parent)) == ('{"eos_token_id": 2}', ["bundle"])


@pytest.mark.parametrize("change", ["nothing", "weights", "licence", "settings", "bundle"])
def test_a_finished_bundle_is_taken_unless_it_is_of_something_else(
    change: str, model: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt("wisparse.converter.pipeline.remove_state", model, out)
    changed = FAST | ({"dtype": "bfloat16"} if change == "settings" else {})
    if change == "weights":
        zero_a_tenth_of_the_weights(model)
    elif change == "licence":
        (model / "LICENSE").write_text("of another kind")
    elif change == "bundle":
        (out / "generation_config.json").write_text("{}")
    elif change == "nothing":
        convert(model, out, **FAST)
        assert "was complete already" in caplog.text
    with pytest.raises(UsageError, match="already exists"):
        convert(model, out, **changed)
    expected = digests(convert(model, out.with_name("undisturbed"), **changed))
    assert digests(convert(model, out, **changed, overwrite=True)) == expected
    assert names(out.parent) == ["bundle", "undisturbed"]


def test_upload(model: Path, out: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that breaks off is in tests/test_commands_push.py."""
    push = Mock(return_value="https://hub/me/it")
    monkeypatch.setattr("wisparse.converter.preflight.check_write_access", lambda repo: None)
    monkeypatch.setattr("wisparse.converter.preflight.is_public", lambda repo: False)
    monkeypatch.setattr(pipeline, "push_bundle", push)
    code, shown, _ = run(model, "-o", out, "--upload-repo", "me/it", "--private", *FLAGS)
    assert (code, "https://hub/me/it" in shown) == (0, True)
    push.assert_called_once_with(out, "me/it", True)
    verify_bundle(out)
