"""Spellings of config.json: each that transformers loads gives its logits, or is refused by name before a weight is read."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import make_checkpoint
from tiny_bundle import tiny_recipe

from wisparse.converter.config import full_config
from wisparse.formats.bundle import Bundle, ProjectionMask, scale_shapes
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.write import write_bundle
from wisparse.runtime.torch.decoder import TorchDecoder

# fmt: off
_OLD = {"rope_parameters": ..., "rope_theta": 5000.0}  # before transformers 5
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
_PHI = {**_OLD, "original_max_position_embeddings": 32}
_WINDOW = {"sliding_window": 7, "use_sliding_window": True, "layer_types": ...}
_KINDS = ["full_attention", "sliding_attention", "full_attention"]
_NESTED = {"rope_type": "default", "rope_theta": 300.0}


def _scaled(**rope: Any) -> dict[str, Any]:
    return {**_OLD, "rope_scaling": rope}


def _new(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5000.0, **rope}}


def _both(full: Mapping[str, Any], near: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": dict(full), "sliding_attention": dict(near)}}


# model of `runtime_models` -> name -> keys of config.json that are set, or removed (`...`).
LOADED: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "as saved": {},
        "theta at the top": _OLD,
        "theta at the top, an integer": {"rope_parameters": ..., "rope_theta": 500000},
        "no theta": {"rope_parameters": ...},
        "null scaling": {**_OLD, "rope_scaling": None},
        "empty scaling": {**_OLD, "rope_scaling": {}},
        "default by type": _scaled(type="default"),
        "parameters without a type": _new(),
        "parameters by type": _new(type="linear", factor=4.0),
        "linear by type": _scaled(type="linear", factor=4.0),
        "linear by rope_type": _scaled(rope_type="linear", factor=4),
        "linear, both": _scaled(rope_type="linear", type="dynamic", factor=4),
        "dynamic": _scaled(type="dynamic", factor=2.0),
        "dynamic, new": _new(rope_type="dynamic", factor=2.0),
        "llama3": _scaled(rope_type="llama3", **_LLAMA3),
        "llama3 by type": _scaled(type="llama3", **_LLAMA3),
        "llama3, new, integers": _new(rope_type="llama3", **{key: int(value) for key, value in _LLAMA3.items()}),
        "llama3 without the original length": _scaled(rope_type="llama3", **dict(list(_LLAMA3.items())[:3])),
        "yarn of a model card": {**_scaled(type="yarn", **_YARN), "max_position_embeddings": 32},
        "yarn of a model card, new": {**_new(rope_type="yarn", **_YARN), "max_position_embeddings": 32},
        "yarn, extended": {**_scaled(rope_type="yarn", **_YARN), "max_position_embeddings": 128},
        "yarn without the original length": {**_scaled(rope_type="yarn", factor=2.0), "max_position_embeddings": 48},
        "yarn, attention factor": _scaled(rope_type="yarn", attention_factor=1.3, **_YARN),
        "yarn, betas": _scaled(rope_type="yarn", beta_fast=8, beta_slow=2, **_YARN),
        "yarn, mscale": _scaled(rope_type="yarn", mscale=1.0, mscale_all_dim=0.7, **_YARN),
        "yarn, not truncated": _scaled(rope_type="yarn", truncate=False, **_YARN),
        "yarn, null factor": _scaled(rope_type="yarn", **_YARN | {"factor": None}),
        "longrope": _scaled(rope_type="longrope", factor=4.0, original_max_position_embeddings=32, **_LONG),
        "longrope, original length at the top": {**_PHI, "rope_scaling": {"rope_type": "longrope", **_LONG}},
        "scaling added by hand, theta the default": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": {"type": "yarn", **_YARN}},
        "partial, which llama has not": {**_OLD, "partial_rotary_factor": 0.5},
        "head_dim null": {"head_dim": None},
        "head_dim absent": {"head_dim": ...},
        "heads absent": {"num_key_value_heads": 2, "pretraining_tp": ..., "attention_bias": ..., "mlp_bias": ...},
        "window, which llama has none of": {"sliding_window": 7},
        "eos list": {"eos_token_id": [2, 5]},
        "eos null": {"eos_token_id": None, "bos_token_id": None},
        "torch_dtype": {"dtype": ..., "torch_dtype": "float32"},
        "no dtype": {"dtype": ...},
        "null dtype": {"dtype": None},
        "wrong dtype": {"dtype": "float16"},
        "no architectures": {"architectures": ...},
        "remote code": {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
    },
    "llama-tied": {"tied": {}, "old": _OLD},
    "llama-bias": {"biases": {}, "biases, old": _OLD},
    "llama-head-dim": {"head_dim of its own": {}, "yarn": _scaled(rope_type="yarn", **_YARN)},
    "mistral-window": {"window": {}, "no window": {"sliding_window": None}, "window absent": {"sliding_window": ...}},
    "qwen2": {
        "as saved": {},
        "window unused": {"sliding_window": 7, "use_sliding_window": False, "layer_types": ...},
        "window by max_window_layers": {**_WINDOW, "max_window_layers": 1},
        "window in none": {**_WINDOW, "max_window_layers": 3},
        "layer types": {"sliding_window": 7, "use_sliding_window": True, "layer_types": _KINDS},
        "tie absent": {"tie_word_embeddings": True, **_OLD},
        "yarn of its card": {**_scaled(type="yarn", **_YARN), "max_position_embeddings": 32},
    },
    "qwen3": {"as saved": {}, "window": {**_WINDOW, "max_window_layers": 2}, "yarn": _scaled(rope_type="yarn", **_YARN)},
    "phi3": {
        "plain": {}, "partial": {**_OLD, "partial_rotary_factor": 0.5}, "window": {"sliding_window": 9},
        "longrope": {**_PHI, "rope_scaling": {"type": "longrope", **_LONG}},
        "longrope, factors without points": {
            **_PHI, "rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}},
        "longrope, attention factor": {**_PHI, "rope_scaling": {"type": "longrope", "attention_factor": 1.4, **_LONG}},
    },
    "gemma2": {
        "as saved": {}, "types absent": {"layer_types": ...}, "no cap": {"final_logit_softcapping": None},
        "tie absent": {"tie_word_embeddings": ...},
    },
    "gemma3": {
        "as saved": {},
        "old": {"rope_parameters": ..., "rope_theta": 9000.0, "rope_local_base_freq": 300.0},
        "old, scaled": {
            "rope_parameters": ..., "rope_theta": 9000.0, "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "pattern": {"layer_types": ..., "sliding_window_pattern": 2},
        "linear in one kind": _both({"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}, _NESTED),
    },
    "olmo3": {
        "yarn in one kind": _both({"rope_type": "yarn", "rope_theta": 5000.0, **_YARN}, _NESTED),
        "one for both": _new(rope_type="default"), "old": _OLD,
    },
    "smollm3": {"rope by interval": {"no_rope_layers": ..., "no_rope_layer_interval": 2}},
    "granite": {"multipliers without points": {"embedding_multiplier": 3, "logits_scaling": 2}},
    "exaone4-window": {"pattern": {"layer_types": ..., "sliding_window_pattern": 2}},
    "nemotron-h-moe": {
        "as saved": {}, "older kinds": {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp", "moe"]},
        "pattern": {"layers_block_type": ..., "hybrid_override_pattern": "MEM*-E"},
        "null kinds": {"layers_block_type": None, "hybrid_override_pattern": "MEM*-E", "num_hidden_layers": 6},
        "drafting": {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
        "no latent": {"moe_latent_size": None}, "no groups": {"n_group": 1, "topk_group": 1},
        "shared experts are one": {"n_shared_experts": 3},
    },
    "gpt-oss": {"yarn": {}, "old": {**_OLD, "rope_scaling": {"rope_type": "yarn", "truncate": False, **_YARN}}},
}
# Spellings that transformers refuses: as above, and the keys of one that it loads and that means the same.
READ_AS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a cap without a point": ("gemma2", {"final_logit_softcapping": 30}, {"final_logit_softcapping": 30.0}),
    "an epsilon without a point": ("llama", {"rms_norm_eps": 0}, {"rms_norm_eps": 0.0}),
    "sizes with points": ("llama", {"hidden_size": 64.0, "num_hidden_layers": 3.0}, {}),
    "a scale with a point": ("gemma3", {"query_pre_attn_scalar": 40.0}, {}),
    "dtype auto": ("llama", {"dtype": "auto"}, {}),
    "torch_dtype auto": ("qwen2", {"dtype": ..., "torch_dtype": "auto"}, {}),
    "dtype of torch": ("phi3", {"dtype": "torch.float32"}, {}),
    "layer types, no window": ("qwen2", {"sliding_window": 7, "use_sliding_window": False, "layer_types": _KINDS},
                               {"sliding_window": None, "use_sliding_window": False, "layer_types": ...}),
    "su": ("phi3", {**_PHI, "rope_scaling": {"type": "su", **_LONG}}, LOADED["phi3"]["longrope"]),
    "su, new": ("phi3", {**_new(rope_type="su", **_LONG), "original_max_position_embeddings": 32},
                {**_new(rope_type="longrope", **_LONG), "original_max_position_embeddings": 32}),
}
_ADDED = r"rope_scaling: beside it .* rope_parameters, whose rope_theta \(5000\.0\) would be lost; move its entries"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "yarn added by hand": ("llama", {**_new(rope_type="default"), "rope_scaling": {"type": "yarn", **_YARN}}, _ADDED),
    "linear added by hand": ("qwen2", {**_new(rope_type="default"), "rope_scaling": {"type": "linear", "factor": 2}}, _ADDED),
    "added by hand to two": ("gemma3", {**_both(_NESTED, _NESTED), "rope_scaling": {"type": "linear", "factor": 2}},
                             "rope_parameters, whose (full|sliding)_attention"),
    "another factor": ("llama", {**_new(rope_type="linear", factor=4), "rope_scaling": {
        "rope_type": "linear", "factor": 8, "rope_theta": 5000.0}}, r"rope_parameters, whose factor \(4\)"),
    "a size in quotes": ("llama", {"hidden_size": "64"}, "hidden_size: expected a number, found '64'"),
    "a cap in quotes": ("gemma2", {"final_logit_softcapping": "30.0"}, "final_logit_softcapping: expected a number"),
    "half a block": ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers"),
    "theta in quotes": ("llama", _new(rope_type="default", rope_theta="1e4"), "rope_theta: expected a positive number"),
    "factor in quotes": ("phi3", _new(rope_type="linear", factor="4"), "rope_parameters"),
    "unknown scaling": ("llama", _scaled(type="ntk", factor=2.0), "rotary scaling: expected one of"),
    "partial and scaled": ("llama", {**_new(rope_type="linear", factor=2, partial_rotary_factor=0.5)}, "1 beside scaled"),
    "a bias in quotes": ("qwen3", {"attention_bias": "true"}, "attention_bias"),
}
# fmt: on


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A new folder with the weights of a model and its config.json, changed."""
    folder = tmp_path_factory.mktemp("models")

    def make(model: str, changes: Mapping[str, Any]) -> Path:
        if not (folder / model).exists():
            make_checkpoint(model, folder / model)
        out = tmp_path_factory.mktemp("spelled")
        config = json.loads((folder / model / "config.json").read_text()) | dict(changes)
        (out / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not ...}))
        shutil.copy(folder / model / "model.safetensors", out)
        return out

    return make


@torch.inference_mode()
def difference(folder: Path, like: Path, out: Path) -> float:
    """Between our logits of ``folder`` and those of transformers for ``like``, over their size, where both end."""
    from transformers import AutoModelForCausalLM

    source = Checkpoint.open(folder, complete=full_config)
    shapes = scale_shapes(source.config).items()
    levels = {0.5: {name: ProjectionMask(torch.ones(shape), 1.0, 0.5) for name, shape in shapes}}
    bundle = Bundle.open(write_bundle(source, tiny_recipe(source.config, levels), levels, out))
    # Before 5.21 transformers takes torch's fused attention for Gemma 2, which cannot cap scores.
    theirs = AutoModelForCausalLM.from_pretrained(like, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(3, 101, (60,), generator=torch.Generator().manual_seed(0))
    length = bundle.config.max_position_embeddings
    decoder = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=length)
    found = 0.0
    for end in (9, min(60, length)):  # beyond the original context, which is 32 tokens
        expected = theirs(tokens[None, :end]).logits[0, -1]
        assert expected.std() > 0.1
        found = max(found, float((decoder.prefill(0, tokens[:end], end) - expected).abs().max() / expected.std()))
    return found


@pytest.mark.parametrize(("model", "name"), [(model, name) for model in LOADED for name in LOADED[model]])
def test_logits_are_those_of_transformers(model: str, name: str, spelled: Callable[..., Path], tmp_path: Path) -> None:
    folder = spelled(model, LOADED[model][name])
    assert difference(folder, folder, tmp_path / "out") < 1e-5


@pytest.mark.parametrize(
    ("model", "name", "context"),
    [
        ("llama", "yarn of a model card", 128),
        ("llama", "yarn of a model card, new", 128),
        ("qwen2", "yarn of its card", 128),
        ("llama", "yarn, extended", 128),
        ("qwen3", "yarn", 256),
        ("llama", "linear by type", 256),
    ],
)
def test_yarn_extends_the_context(model: str, name: str, context: int, spelled: Callable[..., Path]) -> None:
    source = Checkpoint.open(spelled(model, LOADED[model][name]), complete=full_config)
    assert source.config.max_position_embeddings == context


@pytest.mark.parametrize("name", READ_AS)
def test_read_as_what_it_means(name: str, spelled: Callable[..., Path], tmp_path: Path) -> None:
    model, changes, like = READ_AS[name]
    assert difference(spelled(model, changes), spelled(model, like), tmp_path / "out") < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, spelled: Callable[..., Path]) -> None:
    model, changes, words = REFUSED[name]
    folder = spelled(model, changes)
    (folder / "model.safetensors").write_bytes(b"")  # not read
    with pytest.raises(UnsupportedModelError, match=words):
        Checkpoint.open(folder, complete=full_config)
