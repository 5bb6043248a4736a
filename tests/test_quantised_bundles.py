"""Bundles whose dense weights are quantised: their bytes are the source's, and every program computes the same."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from bundle_maker import cpu_decoder
from click.testing import CliRunner
from quantised_models import PUBLISHED, quantise_model
from runtime_models import make_checkpoint
from safetensors.torch import load_file
from tiny_bundle import VOCAB, byte_tokenizer, tiny_config, write_tiny_bundle, write_tiny_model

from wisparse.commands.export_onnx import command as export_onnx
from wisparse.converter.source import load_source
from wisparse.formats.bundle import Bundle, verify_bundle
from wisparse.formats.errors import UsageError

BY_TRANSFORMERS = ["pack int4 groups", "pack int8 rows", "fp8 rows"]
Made = Callable[[str], tuple[Path, Path]]
TOKENS = torch.tensor([5, 17, 250, 3, 99, 101, 7, 7, 30, 31])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Source and bundle by the name of what the source's weights are stored as; each is made once."""
    folder = tmp_path_factory.mktemp("quantised")
    config = tiny_config(tie_word_embeddings=False)
    plain = write_tiny_model(folder / "plain", config)

    def make(name: str) -> tuple[Path, Path]:
        source = quantise_model(plain, folder / name / "source", *PUBLISHED[name]())
        return source, write_tiny_bundle(folder / name / "bundle", source)

    return cache(make)


def logits(bundle: Path, backend: str) -> torch.Tensor:
    """After each of `TOKENS`, all of them dense."""
    decoder = cpu_decoder(Bundle.open(bundle), backend, max_seq_len=64)
    found = torch.stack([decoder.prefill(0, TOKENS[:count], count).clone() for count in range(1, len(TOKENS) + 1)])
    decoder.close()
    return found


@pytest.mark.parametrize("name", [*BY_TRANSFORMERS, "gptq", "awq", "fp8 blocks, as DeepSeek's"])
def test_stored_tensors_are_the_sources_bytes(name: str, made: Made) -> None:
    source, bundle = made(name)
    stored, kept = load_file(source / "model.safetensors"), {}
    for file in bundle.glob("model-*.safetensors"):
        kept |= load_file(file)
    assert set(stored) == set(kept)
    for key, tensor in stored.items():
        assert tensor.dtype is kept[key].dtype
        assert torch.equal(tensor.view(-1).view(torch.uint8), kept[key].view(-1).view(torch.uint8))
    verify_bundle(bundle)


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks, as DeepSeek's"])
def test_latents_are_made_by_dequantised_weights(name: str, tmp_path: Path) -> None:
    plain = make_checkpoint("deepseek-v3", tmp_path / "plain", vocab_size=VOCAB)
    byte_tokenizer().save(str(plain / "tokenizer.json"))
    source = quantise_model(plain, tmp_path / "source", *PUBLISHED[name]())
    bundle = write_tiny_bundle(tmp_path / "bundle", source)
    stored = Bundle.open(bundle).checkpoint.quantised
    assert "model.layers.1.self_attn.kv_b_proj.weight" in stored
    with torch.inference_mode():
        expected = load_source(source, torch.float32, "cpu").model(TOKENS[None]).logits[0]
    for backend in ("torch", "numba"):
        torch.testing.assert_close(logits(bundle, backend), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*BY_TRANSFORMERS, "pack int4 groups, zero points", "gptq", "awq"])
def test_back_ends_the_converters_model_and_transformers_agree(name: str, made: Made) -> None:
    from transformers import AutoModelForCausalLM

    source, bundle = made(name)
    models = [(load_source(source, torch.float32, "cpu").model, {"rtol": 1e-4, "atol": 1e-5})]
    if name in BY_TRANSFORMERS:
        theirs = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32).eval()
        models.append((theirs, {"rtol": 1e-5, "atol": 1e-5}))
    for model, tolerance in models:
        with torch.inference_mode():
            expected = model(TOKENS[None]).logits[0]
        torch.testing.assert_close(logits(bundle, "torch"), expected, **tolerance)
        torch.testing.assert_close(logits(bundle, "numba"), expected, rtol=1e-4, atol=1e-5)


def test_what_a_quantised_model_cannot_be(made: Made, tmp_path: Path) -> None:
    source, _ = made("gptq")
    with pytest.raises(UsageError, match="expected auto for a quantised model"):
        write_tiny_bundle(tmp_path / "out", source, dtype="bfloat16")
    # ``--weights fp8`` is refused where nothing multiplies with it.
    opened = Bundle.open(made("gptq")[1])
    with pytest.raises(UsageError, match="no back end can run this model on cpu: numba cannot: it has no fp8 weights;"):
        cpu_decoder(opened, "auto", max_seq_len=8, weights="fp8")


def test_an_onnx_export_is_widened_and_says_so(made: Made, tmp_path: Path) -> None:
    """The command itself compares the result with our runtime."""
    pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    pytest.importorskip("onnx", reason="needs the onnx extra")
    _, bundle = made("gptq")
    result = CliRunner().invoke(export_onnx, [str(bundle), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "agrees with our runtime" in result.output
    assert "note: the bundle's int4 weights are widened to float32" in result.stderr
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
