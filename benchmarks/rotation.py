"""What rotating a model is worth: a search on the source and on its rotated copy, at the same sparsities.

    python benchmarks/rotation.py                              # the example model, uniform |x| and fisher
    python benchmarks/rotation.py --model PATH --searches uniform --eval-tokens 6144      # shorter

The copy is made from standard-library files, as the masks are, and both are measured on other ones, every token sparse.
KL is to the source's dense model, for the copy as well: what rounding its weights costs is in it. ``ratio`` is copy
over source on the same tokens, with its standard error over batches of four sequences.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from quality import Clock, describe_machine, evaluate, options_of, print_head, publish, row, stdlib_tokens

from wisparse.converter.model.masking import MaskedModel
from wisparse.converter.model.source import SourceModel, load_source
from wisparse.converter.rotate import rotate
from wisparse.converter.searches.search import SearchSettings, search
from wisparse.converter.searches.settings import SearchResult
from wisparse.converter.text.tokens import CalibrationTokens

SEARCHES = {"uniform": ("teal", "uniform"), "greedy": ("teal", "greedy"), "fisher": ("wisparse", "fisher")}
SEARCHES["refine"] = ("wisparse", "refine")


def ratio(source: list[float], copy: list[float]) -> tuple[float, float]:
    """Of the means, and its standard error from the pairs."""
    mean, found = statistics.fmean(source), statistics.fmean(copy) / statistics.fmean(source)
    rest = [b - found * a for a, b in zip(source, copy, strict=True)]
    return found, statistics.stdev(rest) / mean / math.sqrt(len(rest))


class Measured:
    """Scores masks on held-out tokens, against the source's dense model."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self._dense: list[torch.Tensor] = []

    def __call__(self, model: SourceModel, result: SearchResult | None) -> tuple[Any, list[float]]:
        """The whole, and the KL of every batch; without a result, of the dense model."""
        kls = []
        with MaskedModel(model.projections) as masked:
            thresholds = {} if result is None else result.put_on(masked)
            for index, part in enumerate(self.ids.split(4)):
                known = self._dense[index : index + 1]
                found = evaluate(model.model, masked, part, thresholds, dense_log_probs=known)
                self._dense[index : index + 1] = known
                kls.append(found)
        mean = {name: statistics.fmean(getattr(one, name) for one in kls) for name in vars(kls[0])}
        mean["num_tokens"] = self.ids.numel()
        return type(kls[0])(**mean), [one.kl for one in kls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5])
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=["uniform", "fisher"])
    options = options_of(parser)
    source = load_source(options.model, device=options.device)
    tokens = stdlib_tokens(source, "calibration", options.num_samples, options.seq_len, options.seed)
    held_out = stdlib_tokens(source, "evaluation", options.eval_tokens // options.seq_len, options.seq_len, 1)
    measured = Measured(held_out.input_ids)
    measured(source, None)
    facts = {
        "model": options.model.name,
        "calibration tokens": tokens.input_ids.numel(),
        "evaluation tokens": held_out.input_ids.numel(),
        **describe_machine(source.device),
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        files = sorted(one for one in Path(sysconfig.get_paths()["stdlib"]).glob("*.py") if one.stat().st_size > 8192)
        with Clock() as clock:
            made = rotate(
                options.model,
                Path(work) / "copy",
                calibration=[str(file) for file in files[0::2]],
                num_samples=16,
                seq_len=options.seq_len,
                device=options.device,
            )
        copy = load_source(made.folder, device=options.device)
        facts |= {"seconds to rotate": round(clock.spent, 1), "KL of the dense copy": measured(copy, None)[0].kl}
        print_head("Rotation", facts)
        for sparsity in options.sparsities:
            for label in options.searches:
                rows += compare(label, sparsity, source, copy, tokens, measured, options)
    publish("rotation", "Rotation", options, facts, rows)


def compare(
    label: str,
    sparsity: float,
    source: SourceModel,
    copy: SourceModel,
    tokens: CalibrationTokens,
    measured: Measured,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One search on both; two rows."""
    method, kind = SEARCHES[label]
    quick = None if kind in ("fisher", "refine") else options.kl_tokens
    settings = SearchSettings(sparsity=sparsity, method=method, search=kind, kl_tokens=quick, seed=options.seed)
    rows, kls = [], []
    for name, model in (("source", source), ("copy", copy)):
        with Clock() as clock:
            result = search(model, tokens, settings)
        found, parts = measured(model, result)
        rows.append(
            {
                "search": label,
                "sparsity": sparsity,
                **row(f"{label} {sparsity:.0%}, {name}", found, clock.spent, result),
            }
        )
        kls.append(parts)
        print(f"{rows[-1]['recipe']}: KL {found.kl:.4f}, realised {found.realised_sparsity:.4f}", flush=True)
    rows[-1]["ratio"], rows[-1]["ratio_stderr"] = ratio(*kls)
    print(f"  ratio {rows[-1]['ratio']:.3f} +- {rows[-1]['ratio_stderr']:.3f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
