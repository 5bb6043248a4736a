"""The model card, held to the Hub's rules without the Hub, and what is measured of a bundle afterwards."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from test_formats_folder import killed_at
from tiny_bundle import files_of, write_tiny_bundle, write_tiny_model

from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.card import (
    Finding,
    Inherited,
    check_amendable,
    read_findings,
    read_inherited,
    render_card,
    save_findings,
    with_table,
)
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel

Run = Callable[..., tuple[int, str, str]]
_SPARSE = {"num_tokens": 24576, "kl": 0.0513, "dense_perplexity": 7.957, "perplexity": 8.37, "top1_agreement": 0.826}
REPORT = {
    "verdict": "At 50% sparsity, KL 0.05 nats/token: close to dense.",
    "sparsity": {"expect": "50.0% of the weights are left unread on the calibration text."},
    "quality": {"text": "held-out library source", "sparse": _SPARSE, "realised_sparsity": 0.5},
    "levels": [{}],
}
OTHER = "---\nlicense: other\nlicense_name: qwen\n"
LLAMA = "---\nlicense: llama3.1\nlanguage:\n- en\n- de\nbase_model: x/y\nextra_gated_prompt: secret\n---\n# Llama\n"


def recipe(base_model: str = "org/Llama-3.1-8B-Instruct", revision: str | None = "a" * 40) -> Recipe:
    name = "model.layers.{}.mlp.down_proj"
    entries = tuple(ProjectionRecipe(name.format(i), 0.4 + 0.1 * i, 0.5 * i, 1.0, 0.5) for i in range(3))
    calibration = CalibrationRecord("self", 64, 512, 32768, 0, "d" * 64)
    return Recipe(base_model, revision, "wisparse", 0.5, (SparsityLevel(0.5, entries, (0.4, 0.5, 0.6)),), calibration)


def check(text: str) -> dict[str, Any]:
    """The Hub's rules for model cards, as its documentation and its client state them. Returns the metadata."""
    match = re.match(r"---\n(.*?)\n---\n\n", text, re.DOTALL)
    metadata = yaml.safe_load(match[1])
    allowed = {"base_model", "base_model_relation", "language", "library_name", "license", "license_name"}
    assert set(metadata) <= allowed | {"license_link", "pipeline_tag", "tags", "model-index"}
    assert None not in metadata.values()
    if "base_model" in metadata:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", metadata["base_model"])
        assert metadata["base_model_relation"] == "quantized"
    assert metadata.get("license") != "other" or (metadata["license_name"] and metadata["license_link"])
    for code in metadata.get("language", []):
        assert re.fullmatch(r"[a-z]{2,3}|code|multilingual", code)
    assert all(isinstance(tag, str) for tag in metadata["tags"])
    # What the client makes of it: raises on an invalid model-index, round trip included.
    data = ModelCard(text).data
    assert yaml.safe_load(data.to_yaml()) == metadata
    return metadata


def test_a_full_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(LLAMA)
    for name in ("LICENSE", "USE_POLICY.md", "chat_template.jinja"):
        (tmp_path / name).write_text("text")
    figures = [("figures/sparsity.png", "Sparsity by block")]
    found = replace(recipe(), search={"settings": {"search": "refine"}})
    text = render_card(found, read_inherited(tmp_path), REPORT, figures=figures, repo_id="me/Llama-wisparse-50")
    metadata = check(text)
    expected = {"base_model": "org/Llama-3.1-8B-Instruct", "library_name": "wisparse", "license": "llama3.1"}
    expected |= {"language": ["en", "de"], "pipeline_tag": "text-generation"}
    assert metadata.items() >= expected.items()
    assert {"wisparse", "conversational"} <= set(metadata["tags"])
    values = {m["type"]: m["value"] for m in metadata["model-index"][0]["results"][0]["metrics"]}
    assert values == {"perplexity": 8.37, "kl_divergence": 0.0513, "accuracy": 0.826}
    for expected in (
        "| perplexity | 7.957 | 8.370 |",
        "24,576 tokens of held-out library source; every token sparse",
        "![Sparsity by block](figures/sparsity.png)",
        'wisparse generate me/Llama-wisparse-50 --prompt "Why',
        "wisparse chat me/Llama-wisparse-50",
        'wisparse.load("me/Llama-wisparse-50")',
        "40.0% to 60.0% by block",
        "alpha: 0 to 1, median 0.5",
        "`LICENSE` and `USE_POLICY.md`",
        "a" * 40,
        "WiSparse has no public repository yet. Without it this folder is the dense model",
        "pip install .  # in the copy\n",
        'AutoModelForCausalLM.from_pretrained("me/Llama-wisparse-50")',
        "| `wisparse.safetensors` | for each linear layer",
        "- search: refine\n",
        "arXiv:2602.14452",
        f"**{REPORT['verdict']}**\n\n| |",
    ):
        assert expected in text, expected
    assert "secret" not in text


def test_a_card_with_the_projects_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wisparse.formats.card.PROJECT", "https://example.org/wisparse")
    text = render_card(recipe(), read_inherited(tmp_path), REPORT)
    check(text)
    assert 'pip install "wisparse @ git+https://example.org/wisparse"\nwisparse generate' in text
    assert "A [WiSparse](https://example.org/wisparse) bundle of" in text
    assert "no public repository" not in text


def test_what_a_card_inherits(tmp_path: Path) -> None:
    text = render_card(recipe("my-model", None), read_inherited(tmp_path), REPORT)
    metadata = check(text)
    assert not {"base_model", "license"} & metadata.keys()  # a folder's name would link to a stranger's model
    assert "names no licence" in text
    assert "wisparse chat" not in text
    # Tags are inherited and how it is stored is not.
    tags = "tags:\n- code\n- Math\n- safetensors\n- 'a b'\n- wisparse\n"
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{tags}---\n")
    text = render_card(recipe(), read_inherited(tmp_path), REPORT)
    assert check(text)["tags"] == ["wisparse", "activation-sparsity", "code", "Math"]
    # ``other`` without a licence file points at the source.
    inherited = Inherited("other")
    metadata = check(render_card(recipe(), inherited, REPORT))
    assert metadata["license_link"] == "https://huggingface.co/org/Llama-3.1-8B-Instruct"
    assert "license" not in check(render_card(recipe("folder", None), inherited, REPORT))


@pytest.mark.parametrize(
    ("card", "files", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", ["LICENSE"], ("apache-2.0", None, None)),
        (f"{OTHER}license_link: https://x.org/l\n---\n", [], ("other", "qwen", "https://x.org/l")),
        ("---\nlicense: other\n---\n", ["LICENSE.txt"], ("other", "as-in-the-source", "LICENSE.txt")),
        ("# no metadata\n", ["LICENCE"], ("other", "as-in-the-source", "LICENCE")),
        ("# no metadata\n", [], (None, None, None)),
        ("---\nlicense: [not, text\n---\n", [], (None, None, None)),  # damaged YAML
        ("---\n- a list\n---\n", [], (None, None, None)),
        ("---\nlicense: 'Ask me! '\n---\n", [], (None, None, None)),  # the Hub would refuse it
    ],
)
def test_a_licence_is_inherited(tmp_path: Path, card: str, files: list[str], expected: tuple[str | None, ...]) -> None:
    (tmp_path / "README.md").write_text(card)
    for name in files:
        (tmp_path / name).write_text("text")
    inherited = read_inherited(tmp_path)
    assert (inherited.licence, inherited.licence_name, inherited.licence_link) == expected
    check(render_card(recipe(), inherited, REPORT))


@pytest.mark.parametrize(("given", "kept"), [("[en, English, code, 7, zho]", ("en", "code", "zho")), ("fr", ("fr",))])
def test_only_valid_languages_are_inherited(tmp_path: Path, given: str, kept: tuple[str, ...]) -> None:
    (tmp_path / "README.md").write_text(f"---\nlanguage: {given}\n---\n")
    assert read_inherited(tmp_path).languages == kept


SPEED = Finding("tok/s", "one request; numba on a|b <i>, 2 threads", 0.5, 200.0, 300.0)
SCORE = Finding("sums, exact_match", "n = 50, prompts dense; torch on cpu", 0.3, 0.9, 0.88, 0.01, 0.012)
CARD = b"---\nlicense: mit\n---\n\n# A card\n\n## Measured\n\nsomething\n\n## Use\n\nlike this\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    extra = {"README.md": CARD, "conversion_report.json": b'{"report_version": 1}\n', "figures/a.png": b"png"}
    return write_tiny_bundle(tmp_path / "bundle", write_tiny_model(tmp_path / "model"), 0.3, 0.5, extra_files=extra)


def test_report_and_card_have_it_and_nothing_else_changes(bundle: Path) -> None:
    before = files_of(bundle)
    save_findings(bundle, [SPEED])
    save_findings(bundle, [SCORE, replace(SPEED, sparse=310.0)])
    after = files_of(bundle)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"README.md", "conversion_report.json", "wisparse.json"}
    report = json.loads(after["conversion_report.json"])
    assert report == {"report_version": 1, "findings": [asdict(replace(SPEED, sparse=310.0)), asdict(SCORE)]}
    card = after["README.md"].decode()
    head, rest = card.split("<!-- measured since the conversion -->")
    assert head + rest.split("since -->\n")[1] == CARD.decode().replace("\n## Use", "\n\n## Use")
    assert [line for line in card.splitlines() if line.startswith("| ")] == [
        "| | dense | 30% | 50% |",
        r"| tok/s: one request; numba on a\|b \<i\>, 2 threads | 200.0 | – | 310.0 (1.55x) |",
        r"| sums, exact\_match: n = 50, prompts dense; torch on cpu | 0.9000 ± 0.0100 | 0.8800 ± 0.0120 | – |",
    ]
    assert verify_bundle(bundle).notes == ()
    assert Bundle.open(bundle).recipe.sparsities == (0.3, 0.5)
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle", "model"]


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


ODD = [asdict(SPEED) | {"dense": dense} for dense in ("1", None, 10**400)]
ODD += [asdict(SPEED) | odd for odd in ({"sparsity": True}, {"what": "x" * 999})]
NO_FINDINGS = [{}, [1], [{"what": "x"}], *([one] for one in ODD), [asdict(SPEED)] * 1001]


@pytest.mark.parametrize("findings", NO_FINDINGS, ids=lambda value: str(value)[-40:])
def test_findings_that_are_none(findings: Any, bundle: Path) -> None:
    (bundle / "conversion_report.json").write_text(json.dumps({"findings": findings}))
    before = files_of(bundle)
    for action in (lambda: check_amendable(bundle), lambda: save_findings(bundle, [SPEED])):
        with pytest.raises(BundleError, match="findings"):
            action()
    assert files_of(bundle) == before


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


def test_killed_at_every_step_a_whole_bundle_stands_there(bundle: Path) -> None:
    number, seen = 0, set()
    while True:
        out = bundle.with_name(f"out-{number}")
        shutil.copytree(bundle, out)
        status = killed_at(number, lambda out=out: save_findings(out, [SPEED]))
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


def test_bench_saves_what_it_measured(bundle: Path, run: Run) -> None:
    quick = ["--runs", "1", "--max-new-tokens", "2", "--device", "cpu", "--backend", "torch", "--json"]
    code, out, err = run("bench", bundle, *quick, "--save")
    assert code == 0, err
    measured = json.loads(out)
    (found,) = read_findings(json.loads((bundle / "conversion_report.json").read_text()))
    assert (found.what, found.sparsity) == ("tok/s", measured["sparsity"])
    assert (found.dense, found.sparse) == (measured["dense"]["tok_per_s"], measured["sparse"]["tok_per_s"])
    assert found.conditions.startswith("one request, 2 tokens after 5; ")
    assert f"saved in {bundle}" in err


def test_misuse(bundle: Path, run: Run) -> None:
    for arguments, said in (
        (["bench", "me/it"], "--save: expected a bundle's folder, found 'me/it'"),
        (["bench", bundle, "--sparsity", "0"], "--save: expected a sparsity level, found"),
        (["bench", bundle, "--all-weights"], "--all-weights goes without"),
        (["eval", bundle], "--save requires --tasks"),
    ):
        code, _, err = run(*arguments, "--save")
        assert (code, said in err) == (2, True), err
