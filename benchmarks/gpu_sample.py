"""Microseconds of choosing the next token on an NVIDIA GPU: greedy, and sampled with the usual settings.

    PYTHONPATH=. python benchmarks/gpu_sample.py

Random logits, rounded to bfloat16, vocabularies of Llama 3 and Mistral; CUDA graphs of many choices, medians.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from gpu_models import need_gpu

from wisparse.kernels.gpu.head import HEAD_ROWS, launch_next
from wisparse.kernels.gpu.sample import SampleState, launch_sample
from wisparse.runtime.cuda.graph import time_launches
from wisparse.runtime.decoding.sampling import SamplingSettings

SETTINGS = {
    "temperature": SamplingSettings(0.8),
    "min_p": SamplingSettings(0.8, 0, 1.0, 0.05),
    "top_k": SamplingSettings(0.8, 50),
    "top_p": SamplingSettings(0.8, 0, 0.9),
    "top_k, top_p": SamplingSettings(0.8, 50, 0.9),
}
COUNT = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    need_gpu(parser)
    device = torch.device("cuda")
    pdl = torch.cuda.get_device_capability()[0] >= 9
    rows = []
    for vocabulary in (32768, 128256):
        for batch in (1, 4):
            generator = torch.Generator(device).manual_seed(0)
            logits = 3 * torch.randn(batch, vocabulary, generator=generator, device=device)
            logits = logits.bfloat16().float()
            tiles = logits.view(batch, -1, HEAD_ROWS)
            best = tiles.amax(2).contiguous()
            best_id = (tiles.argmax(2) + HEAD_ROWS * torch.arange(tiles.shape[1], device=device)).int().contiguous()
            tokens = torch.zeros(batch, dtype=torch.int64, device=device)
            following = torch.zeros_like(tokens)
            positions = torch.zeros(batch, dtype=torch.int32, device=device)
            state = SampleState.empty(batch, vocabulary, device)

            def greedy(best=best, best_id=best_id, tokens=tokens, following=following, positions=positions) -> None:
                for _ in range(COUNT):
                    launch_next(best, best_id, tokens, following, positions, pdl=pdl)

            def sampled(
                logits=logits, best=best, best_id=best_id, tokens=tokens, following=following, positions=positions,
                state=state,
            ) -> None:  # fmt: skip
                for _ in range(COUNT):
                    launch_sample(
                        logits, best, best_id, tokens, following, positions, state, torch.bfloat16, pdl=pdl
                    )  # fmt: skip

            row = {"vocabulary": vocabulary, "batch": batch, "greedy": time_launches(greedy, COUNT)}
            for name, s in SETTINGS.items():
                numbers = torch.tensor([[s.temperature, s.top_k, s.top_p, s.min_p]] * batch, dtype=torch.float64)
                state.numbers.copy_(numbers)
                row[name] = time_launches(sampled, COUNT)
            rows.append(row)
            print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    line = json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "us": rows})
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu-h200-sample.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
