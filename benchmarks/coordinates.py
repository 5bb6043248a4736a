"""KL by coordinates, weight type and amount of calibration text: what ``--rotation auto`` and the text's defaults rest on.

    python benchmarks/coordinates.py --device cuda                    # the example model, minutes on a GPU
    python benchmarks/coordinates.py --models PATH ... --parts fit --output results/coordinates.json
    python benchmarks/coordinates.py --parts bits --tokens 8192 --search fisher    # on a CPU

Parts: ``auto`` is each weight type in the source's and in rotated coordinates; ``rotation``, ``fit`` (GPTQ) and
``thresholds`` vary the amount of text of that stage alone; ``bits`` is the KL over the bits read a weight. Calibrated on every other file of Python's standard library,
or on the model's own text (``self``); measured on the other files (``library``) and on installed packages (``packages``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from quality import EXAMPLE, Evaluator, describe_machine, print_document, stdlib_tokens

from wisparse.converter.calibration import CalibrationTokens, pack, path_documents, write_calibration
from wisparse.converter.config import full_config
from wisparse.converter.gptq import quantise_weights
from wisparse.converter.planes import read_in_planes
from wisparse.converter.processes import SILENT
from wisparse.converter.rotation import rotate
from wisparse.converter.search.allocation import MAX_SPARSITY, allocate
from wisparse.converter.search.search import Run, SearchResult, SearchSettings, SparsityLevels, search
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.manifest import unread

AMOUNTS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
USUAL = 8192  # tokens of the stages that a part does not vary; half of it for the rotation
LEVELS = (0.3, 0.4, 0.5)


class Trial:
    """One model, and the KL of what is made of it to the model as it was."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.device, self.seq_len, self.seed = folder, options.device, options.seq_len, options.seed
        self.tokens, self.search, self.scopes = options.tokens, options.search, options.scopes
        self.dense = load_source(folder, torch.float32, self.device)
        seq_len, seed, count = self.seq_len, self.seed, options.eval_tokens // self.seq_len
        packages = path_documents([str(Path(transformers.__file__).parent / "models")], 0)
        rows = pack(packages, self.dense.tokenizer, count, seq_len, seed, "packages")
        self.evaluators = {
            "library": Evaluator(self.dense, stdlib_tokens(self.dense, "evaluation", count, seq_len, 1).input_ids),
            "packages": Evaluator(self.dense, torch.tensor(rows)),
        }
        self.texts: dict[str, CalibrationTokens] = {}

    def text(self, kind: str, amount: int, other: int = 0) -> CalibrationTokens:
        """The first ``amount`` tokens of a text; ``other`` asks for a text apart from it."""
        most = max(AMOUNTS) if kind == "library" else 65536
        key = f"{kind}-{other}"
        if key not in self.texts:
            size, seed = most // self.seq_len, self.seed + 1000 * other
            if kind == "library":
                self.texts[key] = stdlib_tokens(self.dense, "calibration", size, self.seq_len, seed)
            else:
                wanted = [(size, self.seq_len, seed)]
                (self.texts[key],) = write_calibration(self.dense.model, self.dense.tokenizer, wanted, SILENT)
        found, count = self.texts[key], amount // self.seq_len
        return replace(found, input_ids=found.input_ids[:count], keep=found.keep[:count])

    def source(self, kind: str, rotation: int) -> SourceModel:
        """The model, rotated by so many tokens; 0 for the source's coordinates."""
        source = load_source(self.folder, torch.float32, self.device)
        if rotation:
            checkpoint = Checkpoint.open(self.folder, complete=full_config)
            source = rotate(source, checkpoint, self.text(kind, USUAL), lambda: self.text(kind, rotation, 1))[0]
        return source

    @contextmanager
    def quantized(self, source: SourceModel, weights: str, tokens: CalibrationTokens) -> Iterator[None]:
        kept = {name: module.weight.clone() for name, module in source.projections.items()}
        if weights != "native":
            quantise_weights(source, tokens, weights, torch.bfloat16)  # type: ignore[arg-type]
        yield
        with torch.no_grad():
            for name, weight in kept.items():
                source.projections[name].weight.copy_(weight)

    def kl(self, source: SourceModel, result: SearchResult | None = None) -> dict[str, float]:
        """By text; all weights are read without a result."""
        return {name: evaluator.against(source)(result).kl for name, evaluator in self.evaluators.items()}

    def masked(self, source: SourceModel, tokens: CalibrationTokens, kind: str, level: float) -> dict[str, float]:
        return self.kl(source, search(source, tokens, SearchSettings(sparsity=level, search=kind, seed=self.seed)))


Rows = Iterator[tuple[dict[str, Any], dict[str, float]]]


def auto(trial: Trial) -> Rows:
    for kind, amount in (("library", USUAL), ("library", 32768), ("self", USUAL), ("self", 32768)):
        for coordinates, rotation in (("source", 0), ("rotated", amount // 2)):
            source, tokens = trial.source(kind, rotation), trial.text(kind, amount)
            # A scale a row is rounded without text.
            rounded = ("int8", "fp8") if (kind, amount) == ("library", USUAL) else ()
            for weights in ("native", *rounded, "int4"):
                with trial.quantized(source, weights, tokens):
                    about = {"text": kind, "tokens": amount, "coordinates": coordinates, "weights": weights}
                    yield {**about, "sparsity": 0.0}, trial.kl(source)
                    for level in LEVELS:
                        yield {**about, "sparsity": level}, trial.masked(source, tokens, "fisher", level)


def rotation(trial: Trial) -> Rows:
    for amount in (2048, *AMOUNTS):
        source, tokens = trial.source("library", amount), trial.text("library", USUAL)
        for level in (0.3, 0.5):
            yield {"tokens": amount, "sparsity": level}, trial.masked(source, tokens, "fisher", level)


def fit(trial: Trial) -> Rows:
    for kind, amounts in (("library", AMOUNTS), ("self", AMOUNTS[:5])):
        for coordinates, rotation in (("source", 0), ("rotated", USUAL // 2)):
            source = trial.source(kind, rotation)
            for amount in amounts:
                with trial.quantized(source, "int4", trial.text(kind, amount)):
                    yield {"text": kind, "coordinates": coordinates, "tokens": amount}, trial.kl(source)


def thresholds(trial: Trial) -> Rows:
    for kind, amounts in (("library", AMOUNTS), ("self", AMOUNTS[:5])):
        source = trial.source(kind, USUAL // 2)
        for amount in amounts:
            for by in ("fisher", "refine"):
                for level in (0.3, 0.5):
                    about = {"text": kind, "search": by, "tokens": amount, "sparsity": level}
                    yield about, trial.masked(source, trial.text(kind, amount), by, level)


BITS = (5.0, 4.25, 3.75, 3.4, 2.95, 2.5)
MASKS = {"native": (16, (0.5, 0.4, 0.3)), "int8": (8, ()), "int4": (4, (0.3,))}


@torch.no_grad()
def only(levels: SparsityLevels, scope: str, sparsity: float) -> SearchResult | None:
    """``levels.at`` where channels are dropped in routed experts alone, or outside them alone, by `fisher`; None where
    these are too few."""
    run, sizes = Run(levels, replace(levels.settings, sparsity=sparsity)), levels.calib.sizes
    curves = run.sensitivities()
    inside = {name: size for name, size in sizes.items() if (".experts." in name) == (scope == "experts")}
    if sparsity * sum(sizes.values()) > MAX_SPARSITY * sum(inside.values()):
        return None
    spread = allocate({n: curves[n] for n in inside}, inside, sparsity * sum(sizes.values()) / sum(inside.values()))
    return run.result(dict.fromkeys(sizes, 0.0) | spread)


def bits_read(trial: Trial) -> Rows:
    """Masks on weights of 16, 8 and 4 bits, and graded weights; scales are not counted. int4 is fitted to the text of the
    rotation too, as in a conversion."""
    amount, scopes = trial.tokens, trial.scopes
    for turned in ("rotated", "source"):
        tokens, rotation = trial.text("library", amount), trial.text("library", amount // 2, 1)
        source = trial.source("library", amount // 2 if turned == "rotated" else 0)
        for weights in (*MASKS, "graded"):
            width, sparsities = MASKS.get(weights, (8, tuple(map(unread, sorted(BITS)))))
            about = {"coordinates": turned, "weights": weights}
            with trial.quantized(source, weights if weights != "graded" else "native", tokens.joined(rotation)):
                if weights != "native":
                    matrices = quantise_weights(source, tokens, weights, torch.bfloat16) if weights == "graded" else {}
                    yield {**about, "bits": float(width)}, trial.kl(source)
                read = read_in_planes(source, matrices) if weights == "graded" else source
                with SparsityLevels(read, tokens, SearchSettings(search=trial.search, seed=trial.seed)) as levels:
                    for scope, sparsity in product(scopes, sparsities):
                        found = levels.at(sparsity) if scope == "all" else only(levels, scope, sparsity)
                        inside = {"scope": scope} if len(scopes) > 1 else {}
                        if found is not None:
                            yield {**about, **inside, "bits": round(width * (1 - sparsity), 4)}, trial.kl(read, found)


PARTS: Mapping[str, Callable[[Trial], Rows]] = {
    "auto": auto, "rotation": rotation, "fit": fit, "thresholds": thresholds, "bits": bits_read,
}  # fmt: skip


def timed_rows(head: dict[str, Any], found: Rows) -> list[dict[str, Any]]:
    """What was measured, each row printed when it is there."""
    rows, started = [], time.perf_counter()
    for about, kl in found:
        row = {**head, **about, "kl": {name: round(value, 6) for name, value in kl.items()}}
        row["seconds"] = round(time.perf_counter() - started, 1)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        started = time.perf_counter()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=[EXAMPLE])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=131072, help="of bits")
    parser.add_argument("--search", default="refine", choices=("fisher", "refine"), help="of bits")
    parser.add_argument("--scopes", nargs="+", default=["all"], choices=("all", "experts", "outside"), help="of bits")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--eval-tokens", type=int, default=24576)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    options = parser.parse_args()
    document: dict[str, Any] = {
        "benchmark": "coordinates",
        **describe_machine(torch.device(options.device)),
        "rows": [],
    }
    for part in options.parts:
        for folder in options.models:
            trial = Trial(folder, options)
            document["rows"] += timed_rows({"part": part, "model": folder.name}, PARTS[part](trial))
    print_document(document, options.output)


if __name__ == "__main__":
    main()
