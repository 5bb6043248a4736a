"""Throws damaged and forged bundles at every reader, and fails if one of them is taken badly.

    python tests/hostile.py 0:17 1:3        # case 17 of seed 0, case 3 of seed 1; prints one JSON document

A case copies a small bundle, damages the copy in one to three ways (``hostile_mutations``), before or after ``verify``,
or between opening and reading; often it makes all digests fit again, as a forger would. What must come out:

    refused      BundleError (exit code 6) from loading, or
    identical    accepted, and the same meaning and the same tokens as the intact bundle, or
    unverified   damage to a weight that is still a number: loading accepts it, ``verify`` refuses it, or
    forged       digests that fit a well-formed bundle of another content. It generates, or says why it cannot.

Anything else fails the case, as does a step that takes more than `SECONDS` of processor time or `MEGABYTES` of memory,
and a reader that changes a file.
"""

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
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from hostile_mutations import MUTATIONS, TOO_BROKEN
from quantised_models import PUBLISHED, quantise_model
from tiny_bundle import resign, tiny_config, write_tiny_bundle, write_tiny_model

from wisparse import BundleError, UsageError, WisparseError, load
from wisparse.cli import main as command_line
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.card import check_amendable
from wisparse.runtime.tokenizer import check_tokenizer

SECONDS = 5.0
MEGABYTES = 400
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
PROMPTS: tuple[Any, ...] = ([1, 2, 3, 4, 5], "def f(x):", [{"role": "user", "content": "hi"}])
STORED = ("pack int4 groups, zero points", "pack int8 rows", "fp8 blocks, as DeepSeek's", "gptq", "awq")


class _TooSlow(BaseException):
    """Not an Exception: nothing under test may catch it."""


def build(folder: Path) -> list[Path]:
    """The intact bundles: three plain ones, and one for each way of `STORED`."""
    kinds: list[tuple[dict[str, Any], torch.dtype, str | None]] = [
        (tiny_config("llama"), torch.float32, None),
        (tiny_config("qwen3", tie_word_embeddings=False, dtype="bfloat16"), torch.bfloat16, None),
        (tiny_config("phi3", rope_parameters=LONGROPE), torch.float32, None),
        *((tiny_config("llama"), torch.float32, stored) for stored in STORED),
    ]
    bundles = []
    for index, (config, dtype, stored) in enumerate(kinds):
        model = write_tiny_model(folder / f"model-{index}", config, dtype=dtype)
        if stored is not None:
            model = quantise_model(model, folder / f"quantised-{index}", *PUBLISHED[stored]())
        levels = (0.3, 0.5, 0.7) if index in (1, 4) else (0.5,)
        card = {"README.md": b"# Card\n"}
        bundles.append(write_tiny_bundle(folder / f"{index}", model, *levels, max_shard_size="24KB", extra_files=card))
    return bundles


def meaning(bundle: Bundle) -> str:
    """Digest of all that decides what a bundle answers."""
    digest = hashlib.sha256(json.dumps([bundle.config_dict, bundle.recipe.to_dict()], sort_keys=True).encode())
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
    try:
        model = load(folder, device="cpu", backend="torch", max_seq_len=32)
    except UsageError as error:  # a forged context that is shorter
        return [f"refused: {error}"]
    found: list[tuple[int, ...] | str] = []
    for prompt in PROMPTS:
        try:
            found.append(model.generate(prompt, max_new_tokens=4, prefill="all").token_ids)
        except BundleError:
            raise
        except WisparseError as error:  # the prompt does not fit, or the weights overflow
            found.append(f"refused: {error}")
    return found


def verify(folder: Path) -> bool:
    verify_bundle(folder)
    check_tokenizer(Bundle.open(folder))
    return True


def _state(folder: Path) -> list[tuple[Any, ...]]:
    """Names, kinds, sizes and times of everything in a folder: reading must change none."""
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(path, status.st_mode, status.st_size, status.st_mtime_ns) for path, status in found]


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


def _attempt(act: Callable[[], Any], seconds: float) -> Any:
    """The result, or None for a proper refusal; within the limits of time and memory."""
    status, on_linux = Path("/proc/self/status"), Path("/proc/self/clear_refs").exists()

    def megabytes(key: str) -> float:
        return int(status.read_text().split(f"{key}:")[1].split()[0]) / 1024 if on_linux else 0.0

    def used() -> float:  # of this process and its ended children, no matter what else the machine does
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in both)

    if on_linux:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    memory, started = megabytes("VmRSS"), used()
    try:
        result = act()
    except BundleError as error:
        text, result = str(error), None
        if not text or "\n" in text or len(text) > 1500 or not text.isprintable():
            raise AssertionError(f"not one clear sentence: {text!r:.2000}") from error
    growth, taken = megabytes("VmHWM") - memory, used() - started
    if growth > MEGABYTES or taken > seconds:
        raise AssertionError(f"one step took {taken:.1f} s, and memory rose by {growth:.0f} MB")
    return result


def _commands(folder: Path, forged: bool, refused: bool | None) -> None:
    for args in (["verify"], ["inspect"], ["generate", "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command_line([args[0], str(folder), *args[1:]])
            except SystemExit as status:
                code = status.code or 0
        unlike = args[0] == "verify" and refused is not None and refused != (code == 6)
        # A forged tokenizer may make the prompt empty (2), forged weights may overflow (1).
        expected = (0, 1, 2, 6) if forged and args[0] == "generate" else (0, 6)
        if code not in expected or unlike or "Traceback" in err.getvalue():
            raise AssertionError(f"wisparse {args[0]}: exit code {code}, stderr {err.getvalue()[-500:]!r}")


def run_case(name: str, intact: Path, wanted: tuple[str, list], folder: Path, done: list[str], seconds: float) -> str:
    """Returns what came out of case ``name``; raises what should not. ``done`` gets the damage, as ``kind: what``."""
    random = Random(name)
    when = random.choices(["before", "after verify", "after opening"], [8, 1, 1])[0]
    forged = when == "before" and random.random() < 0.5
    shutil.copytree(intact, folder, symlinks=True)
    shutil.copytree(intact, folder.parent / "outside")

    def damage() -> None:
        # One lie that all digests vouch for gets further than several.
        for _ in range(1 if forged else random.choice([1, 1, 1, 2, 3])):
            kind = random.choice(list(MUTATIONS))
            done.append(kind)
            with contextlib.suppress(*TOO_BROKEN):
                done[-1] = f"{kind}: {MUTATIONS[kind](random, folder)}"
        if forged:
            files = list(folder.iterdir())
            small = sum(file.stat().st_size for file in files if file.is_file()) < 64 << 20
            if small and all(file.is_file() or file.is_dir() for file in files):
                with contextlib.suppress(*TOO_BROKEN):
                    resign(folder)

    if when == "before":
        damage()
    if when == "after verify":
        verify(folder)
        damage()
    before = _state(folder.parent)
    verified = _attempt(lambda: verify(folder), seconds)
    plain = Bundle.open

    def open_and_damage(path: Any) -> Bundle:
        bundle = plain(path)
        if when == "after opening":
            damage()
        return bundle

    with mock.patch.object(Bundle, "open", open_and_damage):
        loaded = _attempt(lambda: answers(folder), seconds)
    opened = _attempt(lambda: meaning(Bundle.open(folder)), seconds)
    with contextlib.suppress(UsageError):  # a folder that holds what is not the bundle's
        _attempt(lambda: check_amendable(folder), seconds)  # what ``--save`` asks first
    if int(name.split(":")[1]) % 20 == 0:
        _commands(folder, forged, refused=verified is None if when != "after opening" else None)
    if when != "after opening" and _state(folder.parent) != before:
        raise AssertionError("a reader changed the folder")
    if loaded is None:
        return "refused"
    if loaded == wanted[1] and (opened in (None, wanted[0]) or forged):
        return "identical"
    if not forged and verified is None:
        return "unverified"  # loading looks at headers and finiteness, verify at every byte
    if not forged:
        raise AssertionError(f"other tokens or meaning than the intact bundle: {loaded}")
    if verified is None:
        raise AssertionError("load accepts what verify refuses")
    return "forged"


def run(names: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    outcomes: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    base = Path(tempfile.mkdtemp(prefix="hostile-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        bundles = build(base / "intact")
        wanted = [(meaning(Bundle.open(bundle)), answers(bundle)) for bundle in bundles]
        if sys.platform.startswith("linux"):
            # An allocation beyond fails at once, as a MemoryError that counts as a failure, and spares the machine.
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (4 << 30),) * 2)
        for name in names:
            which = int(name.split(":")[1]) % len(bundles)
            done: list[str] = []
            try:
                with _time_limit(20 * seconds):
                    outcome = run_case(name, bundles[which], wanted[which], base / "case" / "bundle", done, seconds)
            except (Exception, _TooSlow) as error:
                outcome = "failed"
                failures.append({"case": name, "damage": done, "error": f"{type(error).__name__}: {error!s:.300}"})
                print(f"case {name} {done}", *traceback.format_exception(error)[-4:], sep="\n", file=sys.stderr)
            finally:
                shutil.rmtree(base / "case", ignore_errors=True)
            outcomes[outcome] += 1
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return {"outcomes": outcomes, "failures": failures[:50]}


if __name__ == "__main__":
    # Ended from outside, it still takes its scratch folder with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(json.dumps(run(sys.argv[1:]), indent=1))
