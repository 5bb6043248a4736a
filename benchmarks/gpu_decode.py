"""Decoding speed on an NVIDIA GPU: dense and sparse against a ``torch.compile`` baseline, in one run.

    PYTHONPATH=. python benchmarks/gpu_decode.py --shape llama-3.1-8b --parts baseline decode kernels context batch

Random weights of a published shape, bf16, thresholds calibrated to each target on the device; a 5-token prompt, 200
tokens, medians. ``share`` is of the ideal: the bytes of the kept weights over the read ceiling measured in the same
run. Prints tables, then one line of JSON (also to ``$OUT/gpu-decode-<shape>.json`` if OUT is set).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import triton
from gpu_baseline import Baseline
from gpu_models import SHAPES, calibrate, need_gpu, random_bundle, set_sparsity

from wisparse.kernels.gpu.plan import regime
from wisparse.runtime.benchmark import Workload, read_bandwidth_gbps, time_run
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.kernel_times import time_kernels

PROMPT, TOKENS = 5, 200
BATCHES = (2, 4, 8)


def rates(decoder: CudaDecoder, batch: int = 1, prompt: int = PROMPT, runs: int = 5) -> list[float]:
    time_run(decoder, Workload(prompt, 8, batch))
    return [batch * TOKENS / time_run(decoder, Workload(prompt, TOKENS, batch))[1] for _ in range(runs)]


def kernel_table(decoder: CudaDecoder, sparsity: float, ceiling: float, rows: int = 1) -> dict:
    """Microseconds of each launch of a block, averaged over all blocks, with its share of the ideal: the weights that
    its rows keep, read at the ceiling (many rows read all of them)."""
    several = regime(rows, dense=sparsity == 0) == "batch"
    table = time_kernels(decoder, batch=rows, sparsity=0 if several else sparsity, gbps=ceiling)
    print(f"per launch at {sparsity:.0%}, {rows} rows:")
    for role, row in table.items():
        ideal = f"  ideal {row['ideal_us']:7.2f}  {row['ideal_us'] / row['us']:6.1%}" if "ideal_us" in row else ""
        print(f"  {role:10s} {row['us']:8.2f} us{ideal}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--parts", nargs="+", default=["baseline", "decode", "kernels", "context", "batch"])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.0, 0.3, 0.4, 0.5])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    need_gpu(parser)
    parts = set(arguments.parts)
    device, dtype = torch.device("cuda"), torch.bfloat16
    properties = torch.cuda.get_device_properties(0)
    ceiling = read_bandwidth_gbps(device)
    result: dict = {
        "shape": arguments.shape, "gpu": properties.name, "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(), "ceiling_gbps": ceiling,
        "prompt": PROMPT, "tokens": TOKENS, "runs": arguments.runs,
    }  # fmt: skip
    print(json.dumps(result), flush=True)

    bundle = random_bundle(arguments.shape)
    baseline = {}
    for batch in [size for size in (1, *BATCHES) if ("baseline" if size == 1 else f"baseline{size}") in parts]:
        model = Baseline(bundle, device, dtype, batch, 256)
        measured = model.tok_per_s(tokens=TOKENS, runs=arguments.runs, batch=batch)
        baseline[batch] = statistics.median(measured)
        print(
            f"torch.compile dense, batch {batch}: {baseline[batch]:.1f} tok/s  {[round(r, 1) for r in measured]}",
            flush=True,
        )
        del model
        gc.collect()
        torch.cuda.empty_cache()
    result["baseline_tok_per_s"] = baseline

    began = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    context = 8192 + TOKENS + 16 if "context" in parts else 512
    decoder = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=context, max_batch=max(BATCHES))
    torch.cuda.synchronize()
    result["load_s"] = time.perf_counter() - began
    result["load_peak_over_weights"] = torch.cuda.max_memory_allocated() / decoder.weights.num_bytes
    print(f"made and transposed in {result['load_s']:.1f} s, peak {result['load_peak_over_weights']:.2f}x the weights")
    calibrated = calibrate(decoder, [s for s in arguments.sparsities if s > 0])

    result["decode"] = {}
    for sparsity in arguments.sparsities if "decode" in parts else []:
        set_sparsity(decoder, calibrated, sparsity)
        measured = rates(decoder, runs=arguments.runs)
        inside, head = decoder.bytes_read()
        ideal = ceiling * 1e9 / (inside * (1 - sparsity) + head)
        row = {"tok_per_s": statistics.median(measured), "ideal": ideal, "runs": measured}
        text = f"{sparsity:4.0%}: {row['tok_per_s']:.1f} tok/s, {row['tok_per_s'] / ideal:.1%} of ideal {ideal:.0f}"
        if 1 in baseline:
            row["over_baseline"] = row["tok_per_s"] / baseline[1]
            text += f", {row['over_baseline']:.2f}x the baseline"
        if sparsity > 0:  # what the generated tokens really keep
            decoder.measure_sparsity(True)
            time_run(decoder, Workload(PROMPT, 24))
            row["realised"] = decoder.realised_sparsity()
            decoder.measure_sparsity(False)
            text += f", realised {row['realised']:.1%}"
        print(text + f", runs {[round(r, 1) for r in measured]}", flush=True)
        result["decode"][str(sparsity)] = row
        if "kernels" in parts and sparsity in (0.0, 0.5):
            row["kernels"] = kernel_table(decoder, sparsity, ceiling)

    if "context" in parts:
        set_sparsity(decoder, calibrated, 0.5)
        short, long = (statistics.median(rates(decoder, prompt=p, runs=3)) for p in (PROMPT, 8192))
        result["context_8k"] = {"tok_per_s": long, "over_short": long / short}
        print(f"context 8192: {long:.1f} tok/s, {long / short:.3f} of {short:.1f} at {TOKENS}", flush=True)
    for batch in BATCHES if "batch" in parts else []:
        result[f"batch_{batch}"] = {}
        for sparsity in arguments.sparsities:
            set_sparsity(decoder, calibrated, sparsity)
            rate = statistics.median(rates(decoder, batch=batch, runs=3))
            result[f"batch_{batch}"][str(sparsity)] = rate
            print(f"batch {batch} at {sparsity:.0%}: {rate:.1f} tok/s in all", flush=True)
        if "kernels" in parts:
            kernel_table(decoder, arguments.sparsities[-1], ceiling, rows=batch)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    line = json.dumps(result)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"gpu-decode-{arguments.shape}.json").write_text(line)
    print(line)


if __name__ == "__main__":
    main()
