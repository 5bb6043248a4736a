"""First token of a second question over a long document: a model with recurrent blocks, with and without kept states, and one
of the same size with attention alone.

    PYTHONPATH=. python benchmarks/states.py --device cpu

Random weights; times of five questions of 20 tokens each, after a first one over the same document.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import click
import torch
from gpu_models import endless_source
from transformers import AutoConfig, AutoModelForCausalLM

import wisparse

VOCABULARY = 16384
COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
}
COMMON |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 16384}
SIZES = {"key_heads": 4, "value_heads": 8, "key_head_dim": 64, "value_head_dim": 64}
HYBRID = {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}
HYBRID |= {f"linear_num_{name}" if "heads" in name else f"linear_{name}": size for name, size in SIZES.items()}


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--length", default=4000, show_default=True, help="Tokens of the document.")
def main(device: str, length: int) -> None:
    document = torch.randint(10, VOCABULARY, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    for model_type, more, kept in (("qwen3", {}, None), ("qwen3_5_text", HYBRID, None), ("qwen3_5_text", HYBRID, 0)):
        with tempfile.TemporaryDirectory() as temporary:
            source = endless_source(Path(temporary, "source"), VOCABULARY)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **COMMON, **more)).save_pretrained(source)
            quick = {"search": "uniform", "method": "teal", "rotation": "none", "num_samples": 2, "seq_len": 64}
            made = Path(temporary, "out")
            wisparse.convert(
                source, made, sparsity=0.5, calibration=Path(__file__), device=device, progress=False, **quick
            )
            options = {"device": device, "max_batch": 1, "max_seq_len": length + 64, "state_checkpoints": kept}
            with wisparse.load(made, **options) as model:
                model.generate([document[:20]], max_new_tokens=2, temperature=0)
                times = []
                for question in range(6):
                    began = time.perf_counter()
                    prompt = [*document, *range(100 * question + 10, 100 * question + 30)]
                    model.generate([prompt], max_new_tokens=1, temperature=0)
                    times.append(time.perf_counter() - began)
        first, *later = times
        row = {"model": model_type, "state_checkpoints": kept, "first_s": first, "second_s": statistics.median(later)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
