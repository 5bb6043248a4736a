"""The source's configuration, tokenizer and weights: loaded as transformers has them, or refused in one sentence."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import make_source
from hypothesis import example, given
from hypothesis import strategies as st
from quantised_models import change_config, change_tensors
from runtime_models import EXPERTS, make_checkpoint
from runtime_models import WRAPPERS as TINY
from safetensors.torch import load_file, save_file
from test_formats_architectures import JUNK
from tiny_bundle import CLASSES, tiny_config, write_tiny_model
from tokenizers import Tokenizer

from wisparse.converter.config import full_config, release_refusal
from wisparse.converter.source import choose_dtype, float32_by_onednn, load_source, weights_of
from wisparse.converter.tokenizer import load_tokenizer
from wisparse.formats.architectures import ARCHITECTURES, MIXERS, WRAPPERS, text_name
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import PER_LAYER_EMBEDDING, expected_tensors


def test_float32_products_by_onednn_are_float32() -> None:
    setting, x = torch.backends.mkldnn.matmul, torch.rand(512, 576, generator=torch.Generator().manual_seed(1))
    before, weight = setting.fp32_precision, torch.rand(192, 576, generator=torch.Generator().manual_seed(2))
    exact = x.double() @ weight.double().T
    with float32_by_onednn():
        product = torch.nn.functional.linear(x, weight)
    assert setting.fp32_precision == before
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=0.0)  # of bfloat16 inputs it would be 1e-3 off


def test_weights_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tiny_config(dtype="bfloat16"), dtype=torch.bfloat16, shards=3)
    source = load_source(folder, device="cpu")
    assert source.dtype == torch.float32  # a CPU computes in float32 whatever the file holds
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert list(source.projections) == [projection.name for projection in source.config.projections()]
    for name, module in source.projections.items():
        assert torch.equal(module.weight, stored[name + ".weight"].float())
    model = source.model
    assert (model.training, model.config.use_cache, model.config._attn_implementation) == (False, False, "sdpa")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert load_source(folder, torch.bfloat16, "cpu").dtype == torch.bfloat16
    for dtype in ("float16", "bfloat16"):
        assert choose_dtype(dtype, torch.device("cuda")) == getattr(torch, dtype), "on a GPU that of the source"
        assert choose_dtype(dtype, torch.device("cpu")) == torch.float32


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    """What headers and configurations show is in tests/test_formats_checkpoint.py."""
    weight = load_file(write_tiny_model(tmp_path) / "model.safetensors")[O_PROJ]
    for value in (math.nan, math.inf):
        weight[3, 2] = value
        change_tensors(tmp_path, lambda tensors: tensors.update({O_PROJ: weight}))
        with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.o_proj\.weight holds NaN or Inf"):
            load_source(tmp_path, device="cpu")
    write_tiny_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        load_source(tmp_path, device="cpu")
    change_config(tmp_path, lambda config: config.update(model_type="gpt2"))
    with pytest.raises(
        UnsupportedModelError, match=r"gpt2.*the nearest known ones are \w+, \w+, \w+; docs/models.md has all"
    ):
        load_source(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json: expected JSON"):
        load_source(tmp_path, device="cpu")


@pytest.mark.parametrize("model_type", CLASSES)
def test_tokenizer_json_is_taken_literally(model_type: str, example_model: Path, tmp_path: Path) -> None:
    # transformers chooses a class by model_type; for qwen2 that class splits numbers into single digits.
    for file in example_model.glob("*.json"):
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    text = ">>> 12 + 30\n42\n>>> sorted([11, 6, 100])\n"
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.encode(text), tokenizer.decode(expected), tokenizer.eos_token_id) == (expected, text, 0)


# As published, without the vision tower's settings.
MISTRAL_SMALL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "text_config": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "bos_token_id": 151643, "eos_token_id": 151645,
    "vision_start_token_id": 151652, "image_token_id": 151655, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
    "max_position_embeddings": 128000, "max_window_layers": 70, "model_type": "qwen2_5_vl", "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False, "vision_config": {"depth": 32},
    "vocab_size": 151936,
}  # fmt: skip


def test_published_configs_are_read() -> None:
    found = full_config(MISTRAL_SMALL)
    assert (found["model_type"], found["architectures"]) == ("mistral", ["MistralForCausalLM"])
    config = ModelConfig.from_dict(found)
    assert (config.num_blocks, config.q_size(0), config.rotaries[0].theta, config.dtype) == (40, 4096, 1e9, "bfloat16")
    assert {block.window for block in config.blocks} == {None}
    found = full_config(GEMMA)
    config = ModelConfig.from_dict(found)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert [rope.rope_type for rope in config.rotaries] == ["linear", "default"]
    assert found["eos_token_id"] == [1, 106]
    found = full_config(QWEN)
    config = ModelConfig.from_dict(found)
    assert (found["model_type"], config.num_blocks, config.qkv_bias, config.o_bias) == ("qwen2", 36, True, False)
    assert config.tie_word_embeddings
    assert config.rotaries[0].theta == 1e6
    assert not [word for word in ("mrope", "vision") if word in json.dumps(found)]
    # Another scaling of positions stays.
    scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    found = full_config({**QWEN, "rope_scaling": {**scaling, "mrope_section": [16, 24, 24]}})
    assert found["rope_scaling"] == scaling
    # Older spellings stay beside the new ones.
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    source = {"model_type": "llama", "torch_dtype": "bfloat16", "eos_token_id": [7, 8], "num_labels": 3}
    source |= {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    found = full_config(source)
    assert found.items() >= source.items()
    assert found["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    assert found["dtype"] == "bfloat16"
    assert "bos_token_id" not in found


@pytest.mark.parametrize(
    "model_type",
    [one for one in (*ARCHITECTURES, *WRAPPERS) if not any(map(release_refusal, WRAPPERS.get(one, [one])))],
)
def test_keys_left_out_mean_what_they_mean_to_transformers(model_type: str) -> None:
    """Every field is stated, in the spelling that is read, and a bundle of the result is read by transformers alike."""
    from transformers import AutoConfig

    source: dict[str, Any] = {"model_type": model_type, "num_hidden_layers": 7, "num_attention_heads": 160}
    source |= {"hidden_size": 320, "use_sliding_window": model_type != "iquestcoder", "max_window_layers": 3}
    source |= {"hidden_size_per_layer_input": 0, "head_dim": 8} if "gemma4" in model_type else {}
    source |= {  # without these transformers' own default cannot run, or is refused
        "lfm2_moe": {"layer_types": ["conv"] * 6 + ["full_attention"]},
        "glm4_moe": {"head_dim": 8},
        "granitemoehybrid": {"num_local_experts": 0},
        "afmoe": {"mup_enabled": True},
        "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
        "deepseek_v2": {"num_experts_per_tok": 2},
        "deepseek_v3": {"n_group": 1, "topk_group": 1},
    }.get(model_type, {})
    if model_type in WRAPPERS:
        inner = next(iter(WRAPPERS[model_type]))
        source = {"model_type": model_type, "text_config": {**source, "model_type": inner}}
        source["text_config"] |= {"hidden_size_per_layer_input": 0} if inner == "gemma4_text" else {}
    found = full_config(source)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "_sliding_window_pattern", "id2label"):
        assert key not in found
    config = ModelConfig.from_dict(found)
    theirs = AutoConfig.for_model(**{**found, "pad_token_id": 0})
    theirs.allow_global_per_layer_attribute_access = True  # what blocks without a word of their own have
    if model_type not in ("iquestcoder", "internlm3", "sarvam_mla"):  # transformers runs another family's class
        assert type(theirs).__name__.startswith(config.architecture.class_name.removesuffix("ForCausalLM"))
    if (latent := config.latent) is not None:
        sizes = latent.rank, latent.query_rank, latent.key_dim, latent.rotary_dim, latent.value_dim
        ranks = theirs.kv_lora_rank, theirs.q_lora_rank or 0, theirs.qk_nope_head_dim
        assert sizes == (*ranks, theirs.qk_rope_head_dim, theirs.v_head_dim)
    else:
        assert config.num_kv_heads == (theirs.num_key_value_heads or theirs.num_attention_heads)
        assert config.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert (config.rms_norm_eps, config.vocab_size) == (getattr(theirs, config.architecture.eps), theirs.vocab_size)
    kinds = ("full_attention", "sliding_attention") if config.architecture.local_rope else (None,)
    kinds = () if config.architecture.unrotated == "all" else kinds
    ropes = [theirs.rope_parameters[kind] if kind else theirs.rope_parameters for kind in kinds]
    read = [(rope.theta, rope.rope_type) for rope in config.rotaries]
    assert not kinds or read == [(rope["rope_theta"], rope["rope_type"]) for rope in ropes]
    if (rotated := getattr(theirs, "no_rope_layers", None)) is not None:
        assert [block.rotary is not None for block in config.blocks] == [bool(one) for one in rotated]
    layers = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 7
    window = getattr(theirs, "sliding_window", None)
    windows = [window if kind == "sliding_attention" else None for kind in layers]
    assert [block.window for block in config.blocks] == windows
    assert [block.recurrent for block in config.blocks] == [kind in MIXERS for kind in layers]
    assert full_config(found) == found


@pytest.mark.parametrize(
    ("outer", "inner", "stored", "tied"),
    [
        (None, None, True, False),  # Mistral Small 3.1: transformers' own default is wrong, and the weights tell
        (False, True, False, True),  # older transformers put it inside
        (None, None, False, True), (True, None, False, True), (None, True, False, True), (True, False, True, False),
        (False, None, True, False), (True, True, True, True),
    ],
)  # fmt: skip
def test_tied_by_the_config_or_by_the_weights(outer: bool | None, inner: bool | None, stored: bool, tied: bool) -> None:
    config = {**MISTRAL_SMALL, "text_config": {**MISTRAL_SMALL["text_config"]}}
    for place, value in ((config, outer), (config["text_config"], inner)):
        if value is not None:
            place["tie_word_embeddings"] = value
    names = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if stored else set())
    assert full_config(config, names)["tie_word_embeddings"] is tied


SPELLINGS: dict[str, Callable[[str], str]] = {
    "language_model.model": lambda name: "language_model." + name,
    "model.language_model": lambda name: name.replace("model.", "model.language_model.", 1),
    "model": lambda name: name,
}


@pytest.fixture(scope="module", params=TINY)
def wrapper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(request.param, tmp_path_factory.mktemp(request.param) / "wrapper")


def respelled(folder: Path, out: Path, spelling: Callable[[str], str]) -> tuple[Path, int]:
    """A copy whose text tensors have other names, and how many others there are."""
    out.mkdir()
    tensors, others = {}, 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain = text_name(name)
        others += plain is None
        tensors[name if plain is None else spelling(plain)] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, out)
    return out, others


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tensors_are_found_under_every_published_name(spelling: str, wrapper: Path, tmp_path: Path) -> None:
    source, others = respelled(wrapper, tmp_path / "respelled", SPELLINGS[spelling])
    checkpoint = Checkpoint.open(source, complete=full_config)
    assert checkpoint.vision_tensors == others > 0
    assert list(checkpoint.tensors) == list(expected_tensors(checkpoint.config))
    stored = {text_name(name): tensor for name, tensor in load_file(wrapper / "model.safetensors").items()}
    found = load_source(source, device="cpu").model.state_dict()
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.tensor(name), stored[name])
        if name != PER_LAYER_EMBEDDING:  # it stays in its file
            assert torch.equal(found[name], stored[name])


@torch.inference_mode()
def test_the_text_model_loads_and_answers_as_the_wrapper_does(wrapper: Path) -> None:
    from transformers import AutoModelForImageTextToText

    tokens = torch.randint(3, 101, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = AutoModelForImageTextToText.from_pretrained(wrapper, dtype=torch.float32).eval()(tokens).logits
    found = load_source(wrapper, device="cpu").model(tokens).logits
    assert expected.abs().max() > 1, "logits this small would hide any difference"
    assert (found - expected).abs().max() < 1e-4


def test_a_text_model_that_stays_in_its_files_is_found_there(wrapper: Path) -> None:
    """Too large for memory: weights are read whenever they are used, under the names that they have there."""
    pytest.importorskip("accelerate")
    whole, spread = load_source(wrapper, device="cpu"), load_source(wrapper, device="cpu", max_memory={"cpu": 150_000})
    name = list(spread.projections)[-1]
    assert spread.projections[name].weight.is_meta
    assert torch.equal(spread.weight(name), whole.weight(name))


def test_two_names_for_one_tensor_are_refused(wrapper: Path, tmp_path: Path) -> None:
    source, _ = respelled(wrapper, tmp_path / "twice", SPELLINGS["model"])
    name = "model.embed_tokens.weight"
    change_tensors(source, lambda t: t.update({f"language_model.{name}": t[name].clone()}))
    with pytest.raises(UnsupportedModelError, match="the same tensor under two names"):
        Checkpoint.open(source, complete=full_config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mistral3"}, "text_config: expected an object"),
        ({"model_type": "mistral3", "text_config": {"model_type": "dbrx"}}, "inside mistral3.*mixture-of-experts"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4", "n_routed_experts": 128}}, "of-experts"),
        ({"model_type": "gemma3", "text_config": {"model_type": ["x"]}}, "inside gemma3"),
        ({"model_type": "qwen3_vl_moe", "vision_config": {}, "text_config": {"num_experts": 128}}, "of-experts"),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {"num_experts": 8}}}, "of-experts"),
        ({"model_type": "some_vlm", "vision_config": {}, "text_config": {"num_local_experts": 8}}, "of-experts"),
        ({"model_type": "paligemma", "vision_config": {}, "text_config": {"model_type": "gemma"}}, "pictures and text"),
        ({"model_type": "deepseek_v4"}, "of-experts"),
        ({"model_type": "mistrall3"}, "did you mean 'mistral3'"),
        ({**QWEN, "quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({**GEMMA, "quantization_config": {"quant_method": "awq"}}, "quantised"),
        # Before transformers makes lists of this length.
        ({"model_type": "qwen2", "num_hidden_layers": 10**12}, "num_hidden_layers: expected at most 10,000"),
    ],
)
def test_refused_by_its_right_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.from_dict(full_config(config))


def test_a_padding_token_outside_the_vocabulary_is_the_text_models() -> None:
    outer = {"model_type": "smolvlm", "pad_token_id": 128002, "eos_token_id": 7}
    sizes = {key: QWEN[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    inner = {"model_type": "llama", **sizes, "vocab_size": 49280, "pad_token_id": 2, "eos_token_id": 3}
    found = full_config({**outer, "text_config": inner})
    assert (found["pad_token_id"], found["eos_token_id"]) == (2, 7)
    found = full_config({**outer, "text_config": {**inner, "vocab_size": 128256}})
    assert found["pad_token_id"] == 128002


def test_a_family_that_an_older_transformers_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("5.9.2", "5.22.0.dev0"):
        monkeypatch.setattr("transformers.__version__", version)
        with pytest.raises(
            UnsupportedModelError, match=rf"'internlm3': expected transformers 5.23 .* found {version}; pip"
        ):
            full_config({"model_type": "internlm3"})
    monkeypatch.setattr("transformers.__version__", "5.23.0")
    assert release_refusal("internlm3") is None
    assert release_refusal("llama") is None


_keys = [*QWEN, *GEMMA, "rope_parameters", "quantization_config", "dtype"]
_changes = st.dictionaries(st.sampled_from(_keys), JUNK, max_size=3)


@example(base=MISTRAL_SMALL, change={}, inside={"rope_scaling": {"": []}})
@given(base=st.sampled_from([MISTRAL_SMALL, GEMMA, QWEN]), change=_changes, inside=_changes)
def test_any_config_is_read_or_refused(base: dict[str, Any], change: dict[str, Any], inside: dict[str, Any]) -> None:
    config = {**base, **change}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {**config["text_config"], **inside}
    for names in (None, ["lm_head.weight"], []):
        try:
            read = ModelConfig.from_dict(full_config(config, names))
        except UnsupportedModelError:
            continue
        assert all(projection.num_parameters > 0 for projection in read.projections(0))


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "qwen2"])
@torch.inference_mode()
def test_a_tied_config_beside_another_head_loads_as_in_transformers(family: str, tmp_path: Path) -> None:
    """Also where the configuration class is tied by default, and with a head that differs by its dtype alone."""
    from transformers import AutoModelForCausalLM

    folder = make_source(family, tmp_path / "source")
    change_config(folder, lambda config: config.pop("tie_word_embeddings", None) if family == "gemma2" else None)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    tokens = torch.randint(3, 101, (1, 12), generator=torch.Generator().manual_seed(0))
    for head, tied in ((embedding.roll(1, 0), False), (embedding.bfloat16(), True)):
        change_tensors(folder, lambda tensors, head=head: tensors.update({"lm_head.weight": head}))
        source = load_source(folder, device="cpu")
        assert source.config.tie_word_embeddings is tied
        assert (source.model.lm_head.weight is source.model.model.embed_tokens.weight) is tied
        if not tied:
            # Before 5.21 transformers takes torch's fused attention for Gemma 2, which cannot cap scores.
            given = {"attn_implementation": "eager"} if family == "gemma2" else {}
            expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given).eval()(tokens).logits
            assert torch.equal(source.model(tokens).logits, expected)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_loaded_models_weights_have_the_checkpoints_names(family: str, tmp_path: Path) -> None:
    """Also those that transformers renames, as GraniteMoE's routers and Flint's sinks, which a rotation writes anew."""
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(make_checkpoint(family, tmp_path), complete=full_config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = weights_of(model, checkpoint.config)
    for name in checkpoint.tensors:
        assert torch.equal(found[name].float(), checkpoint.tensor(name).float()), name
