"""Every weight type and level on an NVIDIA GPU, beside the dense model under ``torch.compile``, in one run.

    PYTHONPATH=. python benchmarks/gpu_weights.py --out results
    PYTHONPATH=. python benchmarks/gpu_weights.py --shape qwen3-32b --blocks 8
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_weights.py --tiny   # without a GPU: does it run

Random weights, made and rounded on the device; thresholds are calibrated on the bf16 model. Those of graded weights are
put where as many channels of each plane are read as in a converted model (``KEPT``). A prompt of 5 tokens, then 200 greedy
steps, timed as by ``wisparse bench``; medians of five runs. The logits of a step are compared with those of a prompt
over the same weights, and a run with its repetition. Results are written after each row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_baseline import Baseline
from gpu_models import SHAPES, calibrate, mask_bundle, need_gpu, random_bundle, tiny

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.manifest import level_name, unread
from wisparse.formats.weight_types import interleaved, quantise
from wisparse.runtime.benchmark import Workload, machine, read_bandwidth_gbps, time_run
from wisparse.runtime.cuda import weights as cuda_weights
from wisparse.runtime.cuda.decoder import CudaDecoder

# Bits -> the shares of channels whose high and whose low plane is read, as of the two example models.
KEPT = {4.25: (0.84, 0.2225), 3.5: (0.72, 0.155), 3.0: (0.63, 0.12)}
SPARSITIES = (0.0, 0.3, 0.4, 0.5)
LEVELS = {
    **dict.fromkeys(("native", "int8", "fp8", "int4"), SPARSITIES),
    "graded": tuple(unread(bits) for bits in (8.0, *KEPT)),
}
PROMPT, TOKENS, RUNS = 5, 200, 5

Masks = dict[str, ProjectionMask]


class GradedSource(cuda_weights._Source):
    """Reads plain weights as a graded bundle's."""

    def weight(self, name: str, weights: str) -> Any:
        if "layers" not in name:
            return super().weight(name, weights)
        group = next(size for size in (128, 64, 8) if self.checkpoint.shapes[name][1] % size == 0)
        return interleaved(quantise("int8", self.tensor(name), group=group, graded=True))


def masks_by_sparsity(bundle: SimpleNamespace, device: torch.device, dtype: torch.dtype) -> dict[float, Masks]:
    """The masks of every sparsity that a row needs, calibrated on the plain weights; those of 0 drop nothing."""
    wanted = sorted({*SPARSITIES[1:], *(round(1 - share, 6) for kept in KEPT.values() for share in kept)})
    decoder = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
    settings = calibrate(decoder, wanted, tokens=128)
    found: dict[float, Masks] = {}
    for sparsity in wanted:
        mask_bundle(bundle, decoder, settings, sparsity)
        found[sparsity] = dict(bundle.masks)
    decoder.close()
    found[0.0] = {name: ProjectionMask(mask.channel_scale, 0.0, 0.0) for name, mask in found[wanted[0]].items()}
    return found


def masks_of(weights: str, level: float, masks: Mapping[float, Masks]) -> Masks:
    if weights != "graded":
        return masks[level]
    if level == 0:
        return {name: replace(mask, plane_thresholds=(0.0, 0.0)) for name, mask in masks[0.0].items()}
    kept = next(kept for bits, kept in KEPT.items() if unread(bits) == level)
    high, low = (masks[round(1 - share, 6)] for share in kept)
    return {
        name: replace(mask, sparsity=level, plane_thresholds=(mask.threshold, low[name].threshold))
        for name, mask in high.items()
    }


def measure(decoder: CudaDecoder, tokens: int, runs: int, bandwidth: float) -> dict[str, Any]:
    """A row: speed, the share of it that the bytes read allow, and the two comparisons."""
    work = Workload(PROMPT, tokens, 1, runs)
    time_run(decoder, work)  # compiles and warms up
    step_ms = statistics.median(time_run(decoder, work)[1] for _ in range(runs)) / tokens * 1e3
    ids = torch.randint(decoder.config.vocab_size, (64,), generator=torch.Generator().manual_seed(3))
    decoder.measure_sparsity(True)
    decoder.logits(ids, 0)
    dropped = decoder.realised_sparsity() or 0.0
    decoder.measure_sparsity(False)
    ids = ids[: PROMPT + 1]
    decoder.prefill(0, ids[:-1], PROMPT)
    step, prompt = decoder.decode(ids[-1:])[0].clone(), decoder.logits(ids, PROMPT)[-1]
    answers: list[list[int]] = []
    for _ in range(2):
        answer = [int(decoder.prefill(0, ids, len(ids)).argmax())]
        for _ in range(min(64, tokens)):
            answer.append(int(decoder.decode(torch.tensor(answer[-1:])).argmax()))
        answers.append(answer)
    inside, head = decoder.bytes_read()
    return {
        "tok_per_s": 1e3 / step_ms,
        "step_ms": step_ms,
        "unread": dropped,
        "share_of_ideal": (inside * (1 - dropped) + head) / bandwidth * 1e-6 / step_ms,
        "weights_bytes": decoder.weights.num_bytes,
        "step_against_prompt": float((step - prompt).norm() / prompt.norm()),
        "repeats": answers[0] == answers[1],
    }


def table(result: dict[str, Any]) -> str:
    about, base = result["machine"], result.get("baseline", {}).get("tok_per_s")
    lines = [
        f"# Weight types and levels on an NVIDIA GPU: {result['shape']}",
        "",
        f"{about['device']}; torch {about['torch']}, Triton {about.get('triton', '')}; random weights; prompt {PROMPT}, "
        f"{result['tokens']} tokens, medians of {result['runs']} runs; memory reads {result['read_gbps']:,.0f} GB/s. "
        "Made by `benchmarks/gpu_weights.py`.",
        "",
        "| weights, level | tok/s | ms a step | over torch.compile | of what the bytes allow | unread | step against prompt "
        "| repeats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if base:
        lines.append(f"| torch.compile, bf16 | {base:,.0f} | {1e3 / base:.3f} | 1.00x | | | | |")
    for row in result["rows"]:
        name = "bf16" if row["weights"] == "native" else row["weights"]
        over = f"{row['tok_per_s'] / base:.2f}x" if base else ""
        lines.append(
            f"| {name}, {level_name(row['level'], row['weights'] == 'graded')} | {row['tok_per_s']:,.0f} | "
            f"{row['step_ms']:.3f} | {over} | {row['share_of_ideal']:.0%} | "
            f"{row['unread']:.1%} | {row['step_against_prompt']:.1e} | {'yes' if row['repeats'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has, without torch.compile")
    parser.add_argument("--weights", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the shape's family")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", Path(__file__).parent / "results")))
    options = parser.parse_args()
    if not options.tiny:
        need_gpu(parser)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if options.tiny else torch.bfloat16  # the interpreter rounds bf16 in ways of its own
    shape = tiny(SHAPES[options.shape]) if options.tiny else SHAPES[options.shape]
    tokens, runs = (3, 1) if options.tiny else (TOKENS, RUNS)
    bundle = random_bundle(shape, num_blocks=options.blocks, dtype=dtype)
    bandwidth = read_bandwidth_gbps(device)
    result: dict[str, Any] = {
        "shape": "tiny" if options.tiny else options.shape + (f", {options.blocks} blocks" if options.blocks else ""),
        "machine": machine(device), "read_gbps": bandwidth, "prompt": PROMPT, "tokens": tokens, "runs": runs, "rows": [],
    }  # fmt: skip
    if not (options.tiny or options.blocks):
        rates = Baseline(bundle, device, dtype, 1, 256).tok_per_s(tokens=tokens, runs=runs)
        result["baseline"] = {"tok_per_s": statistics.median(rates), "runs": rates}
        torch.cuda.empty_cache()
    masks = masks_by_sparsity(bundle, device, dtype)
    options.out.mkdir(parents=True, exist_ok=True)
    name = "gpu-h200-weights" + ("" if options.shape == "llama-3.1-8b" else f"-{options.shape}")
    plain_source = cuda_weights._Source
    for weights in options.weights:
        bundle.masks = masks_of(weights, 0.0, masks)
        cuda_weights._Source = GradedSource if weights == "graded" else plain_source  # type: ignore[misc]
        began = time.perf_counter()
        decoder = CudaDecoder(
            bundle, device=device, dtype=dtype, max_seq_len=PROMPT + tokens + 80,
            weights="native" if weights == "graded" else weights,
        )  # fmt: skip
        load_s = time.perf_counter() - began
        for level in LEVELS[weights]:
            decoder.set_masks(masks_of(weights, level, masks))
            row = {"weights": weights, "level": level, "load_s": load_s, **measure(decoder, tokens, runs, bandwidth)}
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.out / f"{name}.md").write_text(table(result))
        decoder.close()
    print(table(result))


if __name__ == "__main__":
    main()
