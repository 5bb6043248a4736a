"""Tiny GGUF files, written with the package gguf as llama.cpp's converter writes them: names, interleaved rows, norms + 1."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runtime_models import LLAMA3, LONGROPE, YARN, save_random
from torch import Tensor

HIDDEN, BLOCKS, VOCAB = 256, 3, 272
_ROOT = Path(__file__).parent.parent
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": None, "rms_norm_eps": 1e-6,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_LONG = {key: value * 2 if "factor" in key else value for key, value in LONGROPE.items()}
# name -> GGUF's architecture, Hugging Face's model_type, its settings, metadata by the key after the architecture.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": True, "head_dim": 32}, {}),
    "llama-3.1": ("llama", "llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, {}),
    "llama-bias": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-linear": (
        "llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-yarn": (
        "llama", "llama", {"rope_parameters": {**YARN, "attention_factor": 1.2}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
         "rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_attn_factor": 1.2},
    ),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2},
                {"expert_count": 4, "expert_used_count": 2}),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen2-yarn": (
        "qwen2", "qwen2", {"rope_parameters": {**YARN, "beta_fast": 32.0}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"head_dim": 32, **_EXPERTS},
                 {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}),
    "gemma": ("gemma", "gemma", {"head_dim": 96}, {}),
    "gemma2": (
        "gemma2", "gemma2", {**_WINDOWS, "head_dim": 96, "query_pre_attn_scalar": 96, "attn_logit_softcapping": 2.0,
                             "final_logit_softcapping": 5.0},
        {"attention.sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3", "gemma3_text", {"head_dim": 96, "query_pre_attn_scalar": 96, "sliding_window": 7,
                                  "layer_types": ["sliding_attention"] * 3, "rope_parameters": _GEMMA3_ROPE},
        {"attention.sliding_window": 7, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "gemma3-pattern": (
        "gemma3", "gemma3_text", {"head_dim": 96, "query_pre_attn_scalar": 96, **_WINDOWS,
                                  "rope_parameters": _GEMMA3_ROPE},
        {"attention.sliding_window": 7, "attention.sliding_window_pattern": 2, "rope.scaling.type": "linear",
         "rope.scaling.factor": 2.0},
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 9}, {"attention.sliding_window": 9}),
    "phi3-long": (
        "phi3", "phi3", {"rope_parameters": {**_LONG, "partial_rotary_factor": 0.75},
                         "original_max_position_embeddings": 32, "num_attention_heads": 8},
        {"rope.scaling.original_context_length": 32, "rope.dimension_count": 24},
    ),
    "granite": (
        "granite", "granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6,
                               "logits_scaling": 2.5, "tie_word_embeddings": True},
        {"embedding_scale": 3.0, "attention.scale": 0.4, "residual_scale": 0.6, "logit_scale": 2.5},
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0],
                                       "tie_word_embeddings": True}, {}),
    "olmo2": ("olmo2", "olmo2", {}, {}),
}  # fmt: skip
_INTERLEAVED, _PLUS_ONE = ("llama", "granite", "smollm3"), ("gemma", "gemma2", "gemma3")


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """A head's rotary pairs (i, i + d / 2) side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    name: str, out: Path, kind: str = "F32", metadata: dict[str, Any] | None = None, **changed: Any
) -> torch.nn.Module:
    """Write the model ``name`` of `MODELS` to ``out``, its matrices as ``kind``; returns transformers' model with the
    dequantised weights. ``metadata``: further keys, or None to leave one out; ``changed``: settings."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, model_type, settings, extra = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **settings, **changed})
    attention = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    folder = save_random(AutoModelForCausalLM, config, name, out.parent / f"{out.stem}-{name}-source")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention).eval()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or HIDDEN // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    facts = {
        "block_count": config.num_hidden_layers, "context_length": 256, "embedding_length": HIDDEN,
        "feed_forward_length": 512, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "rope.freq_base": float(rope["rope_theta"]), "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": width, **({} if model_type == "phi3" else dict.fromkeys(
            ("attention.key_length", "attention.value_length"), width)),
    }  # fmt: skip
    writer = gguf.GGUFWriter(str(out), (metadata or {}).get("general.architecture", architecture))
    every: dict[str, Any] = {f"{architecture}.{key}": value for key, value in {**facts, **extra}.items()}
    for key, value in {**every, **BYTES, **(metadata or {})}.items():  # a later one replaces an earlier one
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None and key != "general.architecture":
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](key, value)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], 8)
    qtype = gguf.GGMLQuantizationType[kind]
    for full, parameter in model.state_dict().items():
        weight = parameter.float()
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if full.endswith("experts.gate_up_proj"):  # as transformers has them, (E, 2 I, H)
            block = full.split(".")[2]
            halves = zip(("gate", "up"), weight.chunk(2, 1), strict=True)
            parts = {f"blk.{block}.ffn_{part}_exps.weight": one for part, one in halves}
        elif full.endswith("experts.down_proj"):
            parts = {f"blk.{full.split('.')[2]}.ffn_down_exps.weight": weight}
        else:
            stored = names.get_name(full, (".weight", ".bias"))
            assert stored is not None, full
            parts = {stored: weight}
        for stored, part in parts.items():
            if architecture in _INTERLEAVED and (".attn_q." in stored or ".attn_k." in stored):
                part = interleaved(part, heads if ".attn_q." in stored else kv_heads)
            if architecture in _PLUS_ONE and stored.endswith("norm.weight"):
                part = part + 1
            array = np.ascontiguousarray(part.numpy())
            if array.ndim > 1 and kind != "F32":
                array = quantise(array, qtype)
                writer.add_tensor(stored, array, raw_dtype=qtype)
            else:
                writer.add_tensor(stored, array)
        if parameter.ndim > 1 and kind != "F32":
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(quantise(weight.numpy(), qtype), qtype)))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, width))
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return model


def quantise(array: np.ndarray, qtype: Any) -> np.ndarray:
    """Blocks of a type. gguf does not quantise to K types: their blocks are random bytes with scales of a usual size."""
    import gguf

    if not qtype.name.endswith("_K"):
        return gguf.quants.quantize(array.astype(np.float32), qtype)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    shape = (*array.shape[:-1], array.shape[-1] // block * size)
    # The same bytes for the same weight, whatever the order of its rows.
    blocks = (
        np.frombuffer(b"".join(_bytes(row, size) for row in array.reshape(-1, block)), np.uint8)
        .reshape(-1, size)
        .copy()
    )
    for place in [208] if qtype.name == "Q6_K" else [0, 2]:
        blocks[:, place : place + 2] = np.array([2e-4], np.float16).view(np.uint8)
    return blocks.reshape(shape)


def _bytes(row: np.ndarray, size: int) -> bytes:
    seed = int(np.frombuffer(row.tobytes(), np.uint32).sum())
    return np.random.default_rng(seed).bytes(size)


def llama3_factors(rope: dict[str, Any], width: int) -> np.ndarray:
    factors = []
    for index in range(0, width, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (index / width)
        short, long = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("high", "low"))
        smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if length < short else rope["factor"] if length > long else between)
    return np.array(factors, np.float32)


def _alphabet() -> list[str]:
    """How a byte-level vocabulary spells the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


# A vocabulary of bytes, two ends and two merges, and rows without a token.
_TOKENS = [*_alphabet(), "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<tool_call>", "he", "12"]
BYTES: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*_TOKENS, *(f"[PAD{index}]" for index in range(len(_TOKENS), VOCAB))],
    "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 4, 1, 1] + [5] * (VOCAB - len(_TOKENS)),
    "tokenizer.ggml.merges": ["h e", "1 2"],
    "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 258, "tokenizer.ggml.eot_token_id": 257,
}  # fmt: skip


def texts() -> list[str]:
    """200 texts and more: code, digits, indentation, several scripts, white space of all kinds."""
    files = [*sorted((_ROOT / "kernels").glob("*.py")), *sorted((_ROOT / "docs").glob("*.md"))]
    pieces = [
        text[at : at + 200]
        for text in (file.read_text() for file in files)
        for at in range(0, min(len(text), 2400), 200)
    ]
    others = "नमस्ते दुनिया 123|日本語 テスト４５６ 一二三|Привет 2024-01-02 мир|  \t\n x=1\n    y = 22|e\u0301 é|مرحبا ١٢٣|안녕하세요|🚀 😶\u200d🌫️"
    others += "|I've we'Ll DON'T he'S|3 33 333 3333 3.14 1e-05|a\r\n\r\n  b\n\n\n c| leading|trailing   || |ß Ǆ ǆ İ|\u00a0x\u2003y|XMLHttp//a"
    return [*pieces, *others.split("|")]
