"""``wisparse push`` and reading a bundle back by its Hub id, as a user does it."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hub_standin import TOKEN, Fault, HubStandIn, point_client_at
from huggingface_hub import ModelCard, constants
from tiny_bundle import files_of, write_tiny_model

import wisparse
from wisparse.formats.bundle import Bundle

# The client's own way of sending bytes, on the plain path.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def bundle(variant_bundle: Callable[[str], Path]) -> Path:
    return variant_bundle("llama")


@pytest.fixture
def standin() -> Iterator[HubStandIn]:
    with HubStandIn().running() as server:
        yield server


def command(standin: HubStandIn, home: Path, *args: object, **extra: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": standin.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    environment = {**os.environ, **settings, **extra}
    line = [sys.executable, "-m", "wisparse", *map(str, args)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200)


def test_push_through_the_xet_client(standin: HubStandIn, bundle: Path, tmp_path: Path) -> None:
    """Large files of today's Hub go to its content-addressed storage, by a client of its own."""
    pytest.importorskip("hf_xet")
    files = files_of(bundle)
    large = [content for name, content in files.items() if name.endswith(".safetensors")]
    storage = standin.xet = tmp_path / "storage"
    storage.mkdir()
    standin.known = {hashlib.sha256(content).hexdigest(): content for content in large}
    settings = {"HF_HUB_DISABLE_XET": "0", "HF_XET_CACHE": str(tmp_path / "xet")}
    pushed = command(standin, tmp_path / "one", "push", bundle, "alice/tiny-50", **settings)
    assert pushed.returncode == 0, pushed.stderr
    assert not standin.seen("PUT /storage/")  # not by the older protocol
    arrived = {file.name: file.stat().st_size for file in storage.rglob("default.*")}
    assert 0.7 < sum(arrived.values()) / sum(map(len, large)) < 1.1  # it compresses a little
    commits = standin.repos["alice/tiny-50"].commits
    assert {name: content for name, content in commits[-1][1].items() if name != ".gitattributes"} == files
    again = command(standin, tmp_path / "one", "push", bundle, "alice/tiny-50", **settings)
    assert again.returncode == 0, again.stderr
    assert len(commits) == 2  # nothing to commit, and nothing to send
    assert {file.name: file.stat().st_size for file in storage.rglob("default.*")} == arrived


def test_a_hub_without_xet_is_told_how_to_go_on(standin: HubStandIn, bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    pushed = command(standin, tmp_path / "one", "push", bundle, "alice/tiny-50", HF_HUB_DISABLE_XET="0")
    assert pushed.returncode == 7
    assert "HF_HUB_DISABLE_XET=1" in pushed.stderr
    assert pushed.stderr.rstrip().endswith(f"repeat with: wisparse push {bundle} alice/tiny-50")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run: Run, standin: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    point_client_at(standin, tmp_path / "cache", monkeypatch)

    def run_here(*args: object) -> tuple[int, str, str]:
        code, out, said = run(*args)
        assert not any(rate in said for rate in ("B/s", "it/s"))  # no terminal, no progress bars
        assert TOKEN not in out + said
        return code, out, said

    return run_here


def test_push_then_use_by_hub_id_on_another_cache(
    standin: HubStandIn, bundle: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, said = run("push", bundle, "alice/tiny-50", "--private", "--json")
    assert code == 0, said
    assert json.loads(out)["url"] == f"{standin.url}/alice/tiny-50"
    assert standin.repos["alice/tiny-50"].private
    point_client_at(standin, tmp_path / "another", monkeypatch)
    code, out, said = run("inspect", "alice/tiny-50", "--json")
    assert code == 0, said
    assert json.loads(out)["levels"][0]["projections"][0]["name"] == next(iter(Bundle.open(bundle).masks))
    code, _, said = run("verify", "alice/tiny-50")
    assert (code, "note:" in said) == (0, False), said  # of pictures, say, which are not fetched
    commit = standin.repos["alice/tiny-50"].commits[0][0]
    code, _, said = run("inspect", "alice/tiny-50", "--revision", commit)
    assert (code, "holds no model at revision" in said) == (4, True), said


def test_a_dry_run_shows_what_would_go(standin: HubStandIn, bundle: Path, tmp_path: Path, run: Run) -> None:
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    (copy / "notes.txt").write_text("mine")
    code, out, said = run("push", copy, "alice/tiny-50", "--dry-run")
    assert (code, said) == (0, "")
    assert "for alice/tiny-50 (nothing was uploaded)" in out
    assert "notes.txt" not in out
    found = json.loads(run("push", copy, "alice/tiny-50", "--dry-run", "--json")[1])
    assert found["files"] == {name: (copy / name).stat().st_size for name in files_of(bundle)}
    assert found["num_bytes"] == sum(found["files"].values())
    assert run("push", copy, "tiny-50", "--dry-run")[0] == 2
    assert standin.requests == []


def test_what_is_pushed_and_what_not_is_said(
    standin: HubStandIn, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(bundle, mine)
    (mine / "notes\x1b[2J.txt").write_text("mine")
    code, _, said = run("push", mine, "bob/tiny-50")
    assert (code, "'alice', who may not create repositories under 'bob'" in said) == (4, True), said
    assert not standin.seen("PUT|POST")  # permission comes before everything else
    assert (run("push", tmp_path / "nothing", "alice/tiny-50")[0], run("push", mine, "tiny-50")[0]) == (4, 2)
    code, _, said = run("push", mine, "alice/tiny-50")
    assert code == 0, said
    assert "left out, not part of the bundle: notes\N{REPLACEMENT CHARACTER}[2J.txt" in said
    assert "MB, to alice/tiny-50" in said
    (mine / "notes\x1b[2J.txt").unlink()
    code, _, said = run("push", mine, "alice/tiny-50")
    assert code == 0, said
    assert "nothing to upload: alice/tiny-50 holds all" in said
    assert "MB" not in said
    code, _, said = run("push", mine, "alice/tiny-50", "--private")
    assert code == 4, said
    for words in said.split(": wisparse ", 1)[1].split(", or keep it private under a new name: wisparse "):
        assert run(*shlex.split(words))[0] == 0
    assert standin.repos["alice/tiny-50-private"].private
    monkeypatch.setattr("wisparse.commands.bundles.verify_bundle", Mock(side_effect=KeyboardInterrupt))
    code, _, said = run("push", mine, "alice/tiny-50")
    assert code == 130
    assert said.rstrip().endswith(f"repeat with: wisparse push {mine} alice/tiny-50")


@pytest.mark.usefixtures("quick_conversion")
def test_from_hub_id_to_hub_id(standin: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """From a Hub id to a Hub id, with an upload that breaks off half-way and is repeated as the message says."""
    monkeypatch.chdir(tmp_path)
    files = {file.name: file.read_bytes() for file in write_tiny_model(tmp_path / "model").iterdir()}
    source = standin.add("org/pycode", {**files, "README.md": b"---\nlicense: mit\nlanguage: code\n---\n"})
    convert = ["convert", "org/pycode", "-o", "out", "--upload-repo", "alice/pycode-50", "--search", "uniform"]
    convert += ["--sparsity", "0.5", "--calibration", __file__, "--num-samples", "4", "--seq-len", "24", "--quiet"]
    standin.faults.append(Fault(r"PUT /storage/", None, times=9999, after_bytes=1000))
    code, _, said = run(*convert)
    assert code == 7, said
    retry = said.rstrip().rpartition("repeat with: ")[2]
    assert len(standin.repos["alice/pycode-50"].commits) == 1  # nothing half-done to be seen
    standin.faults.clear()
    assert run(*shlex.split(retry)[1:])[0] == 0
    pushed = standin.repos["alice/pycode-50"].commits
    assert len(pushed) == 2
    files = {name: content for name, content in pushed[-1][1].items() if name != ".gitattributes"}
    assert files == files_of(Path("out"))
    card = ModelCard(files["README.md"].decode()).data
    assert (card.license, card.language, card.library_name) == ("mit", ["code"], "wisparse")
    assert (card.base_model, card.base_model_relation) == ("org/pycode", "quantized")
    assert card.eval_results
    assert Bundle.open("out").recipe.base_revision == source.commits[0][0]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another cache"))
    prompt = ">>> 12 + 30\n"
    there = wisparse.load("alice/pycode-50", device="cpu").generate(prompt, max_new_tokens=12)
    here = wisparse.load("out", device="cpu").generate(prompt, max_new_tokens=12)
    assert there.token_ids == here.token_ids
