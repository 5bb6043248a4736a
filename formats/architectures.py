"""Facts about the supported architectures, as one table, and the model's dimensions read from ``config.json``.

A new architecture of the same family (RMSNorm, rotary embeddings, gated SiLU MLP) is one more row of ``ARCHITECTURES``.
Names are Hugging Face's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import UnsupportedModelError

__all__ = ["ARCHITECTURES", "Architecture", "ModelConfig", "Projection", "RopeConfig"]


# The names that a projection can have: separate, or fused.
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))


@dataclass(frozen=True)
class Architecture:
    """How one ``model_type`` is put together.

    Attributes:
        qkv: projections that read the attention's input, in the order their outputs are laid out as q, k, v; or the one
            that all three are fused in, ``qkv_proj``.
        gate_up: projections that read the MLP's input, in the order gate, up; or the fused ``gate_up_proj``.
        qkv_bias, o_bias, mlp_bias: True or False where the architecture fixes it, else the config key that says so.
        qk_norm: q and k are RMS-normalised per head before the rotary embedding.
        sliding: which config key switches the sliding window on; None if its mere presence does.
        defaults: what transformers takes a key for that ``config.json`` leaves out.
    """

    class_name: str
    qkv: tuple[str, ...] = _QKV[0]
    gate_up: tuple[str, ...] = _GATE_UP[0]
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    sliding: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = (("qkv", self.qkv, _QKV), ("gate_up", self.gate_up, _GATE_UP))
        for name, given, expected in known:
            if given not in expected:
                raise ValueError(f"{self.class_name}: expected {name} to be one of {expected}, found {given}")


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture("MistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        sliding="use_sliding_window",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", qkv=("qkv_proj",), gate_up=("gate_up_proj",), defaults={"rms_norm_eps": 1e-5}
    ),
}

_ROPE_TYPES = ("default", "linear", "llama3", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings; ``parameters`` holds what a scaled ``rope_type`` needs, under Hugging Face's keys."""

    theta: float
    rope_type: str
    rotary_dim: int
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Projection:
    """One linear layer inside a block. ``name`` is its full Hugging Face module name; its weight is (N, K)."""

    name: str
    block: int
    role: str
    in_features: int
    out_features: int
    bias: bool

    @property
    def num_parameters(self) -> int:
        """Weights of the projection, without its bias: the unit in which sparsities are averaged."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class ModelConfig:
    """A causal LM's dimensions, from its ``config.json`` (transformers 4 or 5 spelling)."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    sliding_windows: tuple[int | None, ...]

    @property
    def architecture(self) -> Architecture:
        """The row of ``ARCHITECTURES`` this model belongs to."""
        return ARCHITECTURES[self.model_type]

    @property
    def q_size(self) -> int:
        """Width of the queries, ``num_heads * head_dim``; also K of ``o_proj``."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys and of the values, ``num_kv_heads * head_dim``."""
        return self.num_kv_heads * self.head_dim

    def projections(self, block: int | None = None) -> Iterator[Projection]:
        """The projections in scope, in the order of execution: all of them, or one block's.

        In scope are all linear layers inside the blocks, never ``lm_head`` nor the embeddings.
        """
        arch = self.architecture
        qkv_sizes = {
            "q_proj": self.q_size,
            "k_proj": self.kv_size,
            "v_proj": self.kv_size,
            "qkv_proj": self.q_size + 2 * self.kv_size,
        }
        mlp_sizes = {
            "gate_proj": self.intermediate_size,
            "up_proj": self.intermediate_size,
            "gate_up_proj": 2 * self.intermediate_size,
        }
        for index in range(self.num_blocks) if block is None else (block,):
            attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
            for role in arch.qkv:
                yield Projection(attention + role, index, role, self.hidden_size, qkv_sizes[role], self.qkv_bias)
            yield Projection(attention + "o_proj", index, "o_proj", self.q_size, self.hidden_size, self.o_bias)
            for role in arch.gate_up:
                yield Projection(mlp + role, index, role, self.hidden_size, mlp_sizes[role], self.mlp_bias)
            yield Projection(
                mlp + "down_proj", index, "down_proj", self.intermediate_size, self.hidden_size, self.mlp_bias
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dimensions from a parsed ``config.json``.

        Raises:
            UnsupportedModelError: unknown ``model_type``, quantised weights, an activation or rotary scaling this
                project does not implement, or a missing or nonsensical dimension.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise UnsupportedModelError(f"unsupported architecture: {_refused(config, model_type)}")
        if config.get("quantization_config"):
            raise UnsupportedModelError(
                "the model is quantised (config.json has quantization_config); "
                "expected bf16, fp16 or fp32 weights: use the unquantised checkpoint"
            )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(f"hidden_act: expected 'silu', found {activation!r:.80}")
        arch = ARCHITECTURES[model_type]
        config = {**arch.defaults, **config}

        def switch(value: bool | str) -> bool:
            return _switch(config, value) if isinstance(value, str) else value

        hidden_size = _dimension(config, "hidden_size")
        num_heads = _dimension(config, "num_attention_heads")
        num_kv_heads = _dimension(config, "num_key_value_heads", default=num_heads)
        num_blocks = _dimension(config, "num_hidden_layers", largest=_LARGEST_NUM_BLOCKS)
        head_dim = _dimension(config, "head_dim", default=hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim: expected an even number, found {head_dim}")
        eps = config.get("rms_norm_eps", 1e-6)
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
            raise UnsupportedModelError(f"config.json: rms_norm_eps: expected a small number, found {eps!r:.80}")
        return cls(
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=_dimension(config, "intermediate_size"),
            num_blocks=num_blocks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_dimension(config, "vocab_size"),
            rms_norm_eps=float(eps),
            max_position_embeddings=_dimension(config, "max_position_embeddings"),
            rope=_rope(config, head_dim),
            tie_word_embeddings=_switch(config, "tie_word_embeddings"),
            qkv_bias=switch(arch.qkv_bias),
            o_bias=switch(arch.o_bias),
            mlp_bias=switch(arch.mlp_bias),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            sliding_windows=_sliding_windows(config, arch, num_blocks),
        )


# Families that are refused, by what they are: a name alone (mixtral is not a misspelt mistral) would mislead.
_FAMILIES = (
    (
        "a mixture-of-experts model, which reads only some of its weights at a token already",
        r".*moe.*|mixtral|deepseek_v[23].*|dbrx|gpt_oss|llama4.*|qwen3_next|kimi.*|dots1|minimax.*|grok.*|arctic|jamba",
    ),
    ("an encoder, which writes no text", r".*bert.*|electra|mpnet|xlm-roberta|nomic.*|deberta.*|gte|bge.*"),
    (
        "an encoder-decoder model, not a decoder alone",
        r".*t5.*|.*bart|marian|pegasus.*|m2m_100|nllb.*|led|fsmt|prophetnet|encoder-decoder",
    ),
    (
        "a recurrent or state-space model, whose blocks are no attention and MLP",
        r".*mamba.*|rwkv.*|zamba.*|bamba|recurrent_gemma|nemotron_h|xlstm|hyena|retnet|lfm2.*",
    ),
    (
        "a model of speech, sound or pictures",
        r"whisper|wav2vec2.*|hubert|speecht5|musicgen.*|bark|vits|clip.*|siglip.*|vit.*|dinov.*|sam.*|swin.*",
    ),
    (
        "a model of pictures and text together",
        r".*_vl.*|.*vision.*|llava.*|mllama|idefics.*|paligemma.*|internvl.*|mistral3|pixtral|blip.*|fuyu|kosmos.*|"
        r"gemma3n?|.*omni.*",
    ),
    (
        "a dense decoder whose blocks are put together in another way (docs/bring-your-own-architecture.md says what "
        "a new row of the table can be)",
        r"gpt.*|opt|bloom|mpt|falcon|codegen|phi|gemma.*|stablelm.*|starcoder.*|olmo.*|cohere.*|granite.*|glm.*|"
        r"smollm.*|internlm.*|baichuan.*|minicpm.*|nemotron|exaone.*|persimmon|xglm|biogpt|qwen|chatglm|seed_oss|apertus|"
        r"ernie.*|hunyuan.*|arcee|helium|bitnet|diffllama|ministral.*",
    ),
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _refused(config: Mapping[str, Any], model_type: Any) -> str:
    """Why a model of another type is refused: what its config says it is, else its family, else that none is known."""
    known = ", ".join(ARCHITECTURES)
    if not isinstance(model_type, str):
        return f"config.json: model_type: expected one of {known}, found {model_type!r:.80}"
    kind = None
    if any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERTS):
        kind = _FAMILIES[0][0]
    elif config.get("is_encoder_decoder") is True:
        kind = _FAMILIES[2][0]
    elif isinstance(config.get("vision_config"), dict):
        kind = _FAMILIES[5][0]
    else:
        kind = next((words for words, names in _FAMILIES if re.fullmatch(names, model_type)), None)
    if kind is not None:
        return f"model_type {model_type!r:.80} is {kind}; known ones: {known}"
    close = difflib.get_close_matches(model_type[:80], ARCHITECTURES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"model_type {model_type!r:.80}{hint}; known ones: {known}"


# Far above any model there is; keeps a hostile config from asking for absurd memory before a tensor was looked at.
_LARGEST_DIMENSION = 2**27
_LARGEST_NUM_BLOCKS = 10_000


def _dimension(
    config: Mapping[str, Any], key: str, default: int | None = None, largest: int = _LARGEST_DIMENSION
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive integer, found {value!r:.80}")
    if value > largest:
        raise UnsupportedModelError(f"config.json: {key}: expected at most {largest:,}, found {value!r:.40}")
    return value


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModelError(f"config.json: {key}: expected true or false, found {value!r:.80}")
    return bool(value)


def _positive(value: Any, key: str) -> None:
    # The bound keeps sums and powers of it finite; NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive number, found {value!r:.80}")


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    # transformers 5 keeps everything in rope_parameters; 4 kept rope_theta beside rope_scaling.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise UnsupportedModelError(f"config.json: rope_parameters: expected an object, found {parameters!r:.80}")
    parameters = dict(parameters)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type == "su":  # Phi-3's first name for it
        rope_type = "longrope"
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"rotary scaling: expected one of {', '.join(_ROPE_TYPES)}, found {rope_type!r:.80}"
        )
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _positive(theta, "rope_theta")
    _positive(partial, "partial_rotary_factor")
    rotary_dim = int(head_dim * min(partial, 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(f"rotary embedding: expected an even number of dimensions, found {rotary_dim}")
    # The config's own word comes first, as in transformers; keep it with the rest so that one mapping tells all.
    parameters["original_max_position_embeddings"] = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or config.get("max_position_embeddings")
    )
    parameters.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    _check_scaling(rope_type, parameters, rotary_dim)
    return RopeConfig(float(theta), rope_type, rotary_dim, parameters)


def _check_scaling(rope_type: str, parameters: Mapping[str, Any], rotary_dim: int) -> None:
    """Raise unless every number that the ``rope_type`` computes with is there and positive."""
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "longrope": ("original_max_position_embeddings", "max_position_embeddings"),
    }
    for key in needed[rope_type]:
        _positive(parameters.get(key), f"rope_parameters.{key}")
    if rope_type == "llama3" and parameters["low_freq_factor"] == parameters["high_freq_factor"]:
        raise UnsupportedModelError("config.json: rope_parameters: low_freq_factor equals high_freq_factor")
    if rope_type != "longrope":
        return
    if parameters["original_max_position_embeddings"] < 2:
        raise UnsupportedModelError("config.json: original_max_position_embeddings: expected more than 1")
    for key in ("factor", "attention_factor"):
        if parameters.get(key) is not None:
            _positive(parameters[key], f"rope_parameters.{key}")
    for key in ("short_factor", "long_factor"):
        values = parameters.get(key)
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise UnsupportedModelError(
                f"config.json: rope_parameters.{key}: expected {rotary_dim // 2} numbers, found {values!r:.80}"
            )
        for value in values:
            _positive(value, f"rope_parameters.{key}")


def _sliding_windows(config: Mapping[str, Any], arch: Architecture, num_blocks: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is not None:
        _dimension(config, "sliding_window")
    if window is None or (arch.sliding is not None and not _switch(config, arch.sliding)):
        return (None,) * num_blocks
    kinds = config.get("layer_types")
    if kinds is None:
        # Qwen's rule before layer_types existed: the first max_window_layers blocks attend to everything.
        first = config.get("max_window_layers", 0) if arch.sliding is not None else 0
        if not isinstance(first, int):
            raise UnsupportedModelError(f"config.json: max_window_layers: expected a number, found {first!r:.80}")
        return tuple(window if index >= first else None for index in range(num_blocks))
    if not isinstance(kinds, list) or len(kinds) != num_blocks:
        raise UnsupportedModelError(f"config.json: layer_types: expected {num_blocks} entries, found {kinds!r:.80}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
