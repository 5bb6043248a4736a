"""Short pieces of prompts on a GPU, captured and launched one by one; and what counting costs a decode step.

    PYTHONPATH=. python benchmarks/gpu_prompts.py --bundle out                  # some seconds and the bundle's loading
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_prompts.py --bundle out --device cpu --behind 40   # to try it

A piece of so many positions is read behind a long prefix: by the kernels that read every prompt (``long way``), then by
the graphs that ``CudaDecoder.prepare_prompts`` captures. Told are milliseconds from the call to the chosen token on the
host, the median of rounds in turns, and how far the logits of the two lie apart, over the long way's largest; then what
a decode step of one row and of eight takes whose dropped channels are counted, over one whose are not.

Ends with code 1 if logits lie further apart than half precision explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from gpu_models import need_gpu

from wisparse.formats.bundle import Bundle
from wisparse.runtime.cuda.decoder import CudaDecoder

LENGTHS = (5, 16, 30, 64, 128)
ROUNDS = 7
# bf16 keeps 8 bits: two ways to add up the same differ by a few of its steps after 32 blocks.
MOST_APART = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--weights", default="native")
    parser.add_argument("--behind", type=int, default=3700, help="positions that the slot holds already")
    arguments = parser.parse_args()
    need_gpu(parser, arguments.device)
    bundle = Bundle.open(arguments.bundle)
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float16
    decoder = CudaDecoder(
        bundle, device=device, dtype=dtype, max_seq_len=arguments.behind + 200, max_batch=8, weights=arguments.weights
    )
    torch.manual_seed(0)
    prompt = torch.randint(10, bundle.config.vocab_size - 10, (arguments.behind + max(LENGTHS),))
    decoder.prefill(3, prompt, len(prompt), stop=arguments.behind)

    def read(count: int) -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        stop = arguments.behind + count
        logits = decoder.prefill(3, prompt[:stop], stop, start=arguments.behind)
        logits.argmax().item()
        return 1e3 * (time.perf_counter() - began), logits.clone()

    def several(count: int) -> tuple[float, torch.Tensor]:
        read(count)
        found = [read(count) for _ in range(ROUNDS)]
        return statistics.median(ms for ms, _ in found), found[0][1]

    long_way = {count: several(count) for count in LENGTHS}
    began = time.perf_counter()
    decoder.prepare_prompts()
    if on_gpu:
        torch.cuda.synchronize()
    print(f"captured in {time.perf_counter() - began:.1f} s", flush=True)
    worst, table = 0.0, []
    for count in LENGTHS:
        (before, expected), (after, found) = long_way[count], several(count)
        apart = float((found - expected).abs().max() / expected.abs().max())
        worst = max(worst, apart if apart == apart else float("inf"))
        same = bool(found.argmax() == expected.argmax())
        table.append({"positions": count, "long_way_ms": before, "captured_ms": after, "apart": apart, "same": same})
        print(f"{count:4d} positions: {before:6.2f} ms, captured {after:6.2f} ms; apart {apart:.4f}", flush=True)
    steps = [count_costs(decoder, rows) for rows in (1, 8)] if on_gpu else []
    for one in steps:
        print(
            f"a step of {one['rows']} rows: {one['plain_us']:.0f} us, counted {one['counted_us']:.0f} us "
            f"({one['counted_us'] / one['plain_us']:.3f})",
            flush=True,
        )
    print(json.dumps({"bundle": arguments.bundle.name, "weights": arguments.weights, "prompts": table, "steps": steps}))
    if worst > MOST_APART:
        sys.exit(f"logits lie {worst:.3f} apart, more than {MOST_APART}")


def count_costs(decoder: CudaDecoder, rows: int) -> dict[str, float]:
    """A step's microseconds, uncounted and counted, in turns."""
    for slot in range(rows):
        decoder.prefill(slot, torch.arange(20 + slot), 20 + slot)
    step = decoder.step_for(rows, 0, 100)
    times: dict[bool, list[float]] = {False: [], True: []}
    for count in times:
        step.prepare(count=count)
    step.tokens.copy_(torch.arange(30, 30 + rows))
    for index in range(2 * ROUNDS):
        count = bool(index % 2)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            step.replay(count=count)
            step.positions.fill_(50)
        torch.cuda.synchronize()
        times[count].append((time.perf_counter() - began) / 20 * 1e6)
    plain, counted = (statistics.median(times[count]) for count in (False, True))
    return {"rows": rows, "plain_us": plain, "counted_us": counted}


if __name__ == "__main__":
    main()
