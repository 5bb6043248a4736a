"""Models of more than text, as one table: where their text model lies, so that it is read as if it stood alone.

A wrapper puts a vision tower beside a text model whose block is a row of ``ARCHITECTURES``. Only a source is ever a
wrapper: what is written is the text model alone, under its plain ``model_type``, with the tensors' plain names, so
nothing that reads a bundle meets one. Names are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .architectures import ARCHITECTURES, why_refused
from .errors import UnsupportedModelError
from .model_config import ModelConfig

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


@dataclass(frozen=True)
class Wrapper:
    """How one ``model_type`` wraps a text model.

    Attributes:
        text_types: ``model_type`` of the text model's config -> the plain one, a row of ``ARCHITECTURES``. The first
            is meant where the config names none.
        defaults: what transformers takes a key of the text model for that the config leaves out, where the plain
            ``model_type`` has another default or none.
        flat: published configs keep the text model's keys at the top, beside ``vision_config``.
    """

    text_types: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = False


_QWEN2_VL_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

WRAPPERS: Mapping[str, Wrapper] = {
    "mistral3": Wrapper({"mistral": "mistral", "ministral3": "ministral3"}),
    "gemma3": Wrapper(
        {"gemma3_text": "gemma3_text"},
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "gemma4": Wrapper(
        {"gemma4_text": "gemma4_text"},
        {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen2_vl": Wrapper({"qwen2_vl_text": "qwen2"}, _QWEN2_VL_DEFAULTS, flat=True),
    "qwen2_5_vl": Wrapper({"qwen2_5_vl_text": "qwen2"}, _QWEN2_VL_DEFAULTS, flat=True),
    "qwen3_5": Wrapper(
        {"qwen3_5_text": "qwen3_5_text"},
        {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3_vl": Wrapper(
        {"qwen3_vl_text": "qwen3"},
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 128000,
            "rope_theta": 500_000.0,
        },
    ),
}

# Beginnings of a text model's tensors, in every spelling that transformers has published -> in the plain model. What
# begins otherwise has its plain name already.
RENAMED: Mapping[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_PICTURES = ("vision_tower.", "visual.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.")
_LEFT_OUT = (*_PICTURES, *(f"model.{prefix}" for prefix in _PICTURES))

# Keys of a flat config that are not the text model's.
_NOT_TEXT = (
    *("architectures", "auto_map", "model_type", "text_config", "vision_config"),
    *("image_token_id", "video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id"),
)
# Keys that count for the text model where they stand at the top: the wrapper's own word is the one that transformers
# goes by. The others are taken from the top only where the text model's config is silent.
_TOP_FIRST = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
_TOP_LAST = ("dtype", "torch_dtype", "transformers_version")
# How positions of pictures are laid out, which text alone has none of.
_PICTURE_POSITIONS = ("mrope_section", "mrope_interleaved")


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a parsed ``config.json`` is that of a model whose text model lies inside it."""
    return isinstance(config.get("model_type"), str) and config["model_type"] in WRAPPERS


def text_name(stored: str) -> str | None:
    """The plain name of a wrapper's tensor; None for what is not the text model's."""
    if stored.startswith(_LEFT_OUT):
        return None
    prefix = next((prefix for prefix in RENAMED if stored.startswith(prefix)), "")
    return RENAMED.get(prefix, "") + stored.removeprefix(prefix)


def text_config(config: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """The text model's own ``config.json``, from that of a source; what is no wrapper stays as it is.

    Args:
        config: a source's parsed ``config.json``.
        names: plain names of the tensors that the source holds, where they are known: configs contradict themselves in
            whether the embeddings are tied, or do not say it.

    Raises:
        UnsupportedModelError: no model that is known, alone or wrapped.
    """
    model_type = config.get("model_type")
    if not is_wrapper(config):
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            known = (*ARCHITECTURES, *WRAPPERS)
            raise UnsupportedModelError(f"unsupported architecture: {why_refused(config, model_type, known)}")
        return dict(config)
    wrapper = WRAPPERS[str(model_type)]
    given = config.get("text_config")
    if given is None and wrapper.flat:
        given = {key: value for key, value in config.items() if key not in _NOT_TEXT}
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: text_config: expected an object, found {given!r:.80}")
    inner = given.get("model_type", next(iter(wrapper.text_types)))
    if not isinstance(inner, str) or inner not in wrapper.text_types:
        reason = why_refused(given, inner, wrapper.text_types)
        raise UnsupportedModelError(f"unsupported text model inside {model_type}: {reason}")
    plain = {**wrapper.defaults, **given}
    plain |= {key: config[key] for key in _TOP_LAST if key in config and given.get(key) is None}
    plain |= {key: config[key] for key in _TOP_FIRST if config.get(key) is not None}
    if plain.get("quantization_config"):
        raise UnsupportedModelError(
            f"the model is quantised, which is not known of text models inside {model_type}: use the unquantised "
            "checkpoint"
        )
    _text_positions(plain)
    tied = _tied(config, given, names)
    if tied is not None:
        plain["tie_word_embeddings"] = tied
    plain["model_type"] = wrapper.text_types[inner]
    plain["architectures"] = [ARCHITECTURES[plain["model_type"]].class_name]
    return plain


def _text_positions(plain: dict[str, Any]) -> None:
    """Rotary settings that the plain model knows: for text alone, positions of pictures are those of the text."""
    for key in ("rope_parameters", "rope_scaling"):
        given = plain.get(key)
        if not isinstance(given, Mapping):
            continue
        kept = {name: value for name, value in given.items() if name not in _PICTURE_POSITIONS}
        kept |= {name: "default" for name in ("type", "rope_type") if kept.get(name) == "mrope"}
        plain[key] = kept
        if "rope_theta" in kept:
            plain.pop("rope_theta", None)
        if key == "rope_scaling" and all(value == "default" for value in kept.values()):
            del plain[key]


def _tied(config: Mapping[str, Any], given: Mapping[str, Any], names: Collection[str] | None) -> bool | None:
    """Whether the output layer is the embedding; None where nothing says so and the plain model's default holds.

    Both configs have the key in some versions of transformers, one or none in others. Where they contradict each other
    or say nothing the weights tell.
    """
    said = [one["tie_word_embeddings"] for one in (config, given) if one.get("tie_word_embeddings") is not None]
    if names is None or not all(isinstance(value, bool) for value in said):
        return said[0] if said else None
    if LM_HEAD in names:
        return bool(said) and all(said)
    return any(said) or not said
