"""A source's ``config.json`` with every field stated, as a bundle's is: transformers' own class fills in the rest."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any

from wisparse.formats.architectures import ARCHITECTURES, WRAPPERS, why_refused
from wisparse.formats.errors import UnsupportedModelError, first_line
from wisparse.formats.model_config import LARGEST_NUM_BLOCKS, LM_HEAD, dimension

# Token ids are the source's or none: a default would end answers at a token that means something else.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys that size objects of the configuration class which have nothing to do with the model.
_NOT_READ = ("id2label", "label2id", "num_labels", "auto_map", "quantization_config")
# How positions of pictures are laid out, which text alone has none of.
_PICTURE_POSITIONS = ("mrope_section", "mrope_interleaved")


def full_config(config: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """The text model's ``config.json`` from a source's, with every field in transformers 5's spelling.

    What the source states in an older spelling stays beside it, for tools that know no other.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    model_type = config.get("model_type")
    wrapped = isinstance(model_type, str) and model_type in WRAPPERS
    if not wrapped and (not isinstance(model_type, str) or model_type not in ARCHITECTURES):
        reason = why_refused(config, model_type, (*ARCHITECTURES, *WRAPPERS))
        raise UnsupportedModelError(f"unsupported architecture: {reason}")
    given = _text_config(config, str(model_type)) if wrapped else config
    if given.get("num_hidden_layers") is not None:  # lists of this length are made
        dimension(given, "num_hidden_layers", largest=LARGEST_NUM_BLOCKS)
    plain_type = WRAPPERS[str(model_type)][given["model_type"]] if wrapped else str(model_type)
    of_no_model, full = PreTrainedConfig().to_dict(), dict(given)
    # A wrapper's text model has fields of its class, and then those of the plain one.
    for read_as in dict.fromkeys((given["model_type"], plain_type)):
        known = copy.deepcopy({key: value for key, value in full.items() if key not in _NOT_READ})  # it changes them
        try:
            read = CONFIG_MAPPING[read_as].from_dict({**known, "model_type": read_as})
            stated = json.loads(read.to_json_string(use_diff=False))
        except Exception as error:  # its checks raise a dozen kinds
            raise UnsupportedModelError(f"config.json: transformers cannot read it: {first_line(error)}") from error
        for key, value in stated.items():
            own = key not in of_no_model or (key == "dtype" and value is not None)
            if own and key not in _TOKEN_IDS and not key.startswith("_"):
                full[key] = value
    full["model_type"] = plain_type
    if wrapped:
        full["architectures"] = [ARCHITECTURES[plain_type].class_name]
        tied = _tied(config, given, names)
        if tied is not None:
            full["tie_word_embeddings"] = tied
    return full


def _text_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """What a wrapper's config says of its text model."""
    given = config.get("text_config")
    if given is None and model_type.startswith("qwen2"):  # published with the text model's keys at the top
        others = ("architectures", "model_type", "vision_config")
        given = {key: value for key, value in config.items() if key not in others and "_token_id" not in key}
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: text_config: expected an object, found {given!r:.80}")
    known = WRAPPERS[model_type]
    inner = given.get("model_type", next(iter(known)))
    if not isinstance(inner, str) or inner not in known:
        raise UnsupportedModelError(f"unsupported text model inside {model_type}: {why_refused(given, inner, known)}")
    if config.get("quantization_config") or given.get("quantization_config"):
        raise UnsupportedModelError(
            f"the model is quantised, which is not known of text models inside {model_type}: use the unquantised "
            "checkpoint"
        )
    # The wrapper's own token ids are those that transformers uses; types are taken from it where the text model's
    # config has none.
    first = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
    types = ("dtype", "torch_dtype", "transformers_version")
    last = {key: config[key] for key in types if key in config and given.get(key) is None}
    text = {**given, **last, **first, "model_type": inner}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.get(key), Mapping):
            # For text alone, positions of pictures are those of the text.
            kept = {name: value for name, value in rope.items() if name not in _PICTURE_POSITIONS}
            text[key] = kept | {name: "default" for name in ("type", "rope_type") if kept.get(name) == "mrope"}
    if isinstance(rope := text.get("rope_scaling"), Mapping) and all(value == "default" for value in rope.values()):
        del text["rope_scaling"]
    return text


def _tied(config: Mapping[str, Any], given: Mapping[str, Any], names: Collection[str] | None) -> bool | None:
    """Whether the output layer is the embedding; None where nothing says so and the class's default holds.

    Both configs have the key in some versions of transformers, one or none in others. Where they contradict each other
    or say nothing the weights tell.
    """
    stated = [one["tie_word_embeddings"] for one in (config, given) if one.get("tie_word_embeddings") is not None]
    if names is None or not all(isinstance(value, bool) for value in stated):
        return stated[0] if stated else None
    if LM_HEAD in names:
        return bool(stated) and all(stated)
    return any(stated) or not stated
