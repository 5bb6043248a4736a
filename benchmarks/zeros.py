"""Decoding at sparsity 0 of a model with relu², with and without reading the channels whose input is exactly 0.

    PYTHONPATH=. python benchmarks/zeros.py --device cuda                         # width of AFM-4.5B
    PYTHONPATH=. python benchmarks/zeros.py --device cpu --hidden 1024 --blocks 6

Random weights; a bias of up_proj gives the share of zeros. The model is converted, so its manifest has the shares. Prints
JSON lines: medians of steps, taken in turns, and the largest difference of the logits.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from statistics import NormalDist
from unittest import mock

import click
import torch
from gpu_models import Several, endless_source
from transformers import ArceeConfig, ArceeForCausalLM

import wisparse
from wisparse.formats import bundle as bundles

VOCABULARY = 16384


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--zeros", type=Several(float), default="0.8,0.9,0.95", show_default=True)
@click.option("--hidden", default=2560, show_default=True)
@click.option("--blocks", default=12, show_default=True)
@click.option("--weights", default="native", show_default=True)
@click.option("--steps", default=40, show_default=True)
def main(device: str, zeros: list[float], hidden: int, blocks: int, weights: str, steps: int) -> None:
    config = ArceeConfig(
        hidden_size=hidden, intermediate_size=hidden * 36 // 5, num_hidden_layers=blocks, head_dim=128,
        num_attention_heads=hidden // 128, num_key_value_heads=max(hidden // 640, 1), vocab_size=VOCABULARY,
        max_position_embeddings=512, mlp_bias=True,
    )  # fmt: skip
    for share in zeros:
        with tempfile.TemporaryDirectory() as temporary:
            source = endless_source(Path(temporary, "source"), VOCABULARY)
            model = ArceeForCausalLM(config).to(torch.bfloat16)
            spread = config.initializer_range * math.sqrt(hidden)  # of up_proj's outputs: its inputs are normed
            for name, parameter in model.named_parameters():
                if name.endswith("up_proj.bias"):
                    torch.nn.init.constant_(parameter, -NormalDist().inv_cdf(share) * spread)
            model.save_pretrained(source)
            quick = {"search": "uniform", "method": "teal", "rotation": "none", "num_samples": 2, "seq_len": 64}
            text = Path(__file__)
            made = wisparse.convert(
                source, Path(temporary, "out"), sparsity=0.5, calibration=text, device=device, progress=False, **quick
            )
            print(json.dumps({"device": device, "weights": weights, **timed(made, device, weights, steps)}), flush=True)


def timed(made: Path, device: str, weights: str, steps: int) -> dict[str, object]:
    options = {"device": device, "weights": weights, "sparsity": 0.0, "max_batch": 1, "max_seq_len": steps + 40}
    with mock.patch.object(bundles, "LEAST_ZEROS", 2.0):
        dense = wisparse.load(made, **options)
    with dense, wisparse.load(made, **options) as skipping:
        times: dict[str, list[float]] = {"dense": [], "skipping": []}
        logits, unread = {}, None
        for turn in range(4):
            for name, model in zip(times, (dense, skipping), strict=True):
                decoder, rows = model.decoder, []
                decoder.measure_sparsity(turn == 0)
                decoder.prefill(0, torch.arange(8), 8)
                for step in range(steps):
                    began = time.perf_counter()
                    rows.append(decoder.decode(torch.tensor([step + 9])).float().cpu())
                    times[name] += [time.perf_counter() - began] * (turn > 0)
                if turn == 0:
                    logits[name], unread = torch.cat(rows), decoder.realised_sparsity()
    ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    shares = [one.zeros for one in bundles.Bundle.open(made).recipe.projections if one.zeros]
    return {
        "zeros": statistics.mean(shares), "unread": unread, "step_ms": ms, "times_as_fast": ms["dense"] / ms["skipping"],
        "difference": float((logits["dense"] - logits["skipping"]).abs().max()), "logit": float(logits["dense"].abs().max()),
    }  # fmt: skip


if __name__ == "__main__":
    main()
