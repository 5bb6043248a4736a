"""A rotated model says what its source says, in other numbers; what cannot be turned is left alone, or refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runtime_models import SMALL, VARIANTS
from safetensors.torch import load_file, save_file
from test_every_family import hugging_face, make_source
from tiny_bundle import VOCAB

from wisparse import ResourceError, UnsupportedModelError, convert, load
from wisparse.converter.calibration import CalibrationTokens
from wisparse.converter.config import full_config
from wisparse.converter.masking import MaskedModel
from wisparse.converter.preflight import preflight
from wisparse.converter.rotation import find_rotation, rotate
from wisparse.converter.settings import ConvertSettings
from wisparse.converter.source import SourceModel, load_source
from wisparse.formats.architectures import ARCHITECTURES
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import Checkpoint


def _is_fixed(kind: str) -> bool:
    arch = ARCHITECTURES[kind]
    return bool(arch.attention_gate or arch.recurrent or arch.latent)


FIXED = [name for name, (kind, _) in VARIANTS.items() if _is_fixed(kind)]
# Tied, with biases, fused, with fewer key-value heads, with norms of 1 + weight, with multipliers; all others repeat these.
QUICK = ("llama-tied", "llama-bias", "llama-head-dim", "phi3", "gemma", "granite", "qwen3", "ernie")
# Norms after attention and MLP, also or only; a norm of values, heads of two widths and values that are keys too.
FITTED = ("gemma3", "glm4", "olmo2", "exaone4", "gemma4")
# The values of heads alone: an output layer that has to be the embedding; keys and values of other blocks.
QUICK += (*FITTED, "gemma2", "gemma4-small")
TURNED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive)
    for name in (*VARIANTS, *SMALL)
    if name not in FIXED
]
TURNED += [
    "lfm2-bias",
    "qwen2-moe",
    "gemma4-moe",
    "granite-moe",
    "gpt-oss",
    "flint",
]  # a recurrent mixer; a shared expert behind a gate; experts beside an MLP, in one tensor of two kinds; sinks by another name


def opened(folder: Path) -> tuple[SourceModel, Checkpoint]:
    return load_source(folder, device="cpu"), Checkpoint.open(folder, complete=full_config)


@pytest.mark.parametrize("variant", TURNED)
def test_a_turned_model_says_the_same(variant: str, tmp_path: Path) -> None:
    """The model in memory, and the bundle that is written of it, read by transformers and by the runtime. Norms after attention
    and MLP have equal weights, with which they too can be rotated."""
    folder = make_source(variant, tmp_path / "source")
    set_output_norms(folder, lambda shape: torch.full(shape, 0.7))
    source, checkpoint = opened(folder)
    calibration = CalibrationTokens.from_rows(_rows(2), "numbers", 1)
    tokens = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = hugging_face(folder)(tokens, use_cache=False).logits
        turned, made, record = rotate(source, checkpoint, calibration, lambda: calibration)
        found = turned.model(tokens, use_cache=False).logits
    assert expected.abs().max() > 1, "logits this small would hide any difference"
    assert (found - expected).abs().max() < 1e-3
    fixed = checkpoint.config.fixed_hidden
    kind = "heads" if fixed else "fitted" if checkpoint.config.fitted_hidden else "pca"
    assert (record.kind, record.num_tokens) == (kind, 24)
    assert record.kl < 1e-6
    outputs = [f"{one.name}.weight" for one in made.config.projections() if one.role == "o_proj"]
    assert not all(torch.allclose(checkpoint.tensor(name), made.tensor(name), atol=0.1) for name in outputs)
    assert made.config.tie_word_embeddings == (fixed and checkpoint.config.tie_word_embeddings)
    assert fixed == torch.equal(checkpoint.tensor(made.config.embedding), made.tensor(made.config.embedding))
    written = load_source(_copy_of(made, folder, tmp_path / "copy"), device="cpu").model
    with torch.no_grad():
        assert torch.equal(written(tokens, use_cache=False).logits, found)


def set_output_norms(folder: Path, make: Callable[[torch.Size], torch.Tensor]) -> None:
    """Give the norms after attention and MLP these factors."""
    config, file = Checkpoint.open(folder, complete=full_config).config, folder / "model.safetensors"
    tensors, offset = load_file(file), float(config.architecture.norm_offset)
    ends = tuple(f".{one}.weight" for one in (config.norms.attention_output, config.norms.mlp_output) if one)
    for name in tensors:
        if name.endswith(ends):
            tensors[name] = make(tensors[name].shape) - offset
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("variant", FITTED)
def test_norms_are_fitted(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense model is near its source, and nearer than with the best equal factors."""
    folder, generator = make_source(variant, tmp_path / "source"), torch.Generator().manual_seed(3)
    set_output_norms(folder, lambda shape: 0.7 * (1 + 0.2 * torch.randn(shape, generator=generator)))
    tokens = CalibrationTokens.from_rows(_rows(32), "numbers", 1)
    fitted = rotate(*opened(folder), tokens, lambda: tokens)[2]
    monkeypatch.setattr("wisparse.converter.rotation._FIT_STEPS", 0)
    equal = rotate(*opened(folder), tokens, lambda: tokens)[2]
    assert (fitted.kind, fitted.rejected_kl) == ("fitted", None)
    assert fitted.kl < 0.9 * equal.kl < 0.005, f"fitted {fitted.kl:.2g}, equal {equal.kl:.2g}"


@pytest.mark.usefixtures("quick_conversion")
def test_norms_that_cannot_be_fitted(tmp_path: Path) -> None:
    """The heads' values alone are rotated, embeddings stay tied, and the card says why."""
    folder, generator = make_source("gemma3", tmp_path / "source"), torch.Generator().manual_seed(3)
    set_output_norms(folder, lambda shape: torch.randn(shape, generator=generator).exp())
    tokens = CalibrationTokens.from_rows(_rows(2), "numbers", 1)
    source, made, record = rotate(*opened(folder), tokens, lambda: tokens)
    assert record.kind == "heads"
    assert record.kl < 1e-6
    assert record.rejected_kl > 0.005
    assert made.config.tie_word_embeddings
    assert source.model.get_output_embeddings().weight is source.model.get_input_embeddings().weight
    assert source.model.config.tie_word_embeddings
    expected = hugging_face(folder)(tokens.input_ids, use_cache=False).logits
    assert (source.model(tokens.input_ids, use_cache=False).logits - expected).abs().max() < 1e-3
    out = convert(folder, tmp_path / "out", sparsity=0.5, search="fisher", num_samples=2, seq_len=24, device="cpu")
    rotation = Bundle.open(out).recipe.rotation
    assert rotation.kind == "heads"
    assert f"would give KL {rotation.rejected_kl:.2g}" in (out / "README.md").read_text("utf-8")


def _rows(count: int) -> list[list[int]]:
    return torch.randint(3, VOCAB, (count, 24), generator=torch.Generator().manual_seed(2)).tolist()


def _copy_of(checkpoint: Checkpoint, source: Path, out: Path) -> Path:
    out.mkdir()
    for file in source.iterdir():
        if file.name.startswith("tokenizer"):
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(checkpoint.config_dict))
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_directions_are_principal(tmp_path: Path) -> None:
    """Turned, what a block's o_proj reads has no correlations within a group of heads, nor has the hidden state."""
    folder = make_source("qwen2", tmp_path / "source")
    source, checkpoint = opened(folder)
    rows = torch.randint(3, VOCAB, (4, 48), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = CalibrationTokens.from_rows(rows, "numbers", 1)
    rotation = find_rotation(source, checkpoint, tokens)
    seen: dict[str, list[torch.Tensor]] = {}
    first: dict[str, torch.Tensor] = {}

    def note(name: str, x: torch.Tensor) -> None:
        seen.setdefault(name, []).append(x[:, 1:].flatten(0, 1))
        first[name] = x[:, 0]

    with MaskedModel(source.projections) as masked, masked.during(observer=note), torch.no_grad():
        source.model(input_ids=tokens.input_ids, use_cache=False)
    x = torch.cat(seen["model.layers.1.self_attn.o_proj"]).view(-1, 2, 2, 16).double()
    for group, turn in enumerate(rotation.heads[1].double()):
        turned = (x[:, group].flatten(0, 1) @ turn).T
        moments = turned @ turned.T
        assert (moments - moments.diag().diag()).abs().max() < 1e-4 * moments.diag().max()
    total = torch.zeros(64, 64, dtype=torch.float64)
    for index in range(3):
        for name, norm in (("self_attn.q_proj", "input_layernorm"), ("mlp.gate_proj", "post_attention_layernorm")):
            prefix = f"model.layers.{index}."
            # The first of 48 tokens counts as a 32nd of them, and not among the values.
            x = torch.cat([*seen[prefix + name], first[prefix + name] * (48 / 32) ** 0.5])
            x = x / checkpoint.tensor(f"{prefix}{norm}.weight").float()
            total += x.double().T @ x.double()
    moments = rotation.residual.double().T @ total @ rotation.residual.double()
    assert (moments - moments.diag().diag()).abs().max() < 1e-4 * moments.diag().max()


@pytest.mark.parametrize("variant", ["glm4-moe-lite", "muse-glimmer", "qwen3.5"])
def test_what_ties_a_model_to_its_coordinates(variant: str, tmp_path: Path) -> None:
    """Asked for, it is refused; ``auto`` leaves it alone and says why."""
    source = make_source(variant, tmp_path / "source")
    settings = ConvertSettings(str(source), tmp_path / "out", num_samples=1, seq_len=16, device="cpu")
    plan = preflight(settings)
    assert plan.settings.rotation == "none"
    assert "coordinates" in str(plan.not_rotated)
    with pytest.raises(UnsupportedModelError, match=r"--rotation pca: .* to (its|their) coordinates"):
        preflight(replace(settings, rotation="pca"))


def test_what_auto_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source("llama-tied", tmp_path / "source")
    settings = ConvertSettings(str(source), tmp_path / "out", num_samples=1, seq_len=16, device="cpu")
    plan, config = preflight(settings), Checkpoint.open(source, complete=full_config).config
    assert (plan.settings.rotation, plan.not_rotated) == ("pca", None)
    assert plan.extra_embedding_bytes == config.vocab_size * config.hidden_size * 4
    bare = preflight(replace(settings, rotation="none"))
    assert (bare.settings.rotation, bare.not_rotated, bare.extra_embedding_bytes) == ("none", None, 0)
    assert plan.bundle_bytes - bare.bundle_bytes == plan.memory_bytes - bare.memory_bytes == plan.extra_embedding_bytes
    for changes, why in (({"method": "teal"}, "--method teal"), ({"sparsity": (0.0,)}, "nothing")):
        other = preflight(replace(settings, **changes))
        assert other.settings.rotation == "none"
        assert why in str(other.not_rotated)
        assert preflight(replace(settings, rotation="pca", **changes)).settings.rotation == "pca"
    monkeypatch.setattr("wisparse.converter.preflight.available_bytes", lambda device: bare.memory_bytes)
    tight = preflight(settings)
    assert (tight.settings.rotation, tight.max_memory) == ("none", None)
    assert "does not fit" in str(tight.not_rotated)
    with pytest.raises(ResourceError, match="cannot be rotated; choose a larger device, or --rotation none"):
        preflight(replace(settings, rotation="pca"))


DAMAGES = {"norms": "rotated, the model is .* --rotation none"}
DAMAGES["large weights"] = r"lm_head.weight: .* beyond torch.float16's range"


@pytest.mark.parametrize(("damage", "words"), DAMAGES.items())
def test_a_changed_model_is_refused(damage: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_source("llama", tmp_path / "source")
    if damage == "norms":
        monkeypatch.setattr("wisparse.converter.rotation.norm_factors", lambda *_: torch.full((64,), 3.0))
    else:
        tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
        tensors["lm_head.weight"].fill_(60000.0)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokens = CalibrationTokens.from_rows(_rows(2), "numbers", 1)
    with pytest.raises(UnsupportedModelError, match=words):
        rotate(*opened(folder), tokens, lambda: tokens)


@pytest.mark.usefixtures("quick_conversion")
@pytest.mark.parametrize("weights", ["native", "int8"])
def test_a_conversion_turns_first(weights: str, tmp_path: Path) -> None:
    """The bundle is the rotated model: masked at 0 it says what the source says, and its recipe says what was done."""
    folder = make_source("llama-tied", tmp_path / "source")
    common = {"sparsity": [0.0, 0.5], "search": "fisher", "num_samples": 2, "seq_len": 24, "device": "cpu"}
    out = convert(folder, tmp_path / "out", weights=weights, **common)
    rotation = Bundle.open(out).recipe.rotation
    assert rotation.kind == "pca"
    assert "rotation of the weights: pca" in (out / "README.md").read_text("utf-8")
    prompt = _rows(1)[0]
    with load(out, dtype="float32", backend="torch", sparsity=0.0) as model, torch.no_grad():
        expected = hugging_face(folder)(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        found = model.decoder.prefill(0, torch.tensor(prompt), len(prompt))
    assert (found - expected).abs().max() < (1e-3 if weights == "native" else 0.2 * expected.abs().max())
    bare = convert(folder, tmp_path / "bare", rotation="none", **common)
    assert Bundle.open(bare).recipe.rotation is None
    before, after = Checkpoint.open(folder, complete=full_config), Bundle.open(bare).checkpoint
    for name in after.tensors:
        assert torch.equal(before.tensor(name), after.tensor(name))
