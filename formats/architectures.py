"""The block as data: facts about each supported architecture, as one table.

A block is two halves, attention and MLP, each ``x + output_norm(half(input_norm(x)))`` with either norm left out in
some families:

    attention   o(softmax(cap(scale * q k^T)) v)         q, k normalised, turned by the block's rotary embedding
    MLP         down(activation(gate) * up)

In a hybrid model some blocks have a recurrent half instead of attention (`delta_net`).

``ARCHITECTURES`` says for every ``model_type`` what stands where; ``ModelConfig`` (`model_config`) says it for one
model, block by block. Every executor reads these two and no executor knows a family's name, so that a family which
needs no new arithmetic is one more row. Names are Hugging Face's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_FAMILIES = (
    (
        "a mixture-of-experts model, which reads only some of its weights at a token already",
        r".*moe.*|mixtral|deepseek_v[2-9].*|dbrx|gpt_oss|llama4.*|qwen3_next|qwen4_exp.*|kimi.*|"
        r"dots\d.*|minimax.*|grok.*|arctic|jamba|aria_text|axk\d|bailing_hybrid|flex_olmo|hy_v\d|inkling.*|kolibri.*|"
        r"laguna|longcat.*|mellum|mimo_v2.*|solar_open|zaya",
    ),
    (
        "an encoder, which writes no text",
        r".*bert.*|electra|mpnet|xlm-roberta.*|nomic.*|deberta.*|gte|bge.*|big_bird|roformer|data2vec-text|xmod|ernie",
    ),
    (
        "an encoder-decoder model, not a decoder alone",
        r".*t5.*|.*bart|marian|pegasus.*|m2m_100|nllb.*|led|fsmt|prophetnet|encoder-decoder",
    ),
    (
        "a recurrent or state-space model, whose blocks are no attention and MLP",
        r".*mamba.*|rwkv.*|zamba.*|bamba|recurrent_gemma|nemotron_h|xlstm|hyena|retnet|lfm[23]|.*hybrid|falcon_h1",
    ),
    (
        "a model of speech, sound or pictures",
        r"whisper|wav2vec2.*|hubert|speecht5|musicgen.*|bark|vits|clip.*|siglip.*|vit.*|dinov.*|sam.*|swin.*",
    ),
    (
        "a model of pictures and text together",
        r".*_vl.*|.*vision.*|llava.*|mllama|idefics.*|paligemma.*|internvl.*|mistral3|pixtral|blip.*|fuyu|kosmos.*|"
        r"gemma3n?|gemma4_unified|phi4_multimodal|git|got_ocr2|.*omni.*|chameleon|emu3|qwen3_5",
    ),
    (
        "a dense decoder whose blocks are put together in another way (docs/bring-your-own-architecture.md says what "
        "a new row of the table can be)",
        r"gpt.*|openai-gpt|ctrl|cpmant|opt|bloom|mpt|falcon|codegen|phi|gemma(3n_text|4_[au].*)|vaultgemma|stablelm.*|"
        r"starcoder.*|olmo|cohere.*|granite_swa|internlm.*|baichuan.*|minicpm.*|nemotron|persimmon|xglm|biogpt|qwen|chatglm|"
        r"apertus|arcee|bitnet|diffllama|cwm|nanochat|hyperclovax|jais.*|youtu|blt|iquestcoder|doge",
    ),
)
_EXPERTS, _PICTURES = _FAMILIES[0], _FAMILIES[5]
# Where a wrapper's config keeps that of its text model.
_INSIDE = ("text_config", "thinker_config", "llm_config", "ffn_config")


def why_refused(config: Mapping[str, Any], model_type: Any, supported: Iterable[str]) -> str:
    """Why a model of another type is refused: what its config says it is, else its family, else that none is known."""
    supported = tuple(supported)
    known = ", ".join(supported)
    if not isinstance(model_type, str):
        return f"config.json: model_type: expected one of {known}, found {model_type!r:.80}"
    kind = None
    if _has_experts(config) or re.fullmatch(_EXPERTS[1], model_type):
        kind = _EXPERTS[0]
    elif config.get("is_encoder_decoder") is True:
        kind = _FAMILIES[2][0]
    elif isinstance(config.get("vision_config"), dict):
        kind = _PICTURES[0]
    else:
        kind = next((words for words, names in _FAMILIES if re.fullmatch(names, model_type)), None)
    if kind is not None:
        return f"model_type {model_type!r:.80} is {kind}; known ones: {known}"
    close = difflib.get_close_matches(model_type[:80], supported, n=1, cutoff=0.75)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"model_type {model_type!r:.80}{hint}; known ones: {known}"


def _has_experts(config: Mapping[str, Any], depth: int = 3) -> bool:
    """Whether the config, or that of the text model inside, counts experts: ``num_experts``, ``n_routed_experts``, …"""
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        if key.endswith("experts") and any(type(count) is int and count > 1 for count in counts):
            return True
    inside = (config[key] for key in _INSIDE if isinstance(config.get(key), Mapping)) if depth else ()
    return any(_has_experts(one, depth - 1) for one in inside)


Activation = Literal["silu", "gelu_tanh"]

# A config key, and the power its number is raised to: Gemma's scores are multiplied by query_pre_attn_scalar**-0.5.
Power = tuple[str, float]

# The names that a projection can have: separate, or fused.
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Norms:
    """Where a block's norms over the hidden state stand, by name; None where there is none."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


_BEFORE = Norms()
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm of queries and keys: of each head alone, or of all heads as one vector; before the rotation or after."""

    per_head: bool = True
    after_rotary: bool = False
    names: tuple[str, str] = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Architecture:
    """How one ``model_type`` is put together.

    Attributes:
        norms: where the norms over the hidden state stand.
        norm_offset: norms multiply by 1 + weight, in float32 (Gemma), instead of by weight.
        qkv: projections that read the attention's input, in the order their outputs are laid out as q, k, v; or the one
            that all three are fused in, ``qkv_proj``.
        gate_up: projections that read the MLP's input, in the order gate, up; or the fused ``gate_up_proj``.
        qkv_bias, o_bias, mlp_bias: True or False where the architecture fixes it, else the config key that says so.
        qk_norm: how q and k are normalised, if they are.
        activation: which config key names the MLP's activation.
        activations: what the names there stand for.
        full_heads: blocks without a window have heads of their own: ``per_layer_config`` says so block by block, or
            ``global_head_dim`` and, with ``attention_k_eq_v``, ``num_global_key_value_heads`` for all of them.
        shared_values: config key; where it is true, blocks without a window have no ``v_proj``: their values are what
            ``k_proj`` gives, neither normalised as keys are nor turned.
        value_norm: each head's values are divided by their root mean square; there is no weight.
        block_scalar: name of the one number, a tensor of each block, that its output is multiplied by.
        attention_gate: ``q_proj`` gives each head its query and then a gate of the same width, whose sigmoid multiplies
            what attention gives that head.
        recurrent: blocks that ``layer_types`` calls ``linear_attention`` (or all but every n-th,
            ``full_attention_interval``) have a gated DeltaNet where others have attention (`delta_net`).
        interleaved: rotary embeddings turn neighbours, not halves.
        local_theta: config key with the rotary base of blocks with a sliding window, where that is another one; None
            where all blocks share one rotary embedding.
        unrotated: which blocks know no positions: ``full``, those without a window in a model where others have one;
            ``listed``, those whose entry in ``no_rope_layers`` is 0.
        sliding: which config key switches the sliding window on; None if its mere presence does.
        full_every: without ``layer_types``, every n-th block attends to everything (``sliding_window_pattern``
            overrides n); None: all blocks have the window.
        attention_scale: what scores are multiplied by; None for head_dim**-0.5.
        query_scaling: queries grow with the logarithm of the position, by ``llama_4_scaling_beta``.
        attention_softcap, logits_softcap: config keys of c in c * tanh(x / c), None where there is no such thing.
        embedding_multiplier, residual_multiplier, logits_multiplier: what embeddings, each half's output, and logits
            are multiplied by; None for 1.
        defaults: what transformers takes a key for that ``config.json`` leaves out.
    """

    class_name: str
    norms: Norms = _BEFORE
    norm_offset: bool = False
    qkv: tuple[str, ...] = _QKV[0]
    gate_up: tuple[str, ...] = _GATE_UP[0]
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QKNorm | None = None
    activation: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    full_heads: bool = False
    shared_values: str | None = None
    value_norm: bool = False
    block_scalar: str | None = None
    attention_gate: bool = False
    recurrent: bool = False
    interleaved: bool = False
    local_theta: str | None = None
    unrotated: Literal["full", "listed"] | None = None
    sliding: str | None = None
    full_every: int | None = None
    attention_scale: Power | None = None
    query_scaling: bool = False
    attention_softcap: str | None = None
    logits_softcap: str | None = None
    embedding_multiplier: Power | None = None
    residual_multiplier: Power | None = None
    logits_multiplier: Power | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = (("qkv", self.qkv, _QKV), ("gate_up", self.gate_up, _GATE_UP))
        for name, given, expected in known:
            if given not in expected:
                raise ValueError(f"{self.class_name}: expected {name} to be one of {expected}, found {given}")


_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_FIRST_GEMMA: dict[str, Any] = {**_BIASES, "norm_offset": True, "embedding_multiplier": ("hidden_size", 0.5)}
_GEMMA: dict[str, Any] = {**_FIRST_GEMMA, "activation": "hidden_activation"}
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GLM: dict[str, Any] = {
    "gate_up": _GATE_UP[1],
    "qkv_bias": "attention_bias",
    "interleaved": True,
    "defaults": {
        "attention_bias": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", **_BIASES, mlp_bias="mlp_bias"),
    "mistral": Architecture("MistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Architecture("MinistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral3": Architecture(
        "Ministral3ForCausalLM",
        query_scaling=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        **_BIASES,
        qk_norm=QKNorm(),
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3_5_text": Architecture(
        "Qwen3_5ForCausalLM",
        norm_offset=True,
        **_BIASES,
        qk_norm=QKNorm(),
        attention_gate=True,
        recurrent=True,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "phi3": Architecture("Phi3ForCausalLM", qkv=_QKV[1], gate_up=_GATE_UP[1], defaults={"rms_norm_eps": 1e-5}),
    "gemma": Architecture(
        "GemmaForCausalLM",
        # Its first files say "gelu", and have always meant the one that goes by tanh.
        activations={**ACTIVATIONS, "gelu": "gelu_tanh"},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 16,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        **_FIRST_GEMMA,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        norms=_SANDWICH,
        full_every=2,
        attention_scale=("query_pre_attn_scalar", -0.5),
        attention_softcap="attn_logit_softcapping",
        logits_softcap="final_logit_softcapping",
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        **_GEMMA,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        norms=_SANDWICH,
        qk_norm=QKNorm(),
        local_theta="rope_local_base_freq",
        full_every=6,
        attention_scale=("query_pre_attn_scalar", -0.5),
        logits_softcap="final_logit_softcapping",
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        **_GEMMA,
    ),
    "gemma4_text": Architecture(
        "Gemma4ForCausalLM",
        norms=_SANDWICH,
        **_BIASES,
        qk_norm=QKNorm(),
        activation="hidden_activation",
        full_heads=True,
        shared_values="attention_k_eq_v",
        value_norm=True,
        block_scalar="layer_scalar",
        local_theta="rope_theta",
        full_every=6,
        attention_scale=("head_dim", 0),  # 1, whatever the width
        logits_softcap="final_logit_softcapping",
        embedding_multiplier=("hidden_size", 0.5),
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "global_head_dim": 512,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1_000_000.0,
                    "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM", norms=_AFTER, **_BIASES, qk_norm=QKNorm(per_head=False), defaults={"rms_norm_eps": 1e-5}
    ),
    "olmo3": Architecture(
        "Olmo3ForCausalLM",
        norms=_AFTER,
        **_BIASES,
        qk_norm=QKNorm(per_head=False),
        local_theta="rope_theta",
        full_every=4,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        **_BIASES,
        mlp_bias="mlp_bias",
        unrotated="listed",
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        **_BIASES,
        mlp_bias="mlp_bias",
        attention_scale=("attention_multiplier", 1),
        embedding_multiplier=("embedding_multiplier", 1),
        residual_multiplier=("residual_multiplier", 1),
        logits_multiplier=("logits_scaling", -1),
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "glm": Architecture("GlmForCausalLM", **_GLM),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        **_GLM,
    ),
    "helium": Architecture(
        "HeliumForCausalLM",
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        interleaved=True,
        defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0},
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        norms=_AFTER,
        qk_norm=QKNorm(),
        unrotated="full",
        full_every=4,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "rms_norm_eps": 1e-5},
    ),
    "hunyuan_v1_dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        **_BIASES,
        qk_norm=QKNorm(after_rotary=True, names=("query_layernorm", "key_layernorm")),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "ernie4_5": Architecture(
        "Ernie4_5ForCausalLM",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        interleaved=True,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
}
