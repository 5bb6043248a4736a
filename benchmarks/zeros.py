"""Decoding at sparsity 0 of a model with relu², with and without reading the channels whose input is exactly 0.

    PYTHONPATH=. python benchmarks/zeros.py --device cuda                         # AFM-4.5B's shape
    PYTHONPATH=. python benchmarks/zeros.py --device cpu --hidden 1024 --blocks 6

Random weights; a bias of up_proj gives the share of zeros. Prints JSON lines: medians of steps, taken in turns, and the largest
difference of the logits.
"""

from __future__ import annotations

import json
import statistics
import time
from statistics import NormalDist
from typing import Any

import click
import torch
from gpu_models import Several, random_bundle

from wisparse.formats.bundle import ProjectionMask
from wisparse.runtime.cpu.decoder import CpuDecoder

TINY = torch.finfo(torch.float32).tiny


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--zeros", type=Several(float), default="0.8,0.9,0.95", show_default=True)
@click.option("--hidden", default=2560, show_default=True)
@click.option("--blocks", default=12, show_default=True)
@click.option("--weights", default="native", show_default=True)
@click.option("--steps", default=40, show_default=True)
def main(device: str, zeros: list[float], hidden: int, blocks: int, weights: str, steps: int) -> None:
    shape: dict[str, Any] = {
        "model_type": "arcee", "hidden_size": hidden, "intermediate_size": hidden * 36 // 5, "num_hidden_layers": blocks,
        "num_attention_heads": hidden // 128, "num_key_value_heads": max(hidden // 640, 1), "head_dim": 128,
        "vocab_size": 16384, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "mlp_bias": True,
        "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    for share in zeros:
        bundle = random_bundle(shape)
        random, bias = type(bundle.checkpoint), -NormalDist().inv_cdf(share)

        class Biased(random):  # type: ignore[misc, valid-type]
            def tensor(self, name: str, device: torch.device | str = "cpu", bias: float = bias) -> torch.Tensor:
                found = super().tensor(name, device)
                if name.endswith("bias"):
                    return torch.full_like(found, bias if "up_proj" in name else 0.0)
                return torch.ones_like(found) if found.ndim == 1 else found

            def shape(self, name: str) -> tuple[int, ...]:
                return self.shapes[name]

        bundle.checkpoint.__class__ = Biased
        if device == "cpu":
            kind: Any = CpuDecoder
        else:
            from wisparse.runtime.cuda.decoder import CudaDecoder as kind
        decoder = kind(
            bundle,
            device=torch.device(device),
            dtype=torch.bfloat16,
            max_seq_len=steps + 40,
            max_batch=1,
            weights=weights,
        )
        skipping = {
            name: ProjectionMask(mask.scale, TINY, share) if name.endswith("down_proj") else mask
            for name, mask in bundle.masks.items()
        }
        times: dict[str, list[float]] = {"dense": [], "skipping": []}
        logits: dict[str, torch.Tensor] = {}
        for turn in range(4):
            for name, masks in zip(times, (bundle.masks, skipping), strict=True):
                decoder.set_masks(masks)
                decoder.measure_sparsity(turn == 0)
                decoder.prefill(0, torch.arange(8), 8)
                rows = []
                for step in range(steps):
                    began = time.perf_counter()
                    rows.append(decoder.decode(torch.tensor([step + 9])).float().cpu())
                    times[name] += [time.perf_counter() - began] * (turn > 0)
                if turn == 0:
                    logits[name], unread = torch.cat(rows), decoder.realised_sparsity()
        ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        largest = float((logits["dense"] - logits["skipping"]).abs().max())
        about = {"device": device, "weights": weights, "zeros": share, "unread": unread, "step_ms": ms}
        faster = ms["dense"] / ms["skipping"]
        print(
            json.dumps(
                about | {"times_as_fast": faster, "difference": largest, "logit": float(logits["dense"].abs().max())}
            )
        )


if __name__ == "__main__":
    main()
