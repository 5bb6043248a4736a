"""What a conversion and a loaded bundle need, by model size: the table of docs/requirements.md.

    python benchmarks/requirements.py

Figures come from the preflight's and the loader's own arithmetic, not from runs; what was measured stands beside the
table.
"""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

from pathlib import Path

import torch
from shapes import LLAMA_1B, LLAMA_3B, LLAMA_8B

from wisparse.converter.config import full_config
from wisparse.converter.preflight import bundle_bytes, working_bytes
from wisparse.converter.settings import ConvertSettings, auto_seq_len
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors
from wisparse.runtime.memory import bytes_per_position

_QWEN3 = dict(
    model_type="qwen3", hidden_size=5120, vocab_size=151936, max_position_embeddings=40960, head_dim=128,
    num_key_value_heads=8,
)  # fmt: skip
# Published shapes: what stands in the config.json of these models.
SHAPES = {
    "Llama-3.2-1B": LLAMA_1B, "Llama-3.2-3B": LLAMA_3B, "Llama-3.1-8B": LLAMA_8B,
    "Qwen3-14B": _QWEN3 | dict(intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40),
    "Qwen3-32B": _QWEN3 | dict(intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64),
}  # fmt: skip


def row(name: str, shape: dict[str, object]) -> list[str]:
    """One line of the table; sizes in GB (1e9 bytes), bf16, default settings."""
    config = ModelConfig.from_dict(full_config({"architectures": ["x"], "dtype": "bfloat16", **shape}))
    parameters = sum(torch.Size(size).numel() for size in expected_tensors(config).values())
    needs = {}
    for device in ("cuda", "cpu"):
        settings = ConvertSettings("x", Path("x"), seq_len=auto_seq_len(device, config.max_position_embeddings))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        needs[device] = parameters * dtype.itemsize + working_bytes(config, dtype, settings)
    bundle = bundle_bytes(config, parameters, "auto")
    cache = 1000 * bytes_per_position(config, torch.bfloat16)
    sizes = [2 * parameters + bundle, needs["cuda"], needs["cpu"], 2 * parameters]
    return [name, f"{parameters / 1e9:.1f}B", *(f"{size / 1e9:.0f}" for size in sizes), f"{cache / 1e9:.2f}"]


def table() -> str:
    """The table, in Markdown."""
    head = ["shape", "parameters", "disk: source and bundle", "to convert on a GPU", "to convert on a CPU"]
    head += ["to run", "and per 1,000 tokens of context"]
    rows = [head, ["---"] * len(head), *(row(name, shape) for name, shape in SHAPES.items())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


if __name__ == "__main__":
    print(table())
