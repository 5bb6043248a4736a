"""A tiny random Llama as a search sees it; its weights vary by channel, so that masks and scales matter."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.source import SourceModel
from wisparse.formats.model_config import ModelConfig

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}


def tiny_source(kind: str = "llama", **changes: object) -> SourceModel:
    """``kind`` is llama or qwen2; ``changes`` go to the config."""
    torch.manual_seed(0)
    settings = {**_SIZES, **changes}
    config = LlamaConfig(**settings) if kind == "llama" else Qwen2Config(**settings)
    model = (LlamaForCausalLM if kind == "llama" else Qwen2ForCausalLM)(config).eval()
    model.requires_grad_(False)
    described = ModelConfig.from_dict(config.to_dict())
    projections = {p.name: model.get_submodule(p.name) for p in described.projections()}
    for module in projections.values():
        module.weight *= 4 * torch.logspace(-1, 0, module.in_features)[torch.randperm(module.in_features)]
    model.lm_head.weight *= 20
    return SourceModel(model, described, None, projections, torch.device("cpu"), torch.float32)


def tiny_tokens(num_samples: int = 6, seq_len: int = 24, seed: int = 0) -> CalibrationTokens:
    ids = torch.randint(64, (num_samples, seq_len), generator=torch.Generator().manual_seed(seed))
    return CalibrationTokens.from_rows(ids.tolist(), "random", seed)


def has_hooks(source: SourceModel) -> bool:
    return any(module._forward_pre_hooks for module in source.projections.values())
