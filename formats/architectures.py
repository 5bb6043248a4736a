"""Facts about each supported architecture, as one table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .guard import refusals

Activation = Literal["silu", "gelu_tanh", "clamped"]
# A config key, and the power its number is raised to: Gemma's scores are multiplied by query_pre_attn_scalar**-0.5.
Power = tuple[str, float]

# The names that a projection can have: separate, or fused.
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Norms:
    """Names of a block's norms over the hidden state; None where there is none."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


_BEFORE = Norms()
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_BOTH = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm of queries and keys: of each head, or of all heads as one vector; before the rotary embedding or after."""

    per_head: bool = True
    after_rotary: bool = False
    names: tuple[str, str] = ("q_norm", "k_norm")


@dataclass(frozen=True)
class ExpertsLayout:
    """How a family states its experts: config keys, and names on disk."""

    renormalised: (
        bool | str
    )  # the weights of the chosen ones are divided by their sum; else the config key that says so
    chosen: str = "num_experts_per_tok"
    intermediate_size: str = "moe_intermediate_size"
    shared_size: str | None = None  # of an expert for every token, ``shared_expert``, gated by ``shared_expert_gate``
    # Config has ``decoder_sparse_step`` and ``mlp_only_layers``: some blocks have a dense MLP.
    dense_blocks: bool = False
    module: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    biases: bool = False  # of the router and of every expert
    # Config key; where true, blocks have experts, beside the dense MLP and not in its place. Each of the two has norms of
    # its own, before it and after, and so has the router, whose weights of the chosen ones are multiplied by learned ones.
    beside: str | None = None
    # Files, a bundle's too, hold all experts of a block in one tensor, as transformers does: ``rows``: (E, 2 I, H), gates
    # before ups, and (E, H, I); ``interleaved``: (E, H, 2 I), a gate beside its up, and (E, I, H). Else apart, or ``rows``.
    together: Literal["rows", "interleaved"] | None = None


@dataclass(frozen=True)
class Architecture:
    class_name: str
    norms: Norms = _BEFORE
    norm_offset: bool = False  # norms multiply by 1 + weight, in float32 (Gemma), instead of by weight
    qkv: tuple[str, ...] = _QKV[0]  # projections that read the attention's input: q, k, v, or all three fused
    gate_up: tuple[str, ...] = _GATE_UP[0]  # projections that read the MLP's input: gate, up, or both fused
    # True or False where the architecture fixes it, else the config key that says so.
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QKNorm | None = None
    # The config key that names the MLP's activation, and what the names there stand for.
    activation: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    # Blocks without a window have a head_dim and num_key_value_heads of their own, in ``per_layer_config``, or
    # ``global_head_dim`` and, with ``attention_k_eq_v``, ``num_global_key_value_heads``.
    full_heads: bool = False
    # Config key; where true, values of blocks without a window are ``k_proj``'s output, neither normalised nor rotated.
    shared_values: str | None = None
    value_norm: bool = False  # each head's values are divided by their root mean square; there is no weight
    block_scalar: str | None = None  # name of a tensor (1,) of each block that the block's output is multiplied by
    # Config keys. Of how many last blocks each attends to the keys and values of the last block of its kind before them,
    # and whether their MLPs are twice as wide; and the width of an embedding that every block has of each token.
    shared_kv: str | None = None
    wide_mlp: str | None = None
    per_layer: str | None = None
    # ``q_proj`` gives each head its query and then a gate of the same width, whose sigmoid multiplies the head's output.
    attention_gate: bool = False
    sinks: bool = False  # the softmax of each head's scores has one more, learned, which no position gets
    # Each block's entry in ``layer_types`` says what it is: ``full_attention``, ``sliding_attention``, or, where
    # ``recurrent``, ``linear_attention``: a gated DeltaNet. Without, all blocks have the config's window, if there is one.
    layer_types: bool = False
    recurrent: bool = False
    interleaved: bool = False  # the rotary embedding rotates neighbours (2i, 2i + 1), not halves
    # Blocks with a window have a rotary embedding of their own: ``rope_parameters`` has one for each layer type.
    local_rope: bool = False
    # Blocks without a rotary embedding: ``full``, without a window where others have one; ``listed`` in the config.
    unrotated: Literal["full", "listed"] | None = None
    attention_scale: Power | None = None  # what scores are multiplied by; None for head_dim**-0.5
    query_scaling: bool = False  # queries grow with the logarithm of the position, by ``llama_4_scaling_beta``
    # Config keys of c in c * tanh(x / c); None where there is no such thing.
    attention_softcap: str | None = None
    logits_softcap: str | None = None
    # What embeddings, the output of attention and of the MLP, and logits are multiplied by; None for 1.
    embedding_multiplier: Power | None = None
    residual_multiplier: Power | None = None
    logits_multiplier: Power | None = None
    experts: ExpertsLayout | None = None  # None: every MLP is dense
    # Checkpoints may hold a head that drafts, ``mtp.*``: a block with attention that reads the last hidden state and the
    # token after it, between norms of its own. Embedding and output layer are the model's.
    mtp: bool = False
    without: tuple[str, ...] = ()  # config keys of arithmetic that is not known here: they have to be null

    def __post_init__(self) -> None:
        for name, given, known in (("qkv", self.qkv, _QKV), ("gate_up", self.gate_up, _GATE_UP)):
            if given not in known:
                raise ValueError(f"{self.class_name}: expected {name} to be one of {known}, found {given}")


_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_WINDOWS: dict[str, Any] = {"layer_types": True}
_GEMMA: dict[str, Any] = {**_BIASES, "norm_offset": True, "embedding_multiplier": ("hidden_size", 0.5)}
_NEWER_GEMMA: dict[str, Any] = {
    **_GEMMA,
    **_WINDOWS,
    "norms": _BOTH,
    "activation": "hidden_activation",
    "attention_scale": ("query_pre_attn_scalar", -0.5),
    "logits_softcap": "final_logit_softcapping",
}
_QWEN3: dict[str, Any] = {**_BIASES, **_WINDOWS, "qk_norm": QKNorm()}
_QWEN3_5: dict[str, Any] = {**_QWEN3, "norm_offset": True, "attention_gate": True, "recurrent": True, "mtp": True}
_OLMO: dict[str, Any] = {**_BIASES, "norms": _AFTER, "qk_norm": QKNorm(per_head=False)}
_GLM: dict[str, Any] = {"gate_up": _GATE_UP[1], "qkv_bias": "attention_bias", "interleaved": True}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", **_BIASES, mlp_bias="mlp_bias"),
    "mistral": Architecture("MistralForCausalLM"),
    "ministral": Architecture("MinistralForCausalLM", **_WINDOWS),
    "ministral3": Architecture("Ministral3ForCausalLM", query_scaling=True),
    "qwen2": Architecture("Qwen2ForCausalLM", **_WINDOWS, qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", **_QWEN3),
    "qwen3_5_text": Architecture("Qwen3_5ForCausalLM", **_QWEN3_5),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM", **_BIASES, qk_norm=QKNorm(), experts=ExpertsLayout("norm_topk_prob", dense_blocks=True)
    ),
    "qwen3_5_moe_text": Architecture(
        "Qwen3_5MoeForCausalLM",
        **_QWEN3_5,
        experts=ExpertsLayout(True, shared_size="shared_expert_intermediate_size"),
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        experts=ExpertsLayout(
            True,
            intermediate_size="intermediate_size",
            module="block_sparse_moe",
            names=("w1", "w3", "w2"),
        ),
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        **_BIASES,
        qk_norm=QKNorm(per_head=False),
        experts=ExpertsLayout("norm_topk_prob", intermediate_size="intermediate_size"),
        without=("clip_qkv",),
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        **_BIASES,
        **_WINDOWS,
        activations={"silu": "clamped"},
        sinks=True,
        experts=ExpertsLayout(
            True, intermediate_size="intermediate_size", router="router", biases=True, together="interleaved"
        ),
    ),
    "phi3": Architecture("Phi3ForCausalLM", qkv=_QKV[1], gate_up=_GATE_UP[1]),
    # The first files of Gemma say "gelu" and mean the one by tanh.
    "gemma": Architecture("GemmaForCausalLM", **_GEMMA, activations={**ACTIVATIONS, "gelu": "gelu_tanh"}),
    "gemma2": Architecture("Gemma2ForCausalLM", **_NEWER_GEMMA, attention_softcap="attn_logit_softcapping"),
    "gemma3_text": Architecture("Gemma3ForCausalLM", **_NEWER_GEMMA, qk_norm=QKNorm(), local_rope=True),
    "gemma4_text": Architecture(
        "Gemma4ForCausalLM",
        **{**_NEWER_GEMMA, "norm_offset": False, "attention_scale": ("head_dim", 0)},  # 1, whatever the width
        qk_norm=QKNorm(),
        full_heads=True,
        shared_values="attention_k_eq_v",
        value_norm=True,
        block_scalar="layer_scalar",
        shared_kv="num_kv_shared_layers",
        wide_mlp="use_double_wide_mlp",
        per_layer="hidden_size_per_layer_input",
        local_rope=True,
        experts=ExpertsLayout(
            True,
            chosen="top_k_experts",
            shared_size="intermediate_size",
            router="router.proj",
            together="rows",
            beside="enable_moe_block",
        ),
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", **_OLMO),
    "olmo3": Architecture("Olmo3ForCausalLM", **_OLMO, **_WINDOWS, local_rope=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", **_BIASES, **_WINDOWS, mlp_bias="mlp_bias", unrotated="listed"),
    "granite": Architecture(
        "GraniteForCausalLM",
        **_BIASES,
        mlp_bias="mlp_bias",
        attention_scale=("attention_multiplier", 1),
        embedding_multiplier=("embedding_multiplier", 1),
        residual_multiplier=("residual_multiplier", 1),
        logits_multiplier=("logits_scaling", -1),
    ),
    "glm": Architecture("GlmForCausalLM", **_GLM),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        **_GLM,
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "helium": Architecture("HeliumForCausalLM", qkv_bias="attention_bias", mlp_bias="mlp_bias", interleaved=True),
    "seed_oss": Architecture("SeedOssForCausalLM", **{**_BIASES, "o_bias": "attention_out_bias"}, mlp_bias="mlp_bias"),
    "exaone4": Architecture("Exaone4ForCausalLM", **_WINDOWS, norms=_AFTER, qk_norm=QKNorm(), unrotated="full"),
    "hunyuan_v1_dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        **_BIASES,
        qk_norm=QKNorm(after_rotary=True, names=("query_layernorm", "key_layernorm")),
    ),
    "ernie4_5": Architecture(
        "Ernie4_5ForCausalLM", qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", interleaved=True
    ),
}

# Models of pictures and text: ``model_type`` -> ``model_type`` of the text model's config -> its row above. The first is
# meant where the config names none. A bundle holds the text model alone, under its plain type and tensor names.
WRAPPERS: Mapping[str, Mapping[str, str]] = {
    "mistral3": {"mistral": "mistral", "ministral3": "ministral3"},
    "gemma3": {"gemma3_text": "gemma3_text"},
    "gemma4": {"gemma4_text": "gemma4_text"},
    "qwen2_vl": {"qwen2_vl_text": "qwen2"},
    "qwen2_5_vl": {"qwen2_5_vl_text": "qwen2"},
    "qwen3_5": {"qwen3_5_text": "qwen3_5_text"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "qwen3_5_moe_text"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3"},
}
# Beginnings of a text model's tensors in a wrapper, in every spelling of transformers -> those in the plain model.
RENAMED: Mapping[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_NOT_TEXT = ("vision_tower.", "visual.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.")


def text_name(stored: str) -> str | None:
    """The plain name of a wrapper's tensor; None for what is not the text model's."""
    if stored.removeprefix("model.").startswith(_NOT_TEXT):
        return None
    prefix = next((prefix for prefix in RENAMED if stored.startswith(prefix)), "")
    return RENAMED.get(prefix, "") + stored.removeprefix(prefix)


# Where a wrapper's config keeps that of its text model.
_INSIDE = ("text_config", "thinker_config", "llm_config", "ffn_config")


def why_refused(config: Mapping[str, Any], model_type: Any, supported: Iterable[str]) -> str:
    """Why a model of another type is refused: what its config says it is, else its family, else that none is known."""
    supported = tuple(supported)
    known = ", ".join(supported)
    if not isinstance(model_type, str):
        return f"config.json: model_type: expected one of {known}, found {model_type!r:.80}"
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
        return f"model_type {model_type!r:.80} is {families[family]['is']}; known ones: {known}"
    close = difflib.get_close_matches(model_type[:80], supported, n=1, cutoff=0.75)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"model_type {model_type!r:.80}{hint}; known ones: {known}"


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the config, or that of the text model inside, counts experts: ``num_experts``, ``n_routed_experts``, …"""
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        if key.endswith("experts") and any(type(count) is int and count > 1 for count in counts):
            return True
    return any(has_experts(config[key]) for key in _INSIDE if isinstance(config.get(key), Mapping))
