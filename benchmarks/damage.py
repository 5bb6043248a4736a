"""Random kills and damaged files: whether each start afterwards works, or says in one sentence what to do.

Each case is one of four:

- ``kill``: a conversion is killed at a random moment, up to five times, then runs to its end. The bundle has the bytes of
  one that was never killed, and no other folder is left.
- ``work``: the same, and after each kill a bit of a random file of the work folder is flipped, or its end cut off.
- ``bundle``: the same damage in a random file of a bundle. Loading it gives the undamaged answer or one sentence; damage
  in the weights, whose digests are not checked at load, is found by ``wisparse verify``.
- ``kernel``: the same damage in the cache of compiled CPU kernels. The answer is the undamaged one.

    python benchmarks/damage.py --cases 500
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import numba
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import wisparse
from wisparse.formats.bundle import verify_bundle
from wisparse.formats.errors import WisparseError
from wisparse.formats.guard import file_digest
from wisparse.kernels.cpu import launch

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "pycode-llama-6m"
SHARES = {"bundle": 0.6, "work": 0.15, "kill": 0.15, "kernel": 0.1}
KERNEL = "dequantize_float32"  # compiled in seconds; all kernels are stored alike
MOST_KILLS = 5


def make_source(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=8192, max_position_embeddings=64))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, folder)
    return folder


def convert(source: Path, out: Path) -> None:
    settings = {"sparsity": [0.3, 0.5], "search": "fisher", "num_samples": 4, "seq_len": 48, "weights": "int8"}
    wisparse.convert(source, out, progress=False, device="cpu", calibration=[str(Path(__file__))], **settings)


def digests(folder: Path) -> dict[str, str]:
    """Of all files but the model card and the report, which state times."""
    named = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {n: file_digest(path) for n, path in named.items() if not n.endswith((".md", "report.json", ".png"))}


def answer(bundle: Path) -> list[int]:
    with wisparse.load(bundle, device="cpu", backend="torch", max_seq_len=48) as model:
        return model.generate(list(range(5, 25)), max_new_tokens=12).token_ids


def damage(path: Path, chance: random.Random) -> str:
    """Flip a bit of a file, cut its end off, or empty it; says which."""
    data = bytearray(path.read_bytes())
    kind = chance.choice(("flip", "flip", "flip", "cut", "empty")) if data else "flip"
    if kind == "flip":
        place = chance.randrange(max(len(data), 1))
        data[place : place + 1] = bytes([(data[place] if data else 0) ^ 1 << chance.randrange(8)])
    else:
        del data[chance.randrange(len(data)) if kind == "cut" else 0 :]
    path.write_bytes(data)
    return f"{kind} {path.name}"


@contextlib.contextmanager
def child(source: Path, out: Path) -> Iterator[int]:
    """A process of this one's imports that converts, so that kills fall into the conversion."""
    pid = os.fork()
    if pid == 0:
        try:
            convert(source, out)
            os._exit(0)
        except WisparseError as error:
            print(f"child: {error}", file=sys.stderr)
            os._exit(3)
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    yield pid


def killed_conversion(
    case: Path, source: Path, seconds: float, whole: dict[str, str], chance: random.Random, damaged: bool
) -> str:
    out, said = case / "out", []
    for _ in range(chance.randint(1, MOST_KILLS)):
        with child(source, out) as pid:
            time.sleep(chance.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, 3):
            return f"the conversion failed with {os.WEXITSTATUS(status)} before its kill"
        if out.exists():
            break
        files = [path for path in case.rglob("*") if path.is_file()]
        if damaged and files:
            said.append(damage(chance.choice(files), chance))
    with contextlib.suppress(FileNotFoundError):
        if out.exists() and digests(out) == whole:
            shutil.rmtree(out)  # it was finished before the kill: once more over what is left
    try:
        convert(source, out)
    except WisparseError as error:
        if "\n" in str(error):
            return f"{said}: more than one sentence: {error}"
        for left in case.iterdir():  # what its sentence asks for: begin with an empty folder
            shutil.rmtree(left)
        convert(source, out)
    except Exception as error:
        return f"{said}: {type(error).__name__}: {error}"
    if digests(out) != whole:
        return f"{said}: other bytes than those of a conversion that was never killed"
    left = [path.name for path in case.iterdir() if path != out]
    return f"{said}: left behind: {left}" if left else ""


def damaged_bundle(case: Path, bundle: Path, expected: list[int], chance: random.Random) -> str:
    copy = Path(shutil.copytree(bundle, case / "bundle"))
    path = chance.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
    said = damage(path, chance)
    is_weights = path.name.startswith("model") and path.suffix == ".safetensors"
    try:
        found = answer(copy)
    except WisparseError as error:
        return f"{said}: more than one sentence: {error}" if "\n" in str(error) else ""
    except Exception as error:
        return f"{said}: {type(error).__name__}: {error}"
    if is_weights:
        try:
            verify_bundle(copy)
        except WisparseError:
            return ""
        return f"{said}: verify found nothing"
    return "" if found == expected else f"{said}: another answer"


def damaged_kernel(cache: Path, chance: random.Random) -> str:
    said = ""
    for path in cache.rglob(f"{KERNEL}-*"):
        said = damage(path, chance)
    pid = os.fork()  # as another start would: nothing is loaded yet
    if pid == 0:
        try:
            launch.prepare(KERNEL)
            os._exit(0)
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return "" if status == 0 else f"{said}: the start ended with status {status}"


@click.command()
@click.option("--cases", default=500, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("--only", type=click.Choice(sorted(SHARES)), help="One of the four cases.")
def main(cases: int, seed: int, only: str | None) -> None:
    logging.getLogger("wisparse").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chance, counts, wrong = random.Random(seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        source, bundle = make_source(folder / "source"), folder / "whole" / "out"
        bundle.parent.mkdir()
        convert(source, bundle)
        start = time.perf_counter()
        shutil.rmtree(bundle)
        convert(source, bundle)
        seconds = time.perf_counter() - start
        whole, expected = digests(bundle), answer(bundle)
        numba.config.CACHE_DIR = str(folder / "kernels")
        for number in range(cases):
            kind = only or chance.choices([*SHARES], [*SHARES.values()])[0]
            case = folder / f"case-{number}"
            case.mkdir()
            if kind == "bundle":
                said = damaged_bundle(case, bundle, expected, chance)
            elif kind == "kernel":
                said = damaged_kernel(folder / "kernels", chance)
            else:
                said = killed_conversion(case, source, seconds, whole, chance, damaged=kind == "work")
            counts[kind] += 1
            if said:
                wrong.append(f"{number} {kind}: {said}")
                print(wrong[-1], file=sys.stderr, flush=True)
            shutil.rmtree(case, ignore_errors=True)
            if number % 50 == 49:
                print(f"{number + 1} of {cases}, {len(wrong)} wrong", file=sys.stderr, flush=True)
    print(json.dumps({"cases": dict(counts), "conversion_seconds": round(seconds, 2), "wrong": wrong}, indent=2))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
