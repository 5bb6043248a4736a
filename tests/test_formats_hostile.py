"""A thousand damaged and forged bundles, each refused in one sentence or loaded with its meaning intact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import hostile
import hostile_text
import pytest

TESTS = Path(__file__).resolve().parent

# Readers that believe what they are told: no digest, no checksum.
CREDULOUS = """
import json, sys
sys.path.insert(0, {tests!r})
import hostile
from wisparse.formats import bundle, verify
from wisparse.formats.weights import checkpoint
checkpoint.Checkpoint._require = lambda *_: None
verify._check_file = lambda *_: 0
bundle._read_checked = lambda folder, name, manifest: bundle.read_bounded(folder, name, 1 << 30, bundle.BundleError)
hostile.MUTATIONS = {{kind: hostile.MUTATIONS[kind] for kind in ("swap_tensors", "flip_bits", "bad_tokenizer")}}
print(json.dumps(hostile.run(60, 0, 20, 400)))
"""


def _run(*command: str) -> tuple[int, dict[str, Any], str]:
    # One process of its own: it limits its memory and listens to the alarm clock.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=280)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_a_thousand_hostile_bundles() -> None:
    code, summary, stderr = _run(str(TESTS / "hostile.py"), "--cases", "1000", "--seed", "0")
    assert summary["failures"] == [], stderr[-3000:]
    assert code == 0
    assert summary["handled"] == summary["cases"] == 1000
    assert set(summary["outcomes"]) == {"refused", "identical", "forged"}
    assert all(sum(counts.values()) > 10 for counts in summary["by_kind"].values())


@pytest.mark.slow
def test_hostile_chat_templates_and_tokenizers() -> None:
    code, summary, stderr = _run(str(TESTS / "hostile.py"), "--cases", "60", "--seed", "7", "--text")
    assert summary["failures"] == [], stderr[-3000:]
    assert code == 0
    assert summary["outcomes"]["refused"] > 20
    assert summary["outcomes"]["forged"] > 3


def test_the_harness_sees_readers_that_check_nothing() -> None:
    _, summary, _ = _run("-c", CREDULOUS.format(tests=str(TESTS)))
    assert any("other tokens or meaning than the intact bundle" in failure["error"] for failure in summary["failures"])


def test_hostile_sequences_can_be_written_down() -> None:
    for seed in range(10):
        part = hostile_text._sequence(Random(seed), "normalizers", lambda _: {"prepend": "x" * 100_000})
        assert len(str(part)) < 9_000_000, seed


def test_summaries_of_several_runs_are_one() -> None:
    case = {"case": "1:2", "damage": "", "outcome": "failed", "processor_s": 6.0, "wall_s": 7.0, "memory_growth_mb": 3}
    common = {"python": "3.12", "torch": "2", "machine": "x", "cores": 2, "load": 1.5, "total_s": 9, "command": "c"}
    slow = {"slowest_step_processor_s": 6.0, "slowest_step_wall_s": 7.0, "largest_memory_growth_mb": 3}
    one = common | slow | {"cases": 2, "handled": 1, "outcomes": {"failed": 1, "refused": 1}, "slowest": [case] * 6}
    one |= {"by_kind": {"truncate": {"failed": 1}}, "failures": [{"case": "1:2"}]}
    quick = {"slowest_step_processor_s": 0.1, "largest_memory_growth_mb": 8}
    other = one | quick | {"cases": 3, "handled": 3, "outcomes": {"refused": 3}, "by_kind": {}, "failures": []}
    merged = hostile.merge([one, other])
    assert (merged["cases"], merged["handled"], merged["outcomes"]) == (5, 4, {"failed": 1, "refused": 4})
    assert (merged["slowest_step_processor_s"], merged["largest_memory_growth_mb"]) == (6.0, 8)
    assert (merged["by_kind"], len(merged["slowest"])) == ({"truncate": {"failed": 1}}, 10)
    assert merged["failures"] == [{"case": "1:2"}]
    with pytest.raises(ValueError, match="one machine"):
        hostile.merge([one, other | {"cores": 64}])
