"""Which tensors a checkpoint of a known architecture holds, and their shapes: everything is checked against it."""

from __future__ import annotations

from .architectures import ModelConfig

__all__ = ["LM_HEAD", "expected_tensors", "is_derived"]

LM_HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, in the order a decoder meets them; weights are (out, in).

    With tied embeddings there is no ``lm_head.weight``.
    """
    hidden, vocab = (config.hidden_size,), (config.vocab_size, config.hidden_size)
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab}
    for block in range(config.num_blocks):
        prefix = f"model.layers.{block}."
        expected[prefix + "input_layernorm.weight"] = hidden
        for projection in config.projections(block):
            if projection.role == config.architecture.gate_up[0]:
                expected[prefix + "post_attention_layernorm.weight"] = hidden
            if projection.role == "o_proj" and config.architecture.qk_norm:
                expected[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
                expected[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
            expected[projection.name + ".weight"] = (projection.out_features, projection.in_features)
            if projection.bias:
                expected[projection.name + ".bias"] = (projection.out_features,)
    expected["model.norm.weight"] = hidden
    if not config.tie_word_embeddings:
        expected[LM_HEAD] = vocab
    return expected


def is_derived(name: str) -> bool:
    """Whether a tensor only repeats what the config says: old Llama checkpoints carry their rotary frequencies."""
    return name.startswith("model.layers.") and name.endswith(".self_attn.rotary_emb.inv_freq")
