"""Throws damaged and forged bundles at every reader, and fails if one of them is taken badly.

    python tests/hostile.py --cases 10000 --seed 0        # prints progress, then one JSON document
    python tests/hostile.py --only 0:17,1:3               # these again: case 17 of seed 0, case 3 of seed 1

A case copies a small bundle, damages the copy in one to three ways (``hostile_mutations``), in half of the cases makes
all digests fit again as a forger would, and gives it to ``verify``, to ``load`` with generation, and now and then to
the commands. Some cases do the damage after ``verify``, or between the opening and the reading. What must come out:

    refused      BundleError (exit code 6) from loading, or
    identical    accepted, and the same meaning and the same tokens as the intact bundle, or
    unverified   damage to a weight that is still a number: loading accepts it, ``verify`` refuses it, or
    forged       digests that fit a well-formed bundle of another content: nothing to object to. It generates, or says
                 why it cannot: a prompt that its tokenizer makes empty, or weights that overflow.

Anything else fails the case: another exception, more than ``--seconds`` of processor time for one step, resident memory
that grows by more than ``--megabytes`` (or address space beyond a few gigabytes), a file touched, other tokens than the
intact bundle's.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import json
import logging
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from hostile_mutations import MUTATIONS
from quantised_models import PUBLISHED, quantise_model
from tiny_bundle import resign, tiny_config, write_tiny_bundle, write_tiny_model

from wisparse.cli import main as command_line
from wisparse.formats.bundle import Bundle
from wisparse.formats.card import check_amendable
from wisparse.formats.errors import BundleError, UsageError, WisparseError
from wisparse.formats.verify import verify_bundle
from wisparse.runtime.backends import load
from wisparse.runtime.tokenizer import check_tokenizer

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 64,
}
PROMPTS: tuple[Any, ...] = ([1, 2, 3, 4, 5], "def f(x):", [{"role": "user", "content": "hi"}])


# What a damage, or signing again, meets where an earlier damage was thorough.
_TOO_BROKEN = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, struct.error)


class _TooSlow(BaseException):
    """Not an Exception: nothing under test may catch it."""


def build(folder: Path) -> list[Path]:
    """The intact bundles."""
    kinds: dict[str, tuple[dict[str, Any], torch.dtype]] = {
        "llama": (tiny_config("llama"), torch.float32),
        "qwen3": (tiny_config("qwen3", tie_word_embeddings=False, dtype="bfloat16"), torch.bfloat16),
        "phi3": (tiny_config("phi3", rope_parameters=LONGROPE), torch.float32),
    }
    stored = {
        "int4": "pack int4 groups, zero points",
        "int8": "pack int8 rows",
        "fp8": "fp8 blocks, as DeepSeek's",
        "gptq": "gptq",
        "awq": "awq",
    }
    kinds |= {name: (tiny_config("llama"), torch.float32) for name in stored}
    bundles = []
    for name, (config, dtype) in kinds.items():
        model = write_tiny_model(folder / f"{name}-model", config, dtype=dtype)
        if name in stored:
            model = quantise_model(model, folder / f"{name}-quantised", *PUBLISHED[stored[name]]())
        levels = (0.3, 0.5, 0.7) if name in ("qwen3", "int8") else (0.5,)
        card = {"README.md": b"# Card\n"}
        bundles.append(write_tiny_bundle(folder / name, model, *levels, max_shard_size="24KB", extra_files=card))
    return bundles


def meaning(bundle: Bundle) -> str:
    """Digest of all that decides what a bundle answers."""
    digest = hashlib.sha256()
    digest.update(json.dumps([bundle.config_dict, bundle.recipe.to_dict()], sort_keys=True).encode())
    for masks in bundle.levels.values():
        for name, mask in masks.items():
            digest.update(f"{name} {mask.threshold!r} {mask.sparsity!r}".encode())
            digest.update(mask.channel_scale.numpy().tobytes())
    for name in bundle.checkpoint.tensors:
        tensor = bundle.checkpoint.tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        digest.update(bundle.read_bytes(name) or b"")
    return digest.hexdigest()


def answers(folder: Path) -> list[tuple[int, ...] | str]:
    """What the bundle generates, or the sentence that says why it does not."""
    model = load(folder, device="cpu", backend="torch", max_seq_len=32)
    found: list[tuple[int, ...] | str] = []
    for prompt in PROMPTS:
        try:
            found.append(model.generate(prompt, max_new_tokens=4, prefill="all").token_ids)
        except BundleError:
            raise
        except WisparseError as error:  # the prompt does not fit, or the weights overflow
            found.append(f"refused: {error}")
    return found


def verify(folder: Path) -> None:
    """What the command does."""
    verify_bundle(folder)
    check_tokenizer(Bundle.open(folder))


def amendable(folder: Path) -> None:
    """What ``--save`` asks first."""
    with contextlib.suppress(UsageError):  # a folder that holds what is not the bundle's
        check_amendable(folder)


def _state(folder: Path) -> list[tuple[Any, ...]]:
    """Names, kinds, sizes and times of everything in a folder: reading must change none."""
    found = []
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            status = os.lstat(os.path.join(root, name))
            found.append((root, name, status.st_mode, status.st_size, status.st_mtime_ns))
    return sorted(found)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def alarm(*_: Any) -> None:
        raise _TooSlow(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # Where a C function does not let the signal through.
    faulthandler.dump_traceback_later(10 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _after_opening(act: Callable[[], None]) -> Iterator[None]:
    """Do something to the files right after ``Bundle.open``, before its caller reads weights."""
    plain = Bundle.open

    def opened(folder: Any) -> Bundle:
        bundle = plain(folder)
        act()
        return bundle

    Bundle.open = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bundle.open = plain  # type: ignore[method-assign]


class _Memory:
    """How far resident memory rises from here on."""

    def __init__(self) -> None:
        self._linux = Path("/proc/self/clear_refs").exists()
        if self._linux:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self._start = self._read("VmRSS")

    @staticmethod
    def _read(key: str) -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{key}:")[1].split()[0]) / 1024

    def growth_mb(self) -> float:
        return max(self._read("VmHWM") - self._start, 0) if self._linux else 0


class Case:
    """One damaged copy and what became of it."""

    def __init__(self, seed: str, intact: Path, wanted: tuple[str, list[Any]], room: Path) -> None:
        self.random = Random(seed)
        self.intact = intact
        self.meaning, self.answers = wanted
        self.folder = room / "case" / "bundle"
        self.growth_mb = 0.0
        self.slowest_s = 0.0
        self.damage: list[str] = []
        self.kinds: list[str] = []
        self.when = self.random.choices(["before", "after verify", "after opening"], [8, 1, 1])[0]
        self.forged = self.when == "before" and self.random.random() < 0.5

    def run(self, commands: bool) -> str:
        """Returns what came out; raises what should not."""
        (self.folder.parent / "outside").mkdir(parents=True)
        shutil.copytree(self.intact, self.folder, symlinks=True)
        if self.when == "before":
            self._damage()
        if self.when == "after verify":
            verify(self.folder)
            self._damage()
        before = _state(self.folder.parent) if self.when != "after opening" else None
        verified = self._try(lambda: verify(self.folder) or True)
        act = self._damage if self.when == "after opening" else lambda: None
        with _after_opening(act) if self.when == "after opening" else contextlib.nullcontext():
            loaded = self._try(lambda: answers(self.folder))
        opened = self._try(lambda: meaning(Bundle.open(self.folder)))
        self._try(lambda: amendable(self.folder))
        if commands:
            self._commands(refused=verified is None if self.when != "after opening" else None)
        if before is not None and _state(self.folder.parent) != before:
            raise AssertionError("a reader changed the folder")
        if loaded is None:
            return "refused"
        if loaded == self.answers and (opened in (None, self.meaning) or self.forged):
            return "identical"
        if not self.forged:
            if verified is None:
                return "unverified"  # loading looks at headers and finiteness, verify at every byte
            raise AssertionError(f"other tokens or meaning than the intact bundle: {loaded}")
        if verified is None:
            raise AssertionError("load accepts what verify refuses")
        return "forged"

    def _damage(self) -> None:
        # One lie that all digests vouch for gets further than several.
        for _ in range(self.random.choice([1, 1, 1, 2, 3]) if not self.forged else 1):
            kind = self.random.choice(list(MUTATIONS))
            with contextlib.suppress(*_TOO_BROKEN):
                self.kinds.append(kind)
                self.damage.append(f"{kind}: {MUTATIONS[kind](self.random, self.folder)}")
        if self.forged:
            sizes = [file.stat().st_size for file in self.folder.iterdir() if file.is_file()]
            if not sizes or max(sizes) > 64 << 20 or not all(f.is_file() or f.is_dir() for f in self.folder.iterdir()):
                return
            with contextlib.suppress(*_TOO_BROKEN):
                resign(self.folder)

    def _try(self, act: Callable[[], Any]) -> Any:
        """The result, or None for a proper refusal."""
        memory = _Memory()
        used = _processor_seconds()
        try:
            return act()
        except BundleError as error:
            text = str(error)
            if not text or "\n" in text or len(text) > 1500 or not text.isprintable():
                raise AssertionError(f"not one clear sentence: {text!r:.2000}") from error
            return None
        finally:
            self.slowest_s = max(self.slowest_s, _processor_seconds() - used)
            self.growth_mb = max(self.growth_mb, memory.growth_mb())

    def _commands(self, refused: bool | None) -> None:
        for args in (
            ["verify"],
            ["inspect"],
            ["generate", "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"],
        ):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    command_line([args[0], str(self.folder), *args[1:]])
                except SystemExit as status:
                    code = status.code or 0
            unlike = args[0] == "verify" and refused is not None and refused != (code == 6)
            # A forged tokenizer may make the prompt empty (2), forged weights may overflow (1).
            expected = (0, 1, 2, 6) if self.forged and args[0] == "generate" else (0, 6)
            if code not in expected or unlike or "Traceback" in err.getvalue():
                raise AssertionError(f"wisparse {args[0]}: exit code {code}, stderr {err.getvalue()[-500:]!r}")


def run(cases: int, seed: int, seconds: float, megabytes: float, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run cases ``seed:0`` to ``seed:cases-1`` (or ``only`` some, each ``seed:case``) and summarise."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    outcomes: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in MUTATIONS}
    failures: list[dict[str, Any]] = []
    slowest: list[tuple[float, str]] = []
    base = Path(tempfile.mkdtemp(prefix="hostile-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        bundles = build(base / "intact")
        wanted = [(meaning(Bundle.open(bundle)), answers(bundle)) for bundle in bundles]
        _limit_memory()
        for name in only or [f"{seed}:{index}" for index in range(cases)]:
            index = int(name.split(":")[1])
            kind = index % len(bundles)
            case = Case(name, bundles[kind], wanted[kind], base)
            try:
                with _time_limit(20 * seconds):
                    outcome = case.run(commands=index % 20 == 0)
                if case.growth_mb > megabytes:
                    raise AssertionError(f"resident memory rose by {case.growth_mb:.0f} MB")
                if case.slowest_s > seconds:
                    raise AssertionError(f"one step took {case.slowest_s:.1f} s")
            except (Exception, _TooSlow) as error:
                outcome = "failed"
                trace = traceback.format_exception(error)[-4:]
                failures.append({"case": name, "damage": case.damage, "when": case.when, "forged": case.forged,
                                 "error": f"{type(error).__name__}: {error!s:.300}"})  # fmt: skip
                print(f"case {name} {case.damage} {case.when} forged={case.forged}\n{''.join(trace)}", file=sys.stderr)
            finally:
                shutil.rmtree(base / "case", ignore_errors=True)
            slowest.append((round(case.slowest_s, 2), f"{name} {'; '.join(case.damage)[:120]}"))
            outcomes[outcome] += 1
            for kind in set(case.kinds):
                by_kind[kind][outcome] += 1
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return {
        "cases": sum(outcomes.values()),
        "outcomes": dict(sorted(outcomes.items())),
        "by_kind": {kind: dict(sorted(counts.items())) for kind, counts in sorted(by_kind.items())},
        "slowest": sorted(slowest, reverse=True)[:10],
        "failures": failures[:50],
    }


def _processor_seconds() -> float:
    """Of this process and of its children that have ended: unlike the clock, no matter what else the machine does."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _limit_memory(gigabytes: float = 4.0) -> None:
    """An allocation beyond this fails at once, as a MemoryError that counts as a failure, and spares the machine."""
    if not sys.platform.startswith("linux"):
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(gigabytes * 2**30),) * 2)


if __name__ == "__main__":
    # Ended from outside, it still takes its scratch folder with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of processor time a step may take")
    parser.add_argument("--megabytes", type=float, default=400, help="of memory a reader may add")
    parser.add_argument("--only", metavar="SEED:CASE,...", default="", help="run these cases")
    arguments = parser.parse_args()
    only = list(filter(None, arguments.only.split(",")))
    summary = run(arguments.cases, arguments.seed, arguments.seconds, arguments.megabytes, only)
    print(json.dumps(summary, indent=1))
    sys.exit(1 if summary["failures"] else 0)
