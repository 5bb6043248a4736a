"""What one factor a token on all thresholds is worth, at the same mean bytes; and the first tokens of a text dense.

    OMP_NUM_THREADS=1 python benchmarks/token_factor.py --json out.json

The search of `--search` at 50%, rotated; then, without searching again, every threshold times a factor that a token has

    token id     its id gives it (a table)
    before       what the step before said gives it: the entropy of its distribution, in `_CLASSES` equal classes
    both         the product of the two tables, each made as if alone
    place        the first `_FIRST` tokens of a text are dense, the others make up for it
    own entropy  the entropy of the dense model's own answer to it gives it, which nobody has in time: how far such
                 classes could go

Tables are chosen on the calibration text: each level of the factor is tried on all tokens at once, a class takes the
level that costs it least KL and bytes together, at a price that leaves the mean bytes as they are; a class's curve is
drawn to that of all tokens by so much as `_DRAWN` tokens. Judged on other text against the plain thresholds at the same
bytes there: KL between two levels is interpolated in logarithms. ± is the standard error of the paired difference, each
passage a draw.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from quality import EXAMPLE, describe_machine, stdlib_tokens, turned
from torch import Tensor

from wisparse.converter.bench.divergence import kl_rows
from wisparse.converter.model.masking import MaskedModel
from wisparse.converter.model.source import SourceModel, load_source
from wisparse.converter.searches.search import SearchSettings, search

_LEVELS = (0.4, 0.6, 0.75, 0.87, 1.0, 1.15, 1.33, 1.6, 2.2)
_CLASSES, _FIRST, _DRAWN = 16, 6, 30.0
_SHOWN = torch.tensor([0.05, 0.5, 0.95])
_DIRECTIONS_SEED = 3_000_003


class Factors:
    """The masked model, with a factor a token.

    Attributes:
        dense: log-probabilities (S, L, V) of the model without masks.
    """

    def __init__(self, source: SourceModel, masked: MaskedModel, thresholds: Mapping[str, float], ids: Tensor) -> None:
        self._model, self._masked, self._thresholds, self._ids = source.model, masked, thresholds, ids
        self._sizes = {name: module.weight.numel() for name, module in source.projections.items()}
        masked.clear()
        self.dense = torch.cat([self._log_probs(some) for some in ids.split(1)])

    def _log_probs(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits.float().log_softmax(-1)

    @torch.no_grad()
    def __call__(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """KL (S, L) and the share of the weights read (S, L), at factors (S, L)."""
        kl, read = torch.empty_like(factors), torch.zeros_like(factors)
        for row, (ids, some) in enumerate(zip(self._ids.split(1), factors.split(1), strict=True)):

            def masked(name: str, x: Tensor, row: int = row, some: Tensor = some) -> Tensor:
                scale = self._masked._slots[name].scale
                keep = x.float().abs() * scale >= self._thresholds[name] * some[..., None]
                read[row] += keep.float().mean(-1)[0] * self._sizes[name]
                return torch.where(keep, x, 0.0)

            with self._masked.replacing(masked):
                kl[row] = kl_rows(self.dense[row], self._log_probs(ids)[0])
        return kl, read / sum(self._sizes.values())


def entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def before(log_probs: Tensor) -> Tensor:
    """Of every token, the entropy of the step before it; the first one's is the mean."""
    found = entropy(log_probs)
    return torch.cat([found.mean().expand(len(found), 1), found[:, :-1]], 1)


def bounds_of(values: Tensor) -> Tensor:
    """Where equal classes part."""
    return values.flatten().quantile(torch.linspace(0, 1, _CLASSES + 1)[1:-1])


def table(classes: Tensor, count: int, kls: Tensor, reads: Tensor, wanted: float) -> Tensor:
    """The level's factor for each class, of (levels, S, L) measurements, at so many mean bytes."""
    levels, flat = len(_LEVELS), classes.flatten()
    number = torch.bincount(flat, minlength=count).float()

    def curve(values: Tensor) -> Tensor:
        sums = torch.zeros(levels, count).index_add_(1, flat, values.reshape(levels, -1))
        return (sums + _DRAWN * values.reshape(levels, -1).mean(1, keepdim=True)) / (number + _DRAWN)

    kl, read = curve(kls), curve(reads)
    # Between two levels the factor's logarithm is interpolated: else few classes cannot meet the bytes.
    fine = torch.linspace(math.log(_LEVELS[0]), math.log(_LEVELS[-1]), 181)
    kl, read = (_interpolated(values, fine) for values in (kl, read))
    low, high = 1e-4, 1e4
    for _ in range(60):
        price = math.sqrt(low * high)
        chosen = (kl + price * read).argmin(0)
        mean = (number * read.gather(0, chosen[None])[0]).sum() / number.sum()
        low, high = (price, high) if mean > wanted else (low, price)
    return fine[chosen].exp()


def _interpolated(values: Tensor, fine: Tensor) -> Tensor:
    known = torch.tensor(_LEVELS).log()
    right = torch.searchsorted(known, fine).clamp(1, len(known) - 1)
    part = ((fine - known[right - 1]) / (known[right] - known[right - 1]))[:, None]
    return torch.lerp(values[right - 1], values[right], part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--search", default="fisher")
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--table-samples", type=int, default=32, help="of other passages of the calibration files")
    parser.add_argument("--evaluation-samples", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    length = arguments.seq_len
    source = load_source(arguments.model, device="cpu")
    tokens = stdlib_tokens(source, "calibration", arguments.num_samples, length)
    chosen_on = stdlib_tokens(source, "calibration", arguments.table_samples, length, seed=7).input_ids
    judged_on = stdlib_tokens(source, "evaluation", arguments.evaluation_samples, length, seed=1).input_ids
    source = turned(source, arguments.model, tokens, _DIRECTIONS_SEED)
    result = search(source, tokens, SearchSettings(search=arguments.search))
    with MaskedModel(source.projections) as masked, torch.no_grad():
        thresholds = result.apply_to(masked)
        here, there = (Factors(source, masked, thresholds, ids) for ids in (chosen_on, judged_on))
        rows = compared(here, there, chosen_on, judged_on)
    document = {
        "model": arguments.model.name,
        "search": arguments.search,
        "tokens": {"search": tokens.num_tokens, "tables": chosen_on.numel(), "judged": judged_on.numel()},
        "machine": describe_machine(torch.device("cpu")),
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


def compared(here: Factors, there: Factors, ids_here: Tensor, ids_there: Tensor) -> list[dict[str, Any]]:
    """Every way to give a token its factor, beside none."""
    size = here.dense.shape[-1]

    def tried(factors: Factors, shape: Tensor) -> tuple[Tensor, Tensor]:
        found = [factors(torch.full(shape.shape, level)) for level in _LEVELS]
        return torch.stack([kl for kl, _ in found]), torch.stack([read for _, read in found])

    kls, reads = tried(here, ids_here)
    plain_kls, plain_reads = tried(there, ids_there)
    wanted = float(reads[_LEVELS.index(1.0)].mean())

    def by_class(values: Callable[[Factors], Tensor]) -> Tensor:
        bounds = bounds_of(values(here))
        classes = torch.bucketize(values(here), bounds)
        return table(classes, _CLASSES, kls, reads, wanted)[torch.bucketize(values(there), bounds)]

    by_id = table(ids_here, size, kls, reads, wanted)[ids_there]
    by_step = by_class(lambda one: before(one.dense))
    first = torch.ones(ids_there.shape)
    first[:, :_FIRST] = 0.0
    ways = {
        "token id": by_id,
        "before": by_step,
        "both": by_id * by_step,
        "place": first,
        "own entropy": by_class(lambda one: entropy(one.dense)),
    }
    rows = []
    for name, factors in ways.items():
        kl, read = there(factors)
        plain = _plain_at(plain_kls, plain_reads, float(read.mean()))
        change = (kl.mean(1) - plain).mean() / plain.mean()
        error = (kl.mean(1) - plain).std() / math.sqrt(len(plain)) / plain.mean()
        rows.append(
            {
                "factor": name,
                "kl": round(float(kl.mean()), 5),
                "read": round(float(read.mean()), 4),
                "plain_kl_at_these_bytes": round(float(plain.mean()), 5),
                "change": round(float(change), 4),
                "stderr": round(float(error), 4),
                "factors": [
                    round(float(one), 3) for one in factors.flatten().quantile(torch.tensor([0.05, 0.5, 0.95]))
                ],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _plain_at(kls: Tensor, reads: Tensor, wanted: float) -> Tensor:
    """KL by passage (S,) of the plain thresholds, at so many mean bytes."""
    means = reads.mean((1, 2))
    right = int((means > wanted).sum())  # falls with the level
    part = (means[right - 1] - wanted) / (means[right - 1] - means[right])
    logs = kls.mean(2).log()
    return torch.lerp(logs[right - 1], logs[right], part).exp()


if __name__ == "__main__":
    main()
