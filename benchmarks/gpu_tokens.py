"""Every family on an NVIDIA GPU against transformers: compiled kernels in float32 give its sparse greedy tokens.

    PYTHONPATH=. python benchmarks/gpu_tokens.py                        # all families; a few minutes, most to compile
    PYTHONPATH=. python benchmarks/gpu_tokens.py --only gemma3 qwen3.5
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_tokens.py --only gemma3 --count 4     # without a GPU

For each of the tests' tiny models, in which every field of its family is used: a checkpoint of random weights,
converted at 50%; a prompt after which no mask and no choice lies within rounding (``tests/family_cases.py``);
transformers with ``wisparse.sparsify`` on the CPU, in float32; the Triton back end with the same bundle. As many
processes as cores. Prints a line a family, then one line of JSON; exit code 1 if a token differs, a logit by 1e-4, or a
family has not ended after ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_models import need_gpu

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))


def compare(case: tuple[str, str], count: int) -> dict[str, Any]:
    """One family; a wrapper's text model is converted alone."""
    import torch
    import triton_worker
    from family_cases import clear_answer, converted, make_source

    began = time.perf_counter()
    name, kind = case
    with tempfile.TemporaryDirectory() as folder:
        bundle = converted(make_source(name, Path(folder) / kind), Path(folder) / "bundle", "refine")
        theirs = clear_answer(bundle)
        made = time.perf_counter()
        tokens, logits = triton_worker.answer(str(bundle), theirs.prompt.tolist(), count)
    return {
        "tokens": count,
        "equal": sum(map(int.__eq__, tokens, theirs.tokens)),
        "largest_difference": float((torch.tensor(logits) - theirs.logits[:count]).abs().max()),
        "seed": theirs.seed,
        "clearance": round(theirs.clearance, 1),
        "seconds_before": round(made - began, 1),
        "seconds": round(time.perf_counter() - made, 1),
    }


def main() -> None:
    from family_cases import COUNT, PLAIN
    from runtime_models import SMALL, WRAPPERS

    cases = {name: (name, "source") for name in PLAIN}
    cases |= {f"{name}-text": (name, "wrapper") for name in WRAPPERS if name not in SMALL}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases), metavar="FAMILY")
    parser.add_argument("--count", type=int, default=COUNT, choices=range(2, COUNT + 1), help="tokens", metavar="N")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=480, help="seconds for all")
    arguments = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted:
        need_gpu(parser)
    import torch

    conditions = {
        "device": platform.processor() if interpreted else torch.cuda.get_device_name(), "interpreted": interpreted,
        **{name: metadata.version(name) for name in ("torch", "triton", "transformers")},
    }  # fmt: skip
    print(json.dumps(conditions), flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes
    ends = time.monotonic() + arguments.limit
    results: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(min(arguments.processes, len(arguments.only))) as pool:
        jobs = {name: pool.apply_async(compare, (cases[name], arguments.count)) for name in arguments.only}
        for name, job in jobs.items():
            try:
                results[name] = job.get(max(0.0, ends - time.monotonic()))
            except multiprocessing.TimeoutError:
                results[name] = {"failed": f"not ended after {arguments.limit:g} s"}
            except Exception as error:  # of one family: the others are still worth knowing
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(name, json.dumps(results[name]), flush=True)
    wrong = [
        name for name, found in results.items()
        if "failed" in found or found["equal"] < found["tokens"] or not found["largest_difference"] < 1e-4
    ]  # fmt: skip
    print(json.dumps({**conditions, "results": results, "wrong": wrong}))
    if wrong:
        raise SystemExit(f"not what transformers gives: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
