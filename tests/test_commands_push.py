"""``wisparse push`` and reading a bundle back by its Hub id, as a user does it: one process each, a real bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_maker import make_bundle
from hub_standin import TOKEN, Fault, HubStandIn, point_client_at
from huggingface_hub import constants
from runtime_models import make_checkpoint

from wisparse.cli import main
from wisparse.formats.bundle import Bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    return make_bundle(make_checkpoint("llama", folder / "source"), folder / "bundle")


@pytest.fixture
def standin() -> Iterator[HubStandIn]:
    with HubStandIn().running() as server:
        yield server


def wisparse(standin: HubStandIn, home: Path, *args: object, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": standin.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        **extra,
    }
    command = [sys.executable, "-m", "wisparse", *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def test_push_then_use_by_hub_id_on_another_cache(standin: HubStandIn, bundle: Path, tmp_path: Path) -> None:
    pushed = wisparse(standin, tmp_path / "one", "push", bundle, "alice/tiny-50", "--private", "--json")
    assert pushed.returncode == 0, pushed.stderr
    assert json.loads(pushed.stdout)["url"] == f"{standin.url}/alice/tiny-50"
    assert standin.repos["alice/tiny-50"].private
    assert TOKEN not in pushed.stdout + pushed.stderr
    inspected = wisparse(standin, tmp_path / "two", "inspect", "alice/tiny-50", "--json")
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)["projections"][0]["name"] == next(iter(Bundle.open(bundle).masks))
    before = len(standin.requests)
    offline = wisparse(standin, tmp_path / "two", "verify", "alice/tiny-50", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert len(standin.requests) == before
    commit = standin.repos["alice/tiny-50"].commits[0][0]
    empty = wisparse(standin, tmp_path / "two", "inspect", "alice/tiny-50", "--revision", commit)
    assert empty.returncode == 4, empty.stderr
    assert "holds no model at revision" in empty.stderr
    assert "it/s" not in inspected.stderr + empty.stderr  # progress bars are for terminals


def in_process(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Exit code and stderr of the command line."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    return int(caught.value.code or 0), capsys.readouterr().err


def test_a_failed_push_exits_with_7_and_keeps_the_bundle(
    standin: HubStandIn,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    point_client_at(standin, tmp_path / "cache", monkeypatch)
    for status in (403, 500):
        standin.faults[:] = [Fault(r"POST .*/commit/", status, times=99)]
        code, said = in_process(capsys, "push", bundle, "alice/tiny-50")
        assert code == 7, said
        assert said.rstrip().endswith(f"repeat with: wisparse push {bundle} alice/tiny-50")
        Bundle.open(bundle)
    standin.faults.clear()
    assert in_process(capsys, "push", bundle, "alice/tiny-50")[0] == 0


def test_permission_comes_before_everything_else(
    standin: HubStandIn,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    point_client_at(standin, tmp_path / "cache", monkeypatch)
    code, said = in_process(capsys, "push", bundle, "bob/tiny-50")
    assert code == 4, said
    assert "'alice', who may not create repositories under 'bob'" in said
    assert not standin.seen("PUT|POST")
    assert in_process(capsys, "push", tmp_path / "nothing", "alice/tiny-50")[0] == 4
    assert in_process(capsys, "push", bundle, "tiny-50")[0] == 2
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.devnull)
    code, said = in_process(capsys, "push", bundle, "alice/tiny-50")
    assert code == 4, said
    assert "hf auth login" in said
