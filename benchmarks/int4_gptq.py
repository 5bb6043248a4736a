"""What weights in few bits cost by themselves: KL(dense || quantised, dense), rounded and fitted, on text not used.

    python benchmarks/int4_gptq.py                          # the example model; some minutes on two cores
    python benchmarks/int4_gptq.py --models PATH ... --output results/int4_gptq.json

int4 in groups is fitted (GPTQ, as ``wisparse-convert --weights int4`` does) on every other file of Python's standard
library and measured on the other files, beside rounding to nearest with the same groups, and int8 and fp8 with a scale
a row. A table goes to stderr, one JSON document to stdout, and to --output if given.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quality import EXAMPLE, describe_machine, print_document, stdlib_files
from torch import Tensor

from wisparse.converter.calibration import load_calibration
from wisparse.converter.flow import BlockFlow
from wisparse.converter.gptq import group_size, quantise_weights
from wisparse.converter.masking import MaskedModel
from wisparse.converter.sensitivity import DenseReference
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.weight_types import quantise


class Measure:
    """KL of a changed model to itself as it was, over tokens that nothing else sees."""

    def __init__(self, source: SourceModel, tokens: Any) -> None:
        self.source = source
        self.flow = BlockFlow(source.model, source.config, tokens.input_ids, tokens.keep)
        self.reference = DenseReference(self.flow, MaskedModel(source.projections))
        self.weights = {name: module.weight.clone() for name, module in source.projections.items()}
        if not self.reference.keeps_distributions:
            raise SystemExit("the vocabulary is too large for so many tokens: lower --num-samples")
        for batch in range(self.flow.num_batches):
            self.reference.distribution(batch, 0)

    @torch.no_grad()
    def kl(self, change: Callable[[], Any]) -> float:
        """Nats a token after ``change``, which is undone."""
        change()
        sums = [self.reference.kl_sum(batch, self.flow.final(batch)) for batch in range(self.flow.num_batches)]
        for name, weight in self.weights.items():
            self.source.projections[name].weight.copy_(weight)
        return sum(sums) / self.flow.num_counted


def round_int4(source: SourceModel, group: int, scale_dtype: torch.dtype) -> None:
    """Every projection to nearest, in place."""
    for module in source.projections.values():
        weight: Tensor = module.weight
        weight.data.copy_(quantise("int4", weight, group=group, scale_dtype=scale_dtype).dequantise(weight.dtype))


def measured(model: Path, num_samples: int, seq_len: int) -> dict[str, Any]:
    """One model's figures; every other file calibrates, the others measure."""
    source = load_source(model, torch.float32, "cpu")
    calibration, fresh = (
        load_calibration(
            tuple(map(str, stdlib_files(kind))), source.tokenizer, num_samples=num_samples, seq_len=seq_len, seed=0
        )
        for kind in ("calibration", "evaluation")
    )
    measure, group, scale_dtype = Measure(source, fresh), group_size(source.config), torch.bfloat16

    def quantised(kind: Any) -> float:
        return measure.kl(lambda: quantise_weights(source, calibration, kind, scale_dtype))

    rounded = measure.kl(lambda: round_int4(source, group, scale_dtype))
    started = time.perf_counter()
    by_gptq = quantised("int4")
    seconds = time.perf_counter() - started
    found = {f"int4, groups of {group}, rounded": rounded, f"int4, groups of {group}, GPTQ": by_gptq}
    found |= {f"{kind}, a scale a row": quantised(kind) for kind in ("int8", "fp8")}
    print(f"{model.name}: GPTQ over rounding {by_gptq / rounded:.3f}, {seconds:.0f} s", file=sys.stderr)
    for name, value in found.items():
        print(f"  {name:32} KL {value:.5f} nats/token", file=sys.stderr)
    return {"kl": found, "gptq over rounding": by_gptq / rounded, "seconds of fitting and measuring": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=[EXAMPLE])
    parser.add_argument("--num-samples", type=int, default=32, help="of calibration, and of the evaluation")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--output", type=Path, help="write the JSON document there too")
    options = parser.parse_args()
    rows = {model.name: measured(model, options.num_samples, options.seq_len) for model in options.models}
    document = {
        "benchmark": "int4_gptq",
        "evaluation": "standard library, other files than the calibration's",
        "num_tokens": options.num_samples * (options.seq_len - 1),
        **describe_machine(torch.device("cpu")),
        "models": rows,
    }
    print_document(document, options.output)


if __name__ == "__main__":
    main()
