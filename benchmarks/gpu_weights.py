"""Weights in fewer bits on an NVIDIA GPU, dense and sparse, beside the same ``torch.compile`` baseline, in one run.

    PYTHONPATH=. python benchmarks/gpu_weights.py --out results
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_weights.py --tiny   # without a GPU: does it run

Random weights of the 8B shape, made and rounded on the device; thresholds calibrated on the bf16 model and used with
every type, as a bundle's are. A prompt of 5 tokens, then 200 greedy steps whose token the host reads, as ``wisparse
bench`` times them; medians of five runs. Under each type the step is compared with the prompt's path over the same
weights, and a run with its repetition. The fixed part of a step is where a line through the bf16 rows meets no bytes.
Every part has its own try; what is known is written after each, to ``gpu-h200-weights.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from gpu_baseline import Baseline
from gpu_models import SHAPES, calibrate, mask_bundle, random_bundle, tiny

from wisparse.formats.bundle import ProjectionMask
from wisparse.runtime.benchmark import Workload, machine, read_bandwidth_gbps, time_run, wait
from wisparse.runtime.cuda.decoder import CudaDecoder

SHAPE = "llama-3.1-8b"
NAME = "gpu-h200-weights"
PROMPT, TOKENS, CONTEXT = 5, 200, 4096
PARTS = ("baseline", "native", "int8", "fp8", "int4", "memory")


@dataclass(frozen=True)
class Goal:
    """A row of the table: what is measured, and what is asked for: at least, and aimed for."""

    weights: str
    sparsity: float
    batch: int = 1
    least: float | None = None
    aim: float | None = None

    @property
    def name(self) -> str:
        kind = {"native": "bf16", "int4": "int4, groups of 128"}.get(self.weights, self.weights)
        return f"{kind}, {self.sparsity:.0%}" + (f", {self.batch} rows" if self.batch > 1 else "")


GOALS = (
    Goal("native", 0.0),
    Goal("native", 0.3),
    Goal("native", 0.5, 1, 404, 470),
    Goal("int8", 0.0, 1, 360, 440),
    Goal("int8", 0.5, 1, 540, 680),
    Goal("fp8", 0.0, 1, 350, 430),
    Goal("fp8", 0.5, 1, 520, 660),
    Goal("int4", 0.0, 1, 460, 650),
    Goal("int4", 0.3, 1, 540, 800),
    Goal("int4", 0.5, 1, 620, 1000),
    Goal("int4", 0.0, 8, 2400, 3500),
)
FIXED_MS, MEMORY_GB = (0.50, 0.30), (6.5, 5.5)


@dataclass(frozen=True)
class Setting:
    """What all parts share."""

    bundle: SimpleNamespace
    device: torch.device
    dtype: torch.dtype
    prompt: int
    tokens: int
    context: int
    runs: int

    def decoder(self, weights: str, batch: int = 1, length: int | None = None) -> CudaDecoder:
        length = length or self.prompt + self.tokens + 8
        return CudaDecoder(
            self.bundle, device=self.device, dtype=self.dtype, max_seq_len=length, max_batch=batch, weights=weights
        )


def baseline(setting: Setting) -> dict:
    """tok/s of plain PyTorch under ``torch.compile``, in the model's own type."""
    model = Baseline(setting.bundle, setting.device, setting.dtype, 1, 256)
    runs = model.tok_per_s(tokens=setting.tokens, runs=setting.runs)
    return {"tok_per_s": statistics.median(runs), "runs": runs}


def calibrated_masks(setting: Setting) -> dict[float, dict[str, ProjectionMask]]:
    """Sparsity -> masks, from one pass of the plain model at each; those of 0 drop nothing."""
    decoder = setting.decoder("native", length=max(256, setting.prompt + setting.tokens + 8))
    wanted = sorted({goal.sparsity for goal in GOALS} - {0.0})
    settings = calibrate(decoder, wanted, tokens=min(256, decoder.max_seq_len))
    found = {}
    for sparsity in wanted:
        mask_bundle(setting.bundle, decoder, settings, sparsity)
        found[sparsity] = dict(setting.bundle.masks)
    decoder.close()
    found[0.0] = {name: ProjectionMask(mask.channel_scale, 0.0, 0.0) for name, mask in found[wanted[0]].items()}
    setting.bundle.masks.clear()
    setting.bundle.masks.update(found[0.0])
    return found


def measure(
    setting: Setting,
    weights: str,
    masks: Mapping[float, Mapping[str, ProjectionMask]],
    bandwidth: float,
    each: Callable[[str, dict], None],
) -> None:
    """All rows of one type; each is reported as it is known."""
    goals = [goal for goal in GOALS if goal.weights == weights]
    began = time.perf_counter()
    decoder = setting.decoder(weights, batch=max(goal.batch for goal in goals))
    wait(setting.device)
    loaded = time.perf_counter() - began
    try:
        for goal in goals:
            began = time.perf_counter()
            try:
                decoder.set_masks(masks[goal.sparsity])
                row = rate(setting, decoder, goal, bandwidth)
            except Exception:
                row = {"error": traceback.format_exc()}
            each(goal.name, {"goal": asdict(goal), "load_s": loaded, "s": time.perf_counter() - began, **row})
    finally:
        decoder.close()


def rate(setting: Setting, decoder: CudaDecoder, goal: Goal, bandwidth: float) -> dict:
    work = Workload(setting.prompt, setting.tokens, goal.batch, setting.runs)
    time_run(decoder, work)  # compiles and warms up
    runs = [time_run(decoder, work)[1] for _ in range(setting.runs)]
    step_ms = statistics.median(runs) / work.new_tokens * 1e3
    realised = realised_sparsity(setting, decoder) if goal.sparsity else 0.0
    inside, head = decoder.bytes_read()
    needed = inside * (1 - realised) + head
    return {
        "tok_per_s": goal.batch * 1e3 / step_ms,
        "step_ms": step_ms,
        "runs": [goal.batch * work.new_tokens / seconds for seconds in runs],
        "realised": realised,
        "bytes": needed,
        "weights_bytes": decoder.weights.num_bytes,
        "share_of_ideal": needed / bandwidth * 1e-6 / step_ms,
        **agreement(setting, decoder),
    }


def realised_sparsity(setting: Setting, decoder: CudaDecoder) -> float:
    """Of a prompt read with masks, which needs no kernels of its own."""
    decoder.measure_sparsity(True)
    decoder.logits(some_ids(setting, 64), 0)
    found = decoder.realised_sparsity()
    decoder.measure_sparsity(False)
    return found or 0.0


def agreement(setting: Setting, decoder: CudaDecoder) -> dict:
    """A step's logits against the prompt's path over the same weights, and whether a run repeats itself."""
    ids = some_ids(setting, setting.prompt + 1)
    decoder.prefill(0, ids[:-1], setting.prompt)
    step = decoder.decode(ids[-1:])[0].clone()
    other = decoder.logits(ids, setting.prompt)[-1]
    runs = []
    for _ in range(2):
        last = decoder.prefill(0, ids, len(ids)).argmax().view(1)
        tokens = [int(last)]
        for _ in range(min(64, setting.tokens)):
            last = decoder.decode(torch.tensor(tokens[-1:])).argmax(-1)
            tokens.append(int(last))
        runs.append(tokens)
    return {"step_against_prompt": float((step - other).norm() / other.norm()), "repeats": runs[0] == runs[1]}


def some_ids(setting: Setting, count: int) -> torch.Tensor:
    count = min(count, setting.prompt + setting.tokens)
    return torch.randint(setting.bundle.config.vocab_size, (count,), generator=torch.Generator().manual_seed(3))


def memory(setting: Setting) -> dict:
    """The most that loading, a prompt and an answer which fill the context take together."""
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    decoder = setting.decoder("int4", length=setting.context)
    loaded = torch.cuda.max_memory_allocated() if on_gpu else 0
    work = Workload(setting.context - setting.tokens, setting.tokens)
    seconds = time_run(decoder, work)
    found = {
        "weights_bytes": decoder.weights.num_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "peak_while_loading_bytes": loaded,
        "prefill_s": seconds[0],
        "decode_tok_per_s": setting.tokens / seconds[1],
    }
    decoder.close()
    return found


def fixed_part(rows: Mapping[str, dict], bandwidth: float) -> dict | None:
    """Milliseconds of a bf16 step that no byte accounts for: a straight line through its rows, least squares."""
    points = [
        (row["bytes"] * 1e-9, row["step_ms"])
        for row in rows.values()
        if "bytes" in row and row["goal"]["weights"] == "native"
    ]
    if len({x for x, _ in points}) < 2:
        return None
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return {"ms": intercept, "gbps": 1e3 / slope, "read_gbps": bandwidth, "points": points}


def table(result: dict) -> str:
    """The figures beside the goals, as Markdown."""
    base = result.get("baseline", {}).get("tok_per_s")
    lines = [
        "# Weights in fewer bits on an NVIDIA GPU",
        "",
        f"{result['machine'].get('device', '')}; torch {result['machine']['torch']}, Triton "
        f"{result['machine'].get('triton', '')}; {result['shape']}, random weights; prompt {result['prompt']}, "
        f"{result['tokens']} tokens, medians of {result['runs']} runs; memory reads {result['read_gbps']:,.0f} GB/s. "
        "Made by `benchmarks/gpu_weights.py`.",
        "",
        "| weights, sparsity | tok/s | over the baseline | at least | aim | of what the bytes allow | realised | step "
        "against prompt | repeats |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    if base:
        lines.append(f"| torch.compile, bf16 | {base:,.0f} | 1.00x | | | | | | |")
    for name, row in result["rows"].items():
        goal = row["goal"]
        wanted = " | ".join("" if goal[key] is None else f"{goal[key]:,.0f}" for key in ("least", "aim"))
        if "error" in row:
            lines.append(f"| {name} | failed: {row['error'].strip().splitlines()[-1]} | | {wanted} | | | | |")
            continue
        over = f"{row['tok_per_s'] / base:.2f}x" if base and goal["batch"] == 1 else ""
        lines.append(
            f"| {name} | {row['tok_per_s']:,.0f} | {over} | {wanted} | {row['share_of_ideal']:.0%} | "
            f"{row['realised']:.1%} | {row['step_against_prompt']:.1e} | {'yes' if row['repeats'] else 'NO'} |"
        )
    fixed, used = result.get("fixed"), result.get("memory", {})
    if fixed:
        lines += ["", f"Fixed part of a step: {fixed['ms']:.3f} ms (at most {FIXED_MS[0]}, aim {FIXED_MS[1]})."]
    if "peak_bytes" in used:
        lines += [
            "",
            f"GPU memory, int4 and an output layer of int8, {result['context']:,} positions, peak: "
            f"{used['peak_bytes'] / 1e9:.2f} GB (at most {MEMORY_GB[0]}, aim {MEMORY_GB[1]}), of which the weights are "
            f"{used['weights_bytes'] / 1e9:.2f}; prompt of {result['context'] - result['tokens']:,} tokens in "
            f"{used['prefill_s']:.2f} s, kernels compiled within.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has, to try it out")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", Path(__file__).parent / "results")))
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or arguments.tiny):
        parser.error("without a GPU: only --tiny, with TRITON_INTERPRET=1")
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float16  # the interpreter rounds bf16 in ways of its own
    shape = tiny(SHAPES[SHAPE]) if arguments.tiny else SHAPES[SHAPE]
    began = time.perf_counter()
    setting = Setting(
        random_bundle(shape, num_blocks=1 if arguments.tiny else arguments.blocks, dtype=dtype), device, dtype, PROMPT,
        *((3, 24, 1) if arguments.tiny else (TOKENS, CONTEXT, arguments.runs)),
    )  # fmt: skip
    bandwidth = read_bandwidth_gbps(device)
    result: dict = {
        "shape": "tiny" if arguments.tiny else SHAPE, "machine": machine(device), "read_gbps": bandwidth,
        "prompt": setting.prompt, "tokens": setting.tokens, "context": setting.context, "runs": setting.runs,
        "rows": {},
    }  # fmt: skip
    print(json.dumps(result), flush=True)

    def keep() -> None:
        result["fixed"] = fixed_part(result["rows"], bandwidth)
        result["seconds"] = time.perf_counter() - began
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
        (arguments.out / f"{NAME}.md").write_text(table(result))

    def attempt(name: str, part: Callable[[], dict]) -> dict:
        started = time.perf_counter()
        try:
            found = part()
        except Exception:
            found = {"error": traceback.format_exc()}
            print(found["error"], flush=True)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - started:.0f} s, {time.perf_counter() - began:.0f} s in all", flush=True)
        return found

    def report(name: str, row: dict) -> None:
        result["rows"][name] = row
        keep()
        base = result.get("baseline", {}).get("tok_per_s")
        if "error" in row:
            print(f"{name}: failed\n{row['error']}", flush=True)
            return
        over = f", {row['tok_per_s'] / base:.2f}x" if base else ""
        print(
            f"{name}: {row['tok_per_s']:,.1f} tok/s{over}, {row['step_ms']:.3f} ms, {row['share_of_ideal']:.1%} of the "
            f"ideal, goal {row['goal']['least']}, realised {row['realised']:.1%}, step against prompt "
            f"{row['step_against_prompt']:.1e}, repeats {row['repeats']}, loaded in {row['load_s']:.0f} s, "
            f"measured in {row['s']:.0f} s",
            flush=True,
        )

    if "baseline" in arguments.only and on_gpu:
        result["baseline"] = attempt("baseline", lambda: baseline(setting))
        print(f"torch.compile: {result['baseline'].get('tok_per_s')}", flush=True)
    masks: dict = {}
    if set(arguments.only) - {"baseline", "memory"}:
        attempt("masks", lambda: masks.update(calibrated_masks(setting)) or {})
    for weights in [part for part in arguments.only if part not in ("baseline", "memory")]:
        failed = attempt(weights, lambda w=weights: measure(setting, w, masks, bandwidth, report) or {})
        for goal in GOALS if "error" in failed else ():
            if goal.weights == weights and goal.name not in result["rows"]:
                report(goal.name, {"goal": asdict(goal), **failed})
    if "memory" in arguments.only:
        result["memory"] = attempt("memory", lambda: memory(setting))
    keep()
    print(table(result))


if __name__ == "__main__":
    main()
