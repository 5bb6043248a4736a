"""Bundles for the CPU benchmark: a random model of a given shape, and thresholds calibrated to a sparsity.

Speed depends on shapes and on how many channels are kept, not on what the weights mean, so random weights serve.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import shapes
import torch
from safetensors.torch import save_file

from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel
from wisparse.formats.model_config import ModelConfig, expected_tensors
from wisparse.formats.write import write_bundle

LLAMA_1B = shapes.LLAMA_1B | {"bos_token_id": 0, "eos_token_id": 1}


def random_checkpoint(config: dict[str, Any], folder: Path, seed: int = 0) -> Path:
    """A bfloat16 model with normal weights of standard deviation 1/sqrt(K) and norms of 1; written once."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(ModelConfig.from_dict(config)).items():
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            tensor.normal_(generator=generator).mul_(shape[-1] ** -0.5)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def calibrated_bundle(source: Path, out: Path, sparsity: float, num_tokens: int = 128) -> Path:
    """A bundle whose every projection drops ``sparsity`` of its channels on random tokens; written once.

    channel_scale = (g / gmean(g)) ** 0.5, as alpha = 0.5 gives it.
    """
    if (out / "wisparse.json").is_file():
        return out
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=checkpoint.tensors["model.norm.weight"].dtype).eval()
    masks: dict[str, ProjectionMask] = {}

    def record(name: str, weight: torch.Tensor):
        norms = weight.float().norm(dim=0).clamp_min(1e-20)
        scale = (norms / norms.log().mean().exp()).clamp_min(1e-4).sqrt()

        def hook(module: Any, args: Any) -> None:
            score = args[0][0, 1:].float().abs() * scale
            threshold = float(score.flatten().kthvalue(max(1, round(sparsity * score.numel()))).values)
            masks[name] = ProjectionMask(scale, threshold if sparsity else 0.0, sparsity)

        return hook

    projections = list(checkpoint.config.projections())
    for projection in projections:
        module = model.get_submodule(projection.name)
        module.register_forward_pre_hook(record(projection.name, module.weight))
    generator = torch.Generator().manual_seed(0)
    model(torch.randint(0, checkpoint.config.vocab_size, (1, num_tokens), generator=generator), use_cache=False)
    entries = tuple(ProjectionRecipe(p.name, sparsity, 0.5, masks[p.name].threshold, sparsity) for p in projections)
    recipe = Recipe(
        base_model=source.name,
        base_revision=None,
        method="benchmark",
        default=sparsity,
        levels=(SparsityLevel(sparsity, entries, (sparsity,) * checkpoint.config.num_blocks),),
        calibration=CalibrationRecord("random tokens", 1, num_tokens, num_tokens, 0, "0" * 64),
        versions={"torch": torch.__version__},
    )
    return write_bundle(checkpoint, recipe, {sparsity: masks}, out)
