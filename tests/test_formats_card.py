"""The model card: what it says, and that the Hub's rules for metadata hold, checked without the Hub."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from wisparse.formats.card import Inherited, read_inherited, render_card
from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel

_SPARSE = {"num_tokens": 24576, "kl": 0.0513, "dense_perplexity": 7.957, "perplexity": 8.37, "top1_agreement": 0.826}
REPORT = {
    "verdict": "At 50% sparsity, KL 0.05 nats/token: close to dense.",
    "sparsity": {"expect": "50.0% of the weights are left unread on the calibration text."},
    "quality": {"text": "held-out library source", "sparse": _SPARSE, "realised_sparsity": 0.5},
    "levels": [{}],
}
LLAMA = "---\nlicense: llama3.1\nlanguage:\n- en\n- de\nbase_model: x/y\nextra_gated_prompt: secret\n---\n# Llama\n"


def recipe(base_model: str = "org/Llama-3.1-8B-Instruct", revision: str | None = "a" * 40) -> Recipe:
    entries = tuple(
        ProjectionRecipe(f"model.layers.{i}.mlp.down_proj", 0.4 + 0.1 * i, 0.5 * i, 1.0, 0.5) for i in range(3)
    )
    calibration = CalibrationRecord("self", 64, 512, 32768, 0, "d" * 64)
    return Recipe(base_model, revision, "wisparse", 0.5, (SparsityLevel(0.5, entries, (0.4, 0.5, 0.6)),), calibration)


def check(text: str) -> dict[str, Any]:
    """The Hub's rules for model cards, as its documentation and its client state them. Returns the metadata."""
    match = re.match(r"---\n(.*?)\n---\n\n", text, re.DOTALL)
    assert match is not None
    metadata = yaml.safe_load(match[1])
    allowed = {"base_model", "base_model_relation", "language", "library_name", "license", "license_name"}
    assert set(metadata) <= allowed | {"license_link", "pipeline_tag", "tags", "model-index"}
    assert None not in metadata.values()
    if "base_model" in metadata:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", metadata["base_model"])
        assert metadata["base_model_relation"] == "quantized"
    if metadata.get("license") == "other":
        assert metadata["license_name"]
        assert metadata["license_link"]
    for code in metadata.get("language", []):
        assert re.fullmatch(r"[a-z]{2,3}|code|multilingual", code)
    assert all(isinstance(tag, str) for tag in metadata["tags"])
    for model in metadata.get("model-index", []):
        assert isinstance(model["name"], str)
        for result in model["results"]:
            assert result["task"]["type"]
            assert result["dataset"]["type"]
            assert result["dataset"]["name"]
            for metric in result["metrics"]:
                assert metric["type"]
                assert isinstance(metric["value"], float)
    # And what the client makes of it: raises on an invalid model-index, round trip included.
    data = ModelCard(text).data
    assert yaml.safe_load(data.to_yaml()) == metadata
    return metadata


def test_a_full_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(LLAMA)
    (tmp_path / "LICENSE").write_text("text")
    (tmp_path / "USE_POLICY.md").write_text("text")
    (tmp_path / "chat_template.jinja").write_text("x")
    figures = [("figures/sparsity.png", "Sparsity by block")]
    text = render_card(recipe(), read_inherited(tmp_path), REPORT, figures=figures, repo_id="me/Llama-wisparse-50")
    metadata = check(text)
    assert metadata["base_model"] == "org/Llama-3.1-8B-Instruct"
    assert metadata["library_name"] == "wisparse"
    assert metadata["license"] == "llama3.1"
    assert metadata["language"] == ["en", "de"]
    assert metadata["pipeline_tag"] == "text-generation"
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
    ):
        assert expected in text, expected
    assert "secret" not in text


def test_a_card_of_a_local_model_without_anything(tmp_path: Path) -> None:
    text = render_card(recipe("my-model", None), read_inherited(tmp_path), REPORT)
    metadata = check(text)
    assert "base_model" not in metadata  # a folder's name would link to a stranger's model
    assert "license" not in metadata
    assert "names no licence" in text
    assert "wisparse chat" not in text


def test_a_card_says_how_to_install_what_to_cite_which_search_and_how_good(tmp_path: Path) -> None:
    tags = "tags:\n- code\n- Math\n- safetensors\n- 'a b'\n- wisparse\n"
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{tags}---\n")
    found = replace(recipe(), search={"settings": {"search": "refine"}})
    text = render_card(found, read_inherited(tmp_path), REPORT)
    assert check(text)["tags"] == ["wisparse", "activation-sparsity", "code", "Math"]
    for expected in (
        "pip install wisparse\n",
        "- search: refine\n",
        "arXiv:2602.14452",
        f"**{REPORT['verdict']}**\n\n| |",
    ):
        assert expected in text, expected


def test_equal_arguments_give_equal_bytes() -> None:
    assert render_card(recipe(), Inherited(), REPORT) == render_card(recipe(), Inherited(), REPORT)


@pytest.mark.parametrize(
    ("card", "files", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", ["LICENSE"], ("apache-2.0", None, None)),
        (
            "---\nlicense: other\nlicense_name: qwen\nlicense_link: https://x.org/l\n---\n",
            [],
            ("other", "qwen", "https://x.org/l"),
        ),
        ("---\nlicense: other\n---\n", ["LICENSE.txt"], ("other", "as-in-the-source", "LICENSE.txt")),
        ("# no metadata\n", ["LICENCE"], ("other", "as-in-the-source", "LICENCE")),
        ("# no metadata\n", [], (None, None, None)),
        ("---\nlicense: [not, text\n---\n", [], (None, None, None)),  # damaged YAML
        ("---\n- a list\n---\n", [], (None, None, None)),
        ("---\nlicense: 'Ask me! '\n---\n", [], (None, None, None)),  # the Hub would refuse it
    ],
)
def test_the_licence_is_inherited(
    tmp_path: Path, card: str, files: list[str], expected: tuple[str | None, str | None, str | None]
) -> None:
    (tmp_path / "README.md").write_text(card)
    for name in files:
        (tmp_path / name).write_text("text")
    inherited = read_inherited(tmp_path)
    assert (inherited.licence, inherited.licence_name, inherited.licence_link) == expected
    check(render_card(recipe(), inherited, REPORT))


def test_other_without_a_licence_file_points_at_the_source(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: other\n---\n")
    inherited = read_inherited(tmp_path)
    metadata = check(render_card(recipe(), inherited, REPORT))
    assert metadata["license_link"] == "https://huggingface.co/org/Llama-3.1-8B-Instruct"
    assert "license" not in check(render_card(recipe("folder", None), inherited, REPORT))


def test_only_valid_languages_are_inherited(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlanguage: [en, English, code, 7, zho]\n---\n")
    assert read_inherited(tmp_path).languages == ("en", "code", "zho")
    (tmp_path / "README.md").write_text("---\nlanguage: fr\n---\n")
    assert read_inherited(tmp_path).languages == ("fr",)


def test_the_checks_can_fail() -> None:
    text = render_card(recipe(), Inherited("other", "a-name", "https://x.org"), REPORT)
    with pytest.raises(KeyError):
        check(text.replace("license_name", "pipeline_tag"))
    with pytest.raises(AssertionError):
        check(render_card(recipe(), Inherited(), REPORT).replace("org/Llama-3.1-8B-Instruct", "folder"))
