"""The sampling defaults of generation_config.json, and its fields that change answers but are not supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FILE = "generation_config.json"


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(_ids(word) and word for word in value)


# Supported fields, with the names of `SamplingParams`, and the check of their values.
SAMPLING_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "temperature": _number(0, 100),
    "top_k": lambda value: type(value) is int and 0 <= value < 2**31,
    "top_p": _number(1e-9, 1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "bad_words_ids": _words,
}
# Fields of transformers 5 that change answers and are not supported, with the values that have no effect.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale", "top_h"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("sequence_bias", "stop_strings", "force_words_ids", "constraints"), ([],)),
    **dict.fromkeys(("watermarking_config", "dola_layers", "max_time"), ()),
    **dict.fromkeys(("token_healing", "remove_invalid_values"), (False,)),
}


def sampling_defaults(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of `SAMPLING_FIELDS` for requests that give none, and the fields that are ignored. As in transformers,
    ``do_sample`` decides on greedy decoding; a temperature without it means sampling, as in vLLM."""
    stated = {name: config[name] for name in (*SAMPLING_FIELDS, *_UNSUPPORTED) if config.get(name) is not None}
    defaults = {name: value for name, value in stated.items() if (valid := SAMPLING_FIELDS.get(name)) and valid(value)}
    ignored = {
        name: value
        for name, value in stated.items()
        if name not in defaults and not any(value == neutral for neutral in _UNSUPPORTED.get(name, ()))
    }
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    elif config.get("do_sample") is True:
        defaults.setdefault("temperature", 1.0)
    return defaults, ignored
