"""Models and bundles of a few kilobytes, made on the fly: every supported architecture, any layout of files."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wisparse.formats.architectures import ARCHITECTURES
from wisparse.formats.bundle import ProjectionMask
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensors import expected_tensors
from wisparse.formats.write import write_bundle

VOCAB = 258  # 256 bytes, <s>, </s>
CLASSES = ("llama", "mistral", "qwen2", "qwen3", "phi3")


def tiny_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type].class_name], "model_type": model_type, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 4, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu",
        "tie_word_embeddings": True, "dtype": "float32", "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257,
    }  # fmt: skip
    arch = ARCHITECTURES[model_type]
    config |= {arch.activation: "silu", "sliding_window": None}
    config |= {key: None for key in (arch.attention_softcap, arch.logits_softcap) if key}
    config |= changes
    if arch.layer_types:
        config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])
    return {key: value for key, value in config.items() if value is not ...}


def write_tiny_model(
    folder: Path, config: Mapping[str, Any] | None = None, *, dtype: torch.dtype = torch.float32, shards: int = 1,
    seed: int = 0, add: Mapping[str, torch.Tensor] | None = None, drop: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """A random model with a byte-level tokenizer; ``add`` and ``drop`` change its tensors, after the expected ones."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(config or tiny_config())
    generator = torch.Generator().manual_seed(seed)

    def values(shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return (1 + drawn / 4 if len(shape) == 1 else drawn / shape[-1] ** 0.5).to(dtype)

    tensors = {name: values(shape) for name, shape in expected_tensors(ModelConfig.from_dict(config)).items()}
    tensors = {name: tensor for name, tensor in {**tensors, **(add or {})}.items() if name not in drop}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for index in range(shards):
            file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(tensors.items())[index::shards])
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index_text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index_text)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": [257]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "LICENSE").write_text("Do as you like.\n")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """A token a byte, ``<s>`` and ``</s>``: `VOCAB` in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def tiny_masks(config: ModelConfig, sparsity: float = 0.5, seed: int = 1) -> dict[str, ProjectionMask]:
    """Random scales; a threshold that drops about ``sparsity`` of normal activations; the first projection dense."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for index, projection in enumerate(config.projections()):
        shape = (projection.experts, projection.in_features)[projection.experts == 0 :]
        scale = torch.rand(shape, generator=generator) + 0.5
        kept = index == 0 or sparsity == 0
        threshold = 0.0 if kept else float(torch.tensor(1.4 * sparsity))
        masks[projection.name] = ProjectionMask(scale, threshold, 0.0 if kept else sparsity)
    return masks


def tiny_levels(config: ModelConfig, *sparsities: float) -> dict[float, dict[str, ProjectionMask]]:
    """`tiny_masks` for each of ``sparsities`` (without any: 0.5)."""
    return {sparsity: tiny_masks(config, sparsity, seed) for seed, sparsity in enumerate(sparsities or (0.5,), start=1)}


def tiny_recipe(config: ModelConfig, levels: Mapping[float, Mapping[str, ProjectionMask]], **changes: Any) -> Recipe:
    """A recipe that agrees with ``sparsity levels``; the default is the middle one."""
    written = []
    for sparsity, masks in levels.items():
        entries = (ProjectionRecipe(name, m.sparsity, 0.5, m.threshold, m.sparsity) for name, m in masks.items())
        written.append(SparsityLevel(sparsity, tuple(entries), (sparsity,) * config.num_blocks))
    fields: dict[str, Any] = {
        "base_model": "someone/tiny", "base_revision": None, "method": "wisparse", "levels": tuple(written),
        "default": list(levels)[len(levels) // 2], "calibration": CalibrationRecord("self", 2, 8, 16, 0, "ab" * 32),
        "search": {"method": "none", "history": [1.5, 1.25]}, "versions": {"torch": "2"},
    }  # fmt: skip
    return Recipe(**(fields | changes))


def write_tiny_bundle(folder: Path, model: Path, *sparsities: float, **settings: Any) -> Path:
    """A bundle of ``model`` in ``folder``, with the ``tiny_levels``; ``settings`` go to ``write_bundle``."""
    source = Checkpoint.open(model)
    levels = tiny_levels(source.config, *sparsities)
    return write_bundle(source, tiny_recipe(source.config, levels), levels, folder, **settings)


def resign(folder: Path, *, recipe: bool = True) -> None:
    """Make all digests of a changed bundle fit again, as a forger would: what is refused then breaks another rule."""
    manifest = json.loads((folder / "wisparse.json").read_text())
    sidecar = folder / "wisparse.safetensors"
    if recipe:
        plain = {key: value for key, value in manifest.items() if key != "files"}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        header, data = split_safetensors(sidecar.read_bytes())
        header["__metadata__"]["recipe_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        sidecar.write_bytes(join_safetensors(header, data))
    for name in manifest["files"]:
        manifest["files"][name] = {"sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
    (folder / "wisparse.json").write_text(json.dumps(manifest, indent=1))


def split_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_safetensors(header: Mapping[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def change_tensor(file: Path, name: str, values: Any, row: int | None = None) -> None:
    """Overwrite one tensor's values, or one row of them, in place; the digests are left as they were."""
    header, data = split_safetensors(file.read_bytes())
    start, end = header[name]["data_offsets"]
    new = np.asarray(values, dtype="<f4").tobytes()
    if row is not None:
        start += len(new) * row
        end = start + len(new)
    assert start < header[name]["data_offsets"][1]
    assert len(new) == end - start
    file.write_bytes(join_safetensors(header, data[:start] + new + data[end:]))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digests(bundle: Path) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files_of(bundle).items())}
