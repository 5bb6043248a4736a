"""The configuration of a source model, read by transformers' class: every field stated, multimodal wrappers as text models."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any

from wisparse.formats.architectures import ARCHITECTURES, WRAPPERS, why_refused
from wisparse.formats.errors import UnsupportedModelError, first_line
from wisparse.formats.model_config import LARGEST_NUM_BLOCKS, LM_HEAD, dimension

# Only the source's own token ids are kept: with a class's default, generation could end at another token.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys that are not given to the configuration class: they do not change the model.
_NOT_READ = ("id2label", "label2id", "num_labels", "auto_map", "quantization_config")
# Keys of multimodal rotary positions, which text alone does not use.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def full_config(config: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """The text model's ``config.json`` from a source's, with every field under its transformers 5 name. Older names that
    the source has are kept too, for tools that know only them."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    model_type = config.get("model_type")
    wrapped = isinstance(model_type, str) and model_type in WRAPPERS
    if not wrapped and (not isinstance(model_type, str) or model_type not in ARCHITECTURES):
        reason = why_refused(config, model_type, (*ARCHITECTURES, *WRAPPERS))
        raise UnsupportedModelError(f"unsupported architecture: {reason}")
    text_config = _text_config(config, str(model_type)) if wrapped else config
    if text_config.get("num_hidden_layers") is not None:  # configuration classes make lists of this length
        dimension(text_config, "num_hidden_layers", largest=LARGEST_NUM_BLOCKS)
    plain_type = WRAPPERS[str(model_type)][text_config["model_type"]] if wrapped else str(model_type)
    base_defaults, full = PreTrainedConfig().to_dict(), dict(text_config)
    # A multimodal model's text model gets the fields of its own class, then those of the text-only class.
    for read_as in dict.fromkeys((text_config["model_type"], plain_type)):
        # A copy, which from_dict changes.
        known = copy.deepcopy({key: value for key, value in full.items() if key not in _NOT_READ})
        try:
            read = CONFIG_MAPPING[read_as].from_dict({**known, "model_type": read_as})
            fields = json.loads(read.to_json_string(use_diff=False))
        except Exception as error:  # its validation raises many types
            raise UnsupportedModelError(f"config.json: transformers cannot read it: {first_line(error)}") from error
        for key, value in fields.items():
            is_model_field = key not in base_defaults or (key == "dtype" and value is not None)
            if is_model_field and key not in _TOKEN_IDS and not key.startswith("_"):
                full[key] = value
    full["model_type"] = plain_type
    method = full.get("quantization_config")
    if plain_type == "gpt_oss" and isinstance(method, dict) and method.get("quant_method") == "mxfp4":
        del full["quantization_config"]  # mxfp4 weights are dequantised when they are read
    if wrapped:
        full["architectures"] = [ARCHITECTURES[plain_type].class_name]
        tied = _tied(config, text_config, names)
        if tied is not None:
            full["tie_word_embeddings"] = tied
    return full


def _text_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    text_config = config.get("text_config")
    if text_config is None and model_type.startswith("qwen2"):  # published with the text model's keys at the top
        outer_keys = ("architectures", "model_type", "vision_config")
        text_config = {key: value for key, value in config.items() if key not in outer_keys and "_token_id" not in key}
    if not isinstance(text_config, Mapping):
        raise UnsupportedModelError(f"config.json: text_config: expected an object, found {text_config!r:.80}")
    text_types = WRAPPERS[model_type]
    text_type = text_config.get("model_type", next(iter(text_types)))
    if not isinstance(text_type, str) or text_type not in text_types:
        reason = why_refused(text_config, text_type, text_types)
        raise UnsupportedModelError(f"unsupported text model inside {model_type}: {reason}")
    if config.get("quantization_config") or text_config.get("quantization_config"):
        unknown = f"the model is quantised, which is not known of text models inside {model_type}"
        raise UnsupportedModelError(f"{unknown}: use the unquantised checkpoint")
    # The outer config's token ids take precedence; its dtype is used where the text config has none.
    first = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
    types = ("dtype", "torch_dtype", "transformers_version")
    last = {key: config[key] for key in types if key in config and text_config.get(key) is None}
    text = {**text_config, **last, **first, "model_type": text_type}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.get(key), Mapping):
            # For text alone, multimodal rotary positions are the ordinary ones.
            kept = {name: value for name, value in rope.items() if name not in _MROPE_KEYS}
            text[key] = kept | {name: "default" for name in ("type", "rope_type") if kept.get(name) == "mrope"}
    if isinstance(rope := text.get("rope_scaling"), Mapping) and all(value == "default" for value in rope.values()):
        del text["rope_scaling"]
    return text


def _tied(config: Mapping[str, Any], text_config: Mapping[str, Any], names: Collection[str] | None) -> bool | None:
    """Whether the output layer is the embedding, by the outer and the text config; if they disagree or do not say, by
    whether the weights have an output layer. None: the class's default."""
    stated = [value for each in (config, text_config) if (value := each.get("tie_word_embeddings")) is not None]
    if names is None or not all(isinstance(value, bool) for value in stated):
        return stated[0] if stated else None
    if LM_HEAD in names:
        return bool(stated) and all(stated)
    return any(stated) or not stated
