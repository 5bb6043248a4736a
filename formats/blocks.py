"""What tells one block of a model from another: how far it looks back, which rotary embedding turns it, its heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .architectures import Architecture
from .errors import UnsupportedModelError

# Far above any model there is; keeps a hostile config from asking for absurd memory before a tensor was looked at.
_LARGEST_DIMENSION = 2**27


def dimension(
    config: Mapping[str, Any], key: str, default: int | None = None, largest: int = _LARGEST_DIMENSION
) -> int:
    """A positive integer; ``default`` where the config has none."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive integer, found {value!r:.80}")
    if value > largest:
        raise UnsupportedModelError(f"config.json: {key}: expected at most {largest:,}, found {value!r:.40}")
    return value


def switch(config: Mapping[str, Any], key: str) -> bool:
    """True or false; false where the config has none."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModelError(f"config.json: {key}: expected true or false, found {value!r:.80}")
    return bool(value)


def number(config: Mapping[str, Any], key: str) -> float:
    """A positive number."""
    value = config.get(key)
    # The bounds keep sums, powers and quotients of it finite; NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-12 < value < 1e12:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive number, found {value!r:.80}")
    return float(value)


def listed(config: Mapping[str, Any], key: str, num_blocks: int) -> list[Any] | None:
    """A list with an entry for every block; None if the config has none."""
    values = config.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != num_blocks:
        raise UnsupportedModelError(f"config.json: {key}: expected {num_blocks} entries, found {values!r:.80}")
    return values


@dataclass(frozen=True)
class DeltaNet:
    """Dimensions of a model's recurrent blocks.

    Attributes:
        key_heads, value_heads: value heads share the keys and queries of one key head in groups.
        key_dim, value_dim: numbers in a head; the state of a value head is (key_dim, value_dim).
        taps: positions that the convolution sees, the current one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_size(self) -> int:
        """Width of the keys, and of the queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of the values, of the gate, and of what ``out_proj`` reads."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Width of queries, keys and values together, which is what the convolution goes over."""
        return 2 * self.key_size + self.value_size

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name below ``linear_attn.`` -> shape of all that is not a projection in scope: too little to be worth a mask,
        and what it says decides how long the state remembers."""
        return {
            "in_proj_b.weight": (self.value_heads, hidden_size),
            "in_proj_a.weight": (self.value_heads, hidden_size),
            "conv1d.weight": (self.mixed_size, 1, self.taps),
            "dt_bias": (self.value_heads,),
            "A_log": (self.value_heads,),
            "norm.weight": (self.value_dim,),
        }


def read_delta_net(config: Mapping[str, Any]) -> DeltaNet:
    """From a parsed ``config.json``; raises UnsupportedModelError for a missing or nonsensical dimension."""
    found = DeltaNet(
        key_heads=dimension(config, "linear_num_key_heads"),
        value_heads=dimension(config, "linear_num_value_heads"),
        key_dim=dimension(config, "linear_key_head_dim"),
        value_dim=dimension(config, "linear_value_head_dim"),
        taps=dimension(config, "linear_conv_kernel_dim", largest=64),
    )
    if found.value_heads % found.key_heads:
        raise UnsupportedModelError(
            f"config.json: linear_num_value_heads ({found.value_heads}) is not a multiple of linear_num_key_heads "
            f"({found.key_heads})"
        )
    if found.taps < 2:
        raise UnsupportedModelError("config.json: linear_conv_kernel_dim: expected 2 or more, found 1")
    return found


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


@dataclass(frozen=True)
class Block:
    """What tells one block of a model from another.

    Attributes:
        window: how many positions it attends to, itself included; None for all.
        rotary: which of ``ModelConfig.rotaries`` turns its queries and keys; None where nothing does.
        head_dim, num_kv_heads: width of a head, and how many heads have keys and values.
        recurrent: it has a gated DeltaNet instead of attention, and neither a window nor a rotary embedding.
        shared_values: it has no ``v_proj``; its values are what ``k_proj`` gives.
    """

    window: int | None
    rotary: int | None
    head_dim: int
    num_kv_heads: int
    recurrent: bool = False
    shared_values: bool = False

    @property
    def kv_size(self) -> int:
        """Width of the keys and of the values."""
        return self.num_kv_heads * self.head_dim


def read_blocks(
    config: Mapping[str, Any], arch: Architecture, num_blocks: int, head_dim: int, num_kv_heads: int
) -> tuple[Block, ...]:
    """Every block of a model, in order; raises UnsupportedModelError for a nonsensical list, window, period or head."""
    if arch.recurrent:
        kinds = _recurrent(config, num_blocks)
        return tuple(Block(None, None if one else 0, head_dim, num_kv_heads, one) for one in kinds)
    windows = _windows(config, arch, num_blocks)
    if arch.full_heads:  # the last one attends to everything whatever else is said
        windows[-1] = None
    unrotated: set[int] = set()
    if arch.unrotated == "full" and any(window is not None for window in windows):
        unrotated = {index for index, window in enumerate(windows) if window is None}
    elif arch.unrotated == "listed":
        unrotated = {index for index, rotated in enumerate(_rotated(config, num_blocks)) if not rotated}
    local = 0 if arch.local_theta is None else 1
    blocks = [
        Block(window, None if index in unrotated else 0 if window is None else local, head_dim, num_kv_heads)
        for index, window in enumerate(windows)
    ]
    return tuple(_with_full_heads(config, arch, blocks) if arch.full_heads else blocks)


def _with_full_heads(config: Mapping[str, Any], arch: Architecture, blocks: list[Block]) -> list[Block]:
    """The same with heads of their own where there is no window: Gemma 4's."""
    shared = arch.shared_values is not None and switch(config, arch.shared_values)
    own = {"head_dim": config.get("global_head_dim")}
    if shared:
        own["num_key_value_heads"] = config.get("num_global_key_value_heads")
    full = {index: own for index, block in enumerate(blocks) if block.window is None}
    given = config.get("per_layer_config", full)
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: per_layer_config: expected an object, found {given!r:.80}")
    # The keys are numbers as JSON has them: "5", and "05" in a model of more than ten blocks.
    names = {int(key) if re.fullmatch("[0-9]{1,5}", str(key)) else -1: key for key in given}
    if unknown := set(names) - set(range(len(blocks))):
        raise UnsupportedModelError(
            f"config.json: per_layer_config: expected blocks, found {names[min(unknown)]!r:.80}"
        )
    found = []
    for index, block in enumerate(blocks):
        said = given[names[index]] if index in names else {}
        if not isinstance(said, Mapping) or not set(said) <= {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(
                f"config.json: per_layer_config: expected head_dim and num_key_value_heads, found {said!r:.80}"
            )
        found.append(
            replace(
                block,
                head_dim=dimension(said, "head_dim", default=block.head_dim),
                num_kv_heads=dimension(said, "num_key_value_heads", default=block.num_kv_heads),
                shared_values=shared and block.window is None,
            )
        )
    widths = [{block.head_dim for block in found if (block.window is None) == full} for full in (True, False)]
    if any(len(of_kind) > 1 for of_kind in widths):
        raise UnsupportedModelError("config.json: per_layer_config: expected one head_dim for blocks of a kind")
    return found


def _recurrent(config: Mapping[str, Any], num_blocks: int) -> list[bool]:
    kinds = listed(config, "layer_types", num_blocks)
    if kinds is None:
        every = dimension(config, "full_attention_interval", default=4)
        return [(index + 1) % every != 0 for index in range(num_blocks)]
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise UnsupportedModelError(
                f"config.json: layer_types: expected linear_attention or full_attention, found {kind!r:.80}"
            )
    return [kind == "linear_attention" for kind in kinds]


def _rotated(config: Mapping[str, Any], num_blocks: int) -> list[Any]:
    """SmolLM3's list of blocks that know positions, or its rule where there is no list."""
    given = listed(config, "no_rope_layers", num_blocks)
    if given is not None:
        return given
    every = dimension(config, "no_rope_layer_interval", default=4)
    return [(index + 1) % every for index in range(num_blocks)]


def _windows(config: Mapping[str, Any], arch: Architecture, num_blocks: int) -> list[int | None]:
    window = config.get("sliding_window")
    if window is not None:
        dimension(config, "sliding_window")
    if window is None or (arch.sliding is not None and not switch(config, arch.sliding)):
        return [None] * num_blocks
    kinds = listed(config, "layer_types", num_blocks)
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if arch.unrotated == "listed":
        # SmolLM3's rule: without a list of kinds, the window stands where positions are not told apart.
        return [None if rotated else window for rotated in _rotated(config, num_blocks)]
    if arch.full_every is not None:
        return [None if full else window for full in _full(config, arch.full_every, num_blocks)]
    # Qwen's rule before layer_types existed: the first max_window_layers blocks attend to everything.
    first = config.get("max_window_layers", 0) if arch.sliding is not None else 0
    if not isinstance(first, int):
        raise UnsupportedModelError(f"config.json: max_window_layers: expected a number, found {first!r:.80}")
    return [window if index >= first else None for index in range(num_blocks)]


def _full(config: Mapping[str, Any], every: int, num_blocks: int) -> list[bool]:
    """Which blocks attend to everything, by ``sliding_window_pattern``: a period, or a period spelled in L and G."""
    pattern = config.get("sliding_window_pattern", every)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        # The last block attends to everything whatever the letters say.
        return [pattern[index % len(pattern)] == "G" or index == num_blocks - 1 for index in range(num_blocks)]
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedModelError(
            f"config.json: sliding_window_pattern: expected a positive integer or letters, found {pattern!r:.80}"
        )
    return [(index + 1) % pattern == 0 for index in range(num_blocks)]
