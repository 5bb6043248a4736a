"""Sparsity realised on text of another kind than the calibration's, and KL there; in units of the token's own norm too.

    OMP_NUM_THREADS=1 python benchmarks/other_text.py --json out.json         # the example model, minutes on two cores

Calibrated on passages of every other file of the standard library, or on text that the model writes (`--calibration
self`), as a conversion does it (`--search`, rotated unless --rotation none). Then, every token sparse: the files
between, two draws; the files calibrated on, other passages; text that the model writes; interpreter sessions; the
documentation of Python's statements, which is prose.

    plain       thresholds as the bundle holds them
    by norm     those of o_proj and down_proj, whose inputs no norm has made alike, times the root mean square of the
                token's input over its mean; set again on the calibration text, in the order of execution, for the same
                share left unread there
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from quality import EXAMPLE, describe_machine, stdlib_tokens, turned
from torch import Tensor

from wisparse.converter.bench.divergence import kl_rows
from wisparse.converter.model.masking import MaskedModel
from wisparse.converter.model.source import SourceModel, load_source
from wisparse.converter.searches.search import SearchSettings, search
from wisparse.converter.text.calibration import load_calibration, pack
from wisparse.converter.text.tokens import CalibrationTokens
from wisparse.converter.weights.rotate import rotate
from wisparse.formats.weights.checkpoint import Checkpoint
from wisparse.runtime.tasks.interpreter_chains import make_chains

_DIRECTIONS_SEED = 3_000_003


def texts(source: SourceModel, count: int, length: int) -> dict[str, Tensor]:
    """Kind -> tokens (S, L)."""

    def packed(documents: list[str]) -> Tensor:
        return torch.tensor(pack(documents, source.tokenizer, count, length, 0, "text"))

    sessions = [chain.session + [*chain.questions()][-1] for chain in make_chains(40 * count, 1)]
    return {
        "library, other files": stdlib_tokens(source, "evaluation", count, length).input_ids,
        "library, other files, again": stdlib_tokens(source, "evaluation", count, length, 1).input_ids,
        "library, the same files": stdlib_tokens(source, "calibration", count, length, 2_000_003).input_ids,
        "the model's own": written(source, count, length, 5).input_ids,
        "interpreter sessions": packed(sessions),
        "prose": packed([topics[name] for name in sorted(topics)]),
    }


def written(source: SourceModel, count: int, length: int, seed: int) -> CalibrationTokens:
    """The model's own text."""
    return load_calibration("self", source.tokenizer, source.model, count, length, seed)


class Masks:
    """Thresholds times a norm of the token for some of the projections."""

    def __init__(self, source: SourceModel, scales: Mapping[str, Tensor], thresholds: Mapping[str, float]) -> None:
        self.source, self.scales, self.thresholds = source, scales, dict(thresholds)
        self.means: dict[str, float] = {}
        self.sizes = {name: module.weight.numel() for name, module in source.projections.items()}
        self.masked = MaskedModel(source.projections)

    def units(self, name: str, x: Tensor) -> Tensor | float:
        if name not in self.means:
            return 1.0
        return x.float().square().mean(-1, keepdim=True).sqrt() / self.means[name]

    @torch.no_grad()
    def logits(self, ids: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """Of (1, L); ``seen`` gets the share of each token's channels that is dropped, by projection (L,)."""

        def drop(name: str, x: Tensor) -> Tensor:
            keep = x.float().abs() * self.scales[name] >= self.thresholds[name] * self.units(name, x)
            seen[name] = 1.0 - keep.float().mean(-1)[0]
            return torch.where(keep, x, 0.0)

        with self.masked.replacing(drop):
            return self.source.model(input_ids=ids, use_cache=False).logits[0].float()

    @torch.no_grad()
    def set_by_norm(self, ids: Tensor, allocation: Mapping[str, float]) -> None:
        """Thresholds of the projections that no norm stands before, in units of the token's; one after the other."""
        for name in [one for one in self.thresholds if one.endswith(("o_proj", "down_proj"))]:
            inputs: list[Tensor] = []

            def look(found: str, x: Tensor, name: str = name, inputs: list[Tensor] = inputs) -> None:
                if found == name:
                    inputs.append(x[0, 1:].float())

            with self.masked.observing(look):
                for some in ids.split(1):
                    self.logits(some, {})
            x = torch.cat(inputs)
            norms = x.square().mean(-1, keepdim=True).sqrt()
            self.means[name] = float(norms.mean())
            scores = (x.abs() * self.scales[name] / (norms / self.means[name])).flatten()
            self.thresholds[name] = float(scores.kthvalue(max(1, round(allocation[name] * len(scores)))).values)

    def measure(self, ids: Tensor, dense: list[Tensor]) -> dict[str, float]:
        unread, kls = [], []
        for row, wanted in zip(ids.split(1), dense, strict=True):
            seen: dict[str, Tensor] = {}
            kls.append(float(kl_rows(wanted, self.logits(row, seen))[1:].mean()))
            total = sum(self.sizes.values())
            unread.append(float(sum(seen[name][1:].mean() * size / total for name, size in self.sizes.items())))
        kl, found = torch.tensor(kls), torch.tensor(unread)
        root = math.sqrt(len(kls))
        return {
            "unread": round(float(found.mean()), 4),
            "unread_stderr": round(float(found.std()) / root, 4),
            "kl": round(float(kl.mean()), 5),
            "kl_stderr": round(float(kl.std()) / root, 5),
        }


def log_probs(source: SourceModel, ids: Tensor) -> Tensor:
    logits: Tensor = source.model(input_ids=ids, use_cache=False).logits
    return logits[0].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--search", default="fisher")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--evaluation-samples", type=int, default=16)
    parser.add_argument("--calibration", choices=("library", "self"), default="library")
    parser.add_argument("--ways", nargs="+", choices=("plain", "by norm"), default=["plain", "by norm"])
    parser.add_argument("--rotation", choices=("pca", "none"), default="pca")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    source = load_source(arguments.model, device="cpu")
    shape = (arguments.num_samples, arguments.seq_len)
    own = arguments.calibration == "self"
    tokens = written(source, *shape, 0) if own else stdlib_tokens(source, "calibration", *shape)
    judged = {"calibrated on": tokens.input_ids, **texts(source, arguments.evaluation_samples, arguments.seq_len)}
    if arguments.rotation != "none":
        if own:
            directions = written(source, -(-shape[0] // 2), shape[1], _DIRECTIONS_SEED)
            source = rotate(source, Checkpoint.open(arguments.model), tokens, lambda: directions).source
        else:
            source = turned(source, arguments.model, tokens, _DIRECTIONS_SEED)
    result = search(source, tokens, SearchSettings(search=arguments.search, sparsity=arguments.sparsity))
    with torch.no_grad():
        dense = {
            kind: [
                source.model(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1) for row in ids.split(1)
            ]
            for kind, ids in judged.items()
        }
    scales = result.channel_scales
    masks = Masks(source, scales, {name: entry.threshold for name, entry in result.projections.items()})
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        if way == "by norm":
            masks.set_by_norm(tokens.input_ids, {name: entry.sparsity for name, entry in result.projections.items()})
        for kind, ids in judged.items():
            rows.append({"thresholds": way, "text": kind, **masks.measure(ids, dense[kind])})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    document = {
        "model": arguments.model.name,
        "search": arguments.search,
        "calibration": tokens.source,
        "rotation": arguments.rotation,
        "sparsity": arguments.sparsity,
        "tokens": {"calibration": tokens.num_tokens, "each text": arguments.evaluation_samples * arguments.seq_len},
        "machine": describe_machine(torch.device("cpu")),
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
