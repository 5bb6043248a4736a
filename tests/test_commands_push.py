"""``wisparse push`` and reading a bundle back by its Hub id, as a user does it: one process each, a real bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_maker import make_bundle, make_checkpoint
from hub_standin import TOKEN, Fault, HubStandIn

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


def test_a_failed_push_exits_with_7_and_keeps_the_bundle(standin: HubStandIn, bundle: Path, tmp_path: Path) -> None:
    # A refusal, not a passing failure: those are waited for, which takes the better part of a minute.
    standin.faults.append(Fault(r"POST .*/commit/", 403, times=99))
    failed = wisparse(standin, tmp_path / "home", "push", bundle, "alice/tiny-50")
    assert failed.returncode == 7, failed.stderr
    assert failed.stderr.rstrip().endswith(f"repeat with: wisparse push {bundle} alice/tiny-50")
    assert "Traceback" not in failed.stderr
    Bundle.open(bundle)


def test_permission_comes_before_everything_else(standin: HubStandIn, bundle: Path, tmp_path: Path) -> None:
    refused = wisparse(standin, tmp_path / "home", "push", bundle, "bob/tiny-50")
    assert refused.returncode == 4, refused.stderr
    assert "'alice', who may not create repositories under 'bob'" in refused.stderr
    assert not standin.seen("PUT|POST")
    stranger = wisparse(standin, tmp_path / "home", "push", bundle, "alice/tiny-50", HF_TOKEN="")
    assert stranger.returncode == 4, stranger.stderr
    assert "hf auth login" in stranger.stderr
    missing = wisparse(standin, tmp_path / "home", "push", tmp_path / "nothing", "alice/tiny-50")
    assert missing.returncode == 4, missing.stderr
    spelling = wisparse(standin, tmp_path / "home", "push", bundle, "tiny-50")
    assert spelling.returncode == 2, spelling.stderr
