"""Damaged and forged bundles, each refused in one sentence or loaded with its meaning intact."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent

# Readers that believe what they are told: no digests.
CREDULOUS = """
import json, sys
sys.path.insert(0, {tests!r})
import hostile
from wisparse.formats import bundle
bundle.is_document = lambda name: True
bundle._read_checked = lambda *file: bundle.guard.read_bounded(*file[:2], 1 << 30, bundle.BundleError)
hostile.MUTATIONS = {{kind: hostile.MUTATIONS[kind] for kind in ("swap_tensors", "flip_bits", "bad_tokenizer")}}
print(json.dumps(hostile.run([f"0:{{index}}" for index in range(60)], seconds=20)))
"""


def _run(*command: str) -> tuple[dict[str, Any], str]:
    # One process of its own: it limits its memory and listens to the alarm clock.
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=1700)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("cases", "seed"), [(150, 0), pytest.param(850, 1, marks=pytest.mark.exhaustive)])
def test_hostile_bundles(cases: int, seed: int) -> None:
    summary, stderr = _run(str(TESTS / "hostile.py"), "--cases", str(cases), "--seed", str(seed))
    assert summary["failures"] == [], stderr[-3000:]
    assert summary["cases"] == cases
    assert set(summary["outcomes"]) == {"refused", "identical", "unverified", "forged"}
    assert all(sum(counts.values()) > 0 for counts in summary["by_kind"].values())


@pytest.mark.exhaustive
def test_the_harness_sees_readers_that_check_nothing() -> None:
    summary, _ = _run("-c", CREDULOUS.format(tests=str(TESTS)))
    assert any("other tokens or meaning than the intact bundle" in failure["error"] for failure in summary["failures"])
