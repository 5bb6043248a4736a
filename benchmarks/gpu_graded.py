"""Graded weights on an NVIDIA GPU beside int8 and int4, in one run: tok/s at the 8B shape.

    PYTHONPATH=. python benchmarks/gpu_graded.py --blocks 8
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_graded.py --tiny   # without a GPU: does it run

Random weights; speed depends on how many planes are kept, so thresholds are put where a converted model keeps as many
(``KEPT``). ``--blocks``: fewer than the shape has, whose step is what is timed. ``share``: the time that the bytes read
take at the speed of a plain read, over the step's. Under each level the step is compared with the prompt's path over the
same weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_models import SHAPES, calibrate, mask_bundle, random_bundle, tiny

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.weight_types import interleaved, quantise
from wisparse.runtime.benchmark import Workload, machine, read_bandwidth_gbps, time_run
from wisparse.runtime.cuda import weights as cuda_weights
from wisparse.runtime.cuda.decoder import CudaDecoder

# Bits -> the shares of channels whose high and whose low plane is read, as of the two example models.
KEPT = {4.25: (0.84, 0.2225), 3.5: (0.72, 0.155), 3.0: (0.63, 0.12)}
SPARSITIES = (0.3, 0.5)
RUNS, PROMPT, TOKENS = 5, 5, 200

Masks = dict[str, ProjectionMask]


class GradedSource(cuda_weights._Source):
    """Reads plain weights as a graded bundle's."""

    def weight(self, name: str, weights: str) -> Any:
        if "layers" not in name:
            return super().weight(name, weights)
        group = next(size for size in (128, 64, 8) if self.checkpoint.shapes[name][1] % size == 0)
        return interleaved(quantise("int8", self.tensor(name), group=group, graded=True))


def made_masks(bundle: SimpleNamespace, device: torch.device, dtype: torch.dtype) -> dict[float, Masks]:
    """Masks at every sparsity that is needed."""
    wanted = sorted({*SPARSITIES, *(round(1 - share, 6) for kept in KEPT.values() for share in kept)})
    decoder = CudaDecoder(bundle, device=device, dtype=dtype, max_seq_len=256)
    settings = calibrate(decoder, wanted, tokens=128)
    found = {}
    for sparsity in wanted:
        mask_bundle(bundle, decoder, settings, sparsity)
        found[sparsity] = dict(bundle.masks)
    decoder.close()
    return found


def levels_of(kind: str, masks: dict[float, Masks]) -> dict[str, Masks]:
    first = next(iter(masks.values()))
    planes = (0.0, 0.0) if kind == "graded" else ()
    levels = {"8 bits" if planes else "dense": {n: ProjectionMask(m.scale, 0.0, 0.0, planes) for n, m in first.items()}}
    if not planes:
        return levels | {f"{one:.0%}": masks[one] for one in SPARSITIES}
    for bits, kept in KEPT.items():
        high, low = (masks[round(1 - share, 6)] for share in kept)
        levels[f"{bits:g} bits"] = {
            name: replace(mask, sparsity=1 - bits / 8, plane_thresholds=(mask.threshold, low[name].threshold))
            for name, mask in high.items()
        }
    return levels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("without a GPU: only --tiny, with TRITON_INTERPRET=1")
    dtype = torch.float16 if options.tiny else torch.bfloat16
    shape = tiny(SHAPES[options.shape]) if options.tiny else SHAPES[options.shape]
    full = shape["num_hidden_layers"]
    blocks, tokens, runs = options.blocks or full, *((3, 1) if options.tiny else (TOKENS, RUNS))
    bundle = random_bundle(shape, num_blocks=blocks, dtype=dtype)
    masks = made_masks(bundle, device, dtype)
    document: dict[str, Any] = {
        "shape": options.shape, "machine": machine(device), "read_gbps": read_bandwidth_gbps(device), "rows": {},
    }  # fmt: skip
    source = cuda_weights._Source
    for kind in ("int8", "int4", "graded"):
        levels = levels_of(kind, masks)
        bundle.masks.update(next(iter(levels.values())))
        cuda_weights._Source = GradedSource if kind == "graded" else source  # type: ignore[misc]
        decoder = CudaDecoder(
            bundle, device=device, dtype=dtype, max_seq_len=PROMPT + tokens + 8,
            weights="native" if kind == "graded" else kind,
        )  # fmt: skip
        inside, head = decoder.bytes_read()
        for level, of_level in levels.items():
            decoder.set_masks(of_level)
            work = Workload(PROMPT, tokens, 1, runs)
            time_run(decoder, work)
            step_ms = statistics.median(time_run(decoder, work)[1] for _ in range(runs)) / tokens * 1e3
            ids = torch.randint(bundle.config.vocab_size, (PROMPT + 1,), generator=torch.Generator().manual_seed(3))
            decoder.prefill(0, ids[:-1], PROMPT)
            step, other = decoder.decode(ids[-1:])[0].clone(), decoder.logits(ids, PROMPT)[-1]
            decoder.measure_sparsity(True)
            decoder.logits(ids, 0)
            unread = decoder.realised_sparsity() or 0.0
            row = {
                "step_ms": step_ms,
                "unread": unread,
                "share": (inside * (1 - unread) + head) / document["read_gbps"] / step_ms * 1e-6,
                "step_against_prompt": float((step - other).norm() / other.norm()),
            }
            decoder.measure_sparsity(False)
            document["rows"][f"{kind} {level}"] = row
            print(kind, level, row, flush=True)
        decoder.close()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu-graded.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
