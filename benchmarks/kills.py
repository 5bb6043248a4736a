"""Kill conversions of a tiny model at random moments and run them again: do they end with the same bytes?

    python benchmarks/kills.py --kills 300 --out benchmarks/results/kills.json

SIGKILL, SIGTERM and SIGINT, into a new folder and over an old bundle (``--overwrite``) that differs from the new one in
its licence, template and end token alone, so that neither settings nor recipe tell them apart. Half of the kills come
at a random time, half at a random step of writing to the disk, most of these while the bundle is written and swapped
in. A run is killed up to three times before it may finish. Afterwards the bundle must have the bytes of an undisturbed
conversion, and nothing may lie beside it.

The conversions are those of a plain install, without pictures. ``--first`` goes on with the numbering of an earlier
run; the results of several runs into one file are added up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from tiny_bundle import tiny_config, write_tiny_model  # noqa: E402

SEARCHES: dict[str, dict[str, Any]] = {
    "fisher": {"max_kl": 5e-3},
    "refine": {"sparsity": [0.4, 0.5], "num_samples": 24},  # enough tokens for three steps
    "additive": {"sparsity": 0.5},
    "paper": {"sparsity": 0.5, "num_generations": 3, "num_offspring": 3},
    "uniform": {"sparsity": 0.5},
}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")


class Harness:
    """tests/kill_conversion.py, one process for all attempts."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, TESTS / "kill_conversion.py", "--plain"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, settings: dict[str, Any], kill: Any) -> dict[str, Any]:
        """One attempt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"settings": settings, "kill_at": [kill]}), file=self._process.stdin, flush=True)
        attempts: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return attempts[0]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def digests(bundle: Path) -> dict[str, str]:
    """Every file of a folder, hidden ones too, and its sha256."""
    return {
        str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(bundle.rglob("*"))
        if path.is_file()
    }


def is_over(out: Path, expected: dict[str, str]) -> bool:
    """Whether the bundle is the right one, and alone."""
    return [path.name for path in out.parent.iterdir()] == [out.name] and digests(out) == expected


def choose_kill(choose: random.Random, reference: dict[str, Any]) -> dict[str, Any]:
    """A signal, at a random time or at a random step; the last steps are those of writing the bundle."""
    kill: dict[str, Any] = {"signal": choose.choice(SIGNALS)}
    if choose.random() < 0.5:
        return kill | {"after": choose.uniform(0, reference["seconds"])}
    points, writing = len(reference["labels"]), reference["writing"]
    return kill | {"point": choose.randint(writing, points) if choose.random() < 0.8 else choose.randint(1, points)}


def run(harness: Harness, home: Path, first: int, kills: int, seconds: float) -> dict[str, Any]:
    """Trials until so many kills hit, or the time is over."""
    model = write_tiny_model(home / "tiny", tiny_config(num_hidden_layers=3))
    former = write_tiny_model(home / "former" / "tiny", tiny_config(num_hidden_layers=3))
    (former / "LICENSE").write_text("another licence\n")
    (former / "chat_template.jinja").write_text("{{ messages }}")
    (former / "generation_config.json").write_text('{"eos_token_id": 7}')
    references: dict[str, dict[str, Any]] = {}
    counted: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    started, trial = time.monotonic(), first
    while counted["kills"] < kills and time.monotonic() - started < seconds:
        choose = random.Random(f"kills {trial}")
        search, overwrite = choose.choice(list(SEARCHES)), choose.random() < 0.5
        settings = {
            "model": str(model),
            "search": search,
            "method": "teal" if search == "uniform" else "wisparse",
            "num_samples": 4,
            "seq_len": 24,
            "device": "cpu",
            **SEARCHES[search],
        }
        if search not in references:
            references[search] = _reference(harness, home, settings, former)
        reference = references[search]
        folder = home / "trial"
        out = folder / "out"
        folder.mkdir()
        if overwrite:
            shutil.copytree(reference["former"], out)
        settings |= {"output_dir": str(out), "overwrite": overwrite}
        passed: list[Any] = []
        for kill in [*(choose_kill(choose, reference) for _ in range(choose.randint(1, 3))), None]:
            status = harness.ask(settings, kill)["status"]
            passed.append([kill, status])
            if kill is not None and status != 0:
                counted["kills"] += 1
                counted[kill["signal"]] += 1
                counted["overwrite" if overwrite else "new folder"] += 1
                counted["at a step" if "point" in kill else "at a time"] += 1
            # Killed after the last trace was gone, a conversion is over.
            if status == 0 or is_over(out, reference["digests"]):
                break
        if not is_over(out, reference["digests"]):
            left = sorted(path.name for path in folder.iterdir())
            failures.append({"trial": trial, "search": search, "overwrite": overwrite, "passed": passed, "left": left})
        counted["trials"] += 1
        counted[f"search {search}"] += 1
        shutil.rmtree(folder)
        trial += 1
    return {"first": first, "next": trial, "seconds": round(time.monotonic() - started, 1), **counted} | {
        "failures": failures
    }


def _reference(harness: Harness, home: Path, settings: dict[str, Any], former: Path) -> dict[str, Any]:
    """The undisturbed conversion, and the bundle that is overwritten."""
    out = home / f"undisturbed-{settings['search']}"
    found = harness.ask({**settings, "output_dir": str(out)}, None)
    old = home / f"former-{settings['search']}"
    assert harness.ask({**settings, "model": str(former), "output_dir": str(old)}, None)["status"] == 0
    assert found["status"] == 0
    assert digests(out).keys() == digests(old).keys()
    assert digests(out) != digests(old)
    writing = next(index for index, label in enumerate(found["labels"]) if "OUT.partial" in label)
    return {**found, "writing": writing + 1, "digests": digests(out), "former": old}


def main() -> None:
    """Run, add to the file, print the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial; it is the seed, too")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after this time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    harness = Harness()
    with tempfile.TemporaryDirectory() as home:
        piece = run(harness, Path(home), options.first, options.kills, options.seconds)
    harness.close()
    pieces = [piece]
    if options.out is not None and options.out.exists():
        pieces = [*json.loads(options.out.read_text())["pieces"], piece]
    total: Counter[str] = Counter()
    for one in pieces:
        total.update({key: value for key, value in one.items() if key not in ("first", "next", "failures")})
    summary = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "total": dict(total) | {"failed trials": sum(len(one["failures"]) for one in pieces)},
        "pieces": pieces,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary["total"]))
    sys.exit(1 if piece["failures"] else 0)


if __name__ == "__main__":
    main()
