"""Models for the benchmarks on CPUs: a random one of a shape, its thresholds calibrated to a sparsity, GGUF files.

Speed depends on shapes and on how many channels are kept, not on what the weights mean, so random weights serve.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shapes
import torch
from safetensors.torch import save_file

from wisparse.converter.experts import Rows, find_experts
from wisparse.converter.statistics import channel_scale, weight_norm
from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, QualityTable, Recipe, SparsityLevel, unread
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors
from wisparse.formats.weight_types import PLANE_BITS, group_of, quantise
from wisparse.formats.write import write_bundle
from wisparse.kernels.reference import scores

GRADED = {3.5: (0.7, 0.175)}  # by bits the shares of channels whose high and whose low plane is read
LLAMA_1B = shapes.LLAMA_1B | {"bos_token_id": 0, "eos_token_id": 1}
# Of 16 experts 2, 17.5M parameters; of 32 experts 4, 0.67B of which a token reads 0.14B.
_EXPERTS = {"model_type": "qwen3_moe", "norm_topk_prob": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
_EXPERTS |= {"hidden_act": "silu", "max_position_embeddings": 2048, "decoder_sparse_step": 1, "mlp_only_layers": []}
_EXPERTS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "bos_token_id": 0, "eos_token_id": 1}
EXPERTS = {
    name: {**_EXPERTS, **dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "vocab_size"), sizes, strict=True))}
    for name, sizes in {
        "qwen3-moe-17m": (256, 6, 8, 4, 32, 704, 192, 16, 2, 8192),
        "qwen3-moe-670m": (1024, 12, 16, 4, 64, 3072, 512, 32, 4, 32768),
    }.items()
}  # fmt: skip


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
def calibrated_bundle(
    source: Path, out: Path, sparsity: float | Sequence[float], num_tokens: int = 128,
    graded: Mapping[float, tuple[float, float]] | None = None, quality: QualityTable | None = None,
) -> Path:  # fmt: skip
    """A bundle whose every projection drops ``sparsity`` of its channels on random tokens, one level or several; written
    once. ``graded``: one of graded weights, as GRADED.

    channel_scale = (g / gmean(g)) ** 0.5, as alpha = 0.5 gives it.
    """
    if (out / "wisparse.json").is_file():
        return out
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=checkpoint.tensors["model.norm.weight"].dtype).eval()
    levels: dict[float, dict[str, ProjectionMask]] = {unread(bits): {} for bits in graded or ()}
    for level in () if graded else [sparsity] if isinstance(sparsity, float) else sparsity:
        levels[level] = {}

    counted = torch.arange(num_tokens)[None] > 0

    def record(name: str, weight: torch.Tensor):
        scale = channel_scale(weight_norm(weight), 0.5)

        def hook(module: Any, args: Any) -> None:
            rows = Rows.counted(module, args[0], counted, counted.flatten().nonzero()[:, 0])
            score = scores(rows.x, rows.scale(scale)).flatten()
            for level, masks in levels.items():
                kept = (graded or {}).get(8 * (1 - level), (1 - level,))
                limits = [float(score.kthvalue(max(1, round((1 - share) * score.numel()))).values) for share in kept]
                planes = tuple(limits) if graded else ()
                masks[name] = ProjectionMask(scale, limits[0] if level else 0.0, level, planes)

        return hook

    projections, experts = list(checkpoint.config.projections()), find_experts(model, checkpoint.config)
    for projection in projections:
        module = experts.get(projection.name) or model.get_submodule(projection.name)
        module.register_forward_pre_hook(record(projection.name, module.weight))
    generator = torch.Generator().manual_seed(0)
    model(torch.randint(0, checkpoint.config.vocab_size, (1, num_tokens), generator=generator), use_cache=False)
    if graded:
        modules = {p.name: model.get_submodule(p.name) for p in projections}
        how = {"scale_dtype": torch.bfloat16, "graded": True}
        matrices = {
            name: quantise("int8", module.weight, group=group_of(module.in_features), **how)
            for name, module in modules.items()
        }
        checkpoint = checkpoint.quantize(matrices, torch.bfloat16)

    def entries(level: float) -> tuple[ProjectionRecipe, ...]:
        masks = levels[level]
        return tuple(ProjectionRecipe(p.name, level, 0.5, masks[p.name].threshold, level) for p in projections)

    blocks = checkpoint.config.num_blocks
    recipe = Recipe(
        base_model=source.name, base_revision=None, method="benchmark", default=min(levels),
        levels=tuple(SparsityLevel(level, entries(level), (level,) * blocks) for level in sorted(levels)),
        calibration=CalibrationRecord("random tokens", 1, num_tokens, num_tokens, 0, "0" * 64),
        versions={"torch": torch.__version__}, plane_bits=PLANE_BITS if graded else (), quality=quality,
    )  # fmt: skip
    return write_bundle(checkpoint, recipe, dict(sorted(levels.items())), out)


def make_gguf(source: Path, out: Path, output_type: str) -> Path:
    """A random checkpoint of ``LLAMA_1B`` in Q4_0 for llama.cpp, its tied embedding and output layer in another type; its
    words are made up. Written once."""
    if out.is_file():
        return out
    import gguf
    from safetensors import safe_open

    config, part = LLAMA_1B, out.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t 1"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            weight, to = file.get_tensor(name).float().numpy(), names.get_name(name, try_suffixes=(".weight",))
            if weight.ndim == 1:
                writer.add_tensor(to, weight)
                continue
            kind = gguf.GGMLQuantizationType[output_type if "embed" in name else "Q4_0"]
            writer.add_tensor(to, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(out)
