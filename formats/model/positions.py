"""How a model tells positions apart: its rotary embeddings, read from ``config.json`` and checked.

A model has one or two of them (Gemma 3's and OLMo 3's blocks with a sliding window have their own); which block uses
which stands in ``ModelConfig.blocks``. Names are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModelError

__all__ = ["RopeConfig", "read_rope"]

# What each scaling computes with; every one of these has to be a positive number.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings", "max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}
_OPTIONAL = {
    "proportional": ("factor",),
    "dynamic": ("alpha",),
    "longrope": ("factor", "attention_factor"),
    "yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
}
# Names that a scaling was published under before: Phi-3's first name, and Qwen2-VL's for the positions of pictures,
# which in text alone are those of the text.
_RENAMED = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding; ``parameters`` holds what a scaled ``rope_type`` needs, under Hugging Face's keys.

    Attributes:
        rotary_dim: how many of a head's dimensions are turned, the first ones.
        interleaved: the pairs that are turned together are neighbours (2i, 2i + 1), not halves (i, i + rotary_dim / 2).
    """

    theta: float
    rope_type: str
    rotary_dim: int
    parameters: Mapping[str, Any]
    interleaved: bool = False


def read_rope(
    config: Mapping[str, Any], given: Mapping[str, Any], theta: Any, head_dim: int, *, interleaved: bool
) -> RopeConfig:
    """One rotary embedding of a parsed ``config.json``.

    Args:
        config: the whole config, for what older spellings keep outside.
        given: the rotary embedding's own settings (``rope_parameters``, ``rope_scaling``); may be empty.
        theta: the base where ``given`` has none.
        head_dim: size of a head.
        interleaved: see :class:`RopeConfig`.

    Raises:
        UnsupportedModelError: a scaling this project does not implement, or a missing or nonsensical number.
    """
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: rope_parameters: expected an object, found {given!r:.80}")
    parameters = dict(given)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    rope_type = _RENAMED.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        raise UnsupportedModelError(f"rotary scaling: expected one of {', '.join(_NEEDED)}, found {rope_type!r:.80}")
    theta = parameters.get("rope_theta", theta)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _positive(theta, "rope_theta")
    _positive(partial, "partial_rotary_factor")
    # Proportional: every pair of the head is one, and those beyond the factor are turned by nothing.
    rotary_dim = int(head_dim * min(partial, 1.0))
    if rope_type == "proportional":
        rotary_dim, parameters["partial_rotary_factor"] = head_dim, min(partial, 1.0)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(f"rotary embedding: expected an even number of dimensions, found {rotary_dim}")
    # The config's own word comes first, as in transformers; keep it with the rest so that one mapping tells all.
    parameters["original_max_position_embeddings"] = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or config.get("max_position_embeddings")
    )
    parameters.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    if rope_type == "yarn" and parameters.get("factor") is None:
        maximum, original = parameters["max_position_embeddings"], parameters["original_max_position_embeddings"]
        _positive(maximum, "max_position_embeddings")
        _positive(original, "original_max_position_embeddings")
        parameters["factor"] = maximum / original
    _check_scaling(rope_type, parameters, rotary_dim)
    return RopeConfig(float(theta), rope_type, rotary_dim, parameters, interleaved)


def _positive(value: Any, key: str) -> None:
    # The bound keeps sums and powers of it finite; NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive number, found {value!r:.80}")


def _check_scaling(rope_type: str, parameters: Mapping[str, Any], rotary_dim: int) -> None:
    """Raise unless every number that the ``rope_type`` computes with is there and positive."""
    for key in _NEEDED[rope_type]:
        _positive(parameters.get(key), f"rope_parameters.{key}")
    for key in _OPTIONAL.get(rope_type, ()):
        if parameters.get(key) is not None:
            _positive(parameters[key], f"rope_parameters.{key}")
    if rope_type == "llama3" and parameters["low_freq_factor"] == parameters["high_freq_factor"]:
        raise UnsupportedModelError("config.json: rope_parameters: low_freq_factor equals high_freq_factor")
    if rope_type == "dynamic" and rotary_dim < 4:
        raise UnsupportedModelError(f"rotary embedding: dynamic scaling needs 4 dimensions or more, found {rotary_dim}")
    if rope_type == "yarn" and not isinstance(parameters.get("truncate", True), bool):
        raise UnsupportedModelError(
            f"config.json: rope_parameters.truncate: expected true or false, found {parameters['truncate']!r:.80}"
        )
    if rope_type != "longrope":
        return
    if parameters["original_max_position_embeddings"] < 2:
        raise UnsupportedModelError("config.json: original_max_position_embeddings: expected more than 1")
    for key in ("short_factor", "long_factor"):
        values = parameters.get(key)
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise UnsupportedModelError(
                f"config.json: rope_parameters.{key}: expected {rotary_dim // 2} numbers, found {values!r:.80}"
            )
        for value in values:
            _positive(value, f"rope_parameters.{key}")
