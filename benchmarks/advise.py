"""What ``wisparse advise`` expects, beside what the same machine then decodes at.

    PYTHONPATH=. python benchmarks/advise.py --shape example llama-300m llama-1b --work-dir FOLDER
    PYTHONPATH=. python benchmarks/advise.py --shape llama-8b --device cuda

Random weights, thresholds calibrated to 50% on random tokens, but for ``example``, whose weights are trained. Forecast
and measurement (as ``wisparse bench`` times it, fewer tokens for large models) alternate ``--rounds`` times; a figure is
the median of the rounds. Results are merged into ``--output``, by shape. On a CPU set GOMP_SPINCOUNT=3000, as the
command line does.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from shapes import LLAMA, LLAMA_1B, LLAMA_8B

from wisparse.formats.bundle import Bundle
from wisparse.runtime.backends import make_decoder
from wisparse.runtime.benchmark import Workload, machine, time_run
from wisparse.runtime.forecast import forecast

TOKENS = {"bos_token_id": 0, "eos_token_id": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-300m": LLAMA | TOKENS | dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16, head_dim=64,
        vocab_size=32000,
    ),
    "llama-1b": LLAMA_1B | TOKENS,
    "llama-8b": LLAMA_8B | TOKENS,
}  # fmt: skip
LEVELS = (0.0, 0.5)


def masked_bundle(shape: str, work: Path, device: torch.device) -> tuple[Any, dict[float, Any]]:
    """A bundle, or what a decoder reads of one, and its masks by level."""
    if device.type == "cuda":
        from gpu_models import calibrate, mask_bundle, random_bundle

        from wisparse.runtime.cuda.decoder import CudaDecoder

        made = random_bundle(SHAPES[shape])
        masks = {0.0: dict(made.masks)}
        native = CudaDecoder(made, device=device, dtype=torch.bfloat16, max_seq_len=256)
        mask_bundle(made, native, calibrate(native, [0.5]), 0.5)
        native.close()
        return made, masks | {0.5: made.masks}
    from cpu_models import calibrated_bundle, random_checkpoint

    source = Path("examples/pycode-llama-6m") if shape == "example" else random_checkpoint(SHAPES[shape], work / shape)
    bundle = Bundle.open(calibrated_bundle(source, work / f"{shape}-50%", 0.5))
    return bundle, {level: bundle.at(level).masks for level in LEVELS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=["example", *SHAPES], required=True)
    parser.add_argument("--work-dir", type=Path, default=Path("work"))
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/advise.json"))
    arguments = parser.parse_args()
    device = arguments.device
    for shape in arguments.shape:
        bundle, masks = masked_bundle(shape, arguments.work_dir, device)
        work = Workload(new_tokens=200 if shape == "example" or device.type == "cuda" else 16)
        kinds = ["native", "int8", "int4"]
        sizes = dict(device=device, dtype=torch.bfloat16, max_seq_len=256)
        decoders = {kind: make_decoder(bundle, weights=kind, **sizes) for kind in kinds}
        expected: dict[tuple[str, float], list[float]] = {(kind, level): [] for kind in kinds for level in LEVELS}
        measured: dict[tuple[str, float], list[float]] = {key: [] for key in expected}
        for _ in range(arguments.rounds):
            for one in forecast(bundle.config, device, LEVELS, 4096):
                expected.setdefault((one.weights, one.sparsity), []).append(one.tok_per_s)
            for again in range(2):
                for kind, level in measured:
                    decoders[kind].set_masks(masks[level])
                    seconds = time_run(decoders[kind], work)[1]
                    if again:  # the first run warms up
                        measured[kind, level].append(work.new_tokens / seconds)
        rows = []
        for (kind, level), rates in measured.items():
            found, guess = statistics.median(rates), statistics.median(expected[kind, level])
            row = {"weights": kind, "sparsity": level, "expected": guess, "measured": found, "ratio": guess / found}
            rows.append(row | {"expected_rounds": expected[kind, level], "measured_rounds": rates})
            print(
                f"{shape} {kind} {level:.0%}: {guess:.1f} expected, {found:.1f} tok/s, {guess / found:.3f}", flush=True
            )
        for decoder in decoders.values():
            decoder.close()
        document = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        document[f"{shape} on {device.type}"] = {"machine": machine(device), "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
