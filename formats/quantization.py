"""Parsing of ``quantization_config``: the packing of each weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .config_fields import dimension, require
from .errors import UnsupportedModelError
from .guard import refusals
from .model_config import LM_HEAD, ModelConfig
from .packings import ACT_ORDER, Packed, Packing, Plain, Transposed

_KEY = "quantization_config"
_HEAD = LM_HEAD.removesuffix(".weight")
_KNOWN = "compressed-tensors (pack-quantized, int-quantized, float-quantized), fp8, gptq, awq and auto-round"
_AUTO_ROUND = ("auto-round", "intel/auto-round")
# AutoRound's packings: what is added to a stored zero point; None: AWQ's.
_AUTO_ROUND_PACKINGS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round:auto_awq": None}
_MAX_GROUPS, _MAX_NAMES, _MAX_NAME = 64, 100_000, 1000
# Limits on regular expressions that bound their time: short names, few quantifiers, which apply to single characters or
# sets, not to groups. A trial on a layer's name takes about 30 steps to the power of the number of quantifiers.
_MAX_PATTERN, _MAX_QUANTIFIERS, _MAX_STEPS = 200, 3, 20_000 * 30**3


def quantisation_method(given: Any) -> str:
    """The method of a ``quantization_config``; UnsupportedModelError unless it is known."""
    require(isinstance(given, dict), _KEY, "an object", given)
    method = given.get("quant_method")
    if method is None and "config_groups" in given:
        method = "compressed-tensors"
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"
    if method not in ("compressed-tensors", "fp8", "gptq", "awq", *_AUTO_ROUND):
        name = str(method).replace("_fp4", "").lower()
        methods = refusals()["quantization"].items()
        by = next((f"{names[name]}: {why};" for why, names in methods if name in names), f"{method!r:.80};")
        raise UnsupportedModelError(f"the model is quantised by {by} known are {_KNOWN}: use an unquantised checkpoint")
    return str(method)


def read_quantisation(config_dict: Mapping[str, Any], config: ModelConfig) -> dict[str, Packing]:
    """Name of each quantized weight -> its packing. ``config_dict``: ``config.json``, from which ``config`` was read. Only
    projections, the output layer and ``kv_b_proj``, which is dequantized at load, are quantized. UnsupportedModelError for
    an unknown or inconsistent setting."""
    given = config_dict.get(_KEY)
    if given is None or given == {}:
        return {}
    layers = [part for projection in config.projections() for part in projection.parts]
    if not config.tie_word_embeddings:
        layers.append(_HEAD)
    if config.latent is not None:
        layers += [f"model.layers.{index}.self_attn.kv_b_proj" for index in range(config.num_blocks)]
    packings = read_packings(given, layers)
    if not packings and "config_groups" in given:
        raise _refused(": its targets are none of the model's linear layers")
    # Runtimes fuse projections with a common input, so these must have equal packings.
    for shared in (shared for block in range(config.num_blocks) for shared in config.shared_inputs(block)):
        first, *others = (part for projection in shared for part in projection.parts)
        for other in others:
            if packings.get(other) != packings.get(first):
                differ = f"{first} and {other.rpartition('.')[2]} read one input but are stored in different ways"
                if shared[0].experts:
                    differ = f"{first} and {other} are stored in different ways"
                raise _refused(f": {differ}; expected one scheme for both")
    return {f"{layer}.weight": packing for layer, packing in packings.items()}


def read_packings(given: Mapping[str, Any], layers: list[str]) -> dict[str, Packing]:
    """The packings of those of the linear ``layers`` that are quantised. ``given``: ``config.json``'s
    ``quantization_config``. UnsupportedModelError as of `read_quantisation`."""
    readers = {"compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq, "awq": _awq}
    readers |= dict.fromkeys(_AUTO_ROUND, _auto_round)
    return readers[quantisation_method(given)](given, layers)


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"config.json: {_KEY}{what}")


def _compressed(given: Mapping[str, Any], layers: list[str]) -> dict[str, Packing]:
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") in ("dense", None):
        sparsity = None
    for key, refused in (("sparsity_config", sparsity), ("transform_config", given.get("transform_config"))):
        if refused:
            raise _refused(f".{key} is not known here; use the unquantised checkpoint")
    if given.get("kv_cache_scheme"):
        raise _refused(".kv_cache_scheme: a quantised cache is not known here; take a checkpoint without it")
    status = given.get("quantization_status", "compressed")
    require(status in ("compressed", "frozen"), f"{_KEY}.quantization_status", "'compressed'", status)
    groups: Any = given.get("config_groups")
    valid = isinstance(groups, dict) and 0 < len(groups) <= _MAX_GROUPS
    require(valid, f"{_KEY}.config_groups", "an object", groups)
    ignored = _matcher("ignore", given.get("ignore") or [], len(layers))
    schemes = []
    for name, group in groups.items():
        where = f"config_groups.{name:.40}"
        require(isinstance(group, dict), f"{_KEY}.{where}", "an object", group)
        packing = _scheme(where, group, group.get("format") or given.get("format"))
        schemes.append((_matcher(f"{where}.targets", group.get("targets"), len(layers)), packing))
    found: dict[str, Packing] = {}
    for layer in layers:
        if ignored(layer):
            continue
        # The most specific target applies: a name, then a pattern, then the layer's class.
        matches = [(rank, packing) for match, packing in schemes if (rank := match(layer))]
        best = max((rank for rank, _ in matches), default=0)
        chosen = {packing for rank, packing in matches if rank == best}
        if len(chosen) > 1:
            raise _refused(f": {layer} is a target of two different schemes")
        if chosen:
            found[layer] = chosen.pop()
    return found


def _scheme(where: str, group: Mapping[str, Any], form: Any) -> Packing:
    weights: Any = group.get("weights")
    activations: Any = group.get("input_activations") or {}
    for key, value in (("weights", weights), ("input_activations", activations)):
        require(isinstance(value, dict), f"{_KEY}.{where}.{key}", "an object", value)
    bits, number, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    form = f"{number}-quantized" if form == "naive-quantized" else form
    if strategy is None:
        # compressed-tensors' default.
        size = weights.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if weights.get("dynamic") not in (None, False):
        raise _refused(f".{where}: weights that are rounded anew at every use are not known")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _refused(
            f".{where}: channels reordered by their activations (actorder 'group') share no scale with their neighbours; "
            "take a checkpoint quantised without it, or with actorder 'weight'"
        )
    symmetric = weights.get("symmetric", True)
    require(isinstance(symmetric, bool), f"{_KEY}.{where}: symmetric", "true or false", symmetric)
    size = dimension(weights, "group_size") if strategy == "group" else None
    per_tensor, known = strategy == "tensor", strategy in ("tensor", "channel", "group")
    static = activations.get("dynamic") is False
    if form == "pack-quantized" and number == "int" and known and bits in (4, 8) and (symmetric or not per_tensor):
        return Packed("int4" if bits == 4 else "int8", size, not symmetric, per_tensor)
    if form == "int-quantized" and number == "int" and known and bits == 8:
        return Plain("int8", size, None, per_tensor, not symmetric, input_scale=static)
    if form == "float-quantized" and number == "float" and bits == 8 and symmetric and (known or strategy == "block"):
        rows, columns = _block(weights.get("block_structure"), where) if strategy == "block" else (None, size)
        return Plain("fp8", columns, rows, per_tensor, input_scale=static)
    raise _refused(
        f".{where}: {form!r:.40} of {bits!r:.20}-bit {number!r:.20} by {strategy!r:.20} is not among the schemes read "
        f"here ({_KNOWN}); use the unquantised checkpoint"
    )


def _block(given: Any, where: str) -> tuple[int, int]:
    valid = isinstance(given, list) and len(given) == 2
    valid = valid and all(type(size) is int and 0 < size < 2**20 for size in given)
    require(valid, f"{_KEY}.{where}", "a block of two sizes", given)
    return given[0], given[1]


def _matcher(key: str, given: Any, num_layers: int) -> Callable[[str], int]:
    """A function of a layer's name: 0 no match, 1 by class, 2 by pattern (``re:…``), 3 by name."""
    given = _strings(key, given)
    compiled = _patterns(key, [name[3:] for name in given if name.startswith("re:")], num_layers)
    exact = {name for name in given if not name.startswith("re:")}

    def match(layer: str) -> int:
        if layer in exact:
            return 3
        return 2 if any(pattern.match(layer) for pattern in compiled) else int("Linear" in exact)

    return match


def _patterns(key: str, given: list[str], num_layers: int) -> list[re.Pattern[str]]:
    """Regular expressions to try on the beginning of every layer's name."""
    compiled, steps = [], 0
    for pattern in given:
        # An end of ".*" decides nothing.
        short = pattern if pattern.endswith("\\.*") else pattern.removesuffix(".*")
        # Escaped characters and those in a set are no quantifiers.
        bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", short)
        quantifiers = re.findall(r"[*+{]|(?<![(*+?}])\?", bare)
        if len(short) > _MAX_PATTERN or len(quantifiers) > _MAX_QUANTIFIERS or re.search(r"\)[*+?{]", bare):
            raise _refused(f".{key}: a pattern too intricate to be tried: {pattern!r:.80}")
        steps += num_layers * 30 ** len(quantifiers)
        if steps > _MAX_STEPS:
            raise _refused(f".{key}: {len(given)} patterns are too many to be tried on every layer")
        try:
            compiled.append(re.compile(short))
        except (re.error, OverflowError, RecursionError):
            raise _refused(f".{key}: not a regular expression: {pattern!r:.80}") from None
    return compiled


def _fp8(given: Mapping[str, Any], layers: list[str]) -> dict[str, Packing]:
    form = given.get("fmt", "e4m3")
    require(form in ("e4m3", "float8_e4m3fn"), f"{_KEY}.fmt", "'e4m3'", form)
    static = given.get("activation_scheme") == "static"
    packing = Plain("fp8", per_tensor=True, input_scale=static)
    if given.get("weight_block_size") is not None:
        rows, columns = _block(given["weight_block_size"], "weight_block_size")
        packing = Plain("fp8", columns, rows, scale="weight_scale_inv", input_scale=static)
    return _except(given, ("modules_to_not_convert", "ignored_layers"), layers, packing)


def _awq(given: Mapping[str, Any], layers: list[str]) -> dict[str, Packing]:
    group = _group_of_4_bits(given, ("bits", "w_bit"), ("group_size", "q_group_size"))
    version = given.get("version", "gemm")
    valid = isinstance(version, str) and version.lower() == "gemm"
    require(valid, f"{_KEY}.version", "AWQ's 'gemm'", version, ", which is packed in another way")
    return _except(given, ("modules_to_not_convert",), layers, Transposed(group, awq=True))


def _gptq(given: Mapping[str, Any], layers: list[str]) -> dict[str, Packing]:
    form = "marlin" if given.get("is_marlin_format") else given.get("checkpoint_format", "gptq")
    known, other = form in ("gptq", "gptq_v2"), ", which is packed in another way"
    require(known, f"{_KEY}.checkpoint_format", "'gptq' or 'gptq_v2'", form, other)
    only: Any = given.get("modules_in_block_to_quantize")
    named: tuple[str, ...] = ("",)
    if only is not None:
        require(isinstance(only, list), f"{_KEY}.modules_in_block_to_quantize", "a list", only)
        flat = [x for one in only for x in (one if type(one) is list else [one])]
        named = tuple(f".{name}" for name in _strings("modules_in_block_to_quantize", flat))
    # Rules by pattern, "-:" for layers that stay unquantized; the first that matches applies.
    rules = _objects("dynamic", given)
    patterns = _patterns("dynamic", [rule.removeprefix("-:").removeprefix("+:") for rule in rules], len(layers))
    found: dict[str, Packing] = {}
    for layer in layers:
        rule = next((rule for pattern, rule in zip(patterns, rules, strict=True) if pattern.match(layer)), "")
        if rule.startswith("-:") or not layer.endswith(named) or (layer == _HEAD and given.get("lm_head") is not True):
            continue
        settings = {**given, **rules.get(rule, {})}
        group = _group_of_4_bits(settings, ("bits",), ("group_size",))
        if settings.get("desc_act") is True and group is not None:
            raise _refused(f".desc_act: {ACT_ORDER}")
        offset, symmetric = 0 if form == "gptq_v2" else 1, settings.get("sym") is True
        found[layer] = Transposed(group, zero_offset=offset, symmetric=symmetric)
    return found


def _auto_round(given: Mapping[str, Any], layers: list[str]) -> dict[str, Packing]:
    """GPTQ's or AWQ's packing in the blocks that are named, with exceptions by layer."""
    form = given.get("packing_format", "auto_round:auto_gptq")
    known = isinstance(form, str) and form in _AUTO_ROUND_PACKINGS
    other = "; export it again as auto_round:auto_gptq or auto_round:auto_awq"
    require(known, f"{_KEY}.packing_format", f"one of {', '.join(_AUTO_ROUND_PACKINGS)}", form, other)
    offset = _AUTO_ROUND_PACKINGS[form]
    blocks = given.get("block_name_to_quantize") or given.get("to_quant_block_names") or ["model.layers"]
    blocks = _strings("block_name_to_quantize", blocks.split(",") if isinstance(blocks, str) else blocks)
    own = _objects("extra_config", given)
    # A model that reads images too names its text model's blocks so.
    own, blocks = {_plain(name): one for name, one in own.items()}, [_plain(name) for name in blocks]
    rules = [name for name in own if re.search(r"[][*+?^$|\\()]", name)]
    # A name applies before a pattern, which may match anywhere.
    searched = [rule.removeprefix(".*") for rule in rules]
    patterns = list(zip(_patterns("extra_config", searched, len(layers)), rules, strict=True))
    found: dict[str, Packing] = {}
    for layer in layers:
        in_blocks = any(f"{layer}.".startswith(f"{name.strip()}.") for name in blocks)
        chosen = own.get(layer)
        if chosen is None:
            matching = (own[rule] for pattern, rule in patterns if own[rule] and pattern.search(layer))
            chosen = next(matching, {} if in_blocks else {"bits": 16})
        settings = {**given, **chosen}
        if settings.get("bits") in (16, 32):
            continue
        require(settings.get("data_type", "int") == "int", f"{_KEY}.data_type", "'int'", settings.get("data_type"))
        group, symmetric = _group_of_4_bits(settings, ("bits",), ("group_size",)), settings.get("sym") is True
        found[layer] = Transposed(group, True) if offset is None else Transposed(group, False, offset, symmetric)
    return found


def _plain(name: str) -> str:
    return re.sub(r"language_model\\?\.", "", name, count=1)


def state_zero_offset(given: Mapping[str, Any], offset: int) -> tuple[str, str, str]:
    """The key of a ``quantization_config`` that says what is added to stored zero points, its value and the right one."""
    if given.get("quant_method") in _AUTO_ROUND:
        forms = {added: form for form, added in _AUTO_ROUND_PACKINGS.items()}
        return "packing_format", given.get("packing_format", forms[1]), forms[offset]
    return "checkpoint_format", given.get("checkpoint_format", "gptq"), "gptq" if offset else "gptq_v2"


def _except(given: Mapping[str, Any], keys: tuple[str, ...], layers: list[str], packing: Packing) -> dict[str, Packing]:
    """All layers with this packing except those that the config excludes, and the output layer."""
    excluded = {name for key in keys for name in _strings(key, given.get(key) or [])} | {_HEAD}
    return {layer: packing for layer in layers if not any(name and f".{name}." in f".{layer}." for name in excluded)}


def _objects(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of single layers, by names or patterns."""
    found: Any = given.get(key) or {}
    valid = isinstance(found, dict) and len(found) <= _MAX_NAMES
    valid = valid and all(isinstance(one, dict) for one in found.values())
    require(valid, f"{_KEY}.{key}", "an object of objects", found)
    return found


def _strings(key: str, given: Any) -> list[str]:
    valid = isinstance(given, list) and len(given) <= _MAX_NAMES
    valid = valid and all(isinstance(name, str) and len(name) <= _MAX_NAME for name in given)
    require(valid, f"{_KEY}.{key}", "a list of names", given)
    return list(given)


def _group_of_4_bits(given: Mapping[str, Any], bits: tuple[str, ...], size: tuple[str, ...]) -> int | None:
    """The group size; each setting is read by the first of its names that is present."""
    key, group = (next((name for name in names if name in given), names[0]) for names in (bits, size))
    found = given.get(key)
    require(type(found) is int and found == 4, f"{_KEY}.{key}", "4", found, "; use the unquantised checkpoint")
    return None if type(given.get(group)) is int and given[group] == -1 else dimension(given, group)
