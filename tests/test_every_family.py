"""From a checkpoint to answers, for every family: converted, verified, decoded dense and sparse like transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runtime_models import FAMILIES, HYBRIDS, WRAPPERS, make_checkpoint, make_wrapper
from safetensors import safe_open
from tiny_bundle import VOCAB, byte_tokenizer

import wisparse
from wisparse.cli import convert_main
from wisparse.converter.pipeline import convert
from wisparse.formats.bundle import Bundle
from wisparse.formats.model.architectures import ARCHITECTURES
from wisparse.formats.model.expected import expected_tensors
from wisparse.formats.verify import verify_bundle

# The default search goes backward and forward through the masked model, the other one from block to block.
SEARCHES = ("refine", "additive")
QUICK = (("gemma3", "refine"), ("granite", "refine"))
CASES = [(variant, search) for variant in (*FAMILIES, *HYBRIDS) for search in SEARCHES]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in CASES]


SMALL = ["--num-samples", "4", "--seq-len", "24", "--device", "cpu"]


def make_source(name: str, folder: Path) -> Path:
    make = make_wrapper if name in WRAPPERS and folder.name == "wrapper" else make_checkpoint
    make(name, folder, vocab_size=VOCAB)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def converted(source: Path, out: Path, search: str) -> Path:
    convert(source, out, sparsity=0.5, search=search, num_samples=4, seq_len=24, device="cpu")
    return out


def hugging_face(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def check_bundle(bundle: Path, dense: torch.nn.Module) -> None:
    """Dense logits are the source's, as ``dense`` computes them; sparse greedy tokens those of transformers, masked."""
    verify_bundle(bundle)
    tokens = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    model = wisparse.load(bundle, device="cpu", dtype="float32", backend="torch")
    expected = dense(tokens[None], use_cache=False).logits[0]
    assert expected.abs().max() > 1, "logits this small would hide any difference"
    assert (model.decoder.logits(tokens, len(tokens)) - expected).abs().max() < 1e-4
    theirs = greedy_by_transformers(wisparse.sparsify(hugging_face(bundle), bundle), tokens)
    assert greedy_by_runtime(model, tokens) == theirs
    assert (model.decoder.logits(tokens, 0) - expected).abs().max() > 0.1, "masks that change nothing show nothing"


def greedy_by_transformers(model: torch.nn.Module, tokens: torch.Tensor, count: int = 16) -> list[int]:
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens[None], **settings)[0, len(tokens) :].tolist()


def greedy_by_runtime(model: wisparse.Model, tokens: torch.Tensor, count: int = 16) -> list[int]:
    """Whatever the end of a text is: a prompt read dense, then sparse tokens."""
    found = [int(model.decoder.prefill(0, tokens, len(tokens)).argmax())]
    while len(found) < count:
        found.append(int(model.decoder.decode(torch.tensor(found[-1:]))[0].argmax()))
    return found


@pytest.mark.parametrize(("variant", "search"), CASES)
def test_a_family_is_converted_and_decoded_as_transformers_does(variant: str, search: str, tmp_path: Path) -> None:
    source = make_source(variant, tmp_path / "source")
    check_bundle(converted(source, tmp_path / "bundle", search), hugging_face(source))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3-vl" else pytest.mark.slow) for name in WRAPPERS]
)
def test_the_text_model_of_a_wrapper_is_converted_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForImageTextToText

    source, bundle = make_source(name, tmp_path / "wrapper"), tmp_path / "bundle"
    with pytest.raises(SystemExit) as exit_:
        convert_main([str(source), "-o", str(bundle), "--sparsity", "0.5", *SMALL])
    assert not exit_.value.code
    stored = safe_open(source / "model.safetensors", "pt").keys()
    # The rotation gives tied embeddings an output layer of its own.
    kept = [name for name in Bundle.open(bundle).checkpoint.tensors if not name.startswith("lm_head")]
    count = sum("lm_head" not in name for name in stored) - len(kept)
    assert count > 5
    said = f"text only: {count} tensors of the vision tower left out"
    assert said in capsys.readouterr().out
    assert said in (bundle / "README.md").read_text()
    assert Bundle.open(bundle).recipe.text_only == said
    check_bundle(bundle, AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval())
    opened = Bundle.open(bundle)
    config = opened.config_dict
    assert config["model_type"] in ARCHITECTURES
    assert config["architectures"] == [ARCHITECTURES[config["model_type"]].class_name]
    assert not any("vision" in key or "mrope" in str(value) for key, value in config.items())
    assert set(opened.checkpoint.tensors) == set(expected_tensors(opened.config))
