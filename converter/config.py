"""The configuration of a source model, read by transformers' class: every field stated, multimodal wrappers as text models.
What is refused by the stated fields alone is refused before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, get_args

from wisparse.formats import guard
from wisparse.formats.architectures import ARCHITECTURES, WRAPPERS, require_known, why_refused
from wisparse.formats.checkpoint import read_config
from wisparse.formats.config_fields import LARGEST_DIMENSION, dimension, require, require_rope_type
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import LARGEST_NUM_BLOCKS, LM_HEAD, require_values
from wisparse.formats.quantization import quantisation_method

# Only the source's own token ids are kept: with a class's default, generation could end at another token.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys that are not given to the configuration class: they do not change the model.
_NOT_READ = ("id2label", "label2id", "num_labels", "auto_map", "quantization_config")
_NO_CLAMP = 1e-30  # its logarithm is taken
# Keys of multimodal rotary positions, which text alone does not use.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
# The release of transformers from which a family can be converted, if it is later than the lower bound: before it lacks the
# family, or its text model (muse_glimmer_text), or computes other logits (granitemoehybrid).
_SINCE = {"flint": "5.21", **dict.fromkeys(("granitemoehybrid", "internlm3", "iquestcoder"), "5.23")}
_SINCE |= dict.fromkeys(("muse_glimmer_text", "sarvam_mla"), "5.24")

# Dimensions that every family states. Configuration classes make lists of the number of layers.
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def require_supported(model: str | os.PathLike[str]) -> None:
    """UnsupportedModelError, without torch and transformers, for a folder whose config.json states what is not supported."""
    folder = guard.find_folder(model)
    # A folder without config.json is refused by `open_source`, after the other arguments.
    if folder is not None and (folder / "config.json").is_file():
        require_stated(read_config(folder))


def require_stated(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Check what a source's config.json states. Returns the text model's config, respelled, and its row of the table."""
    model_type = require_known(config)
    stated = _respelled(_text_config(config, model_type) if model_type in WRAPPERS else config)
    plain_type = WRAPPERS[model_type][stated["model_type"]] if model_type in WRAPPERS else model_type
    require_values(stated, plain_type, complete=False)
    for key in _SIZES:
        if (value := stated.get(key)) is not None:
            require(not isinstance(value, str), key, "a number", value)
            whole = isinstance(value, float) and value.is_integer()
            limit = LARGEST_NUM_BLOCKS if key == "num_hidden_layers" else LARGEST_DIMENSION
            dimension({key: int(value) if whole else value}, key, limit)
    for given in (stated.get("rope_parameters"), stated.get("rope_scaling")):
        # Of all blocks, or of each kind of blocks.
        ropes = [given, *given.values()] if isinstance(given, Mapping) else []
        for rope in (one for one in ropes if isinstance(one, Mapping)):
            if (rope_type := rope.get("rope_type", rope.get("type"))) is not None:
                require_rope_type(rope_type)
    if stated.get("quantization_config") and not _is_mxfp4(stated):
        quantisation_method(stated["quantization_config"])
    return stated, plain_type


def _is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether the experts are gpt-oss's, which are dequantised when they are read."""
    method = config.get("quantization_config")
    return config["model_type"] == "gpt_oss" and isinstance(method, dict) and method.get("quant_method") == "mxfp4"


def release_refusal(model_type: str) -> str | None:
    """Why the installed release of transformers, if it is too old, cannot be used for models of this type."""
    from transformers import __version__

    needed = _SINCE.get(model_type, "0.0")
    installed, first = (tuple(map(int, version.split(".")[:2])) for version in (__version__, needed))
    if installed >= first:
        return None
    expected = f"expected transformers {needed} or later, found {__version__}"
    return f"config.json: model_type {model_type!r}: {expected}; pip install -U transformers"


def full_config(config: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """The text model's ``config.json`` from a source's, with every field under its transformers 5 name. Older names that
    the source has are kept too, for tools that know only them."""
    full, plain_type = require_stated(config)
    if refused := release_refusal(plain_type):
        raise UnsupportedModelError(refused)
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    base_defaults, text_config, wrapped = PreTrainedConfig().to_dict(), full, config["model_type"] in WRAPPERS
    # A multimodal model's text model gets the fields of its own class, then those of the text-only class.
    for read_as in dict.fromkeys((text_config["model_type"], plain_type)):
        if read_as not in CONFIG_MAPPING:  # a text model's type of before, EXAONE 4.5's
            continue
        full = _as_declared(full, CONFIG_MAPPING[read_as])
        # A copy, which from_dict changes.
        known = copy.deepcopy({key: value for key, value in full.items() if key not in _NOT_READ})
        try:
            read = CONFIG_MAPPING[read_as].from_dict({**known, "model_type": read_as})
            values = json.loads(read.to_json_string(use_diff=False))
        except Exception as error:  # its validation raises many types
            why = " ".join(str(error).split()) or type(error).__name__
            raise UnsupportedModelError(f"config.json: transformers cannot read it: {why:.300}") from error
        _require_rope_kept(full, values)
        for key, value in values.items():
            is_model_field = key not in base_defaults or (key == "dtype" and value is not None)
            if is_model_field and not _is_infinite(value) and key not in _TOKEN_IDS and not key.startswith("_"):
                full[key] = value
    full["model_type"] = plain_type
    if plain_type == "nemotron_h":  # transformers raises steps to it in passes over several tokens alone
        full["time_step_min"] = _NO_CLAMP
    if _is_mxfp4(full):
        del full["quantization_config"]
    if wrapped:
        full["architectures"] = [ARCHITECTURES[plain_type].class_name]
        tied = _tied(config, text_config, names)
        if tied is not None:
            full["tie_word_embeddings"] = tied
    return full


def _respelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with spellings that transformers 5 does not read as the ones that it does."""
    found = dict(config)
    for key in [key for key, value in found.items() if _is_infinite(value)]:
        del found[key]
    if "tie_embedding" in found and str(found.get("model_type")).startswith("lfm2"):  # which transformers reads first
        found["tie_word_embeddings"] = found.pop("tie_embedding")
    for key in ("dtype", "torch_dtype"):
        value = found.get(key)
        if value == "auto":  # that of the weights, as without the key
            del found[key]
        elif isinstance(value, str):
            found[key] = value.removeprefix("torch.")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(key), Mapping):
            # Phi-3's first name of LongRoPE, and Sarvam's of YaRN.
            names = {"su": "longrope", "deepseek_yarn": "yarn"}
            found[key] = {
                name: names.get(value, value) if isinstance(value, str) else value for name, value in rope.items()
            }
    return found


def _is_infinite(value: Any) -> bool:
    """Whether it is limits without an upper one, in a form that transformers writes, and reads from files only. They are the
    default."""
    return isinstance(value, list) and value == [0, {"__float__": "Infinity"}]


def _as_declared(config: Mapping[str, Any], declared: Any) -> dict[str, Any]:
    """``config`` with numbers of the types that transformers' class declares and insists on: 30 as 30.0, 64.0 as 64."""
    found = dict(config)
    for field in fields(declared):
        types, value = get_args(field.type) or (field.type,), found.get(field.name)
        if isinstance(value, str) and str not in types and (int in types or float in types):
            require(False, field.name, "a number", value)
        if type(value) is int and float in types and int not in types and abs(value) < 2**53:
            found[field.name] = float(value)
        elif type(value) is float and int in types and float not in types and value.is_integer():
            found[field.name] = int(value)
    return found


def _require_rope_kept(stated: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Refuse a ``rope_scaling`` beside ``rope_parameters``, which transformers then drops, if numbers would change by it."""
    rope, kept = stated.get("rope_parameters"), read.get("rope_parameters")
    if not stated.get("rope_scaling") or not isinstance(rope, Mapping) or not isinstance(kept, Mapping):
        return
    for key, value in rope.items():
        if key not in ("type", "rope_type") and kept.get(key) != value:
            lost = f"beside it transformers does not read rope_parameters, whose {key} ({value!r:.60}) would be lost"
            advice = "move its entries into rope_parameters, with rope_type for type, and delete rope_scaling"
            raise UnsupportedModelError(f"config.json: rope_scaling: {lost}; {advice}")


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
    # Releases before 5.21 save SmolVLM with the class's default, of a larger vocabulary; no embedding can have it.
    pad, size = first.get("pad_token_id"), text_config.get("vocab_size")
    if isinstance(pad, int) and isinstance(size, int) and pad >= size:
        del first["pad_token_id"]
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
