"""Every family's sparse greedy tokens on a GPU against transformers'."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from gpu_models import Several, need_gpu, out_option, save

from wisparse.runtime.benchmark import machine

TESTS = Path(__file__).resolve().parent.parent / "tests"


def compare(name: str, count: int) -> dict[str, Any]:
    """One family; with ``-text`` a wrapper's text model, converted alone."""
    sys.path.append(str(TESTS))
    import triton_worker
    from family_cases import clear_answer, converted, make_source

    began, family = time.perf_counter(), name.removesuffix("-text")
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(family, Path(folder) / ("source" if family == name else "wrapper"))
        bundle = converted(source, Path(folder) / "bundle", "refine")
        theirs = clear_answer(bundle)
        made = time.perf_counter()
        tokens, logits = triton_worker.answer(str(bundle), theirs.prompt.tolist(), count)
    return {
        "tokens": count, "equal": sum(map(int.__eq__, tokens, theirs.tokens)),
        "largest_difference": float((torch.tensor(logits) - theirs.logits[:count]).abs().max()),
        "seed": theirs.seed, "clearance": round(theirs.clearance, 1), "seconds_before": round(made - began, 1),
        "seconds": round(time.perf_counter() - made, 1),
    }  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.option("--only", type=Several(str), help="Families.  [default: all]")
@click.option("--count", type=int, help="Tokens, at least 2.  [default: as the tests]")
@click.option("--processes", default=os.cpu_count())
@click.option("--limit", default=480.0, help="Seconds for all.")
@out_option
def tokens(only: list[str] | None, count: int | None, processes: int, limit: float, out: Path | None) -> None:
    """Every family against transformers: compiled kernels in float32 give its sparse greedy tokens.

    Built: of each of the tests' tiny models, in which every field of its family is used, a checkpoint of random weights,
    converted at 50%, and a prompt after which no mask and no choice lies within rounding (tests/family_cases.py).

    Compared: transformers with `wisparse.sparsify` on the CPU, in float32, and the Triton back end with the same bundle,
    in as many processes as cores. With TRITON_INTERPRET=1 no GPU is needed.

    Printed: a line a family, then one line of JSON (gpu-tokens.json); exit status 1 if a token differs, a logit by 1e-4,
    or a family has not ended after --limit seconds.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted:
        need_gpu()
    sys.path.append(str(TESTS))
    from family_cases import COUNT, PLAIN
    from runtime_models import SMALL, WRAPPERS

    families = [*PLAIN, *(f"{name}-text" for name in WRAPPERS if name not in SMALL)]
    if unknown := set(only or ()) - set(families):
        raise click.UsageError(f"--only: expected some of {', '.join(families)}, found {', '.join(sorted(unknown))}")
    conditions = {**machine(torch.device("cpu" if interpreted else "cuda")), "interpreted": interpreted}
    print(json.dumps(conditions), flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes
    ends, results = time.monotonic() + limit, dict[str, Any]()
    wanted = only or families
    with multiprocessing.get_context("spawn").Pool(min(processes, len(wanted))) as pool:
        jobs = {name: pool.apply_async(compare, (name, count or COUNT)) for name in wanted}
        for name, job in jobs.items():
            try:
                results[name] = job.get(max(0.0, ends - time.monotonic()))
            except multiprocessing.TimeoutError:
                results[name] = {"failed": f"not ended after {limit:g} s"}
            except Exception as error:  # of one family: the others are still measured
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(name, json.dumps(results[name]), flush=True)
    wrong = [
        name for name, found in results.items()
        if "failed" in found or found["equal"] < found["tokens"] or not found["largest_difference"] < 1e-4
    ]  # fmt: skip
    line = json.dumps({**conditions, "results": results, "wrong": wrong})
    save(out, "gpu-tokens.json", line + "\n")
    print(line)
    if wrong:
        raise SystemExit(f"not what transformers gives: {', '.join(wrong)}")
