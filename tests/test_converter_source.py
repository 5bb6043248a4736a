"""A source model is loaded whole and finite, with its projections under their names, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bundle import CLASSES, tiny_config, write_tiny_model

from wisparse.converter.source import choose_dtype, load_source
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.machine import choose_device


@pytest.mark.parametrize("model_type", CLASSES)
def test_projections_are_the_configs_in_order(model_type: str, tmp_path: Path) -> None:
    source = load_source(write_tiny_model(tmp_path, tiny_config(model_type)), device="cpu")
    projections = list(source.config.projections())
    assert list(source.projections) == [projection.name for projection in projections]
    for projection in projections:
        assert tuple(source.projections[projection.name].weight.shape) == (
            projection.out_features,
            projection.in_features,
        )
    assert len(source.blocks) == source.config.num_blocks
    assert not source.model.training
    assert source.model.config.use_cache is False
    assert source.model.config._attn_implementation == "sdpa"
    assert not any(parameter.requires_grad for parameter in source.model.parameters())


def test_weights_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tiny_config(dtype="bfloat16"), dtype=torch.bfloat16, shards=3)
    source = load_source(folder, device="cpu")
    assert source.dtype == torch.float32  # a CPU computes in float32 whatever the file holds
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, module in source.projections.items():
        assert torch.equal(module.weight, stored[name + ".weight"].float())
    assert load_source(folder, torch.bfloat16, "cpu").dtype == torch.bfloat16


def test_dtype_on_a_gpu_is_the_sources() -> None:
    cuda = torch.device("cuda")
    assert choose_dtype("float16", cuda) == torch.float16
    assert choose_dtype("bfloat16", cuda) == torch.bfloat16
    assert choose_dtype("float16", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "cpu:x"])
def test_device_that_is_none(device: str) -> None:
    with pytest.raises(UsageError, match="--device"):
        choose_device(device, "--device")


def test_missing_tensor_is_not_filled_with_noise(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, drop=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(UnsupportedModelError, match=r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_source(tmp_path, device="cpu")


def test_misshaped_tensor(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, add={"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 5)})
    with pytest.raises(UnsupportedModelError, match="up_proj"):
        load_source(tmp_path, device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weight(value: float, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 2] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight holds NaN or Inf"):
        load_source(tmp_path, device="cpu")


def test_truncated_file(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModelError, match=r"truncated|bytes"):
        load_source(tmp_path, device="cpu")


def test_pickle_is_not_loaded(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        load_source(tmp_path, device="cpu")


def test_unknown_architecture_names_the_known(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"gpt2.*known ones: llama, mistral, .*qwen3_vl"):
        load_source(tmp_path, device="cpu")


def test_missing_tokenizer(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        load_source(tmp_path, device="cpu")
