"""Validated reading of the fields of ``config.json``, its rotary embedding, and the sampling of ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .architectures import Architecture
from .errors import UnsupportedModelError

# Far above any model: bounds memory for a hostile config before the tensors are validated.
LARGEST_DIMENSION = 2**27


def require(valid: bool, key: str, what: str, found: Any, advice: str = "") -> None:
    if not valid:
        raise UnsupportedModelError(f"config.json: {key}: expected {what}, found {found!r:.80}{advice}")


def dimension(config: Mapping[str, Any], key: str, largest: int = LARGEST_DIMENSION) -> int:
    value: Any = config.get(key)
    require(type(value) is int and value > 0, key, "a positive integer", value)
    require(value <= largest, key, f"at most {largest:,}", value)
    return int(value)


def switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    require(value is None or isinstance(value, bool), key, "true or false", value)
    return bool(value)


def number(
    config: Mapping[str, Any], key: str, low: float = 1e-12, high: float = 1e12, what: str = "a positive number"
) -> float:
    """The bounds keep sums, powers and quotients finite; NaN fails every comparison."""
    value: Any = config.get(key.rpartition(".")[2])
    require(type(value) in (int, float) and low <= value < high, key, what, value)
    return float(value)


def listed(config: Mapping[str, Any], key: str, length: int, what: str = "entries") -> list[Any]:
    values: Any = config.get(key.rpartition(".")[2])
    require(isinstance(values, list) and len(values) == length, key, f"{length} {what}", values)
    return list(values)


def read_count(config: Mapping[str, Any], key: str | None) -> int:
    """A non-negative number; 0 if ``key`` is None or missing."""
    value = 0 if key is None or config.get(key) is None else config[key]
    require(type(value) is int and 0 <= value <= LARGEST_DIMENSION, str(key), "0 or a positive integer", value)
    return int(value)


# By rope type: required parameters and optional ones, which may be missing or null. All must be positive.
_ROPE_NUMBERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": ((), ("alpha",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "longrope": (("original_max_position_embeddings", "max_position_embeddings"), ("factor", "attention_factor")),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
    ),
    "proportional": ((), ("factor",)),
}


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    rope_type: str
    rotary_dim: int  # number of rotated dimensions of a head, from the first
    parameters: Mapping[str, Any]  # of a scaled ``rope_type``, by Hugging Face's keys
    interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2)


def require_rope_type(found: Any) -> str:
    known = isinstance(found, str) and found in _ROPE_NUMBERS
    require(known, "rotary scaling", f"one of {', '.join(_ROPE_NUMBERS)}", found)
    return str(found)


def read_rope(config: Mapping[str, Any], given: Any, head_dim: int, arch: Architecture) -> RopeConfig:
    """``given``: the parameters of one rotary embedding of heads of ``head_dim``."""
    require(isinstance(given, Mapping), "rope_parameters", "an object", given)
    parameters, rope_type = dict(given), require_rope_type(given.get("rope_type"))

    def positive(key: str) -> float:
        return number(parameters, f"rope_parameters.{key}", 1e-300, 1e30)

    theta = positive("rope_theta")
    parameters.setdefault("partial_rotary_factor", 1.0)
    partial = parameters["partial_rotary_factor"] = min(positive("partial_rotary_factor"), 1.0)
    if partial < 1 and not arch.partial and rope_type != "proportional":
        key = "rope_parameters.partial_rotary_factor"
        require(rope_type == "default", key, "1 beside scaled positions in this family", partial)
        partial = parameters["partial_rotary_factor"] = 1.0  # as transformers, which does not read it there
    # Proportional: all dimensions form pairs; those beyond the factor have frequency 0.
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * partial)
    even = rotary_dim >= 2 and rotary_dim % 2 == 0
    require(even, "rotary embedding", "an even number of dimensions", rotary_dim)
    # As in transformers, the config's own number comes first.
    maximum = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = original or maximum
    parameters.setdefault("max_position_embeddings", maximum)
    if rope_type == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = positive("max_position_embeddings") / positive("original_max_position_embeddings")
    required, optional = _ROPE_NUMBERS[rope_type]
    for key in (*required, *optional):
        if key in required or parameters.get(key) is not None:
            positive(key)
    if rope_type == "llama3":
        low, high = (parameters[f"{key}_freq_factor"] for key in ("low", "high"))
        require(low != high, "rope_parameters.low_freq_factor", "another number than high_freq_factor", low)
    if rope_type == "dynamic":
        require(rotary_dim >= 4, "rotary embedding", "4 dimensions or more for dynamic scaling", rotary_dim)
    if rope_type == "yarn":
        truncate = parameters.get("truncate", True)
        require(isinstance(truncate, bool), "rope_parameters.truncate", "true or false", truncate)
    if rope_type == "longrope":
        original = parameters["original_max_position_embeddings"]
        require(original >= 2, "original_max_position_embeddings", "more than 1", original)
        for key in ("short_factor", "long_factor"):
            for value in listed(parameters, f"rope_parameters.{key}", rotary_dim // 2, "numbers"):
                number({key: value}, f"rope_parameters.{key}", 1e-300, 1e30)
    return RopeConfig(theta, rope_type, rotary_dim, parameters, arch.interleaved)


GENERATION_CONFIG = "generation_config.json"


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
