"""A GGUF file's model in Hugging Face's terms: ``config.json`` from its metadata, names and rows of its tensors.

llama.cpp's converter changes three things, which are undone here: it interleaves the rows of queries and keys in families
whose rotary pairs it wants side by side, adds 1 to the norms of families that multiply by 1 + weight, and stacks experts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wisparse.formats.architectures import ARCHITECTURES
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.gguf import GgufFile
from wisparse.formats.lazy import Tensor, torch
from wisparse.formats.tensor_file import Entry, TensorFile

ADVICE = "give the checkpoint that the file was made from"


@dataclass(frozen=True)
class _Family:
    model_type: str
    interleaved_rows: bool = False  # of q_proj and k_proj
    keys: Mapping[str, str] = field(default_factory=dict)  # config.json's -> the file's, where they are required
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what llama.cpp fixes for the family


_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # where the file has none
_MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
# ``general.architecture`` -> family.
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama", interleaved_rows=True),
    "qwen2": _Family("qwen2", fixed={"use_sliding_window": False}),
    "qwen3": _Family("qwen3", fixed={"use_sliding_window": False}),
    "qwen3moe": _Family(
        "qwen3_moe",
        keys={"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    "gemma": _Family("gemma", fixed={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": _Family("gemma2", fixed=_GELU),
    "gemma3": _Family("gemma3_text", fixed=_GELU),
    "phi3": _Family("phi3"),
    "granite": _Family("granite", interleaved_rows=True, keys=_MULTIPLIERS),
    "smollm3": _Family("smollm3", interleaved_rows=True, fixed={"no_rope_layer_interval": 4}),
    "olmo2": _Family("olmo2"),
}
# Metadata that does not change the model, or that is read from the tensors.
_NOT_READ = re.compile(r"vocab_size|tensor_data_layout|attention\.causal|attention\.layer_norm_epsilon")
_PARTIAL = ("phi3",)  # families with ``partial_rotary_factor``
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class _Metadata:
    """The metadata of the file's architecture; `unread` are the keys that nothing asked for."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self._prefix = file, f"{architecture}."
        every = file.metadata.items()
        self.unread = {key.removeprefix(self._prefix): value for key, value in every if key.startswith(self._prefix)}
        self._values = dict(self.unread)

    def wrong(self, key: str, expected: str, found: Any) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.file.name}: {self._prefix}{key}: expected {expected}, found {found!r:.80}")

    def number(self, key: str, default: float | None = None) -> Any:
        """A number; of a list with one value for each block, which has to be the same in all, that value."""
        self.unread.pop(key, None)
        value = self._values.get(key, default)
        if isinstance(value, list) and len({*map(str, value)}) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", value)
        return value

    def count(self, key: str, default: int | None = None, largest: int = 2**27) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or not (default == 0 or value > 0) or not 0 <= value <= largest:
            raise self.wrong(key, f"a whole number from {int(default != 0)} to {largest:,}", value)
        return value

    def given(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str) -> str:
        self.unread.pop(key, None)
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return value


def family_of(file: GgufFile) -> _Family:
    """The file's family; raises UnsupportedModelError for another architecture, or what is not a language model."""
    architecture, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{file.name}: holds {kind!r:.40}, not a language model")
    family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        known = f"GGUF files are read of {', '.join(_FAMILIES)}"
        raise UnsupportedModelError(f"{file.name}: unsupported architecture {architecture!r:.80}; {known}; {ADVICE}")
    return family


def read_config(file: GgufFile) -> dict[str, Any]:
    """``config.json`` without token ids; what the file says and cannot be said there raises UnsupportedModelError."""
    family, architecture = family_of(file), file.metadata["general.architecture"]
    data = _Metadata(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModelError(f"{file.name}: no token_embd.weight; the file holds no whole model")
    hidden, heads = data.count("embedding_length"), data.count("attention.head_count")
    blocks = data.count("block_count", largest=len(file.tensors))
    head_dim = data.count("attention.key_length", max(1, hidden // heads))
    experts, chosen = data.count("expert_count", 0), data.count("expert_used_count", 0)
    model_type = "mixtral" if experts and family.model_type == "llama" else family.model_type
    config = {
        "architectures": [ARCHITECTURES[model_type].class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": data.count("feed_forward_length", 0 if experts else None),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": data.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": data.count("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "hidden_act": "silu",
        "sliding_window": None,
        "dtype": "float32" if {*file.kinds} <= {"F32"} else "bfloat16",
        **{key: data.number(stored) for key, stored in family.keys.items()},
        **family.fixed,
    }
    if (width := data.count("attention.value_length", head_dim)) != head_dim:
        raise data.wrong("attention.value_length", f"attention.key_length ({head_dim})", width)
    if experts:
        config |= {
            "num_local_experts" if model_type == "mixtral" else "num_experts": experts,
            "num_experts_per_tok": chosen,
        }
    rope = _rope(data, head_dim, model_type, config["max_position_embeddings"])
    config["rope_parameters"] = rope
    if "original_max_position_embeddings" in rope and model_type == "phi3":
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if model_type in ("gemma2", "gemma3_text"):
        config |= _newer_gemma(data, config, rope)
    if model_type == "smollm3":
        config["no_rope_layers"] = [int((block + 1) % 4 != 0) for block in range(blocks)]
    if model_type == "phi3" and (window := data.count("attention.sliding_window", 0)):
        config["sliding_window"] = window
    for key, value in data.unread.items():
        if value not in (0, False, "", None) and not _NOT_READ.fullmatch(key):
            raise UnsupportedModelError(
                f"{file.name}: {architecture}.{key} is {value!r:.60}, which is not known of this family here; {ADVICE}"
            )
    return config


def _newer_gemma(data: _Metadata, config: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Of Gemma 2 and 3. The scale of the scores is not in the file: llama.cpp knows the largest models by their blocks."""
    second, blocks = config["model_type"] == "gemma2", config["num_hidden_layers"]
    largest = blocks == (46 if second else 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    period = data.count("attention.sliding_window_pattern", 2 if second else 6)
    sliding, full = "sliding_attention", "full_attention"
    found = {
        "query_pre_attn_scalar": scalar,
        "sliding_window": data.count("attention.sliding_window", 4096 if second else None),
        "layer_types": [sliding if (block + 1) % period else full for block in range(blocks)],
    }
    local = {
        "rope_type": "default",
        "rope_theta": data.number("rope.freq_base_swa", rope["rope_theta"] if second else 1e4),
    }
    if second:
        if local["rope_theta"] != rope["rope_theta"]:
            raise data.wrong("rope.freq_base_swa", f"rope.freq_base ({rope['rope_theta']})", local["rope_theta"])
        return found | {key: data.number(key, default) for key, default in _SOFTCAPS.items()}
    if data.given("final_logit_softcapping"):
        found["final_logit_softcapping"] = data.number("final_logit_softcapping")
    return found | {"rope_parameters": {sliding: local, full: rope}}


def _rope(data: _Metadata, head_dim: int, model_type: str, context: int) -> dict[str, Any]:
    """``rope_parameters`` from the metadata's scaling or from tensors of factors, one for each pair of dimensions."""
    theta, rotated = data.number("rope.freq_base", 10000.0), data.count("rope.dimension_count", head_dim)
    kind = data.text("rope.scaling.type", "linear")
    factor = data.number("rope.scaling.factor", data.number("rope.scale_linear", 0)) or 1.0
    original = data.count("rope.scaling.original_context_length", 0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotated != head_dim and model_type not in _PARTIAL:
        raise data.wrong("rope.dimension_count", f"the heads' width ({head_dim})", rotated)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if data.unread.pop("rope.scaling.finetuned", True) is False and model_type == "granite":
        raise data.wrong("rope.scaling.finetuned", "true: without it positions are not used", False)
    factors = [_vector(data.file, name) for name in _ROPE_TENSORS]
    if factors[0] is not None:
        return rope | _from_factors(factors[0], theta, context)
    if factors[1] is not None and factors[2] is not None:
        rope |= {"rope_type": "longrope", "short_factor": factors[1], "long_factor": factors[2]}
        rope["original_max_position_embeddings"] = original or context
        if data.given("rope.scaling.attn_factor"):
            rope["attention_factor"] = data.number("rope.scaling.attn_factor")
    elif kind == "yarn" and factor != 1.0:
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or context}
        for key in ("attention_factor", "beta_fast", "beta_slow"):
            stored = f"rope.scaling.yarn_{key.replace('attention', 'attn')}"
            if data.given(stored):
                rope[key] = data.number(stored)
        if data.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            raise data.wrong("rope.scaling.yarn_ext_factor", "1", data.number("rope.scaling.yarn_ext_factor"))
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear", "yarn"):
        raise data.wrong("rope.scaling.type", "none, linear, yarn, or longrope with its tensors", kind)
    return rope


def _vector(file: GgufFile, name: str) -> list[float] | None:
    if name not in file.tensors:
        return None
    return [float(str(value)) for value in file.rows(name, 0, file.tensors[name].rows).ravel()]


def _from_factors(factors: list[float], theta: float, context: int) -> dict[str, Any]:
    """Rotary scaling from the factors that divide the frequencies: Llama 3's, where its formula gives them, else LongRoPE
    with the same factors at all lengths."""
    found, original = np.array(factors), 8192 if context > 8192 else max(1, context // 8)
    turns = theta ** (-np.arange(len(found)) / len(found)) / (2 * math.pi)  # of a pair, for each position
    largest = float(found.max())
    between = (found > 1.0001) & (found < 0.9999 * largest)
    if between.sum() > 1:
        # Between two wavelengths 1 / factor is linear in the frequency, which gives `low` and `high` but for a factor that
        # they have in common with the original length, which the file does not say. Llama 3's is 8,192.
        share = (1 / found[between] - 1 / largest) / (1 - 1 / largest)
        slope, start = np.polyfit(turns[between], share, 1)
        low, high = (float(f"{(one - start) * original / slope:.4g}") for one in (0, 1))
        if 0 < low < high:
            smooth = np.clip((original * turns - low) / (high - low), 0, 1)
            if np.allclose(1 / ((1 - smooth) / largest + smooth), found, rtol=1e-5, atol=0):
                same = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
                return {"rope_type": "llama3", "factor": largest, **same}
    each = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": context}
    return {"rope_type": "longrope", "attention_factor": 1.0, **each}


# ---------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class _Rows:
    """Where a tensor's rows are in the file."""

    stored: str
    first: int
    shape: tuple[int, ...]
    heads: int = 0  # of a projection whose rows the file has interleaved
    offset: float = 0.0  # that the file has added


def _places(file: GgufFile, config: Mapping[str, Any]) -> Iterator[tuple[str, _Rows]]:
    """Name in a checkpoint and place of each tensor; a tensor that is not known keeps its name."""
    family, arch = family_of(file), ARCHITECTURES[config["model_type"]]
    norms, experts = arch.norms, arch.experts
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": norms.attention_input,
        "post_attention_norm": norms.attention_output,
        "ffn_norm": norms.mlp_input,
        "post_ffw_norm": norms.mlp_output,
        **{f"attn_{role[0]}": f"self_attn.{role}" for role in ("q_proj", "k_proj", "v_proj")},
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": f"mlp.{arch.gate_up[-1]}",
        "ffn_down": "mlp.down_proj",
    }
    if arch.qk_norm is not None:
        names |= zip(("attn_q_norm", "attn_k_norm"), (f"self_attn.{name}" for name in arch.qk_norm.names), strict=True)
    stacked = {}
    if experts is not None:
        names["ffn_gate_inp"] = f"{experts.module}.{experts.router}"
        stacked = dict(zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), experts.names, strict=True))
    for stored, tensor in file.tensors.items():
        block, _, name = stored.removeprefix("blk.").partition(".") if stored.startswith("blk.") else ("", "", stored)
        name, _, part = name.rpartition(".")
        prefix = f"model.layers.{block}." if block else ""
        if stored in _ROPE_TENSORS:
            continue
        if name in stacked and experts is not None and len(tensor.shape) == 3:
            for expert, rows in enumerate(range(0, tensor.rows, tensor.shape[1])):
                full = f"{prefix}{experts.module}.experts.{expert}.{stacked[name]}.{part}"
                yield full, _Rows(stored, rows, tensor.shape[1:])
            continue
        heads = 0
        if family.interleaved_rows and name in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
        offset = 1.0 if arch.norm_offset and name.endswith("norm") else 0.0
        plain = names.get(name)
        yield stored if plain is None else f"{prefix}{plain}.{part}", _Rows(stored, 0, tensor.shape, heads, offset)


class GgufWeights(TensorFile):
    """A GGUF file's tensors under the names of a checkpoint, as float32."""

    dequantised = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = file = GgufFile(path)
        self.folder, self.name, self.error, self.identity = file.folder, file.name, file.error, file.identity
        self.metadata = {}  # a safetensors file's, of which there is none
        self._rows: dict[str, _Rows] = {}
        for name, rows in _places(file, read_config(file)):
            if self._rows.setdefault(name, rows) is not rows:
                raise file.error(f"{file.name}: two tensors for {name!r:.100}")
            if rows.heads and (rows.shape[0] % (2 * rows.heads) or len(rows.shape) > 2):
                raise file.error(
                    f"{file.name}: {rows.stored!r:.100}: shape {rows.shape} is not that of {rows.heads} heads"
                )
        self.entries = {name: Entry("F32", rows.shape) for name, rows in self._rows.items()}

    def read(self, tensor: str, start: int = 0, stop: int | None = None) -> Tensor:
        rows = self._rows[tensor]
        stop = 4 * math.prod(rows.shape) if stop is None else stop
        width = 4 * rows.shape[-1]
        first, last = start // width, -(-stop // width)
        if not rows.heads:
            values = self.file.rows(rows.stored, rows.first + first, rows.first + last) - np.float32(rows.offset)
        else:  # the two halves of each head are interleaved
            order = np.arange(rows.shape[0]).reshape(rows.heads, -1, 2).swapaxes(1, 2).ravel()
            if len(rows.shape) > 1:
                order = order[first:last]
                low = int(np.min(order))
                values = self.file.rows(rows.stored, low, int(np.max(order)) + 1)[order - low]
            else:
                values = self.file.rows(rows.stored, 0, 1)[:, order]
        data = torch.from_numpy(np.ascontiguousarray(values)).view(-1).view(torch.uint8)
        return data[start - first * width : stop - first * width]
