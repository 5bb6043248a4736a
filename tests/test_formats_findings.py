"""What is measured of a bundle afterwards: it lands in report and card, and nowhere else, whatever breaks off."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_formats_folder import _killed_at
from tiny_bundle import write_tiny_bundle, write_tiny_model

from wisparse.cli import main
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.card import Finding, as_entries, check_amendable, merged, read_findings, save_findings, with_table
from wisparse.formats.errors import BundleError, UsageError

SPEED = Finding("tok/s", "one request; numba on a|b <i>, 2 threads", 0.5, 200.0, 300.0)
SCORE = Finding("sums, exact_match", "n = 50, prompts dense; torch on cpu", 0.3, 0.9, 0.88, 0.01, 0.012)
CARD = b"---\nlicense: mit\n---\n\n# A card\n\n## Measured\n\nsomething\n\n## Use\n\nlike this\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    extra = {"README.md": CARD, "conversion_report.json": b'{"report_version": 1}\n', "figures/a.png": b"png"}
    return write_tiny_bundle(tmp_path / "bundle", write_tiny_model(tmp_path / "model"), 0.3, 0.5, extra_files=extra)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_report_and_card_have_it_and_nothing_else_changes(bundle: Path) -> None:
    before = content(bundle)
    save_findings(bundle, [SPEED])
    save_findings(bundle, [SCORE, replace(SPEED, sparse=310.0)])
    after = content(bundle)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"README.md", "conversion_report.json", "wisparse.json"}
    report = json.loads(after["conversion_report.json"])
    assert report == {"report_version": 1, "findings": as_entries([replace(SPEED, sparse=310.0), SCORE])}
    card = after["README.md"].decode()
    head, rest = card.split("<!-- measured since the conversion -->")
    assert head + rest.split("since -->\n")[1] == CARD.decode().replace("\n## Use", "\n\n## Use")
    table = [line for line in card.splitlines() if line.startswith("| ")]
    assert table == [
        "| | dense | 30% | 50% |",
        r"| tok/s: one request; numba on a\|b \<i\>, 2 threads | 200.0 | – | 310.0 (1.55x) |",
        r"| sums, exact\_match: n = 50, prompts dense; torch on cpu | 0.9000 ± 0.0100 | 0.8800 ± 0.0120 | – |",
    ]
    assert verify_bundle(bundle).notes == ()
    assert Bundle.open(bundle).recipe.sparsities == (0.3, 0.5)
    assert os.listdir(bundle.parent) == ["bundle", "model"] or sorted(os.listdir(bundle.parent)) == ["bundle", "model"]


def test_a_card_that_its_owner_wrote_anew_keeps_all_but_the_table(bundle: Path) -> None:
    save_findings(bundle, [SPEED])
    (bundle / "README.md").write_text("# Mine\n\n" + with_table("", [SPEED]) + "\nand this\n")
    (bundle / "figures" / "a.png").unlink()
    save_findings(bundle, [SCORE])
    card = (bundle / "README.md").read_text()
    assert card.startswith("# Mine\n\n<!-- measured since")
    assert card.endswith("since -->\n\nand this\n")
    assert card.count("| tok/s") == card.count("| sums") == 1


def test_a_bundle_without_card_and_report(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", write_tiny_model(tmp_path / "model"))
    save_findings(bundle, [SPEED])
    assert verify_bundle(bundle).notes == ()
    assert read_findings(json.loads((bundle / "conversion_report.json").read_text())) == [SPEED]
    assert "| tok/s" in (bundle / "README.md").read_text()


@pytest.mark.parametrize(
    "findings",
    [
        {},
        [1],
        [{"what": "x"}],
        [{**as_entries([SPEED])[0], "dense": "1"}],
        [{**as_entries([SPEED])[0], "dense": None}],
        [{**as_entries([SPEED])[0], "sparsity": True}],
        [{**as_entries([SPEED])[0], "what": "x" * 1000}],
        as_entries([SPEED]) * 1001,
    ],
    ids=str,
)
def test_findings_that_are_none(findings: Any, bundle: Path) -> None:
    (bundle / "conversion_report.json").write_text(json.dumps({"findings": findings}))
    before = content(bundle)
    for action in (lambda: check_amendable(bundle), lambda: save_findings(bundle, [SPEED])):
        with pytest.raises(BundleError, match="findings"):
            action()
    assert content(bundle) == before


def test_what_cannot_be_written_to_is_told_before_the_work(bundle: Path, tmp_path: Path) -> None:
    check_amendable(bundle)
    (bundle / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt', which is not part of a bundle"):
        check_amendable(bundle)
    with pytest.raises(BundleError):
        check_amendable(tmp_path / "model")


@pytest.mark.parametrize("name", ["figures/a.png", "README.md"])
def test_what_a_symlink_points_at_outside_is_not_taken_in(bundle: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    (bundle / name).unlink()
    (bundle / name).symlink_to(secret)
    for attempt in (lambda: check_amendable(bundle), lambda: save_findings(bundle, [SPEED])):
        with pytest.raises(BundleError, match=f"{name}: a symlink that leaves the folder"):
            attempt()
    assert (bundle / name).is_symlink()
    assert secret.stat().st_nlink == 1


def test_of_two_of_a_kind_the_fresh_one() -> None:
    other = replace(SPEED, sparsity=0.3)
    assert merged([SPEED, SCORE], [replace(SPEED, dense=1.0), other]) == [replace(SPEED, dense=1.0), SCORE, other]


def test_killed_at_every_step_a_whole_bundle_stands_there(bundle: Path) -> None:
    number, seen = 0, set()
    while True:
        out = bundle.with_name(f"out-{number}")
        shutil.copytree(bundle, out)
        status = _killed_at(number, lambda out=out: save_findings(out, [SPEED]))
        if out.exists():  # else it lies beside, between two renames
            assert verify_bundle(out).notes == ()
            seen.add((out / "README.md").read_bytes() == CARD)
        if not status:
            break
        save_findings(out, [SCORE])
        assert "| sums" in (out / "README.md").read_text()
        assert sorted(path.name for path in out.parent.glob(f"{out.name}*")) == [out.name]
        number += 1
    assert number > 15
    assert seen == {True, False}


def test_bench_saves_what_it_measured(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--runs", "1", "--max-new-tokens", "2", "--device", "cpu", "--backend", "torch", "--json"]
    with pytest.raises(SystemExit) as exit_:
        main(["bench", str(bundle), *quick, "--save"])
    out, err = capsys.readouterr()
    assert not exit_.value.code, err
    measured = json.loads(out)
    (found,) = read_findings(json.loads((bundle / "conversion_report.json").read_text()))
    assert (found.what, found.sparsity) == ("tok/s", measured["sparsity"])
    assert (found.dense, found.sparse) == (measured["dense"]["tok_per_s"], measured["sparse"]["tok_per_s"])
    assert found.conditions.startswith("one request, 2 tokens after 5; ")
    assert f"saved in {bundle}" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "me/it", "--save"], "--save: expected a bundle's folder, found 'me/it'"),
        (["bench", "BUNDLE", "--save", "--sparsity", "0"], "--save: expected a sparsity level to tell of"),
        (["bench", "BUNDLE", "--save", "--all-weights"], "--all-weights goes without"),
        (["eval", "BUNDLE", "--save"], "--save keeps what --tasks found, and there are none"),
    ],
)
def test_misuse(arguments: list[str], said: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([str(bundle) if word == "BUNDLE" else word for word in arguments])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
