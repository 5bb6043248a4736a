"""Small checkpoints of every architecture, and bundles with thresholds that really drop half of the channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.recipe import CalibrationRecord, ProjectionRecipe, Recipe
from wisparse.formats.write import write_bundle

# model_type -> what makes it differ from a plain Llama; every feature of the architecture table appears.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-scaled": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "phi3": {},
    "phi3-long": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.2 * i for i in range(8)],
            "original_max_position_embeddings": 32,
        },
    },
}


def make_checkpoint(variant: str, out: Path, seed: int = 0) -> Path:
    """A model of 2 blocks with random weights, saved as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        variant.split("-")[0],
        vocab_size=99,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **VARIANTS[variant],
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The initial weights are so small that every token gives nearly the same logits, and zero biases hide a
            # forgotten bias.
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2 and "embed" not in name:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(std=0.5)
    model.save_pretrained(out)
    return out


@torch.inference_mode()
def make_bundle(source: Path, out: Path, sparsity: float = 0.5, seed: int = 0, max_shard_size: str = "5GB") -> Path:
    """A bundle of ``source`` with random channel scales and the thresholds that drop ``sparsity`` of the channels."""
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(source)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    masks: dict[str, ProjectionMask] = {}
    projections = list(checkpoint.config.projections())
    scales = {p.name: torch.exp(0.3 * torch.randn(p.in_features, generator=generator)) for p in projections}

    def record(name: str):
        def hook(module: Any, args: Any) -> None:
            score = (args[0][0, 4:].abs() * scales[name]).flatten()
            # The last projection stays dense: a bundle may hold such.
            dense = name == projections[-1].name
            threshold = 0.0 if dense else float(torch.quantile(score, sparsity))
            masks[name] = ProjectionMask(scales[name], threshold, 0.0 if dense else sparsity)

        return hook

    handles = [model.get_submodule(p.name).register_forward_pre_hook(record(p.name)) for p in projections]
    tokens = torch.randint(3, checkpoint.config.vocab_size, (1, 48), generator=generator)
    model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    recipe = Recipe(
        base_model="org/source",
        base_revision=None,
        method="wisparse",
        sparsity=sparsity,
        projections=tuple(
            ProjectionRecipe(p.name, masks[p.name].sparsity, 0.5, masks[p.name].threshold, masks[p.name].sparsity)
            for p in projections
        ),
        block_sparsities=(sparsity,) * checkpoint.config.num_blocks,
        calibration=CalibrationRecord("self", 1, 48, 48, seed, "0" * 64),
        versions={"torch": "2.0"},
    )
    return write_bundle(checkpoint, recipe, masks, out, max_shard_size=max_shard_size)
