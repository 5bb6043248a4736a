"""Do right programs agree? Greedy tokens of one bundle in float32 by torch, Numba, transformers and ONNX Runtime.

    python benchmarks/agreement.py                                     # the example model at 50%; some minutes
    python benchmarks/agreement.py MODEL... --search fisher --output results/agreement.json
    python benchmarks/agreement.py BUNDLE...                           # bundles that exist already

Prompts are read dense, answers decoded sparse: 40 tokens each of passages of the standard library and of interpreter
sessions, none of which anything was calibrated on. ONNX Runtime runs the exported file in a loop of this file's own.

Programs round differently, so a score within rounding of its threshold may be kept by one and dropped by another. Where
an engine parts from torch, a plain decoder in transformers is run again with one such channel decided the other way,
nearest first, until the engine's tokens come out: block, projection, channel, score and threshold are printed, with the
distance between the two and the rounding (largest difference between float32 and float64 scores of that projection in
that step), both relative to the threshold. Exit code 1 if more than one prompt in thirty parts, or if one parts and no
such channel explains it. Lines go to stderr, one JSON document to stdout, and to --output if given.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality import EXAMPLE, describe_machine, print_document, stdlib_files
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import wisparse
from wisparse.commands.export_onnx import rotary_tables
from wisparse.formats.bundle import Bundle
from wisparse.formats.manifest import MANIFEST
from wisparse.formats.onnx.export import MODEL, export_onnx
from wisparse.kernels.reference import kept, scores
from wisparse.runtime.tasks.interpreter_lines import make_problems

_SHORTEST_PROMPT, _LONGEST_PROMPT = 16, 64
# Tried where an engine parts, at most; and how many times the rounding seen a score may be off.
_TRIES, _TIMES = 40, 4

Tokens = list[int]
Engine = Callable[[Tokens, int], Tokens]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_prompts(tokenizer: Any, count: int, seed: int) -> list[Tokens]:
    """Half of them passages of the files that the benchmarks evaluate on, half of them interpreter sessions."""
    draw = random.Random(seed)
    files = stdlib_files("evaluation")
    prompts = []
    for path in draw.sample(files, count - count // 2):
        lines = path.read_text("utf-8", "replace").splitlines(keepends=True)
        text = "".join(lines[draw.randrange(len(lines) // 2) :])
        ids = tokenizer(text[:4096]).input_ids
        prompts.append(ids[: draw.randint(_SHORTEST_PROMPT, _LONGEST_PROMPT)])
    return prompts + [tokenizer(one.prompt).input_ids for one in make_problems(count // 2, seed + 1_000_003)]


# ---------------------------------------------------------------------- engines


def own_engine(folder: Path, backend: str) -> Engine:
    """One of our runtime's back ends."""
    model = wisparse.load(folder, device="cpu", dtype="float32", backend=backend)
    decoder = model.decoder
    assert decoder.name == backend

    def generate(prompt: Tokens, count: int) -> Tokens:
        found = [int(decoder.prefill(0, torch.tensor(prompt), len(prompt)).argmax())]
        while len(found) < count:
            found.append(int(decoder.decode(torch.tensor(found[-1:]))[0].argmax()))
        return found

    return generate


def transformers_engine(folder: Path) -> Engine:
    """transformers' own generation, with `sparsify`."""
    model = wisparse.sparsify(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder)
    model.generation_config.eos_token_id = None

    def generate(prompt: Tokens, count: int) -> Tokens:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    return generate


def onnx_engine(folder: Path) -> Engine:
    """ONNX Runtime on an exported folder, one token at a time."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / MODEL), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    empty = {
        one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), dtype=np.float32)
        for one in session.get_inputs()
        if one.name.startswith("past_key_values")
    }

    def generate(prompt: Tokens, count: int) -> Tokens:
        cache, fed, length, found = empty, prompt, 0, []
        while len(found) < count:
            positions = np.arange(length, length + len(fed), dtype=np.int64)[None]
            length += len(fed)
            given = {
                "input_ids": np.array([fed], dtype=np.int64),
                "position_ids": positions,
                "attention_mask": np.ones((1, length), dtype=np.int64),
            }
            values = dict(zip(names, session.run(None, given | cache), strict=True))
            found.append(int(values["logits"][0, -1].argmax()))
            cache = {name.replace("present", "past_key_values"): values[name] for name in names if name != "logits"}
            fed = found[-1:]
        return found

    return generate


# ---------------------------------------------------------------------- where they part


@dataclass(frozen=True)
class Decision:
    """A score beside its threshold.

    Attributes:
        step: answer tokens before it.
        distance, rounding: relative to the threshold.
    """

    step: int
    projection: str
    channel: int
    score: float
    threshold: float
    distance: float
    rounding: float


class Witness:
    """A plain decoder in transformers with masks of its own, that tells every score and turns decisions over.

    Attributes:
        seen: (step, projection) -> scores (K,) float64, in order of execution.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.masks = Bundle.open(folder).masks
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.seen: dict[tuple[int, str], Tensor] = {}
        self._step = 0
        self._turned: Decision | None = None
        for name, mask in self.masks.items():
            if mask.sparsity > 0:
                self.model.get_submodule(name).register_forward_pre_hook(self._hook(name, mask.channel_scale))

    def _hook(self, name: str, scale: Tensor) -> Callable[[nn.Module, tuple], tuple | None]:
        def drop(module: nn.Module, args: tuple) -> tuple | None:
            if self._step == 0:  # the prompt
                return None
            (x,) = args
            self.seen[self._step, name] = (x.double().abs() * scale.double()).flatten()
            keep = kept(scores(x, scale), self.masks[name].threshold)
            turned = self._turned
            if turned is not None and (turned.step, turned.projection) == (self._step, name):
                keep[..., turned.channel] ^= True
            return (torch.where(keep, x, 0.0),)

        return drop

    @torch.no_grad()
    def run(self, prompt: Tokens, count: int, turned: Decision | None = None, forced: Tokens | None = None) -> Tokens:
        """Greedy tokens, with one decision turned over; with ``forced`` these are fed in place of the own ones."""
        self.seen, self._turned = {}, turned
        found: Tokens = []
        cache, fed = None, prompt
        for self._step in range(count):
            out = self.model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
            found.append(int(out.logits[0, -1].argmax()))
            cache, fed = out.past_key_values, [(forced or found)[self._step]]
        return found


class Witnesses:
    """What explains that an engine parts from torch."""

    def __init__(self, folder: Path) -> None:
        self.single, self.double = Witness(folder, torch.float32), Witness(folder, torch.float64)

    def near(self, prompt: Tokens, count: int) -> tuple[Tokens, list[Decision]]:
        """Tokens in float32, and the decisions that rounding can turn over, nearest first.

        From the first on that float32 and float64 take differently, they are about different states.
        """
        tokens = self.single.run(prompt, count)
        self.double.run(prompt, count, forced=tokens)
        found: list[Decision] = []
        for (step, name), single in self.single.seen.items():
            double, threshold = self.double.seen[step, name], self.single.masks[name].threshold
            rounding = float((single - double).abs().max()) / threshold
            distances = (single - threshold).abs() / threshold
            for channel in (distances <= _TIMES * rounding).nonzero().flatten().tolist():
                score, distance = float(single[channel]), float(distances[channel])
                found.append(Decision(step, name, channel, score, threshold, distance, rounding))
            if bool(((single < threshold) != (double < threshold)).any()):
                break
        return tokens, sorted(found, key=lambda one: one.distance)

    def explain(self, prompt: Tokens, ours: Tokens, theirs: Tokens) -> Decision | None:
        """The decision that makes one's tokens the other's, up to where they part; None if none was found."""
        parted = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]) + 1
        tokens, near = self.near(prompt, parted)
        wanted = [one for one in (ours[:parted], theirs[:parted]) if one != tokens]
        for decision in [one for one in near if one.step < parted][:_TRIES]:
            if self.single.run(prompt, parted, turned=decision) in wanted:
                return decision
        return None


# ---------------------------------------------------------------------- the whole


def measure(folder: Path, prompts: list[Tokens], count: int) -> dict[str, Any]:
    """All engines on one bundle."""
    bundle = Bundle.open(folder)
    recipe = bundle.recipe
    with tempfile.TemporaryDirectory() as scratch:
        exported = export_onnx(bundle, Path(scratch) / "onnx", rotary_tables(bundle.config), dtype="float32").folder
        engines: Mapping[str, Engine] = {
            "torch": own_engine(folder, "torch"),
            "numba": own_engine(folder, "numba"),
            "transformers": transformers_engine(folder),
            "onnxruntime": onnx_engine(exported),
        }
        found = {name: [engine(prompt, count) for prompt in prompts] for name, engine in engines.items()}
    names = list(found)
    pairs = {
        f"{a}, {b}": sum(x == y for x, y in zip(found[a], found[b], strict=True))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    say(f"{recipe.base_model}, {recipe.sparsity:.0%}, {len(prompts)} prompts, {count} tokens each")
    for pair, agreeing in pairs.items():
        say(f"  {pair:28} {agreeing} of {len(prompts)}")
    witnesses, parted = Witnesses(folder), []
    for name in names[1:]:
        for i, (ours, theirs) in enumerate(zip(found["torch"], found[name], strict=True)):
            if ours == theirs:
                continue
            why = witnesses.explain(prompts[i], ours, theirs)
            at = next(t for t, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            say(f"  {name} parts from torch on prompt {i} at token {at}: {_words(why)}")
            parted.append({"engine": name, "prompt": i, "token": at, "why": asdict(why) if why else None})
    return {
        "model": recipe.base_model,
        "sparsity": recipe.sparsity,
        "search": recipe.search.get("settings", {}).get("search"),
        "calibration": f"{recipe.calibration.source}, {recipe.calibration.num_tokens} tokens",
        "agreeing": pairs,
        "all": sum(len({tuple(one) for one in row}) == 1 for row in zip(*found.values(), strict=True)),
        "parted": parted,
    }


def _words(why: Decision | None) -> str:
    if why is None:
        return "NOT EXPLAINED by one decision"
    return (
        f"{why.projection} channel {why.channel}, score {why.score:.9g}, threshold {why.threshold:.9g}, "
        f"distance {why.distance:.1e}, rounding {why.rounding:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[EXAMPLE], help="models or bundles")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--search", default="auto")
    parser.add_argument("--num-samples", type=int, default=16, help="of the conversion's calibration")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in options.folders:
            bundle = folder
            if not (folder / MANIFEST).is_file():
                say(f"converting {folder.name}")
                bundle = wisparse.convert(
                    folder,
                    Path(scratch) / folder.name,
                    sparsity=options.sparsity,
                    search=options.search,
                    num_samples=options.num_samples,
                    seq_len=options.seq_len,
                    device="cpu",
                )
            prompts = make_prompts(AutoTokenizer.from_pretrained(bundle), options.prompts, options.seed)
            rows.append(measure(bundle, prompts, options.tokens))
    document = {
        "benchmark": "agreement",
        "dtype": "float32",
        "prompts": options.prompts,
        "tokens": options.tokens,
        "seed": options.seed,
        **describe_machine(torch.device("cpu")),
        **{name: metadata.version(name) for name in ("numba", "onnxruntime")},
        "models": rows,
    }
    print_document(document, options.output)
    least = options.prompts - max(1, options.prompts // 30)
    wanting = [row for row in rows if min(row["agreeing"].values()) < least or any(not p["why"] for p in row["parted"])]
    sys.exit(1 if wanting else 0)


if __name__ == "__main__":
    main()
