"""A mixture of experts on an NVIDIA GPU: the Qwen3-30B-A3B shape, random weights, by weight type, dense and at 50%.

    PYTHONPATH=. python benchmarks/gpu_experts.py --blocks 8 --weights native int8 int4 --rows 1 4
    PYTHONPATH=. python benchmarks/gpu_experts.py --rows 1 2 4 8 --peer 'vllm serve {model} --port {port} --load-format dummy'
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_experts.py --tiny   # without a GPU: does it run

Steps are graphs of all blocks and of none, their difference is scaled to the model's 48 blocks; the bytes are those
that a step reads (experts that rows share are counted again), beside the bandwidth of a plain read in the same run.
Thresholds are the median scores of random tokens. The peer answers as many requests at once over HTTP, 200 tokens after
5. Prints a line for each row of the table and JSON last.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

import argparse
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
from types import SimpleNamespace
from typing import Any

import torch
from gpu_bundle import endless_source
from gpu_first import server
from gpu_models import need_gpu, random_bundle, set_sparsity
from shapes import QWEN3_30B_A3B

from wisparse.kernels.backend import compiling_side_by_side
from wisparse.kernels.reference import scores
from wisparse.runtime.benchmark import Workload, read_bandwidth_gbps, time_run, wait
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.step import capture
from wisparse.runtime.serve.transport import open_socket

BLOCKS, SHAPE = QWEN3_30B_A3B["num_hidden_layers"], QWEN3_30B_A3B
TINY = dict(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, head_dim=16, vocab_size=70)
CONTEXT = 150  # positions before the one that a step appends


def calibrate(decoder: CudaDecoder, sparsity: float, tokens: int) -> list:
    """Every linear's thresholds, of experts each one's own, set to a quantile of random tokens' scores."""
    settings = []

    def observe(group: Any, x: torch.Tensor, first_sparse: int) -> None:
        for i in range(len(group.widths) if len(x) else 0):
            score = scores(x, group.scales[i]).flatten()
            group.thresholds[i] = score.kthvalue(max(1, round(sparsity * score.numel()))).values
        settings.append((group, group.thresholds.clone()))

    ids = torch.randint(decoder.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    decoder.cache.grow(0, tokens)
    decoder.cache.begin(0, 0)
    decoder._observe = observe
    for _ in decoder._read(decoder._cache, 0, ids.to(decoder.device), tokens, 0, tokens):
        pass
    decoder._observe = None
    return settings


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


def ask(command: str, rows: list[int], prompt: int) -> dict[str, Any]:
    """What another server does with the same shape."""
    dice, rates = random.Random(1), {}
    with tempfile.TemporaryDirectory() as folder:
        model = endless_source(Path(folder, "model"), SHAPE["vocab_size"])
        config = SHAPE | dict(architectures=["Qwen3MoeForCausalLM"], torch_dtype="bfloat16")
        (model / "config.json").write_text(json.dumps(config), "utf-8")
        with open_socket("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        with server(shlex.split(command.format(model=model, port=port)), port, Path(folder, "log")) as (client, ready):
            more = {"model": str(model), "ignore_eos": True}
            times = [
                1e3 * client.stream(dice.choices(range(10, 150000), k=prompt), most=2, **more).first for _ in range(6)
            ]
            for count in rows:
                found = []
                for _ in range(3):
                    answers = client.together([dice.choices(range(10, 150000), k=5) for _ in range(count)], **more)
                    seconds = max(one.at[-1] for one in answers) - min(one.began for one in answers)
                    found.append(sum(one.tokens for one in answers) / seconds)
                rates[count] = statistics.median(found)
    return {"tok_per_s": rates, "ready_s": ready, "first_ms": times}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--weights", nargs="+", default=["native", "int8", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens; at least 150")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, by the interpreter")
    parser.add_argument("--peer", help="command of a server to measure too, with {model} and {port}")
    options = parser.parse_args()
    if not options.tiny:
        need_gpu(parser)
    device, dtype = torch.device("cpu" if options.tiny else "cuda"), torch.float16 if options.tiny else torch.bfloat16
    runs, shape = (1, SHAPE | TINY) if options.tiny else (9, SHAPE)
    side_by_side = nullcontext if options.tiny else compiling_side_by_side  # an interpreter compiles nothing
    gbps = read_bandwidth_gbps(device)
    name = "interpreter" if options.tiny else torch.cuda.get_device_name()
    print(f"{name}: a plain read reaches {gbps:.0f} GB/s", flush=True)
    table: list[dict[str, Any]] = []
    for weights in options.weights:
        bundle: SimpleNamespace = random_bundle(shape, num_blocks=options.blocks, dtype=dtype)
        began = time.perf_counter()
        decoder = CudaDecoder(
            bundle, device=device, dtype=dtype, weights=weights,
            max_seq_len=min(4096, options.prompt + 512), max_batch=max(options.rows),
        )  # fmt: skip
        wait(device)
        loaded = time.perf_counter() - began
        ids = torch.randint(decoder.config.vocab_size, (options.prompt,), generator=torch.Generator().manual_seed(3))
        with side_by_side():
            decoder.prefill(0, ids, options.prompt)
        for slot in range(1, max(options.rows)):  # a step's rows read what is there
            decoder.prefill(slot, ids[:200], 200)
        first_ms = []
        for run in range(4):
            wait(device)
            began = time.perf_counter()
            decoder.prefill(0, (ids + run) % decoder.config.vocab_size, options.prompt)
            wait(device)
            first_ms.append((time.perf_counter() - began) * 1e3)
        print(
            f"{weights}: loaded in {loaded:.1f} s; {options.prompt} tokens read in {min(first_ms[1:]):.2f} ms by "
            f"{options.blocks} blocks, {min(first_ms[1:]) * BLOCKS / options.blocks:.1f} ms scaled", flush=True,
        )  # fmt: skip
        settings = calibrate(decoder, max(options.sparsity), min(1024, options.prompt))
        inside, head = decoder.bytes_read()
        for sparsity in options.sparsity:
            set_sparsity(decoder, {sparsity: settings}, sparsity)
            decoder._dense_weights = decoder._count_dense()
            realised = 0.0
            with side_by_side():
                for rows in options.rows:
                    decoder.step_for(rows, CONTEXT + 1).prepare(compile_only=True)
                decoder.step_for(1, CONTEXT + 1).prepare(count=True, compile_only=True)
            if sparsity:
                decoder.measure_sparsity(True)
                decoder.prefill(0, ids[:20], 20)
                for token in range(4):
                    decoder.decode(torch.tensor([token + 5]))
                realised = decoder.realised_sparsity() or 0.0
                decoder.measure_sparsity(False)
            for rows in options.rows:
                every, none = (step_ms(decoder, rows, blocks, runs) for blocks in (options.blocks, 0))
                scaled = none + (every - none) * BLOCKS / options.blocks
                needed = rows * inside * (1 - realised) * BLOCKS / options.blocks + head
                row = dict(
                    weights=weights, sparsity=sparsity, realised=realised, rows=rows, step_ms=scaled,
                    us_a_block=(every - none) / options.blocks * 1e3, rest_us=none * 1e3, gigabytes=needed / 1e9,
                    tok_per_s=rows * 1e3 / scaled, share=needed / gbps / scaled * 1e-6, first_ms=first_ms,
                )  # fmt: skip
                table.append(row)
                print(
                    f"{weights} {sparsity:.0%} (realised {realised:.1%}), {rows} rows: {scaled:.3f} ms, "
                    f"{row['tok_per_s']:.0f} tok/s; a block {row['us_a_block']:.1f} us, the rest {none * 1e3:.0f} us; "
                    f"{needed / 1e9:.2f} GB, {row['share']:.0%} of the bandwidth", flush=True,
                )  # fmt: skip
        if options.blocks == BLOCKS:
            set_sparsity(decoder, {0.0: []}, 0.0)
            work = Workload(5, 100, 1, 3)
            time_run(decoder, work)
            seconds = min(time_run(decoder, work)[1] for _ in range(3))
            print(f"{weights}: 100 tokens read by the host, dense: {100 / seconds:.0f} tok/s", flush=True)
        decoder.close()
        del decoder, settings
        gc.collect()
        torch.cuda.empty_cache()
    result = {"device": name, "gbps": gbps, "torch": torch.__version__, "rows": table}
    if options.peer:
        result["peer"] = ask(options.peer, options.rows, options.prompt)
        print("peer:", json.dumps(result["peer"]), flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
