"""Which tensors a checkpoint of a known architecture holds, and their shapes: everything is checked against it."""

from __future__ import annotations

from .model_config import ModelConfig

__all__ = ["LM_HEAD", "expected_tensors", "is_derived"]

LM_HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, in the order a decoder meets them; weights are (out, in).

    With tied embeddings there is no ``lm_head.weight``.
    """
    hidden, vocab = (config.hidden_size,), (config.vocab_size, config.hidden_size)
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab}
    arch = config.architecture
    # Which norm a decoder meets before each of these projections, and after.
    first, last = arch.norms.attention_input, arch.norms.attention_output
    before = {arch.qkv[0]: first, "in_proj_qkv": first, arch.gate_up[0]: arch.norms.mlp_input}
    after = {"o_proj": last, "out_proj": last, "down_proj": arch.norms.mlp_output}
    for block in range(config.num_blocks):
        prefix = f"model.layers.{block}."
        for projection in config.projections(block):
            if norm := before.get(projection.role):
                expected[f"{prefix}{norm}.weight"] = hidden
            if projection.role == "o_proj" and arch.qk_norm is not None:
                own = config.blocks[block]
                for name, size in zip(arch.qk_norm.names, (config.q_size(block), own.kv_size), strict=True):
                    expected[f"{prefix}self_attn.{name}.weight"] = (own.head_dim if arch.qk_norm.per_head else size,)
            if projection.role == "out_proj" and config.delta_net is not None:
                others = config.delta_net.tensors(config.hidden_size)
                expected |= {f"{prefix}linear_attn.{name}": shape for name, shape in others.items()}
            expected[projection.name + ".weight"] = (projection.out_features, projection.in_features)
            if projection.bias:
                expected[projection.name + ".bias"] = (projection.out_features,)
            if norm := after.get(projection.role):
                expected[f"{prefix}{norm}.weight"] = hidden
        if arch.block_scalar is not None:
            expected[prefix + arch.block_scalar] = (1,)
    expected["model.norm.weight"] = hidden
    if not config.tie_word_embeddings:
        expected[LM_HEAD] = vocab
    return expected


def is_derived(name: str) -> bool:
    """Whether a tensor adds nothing to what decoding computes.

    Old Llama checkpoints carry their rotary frequencies, which the config says; Qwen3.5's carry a block that guesses
    several tokens at once, which transformers leaves out as well.
    """
    repeated = name.startswith("model.layers.") and name.endswith(".self_attn.rotary_emb.inv_freq")
    return repeated or name.startswith("mtp.")
