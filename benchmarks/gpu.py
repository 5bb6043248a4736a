"""What this project measures on an NVIDIA GPU; each case is a command, and ``--help`` says what it builds and times.

    PYTHONPATH=. python benchmarks/gpu.py weights --rows 1,8,32
    PYTHONPATH=. python benchmarks/gpu.py first --weights native,int4 --peer 'vllm serve {model} --port {port} \\
        --load-format dummy --max-model-len 20480 --no-enable-prefix-caching'

Models have published shapes and random weights, made on the device (``gpu_models.py``). Results are printed, the last
line or block is JSON or the table, and written into the folder that ``--out`` or the variable OUT names. Several values
of an option are separated by commas. ``weights`` and ``experts`` have ``--tiny``, which runs without a GPU under
TRITON_INTERPRET=1; ``first --tiny --device cpu`` needs no interpreter.
"""

from __future__ import annotations

import gc
import json
import random
import shlex
import statistics
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import gpu_models as models
import torch
from gpu_baseline import Baseline
from gpu_models import Several, blocks_option, need_gpu, out_option, save, shape_option
from gpu_sanitize import sanitize
from gpu_serve import first, free_port, server
from gpu_tiles import tiles
from gpu_tokens import tokens as tokens_case
from gpu_vllm import vllm
from shapes import QWEN3_30B_A3B

from wisparse.formats.manifest import level_name
from wisparse.kernels.backend import compiling_side_by_side
from wisparse.runtime.benchmark import Workload, machine, read_bandwidth_gbps, time_run, wait
from wisparse.runtime.cuda import weights as cuda_weights
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.step import capture

PROMPT, TOKENS, RUNS = 5, 200, 5


@click.group(context_settings={"show_default": True})
def cases() -> None:
    """Measure on an NVIDIA GPU. Several values of an option are separated by commas."""


# --- weights


@cases.command()
@shape_option
@blocks_option
@click.option("--weights", "kinds", type=Several(models.LEVELS), default=",".join(models.LEVELS))
@click.option("--levels", type=Several(float), help="Sparsities, of those of each type.")
@click.option("--rows", type=Several(int), default="1", help="Sequences in a batch, of masks that are as for one.")
@click.option("--prompt", default=PROMPT, help="Tokens of the prompt.")
@click.option("--tokens", default=TOKENS, help="Decoded in a run.")
@click.option("--runs", default=RUNS)
@click.option("--baseline/--no-baseline", default=True, help="torch.compile; never with --blocks.")
@click.option("--tiny", "is_tiny", is_flag=True, help="A tiny model of the shape's family, by the interpreter.")
@out_option
def weights(
    shape: str, blocks: int | None, kinds: list[str], levels: list[float] | None, rows: list[int], prompt: int,
    tokens: int, runs: int, baseline: bool, is_tiny: bool, out: Path | None,
) -> None:  # fmt: skip
    """Decoding with every weight type at every level, beside torch.compile.

    Built: random weights, made and rounded on the device; masks are calibrated on the bf16 model. Those of graded
    weights are put where as many channels of each plane are read as in a converted model (KEPT).

    Timed: a prompt of 5 tokens, then 200 greedy steps, as by `wisparse bench`; medians of five runs. The logits of a step
    are compared with those of a prompt over the same weights, and a run with its repetition.

    Printed: JSON of each row, then the table; gpu-h200-weights*.json and .md are written after each row.
    """
    if not is_tiny:
        need_gpu()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if is_tiny else torch.bfloat16  # the interpreter rounds bf16 in ways of its own
    config = models.tiny(models.SHAPES[shape]) if is_tiny else shape
    bundle = models.random_bundle(config, num_blocks=blocks, dtype=dtype)
    bandwidth = read_bandwidth_gbps(device)
    result: dict[str, Any] = {
        "shape": "tiny" if is_tiny else shape + (f", {blocks} blocks" if blocks else ""),
        "machine": machine(device), "read_gbps": bandwidth, "prompt": prompt, "tokens": tokens, "runs": runs, "rows": [],
    }  # fmt: skip
    for batch in rows if baseline and not (is_tiny or blocks) else ():
        model = Baseline(bundle, device, dtype, batch, max(256, prompt + tokens))
        rates = model.tok_per_s(tokens=tokens, runs=runs, batch=batch)
        del model
        torch.cuda.empty_cache()
        key = "baseline" if batch == 1 else f"baseline_{batch}"
        result[key] = {"tok_per_s": statistics.median(rates), "runs": rates}
        print(json.dumps({key: result[key]}), flush=True)
    masks = models.masks_by_sparsity(bundle, device, dtype)
    name = "gpu-h200-weights" + ("" if shape == "llama-3.1-8b" else f"-{shape}")
    for kind in kinds:
        bundle.masks = models.masks_of(kind, 0.0, masks)
        source = models.GradedSource if kind == "graded" else cuda_weights._Source
        began = time.perf_counter()
        with mock.patch.object(cuda_weights, "_Source", source):
            decoder = CudaDecoder(
                bundle, device=device, dtype=dtype, max_seq_len=prompt + tokens + 80, max_batch=max(rows),
                weights="native" if kind == "graded" else kind,
            )  # fmt: skip
        load_s = time.perf_counter() - began
        for level in [one for one in models.LEVELS[kind] if levels is None or one in levels]:
            decoder.set_masks(models.masks_of(kind, level, masks))
            about = {"weights": kind, "level": level, "load_s": load_s, **compared(decoder, tokens)}
            for batch in rows:
                work = Workload(prompt, tokens, batch, runs)
                row = {**about, "batch": batch, **timed(decoder, work, about["unread"], bandwidth)}
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
                save(out, f"{name}.json", json.dumps(result, indent=1) + "\n")
                save(out, f"{name}.md", weights_table(result))
        decoder.close()
    print(weights_table(result))


def compared(decoder: CudaDecoder, tokens: int) -> dict[str, Any]:
    """The share of the weights that a prompt's positions leave unread, a step's logits against a prompt's, and whether a
    repeated answer is the same."""
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
    difference = float((step - prompt).norm() / prompt.norm())
    return {"unread": dropped, "step_against_prompt": difference, "repeats": answers[0] == answers[1]}


def timed(decoder: CudaDecoder, work: Workload, unread: float, bandwidth: float) -> dict[str, Any]:
    """Speed, and of one row the share of it that the bytes read allow."""
    time_run(decoder, work)  # compiles and warms up
    step_ms = statistics.median(time_run(decoder, work)[1] for _ in range(work.runs)) / work.new_tokens * 1e3
    inside, head = decoder.bytes_read()
    share = (inside * (1 - unread) + head) / bandwidth * 1e-6 / step_ms if work.batch == 1 else None
    return {
        "tok_per_s": work.batch * 1e3 / step_ms, "step_ms": step_ms, "share_of_ideal": share,
        "weights_bytes": decoder.weights.num_bytes,
    }  # fmt: skip


def weights_table(result: dict[str, Any]) -> str:
    about = result["machine"]
    several = any(row["batch"] != 1 for row in result["rows"])
    lines = [
        f"# Weight types and levels on an NVIDIA GPU: {result['shape']}",
        "",
        f"{about['device']}; torch {about['torch']}, Triton {about.get('triton', '')}; random weights; prompt "
        f"{result['prompt']}, {result['tokens']} tokens, medians of {result['runs']} runs; memory reads "
        f"{result['read_gbps']:,.0f} GB/s. Made by `benchmarks/gpu.py weights`.",
        "",
        "| weights, level | tok/s | ms a step | over torch.compile | of what the bytes allow | unread | step against prompt "
        "| repeats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    bases = {key: found["tok_per_s"] for key, found in result.items() if key.startswith("baseline")}
    for key, base in bases.items():
        batch = int(key.partition("_")[2] or 1)
        rows_of = f", {batch} rows" if several else ""
        lines.append(f"| torch.compile, bf16{rows_of} | {base:,.0f} | {batch * 1e3 / base:.3f} | 1.00x | | | | |")
    for row in result["rows"]:
        batch = row["batch"]
        base = bases.get("baseline" if batch == 1 else f"baseline_{batch}")
        cells = [
            f"{'bf16' if row['weights'] == 'native' else row['weights']}, "
            f"{level_name(row['level'], row['weights'] == 'graded')}" + (f", {batch} rows" if several else ""),
            f"{row['tok_per_s']:,.0f}", f"{row['step_ms']:.3f}", f"{row['tok_per_s'] / base:.2f}x" if base else "",
            f"{row['share_of_ideal']:.0%}" if row["share_of_ideal"] else "", f"{row['unread']:.1%}",
            f"{row['step_against_prompt']:.1e}", "yes" if row["repeats"] else "NO",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# --- experts

TINY_EXPERTS = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16,
    "vocab_size": 70,
}  # fmt: skip
CONTEXT = 150  # positions before the one that a step appends


@cases.command()
@click.option("--blocks", default=8)
@click.option("--weights", "kinds", type=Several(str), default="native,int8,int4")
@click.option("--rows", type=Several(int), default="1,4")
@click.option("--sparsity", "sparsities", type=Several(float), default="0,0.5")
@click.option("--prompt", default=1000, help="Tokens; at least 200.")
@click.option("--peer", help="Command of a server to measure too, with {model} and {port}.")
@click.option("--tiny", "is_tiny", is_flag=True, help="A tiny model, by the interpreter.")
@out_option
@torch.inference_mode()
def experts(
    blocks: int, kinds: list[str], rows: list[int], sparsities: list[float], prompt: int, peer: str | None, is_tiny: bool,
    out: Path | None,
) -> None:  # fmt: skip
    """Decoding with a mixture of experts, the Qwen3-30B-A3B shape, by weight type, dense and at 50%.

    Built: some of the model's 48 blocks with random weights; thresholds are the median scores of random tokens.

    Timed: captured steps of all blocks and of none, whose difference is scaled to 48 blocks; and the prompt, of which the
    first run compiles. The peer answers as many requests at once over HTTP, 200 tokens after 5.

    Printed: a line for each row with the bytes that a step reads (experts that rows share are counted again) beside the
    bandwidth of a plain read in the same run; JSON last (gpu-experts.json).
    """
    if not is_tiny:
        need_gpu()
    device, dtype = torch.device("cpu" if is_tiny else "cuda"), torch.float16 if is_tiny else torch.bfloat16
    runs, shape = (1, QWEN3_30B_A3B | TINY_EXPERTS) if is_tiny else (9, QWEN3_30B_A3B)
    scale = QWEN3_30B_A3B["num_hidden_layers"] / blocks
    side_by_side = nullcontext if is_tiny else compiling_side_by_side  # an interpreter compiles nothing
    gbps = read_bandwidth_gbps(device)
    result: dict[str, Any] = {"machine": machine(device), "gbps": gbps, "rows": []}
    print(f"a plain read reaches {gbps:.0f} GB/s", flush=True)
    for kind in kinds:
        began = time.perf_counter()
        decoder = CudaDecoder(
            models.random_bundle(shape, num_blocks=blocks, dtype=dtype), device=device, dtype=dtype, weights=kind,
            max_seq_len=min(4096, prompt + 512), max_batch=max(rows),
        )  # fmt: skip
        wait(device)
        loaded = time.perf_counter() - began
        ids = torch.randint(decoder.config.vocab_size, (prompt,), generator=torch.Generator().manual_seed(3))
        with side_by_side():
            decoder.prefill(0, ids, prompt)
        for slot in range(1, max(rows)):  # a step's rows read what is there
            decoder.prefill(slot, ids[:200], 200)
        first_ms = []
        for run in range(4):
            wait(device)
            began = time.perf_counter()
            decoder.prefill(0, (ids + run) % decoder.config.vocab_size, prompt)
            wait(device)
            first_ms.append((time.perf_counter() - began) * 1e3)
        best = min(first_ms[1:])
        print(
            f"{kind}: loaded in {loaded:.1f} s; {prompt} tokens read in {best:.2f} ms by {blocks} blocks, "
            f"{best * scale:.1f} ms scaled", flush=True,
        )  # fmt: skip
        level = max(sparsities)
        settings = models.calibrate(decoder, [level], min(1024, prompt), alpha=0.0, dense=True)[level]
        inside, head = decoder.bytes_read()
        for sparsity in sparsities:
            models.set_sparsity(decoder, {sparsity: settings}, sparsity)
            realised = 0.0
            with side_by_side():
                for count in rows:
                    decoder.step_for(count, CONTEXT + 1).prepare(compile_only=True)
                decoder.step_for(1, CONTEXT + 1).prepare(count=True, compile_only=True)
            if sparsity:
                decoder.measure_sparsity(True)
                decoder.prefill(0, ids[:20], 20)
                for token in range(4):
                    decoder.decode(torch.tensor([token + 5]))
                realised = decoder.realised_sparsity() or 0.0
                decoder.measure_sparsity(False)
            for count in rows:
                every, none = (step_ms(decoder, count, some, runs) for some in (blocks, 0))
                scaled = none + (every - none) * scale
                needed = count * inside * (1 - realised) * scale + head
                row = {
                    "weights": kind, "sparsity": sparsity, "realised": realised, "rows": count, "step_ms": scaled,
                    "us_a_block": (every - none) / blocks * 1e3, "rest_us": none * 1e3, "gigabytes": needed / 1e9,
                    "tok_per_s": count * 1e3 / scaled, "share": needed / gbps / scaled * 1e-6, "first_ms": first_ms,
                }  # fmt: skip
                result["rows"].append(row)
                print(
                    f"{kind} {sparsity:.0%} (realised {realised:.1%}), {count} rows: {scaled:.3f} ms, "
                    f"{row['tok_per_s']:.0f} tok/s; a block {row['us_a_block']:.1f} us, the rest {none * 1e3:.0f} us; "
                    f"{needed / 1e9:.2f} GB, {row['share']:.0%} of the bandwidth", flush=True,
                )  # fmt: skip
        decoder.close()
        del decoder, settings
        gc.collect()
        torch.cuda.empty_cache()
    if peer:
        result["peer"] = peer_experts(peer, rows, prompt)
        print("peer:", json.dumps(result["peer"]), flush=True)
    save(out, "gpu-experts.json", json.dumps(result) + "\n")
    print(json.dumps(result))


def step_ms(decoder: CudaDecoder, rows: int, blocks: int, runs: int) -> float:
    """Milliseconds of a captured step of the first ``blocks``."""
    for slot in range(rows):
        decoder.cache.grow(slot, CONTEXT + 12)
    step = decoder.step_for(rows, CONTEXT + 1)
    step.set_inputs(list(range(1, rows + 1)), [CONTEXT] * rows, list(range(rows)))
    replay = capture(partial(step.launch, indices=range(blocks)), decoder.device)
    times = []
    for _ in range(runs + 1):
        step.set_inputs(list(range(1, rows + 1)), [CONTEXT] * rows, list(range(rows)))
        wait(decoder.device)
        began = time.perf_counter()
        for _ in range(10):
            replay()
        wait(decoder.device)
        times.append((time.perf_counter() - began) * 100)
    return statistics.median(times[1:])


def peer_experts(command: str, rows: list[int], prompt: int) -> dict[str, Any]:
    """What another server does with the same shape."""
    dice, vocab_size, port = random.Random(1), QWEN3_30B_A3B["vocab_size"], free_port()
    ids = partial(dice.choices, range(10, vocab_size - 10))
    with tempfile.TemporaryDirectory() as folder:
        model = models.endless_source(Path(folder, "model"), vocab_size)
        (model / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"torch_dtype": "bfloat16"}), "utf-8")
        words = shlex.split(command.format(model=model, port=port))
        with server(words, port, Path(folder, "log")) as (client, ready):
            more = {"model": str(model), "ignore_eos": True}
            times = [client.stream(ids(k=prompt), most=2, **more).first_ms for _ in range(6)]
            rates = {count: client.rate(lambda: [ids(k=5) for _ in range(count)], **more) for count in rows}  # noqa: B023
    return {"tok_per_s": rates, "ready_s": ready, "first_ms": times}


# --- in files of their own


@cases.command(hidden=True)
@shape_option
@blocks_option
@click.option("--folder", type=Path, required=True)
@click.option("--device", default="cuda")
def bundle(shape: str, blocks: int | None, folder: Path, device: str) -> None:
    """Write a random bundle at 50%; `first` runs this in a process of its own, which gives the GPU's memory back."""
    models.write_random_bundle(shape, blocks, folder, device, 0.5)


for case in (first, tokens_case, sanitize, tiles, vllm):
    cases.add_command(case)

if __name__ == "__main__":
    cases()
