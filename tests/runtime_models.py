"""Tiny random checkpoints in which every feature of every listed architecture appears once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from wisparse.converter.config import release_refusal
from wisparse.formats.architectures import WRAPPERS as TEXT_TYPES

# fmt: off
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
_NEAR = {"rope_type": "default", "rope_theta": 100.0}  # of the blocks with a window
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_SCALINGS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 2.5,
}
# Experts, as most families name their numbers and sizes, and as others do.
_SIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

# name -> (model_type, settings). Families whose blocks differ from Llama's in more than a switch. The numbers are small
# enough that windows, caps and the second rotary embedding all change the tokens of a short prompt.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {
        **_WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    }),
    # Without the cap the logits are so far apart that the model writes one token alone, on which channels are zero.
    "gemma3": ("gemma3_text", {
        **_WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 40, "final_logit_softcapping": 5.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}, "sliding_attention": _NEAR,
        },
    }),
    "gemma4": ("gemma4_text", {
        **_WINDOWS, "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
            "sliding_attention": _NEAR,
        },
    }),
    "arcee": ("arcee", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**_WINDOWS, "rope_parameters": {"full_attention": YARN, "sliding_attention": _NEAR}}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "smollm3-window": ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7}),
    "granite": ("granite", {**_SCALINGS, "attention_bias": True}),
    "granite-swa": ("granite_swa", {
        **_WINDOWS, **_SCALINGS, "layer_rope_theta": [100.0, 0, 10000.0], "tie_word_embeddings": False,
    }),
    "cwm": ("cwm", {**_WINDOWS, "head_dim": 24, "rope_parameters": LLAMA3}),
    "internlm3": ("internlm3", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 24}),
    "hyperclovax": ("hyperclovax", _SCALINGS),
    "hyperclovax-plain": ("hyperclovax", {"use_post_norm": False, "head_dim": 24, "attention_bias": True}),
    "gemma": ("gemma", {"head_dim": 24, "attention_bias": True}),
    "ministral": ("ministral", {**_WINDOWS, "head_dim": 24}),
    "helium": ("helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "glm": ("glm", {"head_dim": 24, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 24, "attention_bias": True}),
    "seed-oss": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "head_dim": 24}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-window": ("exaone4", _WINDOWS),
    "hunyuan": ("hunyuan_v1_dense", {
        "head_dim": 24,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
    }),
    "ernie": ("ernie4_5", {"use_bias": True, "head_dim": 24}),
    "ministral3": ("ministral3", {"head_dim": 24, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.7}}),
    "vaultgemma": ("vaultgemma", {
        **_WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0, "attention_bias": True,
        "final_logit_softcapping": 5.0,
    }),
}

FAMILIES["muse-glimmer"] = ("muse_glimmer_text", {
    **_WINDOWS, "head_dim": 24, "layer_rope_theta": [10000.0, 0, 10000.0], "attention_bias": True, "rms_norm_eps": 1e-3,
    "qk_scale_factor": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 5.0,
})
_GEMMA4 = {key: value for key, value in FAMILIES["gemma4"][1].items() if key != "hidden_size_per_layer_input"}
FAMILIES["gemma4-unified"] = ("gemma4_unified_text", _GEMMA4)

# Some of their blocks are recurrent.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", {
        "head_dim": 24, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    }),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32, "conv_L_cache": 4}),
    "granite-hybrid": ("granitemoehybrid", {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0,
        "shared_intermediate_size": 88, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2,
        "mamba_proj_bias": True, **_SCALINGS,
    }),
    "nemotron-h": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"], "head_dim": 24,
        "mamba_num_heads": 8, "mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 12, "mlp_bias": True, "use_bias": True,
    }),
    "lfm2-bias": ("lfm2", {
        "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "conv_bias": True,
    }),
}

# Blocks of them share keys and values, and have embeddings; neither GPUs nor the ONNX export have such models.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-small": ("gemma4_text", {
        **_WINDOWS, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "head_dim": 16,
        "global_head_dim": 24, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
            "sliding_attention": _NEAR,
        },
    }),
}

_LATENT_HEADS = {
    "kv_lora_rank": 40, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28, "attention_bias": True,
    "num_key_value_heads": 4,
}
_LATENT = {**_ROUTED, "n_shared_experts": 2, **_LATENT_HEADS}
FAMILIES["youtu"] = ("youtu", {**_LATENT_HEADS, "q_lora_rank": 48, "tie_word_embeddings": False})
# name -> as above: models with experts, in all blocks but the second of the first one.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", {"head_dim": 24, **_SIX, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen2-moe": ("qwen2_moe", {**_SIX, "shared_expert_intermediate_size": 56}),
    "flex-olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40, "norm_topk_prob": True}),
    "mellum": ("mellum", {
        **_WINDOWS, "head_dim": 24, **_SIX, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {"full_attention": YARN, "sliding_attention": _NEAR},
    }),
    "ernie-moe": ("ernie4_5_moe", {
        "head_dim": 24, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 2,
        "tie_word_embeddings": False,
    }),
    "lfm2-moe": ("lfm2_moe", {
        "layer_types": ["conv", "full_attention", "conv"], **_SIX, "num_dense_layers": 1, "routed_scaling_factor": 1.5,
        "intermediate_size": 96,
    }),
    "glm4-moe": ("glm4_moe", {
        "head_dim": 24, **_ROUTED, "use_qk_norm": True, "routed_scaling_factor": 1.5, "attention_bias": True,
    }),
    "glm4-moe-plain": ("glm4_moe", {"head_dim": 16, **_ROUTED, "n_shared_experts": 2, "norm_topk_prob": False}),
    "solar-open": ("solar_open", {"head_dim": 24, **_ROUTED}),
    "dots1": ("dots1", {
        **_ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 7, "max_window_layers": 1,
        "routed_scaling_factor": 1.5,
    }),
    "exaone-moe": ("exaone_moe", {**_WINDOWS, "head_dim": 24, **_SIX, "sliding_window_pattern": None}),
    "minimax-m2": ("minimax_m2", {
        "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    }),
    "hunyuan-moe": ("hunyuan_v1_moe", {"head_dim": 24, "num_experts": 6, "moe_topk": 2, "intermediate_size": 40}),
    "glm4-moe-lite": ("glm4_moe_lite", {**_LATENT, "q_lora_rank": 48, "routed_scaling_factor": 1.5}),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "mlp_bias": True}),
    "deepseek-v3": ("deepseek_v3", {
        **_LATENT, "q_lora_rank": 48, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    }),
    "sarvam-mla": ("sarvam_mla", {
        **_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
        "rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 1.3},
    }),
    "granite-moe": ("granitemoe", {
        **_SCALINGS, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40, "attention_bias": True,
    }),
    "afmoe": ("afmoe", {**_WINDOWS, "head_dim": 24, **_SIX, "mup_enabled": True, "route_scale": 1.5}),
    "flint": ("flint", {**_WINDOWS, "head_dim": 24, **_SIX, "shared_expert_intermediate_size": 56}),
    "deepseek-v2-groups": ("deepseek_v2", {
        **_LATENT, "q_lora_rank": 48, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
    }),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**HYBRIDS["qwen3.5"][1], **_SIX, "shared_expert_intermediate_size": 56}),
    "qwen3-next": ("qwen3_next", {
        **HYBRIDS["qwen3.5"][1], **_SIX, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1],
    }),
    "gemma4-moe": ("gemma4_text", {
        **FAMILIES["gemma4"][1], "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
        "moe_intermediate_size": 40,
    }),
    "nemotron-h-moe": ("nemotron_h", {
        **HYBRIDS["nemotron-h"][1], "layers_block_type": None, "hybrid_override_pattern": "MEM*-E", **_ROUTED,
        "n_group": 3, "topk_group": 2, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5,
    }),
    "gpt-oss": ("gpt_oss", {
        **_WINDOWS, "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
        "swiglu_alpha": 1.3, "swiglu_limit": 0.8, "rope_parameters": {**YARN, "truncate": False},
    }),
}

_LATER_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", _LATER_WINDOW),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {**_LATER_WINDOW, "head_dim": 16}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 9}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}}),
    "phi3-long": ("phi3", {
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }),
    **FAMILIES,
}

# One family a feature: biases, norms of whole vectors, windows and soft caps, fused projections, DeltaNet, shared keys and
# values, experts and a shared one, attention sinks.
FEATURES = ("seed-oss", "olmo2", "gemma2", "phi3-partial", "qwen3.5", "gemma4", "qwen3.5-moe", "gpt-oss", "gemma4-moe")
FEATURES += ("lfm2", "nemotron-h", "nemotron-h-moe", "granite-swa", "arcee", "muse-glimmer", *SMALL)
# One a smaller one: tied and plain biases, LongRoPE, two rotary embeddings, scalings, pairs that interleave, latents.
DETAILS = ("llama-tied", "llama-bias", "phi3-long", "gemma3", "hunyuan", "ministral3", "glm4", "youtu", "lfm2-bias")
DETAILS += ("granite-hybrid",)


def featured(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; those that repeat the features of others are left to the exhaustive run."""
    import pytest  # benchmarks take the checkpoints without it

    kept = {*FEATURES, *DETAILS}
    return [pytest.param(name, marks=() if name in kept else pytest.mark.exhaustive) for name in names]


_SIZES = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model", "num_attention_heads": 2, "image_size": 64, "patch_size": 4}
_CLIP = {**_SIGLIP, "model_type": "clip_vision_model"}
_PIXTRAL = {**_VISION, "model_type": "pixtral", "head_dim": 8}
_QWEN_VISION = {"depth": 1, "num_heads": 2, "hidden_size": 16, "patch_size": 4}
_QWEN_NEW_VISION = {**_QWEN_VISION, "intermediate_size": 24, "out_hidden_size": 64}


def _mrope(*section: int, **settings: bool) -> dict[str, Any]:
    return {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": list(section), **settings}


# name -> (model_type, settings, of the text model, of the vision tower): models of pictures and text whose text model
# is one of the families.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        "mistral3", {"tie_word_embeddings": False}, {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        _PIXTRAL,
    ),
    "mistral3-ministral": (
        "mistral3", {"tie_word_embeddings": True},
        {"model_type": "ministral3", **FAMILIES["ministral3"][1], "tie_word_embeddings": True}, _PIXTRAL,
    ),
    "gemma3": (  # transformers' wrapper has no cap
        "gemma3", {"tie_word_embeddings": False},
        {"model_type": "gemma3_text", **FAMILIES["gemma3"][1], "final_logit_softcapping": None, "tie_word_embeddings": False},
        _SIGLIP,
    ),
    "gemma4": (
        "gemma4", {}, {"model_type": "gemma4_text", **FAMILIES["gemma4"][1]},
        {**_VISION, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64},
    ),
    "gemma4-small": (
        "gemma4", {"audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        {"model_type": "gemma4_text", **SMALL["gemma4-small"][1]},
        {**_VISION, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64},
    ),
    "gemma4-unified": (
        "gemma4_unified", {}, {"model_type": "gemma4_unified_text", **_GEMMA4},
        {"mm_embed_dim": 16, "mm_posemb_size": 8, "patch_size": 4, "output_proj_dims": 64},
    ),
    "muse-glimmer": (
        "muse_glimmer", {"out_hidden_size": 64, "projector_hidden_size": 24}, FAMILIES["muse-glimmer"][1],
        {**_VISION, "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "exaone4.5": (
        "exaone4_5", {"tie_word_embeddings": False}, {"model_type": "exaone4", **_WINDOWS},
        {**_QWEN_NEW_VISION, "fullatt_block_indexes": [0], "num_key_value_heads": 2},
    ),
    "smolvlm": (
        "smolvlm", {"scale_factor": 2, "image_token_id": 5, "tie_word_embeddings": True},
        {"model_type": "llama", "tie_word_embeddings": True, "pad_token_id": 0}, _SIGLIP,
    ),
    "llava": ("llava", {"image_token_id": 5}, {"model_type": "mistral", "sliding_window": 7}, _CLIP),
    "llava-next": ("llava_next", {"image_token_id": 5}, {"model_type": "qwen2"}, _CLIP),
    "llava-onevision": ("llava_onevision", {"image_token_id": 5}, {"model_type": "qwen2"}, _SIGLIP),
    "internvl": (
        "internvl", {"image_token_id": 5}, {"model_type": "qwen3", "head_dim": 24},
        {**_VISION, "num_attention_heads": 2, "image_size": [8, 8], "patch_size": [4, 4]},
    ),
    "lfm2-vl": (
        "lfm2_vl", {"image_token_id": 5}, {"model_type": "lfm2", **HYBRIDS["lfm2"][1]},
        {**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16},
    ),
    "qwen2-vl": ("qwen2_vl", {}, {"rope_parameters": _mrope(2, 3, 3)}, {**_QWEN_VISION, "embed_dim": 16}),
    "qwen2.5-vl": (
        "qwen2_5_vl", {"tie_word_embeddings": True}, {"rope_parameters": _mrope(2, 3, 3), "tie_word_embeddings": True},
        {**_QWEN_NEW_VISION, "fullatt_block_indexes": [0]},
    ),
    "qwen3.5": (
        "qwen3_5", {}, {**HYBRIDS["qwen3.5"][1], "rope_parameters": _mrope(1, 1, 1, mrope_interleaved=True)},
        {**_QWEN_NEW_VISION, "num_position_embeddings": 16},
    ),
    "qwen3-vl": (
        "qwen3_vl", {}, {"head_dim": 24, "rope_parameters": _mrope(4, 4, 4, mrope_interleaved=True)},
        {**_QWEN_NEW_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}
# Families that the installed transformers is too old for, with what the converter says of them.
LACKING: dict[str, str] = {}
for _table in (FAMILIES, HYBRIDS, EXPERTS, VARIANTS, WRAPPERS):
    for _name, (_type, *_) in list(_table.items()):
        if _refusals := [why for one in TEXT_TYPES.get(_type, [_type]) if (why := release_refusal(one))]:
            LACKING[_name] = _refusals[0]
            del _table[_name]
# fmt: on


def family(name: str, *tables: dict[str, Any]) -> Any:
    """A family's entry of one of the tables; skips the test if the installed transformers is too old for it."""
    found = [table[name] for table in tables if name in table]
    return found[0] if found else pytest.skip(LACKING[name])


def make_wrapper(name: str, out: Path, *, vocab_size: int = 101) -> Path:
    """A model of pictures and text with random weights, saved as transformers saves it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type, settings, text, vision = family(name, WRAPPERS)
    text = {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size, **_SIZES, **text}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **settings)
    return save_random(AutoModelForImageTextToText, config, name, out)


def make_checkpoint(variant: str, out: Path, *, vocab_size: int = 101) -> Path:
    """A model of 3 blocks with random weights, saved as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = family(variant, VARIANTS, HYBRIDS, SMALL, EXPERTS)
    if model_type == "muse_glimmer_text":
        import wisparse.converter.muse_glimmer  # noqa: F401
    rows = dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input")[: 2 if model_type == "gemma4_text" else 1], vocab_size
    )
    config = AutoConfig.for_model(model_type, **rows, **{**_SIZES, **settings})
    return save_random(AutoModelForCausalLM, config, variant, out)


def save_random(auto: Any, config: Any, name: str, out: Path) -> Path:
    """Random weights with which every feature is seen in the logits."""
    torch.manual_seed(len(name))
    model = auto.from_config(config).eval()
    with torch.no_grad():
        scalars = [
            pair
            for pair in model.named_buffers()
            if pair[0].endswith(("layer_scalar", "expert_bias", "correction_bias"))
        ]
        for name, parameter in [*model.named_parameters(), *scalars]:
            # The usual initialisation gives nearly the same logits to every token, and zero biases hide a forgotten one.
            if parameter.dim() == 2:
                parameter.normal_(std=1.2 * parameter.shape[1] ** -0.5 if "embed" not in name else 0.5)
            elif parameter.dim() == 3 and "experts" in name:
                parameter.normal_(std=1.2 * parameter.shape[2] ** -0.5)
            elif name.endswith(("norm.weight", "norm_f.weight", "layer_scalar")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(
                ("conv1d.weight", "conv.conv.weight")
            ):  # the norm of what a head recalls magnifies smaller values' rounding
                parameter.normal_()
            else:
                parameter.normal_(std=0.3)
    model.save_pretrained(out)
    return out
