"""The table of architectures: dimensions read from a config, and configs that must be refused. What is given for a model and is
none gets a sentence that says what it is; JSON that is refused."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_models import EXPERTS, HYBRIDS, VARIANTS
from tiny_bundle import tiny_config, write_tiny_bundle, write_tiny_model

import wisparse
from wisparse.converter.config import full_config, release_refusal
from wisparse.formats.architectures import ARCHITECTURES, WRAPPERS, why_refused
from wisparse.formats.block_ops import not_yet
from wisparse.formats.errors import AccessError, BundleError, UnsupportedModelError
from wisparse.formats.guard import parse_json, shown
from wisparse.formats.hub import fetch_source
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import stacked_experts

ROOT = Path(__file__).resolve().parent.parent
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# Without what its smaller models have more, which is refused.
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": None,
    "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), LLAMA["rope_parameters"]),
}  # fmt: skip
GEMMA2 = {**GEMMA4, "model_type": "gemma2", "rope_parameters": LLAMA["rope_parameters"]}


def test_projections_of_transformers_models_are_found() -> None:
    """Names, shapes and biases are what transformers builds from the same config, for every row of the table."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import wisparse.converter.muse_glimmer  # noqa: F401  (its class)

    for model_type in (one for one in ARCHITECTURES if not release_refusal(one)):
        # Helium's o_proj takes the heads to be as wide as the hidden states.
        settings = {**LLAMA, "head_dim": 16 if model_type == "helium" else 24, "pad_token_id": 0}
        if model_type.startswith("deepseek"):
            settings |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        del settings["rope_parameters"]  # some families have one for each kind of layer
        settings["hidden_act"] = "silu" if ARCHITECTURES[model_type].gated else "relu2"
        if model_type == "gemma4_text":
            settings |= GEMMA4 | {"attention_k_eq_v": True}
        if model_type == "granitemoehybrid":
            settings |= {"num_local_experts": 0}
        if model_type == "afmoe":
            settings |= {"mup_enabled": True}
        if model_type == "nemotron_h":
            settings |= {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
        if model_type == "lfm2_moe":
            settings |= {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}
        if model_type == "dots1":
            settings |= {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2}
        hf_config = AutoConfig.for_model(**copy.deepcopy({**settings, "model_type": model_type}))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        assert type(model).__name__ == ARCHITECTURES[model_type].class_name
        config = ModelConfig.from_dict(hf_config.to_dict())
        ours = {projection.name: projection for projection in config.projections()}
        # Recurrent blocks have two that are too small to be worth a mask.
        left_out = (
            "lm_head.weight",
            "shared_expert_gate.weight",
            "gate.wg.weight",
            "router.gate.weight",
            "kv_b_proj.weight",
            *(f"in_proj_{one}.weight" for one in ("a", "b", "ba")),
        )
        linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        linears = {name: one for name, one in linears.items() if not f"{name}.weight".endswith(left_out)}
        experts = {name: ours.pop(name) for name in list(ours) if ours[name].experts}
        assert set(ours) == set(linears)
        places = stacked_experts(config)
        for one in experts.values():
            place = places[f"{one.parts[0]}.weight"]
            # Files of Granite have other names.
            module, _, role = one.name.rpartition(".")
            gated = role != "down_proj" and ARCHITECTURES[model_type].gated
            stored = f"{module}.{'gate_up_proj' if gated else role}"
            assert model.get_parameter(stored).shape == place.shape, place.name
        for name, linear in linears.items():
            found = (ours[name].out_features, ours[name].in_features, ours[name].bias)
            assert found == (*linear.weight.shape, linear.bias is not None), name


def test_what_blocks_have_is_read() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    (found,) = ModelConfig.from_dict({**LLAMA, "rope_parameters": rope}).rotaries
    assert (found.theta, found.rope_type, found.rotary_dim) == (5e5, "llama3", 16)
    assert all(found.parameters[key] == value for key, value in LLAMA3.items())
    for name in ("gelu", "gelu_pytorch_tanh"):  # the first files of Gemma mean the same by both
        assert ModelConfig.from_dict({**LLAMA, "hidden_act": name, "model_type": "gemma"}).activation == "gelu_tanh"

    def windows(**change: Any) -> tuple[int | None, ...]:
        return tuple(block.window for block in ModelConfig.from_dict({**LLAMA, **change}).blocks)

    assert windows(model_type="mistral", sliding_window=32) == (32,) * 4
    assert windows(model_type="mistral", sliding_window=None) == (None,) * 4
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows(model_type="qwen2", sliding_window=32, layer_types=kinds) == (32, None, 32, None)
    # Heads of blocks without a window.
    for shared in (False, True):
        stated = {"attention_k_eq_v": shared, "global_head_dim": 32, "num_global_key_value_heads": 1}
        config = ModelConfig.from_dict({**LLAMA, **GEMMA4, **stated})
        expected = [(16, 2), (32, 1 if shared else 2)] * 2
        assert [(block.head_dim, block.num_kv_heads) for block in config.blocks] == expected
        assert [block.shared_values for block in config.blocks] == [False, shared] * 2
        assert [rope.rotary_dim for rope in config.rotaries] == [32, 16]
        own = {"head_dim": 32} | ({"num_key_value_heads": 1} if shared else {})
        by_block = {"attention_k_eq_v": shared, "per_layer_config": {"01": own, "3": own}}
        assert ModelConfig.from_dict({**LLAMA, **GEMMA4, **by_block}).blocks == config.blocks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llamma"}, "did you mean 'llama'"),
        ({"model_type": None}, "unsupported architecture"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder"),
        (
            {**GEMMA4, "hidden_size_per_layer_input": 8},
            "vocab_size_per_layer_input: expected vocab_size .*, found None",
        ),
        ({**GEMMA4, "num_kv_shared_layers": 4}, r"num_kv_shared_layers: expected fewer than num_hidden_layers \(4\)"),
        ({**GEMMA4, "num_kv_shared_layers": 3}, "layer_types: expected a block of full_attention before block 1,"),
        ({**GEMMA4, "num_kv_shared_layers": 2, "per_layer_config": {"3": {"num_key_value_heads": 1}}}, "in block 3, f"),
        ({**GEMMA4, "num_kv_shared_layers": "2"}, "num_kv_shared_layers: expected 0 or a positive integer, found '2'"),
        ({**GEMMA4, "enable_moe_block": True}, "num_experts: expected a positive integer"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "is an encoder"),
        ({**GEMMA4, "per_layer_config": []}, "per_layer_config: expected an object, found"),
        ({**GEMMA4, "per_layer_config": {"9": {}}}, "per_layer_config: expected blocks, found '9'"),
        ({**GEMMA4, "per_layer_config": {"1": {"hidden_size": 3}}}, "expected head_dim and num_key_value_heads"),
        ({**GEMMA4, "per_layer_config": {"0": {"head_dim": 6}}}, "expected one head_dim for blocks of a kind"),
        ({**GEMMA4, "global_head_dim": 7}, "even"),
        (
            {"model_type": "brand_new"},
            "model_type 'brand_new': expected a known one; the nearest known ones",
        ),  # near to no other name
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' or 'gelu_pytorch_tanh'"),
        (
            {"model_type": "qwen3_5_text", "hidden_act": "gelu_pytorch_tanh", "layer_types": ["full_attention"] * 4},
            "hidden_act: expected 'silu', found",
        ),
        ({"model_type": "gemma", "hidden_act": "relu"}, "hidden_act: expected 'silu' or 'gelu_pytorch_tanh' or 'gelu'"),
        ({"hidden_size": -1}, "hidden_size: expected a positive integer, found -1"),
        ({"hidden_size": 2**60}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "expected a multiple of num_key_value_heads"),
        ({"head_dim": 3}, "even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "rotary scaling"),
        ({"rope_parameters": [1]}, "rope_parameters: expected an object"),
        ({"rope_parameters": None, "rope_theta": 1e4}, "rope_parameters: expected an object, found None"),
        ({"model_type": "qwen2"}, "layer_types: expected 4 entries, found None"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3 + ["x"]}, "layer_types: expected sliding_att"),
        ({"model_type": "ernie4_5", "rms_norm_eps": None}, "rms_norm_eps: expected a small number, found None"),
        ({**GEMMA2, "final_logit_softcapping": None}, "query_pre_attn_scalar: expected a positive number, found None"),
        ({**GEMMA4, "final_logit_softcapping": ...}, "softcapping: expected a number or null, found no such key"),
        ({"model_type": "qwen2", "sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.from_dict({key: value for key, value in {**LLAMA, **change}.items() if value is not ...})


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_keys = [*LLAMA, "head_dim", "sliding_window", "layer_types", "dtype"]
_keys += ["per_layer_config", "global_head_dim", "attention_k_eq_v", "hidden_size_per_layer_input"]
_keys += ["num_kv_shared_layers"]


@given(change=st.dictionaries(st.sampled_from(_keys), JUNK, max_size=3), model_type=st.sampled_from([*ARCHITECTURES]))
def test_any_config_is_read_or_refused(change: dict[str, Any], model_type: str) -> None:
    try:
        config = ModelConfig.from_dict({**LLAMA, **GEMMA4, "model_type": model_type, **change})
    except UnsupportedModelError:
        return
    assert all(projection.num_parameters > 0 for projection in config.projections(0))


@pytest.mark.parametrize(
    "value", ["a" * 5000, ["a" * 5000], {"a" * 5000: 1}, 10**4000], ids=["text", "list", "object", "number"]
)
def test_a_refusal_is_one_sentence_whatever_was_found(value: object) -> None:
    keys = [*LLAMA, "tie_word_embeddings", "head_dim", "attention_bias", "sliding_window"]
    keys += ["original_max_position_embeddings", "partial_rotary_factor"]
    messages = []
    for key in keys:
        for change in ({key: value}, {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, key: value}}):
            try:
                ModelConfig.from_dict(LLAMA | change)
            except UnsupportedModelError as error:
                messages.append(str(error))
    assert len(messages) > len(keys)
    assert max(map(len, messages)) < 420


FOLDERS = {
    "adapter_config.json adapter_model.safetensors": "is a LoRA (PEFT) adapter of 'org/base', not a whole model: merge",
    "config.json adapter_config.json adapter_model.safetensors": "is a LoRA (PEFT) adapter of 'org/base'",
    "model_index.json": "is a diffusers pipeline",
    "modules.json model.safetensors": "is a sentence-transformers model",
    "model-Q4_K_M.gguf README.md": "is GGUF files, llama.cpp's format: give one of the files",
    "params.json consolidated.00.pth": "is weights in Meta's or Mistral's own layout",
    "model.onnx": "is an ONNX export",
    "tf_model.h5": "is a TensorFlow, Keras or JAX model",
    "train.parquet": "is a data set, not a model; text to calibrate on goes to --calibration",
    "model.safetensors tokenizer.json": "is weights without config.json",
    "snapshots/abc/config.json": "is the Hub's cache of a model",
    "checkpoint-100/config.json checkpoint-200/config.json": "is a training run, not a model: give one of the 2 inside",
    "": "is an empty folder: give a folder with config.json",
    "notes.txt": "is no model: config.json is missing",
}
# Of other blocks than the table's rows can say.
DENSE = ("gpt2", "olmo", "nanochat", "lara_mini", "cohere2", "apertus")


@pytest.mark.parametrize("names", FOLDERS)
def test_a_folder_that_is_no_model(tmp_path: Path, names: str) -> None:
    folder = tmp_path / "some folder"
    folder.mkdir()
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(UnsupportedModelError) as caught:
        wisparse.convert(folder, tmp_path / "out")
    assert str(caught.value).startswith(f"{folder} {FOLDERS[names]}")  # named as it was typed
    with pytest.raises(BundleError, match=r"with wisparse\.json, found .*; make one with wisparse-convert MODEL$"):
        wisparse.load(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.gguf", "is a GGUF file, llama.cpp's format: make a bundle of it"),
        ("model.safetensors", "is a file of weights: give the folder that it lies in"),
        ("model.onnx", "is an ONNX file"),
        ("model.tar.gz", "is an archive: unpack it"),
        ("config.json", "is a file: give the folder that it lies in"),
        ("model", "is a file, not a folder: give a folder with config.json"),
    ],
)
def test_a_file_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("x")
    with pytest.raises(AccessError) as caught:
        fetch_source(name)  # as a relative name it has the spelling of a Hub id
    assert str(caught.value).startswith(f"'{name}' {words}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"model_type": name}, "mixture-of-experts") for name in ("dbrx", "hy_v3", "deepseek_v4", "zaya")),
        ({"model_type": "brand_new", "num_experts": 64}, "'brand_new' is a mixture-of-experts model"),
        ({"model_type": "bert"}, "an encoder, which writes no text"),
        ({"model_type": "t5"}, "an encoder-decoder model"),
        ({"model_type": "brand_new", "is_encoder_decoder": True}, "an encoder-decoder model"),
        *(({"model_type": name}, "recurrent or state-space") for name in ("mamba2", "falcon_h1", "olmo_hybrid")),
        ({"model_type": "whisper"}, "a model of speech, sound or pictures"),
        ({"model_type": "qwen2_5_vl"}, "a model of pictures and text together"),
        ({"model_type": "brand_new", "vision_config": {}}, "a model of pictures and text together"),
        *(({"model_type": name}, "a dense decoder whose blocks are put together in another way") for name in DENSE),
        ({"model_type": "lama"}, "(did you mean 'llama'?)"),
    ],
)
def test_other_families_are_refused_by_what_they_are(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dict(tiny_config() | changes)
    assert str(caught.value).startswith("unsupported architecture: ")
    assert words in str(caught.value)
    assert "the nearest known ones are " in str(caught.value)
    assert ("did you mean" in str(caught.value)) == (changes["model_type"] == "lama")


def test_no_supported_family_is_named_among_the_refused() -> None:
    """A row that is added takes its family off the list of those that need more than a row."""
    assert [name for name in ARCHITECTURES if " is " in why_refused({}, name, ()).partition(";")[0]] == []


def test_every_causal_model_of_transformers_is_a_row_or_refused_by_what_it_is() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = (*ARCHITECTURES, *WRAPPERS)
    others = {name: why_refused({}, name, known) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in known}
    assert len(others) > 100
    assert [name for name, why in others.items() if not why.startswith(f"model_type {name!r} is ")] == []


def test_the_page_of_models_has_every_row_and_what_runs_it() -> None:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    lines = re.findall(r"^\| (`.*?) \|(.*)\|$", page, re.MULTILINE)
    cells = {name: row.split("|") for names, row in lines for name in re.findall(r"`(\w+)`", names)}
    assert cells.keys() == ARCHITECTURES.keys() | WRAPPERS.keys()
    runs: dict[str, set[str]] = {}
    for model_type, settings in {**VARIANTS, **HYBRIDS, **EXPERTS}.values():
        sizes = {"vocab_size": 101, "vocab_size_per_layer_input": 101, "hidden_size": 64, "intermediate_size": 112}
        sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = ModelConfig.from_dict(full_config({**sizes, **settings, "model_type": model_type}))
        lacks_heads = {"vllm"} if config.architecture.full_heads else set()  # of another width in some blocks
        found = {one for one in ("triton", "onnx", "vllm") if not_yet(config, one) is None} - lacks_heads
        runs[model_type] = runs.get(model_type, set()) | found
    stated = dict(zip(("triton", "onnx", "vllm"), (2, 3, 4), strict=True))
    for model_type in (one for one in ARCHITECTURES if not release_refusal(one)):
        row = {one for one, column in stated.items() if cells[model_type][column].strip() == "yes"}
        assert row == runs[model_type], model_type


def test_errors_name_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path / "up" / "model")
    write_tiny_bundle(tmp_path / "up" / "bundle", tmp_path / "up" / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"^up/bundle: already a sparse bundle"):
        wisparse.convert("up/bundle", "out")
    with pytest.raises(BundleError, match=r"^up/model: expected a bundle, .* make one with wisparse-convert up/model$"):
        wisparse.load("up/model")
    assert shown("/cache/models--org--name/snapshots/0123abc") == "org/name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' stands there twice"),
        *((text, "expected JSON") for text in (b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"")),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "expected at most 32 levels"),
        (b'{"a": NaN}', "expected finite numbers, found NaN"),
        *((text, "expected finite numbers") for text in (b'{"a": -Infinity}', b'{"a": 1e999}')),
        (b'{"\xff": 1}', "expected UTF-8, found a wrong byte at 2"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'"text"', "expected a JSON object, found str"),
    ],
)
def test_json_that_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        parse_json(text, "it", BundleError)


def test_a_text_of_many_commas_is_json() -> None:
    prompt = "," * 1_000_000
    assert parse_json(json.dumps({"prompt": prompt}).encode(), "it", BundleError) == {"prompt": prompt}
    assert len(parse_json(b'{"ids": [' + b"1," * 600_000 + b"1]}", "it", BundleError)["ids"]) == 600_001
