"""Bundles with thresholds that really drop half of the channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.record.recipe import CalibrationRecord, ProjectionRecipe, Recipe
from wisparse.formats.write import write_bundle


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
