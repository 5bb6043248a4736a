"""Facts about each supported architecture, as one table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import UnsupportedModelError
from .guard import refusals

Activation = Literal["silu", "gelu_tanh", "clamped", "relu2"]
Mixer = Literal["attention", "delta_net", "short_conv", "mamba2"]  # what mixes the tokens of a block
DenseBlocks = Literal[
    "decoder_sparse_step", "mlp_layer_types", "num_dense_layers", "first_k_dense_replace", "moe_layer_interval"
]
# A config key and an exponent: Gemma's attention scale is query_pre_attn_scalar**-0.5.
Power = tuple[str, float]

# Names of projections, separate or fused.
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",))
# Kind of a recurrent block in ``layer_types`` -> what it has in place of attention.
MIXERS: Mapping[str, Mixer] = {"linear_attention": "delta_net", "conv": "short_conv"}
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Norms:
    """Names of a block's norms over the hidden state, or None. ``attention``: also the block's recurrent mixer."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None
    outputs_key: str | None = None  # config key for whether there are norms of outputs; None: always


_BEFORE = Norms()
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_BOTH = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm of queries and keys: per head or over all heads; before or after the rotary embedding."""

    per_head: bool = True
    after_rotary: bool = False
    names: tuple[str, ...] = ("q_norm", "k_norm")  # none: without weights
    key: str | None = None  # config key for whether there are such norms; None: always


@dataclass(frozen=True)
class ExpertsLayout:
    """A family's config keys and tensor names of experts."""

    renormalised: bool | str  # whether the top-k weights are divided by their sum, or the config key for it
    norm_added: float = 0.0  # added to that sum
    norm_least: str | None = None  # config key of its least value
    score: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits: the experts' weights
    choice_bias: str | None = None  # a block's tensor (E,) that is added to the scores for the choice alone;
    choice_bias_row: bool = False  # (1, E)
    choice_bias_key: str | None = None  # config key for whether there is one; None: always
    scale: str | None = None  # config key of the weights' factor
    group_best: int = 0  # best experts of a group whose scores are the group's, see `Groups`; 0: no groups
    # What is rounded to the activations' dtype: the router's logits and the bias, the logits and their scores, or nothing.
    rounded: Literal["logits", "scores"] | None = "logits"
    count: str | None = None  # config key of the number of experts; None: one of transformers' two
    chosen: str = "num_experts_per_tok"
    intermediate_size: str = "moe_intermediate_size"
    shared_size: str | None = None  # config key of the width of the shared expert,
    shared_count: str | None = None  # and of the number that it is multiplied by
    shared_module: str = "shared_expert"
    shared_gate: str | None = None  # a block's tensor (1, H) that gates it
    # Config key by which some blocks have a dense MLP: every so many blocks have experts, but for ``mlp_only_layers``; each
    # block's kind, ``dense`` or ``sparse``; the number of first blocks; or every so many from one block to another.
    dense_blocks: DenseBlocks | None = None
    module: str = "mlp"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # of those of ``gate_up`` and of down
    router: str = "gate"
    biases: bool = False  # of the router and the experts
    # Config key that puts experts beside the dense MLP. Each has its own input and output norm; the router has an
    # input norm, and its top-k weights are multiplied by a learned scale per expert.
    parallel_mlp: str | None = None
    # How files stack a block's experts. None: one tensor per expert, or ``rows``. ``rows``: (E, 2 I, H), gates before
    # ups, or (E, I, H) without gates, and (E, H, I). ``interleaved``: (E, H, 2 I), a gate beside its up, and (E, I, H).
    stacked: Literal["rows", "interleaved"] | None = None
    stacked_names: tuple[str, str] | None = None  # of these tensors in ``module``; None: transformers' names


@dataclass(frozen=True)
class Architecture:
    class_name: str
    norms: Norms = _BEFORE
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    eps: str = "rms_norm_eps"  # config key
    # Role of a projection -> its name within a block, where it is not `self_attn.q_proj`, `mlp.gate_proj` and so on; also
    # of ``experts`` and ``sinks``.
    modules: Mapping[str, str] = field(default_factory=dict)
    norm_offset: bool = False  # norms multiply by 1 + weight in float32 (Gemma),
    final_offset: bool = True  # also the final one
    wide_norms: bool = False  # norms multiply by the weight in float32
    output_eps: str | None = None  # config key, of the norms of outputs; None: ``eps``
    embedding_norm: bool = False  # RMSNorm without weight on the tokens' embeddings
    always_tied: bool = False  # vLLM's model of the family has no output layer but the embedding
    qkv: tuple[str, ...] = _QKV[0]  # query, key and value projections, separate or fused
    gate_up: tuple[str, ...] = _GATE_UP[0]  # gate and up projections, separate or fused; or up alone
    # True, False, or the config key for it.
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QKNorm | None = None
    # Config key of the MLP's activation, or None where it is always silu; and its values -> our names.
    activation: str | None = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    # Full attention blocks have another head_dim and num_key_value_heads, by ``per_layer_config``, or by
    # ``global_head_dim`` and, with ``attention_k_eq_v``, ``num_global_key_value_heads``.
    full_heads: bool = False
    # Config key; if true, the values of full attention blocks are ``k_proj``'s output before norm and rotation.
    shared_values: str | None = None
    value_norm: bool = False  # RMSNorm without weight on each head's values
    block_scalar: str | None = None  # name of a tensor (1,) in each block, a factor of its output
    # Config keys: the number of last blocks that use the keys and values of the last block of their kind before them,
    # whether their MLPs are twice as wide, and the width of per-layer embeddings.
    shared_kv: str | None = None
    wide_mlp: str | None = None
    per_layer: str | None = None
    # Projection of gates, whose sigmoids multiply the heads' outputs: ``q_proj``'s output is for each head a query, then
    # its gate; or ``attention_gate_proj``.
    attention_gate: Literal["q_proj", "attention_gate_proj"] | None = None
    sinks: bool = False  # attention sinks: a learned additional logit in each head's softmax
    # ``layer_types`` has each block's kind: ``full_attention``, ``sliding_attention`` or, in place of the latter, the
    # ``recurrent`` one. With ``window`` instead, all blocks have the config's window, if any.
    layer_types: bool = False
    window: bool = False
    recurrent: str | None = None  # key of ``MIXERS``
    # The recurrent blocks are Mamba-2: config keys of heads, groups, head_dim, state_dim, taps, conv_bias, bias; or none.
    mamba2: tuple[str, ...] = ()
    # A block is one half: attention, a recurrent mixer, or, of the kinds ``mlp`` and ``moe``, an MLP or experts.
    # ``layers_block_type`` has the kinds.
    one_half: bool = False
    # A DeltaNet's projections are ``in_proj_qkvz`` and ``in_proj_ba``, in which the rows of a key head stand together.
    interleaved_delta: bool = False
    mlp_size: str = "intermediate_size"  # config key of the MLP's width
    # The MLP's width is two thirds of ``intermediate_size`` times ``block_ffn_dim_multiplier``, rounded up to a multiple
    # of ``block_multiple_of``, unless ``block_auto_adjust_ff_dim`` is false.
    adjusted_mlp: bool = False
    latent: bool = False  # multi-head latent attention
    partial: bool = False  # whether ``partial_rotary_factor`` applies
    interleaved: bool = False  # rotary pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2)
    # ``rope_parameters`` has a rotary embedding for each layer type.
    local_rope: bool = False
    # Config key of each block's base of the rotary angles; 0: no rotary embedding.
    rope_thetas: str | None = None
    # Blocks without a rotary embedding: ``full`` attention ones, ``all``, or the config key of a list that is 0 for them; all,
    # unless the key ``position_embedding_type`` is ``rope``.
    unrotated: str | None = None
    attention_scale: Power | None = None  # factor of the scores; None: head_dim**-0.5
    query_multiplier: Power | None = None  # another factor of the scores
    query_scaling: bool = False  # queries are scaled by position, with ``llama_4_scaling_beta``
    # Config keys of the soft caps c in c * tanh(x / c), or None.
    attention_softcap: str | None = None
    logits_softcap: str | None = None
    # Factors of embeddings, of the outputs of attention and MLP, and of logits; None: 1.
    embedding_multiplier: Power | None = None
    residual_multiplier: Power | None = None
    logits_multiplier: Power | None = None
    experts: ExpertsLayout | None = None  # None: all MLPs are dense
    # Checkpoints may have an MTP head, ``mtp.*``: an attention block over the last hidden state and the next token's
    # embedding. Embedding and output layer are the model's.
    mtp: bool = False
    without: tuple[str, ...] = ()  # config keys of unsupported arithmetic, which have to be null or false
    always: tuple[str, ...] = ()  # config keys that have to be true

    def __post_init__(self) -> None:
        for name, given, known in (("qkv", self.qkv, _QKV), ("gate_up", self.gate_up, _GATE_UP)):
            if given not in known:
                raise ValueError(f"{self.class_name}: expected {name} to be one of {known}, found {given}")

    @property
    def gated(self) -> bool:
        """Whether an MLP is down(activation(gate(x)) * up(x)); else it is down(activation(up(x)))."""
        return self.gate_up != ("up_proj",)


_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_LLAMA: dict[str, Any] = {**_BIASES, "mlp_bias": "mlp_bias"}
_WINDOWS: dict[str, Any] = {"layer_types": True}
_UNGATED: dict[str, Any] = {"gate_up": _GATE_UP[2], "activations": {"relu2": "relu2"}}
_GEMMA: dict[str, Any] = {**_BIASES, "norm_offset": True, "embedding_multiplier": ("hidden_size", 0.5)}
_NEWER_GEMMA: dict[str, Any] = {
    **_GEMMA,
    **_WINDOWS,
    "norms": _BOTH,
    "activation": "hidden_activation",
    "attention_scale": ("query_pre_attn_scalar", -0.5),
    "logits_softcap": "final_logit_softcapping",
}
_GEMMA4: dict[str, Any] = {
    **_NEWER_GEMMA,
    "norm_offset": False,
    "attention_scale": ("head_dim", 0),  # 1, whatever the width
    "qk_norm": QKNorm(),
    "full_heads": True,
    "shared_values": "attention_k_eq_v",
    "value_norm": True,
    "block_scalar": "layer_scalar",
    "shared_kv": "num_kv_shared_layers",
    "wide_mlp": "use_double_wide_mlp",
    "local_rope": True,
}
_GRANITE: dict[str, Any] = {
    **_LLAMA,
    "attention_scale": ("attention_multiplier", 1),
    "embedding_multiplier": ("embedding_multiplier", 1),
    "residual_multiplier": ("residual_multiplier", 1),
    "logits_multiplier": ("logits_scaling", -1),
}
_QWEN3: dict[str, Any] = {**_BIASES, **_WINDOWS, "qk_norm": QKNorm()}
_QWEN3_5: dict[str, Any] = {
    **_QWEN3,
    "norm_offset": True,
    "attention_gate": "q_proj",
    "activations": {"silu": "silu"},  # of the recurrent blocks' convolution too, which knows no other here
    "recurrent": "linear_attention",
    "partial": True,
    "mtp": True,
}
_OLMO: dict[str, Any] = {**_BIASES, "norms": _AFTER, "qk_norm": QKNorm(per_head=False)}
_LFM2: dict[str, Any] = {
    "norms": Norms("operator_norm", None, "ffn_norm"),
    "final_norm": "model.embedding_norm",
    "eps": "norm_eps",
    "modules": {
        "o_proj": "self_attn.out_proj",
        "experts": "feed_forward.experts",
        **{f"{role}_proj": f"feed_forward.{name}" for role, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    },
    "qk_norm": QKNorm(names=("q_layernorm", "k_layernorm")),
    "activation": None,
    "layer_types": True,
    "recurrent": "conv",
}
_LATENT: dict[str, Any] = {**_BIASES, "latent": True, "interleaved": True}
_GATE_PROJ: dict[str, Any] = {
    "modules": {"attention_gate_proj": "self_attn.gate_proj"},
    "attention_gate": "attention_gate_proj",
}
_HUNYUAN: dict[str, Any] = {
    **_BIASES,
    "qk_norm": QKNorm(after_rotary=True, names=("query_layernorm", "key_layernorm")),
}
_GLM: dict[str, Any] = {"gate_up": _GATE_UP[1], "qkv_bias": "attention_bias", "partial": True, "interleaved": True}
_MIXTRAL: dict[str, Any] = {
    "intermediate_size": "intermediate_size",
    "module": "block_sparse_moe",
    "names": ("w1", "w3", "w2"),
}


def _shared_experts(count: str) -> dict[str, Any]:
    """Shared experts of the others' size; ``count``: the config key of their number."""
    return {"shared_size": "moe_intermediate_size", "shared_count": count, "shared_module": "shared_experts"}


# DeepSeek-V3's router and shared experts.
_DEEPSEEK: dict[str, Any] = {
    "renormalised": "norm_topk_prob",
    "norm_added": 1e-20,
    "score": "sigmoid",
    "scale": "routed_scaling_factor",
    "rounded": None,
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "count": "n_routed_experts",
    "group_best": 2,
    **_shared_experts("n_shared_experts"),
}
_DEEPSEEK_EXPERTS = ExpertsLayout(**_DEEPSEEK, dense_blocks="first_k_dense_replace")
# A shared expert behind a gate.
_GATED: dict[str, Any] = {
    "shared_size": "shared_expert_intermediate_size",
    "shared_gate": "mlp.shared_expert_gate.weight",
}
_QWEN_EXPERTS = ExpertsLayout("norm_topk_prob", **_GATED, dense_blocks="decoder_sparse_step")
_MAMBA = ("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias")
_V2: dict[str, Any] = {
    "renormalised": False,
    "norm_added": 0.0,
    "score": "softmax",
    "choice_bias": None,
    "group_best": 1,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", **_LLAMA),
    "iquestcoder": Architecture("LlamaForCausalLM", **_LLAMA),
    "internlm3": Architecture("LlamaForCausalLM", **_LLAMA),
    "cwm": Architecture("CwmForCausalLM", **_WINDOWS, mlp_bias="mlp_bias"),
    "mistral": Architecture("MistralForCausalLM", window=True),
    "ministral": Architecture("MinistralForCausalLM", **_WINDOWS),
    "ministral3": Architecture("Ministral3ForCausalLM", window=True, query_scaling=True),
    "qwen2": Architecture("Qwen2ForCausalLM", **_WINDOWS, qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", **_QWEN3),
    "qwen3_5_text": Architecture("Qwen3_5ForCausalLM", **_QWEN3_5),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        **_BIASES,
        window=True,
        qk_norm=QKNorm(),
        experts=ExpertsLayout("norm_topk_prob", dense_blocks="decoder_sparse_step"),
    ),
    "mellum": Architecture(
        "MellumForCausalLM",
        **_QWEN3,
        local_rope=True,
        experts=ExpertsLayout("norm_topk_prob", dense_blocks="mlp_layer_types"),
    ),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", **_WINDOWS, qkv_bias="qkv_bias", experts=_QWEN_EXPERTS),
    "qwen3_5_moe_text": Architecture("Qwen3_5MoeForCausalLM", **_QWEN3_5, experts=ExpertsLayout(True, **_GATED)),
    "qwen3_next": Architecture(
        "Qwen3NextForCausalLM", **{**_QWEN3_5, "mtp": False}, interleaved_delta=True, experts=_QWEN_EXPERTS
    ),
    "mixtral": Architecture("MixtralForCausalLM", window=True, experts=ExpertsLayout(True, **_MIXTRAL)),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        **_BIASES,
        window=True,
        qk_norm=QKNorm(per_head=False),
        experts=ExpertsLayout("norm_topk_prob", intermediate_size="intermediate_size"),
        without=("clip_qkv",),
    ),
    "flex_olmo": Architecture(
        "FlexOlmoForCausalLM", **_OLMO, experts=ExpertsLayout("norm_topk_prob", intermediate_size="intermediate_size")
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        **_BIASES,
        **_WINDOWS,
        activations={"silu": "clamped"},
        sinks=True,
        experts=ExpertsLayout(
            True, intermediate_size="intermediate_size", router="router", biases=True, stacked="interleaved"
        ),
    ),
    "phi3": Architecture("Phi3ForCausalLM", window=True, partial=True, qkv=_QKV[1], gate_up=_GATE_UP[1]),
    # Gemma's first checkpoints say "gelu" for the tanh approximation.
    "gemma": Architecture("GemmaForCausalLM", **_GEMMA, activations={**ACTIVATIONS, "gelu": "gelu_tanh"}),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", **_NEWER_GEMMA, always_tied=True, attention_softcap="attn_logit_softcapping"
    ),
    "vaultgemma": Architecture(
        "VaultGemmaForCausalLM",
        **{**_NEWER_GEMMA, "norms": Norms(mlp_input="pre_feedforward_layernorm")},
        attention_softcap="attn_logit_softcapping",
    ),
    "gemma3_text": Architecture("Gemma3ForCausalLM", **_NEWER_GEMMA, qk_norm=QKNorm(), local_rope=True),
    "gemma4_text": Architecture(
        "Gemma4ForCausalLM",
        **_GEMMA4,
        per_layer="hidden_size_per_layer_input",
        experts=ExpertsLayout(
            True,
            chosen="top_k_experts",
            shared_size="intermediate_size",
            router="router.proj",
            stacked="rows",
            parallel_mlp="enable_moe_block",
        ),
    ),
    "gemma4_unified_text": Architecture("Gemma4UnifiedForCausalLM", **_GEMMA4),
    "arcee": Architecture("ArceeForCausalLM", **_LLAMA, **_UNGATED),
    "muse_glimmer_text": Architecture(
        "MuseGlimmerForCausalLM",  # of `wisparse.converter.muse_glimmer`: transformers has none of the text model
        **{**_NEWER_GEMMA, "attention_scale": None, "embedding_multiplier": None},
        final_offset=False,
        output_eps="post_norm_eps",
        embedding_norm=True,
        **_GATE_PROJ,
        qk_norm=QKNorm(names=()),
        query_multiplier=("qk_scale_factor", 1),
        unrotated="layer_rope_theta",
        logits_multiplier=("output_multiplier", 1),
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", **_OLMO),
    "olmo3": Architecture("Olmo3ForCausalLM", **_OLMO, **_WINDOWS, local_rope=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", **_LLAMA, **_WINDOWS, unrotated="no_rope_layers"),
    "granite": Architecture("GraniteForCausalLM", **_GRANITE),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        **{**_GRANITE, "mlp_bias": False},
        modules={"experts": "block_sparse_moe.experts"},
        experts=ExpertsLayout(
            True,
            intermediate_size="intermediate_size",
            module="block_sparse_moe",
            router="router.layer",
            stacked="rows",
            stacked_names=("input_linear.weight", "output_linear.weight"),
        ),
    ),
    "granite_swa": Architecture(
        "GraniteSWAForCausalLM", **_GRANITE, **_WINDOWS, sinks=True, rope_thetas="layer_rope_theta"
    ),
    "hyperclovax": Architecture(
        "HyperCLOVAXForCausalLM",
        **{**_GRANITE, "logits_multiplier": ("logits_scaling", 1)},
        norms=Norms(attention_output="post_norm1", mlp_output="post_norm2", outputs_key="use_post_norm"),
    ),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        **{**_GRANITE, "mlp_bias": False},
        **_WINDOWS,
        recurrent="linear_attention",
        mamba2=tuple(
            f"mamba_{key}" for key in ("n_heads", "n_groups", "d_head", "d_state", "d_conv", "conv_bias", "proj_bias")
        ),
        gate_up=_GATE_UP[1],
        modules={"gate_up_proj": "shared_mlp.input_linear", "down_proj": "shared_mlp.output_linear"},
        mlp_size="shared_intermediate_size",
        unrotated="position_embedding_type",
        without=("num_local_experts",),
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        **_UNGATED,
        **_WINDOWS,
        norms=Norms(attention_input="norm", mlp_input="norm"),
        embedding="model.embeddings",
        final_norm="model.norm_f",
        eps="layer_norm_epsilon",
        wide_norms=True,
        modules={
            role: f"mixer.{role}"
            for role in (*_QKV[0], "o_proj", "in_proj", "out_proj", "up_proj", "down_proj", "experts")
        },
        mlp_bias="mlp_bias",
        activation="mlp_hidden_act",
        recurrent="linear_attention",
        mamba2=_MAMBA,
        one_half=True,
        unrotated="all",
        without=("tie_word_embeddings", "moe_latent_size"),  # transformers ties nothing
        experts=ExpertsLayout(
            **{
                **_DEEPSEEK,
                "choice_bias": "mixer.gate.e_score_correction_bias",
                "shared_size": "moe_shared_expert_intermediate_size",
                "shared_count": None,  # transformers reads no ``n_shared_experts``
            },
            dense_blocks="mlp_layer_types",  # made of ``layers_block_type``
            module="mixer",
            names=("up_proj", "down_proj"),
        ),
    ),
    "glm": Architecture("GlmForCausalLM", **_GLM),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        **_GLM,
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "glm4_moe": Architecture(
        "Glm4MoeForCausalLM",
        qkv_bias="attention_bias",
        partial=True,
        qk_norm=QKNorm(key="use_qk_norm"),
        experts=_DEEPSEEK_EXPERTS,
    ),
    "solar_open": Architecture(
        "SolarOpenForCausalLM", qkv_bias="attention_bias", partial=True, experts=ExpertsLayout(**_DEEPSEEK)
    ),
    "dots1": Architecture("Dots1ForCausalLM", **_QWEN3, experts=_DEEPSEEK_EXPERTS),
    "minimax_m2": Architecture(
        "MiniMaxM2ForCausalLM",
        partial=True,
        qk_norm=QKNorm(per_head=False),
        experts=ExpertsLayout(
            True, score="sigmoid", choice_bias="block_sparse_moe.e_score_correction_bias", **_MIXTRAL
        ),
    ),
    "helium": Architecture("HeliumForCausalLM", qkv_bias="attention_bias", mlp_bias="mlp_bias", interleaved=True),
    "seed_oss": Architecture("SeedOssForCausalLM", **{**_BIASES, "o_bias": "attention_out_bias"}, mlp_bias="mlp_bias"),
    "exaone4": Architecture("Exaone4ForCausalLM", **_WINDOWS, norms=_AFTER, qk_norm=QKNorm(), unrotated="full"),
    "exaone_moe": Architecture(
        "ExaoneMoeForCausalLM",
        **_WINDOWS,
        qk_norm=QKNorm(),
        unrotated="full",
        experts=ExpertsLayout(
            **{
                **_DEEPSEEK,
                "choice_bias": "mlp.e_score_correction_bias",
                "count": "num_experts",
                "shared_count": "num_shared_experts",
            },
            dense_blocks="mlp_layer_types",
        ),
    ),
    "hunyuan_v1_dense": Architecture("HunYuanDenseV1ForCausalLM", **_HUNYUAN),
    "hunyuan_v1_moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        **_HUNYUAN,
        experts=ExpertsLayout(
            True,
            chosen="moe_topk",
            intermediate_size="intermediate_size",
            shared_size="intermediate_size",
            shared_module="shared_mlp",
            router="gate.wg",
            rounded=None,
        ),
    ),
    "ernie4_5": Architecture(
        "Ernie4_5ForCausalLM", qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", interleaved=True
    ),
    "ernie4_5_moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        interleaved=True,
        without=("use_bias",),  # of the output layer too
        experts=ExpertsLayout(
            True,
            norm_least="moe_norm_min",
            rounded=None,
            choice_bias="mlp.moe_statics.e_score_correction_bias",
            choice_bias_row=True,
            count="moe_num_experts",
            chosen="moe_k",
            **_shared_experts("moe_num_shared_experts"),
            dense_blocks="moe_layer_interval",
        ),
    ),
    "glm4_moe_lite": Architecture(
        "Glm4MoeLiteForCausalLM",
        **_LATENT,
        partial=True,
        experts=ExpertsLayout(**_DEEPSEEK, dense_blocks="mlp_layer_types"),
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        **_LATENT,
        mlp_bias="mlp_bias",
        experts=ExpertsLayout(**{**_DEEPSEEK, **_V2}, dense_blocks="first_k_dense_replace"),
    ),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", **_LATENT, experts=_DEEPSEEK_EXPERTS),
    "sarvam_mla": Architecture("DeepseekV3ForCausalLM", **_LATENT, experts=_DEEPSEEK_EXPERTS),
    "youtu": Architecture("YoutuForCausalLM", **_LATENT, mlp_bias="mlp_bias"),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        **_BIASES,
        **_WINDOWS,
        norms=Norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        **_GATE_PROJ,
        qk_norm=QKNorm(),
        unrotated="full",
        embedding_multiplier=("hidden_size", 0.5),
        always=("mup_enabled",),
        experts=ExpertsLayout(
            True,
            norm_added=1e-20,
            score="sigmoid",
            choice_bias="mlp.expert_bias",
            scale="route_scale",
            router="router.gate",
            **_shared_experts("num_shared_experts"),
            dense_blocks="num_dense_layers",
        ),
    ),
    "flint": Architecture(
        "FlintForCausalLM",
        **_BIASES,
        **_WINDOWS,
        qk_norm=QKNorm(),
        unrotated="full",
        sinks=True,
        modules={"sinks": "self_attn.softmax_offset"},
        experts=ExpertsLayout(
            "norm_topk_prob",
            score="sigmoid",
            rounded=None,
            shared_size="shared_expert_intermediate_size",
            dense_blocks="decoder_sparse_step",
        ),
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", **_LFM2, adjusted_mlp=True),
    "lfm2_moe": Architecture(
        "Lfm2MoeForCausalLM",
        **_LFM2,
        experts=ExpertsLayout(
            "norm_topk_prob",
            norm_added=1e-6,
            score="sigmoid",
            rounded="scores",
            choice_bias="feed_forward.expert_bias",
            choice_bias_key="use_expert_bias",
            scale="routed_scaling_factor",
            dense_blocks="num_dense_layers",
            module="feed_forward",
            names=("w1", "w3", "w2"),
        ),
    ),
}

# Multimodal models: ``model_type`` -> ``model_type`` of the text model's config -> its row above; the first is the default.
# A bundle has only the text model, with its model_type and tensor names.
WRAPPERS: Mapping[str, Mapping[str, str]] = {
    "mistral3": {"mistral": "mistral", "ministral3": "ministral3"},
    "gemma3": {"gemma3_text": "gemma3_text"},
    "gemma4": {"gemma4_text": "gemma4_text"},
    "gemma4_unified": {"gemma4_unified_text": "gemma4_unified_text"},
    "muse_glimmer": {"muse_glimmer_text": "muse_glimmer_text"},
    "smolvlm": {"llama": "llama"},
    "idefics3": {"llama": "llama"},
    "llava": {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"},
    "llava_next": {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"},
    "llava_onevision": {"qwen2": "qwen2"},
    "internvl": {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "gpt_oss": "gpt_oss"},
    "lfm2_vl": {"lfm2": "lfm2", "lfm2_moe": "lfm2_moe"},
    "exaone4_5": {"exaone4": "exaone4", "exaone4_5_text": "exaone4"},
    "qwen2_vl": {"qwen2_vl_text": "qwen2"},
    "qwen2_5_vl": {"qwen2_5_vl_text": "qwen2"},
    "qwen3_5": {"qwen3_5_text": "qwen3_5_text"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "qwen3_5_moe_text"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3"},
}
# Prefix of the text model's tensors in a wrapper, by transformers' versions -> prefix in the text model.
RENAMED: Mapping[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
_NOT_TEXT = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
    "vision_embedder.",
    "vision_adapter.",
    "vision_projection.",
    "connector.",
    "image_newline",
)


def text_name(stored: str) -> str | None:
    """The text model's name of a wrapper's tensor; None for tensors of other parts."""
    if stored.removeprefix("model.").startswith(_NOT_TEXT):
        return None
    prefix = next((prefix for prefix in RENAMED if stored.startswith(prefix)), "")
    return RENAMED.get(prefix, "") + stored.removeprefix(prefix)


# Keys of the text model's config in a wrapper's config.
_INSIDE = ("text_config", "thinker_config", "llm_config", "ffn_config")


def why_refused(config: Mapping[str, Any], model_type: Any, supported: Iterable[str]) -> str:
    """Why a model type is refused: by its config, else by its family, else as unknown; with the three nearest known ones."""
    supported = tuple(supported)
    name = model_type[:80] if isinstance(model_type, str) else ""
    nearest = ", ".join(difflib.get_close_matches(name, supported, n=3, cutoff=0.0))
    known = f"the nearest known ones are {nearest}; docs/models.md has all"
    if not isinstance(model_type, str):
        return f"config.json: model_type: expected a known one (docs/models.md), found {model_type!r:.80}"
    families = refusals()["families"]
    names = (name for name, row in families.items() if re.fullmatch("|".join(row["model_types"]), model_type))
    family = next(names, None)
    if family == "experts" or has_experts(config):
        family = "experts"
    elif config.get("is_encoder_decoder") is True:
        family = "encoder_decoder"
    elif isinstance(config.get("vision_config"), dict):
        family = "vision"
    if family is not None:
        return f"model_type {model_type!r:.80} is {families[family]['is']}; {known}"
    close = difflib.get_close_matches(model_type[:80], supported, n=1, cutoff=0.75)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"model_type {model_type!r:.80}{hint}: expected a known one; {known}"


def require_known(config: Mapping[str, Any]) -> str:
    """The model type of a source; UnsupportedModelError unless it is known."""
    model_type, known = config.get("model_type"), (*ARCHITECTURES, *WRAPPERS)
    if not isinstance(model_type, str) or model_type not in known:
        raise UnsupportedModelError(f"unsupported architecture: {why_refused(config, model_type, known)}")
    return model_type


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the config, or its text model's, has a number of experts: ``num_experts``, ``n_routed_experts``, …"""
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        if key.endswith("experts") and any(type(count) is int and count > 1 for count in counts):
            return True
    return any(has_experts(config[key]) for key in _INSIDE if isinstance(config.get(key), Mapping))
