"""What the verbs print is what ``wisparse bench`` measured: tok/s of each verb, typed as a user types it.

    PYTHONPATH=. python benchmarks/gpu_verbs.py                          # 8B shape and the example, on an NVIDIA GPU
    PYTHONPATH=. python benchmarks/gpu_verbs.py --only example           # the example alone
    PYTHONPATH=. python benchmarks/gpu_verbs.py --bundle out --device cpu --tokens 60    # a bundle that is there

Run it from the repository's root; the package need not be installed, and no network is needed. Makes in ``--folder``
(17 GB under /tmp) a bundle of the Llama-3.1-8B shape, random bf16 weights with thresholds calibrated to 50% on the GPU,
and a bundle of the example model by ``wisparse convert``, both without an end-of-text token, so that every answer has
the same length. Then runs, one after the other, each in a process of its own:

    wisparse bench BUNDLE
    wisparse generate BUNDLE --prompt ...       twice: the first run compiles what the second finds in the cache
    wisparse chat BUNDLE                        two messages on standard input, /reset between them
    wisparse eval BUNDLE --tasks interpreter_lines --limit N      if lm-evaluation-harness is installed

and prints a table with each verb's own tok/s and its ratio over bench, the seconds each part took, and one line of JSON
(also to ``$OUT/gpu-verbs.json`` if OUT is set). About five minutes on an H200.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pycode-llama-6m"
SPARSITY = 0.5
PROMPT = "def add(a, b):\n"
MESSAGES = ("Write a function that adds two numbers.", "/reset", "Sort a list of numbers.")
_FOOTER = re.compile(r"generation ([\d,]+) tokens, ([\d,.]+) tok/s")


@dataclass(frozen=True)
class Row:
    """One verb's own figure, and the one of ``bench`` that it is held to."""

    verb: str
    tokens: int
    tok_per_s: float
    bench: float

    @property
    def ratio(self) -> float:
        return self.tok_per_s / self.bench


# ---------------------------------------------------------------------- bundles


def endless_source(folder: Path, vocab_size: int | None = None, end: int | None = None) -> Path:
    """The example's files without an end-of-text token, or with ``end`` for one; with ``vocab_size`` only its
    tokenizer, made that large by words of its own."""
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        document = json.loads((EXAMPLE / name).read_text("utf-8"))
        kept = {key: value for key, value in document.items() if not key.startswith("eos_token")}
        if vocab_size is None or name == "tokenizer_config.json":
            (folder / name).write_text(json.dumps(kept), "utf-8")
    if end is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), "utf-8")
    shutil.copy(EXAMPLE / "chat_template.jinja", folder)
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text("utf-8"))
    if vocab_size is None:
        shutil.copy(EXAMPLE / "model.safetensors", folder)
    else:
        words = tokenizer["model"]["vocab"]
        words.update({f"Ġword{index}": index for index in range(len(words), vocab_size)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return folder


def make_random(shape: str, num_blocks: int | None, out: Path, device: str, end: int | None = None) -> None:
    """A bundle of a published shape: random weights, thresholds calibrated on the device as ``gpu_decode.py`` does."""

    import torch
    from gpu_models import SHAPES, calibrate, random_bundle

    from wisparse.formats.bundle import ProjectionMask
    from wisparse.formats.checkpoint import TensorInfo
    from wisparse.formats.errors import BundleError
    from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel
    from wisparse.formats.model_config import expected_tensors
    from wisparse.formats.write import write_bundle
    from wisparse.runtime.cuda.decoder import CudaDecoder

    random = random_bundle(shape, num_blocks=num_blocks)
    config = random.config
    config_dict = {**SHAPES[shape], "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"}
    config_dict["num_hidden_layers"] = config.num_blocks
    decoder = CudaDecoder(random, device=torch.device(device), dtype=torch.bfloat16, max_seq_len=512)
    settings = calibrate(decoder, [SPARSITY])[SPARSITY]
    thresholds = {id(group): values.tolist() for group, values in settings}
    masks = {}
    for index, block in enumerate(decoder.weights.blocks):
        names = iter(projection.name for projection in config.projections(index))
        for group in block.linears:
            for scale, threshold in zip(group.scales, thresholds[id(group)], strict=True):
                masks[next(names)] = ProjectionMask(scale.cpu(), threshold, SPARSITY)
    decoder.close()

    class Source:
        """What ``write_bundle`` asks of a checkpoint; each tensor is made when it is written."""

        def __init__(self, folder: Path) -> None:
            self.config, self.config_dict, self.folder = config, config_dict, folder
            self.error, self.quantised = BundleError, {}
            self.tensors = {
                name: TensorInfo(name, "none", name, size, "BF16") for name, size in expected_tensors(config).items()
            }

        def chunks(self, name: str, chunk_bytes: int):
            yield from random.checkpoint.tensor(name, device).flatten().cpu().split(chunk_bytes // 2)

    entries = tuple(ProjectionRecipe(n, m.sparsity, 0.5, m.threshold, m.sparsity) for n, m in masks.items())
    recipe = Recipe(
        base_model=f"random/{shape}", base_revision=None, method="wisparse", default=SPARSITY,
        levels=(SparsityLevel(SPARSITY, entries, (SPARSITY,) * config.num_blocks),),
        calibration=CalibrationRecord("self", 1, 256, 256, 0, "ab" * 32),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source = Source(endless_source(Path(folder, "source"), config.vocab_size, end))
        write_bundle(source, recipe, {SPARSITY: masks}, out)  # type: ignore[arg-type]


def environment() -> dict[str, str]:
    """The package from this checkout, wherever the script was started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def wisparse(*arguments: object, stdin: str = "", timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """A verb, as it is typed; ``timeout`` in seconds."""
    command = [sys.executable, "-m", "wisparse", *map(str, arguments)]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment(), check=False, timeout=timeout
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done


# ---------------------------------------------------------------------- verbs


def footers(stderr: str) -> list[tuple[int, float]]:
    """Tokens and tok/s of each answer, as the verbs print them."""
    return [(int(n.replace(",", "")), float(rate.replace(",", ""))) for n, rate in _FOOTER.findall(stderr)]


def measure(bundle: Path, device: str, tokens: int, questions: int, seconds: dict[str, float]) -> dict[str, Any]:
    """Every verb on one bundle."""

    def timed(name: str, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        began = time.perf_counter()
        done = wisparse(*arguments, "--device", device, stdin=stdin)
        seconds[f"{bundle.name}: {name}"] = time.perf_counter() - began
        print(f"{bundle.name}: {name}: {seconds[f'{bundle.name}: {name}']:.1f} s", flush=True)
        for line in done.stderr.splitlines():
            print(f"    {line}")
        return done

    bench = json.loads(timed("bench", "bench", bundle, "--max-new-tokens", tokens, "--json").stdout.splitlines()[-1])
    sparse, dense = bench["sparse"]["tok_per_s"], bench["dense"]["tok_per_s"]
    rows = [Row("bench", tokens, sparse, sparse)]
    plain = ("--max-new-tokens", tokens)
    generate = ("generate", bundle, "--prompt", PROMPT, "--ignore-chat-template", *plain)
    for name in ("generate", "generate again"):
        ((count, rate),) = footers(timed(name, *generate).stderr)
        rows.append(Row(name, count, rate, sparse))
    chat = timed("chat", "chat", bundle, *plain, stdin="\n".join(MESSAGES) + "\n")
    rows += [Row(f"chat, answer {i}", *found, sparse) for i, found in enumerate(footers(chat.stderr), start=1)]
    if importlib.util.find_spec("lm_eval") is None:
        print("eval --tasks: not measured, lm-evaluation-harness is not installed: pip install 'wisparse[eval]'")
    else:
        task = ("--tasks", "interpreter_lines", "--limit", questions, "--json")
        found = json.loads(timed("eval --tasks", "eval", bundle, *task).stdout)["bundles"][0]["generation"]
        for policy, bound in (("half", sparse), ("masks off", dense)):
            rows.append(Row(f"eval --tasks, {policy}", found[policy]["tokens"], found[policy]["tok_per_s"], bound))
    return {
        "bundle": bundle.name, "dense_tok_per_s": dense, "bench": bench,
        "rows": [{"verb": r.verb, "tokens": r.tokens, "tok_per_s": r.tok_per_s, "over_bench": r.ratio} for r in rows],
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    machine = ", ".join(f"{key} {value}" for key, value in found["bench"]["machine"].items())
    print(f"\n{found['bundle']}: {machine}; dense {found['dense_tok_per_s']:,.1f} tok/s")
    print(f"{'verb':24s} {'tokens':>7s} {'tok/s':>10s} {'over bench':>11s}")
    for row in found["rows"]:
        print(f"{row['verb']:24s} {row['tokens']:7d} {row['tok_per_s']:10,.1f} {row['over_bench']:11.3f}")
    print("eval with masks off is held to bench's dense figure", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has, to try it out")
    parser.add_argument("--only", choices=("shape", "example"), help="one of the two bundles")
    parser.add_argument("--bundle", type=Path, action="append", help="measure a bundle that is there; none is made")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to make the bundles")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--keep", action="store_true", help="leave the bundles where they are")
    parser.add_argument("--part", choices=("make",), help=argparse.SUPPRESS)
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "make":
        make_random(arguments.shape, arguments.blocks, arguments.folder, arguments.device, arguments.end)
        return
    from gpu_models import need_gpu

    need_gpu(parser, arguments.device)
    folder = Path(tempfile.mkdtemp(prefix="wisparse-verbs-", dir=arguments.folder))
    random, example = folder / arguments.shape, folder / "example"
    seconds: dict[str, float] = {}
    results = []

    def make(name: str, build: Any) -> None:
        began = time.perf_counter()
        build()
        seconds[f"{name}: made"] = time.perf_counter() - began
        print(f"{name}: made in {seconds[f'{name}: made']:.1f} s", flush=True)

    def make_shape() -> None:
        # In a process of its own, which gives the GPU's memory back.
        child = [sys.executable, __file__, "--part", "make", "--shape", arguments.shape, "--folder", str(random)]
        child += ["--device", arguments.device] + (["--blocks", str(arguments.blocks)] if arguments.blocks else [])
        subprocess.run(child, check=True, env=environment())

    def make_example() -> None:
        source = endless_source(folder / "source")
        # Any text will do, and the quickest search: speed depends on how many channels are kept.
        text = ("--calibration", ROOT / "converter", "--num-samples", 8, "--seq-len", 512, "--search", "uniform")
        wisparse("convert", source, "-o", example, "--sparsity", SPARSITY, *text, "--device", arguments.device, "-q")

    began = time.perf_counter()
    try:
        if arguments.bundle:
            results = [measure(one, arguments.device, arguments.tokens, arguments.questions, seconds)
                       for one in arguments.bundle]  # fmt: skip
        else:
            for name, path, build in (("example", example, make_example), ("shape", random, make_shape)):
                if arguments.only in (None, name):
                    make(path.name, build)
                    results.append(measure(path, arguments.device, arguments.tokens, arguments.questions, seconds))
                    show(results[-1])
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.bundle:
        for found in results:
            show(found)
    print("\nseconds: " + ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items()))
    print(f"in all {time.perf_counter() - began:.0f} s")
    line = json.dumps({"python": platform.python_version(), "seconds": seconds, "results": results})
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu-verbs.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
