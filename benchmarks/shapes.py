"""The shapes of published models, as their config.json has them, but for Llama 3.1's scaled rotary embeddings."""

# ruff: noqa: C408 (tables of keyword arguments read better)
from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", num_key_value_heads=8, vocab_size=128256,
    max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    hidden_act="silu", dtype="bfloat16", tie_word_embeddings=False,
)  # fmt: skip
LLAMA_1B = LLAMA | dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64,
    tie_word_embeddings=True,
)  # fmt: skip
LLAMA_3B = LLAMA | dict(
    hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, head_dim=128,
    tie_word_embeddings=True,
)  # fmt: skip
LLAMA_8B = LLAMA | dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128,
)  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
    moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[], num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, hidden_act="silu", dtype="bfloat16",
    tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1e6),
)  # fmt: skip
